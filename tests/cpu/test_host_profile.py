"""benchmarks/host_profile.py finds the function that runs, and the one that waits for it."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def runs_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def waits_for_it(seconds: float) -> None:
    runs_for(seconds)


def test_the_longest_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    host_profile = importlib.import_module("host_profile")
    host_profile.start()
    runs_for(0.05)
    waits_for_it(0.2)
    found = host_profile.summary()
    assert found["looks"] > 100
    share_of = {where.rsplit(" ", 1)[1]: share for share, where in found["functions"]}
    assert share_of["runs_for"] > 0.8 and 0.5 < share_of["waits_for_it"] < share_of["runs_for"]
    assert "runs_for" in found["lines"][0][1] and found["lines"][0][0] > 0.3
    looks = found["looks"]
    runs_for(0.02)
    assert host_profile.summary()["looks"] == looks, "it has ended"
