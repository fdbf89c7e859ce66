// The turns in which host threads make calls; and calls that are known: a call of the same shapes, strides, dtypes and
// options has been checked, planned and prepared in Python, so they are enqueued from here.

#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <unordered_map>

#include "bindings/calls.h"

using namespace pybind11::literals;

namespace flux::bindings {

namespace {

using runtime::LaunchTable;

struct Fresh {
  int like = 0;  // the argument on whose device it is
  py::tuple shape;
  py::object strides, dtype;
  // Where it lies if tensors share a block of memory: its strides, and its offset in elements of the block.
  bool in_block = false;
  py::object block_strides = {}, offset = {};
  int64_t elements_before = 0;
  bool is_result = false;  // else only its address is needed
  bool by_step = false;    // torch makes it after the launches
};

int64_t elements(const py::tuple& shape) {
  int64_t product = 1;
  for (const py::handle size : shape) product *= size.cast<int64_t>();
  return product;
}

// Operands, and results of calls: the number of an argument, or -1 - the number of a fresh tensor, or kAbsent.
using Operands = std::vector<int>;
// A launch: its handle, its operands, the number, from 1, of the call by copy engines that it belongs to, or 0; and None, or
// what it is instead: a function of the operands that calls torch.
using KnownLaunch = std::tuple<uint64_t, Operands, uint32_t, py::object>;
// What torch makes of operands when all launches are enqueued: a function, its operands, and the fresh tensors it makes.
using FollowingStep = std::tuple<py::object, Operands, Operands>;

struct KnownCall {
  std::vector<int64_t> words;
  std::vector<Fresh> fresh;
  std::unique_ptr<Fresh> block;  // in which some of `fresh` lie, or null
  std::vector<KnownLaunch> launches;
  std::optional<FollowingStep> follows;
  Operands results;
  bool one_result;
  size_t num_written;  // results that are arguments
  const LaunchTable* table;
  std::mutex running;  // a launch keeps what it has encoded, so two threads may not run it at once

  KnownCall() = default;
  KnownCall(const KnownCall&) = delete;
  ~KnownCall() {
    for (const auto& [handle, operands, copy_call, step] : launches) {
      if (step.is_none()) table->drop(reinterpret_cast<void*>(handle));
    }
  }
};

// Shape, strides or None, argument it is like, dtype or None, place in a block or None. None: a step makes it.
using FreshTuple = std::tuple<py::tuple, py::object, int, py::object, py::object>;

class KnownCalls {
 public:
  // torch, table: None if no call can be known. turn, order: None if the calls are no collectives. addr: of the
  // workspace's ErrorRecord, or 0. name: of the group, or empty.
  KnownCalls(const Torch* torch, const py::object& table, CallTurn* turn, LaunchOrder* order, uint64_t addr,
             py::str name)
      : group_name(std::move(name)), torch_(torch), turn_(turn), order_(order) {
    if (!table.is_none()) table_ = unpack<LaunchTable>(table, runtime::kLaunchTableName);
    if ((turn == nullptr) != (order == nullptr)) throw py::value_error("order: expected one with a turn");
    if (turn != nullptr) error_ = reinterpret_cast<const volatile uint32_t*>(checked_word("addr", addr));
  }

