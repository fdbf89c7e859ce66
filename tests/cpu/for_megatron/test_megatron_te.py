"""Specs of Transformer Engine on flux, between CPU processes: losses and gradients of the models that
Megatron builds from them. Without the package, a stand-in has its classes (te_stand_in.py).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import megatron_grouped_steps as steps
import pytest
import te_stand_in
import torch
from cases import Answers, by_name, run_scenarios
from megatron_bridge_steps import layers_in_adapters
from megatron_models import (
    KINDS,
    RECOMPUTED,
    SWIGLU,
    Told,
    assert_alike,
    make_config,
    make_model,
    on_cpus,
    prepare,
    run_in_layouts,
    train,
)
from megatron_models import pair as local_pair

pytestmark = on_cpus

MODELS: dict[str, dict[str, Any]] = {
    **KINDS,
    "biases": {"add_bias_linear": True},
    "swiglu, rms norm, norms of queries": {**SWIGLU, "normalization": "RMSNorm", "qk_layernorm": True},
    "norms around one": {"layernorm_zero_centered_gamma": True},
    "recomputation": RECOMPUTED,
}


def spec_of(config: Any, on_flux: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from flux.integrations.megatron import convert_spec

    spec = get_gpt_decoder_block_spec(
        config, True, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    return convert_spec(spec) if on_flux else spec


def pair(config: Any) -> list[Any]:
    """Stock, and on flux, with the same weights, of which no norm is one."""
    models = [make_model(config, spec_of(config, on_flux)) for on_flux in (False, True)]
    with torch.no_grad():
        for name, p in models[0].named_parameters():
            if "norm" in name:
                p.add_(torch.linspace(-0.5, 0.5, p.numel(), dtype=p.dtype))
    models[1].load_state_dict(models[0].state_dict())
    return models


def equal_to_stock(rank: int, world_size: int) -> None:
    from flux.integrations.megatron import convert_model

    told = Told()
    for name, options in MODELS.items():
        for sequence_parallel in (True, False):
            if options.get("num_moe_experts") and not sequence_parallel:
                continue  # Megatron refuses to train these
            config = make_config(sequence_parallel=sequence_parallel, **options)
            stock, ours = pair(config)
            for (n, p), (m, q) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
                # Megatron reads a missing attribute as True. Of experts, releases mark different ones.
                marks, ours_marks = ({"allreduce": True, **vars(x)} for x in (p, q))
                assert n == m and (marks == ours_marks or ".local_experts." in n), (
                    f"{name}: {n}: {marks}, {ours_marks}"
                )
            left = [n for n, why in convert_model(ours).items() if why is not None]
            # The two down-projections of multi-latent attention, of which every rank has all columns.
            kept = ["linear_kv_down_proj", "linear_q_down_proj"] if name == "MLA" else []
            assert sorted({n.rpartition(".")[2] for n in left} - {"word_embeddings"}) == kept, left
            expected = train(stock, 2)
            assert sum("norm" in n for n in expected[1]) >= 5
            assert_alike(train(ours, 2), expected, f"{name}, sequence parallel: {sequence_parallel}")
    assert not [m for m in told.messages if "Megatron's own code" in m], told.messages


def selective_recomputation(rank: int, world_size: int) -> None:
    """Parts of layers are recomputed; of norms the results are freed that flux's layers have saved. (Megatron
    needs Transformer Engine for that, with its own norms too.)
    """
    from flux.integrations.megatron import convert_model, save_gathered_inputs

    recomputed = {
        "dense": ("core_attn", "mlp", "layernorm"),
        "MoE": ("layernorm", "moe"),
        "shared experts": ("layernorm", "shared_experts"),
        "MLA": ("mla_up_proj", "layernorm"),
    }
    for kind, parts in recomputed.items():
        for modules in (*([part] for part in parts), list(parts)):
            for sequence_parallel in (True, False):
                if "num_moe_experts" in KINDS[kind] and not sequence_parallel:
                    continue  # Megatron refuses to train these
                options = {"recompute_granularity": "selective", "recompute_modules": modules}
                config = make_config(**KINDS[kind], **options, sequence_parallel=sequence_parallel)
                stock, ours = local_pair(config)
                convert_model(ours)
                expected = train(stock)
                for saves in (False, True):
                    save_gathered_inputs(ours, saves)
                    assert_alike(train(ours), expected, f"{kind}, {modules}, {sequence_parallel=}, {saves=}")


def the_command_line(rank: int, world_size: int) -> None:
    """`--spec flux.integrations.megatron gpt_layer_spec`, whose stock model is Transformer Engine's."""
    from flux.integrations.megatron import get_flux_layer_spec, gpt_layer_spec

    config = make_config(sequence_parallel=True, normalization="RMSNorm", qk_layernorm=True)
    config.transformer_impl = "transformer_engine"
    stock, ours = pair(config)
    expected = train(stock)
    assert_alike(train(ours), expected)
    for spec in (gpt_layer_spec, get_flux_layer_spec(config)):
        model = make_model(config, spec)
        model.load_state_dict(stock.state_dict())
        assert_alike(train(model), expected)
        names = {type(module).__name__ for module in model.modules()}
        assert {"FluxLayerNormColumnParallelLinear", "TEDotProductAttention"} <= names
        assert not {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} & names


