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
  if (value % to != 0) report(std::string("misaligned ") + what, machine.running, &where);
}

// A box of an H100 begins at a multiple of 16 bytes within a row; elsewhere the instruction is illegal.
void first_column(int column, const TensorMap& map, const Where& where) {
  aligned(static_cast<uint64_t>(static_cast<int64_t>(column) * map.element_bytes), 16, "column of a TMA box",
          where);
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

}  // namespace

void tma_load(const void* map_address, uint32_t dst, uint32_t bar, int x, int y, uint32_t ctas,
              const Where& where) {
  maybe_preempt();
  const TensorMap map = tensor_map_at(map_address, 2, where);
  // The hardware would take 128 bytes, with a pattern that does not begin where the box does.
  aligned(dst, map.swizzle_bytes(), "destination of a swizzled TMA load", where);
  first_column(x, map, where);
  Cta& own = here();
  const uint32_t targets = ctas == 0 ? 1u << own.rank_in_cluster : ctas;
  for (int rank = 0; rank < 16; ++rank) {
    if ((targets >> rank & 1) == 0) continue;
    Cta& cta = cta_of_cluster(rank, where);
    checked(cta, dst, map.box_bytes(), "TMA load", where);
    barrier_at(cta, bar, where);
    issue(false, [=, in_flight = InFlight(cta)] {
      Cta& to = *in_flight.cta;
      for_each_piece(map, {x, y, 0}, [&](int64_t offset, const uint8_t* address, int bytes) {
        if (address != nullptr) check_global(address, bytes, "TMA load", where);
        uint8_t piece[16] = {};
        if (address != nullptr) std::memcpy(piece, address, static_cast<size_t>(bytes));
        const uint32_t at = map.swizzled(dst + static_cast<uint32_t>(offset));
        async_write(to, at, 16, where);
        std::memcpy(to.memory + at, piece, 16);
      });
      complete_bytes(to, bar, map.box_bytes(), where);
    });
  }
}

// A copy from shared memory: reads at one moment, writes at a later one.
static void store_in_group(std::function<std::function<void()>()> read) {
  Fiber& fiber = self();
  Cta& cta = here();
  const std::shared_ptr<CopyGroup> group = open_group(fiber.open_bulk);
  ++group->reads;
  ++group->writes;
  Launch* const launch = cta.launch;
  ++launch->writes_in_flight;
  issue(false, [=, done = fiber.copies_done, read = std::move(read),
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
  });
}

void tma_store(const void* map_address, uint32_t src, int x, int y, int z, const Where& where) {
  maybe_preempt();
  const TensorMap map = tensor_map_at(map_address, 3, where);
  aligned(src, map.swizzle_bytes(), "source of a swizzled TMA store", where);
  first_column(x, map, where);
  checked(here(), src, map.box_bytes(), "TMA store", where);
  store_in_group([=, &fiber = self()] {
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
      async_read(*fiber.cta, at, 16, fiber, /*written_only=*/true, "TMA store", where);
      Piece piece = {const_cast<uint8_t*>(address), bytes, {}};
      std::memcpy(piece.data, fiber.cta->memory + at, 16);
      pieces.push_back(piece);
    });
    return [pieces = std::move(pieces)] {
      for (const Piece& piece : pieces) std::memcpy(piece.to, piece.data, static_cast<size_t>(piece.bytes));
    };
  });
}

void bulk_store(void* dst, uint32_t src, uint32_t bytes, const Where& where) {
  maybe_preempt();
  aligned(src | bytes | reinterpret_cast<uintptr_t>(dst), 16, "bulk copy", where);
  checked(here(), src, bytes, "bulk copy", where);
  check_global(dst, bytes, "bulk copy", where);
  store_in_group([=, &fiber = self()] {
    async_read(*fiber.cta, src, bytes, fiber, /*written_only=*/true, "bulk copy", where);
    const uint8_t* const from = fiber.cta->memory + src;
    return [dst, data = std::vector<uint8_t>(from, from + bytes)] {
      std::memcpy(dst, data.data(), data.size());
    };
  });
}

void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, const Where& where) {
  maybe_preempt();
  aligned(dst | bytes | reinterpret_cast<uintptr_t>(src), 16, "bulk copy", where);
  checked(here(), dst, bytes, "bulk copy", where);
  check_global(src, bytes, "bulk copy", where);
  issue(false, [=, in_flight = InFlight(here())] {
    async_write(*in_flight.cta, dst, static_cast<int>(bytes), where);
    std::memcpy(in_flight.cta->memory + dst, src, bytes);
    complete_bytes(*in_flight.cta, bar, bytes, where);
  });
}

