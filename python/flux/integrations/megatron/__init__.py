"""Megatron-Core on flux: its tensor-parallel layers with fused communication, by one line in the spec.

Tested with megatron-core 0.15.3 to 0.19.2; needs neither Transformer Engine nor Apex, and works beside both.
See docs/megatron.md.
"""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"flux.integrations.megatron needs Megatron-Core (pip install megatron-core), but: {error}"
    ) from error

from flux.integrations.megatron.convert import (
    FluxTransformerLayer,
    convert_model,
    convert_spec,
    coverage,
    get_flux_layer_spec,
    gpt_layer_spec,
    on_flux,
)
from flux.integrations.megatron.linear import (
    FluxColumnParallelLinear,
    FluxRowParallelLinear,
    accumulate_into_main_grad,
    save_gathered_inputs,
)
from flux.integrations.megatron.moe import FluxMoELayer
from flux.integrations.megatron.norm import FluxLayerNormColumnParallelLinear, FluxNorm

__all__ = [
    "FluxColumnParallelLinear",
    "FluxLayerNormColumnParallelLinear",
    "FluxMoELayer",
    "FluxNorm",
    "FluxRowParallelLinear",
    "FluxTransformerLayer",
    "accumulate_into_main_grad",
    "convert_model",
    "convert_spec",
    "coverage",
    "get_flux_layer_spec",
    "gpt_layer_spec",
    "on_flux",
    "save_gathered_inputs",
]
