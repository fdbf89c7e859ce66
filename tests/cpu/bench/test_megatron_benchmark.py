"""benchmarks/megatron_model.py between CPU processes: every candidate is the same model, and is timed.
What it concludes needs no Megatron-Core.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import FOLDER, script
from megatron_models import needs_megatron

OWN = {"stock", "flux", "flux, gathered x kept"}
DISPATCHED = {"stock, alltoall", "stock, grouped GEMM", "stock, alltoall, grouped GEMM"}

benchmark = script("megatron_model")
whole = script("whole_models")


@needs_megatron
def test_rehearsal(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    models = ["llama-3-8b", "mixtral-8x7b:2"]
    options = ["--cpu", "--rounds", "2", "--iters", "1", "--json", str(file)]
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(FOLDER / "megatron_model.py"),
        "--models",
        *models,
        *options,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(file.read_text())
    assert [model["name"] for model in result["models"]] == models and not result["faults"]
    for model, names in zip(result["models"], (OWN, OWN | DISPATCHED), strict=True):
        assert model["candidates"].keys() == names and not model["skipped"]
        for run_of_one in model["candidates"].values():
            for kind in ("forward", "training"):
                assert len(run_of_one["samples_ms"][kind]) == 2
    assert "stock, alltoall" in run.stdout
    assert run.stdout.count("training, ") == len(OWN) + len(OWN | DISPATCHED)


def result_of(times: dict[str, float]) -> dict[str, Any]:
    candidates = {
        name: {
            "loss": 4.0,
            "gradients_apart": 0.0,
            "step_mib": 2048.0,
            "samples_ms": {"forward": [ms, ms, 2 * ms], "training": [3 * ms] * 3},
            "host_bound": ["training"] if name == "stock" else [],
        }
        for name, ms in times.items()
    }
    shape = {"layers": 4, "sequence": 4096, "experts": 0}
    model = {"name": "llama-3-8b", "ep": 1, "shape": shape, "candidates": candidates, "skipped": {"x": "why"}}
    machine = {"megatron-core": "0.19.2", "gpu": "NVIDIA H100", "gpu_count": 2}
    head = {"version": "0.2.0", "commit": "60685d2", "date": "2026-11-26", "suite": "megatron_model"}
    settings = {"tp": 2, "rounds": 3, "iters": 3}
    return {**head, "machine": machine, "settings": settings, "models": [model], "faults": ["a fault"]}


TIMES = {"stock": 12.0, "flux": 10.0, "flux, gathered x kept": 8.0, "Transformer Engine": 9.0}


def test_times_are_over_those_of_flux_with_the_same_classes(whole: Any) -> None:
    model = result_of(TIMES)["models"][0]
    found = {(kind, name): ratio for kind, name, *_, ratio, _ in whole.lines(model)}
    assert found["forward", "stock"] == 1.5 and found["training", "flux, gathered x kept"] == 1.0
    assert found["forward", "Transformer Engine"] == 9 / 8  # no candidate on flux has its classes
    both = result_of({**TIMES, "Transformer Engine on flux": 6.0})["models"][0]
    found = {(kind, name): ratio for kind, name, *_, ratio, _ in whole.lines(both)}
    assert found["forward", "Transformer Engine"] == 1.5 and found["forward", "stock"] == 1.5


def test_a_result_is_shown(whole: Any) -> None:
    assert list(whole.told(result_of(TIMES))) == [
        "llama-3-8b · 4 layers · 4096 tokens · TP 2",
        *(f"  forward, {name}: {ms:.3f} ms ± 50.0 %, {ms / 8:.3f} of flux" for name, ms in TIMES.items()),
        *(
            f"  training, {name}: {3 * ms:.3f} ms ± 0.0 %, {ms / 8:.3f} of flux"
            + ", paced by the host" * (name == "stock")
            for name, ms in TIMES.items()
        ),
        "  not run: x: why",
        "FAULT: a fault",
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"loss": 4.03}, None),
        ({"loss": 4.05}, "flux: loss 4.05, of stock 4.0"),
        ({"loss": float("nan")}, "flux: loss nan, of stock 4.0"),
        ({"graph_loss": 4.03}, None),
        ({"graph_loss": 4.05}, "flux: loss 4.05 from a CUDA graph, of stock 4.0"),
        ({"gradients_apart": 0.09}, None),
        ({"gradients_apart": 0.2}, "flux: gradients are 0.2 of stock's apart from them"),
        ({"gradients_apart": float("nan")}, "flux: gradients are nan of stock's apart from them"),
    ],
)
def test_another_model_is_a_fault(benchmark: Any, change: dict[str, float], fault: str | None) -> None:
    runs = result_of(TIMES)["models"][0]["candidates"]
    runs["flux"] |= change
    assert benchmark.faults_of(runs, False, False) == [fault] * (fault is not None)
    assert len(benchmark.faults_of(runs, False, True)) == 1
    is_large = fault is not None and "0.2" not in fault
    assert bool(benchmark.faults_of(runs, True, False)) == is_large  # a router may choose otherwise


def test_distance_of_gradients(benchmark: Any) -> None:
    ours = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "c": torch.ones(9)}
    theirs = {**copy.copy(ours), "b": torch.tensor([1.0])}
    del theirs["c"]
    assert benchmark.distance(ours, theirs) == pytest.approx(3 / 10**0.5)
