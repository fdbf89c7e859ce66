"""Specs of Megatron-Core on flux, the models that Megatron-LM's scripts build from flags, and linear layers
that flux does not serve. Scenarios of test_megatron.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_models import MIXTURE, Told, assert_alike, flux_layers, make_config, make_model, sizes, train


def get_stock_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, False, normalization=config.normalization)


def nested_specs(rank: int, world_size: int) -> None:
    """Every place of a spec in which newer releases put classes, and what convert_spec says of it."""
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from flux.integrations import megatron as ours

    class Builder:
        @classmethod
        def as_mlp_submodule(cls, submodules: Any) -> Any:
            return submodules

    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    inner = functools.partial(MLP, submodules=mlp)
    spec = functools.partial(MoELayer, submodules={"experts": [inner], "shared": (inner, 3)})
    made = ours.convert_spec(spec)
    assert made.func is ours.FluxMoELayer and spec.func is MoELayer
    for part in (made.keywords["submodules"]["experts"][0], made.keywords["submodules"]["shared"][0]):
        assert part.func is MLP
        assert part.keywords["submodules"].linear_fc1 is ours.FluxColumnParallelLinear
        assert part.keywords["submodules"].linear_fc2 is ours.FluxRowParallelLinear
    assert mlp.linear_fc1 is ColumnParallelLinear, "the original must stay"
    built = ours.convert_spec(functools.partial(Builder.as_mlp_submodule, submodules=mlp))
    assert built().linear_fc2 is ours.FluxRowParallelLinear
    kept = ModuleSpec(
        object, {"kept": 1}, MLPSubmodules(te.TELayerNormColumnParallelLinear, None), {"also": "kept"}
    )
    made_of = ours.convert_spec(kept)
    assert made_of.submodules.linear_fc1 is ours.FluxLayerNormColumnParallelLinear
    assert (made_of.module, made_of.params, made_of.metainfo) == (object, {"kept": 1}, {"also": "kept"})
    by_name = ModuleSpec(("megatron.core.tensor_parallel.layers", "RowParallelLinear"))
    assert ours.convert_spec(by_name).module is ours.FluxRowParallelLinear
    # What stays is told; what flux cannot look into is a warning.
    told = Told()
    ours.convert_spec(
        functools.partial(
            MLP, submodules=MLPSubmodules(linear_fc1=torch.nn.Linear, linear_fc2=RowParallelLinear)
        )
    )
    ours.convert_spec([RowParallelLinear, lambda: mlp])
    assert [m.split(": ", 2)[2] for m in told.messages] == [
        "1 on flux (linear_fc2 RowParallelLinear), 1 stay Megatron's (linear_fc1 Linear)",
        "1 on flux (RowParallelLinear), 1 stay Megatron's (<lambda>)",
    ]
    with pytest.raises(ValueError, match="expected layers that flux replaces, got 0 on flux"):
        ours.convert_spec(ModuleSpec(IdentityOp))
    assert ours.convert_spec(ModuleSpec(IdentityOp), allow_unchanged=True).module is IdentityOp
    assert ours.convert_spec(made).func is ours.FluxMoELayer, "twice is once"


def spec_of_the_command_line(rank: int, world_size: int) -> None:
    """`--spec flux.integrations.megatron gpt_layer_spec` builds the model of the flags."""
    from flux.integrations.megatron import gpt_layer_spec

    for options in (
        {"qk_layernorm": True},
        {"normalization": "RMSNorm", "num_query_groups": 2},
        {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "tensor_model_parallel_size": 1},
    ):
        config = make_config(**options)
        stock = make_model(config, get_stock_spec(config))
        ours = make_model(config, gpt_layer_spec)
        assert [(n, p.shape) for n, p in ours.named_parameters()] == [
            (n, p.shape) for n, p in stock.named_parameters()
        ], options
        if "num_moe_experts" not in options:  # without sequence parallelism stock refuses to train these
            assert_alike(train(ours), train(stock))
        names = flux_layers(ours)
        assert any(n.endswith("linear_proj") for n in names) and any(".mlp" in n for n in names)


def multi_token_prediction(rank: int, world_size: int) -> None:
    """By a converted spec, and converted after it was built, as `on_flux` does it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from flux.integrations.megatron import convert_model, convert_spec, gpt_layer_spec

    mixture = {**MIXTURE, "tensor_model_parallel_size": 1}
    for options in ({}, mixture):
        config = make_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.3, **options)
        spec = get_stock_spec(config)
        block = get_gpt_mtp_block_spec(config, spec.layer_specs[-1], use_transformer_engine=False)
        stock = make_model(config, spec, mtp_block_spec=block)
        for parts in ((spec, block), (convert_spec(spec), convert_spec(block))):
            ours = make_model(config, parts[0], mtp_block_spec=parts[1])
            found = convert_model(ours)
            left = [name for name, why in found.items() if why is not None]
            assert left == ["embedding.word_embeddings"], left
            assert sum(name.startswith("mtp.") for name in found) >= 4, found
            if not options:  # without sequence parallelism stock refuses to train experts
                assert_alike(train(ours), train(stock))
        with pytest.raises(ValueError, match="Invalid spec"):
            get_gpt_mtp_block_spec(config, gpt_layer_spec, use_transformer_engine=False)


