// The wgmma atoms that csrc/gemm/wgmma.cuh names, as calls of the engine. A further operand type is a further
// sim::Element and a further line of FLUX_SIM_ATOMS.
#pragma once

#include <cstdint>

#include "sim.h"

namespace cute {

namespace SM90::GMMA {

enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };

template <int kN, sim::Element kElement, Major kMajorA, Major kMajorB>
struct SimAtom {
  // The accumulators of a thread are neighbours in memory, as Wgmma::step passes an array.
  template <class... More>
  static void fma(uint64_t a, uint64_t b, float& first, More&... more) {
    constexpr int kCount = sizeof...(more);  // without the first, with the scale
    static_assert(kCount == kN / 2);
    call(a, b, &first, more...);
  }

 private:
  template <class... More>
  static void call(uint64_t a, uint64_t b, float* d, More&... more) {
    ScaleOut scale = ScaleOut::One;
    ((scale = last(more, scale)), ...);
    sim::wgmma({kN, kElement, kMajorA == Major::MN, kMajorB == Major::MN}, a, b, d, scale == ScaleOut::One);
  }
  static ScaleOut last(float&, ScaleOut scale) { return scale; }
  static ScaleOut last(ScaleOut& scale, ScaleOut) { return scale; }
};

#define FLUX_SIM_ATOMS(n)                                                                       \
  template <Major kMajorA, Major kMajorB>                                                       \
  using MMA_64x##n##x16_F32BF16BF16_SS = SimAtom<n, sim::Element::kBFloat16, kMajorA, kMajorB>; \
  template <Major kMajorA, Major kMajorB>                                                       \
  using MMA_64x##n##x16_F32F16F16_SS = SimAtom<n, sim::Element::kFloat16, kMajorA, kMajorB>;
FLUX_SIM_ATOMS(8)
FLUX_SIM_ATOMS(16)
FLUX_SIM_ATOMS(32)
FLUX_SIM_ATOMS(64)
FLUX_SIM_ATOMS(80)
FLUX_SIM_ATOMS(96)
FLUX_SIM_ATOMS(112)
FLUX_SIM_ATOMS(128)
FLUX_SIM_ATOMS(160)
FLUX_SIM_ATOMS(192)
FLUX_SIM_ATOMS(224)
FLUX_SIM_ATOMS(256)
#undef FLUX_SIM_ATOMS

}  // namespace SM90::GMMA

inline void warpgroup_arrive() { sim::wgmma_fence(); }
inline void warpgroup_commit_batch() { sim::wgmma_commit(); }
template <int kPending>
void warpgroup_wait() {
  sim::wgmma_wait(kPending);
}
inline void warpgroup_fence_operand(float&) {}

}  // namespace cute
