#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>

#include "machine.h"

namespace sim {
namespace {

constexpr Place kSourceLocation = 1u << 31;
constexpr size_t kMaxReaders = 2048;  // of a word; more are not remembered
constexpr uintptr_t kWord = 4, kPiece = 16;

// A word's last write, and its reads since.
struct Cell {
  Epoch write, read;  // read: of several readers, the number of their set
  Place write_place, read_place;
};
static_assert(sizeof(Cell) == 24);

// Readers of one word, in the order of who they are.
using Readers = std::vector<Epoch>;
std::deque<Readers> sets;
std::vector<uint32_t> free_sets;

constexpr uint64_t kSet = uint64_t{1} << 63;  // no actor has this number
bool is_set(Epoch read) { return (read.bits & kSet) != 0; }
uint32_t set_number(Epoch read) { return static_cast<uint32_t>(read.bits); }
Readers& set_of(Epoch read) { return sets[set_number(read)]; }

void forget_readers(Cell& cell) {
  if (is_set(cell.read)) {
    set_of(cell.read).clear();
    free_sets.push_back(set_number(cell.read));
  }
  cell.read = {};
}

uintptr_t arena = 0;
Cell* arena_cells = nullptr;
struct SharedCells {
  Cell* cells = nullptr;
  std::vector<Cell*> with_sets;
};
std::vector<SharedCells> slot_cells;

Cell* reserve_cells(size_t words) {
  void* const cells = mmap(nullptr, words * sizeof(Cell), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells == MAP_FAILED) std::abort();
  return static_cast<Cell*>(cells);
}

SharedCells& cells_of(const Cta& cta) {
  const auto slot = static_cast<size_t>(cta.slot);
  if (slot_cells.size() <= slot) slot_cells.resize(slot + 1);
  if (slot_cells[slot].cells == nullptr) slot_cells[slot].cells = reserve_cells(kSharedBytes / kWord);
  return slot_cells[slot];
}

// Where the cells of an access lie, for reports.
struct Memory {
  const Cta* cta;     // null: global
  uintptr_t address;  // in the CTA, or of global memory
};

// A function of csrc, and the line in it.
struct Frame {
  std::string function, line;
};

// The innermost function first, then those that it has been inlined into.
std::vector<Frame> frames_of(Place place) {
  char command[128], function[4096], line[4096];
  std::snprintf(command, sizeof(command), "addr2line -i -f -C -e /proc/%d/exe 0x%x", getpid(), place - 1);
  std::vector<Frame> frames;
  if (FILE* const lines = popen(command, "r")) {
    while (frames.size() < 4 && std::fgets(function, sizeof(function), lines) != nullptr &&
           std::fgets(line, sizeof(line), lines) != nullptr) {
      std::string at = line;
      at.erase(std::min(at.find_first_of(" \n"), at.size()));
      const size_t root = at.find("csrc/");
      if (root != std::string::npos) frames.push_back({function, at.substr(root)});
    }
    pclose(lines);
  }
  return frames;
}

// Functions that may load what nobody has written, because the value is not used.
struct {
  const char *file, *function;
} constexpr kMayLoadUnwritten[] = {
    // The unused half of the last piece is added to accumulators that are not stored.
    {"csrc/gemm_rs/store.cuh:", "add_arrived"},
};

bool may_load_unwritten(Place place) {
  static std::map<Place, bool> known;
  if (place == 0 || (place & kSourceLocation) != 0) return false;
  const auto [entry, is_new] = known.try_emplace(place);
  if (is_new) {
    for (const Frame& frame : frames_of(place)) {
      for (const auto& [file, function] : kMayLoadUnwritten)
        entry->second |= frame.line.starts_with(file) && frame.function.find(function) != std::string::npos;
    }
  }
  return entry->second;
}

std::string text_of(Place place) {
  if (place == 0) return "";
  if ((place & kSourceLocation) != 0) {
    const Where where = std::bit_cast<Where>(static_cast<uintptr_t>(place & ~kSourceLocation));
    return where.line() == 0 ? "" : sim::text(" at ", where.file_name(), ":", where.line());
  }
  std::string text;
  for (const Frame& frame : frames_of(place)) text += (text.empty() ? " at " : ", from ") + frame.line;
  return text;
}

std::string who_is(Epoch epoch) {
  const ActorInfo* const info = actor_info(epoch.actor());
  if (info == nullptr) return "something long ago";
  const auto thread_text = [&](int thread) {
    return text(info->name, ", warp ", thread / 32, ", lane ", thread % 32);
  };
  if (epoch.slot() < info->threads) return thread_text(epoch.slot());
  const auto& [agent, thread] = info->agents[epoch.slot() - info->threads];
  switch (agent) {
    case Agent::kCopies:
      return "cp.async of " + thread_text(thread);
    case Agent::kBulkReads:
    case Agent::kBulkWrites:
      return "bulk copies of " + thread_text(thread);
    case Agent::kBarrier:
      return text("copies that complete on mbarrier ", thread, " of ", info->name);
  }
  return "";
}

std::string place_in(const Memory& memory) {
  return memory.cta != nullptr ? text("shared address ", memory.address)
                               : describe_global(reinterpret_cast<const void*>(memory.address));
}

// What an access does at a place.
std::string told(const Access& access, const char* does, const Memory& memory) {
  return text(access.what, does, ", of ", place_in(memory), "\n  ", who_is(access.epoch),
              text_of(access.place));
}

enum class Order { kKnown, kUnfenced, kUnknown };

Order order_of(const Access& access, Epoch earlier, bool earlier_writes) {
  const Past& past = access.past;
  const ActorInfo* const info = actor_info(earlier.actor());
  if (info == nullptr) return Order::kKnown;
  // A proxy fence orders ordinary writes before what the async proxy accesses; reads it need not.
  const bool needs_fence = access.async && earlier_writes && info->is_generic(earlier.slot()) &&
                           !(access.sees_copies && info->is_copy(earlier.slot()));
  if (earlier.actor() == past.actor && earlier.slot() == past.thread) {
    if (earlier.time() > past.now) return Order::kUnknown;
    return needs_fence && earlier.time() > past.fenced ? Order::kUnfenced : Order::kKnown;
  }
  if (covers(past.known, earlier, needs_fence)) return Order::kKnown;
  if (needs_fence && covers(past.known, earlier)) return Order::kUnfenced;
  if (access.clock == nullptr) return Order::kUnknown;
  for (const Stamp& stamp : access.clock->copied) {
    if (stamp.actor == earlier.actor() && stamp.slot == earlier.slot() && stamp.time >= earlier.time())
      return Order::kKnown;
  }
  return Order::kUnknown;
}

[[noreturn]] void report_race(const Access& access, const Memory& memory, Epoch earlier, Place earlier_place,
                              const char* earlier_what, Order order) {
  const bool unfenced = order == Order::kUnfenced;
  const std::string race = text(" and ", earlier_what, " that nothing orders");
  const char* const does = unfenced ? " may miss what was written: no proxy fence in between" : race.c_str();
  report(text(unfenced ? "" : "data race: ", told(access, does, memory), "\n  and earlier ", who_is(earlier),
              text_of(earlier_place)),
         nullptr);
}

// Whether a rank that has recorded a failure is one of the two: its results need not be right.
bool has_failed(Epoch epoch) {
  const ActorInfo* const info = actor_info(epoch.actor());
  return info != nullptr && machine.devices[info->device].failed;
}
bool is_excused(Epoch epoch, Epoch earlier) {
  return !machine.config.reports_races || has_failed(epoch) || has_failed(earlier);
}

void check(const Access& access, const Memory& memory, Epoch earlier, Place place, bool earlier_writes,
           bool writes) {
  if (earlier_writes && earlier.bits == access.known_write.bits) return;
  const Order order = order_of(access, earlier, earlier_writes);
  if (order == Order::kKnown || is_excused(access.epoch, earlier)) {
    if (earlier_writes) access.known_write = earlier;
    return;
  }
  // A store does not happen before a load that its thread has finished, even without a fence in between.
  if (writes && access.clock != nullptr && covers(access.clock->pending, earlier)) return;
  report_race(access, memory, earlier, place, earlier_writes ? "a write" : "a read", order);
}

bool is_async(Epoch epoch) {
  const ActorInfo* const info = actor_info(epoch.actor());
  return info != nullptr && !info->is_generic(epoch.slot());
}

// Whether the write comes after all reads. Reads of the async proxy are noted in the first word of a piece only.
void check_reads(const Cell& cell, const Access& access, const Memory& memory, bool async_only) {
  if (cell.read.never()) return;
  const auto check_one = [&](Epoch read) {
    if (!async_only || is_async(read)) check(access, memory, read, cell.read_place, false, true);
  };
  if (!is_set(cell.read)) {
    check_one(cell.read);
  } else {
    for (const Epoch read : set_of(cell.read)) check_one(read);
  }
}

// Whether the cell now has a set of readers, and had none.
bool add_reader(Cell& cell, const Access& access) {
  cell.read_place = access.place;
  const bool had_set = is_set(cell.read);
  if (!had_set && (cell.read.never() || cell.read.who() == access.epoch.who() ||
                   order_of(access, cell.read, false) == Order::kKnown)) {
    cell.read = access.epoch;
    return false;
  }
  if (!had_set) {
    if (free_sets.empty()) {
      free_sets.push_back(static_cast<uint32_t>(sets.size()));
      sets.emplace_back();
    }
    sets[free_sets.back()].assign(1, cell.read);
    cell.read = {kSet | free_sets.back()};
    free_sets.pop_back();
  }
  Readers& readers = set_of(cell.read);
  const auto at = std::lower_bound(readers.begin(), readers.end(), access.epoch,
                                   [](Epoch a, Epoch b) { return a.who() < b.who(); });
  if (at != readers.end() && at->who() == access.epoch.who()) {
    *at = access.epoch;
  } else if (readers.size() < kMaxReaders) {
    readers.insert(at, access.epoch);
  }
  return !had_set;
}

// Of the word at `address`. Returns as add_reader.
bool read(Cell& cell, const Access& access, const Memory& memory) {
  const bool strong = access.epoch.strong();
  if (!(strong && cell.write.strong())) check(access, memory, cell.write, cell.write_place, true, false);
  if (strong || !access.noted || (access.async && memory.address % kPiece != 0)) return false;
  return cell.read.bits != access.epoch.bits && add_reader(cell, access);
}

void write(Cell& cell, const Access& access, const Memory& memory) {
  if (!cell.write.never() && !(access.epoch.strong() && cell.write.strong()))
    check(access, memory, cell.write, cell.write_place, true, true);
  check_reads(cell, access, memory, /*async_only=*/false);
  const size_t word = memory.address % kPiece / kWord;
  if (word > 0) check_reads((&cell)[-static_cast<ptrdiff_t>(word)], access, memory, /*async_only=*/true);
  forget_readers(cell);
  if (cell.write.strong() && !access.epoch.strong() && memory.cta == nullptr) forget_told(memory.address);
  cell.write = access.epoch;
  cell.write_place = access.place;
}

void report_unwritten(const Access& access, const Memory& memory) {
  if (is_excused(access.epoch, access.epoch) || may_load_unwritten(access.place)) return;
  report(told(access, " of memory that nobody has written", memory), nullptr);
}

Cell& cell_of(uintptr_t address) { return arena_cells[(address - arena) / kWord]; }

// Calls use(cell, address) for the words of an access.
template <class Use>
void for_each_word(uintptr_t begin, int64_t bytes, Use use) {
  for (uintptr_t at = begin / kWord * kWord; at < begin + static_cast<uintptr_t>(bytes); at += kWord) use(at);
}

bool is_global(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) - arena < kArenaBytes; }

// An access of the running thread.
void access_memory(const void* pointer, int bytes, bool writes, bool shared, const Access& access) {
  if (!shared) {
    return (writes ? write_global : read_global)(pointer, bytes, access);
  }
  Cta& cta = here();
  const uint32_t at = shared_address(pointer);
  if (at + static_cast<uint32_t>(bytes) > dynamic_begin() + cta.launch->config.shared_bytes)
    report(told(access, " beyond the CTA's shared memory", {&cta, at}), nullptr);
  if (writes) {
    write_shared(cta, at, bytes, access);
  } else {
    read_shared(cta, at, bytes, access);
  }
}

// A word's cell in this CTA: earlier CTAs have used the same memory.
Cell& own_cell(Cell* cells, const Cta& cta, uintptr_t address) {
  Cell& cell = cells[address / kWord];
  if (cell.write.actor() != cta.actor) cell.write = {};
  if (!is_set(cell.read) && cell.read.actor() != cta.actor) cell.read = {};
  return cell;
}

}  // namespace

