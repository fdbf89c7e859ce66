"""docs/results.md, a page for each operator in docs/results, and the table in README.md, as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import whole_models
from measurements import OTHERS, Group, Measured, Other, Source, operator_of
from results_text import CELLS, HEAD, LOSSES, MODELS, OPERATORS, PAGES, README_HEAD, README_NOTES, VLLM, Page

_NUMERIC = re.compile(r"[\d.,*–% µs/]*( \(\*{0,2}[\d.]+\*{0,2}\))?")


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


def both(mean: float | None, worst: float | None) -> str:
    return "–" if mean is None else f"{speed(mean)} ({speed(worst)})"


def span(values: Iterable[str]) -> str:
    """The first and the last of texts in their order."""
    found = sorted(set(values))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def time(ms: float) -> str:
    return f"{1e3 * ms:.1f} µs" if ms < 0.1 else f"{1e3 * ms:.0f} µs" if ms < 1 else f"{ms:.1f} ms"


def links(sources: Iterable[Source], up: str) -> str:
    return ", ".join(
        f"[{source.commit[:7]}]({up}benchmarks/results/{source.name})"
        for source in sorted(set(sources), key=lambda source: source.date, reverse=True)
    )


def changed(sources: Iterable[Source]) -> str:
    """How much of the kernel changed since the oldest of some files, and whether its rests were equal."""
    oldest = min(sources, key=lambda source: source.date)
    since = "no" if oldest.marks.changed == "same" else oldest.marks.changed
    return since if oldest.marks.equal_rests else f"{since}, unequal rests"


def origin(source: Source, up: str) -> str:
    return f"{source.on}, {source.date[:10]}, {links([source], up)}, kernel changed: {changed([source])}."


def label(group: Group, found: Measured) -> str:
    row = found.row
    if group.suite == OTHERS:
        return f"{row.n} × {row.k}"
    return f"{row.name} ({row.pattern})" if operator_of(group.op) == "gemm" else row.name


def pivot(group: Group) -> str:
    """Speed-ups: a line for each model and variant, a column for each M; behind the slash over own parts."""
    sizes = sorted({found.row.m for found in group.rows})
    lines: dict[str, dict[int, str]] = {}
    for found in group.rows:
        d = found.derived
        over = f"/{speed(d.over_parts)}" if d.over_parts is not None else ""
        lines.setdefault(label(group, found), {})[found.row.m] = (
            f"{speed(d.speedup)}{over}" if found.row.ok else "wrong"
        )
    head = ["M", *map(str, sizes)]
    return table(head, ([name, *(cells.get(size, "–") for size in sizes)] for name, cells in lines.items()))


def facts(group: Group) -> str:
    """What a table of speed-ups does not show."""
    s = group.summary
    lines = [f"Over the best without flux {both(s.geomean_speedup, s.min_speedup)}"]
    if s.geomean_over_parts is not None:
        lines.append(f"over own parts {both(s.geomean_over_parts, s.min_over_parts)}")
    if s.geomean_over_floor is not None:
        lines.append(f"t/floor {s.geomean_over_floor:.2f}, at most {s.max_over_floor:.2f}")
    names = Counter(found.derived.peer_name for found in group.rows if found.derived.peer_name).most_common()
    best = ", ".join(f"{name} ({count})" if len(names) > 1 else str(name) for name, count in names)
    ours = sorted(found.derived.flux for found in group.rows if found.derived.flux is not None)
    spreads = [found.row.times["flux"].spread for found in group.rows if "flux" in found.row.times]
    lines.append(f"{time(ours[0])} to {time(ours[-1])} a call, ±{100 * median(spreads):.1f} %; best: {best}")
    absent = sorted(set.intersection(*(set(found.absent) for found in group.rows)))
    lines += [f"absent: {', '.join(absent)}"] if absent else []
    return f"{'; '.join(lines)}."


def name_of(group: Group) -> str:
    suite = "" if group.suite in ("default", "models") else f", {group.suite}"
    return f"{OPERATORS[group.op].name}{suite}"


def of_group(group: Group, up: str) -> str:
    sources = [found.source for found in group.rows]
    rows = "All rows" if group.is_full else f"{group.covered} of the suite's {group.shapes} shapes"
    days = span(source.date[:10] for source in sources)
    since = f"{rows}, {days}, {links(sources, up)}, kernel changed: {changed(sources)}."
    if group.withdrawn:
        since += f" Withdrawn: {group.withdrawn} rows whose routing starves half of the experts."
    return f"### {name_of(group)}, {group.where}\n\n{since} {facts(group)}\n\n{pivot(group)}"


def summary(groups: Sequence[Group], up: str) -> str:
    rows = []
    for op, operator in OPERATORS.items():
        for group in (found for found in groups if found.op == op):
            s, sources = group.summary, [found.source for found in group.rows]
            floor = "–" if s.geomean_over_floor is None else f"{s.geomean_over_floor:.2f}"
            name = f"[{name_of(group)}](results/{operator.at}.md)"
            speeds = [
                both(s.geomean_speedup, s.min_speedup),
                both(s.geomean_over_parts, s.min_over_parts),
                floor,
            ]
            count = str(s.rows) if group.is_full else f"{s.rows}, a part"
            since = [links(sources, up), span(source.date[5:10] for source in sources), changed(sources)]
            rows.append([name, group.where, count, *speeds, *since])
    head = ["operator", "GPUs", "rows", "over the best without flux", "over own parts", "t / floor"]
    return table([*head, "commit", "2026", "kernel changed since"], rows)


def newest(found: Sequence[Other], key: Callable[[Other], object]) -> list[Other]:
    """Of those with equal keys the newest, newest first."""
    ordered = sorted(found, key=lambda other: other.source.date, reverse=True)
    first: dict[object, Other] = {}
    for other in ordered:
        first.setdefault(key(other), other)
    return list(first.values())


def vllm_key(other: Other) -> tuple[object, ...]:
    """Of a model the newest run of flux as it is installed counts, and the newest of its variants."""
    settings, model = other.data["settings"], other.data["settings"]["model"]
    usual = "flux-graph" in other.data["runs"]
    where = (model.get("name", "llama-3-8b"), settings["tp"], other.source.machine)
    return *where, settings["work"].get("api_server"), usual


def vllm(found: Sequence[Other], up: str) -> list[str]:
    parts = []
    for other in newest([other for other in found if other.data["settings"].get("defaults")], vllm_key):
        settings, runs = other.data["settings"], other.data["runs"]
        rates = whole_models.over_stock(runs)
        metrics = list(dict.fromkeys(metric for of_run in rates.values() for metric in of_run))
        lines = [
            [name, *(_rate(*of_run[metric]) if metric in of_run else "–" for metric in metrics)]
            for name, of_run in rates.items()
        ]
        model = settings["model"]
        how = ", API server" if settings["work"].get("api_server") else ""
        title = f"{model.get('name', 'llama-3-8b')}, {model['layers']} layers, TP {settings['tp']}"
        version = other.data["machine"]["vllm"]
        said = f"vLLM {version}{how}, {origin(other.source, up)} {scatter(runs)}"
        parts.append(f"## {title}\n\n{said}\n")
        if metrics:
            parts.append(table(["tokens/s", *metrics], lines))
        parts += arrivals(runs)
    return parts


def arrivals(runs: Any) -> list[str]:
    """What requests waited for, of each rate at which they arrived: medians of samples."""
    lines = []
    for rate in dict.fromkeys(rate for run in runs.values() for rate in run.get("traces", {})):
        for name, run in runs.items():
            samples = run.get("traces", {}).get(rate)
            if rate == "at once" or not samples:
                continue
            times = [f"{1e3 * seconds:.1f}" for both in whole_models.waited(samples) for seconds in both]
            tokens = median(each["tokens_per_s"] for each in samples)
            first = [each["first_s"]["median"] for each in samples]
            apart = f"{len(samples)}, {100 * (max(first) / min(first) - 1):.0f} %"
            lines.append([rate, name, *times, f"{tokens:,.0f}", apart])
    head = ["requests", "", "first token, ms", "99 % within", "each further, ms", "99 % within", "tokens/s"]
    return [table([*head, "samples, apart"], lines)] if lines else []


def scatter(runs: Any) -> str:
    """How far the samples are apart from which a rate is the median."""
    spread = {
        f"{name}, {metric}": max(samples) / min(samples) - 1
        for name, run in runs.items()
        for metric, samples in run["samples_s"].items()
    }
    widest = max(spread, key=lambda name: spread[name])
    return f"Samples up to {100 * spread[widest]:.0f} % apart ({widest})."


def _rate(rate: float, ratio: float | None) -> str:
    return f"{rate:,.0f}" if ratio in (None, 1.0) else f"{rate:,.0f} ({speed(ratio)})"


def models(found: Sequence[Other], up: str) -> list[str]:
    """A table for each model of each file, newest first."""
    parts = []
    for other in newest(
        found, lambda o: (o.source.machine, *[(m["name"], *m["candidates"]) for m in o.data["models"]])
    ):
        settings, machine = other.data["settings"], other.data["machine"]
        parts.append(f"megatron-core {machine['megatron-core']}; {origin(other.source, up)}\n")
        for model in other.data["models"]:
            cells: dict[str, dict[str, str]] = {name: {} for name in model["candidates"]}
            for kind, name, ms, apart, ratio, host in whole_models.lines(model):
                text = f"{ms:.1f} ({speed(ratio)}) ±{100 * apart:.0f}{' *host*' if host else ''}"
                cells[name][kind] = text
            kinds = [
                *whole_models.PASSES,
                *[whole_models.GRAPH] * any(whole_models.GRAPH in line for line in cells.values()),
            ]
            lines = [
                [name, *(cells[name].get(kind, "–") for kind in kinds), f"{run['step_mib'] / 1024:.1f}"]
                for name, run in model["candidates"].items()
            ]
            columns = [f"{kind}, ms ±%" for kind in kinds]
            title = whole_models.title(model, settings["tp"])
            parts.append(table([title, *columns, "memory of a step, GiB"], lines))
    return parts


def losses(found: Sequence[Other], up: str) -> list[str]:
    parts = []
    for other in found:
        curves = other.data
        apart, step = max((max(at) - min(at), i) for i, at in enumerate(zip(*curves.values(), strict=True)))
        steps = len(next(iter(curves.values())))
        at = (0, steps // 2, steps - 1)
        lines = [[name, *(f"{curve[i]:.4f}" for i in at)] for name, curve in curves.items()]
        text = f"The curves are at most {apart:.3f} apart, at step {step} of {steps}."
        parts.append(f"{text} {origin(other.source, up)}\n")
        parts.append(table(["loss", *(f"step {i}" for i in at)], lines))
    return parts


def head(page: Page, sources: Sequence[Source]) -> str:
    """The first lines of a page: what was measured, when, on what, and whether kernels changed since."""
    machines = ", ".join(sorted({source.on for source in sources}))
    days = span(source.date[:10] for source in sources)
    states = {source.marks.changed == "same" for source in sources}
    since = "some kernels" if len(states) > 1 else "no kernel" if states == {True} else "all kernels"
    where = f"{days}, on {machines}, multicast off; {since} changed since. `make results` writes this page."
    return f"# Results: {page.title}\n\n{page.what}\n{where}\n"


def pages(groups: Sequence[Group], others: Sequence[Other], figures: Path) -> dict[str, str]:
    """All pages, by their path in docs."""
    unknown = {group.op for group in groups} - {*OPERATORS}
    if unknown:
        raise ValueError(f"no section for {', '.join(sorted(unknown))}: add it to benchmarks/results_text.py")
    found = {"results.md": "\n".join([HEAD, summary(groups, "../")])}
    up = "../../"
    of_vllm = [other for other in others if "runs" in other.data]
    of_models = [other for other in others if "models" in other.data]
    curves = [other for other in others if other.source.op == "losses"]
    for page in PAGES:
        mine = [
            group
            for op, operator in OPERATORS.items()
            if operator.at == page.at
            for group in groups
            if group.op == op
        ]
        parts = []
        for op, operator in OPERATORS.items():
            of_op = [group for group in mine if group.op == op]
            if of_op:
                parts.append(
                    f"## {operator.name}\n\n{operator.what} See [{operator.page}](../{operator.page}).\n"
                )
                parts += [of_group(group, up) for group in of_op]
        sources = [measured.source for group in mine for measured in group.rows]
        if page.at == "vllm":
            parts += [VLLM, *vllm(of_vllm, up)]
            sources += [other.source for other in of_vllm]
        if page.at == "megatron":
            parts += [
                "## Whole models\n",
                MODELS,
                *models(of_models, up),
                "## Losses of a training\n",
                LOSSES,
                *losses(curves, up),
            ]
            sources += [other.source for other in (*of_models, *curves)]
        drawn = pictures(sources, mine, figures)
        notes = [*([CELLS] if mine else []), *([f"Pictures: {drawn}.\n"] if drawn else [])]
        parts = [head(page, sources), *notes, *parts]
        found[f"results/{page.at}.md"] = "\n".join(parts)
    return found


def pictures(sources: Sequence[Source], groups: Sequence[Group], figures: Path) -> str:
    """The pictures that `bench --plot` drew of these files: their captions say of which."""
    commits = {source.commit[:7] for source in sources}
    names = {operator_of(group.op) for group in groups}
    found = []
    for path in sorted(figures.glob("*.svg")):
        said = " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))
        commit = re.search(r"flux \S+ \(([0-9a-f]{7})", said)
        if commit and commit[1] in commits and any(f"{name}  ·" in said for name in names):
            found.append(f"[{path.stem}](../figures/{path.name})")
    return ", ".join(found)


@dataclass(frozen=True)
class Headline:
    """A number of README.md: what was measured of which model, the baseline, and where it stands."""

    what: str
    baseline: str
    page: str
    model: str
    tp: int
    run: str
    metric: str
    stock: str

    def samples(self, data: Any) -> tuple[list[float], list[float]] | None:
        """Those of flux and of the baseline in a file of whole models, if it has them."""
        settings, in_vllm = data["settings"], self.page == "vllm"
        if settings["tp"] != self.tp or not settings.get("defaults", not in_vllm):
            return None
        if in_vllm:
            runs = data.get("runs", {}) if settings["model"].get("name") == self.model else {}
        else:
            named = (each for each in data.get("models", ()) if each["name"].startswith(self.model))
            runs = next((each["candidates"] for each in named), {})
        unit = "samples_s" if in_vllm else "samples_ms"
        ours, theirs = (runs.get(name, {}).get(unit, {}).get(self.metric) for name in (self.run, self.stock))
        return (ours, theirs) if ours and theirs else None

    def found(self, others: Sequence[Other]) -> tuple[Source, list[float], list[float]]:
        """The newest file's; of Megatron-Core, whose steps are alike, that with the fastest baseline."""
        having = [(other.source, *both) for other in others if (both := self.samples(other.data))]
        if self.page == "vllm":
            return max(having, key=lambda each: each[0].date)
        return min(having, key=lambda each: median(each[2]))


