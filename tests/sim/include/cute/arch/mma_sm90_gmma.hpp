// The wgmma atoms that csrc/gemm/sm90/mainloop.cuh names, as calls of the engine. A further operand type is a further
// sim::Element and a further line of FLUX_SIM_ATOMS.
#pragma once

#include <cstdint>

#include "sim.h"

namespace cute {

namespace SM90::GMMA {

enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };
enum class ScaleIn { Neg = -1, One = 1 };

template <int kN, sim::Element kElementA, sim::Element kElementB, Major kMajorA, Major kMajorB>
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
    sim::wgmma({kN, kElementA, kElementB, kMajorA == Major::MN, kMajorB == Major::MN}, a, b, d,
               scale == ScaleOut::One);
  }
  static ScaleOut last(float&, ScaleOut scale) { return scale; }
  static ScaleOut last(ScaleOut& scale, ScaleOut) { return scale; }
};

template <int kN, sim::Element kA, sim::Element kB>
using SimKMajorAtom = SimAtom<kN, kA, kB, Major::K, Major::K>;

#define FLUX_SIM_FP8_ATOM(n, name, a, b)                    \
  template <ScaleIn = ScaleIn::One, ScaleIn = ScaleIn::One> \
  using MMA_64x##n##x32_F32##name##_SS_TN = SimKMajorAtom<n, sim::Element::a, sim::Element::b>;
#define FLUX_SIM_ATOMS(n)                                                             \
  template <Major kMajorA, Major kMajorB>                                             \
  using MMA_64x##n##x16_F32BF16BF16_SS =                                              \
      SimAtom<n, sim::Element::kBFloat16, sim::Element::kBFloat16, kMajorA, kMajorB>; \
  template <Major kMajorA, Major kMajorB>                                             \
  using MMA_64x##n##x16_F32F16F16_SS =                                                \
      SimAtom<n, sim::Element::kFloat16, sim::Element::kFloat16, kMajorA, kMajorB>;   \
  FLUX_SIM_FP8_ATOM(n, E4M3E4M3, kE4M3, kE4M3)                                        \
  FLUX_SIM_FP8_ATOM(n, E5M2E4M3, kE5M2, kE4M3)                                        \
  FLUX_SIM_FP8_ATOM(n, E4M3E5M2, kE4M3, kE5M2)
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
#undef FLUX_SIM_FP8_ATOM

}  // namespace SM90::GMMA

inline void warpgroup_arrive() { sim::wgmma_fence(); }
inline void warpgroup_commit_batch() { sim::wgmma_commit(); }
template <int kPending>
void warpgroup_wait() {
  sim::wgmma_wait(kPending);
}
inline void warpgroup_fence_operand(float&) {}

}  // namespace cute
