"""Gradients of weights, dense ones and experts': gradᵀ · x, stored, or added to a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flux import _env
from flux._log import say_once
from flux._memory import aligned, wide_type
from flux.calls import argument_types, checks, transforms
from flux.calls.schemas import implement
from flux.comm import cuda
from flux.ops.grouped_gemm import checked_bounds, torch_grouped_mm
from flux.plan.choose import PlanInput, why_not_fused

Tensor = torch.Tensor
# The bit of a kernel's choice that fetches what is added to before; the others are a tile (csrc/moe/moe.h).
PREFETCHES = 1 << 8


def weight_grad(grad_output: Tensor, x: Tensor, transpose_weight: bool = False) -> Tensor:
    """Gradient [N, K] (or [K, N]) of the weight in x [..., K] · weightᵀ, from grad_output [..., N]."""
    left, right = (x, grad_output) if transpose_weight else (grad_output, x)
    a, b = _matrix(left).t(), _matrix(right)
    if a.is_cuda:
        return torch.mm(a, b)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(wide), b.to(wide)).to(x.dtype)


def wgrad_accum(grad_output: Tensor, x: Tensor, main_grad: Tensor) -> None:
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
    torch.ops.flux.wgrad_accum.default(grad_output, x, main_grad)


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.flatten(0, -2)


def _dense_fake(grad_output: Tensor, x: Tensor, main_grad: Tensor) -> None:
    op = "wgrad_accum"
    if x.dim() < 2:
        checks.fail(op, "x", "at least 2 dimensions [m, k]", f"{x.dim()}")
    if grad_output.shape[:-1] != x.shape[:-1]:
        expected = f"the leading dimensions of x, {list(x.shape[:-1])}"
        checks.fail(op, "grad_output", expected, f"shape {list(grad_output.shape)}")
    checks.grads(op, x, grad_output, main_grad, [grad_output.shape[-1], x.shape[-1]])


def _dense(grad_output: Tensor, x: Tensor, main_grad: Tensor) -> None:
    _dense_fake(grad_output, x, main_grad)
    checks.separate("wgrad_accum", "main_grad", main_grad, grad_output, x)
    a, b = _matrix(grad_output).t(), _matrix(x)
    if not x.is_cuda:
        wide = torch.promote_types(x.dtype, torch.float32)
        main_grad.copy_(torch.addmm(main_grad.to(wide), a.to(wide), b.to(wide)))
    elif main_grad.dtype == x.dtype:
        torch.addmm(main_grad, a, b, out=main_grad)
    else:
        torch.addmm(main_grad, a, b, out_dtype=main_grad.dtype, out=main_grad)


def grouped_wgrad(grad_output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad_output[rows of e]ᵀ · x[rows of e] for each expert e: gradients of flux.grouped_gemm's weights.

    Nothing is read on the host, but for types and sizes that torch has no grouped GEMM for.

    Args:
        grad_output: [M, N], gradient of the products, sorted by expert.
        x: [M, K]; dtype (bfloat16, float16, float32 or float64) and device of `grad_output`.
        offsets: int32 [E + 1]. Rows offsets[e] to offsets[e + 1] are expert e's; the first entry is 0, none
            is smaller than the one before, and the last is at most M. Checked on CPUs only. Rows from
            offsets[E] on do not count, whatever they hold.

    Returns:
        [E, N, K] in x's dtype, accumulated in fp32 (fp64 for fp64) and rounded once; zeros for experts
        without rows.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit.

    Example::

        grad_output, x = torch.ones(6, 32), torch.ones(6, 64)
        offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)  # 2 rows, none, 4 rows
        grads = flux.grouped_wgrad(grad_output, x, offsets)
        assert grads.shape == (3, 32, 64) and (grads[2] == 4).all() and not grads[1].any()
    """
    argument_types.check("grouped_wgrad", grad_output=grad_output, x=x, offsets=offsets)
    return expert_grads(grad_output, x, offsets)


