"""flux compare: rows better, worse and the same, without the drift of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flux.bench import record
from flux.bench.model import Row, Timing
from flux.cli import app


def row(m: int, flux: float, peer: float = 2.0, spread: float = 0.0, **change: Any) -> Row:
    def timing(role: str, ms: float) -> Timing:
        return Timing(role, tuple(ms * (1 + spread * step) for step in (-2, -1, 0, 1, 2)))

    times = {"flux": timing("flux", flux), "NCCL": timing("peer", peer), "flux, parts": timing("peer", 9.0)}
    return Row(
        "gemm_rs", "a", "gemm_rs", m, 8, 8, 2, "bfloat16", (m, 8, 4), 0, times, check="exact", **change
    )


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
    result = CliRunner().invoke(app, ["compare", *files])
    assert result.exit_code == status, result.output
    assert f"1 {verdict}" in result.output


def test_wrong_and_missing_rows(tmp_path: Path) -> None:
    wrong = row(16, 1.0)
    wrong.check, wrong.times = "rank 1: 3 of 64 wrong", {}
    files = [
        written(tmp_path / "a.json", row(8, 1.0), row(16, 1.0), row(32, 1.0)),
        written(tmp_path / "b.json", row(8, 1.0), wrong, row(64, 1.0)),
    ]
    result = CliRunner().invoke(app, ["compare", *files])
    assert result.exit_code == 1 and "0 better, 0 worse, 1 same, 1 wrong" in result.output
    for arguments in (files[:1], [files[0], str(tmp_path / "none")], [files[0], written(tmp_path / "c")]):
        assert CliRunner().invoke(app, ["compare", *arguments]).exit_code == 2
