"""What a call will do, and why. Plans depend on facts that are equal on all ranks: all choose alike."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flux import _invariance, _native
from flux.comm import cuda
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NotInvariant, Workspace, expecting_graphs, round_up
from flux.fp8.products import why_not_torchs
from flux.fp8.scales import BLOCK, Scaling
from flux.measured import files
from flux.measured.times import WAYS as ALL_WAYS
from flux.measured.times import Model, Modelled, choose, scaled
from flux.plan.plan import RUNS, SUMS
from flux.plan.plan import Plan as Plan
from flux.plan.plan import PlanInput as PlanInput
from flux.plan.plan import Planned as Planned

# Operators without a GEMM: their time depends on the number of elements only.
_ELEMENTS = ("all_gather", *SUMS)
# The operators that one is made of, where it may also run them one after the other.
_PARTS = {
    "gemm_rs": "gemm and reduce_scatter",
    "ag_gemm": "all_gather and gemm",
    "gemm_ar": "gemm and all_reduce",
    "gemm_ar_norm": "gemm and all_reduce",
}
# Where an operator was not measured near a problem: one of which the same ways count, and that way which does
# not. A norm is part of the kernels that sum, but one more pass behind gemm_rs and all_gather.
_LIKE = {"gemm_ar_norm": ("gemm_ar", "composed")}
_MAX_EXTENT: int = _native.core.MAX_EXTENT
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# What operators do with products that have 16 bits, also those of fp8 operands.
_IN_16_BITS = {
    **dict.fromkeys(("gemm_rs", "gemm_ar", "moe.gemm_gather_rs"), "ranks send each other products"),
    **dict.fromkeys(("grouped_gemm", "moe.ag_scatter_gemm"), "grouped GEMMs store results"),
}
# Rows must start at multiples of 16 bytes for TMA.
_ALIGNMENT = 8
_ROW_ALIGNMENT_BYTES = 16


@functools.cache
def takes(op: str, name: str) -> bool:
    """Whether the kernel of an operator has an argument of that name, such as "scale_x" for fp8 operands."""
    packet: Any = getattr(torch.ops.flux, "_" + op.replace(".", "_"), None)
    return packet is not None and any(argument.name == name for argument in packet.default._schema.arguments)


def why_not_fused(op: str, problem: PlanInput) -> str | None:
    """Why a problem does not run in flux's kernel (on CPU: its protocol), or None. n of all_gather: any."""
    n, k, dtype = problem.n, problem.k, problem.dtype
    if min(problem.m, n, k) == 0:
        return "the problem is empty"
    if max(problem.m, n, k) > _MAX_EXTENT:
        return f"a dimension exceeds {_MAX_EXTENT}"
    if problem.why_not is not None:
        return problem.why_not
    if problem.device_type == "cpu":
        return "CPU tensors without communication: one torch.mm" if op == "gemm" else None
    if not problem.on_gpu:
        return f"no kernels for {problem.device_type} tensors"
    if op == "all_gather":
        row_bytes = k * dtype.itemsize
        if row_bytes >= 2**31:
            return f"rows of {row_bytes} bytes are longer than the kernel can count"
        if row_bytes % _ROW_ALIGNMENT_BYTES:
            return f"rows of {row_bytes} bytes are not a multiple of {_ROW_ALIGNMENT_BYTES} bytes"
        return None
    scaling, of_k, why = problem.scaling, _ALIGNMENT, ": TMA needs 16-byte aligned rows"
    if scaling is not None:
        if op != "gemm_ar" and not takes(op, "scale_x"):  # gemm_ar's product is flux.gemm's
            return f"{op} has no kernel for float8 operands yet"
        if scaling.out_dtype == torch.float32 and op in _IN_16_BITS:
            return f"{_IN_16_BITS[op]} of 16 bits, not float32"
        of_k = BLOCK if scaling.kind == "block" else _ROW_ALIGNMENT_BYTES
        why = f", which {scaling.kind} scales need"
    elif dtype not in _KERNEL_DTYPES:
        return f"kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    for name, size, multiple in (("k", k, of_k), ("n", n, _ALIGNMENT)):
        if size % multiple:
            return f"{name} = {size} is not a multiple of {multiple}{why}"
    return None


def chosen(choice: Any, reason: str) -> dict[str, Any]:
    return {
        "reason": f"{reason}; {choice.reason}" if choice.reason else reason,
        "config": choice.config,
        "config_name": choice.name,
        "cluster": choice.cluster,
        "group_m": choice.group_m,
        "choice": choice.packed,
        "time_us": choice.time_us,
        "candidates": tuple(choice.candidates),
    }


# The tile shape that serves any number of rows is the one that the cost model prefers for this number. It is
# between decoding, for which narrower tiles would use more SMs, and prefill, for which wider ones are faster.
_TYPICAL_ROWS = 512
_TYPICAL_RANKS = 2
_NO_CLUSTER = 1 << 8  # in a packed choice (csrc/gemm/plan.h); K is not split


