"""Options of the command line: what is wrong is refused in one line, with status 2, before anything runs. And
what `flux bench --show` shows.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_bench_record import make_record
from typer.testing import CliRunner

import flux
from flux._files import write_json
from flux.bench import record, report
from flux.bench.record import Record
from flux.cli import app, doctor, findings, verify
from flux.cli import bench as bench_cli
from flux.cli.findings import Finding
from flux.cli.verify_log import Outcome

runner = CliRunner()


def invoke(command: str) -> Any:
    return runner.invoke(app, shlex.split(command))


def refusal(command: str) -> str:
    """The one line that a refused command prints."""
    result = invoke(command)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error ")
    return line


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((bench_cli, "run"), (verify, "plan_runs"), (doctor, "examine")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("it runs"))


# Of options that take whole numbers.
NOT_WHOLE = ["gemm_rs --m 0", "gemm_rs --m -5", "gemm_rs --m 1e3", "gemm_rs --k 8 --n 0", "--iters 0"]
NOT_WHOLE += ["gemm_rs --n 8 --k -1", "--rounds x", "--world 0", "--tp 0", "moe --ep 0"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nope", "flux: no such command 'nope'"),
        ("--nope", "flux: no such option: --nope"),
        ("bench --nope", "bench: no such option: --nope"),
        ("bench --json", "bench: option '--json' requires an argument"),
        ("doctor extra", "doctor: got unexpected extra argument"),
        ("bench '[/x]'", "bench: op expected to be one of gemm_rs, ag_gemm|got '[/x]'"),
        *(
            (f"bench {given}", f"bench: {given.split()[-2]} expected a whole number of 1 or more, got")
            for given in NOT_WHOLE
        ),
        ("bench gemm_rs --k 8", "bench: --n and --k come together, got only --k"),
        ("bench --timeout nan", "bench: --timeout expected a number from 1 to 1000000, got 'nan'"),
        ("bench --link 0", "bench: --link expected a number from 1 to 1000000, got '0'"),
        ("bench --dtype int8", "bench: --dtype expected to be bf16, fp16, fp32 or fp8, got 'int8'"),
        ("bench --suite nope", "bench: --suite expected to be one of cpu, decode, default, served|'nope'"),
        ("bench --suite nope.toml", "bench: --suite nope.toml: suite file not found"),
        ("bench --cpu --model nope", "bench: --model expected to be one of tiny-mlp|got 'nope'"),
        ("bench layer --model nope", "bench: --model expected to be one of llama-3-8b|got 'nope'"),
        ("bench moe --cpu --imbalance nan", "--imbalance expected to be|got 'nan'"),
        ("bench moe --cpu --imbalance cold", "--imbalance expected to be|got 'cold'"),
        ("bench moe --cpu --ep 3", "--ep expected to be a divisor of 4 ranks, got 3"),
        ("bench gemm_rs --cpu --ep 2", "bench: --ep expected with moe, got gemm_rs"),
        ("bench gemm_rs --cpu --imbalance 0", "bench: --imbalance expected with moe, got gemm_rs"),
        ("bench moe --cpu --suite cpu", "bench: --suite expected with ops that take no --model, got moe"),
        ("bench gemm_rs --n 8 --k 8 --model tiny-mlp", "bench: --model expected without --n and --k"),
        ("bench --cpu --link 100", "bench: --link expected with GPUs, got 100"),
        ("bench --cpu --world 9", "bench: --world expected to be at most 8 on CPUs, got 9"),
        ("bench --show x --iters 3 --m 5", "bench: --show measures nothing, expected without --m, --iters"),
        ("bench gemm_rs --show x", "bench: --show measures nothing, expected without ops"),
        ("bench --show x --strict", "bench: --show measures nothing, expected without --strict"),
        (
            "bench gemm_rs --cpu --suite decode",
            "nothing to measure: gemm_rs left out: suite decode has no shape",
        ),
        ("bench layer --cpu --m 7", "layer_forward: m must be divisible by the 4 ranks, got m=7"),
        ("bench gemm_rs --cpu --m 63 --world 2", "m must be divisible by the 2 ranks, got m=63"),
        ("bench moe --cpu --n 8 --k 8", "bench: "),
        ("verify --world 0", "verify: --world expected a whole number from 1 to 8, got '0'"),
        ("verify --world 9", "verify: --world expected a whole number from 1 to 8, got '9'"),
        ("verify --nodes 3 --world 4", "--world expected a multiple of --nodes 3, got 4"),
        ("doctor --links x.json", "--links expected with --nodes"),
    ],
)
def test_a_wrong_option_is_one_line(command: str, words: str) -> None:
    line = refusal(command)
    assert all(word in line for word in words.split("|")), line


def test_what_all_ops_miss_is_said_once() -> None:
    line = refusal("bench gemm_rs ag_gemm --cpu --world 1")
    assert line.count("2 ranks or more") == 1 and "gemm_rs, ag_gemm left out" in line


def test_what_a_suite_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {"ops": ["gemm_rs", "gemm_ar", "gemm_ar"], "model": ["llama3-8b-o"] * 2, "m": [8, 8]}
    settings = bench_cli.choose(bench_cli.Asked.of({**twice, "suite": "decode", "cpu": True}))
    assert settings.skipped == ("gemm_rs left out: suite decode has no shape for it",)
    assert [(problem.op, problem.m) for problem in settings.problems] == [("gemm_ar", 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"not = toml = at all", "no TOML: Invalid value"), (b"\xff\xfe", "expected UTF-8, got 0xff")],
)
def test_a_wrong_suite_names_its_file(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(text)
    line = refusal(f"bench --suite {file}")
    assert all(word in line for word in (str(file), *words.split("|"))), line


@pytest.mark.parametrize("command", ["bench --cpu", "verify --cpu", "doctor"])
def test_a_file_that_cannot_be_written_is_found_before_the_run(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "folder.json").mkdir()
    for target, why in (
        (tmp_path / "folder.json", "it is a folder"),
        (file / "x.json", f"{file} is no folder"),
        (file / "deep" / "x.json", "Not a directory"),
        (tmp_path / ("x" * 250), "File name too long"),
        ("''", "it is a folder"),
    ):
        line = refusal(f"{command} --json {target}")
        name = command.split()[0]
        assert f"{name}: --json expected a file that can be written" in line and why in line, line


def test_a_picture_that_cannot_be_drawn_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    (tmp_path / "folder.png").mkdir()
    for target, words in (
        ("x", "--plot expected a file that ends in .|.png|.svg|got 'x'"),
        ("x.xyz", "got 'x.xyz'"),
        ("x.pgf", "got 'x.pgf'"),
        (tmp_path / "folder.png", "--plot expected a file that can be written|it is a folder"),
        ("r.png --json r.png", "--plot expected another file than --json"),
    ):
        line = refusal(f"bench --cpu --plot {target}")
        assert all(word in line for word in words.split("|")), line
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refusal("bench --cpu --plot x.png")


def test_folders_of_targets_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda **k: iter([Finding("s", "n", "v")]))
    file = tmp_path / "new" / "deep" / "d.json"
    assert invoke(f"doctor --json {file}").exit_code == 0
    assert json.loads(file.read_text())["ok"]
    assert [path.name for path in file.parent.iterdir()] == ["d.json"]


def test_links_stay_links_and_pipes_stay_pipes(tmp_path: Path) -> None:
    """A result must not take the place of standard output."""
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file.json")
    write_json({"a": 1}, link)
    assert link.is_symlink() and json.loads((tmp_path / "file.json").read_text()) == {"a": 1}
    os.mkfifo(pipe)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    record.write(make_record(complete=False), pipe)  # only the finished result goes there
    write_json({"b": 2}, pipe)
    thread.join(10)
    assert pipe.is_fifo() and [json.loads(text) for text in read] == [{"b": 2}]


def finished(monkeypatch: pytest.MonkeyPatch, result: Record | None) -> None:
    monkeypatch.setattr(bench_cli, "run", lambda settings: result)


def test_a_picture_without_rows_is_one_line_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    result = make_record("cpu")
    for row in result.rows:
        del row.times["flux"]
    finished(monkeypatch, result)
    shown = invoke(f"bench --cpu --plot {tmp_path / 'p.png'}")
    assert shown.exit_code == 1 and "gemm_rs" in shown.stdout
    _, line = shown.stderr.splitlines()  # the first says what is measured
    assert "no row of flux to plot" in line


def test_exit_status_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for what is wrong; 2 is for options."""
    slow = make_record("cuda")  # one of its rows is under the bar
    finished(monkeypatch, slow)
    assert invoke("bench --cpu").exit_code == 0
    assert invoke("bench --cpu --strict").exit_code == 1
    slow.rows[0].check = "rank 1: 7 of 9 wrong"
    assert invoke("bench --cpu").exit_code == 1
    finished(monkeypatch, make_record("cpu"))
    assert invoke("bench --cpu --strict").exit_code == 0, "bars are for GPUs"


