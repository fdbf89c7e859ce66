"""What a call will do, and why: flux.explain."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _deprecated, _invariance
from flux.calls import argument_types, checks
from flux.comm import group as groups
from flux.comm import registry
from flux.errors import fail
from flux.fp8.scales import FP8, Scaling, check_how, kind_of
from flux.plan.choose import plan_without_workspace, workspace_plan
from flux.plan.plan import Plan, PlanInput

OPS = ("gemm", "gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")


@_deprecated.arguments("group", "transpose_weight")
def explain(
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: groups.GroupLike = None,
    transpose_weight: bool = False,
    norm: bool = False,
    scales: str | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
) -> Plan:
    """What a call of `op` with x [m, k] and weight [n, k] (or [k, n]) does, and why.

    Decides for the current CUDA device if there is one, else for CPU tensors. Not a collective: before the
    group's first call it cannot know whether the peers can be reached, and says so in `reason`.

    Args:
        op: "gemm", "gemm_rs", "ag_gemm", "gemm_ar", "all_reduce" or "reduce_scatter". The layers of flux.moe
            are planned for a routing; `flux bench moe` prints how they run.
        m: rows of x on one rank; for ag_gemm the gathered rows.
        n: columns of the result on one rank: for ag_gemm this rank's part of N. Of all_reduce and
            reduce_scatter the columns of x.
        k: columns of x on one rank: for gemm_rs and gemm_ar this rank's part of K. Nothing for all_reduce and
            reduce_scatter.
        dtype: of x.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [k, n].
        norm: of gemm_ar and all_reduce: with `norm_weight`.
        scales: of a float8 dtype: "tensor", "row" (x and weight as flux.quantize makes them so) or "block" (x
            by "group128", weight by "block128").
        out_dtype: with `scales`, of the result.
        accumulate: with `scales`: "promoted" or "fast".

    Returns:
        The plan; printing it explains it.

    Raises:
        TypeError: an argument is of another type.
        ValueError: unknown op or group, a negative size, an unsupported dtype, `norm` of another op, or m not
            divisible by the ranks where these share rows.

    Example::

        plan = flux.explain("gemm_rs", m=1024, n=1024, k=256, dtype=torch.float32)
        print(plan)
        assert plan.by_flux or plan.reason
    """
    if op == "gemm_ar_norm":
        _deprecated.warn("explain('gemm_ar_norm')", "use 'gemm_ar' with norm=True")
        op, norm = "gemm_ar", True
    if op not in OPS:
        fail("explain", "op", f"one of {', '.join(OPS)} (`flux bench moe` prints flux.moe's)", repr(op))
    how = {"scales": scales, "out_dtype": out_dtype, "accumulate": accumulate}
    argument_types.check(
        "explain", m=m, n=n, k=k, dtype=dtype, transpose_weight=transpose_weight, norm=norm, **how
    )
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 0:
            fail("explain", name, "a size", size)
    scaling = _scaling(op, dtype, scales, out_dtype, accumulate)
    if norm and op not in ("gemm_ar", "all_reduce"):
        fail("explain", "norm", f"False, as {op} has no norm", norm)
    if norm and op == "gemm_ar":
        op = "gemm_ar_norm"
    device = current_device()
    process_group = None if op == "gemm" else groups.resolve_group(group, "explain")
    world_size = 1 if process_group is None else process_group.size()
    if op in ("gemm_rs", "ag_gemm", "reduce_scatter") and m % world_size:
        fail("explain", "m", f"a multiple of the {world_size} ranks of the group", m)
    return _planned(op, device, process_group, m, n, k, dtype, transpose_weight, scaling)


def _planned(op: str, device: torch.device, group: ProcessGroup | None, *problem: Any) -> Plan:
    """problem: as of problem_of."""
    world_size = 1 if group is None else group.size()
    workspace = None if group is None or world_size == 1 else registry.find(group, device)
    if workspace is not None:
        return workspace_plan(workspace, op, *problem)
    m, n, k, dtype, transpose_weight, scaling = problem
    of_device = PlanInput(device.type, m, n, k, dtype, transpose_weight, world_size, scaling=scaling)
    return plan_without_workspace(op, of_device, device, _invariance.active())


def _scaling(
    op: str, dtype: torch.dtype, scales: str | None, out_dtype: torch.dtype | None, accumulate: str
) -> Scaling | None:
    if dtype not in FP8:
        if dtype not in checks.FLOATING:
            fail("explain", "dtype", "bfloat16, float16, float32, float64 or a float8", dtype)
        for name, value in (("scales", scales), ("out_dtype", out_dtype)):
            if value is not None:
                fail("explain", name, f"None, as the dtype is {dtype}", value)
        return None
    if scales not in ("tensor", "row", "block"):
        fail("explain", "scales", f"tensor, row or block, as the dtype is {dtype}", scales)
    check_how("explain", out_dtype or torch.bfloat16, accumulate)
    return Scaling(kind_of(op, scales), out_dtype or torch.bfloat16, accumulate == "fast")


def why_unfused(
    op: str, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, group_name: str, **how: Any
) -> str | None:
    """Why a collective call would not run fused, or None: without checks, and fast enough to use in each."""
    options = how.get("transpose_weight", False), how.get("scaling")
    plan = _planned(op, device, groups.process_group(group_name), m, n, k, dtype, *options)
    return None if plan.by_flux else plan.reason


def current_device() -> torch.device:
    """Default device of explain and reserve: the current GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
