"""Gradients, layers and adapters on two emulated nodes: the scenarios of one node, unchanged."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_autograd
import test_dtensor
import test_layers
import test_megatron
import test_megatron_moe
import test_moe_autograd
import torch

from flux.comm import registry
from flux.comm.nodes.workspace import NodesWorkspace
from flux.testing import spawn

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
)


def on_nodes(rank: int, world_size: int, fn: Callable[..., Any], *arguments: Any) -> Any:
    """fn on one rank, whose calls must have had several nodes."""
    answer = fn(rank, world_size, *arguments)
    found = [registry.find(group, torch.device("cpu")) for group, _ in list(registry._workspaces)]
    assert any(isinstance(space, NodesWorkspace) and space.rail is not None for space in found)
    return answer


def answers(fn: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    ranks = world_size // 2
    return spawn(on_nodes, world_size, fn, *arguments, backend="gloo", timeout_s=240, ranks_per_node=ranks)


def without(module: Any, *left_out: str) -> list[Callable[[int, int], Any]]:
    """The scenarios of a test module but for some: torch.compile takes long and does not know of nodes."""
    return [scenario for scenario in module.SCENARIOS if scenario.__name__ not in left_out]


def of_operators(rank: int, world_size: int) -> dict[str, str]:
    scenarios = without(test_autograd, "torch_sees")
    return {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_operators(world_size: int) -> None:
    # The sum of each node is rounded, so that sums of values which a type does not hold differ.
    for told in answers(of_operators, world_size):
        assert not any(text for text in told.values() if text != "wrong: ['all_gather_rounded']"), told


def of_experts(rank: int, world_size: int) -> dict[str, str]:
    of_one_node, ranks = test_moe_autograd.cases, world_size // 2
    test_moe_autograd.cases = lambda p: [replace(case, ranks_per_node=ranks) for case in of_one_node(p)]
    scenarios = without(test_moe_autograd, "torch_sees")
    return {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_experts(world_size: int) -> None:
    for told in answers(of_experts, world_size):
        assert not any(told.values()), told


def of_layers(rank: int, world_size: int) -> None:
    for scenario in without(test_layers, "compiled"):
        scenario(rank, world_size)


def test_layers_on_nodes() -> None:
    answers(of_layers, 4)


def test_dtensor_on_nodes() -> None:
    assert answers(test_dtensor.work, 4) == [{}] * 4


def megatron(rank: int, world_size: int) -> None:
    test_megatron.prepare(world_size)
    for scenario in (test_megatron.equal_to_stock, test_megatron.mixture_of_experts):
        scenario(rank, world_size)


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_megatron_on_nodes() -> None:
    answers(megatron, 2)


def experts_of_megatron(rank: int, world_size: int) -> None:
    _, layout = test_megatron_moe.LAYOUTS["EP 2"]
    test_megatron_moe.prepare_layout(layout)
    for scenario in (test_megatron_moe.equal_to_stock, test_megatron_moe.uneven_tokens):
        scenario(rank, world_size, layout)


@needs_megatron
@pytest.mark.filterwarnings("ignore")
def test_experts_of_megatron_on_nodes() -> None:
    answers(experts_of_megatron, 2)
