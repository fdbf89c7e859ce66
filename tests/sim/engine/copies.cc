// Asynchronous copies: TMA boxes, bulk copies, cp.async, st.async. Each is issued with its operands, and takes effect
// when the adversary says so.
#include <cstring>

#include "machine.h"
#include "tensor_map.h"

namespace sim {
namespace {

std::shared_ptr<CopyGroup>& open_group(std::shared_ptr<CopyGroup>& group) {
  if (group == nullptr) group = std::make_shared<CopyGroup>();
  return group;
}

void aligned(uint64_t value, uint64_t to, const char* what, const Where& where) {
  if (value % to != 0) fail(where, "misaligned ", what);
}

// A box of an H100 begins at a multiple of 16 bytes within a row; elsewhere the instruction is illegal.
void first_column(int column, const TensorMap& map, const Where& where) {
  aligned(int64_t{column} * map.element_bytes, 16, "column of a TMA box", where);
}

// Counts an operation on the memory of a CTA, which must not exit before it.
struct InFlight {
  Cta* cta;
  explicit InFlight(Cta& cta) : cta(&cta) { ++cta.in_flight; }
  InFlight(const InFlight& other) : cta(other.cta) { ++cta->in_flight; }
  InFlight& operator=(const InFlight&) = delete;
  ~InFlight() { --cta->in_flight; }
};

// The box's rows in global memory, one after the other: piece(offset in the box, address or null, bytes).
template <class Piece>
void for_each_piece(const TensorMap& map, const int (&at)[3], Piece piece) {
  const int row_bytes = static_cast<int>(map.box[0]) * map.element_bytes;
  int64_t offset = 0;
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y, offset += row_bytes) {
      const int64_t row = at[1] + static_cast<int64_t>(y), slice = at[2] + static_cast<int64_t>(z);
      const bool inside = row >= 0 && row < map.sizes[1] && slice >= 0 && slice < map.sizes[2];
      for (int byte = 0; byte < row_bytes; byte += 16) {
        const int64_t column = at[0] + byte / map.element_bytes;
        const int64_t left = (map.sizes[0] - column) * map.element_bytes;
        const int bytes =
            !inside || column < 0 || left <= 0 ? 0 : static_cast<int>(std::min<int64_t>(left, 16));
        const uint8_t* const address =
            map.base + slice * map.strides[1] + row * map.strides[0] + column * map.element_bytes;
        piece(offset + byte, bytes > 0 ? address : nullptr, bytes);
      }
    }
  }
}

// The slot of one of the running thread's agents.
int agent_of(int& slot, Agent agent) {
  if (slot < 0) slot = new_agent(here().actor, agent, self().thread);
  return slot;
}

// A copy that completes on an mbarrier, in the phase that is running.
Access completing_on(const char* what, const Cta& cta, const MBarrier& barrier, const Past& past,
                     Place place) {
  return {what, Epoch::of(cta.actor, barrier.slot, barrier.phase + 1), place, past, nullptr, /*async=*/true};
}

}  // namespace

void tma_load(const void* map_address, uint32_t dst, uint32_t bar, std::initializer_list<int> at,
              uint32_t ctas, const Where& where) {
  maybe_preempt();
  const TensorMap map = tensor_map_at(map_address, at.size(), where);
  int place[3] = {};
  std::copy(at.begin(), at.end(), place);
  // The hardware would take 128 bytes, with a pattern that does not begin where the box does.
  aligned(dst, map.swizzle_bytes(), "destination of a swizzled TMA load", where);
  first_column(place[0], map, where);
  Cta& own = here();
  const uint32_t targets = ctas == 0 ? 1u << own.rank_in_cluster : ctas;
  for (int rank = 0; rank < 16; ++rank) {
    if ((targets >> rank & 1) == 0) continue;
    Cta& cta = cta_of_cluster(rank, where);
    checked(cta, dst, map.box_bytes(), "TMA load", where);
    known_barrier(cta, bar, where);
    issue(false, [=, past = issue_past(), in_flight = InFlight(cta)] {
      Cta& to = *in_flight.cta;
      const Access access = completing_on("TMA load", to, barrier_at(to, bar, where), past, place_of(where));
      for_each_piece(map, place, [&](int64_t offset, const uint8_t* address, int bytes) {
        uint8_t piece[16] = {};
        if (address != nullptr) {
          check_global(address, bytes, "TMA load", where);
          std::memcpy(piece, address, bytes);
          // A box may hold rows that have not arrived, if nobody uses them: they are NaN.
          if (!is_ordered(address, bytes, access)) std::memset(piece, 0xFF, bytes);
        }
        const uint32_t at = map.swizzled(dst + static_cast<uint32_t>(offset));
        write_shared(to, at, 16, access);
        std::memcpy(to.memory + at, piece, 16);
      });
      complete_bytes(to, bar, map.box_bytes(), where);
    });
  }
}

