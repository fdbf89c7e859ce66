"""Megatron's layers of experts whose experts are Transformer Engine's grouped ones, on flux. Scenarios of
test_megatron_te.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron_models import (
    SWIGLU,
    MoECalls,
    OnCpu,
    Told,
    assert_alike,
    copies,
    forward,
    grouped_config,
    grouped_pair,
    of_experts,
    replicas,
    summed_grads,
)
from test_megatron_moe import equal_to_stock, groups, train, weights_without_copies

ACTIVATION = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
MODELS: dict[str, dict[str, Any]] = {
    "gelu, aux loss": {"moe_aux_loss_coeff": 0.1},
    "swiglu, activation recomputed": {**SWIGLU, **ACTIVATION},
    "clamped": {**SWIGLU, "activation_func_clamp_value": 0.01},
    "linear offset, shared expert, dropped tokens": {
        **SWIGLU,
        "glu_linear_offset": 1.0,
        "moe_shared_expert_intermediate_size": 16,
        "moe_expert_capacity_factor": 0.5,
    },
    "layer recomputed": {**SWIGLU, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def grouped_equal_to_stock(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    equal_to_stock(rank, world_size, layout, MODELS)


def grouped_data_parallelism(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Two micro-batches into main_grad, with weights in the distributed optimizer's buffer, not copied."""
    from flux.integrations.megatron import accumulate_into_main_grad

    config, grads = grouped_config(layout, **SWIGLU), []
    stock, ours = grouped_pair(config, rank)
    models = ((stock, False), (ours, False), (grouped_pair(config, rank)[1], True))
    overlap = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    with OnCpu():
        for model, by_flux in models:
            accumulate_into_main_grad(model, by_flux)
            before = {p.data_ptr() for p in of_experts(model).values()}
            wrapped = replicas(model, use_distributed_optimizer=True, **overlap)
            assert not before & {p.data_ptr() for p in of_experts(model).values()}, "they lie in its buffer"
            with copies(model) as copied, MoECalls() as calls:
                with wrapped.no_sync():
                    forward(wrapped, rank).backward()
                forward(wrapped, 2 + rank).backward()
            assert not copied() and (len(calls.names) > 0) == (model is not stock)
            grads.append(summed_grads(wrapped))
            assert {p.grad_added_to_main_grad for p in of_experts(model).values()} == {by_flux}
    assert all(grads[0][name].any() for name in of_experts(stock))
    assert_alike(grads[1], grads[0])
    assert_alike(grads[2], grads[0])


def grouped_weights_without_copies(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """After either conversion."""
    for by_model in (False, True):
        pair = partial(grouped_pair, by_model=by_model)
        weights_without_copies(rank, world_size, layout, grouped_config(layout, **SWIGLU), pair)


def grouped_falls_back(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """What flux does not serve runs in Megatron's own code, with the same result, and one line says why."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from flux.integrations.megatron import coverage

    told = Told()
    layer = grouped_pair(grouped_config(layout), rank)[1].decoder.layers[0].mlp
    config, experts = layer.config, layer.experts
    # Beside those of all experts (test_megatron_moe.py).
    alternate = {"gated_linear_unit": True, "moe_mlp_glu_interleave_size": 32}
    in_fp8 = {"bias_activation_fusion": True, "activation_func_fp8_input_store": True}
    offloaded = {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]}
    for reason, options in (
        ("Transformer Engine delays the gradients of its weights", {"delay_wgrad_compute": True}),
        ("its experts have a recipe of quantization", {"quant_recipe": object()}),
        ("gates and ups alternate in its experts' weights", alternate),
        ("its activation keeps its input in fp8", in_fp8),
        ("its activation is recomputed", ACTIVATION),
        ("activations of its experts are offloaded to the CPU", offloaded),
    ):
        with mock.patch.multiple(config, create=True, **options):
            assert layer._reason(groups()) == reason
    with mock.patch.object(experts, "_with_fused_impl", True, create=True):
        assert layer._reason(groups()) == "its experts are one operation of Transformer Engine's"
    with mock.patch.object(experts.linear_fc2.weight1, "gtp_remat_size", 2, create=True):
        assert "are split over another group too (generalized" in str(layer._reason(groups()))
    weight = experts.linear_fc1._parameters.pop("weight0")
    assert layer._reason(groups()) == "the weights of its experts are one parameter"
    experts.linear_fc1._parameters["weight0"] = weight
    fc1, experts.linear_fc1 = experts.linear_fc1, torch.nn.Identity()
    assert layer._reason(groups()) == "the linear layers of its experts are not Transformer Engine's"
    experts.linear_fc1 = fc1
    layer.experts.__class__ = type("Other", (TEGroupedMLP,), {})
    assert layer._reason(groups()) == "its experts are Other, neither SequentialMLP nor TEGroupedMLP"
    layer.experts.__class__ = TEGroupedMLP
    assert layer._reason(groups()) is None
    assert layer._why_not(torch.ones(1).bfloat16()).startswith("x is torch.bfloat16, and its experts")
    # Whole models, whose activations Megatron makes again: the result of GELU, of which flux would keep it.
    stock, ours = grouped_pair(grouped_config(layout, **ACTIVATION), rank)
    assert coverage(ours)["decoder.layers.1.mlp"] == "its activation is recomputed"
    loss, grads, calls = train(ours, rank)
    assert not calls
    assert_alike((loss, grads), train(stock, rank)[:2])
    (said,) = [m for m in told.messages if "FluxMoELayer runs" in m]
    assert said.endswith("runs in Megatron's own code: its activation is recomputed")


def grouped_parametrized_and_replaced(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Weights that are no parameters of their module, and modules that were replaced, are found."""
    config = grouped_config(layout, **SWIGLU)
    stock, ours = grouped_pair(config, rank)
    for change in ("parametrization", "module"):
        for model in (stock, ours):
            experts = model.decoder.layers[0].mlp.experts
            if change == "parametrization":
                torch.nn.utils.parametrize.register_parametrization(
                    experts.linear_fc2, "weight1", torch.nn.Tanh()
                )
            else:
                for weight in ("weight0", "weight1"):
                    with torch.no_grad():
                        changed = torch.nn.Parameter(getattr(experts.linear_fc1, weight).detach() * -2)
                    setattr(experts.linear_fc1, weight, changed)
        found = [train(model, rank) for model in (stock, ours)]
        assert len(found[1][2]) == 8 and not found[0][2]
        assert_alike(found[1][:2], found[0][:2])


ALL = (
    grouped_equal_to_stock,
    grouped_data_parallelism,
    grouped_weights_without_copies,
    grouped_falls_back,
    grouped_parametrized_and_replaced,
)
