"""Small GPTs of Megatron-Core, stock and on flux, for the tests between CPU processes (tests/cpu) and between
GPUs (tests/dist). Imports Megatron only where it is used, for not every machine has it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Calls, run_scenarios
from torch.overrides import TorchFunctionMode
from torch.utils import cpp_extension

BATCH = 2
HIDDEN = 32  # all other sizes follow from this one
EXPERTS, TOP_K = 4, 2
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core, which is not installed"
)
# Megatron warns of what it lacks on CPUs.
on_cpus = [needs_megatron, pytest.mark.filterwarnings("ignore")]


def prepare(tensor_parallel: int, device: str = "cpu", graphs: bool = False, **sizes: Any) -> None:
    """Megatron's groups; and what stock Megatron lacks without Transformer Engine, and without CUDA. graphs:
    its random numbers can be captured in CUDA graphs.
    """
    if device == "cpu":
        # Importing Megatron-Core 0.15 compiles an allocator for GPUs, and goes on without it after an error.
        cpp_extension.load_inline = compile_nothing
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Megatron-Core 0.16.1 looks for these without Transformer Engine too.
    moe_utils.te_general_gemm = None
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.TELinear = type("TELinear", (), {})
    parallel_state.initialize_model_parallel(tensor_parallel, **sizes)
    if device == "cuda":
        random.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=graphs)
        return
    # It asks for the current device and for its random numbers, whatever the model is on.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.cuda.Stream = NoStream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = NoStream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    random._get_all_rng_states = lambda: (torch.get_rng_state(),)
    random._set_all_rng_states = lambda state: torch.set_rng_state(state)
    random._get_share_storage = lambda: copy_storage


def compile_nothing(*_: Any, **__: Any) -> None:
    raise RuntimeError("no GPU")


def copy_storage(to: torch.Tensor, source: torch.Tensor) -> None:
    """What is recomputed, where it was freed. (Megatron-Core 0.19 compiles C++ that shares the memory.)"""
    to.untyped_storage().resize_(source.untyped_storage().nbytes())
    to.untyped_storage().copy_(source.untyped_storage())


class OnCpu(TorchFunctionMode):
    """Allocates tensors on the CPU that Megatron's schedules want on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class NoStream:
    """In place of CUDA streams and events, where there is no GPU: all their methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return NoStream


def make_config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hidden = options.pop("hidden_size", HIDDEN)
    # Multi-latent attention has a config class of its own.
    make = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    common = {
        "num_layers": 2,
        "hidden_size": hidden,
        "ffn_hidden_size": 3 * hidden // 2,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,  # a kernel of Apex
        "tensor_model_parallel_size": 2,
        "add_bias_linear": False,
    }
    return make(**{**common, **options})


def make_moe_config(layout: dict[str, Any], **options: Any) -> Any:
    experts = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 3 * options.get("hidden_size", HIDDEN) // 4,
        "moe_token_dispatcher_type": "allgather",
    }
    return make_config(**{**experts, **layout, **options})


def stock_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's classes, but for the norm, which without Apex refuses sequence parallelism, and the core of
    multi-latent attention, which is Transformer Engine's.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from flux.integrations.megatron import FluxNorm

    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=vp_stage)
    layer = copy.deepcopy(spec.layer_specs[0])
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = FluxNorm
    if config.multi_latent_attention:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return dataclasses.replace(spec, layer_specs=[layer] * len(spec.layer_specs), layer_norm=FluxNorm)


class CausalAttention(torch.nn.Module):
    """Of heads whose keys and values may differ in size."""

    def __init__(self, config: Any = None, *, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # from [sequence, batch, head, size]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def full_graphs() -> dict[str, Any]:
    """Options of a config whose whole iterations are captured in CUDA graphs."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    if "cuda_graph_modules" in names:  # since 0.18
        return {"cuda_graph_impl": "full_iteration"}
    return {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}


def sizes(config: Any) -> tuple[int, int]:
    """Of the vocabulary, and of a sequence."""
    return 2 * config.hidden_size, config.hidden_size // 2


def make_model(config: Any, spec: Any, device: str = "cpu", **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(4)
    vocabulary, sequence = sizes(config)
    options = {"position_embedding_type": "rope", "parallel_output": True, **options}
    return GPTModel(config, spec, vocabulary, sequence, **options).to(device)


def pair(config: Any, device: str = "cpu") -> tuple[Any, Any]:
    """The same model, stock and on flux."""
    from flux.integrations.megatron import convert_spec

    specs = (stock_spec(config), convert_spec(stock_spec(config)))
    stock, ours = (make_model(config, spec, device) for spec in specs)
    return stock, ours


def moe_pair(config: Any, rank: int, device: str = "cpu") -> tuple[Any, Any]:
    """As `pair`; every rank's experts and every expert differ."""
    stock, ours = pair(config, device)
    draw_experts(stock, rank)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def draw_experts(model: Any, rank: int) -> None:
    g = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in of_experts(model).values():
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)


def grouped_config(layout: dict[str, Any], **options: Any) -> Any:
    return make_moe_config(layout, moe_grouped_gemm=True, **options)


