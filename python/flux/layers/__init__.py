"""Tensor-parallel layers over flux's operators, with Megatron's backward passes. See docs/layers.md."""

from flux.layers.clip import clip_grad_norm_
from flux.layers.fp8 import Fp8
from flux.layers.functional import column_linear, row_linear
from flux.layers.linear import ColumnParallelLinear, RowParallelLinear
from flux.layers.mlp import ParallelMLP
from flux.layers.norm import RMSNorm, mark_replicated, reduce_replicated_grads
from flux.layers.weight_grads import DeferredGrads

__all__ = [
    "ColumnParallelLinear",
    "DeferredGrads",
    "Fp8",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "clip_grad_norm_",
    "column_linear",
    "mark_replicated",
    "reduce_replicated_grads",
    "row_linear",
]
