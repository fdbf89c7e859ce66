"""One-line changes of csrc, each of which breaks a rule that a kernel rests on: the simulator notices all.

    mutants.py [name ...]       run all of them, or the named ones; --seeds: only so many of each case
    mutants.py --list

Each mutant is a copy of csrc with one line changed. Its program runs seeded cases until one fails; the report
says which case did, and how. Survivors make the command fail, unless the table (mutants.toml) says why nobody
can notice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import simulator

# Seeds of cases that notice seldom; of any other case 54.
CASES = {"too_late_rank": 180, "gemm_ar": 324, "all_reduce": 216}
CPU_SECONDS = 300
# What is compiled again if a header changes.
_AR = ("gemm_ar/gemm_ar.cu",)
_RS = ("gemm_rs/gemm_rs.cu", "instances/gemm_rs.cu")
_GEMM_FP8 = ("gemm/gemm.cu", "instances/gemm_fp8.cu")
_LAYERS = ("moe/ag_scatter_gemm.cu", "moe/gemm_gather_rs.cu")
KERNELS_OF = {
    "ordinary": ("gemm/gemm.cu", "instances/gemm.cu"),
    "split_k": ("gemm/gemm.cu", "instances/gemm_split_k.cu"),
    "swap_ab": ("gemm/gemm.cu", "instances/gemm_swap_ab.cu"),
    "gemm_rs": _RS,
    "gemm_rs_frozen": _RS,
    "gemm_ar": _AR,
    "all_reduce": _AR,
    "norm_bits": _AR,
    "overlap": _AR,
    "all_gather": ("ag_gemm/all_gather.cu",),
    "ag_gemm": ("ag_gemm/ag_gemm.cu", "instances/ag_gemm.cu"),
    "moe_route": ("moe/routing.cu",),
    "grouped_gemm": ("moe/grouped_gemm.cu",),
    "grouped_wgrad": ("moe/grouped_wgrad.cu",),
    "moe_combine": ("moe/expert_rows.cu",),
    "expert_rows": ("moe/expert_rows.cu",),
    "moe_layers": (*_LAYERS, "instances/ag_scatter_gemm.cu", "instances/gemm_gather_rs.cu"),
    "copy_queue": ("cases/copies.cc",),
    "refused": _AR,
    **dict.fromkeys(("fp8_ordinary", "fp8_split_k", "fp8_swap_ab", "fp8_promotion"), _GEMM_FP8),
    "fp8_ag_gemm": ("ag_gemm/ag_gemm.cu", "instances/ag_gemm_fp8.cu", "ag_gemm/all_gather.cu"),
    "fp8_gemm_rs": ("gemm_rs/gemm_rs.cu", "instances/gemm_rs_fp8.cu"),
    "fp8_grouped_gemm": ("moe/grouped_gemm.cu", "instances/grouped_gemm_fp8.cu"),
    "fp8_moe_layers": (*_LAYERS, "instances/moe_layers_fp8.cu"),
    "quantize": ("gemm/quantize.cu",),
    "add_norm": ("gemm/add_norm.cu",),
    **dict.fromkeys(("int8_sum", "int8_sum_frozen"), ("gemm_ar/int8_sum.cu",)),
}


@dataclass(frozen=True)
class Mutant:
    """`old` occurs in the file exactly once."""

    name: str
    file: str
    old: str
    new: str
    cases: tuple[tuple[str, str], ...]  # (program, case)
    kernels: tuple[str, ...]  # compiled again, if not those of KERNELS_OF
    seed: int = 1  # the first of the cases
    equivalent: str = ""  # why no program can notice, if none can
    gap: str = ""  # what the simulator or the cases lack to notice


def table() -> list[Mutant]:
    program_of = {case: program.name for program in simulator.PROGRAMS.values() for case in program.cases}
    groups = tomllib.loads((simulator.HERE / "mutants.toml").read_text())["group"]
    return [
        Mutant(
            file=group["file"],
            cases=tuple((program_of[case], case) for case in group["cases"]),
            kernels=tuple(group.get("kernels", ())),
            **mutation,
        )
        for group in groups
        for mutation in group["mutations"]
    ]


def verdict(mutant: Mutant, seeds: int | None = None) -> str | None:
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
            binary = simulator.build(program, root, (mutant.file, *(mutant.kernels or KERNELS_OF[case])))
            count = CASES.get(case, 54) if seeds is None else seeds
            done = simulator.run(binary, case, seed=mutant.seed, cases=count, cpu_seconds=CPU_SECONDS)
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
    parser.add_argument("--seeds", type=int, help="of each case; make test runs 6, CI 18")
    arguments = parser.parse_args()
    mutants = table()
    unknown = set(arguments.names) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not arguments.names or mutant.name in arguments.names]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.name:28} {mutant.file}")
        return 0
    run = partial(verdict, seeds=arguments.seeds)
    survivors, explained = [], []
    with ThreadPoolExecutor(simulator.JOBS) as pool:
        for mutant, how in zip(chosen, pool.map(run, chosen), strict=True):
            why_not = mutant.equivalent or (mutant.gap and f"gap: {mutant.gap}")
            if how is None and not why_not:
                survivors.append(mutant.name)
            if how is not None and why_not:
                explained.append(mutant.name)
            print(f"{mutant.name:28} {how or why_not or 'SURVIVES'}", flush=True)
    expected = sum(1 for mutant in chosen if not mutant.equivalent and not mutant.gap)
    print(f"{expected - len(survivors)} of {expected} noticed; survivors: {' '.join(survivors) or 'none'}")
    if explained:
        print(f"noticed, although the table says why nobody can: {' '.join(explained)}")
    return 1 if survivors or explained else 0


if __name__ == "__main__":
    sys.exit(main())
