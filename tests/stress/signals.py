"""Disturbs random calls of flux by random signals, and checks who ends how and what is left.

    python tests/stress/signals.py --cases 100 --seed 1
    python tests/stress/signals.py --seed 1 --only 17        # one case of that campaign again

A case is a program that calls spawn (random_calls.py). SIGKILL, SIGTERM, SIGINT or SIGSTOP goes to a rank or
to the caller, at a random moment. After that

- results are exact or there are none; peers of a rank that has died, or is stopped for longer than the
  deadline, raise CommTimeoutError, and one of them names it; a shorter stop changes nothing;
- a caller that gets a deadly signal ends by it, or as its own handler says, and its processes within 5 s;
- no process is left, nor a file in /tmp or /dev/shm.

Needs about 10 s for a case, on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from leftovers import await_end, await_files, files, processes, start  # noqa: E402

PROGRAM = str(Path(__file__).with_name("random_calls.py"))
DEADLINE_S = 3.0
END_S = 5.0
HANG_S = 80.0
STATUS = {
    ("plain", signal.SIGTERM): -signal.SIGTERM,
    ("plain", signal.SIGINT): -signal.SIGINT,
    ("handler", signal.SIGTERM): 7,
    ("handler", signal.SIGINT): -signal.SIGINT,
    ("catch", signal.SIGTERM): -signal.SIGTERM,
    ("catch", signal.SIGINT): 130,
}


@dataclass
class Case:
    """One program and what happens to it."""

    number: int
    world: int
    seed: int
    action: str
    mode: str
    victim: int
    delay_s: float
    pause_s: float

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.action}, {self.world} ranks, victim {self.victim}, "
            f"caller {self.mode}, after {self.delay_s:.2f} s"
        )


@dataclass
class Run:
    """A program that is running: what the actions need of it, and what they find wrong."""

    case: Case
    folder: Path
    program: subprocess.Popen[str]
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0  # from a deadly signal to the last process' end

    def rank(self, rank: int) -> int:
        return int((self.folder / f"started-{rank}").read_text())

    def when_ready(self, names: str = "ready") -> None:
        await_files(self.folder, [f"{names}-{r}" for r in range(self.case.world)], self.program, HANG_S)
        time.sleep(self.case.delay_s)

    def let_it_finish(self) -> list[dict[str, Any]]:
        """What the ranks say, when the caller has ended by itself."""
        try:
            status = self.program.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"hangs for {HANG_S:.0f} s")
            return []
        if status != 0:
            self.wrong.append(f"exit status {status}, expected 0")
            return []
        told: list[dict[str, Any]] = json.loads((self.folder / "results").read_text())
        return told

    def expect_exact(self) -> None:
        (self.folder / "stop").touch()
        told = self.let_it_finish()
        if any(answer.get("error", "died") is not None for answer in told):
            self.wrong.append(f"expected exact results on all ranks, got {told}")

    def expect_timeouts(self, victim_ends: int | None) -> None:
        """Peers time out, directly or indirectly because of the victim, which dies or has its own timeout."""
        told = self.let_it_finish()
        if not told:
            return
        lost = told.pop(self.case.victim)
        if victim_ends is not None and lost.get("exit_code") != victim_ends:
            self.wrong.append(f"victim: expected exit code {victim_ends}, got {lost}")
        if victim_ends is None and "calls" not in lost:
            self.wrong.append(f"victim: expected a timeout or exact results, got {lost}")
        errors = [answer.get("error") for answer in told]
        if not all(errors):
            self.wrong.append(f"survivors: expected a timeout each, got {told}")
            return
        if self.case.victim not in [error["peer"] for error in errors]:
            self.wrong.append(f"survivors: expected one to name rank {self.case.victim}, got {errors}")
        if max(error["seconds"] for error in errors) > 3 * DEADLINE_S + 2:
            self.wrong.append(f"survivors: too late, {errors}")

    def kill_caller(self, number: signal.Signals) -> None:
        begin = time.monotonic()
        os.kill(self.program.pid, number)
        expected = STATUS.get((self.case.mode, number), -number)
        try:
            status = self.program.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"hangs for {HANG_S:.0f} s")
            return
        if status != expected:
            self.wrong.append(f"exit status {status}, expected {expected}")
        caller_s = time.monotonic() - begin
        left = await_end(self.folder, begin + END_S - time.monotonic())
        self.seconds = time.monotonic() - begin
        if left or self.seconds > END_S:
            self.wrong.append(f"the caller ended after {caller_s:.2f} s, {END_S:.0f} s later there is {left}")


def rank_dies(number: signal.Signals) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.when_ready()
        os.kill(run.rank(run.case.victim), number)
        run.expect_timeouts(-number)

    return act


def rank_dies_early(run: Run) -> None:
    """Before its first call: peers may fail in torch's own set-up, which knows no deadline of flux's."""
    run.when_ready("started")
    os.kill(run.rank(run.case.victim), signal.SIGKILL)
    (run.folder / "stop").touch()
    try:
        status = run.program.wait(HANG_S)
    except subprocess.TimeoutExpired:
        run.wrong.append(f"hangs for {HANG_S:.0f} s")
        return
    errors = (run.folder / "err").read_text()
    if status != 0 or "AssertionError" in errors:
        run.wrong.append(f"exit status {status}")


def rank_is_interrupted(run: Run) -> None:
    run.when_ready()
    os.kill(run.rank(run.case.victim), signal.SIGINT)
    time.sleep(run.case.pause_s)
    run.expect_exact()


def rank_pauses(run: Run) -> None:
    run.when_ready()
    os.kill(run.rank(run.case.victim), signal.SIGSTOP)
    time.sleep(run.case.pause_s)
    os.kill(run.rank(run.case.victim), signal.SIGCONT)
    time.sleep(run.case.pause_s)
    run.expect_exact()


def rank_stays_away(then: signal.Signals) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.when_ready()
        os.kill(run.rank(run.case.victim), signal.SIGSTOP)
        others = [f"done-{r}" for r in range(run.case.world) if r != run.case.victim]
        await_files(run.folder, others, run.program, HANG_S)
        os.kill(run.rank(run.case.victim), then)
        run.expect_timeouts(-then if then == signal.SIGKILL else None)

    return act


def caller_dies(number: signal.Signals) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.when_ready()
        run.kill_caller(number)

    return act


def caller_dies_early(number: signal.Signals) -> Callable[[Run], None]:
    """While the fork server imports, or ranks set up."""

    def act(run: Run) -> None:
        await_files(run.folder, ["calling"], run.program, HANG_S)
        time.sleep(4 * run.case.delay_s)
        run.kill_caller(number)

    return act


def caller_dies_with_a_stopped_rank(number: signal.Signals) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.when_ready()
        os.kill(run.rank(run.case.victim), signal.SIGSTOP)
        time.sleep(run.case.pause_s)
        run.kill_caller(number)

    return act


def caller_pauses(seconds: float) -> Callable[[Run], None]:
    """Ranks need nothing of their caller."""

    def act(run: Run) -> None:
        run.when_ready()
        os.kill(run.program.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(run.program.pid, signal.SIGCONT)
        run.expect_exact()

    return act


def caller_is_stopped_and_killed(run: Run) -> None:
    run.when_ready()
    os.kill(run.program.pid, signal.SIGSTOP)
    time.sleep(run.case.pause_s)
    run.kill_caller(signal.SIGKILL)


ACTIONS: dict[str, Callable[[Run], None]] = {
    "SIGKILL to a rank": rank_dies(signal.SIGKILL),
    "SIGTERM to a rank": rank_dies(signal.SIGTERM),
    "SIGKILL to a rank that starts": rank_dies_early,
    "SIGINT to a rank": rank_is_interrupted,
    "SIGSTOP to a rank for a moment": rank_pauses,
    "SIGSTOP to a rank, SIGCONT after the deadline": rank_stays_away(signal.SIGCONT),
    "SIGSTOP to a rank, SIGKILL after the deadline": rank_stays_away(signal.SIGKILL),
    "SIGKILL to the caller": caller_dies(signal.SIGKILL),
    "SIGTERM to the caller": caller_dies(signal.SIGTERM),
    "SIGINT to the caller": caller_dies(signal.SIGINT),
    "SIGKILL to a caller that starts": caller_dies_early(signal.SIGKILL),
    "SIGTERM to a caller that starts": caller_dies_early(signal.SIGTERM),
    "SIGINT to a caller that starts": caller_dies_early(signal.SIGINT),
    "SIGSTOP to a rank, SIGKILL to the caller": caller_dies_with_a_stopped_rank(signal.SIGKILL),
    "SIGSTOP to a rank, SIGTERM to the caller": caller_dies_with_a_stopped_rank(signal.SIGTERM),
    "SIGSTOP to a rank, SIGINT to the caller": caller_dies_with_a_stopped_rank(signal.SIGINT),
    "SIGSTOP to the caller for a moment": caller_pauses(1.0),
    "SIGSTOP to the caller beyond the deadline": caller_pauses(DEADLINE_S + 1.5),
    "SIGSTOP to the caller, then SIGKILL": caller_is_stopped_and_killed,
}


def draw(number: int, seed: int) -> Case:
    """The n-th case of a campaign: all actions come up equally often."""
    dice = random.Random(f"{seed}/{number}")
    order = list(ACTIONS)
    random.Random(f"{seed}/order/{number // len(order)}").shuffle(order)
    world = dice.choice((2, 4))
    return Case(
        number=number,
        world=world,
        seed=dice.randrange(1 << 30),
        action=order[number % len(order)],
        mode=dice.choice(("plain", "handler", "catch")),
        victim=dice.randrange(world),
        delay_s=dice.choice((0.0, dice.random(), 2 * dice.random())),
        pause_s=dice.uniform(0.1, DEADLINE_S / 3),
    )


def play(case: Case, folder: Path) -> Run:
    folder.mkdir()
    arguments = [PROGRAM, str(folder), str(case.world), str(case.seed), case.mode, str(DEADLINE_S)]
    run = Run(case, folder, start(arguments, folder))
    pids = {run.program.pid}
    try:
        try:
            ACTIONS[case.action](run)
        except AssertionError as error:
            run.wrong.append(str(error))
        pids |= {int(path.read_text()) for path in folder.glob("started-*")}
        left = await_end(folder, END_S)
        if left:
            run.wrong.append(f"left behind: {left}")
    finally:
        run.program.kill()
        run.program.wait()
        pids |= set(processes(folder))
        await_end(folder, 0.0)
    files_left = files(folder, pids)
    if files_left:
        run.wrong.append(f"left behind: {files_left}")
    errors = (folder / "err").read_text()
    if errors.count("Traceback") > ("caller" in case.action):
        run.wrong.append("a rank has left a traceback on stderr")
    if run.wrong:
        run.wrong.append("stderr: " + errors[-3000:])
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no case after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="only the case of that number")
    options = parser.parse_args()
    # A campaign that is terminated ends the program of its case too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    numbers = range(options.cases) if options.only is None else [options.only]
    base = Path(tempfile.mkdtemp(prefix="signals-"))
    failed: list[Run] = []
    played: Counter[str] = Counter()
    slowest = 0.0
    for number in numbers:
        if time.monotonic() - begin > options.seconds:
            break
        case = draw(number, options.seed)
        run = play(case, base / str(number))
        played[case.action] += 1
        slowest = max(slowest, run.seconds)
        ended = f", all ended in {run.seconds:.2f} s" if run.seconds else ""
        print(f"{'WRONG' if run.wrong else 'ok   '} {case}{ended}", *run.wrong, sep="\n      ", flush=True)
        if run.wrong:
            failed.append(run)
    for action in ACTIONS:
        print(f"{played[action]:4} {action}")
    print(f"{sum(played.values())} cases of seed {options.seed}, {len(failed)} wrong, ", end="")
    print(f"slowest end of all processes {slowest:.2f} s, {time.monotonic() - begin:.0f} s in all")
    if failed:
        print(f"folders: {base}")
        raise SystemExit(1)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
