"""Plans of the operators whose ranks exchange vectors: gemm_ar, all_reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch

from flux import _invariance, _native
from flux.comm.workspace import round_up
from flux.ops import _invariant
from flux.ops.plan import CPU_NUM_SMS, PLANNERS, Plan, can_run_fused, chosen

# The largest matrix that an exchange holds.
MAX_EXCHANGE_BYTES = 64 << 20
# Larger sums are bound by the link, and gemm_rs hides half of the transfer. For four projections on two
# GPUs gemm_rs and all_gather took 20 to 34 % longer than an exchange for sums of 8 MiB, 1 to 7 % less for
# 16 MiB and 10 to 29 % less for 64 MiB
# (benchmarks/results/tuning/2026-11-22-gemm_ar-composed-tp2-2xH200.json).
COMPOSED_FROM_BYTES = 12 << 20
# Where the ranks do not divide the rows, the rest is another exchange, which reads the weight once more. That
# is expected to take as long as what composing gains for 16 MiB, a fifth of what it gains for 32.
RAGGED_FROM_BYTES = 2 * COMPOSED_FROM_BYTES
# Elements of the kernels' 16-byte vectors. On CPUs matrices of any dtype are padded to a multiple of it.
VECTOR = 8
_BY_TORCH = "torch.distributed.all_reduce"

# A valid size for dimensions that an operator does not have.
_NO_MATTER = VECTOR
# Value of `config` without a tile shape; must be equal on all ranks.
_NO_TILE = 0


def plan_gemm_ar(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of a GEMM+AllReduce. `num_sms` is that of the group's smallest GPU (0 on CPU).

    `fused` without a `mode`: composed of flux.gemm_rs and flux.all_gather, and of an exchange of the last
    rows if the ranks do not divide all.
    """
    fused, reason = can_run_fused(
        "gemm_ar", device_type=device_type, dtype=dtype, m=m, n=n, k=k, why_not=why_not
    )
    common = ("gemm_ar", m, n, k, dtype, world_size, transpose_weight)
    if not fused:
        return Plan(*common, False, _BY_TORCH, reason)
    sum_bytes = m * n * dtype.itemsize
    rest, invariant = m % world_size, _invariance.active()
    # A sum that is composed is rounded before the residual is added.
    if invariant and sum_bytes > MAX_EXCHANGE_BYTES >= n * dtype.itemsize:
        parts = len(split_rows(m, n, dtype))
        return Plan(*common, True, f"{transport}, in {parts} parts", "batch invariant: exchanges only")
    composed_from = RAGGED_FROM_BYTES if rest else COMPOSED_FROM_BYTES
    if not invariant and m >= world_size and sum_bytes >= composed_from:
        reason = f"a sum of {sum_bytes / 2**20:.0f} MiB is sooner there as gemm_rs + all_gather"
        reason += f", of {rest} rows by exchange" if rest else ""
        return Plan(*common, True, "those of gemm_rs and all_gather", reason)
    if sum_bytes > MAX_EXCHANGE_BYTES:
        reason = f"the sum has {sum_bytes / 2**20:.0f} MiB, more than an exchange holds"
        reason += f", and m = {m} cannot be dealt to {world_size} ranks"
        return Plan(*common, False, _BY_TORCH, reason)
    choice = _invariant.select("gemm_ar", m, n, k, transpose_weight, 1, num_sms or CPU_NUM_SMS)
    two_launches = device_type == "cuda" and not choice.sums_in_launch
    exchange = _exchanged(device_type, m, n, dtype, world_size, transport, alone=two_launches)
    reason += f"; {exchange.pop('reason')}"
    if device_type == "cuda":
        reason += f"; {'two launches: GEMM, sum' if two_launches else 'one launch'}"
    return Plan(*common, True, **(chosen(choice, reason) | exchange))