// A copy from shared memory: reads at one moment, writes at a later one.
struct BulkAccess {
  Past past;
  Epoch reads, writes;
};
static BulkAccess store_in_group_access() {
  Fiber& fiber = self();
  const int reads = agent_of(fiber.bulk_reads_slot, Agent::kBulkReads);
  const int writes = agent_of(fiber.bulk_writes_slot, Agent::kBulkWrites);
  const uint32_t number = fiber.bulk_group + 1;
  const uint32_t actor = fiber.cta->actor;
  return {issue_past(), Epoch::of(actor, reads, number), Epoch::of(actor, writes, number)};
}
static void store_in_group(std::function<std::function<void()>()> read) {
  Fiber& fiber = self();
  Cta& cta = here();
  const std::shared_ptr<CopyGroup> group = open_group(fiber.open_bulk);
  ++group->reads;
  ++group->writes;
  Launch* const launch = cta.launch;
  ++launch->writes_in_flight;
  std::function<void()> effect = [=, done = fiber.copies_done, read = std::move(read),
                                  in_flight = std::make_shared<InFlight>(cta)]() mutable {
    std::function<void()> write = read();
    --group->reads;
    done->wake_all();
    in_flight.reset();
    issue(false, [=, write = std::move(write)] {
      write();
      --group->writes;
      done->wake_all();
      --launch->writes_in_flight;
    });
  };
  if (machine.config.late_stores) return issue_arrival(*fiber.copies_done, std::move(effect));
  issue(false, std::move(effect));
}

static void copy_to_global(const void* map_address, uint32_t src, int x, int y, int z, bool adds,
                           const Where& where) {
  maybe_preempt();
  const TensorMap map = tensor_map_at(map_address, 3, where);
  if (adds && map.element_bytes != 4) fail(where, "a sum of elements that are not fp32");
  aligned(src, map.swizzle_bytes(), "source of a swizzled TMA store", where);
  first_column(x, map, where);
  checked(here(), src, map.box_bytes(), "TMA store", where);
  store_in_group([=, by = store_in_group_access(), &fiber = self()] {
    const Access reads = {"TMA store", by.reads, place_of(where), by.past, nullptr, /*async=*/true};
    struct Piece {
      uint8_t* to;
      int bytes;
      uint8_t data[16];
    };
    std::vector<Piece> pieces;
    for_each_piece(map, {x, y, z}, [&](int64_t offset, const uint8_t* address, int bytes) {
      if (address == nullptr) return;
      check_global(address, bytes, "TMA store", where);
      const uint32_t at = map.swizzled(src + static_cast<uint32_t>(offset));
      read_shared(*fiber.cta, at, 16, reads);
      Piece piece = {const_cast<uint8_t*>(address), bytes, {}};
      std::memcpy(piece.data, fiber.cta->memory + at, 16);
      pieces.push_back(piece);
    });
    return [=, pieces = std::move(pieces)] {
      const Access writes = {"TMA store", by.writes, place_of(where), by.past, nullptr, /*async=*/true};
      for (const Piece& piece : pieces) {
        write_global(piece.to, piece.bytes, writes);
        float sums[4] = {}, terms[4];
        if (adds) std::memcpy(sums, piece.to, piece.bytes);
        std::memcpy(terms, piece.data, piece.bytes);
        for (int i = 0; i < piece.bytes / 4; ++i) sums[i] += terms[i];
        std::memcpy(piece.to, adds ? static_cast<const void*>(sums) : piece.data, piece.bytes);
      }
    };
  });
}

void tma_store_3d(const void* map, uint32_t src, int x, int y, int z, const Where& where) {
  copy_to_global(map, src, x, y, z, /*adds=*/false, where);
}
void tma_add_3d(const void* map, uint32_t src, int x, int y, int z, const Where& where) {
  copy_to_global(map, src, x, y, z, /*adds=*/true, where);
}

