"""Megatron's tensorwise and blockwise recipes on flux, between CPU processes: layers multiply what their
operands are rounded to, forward and backward, models train, and other recipes are refused.

Runs wherever there is a Megatron-Core; `make megatron` runs it for all releases that flux is tested with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Answers, by_name, run_scenarios
from megatron_models import (
    KINDS,
    MIXTURE,
    SWIGLU,
    OnCpu,
    Told,
    make_config,
    make_model,
    needs_megatron,
    pair,
    prepare,
    stock_spec,
    token_losses,
)
from references import all_gather, all_reduce, reduce_scatter

from flux.ops.quantize import dequantized, quantize
from flux.testing import scaled_bound

pytestmark = needs_megatron

Tensor = torch.Tensor
RECIPES = list(product(("tensorwise", "blockwise"), ("e4m3", "hybrid")))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN, OUT, ROWS = 256, 128, 32  # of a rank: columns that are multiplied, columns of the result; of all: rows


def recipes(**options: Any) -> Iterator[Any]:
    for (recipe, fp8), sequence_parallel in product(RECIPES, (True, False)):
        yield make_config(
            fp8=fp8, fp8_recipe=recipe, sequence_parallel=sequence_parallel, hidden_size=128, **options
        )


def layers_of(config: Any, p: int) -> Iterator[tuple[Any, Any, Tensor]]:
    """A layer of each kind, stock and on flux, and numbers of an x of its size."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

    plain = copy.copy(config)
    plain.fp8 = None
    rows = ROWS // p if config.sequence_parallel else ROWS
    kinds = (
        (ColumnParallelLinear, FluxColumnParallelLinear, (IN, OUT * p), (rows, IN), {"gather_output": False}),
        (
            RowParallelLinear,
            FluxRowParallelLinear,
            (IN * p, OUT),
            (ROWS, IN),
            {"input_is_parallel": True, "skip_bias_add": False},
        ),
    )
    for stock, ours, sizes, (count, columns), options in kinds:
        how: dict[str, Any] = {"init_method": torch.nn.init.zeros_, "bias": True, **options}
        yield (
            stock(*sizes, config=plain, **how),
            ours(*sizes, config=config, **how),
            torch.empty(count // 2, 2, columns),
        )


def integers(like: Tensor, seed: int) -> Tensor:
    """From -28 to 28: some have more bits than fp8 has. The largest, 28 = 7 * 2^2, makes the scales of a
    tensor, 28 / 448 and 28 / 57344, powers of two.
    """
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-28, 29, like.shape, generator=g).to(like.dtype)


def rounded(x: Tensor, bits: int) -> Tensor:
    """To so many significant bits, to even."""
    unit = torch.exp2(torch.frexp(x)[1] - bits)
    return torch.where(x == 0, x, (x / unit).round() * unit)


