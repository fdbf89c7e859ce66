// Routing on the GPU: ranks tell each other what their tokens chose, and sort (token, expert) pairs by expert, a
// counting sort that is stable in the order of steps and tokens. Each CTA takes kThreads tokens of one source, a
// thread a token: those of this rank are first sent to all peers, those of a peer are waited for. Within a warp the
// order is found from one word for each expert, in which each lane that chose it sets its bit; between warps and
// CTAs from counts. So nothing depends on who comes first. One grid-wide barrier separates counting from placing;
// one CTA more makes the tile schedule meanwhile.
#include <cooperative_groups.h>

#include "moe/choices.cuh"
#include "runtime/check.h"
#include "runtime/device.h"

namespace flux::moe {
namespace {

// Of the tokens of one CTA, those that a slice of experts needs.
struct Needed {
  int count;
  int end;  // one behind the last of them, counted from the source's first token
};

struct Params : ChoiceParams {
  int block_m;
  int chunks;      // CTAs for each source
  bool exchanges;  // else there are no peers, or no tokens
  RoutingArrays out;
  int32_t* histograms;  // [step][chunk][expert]
  Needed* needed;       // [step][chunk][slice]
};

// What a CTA does for kThreads tokens of one source.
template <int kThreads>
struct Cta {
  static constexpr int kWarps = kThreads / 32;

  struct Shared {
    // Rows of each: the CTA that makes the schedule needs some for its own ends.
    static constexpr int kRows = kWarps < kMaxSteps ? kMaxSteps : kWarps;
    uint32_t* lanes;  // [warp][expert]: which lanes chose it
    int32_t* before;  // [warp][expert]: how many of the CTA's earlier warps' tokens did
    int32_t* first;   // [expert]: row of the CTA's first token there

    __device__ static Shared carve(void* memory, int experts) {
      auto* lanes = static_cast<uint32_t*>(memory);
      auto* before = reinterpret_cast<int32_t*>(lanes + kRows * experts);
      return {lanes, before, before + kRows * experts};
    }
    __host__ __device__ static constexpr int bytes(int experts) { return (2 * kRows + 1) * experts * 4; }
  };

  // The token of a thread.
  struct Place {
    int step, source, chunk, token;
    bool valid;
    int32_t ids[kMaxTopK];  // its experts
    uint32_t slices;        // bit s: slice s needs it
  };

  __device__ __forceinline__ static int lane_id() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_id() { return threadIdx.x / 32; }
  __device__ __forceinline__ static uint32_t lanes_before() { return (1u << lane_id()) - 1; }

