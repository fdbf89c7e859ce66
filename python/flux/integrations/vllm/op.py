"""The operators that vLLM's graphs contain. They need nothing of vLLM but its operator
torch.ops.vllm.all_reduce.

Those of fp8 layers also take the product that vLLM computes. Where flux is not used, it is the result, and
the graph is vLLM's; where flux is, the pass takes it away (graph.drop_products), and what only it needed.
"""

from __future__ import annotations

from typing import Any

import torch

import flux
from flux import _invariance
from flux.calls.dispatch import PASSED_BY, needs_no_python
from flux.fp8.scales import Scaling, is_by_block
from flux.ops import gemm, gemm_ar
from flux.ops.explain import why_unfused

_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "DEF")
_SCALES = "Tensor? scale_x=None, Tensor? scale_w=None"
# group_name: of torch's process group. vllm_group: vLLM's name of the same group.
_library.define(
    "linear_all_reduce(Tensor x, Tensor weight, Tensor? bias, int min_tokens, str group_name, str vllm_group,"
    f" {_SCALES}, ScalarType? out_dtype=None, Tensor? product=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_all_reduce_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight,"
    f" float eps, str group_name, {_SCALES}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_all_reduce_norm_quant(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor norm_weight,"
    " float eps, str group_name, Tensor? scale_x, Tensor? scale_w, str quant, Tensor? quant_scale,"
    " bool ue8m0, bool return_norm) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_behind_norm(Tensor x, Tensor weight, bool swiglu) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "quantised_rows(Tensor q, Tensor scale, Tensor x, str quant, Tensor? quant_scale, bool ue8m0)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "scaled_linear(Tensor product, Tensor x, Tensor weight, Tensor? bias, Tensor scale_w, str quant,"
    " Tensor? quant_scale, bool ue8m0) -> Tensor",
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
    *scaling: Any,
) -> torch.Tensor:
    """Sum over ranks of x · weightᵀ, plus bias once: by flux from `min_tokens` rows on, by vLLM below.

    Args:
        x: [..., K/p].
        weight: [N, K/p].
        bias: [N], the same on all ranks.
        scaling: of fp8 operands: scales of x and of the weight as in flux.gemm_ar, the result's dtype, and
            vLLM's product of this rank [..., N] with the bias on one of them, or None.

    Returns:
        [..., N], a fresh tensor.
    """
    op = _op if torch.compiler.is_compiling() else _run
    result: torch.Tensor = op(x, weight, bias, min_tokens, group_name, vllm_group, *scaling)
    return result


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    # Decided at run time and not while the graph is traced, because there the number of tokens would become a
    # constant.
    # A call that must be batch invariant and cannot be raises: other calls of the layer may have been.
    weight, bias, scale_w = plain(weight), plain_if_any(bias), plain_if_any(scale_w)
    ours = _tokens(x) >= min_tokens and (
        _invariance.active() or _runs_fused(x, weight, group_name, scale_x, out_dtype)
    )
    if ours or (scale_x is not None and product is None):
        with torch.no_grad():
            how: dict[str, Any] = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}
            result: torch.Tensor = flux.gemm_ar(x, weight, bias, group=group_name, **how)
            return result
    if product is not None:
        return _all_reduce(product, vllm_group)
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
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]], dtype=out_dtype or x.dtype)


def scaled_linear(product: torch.Tensor, *of_layer: Any) -> torch.Tensor:
    """vLLM's product of an fp8 layer, with what flux needs to compute it itself. The pass takes it out of
    every graph; until then it tells sequence.py what the layer is.

    Args:
        of_layer: x [..., K] before it is quantised, weight [N, K], bias [N] or None, scales of the weight,
            how vLLM quantises x, its static scale or None, and whether scales are powers of two: as in
            flux.quantize.
    """
    result: torch.Tensor = torch.ops.flux_vllm.scaled_linear.default(product, *of_layer)
    return result


