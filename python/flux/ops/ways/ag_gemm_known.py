"""AllGather+GEMM as a call that C++ repeats (flux.comm.repeat)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
    """The arguments of a call, as `_names` has them. scaling: as fp8.arguments returns it, with a list of
    scales.
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
    made = repeat.Recipe(arguments[0], dict(zip(_names(count, scaled), arguments[1:], strict=False)), within)
    for i, out in enumerate(outs):
        made.returns(out, f"out[{i}]")
    return made


def _names(count: int, scaled: bool) -> Iterator[str]:
    yield from ("count", "transpose_weight", "return_gathered", "x")
    for name in ("weight", "bias"):
        yield from (f"{name}[{i}]" for i in range(count))
    if scaled:
        yield from ("scale_x", *(f"scale_w[{i}]" for i in range(count)), "out_dtype", "accumulate")
    yield from (f"out[{i}]" for i in itertools.count())


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
    read: dict[str, torch.Tensor | None] = {"scale_x": scales[0].x} if scales else {}
    numbers = []
    for i, (x, weight, bias, _) in enumerate(operands):
        read |= {"x": x, f"weight[{i}]": weight, f"bias[{i}]": bias}
        read |= {f"scale_w[{i}]": scales[i].w} if scales else {}
        used = [*recipe.numbers("x", f"weight[{i}]", f"bias[{i}]"), recipe.results[i]]
        numbers.append(used + recipe.numbers("scale_x", f"scale_w[{i}]"))
    if gathered:
        rows, *their_scales = recipe.results[len(operands) :]
        numbers.append([recipe.number("x"), rows, recipe.number("scale_x"), *their_scales])
    if recipe.in_place(**read) and in_place((*(product for *_, product in operands), *gathered), outs):
        workspace.remember(recipe, enqueue, numbers, by_copy_engine)
