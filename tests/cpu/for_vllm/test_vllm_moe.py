"""MoE layers of the vLLM plugin as far as they go without vLLM: which are served, and when.
A small stand-in has the names of vLLM that the runner touches.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import stand_ins
import torch
import torch.distributed as dist
import vllm_stand_in as stand_in
from pytest import LogCaptureFixture, MonkeyPatch

from flux.integrations import vllm as plugin
from flux.integrations.vllm import report as reports
from flux.integrations.vllm import rows
from flux.integrations.vllm.sequence import NEVER
from flux.ops import explain

vllm = stand_in.vllm
Modules = stand_in.Modules
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 6, 16, 24, 2

Activation = enum.Enum("Activation", {"SILU": "silu", "GELU": "gelu"})
Kernel = enum.Enum("Kernel", {"CPU": "CPU", "TRITON": "TRITON", "FLASHINFER_CUTLASS": "FlashInfer CUTLASS"})


class UnquantizedFusedMoEMethod:
    """Of vLLM; packs weights as it does on CPUs."""

    def __init__(self) -> None:
        self.unquantized_backend, self.is_monolithic = Kernel.CPU, False

    def process_weights_after_loading(self, experts: Any) -> None:
        experts.w13_weight = experts.w2_weight = None


class RoutedExperts:
    """Of vLLM."""

    expert_map = None

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any) -> None: ...


class Runner:
    """vLLM's MoERunner, to the extent that the plugin looks at it. changes: what differs from a layer that
    flux serves, by the path of an attribute.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(stand_in.registry(sys.modules).get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, name: str) -> Any:
        return stand_in.Linear.register_oot.__func__(cls, name)  # type: ignore[attr-defined]

    def __init__(self, changes: dict[str, Any] | None = None) -> None:
        parallel = types.SimpleNamespace(
            tp_size=2, dp_size=1, pcp_size=1, sp_size=1, use_ep=False, enable_eplb=False
        )
        self.moe_config = types.SimpleNamespace(
            moe_parallel_config=parallel,
            skip_final_all_reduce=False,
            is_lora_enabled=False,
            activation=Activation.SILU,
            swiglu_limit=None,
            swiglu_alpha=None,
            swiglu_beta=None,
            has_bias=False,
            experts_per_token=TOP_K,
            hidden_dim=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE,
            moe_backend="auto",
        )
        self.routed_experts = types.SimpleNamespace(
            quant_method=UnquantizedFusedMoEMethod(),
            params_dtype=torch.float32,
            apply_router_weight_on_input=False,
            w13_weight=torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            w2_weight=torch.ones(EXPERTS, HIDDEN, INTERMEDIATE),
            expert_map=None,
            forward_modular=mock.Mock(return_value="vLLM's kernel"),
        )
        self.router = types.SimpleNamespace(select_experts=lambda **kwargs: ("weights", "ids"))
        self.shared_experts = self.routed_input_transform = self.routed_output_transform = None
        self._forward_entry: Any = None
        for path, value in (changes or {}).items():
            *owners, name = path.split(".")
            owner: Any = self
            for step in owners:
                owner = getattr(owner, step)
            setattr(owner, name, value)

    def _apply_quant_method(self, hidden_states: Any, router_logits: Any, input_ids: Any = None) -> Any:
        ids = torch.tensor([[1, 3], [0, 1], [3, 5], [2, 4]])
        given = {"topk_weights": "weights", "topk_ids": ids, "shared_experts": None}
        said = self.routed_experts.forward_modular(x=hidden_states, **given)
        return "vLLM's shared", f"{said} with ids" if input_ids is not None else said

    def _maybe_reduce_final_output(self, states: Any, trunc_size: int | None, *others: Any) -> Any:
        return "vLLM's sum", trunc_size, *others


@pytest.fixture
def with_moe(vllm: Modules, monkeypatch: MonkeyPatch) -> Modules:
    """A vLLM that has MoE layers too."""
    monkeypatch.setenv("FLUX_VLLM_MOE", "auto")
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "4")
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "7")
    layers = "vllm.model_executor.layers.fused_moe"
    contents: dict[str, dict[str, Any]] = {
        f"{layers}.activation": {"MoEActivation": Activation},
        f"{layers}.config": {"FusedMoEConfig": type("FusedMoEConfig", (), {"moe_parallel_config": None})},
        f"{layers}.routed_experts": {"RoutedExperts": RoutedExperts},
        f"{layers}.runner.moe_runner": {
            "MoERunner": type("MoERunner", (Runner,), {}),
            "_moe_forward": stand_in.moe_forward_of_vllm,
        },
        f"{layers}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
    }
    for name, module in stand_ins.modules(contents).items():
        if name.startswith(layers):
            monkeypatch.setitem(sys.modules, name, module)
    vllm["vllm.model_executor.layers"].fused_moe = sys.modules[layers]  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops.vllm, "moe_forward", "opaque", raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "new_group", mock.Mock(return_value=mock.Mock(group_name="alone")))
    configure(vllm)
    return vllm


