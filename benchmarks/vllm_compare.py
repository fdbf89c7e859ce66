"""Whether the engines of vllm_throughput.py say the same, and whether each did what its name says."""

from __future__ import annotations

import math
import statistics
from typing import Any

# For what flux is called, and where vllm_probe.Probe tells which layers ask for it.
KINDS = {"linear": "row_parallel", "experts": "experts"}


def compare_forced(
    prompts: list[list[int]], ours: list[list[dict[int, float]]], theirs: list[list[dict[int, float]]]
) -> dict[str, Any]:
    """Log-probabilities at every position but the first of prompts: how often both find the same token most
    probable, and how far the prompt's own token is apart. NaN and infinities are counted and left out.
    """
    same, apart, not_finite = 0, [], 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        for token, x, y in zip(prompt[1:], a, b, strict=True):
            if all(map(math.isfinite, [*x.values(), *y.values()])):
                same += max(x, key=x.__getitem__) == max(y, key=y.__getitem__)
                apart.append(abs(x[token] - y[token]))
            else:
                not_finite += 1
    result: dict[str, Any] = {"positions": len(apart), "not_finite": not_finite}
    if apart:
        result |= {
            "first_equal_percent": 100 * same / len(apart),
            "mean_apart": statistics.fmean(apart),
            "max_apart": max(apart),
        }
    return result


def pairs_of(runs: list[str]) -> list[tuple[str, str]]:
    """(stock, another run of its mode), and both stocks."""
    pairs = [(f"stock-{run.rsplit('-', 1)[1]}", run) for run in runs]
    pairs = [(stock, run) for stock, run in pairs if stock != run and stock in runs]
    both = ("stock-graph", "stock-eager")
    return pairs + ([both] if set(both) <= set(runs) else [])


def compare_all(runs: dict[str, dict[str, Any]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Of all pairs, how far apart are what both runs said."""
    said = {run: data["forced"] for run, data in runs.items() if "forced" in data}
    return [
        {"runs": [a, b], "forced": compare_forced(prompts, said[a], said[b])} for a, b in pairs_of(list(said))
    ]


def faults_of(
    runs: dict[str, Any], comparisons: list[dict[str, Any]], cpu: bool, defaults: bool = False
) -> list[str]:
    """What makes a result worth nothing, though its engines ran. By default, flux may leave all to vLLM."""
    faults, weights = [], set()
    for run, data in runs.items():
        states = zip(data.get("state_at_start", []), data.get("state", []), strict=False)
        for rank, (start, end) in enumerate(states):
            weights.add((rank, end["weights"]))
            calls, before = end["flux_calls"], start["flux_calls"]
            total = calls["linear"] + calls["experts"]
            if run.startswith("stock") and total:
                faults.append(f"{run}: rank {rank} called flux {total} times")
            # What came before the start was vLLM measuring its memory and capturing graphs.
            idle = [kind for kind in KINDS if end[KINDS[kind]] and calls[kind] <= before[kind]]
            if run.startswith("flux") and not defaults and (idle or not end["flux_through"]):
                which = f" for {' and '.join(idle)}" if idle else ""
                faults.append(f"{run}: rank {rank} did not run flux's kernels{which}")
    if len(weights) != len({rank for rank, _ in weights}):
        faults.append("the runs don't have the same weights")
    for pair in comparisons:
        if pair["forced"]["not_finite"]:
            faults.append(f"{pair['runs']}: log-probabilities that are not finite")
        if cpu and pair["forced"].get("first_equal_percent") != 100:
            faults.append(f"{pair['runs']}: other tokens, in float32")
    return faults