def fp32_residual(rank: int, world_size: int) -> None:
    """fp32_residual_connection: norms take fp32, products are bf16."""
    config = make_config(sequence_parallel=True, params_dtype=torch.bfloat16, bf16=True)
    config = dataclasses.replace(config, fp32_residual_connection=True)
    stock, ours = pair(config)
    (loss, grads), (our_loss, our_grads) = train(stock), train(ours)
    assert our_loss.dtype == loss.dtype and abs(our_loss - loss) < 0.01 * loss
    for name, grad in grads.items():
        got = our_grads[name]
        assert got.dtype == grad.dtype == torch.bfloat16, name
        assert (got - grad).float().norm() < 0.05 * grad.float().norm(), name


def delayed_gradients(rank: int, world_size: int) -> None:
    """delay_wgrad_compute: backward_dw gives what Transformer Engine's gives, batch by batch."""
    config = make_config(sequence_parallel=True, add_bias_linear=True)
    config.delay_wgrad_compute = True  # its constructor wants experts and a schedule that runs on GPUs only
    found = []
    for model in pair(config):
        _, grads = train(model)
        delayed = {
            name: p for name, p in model.named_parameters() if getattr(p, "skip_backward_post_hook", False)
        }
        layers = {name.rpartition("_")[2].removesuffix(".weight") for name in delayed}
        assert layers == {"qkv", "proj", "fc1", "fc2"}
        assert all(grads[name] is None for name in delayed)
        called: list[str] = []
        for layer in model.decoder.layers:
            for part in (layer.self_attention.linear_qkv, layer.mlp.linear_fc2):
                part.register_wgrad_accumulation_and_reduce_hooks(partial(called.append, ""))
            layer.self_attention.backward_dw()
            layer.mlp.backward_dw()
        assert len(called) == 4
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_alike(found[1], found[0])


def fp8_contexts(rank: int, world_size: int) -> None:
    """Layers multiply in fp8 where Megatron's contexts say so: not those at both ends with
    first_last_layers_bf16, not the output layer, and no layer that is called outside of them.
    """
    from flux.integrations.megatron import convert_model, linear

    for recipe, ends_in_16_bits in product(("tensorwise", "blockwise"), (False, True)):
        config = make_config(
            num_layers=3,
            sequence_parallel=True,
            fp8="hybrid",
            fp8_recipe=recipe,
            first_last_layers_bf16=ends_in_16_bits,
        )
        model = make_model(config, spec_of(config, True))
        convert_model(model)
        in_fp8: list[bool] = []

        def note(call: Any, found: list[bool] = in_fp8) -> Any:
            return lambda *args, fp8, **options: (
                found.append(fp8 is not None) or call(*args, fp8=fp8, **options)
            )

        with (
            mock.patch.object(linear, "column_linear", note(linear.column_linear)),
            mock.patch.object(linear, "row_linear", note(linear.row_linear)),
        ):
            train(model)
            ends = [not ends_in_16_bits] * 4
            assert in_fp8 == [*ends, *[True] * 4, *ends, False], (recipe, in_fp8)
            del in_fp8[:]
            model.decoder.layers[1].mlp(torch.randn(8, 1, config.hidden_size))
            assert in_fp8 == [False, False]


SCENARIOS = by_name(
    equal_to_stock, selective_recomputation, the_command_line, fp32_residual, delayed_gradients, fp8_contexts
)
IN_LAYOUTS = {"TP 2": (layers_in_adapters, *steps.ALL[:1]), "EP 2": (layers_in_adapters, *steps.ALL)}
NAMES = [f"{layout}: {each.__name__}" for layout, part in IN_LAYOUTS.items() for each in part]


def run(rank: int, world_size: int) -> dict[str, str]:
    if importlib.util.find_spec("transformer_engine") is None:
        te_stand_in.install()
    prepare(2)
    from megatron.core import parallel_state

    told = run_scenarios(SCENARIOS, rank, world_size)
    parallel_state.destroy_model_parallel()
    return told | run_in_layouts(IN_LAYOUTS, rank, world_size)


# One set of processes: importing Megatron takes two seconds.
answers = Answers(run, timeout_s=240)


@pytest.mark.parametrize("name", [*SCENARIOS, *NAMES])
def test_transformer_engines_specs(name: str) -> None:
    told = answers.of(2, name)
    assert told == [""] * 2, "\n".join(told)
