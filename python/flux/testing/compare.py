"""Whether a result is the exact one, or one that agrees with another but for rounding: in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

# Successive calls of a correctness check: they use both buffers of a workspace, and one of them again.
CALLS = 3
EXACT = "exact"


Case = TypeVar("Case", bound=Any)  # a dataclass with a seed


def successive(case: Case) -> list[Case]:
    """The cases of successive calls: of one kind, with other data each."""
    return [replace(case, seed=case.seed + 100 * i) for i in range(CALLS)]


def compare(got: torch.Tensor, want: torch.Tensor) -> str:
    """ "exact", or where and by how much a result differs."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    wrong = got != want
    count = int(wrong.sum())
    if count == 0:
        return EXACT
    first = wrong.nonzero()[0].tolist()
    at = tuple(first)
    return f"{count} of {want.numel()} wrong; at {first} got {got[at].item():g}, expected {want[at].item():g}"


# Largest difference of two computations, relative to the root mean square of the result: single
# elements by this much, their mean by an eighth of it. Rounding moves elements by a few units of 2^-8 for
# bfloat16; if the contribution of one of p ranks is missing, all are wrong by about 1/sqrt(p).
_APART = {torch.bfloat16: 0.25, torch.float16: 0.03, torch.float32: 1e-4, torch.float64: 1e-9}


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    """ "agrees to ..." if all tensors are alike but for rounding, else the first that is not, and how far.

    For what cannot be computed exactly: activations, norms, whole models.
    """
    if got.keys() != want.keys():
        return f"results {sorted(got)}, expected {sorted(want)}"
    worst = 0.0
    for name, expected in want.items():
        if got[name].shape != expected.shape:
            return f"{name}: shape {list(got[name].shape)}, expected {list(expected.shape)}"
        reference = expected.detach().double()
        apart = (got[name].detach().double() - reference).abs()
        scale = max(float(reference.square().mean().sqrt()), 1e-30)
        most, mean = float(apart.max()) / scale, float(apart.square().mean().sqrt()) / scale
        limit = _APART[expected.dtype]
        # A negated comparison, so that a NaN fails.
        if not (most <= limit and mean <= limit / 8):
            return f"{name}: off by {most:.2g} of its rms at most and {mean:.2g} on average"
        worst = max(worst, mean)
    return f"agrees to {worst:.1e}" if worst else "agrees to the bit"


def first_difference(results: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """ "exact", or the first of these results, (got, want), that differs, and how."""
    said = {name: compare(*both) for name, both in results.items()}
    return next((f"{name}: {text}" for name, text in said.items() if text != EXACT), EXACT)


def passed(check: str) -> bool:
    """Whether a comparison has passed: exact, or equal within rounding."""
    return check == EXACT or check.startswith("agrees")


def require(check: str) -> None:
    """Raises RuntimeError if a comparison has not passed."""
    if not passed(check):
        raise RuntimeError(f"wrong: {check}")


def first_wrong(told: Iterable[str]) -> str:
    """The first of these comparisons that failed; if none did, the first that is not "exact"."""
    told = list(told)
    failed = (said for said in told if not passed(said))
    return next(failed, next((said for said in told if said != EXACT), EXACT))
