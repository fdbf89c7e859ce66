// A rank that never starts, or so late that its peers have given up: they record a timeout and send nothing more, and
// nobody has a wrong result without knowing it.
#include "cuda_runtime_api.h"
#include "ops.h"

namespace cases {
namespace {

using flux::runtime::SymmBuffer;

constexpr int kCalls = 3;
constexpr uint64_t kDeadline = 50'000'000;

// After the first call, which timed out on every rank, no rank has sent anything.
void expect_nothing_sent(const Ranks& region) {
  for (const SymmBuffer& mine : region.symm) {
    const std::string of_rank = " of rank " + std::to_string(mine.rank) + " after a timeout";
    const auto* const signals =
        reinterpret_cast<const uint32_t*>(mine.peers[mine.rank] + flux::runtime::kHeaderBytes);
    for (int64_t i = 0; i < mine.signal_bytes / 4; ++i) {
      if (signals[i] > 1) wrong("epoch ", signals[i], " was signalled to word ", i, of_rank);
    }
    const auto untouched = [&](const char* bytes, int64_t count, const char* what) {
      for (int64_t i = 0; i < count; ++i) {
        if (static_cast<uint8_t>(bytes[i]) != 0xFF) wrong("byte ", i, " of ", what, " was sent", of_rank);
      }
    };
    untouched(mine.slots(mine.rank, 2), mine.slot_bytes, "the slots");
    untouched(mine.exchange(mine.rank, 2), mine.exchange_bytes, "the exchange buffer");
  }
}

void run(uint64_t seed, bool starts) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 3, 4}), missing = random.below(world_size);
  Setup setup = {random, world_size, kCalls, draw_dtype(random)};
  setup.transposed = random.below(2) == 0;
  sim::MachineConfig machine = machine_of(seed, 8, world_size);
  machine.late_rank = starts ? missing : -1;
  machine.too_late = starts;
  sim::reset_machine(machine);
  const size_t number = (random.below(static_cast<int>(kOps.size()) + 1));
  const Op op = (number < kOps.size() ? kOps[number] : kRoute)(setup);
  // The host has enqueued copies before it learns of a timeout.
  const bool copied = op.can_copy && random.below(2) == 0;
  describe(op.name, copied ? ", copied, " : ", ", world_size, " ranks, rank ", missing,
           starts ? " too late" : " dead", setup.transposed ? ", [K, N]" : "", name_of(setup.dtype));
  Ranks region(world_size, op.sizes);
  // Waits give up soon: each step of time wakes every thread that polls.
  for (SymmBuffer& mine : region.symm) mine.timeout_ns = kDeadline;
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank == missing && !starts) continue;
    cudaSetDevice(rank);
    for (int call = 0; call < kCalls; ++call) {
      op.enqueue(rank, call, region.symm[rank], copied ? static_cast<uint32_t>(call + 1) : 0);
    }
  }
  cudaDeviceSynchronize();

  for (int rank = 0; rank < world_size; ++rank) {
    const auto& record = *region.symm[rank].error;
    const auto& header = *region.symm[rank].header();
    const bool runs = starts || rank != missing;
    const std::string name = "rank " + std::to_string(rank);
    if (!starts && (record.code != 0) != runs) wrong(name, " has the wrong record of a failure");
    if ((record.code != 0) != (header.aborted != 0))
      wrong(name, " has an abort without a record, or the reverse");
    if (record.code != 0 && (record.rank != static_cast<uint32_t>(rank) || record.op == 0))
      wrong(name, " has a wrong record");
    const auto epochs = static_cast<uint32_t>(runs ? kCalls * op.epochs : 0);
    if (header.epoch != epochs || header.ctas_done != 0 || header.next_tile != 0 || header.next_piece != 0) {
      wrong("the header of ", name, " is not as a call leaves it");
    }
  }
  for (const Output& output : op.outputs) {
    if (output.rank == missing && !starts) continue;
    const bool may_fail = region.symm[output.rank].error->code != 0;
    expect(output.values, output.right, setup.dtype, output.name, may_fail);
  }
  if (!starts && !copied) expect_nothing_sent(region);
}

void dead_rank(uint64_t seed) { run(seed, /*starts=*/false); }
void too_late_rank(uint64_t seed) { run(seed, /*starts=*/true); }

}  // namespace

const std::vector<NamedCase> kCases = {
    {"dead_rank", dead_rank}, {"too_late_rank", too_late_rank}, {"graphs", graphs}};

}  // namespace cases
