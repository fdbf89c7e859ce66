"""By what the vLLM plugin decides (flux.integrations.vllm.thresholds), from benchmarks/results:
benchmarks/tuning_facts.py writes it beside the facts of plans.

Of each problem of gemm_ar the newest measurement counts. The run that compares large sums is added: it is of
two ranks, and its peer is cuBLAS and NCCL. Of whole models in vLLM the newest run of each number of columns
in the residual counts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flux.integrations.vllm.thresholds import Decode, Measured, Prefill, Row, Sum, measured_in
from flux.measured.machine import Machine, of_result

RESULTS = Path(__file__).parent / "results"
LARGE = RESULTS / "tuning" / "2026-11-22-gemm_ar-composed-tp2-2xH200.json"
# A larger m is not in the suite of gemm_ar.
LARGE_FROM = 256
# Of results that do not have them: bits of the bus by the memory's clock in MHz (HBM3e and HBM3), and the
# rate of NVLink-4, 18 links.
_BUS_BITS, _LINK_GB_PER_S = {3201: 6144, 2619: 5120}, 478.1


def machine_of(about: dict[str, Any]) -> Machine:
    """The machine of a result, by what it says of it."""
    found = of_result(about, "a result")
    if found.memory_gb_per_s is not None:
        return found
    clocks = about["gpus_idle"][0]
    memory_mhz = clocks["mem_max_mhz"]
    memory = round(2 * memory_mhz * _BUS_BITS[memory_mhz] / 8e3, 1)
    return Machine(found.arch, found.sms, clocks["sm_max_mhz"], memory, _LINK_GB_PER_S)


def measured(machine: Machine) -> dict[str, list[dict[str, Any]]]:
    """What was measured on such a machine, the run of large sums included."""
    newest: dict[tuple[int, int, int, int, str], Row] = {}
    sums: dict[tuple[int, int], Sum] = {}
    for path in sorted(
        path for op in ("gemm_ar", "all_reduce", "decode") for path in RESULTS.glob(f"*-{op}-*")
    ):
        if machine_of(json.loads(path.read_text())["machine"]).difference(machine):
            continue
        _, found = measured_in(path)
        # Of scales that count as one kind the slowest.
        for row in sorted(found.rows, key=lambda row: -row.speedup):
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
        # Of shapes with as many bytes the slowest.
        slowest = {(s.ranks, s.nbytes): s for s in sorted(found.sums, key=lambda s: -s.speedup)}
        sums |= slowest
    for shape in json.loads(LARGE.read_text())["rows"]:
        if shape["m"] > LARGE_FROM:
            row = Row(2, shape["n"], shape["k"], shape["m"], round(speedup_of_large(shape), 3))
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
    models = of_models(machine)
    found = Measured(
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


def speedup_of_large(shape: dict[str, float]) -> float:
    """Of the faster of the two ways that gemm_ar chooses from."""
    return shape["cublas+nccl"] / min(shape[way] for way in ("exchange", "composed") if way in shape)
