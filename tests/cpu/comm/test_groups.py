"""Which groups a call can name, several groups at once, and what happens to their workspaces."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_calls import COLLECTIVES, Call, mixed, wrong
from refusals import said
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux
from flux.comm import registry
from flux.comm.group import resolve_group
from flux.comm.workspace import made
from flux.plan.choose import PlanInput, why_not_fused
from flux.testing import AgGemmCase, GemmRsCase, spawn

DTYPES = (torch.bfloat16, torch.float32)


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    x = torch.ones(2, 2)
    for op, given in (("gemm_rs", (x, x)), ("ag_gemm", (x, x)), ("all_gather", (x,))):
        message = said(getattr(flux, op), *given)
        assert message.startswith(f"{op}: group: expected an initialised torch.distributed")


def forms(rank: int, world_size: int) -> str:
    world = dist.group.WORLD
    assert world is not None
    case = GemmRsCase(world_size * 9, 24, 16, world_size)
    x, weight, _ = case.inputs(rank)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    for group in (None, world, world.group_name, mesh, mesh["tp"], mesh.get_group()):
        assert torch.equal(flux.gemm_rs(x, weight, group=group), case.expected(rank))
        assert flux.ag_gemm(x, weight, group=group).shape == (world_size * case.m, case.n)
        assert flux.all_gather(x, group=group).shape == (world_size * case.m, case.k)
    inner = square["tp"]
    half = GemmRsCase(inner.size() * 9, 24, 16, inner.size(), seed=rank // inner.size())
    x, weight, _ = half.inputs(inner.get_local_rank())
    assert torch.equal(flux.gemm_rs(x, weight, group=inner), half.expected(inner.get_local_rank()))
    bad: list[Any] = [square, "no such group", 3, dist.GroupMember.NON_GROUP_MEMBER]
    told = [said(flux.gemm_rs, x, weight, group=group) for group in bad]
    assert "one-dimensional DeviceMesh, got 2 dimensions ('dp', 'tp')" in told[0], told
    assert "got 'no such group'" in told[1] and "got int" in told[2] and "member" in told[3], told
    assert all(message.startswith("gemm_rs: group: expected") for message in told)
    rows = said(flux.gemm_rs, torch.ones(world_size * 2 + 1, 4), torch.ones(3, 4))
    assert rows.startswith(f"gemm_rs: x: expected dimension 0 divisible by the {world_size} ranks"), rows
    assert rows.endswith(f"got shape [{world_size * 2 + 1}, 4]"), rows
    return ""


def test_forms_of_a_group() -> None:
    assert spawn(forms, 4, backend="gloo") == [""] * 4


def two_groups(rank: int, world_size: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    delays = random.Random(rank)
    for number in range(25):
        # Different shapes in the two groups, at different speeds: they must not notice each other.
        mine, colour = (groups[rank // 2], rank // 2) if number % 3 else (strided[rank % 2], rank % 2)
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.03)
        for group, seed in [(mine, 2 * number + colour)] + [(None, number)] * (number % 10 == 9):
            dice = random.Random(seed)
            if told := wrong(Call(dice, seed, group, mixed, DTYPES).make(dice.choice(COLLECTIVES))):
                return f"call {number} of group {colour if group else 'all'}: {told}"
    return ""


def test_two_groups_of_two_at_the_same_time() -> None:
    assert spawn(two_groups, 4, backend="gloo") == [""] * 4


def lifecycle(rank: int, world_size: int) -> str:
    world = resolve_group(None, "test")
    flux.release()  # nothing to release is fine
    flux.check()
    flux.reserve(max_m=4000, max_n=3000, max_k=64)
    workspace = registry.existing(world)[0]
    size = workspace.slot_bytes
    flux.reserve(max_m=4000, max_n=3000, max_k=64)
    flux.reserve(max_m=8, max_n=8, max_k=8)
    assert (workspace.slot_bytes, registry.existing(world)) == (size, [workspace]), "reserve is idempotent"
    for m, n in ((4000 // world_size * world_size, 3000), (world_size, 8)):
        plan = flux.explain("gemm_rs", m, n, 16)
        assert workspace.fits(plan.signal_bytes, plan.slot_bytes)
    case = GemmRsCase(world_size * 300, 700, 16, world_size)
    x, weight, _ = case.inputs(rank)
    assert torch.equal(flux.gemm_rs(x, weight), case.expected(rank))
    wide = AgGemmCase(4000 // world_size * world_size, 8, 64, world_size)
    x, weight, _ = wide.inputs(rank)
    assert torch.equal(flux.ag_gemm(x, weight), wide.expected(rank))
    x, weight, _ = case.inputs(rank)
    assert workspace.slot_bytes == size, "what was reserved did not suffice"
    flux.check()
    plan = flux.explain("gemm_rs", case.m, case.n, case.k)
    assert plan.by_flux and plan.transport == "POSIX shared memory" and plan.config_name, plan
    with pytest.raises(TypeError, match="expect_graphs: group: expected"):
        flux.expect_graphs(3)  # type: ignore[arg-type]
    assert workspace.copies and workspace.plans
    flux.expect_graphs()
    assert not workspace.copies and not workspace.plans
    assert torch.equal(flux.gemm_rs(x, weight), case.expected(rank))
    flux.release()
    assert registry.existing(world) == []
    assert torch.equal(flux.gemm_rs(x, weight), case.expected(rank))
    # A group that is gone takes its workspace along, and its name may come again.
    for _ in range(2):
        group = dist.new_group(list(range(world_size)))
        assert torch.equal(flux.gemm_rs(x, weight, group=group), case.expected(rank))
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="gemm_rs: group: expected a live group"):
            flux.gemm_rs(x, weight, group=group)
    group = dist.new_group(list(range(world_size)))
    flux.gemm_rs(x, weight, group=group)
    assert sorted(key[0].group_name for key in made) == sorted([world.group_name, group.group_name])
    return ""


def test_reserve_release_and_the_end_of_a_group() -> None:
    assert spawn(lifecycle, 2, backend="gloo") == [""] * 2


def dry_run(rank: int, world_size: int, backend: str) -> list[Any]:
    """Operators and a step of training in a group of 4 ranks that torch fakes."""
    dist.destroy_process_group()
    dist.init_process_group(backend, store=FakeStore(), rank=1, world_size=4)
    x, weight = torch.ones(8, 6), torch.ones(12, 6)
    found = [flux.gemm_rs(x, weight), flux.ag_gemm(x, weight), flux.gemm_ar(x, weight), flux.all_reduce(x)]
    found += [flux.reduce_scatter(x), flux.all_gather(x)]
    flux.reserve(max_m=8, max_n=8, max_k=8)
    mlp = flux.layers.ParallelMLP(8, 16, dtype=torch.float32)
    found.append(mlp(torch.ones(2, 8)))
    found[-1].sum().backward()
    experts = flux.moe.MoEMLP(8, 16, 4, ep_size=2, dtype=torch.float32)
    found.append(experts(torch.ones(2, 8), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2)))
    with FakeTensorMode():  # shapes without memory
        mlp = flux.layers.ParallelMLP(8, 16)
        found.append(mlp(torch.ones(2, 8)))
        found[-1].sum().backward()
    flux.check()
    flux.release()
    flux.gemm_rs(x, weight)
    reason = flux.explain("gemm_rs", m=8, n=12, k=6, dtype=torch.float32).reason
    return [*(list(result.shape) for result in found), reason]


@pytest.mark.parametrize("backend", ["fake", "cpu:fake,cuda:fake"])
def test_dry_runs_in_a_fake_group_give_shapes(backend: str) -> None:
    (told,) = spawn(dry_run, 1, backend, backend="gloo")
    assert told[:-1] == [[2, 12], [32, 12], [8, 12], [8, 6], [2, 6], [32, 6], [2, 8], [2, 8], [2, 8]]
    assert told[-1] == f"rank 0: torch's backend {backend} exchanges nothing"


def nine(rank: int, world_size: int) -> tuple[bool, str]:
    result = flux.gemm_rs(torch.ones(world_size, 4), torch.ones(3, 4))
    assert torch.equal(result, torch.full((1, 3), 4.0 * world_size))
    plan = flux.explain("gemm_rs", world_size, 3, 4, torch.float32)
    return plan.by_flux, plan.reason


def test_more_ranks_than_a_kernel_serves_run_unfused() -> None:
    for fused, reason in spawn(nine, 9, backend="gloo"):
        assert not fused
        assert "9 ranks" in reason and "at most 8" in reason


@pytest.mark.parametrize(
    ("change", "fused", "reason"),
    [
        ({}, True, "supported"),
        ({"dtype": torch.float16}, True, "supported"),
        ({"dtype": torch.float32}, False, "not float32"),
        ({"k": 60}, False, "k = 60 is not a multiple of 8"),
        ({"n": 129}, False, "n = 129 is not a multiple of 8"),
        ({"m": 1}, True, "supported"),
        ({"m": 0}, False, "empty"),
        ({"k": 0}, False, "empty"),
        ({"m": 2**31}, False, "exceeds"),
        ({"why_not": "rank 3: no way to its peers"}, False, "rank 3: no way"),
        ({"device_type": "cpu", "n": 129, "dtype": torch.float32}, True, "share memory"),
        ({"device_type": "cpu", "op": "gemm"}, False, "torch.mm"),
        ({"op": "ag_gemm"}, True, "supported"),
        ({"op": "ag_gemm", "n": 129}, False, "n = 129 is not a multiple of 8"),
        ({"op": "all_gather", "n": 1, "dtype": torch.float64, "k": 2}, True, "supported"),
        ({"op": "all_gather", "n": 1, "k": 9}, False, "rows of 18 bytes"),
        ({"op": "all_gather", "n": 1, "k": 2**30 - 8}, True, "supported"),
        ({"op": "all_gather", "n": 1, "k": 2**29, "dtype": torch.float32}, False, "rows of 2147483648 bytes"),
        ({"op": "ag_gemm", "k": 2**30 - 8}, True, "supported"),
        ({"device_type": "cpu", "op": "all_gather", "n": 1, "k": 2**29}, True, "share memory"),
        ({"device_type": "cpu", "op": "all_gather", "n": 1, "k": 9}, True, "share memory"),
        ({"device_type": "xpu"}, False, "no kernels for xpu"),
    ],
)
def test_what_runs_fused(change: dict[str, Any], fused: bool, reason: str) -> None:
    facts: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "m": 128, "n": 128, "k": 64}
    facts |= {"why_not": None, **change}
    op = facts.pop("op", "gemm_rs")
    problem = PlanInput(**facts)
    why_not = why_not_fused(op, problem)
    assert (why_not is None) is fused
    assert reason in (problem.why_fused if why_not is None else why_not)