  // Sum of the values of all threads before this one; all threads take part. `total`: of all.
  __device__ static int block_scan(int value, int* total) {
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
  __device__ static int scan_array(int32_t* values, int count) {
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

  // ---- counting -------------------------------------------------------------------------------------------------

  __device__ static Place count_tokens(const Params& p, const sync::Call& call, const Shared& shared,
                                       uint32_t (*ballots)[kWarps]) {
    const Layout& layout = p.layout;
    const int experts = layout.local_experts(), slice = layout.slice_of(layout.rank);
    Place place;
    place.step = blockIdx.x / p.chunks;
    place.chunk = blockIdx.x % p.chunks;
    place.source = layout.source_at(place.step);
    place.token = place.chunk * kThreads + static_cast<int>(threadIdx.x);
    place.valid = place.token < layout.max_tokens;
    place.slices = 0;

    if (p.exchanges && place.step == 0) tell_peers<kThreads>(p, call, place.chunk * kThreads);
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) shared.lanes[i] = 0;
    learn_choices(p, call, place.source, place.token, place.ids);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kMaxTopK; ++j) {
      const int id = place.ids[j];
      if (id < 0 || id >= layout.num_experts) continue;
      place.slices |= layout.ep_size == 1 ? 1 : 1u << id / experts;  // a division takes long
      const int local = layout.local_expert(id, slice);
      if (local >= 0) atomicOr(&shared.lanes[warp_id() * experts + local], 1u << lane_id());
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

  // ---- placing --------------------------------------------------------------------------------------------------

  // The row at which each expert's tokens of this CTA begin.
  __device__ static void find_first_rows(const Params& p, const Shared& shared) {
    const int experts = p.layout.local_experts(), ctas = p.layout.world_size * p.chunks;
    for (int begin = 0, carry = 0; begin < experts; begin += kThreads) {
      const int expert = begin + static_cast<int>(threadIdx.x);
      int before = 0, all = 0;
      if (expert < experts) {
#pragma unroll 16
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

  // Of the tokens of a source that a slice needs: how many are in CTAs before this one, how many there are, and one
  // behind the last of them.
  struct Numbers {
    int before, count, end;
  };

  // Each lane asks for one CTA.
  __device__ __forceinline__ static int2 load_needed(const Params& p, const Place& place, int slice,
                                                     int chunk) {
    if (chunk >= p.chunks) return {0, 0};
    const int cta = place.step * p.chunks + chunk;
    return __ldcg(reinterpret_cast<const int2*>(&p.needed[cta * p.layout.ep_size + slice]));
  }

  __device__ static Numbers sum_needed(const Params& p, const Place& place, int slice, int2 loaded) {
    Numbers sum = {0, 0, 0};
    for (int begin = 0; begin < p.chunks; begin += 32) {
      const int chunk = begin + lane_id();
      if (begin > 0) loaded = load_needed(p, place, slice, chunk);
      sum.before += __reduce_add_sync(~0u, chunk < place.chunk ? loaded.x : 0);
      sum.count += __reduce_add_sync(~0u, loaded.x);
      sum.end = max(sum.end, __reduce_max_sync(~0u, loaded.y));
    }
    return sum;
  }

  // number_tokens of routing.h, for the token of this thread; returns its slot row. `slots` may be null.
  __device__ static int number_token(const Params& p, const Place& place, const uint32_t (*ballots)[kWarps],
                                     int slice, int2 loaded, bool compact, int32_t* slots, int32_t* tokens,
                                     int32_t* extent) {
    const Numbers needed = sum_needed(p, place, slice, loaded);
    if (place.chunk == 0 && threadIdx.x == 0) *extent = compact ? needed.count : needed.end;
    if (!place.valid) return -1;
    int slot = -1;
    if (place.slices >> slice & 1) {
      slot = place.token;
      if (compact) {
        slot = needed.before + __popc(ballots[slice][warp_id()] & lanes_before());
        for (int warp = 0; warp < warp_id(); ++warp) slot += __popc(ballots[slice][warp]);
      }
    }
    if (slots != nullptr) slots[place.token] = slot;
    if (!compact) {
      tokens[place.token] = slot;
    } else {
      if (slot >= 0) tokens[slot] = place.token;
      if (place.token >= needed.count) tokens[place.token] = -1;  // nobody else's slot row
    }
    return slot;
  }

  __device__ static void place_tokens(const Params& p, const Place& place, const Shared& shared,
                                      const uint32_t (*ballots)[kWarps]) {
    const Layout& layout = p.layout;
    const int experts = layout.local_experts(), slice = layout.slice_of(layout.rank);
    const int64_t begin = static_cast<int64_t>(place.source) * layout.max_tokens;
    // Asked for together, as every answer takes as long.
    const int2 arriving = load_needed(p, place, slice, lane_id());
    int2 leaving[kMaxSteps];
#pragma unroll
    for (int to = 0; to < kMaxSteps; ++to) {
      if (place.step == 0 && to < layout.ep_size) leaving[to] = load_needed(p, place, to, lane_id());
    }
    find_first_rows(p, shared);
    const int slot =
        number_token(p, place, ballots, slice, arriving, layout.compacts(place.source, layout.rank), nullptr,
                     p.out.incoming + begin, p.out.received + place.source);
    if (place.valid) {
      uint32_t rows[kMaxTopK];
#pragma unroll
      for (int j = 0; j < kMaxTopK; ++j) {
        const int expert = layout.local_expert(place.ids[j], slice);
        const int at = warp_id() * experts + expert;
        rows[j] = expert < 0
                      ? -1
                      : shared.first[expert] + shared.before[at] + __popc(shared.lanes[at] & lanes_before());
      }
#pragma unroll
      for (int j = 0; j < kMaxTopK; ++j) {
        if (static_cast<int>(rows[j]) >= 0) p.out.rows[rows[j]] = static_cast<int32_t>(begin) + slot;
      }
      store_words(p.out.positions + (begin + place.token) * layout.top_k, rows, layout.top_k);
    }
    if (place.step != 0) return;
#pragma unroll
    for (int to = 0; to < kMaxSteps; ++to) {
      if (to >= layout.ep_size) break;
      const int64_t area = static_cast<int64_t>(to) * layout.max_tokens;
      number_token(p, place, ballots, to, leaving[to], layout.ep_size > 1, p.out.sent + area,
                   p.out.outgoing + area, p.out.sending + to);
    }
  }

  // By a CTA that has no tokens: offsets, counts, the tile schedule, and what lies behind the last row.
  __device__ static void make_schedule(const Params& p, const Shared& shared) {
    const Layout& layout = p.layout;
    const int experts = layout.local_experts(), steps = layout.world_size;
    // Memory that the other CTAs use otherwise.
    static_assert(Shared::kRows >= 5 && Shared::kRows >= kMaxSteps);
    auto* counts = reinterpret_cast<int32_t*>(shared.lanes);  // [expert][step]
    int32_t* rows = shared.first;
    int32_t* arrived = shared.before;
    int32_t* first_m = arrived + experts;
    int32_t* sizes = first_m + experts;
    int32_t* bases = sizes + experts;
    int32_t* offsets = bases + experts;

    for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
      constexpr int kBatch = 16;
      int sum = 0, of_step = 0;
      for (int begin = 0; begin < steps * p.chunks; begin += kBatch) {
        int found[kBatch];  // read before anything is written
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int64_t cta = begin + i;
          found[i] = cta < steps * p.chunks ? __ldcg(&p.histograms[cta * experts + expert]) : 0;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          of_step += found[i];
          if ((begin + i) % p.chunks != p.chunks - 1 || begin + i >= steps * p.chunks) continue;
          counts[expert * steps + (begin + i) / p.chunks] = of_step;
          sum += of_step;
          of_step = 0;
        }
      }
      rows[expert] = offsets[expert] = sum;
      arrived[expert] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < experts * steps; i += kThreads) p.out.counts[i] = counts[i];
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
          arrived[expert] += counts[expert * steps + s];  // this thread has written it
        }
        sizes[expert] = complete_tiles(arrived[expert], rows[expert], p.block_m) - first_m[expert];
        bases[expert] = sizes[expert];
      }
      __syncthreads();
      const int count = scan_array(bases, experts);
      // Eight threads for each: with many experts entries are few, with few they are many.
      constexpr int kTogether = 8;
      for (int expert = threadIdx.x / kTogether; expert < experts; expert += kThreads / kTogether) {
        for (int i = threadIdx.x % kTogether; i < sizes[expert]; i += kTogether) {
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

  __device__ static void run(const Params& p, void* smem) {
    __shared__ uint32_t ballots[kMaxSteps][kWarps];
    const Shared shared = Shared::carve(smem, p.layout.local_experts());
    const sync::Call call = p.exchanges ? sync::begin_call(p.symm) : sync::Call{0, false};
    const bool has_tokens = static_cast<int>(blockIdx.x) < p.layout.world_size * p.chunks;
    Place place;
    if (has_tokens) place = count_tokens(p, call, shared, ballots);
    cooperative_groups::this_grid().sync();
    // Every CTA has taken what it waited for: the call is over before its result is.
    if (p.exchanges && threadIdx.x == 0) sync::end_call(p.symm, call.epoch);
    if (!has_tokens) {
      make_schedule(p, shared);
      return;
    }
    place_tokens(p, place, shared, ballots);
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) routing_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t smem[];
  Cta<kThreads>::run(p, smem);
}

template <int kThreads>
void launch(Params params, cudaStream_t stream) {
  void* arguments[] = {&params};
  // Cooperative: the launch fails, instead of waiting for ever, if not all CTAs fit on the GPU at once.
  FLUX_CUDA_CHECK(cudaLaunchCooperativeKernel(
      reinterpret_cast<const void*>(&routing_kernel<kThreads>), route_ctas(params.layout), kThreads,
      arguments, Cta<kThreads>::Shared::bytes(params.layout.local_experts()), stream));
}

template <int kThreads>
void prepare_kernel() {
  FLUX_CUDA_CHECK(cudaFuncSetAttribute(routing_kernel<kThreads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       Cta<kThreads>::Shared::bytes(kMaxRouteExperts)));
}

}  // namespace

void route(const Layout& layout, int block_m, const OwnChoices& own, const runtime::SymmBuffer* symm,
           const RoutingArrays& out, float* weights, int32_t* scratch, cudaStream_t stream) {
  FLUX_CHECK(layout.local_experts() <= kMaxRouteExperts, layout.local_experts());
  FLUX_CHECK(own.tokens <= layout.max_tokens, own.tokens, layout.max_tokens);
  const bool exchanges = layout.world_size > 1 && layout.max_tokens > 0;
  FLUX_CHECK(!exchanges || symm != nullptr, layout.world_size);
  if (exchanges) FLUX_CHECK(route_exchange_bytes(layout) <= symm->exchange_bytes, symm->exchange_bytes);
  prepare_route();
  // Pairs of words that are read at once start at even ones.
  const int64_t words = static_cast<int64_t>(route_ctas(layout) - 1) * layout.local_experts();
  const Params params = {{layout, own, exchanges ? *symm : runtime::SymmBuffer{}, weights},
                         block_m,
                         route_chunks(layout),
                         exchanges,
                         out,
                         scratch,
                         reinterpret_cast<Needed*>(scratch + words + words % 2)};
  const auto run =
      route_threads(layout) == kFewRouteThreads ? launch<kFewRouteThreads> : launch<kManyRouteThreads>;
  run(params, stream);
}

void prepare_route() {
  static runtime::OncePerDevice once;
  once([] {
    prepare_kernel<kFewRouteThreads>();
    prepare_kernel<kManyRouteThreads>();
  });
}

}  // namespace flux::moe
