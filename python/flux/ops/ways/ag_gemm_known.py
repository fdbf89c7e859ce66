"""AllGather+GEMM as a call that C++ repeats (flux.comm.repeat)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux import _invariance
from flux._memory import in_place
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.fp8.scales import Scales

Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]
_OP = repeat.operator()


def given(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    outs: Tensors | None,
    scaling: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """The arguments of a call: x is number 4; weights, biases, with `scaling` the scales of x, those of the
    weights and two options, and outs follow. scaling: as fp8.arguments returns it, with a list of scales.
    """
    if scaling:
        scaling = (scaling[0], *(scaling[1] or ()), *scaling[2:])
    tensors = (x, *weights, *(biases or (None,) * len(weights)), *scaling, *(outs or ()))
    return (_OP, len(weights), transpose_weight, (return_gathered << 1) + _invariance.active(), *tensors)


def recipe(
    arguments: tuple[Any, ...], count: int, outs: Tensors, scaled: bool, within: repeat.Recipe | None = None
) -> repeat.Recipe:
    """How a call of `count` weights is repeated, which returns `outs`. scaled: it has scales. within: of the
    call that this one is a part of.
    """
    made = repeat.Recipe(*arguments, within=within)
    first = 5 + 2 * count + (count + 3 if scaled else 0)
    for number, out in enumerate(outs, first):
        made.returns(out, like=4, argument=number if number < len(arguments) else None)
    return made


def remember(
    workspace: CudaWorkspace,
    recipe: repeat.Recipe,
    enqueue: Callable[[], None],
    operands: Sequence[tuple[torch.Tensor | None, ...]],
    scales: Sequence[Scales],
    gathered: Tensors,
    outs: Tensors,
    by_copy_engine: bool,
) -> None:
    """Makes a call known.

    Args:
        operands: x, weight, bias and product of each launch.
        scales: of each weight, canonical.
        gathered: what a last launch writes the gathered rows to, and their scales; or nothing.
        outs: the tensors that the caller gets.
    """
    count, (sources, weights, biases, products) = len(operands), zip(*operands, strict=True)
    first = 5 + 2 * count  # of the scales
    of_scales = (scales[0].x, *(scale.w for scale in scales)) if scales else ()
    used = (sources[0], *weights, *biases, *of_scales, *products, *gathered)
    if in_place(used, (*recipe.given[4 : first + len(of_scales)], *outs)):
        numbers = [[4, 5 + i, 5 + count + i, recipe.results[i]] for i in range(count)]
        for i, of_launch in enumerate(numbers):
            of_launch += [first, first + 1 + i] if scales else []
        if gathered:
            rows, *their_scales = recipe.results[count:]
            numbers.append([4, rows, first, *their_scales] if scales else [4, rows])
        workspace.remember(recipe, enqueue, numbers, by_copy_engine)
