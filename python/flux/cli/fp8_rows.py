"""What a user may ask of ``flux bench`` with fp8 operands."""

from __future__ import annotations

from collections.abc import Sequence

from flux.bench.cases import FAMILIES, OPS
from flux.bench.model import FP8, SCALES


def kinds(dtype: str | None, scales: Sequence[str]) -> tuple[str, ...]:
    """The kinds of scales to measure, none without fp8 operands. Raises ValueError if one is unknown."""
    if dtype != FP8:
        if scales:
            raise ValueError(f"bench: --scales expected with --dtype fp8, got --dtype {dtype}")
        return ()
    for kind in scales:
        if kind not in SCALES:
            raise ValueError(f"bench: --scales expected to be one of {', '.join(SCALES)}, got {kind!r}")
    return tuple(dict.fromkeys(scales)) or SCALES


def measurable(ops: Sequence[str], scaled: bool) -> list[str]:
    """The ops that were asked for, and of a family those that can be measured with such operands.

    Raises ValueError if an op cannot.
    """
    found = []
    for op in ops:
        can = [name for name in FAMILIES.get(op, (op,)) if (OPS[name].scaled if scaled else OPS[name].wide)]
        if not can:
            what = "another --dtype than fp8" if scaled else "--dtype fp8"
            raise ValueError(f"bench: {op} expected with {what}")
        found += can
    return list(dict.fromkeys(found))
