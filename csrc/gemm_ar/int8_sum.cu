// ReduceScatter whose contributions travel as int8, with one scale for each 128 elements of a row (MegaScale-MoE, arXiv
// 2505.11432). A warp rounds four groups at a time straight into their owner's exchange area, and the owner adds what
// arrives in fp32, in rank order. The data is the signal (runtime/device/exchange.cuh).

#include "gemm_ar/all_reduce.cuh"
#include "operators.h"

namespace flux::gemm_ar {

constexpr int kInt8Threads = 512;

struct Int8SumParams {
  runtime::SymmBuffer symm;
  runtime::Int8Scatter scatter;
  const char* x;
  int64_t owner_bytes;  // from what x has for one owner to what it has for the next
  char* out;
  bool rounds_own;
};

// A lane's part of a unit: 16 elements of one group, in vectors that are adjacent over the lanes of the group.
template <class Element>
struct Int8Part {
  static constexpr int kElements = 16, kLanes = runtime::Int8Scatter::kGroup / kElements;
  static constexpr int kOfVector = sizeof(uint4) / sizeof(Element), kVectors = kElements / kOfVector;
  static constexpr int kMost = 127;

  int64_t first;  // of its elements
  int left;       // columns of the row from there on; none: the lane has nothing

  FLUX_DEVICE Int8Part(const runtime::Int8Scatter& scatter, int unit, int lane) {
    const int across = scatter.groups_of_row();
    const int group = unit * scatter.kUnitGroups + lane / kLanes;
    const int column = group % across * scatter.kGroup + lane % kLanes * kOfVector;
    first = static_cast<int64_t>(group / across) * scatter.n + column;
    left = group < scatter.groups() ? scatter.n - column : 0;
  }
  FLUX_DEVICE bool has(int vector = 0) const { return vector * kLanes * kOfVector < left; }
  FLUX_DEVICE int64_t offset(int vector) const {
    return (first + vector * kLanes * kOfVector) * static_cast<int64_t>(sizeof(Element));
  }

  FLUX_DEVICE void load(const char* matrix, uint4 (&v)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      v[i] = has(i) ? *reinterpret_cast<const uint4*>(matrix + offset(i)) : uint4{0, 0, 0, 0};
  }
  FLUX_DEVICE static void widen(const uint4 (&v)[kVectors], float (&f)[kElements]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (sizeof(Element) == sizeof(float)) {
        const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        for (int j = 0; j < 4; ++j) f[4 * i + j] = __uint_as_float(words[j]);
      } else {
        float wide[kOfVector];
        gemm::widen<Element>(v[i], wide);
        for (int j = 0; j < kOfVector; ++j) f[kOfVector * i + j] = wide[j];
      }
    }
  }
  FLUX_DEVICE void store(char* matrix, const float (&f)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!has(i)) break;
      uint4 v;
      if constexpr (sizeof(Element) == sizeof(float)) {
        v = {__float_as_uint(f[4 * i]), __float_as_uint(f[4 * i + 1]), __float_as_uint(f[4 * i + 2]),
             __float_as_uint(f[4 * i + 3])};
      } else {
        float values[kOfVector];
        for (int j = 0; j < kOfVector; ++j) values[j] = f[kOfVector * i + j];
        v = gemm::round<Element>(values);
      }
      *reinterpret_cast<uint4*>(matrix + offset(i)) = v;
    }
  }

  FLUX_DEVICE static float scale_of(const float (&f)[kElements]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) largest = gemm::larger(largest, fabsf(f[i]));
    return gemm::scale_to(kMost, gemm::largest_over_lanes<kLanes>(largest));
  }
  // A group whose scale is not finite has zeros: a conversion makes 0 of NaN.
  FLUX_DEVICE static uint4 rounded(const float (&f)[kElements], float scale) {
    const float inverse = 1.0f / scale;
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      words[i / 4] |= static_cast<uint32_t>(__float2int_rn(f[i] * inverse) + kMost) << i % 4 * 8;
    return {words[0], words[1], words[2], words[3]};
  }
  // Without contraction: a product is rounded before it is added.
  FLUX_DEVICE static void add(const uint4& v, float scale, float (&sum)[kElements]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int q = static_cast<int>(words[i / 4] >> i % 4 * 8 & 0xFF) - kMost;
      sum[i] += __fmul_rn(static_cast<float>(q), scale);
    }
  }
};

template <class Element>
struct Int8Sum {
  using Part = Int8Part<Element>;
  static constexpr int kSources = 4;  // whose vectors are in flight

  const Int8SumParams& p;
  const sync::Call call;
  const int lane = threadIdx.x % 32, rank = p.symm.rank;

  FLUX_DEVICE const char* mine(int owner) const { return p.x + owner * p.owner_bytes; }

  FLUX_DEVICE void send(int owner, int unit) const {
    const Part part(p.scatter, unit, lane);
    uint4 v[Part::kVectors];
    float values[Part::kElements];
    part.load(mine(owner), v);
    Part::widen(v, values);
    const float scale = Part::scale_of(values);
    const auto of_group = [&](int group) {
      return __float_as_uint(__shfl_sync(0xFFFFFFFF, scale, group * Part::kLanes));
    };
    const uint4 scales = {of_group(0), of_group(1), of_group(2), of_group(3)};
    char* const area = p.symm.exchange(owner, call.epoch);
    if (part.has()) {
      ptx::store_relaxed_sys(area + p.scatter.numbers(rank, unit) + lane * sizeof(uint4),
                             Part::rounded(values, scale));
    }
    if (lane == 0) ptx::store_relaxed_sys(area + p.scatter.scales(rank, unit), scales);
  }

