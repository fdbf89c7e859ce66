"""The ways of running flux.ag_gemm, of matrices with canonical scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux._memory import aligned, in_place, readable, readable_if_any, wide_type, writable
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.fp8 import scales as fp8
from flux.fp8.products import WideWeight
from flux.fp8.scales import Scales
from flux.ops import gemm as plain
from flux.ops.ways import all_gather as gather
from flux.ops.ways import two_level
from flux.plan.choose import Plan, carried_by, problem_of, workspace_plan
from flux.plan.gather import plan_ag_gemm

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Biases = Sequence[Tensor | None]
_OP = "ag_gemm"


class Call(NamedTuple):
    """Of flux.ag_gemm for a list of weights: scales and bias of each. out: products, then gathered."""

    x: Tensor
    weight: Tensors
    bias: Biases
    transpose_weight: bool
    return_gathered: bool = False
    out: Any = None
    scales: Sequence[Scales] = ()

    @property
    def products(self) -> list[Tensor]:
        return self.out[: len(self.weight)]  # type: ignore[no-any-return]

    @property
    def gathered(self) -> list[Tensor]:
        return self.out[len(self.weight) :]  # type: ignore[no-any-return]

    def each(self) -> Iterable[tuple[Tensor, Tensor | None, Tensor, Scales | None]]:
        scales = self.scales or (None,) * len(self.weight)
        return zip(self.weight, self.bias, self.products, scales, strict=True)


def new_gathered(x: Tensor, shape: list[int], scales: Sequence[Scales]) -> list[Tensor]:
    """Memory for the gathered x of that shape, [M, ..., K], and for its scales [M, ..., scales of a row]."""
    gathered = x.new_empty(shape)
    if not scales:
        return [gathered]
    columns, rows = scales[0].scaling(x.shape[-1]).columns(x.shape[-1]), math.prod(shape[:-1])
    if columns == 1:
        return [gathered, x.new_empty(*shape[:-1], 1, dtype=torch.float32)]
    return [gathered, fp8.empty_column_major(rows, columns, x).view(*shape[:-1], columns)]


def _results(call: Call, sizes: front.Sizes, op: str) -> list[Tensor]:
    (shapes, *_), (x, *_, outs, scales) = sizes, call
    gathered = [shapes[0][0], *x.shape[1:]]
    if outs is None:
        dtype = scales[0].out_dtype if scales else x.dtype
        made = [x.new_empty(*shape, dtype=dtype) for shape in shapes]
        return made + new_gathered(x, gathered, scales) if call.return_gathered else made
    count, kept = len(shapes), 0 if not call.return_gathered else 2 if scales else 1
    if len(outs) != count + kept:
        checks.fail(op, "out", f"{count + kept} tensors", f"{len(outs)}")
    for i, shape in enumerate(shapes):
        which = f"[{i}]" if count > 1 else ""
        checks.out_arg(op, outs[i], shape, x, which, scales[0] if scales else None)
    if kept:
        checks.out_arg(op, outs[count], gathered, x, "[gathered]")
    return list(outs)


def _matrices(call: Call, sizes: front.Sizes) -> Call:
    (_, m, ns, k), (x, weights, biases, transpose_weight, gathers, out, scales) = sizes, call
    biases = biases or (None,) * len(weights)
    if scales:
        made: list[Scales] = []
        for scale, n in zip(scales, ns, strict=True):
            scale = scale._replace(x=made[0].x) if made else scale  # laid out once
            made.append(scale.canonical(n, k, transpose_weight))
        weights = [weight.t() for weight in weights] if transpose_weight else weights
        transpose_weight, scales = False, made
    if x.dim() != 2:
        x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        out = [each.view(m, each.shape[-1]) for each in out]
    return Call(x, weights, biases, transpose_weight, gathers, out, scales)


def _plan(workspace: Workspace, call: Call, sizes: front.Sizes) -> Plan:
    _, m, ns, k = sizes
    scaling = call.scales[0].scaling(k) if call.scales else None
    return plan_of(workspace, m, ns, k, call.x.dtype, call.transpose_weight, scaling)


def plan_of(workspace: Workspace, m: int, ns: tuple[int, ...], *rest: Any) -> Plan:
    """The plan of the gather, and in it those of the weights: all run fused, or none. Its n: their sum."""
    if len(ns) > 1 and workspace.topology is None:
        each = [carried_by(workspace, plan_ag_gemm(problem_of(workspace, m, n, *rest))) for n in ns]
        for plan in each:
            if not plan.by_flux:
                return replace(plan, n=sum(ns))
        # Measurements are of one weight with all columns.
        whole = workspace_plan(workspace, _OP, m, sum(ns), *rest)
        return whole if whole.way != "kernel" else replace(each[0], n=sum(ns), parts=tuple(each))
    return workspace_plan(workspace, _OP, m, sum(ns), *rest)


class Rows:
    """Rows [rows, k] as they are sent where the kernel does not: alone, or beside their canonical scales."""

    def __init__(self, x: Tensor, scales: Sequence[Scales]) -> None:
        self.sent, self._form = x, None
        if scales:
            self._form = scales[0].scaling(x.shape[1]).records(x.shape[1], x.dtype)
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
        return None if self._form is None else self._form.scales(sent.view(torch.uint8))

    def copy(self, everybody: Tensor, gathered: Tensors) -> None:
        """Writes all rows, as they were sent, and their scales to `gathered`, if that is asked for."""
        scale = self.scale(everybody)
        for out, found in zip(gathered, (self.rows(everybody), scale), strict=False):
            if found is not None and out.data_ptr() != found.data_ptr():
                out.copy_(found)

    def received(self, sent: Tensor, call: Call, outs: Tensors) -> Call:
        scale = self.scale(sent)
        scales = [] if scale is None else [each._replace(x=scale) for each in call.scales]
        return call._replace(x=self.rows(sent), out=list(outs), scales=scales)


def alone(call: Call) -> None:
    _products(call, plain.run)
    if call.gathered:
        rows, *scale = call.gathered
        rows.copy_(call.x)
        if scale:
            scale[0].copy_(fp8.of_elements(call.scales[0].x, call.x.shape[0]))


def _products(call: Call, by: Callable[..., None]) -> None:
    for weight, bias, out, scale in call.each():
        by(checks.Product(call.x, weight, bias, call.transpose_weight, out, scale))


def by_torch(workspace: Workspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    _one_by_one(call, workspace.group, gather.unfused, plain.unfused if call.x.is_cuda else plain.run)


def parts(workspace: Workspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> Any:
    _returned(recipe)
    also = {**recipe.same, "n": float(plan.n)}
    all_gather = functools.partial(gather.call, also=also, within=recipe)
    everybody = _one_by_one(call, workspace.group, all_gather, functools.partial(plain.run, within=recipe))
    if isinstance(workspace, CudaWorkspace) and not call.scales:  # which torch packs beside the rows
        if not call.gathered:
            recipe.allocates(everybody)
        workspace.remember_parts(recipe, 1 + len(call.weight))
    return recipe.out


def _returned(recipe: repeat.Recipe) -> list[int]:
    return [recipe.returns(out, f"out[{i}]") for i, out in enumerate(recipe.out)]


def _one_by_one(
    call: Call, group: ProcessGroup, all_gather: Callable[..., object], gemm: Callable[..., None]
) -> Tensor:
    """Rows of all ranks by `all_gather`, then products by `gemm`. Returns the rows as they were sent."""
    rows = Rows(call.x, call.scales)
    everybody = rows.everybody(group, call.gathered)
    all_gather(rows.sent, group, everybody)
    _products(rows.received(everybody, call, call.out), gemm)
    rows.copy(everybody, call.gathered)
    return everybody


def nodes(workspace: NodesWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    rows = Rows(call.x, call.scales)

    def inside(sent: Tensor, outs: Tensors) -> None:
        front.below(AG_GEMM, rows.received(sent, call, outs), workspace.node_group)

    two_level.gather(workspace, plan, rows.sent, inside, call.out)


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


def kernel(workspace: CudaWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe | None = None) -> None:
    """A launch for each weight. recipe: of the call, if it is to be known."""
    x, scales, gathered = call.x, call.scales, call.gathered
    # Allocations may run out of memory, so they come before the call is opened.
    source = readable(x)
    launches = [
        (source, aligned(weight), readable_if_any(bias), writable(out))
        for weight, bias, out, _ in call.each()
    ]
    targets = [writable(gathered[0]), *scale_target(gathered)] if gathered else []
    collected = (scales[0].x, targets[1]) if scales and gathered else ()
    plans = plan.parts or (plan,) * len(launches)

    def enqueue() -> None:
        for i, (of_weight, tensors) in enumerate(zip(plans, launches, strict=True)):
            # The rows that the first launch gathers are used by the others.
            how = (address, of_weight.choice, plan.num_sms, epoch, chunk_rows, i > 0)
            scaled = scales[i].for_kernel(x) if scales else {}
            _kernel(*tensors, plan.transpose_weight, *how, **scaled)
        if targets:
            _collect(source, targets[0], address, epoch, *collected)

    with workspace.enter(plan) as (address, epoch):
        chunk_rows = plan.chunk_rows if epoch else 0
        enqueue()
    written = [*(product for *_, product in launches), *targets]
    if recipe is not None and in_place(written, call.out):
        _remember(workspace, recipe, enqueue, launches, call, epoch > 0)
    for target, out in zip(written, call.out, strict=True):
        if target.data_ptr() != out.data_ptr():
            out.copy_(target if target.dim() == 2 else target[:, None])


def _remember(
    workspace: CudaWorkspace,
    recipe: repeat.Recipe,
    enqueue: Callable[[], None],
    launches: Sequence[tuple[Tensor | None, ...]],
    call: Call,
    by_copy_engine: bool,
) -> None:
    """Makes a call known. launches: x, weight, bias and product of each."""
    results = _returned(recipe)
    read: dict[str, Tensor | None] = {"scale_x": call.scales[0].x} if call.scales else {}
    numbers = []
    for i, (x, weight, bias, _) in enumerate(launches):
        read |= {"x": x, f"weight[{i}]": weight, f"bias[{i}]": bias}
        read |= {f"scale_w[{i}]": call.scales[i].w} if call.scales else {}
        used = [*recipe.numbers("x", f"weight[{i}]", f"bias[{i}]"), results[i]]
        numbers.append(used + recipe.numbers("scale_x", f"scale_w[{i}]"))
    if call.gathered:
        rows, *their_scales = results[len(launches) :]
        numbers.append([recipe.number("x"), rows, recipe.number("scale_x"), *their_scales])
    if recipe.in_place(**read):
        workspace.remember(recipe, enqueue, numbers, by_copy_engine)


def protocol(workspace: CpuWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    """The kernel's work on the CPU, tile by tile."""
    rows = Rows(call.x, call.scales)
    arrivals = gather.Arrivals(workspace, plan, rows.sent)
    plans = plan.parts or (plan,) * len(call.weight)
    core, m, p = _native.core, plan.m, plan.world_size
    for own, (weight, bias, out, scale) in zip(plans, call.each(), strict=True):
        wide_w = WideWeight(weight, plan.transpose_weight, None if scale is None else scale.w)
        wide_bias = None if bias is None else bias.to(wide_type(plan.dtype))
        config = core.tile_config(own.config)
        order = core.ag_gemm_tiles(m, own.n, p, workspace.rank, own.config, own.cluster, own.group_m)
        for source, m_tile, n_tile in order:  # tiles of own rows first, others as their rows arrive
            columns = slice(n_tile * config.block_n, (n_tile + 1) * config.block_n)
            block = arrivals.block(source, m_tile)
            tile = wide_w.times(rows.rows(block), columns, rows.scale(block))
            if wide_bias is not None:
                tile += wide_bias[columns]
            first_row = source * (m // p) + m_tile * config.block_m
            out[first_row : first_row + tile.shape[0], columns] = tile
    if call.gathered:
        everybody = call.gathered[0]
        if call.scales:
            everybody = rows.sent.new_empty(m, rows.sent.shape[1])
        for source in range(p):
            arrivals.copy_to(everybody, source)
        rows.copy(everybody, call.gathered)


AG_GEMM = front.Collective(
    name=_OP,
    call=Call,
    sizes=lambda call, p: checks.ag_gemm_args(
        _OP, call.x, call.weight, call.bias, call.transpose_weight, p, call.scales
    ),
    results=_results,
    matrices=_matrices,
    plan=_plan,
    # Contents of biases may differ, because each rank has its own columns.
    same=lambda call: {"bias": ", ".join("none" if bias is None else "given" for bias in call.bias)},
    alone=alone,
    ways={"torch": by_torch, "parts": parts, "kernel": kernel, "protocol": protocol, "nodes": nodes},
)
_kernel: Any = torch.ops.flux._ag_gemm.default
_collect: Any = torch.ops.flux._collect.default
