"""flux history: a row over all results that have it."""

from __future__ import annotations

from pathlib import Path

from test_bench_record import make_record
from typer.testing import CliRunner, Result

from flux.bench import record
from flux.bench.model import Timing
from flux.cli import app, history


def written(folder: Path, date: str, factor: float) -> Path:
    result = make_record()
    result.date, result.commit = date, f"c{date[-2:]}"
    for row in result.rows:
        row.times["flux"] = Timing("flux", tuple(factor * t for t in row.times["flux"].samples))
    record.write(result, folder / f"{date}.json")
    return folder / f"{date}.json"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["history", *map(str, arguments)])


def test_rows_are_followed_by_date(tmp_path: Path) -> None:
    files = [written(tmp_path, date, factor) for date, factor in (("2026-01-03", 1.0), ("2026-01-01", 2.0))]
    found = history.rows_of([record.read(file) for file in files], ["small"], [])
    assert [[result.commit for result, _ in each] for each in found.values()] == [["c01", "c03"]] * 2
    shown = invoke(*files, "--model", "large", "--m", 512)
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
    file = written(tmp_path, "2026-01-01", 1.0)
    for arguments, words in (
        ((), "files"),
        ((tmp_path / "none",), "No such file"),
        ((file, "--model", "gpt"), "history: found no row"),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2 and words in refused.stderr, refused.output


def test_the_old_spelling_still_works(tmp_path: Path) -> None:
    file = str(written(tmp_path, "2026-01-01", 1.0))
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
        shown = CliRunner().invoke(app, ["bench", *words])
        assert shown.exit_code == status and said in shown.stderr and shown.stderr.count("\n") == 1, (
            shown.output
        )
