"""flux bench with fp8 operands: rows for each kind of scales, exact checks, peers left out, result files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bench_rows import row as made_row
from test_cli import choose_cpu
from torch import Tensor
from typer.testing import CliRunner

import flux
from flux.bench import record
from flux.bench.cases import gemm, libraries, moe, quantize
from flux.bench.cases.common import Context
from flux.bench.cases.operands import Scaled
from flux.bench.model import FP8, IN_16_BITS, VLLM, Row, bar_over_16_bits, derive, in_way, on_wire_bytes
from flux.bench.report import footer
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem
from flux.bench.timing import CpuTimer
from flux.bench.tune import facts_of
from flux.cli import app
from flux.fp8.scales import Scaling
from flux.measured.times import Fact, Tuning, scaled
from flux.moe import gemm_gather_rs
from flux.plan.choose import PlanInput, planned
from flux.testing import spawn

runner = CliRunner()
ONE = Context(0, 1, 1, torch.device("cpu"), torch.bfloat16, None)
SETTINGS = Settings((), "custom", "cpu", 1, 1, FP8, iters=1, rounds=1)


def problem(scales: str, op: str = "gemm", k: int = 256) -> Problem:
    return Problem(op, "a", "local", 40, 136, k, scales=scales)


def test_rows_and_refusals() -> None:
    rows = choose_cpu(["gemm"], dtype="fp8", n=64, k=128, m=[8], world=1, scales=["block", "row"]).problems
    assert [row.scales for row in rows] == ["block", "row"]
    every = choose_cpu(["gemm_rs"], dtype="fp8", n=64, k=128, m=[8])
    assert [row.scales for row in every.problems] == ["tensor", "row", "block"] and every.dtype == FP8
    assert {row.op for row in choose_cpu([], dtype="fp8").problems} >= {"gemm_rs"}
    for ops, options, said in (
        (["gemm"], {"scales": ["row"]}, "--scales expected with --dtype fp8"),
        (["gemm"], {"dtype": "fp8", "scales": ["rows"]}, "one of tensor, row, block, got 'rows'"),
        (["quantize"], {"dtype": "bf16"}, "quantize expected with --dtype fp8"),
        (["layer"], {"dtype": "fp8"}, "layer expected with another --dtype than fp8"),
    ):
        with pytest.raises(ValueError, match=said):
            choose_cpu(ops, **options)  # type: ignore[arg-type]
    assert runner.invoke(app, ["tune", "gemm_rs", "--cpu", "--dtype", "fp8"]).exit_code == 2


def test_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    shape = ["--n", "136", "--k", "512", "--m", "136", "--iters", "1", "--rounds", "1"]
    options = ["--cpu", "--world", "2", "--dtype", "fp8", "--json", str(file)]
    ops = ("gemm_rs", "ag_gemm", "gemm_ar")
    result = runner.invoke(app, ["bench", *ops, *options, *shape])
    assert result.exit_code == 0, result.output
    rows = record.read(file).rows
    assert [(row.op, row.scales, row.check, row.dtype) for row in rows] == [
        (op, kind, "exact", FP8) for op in ops for kind in ("tensor", "row", "block")
    ]
    for row in rows:
        unfused = "gloo+{}" if row.op == "ag_gemm" else "{}+gloo"
        names = {"flux", "flux, parts", IN_16_BITS, "flux.gemm", "gloo", unfused.format("flux.gemm")}
        if row.scales == "row":
            names |= {"_scaled_mm", unfused.format("_scaled_mm")}
        assert names <= set(row.times)
        assert ("flux, fast" in row.times) == (row.scales != "block")
    # Sums travel in bf16, gathered rows in fp8.
    assert [rows[i].wire_bytes for i in (0, 3, 6)] == [136 * 136 * 2 // 2, 136 * 512 // 2, 136 * 136 * 2]
    assert any("DeepGEMM could not run: deep_gemm is not installed" in note for note in rows[2].notes)
    shown = runner.invoke(app, ["bench", "--show", str(file)])
    assert shown.exit_code == 0 and "over bf16: geomean" in shown.stdout and "custom block" in shown.stdout


@pytest.mark.parametrize("scales", ["", "tensor", "row", "block"])
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch, scales: str) -> None:
    """It is found before the clock starts: with a wrong scale, or in 16 bits without one contribution."""
    right = flux.gemm

    def broken(x: Tensor, weight: Tensor, *, scale_x: Tensor | None = None, **rest: object) -> Tensor:
        if scale_x is not None:
            scale_x = scale_x.clone()
            scale_x.view(-1)[0] *= 2
        elif not scales:
            x, weight = x[:, 1:], weight[:, 1:]
        return right(x, weight, scale_x=scale_x, **rest)  # type: ignore[arg-type]

    row = measure(problem(scales), ONE, CpuTimer(None), SETTINGS)
    assert row.check == "exact" and "flux" in row.times
    monkeypatch.setattr(flux, "gemm", broken)
    row = measure(problem(scales), ONE, CpuTimer(None), SETTINGS)
    assert not row.ok and "flux" not in row.times and (scales or "wrong; at [" in row.check)


def test_sums_that_bf16_does_not_hold_are_checked_twice() -> None:
    """130 blocks of K: exact in fp16, and in bf16 but for the rounding."""
    assert gemm.check(problem("block", k=130 * 128), ONE).startswith("agrees")


def test_a_wrong_library_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that drops the scales of rows is noted, and so is one whose package is absent."""

    def product(x: Scaled, weight: Scaled, out: Tensor) -> Tensor:
        return out.copy_(x.q.float() @ weight.q.float().t())

    wrong = libraries.Library("Wrong", "peer", "torch", ("row",), product)
    right = replace(wrong, name="Right", product=lambda x, w, out: libraries.OURS.product(x, w, out))
    absent = replace(wrong, name="Absent", package="no_such_package")
    monkeypatch.setattr(libraries, "LIBRARIES", (wrong, right, absent))
    row = measure(problem("row"), ONE, CpuTimer(None), SETTINGS)
    assert "Right" in row.times and not {"Wrong", "Absent"} & set(row.times)
    assert row.notes[0].startswith("Wrong with row scales could not run: wrong: product: off by")
    assert row.notes[1] == "Absent could not run: no_such_package is not installed"


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_quantisation(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure(problem(scales, "quantize"), ONE, CpuTimer(None), SETTINGS)
    assert row.check == "exact" and {"flux", "copy", "torch"} <= set(row.times)
    right = quantize.quantized

    def broken(x: Tensor, quant: str) -> quantize.Scaled:
        q, scale = right(x, quant)
        broken_now.append(1)
        return quantize.Scaled(q, scale * (2 if len(broken_now) == 1 else 1))

    broken_now: list[int] = []
    monkeypatch.setattr(quantize, "quantized", broken)
    assert "scales are not" in quantize.check(problem(scales, "quantize"), ONE)


def layers(rank: int, world_size: int) -> list[tuple[str, set[str], list[str]]]:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.bfloat16, dist.group.WORLD)
    told = []
    for op in ("moe_layer0", "moe_layer1"):
        for kind, ep_size in (("tensor", 1), ("row", world_size), ("block", world_size)):
            row = replace(moe.problem(op, "tiny", 64, ep_size, load_std=0.05), scales=kind)
            prepared = moe.prepare(row, context)
            for candidate in prepared.candidates:
                candidate.call()
            told.append((moe.check(row, context), {c.name for c in prepared.candidates}, prepared.notes))
    lost = mock.patch.object(flux.moe, "gemm_gather_rs", without_scales)
    with lost:
        told.append((moe.check(row, context), set(), []))
    return told


