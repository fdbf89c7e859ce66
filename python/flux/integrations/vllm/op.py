"""The operators that vLLM's graphs contain. They need nothing of vLLM but its operator
torch.ops.vllm.all_reduce.
"""

from __future__ import annotations

from typing import Any

import torch

import flux
from flux import _invariance
from flux.ops.plan import why_unfused

_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "DEF")
# group_name: of torch's process group. vllm_group: vLLM's name of the same group.
_library.define(
    "linear_all_reduce(Tensor x, Tensor weight, Tensor? bias, int min_tokens, str group_name, str vllm_group)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_all_reduce_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight,"
    " float eps, str group_name) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "all_reduce_below(Tensor x, int min_tokens, str vllm_group) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
) -> torch.Tensor:
    """Sum over ranks of x · weightᵀ, plus bias once: by flux from `min_tokens` rows on, by vLLM below.

    Args:
        x: [..., K/p].
        weight: [N, K/p].
        bias: [N], the same on all ranks.

    Returns:
        [..., N], a fresh tensor.
    """
    op = _op if torch.compiler.is_compiling() else _run
    result: torch.Tensor = op(x, weight, bias, min_tokens, group_name, vllm_group)
    return result


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
) -> torch.Tensor:
    # Decided at run time and not while the graph is traced, because there the number of tokens would become a
    # constant.
    # A call that must be batch invariant and cannot be raises: other calls of the layer may have been.
    if _tokens(x) >= min_tokens and (_invariance.active() or _runs_fused(x, weight, group_name)):
        with torch.no_grad():
            return flux.gemm_ar(x, weight, bias, group=group_name)
    partial = torch.nn.functional.linear(x, weight)
    total: torch.Tensor = torch.ops.vllm.all_reduce(partial, group_name=vllm_group)
    return total if bias is None else total + bias


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


def all_reduce_below(x: torch.Tensor, min_tokens: int, vllm_group: str) -> torch.Tensor:
    """Sum over ranks of x [tokens, N] by vLLM, if there are fewer than `min_tokens`; from there on flux has
    summed x already, and it is returned.
    """
    if torch.compiler.is_compiling():
        result: torch.Tensor = torch.ops.flux_vllm.all_reduce_below.default(x, min_tokens, vllm_group)
        return result
    return x if _tokens(x) >= min_tokens else _all_reduce(x, vllm_group)


def _run_below(x: torch.Tensor, min_tokens: int, vllm_group: str) -> torch.Tensor:
    # An operator must not return its argument.
    return x.clone() if _tokens(x) >= min_tokens else _all_reduce(x, vllm_group)


def _all_reduce(x: torch.Tensor, vllm_group: str) -> torch.Tensor:
    # On CPUs, vLLM's all-reduce overwrites its argument and returns it.
    total: torch.Tensor = torch.ops.vllm.all_reduce(x.clone() if x.is_cpu else x, group_name=vllm_group)
    return total


def _run_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear_all_reduce by flux, then residual and RMSNorm; returns the norm and the sum."""
    with torch.no_grad():
        return flux.gemm_ar(
            x, weight, bias, group=group_name, residual=residual, norm_weight=norm_weight, eps=eps
        )


def _fake_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [*x.shape[:-1], weight.shape[0]]
    return x.new_empty(shape), x.new_empty(shape)


_library.impl("linear_all_reduce", _run, "CompositeExplicitAutograd")
_library.impl("linear_all_reduce_norm", _run_norm, "CompositeExplicitAutograd")
_library.impl("all_reduce_below", _run_below, "CompositeExplicitAutograd")
_torch_library.register_fake("flux_vllm::linear_all_reduce", _fake, lib=_library)
_torch_library.register_fake("flux_vllm::linear_all_reduce_norm", _fake_norm, lib=_library)
_torch_library.register_fake(
    "flux_vllm::all_reduce_below", lambda x, min_tokens, vllm_group: torch.empty_like(x), lib=_library
)
_op: Any = torch.ops.flux_vllm.linear_all_reduce.default


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _runs_fused(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> bool:
    """Whether flux runs the call fused; if not, vLLM's own all-reduce is the better choice."""
    if x.is_cpu:
        return True
    n, k = weight.shape
    return why_unfused("gemm_ar", _tokens(x), n, k, x.dtype, x.device, group_name) is None
