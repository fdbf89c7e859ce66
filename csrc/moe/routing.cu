// Routing on the GPU: a counting sort of (token, expert) pairs by expert, stable in the order of steps and
// tokens. Each CTA takes kThreads tokens of one source, a thread a token. Within a warp the order is found from
// one word for each expert, in which each lane that chose it sets its bit; between warps and CTAs from counts.
// So nothing depends on who comes first. One grid-wide barrier separates counting from placing; one CTA more
// makes the tile schedule meanwhile.
#include <cooperative_groups.h>

#include "moe/moe.h"
#include "runtime/check.h"
#include "runtime/device.h"

namespace flux::moe {
namespace {

constexpr int kThreads = kRouteThreads;
constexpr int kWarps = kThreads / 32;

// Of the tokens of one CTA, those that a slice of experts needs.
struct Needed {
  int count;
  int end;  // one behind the last of them, counted from the source's first token
};

struct Params {
  Layout layout;
  int block_m;
  int chunks;  // CTAs for each source
  const int32_t* ids;
  RoutingArrays out;
  int32_t* histograms;  // [step][chunk][expert]
  Needed* needed;       // [step][chunk][slice]
};

struct Shared {
  uint32_t* lanes;  // [warp][expert]: which lanes chose it
  int32_t* before;  // [warp][expert]: how many of the CTA's earlier warps' tokens did
  int32_t* first;   // [expert]: row of the CTA's first token there

  __device__ static Shared carve(void* memory, int experts) {
    auto* lanes = static_cast<uint32_t*>(memory);
    auto* before = reinterpret_cast<int32_t*>(lanes + kWarps * experts);
    return {lanes, before, before + kWarps * experts};
  }
  __host__ __device__ static constexpr int bytes(int experts) { return (2 * kWarps + 1) * experts * 4; }
};

// The token of a thread.
struct Place {
  int step, source, chunk, token;
  bool valid;
  uint32_t slices;  // bit s: slice s needs it
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }
__device__ __forceinline__ uint32_t lanes_before() { return (1u << lane_id()) - 1; }

// Sum of the values of all threads before this one; all threads take part. `total`: of all.
__device__ int block_scan(int value, int* total) {
  __shared__ int warp_sums[kWarps];
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane_id() >= distance) sum += other;
  }
  if (lane_id() == 31) warp_sums[warp_id()] = sum;
  __syncthreads();
  int before = 0;
  *total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == warp_id()) before = *total;
    *total += warp_sums[warp];
  }
  __syncthreads();  // warp_sums is about to be written again
  return before + sum - value;
}

// Replaces values by the sums of those before; returns the sum of all.
__device__ int scan_array(int32_t* values, int count) {
  int carry = 0;
  for (int begin = 0; begin < count; begin += kThreads) {
    const int i = begin + static_cast<int>(threadIdx.x);
    int total;
    const int before = block_scan(i < count ? values[i] : 0, &total);
    if (i < count) values[i] = carry + before;
    carry += total;
  }
  __syncthreads();
  return carry;
}

__device__ __forceinline__ const int32_t* choices(const Params& p, const Place& place) {
  return p.ids + (static_cast<int64_t>(place.source) * p.layout.max_tokens + place.token) * p.layout.top_k;
}

__device__ Place count_tokens(const Params& p, const Shared& shared, uint32_t (*ballots)[kWarps]) {
  const Layout& layout = p.layout;
  const int experts = layout.local_experts(), slice = layout.slice_of(layout.rank);
  Place place;
  place.step = blockIdx.x / p.chunks;
  place.chunk = blockIdx.x % p.chunks;
  place.source = layout.source_at(place.step);
  place.token = place.chunk * kThreads + static_cast<int>(threadIdx.x);
  place.valid = place.token < layout.max_tokens;
  place.slices = 0;

  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) shared.lanes[i] = 0;
  __syncthreads();
  if (place.valid) {
    const int32_t* ids = choices(p, place);
    for (int j = 0; j < layout.top_k; ++j) {
      const int id = ids[j];
      if (id < 0 || id >= layout.num_experts) continue;
      place.slices |= 1u << id / experts;
      const int local = layout.local_expert(id, slice);
      if (local >= 0) atomicOr(&shared.lanes[warp_id() * experts + local], 1u << lane_id());
    }
  }
  for (int s = 0; s < layout.ep_size; ++s) {
    const uint32_t ballot = __ballot_sync(~0u, place.slices >> s & 1);
    if (lane_id() == 0) ballots[s][warp_id()] = ballot;
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      shared.before[warp * experts + expert] = sum;
      sum += __popc(shared.lanes[warp * experts + expert]);
    }
    p.histograms[static_cast<int64_t>(blockIdx.x) * experts + expert] = sum;
  }
  if (static_cast<int>(threadIdx.x) < layout.ep_size) {
    Needed needed = {0, 0};
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint32_t ballot = ballots[threadIdx.x][warp];
      needed.count += __popc(ballot);
      if (ballot != 0) needed.end = place.chunk * kThreads + warp * 32 + 32 - __clz(ballot);
    }
    p.needed[blockIdx.x * layout.ep_size + threadIdx.x] = needed;
  }
  return place;
}

