// Calls that are known: of shapes, strides, dtypes and options that a call before had. What that call checked, planned
// and prepared in Python holds for them, so they are enqueued from here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/call_turn.h"
#include "bindings/checks.h"
#include "bindings/core.h"
#include "bindings/dlpack.h"
#include "runtime/launch_table.h"
#include "runtime/symm_buffer.h"

namespace py = pybind11;

namespace flux::bindings {
namespace {

using runtime::LaunchTable;

constexpr int kMaxArguments = 32, kMaxWords = 256, kAlignment = 16, kWordBytes = sizeof(int64_t);
constexpr int kAbsent = kMaxArguments;  // the operand for an optional tensor that is not given

template <class T>
T* unpack(const py::object& capsule, const char* name) {
  void* const address = PyCapsule_GetPointer(capsule.ptr(), name);
  if (address == nullptr) throw py::error_already_set();
  return static_cast<T*>(address);
}

// What torch says about tensors and about the state of the calling thread.
class Torch {
 public:
  // types: of tensors that are not subclasses. dtype: torch.dtype. states: functions that return something true if a
  // call must go through torch's dispatcher. The profiler names what is dispatched, so then kernels are, too.
  Torch(const py::object& exchange_api, std::vector<py::object> types, py::object dtype,
        std::vector<py::object> states, py::object grad_enabled, py::object profiler_enabled)
      : types_(std::move(types)),
        dtype_(std::move(dtype)),
        states_(std::move(states)),
        grad_enabled_(std::move(grad_enabled)),
        profiler_enabled_(std::move(profiler_enabled)) {
    const auto* const api = unpack<dlpack::ExchangeApi>(exchange_api, dlpack::kCapsule);
    if (api->version.major != dlpack::kMajor || api->tensor_from_py_object == nullptr) {
      throw py::value_error("exchange_api: expected version 1, with tensors that are not owned");
    }
    describe_ = api->tensor_from_py_object;
    for (const char* name : {"new_empty", "requires_grad", "is_neg", "new_empty_strided"}) {
      names_.push_back(intern(name));
    }
    dtype_name_ = py::make_tuple(intern("dtype"));
  }

  bool is_plain(PyObject* object) const {
    for (const py::object& type : types_) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr()) return true;
    }
    return false;
  }

  // There is one object for each dtype, which is never freed.
  bool is_dtype(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == dtype_.ptr();
  }