def select_tile(op: str, problem: PlanInput) -> Any:
    """The tile shape and raster of a GEMM: the cost model's choice, or one tile shape for any m."""
    core, config = _native.core, -1
    shape, transposed, sms = (problem.m, problem.n, problem.k), problem.transpose_weight, problem.sms
    how: dict[str, Any] = {"world_size": problem.world_size} if op in ("gemm_rs", "ag_gemm") else {}
    how |= problem.operands
    if _invariance.demanded():
        typical = core.select_gemm_rs if op == "gemm_rs" else core.select_ag_gemm
        tile = typical(_TYPICAL_ROWS, *shape[1:], transposed, _TYPICAL_RANKS, sms, **problem.operands).config
        config = tile | _NO_CLUSTER
    select = getattr(core, f"select_{op}")
    return select(*shape, transposed, num_sms=sms, config=config, **how)


def require(plan: Plan) -> None:
    """Raises NotInvariant, on all ranks, if a call must be batch invariant, and its plan is not."""
    if plan.batch_invariant and not plan.by_flux and plan.m * plan.n > 0:
        raise NotInvariant(
            f"{plan.op}: batch_invariant: expected a call that runs fused, got an unfused one: {plan.reason}"
        )


def plan_gemm(problem: PlanInput) -> Plan:
    if (why_not := why_not_fused("gemm", problem)) is not None:
        return problem.plan("gemm", False, why_not)
    return problem.plan("gemm", True, **chosen(select_tile("gemm", problem), problem.why_fused))


def plan_gemm_rs(problem: PlanInput) -> Plan:
    if (why_not := why_not_fused("gemm_rs", problem)) is not None:
        return problem.unfused("gemm_rs", why_not)
    m, n, k, p = problem.m, problem.n, problem.k, problem.world_size
    choice = select_tile("gemm_rs", problem)
    signal_bytes, slot_bytes = gemm_rs_room(m, n, p, choice.config, problem.result_dtype)
    facts = {**chosen(choice, problem.why_fused), "signal_bytes": signal_bytes, "slot_bytes": slot_bytes}
    operand_bytes = 2 if problem.scaling is None else 1
    chunks = _native.core.gemm_rs_copy_chunks(m, n, k, p, operand_bytes) if problem.on_gpu else 0
    if chunks:
        transport = f"copy engines, {chunks} chunks for each peer; in CUDA graphs {problem.transport}"
        facts |= {"transport": transport, "copied": True, "chunks": chunks}
    return problem.plan("gemm_rs", True, **facts)


