"""Twenty steps of training with Megatron-Core's schedules, data parallelism and every kind of layer, stock
and on flux: in each step the same loss and the same gradient of every parameter. Hybrid models.

`make megatron` sets up what this needs, and runs it for several releases of Megatron-Core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import (
    KINDS,
    OnCpu,
    Told,
    forward,
    make_config,
    make_model,
    prepare,
    replicas,
    sizes,
    stock_spec,
    token_losses,
)

from flux.testing import spawn

pytestmark = pytest.mark.skipif(
    Path(sys.prefix).name != ".venv-megatron", reason="takes minutes for each release: make megatron"
)

STEPS = 20
BATCH = 2
LEARNING_RATE = 0.05
WITH_EXPERTS = ("MoE", "shared experts")
# Ranks, how they share a model, and which models.
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "TP 2": (2, {"tensor_model_parallel_size": 2}, tuple(KINDS)),
    "TP 4": (4, {"tensor_model_parallel_size": 4}, tuple(KINDS)),
    "TP 2, EP 2": (
        4,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        WITH_EXPERTS,
    ),
    "TP 2, DP 2, PP 2": (
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        tuple(KINDS),
    ),
    # Each stage has two parts of the model, whose micro-batches are interleaved.
    "TP 2, PP 2 x 2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        ("dense", "MoE"),
    ),
}


def configure(layout: dict[str, int], kind: str) -> Any:
    pipeline = {"pipeline_dtype": torch.float32, "batch_p2p_comm": False}
    layers = 2 * layout.get("virtual_pipeline_model_parallel_size", 1)
    config = make_config(**{**KINDS[kind], **layout, **pipeline}, num_layers=layers, sequence_parallel=True)
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    config.finalize_model_grads_func = finalize_model_grads
    return config


class Trainee:
    """This rank's parts of a model, and their steps."""

    def __init__(self, config: Any, on_flux: bool) -> None:
        from megatron.core import parallel_state

        parts = config.virtual_pipeline_model_parallel_size
        self.models = [make_part(config, on_flux, part) for part in (range(parts) if parts else (None,))]
        self.wrapped = [replicas(model) for model in self.models]
        self.seeds = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def step(self, number: int) -> dict[str, torch.Tensor]:
        """Losses of two micro-batches, on the last stage of the pipeline, and gradients of all parameters."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        replicas, replica = self.seeds

        def forward_step(batches: Any, model: Any) -> Any:
            losses = token_losses(model, next(batches), BATCH)
            return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        batches = [iter(2 * (number * replicas + replica) + i for i in range(2)) for _ in self.wrapped]
        told = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.wrapped,
            num_microbatches=2,
            seq_length=sizes(self.models[0].config)[1],
            micro_batch_size=BATCH,
            forward_only=False,
        )
        found = {f"loss {i}": part["loss"] for i, part in enumerate(told)}
        with torch.no_grad():
            for part, model in enumerate(self.models):
                for name, parameter in model.named_parameters():
                    found[f"{part}: {name}"] = parameter.main_grad.clone()
                    parameter.sub_(LEARNING_RATE * parameter.main_grad)
        return found


def make_part(config: Any, on_flux: bool, part: int | None) -> Any:
    """A part of a model that this rank has; None: it has one."""
    from megatron.core import parallel_state

    from flux.integrations.megatron import accumulate_into_main_grad, convert_model, convert_spec

    last = (config.virtual_pipeline_model_parallel_size or 1) - 1
    spec = stock_spec(config, part)
    model = make_model(
        config,
        convert_spec(spec) if on_flux else spec,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True) and not part,
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True) and part in (None, last),
        vp_stage=part,
    )
    if on_flux:
        left = {name: why for name, why in convert_model(model).items() if why is not None}
        assert all(name == "embedding.word_embeddings" for name in left), left
        accumulate_into_main_grad(model)
    return model


def train(layout: dict[str, int], kind: str) -> None:
    told = Told()
    config = configure(layout, kind)
    stock, ours = Trainee(config, False), Trainee(config, True)
    seen: list[float] = []
    for number in range(STEPS):
        expected, found = stock.step(number), ours.step(number)
        assert found.keys() == expected.keys() and len(found) >= 5
        # fp32, other orders of sums, and what twenty steps make of them.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
        seen += [float(expected["loss 0"])] if "loss 0" in expected else []
        assert all(grad.any() for name, grad in found.items() if "loss" not in name), "a gradient is missing"
    assert not seen or seen[-1] != seen[0], "nothing was trained"
    assert not [message for message in told.messages if "Megatron's own code" in message], told.messages


def run(rank: int, world_size: int, layout_name: str) -> bool:
    _, layout, kinds = LAYOUTS[layout_name]
    # The size of the tensor-parallel group has another name among Megatron's groups.
    sizes = dict(layout)
    prepare(sizes.pop("tensor_model_parallel_size"), **sizes)
    with OnCpu():
        for kind in kinds:
            try:
                train(layout, kind)
            except Exception as error:
                error.add_note(f"in the model: {kind}")
                raise
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore")
def test_steps_equal_stock_megatron(layout: str) -> None:
    world_size = LAYOUTS[layout][0]
    assert spawn(run, world_size, layout, backend="gloo", timeout_s=480) == [True] * world_size


# HybridModel, which replaces GPTModel in Megatron-Core 0.19: attention, MLP and MoE layers of a pattern,
# stock, with a converted spec, and converted after it was built.
HYBRID = any((Path(part) / "megatron" / "core" / "models" / "hybrid").is_dir() for part in sys.path)
PATTERN = "*-*E"


def stack_spec(config: Any) -> Any:
    """The layers of a stack, made of the parts of GPT's layers. (Megatron's own needs Transformer Engine.)"""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from flux.integrations.megatron import FluxNorm

    hybrid_block.TENorm = FluxNorm
    dense, experts = (
        stock_spec(part).layer_specs[0].submodules for part in (make_config(sequence_parallel=True), config)
    )

    def layer(**parts: Any) -> Any:
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))

    attention = layer(
        input_layernorm=FluxNorm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
    )
    mlp, moe = (
        layer(pre_mlp_layernorm=FluxNorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda) for parts in (dense, experts)
    )
    layers = hybrid_block.HybridStackSubmodules(
        mamba_layer=IdentityOp, attention_layer=attention, mlp_layer=mlp, moe_layer=moe
    )
    return ModuleSpec(hybrid_block.HybridStack, submodules=layers)


def make_hybrid(config: Any, spec: Any) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    torch.manual_seed(4)
    return HybridModel(config, spec, *sizes(config), PATTERN, position_embedding_type="rope")


def train_hybrid(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = forward(model, 3)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def hybrid_as_stock(rank: int, world_size: int) -> list[str]:
    from flux.integrations.megatron import convert_model, convert_spec

    prepare(2)
    config = make_config(**KINDS["MoE"], num_layers=len(PATTERN), sequence_parallel=True)
    with OnCpu():
        expected = train_hybrid(make_hybrid(config, stack_spec(config)))
        for spec in (convert_spec(stack_spec(config)), stack_spec(config)):
            model = make_hybrid(config, spec)
            found = convert_model(model)
            left = [name for name, reason in found.items() if reason is not None]
            torch.testing.assert_close(train_hybrid(model), expected, rtol=1e-5, atol=1e-6)
    return [*left, str(len(found))]


@pytest.mark.skipif(not HYBRID, reason="Megatron-Core before 0.18 has no HybridModel")
@pytest.mark.filterwarnings("ignore")
def test_hybrid_model() -> None:
    # Two attention layers, an MLP, a layer of experts, the output layer, and the embedding.
    assert (
        spawn(hybrid_as_stock, 2, backend="gloo", timeout_s=120) == [["embedding.word_embeddings", "9"]] * 2
    )