Place place_of(const Where& where) {
  return static_cast<Place>(std::bit_cast<uintptr_t>(where)) | kSourceLocation;
}

void map_shadow(uintptr_t begin, size_t bytes) {
  arena = begin;
  arena_cells = reserve_cells(bytes / kWord);
}

void clear_shadow(uintptr_t begin, size_t bytes) {
  madvise(&cell_of(begin), bytes / kWord * sizeof(Cell), MADV_DONTNEED);
  sets.clear();
  free_sets.clear();
}

void mark_written(const void* address, int64_t bytes) {
  for_each_word(reinterpret_cast<uintptr_t>(address), bytes,
                [](uintptr_t at) { cell_of(at).write = Epoch::of_host(); });
}

void read_global(const void* address, int64_t bytes, const Access& access) {
  for_each_word(reinterpret_cast<uintptr_t>(address), bytes, [&](uintptr_t at) {
    Cell& cell = cell_of(at);
    if (cell.write.never()) report_unwritten(access, {nullptr, at});
    read(cell, access, {nullptr, at});
  });
}

void write_global(const void* address, int64_t bytes, const Access& access) {
  for_each_word(reinterpret_cast<uintptr_t>(address), bytes,
                [&](uintptr_t at) { write(cell_of(at), access, {nullptr, at}); });
}

