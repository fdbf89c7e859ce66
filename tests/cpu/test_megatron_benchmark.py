"""benchmarks/megatron_model.py between CPU processes: every candidate is the same model, and is timed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "megatron_model.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_model", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["megatron_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
)
@pytest.mark.parametrize(
    ("model", "more", "names", "left"),
    [
        ("llama-3-8b", [], {"stock", "flux", "flux, gathered x kept"}, set()),
        # Stock Megatron's other dispatcher reads sizes from CUDA tensors.
        ("mixtral-8x7b", ["--ep", "2"], {"stock", "flux", "flux, gathered x kept"}, {"stock, alltoall"}),
    ],
)
def test_rehearsal(model: str, more: list[str], names: set[str], left: set[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--model", model, "--cpu", "--rounds", "2", "--iters", "1", "--json", str(file), *more]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARK), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("training ") == len(names)
    result = json.loads(file.read_text())
    for kind in ("forward", "training"):
        rows = {row["candidate"]: row for row in result["rows"] if row["pass"] == kind}
        assert rows.keys() == names
        assert all(len(row["samples_ms"]) == 2 and row["median_ms"] > 0 for row in rows.values())
    assert set(result["skipped"]) == left and not result["faults"]
    assert result["settings"]["model"]["hidden"] == 64


def test_another_loss_is_a_fault(benchmark: Any) -> None:
    losses = {"stock": 4.0, "flux": 4.001, "other": float("nan")}
    assert benchmark.faults_of(losses, False) == ["other: loss nan, of stock 4.0"]
    assert [fault[:4] for fault in benchmark.faults_of(losses, True)] == ["flux", "othe"]


def test_options(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.options_of(["--tp", "4", "--ep", "3"])
    assert "--ep: expected a divisor of --tp" in capsys.readouterr().err
    assert benchmark.MODELS["qwen3-30b-a3b"].tiny().top_k == 2
