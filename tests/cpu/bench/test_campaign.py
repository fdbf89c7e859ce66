"""A campaign of measurements, rehearsed: stand-ins take the place of nvidia-smi and of what the steps run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flux.bench import record
from flux.cli import app
from flux.cli import bench as bench_cli

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import campaign  # noqa: E402
import campaign_steps  # noqa: E402
from campaign_steps import steps  # noqa: E402

# Does what $STUB says of the first argument that it names: ends, fails or hangs. A benchmark
# writes two rows, and only one if it does not succeed.
STUB = f"""#!{sys.executable} -SE
import json, os, sys, time
line = " ".join(sys.argv[1:])
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(os.environ["CUDA_VISIBLE_DEVICES"] + " " + line + "\\n")
how = next((how for word, how in json.loads(os.environ["STUB"]).items() if word in sys.argv), "end")
if "--json" in sys.argv:
    row = dict(op="gemm_rs", model=line.split(" --json")[0], pattern="gemm_rs", m=1, n=8, k=8, tp=4,
               dtype="bfloat16", local=[1, 8, 2], wire_bytes=0, times={{}}, host_us={{"flux": 3.0}},
               plan=None, check="exact", notes=[how], variant="", derived={{}})
    rows = [row, dict(row, m=2)][: 2 if how == "end" else 1]
    commit = os.environ.get("STUB_COMMIT", os.environ["FLUX_COMMIT"])
    whole = dict(schema=1, version="1", commit=commit, date="2026-01-02T03", suite="default", device="cuda",
                 machine={{"gpus_idle": time.time()}}, settings={{"tp": 4}}, rows=rows, skipped=[],
                 complete=how == "end")
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(whole, file)
if how == "hang":
    time.sleep(60)
print("1 skipped" if how == "skip" else "3 passed in 1 s")
sys.exit(how == "fail")
"""
SMI = """#!/bin/sh
for i in $(seq 0 $((STUB_GPUS - 1))); do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done
"""
FEW = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import campaign
from campaign_steps import Step
bench = ("-m", "flux", "bench")
campaign.steps = lambda gpus: [
    Step("first", "dense", 3, (*bench, "one", "--json", "RESULT"), result="all"),
    Step("second", "dense", 3, (*bench, "two", "--json", "RESULT"), result="all"),
    Step("tests", "gpu", 30, ("-m", "pytest", "three"), gpus=1, says=" passed"),
    Step("more", "gpu", 30, ("-m", "pytest", "four"), gpus=1, says=" passed"),
]
sys.exit(campaign.main())
"""

# One step of each kind, in the order in which they are to begin.
WORTH = ["doctor", "verify", "not killed", "bench gemm_rs", "gemm_ar --suite", "moe_layer0", "-k killed"]
WORTH += ["tests/gpu/test_gpu_gemm.py", "layer_forward", "bench --nodes", "memcheck"]


class Machine:
    """A machine that has stand-ins, and a folder for what campaigns leave."""

    def __init__(self, folder: Path) -> None:
        self.out, self.log = folder / "out", folder / "log"
        self.python = folder / "python"
        for path, text in ((self.python, STUB), (folder / "nvidia-smi", SMI)):
            path.write_text(text)
            path.chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def start(self, *options: str, few: bool = True, **env: str) -> subprocess.Popen[str]:
        self.log.write_text("")
        ours = {"PATH": self.path, "STUB_LOG": str(self.log), "FLUX_COMMIT": "abc1234", "STUB": "{}"}
        ours |= {"STUB_GPUS": "4", "PYTHON": sys.executable} | env
        command = [sys.executable, "-c", FEW] if few else [str(ROOT / "benchmarks/measure.sh")]
        command += [str(self.out), *options, "--python", str(self.python)]
        clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.Popen(
            command, env=clean | ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *options: str, few: bool = True, **env: str) -> tuple[int, str]:
        process = self.start(*options, few=few, **env)
        told = process.communicate(timeout=120)[0]
        return process.returncode, told

    def ran(self) -> list[str]:
        """The last word of what steps were given, in the order in which they began."""
        lines = [line.split(" --json")[0] for line in self.log.read_text().splitlines()]
        return [line.split()[-1] for line in lines]

    def report(self) -> str:
        return next(self.out.glob("report-*.md")).read_text()

    def result(self) -> record.Record:
        (file,) = (self.out / "results").iterdir()
        assert file.name == "2026-01-02-all-tp4-4xH200-abc1234.json"
        return record.read(file)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_is_done_is_not_done_again(machine: Machine) -> None:
    status, told = machine.run()
    assert status == 0 and "Nothing is missing." in told
    assert machine.ran()[:2] == ["one", "two"] and sorted(machine.ran()[2:]) == ["four", "three"]
    assert machine.run() == (0, "Nothing is missing.\n") and machine.ran() == []
    assert "4 of 4 steps are done" in machine.report() and "| gemm_rs | 3.0 | 3.0 |" in machine.report()
    result = machine.result()
    assert result.complete and len(result.rows) == 4


