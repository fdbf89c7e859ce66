"""AllGather+GEMM: the gathered rows of all ranks · weightᵀ of each rank (arXiv 2406.06858, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, overload

import torch
from torch.distributed import ProcessGroup

from flux.calls import argument_types, checks
from flux.calls.dispatch import may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.fp8 import scales as fp8
from flux.fp8.scales import Accumulate, Scales, Scaling
from flux.ops import gemm as plain
from flux.ops.all_gather import reference as gather_reference
from flux.ops.ways import ag_gemm as ag_gemm_ways
from flux.ops.ways import two_level
from flux.ops.ways.ag_gemm import Biases, Tensors
from flux.plan.choose import Plan, carried_by, problem_of, require, workspace_plan
from flux.plan.gemm import plan_ag_gemm


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[False] = False,
    out: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> torch.Tensor: ...


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[True],
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[True],
    out: torch.Tensor | None = None,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[False] = False,
    out: Tensors | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: Tensors | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> list[torch.Tensor]: ...


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[True],
    out: Tensors | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


@overload
def ag_gemm(
    x: torch.Tensor,
    weight: Tensors,
    bias: Biases | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[True],
    out: Tensors | None = None,
    scale_x: torch.Tensor,
    scale_w: Tensors,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]: ...


def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | None | Biases = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: bool = False,
    out: torch.Tensor | Tensors | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | Tensors | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> Any:
    """The rows of all p ranks, gathered, · weightᵀ plus bias: each rank its N/p columns. A collective.

    Accumulated in fp32 and rounded once; results are bitwise repeatable, and those of flux.gemm for the same
    tile shape.

    Args:
        x: [M/p, K], or with more leading dimensions, of which the first is gathered; the same shape on all
            ranks. bfloat16 or float16 for the kernel; float32 and float64 go through torch on GPUs. With
            scales fp8, as in flux.gemm.
        weight: [N/p, K] as in nn.Linear, or [K, N/p] with `transpose_weight`; dtype and device of x, with
            scales float8_e4m3fn. Or a list of those, for which x is gathered once.
        bias: [N/p], dtype of the result and device of x. For a list of weights: a list with one entry, which
            may be None, for each.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K, N/p].
        return_gathered: also return the gathered x, without another communication.
        out: contiguous [M, ..., N/p] to write to; for a list of weights a list of those.
        scale_x: of this rank's x, with the shapes of flux.gemm; of the same kind on all ranks. Scales are
            gathered with their rows.
        scale_w: of the weight, with those shapes; for a list of weights a list of those.
        out_dtype, accumulate: as in flux.gemm, the same on all ranks.

    Returns:
        [M, ..., N/p] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`; for a list of
        weights a list of them. With `return_gathered` a tuple of that and the gathered x [M, ..., K], a fresh
        tensor; with scales also theirs, [M, ..., 1] or [M, ..., K / 128].

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out` or scales; `out` shares
            memory with an input or another `out`; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, gate, up = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32, 64)
        hidden, gathered = flux.ag_gemm(x, [gate, up], return_gathered=True)
        assert [h.shape for h in hidden] == [(8 * p, 32)] * 2  # [M, N/p] for each weight
    """
    many = isinstance(weight, (list, tuple))
    count = len(weight) if many else None
    checks.list_like("ag_gemm", "bias", bias, count)
    checks.list_like("ag_gemm", "out", out, count)
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if scaling:
        checks.list_like("ag_gemm", "scale_w", scale_w, count)
        scaling = (scaling[0], fp8.each(scale_w, many), *scaling[2:])
    of_scales = scaling[1] or () if scaling else ()
    weights: Any = weight if many else (weight,)
    biases: Any = () if bias is None else bias if many else (bias,)
    results: Any = None if out is None else list(out) if many else [out]
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        inputs = (x, weights, biases, transpose_weight, return_gathered)
        done = calls.call(*ag_gemm_ways.given(*inputs, results, scaling))
        if done is not None:
            return _answer(done, len(weights), return_gathered, many)
    direct = may_skip_dispatch(x, *weights, *biases, scale_x, *of_scales)
    if not direct or results is not None or scaling:
        flags = {"transpose_weight": transpose_weight, "return_gathered": return_gathered}
        how = {"scale_x": scale_x, "out_dtype": out_dtype, "accumulate": accumulate}
        argument_types.check("ag_gemm", x=x, **flags, **how)
        lists = {"weight": weights, "bias": biases, "out": results or (), "scale_w": of_scales}
        entries = argument_types.check_lists("ag_gemm", many, lists)
        if scaling:
            fp8.no_backward("ag_gemm", x=x, scale_x=scale_x, **entries)
        if results is not None:
            checks.no_backward_through_out("ag_gemm", x=x, **entries)
    if needs_grad(x, *weights, *biases):
        direct = False
        if needs_grad(*biases):
            biases = ag_gemm_ways.without_none(x, weights, biases, transpose_weight)
    name = "" if direct else group_name(group, "ag_gemm")
    if results is not None and return_gathered:
        p = (resolve_group(group, "ag_gemm") if direct else process_group(name)).size()
        scales = fp8.of_weights("ag_gemm", len(weights), *scaling)
        checks.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p, scales)
        results += ag_gemm_ways.new_gathered(x, p, scales)
    arguments = (x, weights, biases, transpose_weight, return_gathered)
    if torch.compiler.is_compiling():
        return _answered(_by_operator, arguments, name, results, many, scaling)
    pg = resolve_group(group, "ag_gemm")
    function = _by_operator if not direct else below_dispatch if pg.size() == 1 else _among_ranks
    call = (_answered, function, arguments, pg if direct else name, results, many, scaling)
    return registry.in_turn(pg, x.device, *call, holds=not direct)


def _by_operator(*arguments: Any) -> list[torch.Tensor]:
    *inputs, results, scaling = arguments
    if results is None:
        return list(_op(*inputs, *scaling))
    _op_out(*inputs, results, *scaling)
    return list(results)


def _answered(
    function: Callable[..., list[torch.Tensor]],
    arguments: tuple[Any, ...],
    group: ProcessGroup | str,
    outs: list[torch.Tensor] | None,
    many: bool,
    scaling: tuple[Any, ...],
) -> Any:
    return _answer(function(*arguments, group, outs, scaling), len(arguments[1]), arguments[-1], many)


def _answer(results: Tensors | torch.Tensor, weights: int, return_gathered: bool, many: bool) -> Any:
    """The public return value: one result, or a list for a list of weights; then what was gathered."""
    if isinstance(results, torch.Tensor):
        return [results] if many else results
    answer = list(results[:weights]) if many else results[0]
    return (answer, *results[weights:]) if return_gathered else answer


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    *scaling: Any,
) -> torch.Tensor:
    """The same for one weight from torch alone: gathered, fp32 product, bias, one rounding. scaling: as in
    gemm.reference.
    """
    pg = resolve_group(group, "ag_gemm")
    given = fp8.given("ag_gemm", *scaling)
    scales = () if given is None else (given,)
    checks.ag_gemm_args("ag_gemm", x, [weight], [bias], transpose_weight, pg.size(), scales)
    rows = gather_reference(x, pg)
    if given is None:
        return plain.reference(rows, weight, bias, transpose_weight)
    scale = fp8.of_elements(given.canonical_x(x.shape[-1]), x[..., 0].numel()).contiguous()
    gathered = gather_reference(scale, pg)
    return plain.reference(rows, weight, bias, transpose_weight, gathered, *scaling[1:])


def _fake(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
    *scaling: Any,
) -> list[torch.Tensor]:
    p, scales = process_group(group_name).size(), fp8.of_weights("ag_gemm", len(weights), *scaling)
    shapes, _, _, _ = checks.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p, scales)
    outs = ag_gemm_ways.new_products(x, shapes, scales)
    return outs + ag_gemm_ways.new_gathered(x, p, scales) if return_gathered else outs


def _fake_out(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
    outs: Tensors,
    *scaling: Any,
) -> None:
    p, scales = process_group(group_name).size(), fp8.of_weights("ag_gemm", len(weights), *scaling)
    shapes, _, _, _ = checks.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p, scales)
    ag_gemm_ways.check_outs(outs, shapes, x, return_gathered, p, scales)


def _eager(*arguments: Any) -> list[torch.Tensor]:
    x, weights, biases, transpose_weight, return_gathered, name, *scaling = arguments
    group, told = process_group(name), fp8.completed(*scaling)
    return below_dispatch(x, weights, biases, transpose_weight, return_gathered, group, None, told)


def _eager_out(*arguments: Any) -> None:
    x, weights, biases, transpose_weight, return_gathered, name, outs, *scaling = arguments
    group, told = process_group(name), fp8.completed(*scaling)
    below_dispatch(x, weights, biases, transpose_weight, return_gathered, group, outs, told)


def below_dispatch(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group: ProcessGroup,
    outs: Tensors | None = None,
    scaling: tuple[Any, ...] = (),
    within: repeat.Recipe | None = None,
) -> list[torch.Tensor]:
    """The products, then the gathered x if requested, and its scales. Without gradients, and without torch's
    dispatcher. within: as in gemm_rs.call."""
    p = group.size()
    if p == 1:
        biases = biases or (None,) * len(weights)
        scales = fp8.of_weights("ag_gemm", len(weights), *scaling)
        shapes, *_ = checks.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p, scales)
        outs, products, gathered = ag_gemm_ways.results(
            x, weights, biases, shapes, p, return_gathered, outs, scales
        )
        ag_gemm_ways.products(x, weights, biases, transpose_weight, products, scales)
        ag_gemm_ways.copy_gathered(gathered, x, scales)
        return outs
    if within is None and (calls := repeat.of_groups.get(group)) is not None:
        inputs = (x, weights, biases, transpose_weight, return_gathered)
        done = calls.call_below(*ag_gemm_ways.given(*inputs, outs, scaling))
        if done is not None:
            return [done] if isinstance(done, torch.Tensor) else list(done)
    arguments = (x, weights, biases, transpose_weight, return_gathered, group, outs, scaling, within)
    return registry.in_turn(group, x.device, _among_ranks, *arguments)


def _among_ranks(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group: ProcessGroup,
    outs: Tensors | None,
    scaling: tuple[Any, ...] = (),
    within: repeat.Recipe | None = None,
) -> list[torch.Tensor]:
    p = group.size()
    biases = biases or (None,) * len(weights)
    scales: Sequence[Scales] = fp8.of_weights("ag_gemm", len(weights), *scaling)
    workspace = registry.find(group, x.device)
    facts = checks.ag_gemm_facts("ag_gemm", x, weights, biases, transpose_weight, scales)
    found = None if workspace is None else workspace.plans.get(facts)
    if found is not None:
        call, plans, shapes, m, ns, k, given = found
    else:
        shapes, m, ns, k = checks.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p, scales)
    arguments = ag_gemm_ways.given(x, weights, biases, transpose_weight, return_gathered, outs, scaling)
    outs, products, gathered = ag_gemm_ways.results(
        x, weights, biases, shapes, p, return_gathered, outs, scales
    )
    if workspace is None:
        workspace = registry.get(group, x.device, "ag_gemm")
    scaled = scales[0].scaling(k) if scales else None
    if scales:
        weights, transpose_weight, scales = ag_gemm_ways.canonical(weights, transpose_weight, scales)
        scaling = (scales[0].x, [scale.w for scale in scales], *scaling[2:])
    if found is None:
        call, plans = _plans(workspace, m, ns, k, x.dtype, transpose_weight, scaled)
        require(call)
        # Contents of biases may differ, because each rank has its own columns.
        given = {"bias": ", ".join("none" if bias is None else "given" for bias in biases)}
        workspace.plans[facts] = (call, plans, shapes, m, ns, k, given)
    x2 = x
    if x.dim() != 2:
        x2 = x.reshape(m // p, k)
        products = [out.view(m, n) for out, n in zip(products, ns, strict=True)]
        gathered = [each.view(m, each.shape[-1]) for each in gathered]
    operands = ag_gemm_ways.Operands(x2, weights, biases, transpose_weight, group, products, gathered, scales)
    if call.way == "parts":
        recipe = ag_gemm_ways.recipe_of(arguments, len(weights), outs, bool(scales), within)
        ag_gemm_ways.by_flux(workspace, operands, {**given, "n": float(call.n)}, recipe)
        return outs
    with workspace.calling(call, given) as epoch:
        if not call.by_flux:
            ag_gemm_ways.unfused(operands)
        elif isinstance(workspace, CudaWorkspace):
            recipe = ag_gemm_ways.recipe_of(arguments, len(weights), outs, bool(scales), within)
            ag_gemm_ways.kernel(workspace, call, plans, operands, recipe)
        elif isinstance(workspace, CpuWorkspace):
            ag_gemm_ways.protocol(workspace, call, plans, operands, epoch)
        else:
            nodes, rows = cast(NodesWorkspace, workspace), ag_gemm_ways.Rows(x2, scales)

            def inside(sent: torch.Tensor, results: Tensors) -> None:
                some, theirs = rows.received(sent, scaling)
                flags = (transpose_weight, len(gathered) > 0)
                below_dispatch(some, weights, biases, *flags, nodes.node_group, results, theirs)

            two_level.gather(nodes, call, rows.sent, inside, [*products, *gathered])
    return outs


def _plans(
    workspace: Workspace,
    m: int,
    ns: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    scaling: Scaling | None = None,
) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan of the gather, on which ranks must agree, and the plans of the GEMMs.

    With several weights, n of the former is the sum of their columns. If one cannot run fused, none does.
    """
    key = ("ag_gemm", m, ns, k, dtype, transpose_weight, scaling)
    rest = (k, dtype, transpose_weight, scaling)
    found = workspace.plans.get(key)
    if found is None and workspace.topology is not None:
        call = workspace_plan(workspace, "ag_gemm", m, sum(ns), *rest)
        found = workspace.plans[key] = (call, (call,) * len(ns))
    if found is None:
        problems = [problem_of(workspace, m, n, *rest) for n in ns]
        plans = tuple(carried_by(workspace, plan_ag_gemm(problem)) for problem in problems)
        if all(plan.by_flux for plan in plans):  # measurements are of one weight with all columns
            whole = workspace_plan(workspace, "ag_gemm", m, sum(ns), *rest)
            plans = (whole,) * len(ns) if len(ns) == 1 or whole.way != "kernel" else plans
        call = replace(next((plan for plan in plans if not plan.by_flux), plans[0]), n=sum(ns))
        found = workspace.plans[key] = (call, plans)
    return cast(tuple[Plan, tuple[Plan, ...]], found)


for _device in ("CPU", "CUDA"):
    library.impl("ag_gemm", _eager, _device)
    library.impl("ag_gemm_out", _eager_out, _device)
torch.library.register_fake("flux::ag_gemm", _fake, lib=library)
torch.library.register_fake("flux::ag_gemm_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.ag_gemm.default
_op_out: Any = torch.ops.flux.ag_gemm_out.default
