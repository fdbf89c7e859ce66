"""A sum over ranks, its norm and the product behind it, in vLLM: C++ repeats all of it as one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import Machine, tensor

from flux.comm.cuda import CudaWorkspace
from flux.integrations.vllm import op, rows
from flux.measured.times import Tuning
from flux.ops import add_norm

pytest_plugins = ("repeated",)  # fixtures

HIDDEN, INNER, NEXT = 64, 128, 48


class Weight(torch.nn.Parameter):
    """As flux leaves vLLM's class for weights."""

    __torch_function__ = op.PASSED_BY


class Dispatched(Weight):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def on_gpu(gemms: Any, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch) -> CudaWorkspace:
    monkeypatch.setattr(add_norm, "_fits", lambda *tensors: True)
    return workspace


def weight(kind: type[torch.Tensor], *shape: int) -> Any:
    made = tensor(*shape)
    return made if kind is torch.Tensor else kind(made, requires_grad=False)


def given(tokens: int, whole: bool, kind: type[torch.Tensor] = Weight, bias: bool = False) -> dict[str, Any]:
    return {
        "x": tensor(tokens, INNER),
        "weight": weight(kind, HIDDEN, INNER),
        "bias": tensor(HIDDEN) if bias else None,
        "group_name": dist.group.WORLD.group_name,
        "residual": tensor(tokens, HIDDEN),
        "whole": whole,
        "norm_weight": tensor(HIDDEN),
        "eps": 1e-5,
        "next_weight": weight(kind, NEXT, HIDDEN),
        "next_bias": tensor(NEXT) if bias else None,
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, Weight])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pair_is_one_known_call(
    rank: int,
    whole: bool,
    kind: type[torch.Tensor],
    bias: bool,
    machine: Machine,
    on_gpu: CudaWorkspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(on_gpu.group), "rank", lambda self: rank)
    rows.scatter_norm_gather(**given(16, whole, kind, bias))
    assert len(machine.dispatched) == 3 and len(on_gpu.known) == 1
    for _ in range(2):
        machine.repeated.clear()
        now = given(16, whole, kind, bias)  # another layer: other addresses
        total, product = rows.scatter_norm_gather(**now)
        assert len(machine.dispatched) == 3, "Python has launched once"
        assert (total.shape, product.shape) == ((16, HIDDEN), (16, NEXT))
        (first, of_sum, _), (second, of_norm, _), (third, of_product, _) = machine.repeated
        assert [first, second, third] == ["flux::_gemm_rs", "flux::_add_norm", "flux::_ag_gemm"]
        at = {name: each.data_ptr() for name, each in now.items() if isinstance(each, torch.Tensor)}
        assert of_sum[:4] == [at["x"], at["weight"], at.get("bias"), total.data_ptr()]
        own = at["residual"] + (8 * HIDDEN * 2 if whole and rank else 0)
        norm = of_norm[3]
        assert of_norm[:3] == [total.data_ptr(), own, at["norm_weight"]]
        assert of_product[:4] == [norm, at["next_weight"], at.get("next_bias"), product.data_ptr()]
        assert norm not in (total.data_ptr(), product.data_ptr(), *at.values())


def test_other_numbers_of_tokens_are_other_calls(machine: Machine, on_gpu: CudaWorkspace) -> None:
    for tokens in (16, 15, 15, 16):
        total, product = rows.scatter_norm_gather(**given(tokens, False))
        assert (len(total), len(product)) == (tokens, tokens), "a last share with fewer tokens"
    assert len(machine.dispatched) == 6 and len(machine.repeated) == 6


@pytest.mark.parametrize("way", ["parts", "kernel"])
def test_parts_of_a_pair_may_have_parts(
    way: str, machine: Machine, on_gpu: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    on_gpu.tuning = Tuning(forced=way)
    launched = []
    for _ in range(3):
        machine.dispatched.clear()
        rows.scatter_norm_gather(**given(16, False))
        launched.append(len(machine.dispatched))
    assert launched == ([5, 0, 0] if way == "parts" else [3, 0, 0])


def test_a_weight_that_torch_must_see_is_made_plain(machine: Machine, on_gpu: CudaWorkspace) -> None:
    assert op.plain(weight(Weight, 8, 8)).__class__ is Weight
    assert op.plain(weight(Dispatched, 8, 8)).__class__ is not Dispatched
    on_gpu.known.paused = True  # as under torch's profiler
    for _ in range(2):
        machine.dispatched.clear()
        rows.scatter_norm_gather(**given(16, False))
        assert len(machine.dispatched) == 3 and not machine.repeated
