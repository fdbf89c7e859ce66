"""How many random cases the tests make: a third of them, or with THOROUGH=1 all, as CI does."""

from __future__ import annotations

import os


def some(count: int) -> int:
    """A third of `count` cases, rounded up, or all."""
    return count if os.environ.get("THOROUGH") else -(-count // 3)