  // The results of a known call, or None if this one is not known, or cannot be made at this moment.
  // kDirect: not called by torch's dispatcher, so whether it may be bypassed is still to be found out.
  template <bool kDirect>
  PyObject* call(PyObject* const* given, Py_ssize_t count) {
    if (calls_.empty() || paused) Py_RETURN_NONE;
    Arguments arguments;
    if (!arguments.read(*torch_, given, count)) Py_RETURN_NONE;
    const std::shared_ptr<KnownCall> known = find(arguments);
    if (known == nullptr || torch_->profiler_enabled()) Py_RETURN_NONE;
    if (kDirect && !may_skip_dispatch(arguments)) Py_RETURN_NONE;
    if (known->num_written > 0 && !tell_written(*known, arguments)) Py_RETURN_NONE;
    // Allocations may run out of memory, so they come before the call is opened.
    std::vector<py::object> fresh;
    fresh.reserve(known->fresh.size());
    void* made[kMaxArguments];
    if (!allocate(*known, arguments, kDirect, &fresh, made)) return none_or_error();
    const auto address = [&](int operand) -> void* {
      if (operand < 0) return made[-1 - operand];
      return operand != kAbsent && arguments.is_tensor[operand] ? arguments.tensors[operand].data : nullptr;
    };
    const auto object = [&](int operand) -> PyObject* {
      if (operand < 0) return fresh[-1 - operand].ptr();
      return operand == kAbsent ? Py_None : arguments.objects[operand];
    };
    if (!enqueue(*known, arguments, address, object)) return none_or_error();
    if (known->follows.has_value() && !follow(*known->follows, object, &fresh)) return nullptr;
    const auto result = [&](int i) { return Py_NewRef(i < 0 ? fresh[-1 - i].ptr() : arguments.objects[i]); };
    if (known->one_result) return result(known->results[0]);
    PyObject* const all = PyTuple_New(static_cast<Py_ssize_t>(known->results.size()));
    for (size_t i = 0; all != nullptr && i < known->results.size(); ++i)
      PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), result(known->results[i]));
    return all;
  }

