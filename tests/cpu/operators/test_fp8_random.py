"""Some of the random fp8 calls of fp8_random.py, on 1 to 4 CPU processes."""

from __future__ import annotations

from effort import some
from fp8_random import OPS, campaign


def test_random_calls_are_exact() -> None:
    assert campaign(OPS, 7_000_000, some(60)) == []
