"""What a call will do, and why: fused or unfused, the tile shape, and the workspace sizes.

Plans depend only on facts that are equal on all ranks of a group, so all ranks make the same decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from flux import _invariance, _native
from flux.comm import cuda, registry
from flux.comm import group as groups
from flux.comm.workspace import Workspace, round_up
from flux.ops import _check, _gate, _invariant

OPS = ("gemm", "gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")
# Operators whose x is [m, n].
_SUMS = ("all_reduce", "reduce_scatter")

# The CPU path uses the tile order of a GPU with this many SMs. The result does not depend on the number.
CPU_NUM_SMS = 8
_MAX_EXTENT: int = _native.core.MAX_EXTENT
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# Rows must start at multiples of 16 bytes for TMA.
_ALIGNMENT = 8
_ROW_ALIGNMENT_BYTES = 16
_BLOCK_M: int = _native.core.tile_configs()[0].block_m
# Number of blocks of rows for which a launch has counters while it pushes (csrc/runtime/symm_buffer.h).
_MAX_PUSH_BLOCKS: int = _native.core.MAX_PUSH_BLOCKS

# Gathered shards of at least this size are sent by copy engines. Starting one takes some microseconds, which
# must be small against the transfer; for larger shards, SMs are better used for the GEMM.
COPY_FROM_BYTES = 8 << 20
# Parts of a shard that all_gather's copy engines signal separately.
_GATHERED_PARTS = 4


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
        fused: whether flux's kernel runs (on CPU: its protocol).
        transport: what carries data between ranks.
        reason: why it runs fused or not.
        config: id of the tile shape, or -1.
        config_name: its name.
        cluster: CTAs of a cluster.
        group_m: rows of tiles in a raster group.
        choice: tile shape, cluster and raster as one integer, as the kernels take it (csrc/gemm/select.h).
        time_us: microseconds that the cost model expects.
        candidates: name and time of each alternative, the fastest first.
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
            f"  runs       {'fused' if self.fused else 'unfused'}: {self.reason}",
            f"  transport  {self.transport}",
        ]
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
        return "\n".join(lines)


def can_run_fused(
    op: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    why_not: str | None = None,
) -> tuple[bool, str]:
    """Whether a problem runs in flux's kernel (on CPU: its protocol), and the reason. A pure function.

    Args:
        m, n, k: as in `Plan`; for all_gather n is any positive number.
        why_not: what already rules it out for the group and device (`Workspace.why_not`), or None.
    """
    if min(m, n, k) == 0:
        return False, "the problem is empty"
    if max(m, n, k) > _MAX_EXTENT:
        return False, f"a dimension exceeds {_MAX_EXTENT}"
    if why_not is not None:
        return False, why_not
    if device_type == "cpu":
        if op == "gemm":
            return False, "CPU tensors without communication: one torch.mm"
        return True, "ranks of one host share memory"
    if device_type != "cuda":
        return False, f"no kernels for {device_type} tensors"
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


def plan_gemm(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    why_not: str | None,
    num_sms: int,
) -> Plan:
    """The plan of a plain GEMM on a device with `num_sms` SMs."""
    fused, reason = can_run_fused(
        "gemm", device_type=device_type, dtype=dtype, m=m, n=n, k=k, why_not=why_not
    )
    common = ("gemm", m, n, k, dtype, 1, transpose_weight, fused, "none (one rank)")
    if not fused:
        return Plan(*common, reason)
    choice = _invariant.select("gemm", m, n, k, transpose_weight, 1, num_sms)
    return Plan(*common, **chosen(choice, reason))


def plan_gemm_rs(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of a GEMM+ReduceScatter. `num_sms` is that of the group's smallest GPU (0 on CPU)."""
    fused, reason = can_run_fused(
        "gemm_rs", device_type=device_type, dtype=dtype, m=m, n=n, k=k, why_not=why_not
    )
    common = ("gemm_rs", m, n, k, dtype, world_size, transpose_weight, fused)
    if not fused:
        return Plan(*common, "torch.distributed.reduce_scatter_tensor", reason)
    choice = _invariant.select("gemm_rs", m, n, k, transpose_weight, world_size, num_sms or CPU_NUM_SMS)
    signal_bytes, slot_bytes = gemm_rs_room(m, n, world_size, choice.config, dtype)
    chunks = _native.core.gemm_rs_copy_chunks(m, n, k, world_size) if device_type == "cuda" else 0
    if chunks:
        transport = f"copy engines, {chunks} chunks for each peer; in CUDA graphs {transport}"
    return Plan(
        *common,
        transport,
        **chosen(choice, reason),
        signal_bytes=signal_bytes,
        slot_bytes=slot_bytes,
        copied=chunks > 0,
        chunks=chunks,
    )


