"""Errors that flux raises besides ``ValueError`` (bad input) and ``RuntimeError`` (CUDA graphs)."""

from __future__ import annotations

from typing import NoReturn


class CommTimeoutError(RuntimeError):
    """A peer's data did not arrive before the deadline (``FLUX_TIMEOUT_S``).

    The workspace of the group is unusable from then on: every later call on it raises this error again until
    ``flux.release(group=group)``.

    Attributes:
        op: name of the operation that waited.
        rank: rank of this process in the group.
        peer: rank, in the group, that did not deliver.
        epoch: number of the call on this workspace that should have finished; 0: a rendezvous on the host.
        seen: the last call of which this rank has seen anything from the peer (None: not known).
        tile: linear index of the tile that was waited for (None: the peer never came to the call).
        timeout_s: the deadline in seconds.
        detail: what else is known.

    Example::

        try:
            flux.all_reduce(torch.ones(4, 64))
            flux.check()
        except flux.CommTimeoutError as error:
            raise SystemExit(f"rank {error.rank} lost rank {error.peer} in {error.op}") from error
    """

    def __init__(
        self,
        op: str,
        rank: int,
        peer: int,
        epoch: int,
        *,
        seen: int | None = None,
        tile: int | None = None,
        timeout_s: float | None = None,
        detail: str = "",
    ) -> None:
        self.op = op
        self.rank = rank
        self.peer = peer
        self.epoch = epoch
        self.seen = seen
        self.tile = tile
        self.timeout_s = timeout_s
        self.detail = detail
        if epoch == 0:
            what = f"peer {peer} to meet on the host, where workspaces are set up, grown and released"
        else:
            what = f"{'the call' if tile is None else f'tile {tile}'} of peer {peer}, epoch {epoch}"
        waited = "" if timeout_s is None else f" for {timeout_s:g} s"
        last = "" if seen is None else f" (last seen from it: epoch {seen})"
        super().__init__(
            f"flux.{op}: rank {rank} waited{waited} for {what}{last}. "
            + (f"{detail} " if detail else "")
            + f"Rank {peer} has died, hangs, is slower than the deadline, or never made this call. "
            "Look for its own error first; FLUX_TIMEOUT_S sets the deadline in seconds; "
            "flux.release(group=group) makes the group usable again once all its ranks are alive."
        )

    def __reduce__(self) -> tuple[object, ...]:
        state = {"seen": self.seen, "tile": self.tile, "timeout_s": self.timeout_s, "detail": self.detail}
        return (_rebuild, (self.op, self.rank, self.peer, self.epoch, state))


def _rebuild(op: str, rank: int, peer: int, epoch: int, state: dict[str, object]) -> CommTimeoutError:
    return CommTimeoutError(op, rank, peer, epoch, **state)  # type: ignore[arg-type]


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    """The form of every message about an argument that does not fit."""
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")
