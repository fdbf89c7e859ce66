"""Writes what the vLLM plugin decides by (flux.integrations.vllm.thresholds) from benchmarks/results.

    python benchmarks/make_measured.py

Of each problem of gemm_ar the newest measurement counts. The run that compares large sums is added: it is of
two ranks, and its peer is cuBLAS and NCCL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flux.integrations.vllm.thresholds import SHIPPED, Row, Sum, measured_in

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
        [*RESULTS.glob("*-gemm_ar-*xH200-*.json"), *RESULTS.glob("*-all_reduce-*xH200-*.json")]
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
    of_sums = [[s.ranks, s.nbytes, s.speedup] for _, s in sorted(sums.items())]
    return {"machine": {"arch": arch, "sms": sms}, "rows": rows, "sums": of_sums}


def speedup_of_large(shape: dict[str, float]) -> float:
    """Of the faster of the two ways that gemm_ar chooses from."""
    return shape["cublas+nccl"] / min(shape[way] for way in ("exchange", "composed") if way in shape)


def text() -> str:
    """The file's contents, a line for each row."""
    data = measured()
    rows, sums = (",\n    ".join(json.dumps(row) for row in data[name]) for name in ("rows", "sums"))
    machine = json.dumps(data["machine"])
    return f'{{\n  "machine": {machine},\n  "rows": [\n    {rows}\n  ],\n  "sums": [\n    {sums}\n  ]\n}}\n'


if __name__ == "__main__":
    SHIPPED.write_text(text())
