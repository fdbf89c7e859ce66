"""Collectives with torch only. scaling: scale_x, scale_w, out_dtype, accumulate."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flux._memory import movable, wide_type
from flux.comm.group import GroupLike, resolve_group
from flux.fp8 import scales as fp8
from flux.ops.gemm import reference as gemm

Tensor = torch.Tensor


def all_gather(x: Tensor, group: GroupLike = None) -> Tensor:
    return torch.cat(_of_all(x, group))


def all_reduce(x: Tensor, group: GroupLike = None, residual: Tensor | None = None) -> Tensor:
    """Summed in fp32 (or float64) in rank order, plus residual, rounded once."""
    total = _sum(x.to(wide_type(x.dtype)), group)
    return (total if residual is None else total + residual).to(x.dtype)


def reduce_scatter(x: Tensor, group: GroupLike = None) -> Tensor:
    return _own_rows(all_reduce(x, group), group)


def gemm_rs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    *scaling: Any,
) -> Tensor:
    """fp32 products, summed in rank order, bias, rounded once."""
    dtype = fp8.result_dtype(x, fp8.given("gemm_rs", *scaling))
    wide = torch.float32 if scaling else wide_type(dtype)
    if scaling:
        scaling = (*scaling[:2], wide, *scaling[3:])
    else:
        x, weight = x.to(wide), weight.to(wide)
    total = _own_rows(_sum(gemm(x, weight, None, transpose_weight, *scaling), group), group)
    return (total if bias is None else total + bias).to(dtype)


def ag_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    *scaling: Any,
) -> Tensor:
    scales = fp8.given("ag_gemm", *scaling)
    if scales is not None:
        rows = fp8.of_elements(scales.canonical_x(x.shape[-1]), x.shape[:-1].numel())
        scaling = (all_gather(rows, group), *scaling[1:])
    return gemm(all_gather(x, group), weight, bias, transpose_weight, *scaling)


def gemm_ar(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
    *scaling: Any,
) -> Tensor:
    """fp32 products, rounded; summed in rank order, bias, residual, rounded. Of one rank as that does it."""
    if resolve_group(group, "gemm_ar").size() == 1:
        product = gemm(x, weight, bias, transpose_weight, *scaling)
        return product if residual is None else product + residual
    product = gemm(x, weight, None, transpose_weight, *scaling)
    total = _sum(product.to(wide_type(x.dtype)), group)
    for addend in (bias, residual):
        total = total if addend is None else total + addend
    return total.to(product.dtype)


def _of_all(x: Tensor, group: GroupLike) -> list[Tensor]:
    pg, plain = resolve_group(group, "all_gather"), movable(x.contiguous())
    gathered = [torch.empty_like(plain) for _ in range(pg.size())]
    dist.all_gather(gathered, plain, group=pg)
    return [each.view(x.dtype) for each in gathered]


def _sum(x: Tensor, group: GroupLike) -> Tensor:
    """In rank order."""
    total = torch.zeros_like(x)
    for other in _of_all(x, group):
        total += other
    return total


def _own_rows(x: Tensor, group: GroupLike) -> Tensor:
    pg = resolve_group(group, "reduce_scatter")
    rows = x.shape[0] // pg.size()
    return x[pg.rank() * rows :][:rows]
