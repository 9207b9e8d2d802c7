#pragma once

#include <pybind11/pybind11.h>

namespace mixprec {
void bind_guards(pybind11::module_& module);
}
