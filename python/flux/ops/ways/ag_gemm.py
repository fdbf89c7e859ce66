"""What the ways of running flux.ag_gemm share: results and their checks, rows with scales as they are sent,
and products without communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux.calls import checks
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import Same, Workspace
from flux.fp8 import scales as fp8
from flux.fp8.packed_rows import records_of
from flux.fp8.scales import Scales
from flux.ops import gemm as plain
from flux.ops.ways import all_gather as gather

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Biases = Sequence[Tensor | None]
_OP = "ag_gemm"


def new_products(x: Tensor, shapes: list[list[int]], scales: Sequence[Scales]) -> list[Tensor]:
    """Memory for the products."""
    if not scales:
        return [x.new_empty(*shape) for shape in shapes]
    return [x.new_empty(*shape, dtype=scales[0].out_dtype) for shape in shapes]


def new_gathered(x: Tensor, world_size: int, scales: Sequence[Scales]) -> list[Tensor]:
    """Memory for the gathered x [M, ..., K], and for its scales [M, ..., scales of a row]."""
    shape = [x.shape[0] * world_size, *x.shape[1:]]
    gathered = x.new_empty(shape)
    if not scales:
        return [gathered]
    columns = scales[0].scaling(x.shape[-1]).columns(x.shape[-1])
    rows = math.prod(shape[:-1])
    flat = x.new_empty(rows, 1, dtype=torch.float32)
    if columns != 1:
        flat = fp8.empty_column_major(rows, columns, x)
    return [gathered, flat.view(*shape[:-1], columns)]


def check_outs(
    outs: Tensors,
    shapes: list[list[int]],
    x: Tensor,
    return_gathered: bool,
    world_size: int,
    scales: Sequence[Scales],
) -> None:
    """Checks the tensors that a call is to write: products, then what is gathered."""
    count, kept = len(shapes), 0 if not return_gathered else 2 if scales else 1
    if len(outs) != count + kept:
        checks.fail(_OP, "out", f"{count + kept} tensors", f"{len(outs)}")
    for i, (out, shape) in enumerate(zip(outs, shapes, strict=False)):
        which = f"[{i}]" if count > 1 else ""
        checks.out_arg(_OP, out, shape, x, which, scales[0] if scales else None)
    if kept:
        checks.out_arg(_OP, outs[count], [x.shape[0] * world_size, *x.shape[1:]], x, "[gathered]")


def results(
    x: Tensor,
    weights: Tensors,
    biases: Biases,
    shapes: list[list[int]],
    world_size: int,
    return_gathered: bool,
    outs: Tensors | None,
    scales: Sequence[Scales],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The tensors that the call writes (new, or given and checked): all, products, and what is gathered."""
    count = len(shapes)
    if outs is None:
        written = new_products(x, shapes, scales)
        if return_gathered:
            written += new_gathered(x, world_size, scales)
    else:
        written = list(outs)
        check_outs(written, shapes, x, return_gathered, world_size, scales)
        read = (x, *weights, *biases, *(scale for each in scales for scale in each[:2]))
        for i, out in enumerate(written[: count + return_gathered]):
            which = f"[{i}]" if count > 1 else ""
            checks.separate(_OP, "out" + which, out, *read, *written[:i])
    return written, written[:count], written[count:]


def canonical(
    weights: Tensors, transpose_weight: bool, scales: Sequence[Scales]
) -> tuple[list[Tensor], bool, list[Scales]]:
    """As fp8.canonical, for several weights of one x."""
    found: list[Tensor] = []
    made: list[Scales] = []
    for weight, scale in zip(weights, scales, strict=True):
        n, k = weight.shape[::-1] if transpose_weight else weight.shape
        shared = scale._replace(x=made[0].x) if made else scale
        made.append(shared.canonical(n, k, transpose_weight))
        found.append(weight.t() if transpose_weight else weight)
    return found, False, made