def configure(vllm: Modules, mode: str = "VLLM_COMPILE", enable_sp: bool = False) -> None:
    config = stand_in.configuration(mode=mode)
    config.compilation_config.pass_config = types.SimpleNamespace(enable_sp=enable_sp)
    vllm["vllm.config"].get_current_vllm_config_or_none = lambda: config  # type: ignore[attr-defined]


def build(**changes: Any) -> Any:
    runner = sys.modules["vllm.model_executor.layers.fused_moe.runner.moe_runner"].MoERunner
    return runner({path.replace("__", "."): value for path, value in changes.items()})


@pytest.mark.parametrize("setting", [None, "off", "auto"])
def test_unless_it_is_turned_off(with_moe: Modules, monkeypatch: MonkeyPatch, setting: str | None) -> None:
    monkeypatch.delenv("FLUX_VLLM_MOE")
    if setting is not None:
        monkeypatch.setenv("FLUX_VLLM_MOE", setting)
    with mock.patch("flux.integrations.vllm.compiled.distinguish_cached_graphs") as marked:
        for _ in range(2):
            plugin.register()
    names = ["RowParallelLinear"] + ([] if setting == "off" else ["MoERunner"])
    assert list(stand_in.registry(with_moe)) == names
    assert type(build()).__name__ == ("MoERunner" if setting == "off" else "FluxMoERunner")
    marks = [call.args for call in marked.call_args_list]
    assert marks == [("auto",)] + ([] if setting == "off" else [("moe",)])


def test_another_plugin(with_moe: Modules, caplog: LogCaptureFixture) -> None:
    stand_in.registry(with_moe)["MoERunner"] = other = type("TheirRunner", (), {})
    with caplog.at_level("WARNING", "vllm.flux"):
        plugin.register()
    assert stand_in.registry(with_moe)["MoERunner"] is other
    (line,) = [record.message for record in caplog.records]
    assert "another plugin has replaced MoERunner by TheirRunner" in line


@pytest.mark.parametrize("tokens", [5, 9])
def test_vllms_workspace_is_sized_in_the_first_batch(with_moe: Modules, tokens: int) -> None:
    """vLLM's kernel allocates what its largest batch needs while vLLM still allows it."""
    plugin.register()
    runner = build()
    theirs = runner._flux_theirs
    x = torch.ones(tokens, HIDDEN)
    names = ("experts_of_own_rows", "summed_experts", "own_experts")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(f"flux.integrations.vllm.moe.{name}"))
        runner._apply_quant_method(hidden_states=x[:3], router_logits=x[:3])
        assert [call.args[0].shape for call in theirs.call_args_list] == [(3, HIDDEN)]
        theirs.reset_mock()
        for _ in range(2):
            runner._apply_quant_method(hidden_states=x, router_logits=x)
    ((largest, weights, ids),) = [call.args for call in theirs.call_args_list]
    assert largest.shape == (3, HIDDEN) and largest.dtype == x.dtype  # flux begins with 4 tokens
    assert weights.shape == ids.shape == (3, TOP_K) and ids.dtype == torch.int32


NOT_SERVED = {
    "weights are quantised": {"routed_experts__quant_method": object()},
    "the dtype is torch.float64": {"routed_experts__params_dtype": torch.float64},
    "they are not sharded over ranks": {"moe_config__moe_parallel_config__tp_size": 1},
    "experts move between ranks": {"moe_config__moe_parallel_config__enable_eplb": True},
    "ranks have different tokens": {"moe_config__moe_parallel_config__dp_size": 2},
    "results are not reduced": {"moe_config__skip_final_all_reduce": True},
    "is transformed": {"routed_input_transform": object()},
    "LoRA is on": {"moe_config__is_lora_enabled": True},
    "the activation is gelu": {"moe_config__activation": Activation.GELU},
    "limits or factors": {"moe_config__swiglu_limit": 7.0},
    "experts have biases": {"moe_config__has_bias": True},
    "multiply the input": {"routed_experts__apply_router_weight_on_input": True},
    "more than 16 experts": {"moe_config__experts_per_token": 17},
    "not multiples of 8": {"moe_config__intermediate_size_per_partition": 12},
    "told which kernel": {"moe_config__moe_backend": "triton"},
    "kernel is FLASHINFER_CUTLASS": {
        "routed_experts__quant_method__unquantized_backend": Kernel.FLASHINFER_CUTLASS
    },
    "chooses the experts": {"routed_experts__quant_method__is_monolithic": True},
}


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_what_stays_vllms(with_moe: Modules, reason: str) -> None:
    plugin.register()
    for _ in range(2):
        runner = build(**NOT_SERVED[reason])
    ((kind, told),) = reports.report.refused
    assert kind == "MoE" and reason in told and reports.report.refused[kind, told] == 2
    x = torch.ones(5, HIDDEN)
    _, said = runner._apply_quant_method(hidden_states=x, router_logits=x, input_ids=x)
    assert said == "vLLM's kernel with ids"
    assert runner._maybe_reduce_final_output(x, 8, True) == ("vLLM's sum", 8, True)
    assert runner._forward_entry is None


