"""What benchmarks/vllm_compare.py concludes from what engines say. Needs no vLLM."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench_rows import script

compare = script("vllm_compare")


def test_forced_positions(compare: Any) -> None:
    prompt = [9, 1, 2, 3]  # nothing is said of its first token
    ours = [{1: -0.5}, {2: -2.0, 5: -0.5}, {3: -1.0, 6: -0.5}]
    theirs = [{1: -0.75}, {2: -2.5, 8: -0.5}, {3: math.nan, 6: -0.5}]
    assert compare.compare_forced([prompt], [ours], [theirs]) == {
        "positions": 2,
        "not_finite": 1,
        "first_equal_percent": 50.0,
        "mean_apart": 0.375,
        "max_apart": 0.5,
    }


def _run(
    before: tuple[int, int], calls: tuple[int, int], *through: str, experts: int = 0, weights: float = 1.5
) -> dict[str, Any]:
    """Of one rank, whose linear layers and experts had called flux that often at the start and the end."""
    start, end = (
        {
            "flux_calls": {"linear": linear, "experts": of_experts, "captured": 0},
            "flux_through": list(through),
            "row_parallel": {"RowParallelLinear": 2},
            "experts": {"MoERunner": experts} if experts else {},
            "weights": weights,
        }
        for linear, of_experts in (before, calls)
    )
    return {"state_at_start": [start], "state": [end]}


STOCK = {"stock-eager": _run((0, 0), (0, 0))}


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        (STOCK | {"flux-eager": _run((4, 0), (8, 0), "stores")}, None),
        (STOCK | {"flux-eager": _run((4, 4), (8, 8), "stores", experts=2)}, None),
        ({"stock-eager": _run((0, 0), (4, 0))}, "called flux 4 times"),
        ({"stock-eager": _run((0, 0), (0, 3), experts=2)}, "called flux 3 times"),
        ({"flux-graph": _run((0, 0), (0, 0))}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 0), (4, 0), "stores")}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 4), (8, 4), "stores", experts=2)}, "did not run flux's kernels for experts"),
        ({"flux-graph": _run((4, 4), (4, 8), "stores", experts=2)}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 0), (4, 0), "stores", experts=2)}, "for linear and experts"),
        ({"flux-graph": _run((4, 4), (8, 8), experts=2)}, "did not run flux"),
        (STOCK | {"flux-eager": _run((4, 0), (8, 0), "stores", weights=2.5)}, "same weights"),
    ],
)
def test_a_run_that_was_not_what_its_name_says_is_found(compare: Any, runs: Any, fault: str | None) -> None:
    faults = compare.faults_of(runs, [], cpu=False)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_found_on_either_side(compare: Any, bad: float) -> None:
    good, broken = [[{1: -0.5, 8: -1.0}]], [[{1: bad, 8: -1.0}]]
    for ours, theirs in (good, broken), (broken, good):
        found = compare.compare_forced([[9, 1]], ours, theirs)
        assert found == {"positions": 0, "not_finite": 1}
        assert compare.faults_of({}, [{"runs": ["a", "b"], "forced": found}], cpu=False)
