// Before routing, ranks send each other the experts and weights of tokens (runtime/device/exchange.cuh).
#pragma once

#include "moe/moe.h"
#include "runtime/device/exchange.cuh"

namespace flux::moe {

constexpr int kWords = 4;                 // 32-bit words of a vector
constexpr int32_t kNowhere = 0x7FFFFFFF;  // an invalid expert id that differs from kAbsent

struct ChoiceParams {
  Layout layout;
  OwnChoices own;
  runtime::SymmBuffer symm;
  float* weights;  // [source][token][choice]: weights of all ranks' tokens
};

// Words j to j + kWords - 1 of a token's row of top_k words; `high`: the upper halves, if words have 64 bits (`wide`).
// Words beyond the row keep their values. Whole vectors if possible: a strided load of one word costs as much.
FLUX_DEVICE void read_row(const ChoiceParams& p, const void* rows, bool wide, int token, int j,
                          uint32_t (&low)[kWords], uint32_t (&high)[kWords]) {
  if (token >= p.own.tokens) return;
  const int64_t at = static_cast<int64_t>(token) * p.layout.top_k + j;
  const auto* const from = static_cast<const uint32_t*>(rows) + (wide ? 2 * at : at);
  if (p.own.whole_vectors) {
    const auto* const vectors = reinterpret_cast<const uint4*>(from);
    const uint4 v = vectors[0], next = wide ? vectors[1] : v;
    low[0] = v.x;
    low[1] = wide ? v.z : v.y;
    low[2] = wide ? next.x : v.z;
    low[3] = wide ? next.z : v.w;
    if (wide) high[0] = v.y, high[1] = v.w, high[2] = next.y, high[3] = next.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (j + i >= p.layout.top_k) break;
    low[i] = from[wide ? 2 * i : i];
    if (wide) high[i] = from[2 * i + 1];
  }
}

// The expert ids of a token's choices j to j + kWords - 1; invalid ids become kNowhere.
FLUX_DEVICE uint4 own_ids(const ChoiceParams& p, int token, int j) {
  uint32_t low[kWords] = {kNowhere, kNowhere, kNowhere, kNowhere}, high[kWords] = {};
  read_row(p, p.own.ids, p.own.wide, token, j, low, high);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (high[i] != 0 || low[i] >= static_cast<uint32_t>(p.layout.num_experts)) low[i] = kNowhere;
  }
  return {low[0], low[1], low[2], low[3]};
}

FLUX_DEVICE uint4 own_weights(const ChoiceParams& p, int token, int j) {
  uint32_t bits[kWords] = {}, unused[kWords];
  read_row(p, p.own.weights, /*wide=*/false, token, j, bits, unused);
  return exchange::presentable({bits[0], bits[1], bits[2], bits[3]});
}

// Byte offset of a vector of a token's choices. A token has the vectors of its experts, then those of its weights.
FLUX_DEVICE int64_t vector_offset(const ChoiceParams& p, int source, int token, int vector) {
  const int64_t slot_token = static_cast<int64_t>(source) * p.layout.max_tokens + token;
  return (slot_token * route_vectors(p.layout.top_k) + vector) * sizeof(uint4);
}

// Sends the choices of kThreads tokens of this rank, from token `first` on, to all peers.
// Adjacent threads send adjacent vectors, so that whole cache lines go over the link.
template <int kThreads>
__device__ void tell_peers(const ChoiceParams& p, const sync::Call& call, int first) {
  if (call.aborted) return;
  constexpr int kBatch = 4;  // vectors that a thread loads before it sends the first
  const Layout& layout = p.layout;
  const int vectors = route_vectors(layout.top_k);
  const int count = min(kThreads, layout.max_tokens - first) * vectors;
  for (int begin = threadIdx.x; begin < count; begin += kBatch * kThreads) {
    uint4 words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + i * kThreads, token = first + at / vectors, vector = at % vectors;
      const bool ids = vector < vectors / 2;
      const int j = (ids ? vector : vector - vectors / 2) * kWords;
      words[i] = ids ? own_ids(p, token, j) : own_weights(p, token, j);
    }
#pragma unroll 1
    for (int step = 1; step < layout.world_size; ++step) {
      const int peer = (layout.rank + step) % layout.world_size;
      char* const to = p.symm.exchange(peer, call.epoch) + vector_offset(p, layout.rank, first, 0);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = begin + i * kThreads;
        if (at >= count) break;
        ptx::store_relaxed_sys(to + at * sizeof(uint4), words[i]);
      }
    }
  }
}

// Stores one word for each of a token's top_k <= kTopK choices, in 16-byte stores if top_k is a multiple of kWords.
template <int kTopK>
FLUX_DEVICE void store_words(void* to, const uint32_t (&words)[kTopK], int top_k) {
  const bool whole = top_k % kWords == 0;
#pragma unroll
  for (int j = 0; j < kTopK; j += kWords) {
    if (whole && j < top_k)
      static_cast<uint4*>(to)[j / kWords] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
#pragma unroll
    for (int word = j; word < j + kWords; ++word) {
      if (!whole && word < top_k) static_cast<uint32_t*>(to)[word] = words[word];
    }
  }
}

// Receives the choices of the calling thread's token: its experts in `ids`, and its weights in p.weights.
template <int kTopK>
__device__ void learn_choices(const ChoiceParams& p, const sync::Call& call, int source, int token,
                              int32_t (&ids)[kTopK]) {
  constexpr int kMaxVectors = kTopK / kWords;
  const int top_k = p.layout.top_k, vectors = route_vectors(top_k) / 2;
#pragma unroll
  for (int j = 0; j < kTopK; ++j) ids[j] = kNowhere;
  if (token >= p.layout.max_tokens) return;
  float* weights = p.weights + (static_cast<int64_t>(source) * p.layout.max_tokens + token) * top_k;
  uint32_t factors[kTopK];  // weights; all are loaded before the first is stored
  const auto keep = [&](int v, const uint4& e, const uint4& w) {
    const uint32_t words[2][kWords] = {{e.x, e.y, e.z, e.w}, {w.x, w.y, w.z, w.w}};
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      ids[v * kWords + word] = static_cast<int32_t>(words[0][word]);
      factors[v * kWords + word] = words[1][word];
    }
  };
  if (source == p.layout.rank) {
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      if (v >= vectors) break;
      keep(v, own_ids(p, token, v * kWords), own_weights(p, token, v * kWords));
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
  const sync::WaitInfo info = {runtime::kRoute, static_cast<uint32_t>(source), static_cast<uint32_t>(token)};
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    if (v >= vectors) break;
    const uint4 e = exchange::take(p.symm, call, base + v * sizeof(uint4), arrived[v], info);
    const uint4 w =
        exchange::take(p.symm, call, base + (vectors + v) * sizeof(uint4), arrived[kMaxVectors + v], info);
    keep(v, e, w);
  }
  store_words(weights, factors, top_k);
}

}  // namespace flux::moe