def grouped_wgrad_accum(grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor) -> None:
    """main_grad[e] += grad_output[rows of e]ᵀ · x[rows of e] for each expert e: flux.wgrad_accum of experts.

    Args:
        grad_output: [M, N], gradient of the products, sorted by expert.
        x: [M, K]; dtype and device of `grad_output`.
        offsets: int32 [E + 1]: rows offsets[e] to offsets[e + 1] are expert e's.
        main_grad: [E, N, K], of x's dtype or fp32 (for fp64: fp64), on the same device. Experts may lie
            apart. Those without rows stay as they are.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; or `main_grad` shares memory
            with another argument.

    Example::

        main_grad = torch.zeros(3, 32, 64)
        offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)  # 2 rows, none, 4 rows
        for _ in range(2):  # two micro-batches
            flux.grouped_wgrad_accum(torch.ones(6, 32), torch.ones(6, 64), offsets, main_grad)
        assert (main_grad[0] == 4.0).all() and not main_grad[1].any()
    """
    given = {"grad_output": grad_output, "x": x, "main_grad": main_grad}
    argument_types.check("grouped_wgrad_accum", offsets=offsets, **given)
    checks.no_backward("grouped_wgrad_accum", **given)
    _accum(grad_output, x, offsets, main_grad)


def add_expert_grads(grad: Tensor, x: Tensor, offsets: Tensor, main_grads: Tensor | Sequence[Tensor]) -> None:
    """grouped_wgrad_accum of checked arguments; main_grads: one tensor, or one for each expert."""
    if isinstance(main_grads, Tensor):
        _accum(grad, x, offsets, main_grads)
        return
    if x.is_cuda and _has_grouped_gemm(grad, x):
        # Of two types, torch adds each by a launch of its own.
        torch._foreach_add_(list(main_grads), list(expert_grads(grad, x, offsets).unbind()))
        return
    bounds = offsets.tolist()
    for main_grad, first, last in zip(main_grads, bounds, bounds[1:], strict=False):
        wgrad_accum(grad[first:last], x[first:last], main_grad)


def uses_kernel(grad: Tensor, x: Tensor, main_grad: Tensor | None = None) -> bool:
    """Whether flux's kernel takes checked arguments, and is wanted. main_grad: what is added to."""
    wanted = x.is_cuda and _env.get("FLUX_GROUPED_WGRAD") == "kernel"
    return wanted and why_not(grad, x, main_grad) is None


def why_not(grad: Tensor, x: Tensor, main_grad: Tensor | None = None) -> str | None:
    """Why the kernel does not support the arguments, or None."""
    reason = why_not_fused("grouped_wgrad", PlanInput("cuda", 1, grad.shape[1], x.shape[1], x.dtype))
    if reason is None and main_grad is not None:
        if main_grad.dtype != torch.float32:
            return f"the kernel adds to float32, not {str(main_grad.dtype).removeprefix('torch.')}"
        step, rows, columns = main_grad.stride()
        if columns != 1 or rows % 4 or (main_grad.shape[0] > 1 and (step % 4 or step == 0)):
            return "rows and experts of main_grad do not begin at multiples of 16 bytes"
    return reason or cuda.why_not(x.device)


def launch(
    grad: Tensor, x: Tensor, offsets: Tensor, out: Tensor, choice: int | None = None, num_sms: int = 0
) -> None:
    """Runs checked arguments in the kernel. out: fp32, to which is added, or of x's dtype."""
    if choice is None:
        choice = _choice(x.shape[0] / out.shape[0], out.dtype == torch.float32)
    _kernel(aligned(grad), aligned(x), offsets.contiguous(), out, choice, num_sms)


def _choice(rows: float, adds: bool) -> int:
    """What was fastest for so many rows of an expert (docs/design/moe.md#gradients-of-experts-weights)."""
    if adds:
        return PREFETCHES if rows <= 256 else 0
    return 1 if rows <= 128 else 0


