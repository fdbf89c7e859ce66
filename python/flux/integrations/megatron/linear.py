"""Megatron's two parallel linear layers. Only the product and its communication are flux's; parameters,
initialisation, checkpoints and everything that flux does not do are Megatron's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from flux._log import say_once
from flux.calls import argument_types
from flux.integrations.megatron import fp8
from flux.layers import DeferredGrads, Fp8, column_linear, row_linear
from flux.layers.functional import SaveGathered
from flux.ops import autocast
from flux.ops.workspaces import expect_graphs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def accumulate_into_main_grad(model: torch.nn.Module, enabled: bool = True) -> None:
    """Turns gradient accumulation fusion on in flux's layers of a built model, or off.

    For models with stock layers too, such as GPTModel's output layer: those refuse the option
    `gradient_accumulation_fusion` where Apex is missing. Build the model without it, then call this.

    Args:
        model: in which flux's layers are looked for.
        enabled: whether they add gradients to `main_grad` of a weight that has one.

    Example::

        from flux.integrations.megatron import FluxColumnParallelLinear, accumulate_into_main_grad

        layer = FluxColumnParallelLinear(
            32, 8 * p, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        accumulate_into_main_grad(layer)
        layer.weight.main_grad = torch.zeros(8, 32)
        layer(torch.ones(4, 1, 32, requires_grad=True))[0].sum().backward()
        assert (layer.weight.main_grad != 0).any()
    """
    for module in model.modules():
        if hasattr(module, "flux_accumulates"):
            module.flux_accumulates = enabled  # type: ignore[assignment]


def save_gathered_inputs(model: torch.nn.Module, save: SaveGathered = "auto") -> None:
    """Chooses whether flux's column-parallel layers of a built model keep the x that they gathered.

    As built, they gather x again in the backward pass, as Megatron's do, which saves memory.

    Args:
        model: in which flux's layers are looked for.
        save: True: keep it, p times the memory of x. False: gather it again. "auto": gather it again if the
            plan does so beside a GEMM, else keep it; outside of CUDA graphs it does so for shards of 8 MiB
            and more.

    Raises:
        TypeError, ValueError: `save` is none of these.

    Example::

        from flux.integrations.megatron import FluxColumnParallelLinear, save_gathered_inputs

        layer = FluxColumnParallelLinear(
            32, 8 * p, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        save_gathered_inputs(layer, "auto")
    """
    argument_types.flag_or_auto("save_gathered_inputs", "save", save)
    for module in model.modules():
        if isinstance(module, FluxColumnParallelLinear):
            module.flux_saves_gathered = save


def prepare_capture(config: Any, group: Any) -> None:
    """If Megatron is to capture CUDA graphs: lets the steps before a capture run as the captured one, so that
    all workspaces are as large as it needs them.
    """
    if getattr(config, "cuda_graph_impl", "none") != "none":
        expect_graphs(group=group)


def collects(layer: torch.nn.Module, *weights: torch.Tensor) -> bool:
    """Whether a layer's gradients of its weights go into their main_grad."""
    # Megatron-FSDP allocates its buffers during the backward pass, and expects them to be overwritten.
    return bool(layer.flux_accumulates) and not any(hasattr(w, "__fsdp_param__") for w in weights)


class FluxLinear(torch.nn.Module):
    """Base of both layers. Must precede Megatron's class among the bases."""

    config: Any
    tp_group: Any
    weight: Any
    bias: Any
    sequence_parallel: bool
    input_is_parallel: bool
    skip_bias_add: bool
    flux_accumulates: bool
    flux_deferred: DeferredGrads | None
    flux_fp8: Fp8 | None

    def __init__(self, *args: Any, config: Any, **options: Any) -> None:
        recipe = fp8.recipe_of(type(self).__name__, config, options.get("is_expert", False))
        # Megatron refuses the option without Apex, which flux does not need.
        quiet = copy.copy(config)
        quiet.gradient_accumulation_fusion = False
        super().__init__(*args, config=quiet, **options)
        self.config = config
        prepare_capture(config, self.tp_group)
        self.flux_fp8 = recipe
        self._delay(getattr(config, "delay_wgrad_compute", False))
        self.flux_accumulates = config.gradient_accumulation_fusion
        self.gradient_accumulation_fusion = (
            config.gradient_accumulation_fusion and megatron_layers._grad_accum_fusion_available
        )

    def why_never(self) -> str | None:
        """Why all calls run in Megatron's own code, or None. Equal on all ranks."""
        if self.tp_group.size() == 1 and self.flux_fp8 is None:  # Megatron's own code has no fp8
            return "the tensor-parallel group has one rank"
        if getattr(self, "explicit_expert_comm", False):
            return "the token dispatcher communicates for the layers of experts"
        if getattr(self, "gtp_remat_size", 1) > 1:
            return "its weight is split over another group too (generalized tensor parallelism)"
        return None

    def _runs_on_flux(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether this call does; if not, the log says why. Equal on all ranks."""
        reason = self._why_not(x, weight)
        if reason is not None:
            tell(type(self).__name__, reason + (" (not in fp8)" if self._fp8() else ""))
        return reason is None

    def _why_not(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        """Why this call runs in Megatron's own code, or None. Equal on all ranks."""
        never = self.why_never()
        if never is not None:
            return never
        if getattr(self.config, "_cpu_offloading_context", None) is not None:
            return "activations are offloaded to the CPU"
        if autocast.enabled(x.device):
            return None
        if x.dtype not in (fp8.DTYPES if self._fp8() else DTYPES) or weight.dtype != x.dtype:
            return f"x is {x.dtype} and the weight {weight.dtype}"
        return None

    def _fp8(self) -> Fp8 | None:
        """How this call multiplies in fp8, or None."""
        return self.flux_fp8 if fp8.is_on() else None

    def _delay(self, is_delayed: bool) -> None:
        """Whether backward_dw computes gradients of the weight."""
        self.flux_deferred = DeferredGrads() if is_delayed else None
        self._flux_hooks: list[Callable[[], None]] = []
        if is_delayed and self.weight is not None:
            # Tells Megatron's data parallelism to register its hook here, not with autograd.
            self.weight.skip_backward_post_hook = True

    def _deferred_for(self, weight: torch.Tensor) -> DeferredGrads | None:
        # Nobody calls backward_dw for a weight of another layer.
        return self.flux_deferred if weight is self.weight else None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Megatron's data parallelism: what backward_dw calls when the weight's gradient is complete."""
        self._flux_hooks.append(hook)

    def backward_dw(self) -> None:
        """The gradient of the weight, of the oldest backward pass that left it (delay_wgrad_compute)."""
        if self.flux_deferred is None:
            return
        if self.flux_deferred:  # else Megatron's own code has computed it
            self.flux_deferred.compute()
        for hook in self._flux_hooks:
            hook()


class FluxColumnParallelLinear(FluxLinear, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear with flux.ag_gemm, and flux.gemm_rs backward; without sequence
    parallelism flux.gemm, and flux.gemm_ar backward.

    Arguments, parameters, state and results are those of Megatron's class.

    Raises:
        ValueError: config asks for fp4, or for fp8 with another recipe than tensorwise and blockwise.

    Example::

        from flux.integrations.megatron import FluxColumnParallelLinear

        layer = FluxColumnParallelLinear(
            32, 8 * p, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        product, bias = layer(torch.randn(4, 1, 32))
        assert product.shape[-1] == 8
    """

    flux_saves_gathered: SaveGathered = False

    def why_never(self) -> str | None:
        if self.grad_output_buffer is not None and self.config.defer_embedding_wgrad_compute:
            return "the gradient of its weight is deferred"
        if self.disable_grad_reduce and not self.sequence_parallel:
            return "somebody else sums the gradient of its input"
        return super().why_never()

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not self._runs_on_flux(input, weight):
            return super()._forward_impl(input, weight, *args, **options)
        return column_linear(
            input,
            weight,
            options["bias"],
            group=options["tp_group"],
            sequence_parallel=options["sequence_parallel"],
            save_gathered=self.flux_saves_gathered,
            gradient_accumulation_fusion=collects(self, weight),
            deferred=self._deferred_for(weight),
            fp8=self._fp8(),
        )


class FluxRowParallelLinear(FluxLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear with flux.gemm_rs, and flux.ag_gemm backward; without sequence parallelism
    flux.gemm_ar, and flux.gemm backward.

    Arguments, parameters, state and results are those of Megatron's class.

    Raises:
        ValueError: config asks for fp4, or for fp8 with another recipe than tensorwise and blockwise.

    Example::

        from flux.integrations.megatron import FluxRowParallelLinear

        layer = FluxRowParallelLinear(
            8 * p,
            32,
            config=config,
            init_method=config.init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        total, bias = layer(torch.randn(4, 1, 8))
        assert total.shape[-1] == 32
    """

    @property
    def replicated_parameters(self) -> tuple[str, ...]:
        """For flux.layers.reduce_replicated_grads: each rank adds the bias to its rows."""
        return ("bias",) if self.sequence_parallel and self.bias is not None else ()

    def why_never(self) -> str | None:
        return super().why_never() if self.input_is_parallel else "its input is not split over ranks"

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._runs_on_flux(input_, self.weight):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return result
        output = row_linear(
            input_,
            self.weight,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=collects(self, self.weight),
            deferred=self.flux_deferred,
            fp8=self._fp8(),
        )
        if self.skip_bias_add:
            return output, self.bias
        # Not added by flux: the gradient of the bias must be that of the rank's rows, as Megatron sums it.
        return (output if self.bias is None else output + self.bias), None


def adopt(layer: torch.nn.Module, cls: type[FluxLinear], may_be_fp8: bool = True) -> None:
    """Makes a layer of Megatron's class one of flux's, whose base that class is, in place."""
    recipe = fp8.recipe_of(cls.__name__, layer.config, getattr(layer, "is_expert", False))
    layer.__class__ = cls
    assert isinstance(layer, FluxLinear)
    prepare_capture(layer.config, layer.tp_group)
    layer.flux_fp8 = recipe if may_be_fp8 else None
    # As stock layers: Megatron calls backward_dw of some of them only, not of the output layer.
    layer._delay(False)
    layer.flux_accumulates = layer.gradient_accumulation_fusion
    if getattr(layer.config, "delay_wgrad_compute", False):
        say_once(
            f"flux: convert_model: {cls.__name__} computes gradients of weights in the backward pass, as the "
            "layer did before, also with delay_wgrad_compute; convert_spec makes layers that delay them",
            logging.INFO,
        )


def tell(layer: str, reason: str) -> None:
    """Logs, once for each layer class and reason."""
    say_once(f"flux: {layer} runs in Megatron's own code: {reason}")
