"""`flux doctor --vllm MODEL`: what of a model would run on flux, and why not more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flux.cli import app, vllm
from flux.integrations.vllm import predict

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
AWQ = {"quant_method": "awq", "bits": 4}
UNMEASURED = "fp8 with block scales was not measured on 2 such GPUs"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "_MIN_TOKENS", "_TUNING", "_SEQUENCE", "_MOE"):
        monkeypatch.delenv(f"FLUX_VLLM{name}", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def found(folder: Path, config: dict[str, Any], *options: str) -> dict[str, str]:
    """What the command writes, by name."""
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(
        app, ["doctor", "--vllm", str(folder), "--json", str(folder / "out.json"), *options]
    )
    assert result.exit_code == 0, result.output
    written = json.loads((folder / "out.json").read_text())["findings"]
    assert all(finding["section"].startswith(f"vLLM: {folder} on ") for finding in written)
    return {finding["name"]: finding["value"] for finding in written}


def test_a_dense_model(tmp_path: Path) -> None:
    said = found(tmp_path, LLAMA, "--tp", "4")
    assert said["o_proj [8192, 2048]"].startswith("flux from 1 token on (measured on such GPUs, ")
    assert said["down_proj [8192, 7168]"].startswith("flux from 1 token on (measured on such GPUs, ")
    assert said["norms"] == "part of flux.gemm_ar, where those run"
    assert said["sequence parallel"] == "compiled batches from 768 tokens on"
    assert {name: what for name, what in said.items() if name.endswith("tokens")} == {
        "1 to 767 tokens": "gemm_ar",
        "768 to 8192 tokens": "sequence parallel",
    }
    said = found(tmp_path, LLAMA, "--tp", "2")
    assert said["vLLM's fusion"] == "compiled batches of 1 to 63 and 129 to 767 tokens stay vLLM's"
    assert said["sequence parallel"] == "compiled batches from 768 tokens on"


@pytest.mark.parametrize(
    ("config", "options", "name", "value"),
    [
        (LLAMA, ("--tp", "1"), "o_proj [8192, 8192]", "vLLM's own: they are not sharded over ranks"),
        (LLAMA, ("--tp", "3"), "o_proj [8192, 2730]", "vLLM's own: sizes are not multiples of 8"),
        (QWEN_MOE, (), "sequence parallel", "no: vLLM fuses sums of up to 16384 tokens"),
        (DEEPSEEK, (), "o_proj [7168, 8192]", f"vLLM's own: {UNMEASURED}"),
        (DEEPSEEK, (), "down_proj [7168, 9216]", f"vLLM's own: {UNMEASURED}"),
        (
            {**LLAMA, "quantization_config": AWQ},
            (),
            "o_proj [8192, 4096]",
            "vLLM's own: weights are quantised (awq)",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            (),
            "o_proj [8192, 4096]",
            "vLLM's own: weights are quantised (fp8, [64, 64])",
        ),
        (DEEPSEEK, (), "experts", "vLLM's own: weights are fp8, and FLUX_VLLM_MIN_TOKENS is not set"),
        (
            {**QWEN_MOE, "moe_intermediate_size": 20},
            (),
            "experts",
            "vLLM's own: sizes are not multiples of 8",
        ),
        (
            {"text_config": {**LLAMA, "model_type": "gemma3_text"}},
            (),
            "norms",
            "vLLM's own: they do not follow the addition of the residual",
        ),
    ],
)
def test_why_not(
    tmp_path: Path, config: dict[str, Any], options: tuple[str, ...], name: str, value: str
) -> None:
    assert found(tmp_path, config, *options)[name] == value


def test_experts_of_decoding_stay_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the batches that vLLM captures in CUDA graphs by default."""
    assert found(tmp_path, QWEN_MOE)["experts"] == "flux from 513 tokens on (prefill only)"
    monkeypatch.setenv("FLUX_VLLM_MOE", "off")
    assert found(tmp_path, QWEN_MOE)["experts"] == "vLLM's own: FLUX_VLLM_MOE is off"


def test_settings_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "300")
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "off")
    assert found(tmp_path, LLAMA, "--tp", "4")["sequence parallel"] == "no: it is turned off"
    said = found(tmp_path, QWEN_MOE, "--tp", "4")
    assert said["o_proj [2048, 1024]"] == "flux from 300 tokens on (FLUX_VLLM_MIN_TOKENS)"
    from_300 = "flux from 300 tokens on (FLUX_VLLM_MIN_TOKENS)"
    assert said["experts"] == from_300
    assert found(tmp_path, DEEPSEEK, "--tp", "4")["experts"] == from_300
    assert found(tmp_path, DEEPSEEK, "--tp", "32")["experts"].endswith("sizes are not multiples of 128")
    monkeypatch.setenv("FLUX_VLLM", "off")
    assert found(tmp_path, LLAMA)["flux"] == "not used, because FLUX_VLLM is off"


@pytest.mark.parametrize(
    ("weights", "scales"),
    [
        ({"strategy": "channel", "type": "float"}, "row"),
        ({"strategy": "block", "type": "float"}, "block"),
        ({"strategy": "channel", "type": "int"}, None),
    ],
)
def test_fp8_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], scales: str | None
) -> None:
    numbers = {"num_bits": 8, "symmetric": True}
    group = {"weights": {**numbers, **weights}, "input_activations": {**numbers, "type": weights["type"]}}
    quantisation = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = {**LLAMA, "quantization_config": quantisation}
    name, packed = "o_proj [8192, 2048]", "vLLM's own: weights are quantised (compressed-tensors)"
    unmeasured = f"vLLM's own: fp8 with {scales} scales was not measured on 4 such GPUs"
    assert found(tmp_path, config, "--tp", "4")[name] == (unmeasured if scales else packed)
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "2048")
    said = found(tmp_path, config, "--tp", "4")
    where = f"flux where the model is sequence parallel ({unmeasured.partition(': ')[2]})"
    assert said[name] == (where if scales else packed)
    assert ("2048 to 8192 tokens" in said) == bool(scales)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "300")
    said = found(tmp_path, config, "--tp", "4")
    assert said[name] == ("flux from 300 tokens on (FLUX_VLLM_MIN_TOKENS)" if scales else packed)


def test_a_model_of_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--someone--a-llama" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert vllm.model("someone/a-llama") == predict.Model("someone/a-llama", 8192, 8192, 28672, expert=28672)


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"model_type": "resnet"}'])
def test_what_is_no_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["doctor", "--vllm", str(tmp_path)])
    assert result.exit_code == 2 and "--vllm expected a folder with config.json" in result.output