def grouped_pair(config: Any, rank: int, device: str = "cpu", by_model: bool = False) -> tuple[Any, Any]:
    """As `moe_pair`, of Transformer Engine's spec, whose experts are grouped; by convert_spec, or only by
    convert_model.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from flux.integrations.megatron import convert_model, convert_spec

    spec = get_gpt_decoder_block_spec(config, True, normalization=config.normalization)
    stock, ours = (make_model(config, s, device) for s in (spec, spec if by_model else convert_spec(spec)))
    draw_experts(stock, rank)
    ours.load_state_dict(stock.state_dict())
    if by_model:
        convert_model(ours)
    return stock, ours


def replicas(model: Any, **options: Any) -> Any:
    """A model in Megatron's data parallelism, with gradients in fp32 in main_grad."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    how = DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": True, "use_distributed_optimizer": False, **options}
    )
    return DistributedDataParallel(model.config, how, model)


def summed_grads(replicas: Any) -> dict[str, torch.Tensor]:
    """Of all parameters, once Megatron has summed them."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    finalize_model_grads([replicas])
    return {name: p.main_grad.clone() for name, p in replicas.module.named_parameters()}


def token_losses(model: Any, seed: int, batch: int = BATCH) -> torch.Tensor:
    """Losses of one micro-batch [batch, sequence]."""
    return losses_of(model, tokens_of(model.config, seed, batch))


def tokens_of(config: Any, seed: int, batch: int = BATCH) -> torch.Tensor:
    """Of one micro-batch [batch, sequence], on the CPU."""
    vocabulary, sequence = sizes(config)
    return torch.randint(vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def losses_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Losses of the tokens [batch, sequence]. Nothing of it waits for a GPU if the tokens are there."""
    batch, sequence = tokens.shape
    device = next(model.parameters()).device
    tokens = tokens.to(device)
    positions = torch.arange(sequence, device=device).expand(batch, -1)
    mask = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device), 1)
    losses: torch.Tensor = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    return losses


def forward(model: Any, seed: int) -> torch.Tensor:
    """Loss of one micro-batch."""
    return token_losses(model, seed).mean()


def train(model: Any, microbatches: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    losses = []
    for number in range(microbatches):
        loss = forward(model, number)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


def assert_alike(got: Any, expected: Any, where: str = "") -> None:
    """Equal except for the order of sums in fp32."""
    # An element whose terms cancel has their error: four units of the tensor's largest element are allowed.
    if isinstance(expected, torch.Tensor):
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        atol = max(1e-7, 4 * torch.finfo(torch.float32).eps * largest)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)
        return
    assert type(got) is type(expected) and len(got) == len(expected)
    keys = expected.keys() if isinstance(expected, dict) else range(len(expected))
    for key in keys:
        try:
            assert_alike(got[key], expected[key])
        except AssertionError as error:
            error.add_note(f"in {key} {where}")
            raise


def flux_layers(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__.startswith("Flux")]


MoECalls = partial(Calls, "flux::moe_")


def of_experts(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


@contextlib.contextmanager
def copies(model: Any) -> Iterator[Callable[[], int]]:
    """How many times weights of experts are stacked."""
    shapes = {p.shape for p in of_experts(model).values()}
    with mock.patch.object(torch, "stack", side_effect=torch.stack) as stack:
        yield lambda: sum(call.args[0][0].shape in shapes for call in stack.call_args_list)


class Told(logging.Handler):
    """What flux says, from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("flux").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "sequence parallel": {"sequence_parallel": True},
    "all-reduce": {},
    "biases": {"sequence_parallel": True, "add_bias_linear": True},
    "biases, all-reduce": {"add_bias_linear": True},
    "swiglu, rms norm": {"sequence_parallel": True, **SWIGLU, "normalization": "RMSNorm"},
    "recomputation": {"sequence_parallel": True, **RECOMPUTED},
    "recomputation, all-reduce": RECOMPUTED,
}

# Stock Megatron's other dispatcher reads sizes from CUDA tensors.
MIXTURE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.1,
}
# One model of each kind of layer that Megatron-Core has.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "GQA": {"num_attention_heads": 8, "num_query_groups": 4},
    "MoE": MIXTURE,
    "shared experts": {**MIXTURE, "moe_shared_expert_intermediate_size": 16},
    "MLA": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "rope",
        "apply_rope_fusion": False,
    },
}

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2}
BOTH = {**TP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
# How many ranks, and how they share a mixture of experts.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"TP 2": (2, TP), "EP 2": (2, EP), "TP 2, EP 2": (4, BOTH)}


def run_in_layouts(
    scenarios: Mapping[str, Sequence[Callable[..., None]]], rank: int, world_size: int
) -> dict[str, str]:
    """run_scenarios of those of each layout, which get it, in its groups."""
    from megatron.core import parallel_state

    told: dict[str, str] = {}
    for name, (size, layout) in LAYOUTS.items():
        if size == world_size and name in scenarios:
            prepare_layout(layout)
            named = {f"{name}: {each.__name__}": partial(each, layout=layout) for each in scenarios[name]}
            told |= run_scenarios(named, rank, world_size)
            parallel_state.destroy_model_parallel()
    return told


def prepare_layout(layout: dict[str, Any], device: str = "cpu", **options: Any) -> None:
    prepare(
        layout["tensor_model_parallel_size"],
        device,
        **options,
        expert_model_parallel_size=layout.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=layout.get("expert_tensor_parallel_size"),
    )
