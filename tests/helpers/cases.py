"""What tests between CPU processes share: names and comparisons of cases, and one set of processes for each
world size.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flux
from flux.testing import spawn

Function = TypeVar("Function", bound=Callable[..., Any])


def asked_at(*world_sizes: int) -> Callable[[Function], Function]:
    """Marks a scenario that runs at these world sizes only, as others cannot change its answer."""

    def mark(scenario: Function) -> Function:
        vars(scenario)["world_sizes"] = world_sizes
        return scenario

    return mark


# opcheck and torch.compile take seconds on each rank. What they look at (schemas, aliases, shapes of fakes,
# graphs) differs between one rank and several, and not between two and three.
asked_of_one_and_of_several = asked_at(1, 2)


def is_asked(scenario: Callable[..., Any], world_size: int) -> bool:
    return world_size in getattr(scenario, "world_sizes", (world_size,))


def questions(
    world_sizes: Sequence[int], scenarios: Mapping[str, Callable[..., Any]]
) -> list[tuple[int, str]]:
    """Each world size with the names of the scenarios that run at it."""
    return [(p, name) for p in world_sizes for name in asked(scenarios, p)]


def asked(scenarios: Mapping[str, Function], world_size: int) -> dict[str, Function]:
    """Those that run at a world size."""
    return {name: each for name, each in scenarios.items() if is_asked(each, world_size)}


def compare(result: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong with a result, or nothing."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{tuple(result.shape)} {result.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    wrong = (result != expected).sum().item()
    return f"{wrong} of {expected.numel()} elements differ" if wrong else ""


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small enough that sums of products are exact in every type."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


Scenario = Callable[[int, int], Any]


def by_name(*scenarios: Function) -> dict[str, Function]:
    return {scenario.__name__: scenario for scenario in scenarios}


def run_scenarios(
    scenarios: Mapping[str, Scenario],
    rank: int,
    world_size: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """What each scenario says on a rank, by name, such as the traceback of one that fails; or nothing.
    prepare: is called once before all of them.
    """
    prepare()
    answers = {}
    for name, scenario in asked(scenarios, world_size).items():
        try:
            answers[name] = scenario(rank, world_size) or ""
        except (Exception, pytest.fail.Exception):
            answers[name] = traceback.format_exc()
    return answers


class Answers:
    """What all ranks say of each scenario; asked once for each world size, by whichever test comes first.

    Args:
        run: of a rank: ``run(rank, world_size)`` returns what went wrong, by name of the scenario.
    """

    def __init__(self, run: Callable[[int, int], dict[str, str]], timeout_s: float = 120) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._told: dict[int, list[dict[str, str]]] = {}

    def of(self, world_size: int, name: str) -> list[str]:
        """The answer of each rank."""
        if world_size not in self._told:
            self._told[world_size] = spawn(self._run, world_size, backend="gloo", timeout_s=self._timeout_s)
        return [answers[name] for answers in self._told[world_size]]


def scenario_test(
    world_sizes: Sequence[int], *scenarios: Scenario, timeout_s: float = 120, **how: Any
) -> Callable[[int, str], None]:
    """A test of each scenario with each number of ranks: none of them may fail, or return what is wrong.
    how: of run_scenarios.
    """
    named = by_name(*scenarios)
    answers = Answers(functools.partial(run_scenarios, named, **how), timeout_s)

    @pytest.mark.parametrize(("world_size", "scenario"), questions(world_sizes, named))
    def test(world_size: int, scenario: str) -> None:
        told = answers.of(world_size, scenario)
        assert told == [""] * world_size, "\n".join(map(str, told))

    return test


class Calls(TorchDispatchMode):
    """Which operators are called whose names begin like this; the rest of their names."""

    def __init__(self, prefix: str = "flux::") -> None:
        super().__init__()
        self.names: list[str] = []
        self._prefix = prefix

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith(self._prefix):
            self.names.append(func._schema.name.removeprefix(self._prefix))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(*names: str) -> Iterator[list[mock.Mock]]:
    """flux's functions of these names, with mocks around them that count their calls."""
    with contextlib.ExitStack() as stack:
        patches = [mock.patch.object(flux, name, wraps=getattr(flux, name)) for name in names]
        yield [stack.enter_context(patch) for patch in patches]
