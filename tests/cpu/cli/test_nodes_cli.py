"""`flux verify`, `bench` and `doctor` with several nodes, and ranks of two torchruns on one machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flux.cli import app, nodes
from flux.comm import topology

runner = CliRunner()


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    done = runner.invoke(app, ["verify", "--nodes", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    outcomes = json.loads(path.read_text())["outcomes"]
    assert Counter(outcome["state"] for outcome in outcomes) == {"exact": len(outcomes)}
    assert {outcome["where"] for outcome in outcomes} == {"2 nodes x 2 emulated, CPU"}
    assert {outcome["op"] for outcome in outcomes} >= {"gemm_rs", "all_gather", "moe"}
    assert any(outcome["case"] == "expert parallel across nodes" for outcome in outcomes)


def test_doctor_measures_what_plans_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "links.json"
    done = runner.invoke(app, ["doctor", "--nodes", "2", "--links", str(path)])
    assert done.exit_code == 0, done.output
    for line in ("2 nodes x 2, emulated on this machine", "works, by gloo", "between nodes", "inside a node"):
        assert line in done.output
    monkeypatch.setenv("FLUX_LINKS", str(path))
    links = topology.links()
    assert links.source.startswith("emulated on this machine, 2 nodes x 2, gloo")
    assert 0 < links.nic_gb_per_s < 1e3 and 0 < links.latency_us < 1e6


def test_doctor_says_why_there_are_no_rates(tmp_path: Path) -> None:
    (finding,) = nodes.findings({"why_not": "all ranks are on one node"}, 2, None, "measured")
    assert finding.state == "bad" and "FLUX_NODE" in (finding.advice or "")
    (finding,) = nodes.findings({"busy": "5 µs, 5 without bytes"}, 2, tmp_path / "links", "measured")
    assert finding.state == "bad" and not list(tmp_path.iterdir()), "no rates are written"
    (finding,) = nodes.findings({"nodes": 3, "ranks": 2}, 2, None, "measured")
    assert finding.state == "bad" and finding.value == "3 nodes x 2, not 2 nodes"


SCRIPT = """
import torch
import torch.distributed as dist

import flux

dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()
out = flux.gemm_rs(torch.ones(64 * p, 32), torch.ones(16, 32))
assert (out == 32 * p).all()
flux.check()
if rank == 0:
    print(flux.explain("gemm_rs", 64 * p, 16, 32, torch.float32))
dist.destroy_process_group()
"""


def test_two_torchruns_on_one_machine_are_two_nodes(tmp_path: Path) -> None:
    """The rehearsal of docs/nodes.md."""
    script = tmp_path / "two_nodes.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    running = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), str(script)],
            env={**os.environ, "FLUX_NODE": str(node), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    told = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert "runs       two-level: 2 nodes x 1, exchange by gloo" in told[0][0]