_IN_VLLM = ("flux-graph", "prefill", "stock-graph")
_IN_MEGATRON = ("flux", "training", "stock")
_SHAPE = "shape in"
HEADLINES = (
    Headline(f"Llama-3-70B's {_SHAPE} vLLM, prefill", "vLLM's defaults", "vllm", "llama-3-70b", 4, *_IN_VLLM),
    Headline(
        f"Qwen3-30B-A3B's {_SHAPE} vLLM, prefill", "vLLM's defaults", "vllm", "qwen3-30b-a3b", 2, *_IN_VLLM
    ),
    Headline(
        *(f"Llama-3-70B's {_SHAPE} Megatron-Core, a training step", "Megatron's own layers", "megatron"),
        *("llama-3-70b", 4, *_IN_MEGATRON),
    ),
    Headline(
        *(f"Mixtral-8x7B's {_SHAPE} Megatron-Core, a training step", "Megatron's own layers", "megatron"),
        *("mixtral-8x7b", 4, *_IN_MEGATRON),
    ),
)


def block(groups: Sequence[Group], others: Sequence[Other]) -> str:
    """The table in README.md: whole programs, and one operator."""
    rows = []
    whole = [other for other in others if "settings" in other.data]
    for line in HEADLINES:
        source, ours, theirs = line.found(whole)
        ratio = f"{median(theirs) / median(ours):.2f}"
        least, most = min(theirs) / max(ours), max(theirs) / min(ours)
        about = [source.on, line.baseline, ratio]
        commit = f"{source.commit[:7]}, {changed([source])}"
        rows.append(
            [f"[{line.what}](docs/results/{line.page}.md)", *about, f"{least:.2f} to {most:.2f}", commit]
        )
    fused = max((group for group in groups if group.op == "gemm_rs" and group.tp == 4), key=lambda g: g.date)
    sources = [found.source for found in fused.rows]
    speeds = [found.derived.speedup or 0.0 for found in fused.rows]
    about = [fused.where, "the best of async-TP, cuBLAS with NCCL", f"{fused.summary.geomean_speedup:.2f}"]
    commit = f"{max(sources, key=lambda source: source.date).commit[:7]}, {changed(sources)}"
    name = f"[`gemm_rs`](docs/results/gemm_rs.md), {len(speeds)} shapes"
    rows.append([name, *about, f"{min(speeds):.2f} to {max(speeds):.2f}", commit])
    head = ["", "GPUs", "over", "speed-up", "least to most", "commit, kernel changed since"]
    return f"{README_HEAD}{table(head, rows)}{README_NOTES}"
