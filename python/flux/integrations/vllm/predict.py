"""What of a model would run on flux in vLLM, from its sizes: the plugin's ranges, asked without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flux.fp8.scales import BLOCK
from flux.integrations.vllm.ranges import ALIGNMENT, Layer, Ranges, over_fusion, ranges_on

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


@dataclass(frozen=True)
class Prediction:
    """What runs on flux.

    Attributes:
        layers: row-parallel ones, by name: columns of each rank's weight, and where they are flux's, or why
            they stay vLLM's.
        few, many, fused: of ranges.Ranges, of all layers together.
        sequence: from how many tokens on a compiled model is sequence parallel, or None.
        why_not_sequence: if so.
        runs: what runs between the layers of a compiled model, and from how many tokens on; ascending.
    """

    layers: dict[str, tuple[int, Ranges | str]]
    few: range
    many: int
    fused: int
    sequence: int | None
    why_not_sequence: str
    runs: list[tuple[int, str]]


def predict(model: Model, ranks: int, device: torch.device) -> Prediction:
    """By what was measured on GPUs like a device, and the settings of this process."""
    widths = {name: n for name, n in (("o_proj", model.attention), ("down_proj", model.mlp)) if n}
    layers = {name: (n // ranks, _layer(model, n, ranks, device)) for name, n in widths.items()}
    served = [found for _, found in layers.values() if isinstance(found, Ranges)]
    sequence, why = _sequence(model, served)
    few, many = over_fusion(served) if sequence is not None else over_fusion([])
    of_sums = ranges_on(device, _of(model, 1, ranks))
    prediction = Prediction(layers, few, many, of_sums.fused, sequence, why, [])
    sums = of_sums.sums if ranks > 1 else range(0)
    begins = [each.begin for each in served]
    edges = {1, few.start, few.stop, of_sums.fused + 1, many, *begins, sums.start, sums.stop, sequence or 1}
    for start in sorted(edge for edge in edges if 1 <= edge <= MOST_TOKENS):
        fuses = start <= of_sums.fused and start not in few and start < many
        told = "vLLM" if fuses else _at(model, start, begins, sequence, sums)
        if not prediction.runs or prediction.runs[-1][1] != told:
            prediction.runs.append((start, told))
    return prediction


def _of(model: Model, k: int, ranks: int) -> Layer:
    fused = FUSED_BY_VLLM_BYTES.get(ranks, 0) // (model.hidden * 2)
    return Layer(model.hidden, k, ranks, scales=_scales(model), experts=model.experts, fused=fused)


def _layer(model: Model, width: int, ranks: int, device: torch.device) -> Ranges | str:
    """Where a row-parallel layer with `width` columns on all ranks is flux's, or why it stays vLLM's."""
    if ranks == 1:
        return "they are not sharded over ranks"
    if model.quantised and not _scales(model):
        return f"weights are quantised ({model.quantised})"
    if model.hidden % ALIGNMENT or width % (ranks * ALIGNMENT):
        return "sizes are not multiples of 8"
    found = ranges_on(device, _of(model, width // ranks, ranks))
    return found if found.any else found.why


def _sequence(model: Model, served: list[Ranges]) -> tuple[int | None, str]:
    """From how many tokens on a compiled model is sequence parallel, or None and why not."""
    if not served:
        return None, "no row-parallel layer is flux's"
    if not model.plain_norm:
        return None, "no row-parallel layer is followed by a plain fused_add_rms_norm"
    if model.whole_columns:
        return None, "attention begins with layers that all ranks have whole"
    begin = served[0].sequence
    return begin, "" if begin is not None else "it is turned off"


def _at(model: Model, start: int, begins: list[int], sequence: int | None, sums: range) -> str:
    """What runs from `start` tokens on, where vLLM does not fuse."""
    if sequence and start >= sequence:
        return "sequence parallel"
    served = sum(start >= begin for begin in begins)
    what = [f"gemm_ar{'' if served == len(begins) else f' {served} of {len(begins)}'}"] if served else []
    others = model.plain_norm and (model.experts or served < len(begins) or not begins)
    what += ["all_reduce"] if others and start in sums else []
    return " + ".join(what) or "vLLM"
