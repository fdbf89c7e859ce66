"""Stand-ins on CPUs for the kernels of flux.moe.rows. As the kernels, they read and write the rows of experts
only, with zeros behind them where the kernels write zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from flux._memory import wide_type
from flux.moe import rows as steps
from flux.ops.grouped_gemm import ACTIVATIONS, activate


def _gather(x: Tensor, tokens: Tensor, offsets: Tensor, scores: Tensor | None, out: Tensor) -> None:
    assert tokens.dtype == torch.int32 and x.is_contiguous()
    out.fill_(float("nan"))
    for row in range(int(offsets[-1])):
        out[row] = x[tokens[row]] if scores is None else x[tokens[row]] * scores[row]


def _finish(
    rows: Tensor, offsets: Tensor, scores: Tensor | None, x: Tensor | None, dots: Tensor | None
) -> None:
    assert (x is None) == (dots is None) and (x is None or x.is_contiguous())
    end = int(offsets[-1])
    if x is not None and dots is not None:
        dots.zero_()
        dots[:end] = (rows[:end].to(dots.dtype) * x[:end].to(dots.dtype)).sum(-1)
    if scores is not None:
        rows[:end] *= scores[:end, None]
    rows[end:] = 0


def _activate(product: Tensor, offsets: Tensor, number: int, out: Tensor) -> None:
    end = int(offsets[-1])
    out.fill_(float("nan"))
    out[:end] = activate(product[:end].to(wide_type(out.dtype)), ACTIVATIONS[number - 1])


def _activation_grad(grad: Tensor, product: Tensor, offsets: Tensor, number: int, out: Tensor) -> None:
    assert grad.is_contiguous() and product.is_contiguous()
    end = int(offsets[-1])
    out.fill_(float("nan"))
    with torch.enable_grad():
        z = product[:end].to(wide_type(out.dtype)).requires_grad_()
        (of_z,) = torch.autograd.grad(activate(z, ACTIVATIONS[number - 1]), z, grad[:end].to(z.dtype))
    out[:end] = of_z


def _finish_activation(
    rows: Tensor, product: Tensor, offsets: Tensor, scores: Tensor, number: int, out: Tensor, dots: Tensor
) -> None:
    assert rows.is_contiguous() and product.is_contiguous()
    active, end = torch.empty_like(rows), int(offsets[-1])
    _activate(product, offsets, number, active)
    dots.fill_(float("nan"))
    dots[:end] = (rows[:end].to(dots.dtype) * active[:end].to(dots.dtype)).sum(-1)
    grad = torch.full_like(rows, float("nan"), dtype=wide_type(rows.dtype))
    grad[:end] = rows[:end].to(grad.dtype) * scores[:end, None]
    _activation_grad(grad, product, offsets, number, out)
    rows[:] = active


class _Activate(torch.autograd.Function):
    """The operator, with its implementation for GPUs and its derivative."""

    forward, setup_context = staticmethod(steps._activate), staticmethod(steps._activate_setup)
    backward = staticmethod(steps._activate_backward)


@contextmanager
def kernels_on_cpus() -> Iterator[Counter[str]]:
    """flux.moe.rows does on CPU tensors what it does on a GPU; yields how often each kernel ran."""
    ran: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(steps, "kernel_takes", lambda *_: True))
        for name, kernel in (
            ("gather", _gather),
            ("finish", _finish),
            ("finish_activation", _finish_activation),
            ("activate", _activate),
            ("activation_grad", _activation_grad),
        ):

            def counted(*arguments: object, name: str = name, kernel: object = kernel) -> None:
                ran[name] += 1
                kernel(*arguments)  # type: ignore[operator]

            stack.enter_context(mock.patch.object(steps, f"_{name}_kernel", counted))
            op = _Activate.apply if name == "activate" else getattr(steps, f"_{name}")
            stack.enter_context(mock.patch.object(steps, f"_{name}_op", op))
        yield ran
