"""Small models with random weights, as vLLM loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
LAYERS = 2
HIDDEN = 256
_MLP = 512
# Quantised Qwen3, by how.
QUANTISED = ("int8", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_experts")
KINDS = ("llama", "llama_of_4", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", *QUANTISED, "adapter")


def make(kind: str, folder: Path) -> None:
    """Writes a model of a kind, or an adapter for "qwen3". Biases are large: one that is added per rank would
    show.
    """
    if kind == "adapter":
        _make_adapter(folder)
        return
    torch.manual_seed(1)
    model = _model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.06)
    model.save_pretrained(folder)
    if kind in QUANTISED:
        _quantise(kind, folder)


def make_tokenizer(folder: Path) -> None:
    """Adds a tokenizer to a model: its words are w0, w1 and so on, one for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def _model(kind: str) -> Any:
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    }
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    if kind in ("llama", "llama_of_4"):
        layers = {"num_hidden_layers": 4} if kind == "llama_of_4" else {}
        config = transformers.LlamaConfig(**{**common, **layers}, attention_bias=True, mlp_bias=True)
        return transformers.LlamaForCausalLM(config)
    if kind in ("qwen3", "int8", "fp8_tensor", "fp8_channel"):
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, head_dim=32))
    if kind == "fp8_block":  # each rank's heads are a whole number of blocks
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, head_dim=64))
    if kind == "fp8_experts":  # each rank's parts of experts, too
        sizes = {**experts, "moe_intermediate_size": 256}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, **sizes, head_dim=64))
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, **experts, head_dim=32)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "qwen2_moe":  # with shared experts, and biases in qkv
        config = transformers.Qwen2MoeConfig(**common, **experts, shared_expert_intermediate_size=128)
        return transformers.Qwen2MoeForCausalLM(config)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    )


def _quantise(kind: str, folder: Path) -> None:
    """Quantises the linear layers of a model, as checkpoints have them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj.weight" in name]:
        in_blocks = kind in ("fp8_block", "fp8_experts")
        made = _fp8_blocks(tensors[name]) if in_blocks else _scaled(kind, tensors[name])
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in made.items()}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _QUANTISATION[kind]
    (folder / "config.json").write_text(json.dumps(config))


def _scaled(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight, with one scale or one for each row, and perhaps what its inputs are divided by."""
    size = weight.abs()
    if kind == "int8":
        scale = size.amax(1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    scale = size.amax(1, keepdim=True) / 448 if kind == "fp8_channel" else size.amax() / 448
    made = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    return made if kind == "fp8_channel" else {**made, "input_scale": torch.tensor(_LARGEST_INPUT / 448)}


def _fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight with a scale for each 128 by 128, as DeepSeek has them."""
    n, k = weight.shape
    blocks = weight.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": values.view(n, k), "weight_scale_inv": scale}


def _compressed(number: str) -> dict[str, Any]:
    """compressed-tensors: weights by channel, inputs by token."""
    numbers = {"num_bits": 8, "type": number, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{number}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_LARGEST_INPUT = 8.0
_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_QUANTISATION = {
    "int8": _compressed("int"),
    "fp8_channel": _compressed("float"),
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8_block": _FP8_BLOCKS,
    "fp8_experts": {
        **_FP8_BLOCKS,
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(LAYERS))],
    },
}


def _make_adapter(folder: Path) -> None:
    """A LoRA adapter of o_proj and down_proj, in the format of peft."""
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(2)
    folder.mkdir()
    tensors = {}
    for layer in range(LAYERS):
        for name, k in (("self_attn.o_proj", HIDDEN), ("mlp.down_proj", _MLP)):
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(HIDDEN, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["o_proj", "down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
