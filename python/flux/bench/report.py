"""Tables of a result, for the terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flux.bench.model import Bar, Derived, Row, Summary, bar_over_16_bits, geomean, summarise
from flux.bench.record import Record

# The target of each op: docs/benchmarks.md, "Targets".
BARS = {
    "gemm": Bar(row=0.90, geomean=0.95),
    "gemm_rs": Bar(row=0.98, geomean=1.15, geomean_tp=4, over_floor=1.15),
    "ag_gemm": Bar(row=0.98, geomean=1.15, geomean_tp=4, over_floor=1.15),
    "gemm_ar": Bar(row=1.0, geomean=1.25),
    "gemm_ar_norm": Bar(row=1.0),
    "all_reduce": Bar(row=1.0),
    "all_reduce_norm": Bar(row=1.0),
    "moe_route": Bar(row=1.0, us=10.0),
    "moe_layer0": Bar(row=1.0, geomean=1.30, geomean_tp=4),
    "moe_layer1": Bar(row=1.0, geomean=1.30, geomean_tp=4),
    "moe_mlp": Bar(row=1.0, host_us=None),
    "layer_forward": Bar(row=1.0, geomean=1.10, geomean_tp=4, host_us=None),
    "layer_training": Bar(row=1.0, geomean=1.08, geomean_tp=4, host_us=None),
    # Peers are bf16, too.
    "gemm_fp8": Bar(row=0.95),
}
_WIDE = 220
TABLE_WIDTH = 80  # width of the columns that every table has


def make_console(*, stderr: bool = False, least: int = 0) -> Console:
    """A console that doesn't fold a table in a file or a pipe. least: columns that it has anywhere."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # characters that an ASCII terminal lacks must not raise
        stream.reconfigure(errors="replace")
    # Text is what it says: brackets and colons in names from files are no styles, links or pictures.
    width = None if stream.isatty() else _WIDE
    console = Console(stderr=stderr, width=width, markup=False, emoji=False)
    console.width = max(console.width, least)
    return console


@dataclass(frozen=True)
class Column:
    """One column. ``spare``: columns with a higher number go first where the terminal is narrow; 0 stays."""

    title: str
    cell: Callable[[Row, Derived, Bar], str | Text]
    justify: str = "right"
    spare: int = 0


