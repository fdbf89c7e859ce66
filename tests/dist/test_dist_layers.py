"""Gradients, flux.layers and Megatron-Core on flux between GPUs."""

from __future__ import annotations

import importlib.util

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


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.filterwarnings("ignore")
def test_the_example_trains_as_on_stock_megatron(world_size: int) -> None:
    run(layer_workers.loss_curves, world_size, 100, CUDA_DEVICE_MAX_CONNECTIONS="1")
