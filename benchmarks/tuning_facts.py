"""Writes the measurements by which plans choose (python/flux/tuning/shipped) from benchmarks/results.

    python benchmarks/tuning_facts.py

Of each problem the newest measurement counts, also if the kernels have changed since; it is then marked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from flux.bench import record
from flux.bench.model import Row
from flux.tune.facts import facts_of
from flux.tuning import store
from flux.tuning.facts import Fact
from flux.tuning.machine import Machine
from kernel_sources import SOURCES, History  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LARGE = RESULTS / "tuning" / "2026-11-22-gemm_ar-composed-tp2-2xH200.json"
FILE = store.SHIPPED / "sm90-132-4.9TBs.json"
# HBM3e: bits of the bus; the files have its clock. NVLink-4: 18 links.
_BUS_BITS, _LINK_GB_PER_S = 6144, 478.1


def measured(results: Path = RESULTS) -> Iterator[tuple[record.Record, str, Row, list[Fact]]]:
    """Every row of a result file with what it says about ways, and the name of the file, oldest first."""
    history = History(ROOT)
    read = [(json.loads(path.read_text()), path) for path in sorted(results.glob("*.json"))]
    files = [(data, path) for data, path in read if "rows" in data and data.get("device") == "cuda"]
    for data, path in sorted(files, key=lambda each: str(each[0]["date"])):
        result = record.from_json(data)
        tuned = result.settings.get("tuning", "off") != "off"
        for row in result.rows:
            op = row.op if row.op in SOURCES else "gemm"
            older = not history.has(result.commit) or history.changed(op, result.commit) > 0
            facts = [replace(fact, source=path.name, older=older) for fact in facts_of(row, tuned)]
            yield result, path.name, row, facts
    history.close()


def of_large_sums() -> list[Fact]:
    """gemm_ar by exchange and composed, which no suite measures side by side."""
    names = {"fused": "exchange", "composed": "composed", "torch": "cublas+nccl"}
    facts = []
    for shape in json.loads(LARGE.read_text())["shapes"]:
        us = {way: shape[name] for way, name in names.items() if name in shape}
        where = (shape["m"], shape["n"], shape["k"])
        facts.append(Fact("gemm_ar", 2, 2, *where, us, source=f"tuning/{LARGE.name}", older=True))
    return facts


def newest() -> tuple[Machine, list[Fact]]:
    """The machine of all files, and the newest measurement of each problem."""
    found = {fact.problem: fact for fact in of_large_sums()}
    machines = set()
    for result, _, _, facts in measured():
        about = result.machine
        clocks = about["gpus_idle"][0]
        memory = round(2 * clocks["mem_max_mhz"] * _BUS_BITS / 8e3, 1)
        machines.add(Machine(about["arch"], about["sms"], clocks["sm_max_mhz"], memory, _LINK_GB_PER_S))
        for fact in facts:
            # Two parts of a fact may have been measured in rows of two operators.
            found.pop(fact.problem, None)
            found[fact.problem] = fact
    (machine,) = machines
    return machine, [found[problem] for problem in sorted(found)]


def text() -> str:
    """The file's contents."""
    machine, facts = newest()
    return store.to_json(machine, facts, what="from benchmarks/results, by benchmarks/tuning_facts.py")


if __name__ == "__main__":
    FILE.write_text(text())
