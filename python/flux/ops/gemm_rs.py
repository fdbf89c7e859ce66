"""GEMM+ReduceScatter: x · weightᵀ summed over ranks, each keeping its rows (arXiv 2406.06858, section 4)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance, _native
from flux._memory import aligned, readable_if_any, wide_type, writable
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import group as groups
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same
from flux.fp8 import scales as fp8
from flux.fp8.scales import Scales
from flux.fp8.wide_product import WideWeight, product
from flux.ops import gemm as plain
from flux.ops.reduce_scatter import recipe_of, reduce_scatter, sum_of
from flux.ops.ways import int8_sum, two_level
from flux.plan.choose import Plan, require, workspace_plan

_OP = repeat.operator()


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    out: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
    wire: Literal["int8"] | None = None,
) -> torch.Tensor:
    """Sum over ranks of x · weightᵀ, of which each of p ranks gets M/p rows, plus bias once. A collective.

    Accumulated in fp32. What ranks send each other is rounded to the result's dtype; the sum is taken in
    fp32, in rank order, and rounded once: results are bitwise repeatable.

    Args:
        x: [M, K/p], or with more leading dimensions, of which the first is scattered; bfloat16 or float16 for
            the kernel, float32 and float64 go through torch on GPUs. With scales fp8, as in flux.gemm.
        weight: [N, K/p] as in nn.Linear, or [K/p, N] with `transpose_weight`; dtype and device of x. With
            scales float8_e4m3fn, as in flux.gemm.
        bias: [N], dtype of the result and device of x; each rank adds it to its own rows.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K/p, N].
        out: contiguous [M/p, ..., N] to write to.
        scale_x, scale_w: of this rank's x and weight, with the shapes of flux.gemm; of the same kind on all
            ranks.
        out_dtype, accumulate: as in flux.gemm, the same on all ranks.
        wire: as in flux.reduce_scatter: flux.gemm, then that.

    Returns:
        [M/p, ..., N] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out` or scales; `out` shares
            memory with an input; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check(group) raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, weight = torch.randn(8 * p, 64), torch.randn(32, 64)  # [M, K/p], [N, K/p]
        out = flux.gemm_rs(x, weight)
        assert out.shape == (8, 32)  # [M/p, N]
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if wire is not None:
        return _over_wire(x, weight, bias, transpose_weight, group, out, wire, scaling)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, weight, bias, out, transpose_weight, *scaling)
        if done is not None:
            return cast(torch.Tensor, done)
    direct = may_skip_dispatch(x, weight, bias, *scaling[:2])
    tensors = {"x": x, "weight": weight, "bias": bias}
    if not direct or out is not None or scaling:
        of_scales = fp8.named(scale_x, scale_w, out_dtype, accumulate)
        argument_types.check("gemm_rs", **tensors, transpose_weight=transpose_weight, out=out, **of_scales)
    if scaling:
        fp8.no_backward("gemm_rs", **tensors, scale_x=scale_x, scale_w=scale_w)
    if out is not None:
        checks.no_backward_through_out("gemm_rs", **tensors, out=out)
    if direct and not needs_grad(x, weight, bias):
        scales, pg = fp8.given("gemm_rs", *scaling), resolve_group(group, "gemm_rs")
        return call(x, weight, bias, transpose_weight, pg, out, scales=scales)
    name = group_name(group, "gemm_rs")
    arguments = (x, weight, bias, transpose_weight, name)
    return cast(torch.Tensor, dispatch(name, x.device, _op, _op_out, arguments, out, scaling))


def _over_wire(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group: GroupLike,
    out: torch.Tensor | None,
    wire: Literal["int8"],
    scaling: tuple[Any, ...],
) -> torch.Tensor:
    of_scales: dict[str, Any] = fp8.named(*scaling) if scaling else {}
    if not torch.compiler.is_compiling():  # compiled, flux.gemm and flux.reduce_scatter check
        tensors = {"x": x, "weight": weight, "bias": bias}
        argument_types.check(
            "gemm_rs", **tensors, transpose_weight=transpose_weight, out=out, wire=wire, **of_scales
        )
        p, scales = resolve_group(group, "gemm_rs").size(), fp8.given("gemm_rs", *scaling)
        shape, *_ = checks.gemm_args("gemm_rs", x, weight, bias, transpose_weight, p, scales=scales)
        int8_sum.check("gemm_rs", wire, fp8.result_dtype(x, scales))
        if scales is not None:
            fp8.no_backward("gemm_rs", **tensors, scale_x=scales.x, scale_w=scales.w)
        if out is not None:
            checks.output("gemm_rs", out, shape, x, weight, bias, scales=scales)
            checks.no_backward_through_out("gemm_rs", **tensors, out=out)
    partial = plain.gemm(x, weight, transpose_weight=transpose_weight, **of_scales)
    result = reduce_scatter(partial, group=group, out=out, wire=wire)
    if bias is None:
        return result
    return result + bias.to(result.dtype) if out is None else result.add_(bias)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    *scaling: Any,
) -> torch.Tensor:
    """gemm_rs with torch only: fp32 products, gathered, summed in rank order, bias, rounded once. scaling: as
    in gemm.reference.
    """
    pg = resolve_group(group, "gemm_rs")
    p, scales = pg.size(), fp8.given("gemm_rs", *scaling)
    shape, m, n, k = checks.gemm_args("gemm_rs", x, weight, bias, transpose_weight, p, scales=scales)
    partial = product(x.reshape(m, k), *fp8.canonical(weight, transpose_weight, scales))
    gathered = [torch.empty_like(partial) for _ in range(p)]
    dist.all_gather(gathered, partial, group=pg)
    rows = m // p
    total = torch.zeros(rows, n, dtype=partial.dtype, device=x.device)
    for other in gathered:
        total += other[pg.rank() * rows : (pg.rank() + 1) * rows]
    if bias is not None:
        total += bias.to(total.dtype)
    return total.to(fp8.result_dtype(x, scales)).view(shape)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group_name: str,
    *scaling: Any,
) -> torch.Tensor:
    p, scales = process_group(group_name).size(), fp8.given("gemm_rs", *scaling)
    shape, _, _, _ = checks.gemm_args("gemm_rs", x, weight, bias, transpose_weight, p, scales=scales)
    return x.new_empty(shape, dtype=fp8.result_dtype(x, scales))


def _fake_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group_name: str,
    out: torch.Tensor,
    *scaling: Any,
) -> None:
    p, scales = process_group(group_name).size(), fp8.given("gemm_rs", *scaling)
    shape, _, _, _ = checks.gemm_args("gemm_rs", x, weight, bias, transpose_weight, p, scales=scales)
    checks.out_arg("gemm_rs", out, shape, x, scales=scales)


def _eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group_name: str,
    *scaling: Any,
) -> torch.Tensor:
    scales = fp8.given("gemm_rs", *scaling)
    return call(x, weight, bias, transpose_weight, process_group(group_name), scales=scales)


def _eager_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group_name: str,
    out: torch.Tensor,
    *scaling: Any,
) -> None:
    scales = fp8.given("gemm_rs", *scaling)
    call(x, weight, bias, transpose_weight, process_group(group_name), out, scales=scales)


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group: ProcessGroup,
    out: torch.Tensor | None = None,
    also: Same = NOTHING,
    scales: Scales | None = None,
    within: repeat.Recipe | None = None,
) -> torch.Tensor:
    """gemm_rs without gradients and without torch's dispatcher.

    Args:
        also: further facts that ranks compare, if the call is a part of another operator.
        within: of that operator's call, if it is to be known (flux.comm.repeat).
    """
    if group.size() == 1:
        shape, *_ = checks.gemm_args("gemm_rs", x, weight, bias, transpose_weight, 1, scales=scales)
        out = checks.output("gemm_rs", out, shape, x, weight, bias, scales=scales)
        plain.run(x, weight, bias, transpose_weight, out, scales)
        return out
    if within is None and (calls := repeat.of_groups.get(group)) is not None:
        given = (_OP, _invariance.active(), x, weight, bias, out, transpose_weight, *(scales or ()))
        done = calls.call_below(*given)
        if done is not None:
            return cast(torch.Tensor, done)
    arguments = (x, weight, bias, transpose_weight, group, out, also, scales, within)
    return registry.in_turn(group, x.device, _among_ranks, *arguments)


def _among_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group: ProcessGroup,
    out: torch.Tensor | None,
    also: Same,
    scales: Scales | None,
    within: repeat.Recipe | None,
) -> torch.Tensor:
    workspace = registry.find(group, x.device)
    facts = checks.facts("gemm_rs", x, weight, bias, transpose_weight, scales)
    found = None if workspace is None else workspace.plans.get(facts)
    if found is not None:
        plan, shape, m, n, k = found
    else:
        shape, m, n, k = checks.gemm_args(
            "gemm_rs", x, weight, bias, transpose_weight, group.size(), scales=scales
        )
    given = {"batch_invariant": _invariance.active(), "x": x, "weight": weight, "bias": bias, "out": out}
    given |= {"transpose_weight": transpose_weight, **fp8.by_name(scales)}
    recipe = repeat.Recipe(_OP, given, within)
    out = checks.output("gemm_rs", out, shape, x, weight, bias, scales=scales)
    recipe.returns(out, "out")
    if workspace is None:
        workspace = registry.get(group, x.device, "gemm_rs")
    if scales is not None:
        weight, transpose_weight, scales = fp8.canonical(weight, transpose_weight, scales)
    if found is None:
        scaling = None if scales is None else scales.scaling(k)
        plan = workspace_plan(workspace, "gemm_rs", m, n, k, x.dtype, transpose_weight, scaling)
        require(plan)
        workspace.plans[facts] = (plan, shape, m, n, k)
    x2, out2 = (x, out) if len(shape) == 2 else (x.reshape(m, k), out.view(m // group.size(), n))
    if plan.way == "parts":
        partial = x.new_empty(m, n, dtype=out.dtype)
        recipe.allocates(partial)
        plain.run(x2, weight, None, transpose_weight, partial, scales, recipe)
        sum_of(partial, group, out2, {"bias": bias, **also}, recipe_of(partial, out2, recipe))
        if bias is not None:
            out2 += bias
            recipe.add_step(torch.Tensor.add_, out, bias)
        if isinstance(workspace, CudaWorkspace):
            workspace.remember_parts(recipe, 2 + (bias is not None))
        return out
    with workspace.calling(plan, {"bias": bias, **also} if also else {"bias": bias}) as epoch:
        if not plan.fused:
            unfused(x2, weight, bias, transpose_weight, group, out2, scales)
        elif isinstance(workspace, CudaWorkspace):
            fused_cuda(workspace, plan, x2, weight, bias, out2, scales, recipe)
        elif isinstance(workspace, CpuWorkspace):
            _fused_cpu(workspace, plan, epoch, x2, weight, bias, out2, scales)
        else:
            nodes, addends = cast(NodesWorkspace, workspace), () if bias is None else (bias,)
            two_level_sum(nodes, plan, x2, weight, transpose_weight, out2, addends, scales)
    return out


def two_level_sum(
    workspace: NodesWorkspace,
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    transpose_weight: bool,
    out: torch.Tensor,
    addends: Sequence[torch.Tensor],
    scales: Scales | None = None,
) -> None:
    """gemm_rs of x [m, k] on several nodes, plus addends [n] or [m/p, n]."""

    def inside(some: two_level.Select, node_sum: torch.Tensor) -> None:
        theirs = None if scales is None else scales.of_rows(x.shape[0], some)
        call(some(x), weight, None, transpose_weight, workspace.node_group, node_sum, scales=theirs)

    two_level.scatter(workspace, plan, x.shape[0], inside, out, addends)


def unfused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    group: ProcessGroup,
    out: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """out = this rank's rows of the sum of all ranks' products, with torch."""
    if out.numel() == 0:
        return
    if x.shape[1] == 0:
        out.zero_()
    elif x.device.type == "cuda":
        partial = x.new_empty(x.shape[0], out.shape[1], dtype=out.dtype)
        plain.unfused(x, weight, None, transpose_weight, partial, scales)
        groups.reduce_scatter()(out, partial, group=group)
    else:
        # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
        partial = product(x, weight, transpose_weight, scales)
        total = torch.empty(out.shape, dtype=partial.dtype)
        groups.reduce_scatter()(total, partial, group=group)
        out.copy_(total if bias is None else total + bias)
        return
    if bias is not None:
        out += bias


def fused_cuda(
    workspace: CudaWorkspace,
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scales: Scales | None = None,
    recipe: repeat.Recipe | None = None,
) -> None:
    """Launches the kernel. recipe: of the call, if it is to be known (flux.comm.repeat)."""
    # Allocations may run out of memory, so they come before the call is opened.
    target = writable(out)
    operands = (aligned(x), aligned(weight), readable_if_any(bias), target)
    staging = None
    if plan.copied_now():
        staging = torch.empty(plan.slot_bytes, dtype=torch.uint8, device=x.device)
    with workspace.enter(plan) if staging is None else workspace.enter_copy(plan) as (address, epoch):
        options = (plan.transpose_weight, address, plan.choice, plan.num_sms, epoch, plan.chunks, staging)
        scaled = fp8.for_kernel(x, scales)
        enqueue = functools.partial(_kernel, *operands, *options, plan.batch_invariant, **scaled)
        enqueue()
    read = dict(zip(("x", "weight", "bias"), operands, strict=False)) | fp8.tensors(scales)
    if recipe is not None and target is out and recipe.in_place(**read):
        staged = repeat.ABSENT if staging is None else recipe.allocates(staging)
        used = [*recipe.numbers("x", "weight", "bias"), *recipe.results, staged]
        used += recipe.numbers("scale_x", "scale_w")
        workspace.remember(recipe, enqueue, [used], by_copy_engine=staging is not None)
    if target is not out:
        out.copy_(target)


def _fused_cpu(
    workspace: CpuWorkspace,
    plan: Plan,
    epoch: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scales: Scales | None,
) -> None:
    """The kernel's work on the CPU, tile by tile: remote tiles to their owners' slots, the own shard last."""
    core = _native.core
    rank, p, rows = workspace.rank, workspace.world_size, out.shape[0]
    wide, dtype = wide_type(x.dtype), plan.result_dtype
    wide_x, of_rows = x.to(wide), None if scales is None else fp8.of_elements(scales.x, plan.m)
    wide_w = WideWeight(weight, plan.transpose_weight, None if scales is None else scales.w)
    wide_bias = None if bias is None else bias.to(wide)
    config = core.tile_config(plan.config)
    block_m, block_n = config.block_m, config.block_n
    layout = core.gemm_rs_layout(plan.m, plan.n, p, plan.config)

    def slot_tile(owner: int, source: int, m_tile: int, n_tile: int, shape: torch.Size) -> torch.Tensor:
        offset = layout.tile_offset(layout.slot_index(source, owner), m_tile, n_tile) * dtype.itemsize // 2
        area = workspace.slot(owner, epoch, offset, block_m * block_n, dtype)
        return area.view(block_m, block_n)[: shape[0], : shape[1]]

    order = core.gemm_rs_tiles(plan.m, plan.n, p, rank, plan.config, plan.cluster, plan.group_m)
    for owner, m_tile, n_tile in order:
        first_row, first_column = m_tile * block_m, n_tile * block_n
        row_range = slice(owner * rows + first_row, owner * rows + min(first_row + block_m, rows))
        columns = slice(first_column, first_column + block_n)
        scale = None if of_rows is None else of_rows[row_range]
        partial = wide_w.times(wide_x[row_range], columns, scale)
        tile = n_tile * layout.m_tiles + m_tile
        # Indices of signal words in a slot: one for each half tile (the rows of one math warpgroup).
        signals = [layout.signal_index(m_tile, n_tile, half) for half in (0, 1)]
        if owner != rank:
            slot = layout.slot_index(rank, owner)
            there = slot_tile(owner, rank, m_tile, n_tile, partial.shape)
            for half, signal in enumerate(signals):
                part = slice(half * block_m // 2, (half + 1) * block_m // 2)
                there[part] = partial[part]
                workspace.signal(owner, slot, signal, epoch)
            continue
        if plan.batch_invariant:  # as the products of peers, which are sent in the result's dtype
            partial = partial.to(dtype).to(wide)
        total = torch.zeros_like(partial)
        for source in range(p):
            if source != rank:
                for signal in signals:
                    workspace.wait(plan.op, source, layout.slot_index(source, rank), signal, tile)
            total += partial if source == rank else slot_tile(rank, source, m_tile, n_tile, partial.shape)
        if wide_bias is not None:
            total += wide_bias[columns]
        out[first_row : first_row + block_m, columns] = total


for _device in ("CPU", "CUDA"):
    library.impl("gemm_rs", _eager, _device)
    library.impl("gemm_rs_out", _eager_out, _device)
torch.library.register_fake("flux::gemm_rs", _fake, lib=library)
torch.library.register_fake("flux::gemm_rs_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.gemm_rs.default
_op_out: Any = torch.ops.flux.gemm_rs_out.default
_kernel: Any = torch.ops.flux._gemm_rs.default