def gemm_rs_room(m: int, n: int, world_size: int, config: int, dtype: torch.dtype) -> tuple[int, int]:
    """The signal_bytes and slot_bytes that one problem needs."""
    layout = _native.core.gemm_rs_layout(m, n, world_size, config)
    # The layout counts in 2-byte elements.
    return round_up(4 * layout.num_signals), round_up(layout.slot_bytes * dtype.itemsize // 2)


def plan_ag_gemm(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of an AllGather+GEMM with one weight. `num_sms` is that of the group's smallest GPU (0 on
    CPU).
    """
    fused, reason = _can_gather_fused("ag_gemm", device_type, dtype, m, n, k, world_size, why_not)
    common = ("ag_gemm", m, n, k, dtype, world_size, transpose_weight, fused)
    if not fused:
        return Plan(*common, "torch.distributed.all_gather_into_tensor", reason)
    choice = _invariant.select("ag_gemm", m, n, k, transpose_weight, world_size, num_sms or CPU_NUM_SMS)
    gathering = _gathering(device_type, m, k, dtype, world_size, transport)
    return Plan(*common, **(chosen(choice, reason) | gathering))


def plan_all_gather(
    device_type: str,
    m: int,
    k: int,
    dtype: torch.dtype,
    world_size: int,
    why_not: str | None,
    transport: str,
) -> Plan:
    """The plan of an AllGather of rows of k elements; m counts those of all ranks."""
    fused, reason = _can_gather_fused("all_gather", device_type, dtype, m, 1, k, world_size, why_not)
    common = ("all_gather", m, 0, k, dtype, world_size, False, fused)
    if not fused:
        return Plan(*common, "torch.distributed.all_gather_into_tensor", reason)
    gathering = _gathering(device_type, m, k, dtype, world_size, transport)
    if gathering.get("copied"):
        # Rows are copied to the result while later rows arrive, so the last part should be small.
        gathering["chunk_rows"] = round_up(-(-(m // world_size) // _GATHERED_PARTS), _BLOCK_M)
    # There is no tile shape; any number that is equal on all ranks.
    gathering |= {"reason": reason, "config": 0}
    return Plan(*common, **gathering)


def _can_gather_fused(
    op: str,
    device_type: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    world_size: int,
    why_not: str | None,
) -> tuple[bool, str]:
    fused, reason = can_run_fused(op, device_type=device_type, dtype=dtype, m=m, n=n, k=k, why_not=why_not)
    blocks = (world_size - 1) * -(-m // world_size // _BLOCK_M)
    if fused and device_type == "cuda" and blocks > _MAX_PUSH_BLOCKS:
        return False, f"{m // world_size} rows of one rank are more than a launch can push"
    return fused, reason


def _gathering(
    device_type: str, m: int, k: int, dtype: torch.dtype, world_size: int, transport: str
) -> dict[str, Any]:
    """How rows are sent, and the workspace sizes that they need."""
    rows, row_bytes = m // world_size, k * dtype.itemsize
    signal_bytes, slot_bytes = ag_gemm_room(m, k, world_size, dtype)
    room = {"transport": transport, "signal_bytes": signal_bytes, "slot_bytes": slot_bytes}
    if device_type != "cuda" or rows * row_bytes < COPY_FROM_BYTES:
        return room
    chunk_rows = copy_chunk_rows(rows)
    transport = f"copy engines; in CUDA graphs {transport}"
    return {**room, "transport": transport, "copied": True, "chunk_rows": chunk_rows}


def copy_chunk_rows(rows: int) -> int:
    """Rows for each signal of a copy engine: the whole shard, rounded up to tiles.

    Peers get a rank's shard one after the other, while own rows are computed. Signalling halves or
    quarters gained up to 9 % on two of nine shapes of TP 4, and lost up to 13 % on others: a signal takes the
    copy engine some microseconds, and the host two driver calls.
    """
    return round_up(rows, _BLOCK_M)


def ag_gemm_room(m: int, k: int, world_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """The signal_bytes and slot_bytes that a gather of m rows of k elements needs."""
    layout = _native.core.ag_gemm_layout(m, k, world_size)
    # The layout counts in 2-byte elements.
    return round_up(4 * layout.num_signals), round_up(layout.slot_bytes * dtype.itemsize // 2)


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


PLANNERS: dict[str, Callable[..., Plan]] = {"gemm_rs": plan_gemm_rs, "ag_gemm": plan_ag_gemm}


def workspace_plan(
    workspace: Workspace, op: str, m: int, n: int, k: int, dtype: torch.dtype, transpose_weight: bool
) -> Plan:
    """The plan of an operator on a workspace, cached by problem."""
    problem = (m, n, k, dtype, transpose_weight)
    plan: Plan | None = workspace.plans.get((op, *problem))
    if plan is None:
        where = (workspace.world_size, workspace.why_not, workspace.num_sms, workspace.transport)
        plan = carried_by(workspace, PLANNERS[op](workspace.device.type, *problem, *where))
        workspace.plans[op, *problem] = plan
    return plan


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
    if world_size == 1 and op not in _SUMS:
        return plan_gemm(device.type, m, n, k, dtype, transpose_weight, why_not, num_sms)
    transport = "not known before the group's first call, when the ranks ask each other"
    return PLANNERS[op](
        device.type, m, n, k, dtype, transpose_weight, world_size, why_not, num_sms, transport
    )


# Cached here, because a group whose calls never run fused has no workspace to cache plans. The second:
# for calls that must be batch invariant.
_remembered_plans = [lru_cache(maxsize=4096)(_plan_without_workspace) for _ in (False, True)]


def current_device() -> torch.device:
    """Default device of explain and reserve: the current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
