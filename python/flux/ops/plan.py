"""What a call will do, and why: fused or unfused, the tile shape, and the workspace sizes.

Plans depend only on facts that are equal on all ranks of a group, so all ranks make the same decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from flux import _env, _invariance, _native
from flux.comm import cuda, registry
from flux.comm import group as groups
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.topology import Links, Topology
from flux.comm.workspace import Workspace
from flux.ops import _check, _gate
from flux.ops.levels import TwoLevel
from flux.tuning import store
from flux.tuning.facts import NO_FACTS, Tuning, choose
from flux.tuning.facts import WAYS as ALL_WAYS

OPS = ("gemm", "gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")
# Operators whose x is [m, n].
_SUMS = ("all_reduce", "reduce_scatter")
# Operators without a GEMM: their time depends on the number of elements only.
_ELEMENTS = ("all_gather", *_SUMS)
# The operators that one is made of, where it may also run them one after the other.
_PARTS = {
    "gemm_rs": "gemm and reduce_scatter",
    "ag_gemm": "all_gather and gemm",
    "gemm_ar": "gemm and all_reduce",
}
_RUNS = {
    "fused": "fused",
    "composed": "composed",
    "parts": "in parts",
    "torch": "unfused",
    "two-level": "two-level",
}

# The CPU path uses the tile order of a GPU with this many SMs. The result does not depend on the number.
CPU_NUM_SMS = 8
_MAX_EXTENT: int = _native.core.MAX_EXTENT
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# Rows must start at multiples of 16 bytes for TMA.
_ALIGNMENT = 8
_ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Plan:
    """How one problem runs. ``print(plan)`` explains it.

    Attributes:
        op: name of the operator.
        m: rows of all ranks; of gemm_rs those of x on one rank, of ag_gemm those of the result.
        n: columns of the result on one rank.
        k: columns of x on one rank.
        dtype: of x.
        world_size: ranks of the group.
        transpose_weight: weight is [k, n].
        fused: whether flux's kernels run (on CPU: their protocols).
        way: how: "fused", "composed" (gemm_ar: gemm_rs and all_gather), "parts" (a GEMM and a collective of
            flux, one after the other), "two-level" (fused inside each of several nodes), or "torch".
        transport: what carries data between ranks.
        reason: why it runs fused or not.
        config: id of the tile shape, or -1.
        config_name: its name.
        cluster: CTAs of a cluster.
        group_m: rows of tiles in a raster group.
        choice: tile shape, cluster and raster as one integer, as the kernels take it (csrc/gemm/select.h).
        time_us: microseconds that the cost model expects.
        candidates: name and time of each alternative, the fastest first.
        estimates: way, microseconds and source of each way that was measured near this problem.
        signal_bytes: of signals in the workspace.
        slot_bytes: of slots in each of the workspace's two buffers.
        exchange_bytes: of the exchange in each of them.
        copied: tiles or gathered rows go by copy engine, except while a CUDA graph is being captured; then,
            and if not copied, the SMs send them.
        chunk_rows: after how many gathered rows the copy engines signal.
        chunks: in how many parts copy engines send the tiles of one peer.
        mode: how ranks sum, 0 one-shot, 1 two-shot, 2 scatter (csrc/runtime/exchange.h); -1: not by an
            exchange.
        batch_invariant: whether the call had to be batch invariant.
        num_sms: SMs that a launch may use; 0: all.
        levels: how it runs on several nodes, or None.

    Example::

        plan = flux.explain("ag_gemm", m=8 * p, n=32, k=64, dtype=torch.float32)
        assert (plan.op, plan.world_size) == ("ag_gemm", p)
        print(f"{plan.transport}; {plan.slot_bytes} bytes for each of two buffers")
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    transpose_weight: bool
    fused: bool
    transport: str
    reason: str
    config: int = -1
    config_name: str = ""
    cluster: int = 1
    group_m: int = 1
    choice: int = -1
    time_us: float = 0.0  # of the cost model
    candidates: tuple[tuple[str, float], ...] = field(default=(), repr=False)  # (name, time_us), best first
    signal_bytes: int = 0
    slot_bytes: int = 0
    exchange_bytes: int = 0
    copied: bool = False
    chunk_rows: int = 0
    chunks: int = 0
    mode: int = -1
    batch_invariant: bool = field(default_factory=_invariance.active)
    way: str = "fused"
    estimates: tuple[tuple[str, float, str], ...] = field(default=(), repr=False)
    num_sms: int = 0
    levels: TwoLevel | None = None

    def copied_now(self) -> bool:
        """Whether copy engines carry the data of a call at this moment.

        Not while a CUDA graph is being captured: it would replay the epoch that the host had counted. There
        the SMs send, and the device counts.
        """
        return self.copied and not torch.cuda.is_current_stream_capturing()

    def __str__(self) -> str:
        rows = self.m // self.world_size if self.op in ("ag_gemm", "all_gather") else self.m
        columns = self.n if self.op in _SUMS else self.k
        weight = f"[{self.k}, {self.n}]" if self.transpose_weight else f"[{self.n}, {self.k}]"
        weight = "" if self.op in ("all_gather", *_SUMS) else f"weight {weight}, "
        lines = [
            f"{self.op}: x [{rows}, {columns}], {weight}{str(self.dtype).removeprefix('torch.')}, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}",
            f"  runs       {_RUNS[self.way]}: {self.reason}",
            f"  transport  {self.transport}",
        ]
        if self.levels is not None:
            lines += self.levels.lines()
        if self.batch_invariant:
            lines.append("  batch      invariant: one tile shape for any number of rows")
        if self.fused and self.config_name:
            tile = self.config_name
            if self.config < _native.core.FIRST_SWAP_AB:  # swap-AB tiles have a split, which is in their name
                tile += f", cluster {self.cluster}, raster groups of {self.group_m}"
            lines += [f"  tile       {tile}", f"  model      {self.time_us:.1f} us"]
        room = self.signal_bytes + 2 * (self.slot_bytes + self.exchange_bytes)
        if room:
            lines.append(f"  workspace  {room / 2**20:.1f} MiB per rank")
        if len(self.candidates) > 1:
            others = ", ".join(f"{name} {time_us:.1f}" for name, time_us in self.candidates[:4])
            lines.append(f"  considered {others} us")
        lines += [f"  {way:<10} {us:.1f} us, {source}" for way, us, source in self.estimates]
        return "\n".join(lines)


