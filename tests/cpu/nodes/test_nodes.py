"""Groups of several nodes, emulated by processes of this host: exact results, gradients, bytes,
explanations. One set of processes for each layout runs all scenarios; each test looks at one answer.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import nodes_cases
import pytest
import torch
import torch.distributed as dist
from dense_calls import COLLECTIVES
from effort import some
from refusals import said
from torch.distributed.device_mesh import init_device_mesh

import flux
from flux.comm import registry
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.topology import Links, write_links
from flux.plan.choose import Plan, workspace_plan
from flux.testing import AgGemmCase, GemmRsCase, SpawnError, spawn

LAYOUTS = ["2x2", "3x2", "2x3", "4x1", "2x4", "4x2"]
SEED = 8  # of random calls; the first 7 of each operator on 2x2 have every schedule
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def all_of(rank: int, world_size: int, names: list[str], ranks: int) -> dict[str, Any]:
    return {name: SCENARIOS[name](rank, world_size, ranks) for name in names}


@functools.cache
def answers(layout: str) -> list[dict[str, Any]]:
    """What each rank says of each scenario."""
    nodes, ranks = nodes_cases.parse(layout)
    names = [name for name in SCENARIOS if layout in ONLY_ON.get(name, LAYOUTS)]
    return spawn(all_of, nodes * ranks, names, ranks, ranks_per_node=ranks, timeout_s=240)


def all_ranks(layout: str, name: str) -> list[Any]:
    return [of_rank[name] for of_rank in answers(layout)]


def random_calls(rank: int, world_size: int, ranks: int) -> tuple[list[str], Counter[str]]:
    count = max(7, some(12)) if (ranks, world_size) == (2, 4) else some(3)
    return nodes_cases.run(rank, world_size, list(nodes_cases.CHECKS), count, SEED)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_calls_are_exact(layout: str) -> None:
    for wrong, seen in all_ranks(layout, "random calls"):
        assert wrong == []
        assert {name.split()[0] for name in seen} == set(nodes_cases.CHECKS), "something ran unfused"


def test_every_schedule_runs_among_the_random_calls() -> None:
    _, seen = all_ranks("2x2", "random calls")[0]
    sums = {f"{op} {how}" for op in ("gemm_ar", "all_reduce") for how in ("node sums", "shards", "composed")}
    others = {
        f"{op} {how}"
        for op in ("ag_gemm", "all_gather", "reduce_scatter")
        for how in ("blocks", "one launch")
    }
    parts = {"gemm_rs one launch", "gemm_rs blocks", "gemm_rs blocks in 2", "gemm_rs blocks in 4"}
    assert set(seen) == sums | others | parts | {"moe all tokens", "moe shares", "moe spanning nodes"}


def of_one_node(rank: int, world_size: int) -> tuple[bool, str, Counter[str]]:
    wrong, seen = nodes_cases.run(rank, world_size, ["gemm_rs", "gemm_ar"], 3, 1)
    plan = flux.explain("gemm_rs", 64 * world_size, 64, 64, torch.float32)
    for members in ([0, 1], [2, 3], [0, 3], [1, 2]):
        group = dist.new_group(members)
        if rank in members:
            for op in COLLECTIVES:
                if not nodes_cases.CHECKS[op](group, random.Random(op), 0):
                    wrong.append(f"{op} of {members}")
            seen += nodes_cases.schedules(group)
    return not wrong, str(plan), seen


def test_one_node_and_its_subgroups_are_no_groups_of_nodes() -> None:
    for ranks_per_node in (None, 4):
        for exact, told, seen in spawn(of_one_node, 4, ranks_per_node=ranks_per_node):
            assert exact and not seen
            assert "runs       by kernel: ranks of one host share memory" in told and "two-level" not in told


def subgroups(rank: int, world_size: int, ranks_per_node: int) -> list[str]:
    """Calls on subgroups of every kind: what they run as."""
    nodes = world_size // ranks_per_node
    kinds = nodes_cases.subgroups(nodes, ranks_per_node)
    found = []
    for members in (members for lists in kinds.values() for members in lists):
        group = dist.new_group(members)
        if rank not in members:
            continue
        for number, op in enumerate(COLLECTIVES):
            check = nodes_cases.CHECKS[op]
            assert check(group, random.Random(f"{members} {op}"), number), (op, members)
        workspace = registry.find(group, CPU)
        topology = None if workspace is None else workspace.topology
        found.append(f"{members} {topology} {None if workspace is None else workspace.why_not}")
    mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("across", "inside"))
    for name in ("across", "inside"):
        case = GemmRsCase(mesh[name].size() * 18, 24, 16, mesh[name].size(), seed=4)
        x, weight, _ = case.inputs(mesh[name].get_local_rank())
        assert torch.equal(
            flux.gemm_rs(x, weight, group=mesh[name]), case.expected(mesh[name].get_local_rank())
        )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_subgroups_have_nodes_of_their_own(layout: str) -> None:
    nodes, ranks = nodes_cases.parse(layout)
    lines = [line for of_rank in all_ranks(layout, "subgroups") for line in of_rank]
    rail = list(range(0, nodes * ranks, ranks))
    assert f"{rail} {nodes} nodes x 1 None" in lines
    if ranks > 1:
        assert f"{list(range(ranks))} None None" in lines  # one node: as ever
        uneven = next(line for line in lines if line.startswith(str(list(range(ranks + 1)))))
        assert f"different numbers of ranks: {ranks} ('0'), 1 ('1')" in uneven


@pytest.mark.parametrize("layout", [*LAYOUTS, "1x4"])
def test_gradients_of_experts(layout: str) -> None:
    assert not any(all_ranks(layout, "gradients of experts"))


def count_bytes(rank: int, world_size: int, ranks: int) -> list[tuple[str, int, int, int]]:
    """For calls of every operator: bytes that this rank's rail has sent, those of the plan, and the least."""
    counted = []
    group = dist.group.WORLD
    assert group is not None
    sizes = [(1, 8, 8), (3, 40, 24), (16, 24, 16), (48, 64, 40), (96, 136, 24)]
    for rows, n, k in sizes:
        dtypes = {"gemm_rs": torch.bfloat16, "ag_gemm": torch.float32, "gemm_ar": torch.float16}
        for op, dtype in dtypes.items():
            m = rows * world_size + (op == "gemm_ar")
            x = torch.ones(m if op != "ag_gemm" else rows, k, dtype=dtype)
            weight = torch.ones(n, k, dtype=dtype)
            call = functools.partial(getattr(flux, op), x, weight)
            counted.append(_counted(op, (m, n, k), dtype, group, call))
        for op, m in (("all_reduce", rows), ("reduce_scatter", rows * world_size)):
            x = torch.ones(m, n)
            call = functools.partial(getattr(flux, op), x)
            counted.append(_counted(op, (m, n, 0), x.dtype, group, call))
    return counted


