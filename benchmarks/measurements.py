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


def judging(history: History) -> Judge:
    """Marks of files by the history. Raises ValueError where it lacks commits, as in a shallow clone."""

    def judge(name: str, op: str, commit: str) -> Marks:
        commit = commit.removesuffix("-dirty")
        if op not in SOURCES:
            raise ValueError(
                f"{name}: nobody says which kernels {op} has: add it to benchmarks/kernel_sources.py"
            )
        equal = history.contains(commit, EQUAL_RESTS)
        if equal is None:
            raise ValueError(f"{name}: its commit {commit} is not in this history: fetch all of it")
        share = 100 * history.changed(op, commit)
        changed = "same" if share == 0 else "<1 %" if share < 1 else f"{share:.0f} %"
        return Marks(changed, equal or operator_of(op) not in OPS)  # only bench rests between candidates

    return judge


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


# Of results of whole models by kind: their name, what they list, and whether they are of experts.
_WHOLE: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "a result of vllm_throughput.py": (
        *("vllm", "runs"),
        lambda data: bool(data["settings"]["model"].get("experts")),
    ),
    "a result of megatron_model.py": (
        *("megatron_model", "models"),
        lambda data: any(model["shape"]["experts"] for model in data["models"]),
    ),
}


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
        elif kind in _WHOLE:
            op, parts, has_experts = _WHOLE[kind]
            op = f"{op}_moe" if has_experts(data) else op
            where = (data["commit"], data["date"], _machine(data["machine"]), len(data[parts]))
            others.append(Other(_source(path.name, op, *where, judge), data))
        elif kind == "losses of a training":
            named = _NAMED_COMMIT.search(path.name)
            if named is None:
                raise ValueError(f"{path.name}: losses name their commit in the name of the file")
            machine = path.name.split("-")[-2].replace("x", "× NVIDIA ")
            where = (named[1], path.name[:10], machine, len(data))
            others.append(Other(_source(path.name, "losses", *where, judge), data))
        else:
            known = "bench, vllm_throughput.py, megatron_model.py or a training"
            raise ValueError(f"{path.name}: no result of {known}: {kind or 'unknown'}")
    return found, others


def _machine(about: dict[str, Any]) -> str:
    return f"{about['gpu_count']}× {about['gpu']}"


def _source(name: str, op: str, commit: str, date: str, machine: str, rows: int, judge: Judge) -> Source:
    return Source(name, op, commit, date, machine, rows, judge(name, op, commit))


def _add(found: list[Measurement], record: Record, name: str, judge: Judge) -> None:
    """Adds each operator of a file to the measurement of its commit that lacks its rows, or as a new one."""
    machine = _machine(record.machine)
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
