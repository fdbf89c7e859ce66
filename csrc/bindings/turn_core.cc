// Bindings of CallTurn and LaunchOrder in flux._core.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/call_turn.h"
#include "bindings/core.h"

namespace py = pybind11;

namespace flux::bindings {

py::object CallTurn::call(PyObject* const* args, Py_ssize_t count, bool holds) {
  acquire(turn_);
  if (turn_.depth() == 1) open_ = false;
  try {
    PyObject* const result = PyObject_Vectorcall(args[0], args + 1, count - 1, nullptr);
    if (result == nullptr) throw py::error_already_set();
    leave();
    return py::reinterpret_steal<py::object>(result);
  } catch (py::error_already_set& error) {
    const bool own = !holds || !error.matches(PyExc_Exception);  // an interrupt is no Exception
    const bool breaks = open_ && own && !error.matches(refusals_);
    const std::string name = breaks ? error.type().attr("__name__").cast<std::string>() : "";
    leave(breaks ? name.c_str() : nullptr);
    throw;
  }
}

namespace {

// Uses METH_FASTCALL, because pybind11's call takes several times as long, and every operator call passes through here.
template <bool kHolds>
PyObject* call_in_turn(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "expected a function, and its arguments");
    return nullptr;
  }
  try {
    return py::handle(self).cast<CallTurn&>().call(args, count, kHolds).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <bool kHolds>
void add_call(py::class_<CallTurn>& type, const char* name, const char* doc) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_in_turn<kHolds>)), METH_FASTCALL,
      doc};
  type.attr(name) = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
}

}  // namespace

void bind_turn(py::module_& m) {
  py::class_<CallTurn> type(m, "CallTurn",
                            "The calls of a process on one group: one after the other, in order of arrival.");
  // Lambdas that take a reference, because a member function would accept None as a null pointer.
  type.def(py::init<py::object>(), py::arg("refusals"),
           "refusals: types of exceptions that all ranks raise together, which break nothing off.")
      .def(
          "open", [](CallTurn& self) { self.open(); },
          "From here to its end, an exception breaks the call off: peers may have seen a part of it.")
      .def(
          "close", [](CallTurn& self) { self.close(); },
          "Until it is opened again, no exception breaks the call off: peers wait for nothing more.")
      .def_property_readonly("broken_by", &CallTurn::broken_by,
                             "Name of the exception that broke a call off, or None.")
      .def("forget", [](CallTurn& self) { self.forget(); }, "Forgets what broke a call off.");
  add_call<false>(
      type, "call",
      "call(fn, *args)\n--\n\nfn(*args), when no other thread is inside a call. A call may be made "
      "of others.");
  add_call<true>(type, "hold",
                 "hold(fn, *args)\n--\n\nAs call, for a call and what comes after it: of that, only an "
                 "interrupt breaks the call off.");

  py::class_<LaunchOrder>(m, "LaunchOrder",
                          "The order of the calls of all groups on one device: a fair lock for the "
                          "thread that launches, and where the last call went.")
      .def(py::init<>())
      .def(
          "acquire", [](LaunchOrder& self) { acquire(self.turn); },
          "Waits until no other thread launches. May be called again by the thread that does.")
      .def(
          "release",
          [](LaunchOrder& self) {
            if (self.turn.depth() == 0) throw py::value_error("release: expected a lock that is held");
            self.turn.release();
          },
          "Ends what acquire began.")
      .def_readwrite("stream", &LaunchOrder::stream, "Raw stream of the last call, or None.")
      .def(
          "lasts", [](LaunchOrder& self, uint64_t stream) { self.lasting.insert(stream); },
          "A raw stream that nobody destroys: known calls may follow the last call there.")
      .def_readwrite("event", &LaunchOrder::event,
                     "What to wait for before the next call, or None: the last call's stream.");
}

}  // namespace flux::bindings
