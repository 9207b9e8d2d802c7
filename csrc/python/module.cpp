#include "module.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  mixprec::bind_scaler(module);
  mixprec::bind_sgd(module);
  mixprec::bind_guards(module);
}
