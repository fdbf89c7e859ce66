"""docs/results.md, and the table of it that README.md has, as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flux.bench.cases import OPS
from flux.bench.model import Bar, Row
from flux.bench.report import BARS
from flux.cli import training
from flux.cli.tables import furthest_apart
from flux.cli.throughput import over_stock, waited
from measurements import Marks, Measurement, Other, Source, operator_of, ranked
from results_text import HEAD, LOSSES, MODELS, OPERATORS, README_HEAD, README_NOTES, VLLM

RESULTS = "../benchmarks/results/"
_NUMERIC = re.compile(r"[\d.,*–% µs]*( \(\*{0,2}[\d.]+\*{0,2}\)[ ¹²³⁴]*)?")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Columns of numbers are set to the right."""
    lines = list(rows)
    columns = zip(*lines, strict=True)
    rule = ["--:" if all(map(_NUMERIC.fullmatch, cells)) else "---" for cells in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))


def speed(value: float | None) -> str:
    """Two digits, three where two would hide which side of 1 it is; bold below 1."""
    if value is None:
        return "–"
    text = f"{value:.3f}" if 0.99 <= value < 1.005 else f"{value:.2f}"
    return f"**{text}**" if value < 1 else text


def span(values: Sequence[float]) -> str:
    if not values:
        return "–"
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}–{high}"


def time(ms: float) -> str:
    return f"{1e3 * ms:.1f} µs" if ms < 0.1 else f"{1e3 * ms:.0f} µs" if ms < 1 else f"{ms:.1f} ms"


def gpus(m: Measurement) -> str:
    return "1 GPU" if m.gpus == 1 else f"{m.gpus} GPUs"


def links(sources: Iterable[Source], texts: Iterable[str]) -> str:
    return ", ".join(f"[{text}]({RESULTS}{s.name})" for s, text in zip(sources, texts, strict=True))


def commit_links(m: Measurement) -> str:
    """A measurement's commit, linked to its files."""
    return links(m.sources, [m.commit, *(f"part {i}" for i in range(2, len(m.sources) + 1))])


def remarks(marks: Marks, complete: bool = True) -> list[str]:
    found = [f"older kernel ({marks.changed})"] if marks.changed != "same" else []
    return found + ([] if marks.equal_rests else ["unequal rests"]) + ([] if complete else ["cut off"])


def origin(sources: Sequence[Source], complete: bool = True) -> str:
    """Which files, of which commit, machine and day, and what changed since."""
    last = max(sources, key=lambda source: source.date)
    names = links(sources, (source.name for source in sources))
    marks = ", ".join(remarks(last.marks, complete)).capitalize() or "The kernel is the same since"
    return f"{names}: commit {last.commit[:7]}, {last.machine}, {last.date[:10]}. **{marks}.**"


def hosts(m: Measurement) -> list[float]:
    return [row.host_us["flux"] for row in m.rows if "flux" in row.host_us]


def label(m: Measurement, row: Row) -> str:
    return f"{row.name} ({row.pattern})" if operator_of(m.op) == "gemm" else row.name


def worst_row(m: Measurement) -> str:
    rows = [(d.speedup, row) for row, d in zip(m.rows, m.derived, strict=True) if d.speedup is not None]
    _, row = min(rows, key=lambda found: found[0])
    return f"{label(m, row)}, M = {row.m}"


def pivot(m: Measurement) -> str:
    """Speed-ups: a line for each model and variant, a column for each M."""
    sizes = sorted({row.m for row in m.rows})
    lines: dict[str, dict[int, str]] = {}
    for row, d in zip(m.rows, m.derived, strict=True):
        lines.setdefault(label(m, row), {})[row.m] = speed(d.speedup) if row.ok else "wrong"
    head = ["", *(f"M = {size}" for size in sizes)]
    return table(head, ([name, *(cells.get(size, "–") for size in sizes)] for name, cells in lines.items()))


