"""The arithmetic of a benchmark row: columns derived from measured times, and the bar of each op.

Pure functions. Times are in milliseconds, sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Annotated, Any, TypedDict

from flux._files import Count, NotNegative, Positive, Size, Within
from flux.testing.compare import passed

# Copy-engine bandwidth of a Hopper GPU over 18 NVLink-4 links, all GPUs at once (measured: 383-391 GB/s).
LINK_GB_PER_S = 380.0

# Roles of candidates that are columns of the table; "fast" sums of fp8 products have fewer bits.
ROLES = ("flux", "gemm", "comm", "serial", "peer")
# Those of candidates that do the job in another way.
OTHERS = ("serial", "peer", "parts")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
# Of fp8 operands: results, and what is summed over ranks, are in 16 bits.
FP8, FP8_RESULT = "float8_e4m3fn", "bfloat16"
SCALES = ("tensor", "row", "block")
FP8_KIND = "_fp8"
# vLLM's product of fp8 operands.
VLLM = "vLLM CUTLASS"
# The candidate that does the work of an fp8 row with 16-bit operands.
IN_16_BITS = "flux, bf16"
_GATHERS = ("ag_gemm", "moe_layer0")  # ranks send each other operands; others send results


# Patterns with one GEMM, for which 2MNK operations give a rate.
GEMM_PATTERNS = ("gemm_rs", "ag_gemm", "gemm_ar", "local")


def in_way(way: str) -> str:
    """The candidate that runs flux's operator in one way (flux.measured.times.WAYS)."""
    return f"flux, {way}"


def bar_over_16_bits(row: Row) -> float:
    """How much sooner an fp8 row should be than in 16 bits: twice the rate and half the bytes, but for scales
    and results; a fused operator may be bound by its links.
    """
    if row.op != "gemm":
        return 1.0
    if row.scales == "block":
        return 1.5 if row.m >= 2048 or row.m <= 128 else 1.0
    return 1.75 if row.m >= 2048 else 1.7 if row.m <= 128 else 1.0


def on_wire_bytes(pattern: str, dtype: str) -> int:
    """Bytes of an element that ranks send each other. Scales are not counted: up to 3 % of fp8 operands."""
    return DTYPE_BYTES[FP8_RESULT if dtype == FP8 and pattern not in _GATHERS else dtype]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: one sample per round, each the mean of a burst on the slowest rank."""

    role: str
    samples: Annotated[tuple[float, ...], Annotated[tuple[Positive, ...], Within(1)]]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def min(self) -> float:
        return min(self.samples)

    @property
    def max(self) -> float:
        return max(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.samples) < 3:
            return 0.0
        low, _, high = quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


@dataclass(frozen=True)
class Bar:
    """The required performance of an op. ``geomean_tp`` limits the geomean bar to one world size (None: all).

    host_us: of an eager call; None where it is that of a model and not of flux. us: of the call on the GPU.
    """

    row: float
    geomean: float | None = None
    geomean_tp: int | None = None
    over_floor: float | None = None
    floor_from_ms: float = 0.15
    host_us: float | None = 25.0
    us: float | None = None


class _Plan(TypedDict, total=False):
    """What tables and pictures show of a plan."""

    fused: bool
    way: str
    config: str
    time_us: NotNegative | None
    candidates: list[tuple[str, Positive]]


@dataclass
class Row:
    """One measured problem: its sizes, the measured times, and the plan."""

    op: str
    model: str
    pattern: str
    m: Size
    n: Size
    k: Size
    tp: Count
    dtype: str
    local: tuple[Size, Size, Size]
    wire_bytes: Size
    times: dict[str, Timing] = field(default_factory=dict)
    host_us: dict[str, NotNegative] = field(default_factory=dict)
    plan: Annotated[dict[str, Any], _Plan] | None = None
    check: str = "not run"
    notes: list[str] = field(default_factory=list)
    variant: str = ""
    scales: str = ""

    @property
    def ok(self) -> bool:
        return passed(self.check)

    @property
    def kind(self) -> str:
        """The operator, apart for fp8 operands: what a bar and a table are of."""
        return f"{self.op}{FP8_KIND}" if self.scales else self.op

    @property
    def over_16_bits(self) -> float | None:
        """How much sooner than with 16-bit operands flux is with fp8 operands."""
        wide, ours = self.times.get(IN_16_BITS), self.times.get("flux")
        return wide.median / ours.median if wide and ours else None

    @property
    def name(self) -> str:
        """The model, and the variant and scales that distinguish its rows."""
        return " ".join(filter(None, (self.model, self.variant, self.scales)))


@dataclass(frozen=True)
class Derived:
    """Columns computed from a row; None where a column has no meaning."""

    flux: float | None
    gemm: float | None
    comm: float | None
    serial: float | None
    peer: float | None
    peer_name: str | None
    parts: float | None
    speedup: float | None
    over_parts: float | None
    e_overlap: float | None
    floor: float | None
    over_floor: float | None
    tflops: float | None

    @property
    def unit(self) -> float:
        """The unit of a row's times in pictures: its floor, or without one its best peer."""
        return self.floor or self.peer or self.flux or 1.0


def wire_bytes(pattern: str, m: int, n: int, k: int, tp: int, element_bytes: int) -> int:
    """Bytes that each rank must send to its peers, whatever the algorithm.

    gemm_rs: p-1 of the p row shards of its partial [M, N]. ag_gemm: its shard of x [M/p, K] to p-1 peers.
    gemm_ar, all_reduce: as gemm_rs, and its shard of the sum to p-1 peers.
    """
    if pattern == "gemm_rs":
        return (tp - 1) * m * n * element_bytes // tp
    if pattern == "ag_gemm":
        return (tp - 1) * m * k * element_bytes // tp
    if pattern in ("gemm_ar", "all_reduce"):
        return 2 * (tp - 1) * m * n * element_bytes // tp
    if pattern == "local":
        return 0
    known = "gemm_rs, ag_gemm, gemm_ar, all_reduce or local"
    raise ValueError(f"wire_bytes: pattern expected to be {known}, got {pattern!r}")


