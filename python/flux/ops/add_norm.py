"""A residual added to a sum, and the RMSNorm of both, by one kernel, for adapters: without gradients."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from flux import _native
from flux.calls import front
from flux.calls.checks import Product
from flux.comm import registry, repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import process_group
from flux.ops.norm_and_quant import row_norm
from flux.ops.ways import ag_gemm
from flux.ops.ways.gemm_rs import GEMM_RS

Tensor = torch.Tensor
_OP, _WHOLE = repeat.operator(), repeat.operator()
_VECTOR = 8  # elements of 16 bits that the kernel loads at once


def add_norm_(
    total: Tensor, residual: Tensor, weight: Tensor, eps: float, within: repeat.Recipe | None = None
) -> Tensor:
    """total [rows, n] += residual, rounded; returns its RMSNorm. within: as of front.below."""
    recipe = repeat.Recipe(_OP, {"total": total, "residual": residual, "weight": weight, "eps": eps}, within)
    done = None if within is not None else repeat.without_group().call_below(*recipe.given)
    if done is not None:
        return cast(Tensor, done)
    if not _fits(total, residual, weight):
        total += residual
        return row_norm(total, weight, eps)
    out = torch.empty_like(total)
    enqueue = functools.partial(_kernel, total, residual, weight, eps, out)
    enqueue()
    front.remember("_add_norm", recipe, enqueue, results={"out": out})
    return out


def _fits(total: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the kernel reads and writes these in place."""
    tensors = (total, residual, weight)
    return (
        total.is_cuda
        and _native.available()
        and total.dtype in (torch.bfloat16, torch.float16)
        and total.numel() > 0
        and total.shape[1] % _VECTOR == 0
        and all(each.dtype == total.dtype and each.is_contiguous() for each in tensors)
        and all(each.data_ptr() % 16 == 0 for each in tensors)
    )


def scatter_norm_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    behind: tuple[Tensor, Tensor | None],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """gemm_rs of x [M, K/p], where p need not divide M, residual [⌈M/p⌉, N] or more rows added, RMSNorm,
    ag_gemm by the weight and bias `behind`, repeated as one. Returns [M, N], whose first ⌈M/p⌉ rows are the
    sum, and the product.
    """
    group, tokens = process_group(group_name), x.shape[0]
    if missing := -tokens % group.size():
        x = pad(x, (0, 0, 0, missing))
    given = (_WHOLE, tokens, x, weight, bias, residual, norm_weight, eps, *behind)
    calls = repeat.of_groups.get(group)
    done = None if calls is None else calls.call_below(*given)
    total, product = _call(group, *given[1:]) if done is None else done
    return total, product[:tokens] if missing else product


@torch.no_grad()
def _call(group: ProcessGroup, *given: Any) -> tuple[Tensor, Tensor]:
    tokens, x, weight, bias, residual, norm_weight, eps, next_weight, next_bias = given
    share = x.shape[0] // group.size()
    total = x.new_empty(tokens, weight.shape[0])
    names = ("tokens", "x", "weight", "bias", "residual", "norm_weight", "eps", "next_weight", "next_bias")
    recipe = repeat.Recipe(_WHOLE, dict(zip(names, given, strict=True)))
    front.below(GEMM_RS, Product(x, weight, bias, False, total[:share]), group, within=recipe)
    own = add_norm_(total[:share], residual[:share], norm_weight, eps, within=recipe)
    gathering = ag_gemm.Call(own, (next_weight,), (next_bias,), False)
    (product,) = front.below(ag_gemm.AG_GEMM, gathering, group, within=recipe)
    recipe.returns(total)
    recipe.returns(product)
    workspace = registry.find(group, x.device)
    if isinstance(workspace, CudaWorkspace):
        workspace.remember_parts(recipe, 3)
    return total, product


_kernel: Any = torch.ops.flux._add_norm.default
