"""Random valid calls of all operators, exact; `make soak` makes ten thousand with a new seed."""

from __future__ import annotations

from effort import some
from soak import OPS, campaign


def test_random_calls_are_exact() -> None:
    made, wrong = campaign(seed=0, count=some(1500), seconds=600.0)
    assert wrong == []
    assert sum(made.values()) >= some(1500) - 3 and set(made) == set(OPS)  # shares of it are rounded