def split_rows(m: int, n: int, dtype: torch.dtype) -> list[slice]:
    """The rows of a matrix [m, n], in parts that an exchange holds."""
    rows = max(1, MAX_EXCHANGE_BYTES // (n * dtype.itemsize))
    return [slice(first, min(first + rows, m)) for first in range(0, m, rows)]


def plan_all_reduce(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of an AllReduce of m * n elements, as one row. The other arguments are those of any plan."""
    return _summed(device_type, 1, m * n, dtype, world_size, why_not, transport)


def plan_all_reduce_norm(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of an AllReduce of m rows of n elements with RMSNorm, for which ranks share whole rows. The
    other arguments are those of any plan.
    """
    return _summed(device_type, m, n, dtype, world_size, why_not, transport, alone=device_type == "cuda")


def _summed(
    device_type: str,
    m: int,
    n: int,
    dtype: torch.dtype,
    world_size: int,
    why_not: str | None,
    transport: str,
    *,
    alone: bool = False,
) -> Plan:
    """The plan of an AllReduce of a matrix [m, n]. `alone`: as of _exchanged."""
    fused, reason = _can_sum_fused("all_reduce", device_type, m, n, dtype, world_size, why_not)
    common = ("all_reduce", m, n, 0, dtype, world_size, False, fused)
    if not fused:
        return Plan(*common, "none (one rank)" if world_size == 1 else _BY_TORCH, reason)
    exchange = _exchanged(device_type, m, n, dtype, world_size, transport, alone=alone)
    return Plan(*common, **(exchange | {"reason": f"{reason}; {exchange['reason']}", "config": _NO_TILE}))


def plan_reduce_scatter(
    device_type: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    world_size: int,
    why_not: str | None,
    num_sms: int,
    transport: str,
) -> Plan:
    """The plan of a ReduceScatter of m * n elements, as one row for each rank."""
    share = m * n // world_size
    fused, reason = _can_sum_fused(
        "reduce_scatter", device_type, world_size, share, dtype, world_size, why_not
    )
    common = ("reduce_scatter", world_size, share, 0, dtype, world_size, False, fused)
    if not fused:
        by_torch = "torch.distributed.reduce_scatter_tensor"
        return Plan(*common, "none (one rank)" if world_size == 1 else by_torch, reason)
    scatter = _native.core.ExchangeMode.SCATTER
    exchange = _native.core.exchange(world_size, round_up(share, VECTOR), world_size, scatter)
    room: dict[str, Any] = _room(device_type, exchange.bytes, world_size, dtype)
    return Plan(*common, transport, reason, config=_NO_TILE, mode=int(scatter), **room)


def _can_sum_fused(
    op: str, device_type: str, m: int, n: int, dtype: torch.dtype, world_size: int, why_not: str | None
) -> tuple[bool, str]:
    """Whether an exchange can sum x [m, n] over ranks, and the reason."""
    if world_size == 1:
        return False, "one rank: x is the sum"
    fused, reason = can_run_fused(
        op, device_type=device_type, dtype=dtype, m=m * n, n=_NO_MATTER, k=_NO_MATTER, why_not=why_not
    )
    if fused and device_type == "cuda" and n % VECTOR:
        return False, f"{n} elements are no whole number of 16-byte vectors"
    if fused and m * n * dtype.itemsize > MAX_EXCHANGE_BYTES:
        return False, f"x has {m * n * dtype.itemsize / 2**20:.0f} MiB, more than an exchange holds"
    return fused, reason


PLANNERS["gemm_ar"] = plan_gemm_ar
PLANNERS["all_reduce"] = plan_all_reduce
PLANNERS["all_reduce_norm"] = plan_all_reduce_norm
PLANNERS["reduce_scatter"] = plan_reduce_scatter


def _exchanged(
    device_type: str,
    m: int,
    n: int,
    dtype: torch.dtype,
    world_size: int,
    transport: str,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """How ranks sum a matrix [m, n], why, and the workspace sizes that they need.

    `alone`: a kernel without a GEMM, which treats the matrix as one row, or distributes its rows over ranks.
    """
    core = _native.core
    padded = round_up(n, VECTOR)
    rows = m
    if alone:
        mode = core.all_reduce_mode(1, m * padded, world_size)
        rows = round_up(m, world_size) if mode == core.ExchangeMode.TWO_SHOT else m
    else:
        mode = core.all_reduce_mode(m, padded, world_size)
    name, other = "one-shot", "two-shot"
    if mode == core.ExchangeMode.TWO_SHOT:
        name, other = other, name
    payload = m * padded * dtype.itemsize / 2**10
    sent = {
        "one-shot": f"{payload * (world_size - 1):.1f} KiB in one trip",
        "two-shot": f"{2 * payload * (world_size - 1) / world_size:.1f} KiB in two",
    }
    return {
        "transport": f"{transport}, {name}",
        "reason": f"{name} sends {sent[name]}, {other} would send {sent[other]}",
        "mode": int(mode),
        **_room(device_type, core.exchange(rows, padded, world_size, mode).bytes, world_size, dtype),
    }


def _room(device_type: str, exchange_bytes: int, world_size: int, dtype: torch.dtype) -> dict[str, int]:
    """The workspace sizes for an exchange area whose layout has `exchange_bytes` (of 2-byte elements)."""
    # The layout counts in 2-byte elements.
    area = round_up(exchange_bytes * dtype.itemsize // 2)
    if device_type == "cuda":
        return {"signal_bytes": 0, "slot_bytes": 0, "exchange_bytes": area}
    # On CPUs data is announced by signals: for each peer a word for contributions and a word for results.
    return {"signal_bytes": round_up(4 * 2 * (world_size - 1)), "slot_bytes": area, "exchange_bytes": 0}


def exchange_room(
    device_type: str, max_m: int, max_n: int, world_size: int, dtype: torch.dtype
) -> dict[str, int]:
    """signal_bytes, slot_bytes and exchange_bytes for any sum of up to max_m rows and max_n columns.

    The largest sum is not the maximum, because a smaller sum in one-shot mode may need more.
    """
    core = _native.core
    edge = max_m * VECTOR  # maximum padding of columns to whole vectors
    most = min(max_m * max_n, MAX_EXCHANGE_BYTES // dtype.itemsize) + edge
    one_shot, too_many = 0, most // VECTOR + 1  # in vectors; smaller sums are one-shot
    while too_many - one_shot > 1:
        middle = (one_shot + too_many) // 2
        if core.all_reduce_mode(1, middle * VECTOR, world_size) == core.ExchangeMode.ONE_SHOT:
            one_shot = middle
        else:
            too_many = middle
    # Two-shot: contributions and results, with shards rounded up, and rows rounded up to the world size.
    dealt = 2 * world_size * (max_n + VECTOR + VECTOR * world_size)
    elements = max(one_shot * VECTOR * world_size, 2 * most + edge * world_size + dealt)
    # Plus the constant part of every exchange area.
    smallest = core.exchange(1, VECTOR, world_size, core.ExchangeMode.ONE_SHOT)
    return _room(device_type, 2 * elements + smallest.bytes, world_size, dtype)
