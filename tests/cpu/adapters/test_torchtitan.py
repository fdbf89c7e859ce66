"""torchtitan on flux between CPU processes: its `tp_gemm_backend="dist_gemm"` calls the two operators of
torch.ops.symm_mem eagerly, forward and backward; `--compile.enable_async_tensor_parallel` is inductor's pass.
test_async_tp.py has both without torchtitan.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import counted

from flux.integrations import async_tp
from flux.testing import spawn

Tensor = torch.Tensor
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("triton") is None,
        reason="needs torchtitan and triton, which are not installed",
    ),
    pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torchtitan 0.3 imports no model with torch before 2.12"
    ),
]

ROWS, HIDDEN, INNER = 6, 16, 24  # of each rank


def functions() -> tuple[Any, Any]:
    """torchtitan's autograd functions."""
    for name in ("linear", "dist_linear"):  # the later name first
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torchtitan.distributed.{name}")
            return module.AllGatherLinear, module.LinearReduceScatter
    raise ImportError("torchtitan.distributed has neither linear nor dist_linear")


def signs(seed: int, *shape: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(2, shape, generator=g) - 1).double()


def feed_forward(rank: int, p: int) -> tuple[dict[str, int], list[str]]:
    """Exact: whole tensors on one rank say what each rank must get."""
    async_tp.install()
    group = dist.group.WORLD
    assert group is not None
    x, up, bias, down = (
        t.requires_grad_()
        for t in (
            signs(1, p * ROWS, HIDDEN),
            signs(2, p * INNER, HIDDEN),
            signs(3, p * INNER),
            signs(4, HIDDEN, p * INNER),
        )
    )
    grad = signs(5, p * ROWS, HIDDEN)
    whole = (x @ up.T + bias).relu() @ down.T
    whole.backward(grad)
    parts = [t.detach().chunk(p, dim)[rank].clone().requires_grad_() for t, dim in
             ((x, 0), (up, 0), (bias, 0), (down, 1))]  # fmt: skip
    gather, scatter = functions()
    with (
        counted("ag_gemm", "gemm_rs") as (ag, rs),
        mock.patch.object(torch, "mm", _wide_mm),
    ):
        hidden = gather.apply(parts[0], parts[1], parts[2], group, group.group_name)
        out = scatter.apply(hidden.relu(), parts[3], None, group, group.group_name)
        out.backward(grad.chunk(p)[rank])
    expected = [whole.detach().chunk(p)[rank]] + [
        t.grad.chunk(p, dim)[rank] for t, dim in ((x, 0), (up, 0), (bias, 0), (down, 1)) if t.grad is not None
    ]
    found = [out.detach(), *(t.grad for t in parts)]
    names = ("result", "x", "up", "bias", "down")
    wrong = [
        name for name, a, b in zip(names, found, expected, strict=True) if a is None or not torch.equal(a, b)
    ]
    return {"ag_gemm": ag.call_count, "gemm_rs": rs.call_count}, wrong


_mm = torch.mm


def _wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """torch.mm, which on CPUs knows no result of another type, as torchtitan asks for it on GPUs."""
    return _mm(a, b)


@pytest.mark.parametrize("world_size", [2, 4])
def test_dist_gemm_runs_on_flux(world_size: int) -> None:
    # Gathers: of x, of its columns for the gradient of `up`, of the gradient. Scatters: forward, backward.
    calls = {"ag_gemm": 3, "gemm_rs": 2}
    assert spawn(feed_forward, world_size, backend="gloo") == [(calls, [])] * world_size


# How often torchtitan's Llama calls ag_gemm and gemm_rs in one step. In attention and MLP of two layers it
# gathers x and its gradient, and eagerly also for the gradient of the weight. Compiled, the gradient of the
# MLP's x is scattered after the sum of two products, which no operator does; the others move a dimension to
# the front, which the compiler finds with flux's pass only.
CALLS = {
    "dist_gemm": (2 * 2 * 3, 2 * 2 * 2),
    "compiled": (2 * 2 * 2, 2 * (2 + 1) if async_tp._REWRITES else 0),
}


def whole_model(rank: int, p: int, how: str) -> str:
    """torchtitan's Llama, stock and on flux: the same losses and gradients in 20 steps."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    from torchtitan_tp import Trainee

    stock = Trainee(rank, p, False)
    expected = [stock.step(number) for number in range(20)]
    async_tp.install()
    ours = Trainee(rank, p, True, how == "compiled")
    with counted("ag_gemm", "gemm_rs") as (ag, rs):
        for number, wanted in enumerate(expected):
            found = ours.step(number)
            assert found.keys() == wanted.keys() and all(grad.any() for grad in found.values())
            # fp32 and the optimizer's steps: a sum in another order grows by a few units each.
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6 * (1 + number))
    calls = (ag.call_count / 20, rs.call_count / 20)
    assert calls == CALLS[how], calls
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"]
    return ""


@pytest.mark.parametrize(("world_size", "how"), [(2, "dist_gemm"), (4, "dist_gemm"), (2, "compiled")])
def test_torchtitans_model_trains_as_stock(world_size: int, how: str) -> None:
    assert spawn(whole_model, world_size, how, backend="gloo", timeout_s=600) == [""] * world_size
