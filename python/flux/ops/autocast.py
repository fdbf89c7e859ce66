"""Under torch.autocast, operators with a GEMM cast their operands, as torch's linear does.

With out= nothing is cast, as in torch, and neither are fp8 operands and what belongs to them. Sums and
gathers without a GEMM do not cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flux.calls.schemas import library
from flux.fp8.scales import FP8

_OPS = (
    "gemm",
    "gemm_rs",
    "gemm_rs_with_gather",
    "ag_gemm",
    "gemm_ar",
    "gemm_ar_norm",
    "gemm_ar_quant",
    "grouped_gemm",
    "moe_ag_scatter_gemm",
    "moe_gemm_gather_rs",
)
_OPERANDS = frozenset(("x", "weight", "weights", "bias", "biases", "residual", "norm_weight"))
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def cast(value: Any, device_type: str) -> Any:
    """An operand, or a list of them, in the type of the enclosing autocast; float64 stays, as in torch."""
    if isinstance(value, (list, tuple)):
        return [cast(entry, device_type) for entry in value]
    if not isinstance(value, torch.Tensor) or value.device.type != device_type:
        return value
    eligible = value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(device_type)) if eligible else value


def enabled(device: torch.device) -> bool:
    """Whether autocast is currently enabled for tensors on a device."""
    return device.type in _KEYS and torch.is_autocast_enabled(device.type)


def cast_if_enabled(*operands: torch.Tensor | None) -> tuple[Any, ...]:
    """Operands as an operator casts them, for callers that save them for the backward pass."""
    device = next(operand.device for operand in operands if operand is not None)
    return tuple(cast(list(operands), device.type)) if enabled(device) else operands


def _make_kernel(op: Any, device_type: str) -> Callable[..., Any]:
    positions = [i for i, argument in enumerate(op._schema.arguments) if argument.name in _OPERANDS]
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[device_type]))

    def kernel(*arguments: Any) -> Any:
        operands = list(arguments)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            for i in () if arguments[0].dtype in FP8 else positions:
                operands[i] = cast(operands[i], device_type)
            return op(*operands)

    return kernel


for _name in _OPS:
    for _device_type, _key in _KEYS.items():
        _kernel = _make_kernel(getattr(torch.ops.flux, _name).default, _device_type)
        library.impl(_name, _kernel, _key)
