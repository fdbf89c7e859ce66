"""A longer sweep of the simulated machine: random cases until their number or the time is used up."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import simulator

BATCH = 18  # all policies once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--cases", type=int, default=360, help="seeds of each kind of case (default 360)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    parser.add_argument("--only", help="one kind of case, such as split_k")
    arguments = parser.parse_args()
    reason = simulator.why_not()
    if reason is not None:
        print(reason)
        return 2
    kinds = [
        (simulator.build(program.name), case)
        for program in simulator.PROGRAMS.values()
        for case in program.cases
        if arguments.only in (None, case)
    ]
    if not kinds:
        parser.error(f"no such case: {arguments.only}")
    start = time.monotonic()
    last = arguments.seed + arguments.cases
    done = failed = 0
    for seed in range(arguments.seed, last, BATCH):
        count = min(BATCH, last - seed)
        with ThreadPoolExecutor(simulator.JOBS) as pool:
            runs = [pool.submit(simulator.run, binary, case, seed, count) for binary, case in kinds]
        for run in runs:
            if run.result().returncode != 0:
                failed += 1
                print(run.result().stderr, end="")
            done += count
        if time.monotonic() - start > arguments.seconds:
            break
    print(f"{done} cases in {time.monotonic() - start:.0f} s, batches with a failure: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