def _counted(
    op: str, sizes: tuple[int, int, int], dtype: torch.dtype, group: dist.ProcessGroup, call: Any
) -> tuple[str, int, int, int]:
    workspace = registry.get(group, CPU, op)
    assert isinstance(workspace, NodesWorkspace)
    before = workspace.rail.bytes_sent
    call()
    plan: Plan = workspace_plan(workspace, op, *sizes, dtype, False)
    assert plan.levels is not None
    m, n, k = sizes
    nodes, p = workspace.topology.nodes, group.size()
    columns = k if op == "ag_gemm" else n
    scattered = (nodes - 1) * m * columns * dtype.itemsize // p
    sent = workspace.rail.bytes_sent - before
    return f"{op} {plan.levels.schedule}", sent, plan.levels.bytes_sent, scattered


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_that_cross_are_those_of_the_model(layout: str) -> None:
    for of_rank in all_ranks(layout, "bytes"):
        for name, sent, planned, scattered in of_rank:
            assert sent == planned > 0, name
            if name.split()[0] in ("gemm_rs", "ag_gemm", "reduce_scatter"):
                assert sent == scattered, name  # (n - 1) / n of what a node's rank has


def unfused(rank: int, world_size: int) -> str:
    if nodes := os.environ.get("NODES"):
        os.environ["FLUX_NODE"] = nodes[rank]
    case = AgGemmCase(8 * world_size, 24, 16, world_size)
    x, weight, bias = case.inputs(rank)
    assert torch.equal(flux.ag_gemm(x, weight, bias), case.expected(rank))
    return flux.explain("ag_gemm", case.m, case.n, case.k).reason


@pytest.mark.parametrize(
    ("ranks_per_node", "env", "reason"),
    [
        (3, {}, "different numbers of ranks: 3 ('0'), 1 ('1')"),
        (2, {"FLUX_FUSED": "off"}, "rank 0: FLUX_FUSED=off"),
        (2, {"FLUX_NODES": "flat"}, "2 nodes x 2: FLUX_NODES=flat"),
        (None, {"NODES": "abab"}, "the ranks of node 'b' are not consecutive: rank 1 is one of them"),
    ],
)
def test_why_a_group_runs_unfused(ranks_per_node: int | None, env: dict[str, str], reason: str) -> None:
    for told in spawn(unfused, 4, ranks_per_node=ranks_per_node, env=env):
        assert reason in told


def explained(rank: int, world_size: int) -> list[str]:
    before = str(flux.explain("gemm_rs", 1024, 1024, 256, torch.float32))
    flux.reserve(max_m=1024, max_n=1024, max_k=256, dtype=torch.float32)
    after = str(flux.explain("gemm_rs", 1024, 1024, 256, torch.float32))
    flux.release()
    flux.gemm_rs(torch.ones(world_size, 8), torch.ones(8, 8))
    return [before, after]


