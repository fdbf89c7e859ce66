"""Rows of results, with times that a test makes up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flux.bench.model import Row, Timing


def row(medians: dict[str, tuple[str, float]], op: str = "gemm_rs", spread: float = 1, **change: Any) -> Row:
    """Whose candidates have these roles, and these medians in ms."""
    timed = {n: Timing(role, (spread * ms, ms, ms / spread)) for n, (role, ms) in medians.items()}
    made = Row(op, "a", op, 512, 64, 256, 4, "bfloat16", (512, 64, 64), 0, timed, check="exact")
    return replace(made, **change)
