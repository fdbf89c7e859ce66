"""Tables of the results of benchmarks/megatron_model.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PASSES = ("forward", "training")
GRAPH = "graph"  # a training step from a CUDA graph: not in every result, nor of every candidate
_ENGINE = "Transformer Engine"


def show(data: dict[str, Any], console: Console) -> None:
    """Prints the times of each model's candidates, what they computed, and what is wrong."""
    machine = data["machine"]
    where = f"{machine.get('gpu_count', 0)}× {machine.get('gpu', machine.get('cpu'))}"
    head = (
        f"flux {data['version']} ({data['commit']}) · {where} · megatron-core {machine.get('megatron-core')}"
    )
    console.print(Text(f"{head} · torch {machine.get('torch')} · {data['date']}", style="dim"))
    for model in data["models"]:
        console.print(_times(model, data["settings"]["tp"]))
        for name, reason in model["skipped"].items():
            console.print(Text(f"not run: {name}: {reason}"))
    for fault in data["faults"]:
        console.print(Text(f"FAULT: {fault}", style="bold red"))


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


def _times(model: dict[str, Any], tp: int) -> Table:
    table = Table(title=title(model, tp), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for name in ("pass", "candidate"):
        table.add_column(name)
    for name in ("ms", "±", "/ flux", "loss", "gradients apart", "step MiB"):
        table.add_column(name, justify="right")
    for kind, name, ms, apart, ratio, host in lines(model):
        run = model["candidates"][name]
        cells = [f"{ms:.3f}{' (host)' if host else ''}", f"{100 * apart:.1f} %", f"{ratio:.3f}"]
        if kind == "training":
            memory = f"{run['step_mib']:.0f}" if "step_mib" in run else "–"
            cells += [f"{run['loss']:.4f}", f"{run['gradients_apart']:.1e}", memory]
        table.add_row(kind, name, *cells)
    return table
