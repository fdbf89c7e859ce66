"""The baselines of flux's layers: Megatron-Core's layers, and the same algorithm on plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flux.bench.cases.common import Context
from flux.comm.group import reduce_scatter
from flux.ops.ways.all_gather import torch_all_gather

Make = Callable[[int, int], nn.Module]
Makes = tuple[Make, Make]
Tensor = torch.Tensor


def megatron_layers(context: Context) -> tuple[Makes, Makes]:
    """Makers of column- and row-parallel layers from (in_features, out_features): Megatron's, and flux's."""
    # Megatron calls collectives by names that newer torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not context.cuda:
        # Megatron allocates on "the current CUDA device" whatever the model is on. Only in this process,
        # which does nothing but measure.
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
        torch.cuda.current_device = lambda: context.device  # type: ignore[assignment,return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are not needed
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig

        from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(context.world_size)
        # The first three are for attention and not for single layers.
        config = TransformerConfig(
            num_layers=1,
            num_attention_heads=context.world_size,
            hidden_size=context.world_size,
            tensor_model_parallel_size=context.world_size,
            sequence_parallel=True,
            params_dtype=context.dtype,
            use_cpu_initialization=not context.cuda,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
    common = {"config": config, "init_method": nn.init.zeros_, "bias": False, "skip_bias_add": True}

    def makes(column: Any, row: Any) -> Makes:
        return (
            lambda k, n: column(k, n, gather_output=False, **common),
            lambda k, n: row(k, n, input_is_parallel=True, **common),
        )

    ours = makes(FluxColumnParallelLinear, FluxRowParallelLinear)
    return makes(ColumnParallelLinear, RowParallelLinear), ours


def torch_layers(context: Context) -> Makes:
    """Makers of layers with Megatron's algorithm (arXiv 2205.05198, section 4.2), with torch only."""
    p = context.world_size
    return (
        lambda k, n: _Layer(_column, n // p, k, context),
        lambda k, n: _Layer(_row, n, k // p, context),
    )


class _Layer(nn.Module):
    def __init__(self, apply: Any, n: int, k: int, context: Context) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k, device=context.device, dtype=context.dtype))
        self.function, self.group = apply, context.group

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x, self.weight, self.group)
        return result


class _Column(torch.autograd.Function):
    """Gathers x, again in the backward pass. There the gather and the scatter overlap with GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        everything, gathering = _gather(x, group)
        gathering.wait()
        return everything @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        everything, gathering = _gather(x, ctx.group)
        whole = grad @ weight
        gathering.wait()
        grad_x, scattering = _scatter(whole, ctx.group)
        grad_weight = grad.flatten(0, -2).t() @ everything.flatten(0, -2)
        scattering.wait()
        return grad_x, grad_weight, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        result, scattering = _scatter(x @ weight.t(), group)
        scattering.wait()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        everything, gathering = _gather(grad, ctx.group)
        gathering.wait()
        return everything @ weight, everything.flatten(0, -2).t() @ x.flatten(0, -2), None


_column: Any = _Column.apply
_row: Any = _Row.apply


def _gather(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    everything = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return everything, torch_all_gather()(everything, x.contiguous(), group=group, async_op=True)


def _scatter(whole: Tensor, group: Any) -> tuple[Tensor, Any]:
    own = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    return own, reduce_scatter()(own, whole.contiguous(), group=group, async_op=True)
