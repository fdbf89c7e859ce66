"""The table of what runs on flux in vLLM (tools/vllm_table.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

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
