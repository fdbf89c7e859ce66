"""Mixture of experts: routing, and the two halves of an expert layer with their communication inside."""

from flux.moe import autograd as _autograd  # noqa: F401  (registers the backward passes)
from flux.moe.ag_scatter_gemm import ag_scatter_gemm
from flux.moe.gemm_gather_rs import gemm_gather_rs
from flux.moe.mlp import MoEMLP
from flux.moe.routing import Routing, route

__all__ = ["MoEMLP", "Routing", "ag_scatter_gemm", "gemm_gather_rs", "route"]
