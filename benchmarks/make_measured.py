"""Writes what the vLLM plugin decides by (flux.integrations.vllm.thresholds) from benchmarks/results.

    python benchmarks/make_measured.py

Of each problem of gemm_ar the newest measurement counts. The run that compares large sums is added: it is of
two ranks, and its peer is cuBLAS and NCCL. Of whole models in vLLM the newest run of each number of columns
in the residual counts, on GPUs of the same architecture with as many SMs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flux.integrations.vllm.thresholds import SHIPPED, Decode, Prefill, Row, Sum, measured_in

RESULTS = Path(__file__).parent / "results"
LARGE = RESULTS / "tuning" / "2026-11-22-gemm_ar-composed-tp2-2xH200.json"
# A larger m is not in the suite of gemm_ar.
LARGE_FROM = 256


def measured() -> dict[str, Any]:
    newest: dict[tuple[int, int, int, int, str], Row] = {}
    sums: dict[tuple[int, int], Sum] = {}
    machines = set()
    # Thresholds are those of one machine.
    for path in sorted(
        path for op in ("gemm_ar", "all_reduce", "decode") for path in RESULTS.glob(f"*-{op}-*xH200-*.json")
    ):
        results = json.loads(path.read_text())
        machines.add((results["machine"]["arch"], results["machine"]["sms"]))
        found = measured_in(results)
        # Of scales that count as one kind the slowest.
        for row in sorted(found.rows, key=lambda row: -row.speedup):
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
        # Of shapes with as many bytes the slowest.
        slowest = {(s.ranks, s.nbytes): s for s in sorted(found.sums, key=lambda s: -s.speedup)}
        sums |= slowest
    for shape in json.loads(LARGE.read_text())["shapes"]:
        if shape["m"] > LARGE_FROM:
            row = Row(2, shape["n"], shape["k"], shape["m"], round(speedup_of_large(shape), 3))
            newest[row.ranks, row.n, row.k, row.m, row.scales] = row
    ((arch, sms),) = machines
    rows = [
        [r.ranks, r.n, r.k, r.m, r.speedup, *([r.scales] if r.scales else [])]
        for _, r in sorted(newest.items())
    ]
    models = of_models((arch, sms))
    return {
        "machine": {"arch": arch, "sms": sms},
        "rows": rows,
        "sums": [[s.ranks, s.nbytes, s.speedup] for _, s in sorted(sums.items())],
        "prefills": [[p.ranks, p.hidden, p.speedup] for p in models if isinstance(p, Prefill)],
        "decodes": [[d.ranks, d.hidden, d.tokens, d.speedup] for d in models if isinstance(d, Decode)],
    }


def of_models(machine: tuple[str, int]) -> list[Prefill | Decode]:
    """Of models that flux made sequence parallel where vLLM, by its defaults, fuses."""
    newest: dict[tuple[Any, ...], Prefill | Decode] = {}
    for results in sorted(
        (json.loads(path.read_text()) for path in RESULTS.glob("*-vllm-defaults-*.json")),
        key=lambda each: str(each["date"]),
    ):
        model, ranks = results["settings"]["model"], results["settings"]["tp"]
        here = (results["machine"]["arch"], results["machine"]["sms"]) == machine
        if not here or model["fp8"] or model["experts"] or "stock-graph" not in results["runs"]:
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


def text() -> str:
    """The file's contents, a line for each row."""
    data = measured()
    lists = {
        name: ",\n    ".join(map(json.dumps, data[name])) for name in ("rows", "sums", "prefills", "decodes")
    }
    told = ",\n  ".join(f'"{name}": [\n    {rows}\n  ]' for name, rows in lists.items())
    return f'{{\n  "machine": {json.dumps(data["machine"])},\n  {told}\n}}\n'


if __name__ == "__main__":
    SHIPPED.write_text(text())
