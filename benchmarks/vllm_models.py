"""The models of vllm_throughput.py: shapes of known ones, with fewer layers and a smaller vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A Llama, or if it has experts a Qwen3-MoE; how long its sequences may be, how many there are at once,
    how many tokens in one pass. ffn: columns of a layer's MLP, or of each of its experts, of which a token
    chooses top_k.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    vocabulary: int
    length: int
    sequences: int
    batched_tokens: int
    experts: int = 0
    top_k: int = 0

    def kv_bytes(self, tp: int) -> int:
        """Of a GPU's KV cache for 64 of the longest sequences, in 16 bits."""
        return 64 * self.length * self.layers * 2 * max(1, self.kv_heads // tp) * self.head_dim * 2

    def config(self) -> dict[str, Any]:
        """What stands in a model's config.json."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }
        if self.experts:
            config |= {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "moe_intermediate_size": self.ffn,
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return config


# fmt: off
_GPU: dict[str, Any] = {
    "dtype": "bfloat16", "vocabulary": 32000, "length": 2048, "sequences": 128, "batched_tokens": 8192,
}
_CPU: dict[str, Any] = {
    "dtype": "float32", "vocabulary": 512, "length": 512, "sequences": 16, "batched_tokens": 512,
}
MODELS = {
    model.name: model
    for model in (
        Model("llama-3-8b", 8, 4096, 14336, 32, 8, 128, **_GPU),
        Model("qwen3-30b-a3b", 8, 2048, 768, 32, 4, 128, experts=128, top_k=8, **_GPU),
    )
}
# What --cpu takes instead.
TWINS = {
    "llama-3-8b": Model("a tiny Llama", 2, 256, 512, 8, 4, 32, **_CPU),
    "qwen3-30b-a3b": Model("a tiny Qwen3-MoE", 2, 256, 64, 8, 4, 32, experts=8, top_k=2, **_CPU),
}
# fmt: on
