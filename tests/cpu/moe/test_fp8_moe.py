"""Grouped GEMM and both expert layers with fp8 operands on CPU processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import scenario_test
from dense_calls import differs
from test_fp8_gemm import MUTANTS, planted

import flux
from flux import _native
from flux.fp8 import scales as fp8
from flux.measured.times import NO_FACTS
from flux.moe.routing import tokens_of_rows
from flux.ops import grouped_gemm as grouped
from flux.ops.quantize import dequantized
from flux.plan.choose import PlanInput, why_not_fused
from flux.plan.moe import LayerProblem, plan_layer
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_moe_data import ScaledMoe

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ["tensor", "row", "block"]


def layouts(p: int) -> list[ScaledMoe]:
    """Small ones, with experts and tokens distributed in every way."""
    found = []
    for i, kind in enumerate(KINDS * (2 if p == 1 else 1)):
        for ep_size in [e for e in range(1, p + 1) if p % e == 0]:
            tokens = tuple((7 if p == 1 or i < 2 else 0) + 30 * r for r in range(p))
            moe = MoeCase(tokens, 260, 272, 4 * ep_size, 2, ep_size, skew="skewed", seed=i)
            found.append(ScaledMoe(moe, kind, E5M2 if i % 2 else E4M3, torch.float32))
    return found


DEFECTS = ("scale_x dropped", "scale_w dropped", "scale_x doubled", "rows swapped", "columns swapped")


def defects(rank: int, p: int) -> None:
    """Wrong scales of either layer on the last rank are seen by some rank."""
    layers = ("layer 0", "layer 1")
    seen = {(layer, name, kind): 0 for layer in layers for name in DEFECTS for kind in KINDS}
    for layer in layers:
        del seen[layer, "rows swapped", "tensor"]  # they have one scale
    for case in layouts(p):
        routing = case.route(rank)
        count = int(routing.offsets[-1])
        (x, scale_x), (w, scale_w) = case.x(rank), case.w1(rank)
        first = {"x": x, "weight": w, "scale_x": scale_x, "scale_w": scale_w, "out_dtype": case.out_dtype}
        (x, scale_x), (w, scale_w) = case.hidden_rows(rank, len(routing.rows)), case.w2(rank)
        second = first | {"x": x, "weight": w, "scale_x": scale_x, "scale_w": scale_w}
        expected = case.layer0(rank), case.layer1(rank)  # take longer than the calls
        for name in DEFECTS:
            if ("layer 0", name, case.kind) not in seen:
                continue
            with planted(MUTANTS[name], rank == p - 1, "canonical_experts"):
                rows = flux.moe.ag_scatter_gemm(routing=routing, **first)
                sums = flux.moe.gemm_gather_rs(routing=routing, **second)
            seen["layer 0", name, case.kind] += not torch.equal(rows[:count], expected[0])
            seen["layer 1", name, case.kind] += not torch.equal(sums, expected[1])
    found = torch.tensor([*seen.values()])
    dist.all_reduce(found)
    assert (found > 0).all(), dict(zip(seen, found.tolist(), strict=True))


def random_data(rank: int, p: int) -> None:
    """Layer 0 has the bits of flux.gemm of the gathered rows, layer 1 those of its products' weighted sums:
    test_fp8_gemm.py has the bounds of these.
    """
    experts, tokens, k, n = 4, 12, 390, 256
    for of_rows, of_weights in (("row", "tensor"), ("group128", "block128")):
        g = torch.Generator().manual_seed(5)  # every rank knows the tokens of all
        xs = torch.randn(p, tokens, k, generator=g) * torch.rand(p, tokens, 1, generator=g).exp()
        ids, scores = torch.rand(tokens, experts, generator=g).topk(2)[1].int(), torch.rand(tokens, 2)
        own = torch.Generator().manual_seed(rank)
        w1, w2 = torch.randn(experts, n, k, generator=own), torch.randn(experts, k, n, generator=own)
        rows = [flux.quantize(x, of_rows) for x in xs]  # type: ignore[call-overload]
        (q1, s1), (q2, s2) = (_each_quantised(w, of_weights) for w in (w1, w2))
        routing = flux.moe.route(ids, scores, experts, max_tokens=tokens)
        first = flux.moe.ag_scatter_gemm(rows[rank][0], q1, routing, scale_x=rows[rank][1], scale_w=s1)
        count, places = int(routing.offsets[-1]), tokens_of_rows(routing)
        every_q = torch.cat([q.view(torch.uint8) for q, _ in rows]).view(E4M3)[places[:count]]
        every_s = torch.cat([scale for _, scale in rows])[places[:count]]
        assert torch.equal(first[:count], _products(every_q, every_s, q1, s1, routing.offsets)), of_rows
        hidden, of_hidden = flux.quantize(first.nan_to_num(), of_rows)  # type: ignore[call-overload]
        result = flux.moe.gemm_gather_rs(hidden, q2, routing, scale_x=of_hidden, scale_w=s2)
        products = torch.zeros(len(hidden), k, dtype=torch.bfloat16)
        products[:count] = _products(hidden[:count], of_hidden[:count], q2, s2, routing.offsets)
        ones = torch.eye(k, dtype=torch.bfloat16).repeat(experts, 1, 1)
        assert torch.equal(result, flux.moe.gemm_gather_rs(products, ones, routing)), of_rows


def _each_quantised(weight: Tensor, quant: str) -> tuple[Tensor, Tensor]:
    made = [flux.quantize(w, quant) for w in weight]  # type: ignore[call-overload]
    return torch.stack([q.view(torch.uint8) for q, _ in made]).view(E4M3), torch.stack([s for _, s in made])


def _products(q: Tensor, scale: Tensor, weight: Tensor, scale_w: Tensor, offsets: Tensor) -> Tensor:
    """Of rows sorted by expert."""
    parts = [
        flux.gemm(q[first:last], weight[e], scale_x=scale[first:last], scale_w=scale_w[e])
        for e, (first, last) in enumerate(itertools.pairwise(offsets.tolist()))
    ]
    return torch.cat(parts)


def activations(rank: int, p: int) -> None:
    """Activations are of the scaled sums."""
    case = ScaledMoe(MoeCase((20,) * p, 200, 256, 4, 2, seed=3), "block", E4M3, torch.float32)
    routing = case.route(rank)
    (x, scale_x), (w, scale_w) = case.x(rank), case.w1(rank)
    count = int(routing.offsets[-1])
    for activation in grouped.ACTIVATIONS:
        how = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": torch.float32}
        rows = flux.moe.ag_scatter_gemm(x, w, routing, activation=activation, **how)
        expected = grouped.activate(case.layer0(rank), activation)
        torch.testing.assert_close(rows[:count], expected)


test_fp8_experts = scenario_test([1, 2, 3, 4], defects, random_data, activations, timeout_s=400)


@pytest.mark.parametrize("op", ["grouped_gemm", "moe.ag_scatter_gemm", "moe.gemm_gather_rs"])
def test_kernels_of_experts_store_16_bits(op: str) -> None:
    for out_dtype, expected in ((torch.float32, False), (torch.float16, True)):
        scaling = fp8.Scaling("row", out_dtype)
        why_not = why_not_fused(op, PlanInput("cuda", 64, 64, 128, E4M3, scaling=scaling))
        assert (why_not is None) is expected, why_not
        assert why_not is None or "16 bits, not float32" in why_not


@pytest.mark.parametrize(
    ("dtype", "scaling"), [(E4M3, fp8.Scaling("row", torch.float16)), (torch.float16, None)]
)
def test_layer_1_gets_a_tile_for_its_operands(dtype: torch.dtype, scaling: fp8.Scaling | None) -> None:
    workspace: Any = SimpleNamespace(
        world_size=2,
        device=torch.device("cuda"),
        why_not=None,
        topology=None,
        tuning=NO_FACTS,
        transport="",
        num_sms=132,
        left_free=0,
        plans={},
    )
    sizes = (64, 512, 256, dtype, 2, 1, 4)  # tokens, n, k, dtype, top_k, ep_size, experts
    plan = plan_layer(workspace, LayerProblem("moe.gemm_gather_rs", *sizes, scaling))
    tile = _native.core.tile_config(plan.tile)
    assert plan.by_flux and tile.operand_bytes == dtype.itemsize, (plan, tile)


def experts(kind: str, out_dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a grouped GEMM, and its exact result."""
    case = ScaledMoe(MoeCase((40,), 256, 160, 4, 2, seed=2), kind, E4M3, out_dtype)
    (x, scale_x), (w, scale_w) = case.x(0), case.w1(0)
    rows = case.moe.rows(0)
    counts = torch.bincount(rows[:, 0], minlength=4)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    how = {"x": x, "weight": w, "offsets": offsets, "rows": rows[:, 2].int()}
    return how | {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}, case.layer0(0)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_gemm_layouts_of_scales(kind: str) -> None:
    how, expected = experts(kind)
    scale_x, scale_w = how["scale_x"], how["scale_w"]
    others: list[dict[str, Any]] = [{}, {"scale_w": scale_w.to(torch.float8_e8m0fnu)}]
    if kind == "tensor":
        others += [
            {"scale_w": scale_w[:, None]},
            {"scale_w": scale_w[:, None, None]},
            {"scale_x": scale_x[0]},
        ]
        others += [{"scale_w": scale_w[:, None].expand(4, 160)}, {"scale_x": scale_x.expand(40)}]
    if kind == "row":
        others += [{"scale_w": scale_w[:, None]}, {"scale_w": scale_w[..., None]}, {"scale_x": scale_x[:, 0]}]
    if kind == "block":
        others += [
            {"scale_x": fp8.column_major(scale_x)},
            {"scale_w": scale_w.transpose(1, 2).contiguous().transpose(1, 2)},
        ]
    for other in others:
        assert not differs("products", flux.grouped_gemm(**(how | other)), expected), other


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scale_w": torch.ones(4, 160)}, r"scale_w: expected shape \[4, 2, 2\]"),
        ({"scale_x": torch.ones(1)}, r"scale_w: expected one entry, \[4\], \[4, 160\]"),
        ({"accumulate": "fast"}, "accumulate: expected 'promoted' with block scales"),
        (
            {"weight": torch.ones(4, 256, 160).to(E4M3).transpose(1, 2)},
            r"weight: expected .* stride\(2\) == 1",
        ),
    ],
)
def test_grouped_gemm_bad_arguments(change: dict[str, Any], told: str) -> None:
    how, _ = experts("block")
    with pytest.raises(ValueError, match="grouped_gemm: " + told):
        flux.grouped_gemm(**(how | change))


