"""The models that megatron_model.py compares: stock, Transformer Engine and flux, with the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
ENGINE = "Transformer Engine"


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
    names: tuple[str, ...] = ()  # of candidates beside stock; none: all
    graphs: bool = False


class Attention(torch.nn.Module):
    """Causal attention of [sequence, batch, heads, size], by torch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class GroupedExperts(torch.nn.Module):
    """Megatron's SequentialMLP as two grouped GEMMs of torch, which Megatron-Core has only with Transformer
    Engine. Its weights are one tensor each, so that nothing is copied in a step.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        first, second = (
            torch.stack([getattr(expert, name).weight.data for expert in experts.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )
        self.first, self.second = torch.nn.Parameter(first), torch.nn.Parameter(second)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, None]:
        ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(x, self.first, ends).chunk(2, -1)
        rows = torch.nn.functional.silu(gate) * up * probs[:, None]
        return grouped_mm(rows.to(x.dtype), self.second, ends), None


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    product: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # the gradient of a weight needs it
    return product


class NoStream:
    """In place of CUDA's streams and events, where there is no GPU: all its methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return NoStream


def initialise(settings: Settings) -> torch.device:
    warnings.filterwarnings("ignore")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 looks for it always
    parallel_state.initialize_model_parallel(
        settings.tp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=settings.tp // settings.ep,
    )
    if not settings.cpu:
        # Random numbers whose state a CUDA graph can keep.
        random.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True)
        return torch.device("cuda", torch.cuda.current_device())
    # Megatron asks for CUDA's device, streams and random numbers whatever the model is on. Its dispatcher
    # makes lists of sizes when it moves them to the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Stream = NoStream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = NoStream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = as_if_moved
    return torch.device("cpu")


def as_if_moved(sizes: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return sizes.numpy() if as_numpy and torch.is_tensor(sizes) else sizes


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


def build(
    settings: Settings, config: Any, spec: Any, on_flux: bool, device: torch.device, weights: dict[str, Any]
) -> Any:
    """A model with the parameters of `weights`, where it has those."""
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
    share_weights(model, weights)
    if on_flux:
        convert_model(model)  # lays out the weights of experts, too
    return model


def usual_name(name: str) -> str:
    """What a parameter of Transformer Engine's grouped experts is called in Megatron's experts."""
    return re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)


def share_weights(model: Any, weights: dict[str, Any]) -> None:
    """Gives a model the first one's parameters, so that memory holds them, and their gradients, once. The
    norms of Transformer Engine's linear layers keep their own, which are ones.
    """
    for path, module in model.named_modules():
        for name in list(module._parameters):
            shared = weights.get(usual_name(f"{path}.{name}"))
            if shared is not None:
                module._parameters[name] = shared


def begin_overlap(settings: Settings) -> None:
    """The buffers of Transformer Engine's overlap. It must not use NVLink's multicast: UB_SKIPMC=1."""
    import transformer_engine.pytorch as te

    te.module.base.initialize_ub(
        shape=[settings.model.sequence, settings.model.hidden], tp_size=settings.tp, bootstrap_backend="nccl"
    )


def candidates(
    settings: Settings, device: torch.device, weights: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Makers of models, by name. The first one's parameters go into `weights`, for all others."""
    from flux.integrations.megatron import save_gathered_inputs

    def make(spec_of: Callable[[Any], Any], on_flux: bool, **options: Any) -> Any:
        config = configure(settings, **options)
        model = build(settings, config, spec_of(config), on_flux, device, weights)
        weights.update({} if weights else model.named_parameters())
        return model

    def saving() -> Any:
        model = make(local_spec, True)
        save_gathered_inputs(model, "auto")
        return model

    def grouped(**options: Any) -> Any:
        model = make(local_spec, False, **options)
        for layer in model.decoder.layers:
            layer.mlp.experts = GroupedExperts(layer.mlp.experts)
        return model

    def overlapping() -> Any:
        begin_overlap(settings)
        return make(engine_spec, False, tp_comm_overlap=True, **of_engine)

    has_experts = settings.model.experts > 0
    # What its users choose for experts.
    of_engine: dict[str, Any] = {
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    of_engine = of_engine if has_experts else {}
    makers: dict[str, Callable[[], Any]] = {
        "stock": lambda: make(local_spec, False),
        "flux": lambda: make(local_spec, True),
        "flux, gathered x kept": saving,
    }
    if has_experts:
        other = {"moe_token_dispatcher_type": "alltoall"}
        makers["stock, alltoall"] = lambda: make(local_spec, False, **other)
        makers["stock, grouped GEMM"] = grouped
        makers["stock, alltoall, grouped GEMM"] = lambda: grouped(**other)
    if importlib.util.find_spec("transformer_engine") is not None:
        makers[ENGINE] = lambda: make(engine_spec, False, **of_engine)
        makers[f"{ENGINE}, overlap"] = overlapping
        makers[f"{ENGINE} on flux"] = lambda: make(engine_spec, True, **of_engine)
    return makers


Batch = tuple[Tensor, Tensor, Tensor]  # tokens, positions, labels


def batch_of(settings: Settings, device: torch.device) -> Batch:
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(settings.model.vocabulary, (1, settings.model.sequence), generator=g).to(device)
    return tokens, torch.arange(settings.model.sequence, device=device)[None], tokens.roll(-1, 1)


def loss_of(model: Any, batch: Batch) -> Tensor:
    tokens, positions, labels = batch
    losses: Tensor = model(tokens, positions, None, labels=labels)
    return losses.float().mean()


def captured(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """The replay of a step from a CUDA graph, captured as Megatron does (full_cuda_graph.py), and the loss
    that a replay computes.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_all_rng_states

    import flux

    # As converted models do if their config asks for CUDA graphs.
    flux.expect_graphs(group=parallel_state.get_tensor_model_parallel_group())
    flux.expect_graphs(group=parallel_state.get_expert_tensor_and_model_parallel_group())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = step()
    return graph.replay, loss
