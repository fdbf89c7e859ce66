"""Megatron-Core on flux between CPU processes: a small GPT gives the loss, the gradients and the checkpoints
of stock Megatron.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import sys
from functools import partial
from typing import Any
from unittest import mock

import megatron_spec_steps as steps
import pytest
import torch
import torch.distributed as dist
from cases import scenario_test
from megatron_models import (
    KINDS,
    MIXTURE,
    MODELS,
    Told,
    assert_alike,
    flux_layers,
    forward,
    make_config,
    make_model,
    on_cpus,
    pair,
    prepare,
    replicas,
    stock_spec,
    summed_grads,
    train,
)

from flux.ops import autograd

pytestmark = on_cpus


def equal_to_stock(rank: int, world_size: int) -> None:
    from flux.integrations.megatron import save_gathered_inputs

    for name, options in MODELS.items():
        stock, ours = pair(make_config(**options))
        linears = [n for n in flux_layers(ours) if n.endswith(("qkv", "proj", "fc1", "fc2"))]
        assert len(linears) == 8 and not any(n in flux_layers(stock) for n in linears), name
        for (n, p), q in zip(stock.named_parameters(), ours.parameters(), strict=True):
            assert torch.equal(p, q), f"{name}: {n} starts differently"
            assert {k: v for k, v in vars(p).items()} == {k: v for k, v in vars(q).items()}, f"{name}: {n}"
        expected = train(stock)
        assert len(expected[1]) >= 11
        assert_alike(train(ours), expected, name)
        save_gathered_inputs(ours)
        with mock.patch.object(autograd, "gemm_rs_with_gather") as gathers_again:
            assert_alike(train(ours), expected, name)
        assert not gathers_again.called, "on CPUs nothing is gathered beside a GEMM"
    with pytest.raises(ValueError, match="save_gathered_inputs: save: expected True, False or 'auto'"):
        save_gathered_inputs(ours, "no")


def gradient_accumulation(rank: int, world_size: int) -> None:
    """Two micro-batches into main_grad, without Apex: with and without Megatron's hooks in mind."""
    from flux.integrations.megatron import accumulate_into_main_grad

    for options in ({"sequence_parallel": True}, {}):
        for hooks in (False, True):
            stock, ours = pair(make_config(**options))
            _, expected = train(stock, microbatches=2)
            accumulate_into_main_grad(ours)
            by_flux = [name for name in expected if ".linear_" in name and name.endswith(".weight")]
            for name in by_flux:
                weight = ours.get_parameter(name)
                weight.main_grad = torch.zeros_like(weight)
                if hooks:
                    weight.grad_added_to_main_grad = False
            _, grads = train(ours, microbatches=2)
            assert len(by_flux) == 8
            for name in by_flux:
                weight = ours.get_parameter(name)
                assert (weight.grad is not None) == hooks
                assert not hooks or weight.grad_added_to_main_grad
                grads[name] = weight.main_grad
            assert_alike(grads, expected)


def delayed_gradients(rank: int, world_size: int) -> None:
    """delay_wgrad_compute: Megatron's data parallelism gets gradients of weights from backward_dw, as its
    schedules call it: of attention and MLP, after each micro-batch or later.
    """
    from flux.integrations.megatron import accumulate_into_main_grad, convert_model

    def gradients(model: Any, delays: bool, overlaps: bool, late: bool) -> dict[str, torch.Tensor]:
        wrapped = replicas(model, overlap_grad_reduce=overlaps, delay_wgrad_compute=delays)
        linears = [layer for layer in model.modules() if getattr(layer, "flux_deferred", None) is not None]
        assert len(linears) == (8 if delays else 0)

        def backward_dw() -> None:
            before = [layer.weight.main_grad.clone() for layer in linears]
            for layer in reversed(model.decoder.layers):
                layer.mlp.backward_dw()
                layer.self_attention.backward_dw()
            assert not any(
                torch.equal(layer.weight.main_grad, grad) for layer, grad in zip(linears, before, strict=True)
            )

        for seed in (0, 1):
            with wrapped.no_sync() if seed == 0 else contextlib.nullcontext():
                forward(wrapped, seed).backward()
                assert all(layer.weight.grad is None for layer in linears)
                assert seed or not any(layer.weight.main_grad.any() for layer in linears)
                if delays and not late:
                    backward_dw()
        for _ in range(2 if late else 0):
            backward_dw()
        assert not any(len(layer.flux_deferred) for layer in linears)
        return summed_grads(wrapped)

    told = Told()
    logging.getLogger("flux").setLevel(logging.INFO)
    for options in ({"sequence_parallel": True, "add_bias_linear": True}, {}):
        config = make_config(**options)
        expected = gradients(pair(config)[0], False, False, False)
        config.delay_wgrad_compute = True  # its constructor accepts it only with experts
        for by_flux, overlaps, late in ((False, False, True), (True, False, False), (True, True, False)):
            ours = pair(config)[1]
            convert_model(ours)  # the output layer, of which nobody calls backward_dw
            accumulate_into_main_grad(ours, by_flux)
            assert_alike(gradients(ours, True, overlaps, late), expected)
    assert ["FluxColumnParallelLinear" in m for m in told.messages if "delay_wgrad_compute" in m] == [True]


