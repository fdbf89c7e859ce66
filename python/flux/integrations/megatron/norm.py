"""Norms of Megatron models: alone, for sequence parallelism without Apex and Transformer Engine, and before a
column-parallel layer, as Transformer Engine has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

from flux.integrations.megatron.linear import FluxColumnParallelLinear


def make_parameters(
    name: str, config: Any, size: int, like: torch.Tensor | None = None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias of a norm [size], marked for Megatron's reduction under sequence parallelism."""
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        expected = "expected LayerNorm or RMSNorm"
        raise ValueError(f"{name}: config.normalization: {expected}, got {config.normalization!r}")
    device = None if like is None else like.device
    if device is None and not config.use_cpu_initialization:
        device = torch.device("cuda", torch.cuda.current_device())
    fill = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    options = {"device": device, "dtype": config.params_dtype}
    weight = nn.Parameter(torch.full((size,), fill, **options))
    bias = nn.Parameter(torch.zeros(size, **options)) if config.normalization == "LayerNorm" else None
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight, bias


def normalise(
    config: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Layer norm, or for "RMSNorm" root mean square norm, over the last dimension of x.

    The result has the dtype of the weight, as Transformer Engine's: x may be fp32, such as a residual stream.
    """
    dtype = weight.dtype
    common = torch.promote_types(x.dtype, dtype)
    x, weight, bias = x.to(common), weight.to(common), None if bias is None else bias.to(common)
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return nn.functional.rms_norm(x, weight.shape, weight, eps).to(dtype)
    return nn.functional.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


class FluxNorm(nn.Module):
    """The norm that config.normalization names, by torch.

    Args:
        config: Megatron's TransformerConfig.
        hidden_size: length of the last dimension of x.
        eps: added to the variance or mean square.
        options: what Megatron passes to norms besides, without effect here.

    Raises:
        ValueError: config.normalization is neither LayerNorm nor RMSNorm.

    Example::

        from flux.integrations.megatron import FluxNorm

        norm = FluxNorm(config, 32)
        assert norm(torch.randn(4, 1, 32)).shape == (4, 1, 32)
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight, self.bias = make_parameters("FluxNorm", config, hidden_size)

    @property
    def replicated_parameters(self) -> tuple[str, ...]:
        """For flux.layers.reduce_replicated_grads: torch may drop the attributes of its parameters."""
        names = tuple(name for name, _ in self.named_parameters(recurse=False))
        return names if self.config.sequence_parallel else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalise(self.config, x, self.weight, self.bias, self.eps)


class FluxLayerNormColumnParallelLinear(FluxColumnParallelLinear):
    """Norm, then FluxColumnParallelLinear: the place of Transformer Engine's class, with its parameter names.

    The norm is torch's; the rows are gathered after it, so every rank normalises its own only.

    Arguments, parameters, state and results are those of Transformer Engine's class, also of its attributes
    return_layernorm_output and return_layernorm_output_gathered.

    Raises:
        ValueError: config.normalization is neither LayerNorm nor RMSNorm.

    Example::

        from flux.integrations.megatron import FluxLayerNormColumnParallelLinear

        how = {"config": config, "init_method": config.init_method, "bias": False}
        layer = FluxLayerNormColumnParallelLinear(32, 8 * p, **how, gather_output=False)
        product, bias = layer(torch.randn(4, 1, 32))
        assert product.shape[-1] == 8
    """

    return_layernorm_output = return_layernorm_output_gathered = False

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        of_norm = make_parameters("FluxLayerNormColumnParallelLinear", config, input_size, self.weight)
        self.layer_norm_weight, self.layer_norm_bias = of_norm

    @property
    def replicated_parameters(self) -> tuple[str, ...]:
        """As of FluxNorm."""
        of_norm = ("layer_norm_weight", "layer_norm_bias")[: 1 if self.layer_norm_bias is None else 2]
        return of_norm if self.config.sequence_parallel else ()

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        eps = self.config.layernorm_epsilon
        x = normalise(self.config, input_, self.layer_norm_weight, self.layer_norm_bias, eps)
        product, bias = super().forward(x, *args, **options)
        if not self.return_layernorm_output:
            return product, bias
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return ((product, x), None) if bias is None else (product, bias, x)

    def map(self, func: Callable[..., Any], leaf_only: bool = False, **options: Any) -> Any:
        """For Megatron-Bridge, which replaces modules by this: an adapter around this one is to read x after
        the norm. Bridge asks layers for it only if they are Transformer Engine's.
        """
        known = inspect.signature(func).parameters
        made = func(self, **{name: value for name, value in options.items() if name in known})
        if getattr(made, "to_wrap", None) is self:
            self.return_layernorm_output = True
        return made
