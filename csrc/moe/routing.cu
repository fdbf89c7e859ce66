// Routing on the GPU. Ranks exchange the choices of their tokens, and sort (token, expert) pairs by expert with a
// stable counting sort, in the order of steps and tokens. Each CTA handles kThreads tokens of one source: it sends the
// choices of own tokens to all peers, or waits for those of a peer's.
//
// The result does not depend on timing: within a warp, the order comes from one word for each expert, in which each lane
// that chose it sets its bit; between warps and CTAs, from counts. One more CTA writes the tile schedule.
#include <cooperative_groups.h>

#include <iterator>

#include "moe/choices.cuh"

namespace flux::moe {
namespace {

// The tokens of one CTA that a slice of experts needs.
struct Needed {
  int count;
  int end;  // index after the last of them, among the source's tokens
};

struct Params : ChoiceParams {
  int block_m;
  int chunks;            // CTAs for each source
  int slice;             // slice of this rank
  int experts;           // experts of each slice
  uint64_t per_experts;  // 2^32 / experts, rounded up: division by multiply and shift, for numbers below 2^16
  int early_experts;     // SendOrder::early_experts
  int max_rows, max_tiles;
  bool exchanges;  // false: there are no peers, or no tokens
  RoutingArrays out;
  int32_t* histograms;  // [step][chunk][expert]
  Needed* needed;       // [step][chunk][slice]

  // The index of an expert among those of this rank, or -1.
  FLUX_DEVICE int local_expert(int id) const {
    const int local = id - slice * experts;
    return local >= 0 && local < experts ? local : -1;
  }
};

// Tokens of a source that a slice needs: in earlier CTAs, in all, and the index after the last one.
struct Numbers {
  int before, count, end;
};

// The work of a CTA: kThreads tokens of one source. Loops are mostly not unrolled: instruction fetches cost more.
template <int kThreads, int kTopK>
struct Cta {
  static constexpr int kWarps = kThreads / 32;

  struct Shared {
    // Rows of `lanes` and `before`. The CTA that writes the schedule uses the same memory, and may need more.
    static constexpr int kRows = kWarps < kMaxSteps ? kMaxSteps : kWarps;
    uint32_t* lanes;  // [warp][expert]: bit mask of the lanes that chose the expert
    int32_t* before;  // [warp][expert]: number of tokens in earlier warps of the CTA that chose the expert
    int32_t* first;   // [expert]: row of the CTA's first token of the expert
    int32_t* totals;  // [expert]: rows of the expert

    __device__ static Shared carve(void* memory, int experts) {
      auto* lanes = static_cast<uint32_t*>(memory);
      auto* before = reinterpret_cast<int32_t*>(lanes + kRows * experts);
      int32_t* first = before + kRows * experts;
      return {lanes, before, first, first + experts};
    }
    __host__ __device__ static constexpr int bytes(int experts) { return (2 * kRows + 2) * experts * 4; }
  };

  // The token that a thread handles.
  struct Place {
    int step, source, chunk, token;
    bool valid;
    int32_t ids[kTopK];  // experts of the token
    uint32_t slices;     // bit s: slice s needs the token
  };

  FLUX_DEVICE static int lane_id() { return threadIdx.x % 32; }
  FLUX_DEVICE static int warp_id() { return threadIdx.x / 32; }
  FLUX_DEVICE static uint32_t lanes_before() { return (1u << lane_id()) - 1; }

  // Result of block_scan: the sum over the threads before this one, and the sum over all threads.
  struct Scan {
    int before, total;
  };

