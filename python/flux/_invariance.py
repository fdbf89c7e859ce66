"""Whether the bits of a row may depend on the rows beside it: the mode of `flux.batch_invariant`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from flux import _env

_mode: bool | None = None


def active() -> bool:
    """Whether calls must be batch invariant. A malformed default counts as off until `demanded` raises: in a
    group, where all ranks do (Workspace.meet), and not only the one that has it.
    """
    if _mode is None:
        with suppress(ValueError):
            return demanded()
    return bool(_mode)


def demanded() -> bool:
    """As active, for what depends on it.

    Raises:
        ValueError: FLUX_BATCH_INVARIANT is malformed.
    """
    global _mode
    if _mode is None:
        _mode = _env.get("FLUX_BATCH_INVARIANT") == "on"
    return _mode


def batch_invariant(enabled: bool = True) -> AbstractContextManager[None]:
    """Calls in this context are batch invariant: the bits of a row do not depend on the batch.

    For gemm, gemm_rs, ag_gemm, gemm_ar, all_reduce and reduce_scatter, with RMSNorm too: they depend on that
    row of x, on the other arguments, on the ranks of the group and on the kind of GPU; not on the number of
    rows, nor on the row's place among them, nor on the rank that owns it. Ranks use one tile shape for any
    number of rows, sum K without splitting it, and round their own products as they round what they send.
    Few rows and very many take longer than without it.

    The mode belongs to the process, all its threads included; all ranks must agree. FLUX_BATCH_INVARIANT=on
    makes it the default. torch.compile'd code runs in the mode of the moment at which it is called.

    Args:
        enabled: False: calls in this context need not be.

    Returns:
        A context manager, to be entered once.

    Raises:
        TypeError: `enabled` is no bool.
        ValueError: by calls in the context that cannot keep the promise: unfused ones (flux.explain says
            why), flux.grouped_gemm and the layers of flux.moe.

    Example::

        x, weight = torch.randn(64, 64), torch.randn(32, 64)
        with flux.batch_invariant():
            assert torch.equal(flux.gemm(x, weight)[5:6], flux.gemm(x[5:6], weight))
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"batch_invariant: enabled: expected a bool, got {type(enabled).__name__}")
    return _switched(enabled)


@contextmanager
def _switched(enabled: bool) -> Iterator[None]:
    global _mode
    before = _mode
    _mode = enabled
    try:
        yield
    finally:
        _mode = before


def refuse(op: str) -> None:
    """Raises ValueError in calls that must be batch invariant: `op` never is."""
    if demanded():
        raise ValueError(f"{op}: batch_invariant: expected an operator that is batch invariant, got {op}")
