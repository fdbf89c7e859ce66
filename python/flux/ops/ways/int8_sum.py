"""Contributions to sums over ranks that travel as int8 with one scale for each 128 elements of a row:
quantised, sent and summed by one kernel (csrc/gemm_ar/int8_sum.cu), elsewhere with torch, with the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance, _native
from flux._memory import readable, writable
from flux.calls import checks
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import Same, Workspace, round_up
from flux.fp8 import scales as fp8
from flux.fp8.scales import Records
from flux.ops import quantize
from flux.plan.sums import MAX_EXCHANGE_BYTES, VECTOR

Tensor = torch.Tensor
_MOST = 127.0
_AnyPlan = TypeVar("_AnyPlan", bound=Any)


def check(op: str, wire: object, dtype: torch.dtype) -> None:
    """Checks the argument `wire` of a sum with results of a dtype."""
    if wire not in (None, "int8"):
        checks.fail(op, "wire", "None or 'int8'", repr(wire))
    if wire is not None and dtype not in fp8.OUT:
        checks.fail(op, "wire", f"None for sums of {dtype}", repr(wire))


def same(wire: str | None) -> Same:
    return {} if wire is None else {"wire": wire}


def planned(plan: _AnyPlan, workspace: Workspace, rows: int, n: int) -> _AnyPlan:
    """The plan of a call whose contributions, [rows, n] for each rank, travel as int8."""
    reason, why_not = "contributions travel as int8", _why_not(workspace, rows, n)
    room = {"signal_bytes": 0, "slot_bytes": 0, "exchange_bytes": 0}
    if why_not is not None:
        return replace(plan, by_flux=False, reason=f"{reason}: {why_not}", **room)
    most = min(rows, rows_at_once(n, workspace.world_size))
    room["exchange_bytes"] = round_up(_native.core.int8_scatter_bytes(most, n, workspace.world_size))
    return replace(plan, by_flux=True, reason=reason, **room)


def _why_not(workspace: Workspace, rows: int, n: int) -> str | None:
    """Why the kernel does not sum rows of n elements, or None."""
    if not isinstance(workspace, CudaWorkspace):
        return "no kernel for CPUs and several nodes"
    if workspace.why_not is not None:
        return workspace.why_not
    if rows * n == 0:
        return "the problem is empty"
    if n % VECTOR:
        return f"rows of {n} elements are no whole number of 16-byte vectors"
    if rows_at_once(n, workspace.world_size) == 0:
        return f"a row of {n} elements is more than an exchange holds"
    return None


def rows_at_once(n: int, world_size: int) -> int:
    """The most rows of n elements that ranks exchange in one launch."""
    of_groups: int = _native.core.int8_scatter_bytes(1, VECTOR, world_size)  # of up to four
    return MAX_EXCHANGE_BYTES // of_groups * 4 // -(-n // fp8.BLOCK)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of rows [rows, n], and scales [rows, n / 128]: max(amax, 1e-10) / 127; rounded to nearest even."""
    wide = x.to(torch.float32)
    scale = quantize.scales_of(quantize.amax_of(wide, "group128"), _MOST, False)
    values = wide * quantize.spread(1.0 / scale, "group128", x)
    # The scale of a group with a NaN is NaN, whatever its numbers are.
    return values.nan_to_num(0.0).round().clamp(-_MOST, _MOST).to(torch.int8), scale


def sum_into(out: Tensor, parts: Tensor, workspace: Workspace, plan: Any) -> None:
    """Writes the sum over ranks of their parts [p, rows, n] for this one to `out` [rows, n], contiguous."""
    if not plan.by_flux:
        out.copy_(sum_of(parts, workspace.group))
        return
    assert isinstance(workspace, CudaWorkspace)
    parts = readable(parts)
    target = writable(out)
    most = rows_at_once(parts.shape[2], workspace.world_size)
    for first in range(0, parts.shape[1], most):
        rows = slice(first, first + most)
        with workspace.enter(plan) as (symm_buffer, _):
            _kernel(parts[:, rows], target[rows], symm_buffer, workspace.num_sms, _invariance.active())
    if target is not out:
        out.copy_(target)


def sum_of(parts: Tensor, group: ProcessGroup) -> Tensor:
    """The fp32 sum of all ranks' parts [p, rows, n] for this one; its own is exact, unless invariant."""
    p, rows, n = parts.shape
    total = parts.new_zeros(rows, n, dtype=torch.float32)
    if parts.numel() == 0:
        return total
    q, scale = quantised(parts.reshape(p * rows, n))
    form = Records(n, torch.int8, scale.shape[1])
    sent = form.pack(q, scale).view(p, -1)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    for source, packed in enumerate(arrived.view(p, rows, -1)):
        if source == group.rank() and not _invariance.active():
            total += parts[source]
        else:
            total += quantize.dequantized(form.rows(packed), form.scales(packed), "group128")
    return total


_kernel: Any = torch.ops.flux._reduce_scatter_int8.default
