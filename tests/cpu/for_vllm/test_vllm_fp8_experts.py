"""MoE layers of the vLLM plugin whose experts have fp8 weights: which are served, with what, and what is
computed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import test_vllm_moe as moe_tests
import torch
import torch.distributed as dist
from pytest import MonkeyPatch

import flux
from flux.integrations import vllm as plugin
from flux.integrations.vllm import report as reports
from flux.integrations.vllm import rows
from flux.integrations.vllm.experts import experts_of_own_rows, own_experts, summed_experts
from flux.testing import spawn

vllm, with_moe, build, Modules = moe_tests.vllm, moe_tests.with_moe, moe_tests.build, moe_tests.Modules
Kernel = moe_tests.Kernel
E4M3 = torch.float8_e4m3fn
EXPERTS, HIDDEN, PART, TOP_K = 4, 256, 128, 2
Tensor = torch.Tensor


def blocks(scale: Tensor) -> Tensor:
    return scale.repeat_interleave(128, -2).repeat_interleave(128, -1)


def rounded(x: Tensor) -> Tensor:
    """What a quantised x stands for."""
    q, scale = flux.quantize(x, "group128")
    return q.float() * scale.repeat_interleave(128, -1)


def expected_of(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The weighted sums of all experts, with weights in fp32."""
    total = torch.zeros_like(x)
    for expert in range(len(w13)):
        gate, up = (rounded(x) @ w13[expert].t()).chunk(2, -1)
        result = rounded(torch.nn.functional.silu(gate) * up) @ w2[expert].t()
        total += result * (weights * (ids == expert)).sum(-1, keepdim=True)
    return total