def test_steps_of_one_gpu_run_side_by_side(machine: Machine) -> None:
    process = machine.start("gpu", STUB='{"pytest": "hang"}')
    while len(machine.ran()) < 2:
        time.sleep(0.02)
    assert not list(machine.out.rglob("end.json")), "one waited for the other"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert sorted(line.split()[0] for line in machine.log.read_text().splitlines()) == ["0", "1"]
    machine.run("dense", STUB_GPUS="2")
    assert [line.split()[0] for line in machine.log.read_text().splitlines()] == ["0,1", "0,1"]


def test_what_failed_took_too_long_or_was_skipped_is_missing_and_comes_last(machine: Machine) -> None:
    how = '{"one": "hang", "two": "fail", "three": "skip"}'
    status, told = machine.run(STUB=how)
    assert status == 1 and "| first | dense | stopped after 3 s, 1 rows are there |" in told
    assert "| second | dense | status 1, 1 rows are there: 3 passed" in machine.report()
    assert "| tests | gpu | nothing was shown: 1 skipped |" in told and "more" not in machine.report()
    cut = machine.result()
    assert not cut.complete and [row.m for row in cut.rows] == [1, 1]
    machine.run("dense", STUB='{"one": "fail"}')
    assert machine.ran() == ["one", "two"]
    assert "2 of 4 steps are done" in machine.report()
    again = machine.result()
    assert [(row.model.split()[-1], row.m, row.notes) for row in again.rows] == [
        ("one", 1, ["fail"]),  # of the last attempt
        ("two", 1, ["end"]),
        ("two", 2, ["end"]),
    ]
    assert machine.run()[0] == 0 and machine.ran()[-1] == "one", "it was tried twice, the test once"
    assert machine.result().complete and len(machine.result().rows) == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_campaign_goes_on(machine: Machine, number: signal.Signals) -> None:
    process = machine.start(STUB='{"two": "hang"}')
    while machine.ran() != ["one", "two"]:
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(timeout=10)
    process.communicate()
    assert "second" in machine.report() and "first" not in machine.report()
    assert machine.run("--list")[0] == 1 and machine.ran() == []
    assert "| second | dense | broken off, 1 rows are there |" in machine.report()
    assert machine.run()[0] == 0
    assert machine.ran()[-1] == "two" and "one" not in machine.ran()
    assert machine.result().complete and len(machine.result().rows) == 4


def test_commits_are_not_mixed(machine: Machine, tmp_path: Path) -> None:
    assert machine.run("dense")[0] == 0 and "2 of 4 steps are done" in machine.report()
    status, told = machine.run(FLUX_COMMIT="def5678")
    assert status == 2 and "has results of commit abc1234, this is def5678" in told and machine.ran() == []
    assert machine.run(FLUX_COMMIT="abc1234-dirty") == (
        2,
        "measure.sh: abc1234-dirty has changes that are not committed\n",
    )
    (tmp_path / "other").mkdir()
    other = Machine(tmp_path / "other")
    assert other.run("dense", FLUX_COMMIT="def5678")[0] == 0
    status, told = machine.run("--merge", str(other.out))
    assert status == 2 and "has results of commit abc1234, this is def5678" in told
    other.out = tmp_path / "third"
    status, told = other.run("dense", STUB_COMMIT="def5678")
    assert status == 2 and "first has rows of commit def5678, not abc1234" in told