@dataclass(frozen=True)
class PlanInput:
    """What a plan depends on. Ranks of a group have equal problems, so they make equal plans.

    Attributes:
        device_type: "cuda" or "cpu".
        m, n, k, dtype, transpose_weight, world_size: as in `Plan`.
        why_not: what rules out flux's kernels for the group and device (`Workspace.why_not`), or None.
        num_sms: of the group's smallest GPU; 0 on CPUs.
        transport: what carries data between ranks.
        tuning: the measurements to choose by.
        left_free: SMs of the GPU beside num_sms, which are left to others.
        topology, engine, links: of a group with several nodes: the nodes, and what carries data between them.
    """

    device_type: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    transpose_weight: bool = False
    world_size: int = 1
    why_not: str | None = None
    num_sms: int = 0
    transport: str = "none (one rank)"
    tuning: Tuning = NO_FACTS
    left_free: int = 0
    topology: Topology | None = None
    engine: str = ""
    links: Links = Links()

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def sms(self) -> int:
        """SMs of the GPU whose tile order is used."""
        return self.num_sms or CPU_NUM_SMS

    def plan(self, op: str, fused: bool, reason: str, **facts: Any) -> Plan:
        """A plan of this problem, unless `facts` say otherwise."""
        named = ("m", "n", "k", "dtype", "world_size", "transpose_weight", "transport")
        given = {name: getattr(self, name) for name in named}
        given["way"] = "fused" if fused else "torch"
        given["num_sms"] = self.num_sms if self.left_free else 0
        return Plan(op, fused=fused, reason=reason, **(given | facts))


def can_run_fused(op: str, problem: PlanInput) -> tuple[bool, str]:
    """Whether a problem runs in flux's kernel (on CPU: its protocol), and the reason. A pure function.

    For all_gather n is any positive number.
    """
    n, k, dtype = problem.n, problem.k, problem.dtype
    if min(problem.m, n, k) == 0:
        return False, "the problem is empty"
    if max(problem.m, n, k) > _MAX_EXTENT:
        return False, f"a dimension exceeds {_MAX_EXTENT}"
    if problem.why_not is not None:
        return False, problem.why_not
    if problem.device_type == "cpu":
        if op == "gemm":
            return False, "CPU tensors without communication: one torch.mm"
        return True, "ranks of one host share memory"
    if not problem.on_gpu:
        return False, f"no kernels for {problem.device_type} tensors"
    row_bytes = k * dtype.itemsize
    if op == "all_gather" and row_bytes >= 2**31:
        return False, f"rows of {row_bytes} bytes are longer than the kernel can count"
    if op == "all_gather":
        if row_bytes % _ROW_ALIGNMENT_BYTES:
            return False, f"rows of {row_bytes} bytes are not a multiple of {_ROW_ALIGNMENT_BYTES} bytes"
        return True, "supported by the kernel"
    if dtype not in _KERNEL_DTYPES:
        return False, f"kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    for name, size in (("k", k), ("n", n)):
        if size % _ALIGNMENT:
            return False, f"{name} = {size} is not a multiple of {_ALIGNMENT}: TMA needs 16-byte aligned rows"
    return True, "supported by the kernel"


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


