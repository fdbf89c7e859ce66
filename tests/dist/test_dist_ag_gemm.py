"""flux.ag_gemm and flux.all_gather between GPUs."""

from __future__ import annotations

import ag_workers
from dense_tests import DenseTests, Killed


class TestAgGemm(DenseTests):
    op, workers = "ag_gemm", ag_workers


class TestKilled(Killed):
    op = "ag_gemm"
    # Shards of 2 MiB, which the kernel pushes, and of 16 MiB, which copy engines carry.
    sizes = [(4096, 1024, 512)] * 2 + [(4096, 1024, 4096)] * 2
