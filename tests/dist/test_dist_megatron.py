"""Megatron-Core on flux between GPUs: small GPTs give the losses and gradients of stock Megatron, dense and
with experts, and train as it does.
"""

from __future__ import annotations

import importlib.util

import megatron_workers
import pytest
from megatron_models import BATCH, LAYOUTS, MODELS
from ranks import SIZES, run

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]
FEW = SIZES[:2]  # the models have four heads
# As Megatron asks for.
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
each_layout = pytest.mark.parametrize(
    ("world_size", "layout"),
    [pytest.param(size, name, marks=pytest.mark.gpus(size)) for name, (size, _) in LAYOUTS.items()],
)


@pytest.mark.parametrize("world_size", FEW)
def test_equal_to_stock(world_size: int) -> None:
    run(megatron_workers.dense, world_size, list(MODELS), BATCH, **ONE_QUEUE)


@pytest.mark.parametrize("world_size", FEW)
def test_equal_to_stock_where_copy_engines_gather(world_size: int) -> None:
    """Shards of 8 MiB and more, of 32768 tokens."""
    run(megatron_workers.dense, world_size, ["recomputation", "swiglu, rms norm"], 128, **ONE_QUEUE)


@pytest.mark.parametrize("world_size", FEW)
def test_gradient_accumulation(world_size: int) -> None:
    run(megatron_workers.main_grads, world_size, **ONE_QUEUE)


@each_layout
def test_experts_equal_to_stock(world_size: int, layout: str) -> None:
    run(megatron_workers.experts, world_size, layout, **ONE_QUEUE)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs Transformer Engine, which is not installed",
)
@each_layout
def test_grouped_experts_equal_to_transformer_engine(world_size: int, layout: str) -> None:
    run(megatron_workers.experts, world_size, layout, True, **ONE_QUEUE)


@pytest.mark.parametrize("layout", ["TP 2", "EP 2"])
def test_gradients_of_experts_are_added_to_main_grads(layout: str) -> None:
    run(megatron_workers.expert_main_grads, 2, layout, **ONE_QUEUE)


@each_layout
def test_whole_iterations_from_a_cuda_graph(world_size: int, layout: str) -> None:
    run(megatron_workers.full_graph, world_size, layout, **ONE_QUEUE)


@pytest.mark.parametrize("batch", [BATCH, 128])
@pytest.mark.parametrize("world_size", FEW)
def test_whole_iterations_of_a_dense_model_from_a_cuda_graph(world_size: int, batch: int) -> None:
    """With 128, shards are so large that copy engines would gather them outside of a graph."""
    run(megatron_workers.full_graph_of_dense, world_size, batch, **ONE_QUEUE)


@pytest.mark.gpus(4)
def test_beside_data_parallelism() -> None:
    run(megatron_workers.data_parallel, 4, **ONE_QUEUE)


@pytest.mark.parametrize("world_size", FEW)
def test_the_example_trains_as_on_stock_megatron(world_size: int) -> None:
    run(megatron_workers.loss_curves, world_size, 100, **ONE_QUEUE)
