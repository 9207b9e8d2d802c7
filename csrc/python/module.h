// The parts of the module mixprec._C, a file each.
#pragma once

#include <pybind11/pybind11.h>

namespace mixprec {
void bind_scaler(pybind11::module_& module);
void bind_sgd(pybind11::module_& module);
void bind_guards(pybind11::module_& module);
}  // namespace mixprec
