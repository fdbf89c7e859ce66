"""The model of plans for several nodes against a discrete simulation of their schedules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from flux.comm.topology import Links
from flux.plan import network_model

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
simulation = importlib.import_module("nodes_simulation")


def test_the_model_is_near_the_simulation() -> None:
    found = list(simulation.rows_of(seeds=2))
    assert len(found) == 4 * 6
    assert simulation.check(found) < 0.08, max(found, key=lambda row: abs(row.apart))


@pytest.mark.parametrize("rows", [1024, 2048, 4096, 16384])
def test_a_plan_that_takes_two_levels_is_not_slower(rows: int) -> None:
    found = list(simulation.rows_of(rows, 2, (2, 4, 8)))
    assert simulation.check(found) < 0.10
    for row in found:
        if row.model <= network_model.MARGIN * row.flat_model:
            assert row.simulated <= row.flat, row


def test_a_rail_by_hand() -> None:
    """Three nodes, 10 us for an exchange, 1 us a kilobyte."""
    links = Links(nic_gb_per_s=1.0, latency_us=10.0)
    rail = simulation.Rail(3, links, 0, 0.0)
    done: list[tuple[float, int]] = []
    for node in range(3):
        for step in (1, 2):
            rail.enqueue(node, (node, step), (node + step) % 3, (node - step) % 3, 5000.0)
            rail.after((node, step), lambda step=step: done.append((rail.now, step)))
    rail.run()
    assert sorted(done) == [(15.0, 1)] * 3 + [(30.0, 2)] * 3  # one after the other, all ranks at once


def test_a_late_rank_delays_what_waits_for_it() -> None:
    rail = simulation.Rail(2, Links(nic_gb_per_s=1.0, latency_us=10.0), 0, 0.0)
    rail.launch(0, 100.0, lambda: rail.enqueue(0, (0, 0), 1, 1, 1000.0))
    rail.launch(1, 400.0, lambda: rail.enqueue(1, (1, 0), 0, 0, 1000.0))
    assert rail.run() == 411.0


def test_launches_of_a_rank_run_in_order() -> None:
    rail = simulation.Rail(1, Links(), 0, 0.0)
    ends: list[float] = []
    for us in (5.0, 7.0):
        rail.launch(0, us, lambda: ends.append(rail.now))
    rail.run()
    assert ends == [5.0, 12.0]


def test_noise_makes_a_call_longer_not_shorter() -> None:
    shape = simulation.dense(4, "Llama-70B down")
    quiet = simulation.two_level_us(shape, "blocks", 1, 0, 0.0)
    noisy = [simulation.two_level_us(shape, "blocks", 1, seed, 0.1) for seed in range(10)]
    assert sum(noisy) / len(noisy) > quiet


def test_one_copy_a_node_pays_with_nodes() -> None:
    rows = [row for row in simulation.moe_rows() if row.name == "DeepSeek-V3"]
    assert [round(row.copies, 1) for row in rows[:3]] == [1.0, 2.7, 4.6]
    assert rows[0].shares == rows[0].all_tokens  # 2 nodes: almost every token goes to the other one
    assert rows[2].shares < 0.8 * rows[2].all_tokens
    assert all(row.shares <= row.flat for row in rows)
