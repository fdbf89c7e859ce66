// Several ranks in one process: a symmetric buffer on each, and the record of its first error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ag_gemm/plan.h"
#include "case.h"
#include "gemm_rs/plan.h"
#include "runtime/symm_buffer.h"

namespace cases {

// Resets the machine. In a third of the runs a rank is late, if the caller names none.
// `cluster`: another kernel may hold all SMs but those of one cluster, until some rank has finished. 0: none does.
// `freezes`: some rank stands still, from some moment on, until the deadlines of the others have passed.
inline void start(uint64_t seed, int world_size, int resident, Random& random, int cluster = 0,
                  int late_rank = -1, bool freezes = false) {
  sim::MachineConfig machine = machine_of(seed, resident, world_size);
  if (cluster > 0 && random.below(3) == 0) {
    machine.occupied = random.below(resident - cluster + 1);
    machine.occupied_until = random.below(world_size);
  }
  machine.late_rank = late_rank >= 0 || random.below(3) != 0 ? late_rank : random.below(world_size);
  if (freezes) {
    machine.frozen_rank = random.below(world_size);
    machine.frozen_after = random.between(1, 30000);
  }
  sim::reset_machine(machine);
}

// The sizes of a case, for reports.
inline std::string words(int world_size, int m, int n, int k, DType dtype) {
  const sim::MachineConfig& machine = sim::machine.config;
  const bool late = machine.late_rank >= 0, occupied = machine.occupied > 0;
  return text(
      world_size, " ranks, ", late ? text("rank ", machine.late_rank, " late, ") : "", machine.resident,
      " resident, ",
      occupied ? text(machine.occupied, " occupied until rank ", machine.occupied_until, " is done, ") : "",
      m, " x ", n, k > 0 ? text(" x ", k) : "", name_of(dtype));
}

struct Sizes {
  int64_t signal_bytes = 0, slot_bytes = 0, exchange_bytes = 0;
};

// For every other seed: so many calls before the first one that epochs begin anew.
inline uint32_t epochs_before(uint64_t seed) { return seed % 2 == 0 ? ~1u : 0; }

// Of gemm_rs or ag_gemm.
template <class Layout>
Sizes sizes_of(const Layout& layout) {
  return {layout.num_signals() * 4, layout.slot_bytes(), 0};
}
inline Sizes exchange_sizes(int m, int n, int world_size, flux::runtime::Exchange::Mode mode) {
  const int whole =
      (m + world_size - 1) / world_size * world_size;  // in two launches, ranks share whole rows
  return {0, 0, flux::runtime::make_exchange(whole, n, world_size, mode).bytes() + 4096};
}

// How gemm_rs sends its tiles: copy engines do, in chunks, if the epoch is not 0.
inline flux::gemm_rs::Transport transport_of(const flux::gemm_rs::Layout& layout, int rank,
                                             uint32_t copy_epoch, int chunks) {
  if (copy_epoch == 0) return {};
  return {copy_epoch, chunks, allocate<char>(layout.slot_bytes(), rank, "staging")};
}

// A rank's rows of the sum of parts: what is sent is rounded, and what stays only if `rounds_own`.
inline Sums scattered(const std::vector<Sums>& parts, int rank, bool rounds_own, DType dtype,
                      const Values& bias) {
  Sums sum(parts[0].size() / parts.size());
  add(sum, bias.values);
  for (size_t source = 0; source < parts.size(); ++source) {
    const auto first = parts[source].begin() + rank * sum.size();
    const Sums part(first, first + sum.size());
    add(sum, source == rank && !rounds_own ? part : rounded(part, dtype));
  }
  return sum;
}

struct Ranks {
  std::vector<flux::runtime::SymmBuffer> symm;
  uint32_t before;  // epochs of earlier calls