def quantised_rows(
    q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's quantisation of x [M, K] gives, and how it does it: as of_layer of scaled_linear ends. The
    pass takes it out of every graph; until then it tells quantised.py what flux can compute with a norm.
    """
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.flux_vllm.quantised_rows.default(q, scale, x, *how)
    return result


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
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear_all_reduce by flux, then residual and RMSNorm; returns the norm and the sum."""
    # The products of `serving` depend on the number of tokens.
    if scale_x is None and gemm.in_graph(x) and not _invariance.active():
        of_sum = (x, plain(weight), plain_if_any(bias), residual, norm_weight, eps, group_name)
        with torch.no_grad():
            return gemm_ar.serving(*of_sum)
    result: tuple[torch.Tensor, torch.Tensor] = _with_norm(
        x, weight, bias, residual, norm_weight, eps, group_name, scale_x, scale_w
    )
    return result


def _run_behind_norm(x: torch.Tensor, weight: torch.Tensor, swiglu: bool) -> torch.Tensor:
    """x [tokens, K] · weightᵀ; with `swiglu`, silu of the first half of its columns times the second."""
    with torch.no_grad():
        return gemm.serving(x, plain(weight), swiglu=swiglu)


def _with_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group_name: str,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
    **quant: Any,
) -> Any:
    weight, bias, scale_w = plain(weight), plain_if_any(bias), plain_if_any(scale_w)
    how: dict[str, Any] = {"residual": residual, "norm_weight": norm_weight, "eps": eps, **quant}
    if scale_x is not None:
        how |= {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": residual.dtype}
    with torch.no_grad():
        return flux.gemm_ar(x, weight, bias, group=group_name, **how)


def _run_norm_quant(*arguments: Any) -> list[torch.Tensor]:
    """linear_all_reduce_norm, quantised as in flux.gemm_ar: returns what that does."""
    *of_sum, quant, quant_scale, ue8m0, return_norm = arguments
    how = {"quant": quant, "quant_scale": plain_if_any(quant_scale), "ue8m0": ue8m0}
    return list(_with_norm(*of_sum, **how, return_norm=return_norm))


def _fake_norm_quant(*arguments: Any) -> list[torch.Tensor]:
    residual, (quant, quant_scale, ue8m0, return_norm) = arguments[3], arguments[-4:]
    q, scale = torch.ops.flux.quantize.default(residual, quant, quant_scale, ue8m0, torch.float8_e4m3fn)
    norms = [torch.empty_like(residual)] if return_norm else []
    return [q, scale, torch.empty_like(residual), *norms]


def _fake_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    group_name: str,
    *scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


_library.impl("linear_all_reduce", _run, "CompositeExplicitAutograd")
_library.impl("linear_behind_norm", _run_behind_norm, "CompositeExplicitAutograd")
_library.impl("linear_all_reduce_norm", _run_norm, "CompositeExplicitAutograd")
# An operator must not return its argument.
_library.impl("scaled_linear", lambda product, *of_layer: product.clone(), "CompositeExplicitAutograd")
_library.impl("linear_all_reduce_norm_quant", _run_norm_quant, "CompositeExplicitAutograd")
_library.impl(
    "quantised_rows", lambda q, scale, x, *how: (q.clone(), scale.clone()), "CompositeExplicitAutograd"
)
_library.impl("all_reduce_below", _run_below, "CompositeExplicitAutograd")
_torch_library.register_fake("flux_vllm::linear_all_reduce", _fake, lib=_library)
_torch_library.register_fake("flux_vllm::linear_all_reduce_norm", _fake_norm, lib=_library)
_torch_library.register_fake(
    "flux_vllm::linear_behind_norm",
    lambda x, weight, swiglu: x.new_empty(x.shape[0], weight.shape[0] // (2 if swiglu else 1)),
    lib=_library,
)
_torch_library.register_fake(
    "flux_vllm::scaled_linear", lambda product, *of_layer: torch.empty_like(product), lib=_library
)
_torch_library.register_fake("flux_vllm::linear_all_reduce_norm_quant", _fake_norm_quant, lib=_library)
_torch_library.register_fake(
    "flux_vllm::quantised_rows",
    lambda q, scale, x, *how: (torch.empty_like(q), torch.empty_like(scale)),
    lib=_library,
)
_torch_library.register_fake(
    "flux_vllm::all_reduce_below", lambda x, min_tokens, vllm_group: torch.empty_like(x), lib=_library
)
_op: Any = torch.ops.flux_vllm.linear_all_reduce.default


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without a class whose __torch_function__ Python would have to call. flux repeats calls
    without Python (flux.comm.repeat) only if no tensor has one.
    """
    if needs_no_python(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def pass_by(weights: type[torch.nn.Parameter]) -> bool:
    """Takes a __torch_function__ from a class of weights that does what torch does without it, as vLLM's:
    with it, each operator that takes such a weight is called twice, the first time by Python. Compilers may
    need it, so not before they are done. Returns whether there was one.
    """
    own = vars(weights).get("__torch_function__")
    code = getattr(getattr(own, "__func__", None), "__code__", None)
    inherited = getattr(super(weights, weights), "__torch_function__", None)
    if code is None or {*code.co_names} - {"super", "__torch_function__"} or inherited is not PASSED_BY:
        return False
    weights.__torch_function__ = PASSED_BY  # type: ignore[assignment, method-assign]
    return True


def plain_if_any(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As plain, for an optional argument."""
    return None if tensor is None else plain(tensor)


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _runs_fused(x: torch.Tensor, weight: torch.Tensor, group_name: str, scale_x: Any, out_dtype: Any) -> bool:
    """Whether flux runs the call fused; if not, vLLM's own all-reduce is the better choice."""
    if x.is_cpu:
        return True
    n, k = weight.shape
    scaling = scaling_of(scale_x, k, out_dtype)
    problem = (_tokens(x), n, k, x.dtype, x.device, group_name, False, scaling)
    return why_unfused("gemm_ar", *problem) is None


def scaling_of(scale_x: torch.Tensor | None, k: int, out_dtype: torch.dtype | None) -> Scaling | None:
    """What a plan depends on, of fp8 rows with k elements; None: there are no scales."""
    if scale_x is None or out_dtype is None:
        return None
    return Scaling("block" if is_by_block(scale_x, k) else "row", out_dtype)
