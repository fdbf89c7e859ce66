"""The operators of a sequence-parallel model in vLLM's graphs, for batches of at least `from_tokens` tokens.

Only the residual is sharded, and only between these operators. It keeps its shape [M, N]: of M tokens on p
ranks, rank r has rows r·s to (r + 1)·s, s = ⌈M/p⌉, and they lie in the first s rows. The other rows are never
read. Smaller batches take the same operators with whole residuals, so every operator of a model agrees on
what a residual holds, because all of them see the same number of tokens. Needs nothing of vLLM but its
operators torch.ops.vllm.all_reduce and moe_forward.

Arguments beside those of op.py:
    residual: [M, N], sharded, or all of it if it is `whole`.
    norm_weight, eps: of RMSNorm, [N].
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch.nn.functional import linear, pad

import flux
from flux.comm.group import process_group
from flux.integrations.vllm.op import all_reduce_below, linear_all_reduce, operator, plain
from flux.ops import add_norm as joined
from flux.ops.gemm_ar import row_norm
from flux.ops.reduce_scatter import by_torch

Tensor = torch.Tensor
_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "FRAGMENT")
# Where norm_experts_scatter has its arguments: before those of vLLM's moe_forward, and behind them.
OURS_BEFORE, OURS_BEHIND = 5, 4
# So many arguments of moe_forward are made here: hidden states and router logits.
MADE = 2
_own_rows = ContextVar("experts get the rows of this rank", default=False)


@operator(lambda a: torch.empty_like(a.residual))
def linear_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
    residual: Tensor,
    whole: bool,
    from_tokens: int,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    product: Tensor | None = None,
) -> Tensor:
    """Sum over ranks of x · weightᵀ, plus bias and residual: own rows of the next residual [M, N]."""
    if x.shape[0] < from_tokens:
        of_fp8 = () if scale_x is None else (scale_x, scale_w, residual.dtype, product)
        return linear_all_reduce(x, weight, bias, min_tokens, group_name, vllm_group, *of_fp8) + residual
    total = torch.empty_like(residual)
    own = total[: share_of(x, group_name)]
    scaling: dict[str, Any] = {}
    if scale_x is not None:
        scale_x = scale_x if scale_x.numel() == 1 else for_all_ranks(scale_x, group_name)
        scaling = {"scale_x": scale_x, "scale_w": plain(scale_w), "out_dtype": own.dtype}
    weight, bias = plain(weight), plain(bias)
    with torch.no_grad():
        flux.gemm_rs(for_all_ranks(x, group_name), weight, bias, group=group_name, out=own, **scaling)
    own += own_rows(residual, whole, group_name)
    return total


@operator(lambda a: torch.empty_like(a.residual))
def sum_scatter(
    x: Tensor,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
    residual: Tensor,
    whole: bool,
    from_tokens: int,
) -> Tensor:
    """Sum over ranks of x [M, N or more], plus residual: own rows of the next residual [M, N]. What is more
    is cut off; from `min_tokens` rows on, flux has summed x already.
    """
    n = residual.shape[1]
    if x.shape[0] < from_tokens:
        return all_reduce_below(x, min_tokens, vllm_group)[:, :n] + residual
    total = torch.empty_like(residual)
    if len(x) >= min_tokens:
        own = own_rows(x, True, group_name)
    else:
        # Half of the all-reduce that vLLM would call. flux.reduce_scatter was not measured for such sums.
        own = x.new_empty(share_of(x, group_name), x.shape[1])
        by_torch(for_all_ranks(x, group_name), group_name, own)
    torch.add(own[:, :n], own_rows(residual, whole, group_name), out=total[: len(own)])
    return total


@operator(lambda a: a.residual.new_empty(a.residual.shape[0], a.weight.shape[0]))
def norm_gather_linear(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    from_tokens: int,
    group_name: str,
    scale_w: Tensor | None = None,
    quant: str | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    product: Tensor | None = None,
) -> Tensor:
    """RMSNorm of own rows; all ranks' rows · weightᵀ + bias: [M, C] with a weight [C, N]."""
    if residual.shape[0] < from_tokens:
        if product is not None:
            return product.clone()  # an operator must not return its argument
        return linear(row_norm(residual, norm_weight, eps), weight, bias)
    own = row_norm(own_rows(residual, False, group_name), norm_weight, eps)
    scaling: dict[str, Any] = {}
    if quant is not None:
        own, scale = flux.quantize(own, cast(Any, quant), scale=quant_scale, ue8m0=ue8m0)
        scaling = {"scale_x": scale, "scale_w": plain(scale_w), "out_dtype": residual.dtype}
    weight, bias = plain(weight), plain(bias)
    with torch.no_grad():
        gathered: Tensor = flux.ag_gemm(own, weight, bias, group=group_name, **scaling)
    return gathered[: residual.shape[0]]


