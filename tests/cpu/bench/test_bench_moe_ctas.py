"""The sweep over communication CTAs: its rows, that it refuses CPUs, that every number is launched and
checked, its table and its picture. Where the kernel would run, CPU processes run the CPU path.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import flux
from flux.bench import plot, record, report
from flux.bench.cases import FAMILIES, OPS, moe, moe_ctas
from flux.bench.cases.common import Context
from flux.bench.model import Row, Timing, derive, forced_name, forced_times, over_best
from flux.bench.record import Record
from flux.bench.runner import Settings, measure
from flux.bench.suites import Request
from flux.bench.timing import CpuTimer
from flux.cli import app
from flux.comm import registry
from flux.plan.moe import MoePlan
from flux.testing import spawn

NUMBERS = [0, 4, 8, 12, 16, 24, 32, 48, 64]
FEW_SMS = 20  # pretended, so that most numbers are left out
FEW = [0, 4, 8, 12, 16]


def test_rows_are_those_of_layer_1_with_even_loads() -> None:
    rows = OPS["moe_ctas"].rows
    assert rows is not None
    asked = Request("moe_ctas", True, 4, ("mixtral-8x7b", "qwen3-235b"), (2048, 8192), (), (1,))
    found = rows(asked)
    assert [(row.model, row.m, row.variant) for row in found] == [
        (model, m, "TP std 0") for model in ("mixtral-8x7b", "qwen3-235b") for m in (2048, 8192)
    ]
    layer1 = moe.problem("moe_layer1", "mixtral-8x7b", 2048)
    assert (found[0].local(4), found[0].on_wire(4, 2)) == (layer1.local(4), layer1.on_wire(4, 2))
    hot = Request("moe_ctas", True, 4, ("qwen3-235b",), (2048,), ("hot",), (4,))
    assert [row.variant for row in rows(hot)] == ["EP4 hot"]


def test_a_family_is_what_fusing_gains() -> None:
    assert FAMILIES["moe"] == ("moe_route", "moe_layer0", "moe_layer1", "moe_mlp")


def test_cpus_are_refused_and_help_names_it() -> None:
    result = CliRunner().invoke(app, ["bench", "moe_ctas", "--cpu", "--world", "2"])
    assert result.exit_code == 2
    assert "moe_ctas needs GPUs" in result.output
    assert "moe_ctas" in CliRunner().invoke(app, ["bench", "--help"]).output


def test_forced_numbers_reach_the_kernel() -> None:
    module = sys.modules["flux.moe.gemm_gather_rs"]
    x, weight = torch.zeros(300, 64), torch.zeros(2, 512, 64)
    routing = flux.moe.Routing._make([*(torch.full((1,), i) for i in range(11)), 2, 1, 300, 100, "g"])
    plan = MoePlan(
        "moe.gemm_gather_rs", 300, 512, 64, x.dtype, 2, 1, True, "", chunks=((0, 2), (2, 2)), tile=3
    )
    workspace = mock.Mock(num_sms=FEW_SMS)
    workspace.enter.side_effect = lambda plan: contextlib.nullcontext((4096, 0))
    names = [argument.name for argument in torch.ops.flux._moe_gemm_gather_rs.default._schema.arguments]
    with mock.patch.object(module, "_kernel") as kernel:
        for ctas in (0, 16):
            forced = replace(plan, communication_ctas=ctas)
            out = moe_ctas.launch(x, weight, routing, forced, workspace)
            assert out.shape == (100, 512)
            given = {**dict(zip(names, kernel.call_args.args, strict=False)), **kernel.call_args.kwargs}
            assert given["communication_ctas"] == ctas
            assert given["out"] is out and given["products"].shape == (300, 512)
            assert [int(a) for a in given["arrays"]] == list(range(10)) and int(given["weights"]) == 10
            assert (given["symm_buffer"], given["config"], given["tiles_per_chunk"]) == (4096, 3, 2)
    workspace.enter.assert_called_with(forced)


@contextlib.contextmanager
def pretended_gpu(context: Context, wrong: int | None = None) -> Iterator[list[int]]:
    """Counts launches by number; the one with the wrong number leaves out a rank's part."""
    launched: list[int] = []

    def launch(x: Any, weight: Any, routing: flux.moe.Routing, plan: Any, workspace: Any) -> torch.Tensor:
        ctas = plan.communication_ctas
        assert plan.fused and workspace is shared
        launched.append(ctas)
        if ctas == wrong and context.rank == 1:
            x = torch.zeros_like(x)
        return flux.moe.gemm_gather_rs(x, weight, routing)

    assert context.group is not None
    shared = registry.get(context.group, context.device, "moe.gemm_gather_rs")
    with mock.patch.object(moe_ctas, "launch", launch), mock.patch.object(shared, "num_sms", FEW_SMS):
        yield launched


