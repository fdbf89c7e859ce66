"""Helpers of flux's tests, shipped so that users can verify their machine."""

from flux.testing.data import AgGemmCase, GemmRsCase
from flux.testing.scaled_data import ScaledCase
from flux.testing.spawn import RankFailure, SpawnError, spawn
from flux.testing.tolerances import scaled_bound, tolerance

__all__ = [
    "AgGemmCase",
    "GemmRsCase",
    "RankFailure",
    "ScaledCase",
    "SpawnError",
    "scaled_bound",
    "spawn",
    "tolerance",
]
