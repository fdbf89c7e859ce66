"""`flux bench --show`: every JSON file that a command writes, and one line for every other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli_options import invoke, refusal

from flux.bench import record
from flux.cli import doctor, verify
from flux.cli.findings import Finding
from flux.cli.verify_log import Outcome

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
