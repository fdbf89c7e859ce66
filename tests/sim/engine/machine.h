// The simulated machine: devices with streams, launches, CTAs and one fiber for each thread. Only one fiber runs at a
// time, and a seed decides which, so a run is reproduced by its seed.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "clocks.h"
#include "shadow.h"
#include "sim.h"

namespace sim {

struct Cta;
struct Launch;
struct Fiber;

// How the adversary uses its freedom. All choices are drawn from `seed`.
struct Policy {
  enum class When { kEarliest, kLatest, kRandom };
  enum class Order { kFifo, kLifo, kRandom };
  uint64_t seed = 1;
  When when = When::kEarliest;  // the moment at which an asynchronous operation takes effect
  Order order = Order::kFifo;   // which runnable thread of a CTA is next
  bool wgmma_last = false;      // kLatest: copies go before the tensor cores' reads
  int preempt = 0;              // a thread loses the SM before one in so many instructions; 0: never
};
Policy policy_of(uint64_t seed);  // policies of successive seeds cover all combinations

struct MachineConfig {
  int devices = 1;
  int num_sms = 8;        // what a device reports
  int resident = 8;       // CTAs that it holds at once
  int late_rank = -1;     // starts nothing before all others can do nothing without it
  bool too_late = false;  // it may start after their deadlines
  // From its so-manyth turn on, a device stands still until deadlines have passed and all others have finished.
  int frozen_rank = -1, frozen_after = 0;
  // Of the CTAs that each device but this one could hold, another kernel takes the place of so many until it is done.
  int occupied = 0, occupied_until = 0;
  // Names of kernels that rely on CTAs beginning in the order of their numbers. Those of all others begin in any order.
  std::vector<std::string> ordered = {"sum_over_ranks", "sum_and_norm", "sum_int8_over_ranks"};
  bool late_stores = false;   // bulk stores read their source as late as arrivals come
  bool reports_races = true;  // false: the case breaks the rules of the operators
  Policy policy;
};

// A set of threads that wait for a condition, which each of them tests again when it is woken.
struct WaitQueue {
  std::vector<Fiber*> waiting;
  void wake_all();
};

// A group of a thread's bulk copies or cp.async.
struct CopyGroup {
  int reads = 0, writes = 0;  // not done yet
  uint32_t number = 0;        // of its thread's bulk groups; of cp.async, of the last copy in the group
};

enum class State { kRunnable, kBlocked, kPolling, kExited };

struct Polled {
  const void* address = nullptr;
  int bytes = 0, repeats = 0;
  uint8_t last[16];
};

struct Fiber {
  void* stack_pointer = nullptr;
  void* stack_base = nullptr;
  Cta* cta = nullptr;
  int thread = 0;
  State state = State::kRunnable;
  // Of a blocked thread, for reports: what it waits for, and at which line.
  std::function<std::string()> reason;
  Where where;
  int registers = 0;
  Clock clock;
  // Its agents: slots of its actor, below zero until they are needed; and how many groups or copies there have been.
  int bulk_reads_slot = -1, bulk_writes_slot = -1, copies_slot = -1;
  uint32_t bulk_group = 0, copies = 0;
  std::vector<std::shared_ptr<CopyGroup>> bulk_groups, copy_groups;
  std::shared_ptr<CopyGroup> open_bulk, open_copies;
  std::vector<std::shared_ptr<CopyGroup>> all_copies;  // cp.async since the last arrival behind them
  std::shared_ptr<WaitQueue> copies_done = std::make_shared<WaitQueue>();  // outlives it in its copies
  std::array<Polled, 4> polled;
  int next_polled = 0;
  bool polls_freely = false;  // after a jump of time, until it has read the timer
  // wgmma: numbers of issued operations, and of those that each committed group ends with.
  int64_t wgmmas = 0;
  std::vector<int64_t> wgmma_groups;
  bool wgmma_fenced = false;
};

struct MBarrier {
  uint32_t count = 0;
  int32_t pending = 0;
  int64_t bytes = 0;  // expected and not arrived; below zero: arrived and not yet expected
  uint32_t phase = 0;
  WaitQueue queue;
  Epoch initialised;
  int slot = 0;  // of the copies that complete on it
  Gathering gathering;
  Known told;  // by the end of the last phase
};

struct NamedBarrier {
  int expected = -1, arrived = 0;
  bool all = true, last_all = true;
  uint64_t generation = 0;
  WaitQueue queue;
  Gathering gathering;
  Known told;
};

struct WarpMeeting {
  uint32_t arrived = 0, mask = 0;
  uint64_t generation = 0;
  uint64_t values[32] = {}, result[32] = {};
  WaitQueue queue;
  Gathering gathering;
  Known told;
};

struct WgmmaOp {
  WgmmaShape shape;
  uint64_t a, b;
  float* accumulators[32];
  bool accumulate;
  Past past;  // of the first lane that issues it
  int arrived = 0;
};
struct TensorWarp {
  std::deque<WgmmaOp> ops;  // the first is number `done`
  int64_t done = 0;
  bool queued = false;  // the first operation is with the adversary
  WaitQueue queue;
};

struct Cluster {
  std::vector<Cta*> ctas;
  NamedBarrier barrier;
};

struct Cta {
  Launch* launch = nullptr;
  uint32_t actor = 0;
  int index = 0, rank_in_cluster = 0;
  std::shared_ptr<Cluster> cluster;
  int slot = -1;              // its shared memory
  uint8_t* memory = nullptr;  // always mapped; generic accesses go through the thread-local block instead
  std::vector<Fiber> fibers;
  std::deque<Fiber*> runnable;
  int live = 0;
  bool exited = false;
  NamedBarrier named[16];
  std::vector<WarpMeeting> warps;
  std::vector<TensorWarp> tensor_warps;
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  std::vector<bool> barriers;  // of each 8 bytes: whether they are an mbarrier
  int free_registers = 0;
  WaitQueue registers_freed;
  int in_flight = 0;  // asynchronous operations that still access this CTA's memory
  bool triggered = false;
};

struct Device {
  int index = 0;
  int free_slots = 0;
  bool held = false, frozen = false;
  // The word that its rank sets at its first failure, and whether it has: what follows need not be ordered.
  const uint32_t* failure = nullptr;
  bool failed = false;
};

struct Launch {
  std::string name;
  LaunchConfig config;
  std::function<void()> body;
  Device* device = nullptr;
  int next_cta = 0, done_ctas = 0, triggered = 0;
  std::vector<int> order;  // of clusters: no hardware promises to start them in the order of their indices
  int writes_in_flight = 0;
  NamedBarrier grid_barrier;
  WaitQueue earlier_done;
  bool earlier_complete = false;
  int number = 0;
  bool follows_launch = false;  // in its stream
  // What its threads know when they begin, and once earlier kernels are complete; and what they know when they exit.
  Known at_start, earlier_known, at_exit;
  bool may_start_early() const { return config.early_start && follows_launch; }
  int total() const { return static_cast<int>(config.grid.x); }
  bool complete() const { return done_ctas == total() && writes_in_flight == 0; }
};

struct Machine {
  MachineConfig config;
  std::mt19937_64 random;
  std::vector<Device> devices;
  std::vector<std::unique_ptr<Cta>> ctas;  // resident
  // Asynchronous operations that have been issued. Each has one effect, whose moment the adversary chooses.
  std::vector<std::function<void()>> copies, wgmmas;
  std::vector<std::pair<WaitQueue*, std::function<void()>>>
      arrivals;  // and copies that complete on barriers of other CTAs
  std::vector<Fiber*> polling, sleeping, frozen;
  int turns_to_freeze = 0;
  uint64_t now_ns = 1000000;
  int64_t cycles = 0;
  int idle_jumps = 0;
  Fiber* running = nullptr;
  Cta* mapped = nullptr;
  int64_t fixed_policy = -1;  // the seed that policies are drawn from, if not the case's own
  std::string case_name;      // for reports: how to run it again

