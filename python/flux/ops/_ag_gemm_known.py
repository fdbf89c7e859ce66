"""AllGather+GEMM as a call that C++ repeats (flux.comm.known)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux import _invariance
from flux.comm import known
from flux.comm.cuda import CudaWorkspace
from flux.ops._tensors import in_place

Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]
_OP = known.operator()


def given(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    outs: Tensors | None,
) -> tuple[Any, ...]:
    """The arguments of a call: x is number 4, weights, biases and outs follow."""
    tensors = (x, *weights, *(biases or (None,) * len(weights)), *(outs or ()))
    return (_OP, len(weights), transpose_weight, (return_gathered << 1) + _invariance.active(), *tensors)


def recipe(arguments: tuple[Any, ...], count: int, outs: Tensors) -> known.Recipe:
    """How a call of `count` weights is repeated, which returns `outs`."""
    made = known.Recipe(*arguments)
    for i, out in enumerate(outs):
        number = 5 + 2 * count + i
        made.returns(out, like=4, argument=number if number < len(arguments) else None)
    return made


def remember(
    workspace: CudaWorkspace,
    recipe: known.Recipe,
    enqueue: Callable[[], None],
    operands: Sequence[tuple[torch.Tensor | None, ...]],
    gathered: torch.Tensor | None,
    outs: Sequence[torch.Tensor | None],
    by_copy_engine: bool,
) -> None:
    """Makes a call known.

    Args:
        operands: x, weight, bias and product of each launch.
        gathered: what a last launch writes the gathered rows to, or None.
        outs: the tensors that the caller gets.
    """
    count, (sources, weights, biases, products) = len(operands), zip(*operands, strict=True)
    used = (sources[0], *weights, *biases, *products, gathered)
    if in_place(used, (*recipe.given[4 : 5 + 2 * count], *outs)):
        numbers = [[4, 5 + i, 5 + count + i, recipe.results[i]] for i in range(count)]
        numbers += [] if gathered is None else [[4, recipe.results[-1]]]
        workspace.remember(recipe, enqueue, numbers, by_copy_engine)
