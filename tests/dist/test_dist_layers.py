"""Gradients and flux.layers between GPUs."""

from __future__ import annotations

import layer_workers
import pytest
from ranks import SIZES, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["gradients", "main_grads", "layers"])
def test_scenario(world_size: int, name: str) -> None:
    run(getattr(layer_workers, name), world_size)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["gradients", "layers"])
def test_with_one_hardware_queue(world_size: int, name: str) -> None:
    run(getattr(layer_workers, name), world_size, CUDA_DEVICE_MAX_CONNECTIONS="1")