def test_explain_and_reserve() -> None:
    before, after = spawn(explained, 4, ranks_per_node=2)[0]
    assert "not known before the group's first call" in before
    assert "runs       two-level: 2 nodes x 2, exchange by gloo, blocks in 4 parts" in after
    assert "inside a node POSIX shared memory; between nodes gloo" in after


def other_links(rank: int, world_size: int, path: str) -> str:
    os.environ["FLUX_LINKS"] = path if rank == 1 else ""
    return said(flux.gemm_rs, torch.ones(world_size, 8), torch.ones(8, 8))


def test_rates_of_links_must_be_the_same(tmp_path: Any) -> None:
    path = tmp_path / "links.json"
    write_links(path, Links(40.0, 300.0, 30.0, "measured"))
    for told in spawn(other_links, 2, str(path), ranks_per_node=1):
        assert (
            "FLUX_LINKS: expected the same on all ranks of the group, got 45 GB/s" in told
            and "(measured)" in told
        )


def fp8_refused(rank: int, world_size: int, ranks: int) -> list[str]:
    """What operators say to fp8 without scales, and that nothing has crossed by then."""
    group = dist.group.WORLD
    assert group is not None
    workspace = registry.find(group, CPU)
    assert isinstance(workspace, NodesWorkspace)
    x, weight = torch.full((world_size, 16), 1.0 + rank).to(E4M3), torch.ones(8, 16).to(E4M3)
    before = workspace.rail.bytes_sent
    messages = [said(op, x, weight) for op in (flux.gemm_rs, flux.ag_gemm, flux.gemm_ar)]
    messages += [said(op, x) for op in (flux.all_reduce, flux.reduce_scatter)]
    assert workspace.rail.bytes_sent == before
    gathered = flux.all_gather(x).float()  # moves bytes of any type
    assert torch.equal(gathered[::world_size, 0], torch.arange(1.0, world_size + 1))
    return messages


def test_fp8_without_scales_is_refused_before_anything_crosses() -> None:
    for products in all_ranks("2x2", "fp8 refused"):
        sums = [products.pop(), products.pop()]
        assert all("scale_x: expected a tensor, as x is torch.float8_e4m3fn" in line for line in products)
        assert all("x: expected dtype bfloat16, float16" in line and "float8_e4m3fn" in line for line in sums)


def batch_invariant(rank: int, world_size: int, ranks: int) -> list[bool]:
    """Rows of large calls, and the same rows in small calls, which other schedules run."""
    torch.manual_seed(rank)
    p, same = world_size, []
    for rows, few in ((64 * p, 4 * p), (8 * p, p)):
        x, w = torch.randn(rows, 48, dtype=torch.bfloat16), torch.randn(40, 48, dtype=torch.bfloat16)
        with flux.batch_invariant():
            whole = flux.gemm_ar(x, w)
            same.append(torch.equal(whole[:few], flux.gemm_ar(x[:few], w)))
            scattered = [flux.all_gather(flux.gemm_rs(x[:m], w)) for m in (rows, few)]
            same += [torch.equal(scattered[0], whole), torch.equal(scattered[0][:few], scattered[1])]
            total = flux.all_reduce(x)
            same.append(torch.equal(total[:few], flux.all_reduce(x[:few])))
            same.append(torch.equal(flux.all_gather(flux.reduce_scatter(x)), total))
            gathered = [flux.ag_gemm(x[: m // p], w)[: few // p] for m in (rows, few)]
            same.append(torch.equal(*gathered))
    return same


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_batch_invariance(layout: str) -> None:
    for same in all_ranks(layout, "batch invariance"):
        assert all(same), same


@pytest.mark.parametrize("layout", ["3x3", "5x2"])
def test_groups_of_more_than_8_ranks(layout: str) -> None:
    nodes, ranks = nodes_cases.parse(layout)
    ops = list(nodes_cases.CHECKS)
    for wrong, seen in spawn(nodes_cases.run, nodes * ranks, ops, 3, 9, ranks_per_node=ranks):
        assert wrong == [] and seen


def fails(rank: int, world_size: int) -> None:
    flux.gemm_rs(torch.ones(world_size, 8), torch.ones(8, 8))
    raise ValueError("after a call")


def test_processes_end_cleanly() -> None:
    with pytest.raises(SpawnError, match="after a call"):
        spawn(fails, 2, ranks_per_node=1)


SCENARIOS: dict[str, Callable[[int, int, int], Any]] = {
    "random calls": random_calls,
    # Meshes of layers need members of as many groups as each other: before subgroups.
    "gradients of experts": nodes_cases.gradients_of_experts,
    "subgroups": subgroups,
    "bytes": count_bytes,
    "fp8 refused": fp8_refused,
    "batch invariance": batch_invariant,
}
ONLY_ON = {
    "gradients of experts": [*LAYOUTS, "1x4"],
    "fp8 refused": ["2x2"],
    "batch invariance": ["2x2", "4x1"],
}
