"""The smoke test of versions of vLLM that flux has not been run with (flux.integrations.vllm.smoke_test)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
from vllm_stand_in import define_all_reduce, define_norm, stand_in

from flux.integrations.vllm import graph, smoke_test
from flux.ops.gemm_ar import row_norm
from flux.testing import spawn

DIFFERS = "its fused_add_rms_norm gives something else"


# With the results that flux takes for granted.
define_vllms_norm = partial(define_norm, row_norm)


def failure(rank: int, world_size: int, *defined: Callable[[], Any]) -> str | None:
    """What the test finds where these operators are defined."""
    libraries = [define() for define in defined]
    with mock.patch.dict(sys.modules, stand_in()):
        for known in ("0.26.0", "0.33.1+cpu"):
            assert smoke_test.failure(known) is None
        found = [smoke_test.failure(version) for version in ("0.34.0", "0.3.3", "1.0.dev5", "main")]
    del libraries
    assert found == found[:1] * len(found)
    return found[0]


def tried(*defined: Callable[[], Any]) -> str | None:
    found: str | None = spawn(failure, 1, *defined, backend="gloo")[0]
    return found


def test_a_version_that_does_the_same_is_served() -> None:
    assert tried(define_all_reduce, define_vllms_norm) is None


def test_a_version_without_the_norm_is_served() -> None:
    """flux fuses no norm then."""
    assert tried(define_all_reduce) is None


def test_a_norm_with_other_results_is_found() -> None:
    assert tried(define_all_reduce, define_norm) == DIFFERS


def test_a_version_without_the_sum_is_found() -> None:
    found = tried(define_vllms_norm)
    assert (
        found is not None and found.startswith("a smoke test raised AttributeError") and "all_reduce" in found
    )


@pytest.mark.parametrize("broken", ["fuse_norm", "unfuse"])
def test_graphs_that_flux_cannot_rewrite_are_found(broken: str) -> None:
    found = spawn(failure_with, 1, broken, backend="gloo")[0]
    assert found is not None and found.startswith("flux cannot") and found.endswith("in a graph")


def failure_with(rank: int, world_size: int, broken: str) -> str | None:
    """What the test finds if a rewrite finds nothing."""
    assert hasattr(graph, broken)
    with mock.patch.object(smoke_test, broken, lambda *arguments: 0):
        return failure(rank, world_size, define_all_reduce, define_vllms_norm)
