"""Some of the random fp8 calls of fp8_random.py, on 1 to 4 CPU processes."""

from __future__ import annotations

import pytest
from effort import some
from fp8_random import OPS, campaign


@pytest.mark.parametrize("op", OPS)
def test_random_calls_are_exact(op: str) -> None:
    assert campaign(op, 7_000_000, some(60)) == []
