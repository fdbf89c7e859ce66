"""Conversion of specs, Megatron's descriptions of which class builds which part of a model, and of built
models: layers that no spec names are converted in place, and which layers run on flux is told.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from flux._log import say_once
from flux.integrations.megatron.linear import (
    FluxColumnParallelLinear,
    FluxLinear,
    FluxRowParallelLinear,
    adopt,
)
from flux.integrations.megatron.moe import GROUPED_LINEARS, OF_TRANSFORMER_ENGINE, FluxMoELayer
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
# Multi-latent attention compares the classes of these with its own, and refuses others.
_COMPARED = ("linear_q_down_proj", "linear_kv_down_proj")
_FLUX = frozenset(_REPLACEMENTS.values())
_LINEARS = (ColumnParallelLinear, RowParallelLinear)


def convert_spec(spec: Any, *, allow_unchanged: bool = False) -> Any:
    """A copy of a spec, of a layer, a block or any part of them, with flux's classes in it.

    Replaced are column- and row-parallel linear layers, Megatron's and Transformer Engine's, layers of
    experts, and torch's norm, which knows no sequence parallelism. Everything else stays: the attention
    itself, and the two projections of multi-latent attention for which it accepts only Megatron's classes.
    convert_model replaces those in a built model, and the output layer. The logger `flux` says what was
    replaced and what stays: a warning, if that includes linear layers or functions, which cannot be searched.

    Args:
        spec: ModuleSpec, submodules, functools.partial, class, or a list, tuple or dict of those.
        allow_unchanged: return a copy also if there is nothing to replace.

    Returns:
        The copy; `spec` stays as it is.

    Raises:
        ValueError: nothing in `spec` was replaced, and `allow_unchanged` is false.

    Example::

        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from flux.integrations.megatron import FluxRowParallelLinear, convert_spec

        spec = convert_spec(get_gpt_layer_local_spec())
        assert spec.submodules.self_attention.submodules.linear_proj is FluxRowParallelLinear
    """
    conversion = _Conversion()
    converted = conversion.of(spec, "")
    if not conversion.replaced and not allow_unchanged:
        raise ValueError(
            f"convert_spec: spec: expected layers that flux replaces, got {conversion.summary()}"
        )
    say_once(
        f"flux: convert_spec: {conversion.summary()}", logging.WARNING if conversion.missed else logging.INFO
    )
    return converted


class _Conversion:
    """A walk through a spec, and what it found: paths of fields with the names of their classes."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self.kept: list[str] = []
        # Of `kept`: what may hold products and communication that flux has a class for.
        self.missed: list[str] = []

    def of(self, part: Any, path: str, is_owner: bool = False) -> Any:
        """The copy of a part. `is_owner`: a class whose parts are beside it in the spec."""
        if isinstance(part, Hashable) and part in _REPLACEMENTS:
            self.replaced.append(f"{path} {_name(part)}".strip())
            return _REPLACEMENTS[part]
        if isinstance(part, functools.partial):
            func = self.of(part.func, path, is_owner="submodules" in part.keywords)
            args = self.of(part.args, path)
            return type(part)(func, *args, **self.of(part.keywords, path))
        if isinstance(part, types.MethodType) and isinstance(part.__self__, type):
            return getattr(self.of(part.__self__, path, is_owner), part.__name__)
        if isinstance(part, dict):
            return {key: self.of(value, _join(path, key)) for key, value in part.items()}
        if isinstance(part, tuple) and len(part) == 2 and str(part[0]).startswith("megatron."):
            # Megatron's form for a class that is imported when it is built.
            found = getattr(importlib.import_module(part[0]), part[1])
            made = self.of(found, path, is_owner)
            return part if made is found else made
        if isinstance(part, (list, tuple)):
            parts = [self.of(entry, _join(path, i)) for i, entry in enumerate(part)]
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return self._of_fields(part, path)
        self._keep(part, path, is_owner)
        return part

    def _of_fields(self, part: Any, path: str) -> Any:
        made = copy.copy(part)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name in _COMPARED:
                self._keep(value, _join(path, field.name), False)
                continue
            is_owner = field.name == "module" and getattr(part, "submodules", None) is not None
            # Not setattr, which frozen dataclasses refuse.
            object.__setattr__(made, field.name, self.of(value, _join(path, field.name), is_owner))
        return made

    def _keep(self, part: Any, path: str, is_owner: bool) -> None:
        if isinstance(part, type) and part in _FLUX:
            self.replaced.append(f"{path} {_name(part)}".strip())
            return
        is_hidden = isinstance(part, types.FunctionType) and (
            part.__closure__ is not None or part.__name__ == "<lambda>"
        )
        if is_owner or not (isinstance(part, type) or is_hidden) or _name(part) == "IdentityOp":
            return
        self.kept.append(f"{path} {_name(part)}".strip())
        # Grouped experts' weights stay in Transformer Engine's modules; flux's layer multiplies by them.
        if is_hidden or ("Linear" in _name(part) and part not in GROUPED_LINEARS):
            self.missed.append(self.kept[-1])

    def summary(self) -> str:
        """One line, with every path once however many layers share it."""
        replaced, kept = (list(dict.fromkeys(found)) for found in (self.replaced, self.kept))
        return (
            f"{len(self.replaced)} on flux ({'; '.join(replaced) or 'none'}), "
            f"{len(self.kept)} stay Megatron's ({'; '.join(kept) or 'none'})"
        )


