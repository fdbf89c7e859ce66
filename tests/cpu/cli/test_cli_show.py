"""`flux bench --show`: every JSON file that flux writes, and one line for every other."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flux.bench import record
from flux.bench.report import TABLE_WIDTH
from flux.cli import app, doctor, show, tables, verify
from flux.cli.findings import Finding
from flux.cli.verify_log import Outcome

runner = CliRunner()
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
# Whole models have pages of their own.
_WHOLE = re.compile("-(vllm|megatron_model)-")
FILES = [file for file in sorted(RESULTS.rglob("*.json")) if not _WHOLE.search(file.name)]
# One of each kind.
BENCH, LOSSES, TUNING = (
    next(file for file in FILES if name in file.name)
    for name in ("gemm_rs-tp4", "megatron-losses", "few-rows-variants")
)


def shown(file: Path) -> str:
    result = runner.invoke(app, ["bench", "--show", str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(file: Path, *more: str) -> str:
    result = runner.invoke(app, ["bench", "--show", str(file), *more])
    assert result.exit_code == 2 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    return line


def leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from leaves(value)
    else:
        yield data


def names(data: Any) -> Iterator[str]:
    """Keys of everything nested, but of lists of rows inside of rows, whose columns stand for them."""
    if isinstance(data, dict):
        yield from (key for key, value in data.items() if key not in ("tiles", "shapes"))
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from names(value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_stored_result_is_shown(file: Path) -> None:
    text, data = shown(file), json.loads(file.read_text())
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 220 and len(lines) > 5
    if file.parent.name != "tuning":
        assert all(name in text for name in [row["model"] for row in data.get("rows", [])] or data)
        return
    # Raw data: every number and every column is there.
    assert "…" not in text
    words = " ".join(text.split())
    single = set(words.replace(",", " ").split())
    for value in set(leaves(data)):
        said = f"{value:.10g}" if isinstance(value, float) else "–" if value is None else str(value)
        assert said in single or " ".join(said.split()) in words, value
    for name in set(names(data)) - {"what", "about", "packages", "part", "rows"}:
        assert name in words, name


def test_losses_are_followed_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    ours = [float(100 - i) for i in range(100)]
    file.write_text(json.dumps({"stock": ours, "ours": [*ours[:70], ours[70] + 0.5, *ours[71:]]}))
    lines = [line.split() for line in shown(file).splitlines()]
    assert ["0", "100.0000", "100.0000"] in lines and ["99", "1.0000", "1.0000"] in lines
    assert len(lines) < 30
    assert ["furthest", "apart:", "5.00e-01,", "at", "step", "70", "of", "100"] in lines


def test_what_verify_and_doctor_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        Outcome("gemm", "one tile", "CPU", "exact", "", 0.25),
        Outcome("gemm_rs", "[many] tiles", "2 ranks", "timed out", "after 3 s"),
    ]
    monkeypatch.setattr(verify, "plan_runs", lambda *a: iter([iter(outcomes)]))
    monkeypatch.setattr(doctor, "examine", lambda **k: iter([Finding("part", "thing", "[3]", "bad", "do")]))
    for command in ("verify", "doctor"):
        file = tmp_path / f"{command}.json"
        ran = runner.invoke(app, [command, "--json", str(file)])
        assert ran.exit_code == 1 and not json.loads(file.read_text())["ok"]
        text = shown(file)
        assert text.splitlines()[0].startswith(f"flux {command} · ")
        assert text.splitlines()[1:] == ran.stdout.splitlines()
    assert "[many] tiles" in shown(tmp_path / "verify.json")


@pytest.mark.parametrize("file", [BENCH, LOSSES, TUNING], ids=lambda file: file.stem)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_a_file_that_is_cut_off(file: Path, share: float, tmp_path: Path) -> None:
    text = file.read_text().rstrip()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: int(share * len(text))])
    assert refusal(cut).endswith(f"file {cut}: expected JSON, but it is cut off")


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
        line = refusal(file)
        assert what in line, text
        if what == "is none of these":
            assert "--show expected a result of bench, outcomes of verify, findings of doctor" in line
            assert line.endswith(f"{file} {what}")


def test_what_is_no_json(tmp_path: Path) -> None:
    for name, content, why in (
        ("a", b"", "it is empty"),
        ("b", b"some text", "Expecting value"),
        ("c", b"\xff\xfe\x00", "byte 0: expected UTF-8, got 0xff"),
        ("d", b"[" * 100_000, "expected at most 64 levels, got more"),
    ):
        (tmp_path / name).write_bytes(content)
        assert why in refusal(tmp_path / name)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        assert f"file {path}: {why}" in refusal(path)


def test_only_results_of_bench_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    line = refusal(TUNING, "--plot", str(tmp_path / "p.png"))
    assert "--plot draws results of bench" in line and "has tuning data" in line
    empty = record.read(BENCH)
    empty.rows.clear()
    record.write(empty, tmp_path / "empty.json")
    result = runner.invoke(
        app, ["bench", "--show", str(tmp_path / "empty.json"), "--plot", str(tmp_path / "p.png")]
    )
    assert result.exit_code == 2 and "no row of flux to plot" in result.stderr


def test_rows_too_wide_for_a_table_are_paragraphs() -> None:
    numbers = {f"column {i}": 1000.5 + i for i in range(30)}
    rows = [{"model": "a", "m": 1} | numbers, {"model": "b", "m": 2}]
    for count, found in ((2, ["model", "m"]), (32, ["model", "a", "·", "m", "1", "·"])):
        output, some = io.StringIO(), [dict(list(row.items())[:count]) for row in rows]
        tables.show({"what": "x", "rows": some}, Console(file=output, width=TABLE_WIDTH))
        text = output.getvalue()
        assert max(map(len, text.splitlines())) <= TABLE_WIDTH
        assert any(line.split()[: len(found)] == found for line in text.splitlines())
        words = " ".join(text.split())
        assert all(f"column {i} {1000.5 + i:.10g}" in words for i in range(count - 2))


def test_all_kinds_are_told_apart() -> None:
    kinds = [
        [kind.name for kind in show.KINDS if kind.is_one(data)][0]
        for data in (json.loads(file.read_text()) for file in (BENCH, LOSSES, TUNING))
    ]
    assert kinds == [show.KINDS[i].name for i in (0, 3, 4)]
