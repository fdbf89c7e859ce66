"""benchmarks/host_profile.py finds the function that runs, and the one that waits for it."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def runs(profile: Any, looks: int) -> None:
    """Until so many looks were taken: a busy machine takes fewer in a second."""
    end = time.monotonic() + 30
    while sum(profile._lines.values()) < looks and time.monotonic() < end:
        pass


def waits_for_it(profile: Any, looks: int) -> None:
    runs(profile, looks)


def test_the_longest_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    host_profile = importlib.import_module("host_profile")
    host_profile.start()
    runs(host_profile, 30)
    waits_for_it(host_profile, 150)
    found = host_profile.summary()
    assert found["looks"] >= 150
    share_of = {where.rsplit(" ", 1)[1]: share for share, where in found["functions"]}
    assert share_of["runs"] > 0.8 and 0.5 < share_of["waits_for_it"] < share_of["runs"]
    assert " runs:" in found["lines"][0][1] and found["lines"][0][0] > 0.3
    looks = found["looks"]
    time.sleep(0.02)
    assert host_profile.summary()["looks"] == looks, "it has ended"
