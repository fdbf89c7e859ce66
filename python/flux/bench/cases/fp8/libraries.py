"""Products of fp8 operands that torch and installed packages offer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flux.bench.cases.common import Context, agree, compare, tried
from flux.bench.cases.fp8.data import Scaled, exact_case, flux_product, of_rank
from flux.bench.model import passed
from flux.bench.suites import Problem

_SCALES_OF_WEIGHT_ALIGNMENT = 4  # of the scales of a row of blocks, in cuBLAS
Layout = Callable[[Scaled], Any]


@dataclass(frozen=True)
class Library:
    """How a package multiplies: x and weight are laid out once, product(x, weight, out) is timed.

    role: "peer", or "fast" if sums stay in the tensor cores. package: that must be installed. kinds: of
    scales.
    """

    name: str
    role: str
    package: str
    kinds: tuple[str, ...]
    x: Layout
    weight: Layout
    product: Callable[[Any, Any, Tensor], Tensor]


def _torch_x(x: Scaled) -> Scaled:
    if x.scale.numel() == 1 or x.scale.shape[1] == 1:
        return Scaled(x.q, x.scale.reshape(() if x.scale.numel() == 1 else (-1, 1)))
    return Scaled(x.q, x.scale.t().contiguous().t())


def _torch_weight(weight: Scaled) -> Scaled:
    n, k = weight.q.shape
    scale = weight.scale
    if scale.numel() == 1 or scale.numel() == n:
        return Scaled(weight.q.t(), scale.reshape(() if scale.numel() == 1 else (1, -1)))
    columns = scale.shape[1]
    width = -(-columns // _SCALES_OF_WEIGHT_ALIGNMENT) * _SCALES_OF_WEIGHT_ALIGNMENT
    padded = scale.new_zeros(scale.shape[0], width)
    padded[:, :columns] = scale
    return Scaled(weight.q.t(), padded[:, :columns].t())


def _by_torch(fast: bool, x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    scales = {"scale_a": x.scale, "scale_b": weight.scale}
    result: Tensor = torch._scaled_mm(
        x.q, weight.q, **scales, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )
    return result


def _as_it_is(operand: Scaled) -> Scaled:
    return operand


def _deep_gemm_x(x: Scaled) -> Scaled:
    return Scaled(x.q, import_module("deep_gemm").get_mn_major_tma_aligned_tensor(x.scale))


def _by_deep_gemm(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    import_module("deep_gemm").fp8_gemm_nt(tuple(x), tuple(weight), out, disable_ue8m0_cast=True)
    return out


def _by_vllm(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    result: Tensor = import_module("vllm._custom_ops").cutlass_scaled_mm(
        x.q, weight.q, x.scale, weight.scale, out.dtype
    )
    return result


def _by_flux(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    return flux_product(x, weight, out=out)


_ALL, _WHOLE = ("tensor", "row", "block"), ("tensor", "row")
OURS = Library("flux.gemm", "peer", "flux", _ALL, _as_it_is, _as_it_is, _by_flux)
LIBRARIES = (
    Library(
        "_scaled_mm", "peer", "torch", _ALL, _torch_x, _torch_weight, functools.partial(_by_torch, False)
    ),
    Library(
        "_scaled_mm, fast",
        "fast",
        "torch",
        _WHOLE,
        _torch_x,
        _torch_weight,
        functools.partial(_by_torch, True),
    ),
    Library("DeepGEMM", "peer", "deep_gemm", ("block",), _deep_gemm_x, _as_it_is, _by_deep_gemm),
    Library("vLLM CUTLASS", "peer", "vllm", _WHOLE, _torch_x, _torch_weight, _by_vllm),
)


def opened(problem: Problem, m: int, n: int, k: int, context: Context) -> tuple[list[Library], list[str]]:
    """The libraries that gave the right product of operands of this size, and why others did not. A
    collective.
    """
    found, notes = [], []
    for library in LIBRARIES:
        if problem.scales not in library.kinds:
            continue
        if find_spec(library.package) is None:
            notes.append(f"{library.name} could not run: {library.package} is not installed")
            continue
        right, error = tried(functools.partial(_right, library, problem, m, n, k, context), context)
        if right is None:
            notes.append(f"{library.name} with {problem.scales} scales could not run: {error}")
        else:
            found.append(library)
    return found, notes


def _right(library: Library, problem: Problem, m: int, n: int, k: int, context: Context) -> Library:
    """Raises RuntimeError if a library's product is wrong."""
    case = exact_case(problem, m, n, k, context)
    x, weight = of_rank(case, context.rank, context)
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)
    got = library.product(library.x(x), library.weight(weight), out)
    want = case.product(context.rank, context.rank, context.device).to(context.dtype)
    said = compare(got, want)
    if said != "exact":
        said = agree({"product": got}, {"product": want})
    if not passed(said):
        raise RuntimeError(f"wrong: {said}")
    return library