  // Makes a call known. Takes over the launches.
  bool remember(const py::tuple& given, const std::vector<std::optional<FreshTuple>>& fresh,
                std::vector<KnownLaunch> launches, Operands results, bool one_result,
                const std::optional<FreshTuple>& block, std::optional<FollowingStep> follows) {
    if (torch_ == nullptr || table_ == nullptr || paused) return false;
    auto known = std::make_shared<KnownCall>();
    known->table = table_;
    known->launches = std::move(launches);
    Arguments arguments;
    const Py_ssize_t count = static_cast<Py_ssize_t>(given.size());
    if (!arguments.read(*torch_, PySequence_Fast_ITEMS(given.ptr()), count)) return false;
    const int num_fresh = static_cast<int>(fresh.size());
    check_range("len(fresh)", num_fresh, 0, kMaxArguments);
    const auto check_operands = [&](const Operands& operands) {
      check_range("len(operands)", static_cast<int64_t>(operands.size()), 0, kMaxArguments);
      for (const int operand : operands) {
        if (operand != kAbsent) check_range("operand", operand, -num_fresh, count - 1);
      }
    };
    for (const KnownLaunch& launch : known->launches) check_operands(std::get<Operands>(launch));
    for (const int result : results) check_range("result", result, -num_fresh, count - 1);
    check_range("len(results)", static_cast<int64_t>(results.size()), 1, kMaxArguments);
    const auto checked = [count](const FreshTuple& wanted) {
      const auto& [shape, strides, like, dtype, place] = wanted;
      check_range("like", like, 0, count - 1);
      Fresh made = {like, shape, strides, dtype};
      made.in_block = !place.is_none();
      if (made.in_block) {
        std::tie(made.block_strides, made.offset) = place.cast<std::tuple<py::tuple, py::int_>>();
        made.elements_before = made.offset.cast<int64_t>();
      }
      return made;
    };
    if (block.has_value()) known->block = std::make_unique<Fresh>(checked(*block));
    for (const std::optional<FreshTuple>& wanted : fresh) {
      Fresh& made = known->fresh.emplace_back(wanted.has_value() ? checked(*wanted) : Fresh());
      made.by_step = !wanted.has_value();
      if (!made.in_block) continue;
      if (known->block == nullptr) throw py::value_error("block: expected one");
      check_range("offset", made.elements_before, 0, elements(known->block->shape) - elements(made.shape));
    }
    for (const int result : results)
      if (result < 0) known->fresh[-1 - result].is_result = true;
    if (follows.has_value()) {
      check_operands(std::get<1>(*follows));
      for (const int result : std::get<2>(*follows)) check_range("made", result, -num_fresh, -1);
      known->follows = std::move(follows);
    }
    known->num_written = std::count_if(results.begin(), results.end(), [](int i) { return i >= 0; });
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

  const py::str group_name;
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

  static PyObject* none_or_error() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

  // Allocates the tensors of a call; false if torch cannot describe one, or with an exception set. A tensor in a block
  // that is no result stays null. direct: as in `call`; an operator's results may not share memory, so below the
  // dispatcher there is no block.
  bool allocate(const KnownCall& known, const Arguments& arguments, bool direct,
                std::vector<py::object>* fresh, void** addresses) const {
    const auto make = [&](const Fresh& wanted) {
      return py::reinterpret_steal<py::object>(
          torch_->make(arguments.objects[wanted.like], wanted.shape, wanted.strides, wanted.dtype));
    };
    py::object block;
    dlpack::Tensor described;
    const bool shares = known.block != nullptr && direct && torch_->has_views();
    if (shares) {
      block = make(*known.block);
      if (block.ptr() == nullptr || !torch_->describe(block.ptr(), &described)) return false;
    }
    char* const begin = shares ? static_cast<char*>(described.data) : nullptr;
    for (const Fresh& wanted : known.fresh) {
      void** const address = addresses + fresh->size();
      if (wanted.by_step) {
        *address = nullptr;
        fresh->push_back(py::none());
        continue;
      }
      if (!shares || !wanted.in_block) {
        fresh->push_back(make(wanted));
        dlpack::Tensor own;
        if (fresh->back().ptr() == nullptr || !torch_->describe(fresh->back().ptr(), &own)) return false;
        *address = own.data;
        continue;
      }
      *address = begin + wanted.elements_before * (described.bits / 8);
      fresh->emplace_back();
      if (!wanted.is_result) continue;
      fresh->back() = py::reinterpret_steal<py::object>(
          torch_->view(block.ptr(), wanted.shape, wanted.block_strides, wanted.offset));
      if (fresh->back().ptr() == nullptr) return false;
    }
    return true;
  }

  // Tells autograd which arguments a call writes. False if one of them overlaps another argument.
  bool tell_written(const KnownCall& known, const Arguments& arguments) const {
    const py::tuple written(known.num_written);
    Py_ssize_t at = 0;
    for (const int result : known.results) {
      if (result < 0) continue;
      if (!arguments.is_apart(result)) return false;
      PyTuple_SET_ITEM(written.ptr(), at++, Py_NewRef(arguments.objects[result]));
    }
    return torch_->tell_written(written);
  }

  bool may_skip_dispatch(const Arguments& arguments) const {
    if (!torch_->bypasses()) return false;
    if (!torch_->grad_enabled()) return true;
    for (int i = 0; i < arguments.count; ++i) {
      if (arguments.is_tensor[i] && torch_->requires_grad(arguments.objects[i])) return false;
    }
    return true;
  }

  // Calls a step of torch with its operands. Null with an exception set if it failed.
  template <class Object>
  static py::object run_step(const py::object& function, const Operands& operands, const Object& object) {
    PyObject* given[kMaxArguments];
    for (size_t i = 0; i < operands.size(); ++i) given[i] = object(operands[i]);
    return py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(function.ptr(), given, operands.size(), nullptr));
  }

  template <class Object>
  static bool follow(const FollowingStep& step, const Object& object, std::vector<py::object>* fresh) {
    const auto& [function, operands, results] = step;
    const py::object made = run_step(function, operands, object);
    if (made.ptr() == nullptr) return false;
    const py::tuple several = results.size() == 1 ? py::make_tuple(made) : made.cast<py::tuple>();
    for (size_t i = 0; i < results.size(); ++i) (*fresh)[-1 - results[i]] = several[i];
    return true;
  }

  template <class Address, class Object>
  bool enqueue(KnownCall& known, const Arguments& arguments, const Address& address, const Object& object) {
    int device = 0;
    for (int i = 0; i < arguments.count; ++i) {
      if (arguments.is_tensor[i]) device = arguments.tensors[i].device_id;
    }
    const std::unique_lock running(known.running, std::try_to_lock);
    if (!running.owns_lock()) return false;
    if (turn_ == nullptr) return launch(known, device, address, object);
    if (!turn_->try_enter()) return false;
    bool done = false;
    if (!turn_->broken_by().has_value() && *error_ == 0 && order_->turn.try_acquire()) {
      done = launch(known, device, address, object);
      order_->turn.release();
    }
    turn_->leave(PyErr_Occurred() ? "RuntimeError" : nullptr);
    return done;
  }

