"""Makes and frees the workspaces of this process: one per group and device."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux.comm import group as groups
from flux.comm import repeat
from flux.comm import workspace as workspaces
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace, refuse_capture
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.rendezvous import Rendezvous
from flux.comm.topology import of_nodes
from flux.comm.workspace import ON_ALL_RANKS, Key, Met, Workspace, broken_off, expecting_graphs, turn
from flux.comm.workspace import find as find
from flux.comm.workspace import in_turn as in_turn
from flux.errors import CommTimeoutError

# First calls that failed after the ranks had met: their rendezvous, and the error if it was a timeout.
_unfinished: dict[Key, tuple[Rendezvous, CommTimeoutError | None]] = {}
# Groups of the process from which this one was forked.
_of_parent: set[ProcessGroup] = set()


def get(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    """The workspace of a group on a device. The group's first call there creates it: a collective."""
    workspace = workspaces.made.get((group, device))
    return _make(group, device, op) if workspace is None else workspace


def _make(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    _refuse_forked(group, op)
    if device.type == "cuda":
        refuse_capture(group, op)
    key, its_turn = (group, device), turn(group, device)
    _raise_if_unfinished(key)
    _forget_destroyed_groups()
    # Free workspaces before the interpreter destroys modules that the destructors of GPU memory need.
    atexit.unregister(_clear)
    atexit.register(_clear)
    rendezvous = Rendezvous.of(group, device.type)
    rendezvous.begin(op)
    _unfinished[key] = (rendezvous, None)
    its_turn.open()
    kind = CudaWorkspace if device.type == "cuda" else CpuWorkspace
    try:
        facts = kind.meet(group, device, op, rendezvous)
        met = Met(group, device, op, rendezvous, its_turn, facts)
        several = of_nodes([fact["node"] for fact in facts])[0] is not None
        workspace: Workspace = (NodesWorkspace if several else kind)(met)
        if isinstance(workspace, NodesWorkspace):  # the own node has a group and a workspace of its own
            workspace.join(op, lambda part, device, op: in_turn(part, device, get, part, device, op), release)
    except CommTimeoutError as error:
        _unfinished[key] = (rendezvous, error)
        raise
    except ON_ALL_RANKS:
        del _unfinished[key]
        raise
    workspaces.made[key] = workspace
    del _unfinished[key]
    if workspace.known is not None:
        repeat.of_groups.setdefault(group, workspace.known)
    its_turn.close()  # the call for which it was made has not begun
    return workspace


def known_of_one_rank(group: ProcessGroup) -> Any:
    """The known calls of a group of one rank, whose calls need no workspace."""
    if group not in repeat.of_groups:
        _forget_destroyed_groups()
        repeat.of_groups.setdefault(group, repeat.make(group_name=str(group.group_name)))
    return repeat.of_groups[group]


def _clear() -> None:
    repeat.of_groups.clear()
    workspaces.made.clear()


def _refuse_forked(group: ProcessGroup, op: str) -> None:
    if group in _of_parent:
        raise RuntimeError(
            f"{op}: group {groups.name_of(group)!r} belongs to the process from which this one was forked, "
            "whose ranks would take this call for its own. Call flux in that process only, not in a "
            "DataLoader's workers; start processes that are to be ranks with spawn or forkserver, or fork "
            "before init_process_group"
        )


def _forget_parent() -> None:
    """In a forked child: forgets the parent's workspaces, so that all calls come to _refuse_forked. Frees
    nothing: destructors would disturb the parent (sockets), wait for its threads, or fail (GPU memory).
    """
    _of_parent.update(groups.live())
    kept = [dict(each) for each in (workspaces.made, workspaces.turns, _unfinished)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # not freed when the interpreter exits either
    for each in (workspaces.made, workspaces.turns, _unfinished):
        each.clear()
    repeat.forget_all()


os.register_at_fork(after_in_child=_forget_parent)


def _raise_if_unfinished(key: Key) -> None:
    if key in _unfinished and (lost := _unfinished[key][1]) is not None:
        raise lost
    if (broken_by := turn(*key).broken_by) is not None:
        raise broken_off(key[0], broken_by)


def _forget_destroyed_groups() -> None:
    for kept in (workspaces.made, _unfinished, workspaces.turns):
        for key in list(kept):  # a copy: other threads add to them
            if not groups.is_live(key[0]):
                kept.pop(key, None)
    for group in [*repeat.of_groups, *expecting_graphs]:
        if not groups.is_live(group):
            repeat.of_groups.pop(group, None)
            expecting_graphs.discard(group)


def existing(group: ProcessGroup) -> list[Workspace]:
    return [workspace for (owner, _), workspace in list(workspaces.made.items()) if owner is group]


def check(group: ProcessGroup) -> None:
    """Raises the failure of a group's workspaces, if any: see flux.check."""
    _refuse_forked(group, "check")
    for key, its_turn in list(workspaces.turns.items()):
        if key[0] is group:
            workspace = workspaces.made.get(key)
            ask = functools.partial(_raise_if_unfinished, key) if workspace is None else workspace.check
            its_turn.call(ask)


def check_all() -> None:
    """As check, for every group of this process. Waits for no stream."""
    for group in {key[0] for key in list(workspaces.turns)}:
        if not groups.is_part(group):  # the group that it is a part of names ranks as users do
            check(group)


def release(group: ProcessGroup) -> None:
    """Frees the workspaces of a group and forgets failures: see flux.release."""
    _refuse_forked(group, "release")
    for key, its_turn in list(workspaces.turns.items()):
        if key[0] is group:
            its_turn.call(_release, key)


def _release(key: Key) -> None:
    workspace = workspaces.made.get(key)
    try:
        if workspace is not None:
            workspace.release()
        elif key in _unfinished:
            _unfinished[key][0].leave("release", wait=False)
    finally:
        if workspace is not None and repeat.of_groups.get(key[0]) is workspace.known:
            repeat.of_groups.pop(key[0], None)
        workspaces.made.pop(key, None)
        _unfinished.pop(key, None)
        turn(*key).forget()
