"""What of a model would run on flux in vLLM, from its sizes: the plugin's thresholds, asked without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flux.fp8.scales import BLOCK
from flux.integrations.vllm import thresholds
from flux.integrations.vllm.report import NEVER

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
        quantised: weights: "row" or "block" if they are fp8 with such scales, another name if flux cannot
            take them, or nothing.
        plain_norm: the norm follows the addition of the residual.
        whole_columns: attention begins with layers that all ranks have whole.
        top_k, expert: how many experts a token chooses, and columns of one, on all ranks together.
    """

    name: str
    hidden: int
    attention: int
    mlp: int
    quantised: str = ""
    experts: bool = False
    plain_norm: bool = True
    whole_columns: bool = False
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
        quantised=_quantised({**config, **text}.get("quantization_config")),
        experts=bool(experts),
        plain_norm=not str(text.get("model_type", "")).startswith(_OTHER_NORMS),
        whole_columns=bool(text.get("kv_lora_rank")),
        top_k=int(text.get("num_experts_per_tok") or 0),
        expert=int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0),
    )


def _quantised(config: Any) -> str:
    """Model.quantised, from a configuration of the hub."""
    if not isinstance(config, dict):
        return ""
    method = str(config.get("quant_method"))
    if method == "fp8":
        blocks = config.get("weight_block_size")
        return "row" if blocks is None else "block" if list(blocks) == [BLOCK, BLOCK] else f"fp8, {blocks}"
    groups = list((config.get("config_groups") or {}).values())
    if method != "compressed-tensors" or len(groups) != 1:
        return method
    weights, inputs = (groups[0].get(name) or {} for name in ("weights", "input_activations"))
    numbers = [(each.get("type"), each.get("num_bits")) for each in (weights, inputs)]
    strategy = str(weights.get("strategy"))
    if numbers != [("float", 8)] * 2:
        return method
    return {"tensor": "row", "channel": "row", "block": "block"}.get(strategy, f"fp8, {strategy}")


def _scales(model: Model) -> str:
    return model.quantised if model.quantised in ("row", "block") else ""


def layers(model: Model, ranks: int, device: torch.device) -> list[tuple[str, int, str]]:
    """Row-parallel layers that flux serves: which, from how many tokens on, and why from there."""
    found = []
    for name, width in (("o_proj", model.attention), ("down_proj", model.mlp)):
        if width and why_not(model, width, ranks, device) is None:
            found.append((name, *_begin(model, width, ranks, device)))
    return found


def _begin(model: Model, width: int, ranks: int, device: torch.device) -> tuple[int, str]:
    problem = (model.hidden, width // ranks, torch.bfloat16, ranks, device)
    return thresholds.from_tokens(*problem, scales=_scales(model))


def why_not(model: Model, width: int, ranks: int, device: torch.device) -> str | None:
    """Why a row-parallel layer with `width` columns on all ranks stays vLLM's, or None."""
    if ranks == 1:
        return "they are not sharded over ranks"
    if model.quantised and not _scales(model):
        return f"weights are quantised ({model.quantised})"
    if model.hidden % thresholds.ALIGNMENT or width % (ranks * thresholds.ALIGNMENT):
        return "sizes are not multiples of 8"
    begin, why = _begin(model, width, ranks, device)
    problem = (model.hidden, torch.bfloat16, ranks, device, _scales(model))
    return why if begin == NEVER and thresholds.sequence_from(*problem) is None else None


def sequence_from(model: Model, ranks: int, device: torch.device) -> tuple[int | None, str]:
    """From how many tokens on a compiled model is sequence parallel, or None and why not."""
    served = layers(model, ranks, device)
    if not served:
        return None, "no row-parallel layer is flux's"
    if not model.plain_norm:
        return None, "no row-parallel layer is followed by a plain fused_add_rms_norm"
    if model.whole_columns:
        return None, "attention begins with layers that all ranks have whole"
    kind = (_scales(model), model.experts)
    begin = thresholds.sequence_from(model.hidden, torch.bfloat16, ranks, device, *kind)
    return begin, "" if begin is not None else "it is turned off"


def fused_by_vllm(model: Model, ranks: int) -> int:
    """Up to how many tokens vLLM fuses all-reduces with RMSNorm in compiled models."""
    return FUSED_BY_VLLM_BYTES.get(ranks, 0) // (model.hidden * 2)


def over_fusion(model: Model, ranks: int, device: torch.device) -> tuple[range, int]:
    """With how few and from how many tokens on flux's layers are flux's also where vLLM would fuse
    all-reduces.
    """
    begins = max((begin for _, begin, _ in layers(model, ranks, device)), default=NEVER)
    if model.experts or sequence_from(model, ranks, device)[0] is None:
        return range(0), NEVER
    how = (torch.bfloat16, ranks, device, _scales(model))
    few = thresholds.few_over_fusion(model.hidden, begins, *how)
    return few, max(thresholds.over_fusion_from(model.hidden, *how), begins)


def ranges(model: Model, ranks: int, device: torch.device) -> list[tuple[int, str]]:
    """What runs between the layers of a compiled model, and from how many tokens on, in ascending order."""
    vllm, (few, over) = fused_by_vllm(model, ranks), over_fusion(model, ranks, device)
    begins = [begin for _, begin, _ in layers(model, ranks, device)]
    sequence, _ = sequence_from(model, ranks, device)
    first, nbytes = thresholds.sums(ranks, device) if ranks > 1 else (1, 0)
    sums = range(first, nbytes // (model.hidden * 2) + 1)
    edges = {1, few.start, few.stop, vllm + 1, over, *begins, sums.start, sums.stop, sequence or 1}
    found: list[tuple[int, str]] = []
    for start in sorted(edge for edge in edges if 1 <= edge <= MOST_TOKENS):
        fuses = start <= vllm and start not in few and start < over
        told = "vLLM" if fuses else _at(model, start, begins, sequence, sums)
        if not found or found[-1][1] != told:
            found.append((start, told))
    return found


def _at(model: Model, start: int, begins: list[int], sequence: int | None, sums: range) -> str:
    """What runs from `start` tokens on, where vLLM does not fuse."""
    if sequence and start >= sequence:
        return "sequence parallel"
    served = sum(start >= begin for begin in begins)
    what = [f"gemm_ar{'' if served == len(begins) else f' {served} of {len(begins)}'}"] if served else []
    others = model.plain_norm and (model.experts or served < len(begins) or not begins)
    what += ["all_reduce"] if others and start in sums else []
    return " + ".join(what) or "vLLM"