  // Exclusive scan over the threads of the CTA. Called by all threads.
  __device__ __noinline__ static Scan block_scan(int value) {
    __shared__ int warp_sums[kWarps];
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, sum, distance);
      if (lane_id() >= distance) sum += other;
    }
    if (lane_id() == 31) warp_sums[warp_id()] = sum;
    __syncthreads();
    Scan scan = {sum - value, 0};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < warp_id()) scan.before += warp_sums[warp];
      scan.total += warp_sums[warp];
    }
    __syncthreads();  // warp_sums is about to be written again
    return scan;
  }

  // Exclusive scan of an array in place; returns the sum of all values. Called by all threads.
  __device__ static int scan_array(int32_t* values, int count) {
    int carry = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kThreads) {
      const int i = begin + static_cast<int>(threadIdx.x);
      const Scan scan = block_scan(i < count ? values[i] : 0);
      if (i < count) values[i] = carry + scan.before;
      carry += scan.total;
    }
    __syncthreads();
    return carry;
  }

  // ---- counting -------------------------------------------------------------------------------------------------

  __device__ static Place count_tokens(const Params& p, const sync::Call& call, const Shared& shared,
                                       uint32_t (*ballots)[kWarps]) {
    const Layout& layout = p.layout;
    Place place;
    place.step = blockIdx.x / p.chunks;
    place.chunk = blockIdx.x % p.chunks;
    place.source = layout.step_of(place.step);
    place.token = place.chunk * kThreads + static_cast<int>(threadIdx.x);
    place.valid = place.token < layout.max_tokens;
    place.slices = 0;

    if (p.exchanges && place.step == 0) tell_peers<kThreads>(p, call, place.chunk * kThreads);
#pragma unroll 1
    for (int i = threadIdx.x; i < kWarps * p.experts; i += kThreads) shared.lanes[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.experts; i += kThreads) shared.first[i] = shared.totals[i] = 0;
    learn_choices(p, call, place.source, place.token, place.ids);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTopK; ++j) {
      const auto id = static_cast<uint32_t>(place.ids[j]);
      if (id >= static_cast<uint32_t>(layout.num_experts)) continue;
      place.slices |= 1u << (id * p.per_experts >> 32);
      const int local = p.local_expert(id);
      if (local >= 0) atomicOr(&shared.lanes[warp_id() * p.experts + local], 1u << lane_id());
    }
#pragma unroll 1
    for (int s = 0; s < layout.ep_size; ++s) {
      const uint32_t ballot = __ballot_sync(~0u, place.slices >> s & 1);
      if (lane_id() == 0) ballots[s][warp_id()] = ballot;
    }
    __syncthreads();

#pragma unroll 1
    for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
      int sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        shared.before[warp * p.experts + expert] = sum;
        sum += __popc(shared.lanes[warp * p.experts + expert]);
      }
      p.histograms[blockIdx.x * p.experts + expert] = sum;
    }
    if (static_cast<int>(threadIdx.x) < layout.ep_size) {
      Needed needed = {0, 0};
#pragma unroll 1
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

  // An expert's tokens in CTAs begin to end - 1, and in those of them before `middle`. A batch of counts is loaded
  // before the first is added.
  struct Counts {
    int all, before;
  };
  __device__ __noinline__ static Counts add_counts(const int32_t* histograms, int experts, int expert,
                                                   int begin, int end, int middle) {
    constexpr int kBatch = 16;
    Counts sum = {0, 0};
    const int32_t* at = histograms + begin * experts + expert;
#pragma unroll 1
    for (int cta = begin; cta < end; cta += kBatch, at += kBatch * experts) {
      int found[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) found[i] = cta + i < end ? __ldcg(at + i * experts) : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum.all += found[i];
        if (cta + i < middle) sum.before += found[i];
      }
    }
    return sum;
  }

  // Writes the first row of each expert's tokens of this CTA to shared.first; returns the number of rows.
  __device__ static int find_first_rows(const Params& p, const Shared& shared) {
    const int ctas = p.layout.world_size * p.chunks, cta = static_cast<int>(blockIdx.x);
    // If there are enough threads, two threads sum an expert.
    const int parts = 2 * p.experts <= kThreads ? 2 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * p.experts; i += kThreads) {
      const int part = i >= p.experts, expert = i - part * p.experts;
      const Counts counts =
          add_counts(p.histograms, p.experts, expert, ctas * part / parts, ctas * (part + 1) / parts, cta);
      atomicAdd(&shared.first[expert], counts.before);
      atomicAdd(&shared.totals[expert], counts.all);
    }
    __syncthreads();
    int num_rows = 0;