def facts(m: Measurement) -> str:
    """What a table of speed-ups does not show, a sentence each."""
    s, bar = m.summary, BARS.get(m.op, Bar(row=1.0))
    mean, worst = speed(s.geomean_speedup), speed(s.min_speedup)
    lines = [f"Speed-up: {mean} in the geometric mean, {worst} at worst ({worst_row(m)})."]
    if s.geomean_bar_met is False:
        lines.append(f"The geometric mean is under the bar of {bar.geomean:.2f}.")
    if s.under_row_bar:
        lines.append(f"Rows under the bar of {bar.row:.2f}: {s.under_row_bar} of {s.rows}.")
    if s.geomean_over_floor is not None:
        floor = f"{s.geomean_over_floor:.2f} in the geometric mean, {s.max_over_floor:.2f} at most"
        over = f", over the bar in {s.over_floor_bar} of {s.floor_bar_rows} rows" if s.over_floor_bar else ""
        lines.append(f"[Time / floor](benchmarks.md#columns): {floor}{over}.")
    names = Counter(d.peer_name for d in m.derived if d.peer_name).most_common()
    counted = (f"{name} in {count} rows" if count > 1 else f"{name} in 1 row" for name, count in names)
    lines.append(f"Best peer: {', '.join(counted)}." if len(names) > 1 else f"Peer: {names[0][0]}.")
    ours = sorted(d.flux for d in m.derived if d.flux is not None)
    theirs = sorted(d.peer for d in m.derived if d.peer is not None)
    times = [f"{time(values[0])} to {time(values[-1])}" for values in (ours, theirs)]
    lines.append(f"A call takes {times[0]}, the best peer {times[1]}.")
    if not m.is_full:
        lines.append(f"The file has {m.covered} of the suite's {m.shapes} shapes.")
    return " ".join(lines)


def pictures(m: Measurement, figures: Path) -> list[str]:
    """The pictures that `bench --plot` drew of these files: their captions say of which."""
    found = []
    for path in sorted(figures.glob("*.svg")):
        said = " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))
        commit = re.search(r"flux \S+ \(([0-9a-f]+)\)", said)
        if (
            commit
            and commit[1].startswith(m.commit)
            and f"{operator_of(m.op)}  ·" in said
            and f"{m.gpus}× " in said
        ):
            found.append(path.name)
    return found


def drawn(m: Measurement, figures: Path) -> str:
    names = pictures(m, figures)
    many = len(names) > 1
    return "".join(f" [Picture{f' {i}' if many else ''}](figures/{name})." for i, name in enumerate(names, 1))


def headline(m: Measurement, figures: Path, title: str = "") -> str:
    text = f"### {OPERATORS[m.op].name}, {gpus(m)}{title}\n\n{facts(m)}{drawn(m, figures)}\n\n{pivot(m)}\n"
    return text + f"From {origin(m.sources, m.complete)}\n"


