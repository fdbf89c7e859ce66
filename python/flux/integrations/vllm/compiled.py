"""flux in the graphs that vLLM compiles.

Layers put one opaque operator into the traced graph. vLLM compiles that graph for ranges of token counts,
and :class:`FluxPass` sees each of them before vLLM's passes do. In a range that is below what flux is for, or
in which vLLM fuses all-reduces with RMSNorm, it turns the operator back into vLLM's own. In the others it
takes in the RMSNorm behind the operator. All ranks do the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from typing import Any

import torch
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import VllmConfig

import flux
from flux.integrations.vllm.graph import fuse_norm, settle_sums, unfuse
from flux.integrations.vllm.report import report

# In names of vLLM's passes that fuse an all-reduce with what follows, or replace it by a reduce-scatter.
_ALL_REDUCE_FUSIONS = ("AllReduce", "SequenceParallelism")

# min_tokens of the pass, once it is installed.
_installed: list[int] = []


class FluxPass(InductorPass):  # type: ignore[misc]
    """Gives a range of token counts back to vLLM, or lets flux have its norms too.

    Args:
        min_tokens: from how many tokens on flux is to be used.
        others: vLLM's passes for the same graph.
    """

    def __init__(self, min_tokens: int, others: list[Any]) -> None:
        self.min_tokens = min_tokens
        self.norms: Counter[Any] = Counter()  # fused in the graphs of a range
        self.fusions = [o for o in others if any(name in type(o).__name__ for name in _ALL_REDUCE_FUSIONS)]

    def why_vllms(self, compile_range: Any) -> str | None:
        """Why vLLM's own operators run in a range, or None."""
        if compile_range.end < self.min_tokens:
            return f"there are fewer than {self.min_tokens} tokens"
        names = [type(f).__name__ for f in self.fusions if f.is_applicable_for_range(compile_range)]
        return f"its {names[0]} applies" if names else None

    def __call__(self, graph: torch.fx.Graph) -> None:
        compile_range = get_pass_context().compile_range
        # Layers of experts do not depend on ranges: only the number of tokens decides who sums.
        if compile_range.end < self.min_tokens or compile_range.start >= self.min_tokens:
            settle_sums(graph, reduced=compile_range.start >= self.min_tokens)
        why_vllms = self.why_vllms(compile_range)
        if why_vllms is not None:
            unfuse(graph)
            what = f"vLLM's own, because {why_vllms}"
        elif compile_range.start >= self.min_tokens:
            self.norms[compile_range] += fuse_norm(graph)
            what = f"flux, with {self.norms[compile_range]} norms"
        else:
            what = "each call decides"
        report.ranges[compile_range.start, compile_range.end] = what

    def uuid(self) -> str:
        return str(self.hash_source(self, unfuse, fuse_norm, settle_sums, str(self.min_tokens)))


def install(min_tokens: int) -> None:
    """Puts the pass before those of vLLM in every graph that this process compiles; once."""
    if _installed:
        return
    _installed.append(min_tokens)
    configure = PostGradPassManager.configure

    @functools.wraps(configure)
    def configure_with_flux(manager: Any, config: Any) -> None:
        configure(manager, config)
        manager.passes.insert(0, FluxPass(min_tokens, manager.passes))

    PostGradPassManager.configure = configure_with_flux


def split_ranges(min_tokens: int) -> None:
    """Lets one of vLLM's ranges begin at `min_tokens`: below, compiled graphs are then vLLM's own."""
    set_ranges = VllmConfig._set_compile_ranges

    @functools.wraps(set_ranges)
    def set_ranges_with_flux(config: Any) -> None:
        set_ranges(config)
        endpoints = config.compilation_config.compile_ranges_endpoints
        if config.parallel_config.tensor_parallel_size > 1 and endpoints and 1 < min_tokens <= max(endpoints):
            config.compilation_config.compile_ranges_endpoints = sorted({*endpoints, min_tokens - 1})

    VllmConfig._set_compile_ranges = set_ranges_with_flux


def distinguish_cached_graphs(mode: str, min_tokens: int) -> None:
    """Keeps vLLM from loading a graph that was compiled with another setting of flux, or without it."""
    compute_hash = VllmConfig.compute_hash
    mark = f"flux {flux.__version__} {mode} {min_tokens}"

    @functools.wraps(compute_hash)
    def compute_hash_with_flux(config: Any, *args: Any, **kwargs: Any) -> str:
        text = f"{compute_hash(config, *args, **kwargs)} {mark}"
        return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()[:10]

    VllmConfig.compute_hash = compute_hash_with_flux