#pragma unroll 1
    for (int begin = 0; begin < p.experts; begin += kThreads) {
      const int expert = begin + static_cast<int>(threadIdx.x);
      const Scan scan = block_scan(expert < p.experts ? shared.totals[expert] : 0);
      if (expert < p.experts) shared.first[expert] += num_rows + scan.before;
      num_rows += scan.total;
    }
    __syncthreads();
    return num_rows;
  }

  // Counts the tokens of this CTA's source that slices need: for own tokens, which are sent, every slice; for
  // tokens of a peer, this rank's slice. One warp for each slice.
  __device__ static void number_needed(const Params& p, const Place& place, Numbers* numbers) {
    const Layout& layout = p.layout;
    const int slice = warp_id();
    if (slice >= layout.ep_size || (place.step != 0 && slice != p.slice)) return;
    Numbers sum = {0, 0, 0};
#pragma unroll 1
    for (int begin = 0; begin < p.chunks; begin += 32) {
      const int chunk = begin + lane_id();
      const int cta = place.step * p.chunks + chunk;
      const auto* address = reinterpret_cast<const int2*>(&p.needed[cta * layout.ep_size + slice]);
      const int2 found = chunk < p.chunks ? __ldcg(address) : int2{0, 0};
      sum.before += __reduce_add_sync(~0u, chunk < place.chunk ? found.x : 0);
      sum.count += __reduce_add_sync(~0u, found.x);
      sum.end = max(sum.end, __reduce_max_sync(~0u, found.y));
    }
    if (lane_id() == 0) numbers[slice] = sum;
  }

  // number_tokens of routing.h, for the token of this thread.
  __device__ __noinline__ static int slot_row(uint32_t slices, int token, const uint32_t (*ballots)[kWarps],
                                              int slice, int needed_before, bool compact) {
    if (!(slices >> slice & 1)) return -1;
    if (!compact) return token;
    int slot = needed_before + __popc(ballots[slice][warp_id()] & lanes_before());
#pragma unroll 1
    for (int warp = 0; warp < warp_id(); ++warp) slot += __popc(ballots[slice][warp]);
    return slot;
  }

  // first_expert of routing.h.
  __device__ static int first_expert(const Params& p, const Place& place, int slice) {
    const uint32_t begin = slice * p.experts;
    uint32_t first = ~0u;
#pragma unroll
    for (int j = 0; j < kTopK; ++j) {
      const uint32_t local = static_cast<uint32_t>(place.ids[j]) - begin;
      if (local < static_cast<uint32_t>(p.experts)) first = min(first, local);
    }
    return static_cast<int>(first);
  }

  __device__ static void place_tokens(const Params& p, const Place& place, const Shared& shared,
                                      const uint32_t (*ballots)[kWarps]) {
    __shared__ Numbers numbers[kMaxSteps];
    const Layout& layout = p.layout;
    const int64_t begin = static_cast<int64_t>(place.source) * layout.max_tokens;
    number_needed(p, place, numbers);
    const int num_rows = find_first_rows(p, shared);  // includes __syncthreads, so `numbers` is complete
    const Numbers& needed = numbers[p.slice];
    const bool compact = layout.compacts(place.source, layout.rank);
    if (place.chunk == 0 && threadIdx.x == 0)
      p.out.received[place.source] = compact ? needed.count : needed.end;
    if (place.valid) {
      const int slot = slot_row(place.slices, place.token, ballots, p.slice, needed.before, compact);
      int32_t* const tokens = p.out.incoming + begin;
      if (!compact) {
        tokens[place.token] = slot;
      } else {
        if (slot >= 0) tokens[slot] = place.token;
        if (place.token >= needed.count) tokens[place.token] = -1;  // slot rows after the last one
      }
      uint32_t rows[kTopK];
#pragma unroll
      for (int j = 0; j < kTopK; ++j) {
        const int expert = p.local_expert(place.ids[j]), any = max(expert, 0);
        const int at = warp_id() * p.experts + any;
        const int row = shared.first[any] + shared.before[at] + __popc(shared.lanes[at] & lanes_before());
        rows[j] = expert < 0 ? -1 : row;
      }
#pragma unroll
      for (int j = 0; j < kTopK; ++j) {
        if (static_cast<int>(rows[j]) >= 0) p.out.rows[rows[j]] = static_cast<int32_t>(begin) + slot;
      }
      store_words(p.out.positions + (begin + place.token) * layout.top_k, rows, layout.top_k);
    }
    // Marks the entries after the last row as empty.
    const int threads = layout.world_size * p.chunks * kThreads;
#pragma unroll 1
    for (int i = num_rows + blockIdx.x * kThreads + threadIdx.x; i < p.max_rows; i += threads)
      p.out.rows[i] = -1;
    if (place.step != 0 || !place.valid) return;
#pragma unroll 1
    for (int to = 0; to < layout.ep_size; ++to) {
      const int64_t at = static_cast<int64_t>(to) * layout.max_tokens + place.token;
      p.out.sent[at] =
          slot_row(place.slices, place.token, ballots, to, numbers[to].before, layout.ep_size > 1);
      p.out.firsts[at] = first_expert(p, place, to);
    }
  }

  // Run by a CTA without tokens: writes offsets, counts and the tile schedule.
  __device__ static void make_schedule(const Params& p, const Shared& shared) {
    const Layout& layout = p.layout;
    const int steps = layout.world_size;
    // Other CTAs use the same shared memory for other arrays.
    static_assert(Shared::kRows >= 3 && Shared::kRows >= kMaxSteps);
    auto* counts = reinterpret_cast<int32_t*>(shared.lanes);  // [step][expert]
    int32_t* rows = shared.first;
    int32_t* early = shared.before;
    int32_t* sizes = early + p.experts;
    int32_t* bases = sizes + p.experts;
    int32_t* offsets = shared.totals;

#pragma unroll 1
    for (int i = threadIdx.x; i < steps * p.experts; i += kThreads) {
      const int step = i / p.experts, expert = i % p.experts;
      const int first = step * p.chunks;
      counts[i] = add_counts(p.histograms, p.experts, expert, first, first + p.chunks, 0).all;
      p.out.counts[expert * steps + step] = counts[i];
    }
    __syncthreads();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
      int sum = 0;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) sum += counts[step * p.experts + expert];
      rows[expert] = offsets[expert] = sum;
      early[expert] = early_tiles(expert, p.early_experts, counts[expert], sum, p.block_m);
    }
    const int num_rows = scan_array(offsets, p.experts);
