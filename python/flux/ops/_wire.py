"""Contributions to sums over ranks that travel as int8 with one scale for each 128 elements of a row: about
half the bytes of 16 bits.

Each rank quantises what it has for the others, one all-to-all exchanges it, and each rank sums what arrives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance
from flux.comm.workspace import Same
from flux.ops import _check, _scales, quantize
from flux.ops._records import Records

Tensor = torch.Tensor
WIRES = ("int8",)
_MOST = 127.0
_AnyPlan = TypeVar("_AnyPlan", bound=Any)


def check(op: str, wire: object, dtype: torch.dtype) -> None:
    """Checks the argument `wire` of a sum with results of a dtype."""
    if wire is None:
        return
    if wire not in WIRES:
        _check.fail(op, "wire", "None or 'int8'", repr(wire))
    if dtype not in _scales.OUT:
        _check.fail(op, "wire", f"None for sums of {dtype}", repr(wire))


def same(wire: str | None) -> Same:
    """What ranks compare of it."""
    return {} if wire is None else {"wire": wire}


def planned(plan: _AnyPlan) -> _AnyPlan:
    """The plan of a call with the same operands whose contributions travel as int8."""
    none: dict[str, Any] = {"signal_bytes": 0, "slot_bytes": 0, "exchange_bytes": 0}
    return replace(plan, fused=False, reason="contributions travel as int8: there is no kernel", **none)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of rows [rows, n], and their scales [rows, n / 128]: scale = max(amax, 1e-10) / 127, q = x * (1 /
    scale) rounded to nearest even, in fp32.
    """
    wide = x.to(torch.float32)
    scale = quantize.scales_of(quantize.amax_of(wide, "group128"), _MOST, False)
    values = wide * spread(1.0 / scale, x.shape[1])
    # The scale of a group with a NaN is NaN, whatever its numbers are.
    return values.nan_to_num(0.0).round().clamp(-_MOST, _MOST).to(torch.int8), scale


def spread(scale: Tensor, n: int) -> Tensor:
    """Scales [rows, n / 128] for each element [rows, n]."""
    return scale.repeat_interleave(_scales.BLOCK, 1)[:, :n]


def dequantised(q: Tensor, scale: Tensor) -> Tensor:
    """What rows stand for, in fp32."""
    return q.to(torch.float32) * spread(scale, q.shape[1])


def sum_of(parts: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks of their parts [p, rows, n] for this one, [rows, n] in fp32, in rank order. The own
    part does not travel, and is not rounded, unless a row must not depend on the rank that owns it.
    """
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
            total += dequantised(form.rows(packed), form.scales(packed))
    return total
