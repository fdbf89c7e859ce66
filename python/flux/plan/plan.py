"""What a plan is, and what it depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flux import _deprecated, _invariance, _native
from flux.comm.topology import Links, Topology
from flux.fp8.scales import Scaling
from flux.measured.times import NO_FACTS, Tuning
from flux.plan.network_model import TwoLevel

# Operators whose x is [m, n].
SUMS = ("all_reduce", "reduce_scatter")
RUNS = {
    "kernel": "by kernel",
    "composed": "composed",
    "parts": "in parts",
    "torch": "unfused",
    "two-level": "two-level",
}
# What carries the data of operators that torch runs.
BY_TORCH = {
    **dict.fromkeys(("gemm_rs", "reduce_scatter"), "torch.distributed.reduce_scatter_tensor"),
    **dict.fromkeys(("ag_gemm", "all_gather"), "torch.distributed.all_gather_into_tensor"),
    **dict.fromkeys(("gemm_ar", "all_reduce"), "torch.distributed.all_reduce"),
}
# The CPU path uses the tile order of a GPU with this many SMs. The result does not depend on the number.
CPU_NUM_SMS = 8


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
        by_flux: whether flux's kernels run (on CPU: their protocols), and not torch alone.
        way: how: "kernel" (one of flux does it all), "composed" (gemm_ar: gemm_rs and all_gather), "parts" (a
            GEMM and a collective of flux, one after the other), "two-level" (by kernel inside each of several
            nodes), or "torch".
        transport: what carries data between ranks.
        reason: why it runs fused or not.
        config: id of the tile shape, or -1.
        config_name: its name.
        cluster: CTAs of a cluster.
        group_m: rows of tiles in a raster group.
        choice: tile shape, cluster and raster as one integer, as the kernels take it (csrc/gemm/plan.h).
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
        scaling: what kind of scales fp8 operands have, or None.
        mode: how ranks sum, 0 one-shot, 1 two-shot, 2 scatter (csrc/runtime/symm_buffer.h); -1: not by an
            exchange.
        batch_invariant: whether the call had to be batch invariant.
        num_sms: SMs that a launch may use; 0: all.
        levels: how it runs on several nodes, or None.
        parts: of ag_gemm with several weights that its kernel multiplies, the plan of each.

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
    by_flux: bool
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
    scaling: Scaling | None = None
    batch_invariant: bool = field(default_factory=_invariance.active)
    way: str = "kernel"
    estimates: tuple[tuple[str, float, str], ...] = field(default=(), repr=False)
    num_sms: int = 0
    levels: TwoLevel | None = None
    parts: tuple[Plan, ...] = field(default=(), repr=False)

    fused = _deprecated.attribute("fused", "by_flux")

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the result, and of what ranks send to be summed."""
        return self.dtype if self.scaling is None else self.scaling.out_dtype

    def copied_now(self) -> bool:
        """Whether copy engines carry a call now: a CUDA graph would replay the epoch that hosts count."""
        return self.copied and not torch.cuda.is_current_stream_capturing()

    def __str__(self) -> str:
        rows = self.m // self.world_size if self.op in ("ag_gemm", "all_gather") else self.m
        columns = self.n if self.op in SUMS else self.k
        weight = f"[{self.k}, {self.n}]" if self.transpose_weight else f"[{self.n}, {self.k}]"
        weight = "" if self.op in ("all_gather", *SUMS) else f"weight {weight}, "
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        scales = "" if self.scaling is None else f"{self.scaling}, "
        lines = [
            f"{self.op}: x [{rows}, {columns}], {weight}{str(self.dtype).removeprefix('torch.')}, "
            f"{scales}{ranks}",
            f"  runs       {RUNS[self.way]}: {self.reason}",
            f"  transport  {self.transport}",
        ]
        if self.levels is not None:
            lines += self.levels.lines()
        if self.batch_invariant:
            lines.append("  batch      invariant: one tile shape for any number of rows")
        if self.by_flux and self.config_name:
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


class Planned(NamedTuple):
    """What holds for all calls of a group with equal facts: the plan, and what checks found."""

    plan: Plan
    sizes: Any = None


@dataclass(frozen=True)
class PlanInput:
    """What a plan depends on, equal on all ranks: what is named as in `Plan`; why_not: what rules out kernels
    for the group and device; of the smallest GPU num_sms, and left_free, left to others; measurements
    (tuning); of several nodes topology, engine, links and nodes_way (FLUX_NODES).
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
    scaling: Scaling | None = None
    left_free: int = 0
    topology: Topology | None = None
    engine: str = ""
    links: Links = Links()
    nodes_way: str = "auto"

    @property
    def result_dtype(self) -> torch.dtype:
        """As in `Plan`."""
        return self.dtype if self.scaling is None else self.scaling.out_dtype

    @property
    def operands(self) -> dict[str, Any]:
        """What the cost model is told of fp8 operands."""
        return {} if self.scaling is None else self.scaling.operands(self.dtype)

    @property
    def why_fused(self) -> str:
        """For a plan, if it is."""
        return "supported by the kernel" if self.on_gpu else "ranks of one host share memory"

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def sms(self) -> int:
        """SMs of the GPU whose tile order is used."""
        return self.num_sms or CPU_NUM_SMS

    def plan(self, op: str, by_flux: bool, reason: str, **facts: Any) -> Plan:
        """A plan of this problem, unless `facts` say otherwise."""
        named = ("m", "n", "k", "dtype", "world_size", "transpose_weight", "transport", "scaling")
        given = {name: getattr(self, name) for name in named}
        given["way"] = "kernel" if by_flux else "torch"
        given["num_sms"] = self.num_sms if self.left_free else 0
        return Plan(op, by_flux=by_flux, reason=reason, **(given | facts))

    def unfused(self, op: str, reason: str, **facts: Any) -> Plan:
        """A plan to leave a problem of several ranks to torch."""
        transport = "none (one rank)" if self.world_size == 1 else BY_TORCH[op]
        return self.plan(op, False, reason, transport=transport, **facts)
