// Rows policies of the grouped GEMM without communication.
#pragma once

#include "moe/plan.h"

namespace flux::moe {

struct LocalRows {
  struct Call {};
  struct Progress {};
  static constexpr bool kArrive = false, kCombine = false;
  template <class Params>
  FLUX_DEVICE static Call begin(const Params&) {
    return {};
  }
  template <class Params>
  FLUX_DEVICE static uint32_t* tile_counter(const Params&) {
    return nullptr;
  }
};

// Rows policy: row i of the sorted rows is row i of x.
struct OrderedRows : LocalRows {
  struct Params {};
  static constexpr bool kInOrder = true;
};

// Rows policy: row i of the sorted rows is row rows[i] of x.
struct IndexedRows : LocalRows {
  struct Params {
    const char* x;
    const int32_t* rows;
  };
  static constexpr bool kInOrder = false;
  FLUX_DEVICE static Sources sources(const Params& p, const Call&) { return {p.x, nullptr}; }
  FLUX_DEVICE static int place(const Params& p, int row) { return p.rows[row]; }
};

// The same of fp8 rows.
struct ScaledIndexedRows : IndexedRows {
  struct Params : IndexedRows::Params {
    int row_bytes;
    const float* scales;  // of row i in k-block b at scales[i * step + b * stride]
    int step;
    int64_t stride;
  };
  FLUX_DEVICE static int first_row_bytes(const Params& p) { return p.row_bytes; }
  FLUX_DEVICE static RowScales scales(const Params& p, const Call&, int place) {
    return {p.scales + static_cast<int64_t>(place) * p.step, p.stride};
  }
};

}  // namespace flux::moe
