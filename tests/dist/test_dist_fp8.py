"""Operators with fp8 operands between GPUs."""

from __future__ import annotations

import fp8_workers
import pytest
from ranks import BACKENDS, SIZES, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact(world_size: int, backend: str) -> None:
    # FLUX_TUNING: the kernels are to run, also where other ways were measured to be faster.
    run(fp8_workers.exact, world_size, FLUX_SYMM_BACKEND=backend, FLUX_TUNING="off")


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["graphs", "int8_between_ranks"])
def test_scenario(world_size: int, name: str) -> None:
    run(getattr(fp8_workers, name), world_size, FLUX_TUNING="off")
