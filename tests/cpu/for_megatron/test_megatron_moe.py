"""Megatron's layers of experts on flux between CPU processes, for tensor, expert and mixed parallelism: the
loss, the gradients and the checkpoints of stock Megatron.
"""

from __future__ import annotations

import contextlib
import copy
import io
import types
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Answers
from megatron_models import (
    BATCH,
    HIDDEN,
    LAYOUTS,
    SWIGLU,
    MoECalls,
    OnCpu,
    Told,
    assert_alike,
    copies,
    flux_layers,
    forward,
    grouped_config,
    grouped_pair,
    make_moe_config,
    moe_pair,
    of_experts,
    on_cpus,
    replicas,
    run_in_layouts,
    summed_grads,
)
from megatron_moe_steps import delayed_gradients, gradients_of_scores, what_training_costs

pytestmark = on_cpus

MODELS: dict[str, dict[str, Any]] = {
    "gelu, aux loss": {"moe_aux_loss_coeff": 0.1},
    "swiglu": SWIGLU,
    "clamped, recomputed": {
        **SWIGLU,
        "activation_func_clamp_value": 0.01,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "shared expert, dropped tokens": {
        "moe_shared_expert_intermediate_size": 16,
        "moe_expert_capacity_factor": 0.5,
        "moe_aux_loss_coeff": 0.1,
    },
    # Not with clamping, which Megatron-Core after 0.19 refuses.
    "linear offset, sigmoid, losses of sequences and logits": {
        **SWIGLU,
        "glu_linear_offset": 1.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.01,
    },
}
FEWER = ("swiglu",)  # for the mixed layout


def train(model: Any, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
    model.zero_grad(set_to_none=True)
    with MoECalls() as calls:
        loss = forward(model, seed)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, calls.names


def facts(model: Any, rank: int) -> dict[str, Any]:
    metadata = {"dp_cp_group": dist.new_group([rank], use_local_synchronization=True)}
    described = {}
    for name, value in model.sharded_state_dict(metadata=metadata).items():
        shape = getattr(value, "local_shape", None)
        of_whole = (getattr(value, name, None) for name in ("global_shape", "global_offset"))
        described[name] = (value.key, *of_whole, value.replica_id, shape)
    return described


def equal_to_stock(
    rank: int, world_size: int, layout: dict[str, Any], grouped: dict[str, dict[str, Any]] | None = None
) -> None:
    """Losses, gradients, parameters and checkpoints. grouped: models of Transformer Engine's grouped experts,
    by convert_spec, and by convert_model.
    """
    from flux.integrations.megatron import coverage

    told = Told()
    # Without tensor parallelism ranks are replicas, with batches of their own.
    seed = rank // layout["tensor_model_parallel_size"]
    for number, (name, options) in enumerate((grouped or MODELS).items()):
        if grouped:
            stock, ours = grouped_pair(grouped_config(layout, **options), rank, by_model=number == 1)
            assert type(ours.decoder.layers[0].mlp.experts).__name__ == "TEGroupedMLP"
        elif world_size == 4 and name not in FEWER:
            continue
        else:
            stock, ours = moe_pair(make_moe_config(layout, **options), rank)
            assert "decoder.layers.0.mlp" not in flux_layers(stock)
        assert "decoder.layers.0.mlp" in flux_layers(ours) and coverage(ours)["decoder.layers.0.mlp"] is None
        for (n, p), (m, q) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
            assert n == m and (vars(p) == vars(q) or grouped and n not in of_experts(ours)), f"{name}: {n}"
        (*expected, none), (*found, calls) = train(stock, seed), train(ours, seed)
        others = {"activation_func_clamp_value", "glu_linear_offset"} & {*options}
        # Of others than SwiGLU: Megatron's code.
        rows = ["activate_rows"] if "gated_linear_unit" in options and not others else []
        assert not none and calls == ["route", "ag_scatter_gemm", *rows, "gemm_gather_rs"] * 2, (name, calls)
        assert len(of_experts(stock)) >= 8 and all(expected[1][n] is not None for n in of_experts(stock))
        assert any("router" in n for n in found[1])
        assert_alike(found, expected, name)
        with torch.no_grad():
            assert_alike(forward(ours.eval(), seed), forward(stock.eval(), seed))
    assert facts(ours, rank) == facts(stock, rank) and len(facts(ours, rank)) > 8
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1.0)
    stock.load_state_dict(ours.state_dict())
    assert_alike(of_experts(stock), of_experts(ours))
    warned = [m for m in told.messages if "FluxMoELayer" in m or "Grouped" in m]
    assert not warned, "neither calls nor convert_spec leave anything of the experts to Megatron"


def alltoall_becomes_flux(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Whatever dispatcher is configured."""
    stock, _ = moe_pair(make_moe_config(layout), rank)
    _, ours = moe_pair(make_moe_config(layout, moe_token_dispatcher_type="alltoall"), rank)
    assert_alike(train(ours, 7 + rank)[:2], train(stock, 7 + rank)[:2])


def uneven_tokens(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """variable_seq_lengths. Stock gets as many tokens on all ranks, and a loss without the surplus."""
    uneven = {"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": True}
    stock, _ = moe_pair(make_moe_config(layout), rank)
    _, ours = moe_pair(make_moe_config(layout, **uneven), rank)
    length = (2, 5)[rank // layout["tensor_model_parallel_size"]]
    found = []
    for model, rows in ((stock, 5), (ours, length)):
        layer = model.decoder.layers[0].mlp
        x = torch.randn(5, BATCH, HIDDEN, generator=torch.Generator().manual_seed(rank))[:rows]
        x.requires_grad_()
        with MoECalls() as calls:
            y = layer(x)[0][:length]
        assert len(calls.names) == (3 if model is ours else 0)
        y.sin().sum().backward()
        assert x.grad is not None
        found.append([y.detach(), x.grad[:length], *(p.grad for p in layer.parameters())])
    assert_alike(found[1], found[0])


def falls_back(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Where flux does not apply Megatron's own code runs, with the same result, and one line says why."""
    told = Told()
    _, ours = moe_pair(make_moe_config(layout), rank)
    expected = train(ours, rank)[:2]
    layer = ours.decoder.layers[0].mlp
    hook = layer.experts.local_experts[1].linear_fc2.register_forward_pre_hook(lambda *_: None)
    for _ in range(2):
        loss, grads, calls = train(ours, rank)
        assert len(calls) == 3, "the other layer has no hooks"
        assert_alike((loss, grads), expected)
    hook.remove()
    assert len(train(ours, rank)[2]) == 6, "without the hook flux runs again"
    stock, ours = moe_pair(make_moe_config(layout, add_bias_linear=True), rank)
    loss, grads, calls = train(ours, rank)
    assert not calls
    assert_alike((loss, grads), train(stock, rank)[:2])
    for option, value, reason in (
        ("fp8", "hybrid", "its experts compute in fp8 or fp4"),
        ("fp4", "e2m1", "its experts compute in fp8 or fp4"),
        ("use_te_activation_func", True, "activation is Transformer Engine's"),
        ("moe_apply_probs_on_input", True, "probabilities are applied before"),
        ("moe_pad_expert_input_to_capacity", True, "padded to their capacity"),
        ("moe_shared_expert_overlap", True, "shared experts overlap"),
        ("overlap_moe_expert_parallel_comm", True, "overlaps with another batch"),
        ("overlap_dispatch_backward_with_experts_wgrad", True, "overlaps with weight gradients"),
        ("moe_token_dispatcher_type", "flex", "dispatcher is flex"),
        ("moe_router_topk", 17, "more than 16 experts"),
    ):
        with mock.patch.object(layer.config, option, value, create=True):
            assert reason in layer._reason(groups())
    of_ranks = groups()
    of_ranks.tp_ep = types.SimpleNamespace(size=of_ranks.tp_ep.size, rank=lambda: 1 - rank)
    assert layer._reason(of_ranks) == "the ranks of its group are in another order"
    of_ranks.tp_ep = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    assert layer._reason(of_ranks) == "the group of its experts has one rank"
    layer.config._cpu_offloading_context = contextlib.nullcontext()
    assert layer._why_not(torch.ones(1)) == "activations are offloaded to the CPU"
    layer.config._cpu_offloading_context = None
    assert layer._why_not(torch.ones(1).bfloat16()).startswith("x is torch.bfloat16, and its experts")
    weight = layer.experts.local_experts[1].linear_fc2.weight
    other = copy.copy(layer.experts.local_experts[0].linear_fc1)
    other._parameters = {**other._parameters, "more": torch.nn.Parameter(torch.ones(1).double())}
    changes = (
        (lambda: setattr(weight, "data", weight.double()), lambda: setattr(weight, "data", weight.float())),
        (
            partial(setattr, layer.experts.local_experts[0], "linear_fc1", other),
            lambda: other._parameters.pop("more"),
        ),
    )
    for change, restore in changes:
        assert layer._why_not(torch.ones(1)) is None
        change()
        for _ in range(2):
            assert layer._why_not(torch.ones(1)).startswith("x is torch.float32, and its experts")
        restore()
    experts, layer.experts = layer.experts, torch.nn.Identity()
    assert layer._reason(groups()) == "its experts are Identity, neither SequentialMLP nor TEGroupedMLP"
    layer.experts = experts
    assert layer._reason(groups()) is None
    assert [m.split(": ", 2)[1:] for m in told.messages if "FluxMoELayer" in m] == [
        ["FluxMoELayer runs in Megatron's own code", "hooks run before its experts"],
        ["FluxMoELayer runs in Megatron's own code", "its experts have biases"],
    ]


def dispatchers_of_others(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """A dispatcher that Megatron chose for a call, as its inference engine does, is left alone."""
    told = Told()
    _, ours = moe_pair(make_moe_config(layout, moe_shared_expert_intermediate_size=16), rank)
    layer = ours.decoder.layers[0].mlp
    x = torch.randn(5, BATCH, HIDDEN, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        expected = layer(x)[0]
        other = copy.copy(layer._dispatchers[False])
        layer.token_dispatcher = other
        with MoECalls() as calls:
            assert_alike(layer(x)[0], expected)
        assert not calls.names and layer.token_dispatcher is other
        layer.token_dispatcher = layer._dispatchers[False]
        with MoECalls() as calls:
            assert_alike(layer(x)[0], expected)
    assert len(calls.names) == 3
    assert [m for m in told.messages if "another dispatcher" in m] == [
        "flux: FluxMoELayer runs in Megatron's own code: another dispatcher was chosen for this call"
    ]


def under_autocast(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """The dtype of stock Megatron's result, on flux, for x in fp32 and in bf16."""
    told = Told()
    stock, ours = (model.decoder.layers[0].mlp for model in moe_pair(make_moe_config(layout), rank))
    x = torch.randn(5, BATCH, HIDDEN, generator=torch.Generator().manual_seed(rank))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16), MoECalls() as calls:
            expected = stock(x.to(dtype))[0]
            y = ours(x.to(dtype))[0]
        assert calls.names == ["route", "ag_scatter_gemm", "gemm_gather_rs"], calls.names
        assert y.dtype == expected.dtype == torch.bfloat16
        assert (y - expected).float().norm() < 0.02 * expected.float().norm()
    # Stock's own backward pass of the router and of the experts fails here; that of flux's does not.
    ours.router.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        ours(x.bfloat16())[0].float().square().sum().backward()
    grads = [p.grad for n, p in ours.named_parameters() if ".local_experts." in n]
    assert len(grads) >= 4 and all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    assert not [m for m in told.messages if "FluxMoELayer" in m], told.messages


def parameters_arrive(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """overlap_param_gather: Megatron's data parallelism gathers parameters while the layers before run."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    from flux.integrations.megatron import accumulate_into_main_grad, convert_model

    def losses(number: int, overlaps: bool) -> list[torch.Tensor]:
        model = moe_pair(config, rank)[number]
        if number:
            convert_model(model)
            accumulate_into_main_grad(model)
        overlap = {"overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps}
        wrapped = replicas(model, use_distributed_optimizer=True, bucket_size=1000, **overlap)
        found = []
        for step in range(3):
            wrapped.zero_grad_buffer()
            with MoECalls() as calls:
                loss = forward(wrapped, 10 * step + replica)
            assert len(calls.names) == (6 if number else 0), calls.names
            loss.backward()
            assert {p.grad_added_to_main_grad for p in of_experts(model).values()} == {number == 1}
            summed_grads(wrapped)
            found.append(loss.detach())
            # In place of the optimizer, which wants CUDA tensors: each rank has its part of the parameters.
            for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
                size = group.intra_distributed_optimizer_instance_size
                own = group.intra_distributed_optimizer_instance_rank
                for bucket in group.buckets:
                    part = shard_buffer(bucket.param_data, size)[own]
                    updated = part - 0.05 * shard_buffer(bucket.grad_data, size)[own]
                    bucket.param_data.fill_(float("nan"))
                    part.copy_(updated)
            if not overlaps:
                wrapped.start_param_sync()
        return found

    config = make_moe_config(layout, moe_shared_expert_intermediate_size=16)
    replica = rank // layout["tensor_model_parallel_size"]
    told = Told()
    with OnCpu():
        expected = losses(0, False)
        assert_alike(losses(0, True), expected)
        assert_alike(losses(1, True), expected)
    assert not [m for m in told.messages if "FluxMoELayer" in m], told.messages


def weights_without_copies(
    rank: int, world_size: int, layout: dict[str, Any], config: Any = None, pair: Any = moe_pair
) -> None:
    """Each pass reads the experts' weights where they lie: laid out at conversion, and in the buffer of the
    distributed optimizer. The results are those of copies.
    """
    from flux.integrations.megatron import convert_model

    stock, ours = pair(config or make_moe_config(layout, **SWIGLU), rank)

    def addresses() -> list[int]:
        return [p.data_ptr() for p in of_experts(ours).values()]

    def clone() -> None:
        for p in of_experts(ours).values():
            p.data = p.data.clone()

    expected = train(ours, rank)[:2]
    for change, expected_copies in (
        (dict, 0),
        (clone, 8),  # two layers of two products, forward and backward
        (lambda: convert_model(ours), 0),
        (lambda: ours.double().float(), 0),
    ):
        change()
        with copies(ours) as copied:
            assert_alike(train(ours, rank)[:2], expected)
        assert copied() == expected_copies
    # An optimizer's step and a checkpoint reach what the layers read.
    train(stock, rank)
    for model in (stock, ours):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert_alike(forward(ours, rank), forward(stock, rank))
    saved = io.BytesIO()
    torch.save({n: p.detach() for n, p in ours.named_parameters()}, saved)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1.0)
    saved.seek(0)
    ours.load_state_dict(torch.load(saved), strict=False)
    with OnCpu():
        with copies(ours) as copied:
            assert_alike(train(ours, rank)[:2], train(stock, rank)[:2])
        before, grads = addresses(), train(stock, rank)[1]
        ours.zero_grad(set_to_none=True)
        wrapped = replicas(ours, use_distributed_optimizer=True)
        assert not set(before) & set(addresses()), "they lie in its buffer"
        with copies(ours) as copied_too:
            forward(wrapped, rank).backward()
        assert not copied() and not copied_too()
        assert_alike({n: p.main_grad for n, p in ours.named_parameters()}, grads)
        before = addresses()
        convert_model(ours)
        assert addresses() == before, "the buffer keeps its parameters"


def replaced_modules(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """No call walks the modules of the experts. Those that were replaced or changed since are found."""
    stock, ours = (m.decoder.layers[0].mlp for m in moe_pair(make_moe_config(layout, **SWIGLU), rank))
    x = torch.randn(5, BATCH, HIDDEN, generator=torch.Generator().manual_seed(rank))

    def is_alike(calls_of_flux: int) -> None:
        found = []
        for layer in (stock, ours):
            layer.zero_grad(set_to_none=True)
            with MoECalls() as calls:
                y = layer(x)[0]
            y.sin().sum().backward()
            found.append([y.detach(), {name: p.grad for name, p in layer.named_parameters()}])
        assert len(calls.names) == calls_of_flux
        assert_alike(found[1], found[0])

    is_alike(4)
    with torch.no_grad(), mock.patch.object(torch.nn.Module, "named_modules", side_effect=AssertionError):
        ours(x)
    for layer in (stock, ours):
        other = copy.copy(layer.experts.local_experts[0].linear_fc1)
        other._parameters = {**other._parameters, "weight": torch.nn.Parameter(other.weight.detach() * -2)}
        layer.experts.local_experts[0].linear_fc1 = other
        linear = layer.experts.local_experts[1].linear_fc2
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", torch.nn.Tanh())
    is_alike(4)
    for layer in (stock, ours):
        others = copy.copy(layer.experts)
        others._modules = {"local_experts": torch.nn.ModuleList(reversed(layer.experts.local_experts))}
        layer.experts = others
    is_alike(4)
    ours.experts.local_experts[1]._forward_pre_hooks = {0: lambda *_: None}  # another dict
    is_alike(0)


def groups() -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    return get_default_pg_collection()


SCENARIOS = {
    "TP 2": (equal_to_stock,),
    "EP 2": (
        equal_to_stock,
        alltoall_becomes_flux,
        delayed_gradients,
        what_training_costs,
        gradients_of_scores,
        uneven_tokens,
        falls_back,
        dispatchers_of_others,
        under_autocast,
        parameters_arrive,
        weights_without_copies,
        replaced_modules,
    ),
    "TP 2, EP 2": (equal_to_stock, delayed_gradients, uneven_tokens, parameters_arrive),
}
NAMES = [(LAYOUTS[layout][0], f"{layout}: {s.__name__}") for layout, part in SCENARIOS.items() for s in part]
# Importing Megatron takes most of the time: one set of processes per world size runs all layouts.
answers = Answers(partial(run_in_layouts, SCENARIOS), timeout_s=240)


@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_experts_equal_stock_megatron(world_size: int, name: str) -> None:
    assert answers.of(world_size, name) == [""] * world_size
