"""The cases of `flux verify`: every op on exact-integer data, in shapes with all edges of the kernels."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flux
from flux import machine
from flux.cli import options, verify_fp8, verify_log, verify_moe
from flux.cli.verify_log import RUNNING, Outcome
from flux.ops import gemm as products
from flux.plan.gather import COPY_FROM_BYTES, copy_chunk_rows
from flux.testing import AgGemmCase, GemmRsCase, spawn
from flux.testing.compare import compare, first_wrong, successive
from flux.testing.emulate import EmulatedRanks, why_not
from flux.testing.emulate_moe import EmulatedMoeRanks

Case = GemmRsCase | AgGemmCase
Tensors = list[torch.Tensor]

COLLECTIVES = ("gemm_rs", "ag_gemm", "all_gather", "gemm_ar", "all_reduce", "reduce_scatter")
_MOE = "moe"
_FP8 = "fp8"
ALL = (*COLLECTIVES, _MOE, _FP8)
_SUMS = ("gemm_ar", "all_reduce")  # sums of whole matrices, whose rows are not distributed over ranks
_WITHOUT_WEIGHT = ("all_gather", "all_reduce", "reduce_scatter")
# Ops that sum the marked product of each rank (GemmRsCase).
_OF_PRODUCTS = ("gemm", "gemm_rs", "reduce_scatter", *_SUMS)
# In elements. The CTAs of all emulated ranks wait for each other, so all must be resident on one GPU.
_MAX_EMULATED_SUM = 1 << 18


def named_cases(world_size: int, device: str, op: str = "gemm_rs") -> list[tuple[str, Case]]:
    """Cases of an op for `world_size` ranks; 1 makes them plain GEMMs. M is per rank times ranks, where these
    share rows.
    """
    p = world_size
    q = 1 if op in _SUMS else p
    big, small = (512 if device == "cuda" else 256), 128
    dtype = torch.bfloat16
    make: Callable[..., Case] = GemmRsCase if op in _OF_PRODUCTS else AgGemmCase
    has_weight = op not in _WITHOUT_WEIGHT
    base = make(big * q, 2 * big, 2 * big, p, dtype, seed=1)
    other = torch.float16 if device == "cuda" else torch.float32
    cases = [
        ("one tile a rank", make(small * q, 2 * small, 64, p, dtype, seed=2)),
        ("many tiles", base),
        ("M, N, K ragged", make((small + 3) * q, 5 * small + 8, 2 * small + 24, p, dtype, seed=3)),
        ("shard smaller than a tile", make(5 * q, 2 * small + 8, 136, p, dtype, seed=4)),
        ("one row" if q == 1 else "one row a rank", make(q, 3 * small, 264, p, dtype, seed=5)),
        (str(other).removeprefix("torch."), replace(base, dtype=other, bias=has_weight, seed=8)),
        ("sizes no kernel takes", make(3 * q, 21, 13, p, dtype, seed=9)),
    ]
    if has_weight:
        cases[5:5] = [
            ("bias", replace(base, bias=True, seed=6)),
            ("weight as [K, N]", replace(base, transpose_weight=True, seed=7)),
        ]
    if device == "cuda":
        cases.append(("large", make(2048 * q, 4096, 1024, p, dtype, seed=10)))
    if device == "cuda" and make is AgGemmCase:
        cases.append(("by copy engine", make(2048 * p, 1024, 2304, p, dtype, seed=11)))
    return cases


def is_copied(case: Case) -> bool:
    return case.m // case.world_size * case.k * case.dtype.itemsize >= COPY_FROM_BYTES


def _compare(case: Case, op: str, rank: int, outs: Tensors, device: torch.device) -> str:
    """ "exact", or how the results of one call on one rank differ: product, gathered rows, or both."""
    wanted: Tensors = []
    if isinstance(case, GemmRsCase) and op in _SUMS:
        wanted = [case.expected_sum(device)]
    elif op != "all_gather":
        wanted = [case.expected(rank, device)]
    if isinstance(case, AgGemmCase) and len(wanted) < len(outs):
        wanted.append(case.gathered(device))
    return first_wrong(compare(out, want) for out, want in zip(outs, wanted, strict=True))


def _timed(op: str, name: str, where: str, run: Callable[[], str]) -> Outcome:
    start = time.perf_counter()
    state = "wrong"
    try:
        result = run()
        state = "exact" if result == "exact" else state
    except (RuntimeError, ValueError, flux.CommTimeoutError) as error:
        state = "timed out" if isinstance(error, flux.CommTimeoutError) else state
        result = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    seconds = time.perf_counter() - start
    return Outcome(op, name, where, state, "" if state == "exact" else result, seconds)


def _announced(op: str, name: str, where: str, run: Callable[[], str]) -> Outcome:
    verify_log.announce(op, where)
    return _timed(op, name, where, run)


def gemm(device: torch.device) -> Iterator[Outcome]:
    where = "1 GPU" if device.type == "cuda" else "CPU"

    def run(case: Case) -> str:
        x, weight, bias = case.inputs(0, device)
        got = flux.gemm(x, weight, bias, transpose_weight=case.transpose_weight)
        return compare(got, case.expected(0, device))

    for name, case in named_cases(1, device.type):
        yield _announced("gemm", name, where, partial(run, case))
    for name, scaled in verify_fp8.gemm_cases():
        yield _announced("gemm", f"fp8, {name}", where, partial(verify_fp8.gemm_case, scaled, device))


def emulated(world_size: int, device: torch.device) -> Iterator[Outcome]:
    """The kernels with all their ranks on one GPU."""
    where = f"{world_size} ranks emulated"
    reason = why_not(world_size, device)
    if reason is not None:
        yield Outcome(", ".join(ALL), "all", where, "skipped", reason)
        return
    ranks = EmulatedMoeRanks(world_size, device)
    for op in COLLECTIVES:
        for name, case in named_cases(world_size, "cuda", op):
            if case.n % 8 or case.k % 8:
                continue  # runs unfused through torch, which is not a kernel to emulate
            if op in ("all_reduce", "reduce_scatter") and case.m * case.n > _MAX_EMULATED_SUM // world_size:
                continue
            yield _announced(op, name, where, partial(_emulated_case, ranks, op, case))
    for name, experts in verify_moe.named_cases(world_size):
        yield _announced(_MOE, name, where, partial(verify_moe.emulated_case, ranks, experts))
    for name, fp8 in verify_fp8.named_cases(world_size):
        yield _announced(_FP8, name, where, partial(verify_fp8.emulated_case, ranks, fp8))


def _emulated_case(ranks: EmulatedRanks, op: str, case: Case) -> str:
    cases = successive(case)
    data = [[_emulated_inputs(op, c, rank, ranks.device) for rank in range(case.world_size)] for c in cases]
    torch.cuda.synchronize(ranks.device)
    results = [_emulated_call(ranks, op, case, inputs, i) for i, inputs in enumerate(data)]
    ranks.check()
    for c, result in zip(cases, results, strict=True):
        for rank in range(case.world_size):
            said = _compare(c, op, rank, [outs[rank] for outs in result], ranks.device)
            if said != "exact":
                return f"rank {rank}: {said}"
    return "exact"


def _emulated_inputs(op: str, case: Case, rank: int, device: torch.device) -> Any:
    """The inputs of a rank, which must live until the check. For a sum without a GEMM, x is the product."""
    x, weight, bias = case.inputs(rank, device)
    if op in ("all_reduce", "reduce_scatter"):
        return products.reference(x, weight), None, None
    return x, weight, bias


def _emulated_call(
    ranks: EmulatedRanks, op: str, case: Case, inputs: list[Any], number: int
) -> list[Tensors]:
    """The results of one call, each of all ranks. Every other ag_gemm also returns the gathered rows; sums
    alternate between one-shot and two-shot.
    """
    xs, weights, biases = ([rank[i] for rank in inputs] for i in range(3))
    layout: dict[str, Any] = {"transpose_weight": case.transpose_weight, "join": False}
    if op == "gemm_rs":
        return [ranks.gemm_rs(xs, weights, biases[0], **layout)]
    if op == "gemm_ar":
        return [ranks.gemm_ar(xs, weights, biases[0], mode=number % 2, **layout)]
    if op == "reduce_scatter":
        return [ranks.reduce_scatter(xs, join=False)]
    if op == "all_reduce":
        return [ranks.all_reduce(xs, mode=number % 2, join=False)]
    chunk_rows = copy_chunk_rows(xs[0].shape[0])
    copied: dict[str, Any] = {"copied": is_copied(case)}
    if op == "all_gather":
        return [ranks.all_gather(xs, join=False, chunk_rows=chunk_rows, **copied)]
    results = [
        ranks.ag_gemm(xs, weights, biases if case.bias else None, chunk_rows=chunk_rows, **copied, **layout)
    ]
    return [*results, ranks.collect(xs, join=False, **copied)] if number % 2 else results


def _where(world_size: int, device: str, nodes: int = 1) -> str:
    if nodes > 1:
        return f"{nodes} nodes x {world_size // nodes} emulated, {'GPUs' if device == 'cuda' else 'CPU'}"
    if device == "cuda":
        return f"{world_size} GPUs"
    return f"{world_size} process{'' if world_size == 1 else 'es'}, CPU"


def run_rank(rank: int, world_size: int, device_type: str, log: str, nodes: int = 1) -> list[Outcome]:
    """All cases on one rank of a real group. One that raises ends the list: ranks would part ways.

    log: file to which rank 0 writes what it begins and what came of it, for whoever waits.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    where = _where(world_size, device_type, nodes)
    runs = [
        (op, name, partial(_rank_case, op, rank, case, device))
        for op in COLLECTIVES
        for name, case in named_cases(world_size, device_type, op)
    ]
    runs += [
        (_MOE, name, partial(verify_moe.rank_case, rank, experts, device))
        for name, experts in verify_moe.named_cases(world_size, nodes)
    ]
    runs += [
        (_FP8, name, partial(verify_fp8.rank_case, rank, fp8, device))
        for name, fp8 in verify_fp8.named_cases(world_size)
    ]
    outcomes: list[Outcome] = []
    with verify_log.writer(log if rank == 0 else None) as write:
        for op, name, run in runs:
            write(Outcome(op, name, where, RUNNING))
            mine = _timed(op, name, where, run)
            told: list[Any] = [None] * world_size
            dist.all_gather_object(told, (mine.state, mine.detail))
            state = next((s for s in ("wrong", "timed out") if s in dict(told)), "exact")
            detail = next((f"rank {r}: {d}" for r, (s, d) in enumerate(told) if s == state and d), "")
            outcomes.append(replace(mine, state=state, detail=detail))
            write(outcomes[-1])
            if "Error" in detail:
                left = len(runs) - len(outcomes)
                outcomes.append(Outcome("", f"{left} more", where, "skipped", "ranks may have parted ways"))
                break
    return outcomes


