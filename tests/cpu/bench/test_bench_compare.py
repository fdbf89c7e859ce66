"""flux compare: rows better, worse and the same, without the drift of the machine. flux history: a row over
all results that have it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_rows import row as made_row
from test_bench_record import make_record
from typer.testing import CliRunner, Result

from flux.bench import record
from flux.bench.model import Row, Timing
from flux.cli import app, history


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def row(m: int, flux: float, peer: float = 2.0, spread: float = 0.0) -> Row:
    def timing(role: str, ms: float) -> Timing:
        return Timing(role, tuple(ms * (1 + spread * step) for step in (-2, -1, 0, 1, 2)))

    times = {"flux": timing("flux", flux), "NCCL": timing("peer", peer), "flux, parts": timing("peer", 9.0)}
    return made_row({}, m=m, tp=2, times=times)


def written(path: Path, *rows: Row) -> str:
    result = record.Record("0", "c", "d", "s", "cuda", {}, {}, list(rows), complete=True)
    record.write(result, path)
    return str(path)


@pytest.mark.parametrize(
    ("after", "verdict", "status"),
    [
        (row(8, 1.0), "same", 0),
        (row(8, 1.019), "same", 0),
        (row(8, 1.03), "worse", 1),
        (row(8, 0.97), "better", 0),
        # All candidates take a tenth longer: the machine.
        (row(8, 1.1, peer=2.2), "same", 0),
        (row(8, 1.0, peer=2.2), "better", 0),
        # As far apart as the samples of one run.
        (row(8, 1.05, spread=0.04), "same", 0),
        (row(8, 1.2, spread=0.04), "worse", 1),
    ],
)
def test_verdicts(tmp_path: Path, after: Row, verdict: str, status: int) -> None:
    files = [written(tmp_path / "a.json", row(8, 1.0)), written(tmp_path / "b.json", after)]
    result = invoke("compare", *files)
    assert result.exit_code == status, result.output
    assert f"1 {verdict}" in result.output


def test_wrong_and_missing_rows(tmp_path: Path) -> None:
    wrong = row(16, 1.0)
    wrong.check, wrong.times = "rank 1: 3 of 64 wrong", {}
    files = [
        written(tmp_path / "a.json", row(8, 1.0), row(16, 1.0), row(32, 1.0)),
        written(tmp_path / "b.json", row(8, 1.0), wrong, row(64, 1.0)),
    ]
    result = invoke("compare", *files)
    assert result.exit_code == 1 and "0 better, 0 worse, 1 same, 1 wrong" in result.output
    for arguments in (files[:1], [files[0], str(tmp_path / "none")], [files[0], written(tmp_path / "c")]):
        assert invoke("compare", *arguments).exit_code == 2


def dated(folder: Path, date: str, factor: float) -> Path:
    result = make_record()
    result.date, result.commit = date, f"c{date[-2:]}"
    for row in result.rows:
        row.times["flux"] = Timing("flux", tuple(factor * t for t in row.times["flux"].samples))
    record.write(result, folder / f"{date}.json")
    return folder / f"{date}.json"


def test_rows_are_followed_by_date(tmp_path: Path) -> None:
    files = [dated(tmp_path, date, factor) for date, factor in (("2026-01-03", 1.0), ("2026-01-01", 2.0))]
    found = history.rows_of([record.read(file) for file in files], ["small"], [])
    assert [[result.commit for result, _ in each] for each in found.values()] == [["c01", "c03"]] * 2
    shown = invoke("history", *files, "--model", "large", "--m", 512)
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines() if "large" in line]
    assert [(line[5], line[6], line[7]) for line in lines] == [
        ("2026-01-01", "c01", "0.4000"),
        ("2026-01-03", "c03", "0.2000"),
    ]


def test_what_is_no_row_of_flux_is_left_out(tmp_path: Path) -> None:
    wrong = make_record()
    wrong.rows[0].check, wrong.rows[1].times = "3 of 9 wrong", {}
    other = make_record()
    other.machine["gpu"] = "Other GPU"
    found = history.rows_of([wrong, other], [], [])
    # GPUs of another kind are another row.
    assert sorted(len(each) for each in found.values()) == [1, 1, 1, 1]


def test_what_is_refused(tmp_path: Path) -> None:
    file = dated(tmp_path, "2026-01-01", 1.0)
    for arguments, words in (
        ((), "files"),
        ((tmp_path / "none",), "No such file"),
        ((file, "--model", "gpt"), "history: found no row"),
    ):
        refused = invoke("history", *arguments)
        assert refused.exit_code == 2 and words in refused.stderr, refused.output


def test_the_old_spelling_still_works(tmp_path: Path) -> None:
    file = str(dated(tmp_path, "2026-01-01", 1.0))
    for words, status, said in (
        (
            ["history", file, "--model", "large", "--m", "512"],
            0,
            "`flux bench history` is `flux history` now",
        ),
        (["compare", file, file], 0, "`flux bench compare` is `flux compare` now"),
        (["history", file, "--strict"], 2, "history measures nothing, expected without --strict"),
        (["compare", file, file, "--m", "512"], 2, "expected without --m"),
    ):
        shown = invoke("bench", *words)
        assert shown.exit_code == status and said in shown.stderr and shown.stderr.count("\n") == 1, (
            shown.output
        )
