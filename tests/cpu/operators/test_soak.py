"""A thousand random valid calls, exact; `make soak` makes ten thousand with a new seed."""

from __future__ import annotations

from soak import OPS, campaign


def test_a_thousand_random_calls_are_exact() -> None:
    made, wrong = campaign(seed=0, count=1000, seconds=600.0)
    assert wrong == []
    assert sum(made.values()) == 1000 and set(made) == set(OPS)