def _rank_case(op: str, rank: int, case: Case, device: torch.device) -> str:
    cases = successive(case)
    data = [c.inputs(rank, device) for c in cases]
    with torch.no_grad():
        results = [_rank_call(op, case, *inputs, i) for i, inputs in enumerate(data)]
    flux.check()
    return first_wrong(_compare(c, op, rank, outs, device) for c, outs in zip(cases, results, strict=True))


def _rank_call(
    op: str, case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, number: int
) -> Tensors:
    """The results of one call. Every other ag_gemm also returns the gathered rows; every other all_reduce
    normalises, and adds a residual, which is then subtracted.
    """
    layout = case.transpose_weight
    if op == "all_gather":
        return [flux.all_gather(x)]
    if op in ("gemm_rs", "gemm_ar"):
        return [getattr(flux, op)(x, weight, bias, transpose_weight=layout)]
    if op == "all_reduce":
        product = products.reference(x, weight)
        if number % 2 == 0:
            return [flux.all_reduce(product)]
        residual = torch.full_like(product, 2)
        _, total = flux.all_reduce(product, residual=residual, norm_weight=residual[0])
        return [total - residual]
    if op == "reduce_scatter":
        return [flux.reduce_scatter(products.reference(x, weight))]
    if number % 2:
        return list(flux.ag_gemm(x, weight, bias, transpose_weight=layout, return_gathered=True))
    return [flux.ag_gemm(x, weight, bias, transpose_weight=layout)]


