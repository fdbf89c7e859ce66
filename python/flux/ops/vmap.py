"""torch.vmap of the operators: one call for each entry of the batch, in order.

So all ranks must map over the same number of entries, and it is no faster than a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flux.calls.schemas import library

_OPS = (
    "gemm",
    "gemm_rs",
    "ag_gemm",
    "gemm_ar",
    "gemm_ar_norm",
    "gemm_ar_quant",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_quant",
    "reduce_scatter",
    "grouped_gemm",
    "grouped_wgrad",
)


def _entry(value: Any, dim: Any, index: int) -> Any:
    """The value of an argument for one call: its entry, or all of it if it is not mapped over."""
    if isinstance(dim, (list, tuple)):
        return [_entry(part, where, index) for part, where in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)


def _make_rule(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        results = [op(*_entry(arguments, in_dims, i)) for i in range(info.batch_size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
        return (tuple(stacked), (0,) * len(stacked)) if isinstance(results[0], tuple) else (stacked, 0)

    return rule


for _name in _OPS:
    torch.library.register_vmap(
        f"flux::{_name}", _make_rule(getattr(torch.ops.flux, _name).default), lib=library
    )
