"""fp8 operands, mixtures of experts, gradients and flux.layers between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp8_workers as fp8
import layer_workers as layers
import moe_workers as moe
import pytest
from ranks import BACKENDS, SIZES, run

ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# The kernels are to run, also where other ways were measured to be faster.
UNTUNED = {"FLUX_TUNING": "off"}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("worker", "args", "env"),
    [
        *((worker, (), env) for worker in (layers.gradients, layers.layers) for env in ({}, ONE_QUEUE)),
        (layers.main_grads, (), {}),
        *((fp8.exact, (), {**UNTUNED, "FLUX_SYMM_BACKEND": backend}) for backend in BACKENDS),
        *((worker, (), UNTUNED) for worker in (fp8.graphs, fp8.int8_between_ranks)),
        *((moe.random_cases, (first, 50), {}) for first in (0, 50, 100)),
        *((worker, (), {}) for worker in (moe.skews, moe.graphs, moe.without_synchronisation)),
        (moe.vllms_experts, (), {}),
    ],
)
def test_scenario(
    world_size: int, worker: Callable[..., list[str]], args: tuple[Any, ...], env: dict[str, str]
) -> None:
    run(worker, world_size, *args, **env)
