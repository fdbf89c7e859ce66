"""Plans of groups with several nodes: two-level or flat, by which schedule, in how many parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flux import _invariance, _native
from flux.comm.nodes.rail import NCCL_CTAS
from flux.comm.topology import Topology
from flux.comm.workspace import round_up
from flux.plan.choose import NODES_PLANNERS, PLANNERS, Plan, PlanInput, why_not_fused
from flux.plan.network_model import MARGIN, Model, TwoLevel
from flux.plan.sums import MAX_EXCHANGE_BYTES, VECTOR

# Parts in which the rows of a node may travel in a ReduceScatter. Each copies its rows of x first.
_PARTS = (1, 2, 4)
# On CPUs no time is modelled. Rows of one rank from which the rows of each node have a launch of their own,
# and the least rows of a part: so small that tests see all schedules.
CPU_BLOCK_ROWS = 16
CPU_PART_ROWS = 24
# Bytes of a sum below which, on CPUs, ranks exchange the whole sum of their node, and below which their share
# of it.
CPU_NODE_SUM_BYTES = 1 << 10
CPU_SHARD_BYTES = 1 << 14


@dataclass(frozen=True)
class _Way:
    """One schedule of a call: its name, parts, bytes that a rank sends to other nodes, and microseconds."""

    schedule: str
    parts: int
    bytes_sent: int
    us: float = 0.0


def _levels(problem: PlanInput) -> tuple[Model, Topology]:
    assert problem.topology is not None
    return Model(problem.topology, problem.links), problem.topology


def sent_by_scatter(nbytes: int, topology: Topology) -> int:
    """Bytes that each rank sends to other nodes, of a tensor of so many bytes, scattered or gathered."""
    return (topology.nodes - 1) * nbytes // topology.world_size


def _pick(
    op: str, problem: PlanInput, ways: Iterable[_Way], flat_us: float, cpu: str, parts: int = 1
) -> Plan:
    """The plan of the way that the model expects to be the soonest; on CPUs that with the name `cpu`."""
    model, topology = _levels(problem)
    possible, forced = list(ways), problem.tuning.forced
    wanted = [way for way in possible if way.schedule == forced] or possible
    usual = [way for way in wanted if (way.schedule, way.parts) == (cpu, parts)]
    best = min(wanted, key=lambda way: way.us) if problem.on_gpu else (usual or wanted)[0]
    sms = NCCL_CTAS if problem.on_gpu else 0
    how = (best.schedule, best.parts, sms, best.bytes_sent, best.us, flat_us)
    found = TwoLevel(topology, problem.engine, *how, problem.links)
    told = [(way.schedule + (f" in {way.parts}" if way.parts > 1 else ""), way.us) for way in possible]
    candidates = tuple(sorted([*told, ("flat", flat_us)], key=lambda way: way[1])) if problem.on_gpu else ()
    # The model's choice between two-level and flat is not batch invariant.
    by_model = problem.nodes_way == "auto" and forced is None and not _invariance.active()
    reason = ""
    if problem.nodes_way == "flat" or forced == "torch":
        reason = f"{topology}: {'FLUX_NODES=flat' if forced is None else 'to be measured'}"
    elif by_model and best.us > MARGIN * flat_us > 0:
        reason = f"{topology}: flat {flat_us:.1f} us, two-level {best.us:.1f} us in the model, {found.links}"
    if reason:
        return problem.unfused(op, reason, candidates=candidates)
    facts = {"way": "two-level", "levels": found, "candidates": candidates, "config": 0}
    return problem.plan(op, True, found.reason, **facts)


def _pick_by_rows(
    op: str,
    problem: PlanInput,
    nbytes: int,
    by_blocks: bool,
    ways: Callable[[], Iterable[tuple[str, int, float]]],
    parts: Sequence[int] = (1,),
) -> Plan:
    """The plan of a scatter or gather of a tensor of so many bytes, of which all ways send as many. ways: on
    GPUs schedules, parts and microseconds. by_blocks, parts: on CPUs whether nodes have launches, and
    possible parts.
    """
    model, topology = _levels(problem)
    sent = sent_by_scatter(nbytes, topology)
    if problem.on_gpu:
        gemm = _gemm_us(problem, problem.sms) if op in ("gemm_rs", "ag_gemm") else 0.0
        flat = model.flat_us(gemm, nbytes)
        return _pick(op, problem, [_Way(name, count, sent, us) for name, count, us in ways()], flat, "")
    found = [*(_Way("blocks", count, sent) for count in parts), _Way("one launch", 1, sent)]
    name, count = ("blocks", parts[0]) if by_blocks else ("one launch", 1)
    return _pick(op, problem, found, 0.0, name, count)


def _inside(problem: PlanInput, **sizes: Any) -> PlanInput:
    """A problem of the ranks of a node, in a launch that leaves SMs free."""
    ranks, free = _levels(problem)[1].ranks, NCCL_CTAS if problem.on_gpu else 0
    sizes |= {"topology": None, "world_size": ranks, "left_free": free}
    return replace(problem, num_sms=max(problem.num_sms - free, 0), **sizes)


def _inside_fused(op: str, problem: PlanInput) -> str | None:
    """Why the ranks of a node would not run a problem fused, or None."""
    if problem.world_size == 1:
        return why_not_fused(op, replace(problem, n=1) if op == "all_gather" else problem)
    plan = PLANNERS[op](problem)
    return None if plan.by_flux else plan.reason


def _gemm_us(problem: PlanInput, sms: int) -> float:
    sizes = (problem.m, problem.n, problem.k, problem.transpose_weight)
    return float(_native.core.select_gemm(*sizes, num_sms=sms, **problem.operands).time_us)


def _launch_us(op: str, problem: PlanInput, rows: int, free: bool) -> float:
    """A launch of gemm_rs or ag_gemm inside a node, of `rows` rows of the node's ranks together."""
    (model, topology), core = _levels(problem), _native.core
    ranks, sms = topology.ranks, problem.sms - (NCCL_CTAS if free else 0)
    if ranks == 1:
        return _gemm_us(replace(problem, m=rows), sms)
    sizes = (rows, problem.n, problem.k, problem.transpose_weight)
    choice = getattr(core, f"select_{op}")(*sizes, world_size=ranks, num_sms=sms, **problem.operands)
    config = core.tile_config(choice.config)
    blocks, columns = -(-rows // ranks // config.block_m), -(-problem.n // config.block_n)
    tiles = ranks * blocks * columns
    waves = -(-tiles // sms)
    sums = problem.n * problem.result_dtype.itemsize
    of_row = sums if op == "gemm_rs" else problem.k * problem.dtype.itemsize
    across = model.inside_us(rows * of_row * (ranks - 1) / ranks)
    late_us = 0.0
    if op == "ag_gemm":
        # SMs without a tile of own rows start when rows arrive; those of the last wave end the launch.
        late_blocks = max(0.0, (tiles - (waves - 1) * sms) / columns - blocks)
        late_us = across * late_blocks / ((ranks - 1) * blocks)
    # Nothing is sent before the first wave, or computed after the last arrival: few waves overlap little.
    return float(max(choice.time_us + late_us, across + choice.time_us / waves))


def plan_gemm_rs(problem: PlanInput) -> Plan:
    model, topology = _levels(problem)
    m, n, nodes, itemsize = problem.m, problem.n, topology.nodes, problem.result_dtype.itemsize
    why_not = why_not_fused("gemm_rs", problem)
    if why_not is None:
        why_not = _inside_fused("gemm_rs", _inside(problem, m=m // nodes))
    if why_not is not None:
        return problem.unfused("gemm_rs", why_not)
    shard = m // topology.world_size
    block_bytes = shard * n * itemsize

    def ways() -> Iterable[tuple[str, int, float]]:
        add = model.sum_us(block_bytes, nodes)
        own = _launch_us("gemm_rs", problem, m // nodes, free=True)
        for parts in _PARTS:
            if shard % parts:
                continue
            first = _launch_us("gemm_rs", problem, m // nodes // parts, free=False)
            later = _launch_us("gemm_rs", problem, m // nodes // parts, free=True)
            moved = m // nodes // parts * problem.k * problem.dtype.itemsize
            copied = model.moved_us(moved) if parts > 1 else 0.0
            launches = [copied + (later if i else first) for i in range((nodes - 1) * parts)]
            transfers = [block_bytes / parts] * len(launches)
            yield "blocks", parts, model.scatter_us(launches, transfers, own, add)
        whole = _launch_us("gemm_rs", problem, m, free=False)
        copied = model.moved_us(m * problem.k * problem.dtype.itemsize)
        yield "one launch", 1, copied + whole + model.crossing_us((nodes - 1) * block_bytes) + add

    possible = [parts for parts in _PARTS if shard % parts == 0]
    best = max(parts for parts in possible if parts == 1 or shard >= parts * CPU_PART_ROWS)
    possible.sort(key=lambda parts: parts != best)
    return _pick_by_rows("gemm_rs", problem, m * n * itemsize, shard >= CPU_BLOCK_ROWS, ways, possible)


def plan_all_gather(problem: PlanInput) -> Plan:
    """The plan of an AllGather of rows of k elements; m counts those of all ranks."""
    return _plan_gather("all_gather", replace(problem, n=0, transpose_weight=False))


def _plan_gather(op: str, problem: PlanInput) -> Plan:
    why_not = why_not_fused(op, problem if op == "ag_gemm" else replace(problem, n=1))
    model, topology = _levels(problem)
    m, k, nodes, itemsize = problem.m, problem.k, topology.nodes, problem.dtype.itemsize
    for rows in (m // nodes, m):
        if why_not is None:
            why_not = _inside_fused(op, _inside(problem, m=rows))
    if why_not is not None:
        return problem.unfused(op, why_not)
    shard_bytes = m // topology.world_size * k * itemsize

    def launch(rows: int, free: bool) -> float:
        if op == "ag_gemm":
            return _launch_us(op, problem, rows, free)
        return model.collective_us(rows * k * itemsize)

    def ways() -> Iterable[tuple[str, int, float]]:
        own, last = launch(m // nodes, True), launch(m // nodes, False)
        launches = [own] * (nodes - 2) + [last]
        yield "blocks", 1, model.gather_us([shard_bytes] * (nodes - 1), launches, own)
        columns = problem.n if op == "ag_gemm" else k
        crossing = model.crossing_us((nodes - 1) * shard_bytes)
        yield "one launch", 1, crossing + launch(m, False) + model.moved_us(m * columns * itemsize)

    return _pick_by_rows(op, problem, m * k * itemsize, m // topology.world_size >= CPU_BLOCK_ROWS, ways)


def plan_reduce_scatter(problem: PlanInput) -> Plan:
    """The plan of a ReduceScatter of m * n elements. k does not matter."""
    model, topology = _levels(problem)
    elements = problem.m * problem.n
    p, share = topology.world_size, elements // topology.world_size
    problem = replace(problem, m=p, n=share, k=0, transpose_weight=False)
    nodes, itemsize = topology.nodes, problem.dtype.itemsize
    if why_not := _inside_sums_fused("reduce_scatter", problem, topology.ranks, share):
        return problem.unfused("reduce_scatter", why_not)

    def ways() -> Iterable[tuple[str, int, float]]:
        launch = model.collective_us(elements // nodes * itemsize)
        add = model.sum_us(share * itemsize, nodes)
        transfers = [share * itemsize] * (nodes - 1)
        yield "blocks", 1, model.scatter_us([launch] * (nodes - 1), transfers, launch, add)
        if not _inside_sums_fused("reduce_scatter", problem, topology.ranks, nodes * share):
            whole = model.moved_us(elements * itemsize) + model.collective_us(elements * itemsize)
            yield "one launch", 1, whole + model.crossing_us(sum(transfers)) + add

    by_blocks = share * itemsize >= CPU_NODE_SUM_BYTES
    return _pick_by_rows("reduce_scatter", problem, elements * itemsize, by_blocks, ways)


def _inside_sums_fused(op: str, problem: PlanInput, m: int, n: int) -> str | None:
    """Why the ranks of a node would not sum x [m, n] fused, or None."""
    inside = _inside(problem, m=m, n=n, k=0)
    if inside.world_size > 1:
        return _inside_fused(op, inside)
    if m * n == 0:
        return "the problem is empty"
    return why_not_fused(op, replace(inside, m=m * n, n=VECTOR, k=VECTOR))


def padded(elements: int, topology: Topology) -> int:
    """Elements of a sum that ranks share: whole vectors for each rank."""
    return round_up(elements, VECTOR * topology.world_size)


def _node_sums(nbytes: int, model: Model, gemm_us: float = 0.0) -> _Way:
    nodes = model.topology.nodes
    sent = (nodes - 1) * nbytes
    us = model.collective_us(2 * nbytes) + model.crossing_us(sent) + model.sum_us(nbytes, nodes)
    return _Way("node sums", 1, sent, gemm_us + us)


def plan_all_reduce(problem: PlanInput) -> Plan:
    """The plan of an AllReduce of m * n elements, as one row. k does not matter."""
    model, topology = _levels(problem)
    elements, nodes, ranks = problem.m * problem.n, topology.nodes, topology.ranks
    problem = replace(problem, m=1, n=elements, k=0, transpose_weight=False)
    itemsize = problem.dtype.itemsize
    nbytes, whole = elements * itemsize, padded(elements, topology) * itemsize
    why_not = _inside_sums_fused("all_reduce", problem, 1, elements)
    ways = [] if why_not else [_node_sums(nbytes, model)]
    for name, sent, columns in (
        ("shards", (nodes - 1) * whole // ranks, padded(elements, topology) // ranks),
        ("composed", 2 * sent_by_scatter(whole, topology), padded(elements, topology) // topology.world_size),
    ):
        if reason := _inside_sums_fused("reduce_scatter", problem, ranks, columns):
            why_not = why_not or reason
            continue
        us = 2 * model.collective_us(whole) + model.crossing_us(sent) + model.moved_us(sent)
        us += problem.links.latency_us if name == "composed" else 0.0  # of its second trip
        ways.append(_Way(name, 1, sent, us))
    if not ways:
        return problem.unfused("all_reduce", why_not or "")
    flat = model.flat_us(0.0, nbytes, passes=2) if problem.on_gpu else 0.0
    return _pick("all_reduce", problem, ways, flat, _cpu_sum(nbytes, ways))


def plan_gemm_ar(problem: PlanInput) -> Plan:
    """The plan of a GEMM+AllReduce. Ranks share as many whole rows as they can; others go as node sums."""
    model, topology = _levels(problem)
    if (why_not := why_not_fused("gemm_ar", problem)) is not None:
        return problem.unfused("gemm_ar", why_not)
    m, n, nodes, itemsize = problem.m, problem.n, topology.nodes, problem.result_dtype.itemsize
    nbytes, row_bytes = m * n * itemsize, n * itemsize
    gemm = _gemm_us(problem, problem.sms) if problem.on_gpu else 0.0
    ways = [_node_sums(nbytes, model, gemm)] if nbytes <= MAX_EXCHANGE_BYTES else []
    for name, ranks in (("shards", topology.ranks), ("composed", topology.world_size)):
        rest = m % ranks
        if m < ranks or rest * row_bytes > MAX_EXCHANGE_BYTES:
            continue
        dealt = replace(problem, m=m - rest)
        if _inside_fused("gemm_rs", _inside(dealt, m=dealt.m if name == "shards" else dealt.m // nodes)):
            continue
        if _inside_fused("all_gather", _inside(_of_sums(dealt))):
            continue
        tail = (nodes - 1) * rest * row_bytes
        us, sent = _shared(name, dealt)
        us += model.crossing_us(tail) + _SMALL_CALL_US if rest else 0.0
        ways.append(_Way(name, 1, sent + tail, us))
    if not ways:
        reason = f"the sum has {nbytes / 2**20:.0f} MiB, more than an exchange holds, and {m} rows"
        return problem.unfused("gemm_ar", reason)
    flat = model.flat_us(gemm, nbytes, passes=2) if problem.on_gpu else 0.0
    return _pick("gemm_ar", problem, ways, flat, _cpu_sum(nbytes, ways))


# Of a further call for the rows that ranks cannot share.
_SMALL_CALL_US = 20.0


def _of_sums(problem: PlanInput) -> PlanInput:
    return replace(problem, k=problem.n, n=0, dtype=problem.result_dtype, scaling=None)


def _shared(name: str, problem: PlanInput) -> tuple[float, int]:
    """Microseconds and bytes of a GEMM+AllReduce whose rows the ranks of a node, or all ranks, share."""
    model, topology = _levels(problem)
    nbytes = problem.m * problem.n * problem.result_dtype.itemsize
    sent, us = 2 * sent_by_scatter(nbytes, topology), 0.0
    if name == "shards":
        sent = (topology.nodes - 1) * nbytes // topology.ranks
    if problem.on_gpu and name == "shards":
        us = _launch_us("gemm_rs", problem, problem.m, free=False) + model.crossing_us(sent)
        us += model.sum_us(nbytes / topology.ranks, topology.nodes)
        us += model.collective_us(nbytes)
    elif problem.on_gpu:
        parts = [plan_gemm_rs(problem), plan_all_gather(_of_sums(problem))]
        # Each may be flat.
        us = sum(plan.candidates[0][1] if plan.candidates else math.inf for plan in parts)
    return us, sent


def _cpu_sum(nbytes: int, ways: list[_Way]) -> str:
    """On CPUs: how a sum of so many bytes is made, if it can be."""
    small, large = nbytes < CPU_NODE_SUM_BYTES, nbytes >= CPU_SHARD_BYTES
    shared = ("composed", "shards") if large else ("shards", "composed")
    wanted = ("node sums", *shared) if small else (*shared, "node sums")
    return min((way.schedule for way in ways), key=wanted.index)


NODES_PLANNERS |= {
    "gemm_rs": plan_gemm_rs,
    "ag_gemm": functools.partial(_plan_gather, "ag_gemm"),
    "all_gather": plan_all_gather,
    "gemm_ar": plan_gemm_ar,
    "gemm_ar_norm": plan_gemm_ar,
    "all_reduce": plan_all_reduce,
    "all_reduce_norm": plan_all_reduce,  # the norm follows the sum
    "reduce_scatter": plan_reduce_scatter,
}
