// GEMM+ReduceScatter of fp8 operands, in a translation unit of its own, so that it compiles in parallel with gemm_rs.cu.
#pragma once

#include "gemm/gemm.h"
#include "gemm/select.h"
#include "gemm_rs/store.cuh"

namespace flux::gemm_rs {

void launch_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::TileOrder& order,
                int rows_per_shard, int num_sms, const SlotStore::Params& store, cudaStream_t stream);
void prepare_fp8();

}  // namespace flux::gemm_rs
