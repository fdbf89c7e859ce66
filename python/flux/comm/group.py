"""Process groups: what users pass, and how their ranks meet on the host.

Ranks meet through the group's key-value store, not through a collective: it works for every backend, needs no
GPU, has a deadline, and knows who is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flux import _env
from flux.errors import CommTimeoutError

_c10d: Any = torch.distributed.distributed_c10d  # parts of it are not typed

GroupLike: TypeAlias = ProcessGroup | DeviceMesh | str | None


def resolve_group(group: GroupLike, op: str) -> ProcessGroup:
    """The group that a ProcessGroup, 1-D DeviceMesh, name, or None (the default group) stands for.

    Raises:
        ValueError: torch.distributed is not initialised, the group has been destroyed, the name is unknown,
            the mesh has more than one dimension, this process is not a member, or the argument is something
            else.
    """
    if isinstance(group, ProcessGroup):
        if group not in _c10d._world.pg_map:
            raise ValueError(f"{op}: group: expected a live group, got one that has been destroyed")
        return group
    if group is None:
        world: ProcessGroup | None = dist.group.WORLD
        if world is not None:
            return world
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{op}: group: expected an initialised torch.distributed (call init_process_group first)"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{op}: group: expected a one-dimensional DeviceMesh, got {group.ndim} dimensions "
                f"{group.mesh_dim_names}; pass one of them, such as mesh['tp']"
            )
        return group.get_group()
    if isinstance(group, str):
        try:
            return process_group(group)
        except (RuntimeError, ValueError):
            raise ValueError(f"{op}: group: expected the name of a process group, got {group!r}") from None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{op}: group: expected a group that this process is a member of, got NON_GROUP_MEMBER"
        )
    raise ValueError(
        f"{op}: group: expected a ProcessGroup, DeviceMesh, group name or None, got {type(group).__name__}"
    )


def process_group(name: str) -> ProcessGroup:
    """The live process group of that name."""
    group: ProcessGroup = _c10d._resolve_process_group(name)
    return group


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def group_name(group: GroupLike, op: str) -> str:
    """Name of the group, as torch operators carry it. torch.compile treats it as a constant."""
    return str(resolve_group(group, op).group_name)


class Meeting:
    """Successive all-to-all exchanges of small facts between the ranks of a group, through its store.

    All ranks must meet in the same order. Keys carry the name of the group's user (CPU or CUDA workspace) and
    a counter.
    """

    def __init__(self, group: ProcessGroup, tag: str) -> None:
        self._store = _c10d._get_process_group_store(group)
        self._rank = group.rank()
        self._world_size = group.size()
        # Groups may share one store (a FileStore given to init_process_group), so the key names the members.
        members = "-".join(str(r) for r in dist.get_process_group_ranks(group))
        self._prefix = f"flux/{tag}/{group.group_name}/{members}"
        self._count = 0

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Gives `facts` to every rank and returns those of all ranks, in rank order.

        Raises:
            CommTimeoutError: a rank did not come within FLUX_TIMEOUT_S.
        """
        self._count += 1
        return self._gather(op, str(self._count), facts)

    def leave(self, op: str, wait: bool) -> None:
        """Says that this rank will not come again; with `wait`, returns when all ranks have said so.

        Raises:
            CommTimeoutError: a rank did not leave within FLUX_TIMEOUT_S.
        """
        if wait:
            self._gather(op, "leave", {})
        else:
            self._store.set(f"{self._prefix}/leave/{self._rank}", "{}")

    def _gather(self, op: str, place: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        prefix = f"{self._prefix}/{place}"
        timeout_s = _env.timeout_s()
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        peer = self._rank
        result: list[dict[str, Any]] = []
        try:
            self._store.set(f"{prefix}/{self._rank}", json.dumps(facts))
            for peer in range(self._world_size):
                key = f"{prefix}/{peer}"
                # Polling, unlike Store.wait, can be interrupted from the keyboard.
                while not self._store.check([key]):
                    if time.monotonic() > deadline:
                        raise CommTimeoutError(op, self._rank, peer, 0, timeout_s=timeout_s)
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.02)
                result.append(json.loads(self._store.get(key)))
        except CommTimeoutError:
            raise
        except RuntimeError as error:  # the store itself is gone: it lives in one of the job's processes
            detail = f"The store of the group failed: {error}."
            raise CommTimeoutError(op, self._rank, peer, 0, timeout_s=timeout_s, detail=detail) from error
        return result


def reduce_scatter() -> Callable[..., object]:
    """torch's reduce-scatter of one tensor, under the name this torch prefers."""
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
