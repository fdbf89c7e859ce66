"""Products of a rank that torch and installed packages offer, of operands in 16 bits and in fp8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import Context, Lineup, library, tried
from flux.bench.cases.operands import Operand, Scaled, exact_calls
from flux.bench.model import VLLM
from flux.bench.suites import Problem
from flux.testing.compare import agree, require

_SCALES_OF_WEIGHT_ALIGNMENT = 4  # of the scales of a row of blocks, in cuBLAS


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
    product: Callable[[Any, Any, Tensor], Any]
    x: Callable[[Any], Any] = lambda x: x
    weight: Callable[[Any], Any] = lambda weight: weight

    def alone(self, lineup: Lineup, role: str, x: Operand, out: Tensor) -> None:
        """A candidate of its product."""
        laid_out, weights = self.x(x), [self.weight(weight) for weight in lineup.weights]
        lineup.add(self.name, role, lambda weight: self.product(laid_out, weight, out), weights)


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


def _scaled_mm(fast: bool, x: Scaled, weight: Scaled, out: Tensor) -> Any:
    how = {"out_dtype": out.dtype, "use_fast_accum": fast, "out": out}
    return torch._scaled_mm(x.q, weight.q, scale_a=x.scale, scale_b=weight.scale, **how)  # type: ignore[arg-type]


def _deep_gemm_x(x: Scaled) -> Scaled:
    return Scaled(x.q, import_module("deep_gemm").get_mn_major_tma_aligned_tensor(x.scale))


def _by_deep_gemm(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    import_module("deep_gemm").fp8_gemm_nt(tuple(x), tuple(weight), out, disable_ue8m0_cast=True)
    return out


def _by_vllm(x: Scaled, weight: Scaled, out: Tensor) -> Any:
    multiply = import_module("vllm._custom_ops").cutlass_scaled_mm
    return multiply(x.q, weight.q, x.scale, weight.scale, out.dtype)


def _by_flux(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
    return flux.gemm(x.q, weight.q, scale_x=x.scale, scale_w=weight.scale, out=out)


def _mm(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


_ALL, _WHOLE = ("tensor", "row", "block"), ("tensor", "row")
_by_torch, _by_torch_fast = (functools.partial(_scaled_mm, fast) for fast in (False, True))
# For what is summed without a product.
NOTHING = Library("", "peer", "torch", (), lambda x, weight, out: out)
OURS = Library("flux.gemm", "peer", "flux", _ALL, _by_flux)
LIBRARIES = (
    Library("_scaled_mm", "peer", "torch", _ALL, _by_torch, _torch_x, _torch_weight),
    Library("_scaled_mm, fast", "fast", "torch", _WHOLE, _by_torch_fast, _torch_x, _torch_weight),
    Library("DeepGEMM", "peer", "deep_gemm", ("block",), _by_deep_gemm, _deep_gemm_x),
    # Its kernels for Hopper are CUTLASS's FP8FastAccum.
    Library(VLLM, "fast", "vllm", _WHOLE, _by_vllm, _torch_x, _torch_weight),
)


def opened(problem: Problem, lineup: Lineup) -> list[Library]:
    """Those that multiply the operands of a row, and notes on others, which gave a wrong fp8 product."""
    if not problem.scales:
        return [Library(library(lineup.context), "peer", "torch", (), _mm)]
    found = []
    for each in LIBRARIES:
        if problem.scales not in each.kinds:
            continue
        if find_spec(each.package) is None:
            lineup.notes.append(f"{each.name} could not run: {each.package} is not installed")
            continue
        right, error = tried(functools.partial(_right, each, problem, lineup.context), lineup.context)
        if right is None:
            lineup.notes.append(f"{each.name} with {problem.scales} scales could not run: {error}")
        else:
            found.append(each)
    return found


def _right(each: Library, problem: Problem, context: Context) -> Library:
    """Raises RuntimeError if a library's product is wrong."""
    x, weight, want = next(exact_calls(replace(problem, op="gemm"), context))
    out = torch.empty(want.shape, dtype=context.dtype, device=context.device)
    got = each.product(each.x(x), each.weight(weight), out)
    require(agree({"product": got}, {"product": want.to(context.dtype)}))
    return each
