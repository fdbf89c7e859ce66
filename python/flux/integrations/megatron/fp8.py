"""Megatron's fp8 recipes as those of flux.layers: what a config asks for, and which calls it applies to."""

from __future__ import annotations

from typing import Any

import torch

from flux.fp8.scales import OUT
from flux.layers import Fp8

try:
    # Megatron enters contexts of Transformer Engine around the layers that multiply in fp8. Without it there
    # are none, and all layers do.
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
except ImportError:
    FP8GlobalStateManager = None

# What fp8 layers quantise.
DTYPES = OUT
_SCALINGS: dict[str, Any] = {"tensorwise": "tensor", "blockwise": "block"}
_GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


def recipe_of(name: str, config: Any, is_expert: bool = False) -> Fp8 | None:
    """How a layer with this config multiplies; None: in the dtype of its operands.

    Raises:
        ValueError: in fp4, or in fp8 in a way that flux.layers does not. Megatron's own classes compute in
            neither, so the layer would silently train in 16 bits.
    """
    if config.fp4:
        raise ValueError(f"{name}: config.fp4: expected None, got {config.fp4!r}; leave such specs alone")
    if not config.fp8:
        return None
    # Some releases have an enumeration here, some plain strings.
    recipe = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    unserved = {
        f"fp8_recipe: expected 'tensorwise' or 'blockwise', got {recipe!r}": recipe not in _SCALINGS,
        f"fp8: expected 'e4m3' or 'hybrid', got {config.fp8!r}": config.fp8 not in _GRADIENTS,
        "fp8_param: expected False: flux reads weights in 16 or 32 bits": config.fp8_param,
        "quant_recipe: expected None with fp8: one recipe for all layers": (
            getattr(config, "quant_recipe", None) is not None
        ),
        "fp8: expected None for layers of single experts, whose products flux has in 16 bits only": is_expert,
        "first_last_layers_bf16: expected False without Transformer Engine: its contexts tell layers apart": (
            config.first_last_layers_bf16 and FP8GlobalStateManager is None
        ),
    }
    for reason, holds in unserved.items():
        if holds:
            raise ValueError(f"{name}: config.{reason}; leave such specs alone")
    return Fp8(_SCALINGS[recipe], grad_dtype=_GRADIENTS[config.fp8], weight_grads=config.fp8_wgrad)


def is_on() -> bool:
    """Whether layers that are called here multiply in fp8, if their config says so."""
    return FP8GlobalStateManager is None or bool(FP8GlobalStateManager.is_fp8_enabled())