def _join(path: str, name: object) -> str:
    # Not the numbers of layers: those that are alike are named once.
    return path if isinstance(name, int) or name in ("module", "submodules") else f"{path}.{name}".lstrip(".")


def _name(part: Any) -> str:
    # Without Transformer Engine, its layers are stand-ins without a name.
    stand_ins = (name for name, value in vars(te).items() if value is part)
    return str(getattr(part, "__name__", None) or next(stand_ins, type(part).__name__))


def get_flux_layer_spec(
    config: Any, *, use_transformer_engine: bool | None = None, vp_stage: int | None = None
) -> Any:
    """The spec of a GPT's layers and final norm on flux, for GPTModel's `transformer_layer_spec`.

    Args:
        config: the model's TransformerConfig.
        use_transformer_engine: start from Megatron's spec for it, whose attention is kept; None: if it is
            installed.
        vp_stage: the virtual pipeline stage, of interleaved schedules.

    Returns:
        TransformerBlockSubmodules, for this rank's pipeline stage.

    Example::

        from flux.integrations.megatron import get_flux_layer_spec

        spec = get_flux_layer_spec(config, use_transformer_engine=False)
        assert len(spec.layer_specs) == config.num_layers
    """
    use_te = gpt_layer_specs.HAVE_TE if use_transformer_engine is None else use_transformer_engine
    stock = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm, vp_stage=vp_stage
    )
    # A pipeline stage may have no layers.
    return convert_spec(stock, allow_unchanged=not stock.layer_specs)


class FluxTransformerLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer, which chooses its parts itself: those of the stock layer for this config
    and layer number, converted.

    Arguments, parameters, state and results are those of Megatron's class.

    Args:
        config: the model's TransformerConfig.
        submodules: without effect; Megatron passes it.
        layer_number: of the layer in its pipeline stage, from 1.
        options: other arguments of Megatron's class.

    Raises:
        ValueError: config asks for a model whose layers differ in class.

    Example::

        from megatron.core.transformer.transformer_layer import TransformerLayer

        from flux.integrations.megatron import FluxTransformerLayer

        assert issubclass(FluxTransformerLayer, TransformerLayer)
    """

    def __init__(self, config: Any, submodules: Any = None, layer_number: int = 1, **options: Any) -> None:
        offset = get_transformer_layer_offset(config, options.get("vp_stage"))
        asked = getattr(config, "transformer_impl", "transformer_engine")
        specs = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config,
            gpt_layer_specs.HAVE_TE and asked == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
        spec = specs[offset + layer_number - 1]
        if spec.module is not TransformerLayer:
            raise ValueError(
                f"FluxTransformerLayer: config: expected TransformerLayer for layer {offset + layer_number}, "
                f"got {_name(spec.module)}; use get_flux_layer_spec"
            )
        super().__init__(config, convert_spec(spec.submodules), layer_number, **options)


# For Megatron's `--spec flux.integrations.megatron gpt_layer_spec`, which takes no function: its layers read
# the config when they are built. The final norm is Megatron's choice: for sequence parallelism it needs Apex
# or Transformer Engine.
gpt_layer_spec = ModuleSpec(module=FluxTransformerLayer)


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
            ours: Any = _REPLACEMENTS[type(module)]  # type: ignore[index]
            adopt(module, ours, may_be_fp8=module in numbered)
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
    if isinstance(module, (FluxLinear, FluxMoELayer)):
        yield name, module.why_never()
    elif isinstance(module, VocabParallelEmbedding):
        yield name, _EMBEDDING
    elif isinstance(module, (ColumnParallelLinear, RowParallelLinear, MoELayer, *OF_TRANSFORMER_ENGINE)):
        yield name, f"its class is {type(module).__name__}"
    skipped = module.experts if isinstance(module, MoELayer) else None
    for part, child in module.named_children():
        if child is not skipped:
            yield from _coverage(child, f"{name}.{part}".lstrip("."))