def passed(layer: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    result, _ = layer(x)
    result.backward(grad)
    return [result.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def exact_layers(rank: int, p: int) -> None:
    """Integers: results and gradients are those of stock layers on operands that are rounded to fp8."""
    for config in recipes():
        for stock, ours, like in layers_of(config, p):
            own = rank if config.sequence_parallel or "Row" in type(ours).__name__ else 0
            x, weight = integers(like, 10 + own), integers(ours.weight, 20 + rank)
            bias = integers(ours.bias, 30 + (0 if "Row" in type(ours).__name__ else rank))
            with torch.no_grad():
                ours.weight.copy_(weight), ours.bias.copy_(bias)
                stock.weight.copy_(rounded(weight, 4)), stock.bias.copy_(bias)
            own = rank if config.sequence_parallel or "Column" in type(ours).__name__ else 0
            grad = integers(ours(x)[0], 40 + own)
            if config.sequence_parallel and config.fp8_recipe == "tensorwise" and rank:
                # The largest value of all rows that are gathered is on rank 0 only.
                gathered = x if "Column" in type(ours).__name__ else grad
                gathered.clamp_(-20, 20)
            bits = 3 if config.fp8 == "hybrid" else 4
            got = passed(ours, x, grad)
            result, grad_x, grad_weight, _ = passed(stock, rounded(x, 4), rounded(grad, bits))
            _, _, _, grad_bias = passed(stock, x, grad)
            names = ("result", "gradient of x", "of the weight", "of the bias")
            for name, a, b in zip(names, got, (result, grad_x, grad_weight, grad_bias), strict=True):
                told = f"{type(ours).__name__}, {config.fp8_recipe}, {config.fp8}: {name}"
                assert torch.equal(a, b), f"{told}: {(a != b).sum()} of {a.numel()} differ"
            assert torch.equal(ours.weight, weight), "a master weight changed"
            assert not torch.equal(result, passed(stock, x, grad)[0]), "nothing was rounded"


def within_the_bound(rank: int, p: int) -> None:
    """Random data: results and gradients of x are as near the product of the quantised operands as the page
    on fp8 says (flux.testing.scaled_bound).
    """
    for config in recipes():
        by_block = config.fp8_recipe == "blockwise"
        for _, ours, like in layers_of(config, p):
            is_row = "Row" in type(ours).__name__
            g = torch.Generator().manual_seed(rank if config.sequence_parallel or is_row else 9)
            x = torch.randn(like.shape, generator=g)
            with torch.no_grad():
                ours.weight.normal_(generator=torch.Generator().manual_seed(50 + rank))
                ours.bias.zero_()
            shape = ours(x)[0].shape
            g = torch.Generator().manual_seed(60 + (rank if config.sequence_parallel or not is_row else 0))
            grad = torch.randn(shape, generator=g)
            result, grad_x, *_ = passed(ours, x, grad)
            weight = ours.weight.detach()
            of_grads = E5M2 if config.fp8 == "hybrid" else E4M3
            # Column: x is gathered, and the gradient of x summed over ranks. Row: the other way round.
            for got, rows, matrix, dtype, sums in (
                (result, x, weight, E4M3, is_row),
                (grad_x, grad, weight.t().contiguous(), of_grads, not is_row),
            ):
                near(got, rows.flatten(0, 1), matrix, dtype, by_block, sums, config.sequence_parallel)


def near(
    got: Tensor,
    rows: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    by_block: bool,
    sums: bool,
    sequence_parallel: bool,
) -> None:
    if sequence_parallel and not sums:
        rows = all_gather(rows)
    quant = ("group128", "block128") if by_block else ("tensor", "tensor")
    q, scale_x = quantize(rows, quant[0], dtype=dtype, ue8m0=by_block)  # type: ignore[arg-type]
    w, scale_w = quantize(weight, quant[1], ue8m0=by_block)  # type: ignore[arg-type]
    exact = dequantized(q, scale_x, quant[0]).double() @ dequantized(w, scale_w, quant[1]).double().t()
    bound = scaled_bound(q, scale_x, w, scale_w, exact, torch.float32)
    if sums:
        total = reduce_scatter if sequence_parallel else all_reduce
        exact, bound = total(exact), total(bound)
    error = (got.flatten(0, 1).double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max()} of the bound"


def models_train(rank: int, p: int) -> None:
    """Models of all recipes: losses and gradients near those of stock Megatron without fp8, in the layers of
    the decoder only, and losses fall as stock's do.
    """
    from megatron.core.transformer import multi_latent_attention

    from flux.integrations.megatron import convert_model

    # Megatron-Core 0.15 asks for its version, with fp8, also where it is not installed.
    multi_latent_attention.is_te_min_version = lambda *_, **__: False
    told = Told()
    for options in (KINDS["dense"], SWIGLU, KINDS["MLA"]):
        for config in recipes(**options):
            plain = copy.copy(config)
            plain.fp8 = None
            stock, _ = pair(plain)
            ours = pair(config)[1]
            ours.load_state_dict(stock.state_dict())
            convert_model(ours)
            assert ours.output_layer.flux_fp8 is None
            in_fp8 = [n for n, m in ours.named_modules() if getattr(m, "flux_fp8", None) is not None]
            assert len(in_fp8) == (14 if config.multi_latent_attention else 8), in_fp8
            before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
            losses = [], []
            for step in range(4):
                for model, seen in zip((stock, ours), losses, strict=True):
                    model.zero_grad(set_to_none=True)
                    loss = token_losses(model, step % 2).mean()
                    loss.backward()
                    seen.append(float(loss))
                if step == 0:
                    weights = dict(ours.named_parameters())
                    for name, parameter in stock.named_parameters():
                        ratio = (weights[name].grad - parameter.grad).norm() / parameter.grad.norm()
                        assert 0 <= ratio < 0.25, f"{config.fp8_recipe}, {config.fp8}: {name}: {ratio}"
                        assert torch.equal(weights[name], before[name]), "a master weight changed"
                with torch.no_grad():
                    for model in (stock, ours):
                        for parameter in model.parameters():
                            parameter.sub_(0.5 * parameter.grad)
            assert losses[0] != losses[1], "nothing was computed in fp8"
            assert losses[1][2] < losses[1][0] and losses[1][3] < losses[1][1]
            torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)
    assert not [message for message in told.messages if "Megatron's own code" in message], told.messages


def main_grads(rank: int, p: int) -> None:
    """Gradients of weights go into main_grad if asked for, and may be left to backward_dw."""
    for config in recipes(gradient_accumulation_fusion=False):
        for _, ours, like in layers_of(config, p):
            x, weight = torch.randn(like.shape), torch.randn(ours.weight.shape)
            with torch.no_grad():
                ours.weight.copy_(weight)
            grad = torch.randn_like(ours(x)[0])
            expected = passed(ours, x, grad)[2]
            ours.zero_grad(set_to_none=True)
            ours.flux_accumulates = True
            ours.weight.main_grad = torch.ones_like(ours.weight)
            ours(x.requires_grad_())[0].backward(grad)
            assert torch.equal(ours.weight.main_grad, 1 + expected)
            ours.flux_accumulates = False
            ours._begin(ours.flux_fp8, True)
            assert passed(ours, x.detach(), grad)[2] is None
            ours.backward_dw()
            assert torch.equal(ours.weight.grad, expected)


def weight_gradients_in_32_bits(rank: int, p: int) -> None:
    """fp8_wgrad=False: gradients of weights are those of the operands that are not rounded."""
    for config in recipes(fp8_wgrad=False):
        for stock, ours, like in layers_of(config, p):
            own = rank if config.sequence_parallel or "Row" in type(ours).__name__ else 0
            x = integers(like, own)
            with torch.no_grad():
                for layer in (stock, ours):
                    layer.weight.copy_(integers(ours.weight, rank))
            own = rank if config.sequence_parallel or "Column" in type(ours).__name__ else 0
            grad = integers(ours(x)[0], 7 + own)
            got, expected = passed(ours, x, grad), passed(stock, x, grad)
            assert torch.equal(got[2], expected[2]) and not torch.equal(got[0], expected[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp8_recipe": "delayed"}, "config.fp8_recipe: expected 'tensorwise' or 'blockwise', got 'delayed'"),
    ({"fp8_recipe": "mxfp8"}, "config.fp8_recipe: expected 'tensorwise' or 'blockwise', got 'mxfp8'"),
    ({"fp8": None, "fp4": "e2m1"}, "config.fp4: expected None, got 'e2m1'"),
    ({"fp8": "e5m2"}, "config.fp8: expected 'e4m3' or 'hybrid', got 'e5m2'"),
    ({"fp8_param": True}, "config.fp8_param: expected False"),
    ({"quant_recipe": object()}, "config.quant_recipe: expected None"),
    ({"first_last_layers_bf16": True}, "config.first_last_layers_bf16: expected False without Transformer"),
]


def refused(rank: int, p: int) -> None:
    """What flux.layers does not have, Megatron's own layers would silently compute in 16 bits."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from flux.integrations.megatron import FluxColumnParallelLinear, convert_model, convert_spec

    config = make_config(fp8="hybrid", fp8_recipe="tensorwise")
    how: dict[str, Any] = {"init_method": config.init_method, "bias": False, "gather_output": False}
    for change, told in REFUSED:
        asked = copy.copy(config)
        vars(asked).update(change)
        with pytest.raises(ValueError) as raised:
            FluxColumnParallelLinear(8, 4 * p, config=asked, **how)
        option = [*change][-1].replace("quant_recipe", "te_precision_config_file").replace("_", "-")
        found, advice = str(raised.value).split("; in scripts: ")
        assert found.startswith(f"FluxColumnParallelLinear: {told}") and f"--{option}" in advice, raised.value
        layer = ColumnParallelLinear(8, 4 * p, config=config, **how)
        layer.config = asked
        with pytest.raises(ValueError, match="FluxColumnParallelLinear: config"):
            convert_model(torch.nn.Sequential(layer))
    experts = make_config(sequence_parallel=True, **MIXTURE)
    experts.fp8, experts.fp8_recipe = "hybrid", "tensorwise"  # its constructor looks for Transformer Engine
    with pytest.raises(ValueError, match="None for layers of single experts.*--moe-grouped-gemm"):
        make_model(experts, convert_spec(stock_spec(experts)))


def falls_back(rank: int, p: int) -> None:
    """A call that flux does not serve runs in Megatron's own code, once with the reason. A group of one rank
    is no such reason: Megatron's own code has no fp8.
    """
    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear, coverage

    told = Told()
    alone = dist.new_group([rank], use_local_synchronization=True)
    config = make_config(fp8="e4m3", fp8_recipe="blockwise")
    how: dict[str, Any] = {"init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": True}
    x = torch.full((4, 1, 128), 17.0)  # 16 in fp8
    for cls, options in (
        (FluxColumnParallelLinear, {}),
        (FluxRowParallelLinear, {"input_is_parallel": True}),
    ):
        layer = cls(128, 128, config=config, tp_group=alone, **how, **options)
        assert coverage(layer) == {"": None}
        result, grad_x, grad = passed(layer, x, torch.full((4, 1, 128), 19.0))  # 20 in fp8
        assert (result == 16 * 128).all() and (grad_x == 20 * 128).all() and (grad == 4 * 16 * 20).all()
    assert not told.messages
    for _ in range(2):
        layer = FluxRowParallelLinear(128, 4, config=config, input_is_parallel=False, **how)
        assert (layer(x)[0] == 17 * 128).all()
    wide = FluxColumnParallelLinear(128, 4 * p, config=config, **how).double()
    assert (wide(x.double())[0] == 17 * 128).all()
    assert [m.split(": ", 2)[2] for m in told.messages] == [
        "its input is not split over ranks (not in fp8)",
        "x is torch.float64 and the weight torch.float64 (not in fp8)",
    ]


SCENARIOS = by_name(
    exact_layers, within_the_bound, models_train, main_grads, weight_gradients_in_32_bits, refused, falls_back
)


def run(rank: int, p: int) -> dict[str, str]:
    prepare(2)
    with OnCpu():
        return run_scenarios(SCENARIOS, rank, p)


answers = Answers(run, timeout_s=400)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.filterwarnings("ignore")
def test_fp8_recipes(scenario: str) -> None:
    told = answers.of(2, scenario)
    assert told == [""] * 2, "\n".join(told)
