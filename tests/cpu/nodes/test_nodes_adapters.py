"""Gradients, layers and adapters on two emulated nodes: the scenarios of one node, unchanged."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import megatron_models
import pytest
import test_autograd
import test_dtensor
import test_layers
import test_megatron
import test_megatron_moe
import test_moe_autograd
import torch

from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import find, made
from flux.testing import spawn

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
)


def on_nodes(rank: int, world_size: int, fn: Callable[..., Any], *arguments: Any) -> Any:
    """fn on one rank, whose calls must have had several nodes."""
    answer = fn(rank, world_size, *arguments)
    found = [find(group, torch.device("cpu")) for group, _ in list(made)]
    assert any(isinstance(space, NodesWorkspace) and space.rail is not None for space in found)
    return answer


def without(module: Any, *left_out: str) -> list[Callable[[int, int], Any]]:
    """The scenarios of a test module but for some: torch.compile takes long and does not know of nodes."""
    return [scenario for scenario in module.SCENARIOS if scenario.__name__ not in left_out]


def of_operators(rank: int, world_size: int) -> dict[str, str]:
    told = {scenario.__name__: scenario(rank, world_size) for scenario in test_autograd.SCENARIOS}
    # The sum of each node is rounded, so that sums of values which a type does not hold differ.
    return {name: text for name, text in told.items() if text and text != "wrong: ['all_gather_rounded']"}


def of_experts(rank: int, world_size: int) -> dict[str, str]:
    of_one_node, ranks = test_moe_autograd.cases, world_size // 2
    test_moe_autograd.cases = lambda p: [replace(case, ranks_per_node=ranks) for case in of_one_node(p)]
    # Its pretended kernels do not sum over nodes.
    scenarios = without(test_moe_autograd, "steps_of_kernels")
    told = {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}
    return {name: text for name, text in told.items() if text}


def of_layers(rank: int, world_size: int) -> dict[str, str]:
    for scenario in without(test_layers, "compiled"):
        scenario(rank, world_size)
    return {}


PARTS = (of_operators, of_experts, of_layers, test_dtensor.work)


def in_turn(rank: int, world_size: int) -> list[dict[str, str]]:
    """What is wrong with each part. One set of processes: they take longer to start than most parts."""
    parts = PARTS if world_size > 2 else PARTS[:2]
    return [on_nodes(rank, world_size, part) for part in parts]


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_layers_and_dtensor_on_nodes(world_size: int) -> None:
    told = spawn(in_turn, world_size, backend="gloo", timeout_s=240, ranks_per_node=world_size // 2)
    assert not any(part for of_rank in told for part in of_rank), told


def megatron(rank: int, world_size: int) -> None:
    from megatron.core import parallel_state

    megatron_models.prepare(world_size)
    test_megatron.equal_to_stock(rank, world_size)
    parallel_state.destroy_model_parallel()
    _, layout = test_megatron_moe.LAYOUTS["EP 2"]
    megatron_models.prepare_layout(layout)
    for scenario in (test_megatron_moe.equal_to_stock, test_megatron_moe.uneven_tokens):
        scenario(rank, world_size, layout)


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_megatron_on_nodes() -> None:
    spawn(on_nodes, 2, megatron, backend="gloo", timeout_s=240, ranks_per_node=1)
