"""What the results of whole models say: of vllm_throughput.py and megatron_model.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

PASSES = ("forward", "training")
GRAPH = "graph"  # a training step from a CUDA graph: not in every result, nor of every candidate
_ENGINE = "Transformer Engine"


def over_stock(runs: dict[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Of each run and metric: tokens per second, and how many times those of stock in the same mode."""
    return {
        name: {
            metric: (rate, rate / stock[metric] if metric in stock else None)
            for metric, rate in run["tokens_per_s"].items()
        }
        for name, run in runs.items()
        for stock in [runs.get(f"stock-{name.rsplit('-', 1)[1]}", {}).get("tokens_per_s", {})]
    }


def waited(samples: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Seconds to the first token of a trace's requests, and for each further one: of both, over its samples,
    the medians of the median and of the 99th percentile.
    """

    def middle(key: str, part: str) -> float:
        return statistics.median(float(each[key][part]) for each in samples)

    return [(middle(key, "median"), middle(key, "p99")) for key in ("first_s", "further_s")]


def title(model: dict[str, Any], tp: int) -> str:
    shape = model["shape"]
    parts = [
        model["name"].partition(":")[0],
        f"{shape['layers']} layers",
        f"{shape['sequence']} tokens",
        f"TP {tp}",
    ]
    return " · ".join([*parts, *[f"experts in {model['ep']} slices"] * (model["ep"] > 1)])


def medians(model: dict[str, Any], kind: str) -> dict[str, float]:
    """Milliseconds of each candidate that has this pass."""
    samples = {name: run["samples_ms"].get(kind) for name, run in model["candidates"].items()}
    return {name: statistics.median(found) for name, found in samples.items() if found}


def over_flux(times: dict[str, float]) -> dict[str, float]:
    """Each candidate's time over that of flux: of the fastest candidate on flux with the same classes, be
    they Megatron's own or Transformer Engine's. Without such a candidate, over that with Megatron's own.
    """
    return {name: time / _fastest_on_flux(times, name.startswith(_ENGINE)) for name, time in times.items()}


def _fastest_on_flux(times: dict[str, float], engine: bool) -> float:
    of_engine = [time for name, time in times.items() if name == f"{_ENGINE} on flux"]
    own = [time for name, time in times.items() if name.startswith("flux")]
    return min(of_engine if engine and of_engine else own)


def spread(samples: list[float]) -> float:
    """How far samples are to both sides of their middle, as a share of the median."""
    return (max(samples) - min(samples)) / 2 / statistics.median(samples)


def lines(model: dict[str, Any]) -> Iterator[tuple[str, str, float, float, float, bool]]:
    """Of each pass and candidate: both names, milliseconds, spread, time over that of flux, whether the host
    set the pace.
    """
    for kind in (*PASSES, GRAPH):
        times = medians(model, kind)
        for name, ratio in over_flux(times).items():
            run = model["candidates"][name]
            yield kind, name, times[name], spread(run["samples_ms"][kind]), ratio, kind in run["host_bound"]


def told(record: dict[str, Any]) -> Iterator[str]:
    """A result in lines: rates over stock's, or times over flux's, and what is wrong."""
    for name, rates in over_stock(record.get("runs", {})).items():
        for metric, (rate, ratio) in rates.items():
            yield f"{name}, {metric}: {rate:.0f} tokens/s" + (f", {ratio:.3f} of stock" if ratio else "")
    for model in record.get("models", []):
        yield title(model, record["settings"]["tp"])
        for kind, name, ms, apart, ratio, host in lines(model):
            paced = ", paced by the host" if host else ""
            yield f"  {kind}, {name}: {ms:.3f} ms ± {100 * apart:.1f} %, {ratio:.3f} of flux{paced}"
        yield from (f"  not run: {name}: {reason}" for name, reason in model["skipped"].items())
    yield from (f"FAULT: {fault}" for fault in record["faults"])
