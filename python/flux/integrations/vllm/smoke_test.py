"""A smoke test of versions of vLLM that flux has not been run with: whether operators with the names that
flux knows (required_names.py) also behave as it assumes.
"""

from __future__ import annotations

import contextlib
import re
from importlib import import_module
from typing import Any

import torch
from torch import fx

from flux.integrations.vllm.graph import count_kept, fuse_norm, norm_operators, unfuse
from flux.ops.gemm_ar import row_norm

# Their models were run with flux and without (docs/design/vllm.md).
KNOWN = tuple(f"0.{minor}" for minor in range(26, 34))
_EPS, _FROM = 1e-5, 4


def failure(version: str) -> str | None:
    """What is wrong with a version of vLLM, or None. Versions that are known are not tried.

    Example::

        failure("0.34.1")  # "its fused_add_rms_norm gives something else"
    """
    found = re.match(r"\d+\.\d+", version)
    if found is not None and found.group() in KNOWN:
        return None
    try:
        # They define the operators.
        import_module("vllm.distributed.parallel_state")
        with contextlib.suppress(ImportError):
            import_module("vllm.ir.ops.layernorm")
        return _norm_differs() or _graphs_differ()
    except Exception as error:  # whatever another version raises: vLLM goes on without flux
        return f"a smoke test raised {type(error).__name__}: {error}"


def _norm_differs() -> str | None:
    """The operator's results, if this version has it with the arguments that flux knows."""
    x, residual = torch.arange(24.0).view(3, 8) - 7, torch.arange(24.0).view(3, 8).flip(0) / 5
    weight = torch.linspace(-1, 2, 8)
    total = x + residual
    expected = row_norm(total, weight, _EPS), total
    for norm in norm_operators()[:1]:
        found = norm(x.clone(), residual.clone(), weight, _EPS)
        if not all(torch.allclose(*pair, rtol=1e-5) for pair in zip(found, expected, strict=True)):
            return "its fused_add_rms_norm gives something else"
    return None


def _graphs_differ() -> str | None:
    """Whether the pass can rewrite a layer in both directions."""
    norms = norm_operators()
    for norm in norms[:1] or [None]:
        kept, given_back = _layer(norm), _layer(norm)
        if norm is not None and fuse_norm(kept, _FROM) != 1:
            return "flux cannot fuse its fused_add_rms_norm in a graph"
        if unfuse(given_back, _FROM - 1) != 1 or count_kept(given_back):
            return "flux cannot give a layer back in a graph"
        for graph in (kept, given_back):
            graph.lint()
    return None


def _layer(norm: Any) -> fx.Graph:
    """The graph of a row-parallel layer of flux, and of the norm behind it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a while

    linear: Any = torch.ops.flux_vllm.linear_all_reduce

    def run(x: Any, weight: Any, residual: Any, norm_weight: Any) -> Any:
        total = linear(x, weight, None, _FROM, "", "")
        return total if norm is None else norm(total, residual, norm_weight, _EPS)

    shapes = ((_FROM, 8), (16, 8), (_FROM, 16), (16,))
    graph: fx.Graph = make_fx(run, tracing_mode="fake")(*map(torch.empty, shapes)).graph
    return graph
