"""Transformer Engine 2.3, as far as Megatron-Core builds GPTs from it, for machines without CUDA: the
same classes, arguments, parameter names, results and delayed weight gradients, without its kernels.

`install` must run before Megatron is imported.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from megatron_models import CausalAttention
from stand_ins import modules
from torch import nn

VERSION = "2.3.0"
Tensor = torch.Tensor


def make_weight(shape: tuple[int, ...], init: Callable[[Tensor], Any] | None, **options: Any) -> nn.Parameter:
    weight = torch.empty(shape, **options)
    (init or nn.init.xavier_normal_)(weight)
    return nn.Parameter(weight)


def norm(
    x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """In fp32 inside; the result has the dtype of the weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + (1 if zero_centered else 0)
    if kind == "RMSNorm":
        return nn.functional.rms_norm(x.to(wide), weight.shape, scale, eps).to(weight.dtype)
    shift = None if bias is None else bias.to(wide)
    return nn.functional.layer_norm(x.to(wide), weight.shape, scale, shift, eps).to(weight.dtype)


class ExtraState:
    """What checkpoints have of modules beside parameters: nothing."""

    def get_extra_state(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


def mark(parameter: Any, is_split: bool, dimension: int) -> None:
    """As Transformer Engine marks parameters of parallel layers."""
    parameter.tensor_model_parallel, parameter.partition_dim = is_split, dimension
    parameter.partition_stride = 1


class Linear(ExtraState, nn.Module):
    """With a tensor-parallel group, and gradients that wait for backward_dw."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode = options.get("parallel_mode")
        self.tp_group, self.tp_size = options.get("tp_group"), options.get("tp_size", 1)
        self.sequence_parallel = bool(options.get("sequence_parallel")) and self.tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = options.get("fuse_wgrad_accumulation", False)
        is_row, is_column = (self.parallel_mode == mode for mode in ("row", "column"))
        where = {"dtype": options.get("params_dtype"), "device": options.get("device")}
        self.in_features = in_features // (self.tp_size if is_row else 1)
        self.out_features = out_features // (self.tp_size if is_column else 1)
        self.weight = make_weight((self.out_features, self.in_features), options.get("init_method"), **where)
        self.bias: Any = nn.Parameter(torch.zeros(self.out_features, **where)) if bias else torch.empty(0)
        if self.parallel_mode is not None:
            mark(self.weight, True, int(is_row))
        if bias and self.parallel_mode is not None:
            mark(self.bias, is_column, 0)
        if bias and is_row:
            self.bias.sequence_parallel = self.sequence_parallel
        self.waiting: deque[tuple[Tensor, Tensor]] | None = None
        self.hooks: list[Callable[[], None]] = []
        if options.get("delay_wgrad_compute"):
            self.waiting = deque()
            self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        kind = "sequence" if self.sequence_parallel else "tensor"
        on_ranks = {
            ("column", "sequence"): mappings.gather_from_sequence_parallel_region,
            ("column", "tensor"): mappings.copy_to_tensor_model_parallel_region,
            ("row", "sequence"): mappings.reduce_scatter_to_sequence_parallel_region,
            ("row", "tensor"): mappings.reduce_from_tensor_model_parallel_region,
        }.get((self.parallel_mode, kind) if self.tp_size > 1 else ("", ""))
        if on_ranks is not None and self.parallel_mode == "column":
            inp = on_ranks(inp, group=self.tp_group)
        self.rows = inp
        y = inp @ self.weight.t() if self.waiting is None else _Delayed.apply(inp, self.weight, self.waiting)
        if on_ranks is not None and self.parallel_mode == "row":
            y = on_ranks(y, group=self.tp_group)
        if self.apply_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        if self.waiting is None:
            return
        grad, x = self.waiting.popleft()
        self.weight.grad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        for hook in self.hooks:
            hook()

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, waiting: deque[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.waiting.append((grad, x))
        return grad @ weight, None, None


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.return_layernorm_output = self.return_layernorm_output_gathered = False
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        of_norm = norm_parameters(
            normalization, in_features, zero_centered_gamma, self.sequence_parallel, like
        )
        self.layer_norm_weight, self.layer_norm_bias = of_norm

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        of_norm = (self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        x = norm(inp, *of_norm, self.zero_centered_gamma)
        y = super().forward(x)
        if not self.return_layernorm_output:
            return y
        x = self.rows if self.return_layernorm_output_gathered else x
        return (*y, x) if self.return_bias else (y, x)


def norm_parameters(
    kind: str, size: int, zero_centered: bool, sequence_parallel: bool, like: dict[str, Any]
) -> tuple[nn.Parameter, nn.Parameter | None]:
    weight = nn.Parameter(torch.full((size,), float(not zero_centered), **like))
    bias = nn.Parameter(torch.zeros(size, **like)) if kind == "LayerNorm" else None
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return weight, bias


class _Norm(nn.Module):
    kind: str

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        hidden_size: int | None = None,  # the older name of the shape
    ) -> None:
        super().__init__()
        normalized_shape = hidden_size if normalized_shape is None else normalized_shape
        assert normalized_shape is not None
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        like = {"dtype": params_dtype, "device": device}
        of_norm = (self.kind, normalized_shape, zero_centered_gamma, sequence_parallel)
        self.weight, self.bias = norm_parameters(*of_norm, like)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.kind, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"


class DotProductAttention(ExtraState, CausalAttention):
    """Of any number of heads and groups."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, **options: Any) -> None:
        super().__init__(softmax_scale=options.get("softmax_scale"))
        assert options.get("attention_dropout", 0.0) == 0.0


class GroupedLinear(ExtraState, nn.Module):
    """One product for each expert, whose rows follow each other, and one weight: weight0, weight1, ..."""

    single_grouped_weight = fp8 = fp8_calibration = False

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        # Gradients of its weights are autograd's alone: flux does not serve the first, and adds itself.
        assert not options.get("delay_wgrad_compute") and not options.get("fuse_wgrad_accumulation")
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.num_gemms, self.use_bias = num_gemms, bias
        self.apply_bias, self.return_bias = bias and not return_bias, return_bias
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        where = {"dtype": options.get("params_dtype"), "device": options.get("device")}
        for i in range(num_gemms):
            weight = make_weight((self.out_features, self.in_features), options.get("init_method"), **where)
            mark(weight, True, int(parallel_mode == "row"))
            self.register_parameter(f"weight{i}", weight)
            of_expert = torch.zeros(self.out_features, **where)
            setattr(self, f"bias{i}", nn.Parameter(of_expert) if bias else of_expert[:0])

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        weights, biases = (
            [getattr(self, f"{kind}{i}") for i in range(self.num_gemms)] for kind in ("weight", "bias")
        )
        parts = [
            nn.functional.linear(x, weight, bias if self.apply_bias else None)
            for x, weight, bias in zip(inp.split(list(m_splits)), weights, biases, strict=True)
        ]
        product = torch.cat(parts)
        return (product, biases) if self.return_bias else product

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class FP8GlobalStateManager:
    enabled = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled


@contextmanager
def fp8_autocast(enabled: bool = True, **_: Any) -> Iterator[None]:
    before, FP8GlobalStateManager.enabled = FP8GlobalStateManager.enabled, enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = before


class Format(Enum):
    E4M3, HYBRID = range(2)


class Recipe:
    def __init__(self, **_: Any) -> None:
        pass


class CudaRNGStatesTracker:
    """Only its name is used: Megatron derives a class from it."""


def no_context(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


def install() -> None:
    """Makes the modules importable, unless the real package is."""
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common.recipe": {
            "Format": Format,
            "Recipe": Recipe,
            **{
                name: type(name, (Recipe,), {})
                for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
            },
        },
        ".pytorch": {
            cls.__name__: cls
            for cls in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention, GroupedLinear)
        }
        | {"fp8_autocast": fp8_autocast},
        ".pytorch.fp8": {
            "FP8GlobalStateManager": FP8GlobalStateManager,
            "fp8_autocast": fp8_autocast,
            "fp8_model_init": no_context,
        },
        ".pytorch.distributed": {
            "CudaRNGStatesTracker": CudaRNGStatesTracker,
            "activation_recompute_forward": no_context,
            "get_all_rng_states": dict,
            "is_fp8_activation_recompute_enabled": lambda: False,
        },
        ".pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
        ".pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    }
    named = {f"transformer_engine{path}": names for path, names in contents.items()}
    sys.modules.update(modules(named))
    # Annotations name classes of these operators; nobody makes one.
    operators = ModuleType("transformer_engine.pytorch.ops")
    operators.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    sys.modules["transformer_engine.pytorch"].ops = operators  # type: ignore[attr-defined]
