"""The smoke test of versions of vLLM that flux has not been run with (flux.integrations.vllm.smoke_test)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from vllm_stand_in import define_all_reduce, define_norm, stand_in

from flux.integrations.vllm import graph, smoke_test
from flux.ops.gemm_ar import row_norm
from flux.testing import spawn


def failure(*defined: Callable[[], Any]) -> str | None:
    """What the test finds where these operators are defined."""
    libraries = [define() for define in defined]
    with mock.patch.dict(sys.modules, stand_in()):
        for known in ("0.26.0", "0.33.1+cpu"):
            assert smoke_test.failure(known) is None
        found = [smoke_test.failure(version) for version in ("0.34.0", "0.3.3", "1.0.dev5", "main")]
    del libraries
    assert found == found[:1] * len(found)
    return found[0]


def all_found(rank: int, world_size: int) -> dict[str, str | None]:
    """Where nothing else defines vLLM's operators."""
    as_vllms = (define_all_reduce, partial(define_norm, row_norm))  # what flux takes for granted
    told = {
        "the same": failure(*as_vllms),
        "no norm": failure(define_all_reduce),
        "another norm": failure(define_all_reduce, define_norm),
        "no sum": failure(*as_vllms[1:]),
    }
    for broken in ("fuse_norm", "unfuse"):  # rewrites that find nothing
        assert hasattr(graph, broken)
        with mock.patch.object(smoke_test, broken, lambda *arguments: 0):
            told[broken] = failure(*as_vllms)
    return told


def test_what_is_found_of_versions() -> None:
    (told,) = spawn(all_found, 1, backend="gloo")
    assert told["the same"] is None
    assert told["no norm"] is None, "flux fuses none then"
    assert told["another norm"] == "its fused_add_rms_norm gives something else"
    assert told["no sum"].startswith("a smoke test raised AttributeError") and "all_reduce" in told["no sum"]
    for broken in ("fuse_norm", "unfuse"):
        assert told[broken].startswith("flux cannot") and told[broken].endswith("in a graph")
