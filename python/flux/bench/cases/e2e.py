"""A Llama-shaped model of transformers under its own tensor-parallel plan: stock, and with flux installed.

Weights are random, and models are cut to some layers and to a small vocabulary: what the layers do to each
other, and what is between them, is that of the whole model.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.cases.common import Candidate, Context, Lineup, capturable
from flux.bench.cases.layer import MODELS as BLOCKS
from flux.bench.cases.plans import explained
from flux.bench.suites import Problem, Request
from flux.testing.compare import agree

_M = {"e2e_prefill": (2048, 8192), "e2e_decode": (16, 64)}
_CPU_M = {"e2e_prefill": (32,), "e2e_decode": (4,)}
_CONTEXT = 1024  # tokens of a sequence that is decoded; on CPUs fewer
_CPU_CONTEXT = 16
_SEED = 20


MODELS = {name: model for name, model in BLOCKS.items() if model.ffn}  # without experts


@dataclass(frozen=True)
class ModelProblem(Problem):
    """One row. "e2e_prefill": m tokens of one sequence. "e2e_decode": one more token of m sequences."""

    layers: int = 1

    def local(self, tp: int) -> tuple[int, int, int]:
        of = MODELS[self.model]
        for size in (of.key_values // of.head, of.ffn):
            if size % tp:
                raise ValueError(f"{self.op}: heads and ffn must be divisible by the {tp} ranks, got {size}")
        return self.m, self.n // tp, self.k

    def on_wire(self, tp: int, element_bytes: int) -> int:
        """Two all-reduces of the activations in each layer."""
        return self.layers * 2 * 2 * (tp - 1) * self.m * self.k * element_bytes // tp

    @property
    def variant(self) -> str:
        return f"{self.layers} layers"


def weights(problem: ModelProblem) -> int:
    """How many numbers a model has: attention and MLP of each layer, embedding and head."""
    of = MODELS[problem.model]
    layer = 2 * of.hidden * (of.hidden + of.key_values) + 3 * of.hidden * of.ffn
    return problem.layers * layer + 2 * of.vocabulary * of.hidden


def rows(request: Request) -> list[Problem]:
    ms = request.m or (_M if request.cuda else _CPU_M)[request.op]
    return [
        ModelProblem(request.op, name, request.op, m, MODELS[name].ffn, MODELS[name].hidden, request.layers)
        for name in request.pick(tuple(MODELS))
        for m in ms
    ]


# The same model twice, stock and with flux, kept for the next row, which is mostly of the same model.
_Pair = tuple[Any, Any]
_loaded: dict[tuple[str, int, torch.dtype], _Pair] = {}


def _pair(problem: ModelProblem, context: Context) -> _Pair:
    key = (problem.model, problem.layers, context.dtype)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = _load(problem, context)
    return _loaded[key]


def _load(problem: ModelProblem, context: Context) -> _Pair:
    # Nothing is downloaded; without a network, attempts would only take time.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    context.say(f"{problem.model}: importing transformers")
    try:
        from flux.integrations import transformers as flux_transformers
    except ImportError as error:
        raise RuntimeError(f"bench e2e needs transformers 5.17 or newer: {error}") from error
    if importlib.util.find_spec("accelerate") is None:
        raise RuntimeError("bench e2e needs accelerate, without which transformers follows no tp_plan")
    # transformers reads its rank and world size from these variables.
    rank, world = str(context.rank), str(context.world_size)
    os.environ.update({"RANK": rank, "LOCAL_RANK": os.environ.get("LOCAL_RANK", rank), "WORLD_SIZE": world})
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder: list[Any] = [tempfile.mkdtemp(prefix="flux-bench-") if context.rank == 0 else None]
    dist.broadcast_object_list(folder, group=context.group)
    try:
        if context.rank == 0:
            context.say(f"{problem.model}: writing random weights of {problem.layers} layers to {folder[0]}")
            _save(problem, context, folder[0])
        dist.barrier(context.group)
        context.say(f"{problem.model}: loading it twice, stock and with flux")
        stock = _from(folder[0], context)
        flux_transformers.install()
        try:
            ours = _from(folder[0], context)
        finally:
            flux_transformers.uninstall()
        dist.barrier(context.group)
        context.say(f"{problem.model}: loaded")
    finally:
        if context.rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return stock, ours


def _save(problem: ModelProblem, context: Context, folder: str) -> None:
    import transformers

    of = MODELS[problem.model]
    config = transformers.LlamaConfig(
        vocab_size=of.vocabulary,
        hidden_size=of.hidden,
        intermediate_size=of.ffn,
        num_hidden_layers=problem.layers,
        num_attention_heads=of.hidden // of.head,
        num_key_value_heads=of.key_values // of.head,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(_SEED)
    with context.device:
        model: Any = transformers.LlamaForCausalLM(config).to(context.dtype)
    model.save_pretrained(folder)


def _from(folder: str, context: Context) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=context.world_size, tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=plan, dtype=context.dtype
    )
    return model.eval()


def _forward(
    model: Any, problem: ModelProblem, context: Context, logits: int = 1
) -> Callable[[], torch.Tensor]:
    """The timed function: the logits of the last tokens of each sequence. logits: how many, 0 for all."""
    vocabulary = MODELS[problem.model].vocabulary
    generator = torch.Generator().manual_seed(_SEED)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(vocabulary, shape, generator=generator).to(context.device)

    if problem.op == "e2e_prefill":
        prompt = tokens(1, problem.m)
        return lambda: _whole(model(prompt, logits_to_keep=logits).logits)

    from transformers import StaticCache

    length = _CONTEXT if context.cuda else _CPU_CONTEXT
    cache = StaticCache(config=model.config, max_cache_len=length + 1)
    last = tokens(problem.m, 1)
    positions = torch.full((1, 1), length, device=context.device)

    def step() -> torch.Tensor:
        # Decode the same position again, because the cache has room for one token.
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        return _whole(model(last, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits)

    step()  # allocates the cache
    random = torch.Generator(context.device).manual_seed(_SEED)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            states.normal_(std=0.1, generator=random)
    return step


def _whole(logits: Any) -> torch.Tensor:
    result: torch.Tensor = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return result


def check(problem: Problem, context: Context) -> str:
    """The logits of flux against those of stock, of all tokens."""
    assert isinstance(problem, ModelProblem)
    pair = _pair(problem, context)
    want, got = (_forward(model, problem, context, logits=0)().clone() for model in pair)
    return agree({"logits": got}, {"logits": want})


def prepare(problem: Problem, context: Context) -> Lineup:
    assert isinstance(problem, ModelProblem)
    (stock, ours), of = _pair(problem, context), MODELS[problem.model]
    lineup = Lineup(context, notes=[f"stock: transformers {version('transformers')}, its own tp_plan"])
    lineup.plan = explained("gemm_ar", problem.m, of.hidden, of.ffn // context.tp, context)
    for name, role, model in (("flux", "flux", ours), ("transformers", "serial", stock)):
        step = _forward(model, problem, context)
        call: Callable[[], object] = step
        if problem.op == "e2e_decode" and context.cuda:
            call, why_not = capturable(step, context)
            lineup.notes += [f"{name} decodes without a CUDA graph: {why_not}"] if why_not else []
        lineup.candidates.append(Candidate(name, role, call, eager=step))
    return lineup
