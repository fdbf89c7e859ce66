// Compiles the kernels of a family where `template class KernelTable<Family>` stands (csrc/instances: in parallel).
#pragma once

#include "gemm/sm90/launch.cuh"

namespace flux::gemm {

template <class Family>
KernelTable<Family>& KernelTable<Family>::table() {
  static KernelTable table{std::make_integer_sequence<int, Family::kTiles>()};
  return table;
}

template <class Family>
runtime::Kernels KernelTable<Family>::loaded_([] { table().raise_limits(); });

template <class Family>
KernelTable<Family>& KernelTable<Family>::on_current_device() {
  loaded_.load();
  return table();
}

}  // namespace flux::gemm
