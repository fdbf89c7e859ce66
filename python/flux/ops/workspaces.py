"""Public functions on workspaces: reserve, expect_graphs, release, check."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _deprecated, _native
from flux.calls import argument_types, checks
from flux.comm import registry
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.registry import check_all as check_all
from flux.comm.workspace import expecting_graphs, round_up
from flux.ops.explain import current_device
from flux.plan.choose import PlanInput, gemm_rs_room, why_not_fused
from flux.plan.gather import COPY_FROM_BYTES, ag_gemm_room
from flux.plan.sums import COMPOSED_FROM_BYTES, exchange_room

_cuda: Any = torch.cuda  # parts of it are not typed


@_deprecated.arguments("group", slots="")
def reserve(
    *,
    max_m: int,
    max_n: int,
    max_k: int,
    dtype: torch.dtype = torch.bfloat16,
    group: GroupLike = None,
    device: torch.device | str | None = None,
) -> None:
    """Makes room for every problem up to the given sizes. A collective; idempotent; never shrinks.

    Calls make room themselves, except while a CUDA graph is being captured: then call this first. Gathered
    shards that go by copy engine have buffers of their own, which are reserved too.

    Args:
        max_m: rows of all ranks: those of x for gemm_rs and gemm_ar, of the result for ag_gemm and
            all_gather.
        max_n: columns of the result. Only gemm_rs and gemm_ar send them: without those, 1 will do. all_reduce
            and reduce_scatter take up to max_m * max_n elements.
        max_k: columns of x on one rank. Only ag_gemm and all_gather send them: without those, 1 will do.
        dtype: of x.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        device: of the tensors; default: the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: an argument does not fit, or the ranks ask for different sizes.
        CommTimeoutError: a rank did not come.

    Example::

        flux.reserve(max_m=256, max_n=128, max_k=64, dtype=torch.float32)
        # Now a CUDA graph can capture calls of up to these sizes.
    """
    argument_types.check("reserve", max_m=max_m, max_n=max_n, max_k=max_k, dtype=dtype)
    for name, size in (("max_m", max_m), ("max_n", max_n), ("max_k", max_k)):
        if size < 1:
            checks.fail("reserve", name, "a positive size", size)
    if dtype not in checks.FLOATING:
        checks.fail("reserve", "dtype", "bfloat16, float16, float32 or float64", dtype)
    pg = resolve_group(group, "reserve")
    where = current_device() if device is None else _device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if pg.size() > 1:
        registry.in_turn(pg, where, _reserve, pg, where, max_m, max_n, max_k, dtype)


def _device(device: torch.device | str) -> torch.device:
    argument_types.device("reserve", "device", device)
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        checks.fail("reserve", "device", "the CPU or a CUDA device", where)
    gpus = torch.cuda.device_count() if where.type == "cuda" else 0
    if where.type == "cuda" and (where.index or 0) >= gpus:
        checks.fail("reserve", "device", f"a CUDA device (torch sees {gpus} here)", where)
    return where


def _reserve(
    group: ProcessGroup, device: torch.device, max_m: int, max_n: int, max_k: int, dtype: torch.dtype
) -> None:
    workspace = registry.get(group, device, "reserve")
    workspace.raise_if_failed()
    if workspace.why_not is not None:
        return
    if isinstance(workspace, NodesWorkspace):
        if workspace.inner is not None:
            _reserve(workspace.node_group, device, max_m, max_n, max_k, dtype)
        return
    p, device_type = workspace.world_size, workspace.device.type
    m = round_up(max_m, p)
    # For large sums gemm_ar is gemm_rs + all_gather, so reserve for a gather too.
    is_large = m * max_n * dtype.itemsize >= COMPOSED_FROM_BYTES
    columns = max(max_k, max_n) if is_large else max_k
    gathered = ag_gemm_room(m, columns, p, dtype)
    rooms = [gathered]
    exchange_bytes = 0
    # Reserve if any size up to these can run fused; sizes that never run fused need no workspace.
    if why_not_fused("gemm_rs", PlanInput(device_type, 8, 8, 8, dtype)) is None:
        rooms += [gemm_rs_room(m, max_n, p, c.id, dtype) for c in _native.core.tile_configs()]
        exchange = exchange_room(device_type, max_m, max_n, p, dtype)
        rooms.append((exchange["signal_bytes"], exchange["slot_bytes"]))
        exchange_bytes = exchange["exchange_bytes"]
    call = {"max_m": max_m, "max_n": max_n, "max_k": max_k, "dtype": str(dtype)}
    signal_bytes, slot_bytes = (max(sizes) for sizes in zip(*rooms, strict=True))
    workspace.grow(signal_bytes, slot_bytes, "reserve", call, exchange_bytes)
    if isinstance(workspace, CudaWorkspace) and m // p * columns * dtype.itemsize >= COPY_FROM_BYTES:
        workspace.reserve_copy(*gathered, "reserve", call)


@_deprecated.arguments("group")
def expect_graphs(*, group: GroupLike = None) -> None:
    """Lets a group's calls run from now on as CUDA graphs capture them: then steps before a capture make all
    the room it needs, and no sizes need to be reserved.

    Graphs contain no calls by copy engines, which carry large shards otherwise: SMs carry those, too, then.
    Exchanges nothing; all ranks must call it between the same calls. Lasts until the group is destroyed.

    Args:
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.

    Raises:
        ValueError: group is none of these.

    Example::

        flux.expect_graphs()
        flux.gemm_rs(torch.ones(p, 64), torch.ones(32, 64))  # a step as it will be captured
        # Now a CUDA graph can capture the same step.
    """
    pg = resolve_group(group, "expect_graphs")
    expecting_graphs.add(pg)
    for workspace in registry.existing(pg):
        registry.in_turn(pg, workspace.device, workspace.stop_copying)


@_deprecated.arguments("group")
def release(*, group: GroupLike = None) -> None:
    """Frees the workspaces of a group, and forgets failures. A collective, except after a timeout or a call
    that was broken off: then only the caller's side is freed, and all ranks that live on must release before
    the group's next call.

    CUDA graphs that captured calls on the group must not be replayed afterwards.

    Args:
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.

    Raises:
        CommTimeoutError: a rank did not come. The caller's side is freed nevertheless.

    Example::

        flux.gemm_rs(torch.ones(p, 64), torch.ones(32, 64))
        flux.release()  # a later call makes a new workspace
    """
    registry.release(resolve_group(group, "release"))


@_deprecated.arguments("group")
def check(*, group: GroupLike = None) -> None:
    """Waits for the current stream, and raises what went wrong on the group's workspaces, if anything.

    Args:
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.

    Raises:
        CommTimeoutError: a peer did not deliver in time in some call since the workspace was made.
        RuntimeError: a call was broken off by an exception, when peers had heard of it.

    Example::

        out = flux.gemm_rs(torch.ones(p, 64), torch.ones(32, 64))
        flux.check()  # the result is there, and no peer was lost
    """
    pg = resolve_group(group, "check")
    if _cuda.is_available() and _cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    registry.check(pg)
