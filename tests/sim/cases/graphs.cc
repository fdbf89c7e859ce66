// CUDA graphs: calls that are captured once and replayed several times, among eager calls. Kernels count the epochs
// themselves, so all that differs between two replays is what the buffers hold.
#include <cstring>

#include "cuda_runtime_api.h"
#include "ops.h"

namespace cases {
namespace {

// Of operands. The calls of graphs come after them, and read copies of these operands.
constexpr int kSets = 4;

// The calls of a graph on each rank.
struct Captured {
  Sums calls;
  std::vector<sim::Graph> of_rank;
};

void copy(void* dst, const void* src, int64_t bytes) {
  cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, nullptr);
}

}  // namespace

void graphs(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 3, 4}), num_graphs = random.between(1, 2);
  std::vector<Captured> captured(num_graphs);
  int calls = kSets;
  for (Captured& graph : captured) {
    for (int i = random.between(1, 3); i > 0; --i) graph.calls.push_back(calls++);
  }
  Setup setup = {random, world_size, calls, draw_dtype(random)};
  setup.transposed = random.below(2) == 0;
  start(seed, world_size, random.one_of({2, 3, 8}), random);
  const Op op = kOps[random.below(static_cast<int>(kOps.size()))](setup);
  // Copy engines have a workspace of their own, in which the host counts the epochs: graphs do not use it.
  const Ranks region(world_size, op.sizes), copies(world_size, op.sizes);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    for (Captured& graph : captured) {
      graph.of_rank.push_back(sim::capture([&] {
        for (const int call : graph.calls) op.enqueue(rank, call, region.symm[rank], 0);
      }));
    }
  }

  std::vector<Output> found;  // of replays, and of eager calls
  std::vector<const Output*> right;
  const auto outputs_of = [&](int call, int rank) {
    std::vector<const Output*> outputs;
    for (const Output& output : op.outputs) {
      if (output.call == call && output.rank == rank) outputs.push_back(&output);
    }
    return outputs;
  };
  const auto inputs_of = [&](int call, int rank) {
    std::vector<Input> inputs;
    for (const Input& input : op.inputs) {
      if (input.call == call && input.rank == rank) inputs.push_back(input);
    }
    return inputs;
  };
  // Takes the results of a call away, which is to have those of a set of operands.
  const auto keep = [&](int call, int set, int rank) {
    const auto outputs = outputs_of(call, rank), rights = outputs_of(set, rank);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Values& from = outputs[i]->values;
      const Values to(rank, "kept", from.rows, from.columns);
      copy(to.data, from.data, static_cast<int64_t>(from.rows) * from.columns * 2);
      found.push_back(
          {call, rank, to, rights[i]->right, rights[i]->name + ", step " + std::to_string(found.size())});
    }
  };

  std::string steps;
  uint32_t epochs = 0, copied = 0;
  for (int step = random.between(4, 8); step > 0; --step) {
    const int which = random.below(num_graphs + 1);
    if (which == num_graphs) {
      const int set = random.below(kSets);
      const bool copies_it = op.can_copy && random.below(2) == 0;
      copied += copies_it;
      epochs += copies_it ? 0 : static_cast<uint32_t>(op.epochs);
      steps += copies_it ? "c" : "e";
      for (int rank = 0; rank < world_size; ++rank) {
        cudaSetDevice(rank);
        const Ranks& ranks = copies_it ? copies : region;
        op.enqueue(rank, set, ranks.symm[rank], copies_it ? copied : 0);
        keep(set, set, rank);
      }
      continue;
    }
    const Captured& graph = captured[which];
    steps += std::to_string(which);
    epochs += static_cast<uint32_t>(op.epochs) * static_cast<uint32_t>(graph.calls.size());
    Sums sets;
    for (size_t i = 0; i < graph.calls.size(); ++i) sets.push_back(random.below(kSets));
    for (int rank = 0; rank < world_size; ++rank) {
      cudaSetDevice(rank);
      for (size_t i = 0; i < sets.size(); ++i) {
        const auto to = inputs_of(graph.calls[i], rank), from = inputs_of(sets[i], rank);
        for (size_t input = 0; input < to.size(); ++input)
          copy(to[input].data, from[input].data, to[input].bytes);
      }
      sim::replay(graph.of_rank[rank]);
      for (size_t i = 0; i < sets.size(); ++i) keep(graph.calls[i], sets[i], rank);
    }
    if (random.below(4) == 0) cudaDeviceSynchronize();
  }
  describe(op.name, ", ", world_size, " ranks, steps ", steps, setup.transposed ? ", [K, N]" : "",
           name_of(setup.dtype));
  cudaDeviceSynchronize();
  region.expect_done(epochs);
  copies.expect_no_timeout();
  for (const Output& output : found) expect(output.values, output.right, setup.dtype, output.name);
}

}  // namespace cases
