"""vLLM's weights are of classes with a __torch_function__ of their own. flux repeats calls of plain tensors
only (flux.comm.repeat), so the plugin's operators hand it those.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

import flux
from flux.integrations.vllm import op, rows


class Weight(torch.nn.Parameter):
    """As BasevLLMParameter."""

    def __new__(cls, data: torch.Tensor) -> Weight:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        return super().__torch_function__(func, types, args, kwargs)


class RowWeight(Weight):
    """As the classes of layers are of BasevLLMParameter."""


@pytest.fixture
def given(monkeypatch: MonkeyPatch) -> dict[str, torch.Tensor]:
    """The tensors that the operators hand to flux, by the names of its arguments."""
    found: dict[str, torch.Tensor] = {}

    def record(x: Any, weight: Any, bias: Any = None, **how: Any) -> Any:
        tensors = {"x": x, "weight": weight, "bias": bias, **how}
        found.update((name, each) for name, each in tensors.items() if isinstance(each, torch.Tensor))
        result = x.new_zeros(len(x), len(weight), dtype=how.get("out_dtype") or torch.bfloat16)
        return (result, result) if "norm_weight" in how else result

    for name in ("gemm_ar", "gemm_rs", "ag_gemm"):
        monkeypatch.setattr(flux, name, record)
    of_one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(rows, "process_group", lambda group_name: of_one)
    return found


X, RESIDUAL, NORM = torch.zeros(4, 8), torch.zeros(4, 16), torch.ones(16)
OF_FP8 = {"scale_x": torch.ones(4, 1), "scale_w": Weight(torch.ones(16, 1))}
CALLS = {
    "linear_all_reduce": lambda w, b: op.linear_all_reduce(X, w, b, 1, "g", "v"),
    "linear_all_reduce, fp8": lambda w, b: op.linear_all_reduce(
        X, w, b, 1, "g", "v", *OF_FP8.values(), torch.bfloat16
    ),
    "linear_all_reduce_norm": lambda w, b: op.linear_all_reduce_norm(X, w, b, RESIDUAL, NORM, 1e-5, "g"),
    "linear_all_reduce_norm, fp8": lambda w, b: op.linear_all_reduce_norm(
        X, w, b, RESIDUAL, NORM, 1e-5, "g", *OF_FP8.values()
    ),
    "linear_scatter": lambda w, b: rows.linear_scatter(X, w, b, 1, "g", "v", RESIDUAL, True, 1),
    "linear_scatter, fp8": lambda w, b: rows.linear_scatter(
        X, w, b, 1, "g", "v", RESIDUAL, True, 1, *OF_FP8.values()
    ),
    "norm_gather_linear": lambda w, b: rows.norm_gather_linear(X, torch.ones(8), 1e-5, w, b, 1, "g"),
}


@pytest.mark.parametrize("call", CALLS)
def test_flux_gets_plain_tensors(call: str, given: dict[str, torch.Tensor]) -> None:
    weight, bias = Weight(torch.zeros(16, 8)), Weight(torch.zeros(16))
    CALLS[call](weight, bias)
    assert {type(tensor) for tensor in given.values()} <= {torch.Tensor, torch.nn.Parameter}
    assert given["weight"].data_ptr() == weight.data_ptr() and given["bias"].data_ptr() == bias.data_ptr()
    assert ("scale_w" in given) == ("fp8" in call)
    assert not any(tensor.requires_grad for tensor in given.values())


def calls_of_python(call: Any) -> list[str]:
    seen = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return seen


def test_torch_passes_weights_by_when_the_model_is_ready(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(Weight, "__torch_function__", vars(Weight)["__torch_function__"])  # and back
    x, weight = torch.ones(2, 8), RowWeight(torch.arange(32.0).view(4, 8))
    expected = torch.nn.functional.linear(x, weight)

    def product() -> torch.Tensor:
        return torch.ops.aten.linear.default(x, weight)

    assert calls_of_python(product).count("__torch_function__") == 1
    assert op.pass_by(Weight)
    assert calls_of_python(product).count("__torch_function__") == 0
    result = product()
    assert type(result) is torch.Tensor and torch.equal(result, expected)
    assert type(weight.data) is type(RowWeight(torch.ones(1)).data)
    assert not op.pass_by(Weight), "it has none any more"


def test_a_class_that_does_something_keeps_it() -> None:
    class Counted(torch.nn.Parameter):
        count = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.count += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    class Behind(Counted):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs)

    class Inherits(torch.nn.Parameter):
        pass

    for weights in (Counted, Behind, Inherits):
        assert not op.pass_by(weights)
    torch.ones(2) + Behind(torch.ones(2), requires_grad=False)
    assert Counted.count == 0 and Behind.count == 1
