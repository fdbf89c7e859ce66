"""AllGather+GEMM: the gathered rows of all ranks · weightᵀ of each rank (arXiv 2406.06858, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, overload

import torch
from torch.distributed import ProcessGroup

from flux.comm import known, registry
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.ops import _ag_gemm_cpu, _check, _gate, _invariant, two_level
from flux.ops import _ag_gemm_known as _known
from flux.ops import all_gather as gather
from flux.ops import gemm as plain
from flux.ops._library import library, may_skip_dispatch, needs_grad
from flux.ops._tensors import aligned, readable, readable_if_any, writable
from flux.ops.plan import Plan, carried_by, problem_of, workspace_plan
from flux.ops.plan_gemm import plan_ag_gemm

Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]


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
    weight: Tensors,
    bias: Biases | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: Literal[False] = False,
    out: Tensors | None = None,
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


def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | None | Biases = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: bool = False,
    out: torch.Tensor | Tensors | None = None,
) -> Any:
    """The rows of all p ranks, gathered, · weightᵀ plus bias: each rank its N/p columns. A collective.

    Accumulated in fp32 and rounded once; results are bitwise repeatable, and those of flux.gemm for the same
    tile shape.

    Args:
        x: [M/p, K], or with more leading dimensions, of which the first is gathered; the same shape on all
            ranks. bfloat16 or float16 for the kernel; float32 and float64 go through torch on GPUs.
        weight: [N/p, K] as in nn.Linear, or [K, N/p] with `transpose_weight`; dtype and device of x. Or a
            list of those, for which x is gathered once.
        bias: [N/p], dtype and device of x. For a list of weights: a list with one entry, which may be None,
            for each.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K, N/p].
        return_gathered: also return the gathered x, without another communication.
        out: contiguous [M, ..., N/p] to write to; for a list of weights a list of those.

    Returns:
        [M, ..., N/p] in x's dtype: a fresh tensor, or `out`; for a list of weights a list of them. With
        `return_gathered` a pair of that and the gathered x [M, ..., K], a fresh tensor.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out`; `out` shares memory
            with an input or another `out`; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check(group) raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, gate, up = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32, 64)
        hidden, gathered = flux.ag_gemm(x, [gate, up], return_gathered=True)
        assert [h.shape for h in hidden] == [(8 * p, 32)] * 2  # [M, N/p] for each weight
    """
    many = isinstance(weight, (list, tuple))
    count = len(weight) if many else None
    _check.list_like("ag_gemm", "bias", bias, count)
    _check.list_like("ag_gemm", "out", out, count)
    weights: Any = weight if many else (weight,)
    biases: Any = () if bias is None else bias if many else (bias,)
    results: Any = None if out is None else list(out) if many else [out]
    if not torch.compiler.is_compiling() and (calls := known.of(group)) is not None:
        done = calls.call(*_known.given(x, weights, biases, transpose_weight, return_gathered, results))
        if done is not None:
            return _answer(done, len(weights), return_gathered, many)
    direct = may_skip_dispatch(x, *weights, *biases)
    if not direct or results is not None:
        flags = {"transpose_weight": transpose_weight, "return_gathered": return_gathered}
        _gate.check("ag_gemm", x=x, **flags)
        lists = {"weight": weights, "bias": biases, "out": results or ()}
        entries = _gate.check_lists("ag_gemm", many, lists)
        if results is not None:
            _check.no_backward_through_out("ag_gemm", x=x, **entries)
    if needs_grad(x, *weights, *biases):
        direct = False
        if needs_grad(*biases):
            biases = _without_none(x, weights, biases, transpose_weight)
    name = "" if direct else group_name(group, "ag_gemm")
    if results is not None and return_gathered:
        p = (resolve_group(group, "ag_gemm") if direct else process_group(name)).size()
        _check.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p)
        results.append(_new_gathered(x, p))
    arguments = (x, weights, biases, transpose_weight, return_gathered)
    if torch.compiler.is_compiling():
        return _answered(_by_operator, arguments, name, results, many)
    pg = resolve_group(group, "ag_gemm")
    function = _by_operator if not direct else _call if pg.size() == 1 else _among_ranks
    where = pg if direct else name
    return registry.in_turn(pg, x.device, _answered, function, arguments, where, results, many)


def _by_operator(*arguments: Any) -> list[torch.Tensor]:
    *inputs, results = arguments
    if results is None:
        return list(_op(*inputs))
    _op_out(*inputs, results)
    return list(results)


def _answered(
    function: Callable[..., list[torch.Tensor]],
    arguments: tuple[Any, ...],
    group: ProcessGroup | str,
    outs: list[torch.Tensor] | None,
    many: bool,
) -> Any:
    return _answer(function(*arguments, group, outs), len(arguments[1]), arguments[-1], many)


def _answer(results: Tensors | torch.Tensor, weights: int, return_gathered: bool, many: bool) -> Any:
    """The public return value: one result, or a list for a list of weights; then the gathered x."""
    if isinstance(results, torch.Tensor):
        return [results] if many else results
    answer = list(results[:weights]) if many else results[0]
    return (answer, results[-1]) if return_gathered else answer


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
) -> torch.Tensor:
    """The same for one weight from torch alone: gathered, fp32 product, bias, one rounding."""
    pg = resolve_group(group, "ag_gemm")
    _check.ag_gemm_args("ag_gemm", x, [weight], [bias], transpose_weight, pg.size())
    return plain.reference(gather.reference(x, pg), weight, bias, transpose_weight)


def _without_none(x: torch.Tensor, weights: Tensors, biases: Biases, transpose_weight: bool) -> Tensors:
    """Replaces None by zeros: torch gives no gradients to the tensors of a list that contains None."""
    n_axis = -1 if transpose_weight else 0
    return [
        x.new_zeros(weight.shape[n_axis]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _new_gathered(x: torch.Tensor, world_size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0] * world_size, *x.shape[1:])


def _fake(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
) -> list[torch.Tensor]:
    p = process_group(group_name).size()
    shapes, _, _, _ = _check.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p)
    outs = [x.new_empty(shape) for shape in shapes]
    return [*outs, _new_gathered(x, p)] if return_gathered else outs


def _fake_out(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
    outs: Tensors,
) -> None:
    p = process_group(group_name).size()
    shapes, _, _, _ = _check.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p)
    _check.out_args("ag_gemm", outs, shapes, x, return_gathered, p)


def _eager(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
) -> list[torch.Tensor]:
    group = process_group(group_name)
    return _call(x, weights, biases, transpose_weight, return_gathered, group)


def _eager_out(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group_name: str,
    outs: Tensors,
) -> None:
    _call(x, weights, biases, transpose_weight, return_gathered, process_group(group_name), outs)


def _call(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group: ProcessGroup,
    outs: Tensors | None = None,
) -> list[torch.Tensor]:
    """The products, then the gathered x if requested. Without gradients, and without torch's
    dispatcher.
    """
    p = group.size()
    if p == 1:
        biases = biases or (None,) * len(weights)
        shapes, *_ = _check.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p)
        outs, products, gathered = _results(x, weights, biases, shapes, p, return_gathered, outs)
        _one_rank(x, weights, biases, transpose_weight, products, gathered)
        return outs
    if (calls := known.of_groups.get(group)) is not None:
        done = calls.call_below(*_known.given(x, weights, biases, transpose_weight, return_gathered, outs))
        if done is not None:
            return [done] if isinstance(done, torch.Tensor) else list(done)
    arguments = (x, weights, biases, transpose_weight, return_gathered, group, outs)
    return registry.in_turn(group, x.device, _among_ranks, *arguments)


def _among_ranks(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    return_gathered: bool,
    group: ProcessGroup,
    outs: Tensors | None,
) -> list[torch.Tensor]:
    p = group.size()
    biases = biases or (None,) * len(weights)
    workspace = registry.find(group, x.device)
    facts = _check.ag_gemm_facts("ag_gemm", x, weights, biases, transpose_weight)
    found = None if workspace is None else workspace.plans.get(facts)
    if found is not None:
        call, plans, shapes, m, ns, k, given = found
    else:
        shapes, m, ns, k = _check.ag_gemm_args("ag_gemm", x, weights, biases, transpose_weight, p)
    arguments = _known.given(x, weights, biases, transpose_weight, return_gathered, outs)
    outs, products, gathered = _results(x, weights, biases, shapes, p, return_gathered, outs)
    if workspace is None:
        workspace = registry.get(group, x.device, "ag_gemm")
    if found is None:
        call, plans = _plans(workspace, m, ns, k, x.dtype, transpose_weight)
        _invariant.require(call)
        # Contents of biases may differ, because each rank has its own columns.
        given = {"bias": ", ".join("none" if bias is None else "given" for bias in biases)}
        workspace.plans[facts] = (call, plans, shapes, m, ns, k, given)
    x2 = x
    if x.dim() != 2:
        x2 = x.reshape(-1, k)
        products = [out.view(m, n) for out, n in zip(products, ns, strict=True)]
        gathered = None if gathered is None else gathered.view(m, k)
    if call.way == "parts":
        gathered = gather.call(x2, group, gathered, also={**given, "n": float(call.n)})
        _one_rank(gathered, weights, biases, transpose_weight, products, None)
        return outs
    with workspace.calling(call, given) as epoch:
        if not call.fused:
            _unfused(x2, weights, biases, transpose_weight, group, products, gathered)
        elif isinstance(workspace, CudaWorkspace):
            recipe = _known.recipe(arguments, len(weights), outs)
            _fused_cuda(workspace, call, plans, x2, weights, biases, products, gathered, recipe)
        elif isinstance(workspace, CpuWorkspace):
            _ag_gemm_cpu.run(workspace, call, plans, epoch, x2, weights, biases, products, gathered)
        else:
            nodes = cast(NodesWorkspace, workspace)

            def inside(rows: torch.Tensor, results: Tensors) -> None:
                _call(
                    rows,
                    weights,
                    biases,
                    transpose_weight,
                    gathered is not None,
                    nodes.node_group,
                    results,
                )

            whole = products if gathered is None else [*products, gathered]
            two_level.gather(nodes, call, x2, inside, whole)
    return outs


def _results(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    shapes: list[list[int]],
    p: int,
    return_gathered: bool,
    outs: Tensors | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    """The tensors that the call writes (new, or given and checked): all, products, gathered x or None."""
    if outs is None:
        results = [x.new_empty(*shape) for shape in shapes]
        if return_gathered:
            results.append(_new_gathered(x, p))
    else:
        results = list(outs)
        _check.out_args("ag_gemm", results, shapes, x, return_gathered, p)
        for i, out in enumerate(results):
            which = f"[{i}]" if len(shapes) > 1 else ""
            _check.separate("ag_gemm", "out" + which, out, x, *weights, *biases, *results[:i])
    if return_gathered:
        return results, results[:-1], results[-1]
    return results, results, None


def _one_rank(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    products: Tensors,
    gathered: torch.Tensor | None,
) -> None:
    for weight, bias, out in zip(weights, biases, products, strict=True):
        plain.run(x, weight, bias, transpose_weight, out)
    if gathered is not None:
        gathered.copy_(x)


def _plans(
    workspace: Workspace, m: int, ns: tuple[int, ...], k: int, dtype: torch.dtype, transpose_weight: bool
) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan of the gather, on which ranks must agree, and the plans of the GEMMs.

    With several weights, n of the former is the sum of their columns. If one cannot run fused, none does.
    """
    key = ("ag_gemm", m, ns, k, dtype, transpose_weight)
    found = workspace.plans.get(key)
    if found is None and workspace.topology is not None:
        call = workspace_plan(workspace, "ag_gemm", m, sum(ns), k, dtype, transpose_weight)
        found = workspace.plans[key] = (call, (call,) * len(ns))
    if found is None:
        problems = [problem_of(workspace, m, n, k, dtype, transpose_weight) for n in ns]
        plans = tuple(carried_by(workspace, plan_ag_gemm(problem)) for problem in problems)
        if all(plan.fused for plan in plans):  # measurements are of one weight with all columns
            whole = workspace_plan(workspace, "ag_gemm", m, sum(ns), k, dtype, transpose_weight)
            plans = (whole,) * len(ns) if len(ns) == 1 or whole.way != "fused" else plans
        call = replace(next((plan for plan in plans if not plan.fused), plans[0]), n=sum(ns))
        found = workspace.plans[key] = (call, plans)
    return cast(tuple[Plan, tuple[Plan, ...]], found)


def _unfused(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    transpose_weight: bool,
    group: ProcessGroup,
    outs: Tensors,
    gathered: torch.Tensor | None,
) -> None:
    if gathered is None:
        gathered = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    gather.unfused(x, group, gathered)
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        if out.numel() == 0:
            continue
        if x.shape[1] == 0:
            out.zero_()
            if bias is not None:
                out += bias
        elif x.is_cuda:
            plain.unfused(gathered, weight, bias, transpose_weight, out)
        else:
            out.copy_(plain.reference(gathered, weight, bias, transpose_weight))


def _fused_cuda(
    workspace: CudaWorkspace,
    call: Plan,
    plans: tuple[Plan, ...],
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    outs: Tensors,
    gathered: torch.Tensor | None,
    recipe: known.Recipe | None = None,
) -> None:
    # Allocations may run out of memory, so they come before the call is opened.
    source = readable(x)
    operands = [
        (source, aligned(weight), readable_if_any(bias), writable(out))
        for weight, bias, out in zip(weights, biases, outs, strict=True)
    ]
    target = None if gathered is None else writable(gathered)

    def enqueue() -> None:
        reuse, sms = False, call.num_sms
        for plan, tensors in zip(plans, operands, strict=True):
            _kernel(*tensors, call.transpose_weight, address, plan.choice, sms, epoch, chunk_rows, reuse)
            reuse = True
        if target is not None:
            _collect(source, target, address, epoch)

    with gather.enter(workspace, call) as (address, epoch):
        chunk_rows = gather.chunk_rows(call, epoch)
        enqueue()
    if recipe is not None:
        written = (*outs, gathered)
        _known.remember(workspace, recipe, enqueue, operands, target, written, epoch > 0)
    for (_, _, _, product), out in zip(operands, outs, strict=True):
        if product is not out:
            out.copy_(product)
    if gathered is not None and target is not None and target is not gathered:
        gathered.copy_(target)


for _device in ("CPU", "CUDA"):
    library.impl("ag_gemm", _eager, _device)
    library.impl("ag_gemm_out", _eager_out, _device)
torch.library.register_fake("flux::ag_gemm", _fake, lib=library)
torch.library.register_fake("flux::ag_gemm_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.ag_gemm.default
_op_out: Any = torch.ops.flux.ag_gemm_out.default
_kernel: Any = torch.ops.flux._ag_gemm.default
_collect: Any = torch.ops.flux._collect.default
