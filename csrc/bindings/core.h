// The parts of flux._core.
#pragma once

#include <pybind11/pybind11.h>

namespace flux::bindings {

// What a wait without the GIL calls now and then: throws if the user interrupts it.
inline void check_signals() {
  const pybind11::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// A method that takes its arguments as an array: pybind11's calls take several times as long.
template <class Self, PyObject* (Self::*kMethod)(PyObject* const* args, Py_ssize_t count)>
PyObject* call_method(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  namespace py = pybind11;
  try {
    return (py::handle(self).cast<Self&>().*kMethod)(args, count);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Self, PyObject* (Self::*kMethod)(PyObject* const* args, Py_ssize_t count)>
void add_method(pybind11::class_<Self>& type, const char* name, const char* doc) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_method<Self, kMethod>)),
      METH_FASTCALL, doc};
  auto* const of = reinterpret_cast<PyTypeObject*>(type.ptr());
  type.attr(name) = pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(of, &method));
}

void bind_known_calls(pybind11::module_& m);
void bind_moe(pybind11::module_& m);
void bind_turn(pybind11::module_& m);
// Defects that a sanitizer must report. Only in builds with FLUX_SANITIZE.
void bind_planted(pybind11::module_& m);

}  // namespace flux::bindings