  // False, without an exception, for tensors that DLPack cannot describe.
  bool describe(PyObject* tensor, dlpack::Tensor* out) const {
    if (describe_(tensor, out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // Whether calls on plain tensors may bypass torch's dispatcher.
  bool bypasses() const {
    for (const py::object& state : states_) {
      if (is_true(PyObject_CallNoArgs(state.ptr()))) return false;
    }
    return true;
  }
  bool profiler_enabled() const { return is_true(PyObject_CallNoArgs(profiler_enabled_.ptr())); }
  bool grad_enabled() const { return is_true(PyObject_CallNoArgs(grad_enabled_.ptr())); }
  bool requires_grad(PyObject* tensor) const { return is_true(PyObject_GetAttr(tensor, names_[1].ptr())); }
  bool is_negated(PyObject* tensor) const {
    return is_true(PyObject_CallMethodNoArgs(tensor, names_[2].ptr()));
  }

  // A new tensor on the device of another one. strides: None for a contiguous tensor. dtype: None for that of the other
  // one.
  PyObject* make(PyObject* like, const py::object& shape, const py::object& strides,
                 const py::object& dtype) const {
    PyObject* arguments[4] = {like, shape.ptr()};
    size_t count = 2;
    if (!strides.is_none()) arguments[count++] = strides.ptr();
    arguments[count] = dtype.ptr();
    PyObject* const names = dtype.is_none() ? nullptr : dtype_name_.ptr();
    return PyObject_VectorcallMethod(names_[strides.is_none() ? 0 : 3].ptr(), arguments, count, names);
  }

 private:
  static py::object intern(const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  }
  // Takes over the reference. An exception counts as true, because then the call must take the long way.
  static bool is_true(PyObject* value) {
    if (value == nullptr) PyErr_Clear();
    if (value == nullptr) return true;
    const int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth != 0;
  }

  int (*describe_)(void*, dlpack::Tensor*);
  std::vector<py::object> types_;
  py::object dtype_;
  std::vector<py::object> states_;
  py::object grad_enabled_, profiler_enabled_;
  std::vector<py::object> names_;
  py::tuple dtype_name_;
};

// The arguments of a call. `words` are equal for two calls exactly if the same launches serve both.
struct Arguments {
  int count = 0, num_words = 0;
  PyObject* objects[kMaxArguments];
  bool is_tensor[kMaxArguments];
  dlpack::Tensor tensors[kMaxArguments];
  int64_t words[kMaxWords];

  // False for arguments that no known call has.
  bool read(const Torch& torch, PyObject* const* given, Py_ssize_t size) {
    if (size > kMaxArguments) return false;
    for (count = 0; count < size; ++count) {
      objects[count] = given[count];
      is_tensor[count] = false;
      if (!read_one(torch, given[count])) return false;
    }
    return true;
  }

  size_t hash() const {
    uint64_t hash = 0xCBF29CE484222325;
    for (int i = 0; i < num_words; ++i) {
      hash = (hash ^ static_cast<uint64_t>(words[i])) * 0x100000001B3;
      hash ^= hash >> 29;
    }
    return hash;
  }

  // The bytes that a tensor spans.
  static std::pair<uintptr_t, uintptr_t> span(const dlpack::Tensor& tensor) {
    int64_t reach = 1;
    for (int i = 0; i < tensor.ndim; ++i) reach += (tensor.shape[i] - 1) * tensor.strides[i];
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
    return {begin, begin + static_cast<uintptr_t>(reach) * tensor.bits / 8};
  }

  bool is_apart(int written) const {
    const auto [begin, end] = span(tensors[written]);
    for (int i = 0; i < count; ++i) {
      if (i == written || !is_tensor[i]) continue;
      const auto [other_begin, other_end] = span(tensors[i]);
      if (begin < other_end && other_begin < end) return false;
    }
    return true;
  }

 private:
  enum Tag { kNone, kInteger, kFloat, kTensor, kString, kDtype };

  bool read_one(const Torch& torch, PyObject* object) {
    if (object == Py_None) return add(kNone);
    if (PyBool_Check(object) || PyLong_CheckExact(object)) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
      return overflow == 0 && add(kInteger | PyBool_Check(object) << 8) && add(value);
    }
    if (PyFloat_CheckExact(object)) {
      int64_t bits;
      const double value = PyFloat_AS_DOUBLE(object);
      std::memcpy(&bits, &value, sizeof(bits));
      return add(kFloat) && add(bits);
    }
    if (PyUnicode_CheckExact(object)) return read_string(object);
    if (torch.is_dtype(object))
      return add(kDtype) && add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(object)));
    if (!torch.is_plain(object)) return false;
    dlpack::Tensor& tensor = tensors[count];
    if (!torch.describe(object, &tensor)) return false;
    is_tensor[count] = true;
    constexpr int kInt = 0, kUnsigned = 1;
    const bool may_be_negated = tensor.code != kInt && tensor.code != kUnsigned;
    if (may_be_negated && torch.is_negated(object)) return false;
    if (tensor.data == nullptr || tensor.byte_offset != 0) return false;
    // Kernels read some tensors at any address, and copies of others unless they are aligned.
    const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data) % kAlignment);
    const int64_t device = static_cast<int64_t>(tensor.device_type) << 8 | tensor.device_id;
    if (!add(kTensor | tensor.code << 8 | tensor.bits << 16 | device << 24 |
             static_cast<int64_t>(tensor.ndim) << 48 | offset << 56)) {
      return false;
    }
    for (int i = 0; i < tensor.ndim; ++i) {
      if (!add(tensor.shape[i]) || !add(tensor.strides[i])) return false;
    }
    return true;
  }

  // Names of options are ASCII.
  bool read_string(PyObject* object) {
    if (!PyUnicode_IS_COMPACT_ASCII(object)) return false;
    const Py_ssize_t size = PyUnicode_GET_LENGTH(object);
    const void* const data = PyUnicode_DATA(object);
    if (!add(kString | static_cast<int64_t>(size) << 8)) return false;
    for (Py_ssize_t at = 0; at < size; at += kWordBytes) {
      int64_t word = 0;
      std::memcpy(&word, static_cast<const char*>(data) + at, std::min<Py_ssize_t>(kWordBytes, size - at));
      if (!add(word)) return false;
    }
    return true;
  }

  bool add(int64_t word) {
    if (num_words == kMaxWords) return false;
    words[num_words++] = word;
    return true;
  }
};

