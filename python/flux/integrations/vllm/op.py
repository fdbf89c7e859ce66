"""The operators that vLLM's graphs contain. They need nothing of vLLM but its operator
torch.ops.vllm.all_reduce.

Those of fp8 layers also take the product that vLLM computes. Where flux is not used, it is the result, and
the graph is vLLM's; where flux is, the pass takes it away (graph.drop_products), and what only it needed.

Arguments, here and in rows.py:
    x: [M, K/p], in fp8 with scale_x.
    weight, bias: [N, K/p], and [N] or None, the same on all ranks.
    min_tokens: the first batch that is flux's.
    group_name, vllm_group: torch's name of the process group, and vLLM's.
    scale_x, scale_w, out_dtype: of fp8 operands, as in flux.gemm_ar.
    product: of fp8 operands: what vLLM computes on this rank, with the bias on one of them.
    quant, quant_scale, ue8m0: how vLLM quantises rows, its static scale if it has one, and whether scales are
        powers of two: as in flux.quantize.

Results are fresh tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch

import flux
from flux import _invariance
from flux.comm.repeat import PASSED_BY, needs_no_python
from flux.fp8.scales import Scaling, is_by_block
from flux.ops import gemm, gemm_ar
from flux.ops.explain import why_unfused

P = ParamSpec("P")
R = TypeVar("R")
Tensor = torch.Tensor
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "DEF")


def operator(
    fake: Callable[[Any], Any], run: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Defines an operator of vLLM's graphs with a function's name, parameters and types. A compiler gets the
    operator from a call of the function; elsewhere it runs as it is.

    Args:
        fake: makes results like the operator's of a namespace with its arguments.
        run: what the operator does, if that is not the function. It must not return an argument.
    """

    def define(function: Callable[P, R]) -> Callable[P, R]:
        name, signature = function.__name__, inspect.signature(function)
        schema: str = _torch_library.infer_schema(function, mutates_args=())
        # No size of a graph is among them.
        schema = schema.replace("SymInt", "int")
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, run or function, "CompositeExplicitAutograd")

        def fake_of(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return fake(SimpleNamespace(**given.arguments))

        _torch_library.register_fake(f"flux_vllm::{name}", fake_of, lib=_library)
        op = getattr(torch.ops.flux_vllm, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = (op if torch.compiler.is_compiling() else function)(*args, **kwargs)
            return result

        return call

    return define


@operator(lambda a: a.x.new_empty([*a.x.shape[:-1], a.weight.shape[0]], dtype=a.out_dtype or a.x.dtype))
def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    min_tokens: int,
    group_name: str,
    vllm_group: str,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    product: Tensor | None = None,
) -> Tensor:
    """Sum over ranks of x [..., K/p] · weightᵀ, plus bias: by flux from `min_tokens` rows on."""
    # Decided at run time and not while the graph is traced, because there the number of tokens would become a
    # constant.
    # A call that must be batch invariant and cannot be raises: other calls of the layer may have been.
    weight, bias, scale_w = plain(weight), plain(bias), plain(scale_w)
    ours = _tokens(x) >= min_tokens and (
        _invariance.active() or _runs_fused(x, weight, group_name, scale_x, out_dtype)
    )
    if ours or (scale_x is not None and product is None):
        with torch.no_grad():
            how: dict[str, Any] = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}
            result: Tensor = flux.gemm_ar(x, weight, bias, group=group_name, **how)
            return result
    if product is not None:
        return _all_reduce(product, vllm_group)
    partial = torch.nn.functional.linear(x, weight)
    total: Tensor = torch.ops.vllm.all_reduce(partial, group_name=vllm_group)
    return total if bias is None else total + bias


# An operator must not return its argument.
@operator(lambda a: torch.empty_like(a.product), lambda product, *of_layer: product.clone())
def scaled_linear(
    product: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_w: Tensor,
    quant: str,
    quant_scale: Tensor | None,
    ue8m0: bool,
) -> Tensor:
    """vLLM's product of an fp8 layer, with what flux needs to compute it itself, such as x before it is
    quantised. The pass takes it out of every graph; until then it tells sequence.py what the layer is.
    """
    return product


