"""``flux tune`` on CPU processes: what it writes, that it goes on where it was killed, and who uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bench_rows import row as made_row
from typer.testing import CliRunner

import flux
from flux import _files
from flux.bench import tune
from flux.bench.model import Row, in_way
from flux.bench.suites import Problem
from flux.bench.tune import facts_of
from flux.cli import app
from flux.measured import files
from flux.measured.machine import Machine
from flux.measured.times import Fact
from flux.testing import spawn

_SHAPE = ["--cpu", "--tp", "2", "--n", "64", "--k", "64", "--iters", "2", "--rounds", "3"]


def rows(file: Path) -> list[dict[str, object]]:
    try:
        return list(json.loads(file.read_text())["rows"])
    except OSError:
        return []


def test_killed_in_the_middle_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    sizes = [part for m in (2, 4, 16, 64) for part in ("--m", str(m))]
    arguments = ["tune", "gemm_ar", "gemm_rs", *_SHAPE, *sizes, "--out", str(file)]
    command = [sys.executable, "-m", "flux", *arguments]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(rows(file)) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = rows(file)
    assert 2 <= len(left) < 8
    # A process of its own: ranks write where their fork server's fd 2 was.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = rows(file)
    assert len(measured) == 8
    # Rows of the first run are as they were; only the rest was measured.
    assert [row["us"] for row in measured[: len(left)]] == [row["us"] for row in left]
    assert done.stderr.count(": done") == 8 - len(left)
    # A finished file is left as it is.
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert rows(file) == measured
    before_and_after(file)
    assert spawn(planned_by, 2, str(file), backend="gloo") == [[]] * 2


def before_and_after(file: Path) -> None:
    choices = tune.choices(files.read(file)[1])
    assert len(choices) == 8
    for choice in choices:
        assert {"kernel", "parts", "torch"} <= choice.fact.us.keys()
        assert choice.after <= choice.before
        assert choice.way == choice.usual or choice.after < 0.98 * choice.before


def planned_by(rank: int, world_size: int, file: str) -> list[str]:
    """Plans of a group with this file are those of its table, and results are right."""
    wrong = []
    with mock.patch.dict("os.environ", {"FLUX_TUNING": file}):
        for choice in tune.choices(files.read(Path(file))[1]):
            fact = choice.fact
            call = flux.gemm_ar if fact.op == "gemm_ar" else flux.gemm_rs
            got = call(torch.ones(fact.m, fact.k), torch.ones(fact.n, fact.k))
            plan = flux.explain(fact.op, fact.m, fact.n, fact.k, torch.float32)
            if plan.way != choice.way or not (got == fact.k * world_size).all():
                wrong.append(f"{fact.problem}: {plan.way}, not {choice.way}")
    return wrong


def test_recorded_shapes_and_a_budget(tmp_path: Path) -> None:
    trace, file = tmp_path / "shapes", tmp_path / "tuning.json"
    known = {"dtype": "float32", "transpose_weight": False}
    problems = [
        {"op": "ag_gemm", "m": 8, "n": 16, "k": 24, "world_size": 2},
        {"op": "ag_gemm", "m": 8, "n": 16, "k": 24, "world_size": 2},
        {"op": "all_reduce", "m": 1, "n": 96, "k": 0, "world_size": 2},
        {"op": "gemm_rs", "m": 8, "n": 16, "k": 24, "world_size": 4},
    ]
    trace.write_text("".join(json.dumps(problem | known) + "\n" for problem in problems))
    assert [(p.op, p.local(2)) for p in tune.traced(trace, 2)] == [
        ("ag_gemm", (8, 16, 24)),
        ("all_reduce", (1, 96, 1)),
    ]
    arguments = ["tune", "--cpu", "--tp", "2", "--trace", str(trace), "--out", str(file), "--dtype", "fp32"]
    arguments += ["--iters", "1", "--rounds", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [(row["op"], row["m"], row["n"]) for row in rows(file)] == [
        ("ag_gemm", 8, 16),
        ("all_reduce", 96, 0),
    ]
    trace.write_text("what")
    assert "file of FLUX_RECORD_SHAPES" in CliRunner().invoke(app, arguments).output
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_spent_budget_leaves_rows(tmp_path: Path) -> None:
    tuned = spawn(with_budget, 2, str(tmp_path / "a"), backend="gloo")[0]
    assert tuned == 2


def with_budget(rank: int, world_size: int, file: str) -> int:
    from flux.bench.runner import Settings

    problems = tuple(Problem("all_reduce", "x", "all_reduce", m, 8, 2) for m in (1, 2))
    settings = Settings(problems, "x", "cpu", 2, 2, "float32", iters=1, rounds=1)
    tuned = tune._tune_rank(rank, world_size, settings, file, 0.0)
    return 2 if tuned is None else tuned.left


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["moe"], "op expected to be one of gemm"),
        (["--trace", "x", "--m", "4"], "--trace expected without other shapes"),
        (["--trace", "/no/such"], "No such file"),
        (["--out", "FILE"], "expected a field 'machine'"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "FILE").write_text("{}")
    given = [str(tmp_path / "FILE") if part == "FILE" else part for part in arguments]
    result = CliRunner().invoke(app, ["tune", "--cpu", "--tp", "2", *given])
    assert result.exit_code == 2 and words in result.output.replace("\n", " "), result.output


def test_a_file_of_another_machine_is_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "a"
    _files.replace(file, files.to_json(Machine("sm_90", 132), []))
    result = CliRunner().invoke(app, ["tune", "all_reduce", *_SHAPE, "--m", "4", "--out", str(file)])
    assert result.exit_code == 1 and "is of another machine: arch sm_90, not cpu" in result.output


def row(op: str, times: dict[str, tuple[str, float]], **change: Any) -> Row:
    return made_row(times, op, m=16, n=32, k=64, tp=2, local=(16, 32, 32), **change)


def test_facts_of_rows() -> None:
    times = {
        "flux": ("flux", 5e-3),
        "cuBLAS": ("gemm", 2e-3),
        "flux.gemm": ("gemm", 1e-3),
        "NCCL": ("comm", 9e-3),
        "flux.all_reduce": ("comm", 3e-3),
        "cuBLAS+NCCL": ("serial", 11e-3),
    }
    gemm, total, whole = facts_of(row("gemm_ar", times))
    assert gemm == Fact("gemm", 1, 2, 16, 32, 32, {"kernel": 1.0, "torch": 2.0})
    assert total == Fact("all_reduce", 2, 2, 512, 0, 0, {"kernel": 3.0, "torch": 9.0})
    # Parts that were timed alone, and what lies between two launches.
    us = {"kernel": 5.0, "torch": 11.0, "parts": 4.5}
    assert whole == Fact("gemm_ar", 2, 2, 16, 32, 32, us, summed=("parts",))
    (whole,) = facts_of(row("gemm_ar", {**times, in_way("parts"): ("peer", 4.8e-3)}), tuned=True)
    assert whole.us == {**us, "parts": 4.8} and not whole.summed
    (whole,) = facts_of(row("gemm_ar", times, plan={"config": "", "way": "composed"}), tuned=True)
    assert whole.us == {"composed": 5.0, "torch": 11.0, "parts": 4.5}
    assert not list(facts_of(row("gemm_ar", times, check="rank 1: 3 of 512 wrong")))
