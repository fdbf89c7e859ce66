"""flux._core refuses what makes no sense: an exception, and never a crash, a hang or gigabytes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flux._native import core
from flux.moe import reference
from flux.plan.choose import PlanInput
from flux.plan.gather import plan_ag_gemm

FUZZER = Path(__file__).parent / "fuzz_core.py"
CALLS = 8000
WORLD = 4
LARGEST = 2**31 - 1


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_the_arguments(seed: int, tmp_path: Path) -> None:
    last_call = tmp_path / "last_call"
    command = [sys.executable, str(FUZZER), core.__file__, str(seed), str(CALLS), str(last_call)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, f"{last_call.read_text().strip()}: {run.returncode}\n{run.stderr[-3000:]}"
    counts: dict[str, list[int]] = json.loads(run.stdout)
    assert len(counts) > 45
    once = {name for name, (returned, _) in counts.items() if returned == 0}
    assert not once, f"never called with arguments that make sense: {once}"
    never = {name for name, (_, raised) in counts.items() if raised == 0}
    takes_anything = {"tile_configs", "CallTurn", "LaunchOrder"}
    assert never <= takes_anything, f"never called with others: {never}"


def test_a_crash_would_be_noticed(tmp_path: Path) -> None:
    """The fuzzer names the call that it did not come back from."""
    script = (
        "import os, runpy, sys\n"
        f"fuzzer = runpy.run_path({str(FUZZER)!r})\n"
        "class Modes: ONE_SHOT = TWO_SHOT = SCATTER = None\n"
        "class Core: ExchangeMode = Modes\n"
        "def die(m):\n"
        "    os.abort()\n"
        "die.__doc__ = 'die(m: typing.SupportsInt) -> int'\n"
        "Core.die = staticmethod(die)\n"
        "fuzzer['Fuzzer'](Core, 1, sys.argv[1]).run(10)\n"
    )
    last_call = tmp_path / "last_call"
    run = subprocess.run([sys.executable, "-c", script, str(last_call)], capture_output=True, timeout=60)
    assert run.returncode < 0 and last_call.read_text().startswith("die("), run.stderr


def moe_layout(**changes: int) -> core.MoeLayout:
    good = {"world_size": 1, "rank": 0, "ep_size": 1, "num_experts": 4, "top_k": 2, "max_tokens": 3}
    return core.MoeLayout(**{**good, **changes})


REFUSED: list[tuple[Callable[[], object], str]] = [
    # Divided by what was zero, which ended the process.
    (lambda: core.gemm_rs_copy_chunks(8, 8, 8, 0), "world_size: expected 1 to 8, got 0"),
    (lambda: core.MoeLayout.blocks_of(1, 0), "block_rows: expected 1 to"),
    (lambda: moe_layout().max_tiles(0), "block_m: expected 1 to"),
    # Read what lies before a table.
    (lambda: core.select_gemm(8, 8, 8, True, 4, 2), "config: expected a tile and cluster that the problem"),
    (lambda: core.select_gemm_ar(8, 8, 8, True, 4, 2), "config: expected a tile and cluster"),
    (lambda: core.select_gemm(8, 8, 8, False, 1, 0x200), "config: expected a tile and cluster .* 1 SMs"),
    # Products and sums that do not fit into 32 bits, or into 64.
    (lambda: core.ag_gemm_layout(1, 2**30, 1), f"k: expected 1 to {2**30 - 1}, got {2**30}"),
    (lambda: core.row_exchange(2**16, 2**16, 2, core.ExchangeMode.ONE_SHOT), r"m \* n: expected 1 to"),
    (lambda: core.exchange(2**29, 2**29, 8, core.ExchangeMode.TWO_SHOT), r"m \* n: expected 1 to"),
    (lambda: core.gemm_rs_layout(2**29, 2**29, 1, 0), r"tiles of \[m, n\]: expected 1 to"),
    (lambda: core.select_gemm(2**29, 2**29, 8, False, 4), r"tiles of \[m, n\]: expected 1 to"),
    (lambda: core.ag_gemm_layout(2**29, 2**29, 1).piece(8, 1, 0), "pieces of a peer: expected 1 to"),
    (lambda: core.moe_comm_units(8, 0, 2**20, 2**20), "units: expected 1 to"),
    (lambda: core.moe_tiles(64, 2**20, 2**20), r"num_entries \* n_tiles: expected 0 to"),
    (lambda: core.gemm_rs_layout(256, 256, 2, 0).tile_offset(0, LARGEST, LARGEST), "m_tile: expected 0 to 0"),
    (lambda: core.gemm_rs_layout(256, 256, 2, 0).signal_index(0, LARGEST, 0), "n_tile: expected 0 to 0"),
    (lambda: core.gemm_rs_chunks(5, 4), "count: expected 1 to 4"),
    (lambda: core.RsLayout.slot_index(-(2**31), -(2**31)), "src: expected 0 to 7"),
    (lambda: core.swap_ab_stage_blocks(0, LARGEST), "k: expected 1 to"),
    (lambda: core.swap_ab_in_pairs(core.NUM_SWAP_AB + core.NUM_FP8_SWAP_AB), "tile: expected 0 to"),
    (
        lambda: core.select_gemm(1, 8, 8, False, 1, core.FIRST_SWAP_AB | 1 << 8 | 2 << 16),
        "CTAs that share a weight in config: expected 0 to 1, got 2",
    ),
    (lambda: core.MoeSendOrder(moe_layout()).signal(LARGEST, LARGEST), "share: expected 0 to"),
    (lambda: moe_layout(num_experts=LARGEST), "num_experts: expected 1 to"),
    (lambda: core.moe_tile(1, 1, LARGEST, 8, 4), "n: expected 1 to"),
    (lambda: core.SymmBuffer(0, 1, [0], 2**40, 0, 0, 0, 0), "signal_bytes: expected 0 to"),
    # Lists of gigabytes.
    (lambda: core.gemm_rs_tiles(2**29, 64, 1, 0, 0, 1, 1), "tiles: expected 1 to"),
    (lambda: core.ag_gemm_tiles(2**29, 64, 1, 0, 0, 1, 1), "tiles: expected 1 to"),
    (lambda: core.MoeSendOrder(moe_layout(world_size=8, top_k=1, max_tokens=2**26)).units, "units: expected"),
    # Silently taken for something else.
    (lambda: core.select_gemm(8, 8, 8, False, 4, -7), "config: expected -1 to"),
    (lambda: core.RsLayout.slot_index(2, 2), "src: expected another rank than owner 2"),
    (lambda: core.exchange(8, 8, 2, core.ExchangeMode(5)), "mode: expected 0 to 2"),
    (lambda: core.wait_at_least(64, 1, float("nan")), "timeout_s: expected a number of seconds, got nan"),
    (lambda: core.wait_at_least(64, 1, -1.0), "timeout_s: expected a number of seconds, got -1"),
    (lambda: core.load_acquire(0), "addr: expected an address, a non-null multiple of 4, got 0"),
    (lambda: core.store_release(66, 1), "addr: expected an address, a non-null multiple of 4, got 66"),
    (lambda: core.moe_tiles(0, 1, 1), "entries: expected an address"),
    (lambda: core.moe_route(moe_layout(), 128, 64, [64] * 9), "arrays.*: expected 10 to 10, got 9"),
    (lambda: core.moe_route(moe_layout(), 128, 64, [64] * 9 + [0]), "arrays: expected an address"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_used_to_go_wrong_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("entry", [(0, 0, 0, 0), (0, 0, 0, -1), (0, 0, 0, 17), (0, 0, 1, 1), (0, -5, 0, 1)])
def test_entries_that_are_no_schedule_are_refused(entry: tuple[int, ...]) -> None:
    entries = torch.tensor([entry], dtype=torch.int32)
    with pytest.raises(ValueError, match="of a group in entries: expected"):
        core.moe_tiles(entries.data_ptr(), 1, 2)


def test_the_largest_problems_still_have_a_plan() -> None:
    most = core.MAX_EXTENT
    assert core.ag_gemm_layout(1, most, 1).row_bytes == 2 * most
    assert core.gemm_rs_layout(most, 1, 1, 0).m_tiles == -(-most // 128)
    assert core.select_gemm(most, 8, most, False, 100).config >= 0
    assert core.select_gemm(16, most, most, False, 100).config >= core.FIRST_SWAP_AB
    assert core.exchange(1, most // 8 * 8, 8, core.ExchangeMode.ONE_SHOT).bytes > 2**33
    assert core.all_reduce_mode(1, 2**40, 8) == core.ExchangeMode.TWO_SHOT
    assert len(core.gemm_rs_tiles(128 * 2**20, 64, 1, 0, 9, 1, most)) == 2**20


def test_a_packed_choice_may_say_how_many_ctas_share_a_row() -> None:
    tile = core.FIRST_SWAP_AB | 2 << 8 | 1 << 16
    assert core.select_gemm_ar(1, 4096, 2048, False, 132, tile | 3 << 24).packed == tile


def test_a_larger_problem_runs_unfused() -> None:
    for k, fused in ((core.MAX_EXTENT, True), (core.MAX_EXTENT + 1, False)):
        plan = plan_ag_gemm(PlanInput("cpu", 2, 8, k, torch.bfloat16, world_size=2))
        assert plan.by_flux == fused
        assert plan.slot_bytes >= 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bad", [-(2**31), -1, 4, 2**31 - 1])
def test_ids_may_be_any_number(bad: int, rank: int) -> None:
    layout = moe_layout(world_size=2, rank=rank, ep_size=2)  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
    ids = torch.tensor(2 * [[[bad, 1], [2, bad], [bad, bad]]], dtype=torch.int32)
    expected = reference.routing_tensors(layout, 128, ids)
    arrays = [torch.full_like(array, 77) for array in expected]
    core.moe_route(layout, 128, ids.data_ptr(), [array.data_ptr() for array in arrays])
    for got, wanted in zip(arrays, expected, strict=True):
        assert torch.equal(got, wanted)
    assert arrays[0].tolist() == ([0, 0, 2] if rank == 0 else [0, 2, 2]), "a row of each rank's token"


def test_threads_wait_at_the_same_time() -> None:
    """A wait releases the GIL, or the first of these would wait for a word that nobody can set."""
    threads = 8
    words = (ctypes.c_uint32 * threads)()
    address = ctypes.addressof(words)
    seen = [0] * threads

    def wait(i: int) -> None:
        seen[i] = core.wait_at_least(address + 4 * i, 1, 30.0)
        if i:
            core.store_release(address + 4 * (i - 1), 1)

    waiting = [threading.Thread(target=wait, args=(i,)) for i in range(threads)]
    start = time.monotonic()
    for thread in waiting:
        thread.start()
    core.store_release(address + 4 * (threads - 1), 1)  # the last one, who tells the one before
    for thread in waiting:
        thread.join()
    assert seen == [1] * threads
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("method", ["open", "forget"])
def test_a_method_of_nothing_is_refused(method: str) -> None:
    with pytest.raises(TypeError):
        getattr(core.CallTurn, method)(None)
