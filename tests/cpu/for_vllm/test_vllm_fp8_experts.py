"""MoE layers of the vLLM plugin whose experts have fp8 weights: which are served, and with what."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import test_vllm_moe as moe_tests
import torch
from pytest import MonkeyPatch

from flux.integrations import vllm as plugin
from flux.integrations.vllm import report as reports
from flux.integrations.vllm import rows

vllm, with_moe, build, Modules = moe_tests.vllm, moe_tests.with_moe, moe_tests.build, moe_tests.Modules
Kernel = moe_tests.Kernel


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
