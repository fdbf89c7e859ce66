"""What of a model would run on flux in vLLM, from its sizes: the plugin's thresholds, asked without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flux.integrations.vllm import thresholds

# Up to which sums vLLM 0.33 fuses all-reduces with RMSNorm on Hopper, by ranks.
FUSED_BY_VLLM_BYTES = {2: 64 << 20, 4: 2 << 20, 8: 1 << 19}
# vLLM's default for max_num_batched_tokens on large GPUs.
MOST_TOKENS = 8192
# They normalise what a layer adds before they add it, or have no norm behind the addition.
_OTHER_NORMS = ("gemma2", "gemma3", "gemma4", "olmo2", "olmo3", "glm4", "exaone4")
# What configurations call the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Model:
    """Sizes of a model.

    Attributes:
        hidden: columns of the residual.
        attention: columns of o_proj's input, on all ranks together.
        mlp: those of down_proj's; 0: all layers have experts instead.
        plain_norm: the norm follows the addition of the residual.
        top_k, expert: how many experts a token chooses, and columns of one, on all ranks together.
    """

    name: str
    hidden: int
    attention: int
    mlp: int
    quantised: bool = False
    experts: bool = False
    plain_norm: bool = True
    top_k: int = 0
    expert: int = 0


def model_of(config: dict[str, Any], name: str = "") -> Model:
    """The sizes in a config.json of transformers.

    Raises:
        ValueError: it has no sizes of a transformer.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict) or "hidden_size" not in text or "num_attention_heads" not in text:
        raise ValueError("its config.json has no hidden_size and num_attention_heads")
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    width = text.get("v_head_dim") or text.get("head_dim") or hidden // heads
    experts = next((n for key in _EXPERTS if (n := text.get(key))), 0)
    dense = not experts or text.get("first_k_dense_replace") or text.get("mlp_only_layers")
    return Model(
        name,
        hidden,
        heads * int(width),
        int(text.get("intermediate_size") or 0) if dense else 0,
        quantised="quantization_config" in {**config, **text},
        experts=bool(experts),
        plain_norm=not str(text.get("model_type", "")).startswith(_OTHER_NORMS),
        top_k=int(text.get("num_experts_per_tok") or 0),
        expert=int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0),
    )


def layers(model: Model, ranks: int, device: torch.device) -> list[tuple[str, int, str]]:
    """Row-parallel layers that flux serves: which, from how many tokens on, and why from there."""
    found = []
    for name, width in (("o_proj", model.attention), ("down_proj", model.mlp)):
        if width and why_not(model, width, ranks) is None:
            problem = (model.hidden, width // ranks, torch.bfloat16, ranks, device)
            found.append((name, *thresholds.from_tokens(*problem)))
    return found


def why_not(model: Model, width: int, ranks: int) -> str | None:
    """Why a row-parallel layer with `width` columns on all ranks stays vLLM's, or None."""
    if ranks == 1:
        return "they are not sharded over ranks"
    if model.quantised:
        return "weights are quantised"
    if model.hidden % thresholds.ALIGNMENT or width % (ranks * thresholds.ALIGNMENT):
        return "sizes are not multiples of 8"
    return None


def sequence_from(model: Model, ranks: int, device: torch.device) -> tuple[int | None, str]:
    """From how many tokens on a compiled model is sequence parallel, or None and why not."""
    served = layers(model, ranks, device)
    if not served:
        return None, "no row-parallel layer is flux's"
    if not model.plain_norm:
        return None, "no row-parallel layer is followed by a plain fused_add_rms_norm"
    begin = thresholds.sequence_from(model.hidden, torch.bfloat16, ranks, device)
    return begin, "" if begin is not None else "it is turned off"


def fused_by_vllm(model: Model, ranks: int) -> int:
    """Up to how many tokens vLLM fuses all-reduces with RMSNorm in compiled models."""
    return FUSED_BY_VLLM_BYTES.get(ranks, 0) // (model.hidden * 2)


def ranges(model: Model, ranks: int, device: torch.device) -> list[tuple[int, str]]:
    """What runs between the layers of a compiled model, and from how many tokens on, in ascending order."""
    vllm = fused_by_vllm(model, ranks)
    begins = [begin for _, begin, _ in layers(model, ranks, device)]
    sequence, _ = sequence_from(model, ranks, device)
    limit = thresholds.sums(ranks, device)[1] // (model.hidden * 2) if ranks > 1 else 0
    edges = {1, vllm + 1, *begins, limit + 1, *([sequence] if sequence else [])}
    found: list[tuple[int, str]] = []
    for start in sorted(edge for edge in edges if edge <= MOST_TOKENS):
        told = "vLLM" if start <= vllm else _at(model, start, begins, sequence, limit)
        if not found or found[-1][1] != told:
            found.append((start, told))
    return found


def _at(model: Model, start: int, begins: list[int], sequence: int | None, limit: int) -> str:
    """What runs from `start` tokens on, where vLLM does not fuse."""
    if sequence and start >= sequence:
        return "sequence parallel"
    served = sum(start >= begin for begin in begins)
    what = [f"gemm_ar{'' if served == len(begins) else f' {served} of {len(begins)}'}"] if served else []
    others = model.plain_norm and (model.experts or served < len(begins) or not begins)
    what += ["all_reduce"] if others and start <= limit else []
    return " + ".join(what) or "vLLM"