// A tensor that a call allocates.
struct Fresh {
  int like;  // the argument on whose device it is
  py::object shape, strides, dtype;
};

// Operands, and results of calls: the number of an argument, or -1 - the number of a fresh tensor, or kAbsent.
struct KnownLaunch {
  void* handle;
  std::vector<int> operands;
  uint32_t copy_call;  // the number, from 1, of the call by copy engines that it belongs to, or 0
};

struct KnownCall {
  std::vector<int64_t> words;
  std::vector<Fresh> fresh;
  std::vector<KnownLaunch> launches;
  std::vector<int> results;
  bool one_result;
  const LaunchTable* table;
  std::mutex running;  // a launch keeps what it has encoded, so two threads may not run it at once

  KnownCall() = default;
  KnownCall(const KnownCall&) = delete;
  ~KnownCall() {
    for (const auto& [handle, operands, copy_call] : launches) table->drop(handle);
  }
};

class KnownCalls {
 public:
  // torch, table: None if no call can be known. turn, order: None if the calls are no collectives. addr: of the
  // workspace's ErrorRecord, or 0.
  KnownCalls(const Torch* torch, const py::object& table, CallTurn* turn, LaunchOrder* order, uint64_t addr)
      : torch_(torch), turn_(turn), order_(order) {
    if (!table.is_none()) table_ = unpack<LaunchTable>(table, runtime::kLaunchTableName);
    if ((turn == nullptr) != (order == nullptr)) throw py::value_error("order: expected one with a turn");
    if (turn != nullptr) error_ = reinterpret_cast<const volatile uint32_t*>(checked_word("addr", addr));
  }

