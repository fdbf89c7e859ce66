"""The files of a results folder as measurements: which rows belong together, which are the newest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flux._files import read_json
from flux.bench import record as records
from flux.bench.cases import OPS
from flux.bench.model import FP8_KIND, Bar, Derived, Row, Summary, derive, summarise
from flux.bench.record import Record
from flux.bench.report import BARS
from flux.bench.suites import Request, load
from flux.cli.show import KINDS
from kernel_sources import EQUAL_RESTS, SOURCES, History

_NAMED_COMMIT = re.compile(r"-([0-9a-f]{7,40})\.json$")
_LISTED = re.compile(
    r"^\| \[([^\]]+\.json)\]\([^)]*\) \| (\S+) \|.*\| (same|[<\d]+ %) \| (equal|unequal|–) \|$", re.M
)


@dataclass(frozen=True)
class Marks:
    """What has changed since a file. changed: percent of its kernel's lines, as text, or "same"."""

    changed: str
    equal_rests: bool


@dataclass(frozen=True)
class Source:
    """One file and one of the operators in it."""

    name: str
    op: str
    commit: str
    date: str
    machine: str
    rows: int
    marks: Marks


Judge = Callable[[str, str, str], Marks]


class Marker:
    """Marks of files by the history; where it lacks their commits, as in a shallow clone, those of the page.

    unchecked: files whose marks were taken from the page.
    """

    def __init__(self, history: History, page: str) -> None:
        self._history = history
        listed = _LISTED.findall(page)
        self._page = {(name, op): Marks(changed, rests != "unequal") for name, op, changed, rests in listed}
        self.unchecked: list[str] = []

    def __call__(self, name: str, op: str, commit: str) -> Marks:
        """Raises ValueError if neither the history nor the page knows."""
        commit = commit.removesuffix("-dirty")
        if op not in SOURCES:
            raise ValueError(
                f"{name}: nobody says which kernels {op} has: add it to benchmarks/kernel_sources.py"
            )
        equal = self._history.contains(commit, EQUAL_RESTS)
        if equal is not None:
            equal = equal or operator_of(op) not in OPS  # only bench rests between candidates
            share = 100 * self._history.changed(op, commit)
            return Marks("same" if share == 0 else "<1 %" if share < 1 else f"{share:.0f} %", equal)
        if (name, op) not in self._page:
            raise ValueError(f"{name}: its commit {commit} is not in this history: fetch all of it")
        self.unchecked.append(name)
        return self._page[name, op]


@dataclass(frozen=True)
class Other:
    """A file that has no rows of bench: throughput of vLLM, models of Megatron-Core, or losses of a
    training.
    """

    source: Source
    data: dict[str, Any]


@dataclass
class Measurement:
    """Rows of one operator from files of one commit, which share no row."""

    op: str
    suite: str
    tp: int
    gpus: int
    records: list[Record]
    sources: list[Source]
    rows: list[Row]

    @property
    def derived(self) -> list[Derived]:
        record = self.records[0]
        return [derive(row, record.link_gb_per_s, with_floor=record.with_floor) for row in self.rows]

    @property
    def summary(self) -> Summary:
        return summarise(self.rows, self.derived, BARS.get(self.op, Bar(row=1.0)))

    @property
    def date(self) -> str:
        return max(source.date for source in self.sources)

    @property
    def commit(self) -> str:
        return self.sources[0].commit[:7]

    @property
    def marks(self) -> Marks:
        return self.sources[0].marks

    @property
    def complete(self) -> bool:
        return all(record.complete for record in self.records)

    @property
    def covered(self) -> int:
        """How many shapes of the suite it has."""
        return len({shape(self.op, row) for row in self.rows} & suite_shapes(self.op, self.suite, self.tp))

    @property
    def shapes(self) -> int:
        return len(suite_shapes(self.op, self.suite, self.tp))

    @property
    def is_full(self) -> bool:
        return self.covered == self.shapes


Shape = tuple[str, str, int, str]


def shape(op: str, row: Any) -> Shape:
    """What a suite asks for. Of a mixture of experts the layout counts, and one imbalance is enough."""
    return row.model, row.pattern, row.m, row.variant.split()[0] if op.startswith("moe") else ""


