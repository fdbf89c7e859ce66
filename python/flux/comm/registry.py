"""The workspaces of this process: one per group and device."""

from __future__ import annotations

import atexit

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace, refuse_capture
from flux.comm.group import Meeting
from flux.comm.workspace import Workspace

_workspaces: dict[tuple[ProcessGroup, torch.device], Workspace] = {}
_made: dict[tuple[str, str], int] = {}


def get(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    """The workspace of a group on a device; making it, at the group's first call there, is a collective."""
    workspace = _workspaces.get((group, device))
    return _make(group, device, op) if workspace is None else workspace


def _make(group: ProcessGroup, device: torch.device, op: str) -> Workspace:
    if device.type == "cuda":
        refuse_capture(group, op)
    if not _made:
        # Before the interpreter tears down what destructors of GPU memory need.
        atexit.register(_workspaces.clear)
    for key in [key for key in _workspaces if key[0] not in c10d._world.pg_map]:
        del _workspaces[key]  # destroy_process_group has ended that group
    # Workspaces that follow each other under one name must not read each other's keys.
    name = (group.group_name, device.type)
    _made[name] = _made.get(name, 0) + 1
    meeting = Meeting(group, f"{device.type}{_made[name]}")
    workspace = (CudaWorkspace if device.type == "cuda" else CpuWorkspace)(group, device, op, meeting)
    _workspaces[group, device] = workspace
    return workspace


def find(group: ProcessGroup, device: torch.device) -> Workspace | None:
    """The workspace of a group on a device if there is one. Not a collective."""
    return _workspaces.get((group, device))


def existing(group: ProcessGroup) -> list[Workspace]:
    """The workspaces that a group has so far."""
    return [workspace for (owner, _), workspace in _workspaces.items() if owner is group]


def drop(workspace: Workspace) -> None:
    """Forgets a workspace; its memory is freed with it."""
    del _workspaces[workspace.group, workspace.device]