def floor_ms(gemm: float, bytes_on_wire: int, link_gb_per_s: float = LINK_GB_PER_S) -> float:
    """The lower bound of the time: the GEMM alone, or the bytes at the bandwidth of the link."""
    return max(gemm, bytes_on_wire / (link_gb_per_s * 1e6))


def e_overlap(flux: float, gemm: float, serial: float) -> float | None:
    """Share of communication that is hidden (arXiv 2406.06858); below 0: slower. None: there is none."""
    return 1.0 - (flux - gemm) / (serial - gemm) if serial > gemm else None


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; ValueError on an empty input."""
    logs = [math.log(v) for v in values]
    if not logs:
        raise ValueError("geomean: no values")
    return math.exp(sum(logs) / len(logs))


def derive(row: Row, link_gb_per_s: float = LINK_GB_PER_S, *, with_floor: bool = True) -> Derived:
    """Everything the table shows about a row.

    The best peer is the fastest candidate that does the same job without flux, fp8 sums with fewer bits
    included. Own parts are candidates that do it by other operators of flux. GEMM alone is the fastest
    candidate of role ``gemm``; a plain GEMM row has no such role, hence no floor.
    """
    best: dict[str, tuple[float, str]] = {}
    for name, timing in row.times.items():
        roles = {timing.role} - {"peer", "parts"}
        if "flux" not in name and timing.role in (*OTHERS, "fast"):
            roles.add("peer")
        elif "flux" in name and timing.role in OTHERS and name != IN_16_BITS:
            roles.add("parts")
        for role in roles:
            if role not in best or timing.median < best[role][0]:
                best[role] = (timing.median, name)

    def time_of(role: str) -> float | None:
        return best[role][0] if role in best else None

    t, gemm, comm, serial, peer = (time_of(r) for r in ROLES)
    parts = time_of("parts")
    floor = floor_ms(gemm, row.wire_bytes, link_gb_per_s) if gemm is not None and with_floor else None
    m, n, k = row.local
    return Derived(
        flux=t,
        gemm=gemm,
        comm=comm,
        serial=serial,
        peer=peer,
        peer_name=best["peer"][1] if "peer" in best else None,
        parts=parts,
        speedup=peer / t if peer is not None and t is not None else None,
        over_parts=parts / t if parts is not None and t is not None else None,
        e_overlap=e_overlap(t, gemm, serial) if None not in (t, gemm, serial) else None,  # type: ignore[arg-type]
        floor=floor,
        over_floor=t / floor if t is not None and floor is not None else None,
        tflops=2e-9 * m * n * k / t if t is not None and row.pattern in GEMM_PATTERNS else None,
    )


@dataclass(frozen=True)
class Summary:
    """The footer under a table of one op."""

    rows: int
    wrong: int
    geomean_speedup: float | None
    min_speedup: float | None
    geomean_over_parts: float | None
    min_over_parts: float | None
    geomean_over_floor: float | None
    max_over_floor: float | None
    median_e_overlap: float | None
    under_row_bar: int
    over_floor_bar: int
    floor_bar_rows: int
    geomean_bar_met: bool | None
    max_host_us: float | None
    over_host_bar: int
    over_time_bar: int

    @property
    def meets_bar(self) -> bool:
        missed = self.under_row_bar or self.over_floor_bar or self.over_host_bar or self.over_time_bar
        return not (self.wrong or missed or self.geomean_bar_met is False)


def summarise(rows: list[Row], derived: list[Derived], bar: Bar) -> Summary:
    """Footer of the rows of one op; ``derived`` belongs to ``rows`` one to one.

    E_overlap can be negative, so its middle is a median and not a geometric mean.
    """
    speedups = [d.speedup for d in derived if d.speedup is not None]
    parts = [d.over_parts for d in derived if d.over_parts is not None]
    floors = [(d.over_floor, d.floor) for d in derived if d.over_floor is not None and d.floor is not None]
    overlaps = [d.e_overlap for d in derived if d.e_overlap is not None]
    held = [ratio for ratio, floor in floors if floor >= bar.floor_from_ms] if bar.over_floor else []
    mean = geomean(speedups) if speedups else None
    applies = bar.geomean is not None and mean is not None
    if bar.geomean_tp is not None:
        applies = applies and all(row.tp == bar.geomean_tp for row in rows)
    hosts = [row.host_us["flux"] for row in rows if "flux" in row.host_us]
    return Summary(
        rows=len(rows),
        wrong=sum(not row.ok for row in rows),
        geomean_speedup=mean,
        min_speedup=min(speedups, default=None),
        geomean_over_parts=geomean(parts) if parts else None,
        min_over_parts=min(parts, default=None),
        geomean_over_floor=geomean(r for r, _ in floors) if floors else None,
        max_over_floor=max((r for r, _ in floors), default=None),
        median_e_overlap=median(overlaps) if overlaps else None,
        under_row_bar=sum(s < bar.row for s in speedups),
        over_floor_bar=sum(r > bar.over_floor for r in held) if bar.over_floor else 0,
        floor_bar_rows=len(held),
        geomean_bar_met=mean >= bar.geomean
        if applies and mean is not None and bar.geomean is not None
        else None,
        max_host_us=max(hosts, default=None),
        over_host_bar=sum(us > bar.host_us for us in hosts) if bar.host_us else 0,
        over_time_bar=sum(1e3 * d.flux > bar.us for d in derived if d.flux is not None) if bar.us else 0,
    )
