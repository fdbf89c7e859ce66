// Bindings of runtime::Turn in flux._core.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/core.h"
#include "runtime/turn.h"

namespace py = pybind11;

namespace flux::bindings {
namespace {

// Serialises the calls of host threads on a group. Also records whether an exception ended a call after the call had
// become visible to peers. In C++, so that no asynchronous exception (such as KeyboardInterrupt) can occur between the
// end of a call and its record.
class CallTurn {
 public:
  explicit CallTurn(py::object refusals) : refusals_(std::move(refusals)) {}

  // args: the function, then its arguments.
  py::object call(PyObject* const* args, Py_ssize_t count) {
    if (!turn_.try_acquire()) {
      py::gil_scoped_release release;
      turn_.acquire([] {
        py::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      });
    }
    const bool outermost = turn_.depth() == 1;
    if (outermost) open_ = false;
    try {
      PyObject* const result = PyObject_Vectorcall(args[0], args + 1, count - 1, nullptr);
      if (result == nullptr) throw py::error_already_set();
      if (outermost) open_ = false;
      turn_.release();
      return py::reinterpret_steal<py::object>(result);
    } catch (py::error_already_set& error) {
      if (outermost && open_ && !error.matches(refusals_))
        broken_by_ = error.type().attr("__name__").cast<std::string>();
      if (outermost) open_ = false;
      turn_.release();
      throw;
    }
  }

  void open() { open_ = true; }
  const std::optional<std::string>& broken_by() const { return broken_by_; }
  void forget() { broken_by_.reset(); }

 private:
  runtime::Turn turn_;
  py::object refusals_;
  bool open_ = false;  // the running call is already visible to peers
  std::optional<std::string> broken_by_;
};

// Uses METH_FASTCALL, because pybind11's call takes several times as long, and every operator call passes through here.
PyObject* call_in_turn(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "call: expected a function, and its arguments");
    return nullptr;
  }
  try {
    return py::handle(self).cast<CallTurn&>().call(args, count).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
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
          "From here to its end, an exception breaks the call off: peers have heard of it.")
      .def_property_readonly("broken_by", &CallTurn::broken_by,
                             "Name of the exception that broke a call off, or None.")
      .def("forget", [](CallTurn& self) { self.forget(); }, "Forgets what broke a call off.");
  static PyMethodDef call = {
      "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_in_turn)), METH_FASTCALL,
      "call(fn, *args)\n--\n\nfn(*args), when no other thread is inside a call. A call may be made of "
      "others."};
  type.attr("call") = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &call));
}

}  // namespace flux::bindings