// The row at which each expert's tokens of this CTA begin.
__device__ void find_first_rows(const Params& p, const Shared& shared) {
  const int experts = p.layout.local_experts(), ctas = p.layout.world_size * p.chunks;
  for (int begin = 0, carry = 0; begin < experts; begin += kThreads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    int before = 0, all = 0;
    if (expert < experts) {
#pragma unroll 8
      for (int cta = 0; cta < ctas; ++cta) {
        const int count = __ldcg(&p.histograms[static_cast<int64_t>(cta) * experts + expert]);
        if (cta < static_cast<int>(blockIdx.x)) before += count;
        all += count;
      }
    }
    int total;
    const int offset = carry + block_scan(all, &total);
    if (expert < experts) shared.first[expert] = offset + before;
    carry += total;
  }
  __syncthreads();
}

// number_tokens of routing.h, for the token of this thread; returns its slot row. `slots` may be null.
__device__ int number_token(const Params& p, const Place& place, const uint32_t (*ballots)[kWarps], int slice,
                            bool compact, int32_t* slots, int32_t* tokens, int32_t* extent) {
  int before = 0, count = 0, end = 0;
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const int cta = place.step * p.chunks + chunk;
    const int2 needed = __ldcg(reinterpret_cast<const int2*>(&p.needed[cta * p.layout.ep_size + slice]));
    if (chunk < place.chunk) before += needed.x;
    count += needed.x;
    end = max(end, needed.y);
  }
  if (place.chunk == 0 && threadIdx.x == 0) *extent = compact ? count : end;
  if (!place.valid) return -1;
  int slot = -1;
  if (place.slices >> slice & 1) {
    slot = place.token;
    if (compact) {
      slot = before + __popc(ballots[slice][warp_id()] & lanes_before());
      for (int warp = 0; warp < warp_id(); ++warp) slot += __popc(ballots[slice][warp]);
    }
  }
  if (slots != nullptr) slots[place.token] = slot;
  if (!compact) {
    tokens[place.token] = slot;
  } else {
    if (slot >= 0) tokens[slot] = place.token;
    if (place.token >= count) tokens[place.token] = -1;  // nobody else's slot row
  }
  return slot;
}

__device__ void place_tokens(const Params& p, const Place& place, const Shared& shared,
                             const uint32_t (*ballots)[kWarps]) {
  const Layout& layout = p.layout;
  const int experts = layout.local_experts(), slice = layout.slice_of(layout.rank);
  const int64_t begin = static_cast<int64_t>(place.source) * layout.max_tokens;
  const int slot = number_token(p, place, ballots, slice, layout.compacts(place.source, layout.rank), nullptr,
                                p.out.incoming + begin, p.out.received + place.source);
  if (place.valid) {
    const int32_t* ids = choices(p, place);
    int32_t* positions = p.out.positions + (begin + place.token) * layout.top_k;
    for (int j = 0; j < layout.top_k; ++j) {
      const int expert = layout.local_expert(ids[j], slice);
      int row = -1;
      if (expert >= 0) {
        const int at = warp_id() * experts + expert;
        row = shared.first[expert] + shared.before[at] + __popc(shared.lanes[at] & lanes_before());
        p.out.rows[row] = static_cast<int32_t>(begin) + slot;
      }
      positions[j] = row;
    }
  }
  if (place.step != 0) return;
  for (int to = 0; to < layout.ep_size; ++to) {
    const int64_t area = static_cast<int64_t>(to) * layout.max_tokens;
    number_token(p, place, ballots, to, layout.ep_size > 1, p.out.sent + area, p.out.outgoing + area,
                 p.out.sending + to);
  }
}

