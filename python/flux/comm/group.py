"""Process groups: those that users name, and such as flux makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flux.errors import fail

_c10d: Any = torch.distributed.distributed_c10d  # parts of it are not typed

# Torch's reduce-scatter of one tensor, under the preferred name of this torch version.
reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

GroupLike: TypeAlias = ProcessGroup | DeviceMesh | str | None


def resolve_group(group: GroupLike, op: str) -> ProcessGroup:
    """The group of this process that a ProcessGroup, 1-D DeviceMesh, name, or None (the default) means."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, ProcessGroup):
        if group not in _c10d._world.pg_map:
            fail(op, "group", "a live group", "one that has been destroyed")
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{op}: group: expected an initialised torch.distributed (call init_process_group first)"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            got = f"{group.ndim} dimensions {group.mesh_dim_names}; pass one of them, such as mesh['tp']"
            fail(op, "group", "a one-dimensional DeviceMesh", got)
        return group.get_group()
    if isinstance(group, str):
        with contextlib.suppress(RuntimeError, ValueError):
            return process_group(group)
        fail(op, "group", "the name of a process group", repr(group))
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        fail(op, "group", "a group that this process is a member of", "NON_GROUP_MEMBER")
    raise TypeError(
        f"{op}: group: expected a ProcessGroup, DeviceMesh, group name or None, got {type(group).__name__}"
    )


def process_group(name: str) -> ProcessGroup:
    group: ProcessGroup = _c10d._resolve_process_group(name)
    return group


def group_name(group: GroupLike, op: str) -> str:
    return str(resolve_group(group, op).group_name)


def world_size(group: GroupLike, op: str) -> int:
    return resolve_group(group, op).size()


# To torch.compile these are constants, as by torch.compiler.assume_constant_result. Calling that would import
# the compiler, which takes longer than all other imports of flux together.
_constant: tuple[Any, ...] = (group_name, world_size)
for _function in _constant:
    _function._dynamo_marked_constant = True


class _Part(NamedTuple):
    """A group that flux has made: its name, the group that it is a part of, and its members in that."""

    name: str
    store: Any
    of: ProcessGroup
    members: Sequence[int]


_parts: dict[ProcessGroup, _Part] = {}


def part_of(group: ProcessGroup, members: Sequence[int], name: str) -> ProcessGroup:
    """A group of some ranks of another, of a new name, with a store but no backend. Not a collective, unlike
    new_group, which needs the whole job, or the same number of groups on all members.
    """
    store = _c10d.PrefixStore(f"flux/{name}", store_of(group))
    part = ProcessGroup(store, members.index(group.rank()), len(members))
    _c10d._register_process_group(name, part)
    # For torch's symmetric memory, which would look for the store in torch's own table of groups.
    _SymmetricMemory.set_group_info(name, part.rank(), part.size(), store)
    _parts[part] = _Part(name, store, group, members)
    return part


def name_of(group: ProcessGroup) -> str:
    return _parts[group].name if group in _parts else str(group.group_name)


def is_part(group: ProcessGroup) -> bool:
    return group in _parts


def forget_part(part: ProcessGroup) -> None:
    if part in _parts:
        _c10d._unregister_process_group(_parts.pop(part).name)


def is_live(group: ProcessGroup) -> bool:
    return is_live(_parts[group].of) if group in _parts else group in _c10d._world.pg_map


def live() -> list[ProcessGroup]:
    return [*_c10d._world.pg_map, *_parts]


def why_fake(group: ProcessGroup) -> str | None:
    """Why nothing reaches the other ranks of a group, or None. Dry runs have such groups, of one process."""
    backend, _ = _c10d._world.pg_map.get(group, ("", None))
    return f"torch's backend {backend} exchanges nothing" if "fake" in backend else None


def store_of(group: ProcessGroup) -> Any:
    return _parts[group].store if group in _parts else _c10d._get_process_group_store(group)


def members_of(group: ProcessGroup) -> list[int]:
    """The ranks of a group in the whole job."""
    if group not in _parts:
        return dist.get_process_group_ranks(group)
    ranks = members_of(_parts[group].of)
    return [ranks[member] for member in _parts[group].members]
