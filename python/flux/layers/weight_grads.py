"""How gradients of weights are made and stored: given to autograd, added to main_grad, or left for later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux._sharded import local, placed_like
from flux.layers import fp8
from flux.ops.gemm import gemm
from flux.ops.wgrad import weight_grad, wgrad_accum

Tensor = torch.Tensor
# Of a weight's gradient: rows [..., N] and [..., K], or both quantised along the rows.
Operand = Tensor | fp8.Quantised


class DeferredGrads:
    """Gradients of weights that backward passes leave for later, oldest first; `len` is how many calls wait.

    With an object of this class, the backward pass of column_linear and row_linear computes and communicates
    what the layers before it need; each `compute` does the GEMMs of one call. Schedules of pipelines fill
    waiting times with these (arXiv 2401.10241). The operands stay in memory until then.

    Raises:
        RuntimeError: `compute` was called, and no call waits.

    Example::

        from flux.layers import DeferredGrads, column_linear

        x, weight = torch.ones(8, 64, requires_grad=True), torch.ones(32, 64, requires_grad=True)
        later = DeferredGrads()
        column_linear(x, weight, deferred=later).sum().backward()
        assert x.grad is not None and weight.grad is None and len(later) == 1
        later.compute()
        assert weight.grad.shape == weight.shape
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def defer(self, compute: Callable[[], None]) -> None:
        """Adds what computes and stores the gradients of one call."""
        self._waiting.append(compute)

    def compute(self) -> None:
        """Computes the gradients of the oldest call, and adds them to its weights' `grad` or `main_grad`."""
        if not self._waiting:
            raise RuntimeError("DeferredGrads.compute: expected a call whose gradients wait, got none")
        with torch.no_grad():
            self._waiting.popleft()()


# Whether gradients go into main_grad, and where they wait, None: nowhere.
How = tuple[bool, DeferredGrads | None]


class WeightGrads:
    """Makes gradients of a call's weights, where needed: for autograd, in main_grad (fusion), or later."""

    def __init__(
        self, weights: Sequence[Tensor], needs: Sequence[bool], fusion: bool, deferred: DeferredGrads | None
    ) -> None:
        self.needs, self.deferred = needs[: len(weights)], deferred
        leaves = [getattr(weight, "parameter", weight) for weight in weights]  # of parts: the DTensors
        self.main = [w if fusion and getattr(w, "main_grad", None) is not None else None for w in leaves]
        # Not kept otherwise: autograd knows the weights, and dynamo the fewer objects the better.
        self.leaves = leaves if deferred is not None else []

    def __call__(
        self, grads: Sequence[Operand | None], x: Operand | None, dtype: torch.dtype
    ) -> list[Tensor | None]:
        """What autograd gets for each weight. grads: [..., N] of each, or quantised [N, M]; x likewise."""
        if x is None or not any(self.needs):
            return [None] * len(self.main)
        if self.deferred is None:
            return self._made(grads, x, dtype)

        def store() -> None:
            for weight, grad in zip(self.leaves, self._made(grads, x, dtype), strict=True):
                store_grad(weight, grad)

        self.deferred.defer(store)
        return [None] * len(self.main)

    def _made(self, grads: Sequence[Operand | None], x: Operand, dtype: torch.dtype) -> list[Tensor | None]:
        return [
            _weight_grad(grad, x, parameter, dtype) if needed and grad is not None else None
            for grad, parameter, needed in zip(grads, self.main, self.needs, strict=True)
        ]


def store_grad(weight: Tensor, grad: Tensor | None) -> None:
    """Adds a gradient to a weight's `grad`, as autograd does. None: there is none, or main_grad has it."""
    if grad is not None:
        grad = placed_like(grad.to(weight.dtype), weight)
        weight.grad = grad if weight.grad is None else weight.grad + grad


def _weight_grad(grad: Any, x: Operand, weight: Any, dtype: torch.dtype) -> Tensor | None:
    """Gradient of a weight for autograd; with a `weight` added to its main_grad instead."""
    if weight is None:
        return weight_grad(grad, x) if isinstance(x, Tensor) else fp8.product(gemm, grad, x, out_dtype=dtype)
    if isinstance(x, Tensor):
        wgrad_accum(grad, x, local(weight.main_grad))
    else:
        main = local(weight.main_grad)
        main += fp8.product(gemm, grad, x, out_dtype=main.dtype)
    return placeholder(weight, dtype)


def placeholder(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What autograd gets for a weight whose gradient has been added to its main_grad."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # Hooks of Megatron's data parallelism run only if autograd gets a gradient. The flag says not to add it.
    weight.grad_added_to_main_grad = True
    fill = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return fill(local(weight), dtype=dtype, requires_grad=False)