# By operator, and by operator and way for those that a measurement may prefer; the modules of the planners
# enter them.
PLANNERS: dict[str, Callable[[PlanInput], Plan]] = {}
WAYS: dict[tuple[str, str], Callable[[PlanInput, str], Plan | None]] = {}
# By operator, of groups with several nodes.
NODES_PLANNERS: dict[str, Callable[[PlanInput], Plan]] = {}


def workspace_plan(
    workspace: Workspace, op: str, m: int, n: int, k: int, dtype: torch.dtype, transpose_weight: bool
) -> Plan:
    """The plan of an operator on a workspace, cached by problem."""
    key = (op, m, n, k, dtype, transpose_weight)
    plan: Plan | None = workspace.plans.get(key)
    if plan is None:
        problem = problem_of(workspace, m, n, k, dtype, transpose_weight)
        plan = workspace.plans[key] = carried_by(workspace, planned(op, problem))
        if workspace.rank == 0:
            _record(op, problem)
    return plan


def planned(op: str, problem: PlanInput) -> Plan:
    """The planner's plan, or another way to run the problem if measurements say that it is sooner."""
    if problem.topology is not None:
        return NODES_PLANNERS[op](problem)
    plan = PLANNERS[op](problem)
    if not plan.fused or plan.batch_invariant:
        return plan
    forced = problem.tuning.forced
    if forced is not None:
        return (_by_way(op, problem, forced, "to be measured") if forced != plan.way else plan) or plan
    estimates = problem.tuning.estimates(*facts_key(op, problem))
    ways = {way: _by_way(op, problem, way, "") for way in {each.way for each in estimates} - {plan.way}}
    possible = [plan.way, *(way for way, other in ways.items() if other is not None)]
    told = tuple((each.way, each.us, each.source) for each in estimates)
    found = choose(estimates, plan.way, possible)
    if found is None:
        return replace(plan, estimates=told)
    best, usual = found
    reason = f"{best.us:.1f} us, {_RUNS[usual.way]} {usual.us:.1f} us ({best.source})"
    other = _by_way(op, problem, best.way, reason)
    assert other is not None
    return replace(other, estimates=told)


def ways_of(op: str) -> tuple[str, ...]:
    """The ways in which an operator of several ranks can run (flux.tuning.facts.WAYS)."""
    return tuple(
        way for way in ALL_WAYS if way in ("fused", "torch") or (op, way) in WAYS or _has_parts(op, way)
    )


def _has_parts(op: str, way: str) -> bool:
    return way == "parts" and op in _PARTS


def facts_key(op: str, problem: PlanInput) -> tuple[str, int, int, int, int, int]:
    """A problem as measurements have it (flux.tuning.facts.Fact)."""
    m, n, k = problem.m, problem.n, problem.k
    if op == "all_gather":
        m, n, k = m * k, 0, 0
    elif op in _ELEMENTS:
        m, n, k = m * n, 0, 0
    return op, problem.world_size, problem.dtype.itemsize, m, n, k


def _by_way(op: str, problem: PlanInput, way: str, reason: str) -> Plan | None:
    """The plan of a way to run a problem that can run fused, or None."""
    if way == "torch":
        return PLANNERS[op](replace(problem, why_not=reason))
    if _has_parts(op, way):
        return problem.plan(op, True, reason, way=way, transport=f"those of {_PARTS[op]}")
    return WAYS[op, way](problem, reason) if (op, way) in WAYS else None


def _record(op: str, problem: PlanInput) -> None:
    """Appends a problem to the file of FLUX_RECORD_SHAPES."""
    path = _env.get("FLUX_RECORD_SHAPES")
    if path:
        names = ("m", "n", "k", "world_size", "transpose_weight")
        told = {"op": op, "dtype": str(problem.dtype).removeprefix("torch.")}
        told |= {name: getattr(problem, name) for name in names}
        with open(path, "a") as file:
            file.write(json.dumps(told) + "\n")