@pytest.mark.parametrize("case", ["eager", "sequence parallelism", "no kernel"])
def test_when_models_stay_vllms(with_moe: Modules, monkeypatch: MonkeyPatch, case: str) -> None:
    if case == "eager":
        monkeypatch.setenv("FLUX_VLLM", "pass")
        configure(with_moe, mode="NONE")
    elif case == "sequence parallelism":
        configure(with_moe, enable_sp=True)
    else:
        monkeypatch.setattr(explain, "why_unfused", lambda *problem, **how: "there is no kernel")
    plugin.register()
    assert not build()._flux_may_sum and not reports.report.served


def test_batches_of_vllms_cuda_graphs_stay_vllms(with_moe: Modules, monkeypatch: MonkeyPatch) -> None:
    """By default it captures up to 512 tokens. With 128 sequences flux's experts were slower than vLLM's."""
    monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS")
    monkeypatch.delenv("FLUX_VLLM_SEQUENCE")
    plugin.register()
    runner = build()
    with mock.patch("flux.integrations.vllm.moe.own_experts", return_value="a part"):
        for tokens, who in ((512, "vLLM's kernel"), (513, "a part")):
            x = torch.ones(tokens, HIDDEN)
            assert runner._apply_quant_method(hidden_states=x, router_logits=x)[1] == who
    assert reports.report.served == {("MoE", 513, "prefill only"): 1}


def test_who_computes_a_batch(with_moe: Modules) -> None:
    """vLLM; flux this rank's part, which vLLM sums; flux all of it; flux of own rows."""
    plugin.register()
    runner = build()
    experts = runner.routed_experts
    assert runner._forward_entry == "opaque"
    before = experts.w13_weight, experts.w2_weight
    experts.quant_method.process_weights_after_loading(experts)
    assert experts.w13_weight is None, "vLLM has packed it"

    def call(tokens: int) -> tuple[Any, torch.Tensor]:
        x = torch.ones(tokens, HIDDEN)
        _, said = runner._apply_quant_method(hidden_states=x, router_logits=x)
        return said, runner._maybe_reduce_final_output(x, 8, False)[:, :8]

    where = "flux.integrations.vllm"
    with (
        mock.patch(f"{where}.moe.own_experts", return_value="a part") as part,
        mock.patch(f"{where}.moe.summed_experts", return_value="the sum") as summed,
        mock.patch(f"{where}.moe.experts_of_own_rows", return_value="own rows") as own,
        mock.patch(f"{where}.op._all_reduce", side_effect=lambda x, group: 2 * x),
    ):
        by_part = ((4, "a part", 2), (6, "a part", 2))
        for tokens, who, factor in ((3, "vLLM's kernel", 2), *by_part, (7, "the sum", 1)):
            said, total = call(tokens)
            assert said == who and torch.equal(total, factor * torch.ones(tokens, 8))
        with mock.patch.object(rows, "rows_are_own", lambda: True):
            assert call(3)[0] == call(9)[0] == "own rows"
    assert part.call_args.args[2] == "weights" and part.call_args.args[5] == "alone"
    for ours, group in ((summed, ("7", 1, 2)), (own, ("7", 1))):
        assert ours.call_args.args[1:3] == ("ids", "weights") and ours.call_args.args[5:] == group
    for ours in (part, summed, own):
        for kept, weight in zip(ours.call_args.args[3:5], before, strict=True):
            assert torch.equal(kept, weight)
    assert reports.report.served == {("MoE", 4, "FLUX_VLLM_MIN_TOKENS"): 1}