bool is_ordered(const void* address, int64_t bytes, const Access& access) {
  bool ordered = true;
  for_each_word(reinterpret_cast<uintptr_t>(address), bytes, [&](uintptr_t at) {
    const Epoch write = cell_of(at).write;
    if (write.bits == access.known_write.bits) return;
    ordered &= !write.never() && order_of(access, write, true) == Order::kKnown;
    if (ordered) access.known_write = write;
  });
  return ordered;
}

void copy_global(const void* dst, const void* src, int64_t bytes, const Access& access) {
  const auto to = reinterpret_cast<uintptr_t>(dst), from = reinterpret_cast<uintptr_t>(src);
  for_each_word(0, bytes, [&](uintptr_t at) {
    Cell& source = cell_of(from + at);
    const bool written = !source.write.never();
    if (written) read(source, access, {nullptr, from + at});
    write(cell_of(to + at), access, {nullptr, to + at});
    if (!written) cell_of(to + at).write = {};
  });
}

void strong_access(const void* address, int bytes, bool writes, const char* what, const Where& where) {
  const bool shared = is_shared(address);
  if (!shared && !is_global(address)) return;  // of the engine
  const Clock& clock = self().clock;
  const Epoch epoch = Epoch::of(clock.actor, clock.thread, clock.now, /*strong=*/true);
  access_memory(address, bytes, writes, shared, {what, epoch, place_of(where), clock, &clock});
}