  int draw(int below) { return static_cast<int>(random() % static_cast<uint64_t>(below)); }
};
extern Machine machine;

inline Fiber& self() { return *machine.running; }
inline Cta& here() { return *machine.running->cta; }

// --- scheduler.cc ---
void reset_machine(const MachineConfig& config);
void run_all();  // until every stream is empty; reports a deadlock
[[noreturn]] void report(const std::string& what, const Fiber* fiber = machine.running,
                         const Where* where = nullptr);
// Strings and numbers behind each other.
template <class... Parts>
std::string text(const Parts&... parts) {
  const auto of = [](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  return (std::string() + ... + of(parts));
}
// Reports what the running thread does at this line.
template <class... Parts>
[[noreturn]] void fail(const Where& where, const Parts&... parts) {
  report(text(parts...), machine.running, &where);
}
std::string name_of(const Fiber& fiber, bool with_lane = true);
void wait_on(WaitQueue& queue, const Where& where, std::function<std::string()> reason);
void wait_polling(const Where& where, std::function<std::string()> reason);
void wake(Fiber* fiber);
void maybe_preempt(bool often = false);
void issue(bool is_wgmma, std::function<void()> effect);
void issue_arrival(WaitQueue& queue, std::function<void()> effect);
void start_cta(Launch* launch, int index, const std::shared_ptr<Cluster>& cluster, int rank_in_cluster);

// --- shared_memory.cc ---
constexpr uint32_t kSharedBytes =
    233472 + 8192;  // what a CTA can address; dynamic memory behind static variables
void map_shared_memory(const Cta& cta);
uint8_t* slot_memory(int slot);
int take_slot();
void free_slot(int slot);
uint32_t dynamic_begin();
uint8_t* checked(Cta& cta, uint32_t address, int64_t bytes, const char* what, const Where& where);
bool is_shared(const void* pointer);

// --- barriers.cc ---
MBarrier& barrier_at(Cta& cta, uint32_t bar, const Where& where);
// The same for the running thread, which must know that it is initialised.
MBarrier& known_barrier(Cta& cta, uint32_t bar, const Where& where);
void complete_bytes(Cta& cta, uint32_t bar, int64_t bytes, const Where& where);
void arrive(Cta& cta, uint32_t bar, const Where& where);
void tell(Gathering& gathering, Clock& clock);
void learn(Clock& clock, const Known& known);
Past issue_past();  // of what the running thread issues now
void check_exit(Cta& cta);
void leave_barriers(Cta& cta);
Cta& cta_of_cluster(int rank, const Where& where);

// --- memory.cc ---
constexpr size_t kArenaBytes = size_t{64} << 30;  // of addresses, few of which have memory
void* allocate(int64_t bytes, int device, const char* name);
std::string describe_global(const void* address);
// What the last write of a word tells those that acquire it; `device` -1: also on other devices.
struct Told {
  Known known;
  int device = -1;
};
Told& told_at(const void* address);
void forget_told(uintptr_t address);
void forget_all_told();
void free_all();
void check_global(const void* address, int64_t bytes, const char* what, const Where& where);
void flush_stores(const Cta& cta);
bool wake_polling();
void catch_faults();

// --- host.cc ---
bool advance_streams();               // starts what may start; whether anything did
bool streams_empty(int device = -1);  // of one device, or of all
void reset_streams();
std::string blocked_streams();
// The kernels that calls launch on the current device, to be launched again on its default stream.
struct GraphNode {
  std::string name;
  LaunchConfig config;
  std::function<void()> body;
};
using Graph = std::vector<GraphNode>;
Graph capture(const std::function<void()>& calls);
void replay(const Graph& graph);

}  // namespace sim
