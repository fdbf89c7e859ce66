"""A process forked from a rank is none: its calls are refused, and its parent goes on undisturbed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_calls import is_exact
from repeated import CALLS, Machine, arguments
from torch.utils.data import DataLoader, Dataset

import flux
from flux.comm import workspace as workspaces
from flux.comm.cuda import CudaWorkspace
from flux.testing import spawn

pytest_plugins = ("repeated",)  # fixtures
REFUSED = (
    "RuntimeError: {}: group '{}' belongs to the process from which this one was forked, whose ranks would "
    "take this call for its own. Call flux in that process only, not in a DataLoader's workers; start "
    "processes that are to be ranks with spawn or forkserver, or fork before init_process_group"
)


def in_child(work: Callable[[], object]) -> str:
    """What work() returns, or raises, in a forked child that then ends as an interpreter does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                told = str(work())
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writing, told.encode())
            atexit._run_exitfuncs()
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, (status, told)
    return told


def held() -> tuple[int, int]:
    """Descriptors of this process, and its mappings of segments."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/flux-")


def right(seed: int) -> bool:
    return is_exact("gemm_rs", seed, 4) and is_exact("ag_gemm", seed, 4)


class Model(Dataset[str]):
    """Its items come out of a call of flux."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            return str(flux.gemm_rs(torch.full((4, 16), 1000.0), torch.ones(8, 16)))
        except RuntimeError as error:
            return f"RuntimeError: {error}"


def forking(rank: int, p: int, forks: int) -> list[str]:
    x, weight = torch.full((4, 16), 1000.0), torch.ones(8, 16)
    told = [in_child(lambda: flux.gemm_rs(x, weight))]  # before the parent's first call
    assert right(0)
    y = flux.gemm_rs(torch.ones(4, 16, requires_grad=True), weight)
    told += [
        in_child(work)
        for work in (
            lambda: flux.gemm_rs(x, weight),
            lambda: flux.ag_gemm(x, weight, group=dist.group.WORLD),
            lambda: y.sum().backward(),
            lambda: flux.reserve(max_m=8, max_n=8, max_k=8),
            flux.release,
            flux.check,
            lambda: None,
        )
    ]
    told += next(iter(DataLoader(Model(), num_workers=1, multiprocessing_context="fork")))
    assert right(1)
    # A child may make a group of its own, although the parent has one of this name.
    assert in_child(alone) == "ok"
    before = held()
    for seed in range(forks):
        in_child(lambda: flux.gemm_rs(x, weight))
        assert right(seed)
    assert held() == before
    flux.release()
    assert right(2)
    return told


def alone() -> str:
    dist.distributed_c10d._world.pg_map.clear()  # destroying the parent's would wait for its peers
    dist.distributed_c10d._update_default_pg(None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert torch.equal(flux.gemm_rs(torch.ones(2, 4), torch.ones(3, 4)), torch.full((2, 3), 4.0))
    return "ok"


def test_a_forked_child_is_refused_and_its_parent_is_right() -> None:
    for told in spawn(forking, 2, 3, backend="gloo"):
        ops = ("gemm_rs", "gemm_rs", "ag_gemm", "ag_gemm", "reserve", "release", "check", None, "gemm_rs")
        for op, message in zip(ops, told, strict=True):
            assert message.startswith("None" if op is None else REFUSED.format(op, "0")), message


@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm", "all_reduce norm", "moe.ag_scatter_gemm"])
def test_no_known_call_reaches_a_gpu_from_a_child(
    op: str, machine: Machine, workspace: CudaWorkspace
) -> None:
    given = arguments(op)
    for _ in range(2):
        CALLS[op](**given)
    launches = len(machine.repeated)
    assert launches and len(workspace.known) == 1

    def call() -> str:
        try:
            CALLS[op](**given)
        except RuntimeError as error:
            return f"{len(machine.repeated) - launches} launches, {type(error).__name__}: {error}"
        return "a result"

    message = in_child(call)
    assert message.startswith(f"0 launches, {REFUSED.format(op.split()[0], workspace.group.group_name)}")
    machine.repeated.clear()
    CALLS[op](**given)
    assert machine.repeated and len(workspace.known) == 1 and workspaces.made
