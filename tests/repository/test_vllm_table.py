"""The table of what runs on flux in vLLM (tools/vllm_table.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from flux.integrations.vllm import predict, thresholds

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
tool: Any = importlib.import_module("vllm_table")


@pytest.fixture(autouse=True)
def measured_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_TOKENS", "TUNING", "SEQUENCE", "MOE"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)


def test_the_page_has_it() -> None:
    page = (ROOT / "docs" / "vllm-models.md").read_text()
    assert tool.table() in page and tool.quantised() in page
    assert all(f"`{name}={value}`" in page for name, value in tool.ASKED.items())


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tool.Model("", 8192, 8192, 28672)
    assert ranges(dense) == [(1, "gemm_ar"), (768, "sequence parallel")]
    experts = tool.Model("", 8192, 8192, 0, experts=True)
    # Sums of vLLM's experts are sharded, too, but its layers take the host longer.
    assert ranges(experts) == [(1, "vLLM"), (129, "gemm_ar"), (1605, "sequence parallel")]
    # Without vLLM's fusion, flux sums what no GEMM of its makes, up to what was measured.
    monkeypatch.setattr(predict, "FUSED_BY_VLLM_BYTES", {})
    assert ranges(experts) == [(1, "gemm_ar + all_reduce"), (129, "gemm_ar"), (1605, "sequence parallel")]
    quantised = tool.Model("", 8192, 8192, 28672, quantised="awq")
    assert ranges(quantised) == [(1, "all_reduce"), (129, "vLLM")]
    fp8 = tool.Model("", 8192, 8192, 28672, quantised="block")
    assert ranges(fp8) == ranges(quantised), "by default, what was not measured is vLLM's"
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "256")
    assert ranges(fp8) == [(1, "vLLM"), (256, "gemm_ar")]
    assert ranges(quantised) == [(1, "vLLM"), (256, "all_reduce"), (4097, "vLLM")]
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "2048")
    assert ranges(fp8) == [(1, "vLLM"), (256, "gemm_ar"), (2048, "sequence parallel")]


def ranges(model: predict.Model) -> list[tuple[int, str]]:
    return predict.predict(model, 4, thresholds.MEASURED_GPU).runs
