"""torch.autocast: operators and layers cast as torch's own linear does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import flux
from flux._sharded import local
from flux.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear, column_linear
from flux.testing import spawn

BF16 = torch.bfloat16


def integers(*shape: int, odd: int = 0) -> torch.Tensor:
    """Small, exact in bfloat16, and so are their sums here."""
    return ((torch.arange(torch.Size(shape).numel()) * 5 + odd) % 3 - 1).float().view(shape)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.float64, BF16, torch.float16])
def test_gemm_is_cast_as_linear(given: torch.dtype, dtype: torch.dtype) -> None:
    x, weight, bias = integers(4, 8).to(given), integers(6, 8).to(given), integers(6).to(given)
    with torch.autocast("cpu", dtype):
        expected, result = linear(x, weight, bias), flux.gemm(x, weight, bias)
        assert result.dtype == expected.dtype and torch.equal(result, expected)
        with torch.autocast("cpu", enabled=False):
            assert flux.gemm(x, weight).dtype == given
        out = torch.empty(4, 6, dtype=given)
        assert flux.gemm(x, weight, out=out) is out  # not cast, as torch.mm is not
    assert flux.gemm(x, weight).dtype == given


def test_mixed_types_fit_under_autocast_only() -> None:
    x, weight = integers(4, 8).to(BF16), integers(6, 8)
    with torch.autocast("cpu", BF16):
        assert torch.equal(flux.gemm(x, weight), linear(x, weight))
    with pytest.raises(ValueError, match="gemm: weight: expected dtype torch.bfloat16"):
        flux.gemm(x, weight)


def test_the_gradients_are_those_of_linear() -> None:
    grads = []
    for product in (linear, flux.gemm):
        x, weight, bias = (integers(*shape).requires_grad_() for shape in ((4, 8), (6, 8), (6,)))
        with torch.autocast("cpu", BF16):
            product(x, weight, bias).float().square().sum().backward()
        grads.append([x.grad, weight.grad, bias.grad])
    for of_linear, of_flux in zip(*grads, strict=True):
        assert of_flux.dtype == torch.float32 and torch.equal(of_flux, of_linear)


def every_operator(rank: int, p: int) -> list[str]:
    x, weight, bias = integers(2 * p, 8, odd=rank), integers(6, 8, odd=rank), integers(6)
    ids, scores = torch.arange(4 * p).view(2 * p, 2) % 4, torch.ones(2 * p, 2)
    routing = flux.moe.route(ids, scores, 4)
    w1, w2 = integers(4, 8, 8, odd=rank), integers(4, 8, 8)
    calls: dict[str, Callable[[], Any]] = {
        "gemm_rs": lambda: flux.gemm_rs(x, weight, bias),
        "ag_gemm": lambda: flux.ag_gemm(x, weight, bias),
        "ag_gemm of two": lambda: torch.cat(flux.ag_gemm(x, [weight, weight], [bias, None])),
        "gathered": lambda: flux.ag_gemm(x, weight, return_gathered=True)[1],
        "gemm_ar": lambda: flux.gemm_ar(x, weight, residual=torch.ones(2 * p, 6)),
        "gemm_ar with norm": lambda: flux.gemm_ar(x, weight, norm_weight=torch.ones(6))[1],
        "layer 0": lambda: flux.moe.ag_scatter_gemm(x, w1, routing)[: int(routing.offsets[-1])],
        "layer 1": lambda: flux.moe.gemm_gather_rs(integers(len(routing.rows), 8), w2, routing),
        "grouped": lambda: flux.grouped_gemm(x, w1, torch.tensor([0, 1, 1, 2, 2 * p], dtype=torch.int32)),
    }
    told = []
    for name, call in calls.items():
        plain = call()
        with torch.autocast("cpu", BF16):
            cast = call()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", BF16):
            traced = compiled() if name in ("gemm_rs", "ag_gemm", "gemm_ar") else cast
        for result in (cast, traced):
            if result.dtype != BF16 or not torch.equal(result.float(), plain):
                told.append(f"{name}: {result.dtype}")
    with torch.autocast("cpu", BF16):  # sums and gathers keep their type, as torch's collectives do
        kept = [flux.all_gather(x), flux.all_reduce(x), flux.reduce_scatter(x)]
    told += [f"cast: {result.dtype}" for result in kept if result.dtype != torch.float32]
    return told


def test_every_operator_that_multiplies_is_cast() -> None:
    assert spawn(every_operator, 2, backend="gloo", timeout_s=240) == [[], []]


def layers(rank: int, p: int) -> list[str]:
    told = []
    torch.manual_seed(0)
    makers: dict[str, Callable[..., torch.nn.Module]] = {
        "column": lambda **options: ColumnParallelLinear(8, 4 * p, **options),
        "row": lambda **options: RowParallelLinear(8 * p, 6, **options),
        "mlp": lambda **options: ParallelMLP(8, 8 * p, **options),
    }
    for name, make in makers.items():
        for options in ({}, {"sequence_parallel": False}, {"gradient_accumulation_fusion": True}):
            layer, grads = make(**options), []
            rows = 2 * p if name == "row" or options.get("sequence_parallel") is False else 2
            x = integers(rows, 8, odd=rank if rows == 2 else 0).requires_grad_()
            for ways in ("given", "kept", "recomputed"):
                layer.zero_grad()
                x.grad = None
                for parameter in layer.parameters():
                    if options.get("gradient_accumulation_fusion"):
                        parameter.main_grad = torch.zeros_like(parameter)
                operands = layer if ways != "given" else in_bf16(layer)
                with torch.autocast("cpu", BF16, enabled=ways != "given"):
                    if ways == "recomputed":
                        result = checkpoint(operands, x, use_reentrant=False)
                    else:
                        result = operands(x if ways != "given" else x.to(BF16))
                if result.dtype != BF16:
                    told.append(f"{name} {options} {ways}: {result.dtype}")
                result.float().square().sum().backward()
                grads.append([x.grad, *(gradient(parameter) for parameter in operands.parameters())])
            for given, kept, recomputed in zip(*grads, strict=True):
                if kept.dtype != torch.float32 or not torch.equal(kept, recomputed):
                    told.append(f"{name} {options}: recomputed gradients differ")
                # By hand each gradient is rounded to bfloat16, here those of weights that collect are not.
                if not torch.allclose(kept, given.float(), rtol=2**-7, atol=2**-7):
                    told.append(f"{name} {options}: gradients differ from those of a layer in bfloat16")
    return told


def in_bf16(layer: torch.nn.Module) -> torch.nn.Module:
    import copy

    cast = copy.deepcopy(layer).to(BF16)
    for parameter in cast.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return cast


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    collected = getattr(parameter, "main_grad", None)
    found = parameter.grad if collected is None or parameter.grad is not None else collected
    assert isinstance(found, torch.Tensor)
    return local(found)


def test_layers_train_under_autocast() -> None:
    assert spawn(layers, 2, backend="gloo", timeout_s=240) == [[], []]


def test_vmap_is_a_loop() -> None:
    assert spawn(mapped, 2, backend="gloo") == [[], []]


def mapped(rank: int, p: int) -> list[str]:
    xs, weight, weights = integers(3, 2 * p, 8, odd=rank), integers(6, 8), integers(3, 6, 8, odd=1)
    norm = torch.ones(6)
    cases: dict[str, tuple[Any, Any]] = {
        "gemm": (lambda x, w: flux.gemm(x, w), (0, 0)),
        "gemm_rs": (lambda x, w: flux.gemm_rs(x, w), (0, 0)),
        "ag_gemm": (lambda x, w: flux.ag_gemm(x, w), (0, 0)),
        "ag_gemm of two": (lambda x, w: torch.cat(flux.ag_gemm(x, [w, weight]), -1), (0, 0)),
        "gemm_ar": (lambda x, w: flux.gemm_ar(x, w), (0, 0)),
        "gemm_ar with norm": (lambda x, w: flux.gemm_ar(x, w, norm_weight=norm)[0], (0, 0)),
        "all_reduce": (lambda x, w: flux.all_reduce(x), (0, 0)),
        "reduce_scatter": (lambda x, w: flux.reduce_scatter(x), (0, 0)),
        "all_gather": (lambda x, w: flux.all_gather(x), (0, 0)),
    }
    told = []
    for name, (call, dims) in cases.items():
        result = torch.vmap(call, in_dims=dims)(xs, weights)
        expected = torch.stack([call(x, w) for x, w in zip(xs, weights, strict=True)])
        if not torch.equal(result, expected):
            told.append(name)
    return told


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_other_transforms_are_refused(transform: Any) -> None:
    x = integers(4, 8)
    with pytest.raises(NotImplementedError, match=r"gemm: inside torch.func.grad.*torch.vmap work"):
        transform(lambda weight: flux.gemm(x, weight).sum())(integers(6, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda dual: flux.gemm(dual, integers(6, 8)),
        lambda dual: flux.gemm(integers(4, 6), integers(8, 6), out=dual),
        lambda dual: flux.wgrad_accum(integers(3, 4), integers(3, 8), dual),
        lambda dual: flux.grouped_gemm(dual, integers(1, 6, 8), torch.tensor([0, 4], dtype=torch.int32)),
        lambda dual: column_linear(dual, [integers(6, 8)], group="none"),
    ],
)
def test_tangents_are_refused(call: Any) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(integers(4, 8), integers(4, 8))
        with pytest.raises(NotImplementedError, match="expected a tensor without a tangent"):
            call(dual)
    call = lambda x: flux.gemm(x, integers(6, 8))  # noqa: E731
    assert torch.autograd.functional.jvp(call, integers(4, 8), integers(4, 8))[1].shape == (4, 6)
