"""Forward pass and training step of GPTs of Megatron-Core on one host: stock, Transformer Engine, flux.

    python benchmarks/megatron_model.py --model llama-3-8b --tp 2 --json FILE
    python benchmarks/megatron_model.py --model llama-3-8b --tp 2 --cpu  # a tiny model in fp32, in processes

Every candidate is the same model with the same weights. All candidates of a run are timed in turns, in an
order that each round draws anew. Stock and flux differ only in `convert_spec` and `convert_model`; norms
and attention are torch's. With Transformer Engine installed, its spec runs stock, with its overlap
(tp_comm_overlap), and on flux. Models with experts run with each of Megatron's dispatchers. A candidate that
cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux.testing import spawn

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Model:
    """A Llama, or with experts a mixture; ffn: columns of a layer's MLP, or of each expert."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int = 4
    sequence: int = 4096
    vocabulary: int = 32768
    experts: int = 0
    top_k: int = 0

    def tiny(self) -> Model:
        """The same kind of model, for CPUs."""
        return dataclasses.replace(
            self,
            hidden=64,
            ffn=96,
            heads=8,
            kv_heads=4,
            layers=2,
            sequence=32,
            vocabulary=128,
            experts=min(self.experts, 4),
            top_k=min(self.top_k, 2),
        )


MODELS = {
    "llama-3-8b": Model(4096, 14336, 32, 8),
    "llama-3-70b": Model(8192, 28672, 64, 8),
    "qwen3-32b": Model(5120, 25600, 64, 8),
    "qwen3-30b-a3b": Model(2048, 768, 32, 4, experts=128, top_k=8),
    "mixtral-8x7b": Model(4096, 14336, 32, 8, experts=8, top_k=2),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    model: Model
    tp: int
    ep: int
    cpu: bool
    rounds: int
    iters: int


class Attention(torch.nn.Module):
    """Causal attention of [sequence, batch, heads, size], by torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def initialise(settings: Settings) -> torch.device:
    warnings.filterwarnings("ignore")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 looks for it always
    parallel_state.initialize_model_parallel(
        settings.tp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=settings.tp // settings.ep,
    )
    if not settings.cpu:
        random.model_parallel_cuda_manual_seed(1)
        return torch.device("cuda", torch.cuda.current_device())
    # Megatron asks for the CUDA device and its random numbers whatever the model is on.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    return torch.device("cpu")


def configure(settings: Settings, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = settings.model
    if model.experts:
        options = {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.top_k,
            "moe_ffn_hidden_size": model.ffn,
            "moe_aux_loss_coeff": 0.01,
            "expert_model_parallel_size": settings.ep,
            "expert_tensor_parallel_size": settings.tp // settings.ep,
            "moe_token_dispatcher_type": "allgather",
            **options,
        }
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        tensor_model_parallel_size=settings.tp,
        sequence_parallel=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        use_cpu_initialization=settings.cpu,
        params_dtype=torch.float32 if settings.cpu else torch.bfloat16,
        bf16=not settings.cpu,
        **options,
    )


def local_spec(config: Any) -> Any:
    """Megatron's classes; norms that know sequence parallelism, and torch's attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from flux.integrations.megatron import FluxNorm

    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = FluxNorm
        parts.self_attention.submodules.core_attention = Attention
    return dataclasses.replace(spec, layer_norm=FluxNorm)


def engine_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, True, normalization=config.normalization)


def build(settings: Settings, config: Any, spec: Any, on_flux: bool, device: torch.device) -> Any:
    from megatron.core.models.gpt import GPTModel

    from flux.integrations.megatron import convert_model, convert_spec

    torch.manual_seed(4)
    model = GPTModel(
        config,
        convert_spec(spec) if on_flux else spec,
        settings.model.vocabulary,
        settings.model.sequence,
        position_embedding_type="rope",
    ).to(device)
    if on_flux:
        convert_model(model)
    return model


def begin_overlap(settings: Settings) -> None:
    """The buffers of Transformer Engine's overlap. It must not use NVLink's multicast: UB_SKIPMC=1."""
    import transformer_engine.pytorch as te

    te.module.base.initialize_ub(
        shape=[settings.model.sequence, settings.model.hidden],
        tp_size=settings.tp,
        bootstrap_backend="nccl",
    )