def without_none(x: Tensor, weights: Tensors, biases: Biases, transpose_weight: bool) -> Tensors:
    """Replaces None by zeros: torch gives no gradients to the tensors of a list that contains None."""
    n_axis = -1 if transpose_weight else 0
    return [
        x.new_zeros(weight.shape[n_axis]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]


class Rows:
    """Rows [rows, k] as they are sent where the kernel does not: alone, or beside their canonical scales."""

    def __init__(self, x: Tensor, scales: Sequence[Scales]) -> None:
        self.sent, self._form = x, None
        if scales:
            self._form = records_of(x.shape[1], x.dtype, scales[0].scaling(x.shape[1]))
            self.sent = self._form.pack(x, scales[0].x).view(x.dtype)

    def everybody(self, group: ProcessGroup, gathered: Tensors) -> Tensor:
        """Memory for what all ranks send: the caller's, if rows alone are sent."""
        if gathered and self._form is None:
            return gathered[0]
        return self.sent.new_empty(self.sent.shape[0] * group.size(), self.sent.shape[1])

    def rows(self, sent: Tensor) -> Tensor:
        """The rows [rows, k] of what was sent, maybe a view."""
        return sent if self._form is None else self._form.rows(sent.view(torch.uint8))

    def scale(self, sent: Tensor) -> Tensor | None:
        """Their scales [rows, scales of a row]."""
        return None if self._form is None else self._form.scales(sent.view(torch.uint8))

    def copy(self, everybody: Tensor, gathered: Tensors) -> None:
        """Writes all rows, as they were sent, and their scales to `gathered`, if that is asked for."""
        scale = self.scale(everybody)
        for out, found in zip(gathered, (self.rows(everybody), scale), strict=False):
            if found is not None and out.data_ptr() != found.data_ptr():
                out.copy_(found)

    def received(self, sent: Tensor, scaling: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """The arguments x and scaling of a call for rows that were sent."""
        return self.rows(sent), (self.scale(sent), *scaling[1:]) if scaling else ()


def products(
    x: Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    outs: Tensors,
    scales: Sequence[Scales],
    by: Callable[..., None] = plain.run,
) -> None:
    """The products of x [..., k] without communication. by: computes one."""
    of_weights = scales or (None,) * len(weights)
    for weight, bias, out, scale in zip(weights, biases, outs, of_weights, strict=True):
        by(x, weight, bias, transpose_weight, out, scale)


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, transpose_weight: bool, out: Tensor, scale: Scales | None
) -> None:
    if not x.is_cuda:
        plain.run(x, weight, bias, transpose_weight, out, scale)
    elif x.shape[1] > 0 and out.numel() > 0:
        weight, transpose_weight, scale = fp8.canonical(weight, transpose_weight, scale)
        plain.unfused(x, weight, bias, transpose_weight, out, scale)
    elif out.numel() > 0:
        out.zero_()
        if bias is not None:
            out += bias


def copy_gathered(gathered: Tensors, x: Tensor, scales: Sequence[Scales]) -> None:
    """Writes rows and scales that are already there."""
    if not gathered:
        return
    gathered[0].copy_(x)
    if scales:
        k, shape = x.shape[-1], gathered[1].shape
        gathered[1].copy_(fp8.of_elements(scales[0].canonical_x(k), shape[:-1].numel()).view(shape))


class Operands(NamedTuple):
    """A call whose x is a matrix: what it reads, its group, and what it writes."""

    x: Tensor
    weights: Tensors
    biases: Biases
    transpose_weight: bool
    group: ProcessGroup
    outs: Tensors
    gathered: Tensors
    scales: Sequence[Scales]


def unfused(operands: Operands) -> None:
    """The call with torch."""
    _one_by_one(operands, gather.unfused, _by_torch)


def by_flux(workspace: Workspace, operands: Operands, also: Same, recipe: repeat.Recipe) -> None:
    """The call as all_gather and gemm. also: as in gemm_rs.call. recipe: of the call."""
    all_gather = functools.partial(gather.call, also=also, within=recipe)
    everybody = _one_by_one(operands, all_gather, functools.partial(plain.run, within=recipe))
    if isinstance(workspace, CudaWorkspace) and not operands.scales:  # which torch packs beside the rows
        if not operands.gathered:
            recipe.allocates(everybody)
        workspace.remember_parts(recipe, 1 + len(operands.weights))


def _one_by_one(call: Operands, all_gather: Callable[..., object], gemm: Callable[..., None]) -> Tensor:
    """Rows of all ranks by `all_gather`, then products by `gemm`. Returns the rows as they were sent."""
    rows, scales = Rows(call.x, call.scales), call.scales
    everybody = rows.everybody(call.group, call.gathered)
    all_gather(rows.sent, call.group, everybody)
    x, scale = rows.rows(everybody), rows.scale(everybody)
    if scale is not None:
        scales = [each._replace(x=scale) for each in scales]
    products(x, call.weights, call.biases, call.transpose_weight, call.outs, scales, gemm)
    rows.copy(everybody, call.gathered)
    return everybody


def scale_target(gathered: Tensors) -> list[Tensor]:
    """Memory for gathered scales as the kernel writes them: the result itself, or a new tensor."""
    if len(gathered) < 2:
        return []
    scale = gathered[1]
    rows, columns = scale.shape
    fits = scale.data_ptr() % 16 == 0 and scale.stride(0) == 1
    if columns == 1:
        return [scale[:, 0] if fits else torch.empty_like(scale[:, 0])]
    like = fp8.empty_column_major(rows, columns, scale)
    return [scale if fits and scale.stride() == like.stride() else like]
