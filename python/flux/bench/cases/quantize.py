"""flux.quantize of activations, against torch, vLLM's kernels, and a copy of as many bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import Candidate, Context, Lineup
from flux.bench.cases.operands import QUANTS, Scaled, quantized
from flux.bench.suites import Problem
from flux.ops import quantize
from flux.testing.scaled_data import dequantized

_OFF = 2**-3  # of a value at most, by rounding its scale another way than flux does


def check(problem: Problem, context: Context) -> str:
    """Bits and scales are those of the CPU path."""
    x, quant = _x(problem, context), QUANTS[problem.scales][0]
    x[0, 0], x[-1, -1] = 448.0, -1e-4
    got, want = quantized(x, quant), quantized(x.cpu(), quant)
    if not torch.equal(got.scale.cpu(), want.scale):
        return "scales are not those of the CPU path"
    wrong = got.q.cpu().view(torch.uint8) != want.q.view(torch.uint8)
    return f"{int(wrong.sum())} of {wrong.numel()} values have other bits" if bool(wrong.any()) else "exact"


def prepare(problem: Problem, context: Context) -> Lineup:
    x, quant = _x(problem, context), QUANTS[problem.scales][0]
    # A copy reads and writes as many bytes as quantisation: two are read and one is written of each element.
    half = torch.empty(x.numel() * 3 // 2, dtype=torch.uint8, device=context.device)
    copy = torch.empty_like(half)
    lineup = Lineup(context)
    lineup.add_call("flux", "flux", lambda: flux.quantize(x, quant))  # type: ignore[arg-type]
    lineup.add_call("copy", "comm", lambda: copy.copy_(half))
    lineup.add_call("torch", "peer", lambda: _by_torch(x, quant))
    if find_spec("vllm") is None:
        lineup.notes.append("vLLM could not run: vllm is not installed")
    else:
        lineup.attempt("vLLM", lambda: Candidate("vLLM", "peer", _vllm(x, quant)))
    return lineup


def _x(problem: Problem, context: Context) -> Tensor:
    m, _, k = problem.local(context.tp)
    generator = torch.Generator(context.device).manual_seed(1234)
    return torch.randn(m, k, generator=generator, device=context.device, dtype=context.dtype)


def _by_torch(x: Tensor, quant: str) -> Scaled:
    """As the CPU path does it."""
    q, scales = quantize.empty(x, quant, torch.float8_e4m3fn)
    quantize.by_torch(x, quant, False, q, scales)
    return Scaled(q, scales)


def _vllm(x: Tensor, quant: str) -> Callable[[], Any]:
    """vLLM's kernel, which has given values near those of x. Raises RuntimeError if it has not."""
    if quant == "group128":
        group = import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
        call = functools.partial(group.per_token_group_quant_fp8, x, 128, column_major_scales=True)
    else:
        ops = import_module("vllm._custom_ops")
        call = functools.partial(ops.scaled_fp8_quant, x, use_per_token_if_dynamic=quant == "row")
    q, scale = call()
    off = (dequantized(q, scale) - x.double()).abs() > _OFF * x.double().abs() + 1e-3
    if bool(off.any()):
        raise RuntimeError(f"wrong: {int(off.sum())} values are far from those of x")
    return call
