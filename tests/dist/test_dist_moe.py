"""flux.moe between GPUs: exact results for every layout, skew and size."""

from __future__ import annotations

from typing import Any

import moe_workers
import pytest
from ranks import SIZES, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        *(("random_cases", (first, 50)) for first in (0, 50, 100)),
        *((name, ()) for name in ("skews", "graphs", "without_synchronisation", "vllms_experts")),
    ],
)
def test_scenario(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(moe_workers, name), world_size, *args)
