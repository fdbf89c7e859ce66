"""Transformer Engine's grouped experts (`moe_grouped_gemm`): what their weights are called, and when flux
cannot take their place.

They are TEGroupedMLP, whose linear layers fc1 and fc2 each hold the weights of all experts, one parameter for
each: weight0, weight1 and so on.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.moe.experts import TEGroupedMLP

# None or stand-ins if Transformer Engine is missing.
LINEARS = tuple(
    getattr(te, name, None) for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
)
# Whose results Megatron's fine-grained offloading moves to the CPU.
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}


def are_grouped(experts: torch.nn.Module) -> bool:
    return type(experts) is TEGroupedMLP


def names_of_weights(linear: Any) -> list[str]:
    """Of fc1 or fc2, the last expert's first."""
    return [f"weight{number}" for number in reversed(range(linear.num_gemms))]


def reasons(experts: Any, config: Any, is_swiglu: bool) -> dict[str, bool]:
    """Why flux does not serve such experts, and whether it holds: options that Megatron reads in this class
    only, or that Transformer Engine's linear layers carry out.
    """
    linears = (experts.linear_fc1, experts.linear_fc2)
    are_known = tuple(map(type, linears)) == LINEARS
    selective = config.recompute_granularity == "selective"
    recomputed = selective and "moe_act" in (config.recompute_modules or ())
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    offloaded = _OFFLOADED & set(getattr(config, "offload_modules", None) or ())
    interleaved = getattr(config, "moe_mlp_glu_interleave_size", None) is not None
    return {
        "the linear layers of its experts are not Transformer Engine's": not are_known,
        "the weights of its experts are one parameter": are_known and not all(map(_are_separate, linears)),
        "its experts have a recipe of quantization": getattr(config, "quant_recipe", None) is not None,
        "the weights of its experts are split over another group too (generalized tensor parallelism)": (
            any(getattr(w, "gtp_remat_size", None) not in (None, 1) for w in experts.parameters())
        ),
        "its experts are one operation of Transformer Engine's": getattr(experts, "_with_fused_impl", False),
        "Transformer Engine delays the gradients of its weights": config.delay_wgrad_compute,
        "gates and ups alternate in its experts' weights": config.gated_linear_unit and interleaved,
        "its activation keeps its input in fp8": (
            config.bias_activation_fusion and config.activation_func_fp8_input_store
        ),
        # flux keeps no result of SwiGLU anyway. What it keeps of others is as much as without the option.
        "its activation is recomputed": recomputed and not is_swiglu,
        "activations of its experts are offloaded to the CPU": bool(offloads and offloaded),
    }


def _are_separate(linear: Any) -> bool:
    return all(linear._parameters.get(name) is not None for name in names_of_weights(linear))