  // False if the launches cannot be made now, and with an exception set if one failed.
  template <class Address, class Object>
  bool launch(KnownCall& known, int device, const Address& address, const Object& object) {
    void* stream = nullptr;
    if (!table_->ready(device, &stream)) return false;
    if (order_ != nullptr && !order_->follow(*table_, device, stream)) return false;
    if (turn_ != nullptr) turn_->open();
    const uint32_t before = copy_epoch;
    for (const KnownLaunch& each : known.launches)
      copy_epoch = std::max(copy_epoch, before + std::get<uint32_t>(each));
    const char* error = nullptr;
    {
      py::gil_scoped_release release;  // a launch waits if the device's queue is full
      for (const auto& [handle, operands, copy_call, step] : known.launches) {
        if (!step.is_none()) {
          const py::gil_scoped_acquire acquire;
          if (run_step(step, operands, object).ptr() == nullptr) return false;
          continue;
        }
        void* addresses[kMaxArguments] = {};  // null: optional tensors after the last operand
        for (size_t i = 0; i < operands.size(); ++i) addresses[i] = address(operands[i]);
        error = table_->run(reinterpret_cast<void*>(handle), addresses,
                            copy_call == 0 ? 0 : before + copy_call, stream);
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

}  // namespace

void bind_known_calls(py::module_& m) {
  py::class_<CallTurn> turn(m, "CallTurn",
                            "The calls of a process on one group: one after the other, in order of arrival.");
  // Lambdas that take a reference, because a member function would accept None as a null pointer.
  turn.def(py::init<py::object>(), "refusals"_a,
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
  add_method<CallTurn, &CallTurn::call<false>>(
      turn, "call",
      "call(fn, *args)\n--\n\nfn(*args), when no other thread is inside a call. Calls may be nested.");
  add_method<CallTurn, &CallTurn::call<true>>(
      turn, "hold",
      "hold(fn, *args)\n--\n\nAs call, with what comes after it: of that, only an interrupt breaks it off.");

  py::class_<LaunchOrder>(m, "LaunchOrder",
                          "Of all groups' calls on a device: a fair lock, and where the last call went.")
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

  m.attr("ABSENT_OPERAND") = kAbsent;
  m.attr("LAUNCH_TABLE") = py::bytes(runtime::kLaunchTableName);  // name of the capsule
  py::class_<Torch>(m, "Torch", "What torch says about tensors and about the calling thread.")
      .def(py::init<py::object, py::kwargs>(), "exchange_api"_a,
           "exchange_api: torch's DLPack exchange API.");
  py::class_<KnownCalls> type(m, "KnownCalls", "Calls on a workspace that are made again without Python.");
  type.def(py::init<const Torch*, py::object, CallTurn*, LaunchOrder*, uint64_t, py::str>(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), "torch"_a, "table"_a,
           "turn"_a, "order"_a, "addr"_a, "group_name"_a)
      .def_readonly("group_name", &KnownCalls::group_name)
      .def("remember", &KnownCalls::remember, "given"_a, "fresh"_a, "launches"_a, "results"_a, "one_result"_a,
           "block"_a = py::none(), "follows"_a = py::none(),
           "Makes a call known; takes over the launches. Tuples: FreshTuple, KnownLaunch, FollowingStep of "
           "known_calls.cc. Returns whether the call can be known.")
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
  add_method<KnownCalls, &KnownCalls::call<true>>(
      type, "call", "call(*args)\n--\n\nThe results of a known call, or None: then make it in another way.");
  add_method<KnownCalls, &KnownCalls::call<false>>(
      type, "call_below", "call_below(*args)\n--\n\nAs call, below torch's dispatcher and autograd.");
}

}  // namespace flux::bindings