class Sections:
    """The measurements of each operator and number of GPUs, in the order of the page."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        unknown = {m.op for m in measurements} - {*OPERATORS}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"no section for {names}: add it to benchmarks/results_text.py")
        self._all = measurements

    def of(self, op: str) -> list[list[Measurement]]:
        """For each number of GPUs, the headline and then the others."""
        mine = [m for m in self._all if m.op == op]
        keys = sorted({(m.gpus, m.tp, m.suite) for m in mine})
        return [ranked(m for m in mine if (m.gpus, m.tp, m.suite) == key) for key in keys]

    def heads(self) -> list[Measurement]:
        return [found[0] for op in OPERATORS for found in self.of(op)]


def summary(sections: Sections) -> str:
    rows = []
    for m in sections.heads():
        s = m.summary
        host = span(hosts(m)) if BARS.get(m.op, Bar(row=1.0)).host_us is not None else "–"
        share = str(s.rows) if m.is_full else f"{s.rows} (a part)"
        bar = "met" if s.meets_bar else "missed"
        marks = ", ".join(remarks(m.marks, m.complete)) or "–"
        speeds = [speed(s.geomean_speedup), speed(s.min_speedup), bar, host]
        name = OPERATORS[m.op].name
        rows.append([name, str(m.gpus), share, *speeds, commit_links(m), m.date[:10], marks])
    head = ["operator", "GPUs", "rows", "speed-up", "worst", "bar", "host µs", "commit", "date", "marks"]
    return table(head, rows)


def vllm(found: Sequence[Other]) -> list[str]:
    """A table for each file, newest first."""
    parts = []
    for other in sorted(found, key=lambda o: o.source.date, reverse=True):
        settings, machine, runs = (other.data[key] for key in ("settings", "machine", "runs"))
        rates = over_stock(runs)
        metrics = list(dict.fromkeys(metric for of_run in rates.values() for metric in of_run))
        lines = [
            [name, *(_rate(*of_run[metric]) if metric in of_run else "–" for metric in metrics)]
            for name, of_run in rates.items()
        ]
        model = settings["model"]
        title = f"{model.get('name', 'llama-3-8b')}, {model['layers']} layers, TP {settings['tp']}"
        how = " with its defaults" if settings.get("defaults") else ""
        how += " through its API server" if settings["work"].get("api_server") else ""
        title += f", vLLM {machine['vllm']}{how}, `FLUX_VLLM_MIN_TOKENS={settings['min_tokens']}`."
        parts.append(f"{title} {scatter(runs)} From {origin([other.source])}\n")
        parts.append(table(["tokens/s", *metrics], lines))
        parts += arrivals(runs)
    return parts


def arrivals(runs: Mapping[str, Any]) -> list[str]:
    """What requests waited for, of each rate at which they arrived: medians of samples."""
    lines = []
    for rate in dict.fromkeys(rate for run in runs.values() for rate in run.get("traces", {})):
        for name, run in runs.items():
            samples = run.get("traces", {}).get(rate)
            if rate == "at once" or not samples:
                continue
            times = [f"{1e3 * seconds:.1f}" for both in waited(samples) for seconds in both]
            tokens = median(each["tokens_per_s"] for each in samples)
            first = [each["first_s"]["median"] for each in samples]
            apart = f"{len(samples)}, {100 * (max(first) / min(first) - 1):.0f} %"
            lines.append([rate, name, *times, f"{tokens:,.0f}", apart])
    head = ["requests", "", "first token, ms", "99 % within", "each further, ms", "99 % within", "tokens/s"]
    return [table([*head, "samples, apart"], lines)] if lines else []


def scatter(runs: Mapping[str, Any]) -> str:
    """How far the samples are apart from which a rate is the median."""
    spread = {
        f"{name}, {metric}": max(samples) / min(samples) - 1
        for name, run in runs.items()
        for metric, samples in run["samples_s"].items()
    }
    widest = max(spread, key=lambda name: spread[name])
    return f"The samples of a rate are up to {100 * spread[widest]:.0f} % apart ({widest})."


def _rate(rate: float, ratio: float | None) -> str:
    return f"{rate:,.0f}" if ratio in (None, 1.0) else f"{rate:,.0f} ({speed(ratio)})"


def models(found: Sequence[Other]) -> list[str]:
    """A table for each model of each file, newest first."""
    parts = []
    for other in sorted(found, key=lambda o: o.source.date, reverse=True):
        settings, machine = other.data["settings"], other.data["machine"]
        parts.append(f"megatron-core {machine['megatron-core']}. From {origin([other.source])}\n")
        for model in other.data["models"]:
            cells: dict[str, dict[str, str]] = {name: {} for name in model["candidates"]}
            for kind, name, ms, apart, ratio, host in training.lines(model):
                text = f"{time(ms)} ({speed(ratio)}) ±{100 * apart:.0f} %{' *host*' if host else ''}"
                cells[name][kind] = text
            graphs = [training.GRAPH] * any(training.GRAPH in line for line in cells.values())
            kinds = [*training.PASSES, *graphs]
            lines = []
            for name, run in model["candidates"].items():
                memory = f"{run['step_mib'] / 1024:.1f} GiB"
                lines.append([name, *(cells[name].get(kind, "–") for kind in kinds), memory])
            names = [*training.PASSES, *("training, CUDA graph" for _ in graphs)]
            parts.append(table([training.title(model, settings["tp"]), *names, "memory of a step"], lines))
            parts += [f"Not run: {name}: {reason}\n" for name, reason in model["skipped"].items()]
    return parts


def losses(found: Sequence[Other]) -> list[str]:
    parts = []
    for other in found:
        curves = other.data
        apart, step = furthest_apart(curves.values())
        steps = len(next(iter(curves.values())))
        at = (0, steps // 2, steps - 1)
        lines = [[name, *(f"{curve[i]:.4f}" for i in at)] for name, curve in curves.items()]
        text = f"The curves are at most {apart:.3f} apart, at step {step} of {steps}."
        parts.append(f"{text} From {origin([other.source])}\n")
        parts.append(table(["loss", *(f"step {i}" for i in at)], lines))
    return parts


def files(measurements: Sequence[Measurement], found: Sequence[Other]) -> str:
    """Every file, once for each operator in it."""
    sources = [s for m in measurements for s in m.sources] + [other.source for other in found]
    rows = []
    for s in sorted(sources, key=lambda s: (s.name, s.op)):
        rests = "–" if operator_of(s.op) not in OPS else "equal" if s.marks.equal_rests else "unequal"
        rows.append([f"[{s.name}]({RESULTS}{s.name})", s.op, str(s.rows), s.marks.changed, rests])
    return table(["file", "what", "rows", "kernel since", "rests"], rows)


def page(measurements: Sequence[Measurement], found: Sequence[Other], figures: Path) -> str:
    sections = Sections(measurements)
    parts = [HEAD, "## Summary\n", summary(sections)]
    for op, operator in OPERATORS.items():
        for i, (first, *others) in enumerate(sections.of(op)):
            if i == 0:
                parts.append(
                    f"## {operator.name}\n\n{operator.what} See [{operator.page}]({operator.page}).\n"
                )
            parts.append(headline(first, figures))
            newer = [m for m in others if m.date > first.date]
            parts += [headline(m, figures, f", a part of the suite at {m.commit}") for m in newer]
    parts += ["## vLLM\n", VLLM, *vllm([other for other in found if "runs" in other.data])]
    if whole := [other for other in found if "models" in other.data]:
        parts += ["## Models of Megatron-Core\n", MODELS, *models(whole)]
    curves = [other for other in found if other.source.op == "losses"]
    parts += ["## Losses of a training\n", LOSSES, *losses(curves)]
    return "\n".join([*parts, "## All files\n", files(measurements, found)])


def block(measurements: Sequence[Measurement]) -> str:
    """The table in README.md: geometric mean and worst row at 2 and 4 GPUs."""
    sections = Sections(measurements)
    rows = []
    for op, operator in OPERATORS.items():
        by_ranks = {group[0].tp: group[0] for group in sections.of(op)}
        if by_ranks:
            rows.append([operator.name, *(_cell(by_ranks.get(ranks)) for ranks in (2, 4))])
    return f"{README_HEAD}{table(['operator', '2 GPUs', '4 GPUs'], rows)}{README_NOTES}"


def _cell(m: Measurement | None) -> str:
    if m is None:
        return "–"
    s = m.summary
    signs = [m.marks.changed != "same", not m.marks.equal_rests, not m.is_full, m.gpus < m.tp]
    marks = "".join(sign for sign, holds in zip("¹²³⁴", signs, strict=True) if holds)
    return f"{speed(s.geomean_speedup)} ({speed(s.min_speedup)}) {marks}".strip()
