// What known calls rest on (known_calls.cc): the turns in which the host threads of a process make calls; and what C++ sees
// of a call's arguments, and asks torch, without calls of Python in between.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/core.h"
#include "runtime/launch_table.h"

// The part of DLPack's C exchange API (version 1) that tells what a Python tensor is, without calls of Python.
namespace flux::dlpack {

constexpr uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

struct Version {
  uint32_t major, minor;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;  // of an element
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* py_object, Tensor* out);  // -1: a Python exception is set. May be null.
  void* current_work_stream;
};

}  // namespace flux::dlpack

namespace flux::bindings {

// --- turns ---

// A fair recursive mutex, in the order of requests: calls on one group must not overtake each other.
class Turn {
 public:
  // Acquires the lock if it is free and no thread waits for it, or if this thread holds it.
  bool try_acquire() {
    const std::lock_guard lock(mutex_);
    if (depth_ > 0 ? holder_ != std::this_thread::get_id() : !waiting_.empty()) return false;
    take();
    return true;
  }

  // Waits for the lock. Calls `poll` about every 50 ms; if it throws, the thread leaves the queue.
  template <class Poll>
  void acquire(Poll&& poll) {
    constexpr auto kPollEvery = std::chrono::milliseconds(50);
    if (try_acquire()) return;
    std::unique_lock lock(mutex_);
    const auto place = waiting_.insert(waiting_.end(), std::this_thread::get_id());
    while (depth_ > 0 || place != waiting_.begin()) {
      if (changed_.wait_for(lock, kPollEvery) == std::cv_status::no_timeout) continue;
      lock.unlock();
      try {
        poll();
      } catch (...) {
        lock.lock();
        waiting_.erase(place);
        changed_.notify_all();
        throw;
      }
      lock.lock();
    }
    waiting_.erase(place);
    take();
  }

  // Called by the holder. Returns true if the lock is now free, false if the holder still has it (recursion).
  bool release() {
    const std::lock_guard lock(mutex_);
    if (--depth_ > 0) return false;
    changed_.notify_all();
    return true;
  }

  int depth() const { return depth_; }  // may be called by the holder only

 private:
  void take() {
    holder_ = std::this_thread::get_id();
    ++depth_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::thread::id> waiting_;  // in order of arrival
  std::thread::id holder_;
  int depth_ = 0;  // number of times that the holder has acquired the lock
};

inline void acquire(Turn& turn) {
  if (turn.try_acquire()) return;
  const py::gil_scoped_release release;
  turn.acquire(check_signals);
}

// Serialises the calls of host threads on a group, and records whether an exception ended a call that peers have seen a
// part of: from `open` until `call` returns, that breaks the group. In C++, so that no KeyboardInterrupt falls between
// the end of a call and its record. Around a call, `hold` keeps the turn for work that is not its own, such as
// autograd's: there only an interrupt breaks the group, because its caller would make the call again.
class CallTurn {
 public:
  explicit CallTurn(py::object refusals) : refusals_(std::move(refusals)) {}

  // args: the function, then its arguments. kHolds: `hold`, else `call`.
  template <bool kHolds>
  PyObject* call(PyObject* const* args, Py_ssize_t count) {
    if (count == 0) throw py::type_error("expected a function, and its arguments");
    acquire(turn_);
    if (turn_.depth() == 1) open_ = false;
    PyObject* const result = PyObject_Vectorcall(args[0], args + 1, count - 1, nullptr);
    if (result != nullptr) {
      leave();
      return result;
    }
    const py::error_already_set error;
    const bool own = !kHolds || !error.matches(PyExc_Exception);  // an interrupt is no Exception
    const bool breaks = open_ && own && !error.matches(refusals_);
    const std::string name = breaks ? error.type().attr("__name__").cast<std::string>() : "";
    leave(breaks ? name.c_str() : nullptr);
    throw error;
  }

