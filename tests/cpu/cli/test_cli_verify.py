"""`flux verify`: what ran out of time, what runs now, and what came of it. Several nodes, emulated or as two
torchruns on one machine, for all commands.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flux
from flux.cli import app, nodes, verify, verify_cases, verify_log
from flux.cli.verify_log import RUNNING, Outcome
from flux.comm import topology
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


def test_verify_on_nodes(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    done = runner.invoke(app, ["verify", "--nodes", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    outcomes = json.loads(path.read_text())["outcomes"]
    assert Counter(outcome["state"] for outcome in outcomes) == {"exact": len(outcomes)}
    assert {outcome["where"] for outcome in outcomes} == {"2 nodes x 2 emulated, CPU"}
    assert {outcome["op"] for outcome in outcomes} >= {"gemm_rs", "all_gather", "moe"}
    assert any(outcome["case"] == "expert parallel across nodes" for outcome in outcomes)


def test_doctor_measures_what_plans_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "links.json"
    done = runner.invoke(app, ["doctor", "--nodes", "2", "--links", str(path)])
    assert done.exit_code == 0, done.output
    for line in ("2 nodes x 2, emulated on this machine", "works, by gloo", "between nodes", "inside a node"):
        assert line in done.output
    monkeypatch.setenv("FLUX_LINKS", str(path))
    links = topology.links()
    assert links.source.startswith("emulated on this machine, 2 nodes x 2, gloo")
    assert 0 < links.nic_gb_per_s < 1e3 and 0 < links.latency_us < 1e6


def test_doctor_says_why_there_are_no_rates(tmp_path: Path) -> None:
    (finding,) = nodes.findings({"why_not": "all ranks are on one node"}, 2, None, "measured")
    assert finding.state == "bad" and "FLUX_NODE" in (finding.advice or "")
    (finding,) = nodes.findings({"busy": "5 µs, 5 without bytes"}, 2, tmp_path / "links", "measured")
    assert finding.state == "bad" and not list(tmp_path.iterdir()), "no rates are written"
    (finding,) = nodes.findings({"nodes": 3, "ranks": 2}, 2, None, "measured")
    assert finding.state == "bad" and finding.value == "3 nodes x 2, not 2 nodes"


SCRIPT = """
import torch
import torch.distributed as dist

import flux

dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()
out = flux.gemm_rs(torch.ones(64 * p, 32), torch.ones(16, 32))
assert (out == 32 * p).all()
flux.check()
if rank == 0:
    print(flux.explain("gemm_rs", 64 * p, 16, 32, torch.float32))
dist.destroy_process_group()
"""


def test_two_torchruns_on_one_machine_are_two_nodes(tmp_path: Path) -> None:
    """The rehearsal of docs/nodes.md."""
    script = tmp_path / "two_nodes.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    running = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), str(script)],
            env={**os.environ, "FLUX_NODE": str(node), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    told = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert "runs       two-level: 2 nodes x 1, exchange by gloo" in told[0][0]