  // The results of a known call, or None if this one is not known, or cannot be made at this moment.
  // direct: not called by torch's dispatcher, so whether it may be bypassed is still to be found out.
  PyObject* call(PyObject* const* given, Py_ssize_t count, bool direct) {
    if (calls_.empty() || paused) Py_RETURN_NONE;
    Arguments arguments;
    if (!arguments.read(*torch_, given, count)) Py_RETURN_NONE;
    const std::shared_ptr<KnownCall> known = find(arguments);
    if (known == nullptr || torch_->profiler_enabled()) Py_RETURN_NONE;
    if (direct && !may_skip_dispatch(arguments)) Py_RETURN_NONE;
    for (const int result : known->results) {
      if (result >= 0 && !arguments.is_apart(result)) Py_RETURN_NONE;
    }
    // Allocations may run out of memory, so they come before the call is opened.
    std::vector<py::object> fresh;
    fresh.reserve(known->fresh.size());
    dlpack::Tensor made[kMaxArguments];
    for (const Fresh& wanted : known->fresh) {
      fresh.push_back(py::reinterpret_steal<py::object>(
          torch_->make(arguments.objects[wanted.like], wanted.shape, wanted.strides, wanted.dtype)));
      if (fresh.back().ptr() == nullptr) return nullptr;
      if (!torch_->describe(fresh.back().ptr(), &made[fresh.size() - 1])) Py_RETURN_NONE;
    }
    const auto address = [&](int operand) -> void* {
      if (operand < 0) return made[-1 - operand].data;
      return operand != kAbsent && arguments.is_tensor[operand] ? arguments.tensors[operand].data : nullptr;
    };
    if (!enqueue(*known, arguments, address)) {
      if (PyErr_Occurred()) return nullptr;
      Py_RETURN_NONE;
    }
    const auto result = [&](int i) { return Py_NewRef(i < 0 ? fresh[-1 - i].ptr() : arguments.objects[i]); };
    if (known->one_result) return result(known->results[0]);
    PyObject* const all = PyTuple_New(static_cast<Py_ssize_t>(known->results.size()));
    for (size_t i = 0; all != nullptr && i < known->results.size(); ++i) {
      PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), result(known->results[i]));
    }
    return all;
  }

  // Makes a call known. Takes over the launches.
  bool remember(const py::tuple& given,
                const std::vector<std::tuple<py::tuple, py::object, int, py::object>>& fresh,
                const std::vector<std::tuple<uint64_t, std::vector<int>, uint32_t>>& launches,
                std::vector<int> results, bool one_result) {
    if (torch_ == nullptr || table_ == nullptr || paused) return false;
    auto known = std::make_shared<KnownCall>();
    known->table = table_;
    for (const auto& [handle, operands, copy_call] : launches) {
      known->launches.push_back({reinterpret_cast<void*>(handle), operands, copy_call});
    }
    Arguments arguments;
    const Py_ssize_t count = static_cast<Py_ssize_t>(given.size());
    if (!arguments.read(*torch_, PySequence_Fast_ITEMS(given.ptr()), count)) return false;
    const int num_fresh = static_cast<int>(fresh.size());
    check_range("len(fresh)", num_fresh, 0, kMaxArguments);
    for (const KnownLaunch& launch : known->launches) {
      check_range("len(operands)", static_cast<int64_t>(launch.operands.size()), 0, kMaxArguments);
      for (const int operand : launch.operands) {
        if (operand != kAbsent) check_range("operand", operand, -num_fresh, count - 1);
      }
    }
    for (const int result : results) check_range("result", result, -num_fresh, count - 1);
    check_range("len(results)", static_cast<int64_t>(results.size()), 1, kMaxArguments);
    for (const auto& [shape, strides, like, dtype] : fresh) {
      check_range("like", like, 0, count - 1);
      known->fresh.push_back({like, shape, strides, dtype});
    }
    known->results = std::move(results);
    known->one_result = one_result;
    known->words.assign(arguments.words, arguments.words + arguments.num_words);
    if (calls_.size() >= kMaxCalls) calls_.clear();
    calls_.emplace(arguments.hash(), std::move(known));
    return true;
  }

  bool knows(PyObject* const* given, Py_ssize_t count) const {
    Arguments arguments;
    return torch_ == nullptr || table_ == nullptr || paused ||
           (arguments.read(*torch_, given, count) && find(arguments) != nullptr);
  }
  void clear() { calls_.clear(); }
  size_t size() const { return calls_.size(); }

  uint32_t copy_epoch = 0;  // of the last call by copy engines, which the host counts
  bool paused = false;      // no call is known now

 private:
  static constexpr size_t kMaxCalls = 1024;

  std::shared_ptr<KnownCall> find(const Arguments& arguments) const {
    const auto [begin, end] = calls_.equal_range(arguments.hash());
    for (auto each = begin; each != end; ++each) {
      const std::vector<int64_t>& words = each->second->words;
      if (static_cast<int>(words.size()) == arguments.num_words &&
          std::memcmp(words.data(), arguments.words, words.size() * sizeof(int64_t)) == 0) {
        return each->second;
      }
    }
    return nullptr;
  }

  bool may_skip_dispatch(const Arguments& arguments) const {
    if (!torch_->bypasses()) return false;
    if (!torch_->grad_enabled()) return true;
    for (int i = 0; i < arguments.count; ++i) {
      if (arguments.is_tensor[i] && torch_->requires_grad(arguments.objects[i])) return false;
    }
    return true;
  }

  template <class Address>
  bool enqueue(KnownCall& known, const Arguments& arguments, const Address& address) {
    int device = 0;
    for (int i = 0; i < arguments.count; ++i) {
      if (arguments.is_tensor[i]) device = arguments.tensors[i].device_id;
    }
    const std::unique_lock running(known.running, std::try_to_lock);
    if (!running.owns_lock()) return false;
    if (turn_ == nullptr) return launch(known, device, address);
    if (!turn_->try_enter()) return false;
    bool done = false;
    if (!turn_->broken_by().has_value() && *error_ == 0 && order_->turn.try_acquire()) {
      done = launch(known, device, address);
      order_->turn.release();
    }
    turn_->leave(PyErr_Occurred() ? "RuntimeError" : nullptr);
    return done;
  }

  // False if the launches cannot be made now, and with an exception set if one failed.
  template <class Address>
  bool launch(KnownCall& known, int device, const Address& address) {
    void* stream = nullptr;
    if (!table_->ready(device, &stream)) return false;
    if (order_ != nullptr && !order_->follows_itself(stream)) return false;
    if (turn_ != nullptr) turn_->open();
    const uint32_t before = copy_epoch;
    for (const KnownLaunch& each : known.launches) copy_epoch = std::max(copy_epoch, before + each.copy_call);
    const char* error = nullptr;
    {
      py::gil_scoped_release release;  // a launch waits if the device's queue is full
      for (const auto& [handle, operands, copy_call] : known.launches) {
        void* addresses[kMaxArguments] = {};  // null: optional tensors after the last operand
        for (size_t i = 0; i < operands.size(); ++i) addresses[i] = address(operands[i]);
        error = table_->run(handle, addresses, copy_call == 0 ? 0 : before + copy_call, stream);
        if (error != nullptr) break;
      }
    }
    if (error != nullptr) PyErr_SetString(PyExc_RuntimeError, error);
    return error == nullptr;
  }

  const Torch* torch_;  // may be null, as may all of these
  const LaunchTable* table_ = nullptr;
  CallTurn* turn_;
  LaunchOrder* order_;
  const volatile uint32_t* error_ = nullptr;
  std::unordered_multimap<size_t, std::shared_ptr<KnownCall>> calls_;
};

