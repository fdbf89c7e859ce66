"""fp8 operands, mixtures of experts, gradients and flux.layers between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layer_workers as workers
import pytest
from ranks import BACKENDS, SIZES, run

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# The kernels are to run, also where other ways were measured to be faster.
UNTUNED = {"FLUX_TUNING": "off"}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("worker", "args", "env"),
    [
        *((worker, (), env) for worker in (workers.gradients, workers.layers) for env in ({}, ONE_QUEUE)),
        (workers.main_grads, (), {}),
        *((workers.fp8_exact, (), {**UNTUNED, "FLUX_SYMM_BACKEND": backend}) for backend in BACKENDS),
        *((worker, (), UNTUNED) for worker in (workers.fp8_graphs, workers.int8_between_ranks)),
        *((workers.random_cases, (first, 50), {}) for first in (0, 50, 100)),
        *(
            (worker, (), {})
            for worker in (workers.skews, workers.moe_graphs, workers.without_synchronisation)
        ),
        (workers.vllms_experts, (), {}),
    ],
)
def test_scenario(
    world_size: int, worker: Callable[..., list[str]], args: tuple[Any, ...], env: dict[str, str]
) -> None:
    run(worker, world_size, *args, **env)