  // Sums a unit of this rank's rows. Lane i waits for the scales of the i-th source in flight.
  FLUX_DEVICE void sum(int unit) const {
    const Part part(p.scatter, unit, lane);
    char* const area = p.symm.exchange(rank, call.epoch);
    const auto info = [&](int source) -> sync::WaitInfo {
      return {runtime::kReduceScatter, static_cast<uint32_t>(source), static_cast<uint32_t>(unit)};
    };
    uint4 own[Part::kVectors];
    part.load(mine(rank), own);
    float total[Part::kElements] = {};
#pragma unroll 1
    for (int first = 0; first < p.symm.world_size; first += kSources) {
      const auto travels = [&](int source) { return source < p.symm.world_size && source != rank; };
      uint4 arrived[kSources], scales = {0, 0, 0, 0};
      const bool takes_scales = lane < kSources && travels(first + lane);
      char* const scales_at = area + p.scatter.scales(first + lane, unit);
      if (takes_scales) scales = ptx::load_relaxed_sys(scales_at);
      const auto numbers_at = [&](int source) {
        return area + p.scatter.numbers(source, unit) + lane * sizeof(uint4);
      };
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (part.has() && travels(first + i)) arrived[i] = ptx::load_relaxed_sys(numbers_at(first + i));
      }
      if (takes_scales) scales = exchange::take(p.symm, call, scales_at, scales, info(first + lane));
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int source = first + i;
        if (source == rank) add_own(own, total);
        if (!travels(source)) continue;
        const uint4 of_groups = {__shfl_sync(0xFFFFFFFF, scales.x, i), __shfl_sync(0xFFFFFFFF, scales.y, i),
                                 __shfl_sync(0xFFFFFFFF, scales.z, i), __shfl_sync(0xFFFFFFFF, scales.w, i)};
        if (!part.has()) continue;
        const int group = lane / Part::kLanes;
        const uint32_t lower = group == 0 ? of_groups.x : of_groups.y;
        const uint32_t upper = group == 2 ? of_groups.z : of_groups.w;
        uint32_t scale = group < 2 ? lower : upper;
        const uint4 v = exchange::take(p.symm, call, numbers_at(source), arrived[i], info(source));
        if (!exchange::is_whole(v)) scale = runtime::kAbsent;  // after a timeout: NaN
        Part::add(v, __uint_as_float(scale), total);
      }
    }
    part.store(p.out, total);
  }

 private:
  FLUX_DEVICE void add_own(const uint4 (&own)[Part::kVectors], float (&total)[Part::kElements]) const {
    float values[Part::kElements];
    Part::widen(own, values);
    if (p.rounds_own) {
      const float scale = Part::scale_of(values);
      Part::add(Part::rounded(values, scale), scale, total);
      return;
    }
#pragma unroll
    for (int i = 0; i < Part::kElements; ++i) total[i] += values[i];
  }
};

template <class Element>
__global__ void __launch_bounds__(kInt8Threads + kClosingThreads, 1)
    sum_int8_over_ranks(const __grid_constant__ Int8SumParams params) {
  const sync::Call call = begin_sum(params.symm);
  if (threadIdx.x >= kInt8Threads) return;
  const Int8Sum<Element> sums = {params, call};
  const auto for_each_unit = [&](auto use) {
    constexpr int kWarps = kInt8Threads / 32;
#pragma unroll 1
    for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < params.scatter.units();
         unit += gridDim.x * kWarps) {
      use(unit);
    }
  };
  if (!call.aborted) {
    exchange::for_each_peer(params.symm,
                            [&](int owner) { for_each_unit([&](int unit) { sums.send(owner, unit); }); });
  }
  for_each_unit([&](int unit) { sums.sum(unit); });
}

static runtime::Kernels kernels([] {
  runtime::load(sum_int8_over_ranks<__nv_bfloat16>, sum_int8_over_ranks<__half>, sum_int8_over_ranks<float>);
});

void reduce_scatter_int8(const void* x, int64_t owner_stride, const runtime::Matrix& out,
                         runtime::DType dtype, const runtime::SymmBuffer& symm, int num_sms, bool rounds_own,
                         cudaStream_t stream) {
  const bool is_float = dtype == runtime::DType::kFloat32;
  const auto kernel = is_float                      ? sum_int8_over_ranks<float>
                      : runtime::is_bfloat16(dtype) ? sum_int8_over_ranks<__nv_bfloat16>
                                                    : sum_int8_over_ranks<__half>;
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  FLUX_CHECK(out.columns % runtime::Exchange::kVector == 0 && out.row_stride == out.columns, out.columns,
             out.row_stride);
  FLUX_CHECK(owner_stride % runtime::Exchange::kVector == 0, owner_stride);
  FLUX_CHECK(out.rows > 0 && out.rows * (out.columns / runtime::Int8Scatter::kGroup + 1) <= INT32_MAX / 8,
             out.rows, out.columns);
  const runtime::Int8Scatter scatter = {static_cast<int>(out.rows), static_cast<int>(out.columns),
                                        symm.world_size};
  FLUX_CHECK(scatter.bytes() <= symm.exchange_bytes, scatter.bytes(), symm.exchange_bytes);
  kernels.load();
  const Int8SumParams params = {.symm = symm,
                                .scatter = scatter,
                                .x = static_cast<const char*>(x),
                                .owner_bytes = owner_stride * runtime::element_bytes(dtype),
                                .out = static_cast<char*>(const_cast<void*>(out.data)),
                                .rounds_own = rounds_own};
  constexpr int kWarps = kInt8Threads / 32;
  num_sms = runtime::usable_sms(num_sms);
  runtime::Launch(std::min(num_sms, (scatter.units() + kWarps - 1) / kWarps), kInt8Threads + kClosingThreads,
                  0, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, params);
}

}  // namespace flux::gemm_ar
