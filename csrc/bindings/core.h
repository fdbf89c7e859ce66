// The parts of flux._core.
#pragma once

#include <pybind11/pybind11.h>

namespace flux::bindings {

void bind_exchange(pybind11::module_& m);
void bind_known_calls(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_turn(pybind11::module_& m);
// Defects that a sanitizer must report. Only in builds with FLUX_SANITIZE.
void bind_planted(pybind11::module_& m);

}  // namespace flux::bindings