@operator(
    lambda a: (torch.empty_like(a.q), torch.empty_like(a.scale)),
    lambda q, scale, *how: (q.clone(), scale.clone()),
)
def quantised_rows(
    q: Tensor, scale: Tensor, x: Tensor, quant: str, quant_scale: Tensor | None, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """What vLLM's quantisation of x [M, K] gives, and how it does it, as of scaled_linear. The pass takes it
    out of every graph; until then it tells behind_norm.py what flux can compute with a norm.
    """
    return q, scale


def _below(x: Tensor, min_tokens: int, vllm_group: str) -> Tensor:
    # An operator must not return its argument.
    return x.clone() if _tokens(x) >= min_tokens else _all_reduce(x, vllm_group)


@operator(lambda a: torch.empty_like(a.x), _below)
def all_reduce_below(x: Tensor, min_tokens: int, vllm_group: str) -> Tensor:
    """Sum over ranks of x [tokens, N] by vLLM; from `min_tokens` on flux has summed x already."""
    return x if _tokens(x) >= min_tokens else _all_reduce(x, vllm_group)


def _all_reduce(x: Tensor, vllm_group: str) -> Tensor:
    # On CPUs, vLLM's all-reduce overwrites its argument and returns it.
    total: Tensor = torch.ops.vllm.all_reduce(x.clone() if x.is_cpu else x, group_name=vllm_group)
    return total


def _fake_norm(a: Any) -> list[Tensor]:
    both = [torch.empty_like(a.residual) for _ in range(1 + a.return_norm)]
    if a.quant is None:
        return both
    how = (a.quant, a.quant_scale, a.ue8m0, torch.float8_e4m3fn)
    return [*torch.ops.flux.quantize.default(a.residual, *how), *both]


@operator(_fake_norm)
def linear_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    quant: str | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = True,
) -> list[Tensor]:
    """linear_all_reduce by flux, residual and RMSNorm: norm and sum, or with `quant` as flux.gemm_ar."""
    with torch.no_grad():
        # The products of `serving` depend on the number of tokens.
        if scale_x is None and quant is None and gemm.in_graph(x) and not _invariance.active():
            given = (x, plain(weight), plain(bias), residual, norm_weight, eps, group_name)
            return list(gemm_ar.serving(*given))
        how: dict[str, Any] = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
        if scale_x is not None:
            how |= {"scale_x": scale_x, "scale_w": plain(scale_w), "out_dtype": residual.dtype}
        if quant is not None:
            how |= {"quant": quant, "quant_scale": plain(quant_scale), "ue8m0": ue8m0}
            how["return_norm"] = return_norm
        return list(flux.gemm_ar(x, plain(weight), plain(bias), group=group_name, **how))


@operator(lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[0] // (2 if a.swiglu else 1)))
def linear_behind_norm(x: Tensor, weight: Tensor, swiglu: bool) -> Tensor:
    """x [tokens, K] · weightᵀ; with `swiglu`, silu of the first half of its columns times the second."""
    with torch.no_grad():
        return gemm.serving(x, plain(weight), swiglu=swiglu)


def plain(tensor: MaybeTensor) -> MaybeTensor:
    """The same tensor without a class whose __torch_function__ Python would have to call. flux repeats calls
    without Python (flux.comm.repeat) only if no tensor has one.
    """
    if tensor is None or needs_no_python(tensor):
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


def _tokens(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _runs_fused(x: Tensor, weight: Tensor, group_name: str, scale_x: Any, out_dtype: Any) -> bool:
    """Whether flux runs the call fused; if not, vLLM's own all-reduce is the better choice."""
    if x.is_cpu:
        return True
    n, k = weight.shape
    scaling = scaling_of(scale_x, k, out_dtype)
    problem = (_tokens(x), n, k, x.dtype, x.device, group_name)
    return why_unfused("gemm_ar", *problem, scaling=scaling) is None


def scaling_of(scale_x: Tensor | None, k: int, out_dtype: torch.dtype | None) -> Scaling | None:
    """What a plan depends on, of fp8 rows with k elements; None: there are no scales."""
    if scale_x is None or out_dtype is None:
        return None
    return Scaling("block" if is_by_block(scale_x, k) else "row", out_dtype)