  // A call without Python code in it: try_enter, open, leave. False if another thread is inside a call.
  bool try_enter() {
    if (!turn_.try_acquire()) return false;
    if (turn_.depth() == 1) open_ = false;
    return true;
  }
  void open() { open_ = true; }
  // What peers have seen so far is complete, and no part of the call: they do not wait for more.
  void close() { open_ = false; }
  // broken_by: name of the exception that ends an open call, or null.
  void leave(const char* broken_by = nullptr) {
    if (open_ && broken_by != nullptr) broken_by_ = broken_by;
    if (turn_.depth() == 1) open_ = false;
    turn_.release();
  }

  const std::optional<std::string>& broken_by() const { return broken_by_; }
  void forget() { broken_by_.reset(); }

 private:
  Turn turn_;
  py::object refusals_;
  bool open_ = false;  // peers may have seen a part of the running call
  std::optional<std::string> broken_by_;
};

// Of the calls of all groups on one device. Held from the wait for the last call until the launch of the next.
struct LaunchOrder {
  Turn turn;
  std::optional<uint64_t> stream;        // raw stream of the last call
  py::object event = py::none();         // after the last call, if that was on an external stream
  std::unordered_set<uint64_t> lasting;  // raw streams that calls were made on and that nobody destroys

  // Whether what is enqueued on a stream from now on comes after the last call. Lets it wait if both streams last.
  bool follow(const runtime::LaunchTable& table, int device, void* next) {
    if (!event.is_none()) return false;
    const auto raw = reinterpret_cast<uint64_t>(next);
    if (stream == raw) return true;
    if (!stream.has_value() || lasting.count(raw) == 0) return false;
    const py::gil_scoped_release release;  // a record waits if the device's queue is full
    if (!table.follow(device, reinterpret_cast<void*>(*stream), next)) return false;
    stream = raw;
    return true;
  }
};

// --- arguments ---

constexpr int kMaxArguments = 32, kMaxWords = 256, kAlignment = 16, kWordBytes = sizeof(int64_t);
constexpr int kAbsent = kMaxArguments;  // the operand for an optional tensor that is not given

template <class T>
T* unpack(const py::object& capsule, const char* name) {
  void* const address = PyCapsule_GetPointer(capsule.ptr(), name);
  if (address == nullptr) throw py::error_already_set();
  return static_cast<T*>(address);
}

class Torch {
 public:
  // of, by name: types: of tensors whose calls need no Python; more may follow. dtype: torch.dtype. view: makes a
  // tensor in the memory of another one, from sizes, strides and offset; or None. states: functions that return
  // something true if torch's dispatcher is needed. profiler_enabled: then kernels are named. increment_version: tells
  // autograd that the tensors of a tuple have been written. forward_ad: the variables of torch.autograd.forward_ad.
  Torch(const py::object& exchange_api, const py::kwargs& of)
      : types_(of["types"]),
        states_(of["states"]),
        forward_ad_(of["forward_ad"]),
        dtype_(of["dtype"]),
        view_(of["view"]),
        grad_enabled_(of["grad_enabled"]),
        profiler_enabled_(of["profiler_enabled"]),
        increment_version_(of["increment_version"]) {
    const auto* const api = unpack<dlpack::ExchangeApi>(exchange_api, dlpack::kCapsule);
    if (api->version.major != dlpack::kMajor || api->tensor_from_py_object == nullptr)
      throw py::value_error("exchange_api: expected version 1, with tensors that are not owned");
    describe_ = api->tensor_from_py_object;
    for (const char* name : {"new_empty", "requires_grad", "is_neg", "new_empty_strided", "_current_level"})
      names_.push_back(intern(name));
    dtype_name_ = py::make_tuple(intern("dtype"));
  }

  bool is_plain(PyObject* object) const {
    return std::any_of(types_.begin(), types_.end(),
                       [&](const py::handle type) { return type.ptr() == type_of(object); });
  }