@cache
def suite_shapes(op: str, suite: str, tp: int) -> frozenset[Shape]:
    bench_op = operator_of(op)
    spec = OPS[bench_op]
    if spec.rows:
        problems = spec.rows(Request(bench_op, cuda=True, world=tp))
    else:
        problems = load(suite).problems(bench_op, spec.patterns)
    return frozenset(shape(op, problem) for problem in problems)


def operator_of(kind: str) -> str:
    """The operator of bench whose rows have this Row.kind."""
    return kind.removesuffix(FP8_KIND)


def read(folder: Path, judge: Judge) -> tuple[list[Measurement], list[Other]]:
    """All files of a folder, without its subfolders. Raises ValueError if one is of no known kind."""
    found: list[Measurement] = []
    others: list[Other] = []
    for path in sorted(folder.glob("*.json")):
        data = read_json(path)
        kind = next(
            (kind.name for kind in KINDS if isinstance(data, dict) and data and kind.is_one(data)), ""
        )
        if kind == "a result of bench":
            _add(found, records.from_json(data), path.name, judge)
        elif kind == "a result of vllm_throughput.py":
            op = "vllm_moe" if data["settings"]["model"].get("experts") else "vllm"
            machine = f"{data['machine']['gpu_count']}× {data['machine']['gpu']}"
            source = _source(path.name, op, data["commit"], data["date"], machine, len(data["runs"]), judge)
            others.append(Other(source, data))
        elif kind == "a result of megatron_model.py":
            experts = any(model["shape"]["experts"] for model in data["models"])
            op = "megatron_model_moe" if experts else "megatron_model"
            machine = f"{data['machine']['gpu_count']}× {data['machine']['gpu']}"
            source = _source(path.name, op, data["commit"], data["date"], machine, len(data["models"]), judge)
            others.append(Other(source, data))
        elif kind == "losses of a training":
            named = _NAMED_COMMIT.search(path.name)
            if named is None:
                raise ValueError(f"{path.name}: losses name their commit in the name of the file")
            machine = path.name.split("-")[-2].replace("x", "× NVIDIA ")
            others.append(
                Other(_source(path.name, "losses", named[1], path.name[:10], machine, len(data), judge), data)
            )
        else:
            known = "bench, vllm_throughput.py, megatron_model.py or a training"
            raise ValueError(f"{path.name}: no result of {known}: {kind or 'unknown'}")
    return found, others


def _source(name: str, op: str, commit: str, date: str, machine: str, rows: int, judge: Judge) -> Source:
    return Source(name, op, commit, date, machine, rows, judge(name, op, commit))


def _add(found: list[Measurement], record: Record, name: str, judge: Judge) -> None:
    """Adds each operator of a file to the measurement of its commit that lacks its rows, or as a new one."""
    machine = f"{record.machine['gpu_count']}× {record.machine['gpu']}"
    for op in dict.fromkeys(row.kind for row in record.rows):
        rows = [row for row in record.rows if row.kind == op]
        source = _source(name, op, record.commit, record.date, machine, len(rows), judge)
        tp, gpus = rows[0].tp, record.machine["gpu_count"]
        keys = {_key(row) for row in rows}
        for other in found:
            same = (other.op, other.suite, other.tp, other.gpus) == (op, record.suite, tp, gpus)
            if same and other.commit == record.commit[:7] and keys.isdisjoint(map(_key, other.rows)):
                other.records.append(record)
                other.sources.append(source)
                other.rows.extend(rows)
                break
        else:
            found.append(Measurement(op, record.suite, tp, gpus, [record], [source], list(rows)))


def _key(row: Row) -> tuple[str, str, int, str]:
    return row.model, row.pattern, row.m, f"{row.variant} {row.scales}"


def ranked(measurements: Iterable[Measurement]) -> list[Measurement]:
    """First the newest of those that cover most of the suite, then the others by date."""
    newest = sorted(measurements, key=lambda m: m.date, reverse=True)
    first = max(newest, key=lambda m: m.covered)  # the first of equals, which is the newest
    return [first, *(m for m in newest if m is not first)]
