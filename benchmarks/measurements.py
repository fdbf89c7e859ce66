"""The files of a results folder as measurements: which rows belong together, which are the newest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flux._files import read_json
from flux.bench import record as records
from flux.bench.cases import OPS
from flux.bench.cases.moe import MODELS
from flux.bench.model import FP8_KIND, Bar, Derived, Row, Summary, summarise
from flux.bench.record import Record
from flux.bench.report import BARS
from flux.bench.suites import Request, load
from kernel_sources import EQUAL_RESTS, SOURCES, History

# The standard deviation in the variant of a row with experts.
_SPREAD = re.compile(r"std ([\d.]+)")
# Packages that have peers of some operators.
_PACKAGES = {"vllm": "vLLM", "flashinfer-python": "FlashInfer"}
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

    @property
    def on(self) -> str:
        """The machine, without the maker of its GPUs."""
        return self.machine.replace("NVIDIA ", "")


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


@dataclass(frozen=True)
class Measured:
    """A row, and the file that it is from. absent: peers that the file's machine did not have."""

    row: Row
    derived: Derived
    source: Source
    absent: tuple[str, ...] = ()


@dataclass
class Group:
    """The newest measurement of each row of an operator on one kind of machine.

    withdrawn: rows that say nothing about use, and are left out.
    """

    op: str
    suite: str
    tp: int
    machine: str
    rows: list[Measured]
    withdrawn: int = 0

    @property
    def where(self) -> str:
        gpus, _, name = self.machine.partition("× ")
        ranks = "" if int(gpus) == self.tp else f", shapes of one of {self.tp} ranks"
        return f"{gpus}× {name.removeprefix('NVIDIA ').split()[0]}{ranks}"

    @property
    def summary(self) -> Summary:
        rows, derived = [found.row for found in self.rows], [found.derived for found in self.rows]
        return summarise(rows, derived, BARS.get(self.op, Bar(row=1.0)))

    @property
    def date(self) -> str:
        return max(found.source.date for found in self.rows)

    @property
    def covered(self) -> int:
        """How many shapes of the suite it has."""
        if self.suite == OTHERS:
            return len(self.rows)
        mine = {shape(self.op, found.row) for found in self.rows}
        return len(mine & suite_shapes(self.op, self.suite, self.tp))

    @property
    def shapes(self) -> int:
        return self.covered if self.suite == OTHERS else len(suite_shapes(self.op, self.suite, self.tp))

    @property
    def is_full(self) -> bool:
        return self.covered == self.shapes


Shape = tuple[str, str, int, str]


def shape(op: str, row: Any) -> Shape:
    """What a suite asks for. Of a mixture of experts the layout counts, and one imbalance is enough."""
    return row.model, row.pattern, row.m, row.variant.split()[0] if op.startswith("moe") else ""


OTHERS = "shapes of no suite"  # given by --n and --k


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


# Of results of whole models by what they list: their name, and whether they are of experts.
_WHOLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "runs": ("vllm", lambda data: bool(data["settings"]["model"].get("experts"))),
    "models": ("megatron_model", lambda data: any(model["shape"]["experts"] for model in data["models"])),
}


def read(folder: Path, judge: Judge) -> tuple[list[Group], list[Other]]:
    """All files of a folder, without its subfolders. Raises ValueError if one is of no known kind."""
    runs: list[tuple[Record, str]] = []
    others: list[Other] = []
    for path in sorted(folder.glob("*.json")):
        data = read_json(path)
        if not isinstance(data, dict):
            raise ValueError(f"{path.name}: no result")
        if "rows" in data and "suite" in data:
            runs.append((records.from_json(data), path.name))
        elif parts := next((key for key in _WHOLE if key in data), ""):
            op, has_experts = _WHOLE[parts]
            op = f"{op}_moe" if has_experts(data) else op
            where = (data["commit"], data["date"], _machine(data["machine"]), len(data[parts]))
            others.append(Other(_source(path.name, op, *where, judge), data))
        elif data and all(isinstance(curve, list) for curve in data.values()):
            named = _NAMED_COMMIT.search(path.name)
            if named is None:
                raise ValueError(f"{path.name}: losses name their commit in the name of the file")
            machine = path.name.split("-")[-2].replace("x", "× NVIDIA ")
            where = (named[1], path.name[:10], machine, len(data))
            others.append(Other(_source(path.name, "losses", *where, judge), data))
        else:
            known = "bench, vllm_throughput.py, megatron_model.py or a training"
            raise ValueError(f"{path.name}: no result of {known}")
    groups: dict[tuple[str, str, int, str], Group] = {}
    for record, name in sorted(runs, key=lambda run: run[0].date, reverse=True):
        _add(groups, record, name, judge)
    return sorted(groups.values(), key=lambda group: (group.op, group.machine, group.suite)), others


def _machine(about: dict[str, Any]) -> str:
    return f"{about['gpu_count']}× {about['gpu']}"


def _source(name: str, op: str, commit: str, date: str, machine: str, rows: int, judge: Judge) -> Source:
    return Source(name, op, commit, date, machine, rows, judge(name, op, commit))


def _add(groups: dict[tuple[str, str, int, str], Group], record: Record, name: str, judge: Judge) -> None:
    """Adds the rows of a file that no newer one has."""
    machine, packages = _machine(record.machine), record.machine.get("peers") or {}
    absent = tuple(name for package, name in _PACKAGES.items() if package not in packages)
    for op in dict.fromkeys(row.kind for row in record.rows):
        rows = [row for row in record.rows if row.kind == op]
        source = _source(name, op, record.commit, record.date, machine, len(rows), judge)
        suite = OTHERS if rows[0].model == "custom" else record.suite
        key = (op, suite, rows[0].tp, machine)
        group = groups.setdefault(key, Group(*key, rows=[]))
        have = {_key(found.row) for found in group.rows}
        for row in rows:
            if starves(row):
                group.withdrawn += 1
            elif _key(row) not in have:
                group.rows.append(Measured(row, record.derived(row), source, absent))


def _key(row: Row) -> tuple[str, str, int, str]:
    return row.model, row.pattern, row.m, f"{row.variant} {row.scales}"


def starves(row: Row) -> bool:
    """Whether loads of experts spread by more than the mean load, so that half of them get no token."""
    spread = _SPREAD.search(row.variant)
    model = MODELS.get(row.model)
    return bool(spread and model) and float(spread[1]) > 1 / model.experts