  // There is one object for each dtype, which is never freed.
  bool is_dtype(PyObject* object) const { return type_of(object) == dtype_.ptr(); }

  // False, without an exception, for tensors that DLPack cannot describe.
  bool describe(PyObject* tensor, dlpack::Tensor* out) const {
    if (describe_(tensor, out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  bool bypasses() const {
    // Tensors with a tangent do not say so. Below zero: no level of forward-mode differentiation is open.
    PyObject* const level = PyDict_GetItem(forward_ad_.ptr(), names_[4].ptr());
    if (level == nullptr || !PyLong_Check(level) || PyLong_AsLong(level) >= 0) return false;
    return std::none_of(states_.begin(), states_.end(), [](const py::handle state) { return is_so(state); });
  }
  bool profiler_enabled() const { return is_so(profiler_enabled_); }
  bool grad_enabled() const { return is_so(grad_enabled_); }
  bool requires_grad(PyObject* tensor) const { return is_true(PyObject_GetAttr(tensor, names_[1].ptr())); }
  // False, without an exception, if torch does not agree.
  bool tell_written(const py::tuple& tensors) const {
    const auto done =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(increment_version_.ptr(), tensors.ptr()));
    if (done.ptr() == nullptr) PyErr_Clear();
    return done.ptr() != nullptr;
  }
  bool is_negated(PyObject* tensor) const {
    return is_true(PyObject_CallMethodNoArgs(tensor, names_[2].ptr()));
  }

  // A new tensor on the device of another one. strides: None if contiguous. dtype: None for that of the other one.
  PyObject* make(PyObject* like, const py::tuple& shape, const py::object& strides,
                 const py::object& dtype) const {
    constexpr Py_ssize_t kApart = 8;
    PyObject* arguments[kApart + 2] = {like};
    size_t count = 1;
    const Py_ssize_t dims = PyTuple_GET_SIZE(shape.ptr());
    if (strides.is_none() && dims > 0 && dims <= kApart) {
      // torch takes 0.5 us more to parse a tuple of sizes (docs/design/host-cost.md).
      for (Py_ssize_t i = 0; i < dims; ++i) arguments[count++] = PyTuple_GET_ITEM(shape.ptr(), i);
    } else {
      arguments[count++] = shape.ptr();
    }
    if (!strides.is_none()) arguments[count++] = strides.ptr();
    arguments[count] = dtype.ptr();
    PyObject* const names = dtype.is_none() ? nullptr : dtype_name_.ptr();
    return PyObject_VectorcallMethod(names_[strides.is_none() ? 0 : 3].ptr(), arguments, count, names);
  }

  bool has_views() const { return !view_.is_none(); }
  // A tensor in the memory of `block`, which autograd does not see as a view. offset: in elements.
  PyObject* view(PyObject* block, const py::object& shape, const py::object& strides,
                 const py::object& offset) const {
    PyObject* const arguments[4] = {block, shape.ptr(), strides.ptr(), offset.ptr()};
    return PyObject_Vectorcall(view_.ptr(), arguments, 4, nullptr);
  }

 private:
  static py::object intern(const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  }
  static PyObject* type_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }
  static bool is_so(const py::handle asked) { return is_true(PyObject_CallNoArgs(asked.ptr())); }
  // Takes over the reference. An exception counts as true, because then the call must take the long way.
  static bool is_true(PyObject* value) {
    if (value == nullptr) PyErr_Clear();
    if (value == nullptr) return true;
    const int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth != 0;
  }

  int (*describe_)(void*, dlpack::Tensor*);
  const py::list types_, states_;
  const py::dict forward_ad_;
  const py::object dtype_, view_, grad_enabled_, profiler_enabled_, increment_version_;
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
    for (int i = 0; i < tensor.ndim; ++i)
      if (!add(tensor.shape[i]) || !add(tensor.strides[i])) return false;
    return true;
  }

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

}  // namespace flux::bindings
