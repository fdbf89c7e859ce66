"""Breaks a call off at a chosen line of flux's Python code, as Ctrl-C or a failed allocation may do anywhere.

As a program: every line of every call of CALLS, on two ranks. `make test` runs a part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from dense_calls import is_exact, wrong_layers

import flux
from flux.comm.shm import NoSharedMemory
from flux.comm.workspace import Disagreement
from flux.testing import spawn
from flux.testing.moe_data import MoeCase

PACKAGE = str(Path(flux.__file__).parent)
# Of calls that wait in vain; a busy machine may take longer to reach a line. And of all others.
SHORT_S, LONG_S = (0.25, 1.0, 4.0), 30.0
ROWS, COLUMNS, DEPTH = 6, 16, 8


class Injected(BaseException):
    """No Exception, so that no handler takes it for an error that it knows."""


def line_of(frame: FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename.removeprefix(PACKAGE + "/"), frame.f_lineno


@contextmanager
def tracing(see: Callable[[FrameType], None]) -> Iterator[None]:
    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or path.startswith(PACKAGE + "/testing"):
            return None
        if event == "line":
            see(frame)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def lines_of(call: Callable[[], Any]) -> list[tuple[str, int]]:
    """The lines that a call runs through, each once, in order."""
    seen: dict[tuple[str, int], None] = {}
    with tracing(lambda frame: seen.setdefault(line_of(frame))):
        call()
    return list(seen)


@contextmanager
def broken_at(line: tuple[str, int]) -> Iterator[None]:
    """Raises Injected the first time that a line of the package is reached."""
    armed = [True]

    def see(frame: FrameType) -> None:
        if armed[0] and line_of(frame) == line:
            armed[0] = False
            raise Injected(f"{line[0]}:{line[1]}")

    with tracing(see):
        yield


def dense(op: str, rank: int, p: int, seed: int, scale: int) -> bool:
    return is_exact(op, seed, ROWS * scale, COLUMNS, DEPTH)


def moe(rank: int, p: int, seed: int, scale: int) -> bool:
    case = MoeCase((ROWS * scale,) * p, COLUMNS, COLUMNS, 4, 2, p, torch.float32, seed=seed)
    return not wrong_layers(case, rank)


OPS = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")
CALLS: dict[str, Callable[..., bool]] = {**{op: partial(dense, op) for op in OPS}, "moe": moe}
# A group's first call, one that must grow the workspace, and one that it knows.
STATES = {"first": (), "grown": (1,), "known": (40,)}


def outcome(attempt: Callable[[], bool]) -> str:
    """What a caller gets: a right result, an error that says what, or something that must not be."""
    try:
        return "exact" if attempt() else "WRONG"
    except flux.CommTimeoutError:
        return "timed out"
    except Disagreement:  # of a layer that is several calls, rank 0 begins with the first again
        return "disagreed"
    except NoSharedMemory:  # rank 0 has removed what this rank was about to map
        return "no shared memory"
    except RuntimeError as error:
        return "broken off" if "was broken off by" in str(error) else f"UNCLEAR {error!r}"


def try_line(
    rank: int,
    p: int,
    call: Callable[..., bool],
    before: tuple[int, ...],
    line: tuple[str, int],
    seed: int,
    short_s: float,
) -> dict[str, str]:
    """Rank 0 breaks its call off at a line and tries again; its peers call once. Then all make another call,
    release, and make one more.
    """
    set_deadline(LONG_S)
    for scale in before:
        assert call(rank, p, seed, scale)
    set_deadline(short_s)
    dist.barrier()
    told = {}
    if rank == 0:
        try:
            with broken_at(line):
                call(rank, p, seed + 1, 40)
            told["injected"] = "no"  # the line is reached in some calls only
        except Injected:
            told["injected"] = "yes"
            told["again"] = outcome(lambda: call(rank, p, seed + 1, 40))
        except flux.CommTimeoutError:
            told["injected"] = "late"
    else:
        told["peer"] = outcome(lambda: call(rank, p, seed + 1, 40))
    told["next"] = outcome(lambda: call(rank, p, seed + 2, 40))
    dist.barrier()
    set_deadline(LONG_S)
    flux.release()
    told["released"] = outcome(lambda: call(rank, p, seed + 3, 40))
    flux.release()
    return told


def set_deadline(seconds: float) -> None:
    from flux.comm.workspace import made

    os.environ["FLUX_TIMEOUT_S"] = str(seconds)
    for workspace in made.values():
        workspace.timeout_s = seconds


def work(
    rank: int, p: int, name: str, state: str, part: int, parts: int
) -> list[tuple[tuple[str, int], dict[str, str]]]:
    call, before = CALLS[name], STATES[state]
    set_deadline(LONG_S)
    for scale in before:
        assert call(rank, p, 0, scale)
    # All ranks run through the same lines but for some branches; rank 0's are those that count.
    lines = [lines_of(lambda: call(rank, p, 1, 40))]
    dist.broadcast_object_list(lines, 0)
    flux.release()
    tried = []
    for number in range(part, len(lines[0]), parts):
        for short_s in SHORT_S:
            told = try_line(rank, p, call, before, lines[0][number], 4 * number, short_s)
            late = [told.get("injected") == "late"]
            dist.broadcast_object_list(late, 0)
            if not late[0]:
                break
        tried.append((lines[0][number], told))
    return tried


def complaints(results: list[list[tuple[tuple[str, int], dict[str, str]]]]) -> list[str]:
    """What was neither exact nor a clear error; and that a release did not bring the group back."""
    allowed = {"exact", "timed out", "broken off", "no shared memory", "disagreed", "yes", "no"}
    return [
        f"rank {rank}, broken off at {line[0]}:{line[1]}: {step}: {said}"
        for rank, tried in enumerate(results)
        for line, told in tried
        for step, said in told.items()
        if said not in allowed or (step == "released" and said != "exact")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", choices=CALLS, action="append")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="only each n-th line")
    arguments = parser.parse_args()
    failed = count = 0
    for name in arguments.call or CALLS:
        for state in STATES:
            results = spawn(
                work, arguments.ranks, name, state, 0, arguments.every, backend="gloo", timeout_s=3600
            )
            count += len(results[0])
            told = [told for _, told in results[0]]
            tally = {
                said: sum(t.get("again") == said for t in told)
                for said in ("exact", "broken off", "timed out")
            }
            found = complaints(results)
            failed += len(found)
            print(
                f"{name}, {state} call: {len(told)} lines, tried again: {tally}, {len(found)} wrong",
                flush=True,
            )
            print("".join(f"  {complaint}\n" for complaint in found), end="")
    print(f"{count} lines broken off, {failed} wrong")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