void bulk_copy_cluster(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t bar, int cta,
                       const Where& where) {
  maybe_preempt();
  aligned(dst | src | bytes, 16, "bulk copy", where);
  Cta& to = cta_of_cluster(cta, where);
  checked(here(), src, bytes, "bulk copy", where);
  checked(to, dst, bytes, "bulk copy", where);
  issue(false, [=, from = InFlight(here()), into = InFlight(to), &fiber = self()] {
    async_read(*from.cta, src, bytes, fiber, /*written_only=*/false, "bulk copy", where);
    async_write(*into.cta, dst, static_cast<int>(bytes), where);
    // Padding may travel too: what was not written here is not written there.
    for (uint32_t i = 0; i < bytes / 16; ++i) {
      into.cta->granules[dst / 16 + i].written = from.cta->granules[src / 16 + i].written;
    }
    std::memcpy(into.cta->memory + dst, from.cta->memory + src, bytes);
    complete_bytes(*into.cta, bar, bytes, where);
  });
}

void store_async(uint32_t address, uint32_t value, uint32_t bar, int cta, const Where& where) {
  maybe_preempt();
  Cta& to = cta_of_cluster(cta, where);
  checked(to, address, 4, "st.async", where);
  issue(false, [=, into = InFlight(to)] {
    async_write(*into.cta, address, 4, where);
    std::memcpy(into.cta->memory + address, &value, 4);
    complete_bytes(*into.cta, bar, 4, where);
  });
}

void bulk_commit() {
  maybe_preempt();
  Fiber& fiber = self();
  fiber.bulk_groups.push_back(open_group(fiber.open_bulk));
  fiber.open_bulk = nullptr;
}

void bulk_wait(int pending, bool reads_only, const Where& where) {
  maybe_preempt();
  Fiber& fiber = self();
  const auto done = [&] {
    const int count = static_cast<int>(fiber.bulk_groups.size()) - pending;
    for (int i = 0; i < count; ++i) {
      const CopyGroup& group = *fiber.bulk_groups[static_cast<size_t>(i)];
      if ((reads_only ? group.reads : group.writes) > 0) return false;
    }
    return true;
  };
  while (!done()) wait_on(*fiber.copies_done, where, [] { return std::string("its bulk copies"); });
  // Only the oldest ones may go: newer ones count as pending even after they are done.
  auto& groups = fiber.bulk_groups;
  while (!groups.empty() && groups.front()->writes == 0) groups.erase(groups.begin());
}

// --- cp.async ---

void copy_async(uint32_t dst, const void* src, int bytes, bool valid, const Where& where) {
  maybe_preempt();
  aligned(dst | reinterpret_cast<uintptr_t>(valid ? src : nullptr), static_cast<uint64_t>(bytes), "cp.async",
          where);
  checked(here(), dst, bytes, "cp.async", where);
  if (valid) check_global(src, bytes, "cp.async", where);
  Fiber& fiber = self();
  const std::shared_ptr<CopyGroup> group = open_group(fiber.open_copies);
  ++group->writes;
  auto counted = std::make_shared<CopyGroup>();  // of this copy alone, for arrivals
  counted->writes = 1;
  fiber.all_copies.push_back(counted);
  issue(false, [=, in_flight = InFlight(here()), done = fiber.copies_done, thread = fiber.thread] {
    Cta& cta = *in_flight.cta;
    generic_write(cta, dst, bytes, thread, where);
    cta.granules[dst / 16].copied = true;
    if (valid) {
      std::memcpy(cta.memory + dst, src, static_cast<size_t>(bytes));
    } else {
      std::memset(cta.memory + dst, 0, static_cast<size_t>(bytes));
    }
    --group->writes;
    --counted->writes;
    done->wake_all();
  });
}

void copy_async_commit() {
  Fiber& fiber = self();
  fiber.copy_groups.push_back(open_group(fiber.open_copies));
  fiber.open_copies = nullptr;
}

void copy_async_wait(int pending, const Where& where) {
  maybe_preempt();
  Fiber& fiber = self();
  const auto done = [&] {
    const int count = static_cast<int>(fiber.copy_groups.size()) - pending;
    for (int i = 0; i < count; ++i) {
      if (fiber.copy_groups[static_cast<size_t>(i)]->writes > 0) return false;
    }
    return true;
  };
  while (!done()) wait_on(*fiber.copies_done, where, [] { return std::string("its cp.async"); });
}

// Arrives when the copies have landed: an operation that keeps itself with the adversary until then.
static void arrive_behind(std::vector<std::shared_ptr<CopyGroup>> copies, std::shared_ptr<InFlight> in_flight,
                          uint32_t bar, const Where& where) {
  for (const auto& copy : copies) {
    if (copy->writes == 0) continue;
    issue(false, [=] { arrive_behind(copies, in_flight, bar, where); });
    return;
  }
  arrive(*in_flight->cta, bar, where);
}

void mbarrier_arrive_after_copies(uint32_t bar, const Where& where) {
  maybe_preempt();
  barrier_at(here(), bar, where);
  arrive_behind(std::move(self().all_copies), std::make_shared<InFlight>(here()), bar, where);
  self().all_copies.clear();
}

void fence_proxy(const Where&) {
  maybe_preempt();
  self().fence_clock = ++machine.proxy_clock;
}

}  // namespace sim