template <bool kDirect>
PyObject* call_known(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    return py::handle(self).cast<KnownCalls&>().call(args, count, kDirect);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <bool kDirect>
void add_call(py::class_<KnownCalls>& type, const char* name, const char* doc) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_known<kDirect>)), METH_FASTCALL,
      doc};
  type.attr(name) = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
}

}  // namespace

void bind_known_calls(py::module_& m) {
  m.attr("ABSENT_OPERAND") = kAbsent;
  m.attr("LAUNCH_TABLE") = py::bytes(runtime::kLaunchTableName);  // name of the capsule
  py::class_<Torch>(m, "Torch", "What torch says about tensors and about the calling thread.")
      .def(py::init<py::object, std::vector<py::object>, py::object, std::vector<py::object>, py::object,
                    py::object>(),
           py::arg("exchange_api"), py::arg("types"), py::arg("dtype"), py::arg("states"),
           py::arg("grad_enabled"), py::arg("profiler_enabled"),
           "exchange_api: torch's DLPack exchange API. types: of plain tensors. dtype: torch.dtype. states: "
           "functions that return something true if calls must go through torch's dispatcher.");
  py::class_<KnownCalls> type(m, "KnownCalls",
                              "Calls on a workspace that are made again without Python in between.");
  type.def(py::init<const Torch*, py::object, CallTurn*, LaunchOrder*, uint64_t>(), py::keep_alive<1, 2>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::arg("torch"), py::arg("table"),
           py::arg("turn"), py::arg("order"), py::arg("addr"))
      .def("remember", &KnownCalls::remember, py::arg("given"), py::arg("fresh"), py::arg("launches"),
           py::arg("results"), py::arg("one_result"),
           "Makes a call known. fresh: (shape, strides or None, argument it is like, dtype or None) of "
           "tensors to allocate. launches: (handle, operands, number of their call by copy engines or 0), "
           "taken "
           "over. Operands and results are numbers of arguments, or -1 - number of a fresh tensor. Returns "
           "whether the call can be known.")
      .def(
          "knows",
          [](const KnownCalls& self, const py::args& given) {
            return self.knows(PySequence_Fast_ITEMS(given.ptr()), static_cast<Py_ssize_t>(given.size()));
          },
          "Whether a call of these arguments is known, or no call can be.")
      .def(
          "clear", [](KnownCalls& self) { self.clear(); }, "Forgets all calls.")
      .def("__len__", [](const KnownCalls& self) { return self.size(); })
      .def_readwrite("copy_epoch", &KnownCalls::copy_epoch)
      .def_readwrite("paused", &KnownCalls::paused, "Whether all calls take the long way for now.");
  add_call<true>(type, "call",
                 "call(*args)\n--\n\nThe results of a known call, or None: then make it in another way.");
  add_call<false>(type, "call_below",
                  "call_below(*args)\n--\n\nAs call, below torch's dispatcher and autograd.");
}

}  // namespace flux::bindings
