"""Old spellings still work, mean the same, and warn once."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from flux import _deprecated
from flux.layers import Fp8, column_linear

X, W = torch.eye(8, 128), torch.eye(4, 128)
F32 = torch.float32
SIZES = {"max_m": 1, "max_n": 1, "max_k": 1}


def plan(op: str, *arguments: Any, **options: Any) -> flux.Plan:
    return flux.explain(op, 8, 16, 32, F32, *arguments, **options)


def experts(*sizes: int, **options: Any) -> flux.moe.MoEMLP:
    torch.manual_seed(0)
    return flux.moe.MoEMLP(*sizes, num_experts=2, **options)


def normed(quant: Any, of: Callable[..., object]) -> object:
    return of(norm_weight=torch.ones(4), quant=quant)


# By old spelling: a call with it, one with the new spelling, and what the warning says to write.
OLD: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "Plan.fused": (lambda: plan("gemm").fused, lambda: plan("gemm").by_flux, "use by_flux"),
    "explain(group) by position": (lambda: plan("gemm_rs", None), lambda: plan("gemm_rs"), "write group="),
    "explain('gemm_ar_norm')": (
        lambda: plan("gemm_ar_norm"),
        lambda: plan("gemm_ar", norm=True),
        "use 'gemm_ar' with norm=True",
    ),
    "reserve(group) by position": (
        lambda: flux.reserve(None, **SIZES),  # type: ignore[misc]
        lambda: flux.reserve(group=None, **SIZES),
        "write group=",
    ),
    "reserve(slots=)": (
        lambda: flux.reserve(**SIZES, slots=1),  # type: ignore[call-arg]
        lambda: flux.reserve(**SIZES),
        "leave it out",
    ),
    "release(group) by position": (lambda: flux.release(None), flux.release, "write group="),  # type: ignore[misc]
    "check(group) by position": (lambda: flux.check(None), flux.check, "write group="),  # type: ignore[misc]
    "expect_graphs(group) by position": (
        lambda: flux.expect_graphs(None),  # type: ignore[misc]
        flux.expect_graphs,
        "write group=",
    ),
    "quantize(quant='token')": (
        lambda: flux.quantize(X, "token"),  # type: ignore[arg-type]
        lambda: flux.quantize(X, "row"),
        "use 'row'",
    ),
    "gemm_ar(quant='token')": (
        lambda: normed("token", functools.partial(flux.gemm_ar, X, W)),
        lambda: normed("row", functools.partial(flux.gemm_ar, X, W)),
        "use 'row'",
    ),
    "all_reduce(quant='token')": (
        lambda: normed("token", functools.partial(flux.all_reduce, W[:, :4])),
        lambda: normed("row", functools.partial(flux.all_reduce, W[:, :4])),
        "use 'row'",
    ),
    "Fp8(scaling=)": (lambda: Fp8(scaling="block"), lambda: Fp8("block"), "use scales="),  # type: ignore[call-arg]
    "Fp8(scales='current')": (lambda: Fp8("current"), Fp8, "use 'tensor'"),  # type: ignore[arg-type]
    "Fp8.scaling": (lambda: Fp8("block").scaling, lambda: Fp8("block").scales, "use scales"),
    "column_linear(weights=)": (
        lambda: column_linear(X, weights=[W]),  # type: ignore[call-overload]
        lambda: [column_linear(X, W)],
        "use weight=",
    ),
    "column_linear(biases=)": (
        lambda: column_linear(X, [W], biases=[W[:, 0]]),  # type: ignore[call-overload]
        lambda: [column_linear(X, W, W[:, 0])],
        "use bias=",
    ),
    "MoEMLP(hidden=)": (
        lambda: experts(hidden=4, ffn_size=8),
        lambda: experts(4, 8, dtype=F32),
        "use hidden_size=",
    ),
    "MoEMLP(intermediate=)": (lambda: experts(4, intermediate=8), lambda: experts(4, 8), "use ffn_size="),
    "MoEMLP.hidden": (lambda: experts(4, 8).hidden, lambda: 4, "use hidden_size"),
    "MoEMLP.intermediate": (lambda: experts(4, 8).intermediate, lambda: 8, "use ffn_size"),
}


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("old", OLD)
def test_an_old_spelling_means_the_new_one_and_warns_once(old: str) -> None:
    before, now, words = OLD[old]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = now()
    _deprecated._said.clear()
    with pytest.warns(DeprecationWarning) as told:
        results = [before(), before()]
    assert [str(each.message) for each in told] == [f"{old} is deprecated and goes with flux 0.4: {words}"]
    assert told[0].filename == __file__, "the warning names the caller's line"
    for result in results:
        assert repr(result) == repr(expected)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: experts(4, 8, hidden=4), TypeError, "MoEMLP"),
        (lambda: experts(hidden=4, hidden_size=4, ffn_size=8), TypeError, "hidden_size: expected one value"),
        (lambda: flux.reserve(**SIZES, slots=2), ValueError, "slots: expected 1, or nothing, got 2"),  # type: ignore[call-arg]
        (lambda: flux.release(None, group=None), TypeError, "group: expected one value, got two"),  # type: ignore[misc]
        (lambda: flux.release(None, None), TypeError, "positional arguments"),  # type: ignore[call-arg]
        (lambda: Fp8(scaling="delayed"), ValueError, "Fp8: scales: expected 'tensor' or 'block'"),  # type: ignore[call-arg]
    ],
)
def test_what_is_wrong_stays_so(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=words):
            call()


def test_groups_are_named() -> None:
    """No public function takes a group by position."""
    for module in (flux, flux.layers, flux.moe):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type(flux)):
                group = inspect.signature(value).parameters.get("group")
                assert group is None or group.kind is inspect.Parameter.KEYWORD_ONLY, name