def computed(rank: int, p: int) -> list[str]:
    """In each way, on ranks that have parts of all experts, and whole experts."""
    wrong = []
    group = dist.group.WORLD.group_name
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True).group_name
    g = torch.Generator().manual_seed(p)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def powers(*shape: int) -> Tensor:
        return 2.0 ** torch.randint(-6, -2, shape, generator=g).float()

    w13, w2 = normal(p, EXPERTS, 2 * PART, HIDDEN).to(E4M3), normal(p, EXPERTS, HIDDEN, PART).to(E4M3)
    scales = powers(p, EXPERTS, 2, 2), powers(p, EXPERTS, 2, 1)
    real = w13.float() * blocks(scales[0]), w2.float() * blocks(scales[1])
    mine = (w13[rank], w2[rank])
    of_mine = (scales[0][rank], scales[1][rank])

    def check(name: str, result: Tensor, expected: Tensor) -> None:
        # An element of 8 bits may be rounded to the next one.
        apart = (result - expected).abs().max() / expected.abs().max()
        if not apart < 2e-3:
            wrong.append(f"{name}: {apart}")

    for tokens in (1, 2 * p + 1, 60):
        x = normal(tokens, HIDDEN)
        ids = torch.rand(tokens, EXPERTS, generator=g).topk(TOP_K).indices.int()
        weights = torch.rand(tokens, TOP_K, generator=g)
        parts = [expected_of(x, ids, weights, real[0][r], real[1][r]) for r in range(p)]
        check("own part", own_experts(x, ids, weights, *mine, alone, scales=of_mine), parts[rank])
        expected = torch.stack(parts).sum(0)
        result = summed_experts(x, ids, weights, *mine, group, rank, p, scales=of_mine)
        check("sum", result, expected)
        share = -(-tokens // p)
        own = torch.arange(rank * share, (rank + 1) * share) % tokens
        rows = (x[own], ids[own], weights[own])
        check("own rows", experts_of_own_rows(*rows, *mine, group, scales=of_mine), expected[own])
    whole = slice(rank * EXPERTS // p, (rank + 1) * EXPERTS // p)
    experts = [each[0][whole] for each in (w13, w2, *scales)]
    result = experts_of_own_rows(*rows, *experts[:2], group, p, scales=tuple(experts[2:]))
    check("whole experts", result, expected_of(x, ids, weights, real[0][0], real[1][0])[own])
    return wrong


def test_experts_with_scales() -> None:
    assert spawn(computed, 2, backend="gloo") == [[]] * 2


class Fp8MoEMethod:
    """Of vLLM; packs weights as it does on CPUs."""

    def __init__(self, **changes: Any) -> None:
        self.fp8_backend, self.is_monolithic = Kernel.TRITON, False
        self.block_quant, self.weight_block_size, self.weight_scale_refine = True, [128, 128], None
        self.weight_scale_name = "weight_scale_inv"
        self.quant_config = types.SimpleNamespace(is_checkpoint_fp8_serialized=True)
        vars(self).update(changes)

    def process_weights_after_loading(self, experts: Any) -> None:
        experts.w13_weight = experts.w2_weight = experts.w13_weight_scale_inv = None


def build_fp8(**changes: Any) -> Any:
    return build(
        routed_experts__quant_method=Fp8MoEMethod(**changes),
        routed_experts__params_dtype=torch.bfloat16,
        routed_experts__w13_weight_scale_inv=torch.ones(2),
        routed_experts__w2_weight_scale_inv=torch.ones(3),
        moe_config__hidden_dim=256,
        moe_config__intermediate_size_per_partition=128,
    )


Build = Callable[[], Any]
NOT_SERVED: dict[str, tuple[str, Build]] = {
    "no setting": ("FLUX_VLLM_MIN_TOKENS is not set", build_fp8),
    "one scale": ("other scales", lambda: build_fp8(block_quant=False, weight_block_size=None)),
    "other blocks": ("other scales", lambda: build_fp8(weight_block_size=[64, 128])),
    "finer blocks": ("other scales", lambda: build_fp8(weight_scale_refine=(2, 1))),
    "bf16 checkpoint": (
        "vLLM quantises the weights",
        lambda: build_fp8(quant_config=types.SimpleNamespace(is_checkpoint_fp8_serialized=False)),
    ),
    "sizes": (
        "no multiples of 128",
        lambda: build(routed_experts__quant_method=Fp8MoEMethod(), moe_config__hidden_dim=192),
    ),
    "DeepGEMM": ("kernel is DEEPGEMM", lambda: build_fp8(fp8_backend=types.SimpleNamespace(name="DEEPGEMM"))),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_stays_vllms(with_moe: Modules, monkeypatch: MonkeyPatch, case: str) -> None:
    if case == "no setting":
        monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS")
    plugin.register()
    why, build = NOT_SERVED[case]
    build()
    ((kind, told),) = reports.report.refused
    assert kind == "MoE" and why in told


@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_is_served(with_moe: Modules, monkeypatch: MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.setattr(with_moe["vllm.platforms"].current_platform, "is_cpu", lambda: on_cpu)
    plugin.register()
    runner = build_fp8()
    experts = runner.routed_experts
    before = [getattr(experts, name) for name in ("w13_weight_scale_inv", "w2_weight_scale_inv")]
    if on_cpu:  # there flux keeps what vLLM packs
        experts.quant_method.process_weights_after_loading(experts)
    assert reports.report.served == {("MoE fp8", 4, "FLUX_VLLM_MIN_TOKENS"): 1}
    where = "flux.integrations.vllm.moe"
    with (
        mock.patch(f"{where}.own_experts") as part,
        mock.patch(f"{where}.summed_experts") as summed,
        mock.patch(f"{where}.experts_of_own_rows") as own,
    ):
        for tokens in (3, 4, 7):
            x = torch.ones(tokens, 256)
            runner._apply_quant_method(hidden_states=x, router_logits=x)
        with mock.patch.object(rows, "rows_are_own", lambda: True):
            runner._apply_quant_method(hidden_states=x, router_logits=x)
    for ours in (part, summed, own):
        (call,) = ours.call_args_list
        assert all(torch.equal(*pair) for pair in zip(call.kwargs["scales"], before, strict=True))
