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


class Module(nn.Module):
    """What all classes have: the tensor-parallel group, and gradients that wait for backward_dw."""

    def _begin(
        self, options: dict[str, Any], in_features: int, out_features: int, bias: bool, return_bias: bool
    ) -> None:
        self.parallel_mode = options.get("parallel_mode")
        self.tp_group, self.tp_size = options.get("tp_group"), options.get("tp_size", 1)
        self.sequence_parallel = bool(options.get("sequence_parallel")) and self.tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = options.get("fuse_wgrad_accumulation", False)
        split = {"column": (self.tp_size, 1), "row": (1, self.tp_size)}.get(self.parallel_mode or "", (1, 1))
        where = {"dtype": options.get("params_dtype"), "device": options.get("device")}
        self.in_features, self.out_features = in_features // split[1], out_features // split[0]
        self.weight = make_weight((self.out_features, self.in_features), options.get("init_method"), **where)
        for name, size in (("weight", None), ("bias", self.out_features if bias else None)):
            if size is not None:
                self.bias = nn.Parameter(torch.zeros(size, **where))
            if hasattr(self, name) and self.parallel_mode is not None:
                parameter = getattr(self, name)
                is_split = name == "weight" or self.parallel_mode == "column"
                parameter.tensor_model_parallel = is_split
                parameter.partition_dim = 1 if self.parallel_mode == "row" and is_split else 0
                parameter.partition_stride = 1
        if bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        if not bias:
            self.bias = torch.empty(0)
        self.waiting: deque[tuple[Tensor, Tensor]] | None = None
        self.hooks: list[Callable[[], None]] = []
        if options.get("delay_wgrad_compute"):
            self.waiting = deque()
            self.weight.skip_backward_post_hook = True

    def _product(self, x: Tensor) -> Any:
        from megatron.core.tensor_parallel import mappings

        group = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, **group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, **group)
        y = x @ self.weight.t() if self.waiting is None else _Delayed.apply(x, self.weight, self.waiting)
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel:
                y = mappings.reduce_scatter_to_sequence_parallel_region(y, **group)
            else:
                y = mappings.reduce_from_tensor_model_parallel_region(y, **group)
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

    def get_extra_state(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

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


class Linear(Module):
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
        self._begin(options, in_features, out_features, bias, return_bias)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._product(inp)


class LayerNormLinear(Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if return_layernorm_output:
            raise NotImplementedError("stand-in: return_layernorm_output")
        self._begin(options, in_features, out_features, bias, return_bias)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.layer_norm_weight = nn.Parameter(
            torch.full((in_features,), float(not zero_centered_gamma), **like)
        )
        self.layer_norm_bias = (
            nn.Parameter(torch.zeros(in_features, **like)) if normalization == "LayerNorm" else None
        )
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._product(
            norm(
                inp,
                self.normalization,
                self.layer_norm_weight,
                self.layer_norm_bias,
                self.eps,
                self.zero_centered_gamma,
            )
        )


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
        like = {"dtype": params_dtype, "device": device}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.full((normalized_shape,), float(not zero_centered_gamma), **like))
        self.bias = nn.Parameter(torch.zeros(normalized_shape, **like)) if self.kind == "LayerNorm" else None
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.kind, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"


class DotProductAttention(nn.Module):
    """Causal attention of [sequence, batch, heads, size]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def get_extra_state(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class GroupedLinear(nn.Module):
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
            # As Transformer Engine marks weights.
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = 1 if parallel_mode == "row" else 0  # type: ignore[attr-defined]
            weight.partition_stride = 1  # type: ignore[attr-defined]
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

    def get_extra_state(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
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
        ".common": {},
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
    for path, names in contents.items():
        module = ModuleType(f"transformer_engine{path}")
        module.__path__ = []  # a package
        vars(module).update(names)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    # Annotations name classes of these operators; nobody makes one.
    operators = ModuleType("transformer_engine.pytorch.ops")
    operators.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    sys.modules["transformer_engine.pytorch"].ops = operators  # type: ignore[attr-defined]