def parameters_arrive_when_a_module_is_called(rank: int, world_size: int) -> None:
    """overlap_param_gather: hooks fetch the parameters of a module before it runs."""
    from flux.integrations.megatron import convert_model

    options = {"sequence_parallel": True, "add_bias_linear": True}
    for more in ({}, {"sequence_parallel": False}, KINDS["MLA"]):
        ours = pair(make_config(**{**options, **more}))[1]
        convert_model(ours)
        expected = train(ours)
        arriving = {name: p.detach().clone() for name, p in ours.named_parameters()}

        def fetch(prefix: str, module: Any, arriving: dict[str, torch.Tensor] = arriving) -> None:
            with torch.no_grad():
                for name, p in module.named_parameters(prefix, recurse=False):
                    p.copy_(arriving[name])

        for prefix, module in ours.named_modules():
            module.register_forward_pre_hook(lambda module, _, prefix=prefix: fetch(prefix, module))
        with torch.no_grad():
            for p in ours.parameters():
                p.fill_(float("nan"))
        assert_alike(train(ours), expected)


def accepts_the_option_without_apex(rank: int, world_size: int) -> None:
    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

    config = make_config(gradient_accumulation_fusion=True)
    common = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False, "skip_bias_add": True}
    column = FluxColumnParallelLinear(8, 16, **common)
    row = FluxRowParallelLinear(16, 8, input_is_parallel=True, **common)
    for layer in (column, row):
        assert layer.config is config and layer.flux_accumulates
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    y, bias = row(column(torch.ones(4, 1, 8))[0])
    assert bias is None
    y.sum().backward()
    assert column.weight.grad is None and row.weight.grad is None
    row.backward_dw()  # nothing was delayed


def checkpoints(rank: int, world_size: int) -> None:
    stock, ours = pair(make_config(sequence_parallel=True, add_bias_linear=True))
    metadata = {"dp_cp_group": dist.new_group([rank], use_local_synchronization=True)}

    def facts(model: Any) -> dict[str, Any]:
        described = {}
        for value in model.sharded_state_dict(metadata=metadata).values():
            if hasattr(value, "global_offset"):
                shape = getattr(value, "local_shape", None)  # objects, such as extra state, have none
                place = (value.global_shape, value.global_offset, value.replica_id, shape)
                described[value.key] = (*place, value.data)
        return described

    expected, got = facts(stock), facts(ours)
    assert len(expected) > 15 and got.keys() == expected.keys()
    for key, (*where, data) in expected.items():
        assert list(got[key][:-1]) == where, key
        assert type(got[key][-1]) is type(data), key
        assert not isinstance(data, torch.Tensor) or torch.equal(got[key][-1], data), key
    # The plain state dicts of stock and flux are interchangeable too, in both directions.
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1.0)
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())


def replicated_gradients(rank: int, world_size: int) -> None:
    """reduce_replicated_grads sums what Megatron marks, also after torch has dropped the marks."""
    from flux.layers import reduce_replicated_grads

    ours = pair(make_config(sequence_parallel=True, add_bias_linear=True))[1]
    _, grads = train(ours)
    marked = {name for name, p in ours.named_parameters() if getattr(p, "sequence_parallel", False)}
    assert {name.rpartition(".")[2] for name in marked if ".linear_" in name} == {"bias"}
    assert len(marked) == 2 * (2 * 2 + 2) + 2  # norms and row-parallel biases of two layers, the final norm
    for module in ours.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module._parameters[name] = torch.nn.Parameter(p.detach())  # as to_empty and load_state_dict do
            module._parameters[name].grad = p.grad.clone()
    assert not any(hasattr(p, "sequence_parallel") for p in ours.parameters())
    reduce_replicated_grads(ours)
    for name, p in ours.named_parameters():
        if name in marked:
            dist.all_reduce(grads[name])
        assert torch.equal(p.grad, grads[name]), name