def sweep(rank: int, world_size: int) -> Row:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    problem = moe.problem("moe_ctas", "tiny", 64)
    with pretended_gpu(context) as launched:
        assert moe_ctas.check(problem, context) == "exact"
        assert launched == FEW
        candidates = moe_ctas.prepare(problem, context).candidates
        results = {candidate.name: candidate.call() for candidate in candidates}
        for candidate in candidates:
            if candidate.role in ("config", "serial"):
                got, want = results[candidate.name], results["flux"]
                assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
                torch.testing.assert_close(got[: len(want)], want, rtol=1e-4, atol=1e-5)
        settings = Settings((problem,), "models", "cpu", world_size, world_size, "float32", iters=1, rounds=2)
        row = measure(problem, context, CpuTimer(context.group), settings)
    with pretended_gpu(context, wrong=8):
        said = moe_ctas.check(problem, context)
        assert said.startswith("8 CTAs: ") and "wrong; at" in said, said
    return row


def test_every_number_takes_its_turn_beside_the_plan() -> None:
    row, other = spawn(sweep, 2, backend="gloo", timeout_s=120)
    assert row.check == other.check == "exact"
    assert list(forced_times(row)) == FEW
    assert [t.role for t in row.times.values()] == [
        "flux",
        *["config"] * 5,
        "comm",
        "gemm",
        "serial",
        "gemm",
    ]
    assert row.plan is not None and 1 <= row.plan["communication_ctas"] <= FEW_SMS // 2
    chosen = row.plan["communication_ctas"]
    assert f"the plan: {chosen} of {FEW_SMS} CTAs begin with communication" in row.notes


def make_row(model: str = "mixtral-8x7b", m: int = 2048, chosen: int = 14) -> Row:
    """Best at 16 CTAs with 0.20 ms; the plan needs 1 % more."""
    times = {"flux": Timing("flux", (0.203, 0.202, 0.201))}
    for ctas in NUMBERS:
        us = 200 + abs(ctas - 16)
        times[forced_name(ctas)] = Timing("config", (us / 1e3, (us + 1) / 1e3, (us - 1) / 1e3))
    times |= {"torch grouped_mm": Timing("gemm", (0.15,)), "grouped_mm+NCCL": Timing("serial", (0.3,))}
    plan = {"fused": True, "config": "8 chunks of columns", "communication_ctas": chosen}
    sizes = (m, 4096, 14336, 4, "bfloat16", (2 * m, 4096, 3584), 1000)
    return Row("moe_ctas", model, "moe_ctas", *sizes, times, {}, plan, "exact", variant="TP std 0")


def make_record(rows: list[Row]) -> Record:
    machine = {"gpu": "Some GPU", "gpu_count": 4, "cuda": "13.0", "nccl": "2.28", "torch": "2.11"}
    settings = {"rounds": 3, "world": 4, "tp": 4, "link_gb_per_s": 380.0}
    return Record("0", "abc", "2026-01-02", "models", "cuda", machine, settings, rows, complete=True)


def test_the_plan_against_the_best_number(tmp_path: Path) -> None:
    row = make_row()
    assert list(forced_times(row)) == NUMBERS
    found = over_best(row)
    assert found is not None and (found.best_ctas, found.best) == (16, 0.2)
    assert found.ratio == pytest.approx(1.01)
    # Forced numbers are no peers: the unfused pipeline is.
    assert derive(row).peer_name == "grouped_mm+NCCL" and derive(row).flux == 0.202
    del row.times["flux"]
    assert over_best(row) is None
    record.write(make_record([make_row()]), tmp_path / "r.json")
    assert record.read(tmp_path / "r.json").rows == [make_row()]


