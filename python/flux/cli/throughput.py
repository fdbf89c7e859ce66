"""Tables of the results of benchmarks/vllm_throughput.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(data: dict[str, Any], console: Console) -> None:
    """Prints tokens per second of each run, what ran in it, how far two runs agree, and what is wrong."""
    runs = data["runs"]
    model = data["settings"]["model"]
    where = f"{data['machine'].get('gpu_count', 0)}× {data['machine'].get('gpu', data['machine'].get('cpu'))}"
    head = f"flux {data['version']} ({data['commit']}) · {where} · vLLM {data['machine'].get('vllm')}"
    console.print(Text(f"{head} · torch {data['machine'].get('torch')} · {data['date']}", style="dim"))
    console.print(
        _rates(runs, f"{model.get('name', 'vllm')} · {model['layers']} layers · TP {data['settings']['tp']}")
    )
    for name, run in runs.items():
        for arrivals, samples in run.get("traces", {}).items():
            console.print(Text(f"{name}: {_trace(arrivals, samples)}"))
    for name, run in runs.items():
        for state in run.get("state", [])[:1]:
            console.print(Text(f"{name}: {_state(state)}"))
    for pair in data["comparisons"]:
        console.print(Text(_agreement(pair)))
    for fault in data["faults"]:
        console.print(Text(f"FAULT: {fault}", style="bold red"))


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


def _rates(runs: dict[str, Any], title: str) -> Table:
    found = over_stock(runs)
    metrics = list(dict.fromkeys(metric for rates in found.values() for metric in rates))
    table = Table(title=f"{title} · tokens/s", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("run")
    for metric in metrics:
        table.add_column(metric, justify="right")
        table.add_column("/ stock", justify="right")
    for name, rates in found.items():
        cells = []
        for metric in metrics:
            rate, ratio = rates.get(metric, (None, None))
            cells += ["–" if rate is None else f"{rate:.0f}", "–" if ratio is None else f"{ratio:.3f}"]
        table.add_row(name, *cells)
    return table


def _trace(arrivals: str, samples: list[dict[str, Any]]) -> str:
    """Times of a trace: the medians of its samples, and how far the slowest is from the fastest."""
    times = [
        f"{what} {1e3 * median:.1f} ms, in 1 % over {1e3 * late:.1f} ms"
        for what, (median, late) in zip(("first token", "each further one"), waited(samples), strict=True)
    ]
    seconds = [each["seconds"] for each in samples]
    apart = 100 * (max(seconds) / min(seconds) - 1)
    return f"trace {arrivals}: {'; '.join(times)}; {len(samples)} samples {apart:.1f} % apart"


def _state(state: dict[str, Any]) -> str:
    """Which layers a run had, and how often they called flux."""
    layers = ", ".join(
        f"{count} {kind}" for kind, count in (state["row_parallel"] | state.get("experts", {})).items()
    )
    calls = state["flux_calls"]
    if isinstance(calls, dict):  # by kind, in files from 98821ce on
        products = f", {calls['products']} for products" if calls.get("products") else ""
        calls = f"{calls['linear']} for linear layers, {calls['experts']} for experts{products}"
    line = f"{layers}; all-reduce by {', '.join(state['backends']) or 'the platform'}; calls of flux: {calls}"
    return f"{line}, through {', '.join(state['flux_through'])}" if state["flux_through"] else line


def _agreement(pair: dict[str, Any]) -> str:
    line = " | ".join(pair["runs"]) + ":"
    if said := pair.get("answers"):
        line += f" {said['equal']} of {said['answers']} answers equal"
        if said["first_difference"]:
            leads = ", ".join(f"{lead:.3f}" for lead in said["lead_there"])
            line += f", the others from token {said['first_difference']} on, stock's lead there {leads}"
    if forced := pair.get("forced"):
        line += f"; forced at {forced['positions']} positions"
        if "mean_apart" in forced:
            line += f": first equal {forced['first_equal_percent']:.1f} %"
            line += f", |dlogprob| mean {forced['mean_apart']:.5f} max {forced['max_apart']:.5f}"
    return line