def test_folders_of_one_commit_are_merged(machine: Machine, tmp_path: Path) -> None:
    assert machine.run("dense", STUB='{"two": "hang"}')[0] == 1
    (tmp_path / "other").mkdir()
    other = Machine(tmp_path / "other")
    assert other.run("gpu")[0] == 0
    assert other.run("dense", STUB='{"one": "fail"}')[0] == 1
    status, told = machine.run("--merge", str(other.out), "--list")
    assert status == 0 and machine.ran() == [], told
    assert machine.result().complete and len(machine.result().rows) == 4


def test_other_machines_have_steps_of_their_own(machine: Machine) -> None:
    assert machine.run()[0] == 0
    assert machine.run(STUB_GPUS="2")[0] == 0 and len(machine.ran()) == 4
    assert sorted(file.name for file in (machine.out / "results").iterdir()) == [
        "2026-01-02-all-tp2-2xH200-abc1234.json",
        "2026-01-02-all-tp4-4xH200-abc1234.json",
    ]


def test_no_step_begins_that_may_outlast_the_run(machine: Machine) -> None:
    status, told = machine.run("--minutes", "0.01")
    assert status == 1 and machine.ran() == [] and "first: left for another run, it may take 3 s" in told


def test_what_is_refused(machine: Machine) -> None:
    assert machine.run(STUB_GPUS="0") == (2, "measure.sh: nvidia-smi lists no GPU\n")
    status, told = machine.run("speed")
    assert status == 2 and "no part is called speed; there are verify, dist" in told


def test_all_steps_from_the_most_worthwhile_on(machine: Machine) -> None:
    """The command of the documentation, on 8 GPUs: every step runs once, exact results before the clock."""
    status, told = machine.run(few=False, STUB_GPUS="8")
    assert status == 0, told
    lines = machine.log.read_text().splitlines()
    assert len(lines) == len(steps(8))
    first = {part: min(i for i, line in enumerate(lines) if part in line) for part in WORTH}
    assert sorted(first, key=lambda part: first[part]) == WORTH
    names = {file.name.split("-", 3)[3] for file in (machine.out / "results").iterdir()}
    assert {
        f"{name}-tp8-8xH200-abc1234.json" for name in ("gemm_rs", "gemm_ar", "moe", "layer", "e2e")
    } < names
    assert "gemm-tp8-1xH200-abc1234.json" in names
    assert machine.run(few=False, STUB_GPUS="8")[0] == 0 and machine.ran() == []


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_steps(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """flux takes the command line of every step, and no two steps measure the same row."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cli, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(bench_cli, "run", found.append)
    rows: list[Any] = []
    for step in steps(gpus):
        assert 0 < step.seconds < 600 and step.part in campaign_steps.PARTS
        if not step.result:
            continue
        monkeypatch.setattr(torch.cuda, "device_count", lambda step=step: step.gpus or gpus)
        result = CliRunner().invoke(app, [*step.command[2:-2], "--json", "x.json"])
        assert result.exit_code == 0, (step, result.output)
        settings = found.pop()
        assert settings.skipped == () or settings.nodes > 1, (step, settings.skipped)
        rows += [(problem, settings.nodes) for problem in settings.problems]
    assert len(set(rows)) == len(rows) > 0
    assert len({step.name for step in steps(gpus)}) == len(steps(gpus))


def test_kinds_of_scales_have_rows_of_their_own() -> None:
    row = dict.fromkeys(("op", "model", "variant", "m", "n", "k", "tp", "dtype"), "a")
    keys = {campaign._key(row | {"scales": kind}) for kind in campaign_steps.SCALES} | {campaign._key(row)}
    assert len(keys) == 4


def test_every_file_of_tests_is_a_step() -> None:
    told = " ".join(" ".join(step.command) for step in steps(4))
    files = [*(ROOT / "tests/gpu").glob("test_*.py"), *(ROOT / "tests/dist").glob("test_*.py")]
    assert files and all(str(file.relative_to(ROOT)) in told for file in files)
