"""What types the results of flux have: of each overload, and with each kind of group.

`mypy --strict` accepts it; it does not run (the examples of the documentation do, and are checked too).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import flux
from flux.layers import (
    ColumnParallelLinear,
    DeferredGrads,
    Fp8,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    clip_grad_norm_,
    column_linear,
    row_linear,
)

group = cast("dist.ProcessGroup | DeviceMesh | str | None", None)
mesh = cast(DeviceMesh, None)
x, weight, bias = torch.ones(8, 8), torch.ones(16, 8), torch.ones(16)
ids = torch.ones(8, 2, dtype=torch.int32)

rows: Tensor = flux.gemm_rs(x, weight.t(), transpose_weight=True, out=torch.empty(4, 16), group=group)
one: Tensor = flux.ag_gemm(x, weight, bias, group=group)
pair: tuple[Tensor, Tensor] = flux.ag_gemm(x, weight, group=group, return_gathered=True)
many: list[Tensor] = flux.ag_gemm(x, [weight, weight], [bias, None], group=group)
q, k, v = flux.ag_gemm(x, (weight, weight, weight), group=group)
both: tuple[list[Tensor], Tensor] = flux.ag_gemm(x, [weight], group=group, return_gathered=True)
total: Tensor = flux.all_reduce(x, group=group, out=torch.empty_like(x))
normed: tuple[Tensor, Tensor] = flux.all_reduce(x, residual=x, norm_weight=x[0], eps=None)
h: Tensor = flux.gemm_ar(x, weight, residual=x)
norm = nn.RMSNorm(8)
h, residual = flux.gemm_ar(h, weight, residual=x, norm_weight=norm.weight, eps=norm.eps)
alone: list[Tensor] = [
    flux.gemm(x, weight, bias, out=rows),
    flux.all_gather(x, group=group),
    flux.reduce_scatter(x, group=group),
]
plan: flux.Plan = flux.explain("gemm_rs", 64, 64, 64, dtype=torch.float32, group=group)
told: list[str] = [str(plan.by_flux), plan.reason, plan.config_name]

(q, scale_x), (w, scale_w) = flux.quantize(x, ue8m0=True), flux.quantize(weight, "block128")
product: Tensor = flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float16)
pair_of_rows: tuple[Tensor, Tensor] = flux.quantize(x, "row", dtype=torch.float8_e5m2)
flux.gemm_rs(pair_of_rows[0], w, scale_x=pair_of_rows[1], scale_w=scale_w, accumulate="fast")

routing: flux.moe.Routing = flux.moe.route(ids, x, 4, ep_size=2, max_tokens=8)
out: Tensor = flux.moe.gemm_gather_rs(flux.moe.ag_scatter_gemm(x, weight, routing), weight, routing)
layer = flux.moe.MoEMLP(8, 16, num_experts=4, activation="swiglu", init=nn.init.zeros_, device="cpu")
again: Tensor = layer(x, ids, x)
grads: Tensor = flux.grouped_wgrad(flux.grouped_gemm(x, weight, ids, activation="gelu"), x, ids)

rms = RMSNorm(8, eps=None, group=mesh, device="cpu", dtype=torch.float32)
mlp = ParallelMLP(8, 16, activation="swiglu", init=lambda w: nn.init.normal_(w, std=0.02), group=mesh)
up = ColumnParallelLinear(8, 16, bias=False, group=mesh, save_gathered=True)
down = RowParallelLinear(16, 8, group=mesh, init=nn.init.zeros_)
h = up(mlp(rms(x)))
h = down(h)
total = clip_grad_norm_(mlp.parameters(), 1.0)
gate, other = column_linear(x, [weight, weight], [None, bias], group=mesh)
scaled: Tensor = column_linear(x, weight, group=mesh, fp8=Fp8("block"))
(kept,) = column_linear(x, [weight], group=mesh, save_gathered="auto", deferred=DeferredGrads())
summed: Tensor = row_linear(gate * other, weight, group=mesh, sequence_parallel=False)