def without_scales(x: Tensor, weight: Tensor, routing: flux.moe.Routing, **options: Any) -> Tensor:
    options["scale_x"] = torch.ones_like(options["scale_x"])
    return gemm_gather_rs(x, weight, routing, **options)


def test_expert_layers() -> None:
    *rows, lost = spawn(layers, 2)[0]
    assert [said for said, _, _ in rows] == ["exact"] * 6 and "wrong; at [" in lost[0]
    both = {"flux", IN_16_BITS, "flux, parts", "flux.grouped_gemm", "gloo"}
    assert all(both <= names for _, names, _ in rows)
    assert "all-to-all+flux.grouped_gemm" in rows[1][1] and "gloo+flux.grouped_gemm" in rows[0][1]
    assert "flux.grouped_gemm+all-to-all" in rows[4][1] and "flux.grouped_gemm+gloo" in rows[3][1]
    assert any("takes no block scales" in note for note in rows[2][2])


def test_bars_and_facts() -> None:
    def row(op: str, scales: str, m: int, fp8_ms: float) -> Row:
        times = {"flux": ("flux", fp8_ms), IN_16_BITS: ("peer", 1.0)}
        return made_row(times, op, m=m, local=(m, 8, 8), dtype=FP8, scales=scales)

    assert bar_over_16_bits(row("gemm", "row", 4096, 1)) == 1.75
    assert bar_over_16_bits(row("gemm", "tensor", 64, 1)) == 1.7
    assert bar_over_16_bits(row("gemm", "block", 4096, 1)) == 1.5
    assert bar_over_16_bits(row("gemm_rs", "block", 4096, 1)) == 1.0
    rows = [row("gemm", "row", 4096, 0.5), row("gemm", "block", 4096, 0.8)]
    said = footer(record.Record("", "", "", "a", "cuda", {}, {}, rows), "gemm")[0].plain
    assert "over bf16: geomean 1.581, min 1.250; 1 of 2 rows under their bar" in said
    assert (on_wire_bytes("ag_gemm", FP8), on_wire_bytes("gemm_rs", FP8)) == (1, 2)
    assert on_wire_bytes("ag_gemm", "float32") == 4