def ranks(world_size: int, device: str, timeout_s: float, nodes: int = 1) -> Iterator[Outcome]:
    """The collective ops between processes: GPUs, or the CPU path; on several nodes, emulated on this one."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    # The kernels are to run, also where others are faster.
    env = {**machine.NO_MULTICAST, "FLUX_TUNING": "off", "FLUX_NODES": "two-level"}
    starting = Outcome("all", "starting", _where(world_size, device, nodes), RUNNING)
    with tempfile.TemporaryDirectory(prefix="flux-verify-") as folder:
        log = Path(folder) / "log"
        try:
            results: list[list[Outcome]] = spawn(
                run_rank,
                world_size,
                device,
                str(log),
                nodes,
                timeout_s=timeout_s,
                backend=backend,
                env=env,
                ranks_per_node=world_size // nodes if nodes > 1 else None,
            )
            outcomes = results[0]
        except RuntimeError as error:
            outcomes, begun = verify_log.read(log)
            late = options.timed_out(error)
            lines = str(error).strip().splitlines() or ["a rank died"]
            detail = f"not done after {timeout_s:g} s (--timeout)" if late else lines[-1]
            state = "timed out" if late else "wrong"
            outcomes.append(replace(begun or starting, state=state, detail=detail))
    yield from outcomes
