"""flux in the graphs that vLLM compiles.

Layers put one opaque operator into the traced graph. vLLM compiles that graph for ranges of token counts,
and :class:`FluxPass` sees each of them before vLLM's passes do. In a range that is below what flux is for, or
in which vLLM fuses all-reduces with RMSNorm, it turns the operator back into vLLM's own. In the others it
takes in the RMSNorm behind the operator. Before vLLM splits the graph, it is made sequence parallel for large
batches (sequence.py); the pass turns that back in other ranges. All ranks do the same.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationMode, VllmConfig

import flux
from flux import _invariance
from flux.comm.group import process_group
from flux.fp8.scales import Scaling
from flux.integrations.vllm import required_names
from flux.integrations.vllm.behind_norm import (
    drop_marks,
    fuse_norm_gemm,
    fuse_quantisation,
    fuse_sum_norm_gemm,
)
from flux.integrations.vllm.graph import (
    SumRule,
    count_kept,
    drop_products,
    fuse_norm,
    fuse_sum_and_norm,
    settle_sums,
    unfuse,
    unshard,
)
from flux.integrations.vllm.ranges import Layer, Ranges, over_fusion, ranges_on
from flux.integrations.vllm.report import report, setting
from flux.integrations.vllm.sequence import LINEAR, SCATTERS, count_sharded, shard
from flux.integrations.vllm.thresholds import fingerprint
from flux.ops.explain import current_device, why_unfused
from flux.ops.gemm import SERVED_TOKENS

# In names of vLLM's passes that fuse an all-reduce with what follows, or replace it by a reduce-scatter.
_WITH_NORM = "AllReduce"
_ALL_REDUCE_FUSIONS = (_WITH_NORM, "SequenceParallelism")


@dataclass
class Rules:
    """What the layers of a model ask of its compiled graphs; of a draft of it, too.

    Attributes:
        mode: FLUX_VLLM, when the plugin was registered.
        installed: graphs that this process compiles from now on get a FluxPass.
        sums: served by it though no layer of flux makes them, by vLLM's name of the group.
        kinds: of layers that flux serves.
        linear_only: the model that is compiled now is of the kind that was measured against vLLM's fusion:
            sequence parallel in large batches, with sums of linear layers only.
    """

    mode: str = "auto"
    installed: bool = False
    sums: dict[str, SumRule] = field(default_factory=dict)
    kinds: set[Ranges] = field(default_factory=set)
    linear_only: bool = False

    def install(self) -> None:
        """Puts the pass before vLLM's, and makes models sequence parallel before vLLM splits them; once."""
        if self.installed:
            return
        self.installed = True
        configure = PostGradPassManager.configure

        @functools.wraps(configure)
        def configure_with_flux(manager: Any, config: Any) -> None:
            configure(manager, config)
            manager.passes.insert(0, FluxPass(self, manager.passes))

        PostGradPassManager.configure = configure_with_flux
        if required_names.missing("sequence") is not None:
            return
        from vllm.compilation.backends import VllmBackend

        compile_model = VllmBackend.__call__

        @functools.wraps(compile_model)
        def compile_sharded(backend: Any, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
            self.linear_only = _shard(graph, backend.vllm_config) == {LINEAR}
            return compile_model(backend, graph, example_inputs)

        VllmBackend.__call__ = compile_sharded


class FluxPass(InductorPass):  # type: ignore[misc]
    """Gives layers back to vLLM where flux does not begin before the end of a range, or vLLM fuses their
    all-reduce; in the others flux takes the norms too. `others` are vLLM's passes for the same graph.
    """

    def __init__(self, rules: Rules, others: list[Any]) -> None:
        self.counts: dict[Any, Counter[str]] = {}  # of a range, over its graphs
        self.sums = rules.sums
        self.few, self.many = over_fusion(rules.kinds if rules.linear_only else ())
        self.fusions = [o for o in others if any(name in type(o).__name__ for name in _ALL_REDUCE_FUSIONS)]

    def __call__(self, graph: torch.fx.Graph) -> None:
        compile_range = get_pass_context().compile_range
        start, end = compile_range.start, compile_range.end
        # Calls that must be batch invariant are the same in all ranges.
        fusions = [] if _invariance.active() else self.fusions
        names = [type(f).__name__ for f in fusions if f.is_applicable_for_range(compile_range)]
        if (self.few.start <= start and end < self.few.stop) or start >= self.many:
            names = [name for name in names if _WITH_NORM not in name]
        counts = self.counts.setdefault((start, end), Counter())
        unshard(graph, None if names else end)
        settle_sums(graph, start, end)
        counts.update(count_sharded(graph))
        counts["given back"] += unfuse(graph, 0 if names else end)
        drop_products(graph, start)
        fuse_sum_norm_gemm(graph, start)
        counts["norms"] += fuse_norm(graph, start)
        counts["kept"] += count_kept(graph)
        counts["sums"] += 0 if names else fuse_sum_and_norm(graph, start, end, self.sums)
        counts["quantised"] += fuse_quantisation(graph)
        drop_marks(graph)
        if end <= SERVED_TOKENS and not _invariance.active():
            served, gated = fuse_norm_gemm(graph)
            counts["products"] += served
            counts["gated"] += gated
        report.ranges[start, end] = _told(counts, names)

    def uuid(self) -> str:
        sums = sorted(self.sums.items(), key=lambda rule: rule[0])
        rules = f"{sums} {self.few} {self.many}"
        # A graph that another rank had put into inductor's cache would be missing in the log.
        rank = str(dist.get_rank() if dist.is_initialized() else 0)
        sources = [inspect.getsource(sys.modules[step.__module__]) for step in (unfuse, fuse_norm_gemm)]
        return str(self.hash_source(self, *sources, rules, rank))


def _told(counts: Counter[str], fusions: list[str]) -> str:
    """What happened in a range, for the log."""
    sharded = ", ".join(f"{counts[kind]} {kind}" for kind in SCATTERS if counts[kind])
    flux = f"flux {counts['kept']} linear layers, {counts['norms']} with norm"
    why = f" ({fusions[0]} applies)" if fusions else ""
    vllm = f"vLLM {counts['given back']}{why}"
    sums = f"flux {counts['sums']} other sums with norm"
    told = (
        (f"flux {sharded} sequence parallel", len(sharded)),
        (flux, counts["kept"]),
        (vllm, counts["given back"]),
        (sums, counts["sums"]),
        (f"{counts['products']} products behind them, {counts['gated']} with SwiGLU", counts["products"]),
        (f"quantised behind {counts['quantised']} norms", counts["quantised"]),
    )
    return ", ".join(what for what, n in told if n) or f"vLLM all{why}"


def _shard(graph: torch.fx.GraphModule, config: Any) -> set[str]:
    """Makes the graph of a model sequence parallel, if that is better. Returns which kinds of sums are."""
    if setting("FLUX_VLLM_SEQUENCE") == 0:
        return set()

    def begins(*layer: Any) -> int | None:
        return ranges_on(current_device(), layer_of(config, *layer)).sequence

    start = shard(graph.graph, begins)
    if isinstance(start, str):  # a draft model, too, is a model
        report.sequence = report.sequence or f"Not sequence parallel: {start}"
        return set()
    graph.recompile()
    split_range(config, start)
    report.sequence = f"Sequence parallel from {start} tokens on"
    return {kind for kind, count in count_sharded(graph.graph).items() if count}


def layer_of(
    config: Any,
    n: int,
    k: int,
    dtype: torch.dtype,
    group_name: str,
    scaling: Scaling | None = None,
    ranks: int | None = None,
) -> Layer:
    """What ranges depend on, of a layer with a weight [n, k] of each rank; scaling: of fp8 ones."""
    ranks = ranks or process_group(group_name).size()
    unfused = why_unfused("gemm_rs", ranks, n, k, dtype, current_device(), group_name, scaling=scaling)
    itemsize = (scaling.out_dtype if scaling else dtype).itemsize
    # Up to which sums vLLM fuses them with RMSNorm; 0 if it does not, or does not say.
    passes: Any = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    fuses = getattr(passes, "fuse_allreduce_rms", False) and hasattr(passes, "flashinfer_max_size")
    nbytes: int = (passes.flashinfer_max_size(ranks) or 0) if fuses else 0
    of_model = (has_experts(config), is_eager(config), nbytes // (n * itemsize))
    return Layer(n, k, ranks, itemsize, scaling.kind if scaling else "", *of_model, unfused is None)


def is_eager(config: Any) -> bool:
    return config is not None and config.compilation_config.mode == CompilationMode.NONE


def has_experts(config: Any) -> bool:
    """Whether vLLM says that the model has experts. Only dense models were measured against its fusion."""
    count = getattr(getattr(config, "model_config", None), "get_num_experts", None)
    return count is not None and bool(count())


def split_range(config: Any, tokens: int) -> None:
    """Lets one of vLLM's ranges begin at `tokens`, in a model that is not compiled yet."""
    if config is None:
        return
    compilation = config.compilation_config
    endpoints = compilation.compile_ranges_endpoints
    if endpoints and 1 < tokens <= max(endpoints):
        compilation.compile_ranges_endpoints = sorted({*endpoints, tokens - 1})


def distinguish_cached_graphs(mode: str) -> None:
    """Keeps vLLM from loading a graph that was compiled with another setting of flux, or without it."""
    compute_hash = VllmConfig.compute_hash
    mark = f"flux {flux.__version__} {mode} {fingerprint()}"

    @functools.wraps(compute_hash)
    def compute_hash_with_flux(config: Any, *args: Any, **kwargs: Any) -> str:
        text = f"{compute_hash(config, *args, **kwargs)} {mark}"
        return hashlib.sha256(text.encode(), usedforsecurity=False).hexdigest()[:10]

    VllmConfig.compute_hash = compute_hash_with_flux
