"""AllReduce with residual and RMSNorm, as behind a GEMM that is not flux's, from CUDA graphs.

One call of flux, against flux.all_reduce and then torch's norm, and against the peers of all_reduce, behind
which torch adds and normalises.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import flux
from flux.bench.cases.common import (
    CALLS,
    Candidate,
    Context,
    Prepared,
    agree,
    collectives,
    compare,
    explained,
)
from flux.bench.cases.graphs import Step, graphed, symm_mem_all_reduce
from flux.bench.model import passed
from flux.bench.suites import Problem
from flux.ops import gemm
from flux.ops.gemm_ar import rms_norm
from flux.testing import GemmRsCase

_EPS = 1e-6
_K = 32  # of the products that are summed in the check


def check(problem: Problem, context: Context) -> str:
    """flux.all_reduce of integers with each rank's mark: sums must be exact, norms agree with torch's."""
    m, n, _ = problem.local(context.tp)
    norm_weight = torch.linspace(0.5, 1.5, n, device=context.device).to(context.dtype)
    said = "exact"
    for seed in range(CALLS):
        case = GemmRsCase(m, n, _K, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        residual = case.residual(context.device)
        norm, total = flux.all_reduce(
            gemm.reference(x, weight),
            group=context.group,
            residual=residual,
            norm_weight=norm_weight,
            eps=_EPS,
        )
        expected = case.expected_sum(context.device) + residual
        said = compare(total, expected)
        if said == "exact":
            said = agree({"norm": norm}, {"norm": rms_norm(expected, norm_weight, _EPS)})
        if not passed(said):
            break
    flux.check(context.group)
    return said


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
