"""Helpers of flux's tests, shipped so that users can verify their machine."""

from flux.testing.data import AgGemmCase, GemmRsCase
from flux.testing.spawn import RankFailure, SpawnError, spawn
from flux.testing.tolerances import tolerance

__all__ = ["AgGemmCase", "GemmRsCase", "RankFailure", "SpawnError", "spawn", "tolerance"]
