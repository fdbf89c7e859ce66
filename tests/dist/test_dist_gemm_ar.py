"""flux.gemm_ar, flux.all_reduce and flux.reduce_scatter between GPUs."""

from __future__ import annotations

import ar_workers
from dense_tests import DenseTests, Killed


class TestGemmAr(DenseTests):
    op, workers = "gemm_ar", ar_workers


class TestKilled(Killed):
    op = "gemm_ar"
    # Swap-AB tiles; ordinary ones, of which a CTA has one; several.
    sizes = [(m, 4096, 2048) for m in (16, 140, 1024)]
