"""Gradients of weights: gradᵀ · x, or accumulated in a buffer over several micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from flux.calls import argument_types, checks
from flux.calls.schemas import library


def weight_grad(grad_output: torch.Tensor, x: torch.Tensor, transpose_weight: bool = False) -> torch.Tensor:
    """Gradient of the weight in x · weightᵀ.

    Args:
        grad_output: [..., N]
        x: [..., K], with the same leading dimensions, flattened here; dtype and device of `grad_output`.

    Returns:
        [N, K], or [K, N] with `transpose_weight`, accumulated in fp32 (fp64 for fp64) and rounded once.
    """
    left, right = (x, grad_output) if transpose_weight else (grad_output, x)
    a, b = _matrix(left).t(), _matrix(right)
    if a.is_cuda:
        return torch.mm(a, b)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(wide), b.to(wide)).to(x.dtype)


def wgrad_accum(grad_output: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad += grad_outputᵀ · x, in one pass where the GPU's GEMM can.

    What Megatron's gradient accumulation fusion does, without Apex. For a weight [K, N] swap the first two
    arguments.

    Args:
        grad_output: [..., N], gradient of the result of x · weightᵀ.
        x: [..., K], with the same leading dimensions; dtype and device of `grad_output`.
        main_grad: [N, K], of the same dtype or fp32 (for fp64: fp64); on the same device. An fp32 sum of
            16-bit gradients is rounded nowhere else: products and sums are fp32.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; or `main_grad` shares memory
            with another argument.

    Example::

        main_grad = torch.zeros(32, 64)
        for _ in range(2):  # two micro-batches
            x, grad_output = torch.ones(8, 64), torch.ones(8, 32)
            flux.wgrad_accum(grad_output, x, main_grad)
        assert (main_grad == 16.0).all()
    """
    argument_types.check("wgrad_accum", grad_output=grad_output, x=x, main_grad=main_grad)
    checks.no_backward("wgrad_accum", grad_output=grad_output, x=x, main_grad=main_grad)
    _op(grad_output, x, main_grad)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)


def _fake(grad_output: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor) -> None:
    op = "wgrad_accum"
    if x.dim() < 2:
        checks.fail(op, "x", "at least 2 dimensions [m, k]", f"{x.dim()}")
    if grad_output.shape[:-1] != x.shape[:-1]:
        expected = f"the leading dimensions of x, {list(x.shape[:-1])}"
        checks.fail(op, "grad_output", expected, f"shape {list(grad_output.shape)}")
    checks.grads(op, x, grad_output, main_grad, [grad_output.shape[-1], x.shape[-1]])


def _run(grad_output: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor) -> None:
    _fake(grad_output, x, main_grad)
    checks.separate("wgrad_accum", "main_grad", main_grad, grad_output, x)
    a, b = _matrix(grad_output).t(), _matrix(x)
    if not x.is_cuda:
        wide = torch.promote_types(x.dtype, torch.float32)
        main_grad.copy_(torch.addmm(main_grad.to(wide), a.to(wide), b.to(wide)))
    elif main_grad.dtype == x.dtype:
        torch.addmm(main_grad, a, b, out=main_grad)
    else:
        torch.addmm(main_grad, a, b, out_dtype=main_grad.dtype, out=main_grad)


for _device in ("CPU", "CUDA"):
    library.impl("wgrad_accum", _run, _device)
torch.library.register_fake("flux::wgrad_accum", _fake, lib=library)

_op: Any = torch.ops.flux.wgrad_accum.default