#pragma unroll 1
    for (int expert = threadIdx.x; expert < p.experts; expert += kThreads)
      p.out.offsets[expert] = offsets[expert];
    if (threadIdx.x == 0) p.out.offsets[p.experts] = num_rows;

    int base = 0;
#pragma unroll 1
    for (int late = 0; late < 2; ++late) {
#pragma unroll 1
      for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
        const int all = ceil_div(rows[expert], p.block_m);
        sizes[expert] = bases[expert] = late ? all - early[expert] : early[expert];
      }
      const int count = scan_array(bases, p.experts);
      // Eight threads for each expert, which balances the work for few and for many experts.
      constexpr int kTogether = 8;
#pragma unroll 1
      for (int expert = threadIdx.x / kTogether; expert < p.experts; expert += kThreads / kTogether) {
#pragma unroll 1
        for (int i = threadIdx.x % kTogether; i < sizes[expert]; i += kTogether) {
          const int begin = base + bases[expert];
          p.out.tiles[begin + i] = make_entry(expert, late ? early[expert] : 0, sizes[expert], begin, i);
        }
      }
      base += count;
      __syncthreads();
    }
    if (threadIdx.x == 0) *p.out.num_tiles = base;
#pragma unroll 1
    for (int i = base + static_cast<int>(threadIdx.x); i < p.max_tiles; i += kThreads)
      p.out.tiles[i] = {0, 0, 0, 0};
  }

  __device__ static void run(const Params& p, void* smem) {
    __shared__ uint32_t ballots[kMaxSteps][kWarps];
    const Shared shared = Shared::carve(smem, p.experts);
    const sync::Call call = p.exchanges ? sync::begin_call(p.symm) : sync::Call{0, false};
    const bool has_tokens = static_cast<int>(blockIdx.x) < p.layout.world_size * p.chunks;
    Place place;
    if (has_tokens) place = count_tokens(p, call, shared, ballots);
    cooperative_groups::this_grid().sync();
    // Every CTA has received its data, so the call can be closed before its results are complete.
    if (p.exchanges && threadIdx.x == 0) sync::end_call(p.symm, call.epoch);
    if (!has_tokens) {
      make_schedule(p, shared);
      return;
    }
    place_tokens(p, place, shared, ballots);
  }
};