@operator(
    lambda a: (
        torch.empty_like(a.residual),
        a.residual.new_empty(a.residual.shape[0], a.next_weight.shape[0]),
    )
)
def scatter_norm_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    residual: Tensor,
    whole: bool,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """linear_scatter, and norm_gather_linear of its result: [M, N] and [M, C]; from `from_tokens` on."""
    if whole:
        residual = own_rows(residual, True, group_name)
    weights = plain(weight), plain(bias)
    next_ones = plain(next_weight), plain(next_bias)
    return joined.scatter_norm_gather(x, *weights, residual, norm_weight, eps, next_ones, group_name)


@operator(lambda a: torch.empty_like(a.residual))
def norm_gather(
    residual: Tensor, norm_weight: Tensor, eps: float, from_tokens: int, group_name: str
) -> Tensor:
    """RMSNorm of own rows, then all ranks' rows: [M, N] → [M, N]."""
    if residual.shape[0] < from_tokens:
        return row_norm(residual, norm_weight, eps)
    own = row_norm(own_rows(residual, False, group_name), norm_weight, eps)
    return flux.all_gather(own, group=group_name)[: residual.shape[0]]


@operator(lambda a: torch.empty_like(a.residual))
def gather(residual: Tensor, from_tokens: int, group_name: str) -> Tensor:
    """All rows of a sharded residual: [M, N] → [M, N]."""
    if residual.shape[0] < from_tokens:
        return residual.clone()
    own = own_rows(residual, False, group_name)
    return flux.all_gather(own, group=group_name)[: residual.shape[0]]


def define_experts(moe_forward: Callable[..., Tensor]) -> None:
    """Defines norm_experts_scatter, once, for arguments of the function behind vLLM's moe_forward."""
    if hasattr(torch.ops.flux_vllm, "norm_experts_scatter"):
        return
    schema: str = _torch_library.infer_schema(moe_forward, mutates_args=())
    vllms = ", ".join(schema[1 : schema.index(")")].split(", ")[MADE:])
    before = "Tensor residual, Tensor norm_weight, float eps, Tensor? gate, Tensor? gate_bias"
    behind = "int min_tokens, int from_tokens, str group_name, str vllm_group"
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"norm_experts_scatter({before}, {vllms}, {behind}) -> Tensor", tags=tags)
    _library.impl("norm_experts_scatter", norm_experts_scatter, "CompositeExplicitAutograd")
    _torch_library.register_fake(
        "flux_vllm::norm_experts_scatter", lambda residual, *more: torch.empty_like(residual), lib=_library
    )


def norm_experts_scatter(*arguments: Any) -> Tensor:
    """RMSNorm of own rows, their experts, summed over ranks, plus the residual: own rows of the next one.

    Args:
        residual, norm_weight, eps: as above.
        gate, gate_bias: [experts, N] and [experts], or None if vLLM's runner has the gate itself.
        ...: arguments of vLLM's moe_forward behind hidden states and router logits.
        min_tokens, from_tokens, group_name, vllm_group: of sum_scatter.
    """
    residual, norm_weight, eps, gate, gate_bias = arguments[:OURS_BEFORE]
    rest = arguments[OURS_BEFORE:-OURS_BEHIND]
    min_tokens, from_tokens, group_name, vllm_group = arguments[-OURS_BEHIND:]

    def experts(residual: Tensor) -> Tensor:
        hidden = row_norm(residual, norm_weight, eps)
        logits = hidden if gate is None else linear(hidden, gate, gate_bias)
        result: Tensor = torch.ops.vllm.moe_forward(hidden, logits, *rest)
        return result

    if len(residual) < from_tokens:
        below = all_reduce_below(experts(residual), min_tokens, vllm_group)
        return torch.add(below, residual)
    total = torch.empty_like(residual)
    own = own_rows(residual, False, group_name)
    before = _own_rows.set(True)
    try:
        torch.add(experts(own), own, out=total[: share_of(residual, group_name)])
    finally:
        _own_rows.reset(before)
    return total


def rows_are_own() -> bool:
    """Whether vLLM's runner is called with this rank's rows, and not with those of all."""
    return _own_rows.get()


def share_of(x: Tensor, group_name: str) -> int:
    """How many rows a rank has, with those that pad the last ranks'."""
    return -(-x.shape[0] // process_group(group_name).size())


def own_rows(x: Tensor, whole: bool, group_name: str) -> Tensor:
    """This rank's rows of x, which has all rows if it is `whole`, and is sharded if not."""
    share = share_of(x, group_name)
    first = process_group(group_name).rank() * share if whole else 0
    return _padded(x[first : first + share], share)


def for_all_ranks(x: Tensor, group_name: str) -> Tensor:
    """x with rows of zeros behind it, so that all ranks have the same number."""
    return _padded(x, share_of(x, group_name) * process_group(group_name).size())


def _padded(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    if x.dtype == torch.float8_e4m3fn:  # torch pads no fp8; zero is the byte zero
        return _padded(x.view(torch.uint8), rows).view(x.dtype)
    return pad(x, (0, 0, 0, rows - x.shape[0]))
