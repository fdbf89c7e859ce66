"""A call broken off at any line leaves no trace or a recorded failure, and a release mends the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_off import broken_at, complaints, lines_of, work

import flux
from flux.comm import registry
from flux.testing import spawn


# All lines of all calls: `make faults`.
@pytest.mark.parametrize(
    ("call", "state", "every"),
    [("gemm_rs", "grown", 8), ("gemm_ar", "first", 30), ("ag_gemm", "known", 16), ("moe", "known", 40)],
)
def test_lines_of_a_call(call: str, state: str, every: int) -> None:
    results = spawn(work, 2, call, state, 3, every, backend="gloo", timeout_s=300)
    assert len(results[0]) >= 10
    assert complaints(results) == []
    tried = [told["again"] for _, told in results[0] if told["injected"] == "yes"]
    assert {"exact", "broken off"} <= set(tried), "before the peers heard of the call, and after"


def test_the_lines_are_those_of_the_package() -> None:
    x, weight = torch.ones(4, 3), torch.ones(2, 3)
    flux.gemm(x, weight)  # what is looked up once
    lines = lines_of(lambda: flux.gemm(x, weight))
    assert len(lines) > 10
    assert {name.split("/")[0] for name, _ in lines} <= {
        "ops",
        "calls",
        "fp8",
        "plan",
        "comm",
        "_memory.py",
        "_invariance.py",
    }
    for line in lines:
        with pytest.raises(BaseException, match=line[0]), broken_at(line):
            flux.gemm(x, weight)


def stale(rank: int, p: int) -> list[str]:
    """A call is broken off on rank 0 when both ranks make room for it."""
    told = []

    def call(value: float, m: int) -> None:
        try:
            result = flux.gemm_rs(torch.full((p * m, 1), value), torch.ones(4, 1))
            told.append(str(set(result.flatten().tolist())))
        except RuntimeError as error:
            told.append(type(error).__name__)

    call(1.0, 4)
    workspace: Any = registry.existing(dist.group.WORLD)[0]  # type: ignore[arg-type]
    workspace.timeout_s = 0.5
    if rank == 0:
        announce = workspace._announce

        def fail() -> None:
            announce()
            if workspace._epoch == 0:
                raise MemoryError

        workspace._announce = fail
        with pytest.raises(MemoryError):
            flux.gemm_rs(torch.ones(p * 400, 1), torch.ones(4, 1))
        workspace._announce = announce
    else:
        call(1.0, 400)
    call(100.0, 400)
    flux.release()
    call(100.0, 400)
    return told


def test_no_rank_sums_what_a_broken_call_left() -> None:
    results = spawn(stale, 2, backend="gloo", env={"FLUX_TIMEOUT_S": "10"})
    assert results[0] == ["{2.0}", "RuntimeError", "{200.0}"]
    assert results[1] == ["{2.0}", "CommTimeoutError", "CommTimeoutError", "{200.0}"]
