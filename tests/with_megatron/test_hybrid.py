"""HybridModel, which replaces GPTModel in Megatron-Core 0.19: attention, MLP and MoE layers of a pattern,
stock, with a converted spec, and converted after it was built.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import KINDS, OnCpu, forward, make_config, prepare, sizes, stock_spec

from flux.testing import spawn

HYBRID = any((Path(part) / "megatron" / "core" / "models" / "hybrid").is_dir() for part in sys.path)
pytestmark = [
    pytest.mark.skipif(Path(sys.prefix).name != ".venv-megatron", reason="needs make megatron"),
    pytest.mark.skipif(not HYBRID, reason="Megatron-Core before 0.18 has no HybridModel"),
]

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


def make(config: Any, spec: Any) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    torch.manual_seed(4)
    return HybridModel(config, spec, *sizes(config), PATTERN, position_embedding_type="rope")


def train(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = forward(model, 3)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def equal_to_stock(rank: int, world_size: int) -> list[str]:
    from flux.integrations.megatron import convert_model, convert_spec

    prepare(2)
    config = make_config(**KINDS["MoE"], num_layers=len(PATTERN), sequence_parallel=True)
    with OnCpu():
        expected = train(make(config, stack_spec(config)))
        for spec in (convert_spec(stack_spec(config)), stack_spec(config)):
            model = make(config, spec)
            found = convert_model(model)
            left = [name for name, reason in found.items() if reason is not None]
            torch.testing.assert_close(train(model), expected, rtol=1e-5, atol=1e-6)
    return [*left, str(len(found))]


@pytest.mark.filterwarnings("ignore")
def test_hybrid_model() -> None:
    # Two attention layers, an MLP, a layer of experts, the output layer, and the embedding.
    assert spawn(equal_to_stock, 2, backend="gloo", timeout_s=120) == [["embedding.word_embeddings", "9"]] * 2
