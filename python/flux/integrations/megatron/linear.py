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
from flux.calls import argument_types, transforms
from flux.fp8.scales import OUT
from flux.layers import DeferredGrads, Fp8, column_linear, row_linear
from flux.layers.functional import SaveGathered
from flux.ops.workspaces import expect_graphs

try:
    # Megatron enters contexts of Transformer Engine around the layers that multiply in fp8. Without it there
    # are none, and all layers do.
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
except ImportError:
    FP8GlobalStateManager = None

_SCALINGS: dict[str, Any] = {"tensorwise": "tensor", "blockwise": "block"}
_FLAGS = {  # of Megatron-LM's scripts, for options whose values flux does not serve
    "fp4": "no --fp4-format",
    "fp8": "--fp8-format hybrid, and --moe-grouped-gemm for experts",
    "fp8_param": "no --fp8-param-gather",
    "fp8_recipe": "--fp8-recipe tensorwise",
    "first_last_layers_bf16": "no --first-last-layers-bf16",
    "quant_recipe": "no --te-precision-config-file",
}
_GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}
_Module: Any = torch.nn.Module  # with attributes of Megatron's classes
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

        how = {"config": config, "init_method": config.init_method, "bias": False}
        layer = FluxColumnParallelLinear(32, 8 * p, **how, gather_output=False)
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

        how = {"config": config, "init_method": config.init_method, "bias": False}
        layer = FluxColumnParallelLinear(32, 8 * p, **how, gather_output=False)
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


class FluxLinear(_Module):  # type: ignore[misc]
    """Base of both layers. Must precede Megatron's class among the bases."""

    # How its weight is split: Megatron-Bridge and Megatron-FSDP ask so modules whose names they do not know.
    tensor_model_parallel = True
    partition_dim: int

    def __init__(self, *args: Any, config: Any, **options: Any) -> None:
        recipe = _recipe_of(type(self).__name__, config, options.get("is_expert", False))
        # Megatron refuses the option without Apex, which flux does not need.
        quiet = copy.copy(config)
        quiet.gradient_accumulation_fusion = False
        super().__init__(*args, config=quiet, **options)
        self.config = config
        self._begin(recipe, getattr(config, "delay_wgrad_compute", False))
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
        if transforms.enabled(x.device):
            return None
        if x.dtype not in (OUT if self._fp8() else DTYPES) or weight.dtype != x.dtype:
            return f"x is {x.dtype} and the weight {weight.dtype}"
        return None

    def _fp8(self) -> Fp8 | None:
        """How this call multiplies in fp8, or None."""
        is_on = FP8GlobalStateManager is None or FP8GlobalStateManager.is_fp8_enabled()
        return self.flux_fp8 if is_on else None

    def _begin(self, recipe: Fp8 | None, is_delayed: bool) -> None:
        """After Megatron's constructor. is_delayed: backward_dw computes gradients of the weight."""
        prepare_capture(self.config, self.tp_group)
        self.flux_fp8 = recipe
        self.tp_size = self.tp_group.size()  # for Megatron-Bridge's adapters of Mamba layers
        self.flux_deferred = DeferredGrads() if is_delayed else None
        self._flux_hooks: list[Callable[[], None]] = []
        if is_delayed and self.weight is not None:
            # Tells Megatron's data parallelism to register its hook here, not with autograd.
            self.weight.skip_backward_post_hook = True

    def _how(self, weight: torch.Tensor, group: Any, sequence_parallel: bool) -> dict[str, Any]:
        """Arguments of flux's layers."""
        return {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "gradient_accumulation_fusion": collects(self, weight),
            # Nobody calls backward_dw for a weight of another layer.
            "deferred": self.flux_deferred if weight is self.weight else None,
            "fp8": self._fp8(),
        }

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

        how = {"config": config, "init_method": config.init_method, "bias": False}
        layer = FluxColumnParallelLinear(32, 8 * p, **how, gather_output=False)
        product, bias = layer(torch.randn(4, 1, 32))
        assert product.shape[-1] == 8
    """

    partition_dim = 0
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
        how = self._how(weight, options["tp_group"], options["sequence_parallel"])
        return column_linear(input, weight, options["bias"], **how, save_gathered=self.flux_saves_gathered)


class FluxRowParallelLinear(FluxLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear with flux.gemm_rs, and flux.ag_gemm backward; without sequence parallelism
    flux.gemm_ar, and flux.gemm backward.

    Arguments, parameters, state and results are those of Megatron's class.

    Raises:
        ValueError: config asks for fp4, or for fp8 with another recipe than tensorwise and blockwise.

    Example::

        from flux.integrations.megatron import FluxRowParallelLinear

        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        layer = FluxRowParallelLinear(8 * p, 32, **how, input_is_parallel=True)
        total, bias = layer(torch.randn(4, 1, 8))
        assert total.shape[-1] == 32
    """

    partition_dim = 1

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
        how = self._how(self.weight, self.tp_group, self.sequence_parallel)
        output = row_linear(input_, self.weight, **how)
        if self.skip_bias_add:
            return output, self.bias
        # Not added by flux: the gradient of the bias must be that of the rank's rows, as Megatron sums it.
        return (output if self.bias is None else output + self.bias), None


def adopt(layer: torch.nn.Module, cls: type[FluxLinear], may_be_fp8: bool = True) -> None:
    """Makes a layer of Megatron's class one of flux's, whose base that class is, in place."""
    recipe = _recipe_of(cls.__name__, layer.config, getattr(layer, "is_expert", False))
    layer.__class__ = cls
    assert isinstance(layer, FluxLinear)
    # As stock layers: Megatron calls backward_dw of some of them only, not of the output layer.
    layer._begin(recipe if may_be_fp8 else None, is_delayed=False)
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


def _recipe_of(name: str, config: Any, is_expert: bool = False) -> Fp8 | None:
    """How a layer with this config multiplies; None: in the dtype of its operands.

    Raises:
        ValueError: in fp4, or in fp8 in a way that flux.layers does not. Megatron's own classes compute in
            neither, so the layer would silently train in 16 bits.
    """
    if not (config.fp8 or config.fp4):
        return None
    # Some releases have an enumeration here, some plain strings.
    recipe = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    unserved = {
        f"fp4: expected None, got {config.fp4!r}": config.fp4,
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
            flags = _FLAGS[reason.partition(":")[0]]
            raise ValueError(f"{name}: config.{reason}; in scripts: {flags}; or leave such specs alone")
    return Fp8(_SCALINGS[recipe], grad_dtype=_GRADIENTS[config.fp8], weight_grads=config.fp8_wgrad)