void bulk_store(void* dst, uint32_t src, uint32_t bytes, const Where& where) {
  maybe_preempt();
  aligned(src | bytes | reinterpret_cast<uintptr_t>(dst), 16, "bulk copy", where);
  checked(here(), src, bytes, "bulk copy", where);
  check_global(dst, bytes, "bulk copy", where);
  store_in_group([=, by = store_in_group_access(), &fiber = self()] {
    read_shared(*fiber.cta, src, bytes, {"bulk copy", by.reads, place_of(where), by.past, nullptr, true});
    const uint8_t* const from = fiber.cta->memory + src;
    return [=, data = std::vector<uint8_t>(from, from + bytes)] {
      write_global(dst, bytes, {"bulk copy", by.writes, place_of(where), by.past, nullptr, true});
      std::memcpy(dst, data.data(), data.size());
    };
  });
}

void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, const Where& where) {
  maybe_preempt();
  aligned(dst | bytes | reinterpret_cast<uintptr_t>(src), 16, "bulk copy", where);
  checked(here(), dst, bytes, "bulk copy", where);
  check_global(src, bytes, "bulk copy", where);
  known_barrier(here(), bar, where);
  issue(false, [=, past = issue_past(), in_flight = InFlight(here())] {
    Cta& to = *in_flight.cta;
    const Access access = completing_on("bulk copy", to, barrier_at(to, bar, where), past, place_of(where));
    read_global(src, bytes, access);
    write_shared(to, dst, bytes, access);
    std::memcpy(to.memory + dst, src, bytes);
    complete_bytes(to, bar, bytes, where);
  });
}

void bulk_copy_cluster(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar, int cta,
                       const Where& where) {
  maybe_preempt();
  aligned(dst | src | bytes, 16, "bulk copy", where);
  Cta& to = cta_of_cluster(cta, where);
  checked(here(), src, bytes, "bulk copy", where);
  checked(to, dst, bytes, "bulk copy", where);
  issue_arrival(known_barrier(to, bar, where).queue,
                [=, past = issue_past(), from = InFlight(here()), into = InFlight(to)] {
                  const Access access = completing_on(
                      "bulk copy", *into.cta, barrier_at(*into.cta, bar, where), past, place_of(where));
                  read_shared(*from.cta, src, bytes, access, /*written_only=*/false);
                  write_shared(*into.cta, dst, bytes, access);
                  copy_unwritten(*from.cta, src, *into.cta, dst, bytes);  // padding may travel too
                  std::memcpy(into.cta->memory + dst, from.cta->memory + src, bytes);
                  complete_bytes(*into.cta, bar, bytes, where);
                });
}

void store_async_cluster(uint32_t address, uint32_t value, uint32_t bar, int cta, const Where& where) {
  maybe_preempt();
  Cta& to = cta_of_cluster(cta, where);
  checked(to, address, 4, "st.async", where);
  issue_arrival(known_barrier(to, bar, where).queue, [=, past = issue_past(), into = InFlight(to)] {
    const MBarrier& barrier = barrier_at(*into.cta, bar, where);
    write_shared(*into.cta, address, 4, completing_on("st.async", *into.cta, barrier, past, place_of(where)));
    std::memcpy(into.cta->memory + address, &value, 4);
    complete_bytes(*into.cta, bar, 4, where);
  });
}

void prefetch_line(const void* address, const Where& where) { check_global(address, 1, "prefetch", where); }

void bulk_commit() {
  maybe_preempt();
  Fiber& fiber = self();
  open_group(fiber.open_bulk)->number = ++fiber.bulk_group;
  fiber.bulk_groups.push_back(std::move(fiber.open_bulk));
}

// Until no access of these is left in all groups but the last `pending`.
static void wait_for(const std::vector<std::shared_ptr<CopyGroup>>& groups, int pending,
                     int CopyGroup::* left, const char* what, const Where& where) {
  for (int i = 0; i < static_cast<int>(groups.size()) - pending; ++i) {
    while (groups[i].get()->*left > 0) wait_on(*self().copies_done, where, [what] { return what; });
  }
}

