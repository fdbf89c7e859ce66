// Argument checks of flux._core, before it multiplies, divides or indexes. Sizes are checked. Addresses are trusted,
// because C++ cannot check what they point to.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "gemm/tile_config.h"
#include "runtime/symm_buffer.h"

namespace flux::bindings {

constexpr int kMaxExtent =
    (1 << 30) - 1;  // maximum of M, N and K: the bytes of a row of 2-byte elements fit into 32 bits
// Maximum number of tiles of a problem: three CTAs for each, counted in tenths, fit into 32 bits.
constexpr int64_t kMaxTiles = 1 << 26;
constexpr int64_t kMaxListed = 1 << 21;  // maximum length of a returned list
constexpr int kMaxSms = 1 << 16;

// Throws ValueError unless low <= value <= high.
inline void check_range(const std::string& what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw pybind11::value_error(what + ": expected " + std::to_string(low) + " to " + std::to_string(high) +
                                ", got " + std::to_string(value));
  }
}

inline void check_extent(const std::string& what, int64_t value) { check_range(what, value, 1, kMaxExtent); }

// An index of one of `count` things.
inline void check_index(const std::string& what, int64_t index, int64_t count) {
  check_range(what, index, 0, count - 1);
}

inline void check_multiple(const std::string& what, int64_t value, const std::string& of, int64_t divisor) {
  if (value % divisor != 0) {
    throw pybind11::value_error(what + ": expected a multiple of " + of + ", got " + std::to_string(value));
  }
}

inline uint64_t checked_word(const char* what, uint64_t address) {
  if (address == 0 || address % sizeof(uint32_t) != 0) {
    throw pybind11::value_error(std::string(what) + ": expected an address, a non-null multiple of 4, got " +
                                std::to_string(address));
  }
  return address;
}

inline void check_world_size(int world_size) {
  check_range("world_size", world_size, 1, runtime::kMaxWorldSize);
}

// Wraps a member function that takes a rank, and checks the rank.
template <class Layout, int (Layout::*of)(int) const>
int of_rank(const Layout& self, int rank) {
  check_index("rank", rank, self.world_size);
  return (self.*of)(rank);
}

// Checks a matrix whose rows are one shard for each rank.
inline void check_shards(int m, const char* columns_name, int columns, int world_size) {
  check_world_size(world_size);
  check_extent("m", m);
  check_extent(columns_name, columns);
  check_multiple("m", m, "world_size " + std::to_string(world_size), world_size);
}

// Checks the result of a GEMM: at most kMaxTiles tiles of 64 columns, the narrowest.
inline void check_problem(int m, int n, int world_size) {
  check_shards(m, "n", n, world_size);
  const int64_t m_tiles = gemm::ceil_div(m / world_size, gemm::kBlockM);
  check_range("tiles of [m, n]", world_size * m_tiles * gemm::ceil_div(n, 64), 1, kMaxTiles);
}

// The index of the slot of `src` on `owner`. A rank has no slot for itself.
inline int checked_slot_index(int src, int owner) {
  check_index("src", src, runtime::kMaxWorldSize);
  check_index("owner", owner, runtime::kMaxWorldSize);
  if (src == owner)
    throw pybind11::value_error("src: expected another rank than owner " + std::to_string(owner));
  return runtime::slot_index(src, owner);
}

}  // namespace flux::bindings