  Ranks(int world_size, Sizes sizes, uint32_t before = 0) : symm(world_size), before(before) {
    const auto whole = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    sizes = {whole(sizes.signal_bytes + 4 * world_size), whole(sizes.slot_bytes),
             whole(sizes.exchange_bytes)};
    const int64_t bytes = flux::runtime::kHeaderBytes + sizes.signal_bytes + 2 * sizes.slot_bytes;
    std::vector<uint64_t> peers;
    for (int rank = 0; rank < world_size; ++rank) {
      void* const memory = sim::allocate(bytes + 2 * sizes.exchange_bytes, rank, "symmetric buffer");
      // Slots hold NaNs until peers write to them, as exchange buffers do.
      std::memset(memory, 0xFF, bytes + 2 * sizes.exchange_bytes);
      std::memset(memory, 0, flux::runtime::kHeaderBytes);
      static_cast<flux::runtime::Header*>(memory)->epoch = before;
      std::fill_n(reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + flux::runtime::kHeaderBytes),
                  sizes.signal_bytes / 4, before);
      sim::mark_written(memory, flux::runtime::kHeaderBytes + sizes.signal_bytes);
      sim::mark_written(static_cast<char*>(memory) + bytes, 2 * sizes.exchange_bytes);
      peers.push_back(reinterpret_cast<uint64_t>(memory));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      flux::runtime::SymmBuffer& mine = symm[rank];
      mine = {};
      mine.rank = rank;
      mine.world_size = world_size;
      for (int peer = 0; peer < world_size; ++peer) mine.peers[peer] = peers[peer];
      mine.signal_bytes = sizes.signal_bytes;
      mine.slot_bytes = sizes.slot_bytes;
      mine.exchange_bytes = sizes.exchange_bytes;
      mine.error = static_cast<flux::runtime::ErrorRecord*>(
          sim::allocate(sizeof(flux::runtime::ErrorRecord), rank, "error record"));
      std::memset(static_cast<void*>(mine.error), 0, sizeof(*mine.error));
      sim::mark_written(mine.error, sizeof(*mine.error));
      sim::machine.devices[rank].failure = &mine.header()->aborted;
      mine.timeout_ns = 2'000'000'000;
    }
  }

  // No rank has waited in vain.
  void expect_no_timeout() const {
    for (const auto& mine : symm) {
      if (mine.error->code == 0) continue;
      wrong("rank ", mine.rank, " has waited in vain for rank ", mine.error->peer, ": operation ",
            mine.error->op, ", tile ", mine.error->tile, ", expected ", mine.error->expected, ", seen ",
            mine.error->seen);
    }
  }

  void expect_done(uint32_t calls) const {
    expect_no_timeout();
    expect_rest(calls);
  }

  // Between calls every word of the exchange buffers is absent, and every counter is zero.
  void expect_rest(uint32_t calls) const {
    for (const auto& mine : symm) {
      const flux::runtime::Header& header = *mine.header();
      bool rests = header.epoch == before + calls && header.ctas_done == 0 && header.next_tile == 0 &&
                   header.next_piece == 0 && header.ctas_begun == 0 && header.next_share == 0 &&
                   header.aborted == 0;
      for (const uint32_t pieces : header.pieces_staged) rests &= pieces == 0;
      for (const uint32_t pieces : header.pieces_pushed) rests &= pieces == 0;
      if (!rests) wrong("the header of rank ", mine.rank, " is not as a call leaves it");
      const auto* words = reinterpret_cast<const uint32_t*>(mine.exchange(mine.rank, 0));
      for (int64_t i = 0; i < 2 * mine.exchange_bytes / 4; ++i) {
        if (words[i] != flux::runtime::kAbsent) {
          wrong("word ", i, " of the exchange buffers of rank ", mine.rank, " was not put back");
        }
      }
    }
  }
};

constexpr float kEps = 0.5f;  // of every RMSNorm

// The RMSNorm of rows of integers: sums of their squares are exact, so nothing depends on an order.
inline void expect_norm(const Values& out, const Sums& sum, const Values& weight, DType dtype) {
  std::vector<float> expected;
  for (int row = 0; row < out.rows; ++row) {
    float squares = 0.0f;
    const int* const values = &sum[row * out.columns];
    const auto element = [&](int column) { return rounded_to(values[column], dtype); };
    for (int column = 0; column < out.columns; ++column) squares += element(column) * element(column);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(out.columns) + kEps);
    for (int column = 0; column < out.columns; ++column) {
      const float weighted = scale * static_cast<float>(weight.values[column]);
      expected.push_back(element(column) * weighted);
    }
  }
  expect(out, expected, dtype, "norm");
}

}  // namespace cases
