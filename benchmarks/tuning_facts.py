"""Writes the measurements by which plans choose, and vLLM's plugin (flux.integrations.vllm.thresholds), from
benchmarks/results into python/flux/measured/shipped.

    python benchmarks/tuning_facts.py

Of each problem the newest measurement counts, also if the kernels have changed since; it is then marked. Of
whole models in vLLM the newest run of each number of columns in the residual counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flux import _native
from flux.bench import record
from flux.bench.tune import facts_of
from flux.integrations.vllm import thresholds
from flux.integrations.vllm.thresholds import Decode, Prefill
from flux.measured import files as store
from flux.measured.machine import Machine, of_result
from flux.measured.times import Fact
from flux.plan.sums import KERNEL_ROWS
from kernel_sources import SOURCES, History

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LARGE = RESULTS / "tuning" / "2026-11-22-gemm_ar-composed-tp2-2xH200.json"
FEW_ROWS = RESULTS / "tuning" / "2026-11-23-few-rows-1xH200.json"
PAIRS_SINCE = "2026-11-27"  # in results
FEW_ROWS_AT = "2026-11-23T03:36"  # of its commit: results of the same day are newer
LARGE_FROM = 256  # a larger m is not in the suite of gemm_ar
# m, n, k of sums of up to 256 rows that were measured with tiles that are gone.
OTHER_TILES = {(m, *weight) for m in (128, 256) for weight in ((8192, 14336), (12288, 24576))}
OTHER_TILES |= {(256, 8192, 7168), (256, 12288, 12288)}
# Of results that do not have them: bits of the bus by the memory's clock in MHz (HBM3e and HBM3), and the
# rate of NVLink-4, 18 links.
_BUS_BITS, _LINK_GB_PER_S = {3201: 6144, 2619: 5120}, 478.1
FILE = store.SHIPPED / "sm90-132-4.9TBs.json"  # of the machine with most measurements


def machine_of(about: dict[str, Any]) -> Machine:
    found = of_result(about, "a result")
    if found.memory_gb_per_s is not None:
        return found
    clocks = about["gpus_idle"][0]
    memory_mhz = clocks["mem_max_mhz"]
    memory = round(2 * memory_mhz * _BUS_BITS[memory_mhz] / 8e3, 1)
    return Machine(found.arch, found.sms, clocks["sm_max_mhz"], memory, _LINK_GB_PER_S)


def measured(history: History) -> Iterator[tuple[str, Machine, list[Fact]]]:
    """Of every row of a result file its date, machine, and what it says about ways, oldest first."""
    read = [(json.loads(path.read_text()), path) for path in sorted(RESULTS.glob("*.json"))]
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
            yield str(result.date), machine_of(result.machine), facts


def tuned(history: History) -> Iterator[tuple[str, Machine, list[Fact]]]:
    """Of every file of flux tune its date, machine, and facts."""
    for path in sorted((RESULTS / "tuning").glob("*-tune-*.json")):
        machine, facts = store.read(path)
        about = json.loads(path.read_text())
        source, commit = f"tuning/{path.name}", about["commit"]
        told = [replace(f, source=source, older=_is_older(history, f.op, commit)) for f in facts]
        yield about["date"], machine, told


def of_large_sums() -> list[Fact]:
    """gemm_ar by exchange and composed, which no suite measures side by side."""
    names = {"parts": "exchange", "composed": "composed", "torch": "cublas+nccl"}
    facts = []
    for shape in json.loads(LARGE.read_text())["rows"]:
        us = {way: shape[name] for way, name in names.items() if name in shape}
        where = (shape["m"], shape["n"], shape["k"])
        facts.append(Fact("gemm_ar", 2, 2, *where, us, source=f"tuning/{LARGE.name}", older=True))
    return facts


def _of_kernels_that_are(fact: Fact) -> Fact:
    """Without times of gemm_ar's kernels that are gone. With many rows, those were a product and its sum."""
    if not fact.op.startswith("gemm_ar") or "kernel" not in fact.us:
        return fact
    kept = fact.op in ("gemm_ar", "gemm_ar_norm") and fact.m in KERNEL_ROWS
    if kept and (fact.m, fact.n, fact.k) not in OTHER_TILES:
        return fact
    us = {way: time for way, time in fact.us.items() if way != "kernel"}
    if fact.m >= KERNEL_ROWS.stop:
        us.setdefault("parts", fact.us["kernel"])
    return replace(fact, us=us)


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