template <int kThreads, int kTopK>
__global__ void __launch_bounds__(kThreads, 1) routing_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8_t smem[];
  Cta<kThreads, kTopK>::run(p, smem);
}

struct Kernel {
  int threads, top_k;  // top_k: the largest that the kernel supports
  void (*function)(Params);
  int (*smem_bytes)(int experts);
};

template <int kThreads, int kTopK>
constexpr Kernel kernel_for() {
  return {kThreads, kTopK, routing_kernel<kThreads, kTopK>, Cta<kThreads, kTopK>::Shared::bytes};
}

const Kernel kKernels[] = {
    kernel_for<kFewRouteThreads, 4>(),        kernel_for<kManyRouteThreads, 4>(),
    kernel_for<kFewRouteThreads, 8>(),        kernel_for<kManyRouteThreads, 8>(),
    kernel_for<kFewRouteThreads, kMaxTopK>(), kernel_for<kManyRouteThreads, kMaxTopK>(),
    kernel_for<kMostRouteThreads, 4>(),       kernel_for<kMostRouteThreads, 8>(),
};

runtime::Kernels kernels([] {
  for (const Kernel& kernel : kKernels) {
    FLUX_CUDA_CHECK(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kernel.smem_bytes(max_route_experts(kernel.threads))));
  }
});

}  // namespace

void route(const Layout& layout, int block_m, const OwnChoices& own, const runtime::SymmBuffer* symm,
           const RoutingArrays& out, float* weights, int32_t* scratch, cudaStream_t stream) {
  const int threads = route_threads(layout);
  FLUX_CHECK(layout.local_experts() <= max_route_experts(threads), layout.local_experts());
  FLUX_CHECK(own.tokens <= layout.max_tokens, own.tokens, layout.max_tokens);
  const bool exchanges = layout.world_size > 1 && layout.max_tokens > 0;
  FLUX_CHECK(!exchanges || symm != nullptr, layout.world_size);
  if (exchanges) FLUX_CHECK(route_exchange_bytes(layout) <= symm->exchange_bytes, symm->exchange_bytes);
  kernels.load();
  // Words of the histograms. `needed` follows at an even word: its pairs of words are read as one.
  const int experts = layout.local_experts();
  const int64_t words = static_cast<int64_t>(route_ctas(layout) - 1) * experts;
  OwnChoices aligned = own;
  aligned.whole_vectors = layout.top_k % kWords == 0 &&
                          reinterpret_cast<uintptr_t>(own.ids) % sizeof(uint4) == 0 &&
                          reinterpret_cast<uintptr_t>(own.weights) % sizeof(uint4) == 0;
  Params params = {{layout, aligned, exchanges ? *symm : runtime::SymmBuffer{}, weights}};
  params.block_m = block_m;
  params.chunks = route_chunks(layout);
  params.slice = layout.slice_of(layout.rank);
  params.experts = experts;
  params.per_experts = ((uint64_t{1} << 32) + experts - 1) / experts;
  params.early_experts = make_send_order(layout).early_experts();
  params.max_rows = layout.max_rows();
  params.max_tiles = layout.max_tiles(block_m);
  params.exchanges = exchanges;
  params.out = out;
  params.histograms = scratch;
  params.needed = reinterpret_cast<Needed*>(scratch + words + words % 2);
  const auto* kernel = std::find_if(std::begin(kKernels), std::end(kKernels), [&](const Kernel& k) {
    return k.threads == threads && k.top_k >= layout.top_k;
  });
  FLUX_CHECK(kernel != std::end(kKernels), layout.top_k);
  runtime::Launch(route_ctas(layout), threads, kernel->smem_bytes(experts), stream)
      .cooperative()
      .run(kernel->function, params);
}

}  // namespace flux::moe