def test_a_run_that_was_stopped_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flux.testing import RankFailure, SpawnError

    file = tmp_path / "r.json"

    def stopped(settings: object) -> None:
        record.write(make_record("cpu", complete=False), file)
        raise SpawnError([RankFailure(rank, None, "") for rank in range(4)])

    monkeypatch.setattr(bench_cli, "run", stopped)
    result = invoke(f"bench --cpu --timeout 7 --json {file}")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1:] == [
        "error bench: stopped after 7 s (--timeout)",
        f"rows measured before that are in {file}",
    ]


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"flux {flux.__version__}\n")


@pytest.mark.parametrize("command", ["verify --cpu", "doctor", "bench --show nope.json", "bench --m 0"])
def test_under_torchrun_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(command)
    assert (result.exit_code, result.output) == (2 if "--m" in command else 0, "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(verify, "plan_runs", lambda *a: iter(()))
    monkeypatch.setattr(doctor, "examine", lambda **k: iter(()))
    assert invoke(command).output


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("2", "2"), ("0", "")])
def test_ranks_that_torchrun_never_sets(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    for command in ("bench --cpu", "verify --cpu", "doctor"):
        assert f"expected as torchrun sets them, got RANK='{rank}'" in refusal(command)


def test_ranks_without_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert "without MASTER_ADDR" in refusal("bench --cpu")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = [sys.executable, "-m", "flux", "doctor", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "examine", full)
    result = invoke("doctor")
    assert (result.exit_code, result.stderr) == (1, "error doctor: [Errno 28] No space left on device\n")


def test_a_terminal_without_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it cannot print is replaced, and ends nothing."""
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    doctor.report([Finding("s", "name", "100 µs ✓", "ok")], report.make_console())
    stream.flush()
    assert b"name" in buffer.getvalue() and b"100 ?s ?" in buffer.getvalue()


def test_narrow_terminals_see_whole_findings() -> None:
    console = Console(file=io.StringIO(), width=24)
    doctor.report([Finding("s", "FLUX_TIMEOUT_S", "30 seconds", "ok")], console)
    assert isinstance(console.file, io.StringIO)
    assert "FLUX_TIMEOUT_S: 30" in " ".join(console.file.getvalue().split())


def test_tables_have_their_width_on_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert report.make_console().width == 30
    assert report.make_console(least=report.TABLE_WIDTH).width == 80


def test_doctor_shows_nonsense_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FLUX_TIMEOUT_S": "nan",
        "FLUX_FUSED": "maybe",
        "FLUX_VLLM_MIN_TOKENS": "-1",
        "FLUX_VLLM": "",
        "FLUX_CUDA": "on",
        "FLUX_WEATHER": "a\n\x1b[31mb",
    }.items():
        monkeypatch.setenv(name, value)
    found = {f.name: f for f in findings.environment()}
    bad = {name for name, finding in found.items() if finding.state == "bad"}
    assert bad == {"FLUX_TIMEOUT_S", "FLUX_FUSED", "FLUX_VLLM_MIN_TOKENS", "FLUX_VLLM"}
    assert all("unset it or correct it" in (found[name].advice or "") for name in bad)
    assert found["FLUX_VLLM"].value == "''"
    assert found["FLUX_CUDA"].state == "info" and "(read when flux is built)" in found["FLUX_CUDA"].value
    assert found["FLUX_WEATHER"].value == r"'a\n\x1b[31mb' (flux does not read it)"
    assert "FLUX_CUTLASS_DIR" not in found and "are not set" in found["FLUX_* variables"].value


# What `flux bench --show` takes: every JSON file that a command writes.
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
FILES = [file for file in sorted(RESULTS.glob("*.json")) if '"rows"' in file.read_text()]
BENCH = next(file for file in FILES if "gemm_rs-tp4" in file.name)


def shown(file: Path) -> str:
    result = invoke(f"bench --show {file}")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_stored_result_is_shown(file: Path) -> None:
    text, data = shown(file), json.loads(file.read_text())
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 220 and len(lines) > 5
    assert all(row["model"] in text for row in data["rows"])


def test_what_verify_and_doctor_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        Outcome("gemm", "one tile", "CPU", "exact", "", 0.25),
        Outcome("gemm_rs", "[many] tiles", "2 ranks", "timed out", "after 3 s"),
    ]
    monkeypatch.setattr(verify, "plan_runs", lambda *a: iter([iter(outcomes)]))
    monkeypatch.setattr(doctor, "examine", lambda **k: iter([Finding("part", "thing", "[3]", "bad", "do")]))
    for command in ("verify", "doctor"):
        file = tmp_path / f"{command}.json"
        ran = invoke(f"{command} --json {file}")
        assert ran.exit_code == 1 and not json.loads(file.read_text())["ok"]
        text = shown(file)
        assert text.splitlines()[0].startswith(f"flux {command} · ")
        assert text.splitlines()[1:] == ran.stdout.splitlines()
    assert "[many] tiles" in shown(tmp_path / "verify.json")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_file_that_is_cut_off(share: float, tmp_path: Path) -> None:
    text = BENCH.read_text().rstrip()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: int(share * len(text))])
    assert refusal(f"bench --show {cut}").endswith(f"file {cut}: expected JSON, but it is cut off")


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("is none of these", ["null", "3", "[]", "{}", '"what"', '{"a": 1}', '{"a": []}', '[{"what": 1}]']),
        ("is none of these", ['{"a": [1], "b": [1, 2]}', '{"schema": 1}', '{"schema": 99}']),
        ("but not whole", [f'{{"schema": 1, "rows": {rows}, "suite": "x"}}' for rows in ("[]", "3")]),
        ("but not whole", ['{"outcomes": [{"op": "gemm"}], "commit": "a", "date": "b"}', '{"outcomes": 3}']),
        ("but not whole", ['{"findings": [3], "date": "b"}']),
        (
            "but not whole",
            ['{"outcomes": [{"op": 1, "case": 2, "where": 3, "state": "new"}], "commit": "a", "date": "b"}'],
        ),
    ],
)
def test_other_json_is_one_line(what: str, texts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for text in texts:
        file.write_text(text)
        line = refusal(f"bench --show {file}")
        assert what in line, text
        if what == "is none of these":
            assert "--show expected a result of bench, outcomes of verify, findings of doctor" in line
            assert line.endswith(f"{file} {what}")


def test_only_results_of_bench_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    (tmp_path / "doctor.json").write_text('{"findings": [], "date": "today"}')
    picture = tmp_path / "p.png"
    line = refusal(f"bench --show {tmp_path / 'doctor.json'} --plot {picture}")
    assert "--plot draws results of bench" in line and "has findings of doctor" in line
    empty = record.read(BENCH)
    empty.rows.clear()
    record.write(empty, tmp_path / "empty.json")
    result = invoke(f"bench --show {tmp_path / 'empty.json'} --plot {picture}")
    assert result.exit_code == 2 and "no row of flux to plot" in result.stderr