void bulk_wait(int pending, bool reads_only, const Where& where) {
  maybe_preempt();
  Fiber& fiber = self();
  wait_for(fiber.bulk_groups, pending, reads_only ? &CopyGroup::reads : &CopyGroup::writes, "its bulk copies",
           where);
  Clock& clock = fiber.clock;
  const uint32_t number = fiber.bulk_group - std::min(fiber.bulk_group, static_cast<uint32_t>(pending));
  if (number > 0 && fiber.bulk_reads_slot >= 0) {
    const uint32_t actor = fiber.cta->actor;
    clock.known = with(clock.known, {{actor, fiber.bulk_reads_slot, number, number}});
    if (!reads_only) clock.copied = {{actor, fiber.bulk_writes_slot, number, number}};
  }
  // Only the oldest ones may go: newer ones count as pending even after they are done.
  auto& groups = fiber.bulk_groups;
  while (!groups.empty() && groups.front()->writes == 0) groups.erase(groups.begin());
}

// --- cp.async ---

void copy_async(uint32_t dst, const void* src, int bytes, bool valid, const Where& where) {
  maybe_preempt();
  aligned(dst | reinterpret_cast<uintptr_t>(valid ? src : nullptr), bytes, "cp.async", where);
  checked(here(), dst, bytes, "cp.async", where);
  if (valid) check_global(src, bytes, "cp.async", where);
  Fiber& fiber = self();
  const std::shared_ptr<CopyGroup> group = open_group(fiber.open_copies);
  ++group->writes;
  auto counted = std::make_shared<CopyGroup>();  // of this copy alone, for arrivals
  counted->writes = 1;
  fiber.all_copies.push_back(counted);
  const int slot = agent_of(fiber.copies_slot, Agent::kCopies);
  const Epoch epoch = Epoch::of(fiber.cta->actor, slot, ++fiber.copies);
  issue(false, [=, past = issue_past(), in_flight = InFlight(here()), done = fiber.copies_done] {
    Cta& cta = *in_flight.cta;
    const Access access = {"cp.async", epoch, place_of(where), past};
    write_shared(cta, dst, bytes, access);
    if (valid) {
      read_global(src, bytes, access);
      std::memcpy(cta.memory + dst, src, bytes);
    } else {
      std::memset(cta.memory + dst, 0, bytes);
    }
    --group->writes;
    --counted->writes;
    done->wake_all();
  });
}

void copy_async_commit() {
  Fiber& fiber = self();
  open_group(fiber.open_copies)->number = fiber.copies;
  fiber.copy_groups.push_back(std::move(fiber.open_copies));
}

void copy_async_wait(int pending, const Where& where) {
  maybe_preempt();
  Fiber& fiber = self();
  wait_for(fiber.copy_groups, pending, &CopyGroup::writes, "its cp.async", where);
  const int last = static_cast<int>(fiber.copy_groups.size()) - pending - 1;
  if (last < 0 || fiber.copies_slot < 0) return;
  const uint32_t number = fiber.copy_groups[last]->number;
  fiber.clock.known = with(fiber.clock.known, {{fiber.cta->actor, fiber.copies_slot, number, 0}});
}

// Arrives when the copies have landed: an operation that keeps itself with the adversary until then.
static void arrive_behind(std::vector<std::shared_ptr<CopyGroup>> copies, std::shared_ptr<InFlight> in_flight,
                          const Stamp& stamp, uint32_t bar, const Where& where) {
  for (const auto& copy : copies) {
    if (copy->writes == 0) continue;
    issue(false, [=] { arrive_behind(copies, in_flight, stamp, bar, where); });
    return;
  }
  if (stamp.time > 0) barrier_at(*in_flight->cta, bar, where).gathering.stamps.push_back(stamp);
  arrive(*in_flight->cta, bar, where);
}

void mbarrier_arrive_after_copies(uint32_t bar, const Where& where) {
  maybe_preempt();
  known_barrier(here(), bar, where);
  Fiber& fiber = self();
  const Stamp copied = {fiber.cta->actor, fiber.copies_slot, fiber.copies, 0};
  arrive_behind(std::move(fiber.all_copies), std::make_shared<InFlight>(here()), copied, bar, where);
  fiber.all_copies.clear();
}

void fence_proxy_async() {
  maybe_preempt();
  Clock& clock = self().clock;
  clock.known = all_fenced(with(clock.known, clock.copied));
  clock.copied.clear();
  clock.fenced = clock.now++;
}

}  // namespace sim