def _fake(grad_output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(_checked("grouped_wgrad", grad_output, x, offsets))


def _accum_fake(grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor) -> None:
    _checked("grouped_wgrad_accum", grad_output, x, offsets, main_grad)


def _checked(
    op: str, grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor | None = None
) -> list[int]:
    if x.dim() != 2:
        checks.fail(op, "x", "2 dimensions [m, k]", f"{x.dim()}")
    if grad_output.dim() != 2 or grad_output.shape[0] != x.shape[0]:
        expected = f"[m, n] with m = {x.shape[0]}, the rows of x"
        checks.fail(op, "grad_output", expected, f"shape {list(grad_output.shape)}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        checks.fail(op, "offsets", "shape [experts + 1]", f"shape {list(offsets.shape)}")
    if offsets.dtype != torch.int32:
        checks.fail(op, "offsets", "dtype int32", offsets.dtype)
    if offsets.device != x.device:
        checks.fail(op, "offsets", f"device {x.device}, that of x", offsets.device)
    shape = [offsets.shape[0] - 1, grad_output.shape[1], x.shape[1]]
    checks.grads(op, x, grad_output, main_grad, shape)
    return shape


def _bounds(op: str, x: Tensor, offsets: Tensor) -> list[tuple[int, slice]]:
    """Each expert that has rows, and these. Reads the offsets on the host, and checks them."""
    bounds = checked_bounds(op, offsets, x.shape[0])
    rows = [slice(*ends) for ends in zip(bounds, bounds[1:], strict=False)]
    return [(expert, each) for expert, each in enumerate(rows) if each.stop > each.start]


def _by_loop(grad_output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    out = _fake(grad_output, x, offsets).zero_()
    wide = wide_type(x.dtype)
    for expert, rows in _bounds("grouped_wgrad", x, offsets):
        out[expert] = grad_output[rows].t().to(wide) @ x[rows].to(wide)
    return out


def _cuda(grad_output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    out = _fake(grad_output, x, offsets)
    if 0 in (out.numel(), x.shape[0]):
        return out.zero_()
    if uses_kernel(grad_output, x):
        launch(grad_output, x, offsets, out)
        return out
    if not _has_grouped_gemm(grad_output, x):
        return _by_loop(grad_output, x, offsets)
    product: Tensor = torch_grouped_mm()(grad_output.contiguous().t(), x.contiguous(), offs=offsets[1:])
    return product


def _has_grouped_gemm(grad: Tensor, x: Tensor) -> bool:
    """Whether torch multiplies the rows of all experts in one launch on a GPU."""
    if x.dtype == torch.bfloat16 and grad.shape[1] % 8 == 0 and x.shape[1] % 8 == 0:
        return True
    say_once(
        f"gradients of expert weights of {str(x.dtype).removeprefix('torch.')}, {grad.shape[1]} by "
        f"{x.shape[1]}, run expert by expert and synchronise with the host: torch's grouped GEMM takes "
        "bfloat16 and multiples of 8"
    )
    return False


def _accum_checked(grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor) -> None:
    _accum_fake(grad_output, x, offsets, main_grad)
    checks.not_expanded("grouped_wgrad_accum", "main_grad", main_grad)
    others = (grad_output, x, offsets)
    if main_grad.numel() and any(checks.share_memory(_span(main_grad), other) for other in others):
        for written in main_grad.unbind():  # others may lie between them
            checks.separate("grouped_wgrad_accum", "main_grad", _span(written), *others)


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((1 + last,), (1,))


def _accum_cpu(grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor) -> None:
    _accum_checked(grad_output, x, offsets, main_grad)
    for expert, rows in _bounds("grouped_wgrad_accum", x, offsets):
        wgrad_accum(grad_output[rows], x[rows], main_grad[expert])


def _accum_cuda(grad_output: Tensor, x: Tensor, offsets: Tensor, main_grad: Tensor) -> None:
    _accum_checked(grad_output, x, offsets, main_grad)
    if 0 in (main_grad.numel(), x.shape[0]):
        return
    if uses_kernel(grad_output, x, main_grad) and main_grad.data_ptr() % 16 == 0:
        torch.autograd.graph.increment_version(main_grad)
        launch(grad_output, x, offsets, main_grad)
    elif _has_grouped_gemm(grad_output, x):
        main_grad.add_(_cuda(grad_output, x, offsets))
    else:
        _accum_cpu(grad_output, x, offsets, main_grad)


implement("wgrad_accum", _dense, _dense_fake)
# For each expert e: grad[rows of e]ᵀ · x[rows of e]. Its backward pass: flux/moe/autograd.py.
expert_grads = implement("grouped_wgrad", _by_loop, _fake, _cuda)
transforms.maps("grouped_wgrad")
_accum = implement("grouped_wgrad_accum", _accum_cpu, _accum_fake, _accum_cuda)
_kernel: Any = torch.ops.flux._grouped_wgrad.default
