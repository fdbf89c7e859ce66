"""Result files, tables and pictures. flux compare: rows better, worse and the same, without the drift of the
machine. flux history: a row over all results that have it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_rows import row as made_row
from rich.console import Console
from typer.testing import CliRunner, Result

from flux import _native, machine
from flux.bench import plot, record, report
from flux.bench.model import Row, Timing
from flux.bench.record import Record
from flux.cli import app, history


def make_record(device: str = "cuda", *, complete: bool = True) -> Record:
    rows = []
    for model, m, speed in (("small", 512, 0.9), ("small", 1024, 1.3), ("large", 512, 6.0)):
        medians = {"flux": ("flux", 0.2), "cuBLAS": ("gemm", 0.18), "NCCL": ("comm", 0.1)}
        medians["cuBLAS+NCCL"] = ("serial", 0.2 * speed)
        times = {
            name: Timing(role, tuple(round(f * ms, 6) for f in (1.02, 1.0, 0.99)))
            for name, (role, ms) in medians.items()
        }
        plan = {"fused": m == 512, "config": "128x256x4", "time_us": 190.0}
        plan["candidates"] = [("128x256x4", 190.0)]
        sizes = (m, 64, 256, 4, "bfloat16", (m, 64, 64), 1000)
        rows.append(Row("gemm_rs", model, "gemm_rs", *sizes, times, {"flux": 9.0}, plan, "exact"))
    rows[1].notes.append("async-TP could not run: no reason")
    settings = {"rounds": 3, "world": 4, "tp": 4, "link_gb_per_s": 380.0}
    info = {"gpu": "Some GPU", "gpu_count": 4, "cuda": "13.0", "nccl": "2.28"}
    info |= {"torch": "2.11", "cpu": "Some CPU"}
    date = "2026-01-02T03:04:05+00:00"
    return Record("0.1.0", "abc", date, "default", device, info, settings, rows, ["gemm left out"], complete)


def drawn(content: Any, width: int = report._WIDE) -> str:
    """What a terminal shows; of a pipe, which must have room for every column."""
    output = io.StringIO()
    Console(file=output, width=width).print(content)
    return output.getvalue()


def text_of(result: Record) -> str:
    return drawn(report.render(result, report._WIDE))


def test_json_round_trip(tmp_path: Path) -> None:
    before = make_record()
    record.write(before, tmp_path / "deep" / "result.json")
    assert record.read(tmp_path / "deep" / "result.json") == before
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["result.json"]


def test_table_shows_columns_footer_and_notes() -> None:
    text = text_of(make_record())
    for word in ("speed-up", "E_overlap", "t/floor", "best peer", "host µs", "plan", "unfused"):
        assert word in text
    assert "min 0.900; 1 of 3 rows under 0.98" in text
    assert "host cost of a call: max 9.0 µs" in text
    assert "async-TP could not run: no reason [small M=1024]" in text
    assert "gemm left out" in text
    assert "cut off" not in text
    assert "cut off" in text_of(make_record(complete=False))


def test_cpu_table_compares_fused_and_unfused() -> None:
    text = text_of(make_record("cpu"))
    assert "unfused" in text and "floor" not in text
    assert "speed-up over unfused: geomean" in text


def test_wrong_rows_are_loud() -> None:
    bad = make_record()
    bad.rows[0].check = "rank 1: 7 of 9 wrong"
    del bad.rows[0].times["flux"]
    text = text_of(bad)
    assert "rank 1: 7 of 9 wrong" in text
    assert "WRONG RESULTS in 1 rows" in text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plot_draws_a_picture(tmp_path: Path, device: str) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is an optional dependency")
    path = plot.plot(make_record(device), tmp_path / "new" / "p.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(path)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 300
    assert pixels[..., :3].std() > 0.02, "an empty picture"


def test_nvidia_smi_is_asked_for_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be idle, with a low clock."""
    asked: list[list[str]] = []
    monkeypatch.setattr(machine, "run_text", lambda query: asked.append(query))
    uuids = {0: "c0ffee", 1: "decade"}
    properties = lambda device: SimpleNamespace(uuid=uuids[device.index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert machine.smi([torch.device("cuda", 1), torch.device("cuda", 0)]) == machine.smi() == []
    assert asked[0][-1] == "--id=GPU-decade,GPU-c0ffee"
    assert not any(word.startswith("--id") for word in asked[1])


def test_nvidia_smi_is_parsed() -> None:
    line = "0, Some GPU, 580.1, 143771, 345, 3201, 1980, 3201, 77.51, 700.00, [N/A]\n"
    (gpu,) = machine.parse_smi(line)
    assert gpu["name"] == "Some GPU" and gpu["driver"] == "580.1"
    assert (gpu["sm_mhz"], gpu["sm_max_mhz"], gpu["power_w"]) == (345, 1980, 77.51)
    assert gpu["temperature_c"] is None
    assert machine.parse_smi("") == []


def test_commit_falls_back_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_text", lambda *a, **k: None)
    monkeypatch.setenv("FLUX_COMMIT", "v1-2-gabc")
    assert machine.commit() == "v1-2-gabc"
    monkeypatch.delenv("FLUX_COMMIT")
    assert machine.commit() == "unknown"
    monkeypatch.setattr(_native.core, "COMMIT", "1a2b3c4")
    assert machine.commit() == "1a2b3c4", "what a wheel was built from"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_narrow_terminals_get_fewer_columns_but_whole_numbers(width: int) -> None:
    text = drawn(report.table(make_record(), "gemm_rs", width), width)
    assert "…" not in text
    for always in ("flux", "best peer", "speed-up", "t/floor", "0.200", "0.180 cuBLAS+NCCL"):
        assert always in text


def test_raw_measurements_have_one_head_and_a_line_for_each_row(tmp_path: Path) -> None:
    file = tmp_path / "raw.json"
    rows = [{"case": "a", "us": 1.5, "part": "first"}, {"case": "b", "us": [2.0, 3.0], "part": "second"}]
    record.write_rows(file, "microseconds of nothing", rows, tp=2)
    data = json.loads(file.read_text())
    head = ["schema", "what", "commit", "date", "gpu", "packages", "about", "rows"]
    assert list(data) == head and data["rows"] == rows and data["about"] == {"tp": 2}
    lines = file.read_text().splitlines()
    assert len(lines) == 2 + len(head) + len(rows) + 1
    assert [json.loads(line.strip().rstrip(",")) for line in lines if '"case"' in line] == rows


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
