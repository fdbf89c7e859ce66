"""Rows of results, with times that a test makes up; the programs of benchmarks/, as modules."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flux.bench.model import Row, Timing

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def row(medians: dict[str, tuple[str, float]], op: str = "gemm_rs", spread: float = 1, **change: Any) -> Row:
    """Whose candidates have these roles, and these medians in ms."""
    timed = {n: Timing(role, (spread * ms, ms, ms / spread)) for n, (role, ms) in medians.items()}
    made = Row(op, "a", op, 512, 64, 256, 4, "bfloat16", (512, 64, 64), 0, timed, check="exact")
    return replace(made, **change)


def script(name: str) -> Any:
    """A fixture: one of them, which finds the others."""

    @pytest.fixture
    def module(monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return module