def layers_of_other_classes(rank: int, world_size: int) -> None:
    """`--spec` names one class: a model whose layers differ in class is refused."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from flux.integrations.megatron import gpt_layer_spec

    config = make_config()
    specs = get_stock_spec(config).layer_specs
    specs[1] = copy.copy(specs[1])
    specs[1].module = type("Other", (TransformerLayer,), {})
    said = "expected TransformerLayer for layer 2, got Other; use get_flux_layer_spec"
    with (
        mock.patch.object(gpt_layer_specs, "get_gpt_decoder_layer_specs", lambda *_, **__: specs),
        pytest.raises(Exception, match=said),
    ):
        make_model(config, gpt_layer_spec)


def builders_of_flags(rank: int, world_size: int) -> None:
    """What Megatron-LM's scripts call: with and without --spec, dense and with experts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module

    from flux.integrations.megatron import coverage, on_flux

    def gpt_builder(
        args: Any, pre_process: Any, post_process: Any, vp_stage: Any = None, config: Any = None
    ) -> Any:
        torch.manual_seed(4)
        spec = get_stock_spec(config) if args.spec is None else import_module(args.spec)
        stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        return GPTModel(config, spec, *sizes(config), position_embedding_type="rope", **stage)

    ours = on_flux(gpt_builder)
    assert ours.__name__ == "gpt_builder"
    for options in ({"qk_layernorm": True}, {**MIXTURE, "tensor_model_parallel_size": 1}):
        config = make_config(**options)
        stock = gpt_builder(SimpleNamespace(spec=None), True, True, config=config)
        assert None not in coverage(stock).values()
        for spec in (None, ("flux.integrations.megatron", "gpt_layer_spec")):
            model = ours(SimpleNamespace(spec=spec), True, True, config=config)
            left = [name for name, why in coverage(model).items() if why is not None]
            assert left == ["embedding.word_embeddings"], left
            if "num_moe_experts" not in options:  # without sequence parallelism stock refuses to train these
                assert_alike(train(model), train(stock))
    with pytest.raises(ValueError, match="convert_model: model: expected layers that flux serves"):
        on_flux(torch.nn.Linear)(2, 3)
    empty = torch.nn.Module()
    empty.decoder = torch.nn.Module()
    empty.decoder.layers = torch.nn.ModuleList()
    assert on_flux(lambda: empty)() is empty, "a stage may have no layers"


def falls_back(rank: int, world_size: int) -> None:
    """Where flux does not apply, Megatron's own code runs, and one line says why."""
    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

    told = Told()
    alone = dist.new_group([rank], use_local_synchronization=True)
    common: dict[str, Any] = {"init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": True}
    config = make_config()
    rows = torch.ones(4, 1, 8)
    for _ in range(2):
        y, _ = FluxColumnParallelLinear(8, 4, config=config, tp_group=alone, **common)(rows)
        assert (y == 8).all() and y.shape[-1] == 4
        row = FluxRowParallelLinear(8, 4, config=config, tp_group=alone, input_is_parallel=True, **common)
        assert (row(rows)[0] == 8).all()
    y, _ = FluxRowParallelLinear(8, 4, config=config, input_is_parallel=False, **common)(rows)
    assert (y == 8).all()
    layer = FluxColumnParallelLinear(8, 4, config=config, disable_grad_reduce=True, **common)
    assert (layer(rows)[0] == 8).all()
    layer = FluxColumnParallelLinear(8, 4, config=config, **common)
    layer.explicit_expert_comm = True  # as SharedExpertMLP sets it, after construction
    assert (layer(rows)[0] == 8).all()
    layer.explicit_expert_comm, layer.gtp_remat_size = False, 2
    assert layer.why_never() == "its weight is split over another group too (generalized tensor parallelism)"
    layer.gtp_remat_size = 1
    assert layer.why_never() is None
    assert layer._why_not(rows.half(), layer.weight) == "x is torch.float16 and the weight torch.float32"
    assert layer._why_not(rows.int(), layer.weight.int()) == "x is torch.int32 and the weight torch.int32"
    offloading, deferring = copy.copy(config), copy.copy(config)
    offloading._cpu_offloading_context = contextlib.nullcontext()
    layer = FluxColumnParallelLinear(8, 4, config=offloading, **common)
    assert layer._why_not(rows, layer.weight) == "activations are offloaded to the CPU"
    deferring.defer_embedding_wgrad_compute = True
    buffers: dict[str, Any] = {"grad_output_buffer": [], "embedding_activation_buffer": []}
    layer = FluxColumnParallelLinear(8, 4, config=deferring, **common, **buffers)
    assert layer.why_never() == "the gradient of its weight is deferred"
    own = "runs in Megatron's own code"
    assert [m.split(": ", 2)[1:] for m in told.messages] == [
        [f"FluxColumnParallelLinear {own}", "the tensor-parallel group has one rank"],
        [f"FluxRowParallelLinear {own}", "the tensor-parallel group has one rank"],
        [f"FluxRowParallelLinear {own}", "its input is not split over ranks"],
        [f"FluxColumnParallelLinear {own}", "somebody else sums the gradient of its input"],
        [f"FluxColumnParallelLinear {own}", "the token dispatcher communicates for the layers of experts"],
    ]


ALL = (
    falls_back,
    nested_specs,
    spec_of_the_command_line,
    multi_token_prediction,
    layers_of_other_classes,
    builders_of_flags,
)
