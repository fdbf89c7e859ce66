"""Plans of groups with several nodes: topologies, when two-level or flat, and what the model expects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flux
from flux.comm import topology
from flux.comm.topology import Links, Topology, of_nodes
from flux.measured.times import Tuning
from flux.plan import network_model
from flux.plan.choose import Plan, PlanInput, planned
from flux.plan.nodes import sent_by_scatter

NODES = [2, 3, 4, 8, 16, 32, 64]


def problem(m: int, n: int, k: int, nodes: int, ranks: int = 8, links: Links | None = None) -> PlanInput:
    return PlanInput(
        "cuda",
        m,
        n,
        k,
        torch.bfloat16,
        False,
        nodes * ranks,
        None,
        132,
        "stores to peers",
        topology=Topology(nodes, ranks),
        engine="NCCL",
        links=links or Links(),
    )


def plan(op: str, m: int, n: int, k: int, nodes: int, ranks: int = 8, links: Links | None = None) -> Plan:
    return planned(op, problem(m, n, k, nodes, ranks, links))


def time_of(found: Plan, name: str) -> float:
    """Microseconds of a candidate; "two-level": the best but flat."""
    if name == "two-level":
        return min(us for way, us in found.candidates if way != "flat")
    return dict(found.candidates)[name]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["a"] * 4, (None, None)),
        (["a"], (None, None)),
        (["a", "a", "b", "b"], (Topology(2, 2), None)),
        (["b", "a"], (Topology(2, 1), None)),
        (["a", "a", "a", "b", "b", "b", "c", "c", "c"], (Topology(3, 3), None)),
    ],
)
def test_topology_of_ids(ids: list[str], found: tuple[Topology | None, str | None]) -> None:
    assert of_nodes(ids) == found


def test_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUX_NODE", raising=False)
    assert "/" in topology.node_id()  # host name, boot and /dev/shm
    monkeypatch.setenv("FLUX_NODE", "rack 1")
    assert topology.node_id() == "rack 1"


# Microseconds that were expected when the design was made: M, N, K of all 16 ranks, GEMM and collective,
# two-level.
DESIGN = [
    ("gemm_rs", 2048, 12288, 49152, 407, 250),
    ("gemm_rs", 8192, 12288, 49152, 1486, 961),
    ("gemm_rs", 8192, 8192, 28672, 761, 417),
    ("gemm_rs", 8192, 8192, 8192, 516, 412),
    ("ag_gemm", 8192, 49152, 12288, 1486, 920),
]


@pytest.mark.parametrize(("op", "m", "n", "k", "flat", "two_level"), DESIGN)
def test_two_nodes_are_as_the_design_expects(
    op: str, m: int, n: int, k: int, flat: float, two_level: float
) -> None:
    found = plan(op, m, n, k // 16, 2) if op == "gemm_rs" else plan(op, m, n // 16, k, 2)
    assert found.way == "two-level" and found.levels is not None and found.levels.schedule == "blocks"
    assert found.levels.us == pytest.approx(two_level, rel=0.1)
    assert found.levels.flat_us == pytest.approx(flat, rel=0.1)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter"])
def test_plans_of_up_to_64_nodes(op: str, nodes: int) -> None:
    p = 8 * nodes
    for m in (p, 8 * p, 64 * p):
        found = plan(op, m, 8192, 1024, nodes)
        best, flat = time_of(found, "two-level"), time_of(found, "flat")
        assert found.by_flux == (best <= network_model.MARGIN * flat)
        assert min(best, flat) > 0
        if found.levels is None:
            assert (
                f"{nodes} nodes x 8: flat {flat:.1f} us, two-level {best:.1f} us in the model" in found.reason
            )
            continue
        assert found.way == "two-level" and found.levels.sms == 4
        assert found.reason.startswith(f"{nodes} nodes x 8, exchange by NCCL, ")
        columns = {"ag_gemm": 1024}.get(op, 8192)
        if op in ("gemm_rs", "ag_gemm", "reduce_scatter"):
            assert found.levels.bytes_sent == sent_by_scatter(m * columns * 2, Topology(nodes, 8))
            assert found.levels.bytes_sent == (nodes - 1) * (m // p) * columns * 2


def test_the_gain_shrinks_with_nodes_and_becomes_a_loss() -> None:
    gains = [
        time_of(p, "flat") / time_of(p, "two-level")
        for p in (plan("gemm_rs", 8192, 8192, 28672 // 8 // n, n) for n in (2, 4, 8, 16))
    ]
    assert gains[0] > 1.5 and gains == sorted(gains, reverse=True)
    assert not plan("gemm_rs", 8192, 8192, 56, 64).by_flux


def test_few_rows_take_one_launch_and_one_exchange() -> None:
    found = dict(plan("gemm_rs", 256, 8192, 256, 4).candidates)
    assert found["one launch"] < found["blocks"] < found["blocks in 4"]
    found = dict(plan("gemm_rs", 8192, 12288, 3072, 2).candidates)
    assert found["blocks"] < found["one launch"]


def test_parts_pay_where_the_exchange_is_longer_than_the_gemm() -> None:
    slow = Links(nic_gb_per_s=12.0, latency_us=2.0, source="a test")
    found = dict(plan("gemm_rs", 65536, 8192, 512, 2, links=slow).candidates)
    assert found["blocks in 2"] < found["blocks"]


def test_sums_choose_by_size() -> None:
    names = []
    for m in (8, 256, 8192):
        found = plan("gemm_ar", m, 8192, 1792, 2)
        assert found.levels is not None
        names.append(found.levels.schedule)
    assert names[0] == "node sums" and names[-1] == "composed"


def test_measured_rates_replace_assumed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Links(nic_gb_per_s=20.0, nvlink_gb_per_s=350.0, latency_us=60.0, source="2 nodes, today")
    path = tmp_path / "links.json"
    topology.write_links(path, measured)
    monkeypatch.setenv("FLUX_LINKS", str(path))
    assert topology.links() == measured
    slower, assumed = (plan("gemm_rs", 8192, 8192, 512, 2, links=links) for links in (measured, Links()))
    assert time_of(slower, "two-level") > time_of(assumed, "two-level")
    assert "20 GB/s and 60 us between nodes, 350 GB/s inside (2 nodes, today)" in str(slower)
    path.write_text(json.dumps({"schema": "another"}))
    topology._read.cache_clear()
    with pytest.raises(
        ValueError, match="FLUX_LINKS, a file of flux doctor --nodes, .*links.json: expected a field 'links'"
    ):
        topology.links()


@pytest.mark.parametrize("told", [None, {}, {**vars(Links()), "latency_us": -1.0}, {**vars(Links()), "x": 1}])
def test_rates_are_checked(told: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        topology.links_of(told, "a file")


def test_explanation_has_every_threshold() -> None:
    told = str(plan("gemm_rs", 8192, 12288, 3072, 2))
    for line in (
        "runs       two-level: 2 nodes x 8, exchange by NCCL, blocks",
        "exchange   12.00 MiB from each rank to other nodes",
        "flat below a gain of 5%",
        "45 GB/s and 20 us between nodes, 340 GB/s inside (assumed)",
        "behind a GEMM with an inner dimension from 1944 on",
        "left free  4 SMs while an exchange is on its way",
        "considered blocks ",
    ):
        assert line in told


def test_the_way_can_be_said() -> None:
    lost = problem(8192, 8192, 56, 64)
    assert not planned("gemm_rs", lost).by_flux
    assert planned("gemm_rs", replace(lost, nodes_way="two-level")).by_flux
    gained = problem(8192, 12288, 3072, 2)
    flat = planned("gemm_rs", replace(gained, nodes_way="flat"))
    assert not flat.by_flux and flat.reason == "2 nodes x 8: FLUX_NODES=flat"
    for schedule in ("blocks", "one launch"):
        found = planned("gemm_rs", replace(gained, tuning=Tuning(forced=schedule)))
        assert found.levels is not None and found.levels.schedule == schedule
    assert not planned("gemm_rs", replace(gained, tuning=Tuning(forced="torch"))).by_flux


@pytest.mark.parametrize(
    "op", ["gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "all_gather", "reduce_scatter"]
)
def test_plans_of_one_node_do_not_look_at_nodes(op: str) -> None:
    for m in (8, 1024, 8192):
        alone = replace(problem(m, 8192, 1024, 1), topology=None)
        found = planned(op, alone)
        assert found.levels is None and found.num_sms == 0  # all of the GPU
        others = [{"links": Links(1.0, 2.0, 3.0, "other")}, {"nodes_way": "two-level"}, {"nodes_way": "flat"}]
        assert all(planned(op, replace(alone, **other)) == found for other in others)


def test_batch_invariant_calls_do_not_change_their_way_with_rows() -> None:
    for m in (1024, 8192):
        assert not planned("gemm_rs", problem(m, 8192, 56, 64)).by_flux
        with flux.batch_invariant():
            assert planned("gemm_rs", problem(m, 8192, 56, 64)).way == "two-level"


@pytest.mark.parametrize(
    ("op", "sizes", "reason"),
    [
        ("gemm_rs", (1024, 1020, 512), "n = 1020 is not a multiple of 8"),
        ("ag_gemm", (1024, 1024, 500), "k = 500 is not a multiple of 8"),
        ("gemm_rs", (0, 1024, 512), "the problem is empty"),
    ],
)
def test_what_no_kernel_takes_is_flat(op: str, sizes: tuple[int, int, int], reason: str) -> None:
    found = plan(op, *sizes, 2)
    assert not found.by_flux and reason in found.reason and found.way == "torch"


def test_launches_that_leave_sms_free_say_how_many_they_use() -> None:
    inside = PlanInput("cuda", 4096, 8192, 512, torch.bfloat16, False, 8, None, 128, "x", left_free=4)
    for op in ("gemm_rs", "ag_gemm"):
        assert planned(op, inside).num_sms == 128
        alone = PlanInput("cuda", 4096, 8192, 512, torch.bfloat16, False, 8, None, 132, "x")
        assert planned(op, alone).num_sms == 0