def of_vllm(machine: Machine) -> dict[str, list[dict[str, Any]]]:
    """What was measured on such a machine, and the run of large sums: two ranks against cuBLAS and NCCL."""
    newest: dict[tuple[int, int, int, int, str], thresholds.Row] = {}
    sums: dict[tuple[int, int], thresholds.Sum] = {}
    for path in sorted(
        path for op in ("gemm_ar", "all_reduce", "decode") for path in RESULTS.glob(f"*-{op}-*")
    ):
        if machine_of(json.loads(path.read_text())["machine"]).difference(machine):
            continue
        _, found = thresholds.measured_in(path)
        # Of scales that count as one kind the slowest.
        for row in sorted(found.rows, key=lambda row: -row.speedup):
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
        # Of shapes with as many bytes the slowest.
        slowest = {(s.ranks, s.nbytes): s for s in sorted(found.sums, key=lambda s: -s.speedup)}
        sums |= slowest
    for shape in json.loads(LARGE.read_text())["rows"]:
        if shape["m"] > LARGE_FROM:
            ours = min(shape[way] for way in ("exchange", "composed") if way in shape)
            where = (2, shape["n"], shape["k"], shape["m"])
            row = thresholds.Row(*where, round(shape["cublas+nccl"] / ours, 3))
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
    models = of_models(machine)
    found = thresholds.Measured(
        tuple(row for _, row in sorted(newest.items())),
        tuple(each for _, each in sorted(sums.items())),
        tuple(each for each in models if isinstance(each, Prefill)),
        tuple(each for each in models if isinstance(each, Decode)),
    )
    return {
        name: [{key: value for key, value in each.items() if value != ""} for each in entries]
        for name, entries in asdict(found).items()
        if name != "source"
    }


def of_models(machine: Machine) -> list[Prefill | Decode]:
    """Of models that flux made sequence parallel where vLLM, by its defaults, fuses."""
    newest: dict[tuple[Any, ...], Prefill | Decode] = {}
    for results in sorted(
        (json.loads(path.read_text()) for path in RESULTS.glob("*-vllm-defaults-*.json")),
        key=lambda each: str(each["date"]),
    ):
        model, ranks = results["settings"]["model"], results["settings"]["tp"]
        if (
            machine_of(results["machine"]).difference(machine)
            or model["fp8"]
            or model["experts"]
            or "stock-graph" not in results["runs"]
        ):
            continue
        # Runs that were told from how many tokens on say nothing of flux's own choice.
        ours = [run for run in results["runs"] if run.startswith("flux") and run.endswith("-graph")]
        ours = [run for run in ours if "-from" not in run and "-seq" not in run]
        # Without vLLM's fusion all batches are flux's; by default prefill is, and some of decoding is vLLM's.
        unfused = [run for run in ours if "-unfused" in run]
        for metric, stock in results["runs"]["stock-graph"]["tokens_per_s"].items():
            what, _, tokens = metric.partition(" ")
            asked = {"prefill": unfused or ours, "decode": unfused}.get(what, [])
            rates = [r for run in asked if (r := results["runs"][run]["tokens_per_s"].get(metric))]
            if not rates:
                continue
            speedup, hidden = round(min(rates) / stock, 3), model["hidden"]
            shape = (ranks, hidden, int(tokens or 0))
            newest[what, *shape] = (
                Decode(ranks, hidden, int(tokens), speedup) if tokens else Prefill(ranks, hidden, speedup)
            )
    return [newest[key] for key in sorted(newest)]


def newest() -> dict[Machine, list[Fact]]:
    """The newest measurement of each problem, by machine."""
    history = History(ROOT)
    told = list(measured(history))
    most = next(machine for _, machine, _ in told if name_of(machine) == FILE.name)
    told += [*tuned(history), ("", most, of_large_sums()), (FEW_ROWS_AT, most, of_few_rows())]
    of_all: dict[Machine, dict[Any, Fact]] = {}
    for _, here, facts in sorted(told, key=lambda each: each[0]):
        # flux tune does not ask for the speed of links.
        machine = next((known for known in of_all if known.difference(here) is None), here)
        found = of_all.setdefault(machine, {})
        for fact in map(_of_kernels_that_are, facts):
            if len(fact.us) < 2:
                continue
            # Two parts of a fact may have been measured in rows of two operators.
            found.pop(fact.problem, None)
            found[fact.problem] = fact
    return {machine: [found[problem] for problem in sorted(found)] for machine, found in of_all.items()}


def name_of(machine: Machine) -> str:
    memory = (machine.memory_gb_per_s or 0) / 1e3
    return f"{machine.arch.replace('_', '')}-{machine.sms}-{memory:.1f}TBs.json"


def texts() -> dict[str, str]:
    what = "from benchmarks/results, by benchmarks/tuning_facts.py"
    found = {}
    for machine, facts in newest().items():
        name = name_of(machine)
        # Thresholds are known of one machine.
        vllm = of_vllm(machine) if name == FILE.name else None
        found[name] = store.to_json(machine, facts, vllm, what=what)
    return found


if __name__ == "__main__":
    for name, text in texts().items():
        (store.SHIPPED / name).write_text(text)
