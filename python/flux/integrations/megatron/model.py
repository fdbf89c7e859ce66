"""Built models: layers that no spec names are converted in place, and which layers run on flux is told."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.moe.moe_layer import MoELayer

from flux._log import say_once
from flux.integrations.megatron.linear import (
    FluxColumnParallelLinear,
    FluxLinear,
    FluxRowParallelLinear,
    adopt,
)
from flux.integrations.megatron.moe import FluxMoELayer

_LINEARS: dict[type, type[FluxLinear]] = {
    ColumnParallelLinear: FluxColumnParallelLinear,
    RowParallelLinear: FluxRowParallelLinear,
}
# Stand-ins if Transformer Engine is missing.
_OF_TRANSFORMER_ENGINE = tuple(
    cls
    for name, cls in vars(te).items()
    if isinstance(cls, type) and name.startswith("TE") and "Linear" in name
)


def convert_model(model: torch.nn.Module, *, allow_unchanged: bool = False) -> dict[str, str | None]:
    """Puts layers of Megatron's own classes in a built model on flux, in place.

    For layers that no spec names, such as the output layer, and for models whose spec is somebody else's.
    Parameters, hooks and state stay as they are. Call it before the model is wrapped for data parallelism,
    compiled or captured. Layers of Transformer Engine own their communication: convert their spec instead.
    Its grouped experts do not, so layers of experts are put on flux here too.
    The logger `flux` says what runs on flux; a warning, if layers other than embeddings do not.

    Args:
        model: GPTModel, HybridModel or any other module.
        allow_unchanged: do not raise if no layer runs on flux afterwards.

    Returns:
        As `coverage`.

    Raises:
        ValueError: no layer runs on flux afterwards, and `allow_unchanged` is false; or a config asks for
            fp4, or for fp8 with another recipe than tensorwise and blockwise.

    Example::

        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from flux.integrations.megatron import convert_model

        layer = ColumnParallelLinear(32, 8 * p, config=config, init_method=config.init_method, bias=False)
        assert convert_model(torch.nn.Sequential(layer)) == {"0": None}
    """
    # Megatron multiplies in fp8 in its numbered layers only, not in the output layer.
    numbered = {
        part for module in model.modules() if hasattr(module, "layer_number") for part in module.modules()
    }
    for module in list(model.modules()):
        if type(module) in _LINEARS:
            adopt(module, _LINEARS[type(module)], may_be_fp8=module in numbered)
        elif type(module) is MoELayer:
            FluxMoELayer.adopt(module)
        elif isinstance(module, FluxMoELayer):
            module.lay_out_experts()  # they may have got other weights since
    found = coverage(model)
    left = {name: reason for name, reason in found.items() if reason is not None}
    summary = f"{len(found) - len(left)} of {len(found)} parallel layers run on flux"
    if left:
        summary += f"; not {'; '.join(f'{name}: {reason}' for name, reason in left.items())}"
    if len(left) == len(found) and not allow_unchanged:
        raise ValueError(f"convert_model: model: expected layers that flux serves, but {summary}")
    is_bad = any(reason != _EMBEDDING for reason in left.values())
    say_once(f"flux: convert_model: {summary}", logging.WARNING if is_bad else logging.INFO)
    return found


def on_flux(builder: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds a model from flags, such as `gpt_builder` of Megatron-LM's gpt_builders.py, with
    convert_model after it.

    The builder chooses layers by its flags as before. Layers of Transformer Engine stay; give the flag
    `--spec flux.integrations.megatron gpt_layer_spec` too, and only what no spec names is left to convert.

    Args:
        builder: returns a model, on a stage of a pipeline the stage's part. Its arguments are passed on.

    Returns:
        The function, with the name and arguments of `builder`.

    Raises:
        ValueError: when called, as convert_model, unless the stage has no layers.

    Example::

        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from flux.integrations.megatron import coverage, on_flux

        @on_flux
        def builder(width):
            return ColumnParallelLinear(32, width, config=config, init_method=config.init_method, bias=False)

        assert coverage(builder(8 * p)) == {"": None}
    """

    @functools.wraps(builder)
    def build(*args: Any, **options: Any) -> Any:
        model = builder(*args, **options)
        decoder = getattr(model, "decoder", None)
        convert_model(model, allow_unchanged=len(getattr(decoder, "layers", [decoder])) == 0)
        return model

    return build


def coverage(model: torch.nn.Module) -> dict[str, str | None]:
    """Which tensor- or expert-parallel layers of a built model run on flux.

    Args:
        model: GPTModel, HybridModel or any other module.

    Returns:
        For the name of each layer that communicates, None if its calls run on flux, or why they do not. A
        layer of experts counts once. Calls may still be left to Megatron for their dtype; the log says so.

    Example::

        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from flux.integrations.megatron import coverage

        layer = ColumnParallelLinear(32, 8 * p, config=config, init_method=config.init_method, bias=False)
        assert coverage(layer) == {"": "its class is ColumnParallelLinear"}
    """
    return dict(_coverage(model, ""))


_EMBEDDING = "it looks rows up: there is no product to fuse its communication with"


def _coverage(module: torch.nn.Module, name: str) -> Iterator[tuple[str, str | None]]:
    skipped: Any = None
    if isinstance(module, (FluxLinear, FluxMoELayer)):
        yield name, module.why_never()
    elif isinstance(module, VocabParallelEmbedding):
        yield name, _EMBEDDING
    elif isinstance(module, (ColumnParallelLinear, RowParallelLinear, MoELayer, *_OF_TRANSFORMER_ENGINE)):
        yield name, f"its class is {type(module).__name__}"
    if isinstance(module, MoELayer):
        skipped = module.experts
    for part, child in module.named_children():
        if child is not skipped:
            yield from _coverage(child, f"{name}.{part}".lstrip("."))
