"""The ways of running flux.ag_gemm: with torch, as all_gather and gemm, in a kernel, tile by tile on CPUs;
and what they share: results and their checks, rows with scales as they are sent.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux import _invariance, _native
from flux._memory import aligned, in_place, readable, readable_if_any, wide_type, writable
from flux.calls import checks
from flux.comm import repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import Same, Workspace
from flux.fp8 import scales as fp8
from flux.fp8.packed_rows import records_of
from flux.fp8.scales import Scales
from flux.fp8.wide_product import WideWeight
from flux.ops import gemm as plain
from flux.ops.ways import all_gather as gather
from flux.plan.choose import Plan

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Biases = Sequence[Tensor | None]
_OP = "ag_gemm"
NUMBER = repeat.operator()


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


def kernel(
    workspace: CudaWorkspace,
    call: Plan,
    plans: tuple[Plan, ...],
    operands: Operands,
    recipe: repeat.Recipe | None = None,
) -> None:
    """Launches the kernel for each weight, by `plans`. recipe: of the call, if it is to be known."""
    x, weights, biases, _, _, outs, gathered, scales = operands
    # Allocations may run out of memory, so they come before the call is opened.
    source = readable(x)
    of_weights = scales or (None,) * len(weights)
    launches = [
        (source, aligned(weight), readable_if_any(bias), writable(out))
        for weight, bias, out in zip(weights, biases, outs, strict=True)
    ]
    targets = [writable(gathered[0]), *scale_target(gathered)] if gathered else []
    collected = (scales[0].x, targets[1]) if scales and gathered else ()

    def enqueue() -> None:
        reuse, sms = False, call.num_sms
        for plan, tensors, scale in zip(plans, launches, of_weights, strict=True):
            launch = (address, plan.choice, sms, epoch, chunk_rows, reuse)
            _kernel(*tensors, call.transpose_weight, *launch, **fp8.for_kernel(x, scale))
            reuse = True
        if targets:
            _collect(source, targets[0], address, epoch, *collected)

    with gather.enter(workspace, call) as (address, epoch):
        chunk_rows = gather.chunk_rows(call, epoch)
        enqueue()
    if recipe is not None:
        _remember(workspace, recipe, enqueue, launches, operands, targets, epoch > 0)
    for (*_, product), out in zip(launches, outs, strict=True):
        if product is not out:
            out.copy_(product)
    for target, out in zip(targets, gathered, strict=True):
        if target.data_ptr() != out.data_ptr():
            out.copy_(target if target.dim() == 2 else target[:, None])


def protocol(
    workspace: CpuWorkspace, call: Plan, plans: tuple[Plan, ...], operands: Operands, epoch: int
) -> None:
    """The kernel's work on the CPU, tile by tile."""
    x, weights, biases, _, _, outs, gathered, scales = operands
    rows = Rows(x, scales)
    arrivals = gather.Arrivals(workspace, call, epoch, rows.sent)
    of_weights = scales or (None,) * len(weights)
    for plan, weight, bias, out, scale in zip(plans, weights, biases, outs, of_weights, strict=True):
        _compute_tiles(arrivals, rows, workspace.rank, plan, weight, bias, out, scale)
    if gathered:
        everybody = gathered[0]
        if scales:
            everybody = rows.sent.new_empty(call.m, rows.sent.shape[1])
        for source in range(call.world_size):
            arrivals.copy_to(everybody, source)
        rows.copy(everybody, gathered)


def _compute_tiles(
    arrivals: gather.Arrivals,
    sent: Rows,
    rank: int,
    plan: Plan,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scale: Scales | None,
) -> None:
    """Tiles of own rows first, others as their rows arrive."""
    core = _native.core
    p, rows = plan.world_size, plan.m // plan.world_size
    wide_w = WideWeight(weight, plan.transpose_weight, None if scale is None else scale.w)
    wide_bias = None if bias is None else bias.to(wide_type(plan.dtype))
    config = core.tile_config(plan.config)
    block_m, block_n = config.block_m, config.block_n
    order = core.ag_gemm_tiles(plan.m, plan.n, p, rank, plan.config, plan.cluster, plan.group_m)
    for source, m_tile, n_tile in order:
        columns = slice(n_tile * block_n, (n_tile + 1) * block_n)
        block = arrivals.block(source, m_tile)
        tile = wide_w.times(sent.rows(block), columns, sent.scale(block))
        if wide_bias is not None:
            tile += wide_bias[columns]
        first_row = source * rows + m_tile * block_m
        out[first_row : first_row + tile.shape[0], columns] = tile


def given(
    x: Tensor,
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
    return (NUMBER, len(weights), transpose_weight, (return_gathered << 1) + _invariance.active(), *tensors)


def recipe_of(
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


def _remember(
    workspace: CudaWorkspace,
    recipe: repeat.Recipe,
    enqueue: Callable[[], None],
    launches: Sequence[tuple[Tensor | None, ...]],
    operands: Operands,
    gathered: Tensors,
    by_copy_engine: bool,
) -> None:
    """Makes a call known.

    Args:
        launches: x, weight, bias and product of each.
        gathered: what a last launch writes the gathered rows to, and their scales; or nothing.
    """
    scales = operands.scales
    read: dict[str, Tensor | None] = {"scale_x": scales[0].x} if scales else {}
    numbers = []
    for i, (x, weight, bias, _) in enumerate(launches):
        read |= {"x": x, f"weight[{i}]": weight, f"bias[{i}]": bias}
        read |= {f"scale_w[{i}]": scales[i].w} if scales else {}
        used = [*recipe.numbers("x", f"weight[{i}]", f"bias[{i}]"), recipe.results[i]]
        numbers.append(used + recipe.numbers("scale_x", f"scale_w[{i}]"))
    if gathered:
        rows, *their_scales = recipe.results[len(launches) :]
        numbers.append([recipe.number("x"), rows, recipe.number("scale_x"), *their_scales])
    written, outs = (*(product for *_, product in launches), *gathered), (*operands.outs, *operands.gathered)
    if recipe.in_place(**read) and in_place(written, outs):
        workspace.remember(recipe, enqueue, numbers, by_copy_engine)


_kernel: Any = torch.ops.flux._ag_gemm.default
_collect: Any = torch.ops.flux._collect.default
