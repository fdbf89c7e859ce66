"""Ranks of spawn never outlive their caller, however it ends, and nothing else is left of them either."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from callers import RANKS
from leftovers import await_end, await_files, children, files, processes, start, state

import flux
from flux.comm.cpu import CpuWorkspace
from flux.testing import GemmRsCase, RankFailure, SpawnError, spawn
from flux.testing.spawn import _context

END_S = 15.0
BUSY = tuple(f"rank-{rank}" for rank in range(RANKS))
CALLERS = str(Path(__file__).with_name("callers.py"))


# ---- callers that are killed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A program, and the signal that ends it.

    Attributes:
        until: it gets the signal when it has made these files
        alive: and has so many processes, `delay_s` later.
        group: all its processes get the signal, as from a terminal.
        spared: file that names a forked child of the program, which goes on, as does its fork server then.
    """

    arguments: tuple[str, ...]
    number: signal.Signals
    until: tuple[str, ...] = ()
    alive: int = 1
    delay_s: float = 0.0
    group: bool = False
    spared: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and what was left of it END_S later."""

    status: int
    processes: dict[int, str]
    files: list[str]
    notes: dict[str, str]  # the files that it made, and its output


def play(scenario: Scenario, folder: Path) -> Outcome:
    folder.mkdir()
    program = start([argument.replace("FOLDER", str(folder)) for argument in scenario.arguments], folder)
    try:
        await_files(folder, scenario.until, program, 120.0)
        if BUSY[-1] in scenario.until:
            while state(int((folder / BUSY[-1]).read_text())) != "T":
                time.sleep(0.01)
        while len(processes(folder)) < scenario.alive:
            assert program.poll() is None, (folder / "err").read_text()
            time.sleep(0.02)
        time.sleep(scenario.delay_s)
        pids = list(processes(folder))
        spared = children(program.pid) if scenario.spared else []
        begin = time.monotonic()
        (os.killpg if scenario.group else os.kill)(program.pid, scenario.number)
        status = program.wait(30)
        assert all(pid in processes(folder) for pid in spared)
        left = await_end(folder, begin + END_S - time.monotonic(), spared)
    finally:
        program.kill()
        await_end(folder, 0.0)
    notes = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    return Outcome(status, left, files(folder, pids), notes)


BENCH = ("-m", "flux", "bench", "gemm_rs", "--cpu", "--world", "2", "--n", "64", "--k", "64", "--m", "64")
SCENARIOS = {
    "killed": Scenario((CALLERS, "plain", "FOLDER"), signal.SIGKILL, BUSY),
    "terminated": Scenario((CALLERS, "fork", "FOLDER"), signal.SIGTERM, (*BUSY, "child"), spared="child"),
    "survivor": Scenario((CALLERS, "survivor", "FOLDER"), signal.SIGTERM, ("left", *BUSY)),
    # The caller, multiprocessing's two servers and two ranks, which have many rounds to do.
    "bench": Scenario((*BENCH, "--rounds", "4000"), signal.SIGINT, alive=5, delay_s=0.5, group=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    """All scenarios, two at a time: they mostly import torch."""
    folder = tmp_path_factory.mktemp("scenarios")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(play, scenario, folder / name) for name, scenario in SCENARIOS.items()}


def check(outcome: Outcome, status: int) -> None:
    assert outcome.status == status, outcome.notes["err"]
    assert outcome.processes == {}
    # multiprocessing leaves its socket, if its process is killed.
    assert [path for path in outcome.files if "/pymp-" not in path] == []


@pytest.mark.parametrize(("name", "number"), [("killed", signal.SIGKILL), ("terminated", signal.SIGTERM)])
def test_ranks_end_with_a_caller_that_is_killed(
    outcomes: dict[str, Future[Outcome]], name: str, number: signal.Signals
) -> None:
    outcome = outcomes[name].result()
    check(outcome, -number)
    assert outcome.notes["out"] == outcome.notes["err"] == ""


def test_a_caller_can_handle_signals_and_go_on(outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes["survivor"].result()
    check(outcome, 7)
    notes = outcome.notes
    assert notes["err"] == "", "no rank says anything"
    assert float(notes["interrupted"]) < END_S and "born" not in notes, (
        "it does not wait for a server that starts"
    )
    assert notes["left"] == f"[] of {RANKS}", "all ranks had ended at the KeyboardInterrupt"


def test_the_traceback_of_an_interrupt_ends_at_the_call(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            spawn(sleep, 1, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [entry.name for entry in caught.traceback][1:] == ["spawn"]
    assert caught.value.__context__ is None


def test_an_interrupted_benchmark_says_so(outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes["bench"].result()
    check(outcome, 130)
    assert outcome.notes["err"] == "rows: 1, on 2 CPU processes\ninterrupted\n"


# ---- ranks that are stopped or killed ----------------------------------------------------------------------


def stop_when_it_signals(folder: Path, seconds: float | None) -> None:
    """This rank stops itself where it would send its next signal; it goes on after that time, if any."""
    send = CpuWorkspace.signal

    def stop(self: CpuWorkspace, *args: Any) -> None:
        CpuWorkspace.signal = send  # type: ignore[method-assign]
        (folder / "stopped").write_text(str(os.getpid()))
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        send(self, *args)

    CpuWorkspace.signal = stop  # type: ignore[method-assign]


def calls(rank: int, world_size: int, folder: Path, stopped_s: float | None) -> tuple[int, str]:
    """How many exact results, and the peer of the timeout that followed, if any.

    Rank 1 stops itself in the call after three: for `stopped_s`, or until rank 0 has timed out.
    """
    for number in range(6):
        case = GemmRsCase(world_size * 10, 8, 16, world_size, seed=number)
        x, weight, _ = case.inputs(rank)
        if (rank, number) == (1, 3):
            stop_when_it_signals(folder, stopped_s)
        try:
            result = flux.gemm_rs(x, weight)
        except flux.CommTimeoutError as error:
            if rank == 0:
                os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
            return number, f"{error.op} {error.peer}"
        assert torch.equal(result, case.expected(rank))
    return 6, ""


def test_a_rank_stopped_for_longer_is_named_by_its_peer(tmp_path: Path) -> None:
    results = spawn(calls, 2, tmp_path, None, env={"FLUX_TIMEOUT_S": "2"}, backend="gloo")
    # Its own tile has come from rank 0, but none for the call that rank 0 no longer makes.
    assert results == [(3, "gemm_rs 1"), (4, "gemm_rs 0")]


def stop_for_good(rank: int, world_size: int, folder: Path) -> None:
    (folder / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_stays_stopped_is_killed_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(SpawnError) as caught:
        spawn(stop_for_good, 1, tmp_path, timeout_s=4)
    assert caught.value.failures == [RankFailure(0, None, "")]
    assert "rank 0 did not finish in time" in str(caught.value)
    assert time.monotonic() - begin < 4 + END_S
    assert not Path("/proc", (tmp_path / "stopped").read_text()).exists()


def die_with_a_child(rank: int, world_size: int) -> None:
    if rank == 1:
        if os.fork() == 0:
            time.sleep(8)  # it has everything open that its parent had
            os._exit(0)
        os._exit(3)


def test_the_death_of_a_rank_is_noticed_although_its_child_lives() -> None:
    begin = time.monotonic()
    result = spawn(die_with_a_child, 2, backend="gloo", may_die={1})
    assert result == [None, RankFailure(1, 3, "")]
    assert time.monotonic() - begin < 6


def sleep(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)


def environment(rank: int, world_size: int) -> str | None:
    return os.environ.get("OF_AN_EARLIER_CALL")


def test_ranks_end_with_their_fork_server_and_the_next_call_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill() -> None:
        while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
            time.sleep(0.01)
        os.kill(int((tmp_path / "0").read_text().split()[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(SpawnError, match="rank 0 died"):
        spawn(sleep, 2, tmp_path, backend="gloo")
    killer.join()
    pids = [(tmp_path / rank).read_text().split()[0] for rank in "01"]
    while any(state(int(pid)) not in ("", "Z") for pid in pids):
        assert time.monotonic() - begin < END_S
    # Ranks have the environment of the call, not of the server's start.
    monkeypatch.setenv("OF_AN_EARLIER_CALL", "1")
    assert spawn(environment, 1) == ["1"]
    assert spawn(environment, 1, env={"OF_AN_EARLIER_CALL": "2"}) == ["2"]
    monkeypatch.delenv("OF_AN_EARLIER_CALL")
    assert spawn(environment, 1) == [None]


def test_calls_of_several_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(spawn, die_with_a_child, 2, backend="gloo")
        fine = pool.submit(spawn, calls, 2, tmp_path, 0.1, backend="gloo")
        assert fine.result() == [(6, "")] * 2
        with pytest.raises(SpawnError, match="rank 1 died with exit code 3"):
            failing.result()


# ---- arguments and results ---------------------------------------------------------------------------------


class Unreadable(Exception):
    """Can be pickled, but not unpickled: as many exceptions with an __init__ of their own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def awkward(rank: int, world_size: int, what: str) -> Any:
    if rank == 0:
        return torch.arange(6.0).view(2, 3).t()
    if what == "unpicklable":
        return (number for number in range(3))
    if what == "unreadable":
        return Unreadable("a", "b")
    error = Unreadable("a", "b")
    error.more = threading.Lock()  # type: ignore[attr-defined]
    raise error


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("unpicklable", "spawn: result: expected what pickle can send, got generator"),
        ("unreadable", "spawn: result: expected what this process can unpickle"),
        ("exception", "test_processes.Unreadable: a"),
    ],
)
def test_what_cannot_be_pickled_is_a_clear_failure(what: str, expected: str) -> None:
    result, failure = spawn(awkward, 2, what, backend="gloo", may_die={1})
    assert torch.equal(result, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert isinstance(failure, RankFailure) and expected in str(failure)
    assert str(failure).startswith("rank 1 raised:")


def at_module_level(rank: int, world_size: int, *args: Any) -> None:
    dist.barrier()


BAD_POSITIONS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((3, 2), TypeError, "fn: expected a function, got int 3"),
    ((lambda rank, size: 0, 2), TypeError, "fn: expected a function that other processes can import"),
    ((threading.Lock().acquire, 2), TypeError, "fn: expected a function that other processes can"),
    ((at_module_level, 2.0), TypeError, "world_size: expected an integer, got float 2.0"),
    ((at_module_level, True), TypeError, "world_size: expected an integer, got bool True"),
    ((at_module_level, 0), ValueError, "world_size: expected an integer of at least 1, got 0"),
    ((at_module_level, 2, 1, threading.Lock()), TypeError, r"args\[1\]: expected what pickle can send"),
]
BAD_OPTIONS: list[tuple[str, Any, type[Exception], str]] = [
    ("timeout_s", "9", TypeError, "timeout_s: expected a number, got str '9'"),
    ("timeout_s", 0, ValueError, "timeout_s: expected a positive number of seconds"),
    ("timeout_s", float("nan"), ValueError, "timeout_s: expected .* got nan"),
    ("timeout_s", float("inf"), ValueError, "timeout_s: expected .* got inf"),
    ("backend", 1, TypeError, "backend: expected a name or None, got int 1"),
    ("backend", "glue", ValueError, r"backend: .*gloo.*, got 'glue'"),
    ("backend", "cpu:gloo,cuda:", ValueError, "backend: .* got 'cpu:gloo,cuda:'"),
    ("env", ["A"], TypeError, "env: expected a mapping of str to str, got list"),
    ("env", {1: "a"}, TypeError, "env: expected a string, got int 1"),
    ("env", {"A": 1}, TypeError, r"env\['A'\]: expected a string, got int 1"),
    ("env", {"A=B": "1"}, ValueError, "env: expected names without '='"),
    ("may_die", 1, TypeError, "may_die: expected a collection of ranks, got int 1"),
    ("may_die", {"1"}, TypeError, "may_die: expected an integer, got str"),
    ("may_die", [2], ValueError, "may_die: expected ranks from 0 to 1, got 2"),
]


def test_bad_arguments_are_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_context, "Process", lambda **_: pytest.fail("a process"))
    none: dict[str, Any] = {}
    bad = [(arguments, none, kind, expected) for arguments, kind, expected in BAD_POSITIONS]
    bad += [((at_module_level, 2), {name: value}, kind, told) for name, value, kind, told in BAD_OPTIONS]
    for arguments, options, kind, expected in bad:
        with pytest.raises(kind, match=f"^spawn: {expected}"):
            spawn(*arguments, **options)


def test_good_arguments_are_taken() -> None:
    fn = functools.partial(at_module_level)
    assert spawn(fn, 2, backend="cpu:GLOO", timeout_s=100, env={}, may_die=(0, 1)) == [None, None]


def test_a_program_on_standard_input_can_start_functions_of_modules() -> None:
    program = (
        "from flux.testing import spawn\ndef rank_of(rank, p): return rank\nprint(spawn(int.__add__, 2))\n"
        "spawn(rank_of, 2)"
    )
    ran = subprocess.run([sys.executable], input=program, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "[2, 3]\n", ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("ValueError: spawn: fn: expected a function of a file")
    assert last.endswith("got rank_of of an interactive session, -c or standard input")
