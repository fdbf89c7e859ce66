"""The models of vllm_throughput.py: shapes of known ones, with fewer layers and a smaller vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KINDS = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
POSITIONS = 4096
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
# As checkpoints of compressed-tensors say it.
_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_E4M3, "strategy": "channel", "dynamic": False},
            "input_activations": {**_E4M3, "strategy": "token", "dynamic": True},
        }
    },
}


@dataclass(frozen=True)
class Model:
    """A model of a kind (of _KINDS); how long its sequences may be, how many there are at once, how many
    tokens in one pass. ffn: columns of a layer's MLP, or of each of its experts, of which a token chooses
    top_k. fp8: linear layers are, with a scale for each row of a weight, and one for each row that comes.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: str
    dtype: str
    vocabulary: int
    length: int
    sequences: int
    batched_tokens: int
    experts: int = 0
    top_k: int = 0
    fp8: bool = False

    def kv_bytes(self, tp: int) -> int:
        """Of a GPU's KV cache for 64 of the longest sequences, in 16 bits."""
        return 64 * self.length * self.layers * 2 * max(1, self.kv_heads // tp) * self.head_dim * 2

    def config(self) -> dict[str, Any]:
        """What stands in a model's config.json."""
        config: dict[str, Any] = {
            "architectures": [_KINDS[self.kind]],
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }
        if self.kind == "qwen3_moe":
            config |= {
                "moe_intermediate_size": self.ffn,
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.kind == "mixtral":
            config |= {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k}
        if self.fp8:
            config["quantization_config"] = _FP8
        return config


# fmt: off
_GPU: dict[str, Any] = {
    "dtype": "bfloat16", "vocabulary": 32000, "length": 2048, "sequences": 256, "batched_tokens": 8192,
}
_CPU: dict[str, Any] = {
    "dtype": "float32", "vocabulary": 512, "length": 512, "sequences": 16, "batched_tokens": 512,
}
MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 8, 4096, 14336, 32, 8, 128, "llama", **_GPU),
        Model("llama-3-70b", 8, 8192, 28672, 64, 8, 128, "llama", **_GPU),
        Model("qwen3-32b", 8, 5120, 25600, 64, 8, 128, "qwen3", **_GPU),
        Model("qwen3-30b-a3b", 8, 2048, 768, 32, 4, 128, "qwen3_moe", experts=128, top_k=8, **_GPU),
        Model("mixtral-8x7b", 8, 4096, 14336, 32, 8, 128, "mixtral", experts=8, top_k=2, **_GPU),
    )
}
_TINY = {
    "llama": Model("a tiny Llama", 2, 256, 512, 8, 4, 32, "llama", **_CPU),
    "qwen3": Model("a tiny Qwen3", 2, 256, 512, 8, 4, 32, "qwen3", **_CPU),
    "qwen3_moe": Model("a tiny Qwen3-MoE", 2, 256, 64, 8, 4, 32, "qwen3_moe", experts=8, top_k=2, **_CPU),
    "mixtral": Model("a tiny Mixtral", 2, 256, 128, 8, 4, 32, "mixtral", experts=4, top_k=2, **_CPU),
}
# What --cpu takes instead.
TWINS = {name: _TINY[model.kind] for name, model in MODELS.items()}
# fmt: on


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Into a model's folder: each token is a word, so that as many tokens come out of a prompt as went in."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<unknown>", "<begin>", "<end>"]
    words = [*special, *(f"w{token}" for token in range(len(special), vocabulary))]
    tokens = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unknown>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
