"""`flux verify`: what ran out of time, what runs now, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flux
from flux.cli import app, verify, verify_cases, verify_log
from flux.cli.verify_log import RUNNING, Outcome
from flux.testing import RankFailure, SpawnError

runner = CliRunner()
DONE = Outcome("gemm_rs", "one tile a rank", "2 processes, CPU", "exact", "", 0.5)
BEGUN = Outcome("gemm_rs", "many tiles", "2 processes, CPU", RUNNING)
LATE = [RankFailure(rank, None, "") for rank in range(2)]


def ending_with(failures: list[RankFailure], *written: Outcome) -> Callable[..., list[Any]]:
    """What stands for `spawn` of ranks that write this much and then fail."""

    def spawn(fn: object, world: int, device: str, log: str, nodes: int, **options: object) -> list[Any]:
        with verify_log.writer(log) as write:
            for outcome in written:
                write(outcome)
        raise SpawnError(failures)

    return spawn


def test_a_time_out_is_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been exact before it stays so, and the case that was running is named."""
    monkeypatch.setattr(verify_cases, "spawn", ending_with(LATE, replace(BEGUN, case="x"), DONE, BEGUN))
    monkeypatch.setattr(verify_cases, "gemm", lambda *a: iter(()))
    file = tmp_path / "v.json"
    options = ["--cpu", "--world", "2", "--timeout", "7", "--json", str(file)]
    result = runner.invoke(app, ["verify", *options])
    assert result.exit_code == 1
    assert "1 exact, 0 wrong, 1 timed out, 0 skipped" in result.stdout
    report = json.loads(file.read_text())
    assert not report["ok"]
    done, late = report["outcomes"]
    assert (done["state"], done["case"]) == ("exact", "one tile a rank")
    assert (late["op"], late["case"], late["state"]) == ("gemm_rs", "many tiles", "timed out")
    assert late["detail"] == "not done after 7 s (--timeout)"


def test_a_time_out_before_the_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_cases, "spawn", ending_with(LATE))
    (outcome,) = verify_cases.ranks(2, "cpu", 7.0)
    assert (outcome.op, outcome.case, outcome.state) == ("all", "starting", "timed out")


@pytest.mark.parametrize(
    "failure", [RankFailure(1, -9, ""), RankFailure(1, None, "Traceback\nValueError: x")]
)
def test_ranks_that_wait_for_a_dead_one_are_not_late(
    monkeypatch: pytest.MonkeyPatch, failure: RankFailure
) -> None:
    monkeypatch.setattr(verify_cases, "spawn", ending_with([failure, LATE[0]], BEGUN))
    (outcome,) = verify_cases.ranks(2, "cpu", 7.0)
    assert (outcome.case, outcome.state) == ("many tiles", "wrong") and "7 s" not in outcome.detail


def test_a_wait_inside_of_a_case_is_a_time_out_too() -> None:
    def waits() -> str:
        raise flux.CommTimeoutError("gemm_rs", 0, 1, 3, timeout_s=30.0)

    def fails() -> str:
        raise ValueError("no")

    assert verify_cases._timed("op", "case", "here", waits).state == "timed out"
    assert verify_cases._timed("op", "case", "here", fails).state == "wrong"


def test_progress_is_a_line_for_each_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all that the file says; half a line, by a process that was killed while it wrote, is not read."""
    monkeypatch.setattr(verify_log, "_announced", "")
    path = tmp_path / "log"
    with verify_log.writer(str(path)) as write, verify_log.writer(None) as silent:
        for case in ("many tiles", "the next"):
            write(replace(BEGUN, case=case))
            silent(replace(BEGUN, op="gemm"))
            write(replace(DONE, case=case))
        write(replace(BEGUN, where="4 processes, CPU"))
    with path.open("a") as file:
        file.write('{"op": "gemm')
    assert capsys.readouterr().err.splitlines() == [
        "verifying gemm_rs, 2 processes, CPU",
        "verifying gemm_rs, 4 processes, CPU",
    ]
    done, running = verify_log.read(path)
    assert [o.case for o in done] == ["many tiles", "the next"]
    assert running == replace(BEGUN, where="4 processes, CPU")
    assert verify_log.read(tmp_path / "none") == ([], None)


def test_cases_after_an_error_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out silently where ranks stop."""

    def everywhere(told: list[Any], mine: object) -> None:
        told[:] = [mine] * len(told)

    def fails(*args: object) -> str:
        raise RuntimeError("lost")

    monkeypatch.setattr(verify_cases.dist, "all_gather_object", everywhere)
    monkeypatch.setattr(verify_cases, "_rank_case", fails)
    first, left = verify_cases.run_rank(1, 2, "cpu", "")
    assert (first.state, first.detail) == ("wrong", "rank 0: RuntimeError: lost")
    every = sum(len(verify_cases.named_cases(2, "cpu", op)) for op in verify_cases.COLLECTIVES)
    every += len(verify_cases.verify_moe.named_cases(2)) + len(verify_cases.verify_fp8.named_cases(2))
    assert (left.state, left.case) == ("skipped", f"{every - 1} more")


def test_the_table_comes_after_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes the pipe early still has the results."""
    file = tmp_path / "v.json"

    def runs(*args: object) -> Iterator[Iterator[Outcome]]:
        yield iter([DONE])

    def closed(*args: object) -> None:
        assert json.loads(file.read_text())["ok"]
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(verify, "plan_runs", runs)
    monkeypatch.setattr(verify, "report", closed)
    assert runner.invoke(app, ["verify", "--json", str(file)]).exit_code == 1
