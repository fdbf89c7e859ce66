"""Plans of the operators whose ranks exchange vectors: gemm_ar, all_reduce and reduce_scatter."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from flux import _invariance, _native
from flux.comm.workspace import round_up
from flux.plan.choose import PLANNERS, WAYS, Plan, PlanInput, chosen, in_parts, select_tile, why_not_fused

# The largest matrix that an exchange holds.
MAX_EXCHANGE_BYTES = 64 << 20
# Larger sums are bound by the link, and gemm_rs hides half of the transfer (docs/design/decode.md).
COMPOSED_FROM_BYTES = 12 << 20
# Of two GPUs, whose exchange sends no more than gemm_rs and all_gather do. A norm is one more pass behind
# these, so that with a norm all sums that fit are exchanged.
PAIR_COMPOSED_FROM_BYTES = 48 << 20
# Where the ranks do not divide the rows, the rest is another exchange, which reads the weight once more. That
# is expected to take as long as what composing gains for 16 MiB, a fifth of what it gains for 32.
RAGGED_FROM_BYTES = 2 * COMPOSED_FROM_BYTES
# Rows for which there is a kernel that multiplies 16-bit operands and sums over ranks (csrc/gemm/swap_ab.h).
# What was measured for others is of kernels that are gone.
KERNEL_ROWS = range(17, 257)
# Where it shortens a decoder layer. Elsewhere a plan takes it only if it was measured to be sooner
# (docs/design/decisions.md#gemm_ar-keeps-the-fused-tiles-that-shorten-a-decoder-layer).
_SOONER_ROWS, _SOONER_RANKS = range(48, 193), 4
# Elements of the kernels' 16-byte vectors. On CPUs matrices of any dtype are padded to a multiple of it.
VECTOR = 8
# Between more than two ranks, the time of a second trip with a norm over that without one. In a launch of
# its own, an owner of a few rows has few CTAs to sum and normalise them; behind a GEMM, CTAs have less to sum
# after two hops (docs/design/decode.md#one-shot-or-two-shot-with-a-norm).
_TRIP_ALONE_WITH_NORM, _TRIP_BEHIND_GEMM_WITH_NORM = 2.8, 0.35

# Of flux.gemm_rs and flux.all_gather, and of an exchange of the last rows if the ranks do not divide all.
_COMPOSED = {"way": "composed", "transport": "those of gemm_rs and all_gather"}
# A valid size for dimensions that an operator does not have.
_NO_MATTER = VECTOR
# Value of `config` without a tile shape; must be equal on all ranks.
_NO_TILE = 0


def plan_gemm_ar(problem: PlanInput, *, norm: bool = False) -> Plan:
    """The plan of a GEMM+AllReduce. norm: with RMSNorm."""
    if (why_not := why_not_fused("gemm_ar", problem)) is not None:
        return problem.unfused("gemm_ar", why_not)
    m, n, p, dtype = problem.m, problem.n, problem.world_size, problem.result_dtype
    sum_bytes = m * n * dtype.itemsize
    rest, invariant = m % p, _invariance.active()
    # A sum that is composed is rounded before the residual is added.
    if invariant and n * dtype.itemsize <= MAX_EXCHANGE_BYTES:
        return in_parts("gemm_ar", problem, "batch invariant: a product, then its sum by exchanges")
    if not invariant and m >= p and sum_bytes >= _composed_from(problem, norm):
        reason = f"a sum of {sum_bytes / 2**20:.0f} MiB is sooner there as gemm_rs + all_gather"
        reason += f", of {rest} rows by exchange" if rest else ""
        return problem.plan("gemm_ar", True, reason, **_COMPOSED)
    if sum_bytes > MAX_EXCHANGE_BYTES:
        reason = f"the sum has {sum_bytes / 2**20:.0f} MiB, more than an exchange holds"
        reason += f", and m = {m} cannot be dealt to {p} ranks"
        return problem.unfused("gemm_ar", reason)
    sooner = _has_kernel(problem) and p == _SOONER_RANKS and m in _SOONER_ROWS
    if sooner or not problem.on_gpu:
        return _by_exchange(problem, problem.why_fused, norm=norm)
    return in_parts("gemm_ar", problem, "a product, then its sum: at least as soon as one kernel")


def _composed_from(problem: PlanInput, norm: bool) -> int:
    """From how many bytes on a sum is sooner as gemm_rs + all_gather."""
    ragged = problem.m % problem.world_size != 0
    if problem.on_gpu and problem.world_size == 2:
        return MAX_EXCHANGE_BYTES + 1 if norm or ragged else PAIR_COMPOSED_FROM_BYTES
    return RAGGED_FROM_BYTES if ragged else COMPOSED_FROM_BYTES


def _composed(problem: PlanInput, reason: str) -> Plan | None:
    """A plan for sums of any size, if every rank can have rows."""
    return problem.plan("gemm_ar", True, reason, **_COMPOSED) if problem.m >= problem.world_size else None


def _has_kernel(problem: PlanInput) -> bool:
    """Whether one kernel multiplies and sums. CPUs have its protocol for any problem."""
    return not problem.on_gpu or (problem.m in KERNEL_ROWS and problem.scaling is None)


def _exchange_if_it_can(problem: PlanInput, reason: str, *, norm: bool) -> Plan | None:
    fits = problem.m * problem.n * problem.result_dtype.itemsize <= MAX_EXCHANGE_BYTES
    return _by_exchange(problem, reason, norm=norm) if fits and _has_kernel(problem) else None


def _by_exchange(problem: PlanInput, reason: str, *, norm: bool) -> Plan:
    exchange = _exchanged(problem, norm=norm)
    reason += f"; {exchange.pop('reason')}"
    tile = chosen(select_tile("gemm_ar", problem), reason) if problem.on_gpu else {"config": _NO_TILE}
    return problem.plan("gemm_ar", True, **({"reason": reason} | tile | exchange))


def split_rows(m: int, n: int, dtype: torch.dtype) -> list[slice]:
    """The rows of a matrix [m, n], in parts that an exchange holds."""
    rows = max(1, MAX_EXCHANGE_BYTES // (n * dtype.itemsize))
    return [slice(first, min(first + rows, m)) for first in range(0, m, rows)]


def plan_all_reduce(problem: PlanInput, *, norm: bool = False) -> Plan:
    """The plan of an AllReduce of m * n elements, as one row; with RMSNorm of m rows. k does not matter."""
    problem = replace(problem, k=0, transpose_weight=False)
    if not norm:
        problem = replace(problem, m=1, n=problem.m * problem.n)
    if (why_not := _why_not_summed("all_reduce", problem)) is not None:
        return problem.unfused("all_reduce", why_not)
    exchange = _exchanged(problem, alone=norm and problem.on_gpu, norm=norm)
    exchange["reason"] = f"{problem.why_fused}; {exchange['reason']}"
    return problem.plan("all_reduce", True, config=_NO_TILE, **exchange)


def plan_reduce_scatter(problem: PlanInput) -> Plan:
    """The plan of a ReduceScatter of m * n elements, as one row for each rank. k does not matter."""
    p = problem.world_size
    share = problem.m * problem.n // p
    problem = replace(problem, m=p, n=share, k=0, transpose_weight=False)
    if (why_not := _why_not_summed("reduce_scatter", problem)) is not None:
        return problem.unfused("reduce_scatter", why_not)
    scatter = _native.core.ExchangeMode.SCATTER
    exchange = _native.core.exchange(p, round_up(share, VECTOR), p, scatter)
    room = _room(problem.device_type, exchange.bytes, p, problem.dtype)
    return problem.plan("reduce_scatter", True, problem.why_fused, config=_NO_TILE, mode=int(scatter), **room)


def _why_not_summed(op: str, problem: PlanInput) -> str | None:
    if problem.world_size == 1:
        return "one rank: x is the sum"
    elements, n = problem.m * problem.n, problem.n
    why_not = why_not_fused(op, replace(problem, m=elements, n=_NO_MATTER, k=_NO_MATTER))
    if why_not is None and problem.on_gpu and n % VECTOR:
        return f"{n} elements are no whole number of 16-byte vectors"
    nbytes = elements * problem.dtype.itemsize
    if why_not is None and nbytes > MAX_EXCHANGE_BYTES:
        return f"x has {nbytes / 2**20:.0f} MiB, more than an exchange holds"
    return why_not


PLANNERS |= {
    "gemm_ar": plan_gemm_ar,
    "gemm_ar_norm": functools.partial(plan_gemm_ar, norm=True),
    "all_reduce": plan_all_reduce,
    "all_reduce_norm": functools.partial(plan_all_reduce, norm=True),
    "reduce_scatter": plan_reduce_scatter,
}
for _op, _norm in (("gemm_ar", False), ("gemm_ar_norm", True)):
    WAYS[_op, "composed"] = _composed
    WAYS[_op, "kernel"] = functools.partial(_exchange_if_it_can, norm=_norm)


def _exchanged(problem: PlanInput, *, alone: bool = False, norm: bool = False) -> dict[str, Any]:
    """How ranks sum a matrix [m, n], why, and sizes. alone: without a GEMM. norm: with RMSNorm."""
    core, m, p, dtype = _native.core, problem.m, problem.world_size, problem.result_dtype
    padded, rows, trip = round_up(problem.n, VECTOR), m, 1.0
    if norm and problem.on_gpu:
        trip = _TRIP_ALONE_WITH_NORM if alone else _TRIP_BEHIND_GEMM_WITH_NORM
    mode = _mode(1, m * padded, p, trip) if alone else _mode(m, padded, p, trip)
    payload = m * padded * dtype.itemsize / 2**10
    one = f"{payload * (p - 1):.1f} KiB in one trip"
    two = f"{2 * payload * (p - 1) / p:.1f} KiB in two"
    name, reason = "one-shot", f"one-shot sends {one}, two-shot would send {two}"
    if mode == core.ExchangeMode.TWO_SHOT:
        name, reason = "two-shot", f"two-shot sends {two}, one-shot would send {one}"
        rows = round_up(m, p) if alone else m
    room = _room(problem.device_type, core.exchange(rows, padded, p, mode).bytes, p, dtype)
    return {"transport": f"{problem.transport}, {name}", "reason": reason, "mode": int(mode), **room}


def _mode(m: int, n: int, world_size: int, trip: float) -> Any:
    """One-shot or two-shot, if a second trip takes `trip` times as long as usual."""
    sent = n if world_size == 2 else max(1, round(n / trip))
    return _native.core.all_reduce_mode(m, sent, world_size)


def _room(device_type: str, exchange_bytes: int, world_size: int, dtype: torch.dtype) -> dict[str, int]:
    """The workspace sizes for an exchange area whose layout has `exchange_bytes` (of 2-byte elements)."""
    area = round_up(exchange_bytes * dtype.itemsize // 2)
    if device_type == "cuda":
        return {"signal_bytes": 0, "slot_bytes": 0, "exchange_bytes": area}
    # On CPUs data is announced by signals: for each peer a word for contributions and a word for results.
    return {"signal_bytes": round_up(4 * 2 * (world_size - 1)), "slot_bytes": area, "exchange_bytes": 0}


def exchange_room(
    device_type: str, max_m: int, max_n: int, world_size: int, dtype: torch.dtype
) -> dict[str, int]:
    """Bytes of buffers for sums of up to that size: a smaller one may need more, in one-shot mode."""
    core = _native.core
    edge = max_m * VECTOR  # maximum padding of columns to whole vectors
    most = min(max_m * max_n, MAX_EXCHANGE_BYTES // dtype.itemsize) + edge
    one_shot, too_many = 0, most // VECTOR + 1  # in vectors; smaller sums are one-shot, with a norm
    while too_many - one_shot > 1:
        middle = (one_shot + too_many) // 2
        if _mode(1, middle * VECTOR, world_size, _TRIP_ALONE_WITH_NORM) == core.ExchangeMode.ONE_SHOT:
            one_shot = middle
        else:
            too_many = middle
    # Two-shot: contributions and results, with shards rounded up, and rows rounded up to the world size.
    dealt = 2 * world_size * (max_n + VECTOR + VECTOR * world_size)
    elements = max(one_shot * VECTOR * world_size, 2 * most + edge * world_size + dealt)
    # Plus the constant part of every exchange area.
    smallest = core.exchange(1, VECTOR, world_size, core.ExchangeMode.ONE_SHOT)
    return _room(device_type, 2 * elements + smallest.bytes, world_size, dtype)