@pytest.mark.parametrize("case", ["shared experts", "scattered experts", "experts in order"])
def test_the_layers_own_sum_stays(with_moe: Modules, monkeypatch: MonkeyPatch, case: str) -> None:
    """Where more than flux's experts is summed, or ranks have whole experts: flux takes the place of vLLM's
    kernel. With own rows it also sums, if it knows which rank has which experts.
    """
    monkeypatch.setattr(torch.ops.vllm, "moe_forward_shared", "opaque, shared", raising=False)
    plugin.register()
    maps = {"scattered experts": [-1, 0, -1, 1, 2, -1], "experts in order": [-1, -1, -1, 0, 1, 2]}
    here = torch.tensor(maps[case]) if case in maps else None
    changes: dict[str, Any] = {"routed_experts__expert_map": here}
    if here is None:
        changes["shared_experts"] = object()
    else:  # vLLM counts one rank of tensor parallelism then
        changes |= {
            "moe_config__moe_parallel_config__use_ep": True,
            "moe_config__moe_parallel_config__tp_size": 1,
        }
    runner = build(**changes)
    assert runner._forward_entry == ("opaque, shared" if here is None else "opaque")
    with mock.patch("flux.integrations.vllm.moe.own_experts", return_value="a part") as ours:
        for tokens in (3, 4, 9):
            x = torch.ones(tokens, HIDDEN)
            said = runner._apply_quant_method(hidden_states=x, router_logits=x)[1]
            assert said == ("vLLM's kernel" if tokens == 3 else "a part")
    ids = torch.tensor([[1, 3], [0, 1], [3, 5], [2, 4]])
    assert torch.equal(ours.call_args.args[1], ids if here is None else here[ids])
    x = torch.ones(9, HIDDEN)
    if case == "experts in order":
        with mock.patch("flux.integrations.vllm.op._all_reduce", side_effect=lambda x, group: 2 * x):
            assert torch.equal(runner._maybe_reduce_final_output(x, None, True), 2 * x)
        with (
            mock.patch.object(rows, "rows_are_own", lambda: True),
            mock.patch("flux.integrations.vllm.moe.experts_of_own_rows", return_value="own rows") as own,
        ):
            assert runner._apply_quant_method(hidden_states=x, router_logits=x)[1] == "own rows"
        assert own.call_args.args[5:] == ("7", 2)
    else:
        assert runner._maybe_reduce_final_output(x, 8, True) == ("vLLM's sum", 8, True)
    ((kind, _, _),) = reports.report.served
    assert kind == "MoE, own part,"


def test_from_where_on_flux_sums(with_moe: Modules, monkeypatch: MonkeyPatch) -> None:
    """From where a sum is bound by the links. All layers have one group of this rank."""
    plugin.register()
    for setting, begins in (("5", 5), ("2", 4), ("off", (24 << 20) // (4 * HIDDEN))):
        monkeypatch.setenv("FLUX_VLLM_SEQUENCE", setting)
        assert build()._flux_sums_from == begins
    assert build(routed_experts__quant_method=object())._flux_sums_from == NEVER
    new_group: Any = dist.new_group
    assert [call.args for call in new_group.call_args_list] == [([3],)]
    assert new_group.call_args.kwargs["use_local_synchronization"]


def test_on_gpus_there_is_one_copy_of_the_weights(with_moe: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(with_moe["vllm.platforms"].current_platform, "is_cpu", lambda: False)
    plugin.register()
    bf16 = {"routed_experts__params_dtype": torch.bfloat16}
    runner = build(routed_experts__quant_method__unquantized_backend=Kernel.TRITON, **bf16)
    assert runner._forward_entry is None, "vLLM's own operator is opaque there"
    experts = runner.routed_experts
    # vLLM makes new parameters when all weights are there.
    experts.w13_weight, experts.w2_weight = experts.w13_weight.clone(), experts.w2_weight.clone()
    select = runner.router.select_experts = mock.Mock(return_value=("weights", "ids"))
    x = torch.ones(7, HIDDEN)
    with mock.patch("flux.integrations.vllm.moe.summed_experts", return_value="flux's") as ours:
        assert runner._apply_quant_method(hidden_states=x, router_logits=x) == (None, "flux's")
    assert ours.call_args.args[3] is experts.w13_weight and ours.call_args.args[4] is experts.w2_weight
    assert select.call_args.kwargs["topk_indices_dtype"] is torch.int32


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
FP8_NOT_SERVED: dict[str, tuple[str, Build]] = {
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


@pytest.mark.parametrize("case", FP8_NOT_SERVED)
def test_which_fp8_experts_stay_vllms(with_moe: Modules, monkeypatch: MonkeyPatch, case: str) -> None:
    if case == "no setting":
        monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS")
    plugin.register()
    why, make = FP8_NOT_SERVED[case]
    make()
    ((kind, told),) = reports.report.refused
    assert kind == "MoE" and why in told


@pytest.mark.parametrize("on_cpu", [False, True])
def test_fp8_experts_are_served(with_moe: Modules, monkeypatch: MonkeyPatch, on_cpu: bool) -> None:
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