// By a CTA that has no tokens: offsets, counts, the tile schedule, and what lies behind the last row.
__device__ void make_schedule(const Params& p, const Shared& shared) {
  const Layout& layout = p.layout;
  const int experts = layout.local_experts(), steps = layout.world_size;
  // Memory that the other CTAs use otherwise.
  static_assert(kWarps >= 5);
  int32_t* rows = shared.first;
  int32_t* arrived = shared.before;
  int32_t* first_m = arrived + experts;
  int32_t* sizes = first_m + experts;
  int32_t* bases = sizes + experts;
  int32_t* offsets = bases + experts;

  for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
    int sum = 0;
    for (int step = 0; step < steps; ++step) {
      int count = 0;
#pragma unroll 8
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const int64_t cta = step * p.chunks + chunk;
        count += __ldcg(&p.histograms[cta * experts + expert]);
      }
      p.out.counts[expert * steps + step] = count;
      sum += count;
    }
    rows[expert] = offsets[expert] = sum;
    arrived[expert] = 0;
  }
  __syncthreads();
  const int num_rows = scan_array(offsets, experts);
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
    p.out.offsets[expert] = offsets[expert];
  }
  if (threadIdx.x == 0) p.out.offsets[experts] = num_rows;

  int base = 0;
  for (int phase = 0, step = 0; phase < layout.phases(); step = layout.last_step(phase++) + 1) {
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
      first_m[expert] = complete_tiles(arrived[expert], rows[expert], p.block_m);
      for (int s = step; s <= layout.last_step(phase); ++s) {
        arrived[expert] += p.out.counts[expert * steps + s];  // this thread has written it
      }
      sizes[expert] = complete_tiles(arrived[expert], rows[expert], p.block_m) - first_m[expert];
      bases[expert] = sizes[expert];
    }
    __syncthreads();
    const int count = scan_array(bases, experts);
    for (int expert = warp_id(); expert < experts; expert += kWarps) {
      for (int i = lane_id(); i < sizes[expert]; i += 32) {
        const int begin = base + bases[expert];
        p.out.tiles[begin + i] = make_entry(expert, first_m[expert], sizes[expert], begin, i);
      }
    }
    base += count;
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.out.num_tiles = base;
  for (int i = base + static_cast<int>(threadIdx.x); i < layout.max_tiles(p.block_m); i += kThreads) {
    p.out.tiles[i] = {0, 0, 0, 0};
  }
  for (int i = num_rows + static_cast<int>(threadIdx.x); i < layout.max_rows(); i += kThreads) {
    p.out.rows[i] = -1;
  }
}

__global__ void __launch_bounds__(kThreads, 1) routing_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t smem[];
  __shared__ uint32_t ballots[kMaxSteps][kWarps];
  const Shared shared = Shared::carve(smem, p.layout.local_experts());
  const bool has_tokens = static_cast<int>(blockIdx.x) < p.layout.world_size * p.chunks;
  Place place;
  if (has_tokens) place = count_tokens(p, shared, ballots);
  cooperative_groups::this_grid().sync();
  if (!has_tokens) {
    make_schedule(p, shared);
    return;
  }
  find_first_rows(p, shared);
  place_tokens(p, place, shared, ballots);
}

}  // namespace

void route(const Layout& layout, int block_m, const int32_t* ids, const RoutingArrays& out, int32_t* scratch,
           cudaStream_t stream) {
  const int experts = layout.local_experts(), ctas = route_ctas(layout);
  FLUX_CHECK(experts <= kMaxRouteExperts, experts);
  prepare_route();
  // Pairs of words that are read at once start at even ones.
  const int64_t words = static_cast<int64_t>(ctas - 1) * experts;
  Params params = {layout,
                   block_m,
                   route_chunks(layout),
                   ids,
                   out,
                   scratch,
                   reinterpret_cast<Needed*>(scratch + words + words % 2)};
  void* arguments[] = {&params};
  // Cooperative: the launch fails, instead of waiting for ever, if not all CTAs fit on the GPU at once.
  FLUX_CUDA_CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&routing_kernel), ctas, kThreads,
                                              arguments, Shared::bytes(experts), stream));
}

void prepare_route() {
  static runtime::OncePerDevice once;
  once([] {
    FLUX_CUDA_CHECK(cudaFuncSetAttribute(routing_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         Shared::bytes(kMaxRouteExperts)));
  });
}

}  // namespace flux::moe
