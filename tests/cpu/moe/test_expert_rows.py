"""The steps between the GEMMs of expert layers: formulas, their derivatives, and what reaches the kernels."""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from row_kernels import kernels_on_cpus
from torch import Tensor

from flux.moe import rows as steps
from flux.ops.grouped_gemm import ACTIVATIONS

OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
TOKENS = torch.tensor([3, 0, 3, 2, 1, 0, 0])
NAN = float("nan")


integers = partial(cases.integers, dtype=torch.bfloat16)


def nowhere(rows: Tensor) -> Tensor:
    """The same up to the last row of an expert, and then not numbers."""
    rows = rows.clone()
    rows[5:] = NAN
    return rows


def test_autograd_sees_that_kernels_overwrite_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "kernel_takes", lambda *_: True)
    monkeypatch.setattr(steps, "_finish_kernel", lambda *_: None)
    monkeypatch.setattr(steps, "_finish_activation_kernel", lambda *_: None)
    rows, scores = integers(1, 7, 16), torch.ones(7)
    steps._finish(rows, OFFSETS, scores, None)
    steps._finish_activation(rows, integers(2, 7, 16), OFFSETS, scores, "silu")
    assert rows._version == 2


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS.int()])
def test_gathered_rows_are_rounded_once(tokens: Tensor) -> None:
    x, scores = integers(1, 4, 16), torch.tensor([2.0, 0.5, -1.0, 4.0, 1.0, NAN, NAN])
    # 255 if the factor were rounded to bfloat16 first.
    x[0, 0], scores[1] = 255, 1 + 2**-8
    exact = (x.double()[TOKENS] * scores.double()[:, None]).bfloat16()
    assert exact[1, 0] == 256
    with torch.no_grad():
        assert torch.equal(steps.gather_rows(x, tokens, OFFSETS, scores)[:5], exact[:5])
        assert torch.equal(steps.gather_rows(x, tokens, OFFSETS)[:5], x[TOKENS][:5])
        with kernels_on_cpus() as ran:
            assert torch.equal(steps.gather_rows(x, tokens, OFFSETS, scores)[:5], exact[:5])
            # Neither contiguous nor where vectors begin.
            assert torch.equal(steps.gather_rows(x.t().contiguous().t(), tokens, OFFSETS)[:5], x[TOKENS][:5])
    assert ran == {"gather": 2}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_finished_rows_end_in_zeros(scaled: bool, dotted: bool) -> None:
    rows, x = nowhere(integers(2, 7, 24)), nowhere(integers(3, 7, 24))
    scores = torch.tensor([2.0, 0.5, -1.0, 4.0, 1.0, 0.0, 0.0]) if scaled else None
    wanted = rows.clone() if scores is None else (rows.float() * scores[:, None]).bfloat16()
    wanted[5:] = 0
    dots = (rows.float() * x.float()).sum(-1)
    dots[5:] = 0
    given = (OFFSETS, scores, x if dotted else None)
    kept, kept_dots = steps.finish_rows(rows, *given)  # for gradients of gradients
    assert torch.isnan(rows[5:]).all()
    with torch.no_grad():
        by_torch = steps.finish_rows(rows.clone(), *given)
        with kernels_on_cpus() as ran:
            by_kernel = steps.finish_rows(rows.clone(), *given)
    assert ran == {"finish": 1}
    for got, got_dots in ((kept, kept_dots), by_torch, by_kernel):
        assert torch.equal(got, wanted)
        assert torch.equal(got_dots, dots if dotted else dots[:0])


def test_rows_that_vectors_cannot_write_are_finished_by_torch() -> None:
    rows = integers(4, 7, 25)[:, 1:]
    wanted = rows.clone()
    wanted[5:] = 0
    with torch.no_grad(), kernels_on_cpus() as ran:
        assert torch.equal(steps.finish_rows(rows, OFFSETS)[0], wanted)
    assert not ran


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_gradients(activation: str) -> None:
    product, columns = nowhere(integers(5, 7, 32)), 16 if activation == "swiglu" else 32
    weights = nowhere(integers(6, 7, columns))

    def gradient() -> tuple[Tensor, Tensor]:
        leaf = product.clone().requires_grad_()
        result = steps.activate_rows(leaf, OFFSETS, activation)
        # Gradients that are not contiguous.
        (grad,) = torch.autograd.grad(result.t(), leaf, weights.t().contiguous())
        return result[:5], grad[:5]

    expected = product.float().requires_grad_()
    by_torch = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "swiglu": lambda z: torch.nn.functional.silu(z[:, :16]) * z[:, 16:],
    }[activation](expected)
    by_torch[:5].backward(weights[:5].float())
    assert expected.grad is not None
    with kernels_on_cpus() as ran:
        again = gradient()
    assert ran == {"activation_grad": 1, "activate": 1}
    for result, grad in (gradient(), again):
        assert result.dtype == grad.dtype == torch.bfloat16
        torch.testing.assert_close(result, by_torch[:5].bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(grad, expected.grad[:5].bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_finished_in_one_pass(activation: str) -> None:
    product, columns = nowhere(integers(13, 7, 32)), 16 if activation == "swiglu" else 32
    back, scores = nowhere(integers(14, 7, columns)), torch.tensor([2.0, 0.5, -1.0, 4.0, 1.0, NAN, NAN])
    leaf, score = product.float().requires_grad_(), scores.clone().requires_grad_()
    rows = steps.activate_rows(leaf, OFFSETS, activation)
    (rows.to(torch.bfloat16).float() * score[:, None])[:5].backward(back[:5].float())
    assert leaf.grad is not None and score.grad is not None
    given = (product, OFFSETS, scores, activation)
    kept = steps.finish_activation(back, *given)  # for gradients of gradients
    assert torch.isnan(back[5:]).all()
    with torch.no_grad():
        by_torch = steps.finish_activation(back.clone(), *given)
        unaligned = torch.empty(7, columns + 1, dtype=back.dtype)[:, 1:]
        unaligned.copy_(back)
        with kernels_on_cpus() as ran:
            by_kernel = steps.finish_activation(back.clone(), *given)
            assert ran == {"finish_activation": 1}
            elsewhere = steps.finish_activation(unaligned, *given)
    assert ran["finish_activation"] == 1
    for of_product, active, dots in (kept, by_torch, by_kernel, elsewhere):
        torch.testing.assert_close(of_product[:5], leaf.grad[:5].bfloat16(), rtol=2**-6, atol=1e-6)
        assert torch.equal(active[:5], rows[:5].bfloat16())
        torch.testing.assert_close(dots[:5], score.grad[:5])