def test_table_of_the_sweep() -> None:
    console = Console(width=report._WIDE)
    with console.capture() as captured:
        console.print(report.render(make_record([make_row(), make_row(m=8192, chosen=17)])))
    text = captured.get()
    for word in ("moe_ctas · 4 ranks", "best CTAs", "flux/best", "1.010", "0.300 grouped_mm+NCCL"):
        assert word in text
    assert "plan over the best number: geomean 1.010, max 1.010" in text
    (line,) = (line for line in text.splitlines() if " 8192 " in line)
    assert "17" in line.split()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that plot has made, kept open to look at."""
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    plt = plot.require_matplotlib()
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def panels(figure: Any) -> list[Any]:
    return [axis for axis in figure.get_axes() if axis.axison]


def test_picture_has_a_panel_for_each_row(tmp_path: Path, drawn: list[Any]) -> None:
    rows = [make_row(m=m) for m in (512, 2048, 8192)] + [make_row("qwen3-235b", m, 20) for m in (512, 2048)]
    path = plot.plot(make_record(rows), tmp_path / "p.svg")
    assert path.read_text().lstrip().startswith("<?xml")
    found = panels(drawn[0])
    assert [axis.get_title(loc="left") for axis in found] == [f"{r.model} TP std 0  M={r.m}" for r in rows]
    lines = {line.get_label(): line for line in found[-1].get_lines()}
    assert list(lines["number forced"].get_xdata()) == NUMBERS
    assert lines["number forced"].get_ydata() == pytest.approx([200 + abs(c - 16) for c in NUMBERS])
    star = lines["the plan's choice"]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([20], [pytest.approx(202.0)])
    assert list(lines["best unfused"].get_ydata()) == pytest.approx([300.0, 300.0])


def test_a_far_unfused_time_is_written_and_not_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    row = make_row()
    row.times["grouped_mm+NCCL"] = Timing("serial", (0.9,))
    plot.plot(make_record([row]), tmp_path / "p.svg")
    (panel,) = panels(drawn[0])
    assert "best unfused" not in [line.get_label() for line in panel.get_lines()]
    assert "best unfused: 900 µs ↑" in [text.get_text() for text in panel.texts]


def test_rows_without_forced_numbers_are_not_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    unfused = make_row(m=8192)
    unfused.times = {name: t for name, t in unfused.times.items() if t.role != "config"}
    plot.plot(make_record([make_row(), unfused]), tmp_path / "p.svg")
    assert len(panels(drawn[0])) == 1
    with pytest.raises(ValueError, match="no row of flux"):
        plot.plot(make_record([unfused]), tmp_path / "p.svg")


def layer_row(op: str, model: str, variant: str, m: int) -> Row:
    times = {"flux": Timing("flux", (0.2,)), "NCCL+grouped_mm": Timing("serial", (0.3,))}
    times["torch grouped_mm"] = Timing("gemm", (0.15,))
    sizes = (m, 64, 64, 4, "bfloat16", (m, 64, 64), 1000)
    return Row(op, model, op, *sizes, times, {}, None, "exact", variant=variant)


def test_layers_are_drawn_by_model_and_layout(tmp_path: Path, drawn: list[Any]) -> None:
    groups = [
        (model, f"{layout} std {std}") for model in "abcd" for layout in ("TP", "EP4") for std in (0, 1)
    ]
    rows = [layer_row("moe_layer1", *group, m) for group in groups for m in (512, 2048, 8192)]
    plot.plot(make_record([*rows, make_row()]), tmp_path / "p.svg")
    axes = drawn[0].get_axes()
    times = [axis for axis in axes if axis.get_title(loc="left").startswith("moe_layer1 · 4 ranks")]
    # 48 rows in two strips, bars of flux and of the unfused pipeline; groups are not torn apart.
    bars = [[len(c) for c in axis.containers] for axis in times]
    assert bars == [[39, 39], [9, 9]]
    named = [text.get_text() for axis in axes for text in axis.texts]
    for model, variant in groups:
        assert named.count(f"{model}\n{variant}") == 1
