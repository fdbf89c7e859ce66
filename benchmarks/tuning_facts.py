"""Writes the measurements by which plans choose (python/flux/measured/shipped) from benchmarks/results.

    python benchmarks/tuning_facts.py

Of each problem the newest measurement counts, also if the kernels have changed since; it is then marked. What
vLLM's thresholds are made of is added by benchmarks/make_measured.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from flux import _native
from flux.bench import record
from flux.bench.model import Row
from flux.bench.tune import facts_of
from flux.measured import files as store
from flux.measured.machine import Machine
from flux.measured.times import Fact
from kernel_sources import SOURCES, History  # noqa: E402
from make_measured import machine_of  # noqa: E402
from make_measured import measured as measured_of_vllm

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LARGE = RESULTS / "tuning" / "2026-11-22-gemm_ar-composed-tp2-2xH200.json"
FEW_ROWS = RESULTS / "tuning" / "2026-11-23-few-rows-1xH200.json"
PAIRS_SINCE = "2026-11-27"  # in results
FEW_ROWS_AT = "2026-11-23T03:36"  # of its commit: results of the same day are newer
FILE = store.SHIPPED / "sm90-132-4.9TBs.json"  # of the machine with most measurements


def measured(results: Path = RESULTS) -> Iterator[tuple[record.Record, str, Row, list[Fact]]]:
    """Every row of a result file with what it says about ways, and the name of the file, oldest first."""
    history = History(ROOT)
    read = [(json.loads(path.read_text()), path) for path in sorted(results.glob("*.json"))]
    files = [(data, path) for data, path in read if "rows" in data and data.get("device") == "cuda"]
    for data, path in sorted(files, key=lambda each: str(each[0]["date"])):
        result = record.from_json(data)
        tuned = result.settings.get("tuning", "off") != "off"
        for row in result.rows:
            older = _is_older(history, row.kind, result.commit)
            # Pairs of k-blocks made flux's fp8 products sooner by up to 14 %, and torch's not.
            slower = row.kind == "gemm_fp8" and str(result.date) < PAIRS_SINCE
            told = () if slower else facts_of(row, tuned)
            facts = [replace(fact, source=path.name, older=older) for fact in told]
            yield result, path.name, row, facts
    history.close()


def tuned(results: Path = RESULTS) -> Iterator[tuple[str, Machine, list[Fact]]]:
    """Of every file of flux tune its date, machine, and facts."""
    history = History(ROOT)
    for path in sorted((results / "tuning").glob("*-tune-*.json")):
        machine, facts = store.read(path)
        about = json.loads(path.read_text())
        source, commit = f"tuning/{path.name}", about["commit"]
        told = [replace(f, source=source, older=_is_older(history, f.op, commit)) for f in facts]
        yield about["date"], machine, told
    history.close()


def of_large_sums() -> list[Fact]:
    """gemm_ar by exchange and composed, which no suite measures side by side."""
    names = {"kernel": "exchange", "composed": "composed", "torch": "cublas+nccl"}
    facts = []
    for shape in json.loads(LARGE.read_text())["rows"]:
        us = {way: shape[name] for way, name in names.items() if name in shape}
        where = (shape["m"], shape["n"], shape["k"])
        facts.append(Fact("gemm_ar", 2, 2, *where, us, source=f"tuning/{LARGE.name}", older=True))
    return facts


def _is_older(history: History, op: str, commit: str) -> bool:
    """Whether an operator's kernels have changed since a commit, or nobody knows the commit."""
    return not history.has(commit) or history.changed(op if op in SOURCES else "gemm", commit) > 0


def of_few_rows() -> list[Fact]:
    """gemm with the tile that the cost model chooses, and cuBLAS."""
    facts = []
    for shape in json.loads(FEW_ROWS.read_text())["rows"]:
        where = (shape["m"], shape["n"], shape["k"])
        chosen = _native.core.select_gemm(*where, False, 132).candidates[0][0]
        us = {"kernel": shape["flux"][chosen], "torch": shape["cublas"]}
        facts.append(Fact("gemm", 1, 2, *where, us, source=f"tuning/{FEW_ROWS.name}", older=True))
    return facts


def newest() -> dict[Machine, list[Fact]]:
    """The newest measurement of each problem, by machine."""
    told = [(str(result.date), machine_of(result.machine), facts) for result, _, _, facts in measured()]
    most = next(machine for _, machine, _ in told if name_of(machine) == FILE.name)
    told += [*tuned(), ("", most, of_large_sums()), (FEW_ROWS_AT, most, of_few_rows())]
    of_all: dict[Machine, dict[Any, Fact]] = {}
    for _, here, facts in sorted(told, key=lambda each: each[0]):
        # flux tune does not ask for the speed of links.
        machine = next((known for known in of_all if known.difference(here) is None), here)
        found = of_all.setdefault(machine, {})
        for fact in facts:
            # Two parts of a fact may have been measured in rows of two operators.
            found.pop(fact.problem, None)
            found[fact.problem] = fact
    return {machine: [found[problem] for problem in sorted(found)] for machine, found in of_all.items()}


def name_of(machine: Machine) -> str:
    memory = (machine.memory_gb_per_s or 0) / 1e3
    return f"{machine.arch.replace('_', '')}-{machine.sms}-{memory:.1f}TBs.json"


def texts() -> dict[str, str]:
    """The contents of each file, by its name."""
    what = "from benchmarks/results, by benchmarks/tuning_facts.py"
    found = {}
    for machine, facts in newest().items():
        name = name_of(machine)
        # Thresholds are known of one machine.
        vllm = measured_of_vllm(machine) if name == FILE.name else None
        found[name] = store.to_json(machine, facts, vllm, what=what)
    return found


if __name__ == "__main__":
    for name, text in texts().items():
        (store.SHIPPED / name).write_text(text)
