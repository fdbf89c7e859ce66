"""Specs: Megatron's descriptions of which class builds which part of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from flux.integrations.megatron.linear import FluxColumnParallelLinear, FluxRowParallelLinear
from flux.integrations.megatron.moe import FluxMoELayer
from flux.integrations.megatron.norm import FluxLayerNormColumnParallelLinear, FluxNorm

# Norms of Apex and Transformer Engine stay: they know sequence parallelism.
_REPLACEMENTS: dict[Hashable, type] = {
    ColumnParallelLinear: FluxColumnParallelLinear,
    RowParallelLinear: FluxRowParallelLinear,
    MoELayer: FluxMoELayer,
    WrappedTorchNorm: FluxNorm,
    te.TEColumnParallelLinear: FluxColumnParallelLinear,
    te.TERowParallelLinear: FluxRowParallelLinear,
    te.TELayerNormColumnParallelLinear: FluxLayerNormColumnParallelLinear,
}


def convert_spec(spec: Any) -> Any:
    """A copy of a spec, of a layer, a block or any part of them, with flux's classes in it.

    Replaced are column- and row-parallel linear layers, Megatron's and Transformer Engine's, layers of
    experts, and torch's norm, which knows no sequence parallelism. Everything else stays, such as the
    attention itself.

    Args:
        spec: ModuleSpec, submodules, or a list or tuple of those.

    Returns:
        The copy; `spec` stays as it is.

    Example::

        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from flux.integrations.megatron import FluxRowParallelLinear, convert_spec

        spec = convert_spec(get_gpt_layer_local_spec())
        assert spec.submodules.mlp.submodules.linear_fc2 is FluxRowParallelLinear
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(convert_spec(part) for part in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: convert_spec(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return _REPLACEMENTS.get(spec, spec) if isinstance(spec, Hashable) else spec


def get_flux_layer_spec(
    config: Any, *, use_transformer_engine: bool | None = None, vp_stage: int | None = None
) -> Any:
    """The spec of a GPT's layers and final norm on flux, for GPTModel's `transformer_layer_spec`.

    Args:
        config: the model's TransformerConfig.
        use_transformer_engine: start from Megatron's spec for it, whose attention is kept; None: if it is
            installed.
        vp_stage: as for Megatron's get_gpt_decoder_block_spec.

    Returns:
        TransformerBlockSubmodules, for this rank's pipeline stage.

    Example::

        from flux.integrations.megatron import get_flux_layer_spec

        spec = get_flux_layer_spec(config, use_transformer_engine=False)
        assert len(spec.layer_specs) == config.num_layers
    """
    use_te = gpt_layer_specs.HAVE_TE if use_transformer_engine is None else use_transformer_engine
    return convert_spec(
        gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_te, normalization=config.normalization, vp_stage=vp_stage
        )
    )


def _dense_layer() -> Any:
    if gpt_layer_specs.HAVE_TE:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return gpt_layer_specs.get_gpt_layer_local_spec()


# A dense layer for Megatron's `--spec flux.integrations.megatron gpt_layer_spec`, which takes no function.
# The final norm is then Megatron's choice: for sequence parallelism it needs Apex or Transformer Engine.
gpt_layer_spec = convert_spec(_dense_layer())
