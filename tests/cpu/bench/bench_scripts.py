"""The programs of benchmarks/, as modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def script(name: str) -> Any:
    """A fixture: one of them, which finds the others."""

    @pytest.fixture
    def module(monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)

    return module
