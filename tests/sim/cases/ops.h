// One operator on all ranks, with operands and exact results for several calls: what cases need that are about calls,
// and not about the shapes of one operator.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ranks.h"

namespace cases {

struct Setup {
  Random& random;
  int world_size, calls;
  DType dtype;
  bool transposed = false;

  Values filled(int rank, const char* name, int rows, int columns, int most = 1) const {
    return Values(rank, name, rows, columns).fill(random, dtype, most);
  }
};

// What a rank reads in a call.
struct Input {
  int call, rank;
  void* data;
  int64_t bytes;
};

// A result of a rank, and what it must be unless a wait has timed out.
struct Output {
  int call, rank;
  Values values;
  Sums right;
  std::string name;
};

// What all ranks call.
struct Op {
  std::string name;
  Sizes sizes;
  // copy_epoch: 0, or the number of the call if copy engines shall send.
  std::function<void(int rank, int call, const flux::runtime::SymmBuffer& symm, uint32_t copy_epoch)>
      enqueue = {};
  std::vector<Input> inputs = {};    // those of a call in the same order for every call
  std::vector<Output> outputs = {};  // likewise
  int epochs = 1;                    // of a call
  bool can_copy = false;             // by copy engines
};

using MakeOp = Op (*)(const Setup& setup);
// Layers have routings that the host has computed; route is the exchange of choices, of which nothing is compared.
extern const std::vector<MakeOp> kOps;
extern const MakeOp kRoute;

void graphs(uint64_t seed);  // graphs.cc

}  // namespace cases
