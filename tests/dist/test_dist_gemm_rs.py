"""flux.gemm_rs between GPUs."""

from __future__ import annotations

import rs_workers
from dense_tests import DenseTests, Killed


class TestGemmRs(DenseTests):
    op, workers = "gemm_rs", rs_workers


class TestKilled(Killed):
    op = "gemm_rs"
    sizes = [(4096, 4096, 512)]