void read_shared(Cta& cta, uint32_t address, int64_t bytes, const Access& access, bool written_only) {
  SharedCells& shared = cells_of(cta);
  for_each_word(address, bytes, [&](uintptr_t at) {
    Cell& cell = own_cell(shared.cells, cta, at);
    if (cell.write.never()) {
      if (written_only) report_unwritten(access, {&cta, at});
    } else if (read(cell, access, {&cta, at})) {
      shared.with_sets.push_back(&cell);
    }
  });
}

void write_shared(Cta& cta, uint32_t address, int64_t bytes, const Access& access) {
  SharedCells& shared = cells_of(cta);
  for_each_word(address, bytes, [&](uintptr_t at) {
    if (cta.barriers[at / 8]) report(told(access, " overwrites an mbarrier", {&cta, at}), nullptr);
    own_cell(shared.cells, cta, at / kPiece * kPiece);  // has the asynchronous reads of its piece
    write(own_cell(shared.cells, cta, at), access, {&cta, at});
  });
}

void copy_unwritten(const Cta& from, uint32_t src, Cta& to, uint32_t dst, int64_t bytes) {
  Cell* const sources = cells_of(from).cells;
  Cell* const cells = cells_of(to).cells;
  for_each_word(0, bytes, [&](uintptr_t at) {
    if (own_cell(sources, from, src + at).write.never()) cells[(dst + at) / kWord].write = {};
  });
}