def norms(rank: int, world_size: int) -> None:
    from flux.integrations.megatron import FluxNorm

    config = make_config(sequence_parallel=True)
    config.normalization = "L2Norm"
    with pytest.raises(ValueError, match="FluxNorm: config.normalization: expected LayerNorm or RMSNorm"):
        FluxNorm(config, 8)
    config.normalization, config.layernorm_zero_centered_gamma = "RMSNorm", True
    norm = FluxNorm(config, 8)
    assert not norm.weight.any() and norm.bias is None and norm.weight.sequence_parallel
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), None, 1e-5))


def in_place(rank: int, world_size: int) -> None:
    """convert_model: built models of all kinds, with the output layer, its own or the embedding's weight."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from flux.integrations.megatron import FluxColumnParallelLinear, convert_model, convert_spec, coverage

    told = Told()
    for name, options in KINDS.items():
        config = make_config(sequence_parallel=True, **options)
        for tied in (False, True):
            spec, more = stock_spec(config), {"share_embeddings_and_output_weights": tied}
            stock, ours = make_model(config, spec, **more), make_model(config, spec, **more)
            before = {id(p) for p in ours.parameters()}
            assert not [n for n, reason in coverage(ours).items() if reason is None], name
            found = convert_model(ours)
            assert coverage(ours) == found and {id(p) for p in ours.parameters()} == before
            left = {n: reason for n, reason in found.items() if reason is not None}
            assert list(left) == ["embedding.word_embeddings"] and "looks rows up" in left[next(iter(left))]
            assert type(ours.output_layer) is FluxColumnParallelLinear
            assert_alike(train(ours), train(stock))
    # By default, Megatron accepts only its own classes for two layers of multi-latent attention.
    make_model(config, convert_spec(stock_spec(config)))
    assert not [m for m in told.messages if "Megatron's own code" in m]
    with pytest.raises(ValueError, match="expected layers that flux serves, but 0 of 0"):
        convert_model(torch.nn.Linear(2, 2))
    assert convert_model(torch.nn.Linear(2, 2), allow_unchanged=True) == {}
    odd = type("Odd", (ColumnParallelLinear,), {})
    layer = odd(8, 4, config=make_config(), init_method=torch.nn.init.ones_, bias=False)
    assert convert_model(layer, allow_unchanged=True) == {"": "its class is Odd"}
    fp8 = copy.copy(layer.config)
    fp8.fp8 = "hybrid"
    layer.__class__, layer.config = ColumnParallelLinear, fp8
    with pytest.raises(ValueError, match="got 'delayed'; in scripts: --fp8-recipe tensorwise"):
        convert_model(layer)


def autocast(rank: int, world_size: int) -> None:
    """Under torch.autocast layers give the dtype that torch's linear gives, whatever x is, on flux."""
    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

    told = Told()
    common: dict[str, Any] = {"init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": True}
    config = make_config(sequence_parallel=True)
    column = FluxColumnParallelLinear(8, 16, config=config, **common)
    row = FluxRowParallelLinear(16, 8, config=config, input_is_parallel=True, **common)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(4, 1, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = row(column(x)[0])
        assert y.dtype == torch.bfloat16 and (y == 128).all()
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype
        assert column.weight.grad.dtype == torch.float32
    assert not told.messages


def cuda_graphs(rank: int, world_size: int) -> None:
    """If the config asks for graphs, calls before a capture run as the captured ones."""
    from megatron.core import parallel_state

    from flux.comm.workspace import expecting_graphs
    from flux.integrations.megatron import FluxColumnParallelLinear, convert_model

    group = parallel_state.get_tensor_model_parallel_group()
    for options in ({}, MIXTURE):
        stock, _ = pair(make_config(sequence_parallel=True, **options))
        assert group not in expecting_graphs
        stock.config.cuda_graph_impl = "full_iteration"  # now, for old releases would begin to capture layers
        convert_model(stock)
        assert group in expecting_graphs
        expecting_graphs.clear()
    config, options = stock.config, {"bias": False, "gather_output": False}
    FluxColumnParallelLinear(32, 16, config=config, init_method=config.init_method, **options)
    assert group in expecting_graphs
    expecting_graphs.clear()


# Importing Megatron takes seconds: one set of processes.
test_megatron = scenario_test(
    (2,),
    cuda_graphs,
    norms,
    in_place,
    autocast,
    equal_to_stock,
    gradient_accumulation,
    delayed_gradients,
    parameters_arrive_when_a_module_is_called,
    accepts_the_option_without_apex,
    checkpoints,
    replicated_gradients,
    *steps.ALL,
    prepare=partial(prepare, 2),
    timeout_s=240,
)


def test_without_megatron_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith("flux.integrations.megatron")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match="pip install megatron-core"):
        importlib.import_module("flux.integrations.megatron")
