"""Tensor-parallel layers over flux's operators, with Megatron's backward passes. See docs/layers.md."""

from flux.layers.functional import DeferredGrads, column_linear, row_linear
from flux.layers.linear import ColumnParallelLinear, RowParallelLinear
from flux.layers.mlp import ParallelMLP
from flux.layers.norm import RMSNorm, mark_replicated, reduce_replicated_grads

__all__ = [
    "ColumnParallelLinear",
    "DeferredGrads",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "column_linear",
    "mark_replicated",
    "reduce_replicated_grads",
    "row_linear",
]