void forget_shared(const Cta& cta) {
  SharedCells& shared = cells_of(cta);
  for (Cell* cell : shared.with_sets) forget_readers(*cell);
  shared.with_sets.clear();
}

// --- ordinary accesses of kernels, which the compiler announces (-fsanitize=thread) ---

namespace {

void plain(const void* pointer, int bytes, bool writes, const void* from) {
  if (machine.running == nullptr) return;
  const bool shared = is_shared(pointer);
  if (!shared && !is_global(pointer)) return;  // of a stack, or a constant
  const Clock& clock = self().clock;
  access_memory(pointer, bytes, writes, shared,
                {writes ? "store" : "load", Epoch::of(clock.actor, clock.thread, clock.now),
                 static_cast<Place>(reinterpret_cast<uintptr_t>(from)), clock, &clock});
}

struct UbsanMismatch {
  struct {
    const char* file;
    uint32_t line, column;
  } where;
};

}  // namespace
}  // namespace sim

#define FLUX_SIM_CALLBACK(name, bytes, writes) \
  void name(void* address) { sim::plain(address, bytes, writes, __builtin_return_address(0)); }
#define FLUX_SIM_CALLBACKS(bytes)                               \
  FLUX_SIM_CALLBACK(__tsan_read##bytes, bytes, false)           \
  FLUX_SIM_CALLBACK(__tsan_write##bytes, bytes, true)           \
  FLUX_SIM_CALLBACK(__tsan_unaligned_read##bytes, bytes, false) \
  FLUX_SIM_CALLBACK(__tsan_unaligned_write##bytes, bytes, true)

extern "C" {
FLUX_SIM_CALLBACKS(1)
FLUX_SIM_CALLBACKS(2)
FLUX_SIM_CALLBACKS(4)
FLUX_SIM_CALLBACKS(8)
FLUX_SIM_CALLBACKS(16)
void __tsan_read_range(void* address, size_t bytes) {
  sim::plain(address, static_cast<int>(bytes), false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  sim::plain(address, static_cast<int>(bytes), true, __builtin_return_address(0));
}
void __tsan_init() {}
// Of the host's code only.
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
uint8_t __tsan_atomic8_load(const uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
uint32_t __tsan_atomic32_load(const uint32_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
void __tsan_atomic8_store(uint8_t* address, uint8_t value, int) { *address = value; }
void __tsan_atomic32_store(uint32_t* address, uint32_t value, int) { *address = value; }
// A pointer that is not aligned for its type (-fsanitize=alignment).
void __ubsan_handle_type_mismatch_v1(sim::UbsanMismatch* data, void* pointer) {
  if (sim::machine.running == nullptr || !(sim::is_shared(pointer) || sim::is_global(pointer))) return;
  sim::report(sim::text("misaligned access at ", data->where.file, ":", data->where.line));
}
}
