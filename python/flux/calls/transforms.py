"""What torch's transformations do with operators. Under autocast, operators with a GEMM cast their operands,
but not with out= or scales. Under vmap one is a call for each entry of the batch, in order: all ranks must
map over as many, and it is no faster than a loop.
"""

from __future__ import annotations

from typing import Any

import torch

from flux.calls.schemas import library
from flux.fp8.scales import FP8

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


def casts(name: str) -> None:
    """Lets autocast cast the operands of a torch operator."""
    op = getattr(torch.ops.flux, name).default
    positions = [i for i, argument in enumerate(op._schema.arguments) if argument.name in _OPERANDS]
    for device_type, key in _KEYS.items():
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*arguments: Any, device_type: str = device_type, keys: Any = keys) -> Any:
            operands = list(arguments)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                for i in () if arguments[0].dtype in FP8 else positions:
                    operands[i] = cast(operands[i], device_type)
                return op(*operands)

        library.impl(name, kernel, key)


def maps(name: str) -> None:
    """Lets vmap map over calls of a torch operator."""
    op = getattr(torch.ops.flux, name).default

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        results = [op(*_entry(arguments, in_dims, i)) for i in range(info.batch_size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
        return (tuple(stacked), (0,) * len(stacked)) if isinstance(results[0], tuple) else (stacked, 0)

    torch.library.register_vmap(f"flux::{name}", rule, lib=library)


def _entry(value: Any, dim: Any, index: int) -> Any:
    """The value of an argument for one call: its entry, or all of it if it is not mapped over."""
    if isinstance(dim, (list, tuple)):
        return [_entry(part, where, index) for part, where in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)