Filled = tuple[Column, list[str | Text]]


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _ratio(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _judged(value: float | None, good: bool, digits: int = 2) -> str | Text:
    style = "bold red" if not good else "green" if value is None or value >= 1.0 else "yellow"
    return "–" if value is None else Text(_ratio(value, digits), style=style)


def _speedup(row: Row, d: Derived, bar: Bar) -> str | Text:
    return _judged(d.speedup, d.speedup is not None and d.speedup >= bar.row)


def _over_floor(row: Row, d: Derived, bar: Bar) -> str | Text:
    if d.over_floor is None or d.floor is None or bar.over_floor is None:
        return _ratio(d.over_floor)
    if d.floor < bar.floor_from_ms:
        return Text(_ratio(d.over_floor), style="dim")
    return _judged(d.over_floor, d.over_floor <= bar.over_floor)


def _peer(row: Row, d: Derived, bar: Bar) -> str:
    return f"{_ms(d.peer)} {d.peer_name}" if d.peer_name else "–"


def _plan(row: Row, d: Derived, bar: Bar) -> str | Text:
    if not row.plan:
        return "–"
    if not row.plan.get("fused", True):
        return Text("unfused", style="yellow")
    return str(row.plan.get("config", "–"))


def _host(row: Row, d: Derived, bar: Bar) -> str | Text:
    value = row.host_us.get("flux")
    within = value is None or bar.host_us is None or value <= bar.host_us
    return "–" if value is None else Text(f"{value:.0f}", style="" if within else "red")


def _over_16_bits(row: Row) -> str | Text:
    value = row.over_16_bits
    return _judged(value, value is not None and value >= bar_over_16_bits(row))


def _fast(row: Row) -> str:
    """The fastest with sums that stay in the tensor cores."""
    found = min(((t.median, name) for name, t in row.times.items() if t.role == "fast"), default=None)
    return "–" if found is None else f"{_ms(found[0])} {found[1]}"


_MODEL = Column("model", lambda r, d, b: r.name, "left")
_PATTERN = Column("model", lambda r, d, b: f"{r.name} ({r.pattern})", "left")
_M = Column("M", lambda r, d, b: str(r.m))
# Those of the local GEMM, as the kernels see it.
_N_K = Column("N × K", lambda r, d, b: f"{r.local[1]} × {r.local[2]}", spare=3)
_K = Column("K", lambda r, d, b: str(r.local[2]))
_FLUX = Column("flux", lambda r, d, b: Text(_ms(d.flux), style="bold"))
_GEMM = Column("GEMM", lambda r, d, b: _ms(d.gemm), spare=2)
_COMM = Column("comm", lambda r, d, b: _ms(d.comm), spare=6)
_SERIAL = Column("serial", lambda r, d, b: _ms(d.serial), spare=5)
_PEER = Column("best peer", _peer, "left")
_PEER_MS = Column("cuBLAS", lambda r, d, b: _ms(d.peer))
_SPEEDUP = Column("speed-up", _speedup)
_SPEEDUP_3 = Column("speed-up", lambda r, d, b: _judged(d.speedup, (d.speedup or 0) >= b.row, 3))
_OVER_PARTS = Column(
    "over parts", lambda r, d, b: _judged(d.over_parts, (d.over_parts or 0) >= b.row), spare=1
)
_E_OVERLAP = Column("E_overlap", lambda r, d, b: _ratio(d.e_overlap), spare=4)
_FLOOR = Column("floor", lambda r, d, b: _ms(d.floor), spare=7)
_OVER_FLOOR = Column("t/floor", _over_floor)
_RATE = Column("TFLOP/s", lambda r, d, b: _ratio(d.tflops, 0))
_PEER_RATE = Column(
    "cuBLAS TFLOP/s", lambda r, d, b: _ratio(d.tflops / d.speedup if d.tflops and d.speedup else None, 0)
)
_OVER_16_BITS = Column("over bf16", lambda r, d, b: _over_16_bits(r))
_FAST = Column("fast sums", lambda r, d, b: _fast(r), "left", spare=4)
_COPY = Column("copy", _COMM.cell)
_OF_COPY = Column("of copy's speed", lambda r, d, b: _ratio(d.comm / d.flux if d.comm and d.flux else None))
_CHECK = Column(
    "check", lambda r, d, b: Text(r.check, style="green" if r.ok else "bold red"), "left", spare=1
)

_HEAD = [_MODEL, _M, _N_K, _FLUX]
_TAIL = [Column("host µs", _host, spare=8), Column("plan", _plan, "left", spare=9), _CHECK]
_GPU_COLLECTIVE = [
    *(*_HEAD, _GEMM, _COMM, _SERIAL, _PEER, _SPEEDUP, _OVER_PARTS, _E_OVERLAP, _FLOOR, _OVER_FLOOR)
]
_GPU_GEMM = [_PATTERN, _M, _N_K, _FLUX, _PEER_MS, _SPEEDUP_3, _RATE, _PEER_RATE, *_TAIL]
_GPU_FP8_GEMM = [_PATTERN, _M, _N_K, _FLUX, _RATE, _OVER_16_BITS, _PEER, _SPEEDUP, _FAST, *_TAIL]
_GPU_QUANTIZE = [_MODEL, _M, _K, _FLUX, _COPY, _OF_COPY, _PEER, _SPEEDUP, *_TAIL]
_CPU = [
    *(_MODEL, _M, _N_K, Column("fused", _FLUX.cell), Column("unfused", _PEER_MS.cell)),
    *(Column("speed-up", lambda r, d, b: _ratio(d.speedup)), _GEMM, Column("comm", _COMM.cell), _CHECK),
]


def _columns(record: Record, op: str) -> list[Column]:
    if record.device == "cpu":
        return _CPU
    if op == "quantize":
        return _GPU_QUANTIZE
    scaled = any(row.scales for row in record.rows if row.op == op)
    if op == "gemm":
        return _GPU_FP8_GEMM if scaled else _GPU_GEMM
    return [*_GPU_COLLECTIVE, *([_OVER_16_BITS] if scaled else []), *_TAIL]


def _bar_of(rows: list[Row]) -> Bar:
    return BARS.get(rows[0].kind if rows else "", Bar(row=1.0))


def title_of(record: Record, row: Row) -> str:
    return f"{row.op} · {record.ranks(row)} · {row.dtype}"


def table(record: Record, op: str, width: int = _WIDE) -> Table:
    """All rows of one op, in the columns that fit into ``width`` characters."""
    rows = [row for row in record.rows if row.op == op]
    title = f"{title_of(record, rows[0])} · ms per call, median of {record.settings.get('rounds')} rounds"
    bar, derived = _bar_of(rows), [record.derived(row) for row in rows]
    columns = [
        (column, [column.cell(row, d, bar) for row, d in zip(rows, derived, strict=True)])
        for column in _columns(record, op)
    ]
    out = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    shown = _fit(columns, width)
    for column, _ in shown:
        out.add_column(column.title, justify=column.justify, no_wrap=True)  # type: ignore[arg-type]
    previous = None
    for i, row in enumerate(rows):
        if previous is not None and (row.model, row.pattern) != previous:
            out.add_section()
        previous = (row.model, row.pattern)
        out.add_row(*(cells[i] for _, cells in shown))
    return out


def _fit(columns: list[Filled], width: int) -> list[Filled]:
    """The columns that fit into this width; a column is shown completely or not at all."""
    kept = list(columns)

    def needed() -> int:
        # The box puts three spaces between columns and two around them.
        return 1 + sum(3 + max(cell_len(str(c)) for c in (column.title, *cells)) for column, cells in kept)

    while needed() > width and any(column.spare for column, _ in kept):
        kept.remove(max(kept, key=lambda filled: filled[0].spare))
    return kept


def _against(record: Record, op: str) -> str:
    if op.startswith("layer"):
        return "stock"
    if record.device == "cpu":
        return "unfused"
    scaled = any(row.scales for row in record.rows if row.op == op)
    return "cuBLAS" if op == "gemm" and not scaled else "best peer"


def footer(record: Record, op: str) -> tuple[Text, Summary]:
    """Geometric means, the worst row, and how many rows are under the bar."""
    rows = [row for row in record.rows if row.op == op]
    bar = _bar_of(rows)
    s = summarise(rows, [record.derived(row) for row in rows], bar)
    lines = []
    if s.geomean_speedup is not None:
        line = (
            f"speed-up over {_against(record, op)}: geomean {s.geomean_speedup:.3f}, min {s.min_speedup:.3f}"
        )
        if record.device == "cuda":
            line += f"; {s.under_row_bar} of {s.rows} rows under {bar.row:.2f}"
            if s.geomean_bar_met is not None:
                line += f"; geomean bar {bar.geomean:.2f} {'met' if s.geomean_bar_met else 'MISSED'}"
        lines.append(line)
    if s.geomean_over_floor is not None:
        line = f"t/floor: geomean {s.geomean_over_floor:.3f}, max {s.max_over_floor:.3f}"
        if bar.over_floor is not None:
            line += (
                f"; {s.over_floor_bar} of {s.floor_bar_rows} rows with floor ≥ {bar.floor_from_ms:g} ms"
                f" over {bar.over_floor:.2f}"
            )
        if s.median_e_overlap is not None:
            line += f"; E_overlap median {s.median_e_overlap:.2f}"
        lines.append(line)
    wide = [(row.over_16_bits, bar_over_16_bits(row)) for row in rows]
    if gains := [(gain, least) for gain, least in wide if gain is not None]:
        under = sum(gain < least for gain, least in gains)
        values = [gain for gain, _ in gains]
        line = f"over bf16: geomean {geomean(values):.3f}, min {min(values):.3f}"
        lines.append(
            f"{line}; {under} of {len(gains)} rows under their bar" if record.device == "cuda" else line
        )
    if s.max_host_us is not None:
        limit = "" if bar.host_us is None else f"; {s.over_host_bar} rows over {bar.host_us:.0f}"
        lines.append(f"host cost of a call: max {s.max_host_us:.1f} µs{limit}")
    if bar.us is not None and record.device == "cuda":
        lines.append(f"time of a call: {s.over_time_bar} of {s.rows} rows over {bar.us:.0f} µs")
    if s.wrong:
        lines.append(f"WRONG RESULTS in {s.wrong} rows: their times mean nothing")
    good = s.meets_bar or (record.device == "cpu" and not s.wrong)
    return Text("\n".join(lines), style="green" if good else "yellow" if not s.wrong else "bold red"), s


def heading(record: Record) -> Text:
    machine = record.machine
    if record.device == "cuda":
        where = f"{machine.get('gpu_count')}× {machine.get('gpu')}, driver {machine.get('driver')}"
    else:
        where = f"{machine.get('cpu')}, {machine.get('cpus')} CPUs"
    software = [f"torch {machine.get('torch')}"]
    if record.device == "cuda":
        software += [f"CUDA {machine.get('cuda')}", f"NCCL {machine.get('nccl')}"]
    text = f"flux {record.version} ({record.commit}) · {where} · {', '.join(software)} · {record.date}"
    return Text(text, style="dim")


def notes(record: Record) -> list[str]:
    """Notes below the tables: peers that could not run, rows that were left out."""
    seen: dict[str, list[str]] = {}
    for row in record.rows:
        for note in row.notes:
            seen.setdefault(note, []).append(f"{row.name} M={row.m}")
    lines = []
    for note, where in seen.items():
        at = (
            "all rows"
            if len(where) == len(record.rows)
            else ", ".join(where[:4]) + (" …" if len(where) > 4 else "")
        )
        lines.append(f"{note} [{at}]")
    return lines + record.skipped


def render(record: Record, width: int = _WIDE) -> RenderableType:
    parts: list[RenderableType] = [heading(record)]
    for op in record.ops():
        parts += [table(record, op, width), footer(record, op)[0], Text("")]
    parts += [Text(f"· {line}", style="dim") for line in notes(record)]
    if record.device == "cpu":
        told = "of CPU processes: they show that the operators run and are exact; their times compare nothing"
        parts.append(Text(told, style="yellow"))
    if not record.complete:
        parts.append(Text("this run was cut off: the rows above are what it finished", style="yellow"))
    return Group(*parts)
