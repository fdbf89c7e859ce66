// What a tensor map of this machine contains.
#pragma once

#include "machine.h"

namespace sim {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x464C5558544D4150;
  uint64_t magic;
  uint8_t* base;
  int64_t sizes[3];    // elements
  int64_t strides[2];  // bytes
  uint32_t box[3];
  uint8_t rank, element_bytes, swizzle_bits;

  int64_t box_bytes() const { return static_cast<int64_t>(box[0]) * box[1] * box[2] * element_bytes; }
  uint32_t swizzle_bytes() const { return 128u << swizzle_bits; }  // after which its pattern repeats
  // 16-byte pieces are exchanged within 128 bytes, by the number of the 128 bytes within 1024.
  uint32_t swizzled(uint32_t address) const {
    const uint32_t mask = (1u << swizzle_bits) - 1;
    return address ^ (address >> 7 & mask) << 4;
  }
};
static_assert(sizeof(TensorMap) <= 128);

inline TensorMap tensor_map_at(const void* address, int rank, const Where& where) {
  const TensorMap map = *static_cast<const TensorMap*>(address);
  if (map.magic != TensorMap::kMagic) fail(where, "not a tensor map");
  if (map.rank != rank) fail(where, "tensor map of another rank");
  return map;
}

}  // namespace sim