def gemm_rs_room(m: int, n: int, world_size: int, config: int, dtype: torch.dtype) -> tuple[int, int]:
    """The signal_bytes and slot_bytes that one problem needs."""
    layout = _native.core.gemm_rs_layout(m, n, world_size, config)
    # The layout counts in 2-byte elements.
    return round_up(4 * layout.num_signals), round_up(layout.slot_bytes * dtype.itemsize // 2)


# By operator, and by operator and way for those that a measurement may prefer; the modules of other planners
# enter theirs.
PLANNERS: dict[str, Callable[[PlanInput], Plan]] = {"gemm": plan_gemm, "gemm_rs": plan_gemm_rs}
WAYS: dict[tuple[str, str], Callable[[PlanInput, str], Plan | None]] = {}
# By operator, of groups with several nodes.
NODES_PLANNERS: dict[str, Callable[[PlanInput], Plan]] = {}


def workspace_plan(workspace: Workspace, op: str, *problem: Any) -> Plan:
    """The plan of an operator on a workspace, cached by problem, the arguments of problem_of."""
    key = (op, *problem, _invariance.active())
    found: Planned | None = workspace.plans.get(key)
    if found is None:
        planning = problem_of(workspace, *problem)
        found = workspace.plans[key] = Planned(carried_by(workspace, planned(op, planning)))
        if workspace.recorded_in:
            _record(workspace.recorded_in, op, planning)
    return found.plan


@functools.lru_cache(maxsize=4096)
def plan_without_workspace(op: str, problem: PlanInput, device: torch.device, batch_invariant: bool) -> Plan:
    """The plan without a group, before its first call, and of one that never runs fused."""
    facts: dict[str, Any] = {"tuning": files.local(device)}
    if problem.on_gpu:
        facts["num_sms"] = cuda.num_sms(device)
        facts["why_not"] = cuda.why_not(device)
    problem = replace(problem, **facts)
    if problem.world_size == 1 and op not in SUMS:
        return planned("gemm", problem)
    transport = "not known before the group's first call, when the ranks ask each other"
    return planned(op, replace(problem, transport=transport))


def planned(op: str, problem: PlanInput) -> Plan:
    """The planner's plan, or another way to run the problem if measurements say that it is sooner."""
    if problem.topology is not None:
        return NODES_PLANNERS[op](problem)
    plan = PLANNERS[op](problem)
    if not plan.by_flux or plan.batch_invariant:
        return plan
    forced = problem.tuning.forced
    if forced is not None:
        return (_by_way(op, problem, forced, "to be measured") if forced != plan.way else plan) or plan
    estimates = problem.tuning.estimates(*facts_key(op, problem), model_of(op, problem))
    if not estimates and op in _LIKE:
        like, other_way = _LIKE[op]
        estimates = tuple(
            each for each in problem.tuning.estimates(*facts_key(like, problem)) if each.way != other_way
        )
    ways = {way: _by_way(op, problem, way, "") for way in {each.way for each in estimates} - {plan.way}}
    possible = [plan.way, *(way for way, other in ways.items() if other is not None)]
    told = tuple((each.way, each.us, each.source) for each in estimates)
    found = choose(estimates, plan.way, possible)
    if found is None:
        return replace(plan, estimates=told)
    best, usual = found
    reason = f"{best.us:.1f} us, {RUNS[usual.way]} {usual.us:.1f} us ({best.source})"
    other = _by_way(op, problem, best.way, reason)
    assert other is not None
    return replace(other, estimates=told)


def ways_of(op: str) -> tuple[str, ...]:
    """The ways in which an operator of several ranks can run (flux.measured.times.WAYS)."""
    usual = ("kernel", "torch", "parts") if op in _PARTS else ("kernel", "torch")
    return tuple(way for way in ALL_WAYS if way in usual or (op, way) in WAYS)


def facts_key(op: str, problem: PlanInput) -> tuple[str, int, int, int, int, int]:
    """A problem as measurements have it (flux.measured.times.Fact)."""
    m, n, k = problem.m, problem.n, problem.k
    if op == "all_gather":
        m, n, k = m * k, 0, 0
    elif op in _ELEMENTS:
        m, n, k = m * n, 0, 0
    if problem.scaling is not None:
        # Sums without promotion are other facts of a product. How much one hides depends little on them.
        op = scaled(op, problem.scaling.kind, fast=op == "gemm" and problem.scaling.fast)
    return op, problem.world_size, problem.dtype.itemsize, m, n, k


def model_of(op: str, problem: PlanInput) -> Model | None:
    """What is known of a problem's fused way for other sizes: a time of gemm, or of a product that is summed,
    and the carrier of a gather; not of ag_gemm, whose product and gather hide each other.
    """
    if op == "gemm":
        return lambda m, n, k: Modelled(PLANNERS[op](replace(problem, m=m, n=n, k=k)).time_us)
    if op == "all_gather":
        p = problem.world_size
        return lambda m, n, k: Modelled(0.0, PLANNERS[op](replace(problem, m=p, k=m // p)).transport)
    if not _PARTS.get(op, "").startswith("gemm"):
        return None

    def product(m: int, n: int, k: int) -> Modelled:
        alone = replace(problem, m=m, n=n, k=k, world_size=1)
        fact = problem.tuning.measured(*facts_key("gemm", alone))
        return Modelled(fact.us.get("kernel", 0.0) if fact else 0.0)

    return product


def _by_way(op: str, problem: PlanInput, way: str, reason: str) -> Plan | None:
    """The plan of a way to run a problem that can run fused, or None."""
    scaling = problem.scaling if op == "gemm" else None
    if way == "torch" and scaling is not None and why_not_torchs(problem.n, problem.k, scaling.kind):
        return None
    if way == "torch":
        return PLANNERS[op](replace(problem, why_not=reason))
    if way == "parts" and op in _PARTS:
        return in_parts(op, problem, reason)
    return WAYS[op, way](problem, reason) if (op, way) in WAYS else None


def in_parts(op: str, problem: PlanInput, reason: str) -> Plan:
    """The plan to run an operator as the operators that it is made of."""
    return problem.plan(op, True, reason, way="parts", transport=f"those of {_PARTS[op]}")


def _record(path: str, op: str, problem: PlanInput) -> None:
    """Appends a problem to the file of FLUX_RECORD_SHAPES."""
    names = ("m", "n", "k", "world_size", "transpose_weight")
    told = {"op": op, "dtype": str(problem.dtype).removeprefix("torch.")}
    told |= {name: getattr(problem, name) for name in names}
    with open(path, "a") as file:
        file.write(json.dumps(told) + "\n")


def problem_of(
    workspace: Workspace,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool = False,
    scaling: Scaling | None = None,
) -> PlanInput:
    """A problem on a workspace."""
    named = ("world_size", "why_not", "num_sms", "transport", "tuning", "left_free")
    facts = {name: getattr(workspace, name) for name in named}
    if isinstance(workspace, NodesWorkspace):
        facts |= {name: getattr(workspace, name) for name in ("topology", "engine", "links")}
        facts["nodes_way"] = workspace.way
    return PlanInput(workspace.device.type, m, n, k, dtype, transpose_weight, scaling=scaling, **facts)


def carried_by(workspace: Workspace, plan: Plan) -> Plan:
    """The plan, changed to sending by SMs if this workspace does not use copy engines."""
    if workspace.copies or not plan.copied:
        return plan
    captured = workspace.group in expecting_graphs
    why = "because CUDA graphs capture its calls" if captured else "with CUDA_LAUNCH_BLOCKING=1"
    transport = f"{workspace.transport} (no copy engines, {why})"
    return replace(plan, copied=False, transport=transport)
