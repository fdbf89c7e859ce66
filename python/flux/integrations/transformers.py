"""Tensor-parallel styles for the `tp_plan` of Hugging Face transformers.

Such a plan keeps activations whole on every rank: the layer that ends attention or an MLP is row-parallel and
all-reduces. That GEMM and its all-reduce become flux.gemm_ar. The column-parallel layers communicate nothing
and stay as they are.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

try:
    from transformers.distributed import tensor_parallel as hf
except ImportError as error:
    raise ImportError(
        f"flux.integrations.transformers: expected transformers 5.16 or newer, got {transformers.__version__}"
    ) from error

from flux._log import say_once
from flux.integrations.dtensor import gemm_ar, local_part, why_not_linear

__all__ = ["FluxRowwiseParallel", "install", "register", "uninstall"]

STYLE = "flux_rowwise"

_registry: Any = hf.ALL_PARALLEL_STYLES
# While installed: the original style "rowwise".
_replaced: list[Any] = []


class FluxRowwiseParallel(hf.RowwiseParallel):  # type: ignore[misc]
    """The style "rowwise" through flux.gemm_ar, forward and backward.

    Serves nn.Linear with plain floating-point weights whose in_features divide by the ranks. Quantised and
    other layers, and inputs that are DTensors, take the style of transformers.

    Example::

        from flux.integrations import transformers as flux_transformers

        flux_transformers.register()
        styles = flux_transformers.hf.ALL_PARALLEL_STYLES
        assert isinstance(styles["flux_rowwise"], flux_transformers.FluxRowwiseParallel)
    """

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        super().install_forward(module, mesh)
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        why_not = why_not_linear(module, group.size(), 1)
        if why_not is None and getattr(module, "_hf_quantized_needs_local_tp", False):
            why_not = "it is quantised"
        if why_not is None and (self.input_layouts != Shard(-1) or self.output_layouts != Replicate()):
            why_not = f"layouts are {self.input_layouts} and {self.output_layouts}"
        if why_not is not None:
            stays = f"transformers: {type(module).__name__} stays with transformers: {why_not}"
            say_once(stays, logging.INFO)
            return module
        name, stock = str(group.group_name), module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = local_part(module.weight), local_part(module.bias)
            if isinstance(x, DTensor) or not self.use_local_output or x.dtype != weight.dtype:
                out: torch.Tensor = stock(x)
                return out
            return gemm_ar(x, weight, bias, name)

        module.forward = forward
        return module


def register() -> None:
    """Adds the style "flux_rowwise", for plans that name it.

    Example::

        from flux.integrations import transformers as flux_transformers

        flux_transformers.register()
        tp_plan = {"model.layers.*.mlp.down_proj": "flux_rowwise"}  # for from_pretrained
    """
    _registry.register(STYLE, FluxRowwiseParallel())


def install() -> None:
    """Puts flux behind the style "rowwise" too, so that every model's own plan (``tp_plan="auto"``) uses it.

    Process-wide, for models that are loaded later; a second call does nothing.

    Example::

        from flux.integrations import transformers as flux_transformers

        flux_transformers.install()  # before from_pretrained(..., tp_plan="auto")
        flux_transformers.uninstall()
    """
    register()
    if not _replaced:
        _replaced.append(_registry["rowwise"])
        _registry.register("rowwise", FluxRowwiseParallel())


def uninstall() -> None:
    """Gives the style "rowwise" back to transformers. Models that are loaded keep what they have.

    Example::

        from flux.integrations import transformers as flux_transformers

        flux_transformers.install()
        flux_transformers.uninstall()  # models loaded from here on run without flux
    """
    while _replaced:
        _registry.register("rowwise", _replaced.pop())
