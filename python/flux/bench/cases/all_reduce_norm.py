"""AllReduce with residual and RMSNorm, as behind a GEMM that is not flux's, from CUDA graphs.

One call of flux, against flux.all_reduce and then torch's norm, and against the peers of all_reduce, behind
which torch adds and normalises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    collectives,
    explained,
)
from flux.bench.cases.gemm_ar_norm import check_sums
from flux.bench.cases.graphs import Step, graphed, symm_mem_all_reduce
from flux.bench.suites import Problem
from flux.ops import gemm

_EPS = 1e-6
_K = 32  # of the products that are summed in the check


def check(problem: Problem, context: Context) -> str:
    """flux.all_reduce of integers with each rank's mark: sums must be exact, norms agree with torch's."""
    m, n, _ = problem.local(context.tp)

    def call(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        norm, total = flux.all_reduce(gemm.reference(x, weight), **options)
        return norm, total

    return check_sums(call, m, n, _K, context)


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, _ = problem.local(context.tp)
    group = context.group
    assert group is not None
    # Some are summed in place repeatedly: anything but zeros would soon overflow.
    x, summed, residual = (torch.zeros(m, n, dtype=context.dtype, device=context.device) for _ in range(3))
    norm_weight = torch.ones(n, dtype=context.dtype, device=context.device)

    def candidate(name: str, role: str, step: Step) -> Candidate:
        return graphed(name, role, step, [x], context)

    def normalised(total: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(total, (n,), norm_weight, _EPS)

    def added_and_normalised(total: torch.Tensor) -> torch.Tensor:
        return normalised(total + residual)

    def by_torch(_: torch.Tensor) -> None:
        dist.all_reduce(summed, group=group)
        added_and_normalised(summed)

    candidates = [
        candidate(
            "flux",
            "flux",
            lambda x: flux.all_reduce(x, group=group, residual=residual, norm_weight=norm_weight, eps=_EPS),
        ),
        candidate(
            "flux.all_reduce+norm",
            "peer",
            lambda x: normalised(flux.all_reduce(x, group=group, residual=residual)),
        ),
        candidate(collectives(context), "peer", by_torch),
    ]
    notes: list[str] = []
    if context.cuda:
        peers, notes = symm_mem_all_reduce(
            m, n, "", lambda x, partial: None, [x], context, added_and_normalised
        )
        candidates += peers
    return Prepared(candidates, explained("all_reduce", m, n, 0, context), notes)
