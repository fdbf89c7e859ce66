"""flux.ops.explain.why_unfused: what flux.explain says, without the cost of asking at every call."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

import flux
from flux.comm import registry
from flux.ops import explain as asking
from flux.plan import choose
from flux.plan.choose import PLANNERS
from flux.testing import spawn

CPU = torch.device("cpu")
OPS = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")


def asked(rank: int, p: int) -> int:
    name = dist.group.WORLD.group_name
    sizes = ((8 * p, 24, 16), (8 * p, 0, 16))
    for _ in range(2):
        for op in OPS:
            for m, n, k in sizes:
                explained = flux.explain(op, m, n, k)
                reason = asking.why_unfused(op, m, n, k, torch.bfloat16, CPU, name)
                assert reason == (None if explained.by_flux else explained.reason), op
                assert (reason is None) == (n > 0)
        flux.all_reduce(torch.ones(8))  # from now on there is a workspace
    # Neither with a workspace nor without is anything decided twice.
    for _ in range(2):
        with mock.patch.dict(PLANNERS, {op: mock.Mock(side_effect=AssertionError) for op in OPS}):
            assert asking.why_unfused("gemm_rs", *sizes[0], torch.bfloat16, CPU, name) is None
        flux.release()
    assert registry.find(dist.group.WORLD, CPU) is None
    return rank


def test_it_says_what_explain_says() -> None:
    assert spawn(asked, 2, backend="gloo") == [0, 1]


def test_another_size_of_the_group_is_another_question() -> None:
    choose.plan_without_workspace.cache_clear()
    why_not = "the kernels need another GPU"
    gpu = torch.device("cuda", 0)
    properties = mock.patch(
        "torch.cuda.get_device_properties",
        return_value=SimpleNamespace(multi_processor_count=8, major=8, minor=0),
    )
    with properties, mock.patch.object(choose.cuda, "why_not", return_value=why_not):
        for size in (2, 4, 2):
            group = mock.Mock(size=lambda size=size: size)
            with mock.patch.object(asking.groups, "process_group", return_value=group):
                told = asking.why_unfused("gemm_ar", 4, 8, 8, torch.bfloat16, gpu, "tp")
            assert told == why_not
    assert choose.plan_without_workspace.cache_info().misses == 2
    choose.plan_without_workspace.cache_clear()
