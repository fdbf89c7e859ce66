"""What test_gpu_sanitizer.py runs under compute-sanitizer; slow there, so small. Prints "all exact" if all
results are.
"""

from __future__ import annotations

import itertools
from typing import Any

import soak
import test_gpu_expert_rows as steps
import test_gpu_fp8 as fp8
import test_gpu_gemm as products
import test_gpu_grouped_gemm as gradients
import test_gpu_moe as layers
import torch
from emulated import Problem, problem

import flux
from flux._native import core
from flux.ops.grouped_gemm import ACTIVATIONS
from flux.ops.norm_and_quant import End
from flux.testing import GemmRsCase, ScaledCase
from flux.testing.emulate import EmulatedRanks
from flux.testing.emulate_moe import EmulatedMoeRanks
from flux.testing.moe_data import MoeCase

ALONE, SPLIT_BY_3 = 1, 5  # "clusters" of the cost model's choices
CHOSEN = -1  # by the model: a swap-AB tile where rows are few


def main() -> None:
    # m, n, k, transpose_weight, the choice of a tile, SMs. On four SMs each cluster gives a swap-AB tile away
    # while it computes the next.
    swaps = [
        (rows, 520, 520, False, core.FIRST_SWAP_AB + tile | parts << 8 | sharers << 16, 4)
        for rows, tile, parts, sharers in ((12, 1, 1, 1), (12, 0, 2, 1), (150, 5, 2, 1), (150, 3, 1, 2))
    ]
    split = (129, 264, 520, False, 5 | SPLIT_BY_3 << 8, 0)
    for m, n, k, transposed, choice, sms in (
        (129, 136, 72, False, CHOSEN, 0),
        (64, 264, 200, True, CHOSEN, 0),
        split,
        *swaps,
    ):
        products.assert_exact(GemmRsCase(m, n, k, 1, transpose_weight=transposed, bias=True), choice, sms)
    ranks = EmulatedRanks(2, timeout_s=60.0)
    for (m, n, k), config in (
        ((12, 264, 264), CHOSEN),
        ((1, 2056, 72), CHOSEN),  # a row of several vectors a thread
        ((132, 264, 264), CHOSEN),
        ((260, 264, 264), CHOSEN),  # in two launches
    ):
        made = problem("gemm_ar", m, n, k, 2, bias=True)
        ones = torch.ones_like(made.weights[0][:, 0])
        for mode in (0, 1):
            made.run(ranks, mode=mode, config=config)
            results = made.call(ranks, mode=mode, config=config, norm_weight=ones)
            ranks.check()
            made.assert_exact(results[2:], mode, config)
    for world_size in (2, 3):
        ranks = EmulatedRanks(world_size, timeout_s=60.0)
        for seed, (rows, n, k) in enumerate(((129, 136, 72), (40, 264, 200))):
            problem("gemm_rs", rows, n, k, world_size, bias=True, seed=seed).run(ranks)
            # On the same workspaces, whose two buffers gemm_rs has used too.
            gathering = problem("ag_gemm", rows, n, k, world_size, bias=True, seed=seed)
            gathering.run(ranks)
            collected, gathered = ranks.collect(gathering.xs), Problem("all_gather", gathering.case)
            gathered.run(ranks)
            gathered.assert_exact(collected)
    sum_and_norm()
    mixture()
    steps_between()
    expert_gradients()
    scaled()
    scaled_ranks()
    print("all exact")


def sum_and_norm() -> None:
    """More rows than CTAs, and rows that shared memory has no room for."""
    for rows, columns in ((300, 136), (3, 32768)):
        steps.test_the_sum_is_exact_and_the_norm_rounded_once(rows, columns, torch.bfloat16)


def mixture() -> None:
    """Both layers, with experts shared and distributed, of weights [N, K] and [K, N]."""
    ranks = EmulatedMoeRanks(2, timeout_s=60.0)
    for ep_size in (1, 2):
        case = MoeCase((40, 35), 136, 72, 4, 3, ep_size, torch.bfloat16, "skewed", 0.1)
        layers.check_layers(ranks, case, config=9, per_chunk=ep_size, ctas=2)


def steps_between() -> None:
    """The steps between the GEMMs of expert layers."""
    of: dict[str, Any] = {"end": 37, "more": 3, "n": 264, "dtype": torch.bfloat16}
    steps.test_gathered_rows(**of, scaled=True)
    steps.test_finished_rows(**of, scaled=True, dotted=True)
    for activation in ACTIVATIONS:
        steps.test_activations(**of, activation=activation)


def expert_gradients() -> None:
    """Stored and added, of experts with rows that end within a k-block."""
    for choice, adds in itertools.product((0, 1), (False, True)):
        gradients.test_rows_of_others_may_be_infinite(choice, adds)


def scaled() -> None:
    """fp8 operands: quantisation, tiles of both kinds of GEMM, and rows of experts."""
    for quant, ue8m0 in (("tensor", False), ("row", False), ("group128", True), ("block128", False)):
        x = torch.randn(130, 264, generator=torch.Generator().manual_seed(1)).bfloat16()
        expected, scales = flux.quantize(x, quant, ue8m0=ue8m0)
        q, found = flux.quantize(x.cuda(), quant, ue8m0=ue8m0)
        assert torch.equal(found.cpu(), scales), quant
        assert torch.equal(q.cpu().view(torch.uint8), expected.view(torch.uint8)), quant
    for op in (soak.fp8_gemm, soak.fp8_grouped_gemm):
        for number in range(8):  # swap-AB tiles, ordinary ones, and those of groups
            assert not op(soak.Case(number, 0, 1)), (op, number)


def scaled_ranks() -> None:
    """fp8 operands between ranks, in every ordinary tile; then a sum whose norm is quantised."""
    ranks = EmulatedRanks(2, timeout_s=60.0)
    for tile in fp8.TILES:
        accumulate = "promoted" if tile.promotes else "fast"
        for kind in ("row", "block") if tile.promotes else ("row",):
            config = tile.id | fp8.ALONE << 8
            if tile in fp8.KEEPING:
                gathering = ScaledCase(130, 264, 384, 2, kind, bias=True, seed=tile.id)
                fp8.check_ag_gemm(ranks, gathering, accumulate, config=config)
            if tile in fp8.SENDING:
                scattered = ScaledCase(260, 264, 384, 2, kind, bias=True, sums=True, seed=tile.id)
                fp8.check_gemm_rs(ranks, scattered, accumulate, config=config)
    end = End(torch.ones(264, dtype=torch.bfloat16, device="cuda"), 1e-6, "row", None, False)
    for m, mode in itertools.product((5, 130), (0, 1)):
        case = ScaledCase(m, 264, 384, 2, "block", sums=True)
        xs, weights, scales, _ = fp8.operands(case, "promoted")
        sums = ranks.gemm_ar(xs, weights, mode=mode, scales=scales, end=end)[2:4]
        ranks.check()
        assert all(torch.equal(result, fp8.total_of(case)) for result in sums), (case, mode)


if __name__ == "__main__":
    main()
