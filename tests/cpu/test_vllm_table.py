"""The table of what runs on flux in vLLM (tools/vllm_table.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from flux.integrations.vllm import forecast, thresholds

ROOT = Path(__file__).parents[2]
spec: Any = importlib.util.spec_from_file_location("vllm_table", ROOT / "tools" / "vllm_table.py")
tool: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_TOKENS", "TUNING", "SEQUENCE"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)


def test_the_page_has_it() -> None:
    assert tool.table() in (ROOT / "docs" / "vllm.md").read_text()


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tool.Model("", 8192, 8192, 28672)
    assert ranges(dense) == [(1, "vLLM"), (129, "gemm_ar"), (768, "sequence parallel")]
    experts = tool.Model("", 8192, 8192, 0, experts=True)
    assert ranges(experts) == ranges(dense), "sums of vLLM's experts are sharded, too"
    # Without vLLM's fusion, flux sums what no GEMM of its makes, up to what was measured.
    monkeypatch.setattr(forecast, "FUSED_BY_VLLM_BYTES", {})
    assert ranges(experts) == [(1, "gemm_ar + all_reduce"), (129, "gemm_ar"), (768, "sequence parallel")]
    quantised = tool.Model("", 8192, 8192, 28672, quantised=True)
    assert ranges(quantised) == [(1, "all_reduce"), (129, "vLLM")]
    assert tool.before(quantised, 4) == [(1, "vLLM")]


def ranges(model: forecast.Model) -> list[tuple[int, str]]:
    return forecast.ranges(model, 4, thresholds.MEASURED_GPU)
