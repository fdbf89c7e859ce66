"""Wrong uses of flux that a type checker finds.

Every line below is an error of the kind that its comment names; `mypy --strict` complains of comments that
nothing needs. It does not run.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flux
from flux.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    column_linear,
    row_linear,
)

x, w, b = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)

flux.gemmrs(x, w)  # type: ignore[attr-defined]
flux.layers.MLP(8, 16)  # type: ignore[attr-defined]
flux.gemm_rs([1.0], w)  # type: ignore[arg-type]
flux.gemm_rs(x, w, None, None)  # type: ignore[call-arg]
flux.gemm_rs(x, w, group=0)  # type: ignore[arg-type]
flux.gemm_rs(x, w, transpose=True)  # type: ignore[call-arg]
flux.ag_gemm(x, [w, w], b)  # type: ignore[call-overload]
one: Tensor = flux.ag_gemm(x, [w, w])  # type: ignore[assignment]
two: Tensor = flux.ag_gemm(x, w, return_gathered=True)  # type: ignore[assignment]
h, residual = flux.gemm_ar(x, w, eps="small")  # type: ignore[call-overload]
three: Tensor = flux.gemm_ar(x, w, norm_weight=b)  # type: ignore[assignment]
flux.gemm(x, w, scale_x=1.0)  # type: ignore[arg-type]
flux.gemm_rs(x, w, scale_x=b, scale_w=b, accumulate="no")  # type: ignore[arg-type]
flux.quantize(x, "rows")  # type: ignore[arg-type]
flux.reserve(max_m=1)  # type: ignore[call-arg]
flux.explain("gemm_rs", 1, 1, 1, dtype="bfloat16")  # type: ignore[arg-type]
flux.moe.route(x, w, num_experts="4")  # type: ignore[arg-type]
flux.moe.ag_scatter_gemm(x, w, None)  # type: ignore[arg-type]
flux.moe.MoEMLP(8, 8.0, 4)  # type: ignore[arg-type]
flux.moe.MoEMLP(8, 8, 4, experts=2)  # type: ignore[call-arg]
column_linear(x, [w], [1.0])  # type: ignore[list-item]
column_linear(x, [w], sequence_parallel="no")  # type: ignore[call-overload]
row_linear(x, [w])  # type: ignore[arg-type]
ColumnParallelLinear(8, 16, save_gathered="yes")  # type: ignore[arg-type]
ColumnParallelLinear(8, 16, seqence_parallel=True)  # type: ignore[call-arg]
RowParallelLinear(8, 16, save_gathered=True)  # type: ignore[call-arg]
ParallelMLP(8, 16, activation="relu")  # type: ignore[arg-type]
ParallelMLP(8, 16, init=0.02)  # type: ignore[arg-type]
ParallelMLP(8, 16, options={})  # type: ignore[call-arg]
RMSNorm([8])  # type: ignore[arg-type]
