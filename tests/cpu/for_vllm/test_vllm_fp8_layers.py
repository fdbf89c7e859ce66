"""Layers of vLLM with fp8 weights: which flux serves, why not the others, and what a layer then calls."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_stand_in as stand_in
from pytest import MonkeyPatch

import flux
from flux.integrations import vllm as plugin
from flux.integrations.vllm import report as reports

E4M3 = torch.float8_e4m3fn
VALUES = torch.arange(16 * 32).view(16, 32).remainder(5).to(E4M3)
Modules = stand_in.Modules
vllm = stand_in.vllm


def layer(vllm: Modules, kind: str = "RowParallelLinear", **changes: Any) -> Any:
    """A layer as vLLM has it when its weights are loaded."""
    quantisation = "vllm.model_executor.layers.quantization"
    method = vllm[f"{quantisation}.fp8"].Fp8LinearMethod(stand_in.fp8_kernel(VALUES))
    given = {"params_dtype": torch.float32, "quant_method": changes.pop("quant_method", method), "tp_rank": 1}
    given["scheme"] = changes.get("scheme")
    made = vllm["vllm.model_executor.layers.linear"].__dict__[kind](VALUES, **given)
    made.weight, made.weight_scale = VALUES.t(), torch.full((16, 1), 0.5)
    for name, value in changes.items():
        setattr(made, name, value)
    made.quant_method.process_weights_after_loading(made)
    return made


def refused() -> list[str]:
    return [why for _, why in reports.report.refused]


@pytest.fixture
def asked(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "4")


@pytest.mark.usefixtures("asked")
def test_a_row_parallel_layer_is_served(vllm: Modules) -> None:
    plugin.register()
    bias = torch.arange(16.0)
    made = layer(vllm, bias=bias)
    assert reports.report.served == {("row-parallel linear fp8 [16, 32]", 4, "FLUX_VLLM_MIN_TOKENS"): 1}
    with mock.patch.object(flux, "gemm_ar") as gemm_ar:
        assert made(torch.ones(3, 32)) == "vLLM's own" and not gemm_ar.called
        assert made(torch.ones(2, 2, 32)) == "vLLM's own" and not gemm_ar.called
        made(torch.ones(4, 32))
        made(mock.Mock(spec=["data", "scale"], data=torch.ones(5, 32).to(E4M3), scale="of vLLM"))
    calls = gemm_ar.call_args_list
    assert [call.args[0].shape[0] for call in calls] == [4, 5]
    for call in calls:
        assert call.args[0].dtype == E4M3 and call.args[2] is bias
        assert torch.equal(call.args[1].float(), VALUES.float())
        assert call.kwargs["scale_w"] is made.weight_scale and call.kwargs["out_dtype"] == torch.float32
    assert calls[0].kwargs["scale_x"].shape == (4, 1) and calls[1].kwargs["scale_x"] == "of vLLM"


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight": torch.zeros(8, 16, dtype=torch.int32)}, "Mock of vLLM repacks the weights"),
        ({"weight": torch.zeros(32, 16).to(E4M3)}, "Mock of vLLM repacks the weights"),
        ({"weight_scale": torch.ones(16, 3)}, "Mock of vLLM repacks the scales"),
        ({"weight_scale": torch.ones(16, 1).to(torch.bfloat16)}, "Mock of vLLM repacks the scales"),
        ({"input_scale_ub": torch.ones(1)}, "scales of rows have an upper bound"),
    ],
)
def test_kernels_of_vllm_that_repack(vllm: Modules, change: dict[str, Any], why: str) -> None:
    """This is known only when the weights are loaded: the layer is vLLM's then, and the log says so."""
    plugin.register()
    made = layer(vllm, **change)
    assert made(torch.ones(9, 32)) == "vLLM's own"
    line = reports.report.line()
    assert line == f"not used. 1 row-parallel linear fp8 layer: {why}"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "fp8 with row scales was not measured on 2 such GPUs"),
        ({"FLUX_VLLM_MIN_TOKENS": "4", "FLUX_VLLM": "layer"}, "FLUX_VLLM is layer, and weights are fp8"),
        ({"FLUX_VLLM_MIN_TOKENS": "4", "INVARIANT": "1"}, "flux's fp8 layers are not batch invariant"),
    ],
)
def test_why_not(vllm: Modules, monkeypatch: MonkeyPatch, settings: dict[str, str], why: str) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = "INVARIANT" in settings  # type: ignore[attr-defined]
    plugin.register()
    assert layer(vllm)(torch.ones(9, 32)) == "vLLM's own"
    assert refused() == [why]


def test_other_quantised_layers(vllm: Modules) -> None:
    plugin.register()
    quantisation = "vllm.model_executor.layers.quantization.compressed_tensors"
    method = vllm[f"{quantisation}.compressed_tensors"].CompressedTensorsLinearMethod(None)
    scheme = type("CompressedTensorsW8A8Int8", (), {})()
    assert layer(vllm, quant_method=method, scheme=scheme)(torch.ones(9, 32)) == "vLLM's own"
    assert refused() == ["weights are quantised (CompressedTensorsW8A8Int8)"]


def test_sequence_parallel_only(vllm: Modules, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "64")
    plugin.register()
    made = layer(vllm)
    assert made(torch.ones(9, 32)) == "vLLM's own"
    assert "row-parallel linear fp8 [16, 32] layer where the model is sequence parallel (" in (
        reports.report.line()
    )


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("served", [True, False])
def test_column_parallel_layers_are_marked(vllm: Modules, served: bool) -> None:
    """In graphs that flux's pass sees, and only there."""
    plugin.register()
    if served:
        layer(vllm)
    made = layer(vllm, "ColumnParallelLinear")
    fp8 = sys.modules.get("flux.integrations.vllm.fp8")
    x, bias = torch.ones(4, 32), torch.ones(16)
    stock = torch.nn.functional.linear(x, VALUES.float(), bias)
    assert torch.equal(made.quant_method.apply(made, x, bias), stock), "no graph is traced"
    assert (fp8 is not None) == served
    if fp8 is None:
        return
    with (
        mock.patch.object(fp8, "scaled_linear", side_effect=lambda product, *of_layer: product) as mark,
        mock.patch("torch.compiler.is_compiling", lambda: True),
    ):
        assert torch.equal(made.quant_method.apply(made, x, bias), stock)
        made.quant_method.apply(made, torch.ones(2, 2, 32))  # not rows
    (call,) = mark.call_args_list
    product, rows, weight, given_bias, scale, *how = call.args
    assert torch.equal(product, stock) and rows is x and given_bias is bias
    assert torch.equal(weight.float(), VALUES.float()) and scale is made.weight_scale
    assert how == ["row", None, False]
