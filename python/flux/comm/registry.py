"""The workspaces of this process: one per group and device."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from flux import _native
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace, refuse_capture
from flux.comm.group import Meeting
from flux.comm.workspace import ON_ALL_RANKS, Workspace, broken_off
from flux.errors import CommTimeoutError

Key = tuple[ProcessGroup, torch.device]

_workspaces: dict[Key, Workspace] = {}
# First calls that were broken off after the ranks had met: what later calls raise, and the meeting to leave.
_broken: dict[Key, tuple[BaseException, Meeting]] = {}
_turns: dict[Key, Any] = {}


def turn(group: ProcessGroup, device: torch.device) -> Any:
    """A lock: threads of this process make their calls on a group one after the other, in order of arrival.

    All ranks must make a group's calls in the same order; that is the callers' responsibility. Held by a call
    from the look-up of its workspace to its end (on GPUs: to its launch). A call may be made of others.
    """
    found = _turns.get((group, device))
    return _turns.setdefault((group, device), _native.core.Turn()) if found is None else found


def get(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    """The workspace of a group on a device; making it, at the group's first call there, is a collective."""
    workspace = _workspaces.get((group, device))
    return _make(group, device, op) if workspace is None else workspace


def _make(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    key = (group, device)
    if key in _broken:
        raise _broken[key][0]
    if device.type == "cuda":
        refuse_capture(group, op)
    atexit.unregister(_workspaces.clear)
    # Before the interpreter tears down what destructors of GPU memory need.
    atexit.register(_workspaces.clear)
    _forget_destroyed_groups()
    meeting = Meeting(group, device.type)
    meeting.begin(op)
    # From here on peers count on this rank: the entry stays if anything goes wrong, whatever it is.
    _broken[key] = (broken_off(op, group, "an exception"), meeting)
    try:
        kind = CudaWorkspace if device.type == "cuda" else CpuWorkspace
        _workspaces[key] = kind(group, device, op, meeting)
    except ON_ALL_RANKS:
        del _broken[key]
        raise
    except BaseException as error:
        lost = isinstance(error, CommTimeoutError)
        _broken[key] = (error if lost else broken_off(op, group, type(error).__name__), meeting)
        raise
    del _broken[key]
    return _workspaces[key]


def _forget_destroyed_groups() -> None:
    for kept in (_workspaces, _broken, _turns):
        for key in [key for key in kept if key[0] not in c10d._world.pg_map]:
            del kept[key]


def find(group: ProcessGroup, device: torch.device) -> Workspace | None:
    """The workspace of a group on a device if there is one. Not a collective."""
    return _workspaces.get((group, device))


def existing(group: ProcessGroup) -> list[Workspace]:
    """The workspaces that a group has so far."""
    return [workspace for (owner, _), workspace in _workspaces.items() if owner is group]


def raise_if_broken(group: ProcessGroup) -> None:
    """Raises what broke off the making of a workspace of a group, if anything did."""
    for (owner, _), (error, _) in _broken.items():
        if owner is group:
            raise error


def release(group: ProcessGroup) -> None:
    """Frees the workspaces of a group and forgets failures: see flux.release."""
    for key in [key for key in _broken if key[0] is group]:
        _broken.pop(key)[1].leave("release", wait=False)
    for workspace in existing(group):
        with turn(group, workspace.device):
            try:
                workspace.release()
            finally:
                _workspaces.pop((group, workspace.device), None)