@pytest.mark.parametrize(("scales", "kind"), [("tensor", "row"), ("row", "row"), ("block", "block")])
def test_plans_of_fp8_operands_follow_facts_of_such_scales(scales: str, kind: str) -> None:
    names = {"flux": ("flux", 0.5), in_way("parts"): ("peer", 0.25), "_scaled_mm+NCCL": ("serial", 0.1)}
    (fact,) = facts_of(made_row(names, m=4096, n=8, tp=2, dtype=FP8, local=(4096, 8, 128), scales=scales))
    assert fact == Fact(scaled("gemm_rs", kind), 2, 1, 4096, 8, 128, {"kernel": 500.0, "parts": 250.0})
    tuning, operands = Tuning((fact,)), (4096, 8, 128, torch.float8_e4m3fn)
    alone = PlanInput("cuda", *operands, world_size=2, num_sms=132, transport="stores", tuning=tuning)
    for each in ("row", "block"):
        plan = planned("gemm_rs", replace(alone, scaling=Scaling(each, torch.bfloat16)))
        assert plan.way == ("parts" if each == kind else "kernel"), plan
    in_16_bits = replace(alone, dtype=torch.bfloat16)
    assert planned("gemm_rs", in_16_bits).way == "kernel"


def test_products_are_torchs_where_it_was_measured_to_be_sooner() -> None:
    names = {"flux": ("flux", 0.5), "_scaled_mm": ("peer", 0.25), VLLM: ("fast", 0.1)}
    row = made_row(names, "gemm", m=128, n=48, k=128, tp=2, local=(128, 48, 128), dtype=FP8)
    row = replace(row, scales="tensor", plan={"fused": True})
    (fact,) = facts_of(row)
    assert fact == Fact(scaled("gemm", "tensor"), 1, 1, 128, 48, 128, {"kernel": 500.0, "torch": 250.0})
    assert not list(facts_of(replace(row, scales="row"))), "torch applies scales of rows behind the product"
    assert not list(facts_of(replace(row, plan={"fused": False}))), "this is torch's time"
    problem = PlanInput("cuda", 128, 48, 128, torch.float8_e4m3fn, num_sms=132, tuning=Tuning((fact,)))
    scaling = Scaling("tensor", torch.bfloat16)

    def fused(**change: Any) -> bool:
        return planned("gemm", replace(problem, **({"scaling": scaling} | change))).by_flux

    assert not fused()
    assert fused(scaling=scaling._replace(kind="row")) and fused(scaling=scaling._replace(fast=True))
    assert not fused(n=64), "a similar weight"
    assert fused(n=56), "torch takes multiples of 16"
    assert fused(dtype=torch.bfloat16, scaling=None)


def test_sums_with_fewer_bits_are_a_way_without_flux() -> None:
    times = {"flux": ("flux", 1.0), "flux, fast": ("fast", 0.4), "flux, parts": ("parts", 0.8)}
    times |= {IN_16_BITS: ("peer", 0.3), "_scaled_mm": ("peer", 0.9), VLLM: ("fast", 0.5)}
    found = derive(made_row(times, "gemm", dtype=FP8, tp=1, scales="row"))
    assert (found.peer_name, found.speedup, found.over_parts) == (VLLM, 0.5, 0.8)
