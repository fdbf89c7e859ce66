"""One-line changes of csrc, each of which breaks a rule that a kernel rests on: the simulator notices all.

    mutants.py [name ...]       run all of them, or the named ones
    mutants.py --list

Each mutant is a copy of csrc with one line changed. Its program runs seeded cases until one fails; the report
says which case did, and how. Survivors make the command fail, unless the table says why nobody can notice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import simulator

CASES = 54
TIMEOUT = 120.0
# What is compiled again if a header changes.
KERNEL_OF = {"ordinary": "gemm/gemm.cu", "split_k": "gemm/gemm_split_k.cu", "swap_ab": "gemm/gemm_swap_ab.cu"}


@dataclass(frozen=True)
class Mutant:
    """`old` occurs in the file exactly once."""

    name: str
    file: str
    old: str
    new: str
    cases: tuple[tuple[str, str], ...]  # (program, case)
    equivalent: str = ""  # why no program can notice, if none can


ORDINARY = (("gemm", "ordinary"),)
SPLIT = (("gemm", "split_k"),)
SWAP = (("gemm", "swap_ab"),)
ANY_GEMM = ORDINARY + SPLIT
KERNEL = "gemm/sm90_gemm.cuh"
SWAPPED = "gemm/sm90_gemm_swap_ab.cuh"
# Of the loader; the same wait stands where the ring is drained.
EMPTY_WAIT = (
    "            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);\n            ptx::mbarrier_arr"
)

MUTANTS = (
    # sm90_gemm.cuh: the ring of stages
    Mutant(
        "full-bytes-low",
        KERNEL,
        "expect_tx(full, stage_bytes)",
        "expect_tx(full, stage_bytes - 128)",
        ORDINARY,
    ),
    Mutant(
        "full-bytes-high",
        KERNEL,
        "expect_tx(full, stage_bytes)",
        "expect_tx(full, stage_bytes + 128)",
        ORDINARY,
    ),
    Mutant(
        "loader-no-empty-wait",
        KERNEL,
        EMPTY_WAIT,
        "            ptx::mbarrier_arr",
        ORDINARY,
    ),
    Mutant(
        "loader-empty-phase",
        KERNEL,
        EMPTY_WAIT,
        EMPTY_WAIT.replace(" ^ 1", ""),
        ORDINARY,
    ),
    Mutant(
        "math-no-full-wait", KERNEL, "ptx::mbarrier_wait(smem.full(ring.index), ring.phase);", ";", ORDINARY
    ),
    Mutant(
        "math-full-phase",
        KERNEL,
        "smem.full(ring.index), ring.phase)",
        "smem.full(ring.index), ring.phase ^ 1)",
        ORDINARY,
    ),
    Mutant("wgmma-no-arrive", KERNEL, "cute::warpgroup_arrive();", ";", ORDINARY),
    Mutant("wgmma-no-commit", KERNEL, "cute::warpgroup_commit_batch();", ";", ORDINARY),
    Mutant("wgmma-wait-two", KERNEL, "warpgroup_wait<1>()", "warpgroup_wait<2>()", ORDINARY),
    Mutant("wgmma-no-last-wait", KERNEL, "cute::warpgroup_wait<0>();", ";", ORDINARY),
    Mutant(
        "release-held-early",
        KERNEL,
        "if (kb > 0 && releases) ptx::mbarrier_arrive_cluster(smem.empty(held), filler);",
        "if (kb > 0 && releases) ptx::mbarrier_arrive_cluster(smem.empty(ring.index), filler);",
        ORDINARY,
    ),
    Mutant(
        "no-release",
        KERNEL,
        "if (kb > 0 && releases) ptx::mbarrier_arrive_cluster(smem.empty(held), filler);",
        ";",
        ORDINARY,
    ),
    Mutant(
        "no-last-release",
        KERNEL,
        "      if (releases) ptx::mbarrier_arrive_cluster(smem.empty(held), filler);\n",
        "",
        ORDINARY,
    ),
    Mutant("releases-self-only", KERNEL, "ptx::lane()) < sharers;", "ptx::lane()) < 1;", ORDINARY),
    Mutant("accumulates-first", KERNEL, "d, kb > 0 || k > 0)", "d, true)", ORDINARY),
    Mutant(
        "a-warpgroup-offset",
        KERNEL,
        "warpgroup * 64 * 128, 0, 1024",
        "warpgroup * 64 * 64, 0, 1024",
        ORDINARY,
    ),
    # sm90_gemm.cuh: slabs
    Mutant("slab-no-fence", KERNEL, "        ptx::fence_proxy_async_smem();\n", "", ORDINARY),
    Mutant(
        "slab-no-arrive",
        KERNEL,
        "        ptx::mbarrier_arrive(smem.slab_full(warpgroup, slabs.index));\n",
        "",
        ORDINARY,
    ),
    Mutant(
        "slab-no-empty-wait",
        KERNEL,
        "        ptx::mbarrier_wait(smem.slab_empty(warpgroup, slabs.index), slabs.phase ^ 1);\n",
        "",
        ORDINARY,
    ),
    Mutant("slab-no-advance", KERNEL, "        slabs.advance();\n", "", ORDINARY),
    Mutant(
        "storer-no-read-wait",
        KERNEL,
        "        ptx::bulk_wait_read<0>();  // the writes",
        "        // the writes",
        ORDINARY,
        equivalent="SlabRing::drain has already waited for every slab of the last tile",
    ),
    Mutant("slab-freed-unread", "gemm/smem.cuh", "    ptx::bulk_wait_read<kPending>();\n", "", ORDINARY),
    Mutant(
        "slab-read-one-less",
        "gemm/smem.cuh",
        "bulk_wait_read<kPending>",
        "bulk_wait_read<kPending + 1>",
        ORDINARY,
    ),
    Mutant("slab-no-commit", "gemm/smem.cuh", "    ptx::bulk_commit();\n", "", ORDINARY),
    Mutant(
        "slab-never-freed",
        "gemm/smem.cuh",
        "    ptx::mbarrier_arrive(smem.slab_empty(warpgroup, freed.index));\n",
        "",
        ORDINARY,
    ),
    Mutant(
        "slab-full-count",
        "gemm/smem.cuh",
        "slab_full(warpgroup, index), 32 * kMathWarps)",
        "slab_full(warpgroup, index), kMathWarps)",
        ORDINARY,
    ),
    Mutant(
        "empty-count",
        "gemm/smem.cuh",
        "kNumMathWarpgroups * kMathWarps * sharers)",
        "kMathWarps * sharers)",
        ORDINARY,
    ),
    Mutant(
        "full-count",
        "gemm/smem.cuh",
        "ptx::mbarrier_init(full(stage), loaders);",
        "ptx::mbarrier_init(full(stage), loaders + 1);",
        ORDINARY,
    ),
    Mutant("phase-not-flipped", "gemm/smem.cuh", "      phase ^= 1;\n", "", ORDINARY),
    Mutant("no-cta-barrier", KERNEL, "(params.store);\n  __syncthreads();", "(params.store);", ORDINARY),
    Mutant(
        "no-first-cluster-barrier",
        KERNEL,
        "  if (cluster_size > 1) ptx::cluster_sync_relaxed();\n  ptx::wait_for",
        "  ptx::wait_for",
        ORDINARY,
    ),
    Mutant(
        "no-wait-for-earlier",
        KERNEL,
        "  ptx::wait_for_earlier_kernels();\n",
        "",
        ORDINARY,
        equivalent="successive calls of the plain GEMM in these cases share no memory that is written",
    ),
    Mutant("registers", KERNEL, "kMathRegisters = 208", "kMathRegisters = 232", ORDINARY),
    # the tile queue
    Mutant(
        "queue-no-full-wait",
        "gemm/tile_queue.cuh",
        "    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);\n    const bool",
        "    const bool",
        ORDINARY,
    ),
    Mutant(
        "queue-no-empty-wait",
        "gemm/tile_queue.cuh",
        "    ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);\n    if",
        "    if",
        ORDINARY,
    ),
    Mutant(
        "queue-give-back",
        "gemm/tile_queue.cuh",
        "    if (reads) ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);\n",
        "",
        ORDINARY,
    ),
    Mutant(
        "queue-bytes",
        "gemm/tile_queue.cuh",
        "cursor.index), sizeof(index), cta);",
        "cursor.index), 2 * sizeof(index), cta);",
        ORDINARY,
    ),
    Mutant(
        "queue-readers",
        "gemm/smem.cuh",
        "kReaders * cluster_size + cluster_size - 1",
        "kReaders * cluster_size",
        ORDINARY,
    ),
    # epilogue.cuh
    Mutant("load-b-half", "gemm/epilogue.cuh", "dst + cta * b.rows * 128, full", "dst, full", ORDINARY),
    Mutant(
        "b-mask",
        "gemm/epilogue.cuh",
        "column + cta * b.rows, 0b11)",
        "column + cta * b.rows, 0b01)",
        ORDINARY,
    ),
    Mutant(
        "bias-edge",
        "gemm/epilogue.cuh",
        "    if (column < n) {\n      const float2 b",
        "    {\n      const float2 b",
        ORDINARY,
    ),
    Mutant(
        "stage-swizzle",
        "gemm/epilogue.cuh",
        "kPanelN == 32 ? row / 2 % 4",
        "kPanelN == 32 ? row % 4",
        ORDINARY,
    ),
    Mutant(
        "store-edge",
        "gemm/epilogue.cuh",
        "  if (row >= num_rows) return;\n",
        "",
        ORDINARY,
        equivalent="TMA clips the whole box; the line only saves the instruction",
    ),
    # split_k.cuh
    Mutant(
        "split-no-ring-free",
        "gemm/split_k.cuh",
        "      ptx::mbarrier_wait(smem.ring_free(), 0);\n",
        "",
        SPLIT,
    ),
    Mutant(
        "split-no-named-barrier",
        "gemm/split_k.cuh",
        "    ptx::named_barrier_sync(1, kNumMathWarpgroups * 128);\n",
        "",
        SPLIT,
    ),
    Mutant(
        "split-barrier-count",
        "gemm/split_k.cuh",
        "ptx::named_barrier_sync(2 + warpgroup, 128);",
        "ptx::named_barrier_sync(2 + warpgroup, 96);",
        SPLIT,
    ),
    Mutant(
        "split-no-second-barrier",
        "gemm/split_k.cuh",
        "    ptx::named_barrier_sync(2 + warpgroup, 128);\n",
        "",
        SPLIT,
    ),
    Mutant("split-no-fence", "gemm/split_k.cuh", "    ptx::fence_proxy_async_smem();\n", "", SPLIT),
    Mutant("split-bytes", "gemm/split_k.cuh", "(split - 1) * bytes)", "split * bytes)", SPLIT),
    Mutant(
        "split-no-parts-wait",
        "gemm/split_k.cuh",
        "    ptx::mbarrier_wait(smem.parts_full(), 0);\n",
        "",
        SPLIT,
    ),
    Mutant("split-bias-twice", KERNEL, "(!Store::kSplitsK || cta == 0)", "true", SPLIT),
    Mutant(
        "split-part",
        "gemm/split_k.cuh",
        "k_blocks * (part + 1) / split - first_block",
        "k_blocks / split",
        SPLIT,
    ),
    # sm90_gemm_swap_ab.cuh
    Mutant(
        "swap-no-empty-wait",
        SWAPPED,
        "          ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);\n",
        "",
        SWAP,
    ),
    Mutant(
        "swap-no-full-wait", SWAPPED, "        ptx::mbarrier_wait(full(ring.index), ring.phase);\n", "", SWAP
    ),
    Mutant(
        "swap-bytes", SWAPPED, "(kSwapAbWeightBytes + rows * 128)", "(kSwapAbWeightBytes + kRows * 128)", SWAP
    ),
    Mutant("swap-wait-one", SWAPPED, "cute::warpgroup_wait<1>();", "cute::warpgroup_wait<2>();", SWAP),
    Mutant("swap-no-last-wait", SWAPPED, "      cute::warpgroup_wait<0>();\n", "", SWAP),
    Mutant(
        "swap-no-partials-wait",
        SWAPPED,
        "          ptx::mbarrier_wait(partials_full, meetings.phase);\n",
        "",
        SWAP,
    ),
    Mutant(
        "swap-no-partials-empty-wait",
        SWAPPED,
        "          ptx::mbarrier_wait(partials_empty, meetings.phase ^ 1);\n",
        "",
        SWAP,
    ),
    Mutant("swap-no-fence", SWAPPED, "          ptx::fence_proxy_async_smem();\n", "", SWAP),
    Mutant(
        "swap-no-partials-release",
        SWAPPED,
        "        if (lane < split && lane != part) ptx::mbarrier_arrive_cluster(partials_empty, lane);\n",
        "",
        SWAP,
    ),
    Mutant(
        "swap-releases-last",
        SWAPPED,
        "        if (is_last && meeting + 1 == kRows / kMeetingRows) break;\n",
        "",
        SWAP,
        equivalent="nobody waits for these arrivals, and the cluster barrier keeps all CTAs until they have come",
    ),
    Mutant(
        "swap-no-tile-barrier",
        SWAPPED,
        "if (tile != first_tile) both_warpgroups();  // the last tile has",
        ";  // the last tile has",
        SWAP,
    ),
    Mutant(
        "swap-no-exit-barrier", SWAPPED, "  if (cluster_size > 1) ptx::cluster_sync_relaxed();\n}", "}", SWAP
    ),
    Mutant("swap-no-rows", SWAPPED, "if (rows > 0) ptx::tma_load_2d", "ptx::tma_load_2d", SWAP),
    Mutant(
        "swap-asked-count",
        SWAPPED,
        "named_barrier_sync(kAsked, kSwapAbThreads)",
        "named_barrier_sync(kAsked, kSwapAbBothThreads)",
        SWAP,
    ),
    Mutant(
        "swap-padding",
        "gemm/swap_ab.h",
        "return kSwapAbN / split + 4; }",
        "return kSwapAbN / split; }",
        SWAP,
        equivalent="the padding of rows only avoids bank conflicts",
    ),
    # host
    Mutant(
        "box-alignment", "gemm/launch.cuh", "ceil_div(left, 8 * boxes) * 8", "ceil_div(left, boxes)", ORDINARY
    ),
    Mutant(
        "k-blocks", "gemm/launch.cuh", "(args.k() + kBlockK - 1) / kBlockK", "args.k() / kBlockK", ORDINARY
    ),
    Mutant(
        "map-rows",
        "runtime/tensor_map.cc",
        "const int64_t rows = matrix.rows / shards,",
        "const int64_t rows = matrix.rows / shards + 1,",
        ORDINARY,
    ),
)


def verdict(mutant: Mutant) -> str | None:
    """How the mutant was noticed, or None."""
    source = (simulator.ROOT / "csrc" / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: the old line occurs {source.count(mutant.old)} times in {mutant.file}"
        )
    simulator.BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=simulator.BUILD) as folder:
        root = Path(folder)
        shutil.copytree(simulator.ROOT / "csrc", root / "csrc")
        (root / "tests").mkdir()
        (root / "tests" / "sim").symlink_to(simulator.HERE)
        (root / "csrc" / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        for program, case in mutant.cases:
            binary = simulator.build(program, root, (mutant.file, KERNEL_OF[case]))
            done = simulator.run(binary, case, seed=1, cases=CASES, timeout=TIMEOUT)
            binary.unlink()
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if line.startswith("sim:")]
                replay = [line for line in done.stderr.splitlines() if "--seed" in line]
                what = lines[0].removeprefix("sim: ") if lines else f"exit status {done.returncode}"
                where = replay[-1].split("--only ")[-1].split(":")[0] if replay else case
                return f"{where}: {what[:110]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutates csrc line by line; the simulator must notice.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not arguments.names or mutant.name in arguments.names]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:28} {mutant.file}")
        return 0
    survivors = []
    with ThreadPoolExecutor(simulator.JOBS) as pool:
        for mutant, how in zip(chosen, pool.map(verdict, chosen), strict=True):
            if how is None and not mutant.equivalent:
                survivors.append(mutant.name)
            print(f"{mutant.name:28} {how or mutant.equivalent or 'SURVIVES'}", flush=True)
    expected = sum(1 for mutant in chosen if not mutant.equivalent)
    print(f"{expected - len(survivors)} of {expected} noticed; survivors: {' '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
