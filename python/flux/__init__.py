"""flux: fused communication and computation kernels for PyTorch.

Importing flux loads its native library and registers its torch operators; it touches neither a GPU nor a
process group.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flux import moe
from flux._invariance import batch_invariant
from flux.errors import CommTimeoutError
from flux.ops import autograd as _autograd  # noqa: F401  (registers the backward passes)
from flux.ops.ag_gemm import ag_gemm
from flux.ops.all_gather import all_gather
from flux.ops.all_reduce import all_reduce
from flux.ops.explain import explain
from flux.ops.gemm import gemm
from flux.ops.gemm_ar import gemm_ar
from flux.ops.gemm_rs import gemm_rs
from flux.ops.grouped_gemm import grouped_gemm
from flux.ops.quantize import quantize
from flux.ops.reduce_scatter import reduce_scatter
from flux.ops.wgrad import grouped_wgrad, grouped_wgrad_accum, wgrad_accum
from flux.ops.workspaces import check, expect_graphs, release, reserve
from flux.plan import nodes as plan_nodes  # noqa: F401  (registers the plans of several nodes)
from flux.plan.choose import Plan

if TYPE_CHECKING:
    from flux import integrations, layers, testing
else:
    _LAZY = ("integrations", "layers", "testing")

    # Hidden from type checkers, which would otherwise accept every name.
    def __getattr__(name: str) -> object:
        """Imports a part of flux at its first use."""
        if name in _LAZY:
            return import_module(f"flux.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})


__version__ = "0.3.0"

__all__ = [
    "CommTimeoutError",
    "Plan",
    "__version__",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "batch_invariant",
    "check",
    "expect_graphs",
    "explain",
    "gemm",
    "gemm_ar",
    "gemm_rs",
    "grouped_gemm",
    "grouped_wgrad",
    "grouped_wgrad_accum",
    "integrations",
    "layers",
    "moe",
    "quantize",
    "reduce_scatter",
    "release",
    "reserve",
    "testing",
    "wgrad_accum",
]
