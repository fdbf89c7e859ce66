// What ranks tell each other before they route: the experts and weights that each token chose. They travel as vectors
// that say by themselves that they are there (runtime/device/exchange.cuh).
#pragma once

#include "moe/moe.h"
#include "runtime/device/exchange.cuh"

namespace flux::moe {

constexpr int kWords = 4;  // of a vector
constexpr int kMaxVectors = kMaxTopK / kWords;
constexpr uint32_t kRouteOp = 6;
constexpr int32_t kNowhere = 0x7FFFFFFF;  // no expert's number, and not kAbsent

struct ChoiceParams {
  Layout layout;
  OwnChoices own;
  runtime::SymmBuffer symm;
  float* weights;  // [source][token][choice]: those of all ranks
};

__device__ __forceinline__ int32_t own_id(const ChoiceParams& p, int token, int j) {
  if (token >= p.own.tokens || j >= p.layout.top_k) return kNowhere;
  const int64_t at = static_cast<int64_t>(token) * p.layout.top_k + j;
  const int64_t id =
      p.own.wide ? static_cast<const int64_t*>(p.own.ids)[at] : static_cast<const int32_t*>(p.own.ids)[at];
  return id >= 0 && id < p.layout.num_experts ? static_cast<int32_t>(id) : kNowhere;
}

// Bits of a weight. A user's NaN may look like a word that has not arrived; there are others.
__device__ __forceinline__ uint32_t own_weight(const ChoiceParams& p, int token, int j) {
  if (token >= p.own.tokens || j >= p.layout.top_k) return 0;
  const uint32_t bits = __float_as_uint(p.own.weights[static_cast<int64_t>(token) * p.layout.top_k + j]);
  return bits == runtime::kAbsent ? 0x7FFFFFFF : bits;
}

// A token's choices, in vectors: its experts, then its weights.
__device__ __forceinline__ int64_t vector_offset(const ChoiceParams& p, int source, int token, int vector) {
  const int64_t slot_token = static_cast<int64_t>(source) * p.layout.max_tokens + token;
  return (slot_token * route_vectors(p.layout.top_k) + vector) * sizeof(uint4);
}

// This rank's tokens from number `first` on, a thread each.
// Neighbouring threads send neighbouring vectors, so that whole lines go over the link.
template <int kThreads>
__device__ void tell_peers(const ChoiceParams& p, const sync::Call& call, int first) {
  // Behind a call that ran out of time nothing is sent: a late peer may not have read what lies there.
  if (call.aborted) return;
  constexpr int kBatch = 4;  // vectors of a thread that are read before the first is sent
  const Layout& layout = p.layout;
  const int vectors = route_vectors(layout.top_k);
  const int count = min(kThreads, layout.max_tokens - first) * vectors;
  for (int begin = threadIdx.x; begin < count; begin += kBatch * kThreads) {
    uint32_t words[kBatch][kWords];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + i * kThreads, token = first + at / vectors, vector = at % vectors;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const int j = vector % (vectors / 2) * kWords + word;
        words[i][word] = vector < vectors / 2 ? own_id(p, token, j) : own_weight(p, token, j);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + i * kThreads;
      if (at >= count) break;
      const int64_t offset = vector_offset(p, layout.rank, first + at / vectors, at % vectors);
      for (int step = 1; step < layout.world_size; ++step) {
        const int peer = (layout.rank + step) % layout.world_size;
        ptx::store_relaxed_sys(p.symm.exchange(peer, call.epoch) + offset,
                               {words[i][0], words[i][1], words[i][2], words[i][3]});
      }
    }
  }
}

// The words of a token's choices; `to` is aligned as their number allows.
__device__ __forceinline__ void store_words(void* to, const uint32_t (&words)[kMaxTopK], int top_k) {
  const bool whole = top_k % kWords == 0;
#pragma unroll
  for (int j = 0; j < kMaxTopK; j += kWords) {
    if (whole && j < top_k) {
      static_cast<uint4*>(to)[j / kWords] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
    }
#pragma unroll
    for (int word = j; word < j + kWords; ++word) {
      if (!whole && word < top_k) static_cast<uint32_t*>(to)[word] = words[word];
    }
  }
}

// The experts of a thread's token; its weights are written where both layers read them.
__device__ inline void learn_choices(const ChoiceParams& p, const sync::Call& call, int source, int token,
                                     int32_t (&ids)[kMaxTopK]) {
  const int top_k = p.layout.top_k, vectors = route_vectors(top_k) / 2;
#pragma unroll
  for (int j = 0; j < kMaxTopK; ++j) ids[j] = kNowhere;
  if (token >= p.layout.max_tokens) return;
  float* weights = p.weights + (static_cast<int64_t>(source) * p.layout.max_tokens + token) * top_k;
  uint32_t factors[kMaxTopK];  // all of them are read before the first is written
  if (source == p.layout.rank) {
#pragma unroll
    for (int j = 0; j < kMaxTopK; ++j) {
      ids[j] = own_id(p, token, j);
      factors[j] = own_weight(p, token, j);
    }
    store_words(weights, factors, top_k);
    return;
  }
  char* base = p.symm.exchange(p.layout.rank, call.epoch) + vector_offset(p, source, token, 0);
  uint4 arrived[2 * kMaxVectors];
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    if (v >= vectors) break;
    arrived[v] = ptx::load_relaxed_sys(base + v * sizeof(uint4));
    arrived[kMaxVectors + v] = ptx::load_relaxed_sys(base + (vectors + v) * sizeof(uint4));
  }
  const sync::WaitInfo info = {kRouteOp, static_cast<uint32_t>(source), static_cast<uint32_t>(token)};
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    if (v >= vectors) break;
    const uint4 e = exchange::take(p.symm, call, base + v * sizeof(uint4), arrived[v], info);
    const uint4 w =
        exchange::take(p.symm, call, base + (vectors + v) * sizeof(uint4), arrived[kMaxVectors + v], info);
    const uint32_t words[2][kWords] = {{e.x, e.y, e.z, e.w}, {w.x, w.y, w.z, w.w}};
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      ids[v * kWords + word] = static_cast<int32_t>(words[0][word]);
      factors[v * kWords + word] = words[1][word];
    }
  }
  store_words(weights, factors, top_k);
}

}  // namespace flux::moe
