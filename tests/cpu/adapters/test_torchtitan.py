"""torchtitan on flux between CPU processes: its `tp_gemm_backend="dist_gemm"` calls the two operators of
torch.ops.symm_mem eagerly, forward and backward; `--compile.enable_async_tensor_parallel` is inductor's pass.
test_async_tp.py has both without torchtitan.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from cases import counted

from flux.integrations import async_tp
from flux.testing import spawn

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None or importlib.util.find_spec("triton") is None,
        reason="needs torchtitan and triton, which are not installed",
    ),
    pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torchtitan 0.3 imports no model with torch before 2.12"
    ),
]


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