@pytest.mark.parametrize("padding", [-1, None])
def test_grouped_gemm_of_deep_gemms_contiguous_layout(padding: int | None) -> None:
    """`grouped_layout` has each row's group, and segments are padded; docs/fp8.md makes offsets of it."""
    how, expected = experts("block")
    offsets, of_rows = how["offsets"].tolist(), how["rows"].long()
    x, scale_x, layout, places = [], [], [], []
    for group, (first, last) in enumerate(itertools.pairwise(offsets)):
        added = -(last - first) % 128
        mine = of_rows[first:last]
        places += range(len(layout), len(layout) + last - first)
        layout += [group] * (last - first) + [group if padding is None else padding] * added
        x.append(torch.cat([how["x"].float()[mine], torch.ones(added, 256)]))
        scale_x.append(torch.cat([how["scale_x"][mine], torch.ones(added, 2)]))
    grouped_layout = torch.tensor(layout, dtype=torch.int32)
    bounds = torch.arange(len(offsets), dtype=torch.int32)
    found = torch.searchsorted(grouped_layout.cummax(0).values, bounds, out_int32=True)
    given = how | {"x": torch.cat(x).to(E4M3), "scale_x": torch.cat(scale_x), "rows": None, "offsets": found}
    result = flux.grouped_gemm(**given)
    assert result.shape[0] == len(layout) and len(layout) % 128 == 0
    assert not differs("products", result[places], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_gemm_on_gpus_without_a_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped products, which CPUs lack, get the right operands."""
    how, expected = experts(kind, torch.bfloat16)
    x, rows = how["x"], how["rows"]
    scales = fp8.Scales(how["scale_x"], how["scale_w"], torch.bfloat16, "promoted").canonical_experts(
        4, 160, 256
    )
    offsets = how["offsets"]

    def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return flux.grouped_gemm(a, b.transpose(1, 2), torch.cat([torch.zeros(1), offs]).int())

    def scaled_grouped_mm(
        a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, offs: Tensor, **how: Any
    ) -> Tensor:
        assert of_a.shape == (a.shape[0],) and of_b.shape == (4, 160) and how["out_dtype"] == torch.bfloat16
        values = (
            dequantized(a, of_a[:, None], "row"),
            dequantized(b.transpose(1, 2), of_b[..., None], "row"),
        )
        return grouped_mm(values[0].bfloat16(), values[1].bfloat16().transpose(1, 2), offs)

    monkeypatch.setattr(grouped, "torch_grouped_mm", lambda: grouped_mm)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm, raising=False)
    call = grouped.Grouped(x, how["weight"], offsets, rows, None, scales).gathered()
    result = grouped.unfused(call)
    assert not differs("products", result, expected)
    assert call.scales is not None
    fp16 = call._replace(scales=call.scales._replace(out_dtype=torch.float16))
    result = grouped.unfused(fp16)
    assert not differs("products", result, expected.half())
