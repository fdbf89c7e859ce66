"""Old spellings still work, mean the same, and warn once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import flux
from flux import _deprecated


def plan() -> flux.Plan:
    return flux.explain("gemm", 8, 16, 32, torch.float32)


# By old spelling: a call with it, one with the new spelling, and what the warning says to write.
OLD: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "Plan.fused": (lambda: plan().fused, lambda: plan().by_flux, "use by_flux"),
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_spelling_means_the_new_one_and_warns_once(old: str) -> None:
    before, now, words = OLD[old]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = now()
    _deprecated._said.clear()
    with pytest.warns(DeprecationWarning) as told:
        results = [before(), before()]
    assert [str(each.message) for each in told] == [f"{old} is deprecated and goes with flux 0.3: {words}"]
    assert told[0].filename == __file__, "the warning names the caller's line"
    for result in results:
        assert repr(result) == repr(expected)