def problem_of(
    workspace: Workspace, m: int, n: int, k: int, dtype: torch.dtype, transpose_weight: bool = False
) -> PlanInput:
    """A problem of the ranks of a workspace."""
    problem = PlanInput(
        workspace.device.type,
        m,
        n,
        k,
        dtype,
        transpose_weight,
        workspace.world_size,
        workspace.why_not,
        workspace.num_sms,
        workspace.transport,
        workspace.tuning,
        workspace.left_free,
    )
    if not isinstance(workspace, NodesWorkspace):
        return problem
    found = workspace.topology, workspace.engine, workspace.links
    return replace(problem, topology=found[0], engine=found[1], links=found[2])


def carried_by(workspace: Workspace, plan: Plan) -> Plan:
    """The plan, changed to sending by SMs if this workspace does not use copy engines."""
    if workspace.copies or not plan.copied:
        return plan
    transport = f"{workspace.transport} (CUDA_LAUNCH_BLOCKING=1 rules out copy engines)"
    return replace(plan, copied=False, transport=transport)


def explain(
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    group: groups.GroupLike = None,
    transpose_weight: bool = False,
) -> Plan:
    """What a call of `op` with x [m, k] and weight [n, k] (or [k, n]) does, and why.

    Decides for the current CUDA device if there is one, else for CPU tensors. Not a collective: before the
    group's first call it cannot know whether the peers can be reached, and says so in `reason`.

    Args:
        op: "gemm", "gemm_rs", "ag_gemm", "gemm_ar", "all_reduce" or "reduce_scatter".
        m: rows of x on one rank; for ag_gemm the gathered rows.
        n: columns of the result on one rank: for ag_gemm this rank's part of N. Of all_reduce and
            reduce_scatter the columns of x.
        k: columns of x on one rank: for gemm_rs and gemm_ar this rank's part of K. Nothing for all_reduce and
            reduce_scatter.
        dtype: of x.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [k, n].

    Returns:
        The plan; printing it explains it.

    Raises:
        ValueError: unknown op or group, a negative size, an unsupported dtype, or m not divisible by the
            ranks where these share rows.

    Example::

        plan = flux.explain("gemm_rs", m=1024, n=1024, k=256, dtype=torch.float32)
        print(plan)
        assert plan.fused or plan.reason
    """
    if op not in OPS:
        _check.fail("explain", "op", f"one of {', '.join(OPS)}", repr(op))
    _gate.check("explain", m=m, n=n, k=k, dtype=dtype, transpose_weight=transpose_weight)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 0:
            _check.fail("explain", name, "a size", size)
    if dtype not in _check.FLOATING:
        _check.fail("explain", "dtype", "bfloat16, float16, float32 or float64", dtype)
    device = current_device()
    process_group = None if op == "gemm" else groups.resolve_group(group, "explain")
    world_size = 1 if process_group is None else process_group.size()
    if op in ("gemm_rs", "ag_gemm", "reduce_scatter") and m % world_size:
        _check.fail("explain", "m", f"a multiple of the {world_size} ranks of the group", m)
    if process_group is not None and world_size > 1:
        workspace = registry.find(process_group, device)
        if workspace is not None:
            return workspace_plan(workspace, op, m, n, k, dtype, transpose_weight)
    return _plan_without_workspace(op, device, m, n, k, dtype, transpose_weight, world_size)


def why_unfused(
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    group_name: str,
    transpose_weight: bool = False,
) -> str | None:
    """Why a collective call would not run fused, or None. As explain, but fast enough to use in every call.

    Takes some microseconds for a known problem. Arguments are not checked; they must be those of a call
    that its operator accepts.
    """
    group = groups.process_group(group_name)
    workspace = registry.find(group, device)
    if workspace is not None:
        plan = workspace_plan(workspace, op, m, n, k, dtype, transpose_weight)
    else:
        remembered = _remembered_plans[_invariance.active()]
        plan = remembered(op, device, m, n, k, dtype, transpose_weight, group.size())
    return None if plan.fused else plan.reason


def _plan_without_workspace(
    op: str,
    device: torch.device,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
) -> Plan:
    """The plan before a group's first call, when no workspace exists."""
    num_sms, why_not = 0, None
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        why_not = cuda.why_not(device)
    problem = PlanInput(device.type, m, n, k, dtype, transpose_weight, world_size, why_not, num_sms)
    problem = replace(problem, tuning=store.local(device))
    if world_size == 1 and op not in _SUMS:
        return planned("gemm", problem)
    transport = "not known before the group's first call, when the ranks ask each other"
    return planned(op, replace(problem, transport=transport))


# Cached here, because a group whose calls never run fused has no workspace to cache plans. The second:
# for calls that must be batch invariant.
_remembered_plans = [lru_cache(maxsize=4096)(_plan_without_workspace) for _ in (False, True)]


def current_device() -> torch.device:
    """Default device of explain and reserve: the current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