def candidates(settings: Settings, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Makers of models, by name."""
    from flux.integrations.megatron import save_gathered_inputs

    plain = configure(settings)

    def saving() -> Any:
        model = build(settings, plain, local_spec(plain), True, device)
        save_gathered_inputs(model, "auto")
        return model

    def overlapping() -> Any:
        begin_overlap(settings)
        config = configure(settings, tp_comm_overlap=True)
        return build(settings, config, engine_spec(config), False, device)

    makers: dict[str, Callable[[], Any]] = {
        "stock": lambda: build(settings, plain, local_spec(plain), False, device),
        "flux": lambda: build(settings, plain, local_spec(plain), True, device),
        "flux, gathered x kept": saving,
    }
    if settings.model.experts:
        other = configure(settings, moe_token_dispatcher_type="alltoall")
        makers["stock, alltoall"] = lambda: build(settings, other, local_spec(other), False, device)
    if importlib.util.find_spec("transformer_engine") is not None:
        makers["Transformer Engine"] = lambda: build(settings, plain, engine_spec(plain), False, device)
        makers["Transformer Engine, overlap"] = overlapping
        makers["Transformer Engine on flux"] = lambda: build(
            settings, plain, engine_spec(plain), True, device
        )
    return makers


def loss_of(model: Any, settings: Settings, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(settings.model.vocabulary, (1, settings.model.sequence), generator=g).to(device)
    positions = torch.arange(settings.model.sequence, device=device)[None]
    losses: Tensor = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    return losses.float().mean()


def measure(rank: int, world_size: int, settings: Settings) -> dict[str, Any]:
    """Rows of both passes, and the candidates that could not run. The same on all ranks."""
    from flux.bench.timing import make_timer

    device = initialise(settings)
    timer = make_timer(device, dist.group.WORLD)
    models, skipped, losses = {}, {}, {}
    for name, make in candidates(settings, device).items():
        try:
            model = make()
            if models:
                # Specs name the same parameters, except those of a norm in a linear layer, which are ones.
                with contextlib.suppress(RuntimeError):
                    model.load_state_dict(models["stock"].state_dict())
            loss = loss_of(model, settings, device)
            loss.backward()
            losses[name] = float(loss)
        except Exception:
            if settings.model.experts == 0 and not name.startswith("Transformer"):
                raise
            skipped[name] = traceback.format_exc().strip().splitlines()[-1][:200]
            continue
        models[name] = model
    passes: dict[str, dict[str, Callable[[], None]]] = {"forward": {}, "training": {}}
    for name, model in models.items():
        passes["forward"][name] = lambda model=model: _forward(model, settings, device)
        passes["training"][name] = lambda model=model: _train(model, settings, device)
    rows = []
    for kind, calls in passes.items():
        for call in calls.values():
            timer.warm(call)
        samples = timer.interleaved(calls, settings.iters, settings.rounds)
        rows += [
            {
                "pass": kind,
                "candidate": name,
                "median_ms": statistics.median(times),
                "min_ms": min(times),
                "max_ms": max(times),
                "samples_ms": times,
                "loss": losses[name],
            }
            for name, times in samples.items()
        ]
    return {"rows": rows, "skipped": skipped, "faults": faults_of(losses, settings.cpu)}


def _forward(model: Any, settings: Settings, device: torch.device) -> None:
    with torch.no_grad():
        loss_of(model, settings, device)


def _train(model: Any, settings: Settings, device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(model, settings, device).backward()


def faults_of(losses: dict[str, float], exact: bool) -> list[str]:
    """What makes times worth nothing: a candidate that computes another loss than stock."""
    share = 1e-5 if exact else 0.01
    expected = losses["stock"]
    return [
        f"{name}: loss {loss}, of stock {expected}"
        for name, loss in losses.items()
        if not abs(loss - expected) <= share * abs(expected)
    ]


def table(record: dict[str, Any]) -> list[str]:
    """Lines of text: each candidate's time, and the speed-up of flux over it."""
    lines = []
    for kind in ("forward", "training"):
        rows = [row for row in record["rows"] if row["pass"] == kind]
        ours = min(row["median_ms"] for row in rows if row["candidate"].startswith("flux"))
        for row in rows:
            spread = (row["max_ms"] - row["min_ms"]) / row["median_ms"]
            lines.append(
                f"{kind:9} {row['candidate']:28} {row['median_ms']:10.3f} ms  ±{50 * spread:4.1f} %  "
                f"flux {row['median_ms'] / ours:5.3f}"
            )
    return lines + [f"not run: {name}: {reason}" for name, reason in record["skipped"].items()]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="shape (default llama-3-8b)")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--ep", type=int, default=1, help="slices of the experts, a divisor of --tp")
    parser.add_argument("--layers", type=int, help="default 4; with --cpu 2")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate (default 7)")
    parser.add_argument("--iters", type=int, default=3, help="steps of a sample (default 3)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--cpu", action="store_true", help="a tiny model in fp32, in processes")
    options = parser.parse_args(arguments)
    if options.tp % options.ep:
        parser.error("--ep: expected a divisor of --tp")
    return options


def main(arguments: list[str] | None = None) -> int:
    import flux
    from flux import machine
    from flux._files import write_json

    options = options_of(arguments)
    model = MODELS[options.model]
    model = model.tiny() if options.cpu else model
    model = dataclasses.replace(model, layers=options.layers or model.layers)
    settings = Settings(model, options.tp, options.ep, options.cpu, options.rounds, options.iters)
    backend = "gloo" if options.cpu else "nccl"
    found = spawn(measure, options.tp, settings, backend=backend, timeout_s=1200)[0]
    result = {
        "version": flux.__version__,
        "commit": machine.commit(),
        "date": machine.now(),
        "suite": "megatron_model",
        "machine": machine.describe("cpu" if options.cpu else "cuda"),
        "settings": {**dataclasses.asdict(settings), "name": options.model},
        **found,
    }
    if options.json:
        write_json(result, options.json)
    print("\n".join([*table(result), *result["faults"]]))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
