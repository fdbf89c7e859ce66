"""``flux doctor --nodes``: which ranks share nodes, and the rates of the links between nodes, by which plans
choose.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux import machine
from flux.bench.timing import all_max
from flux.cli import options
from flux.cli.findings import Finding
from flux.comm import registry
from flux.comm.nodes.rail import shifts
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.topology import Links, write_links
from flux.ops.ways import all_gather
from flux.testing import spawn

_SECTION = "nodes"
_ADVICE = "see docs/nodes.md: FLUX_NODE on all ranks, the same number of consecutive ranks on each node"


def examine(nodes: int, path: Path | None, timeout_s: float = 300.0) -> Iterator[Finding]:
    """Measures among the ranks that torchrun started, or among emulated ones. path: of the rates, written by
    rank 0.

    Raises:
        ValueError: torchrun's ranks are not on so many nodes.
    """
    place = options.torchrun()
    if place is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        world = gpus - gpus % nodes if gpus >= nodes else 2 * nodes
        backend = "cpu:gloo,cuda:nccl" if gpus >= nodes else "gloo"
        env = {**machine.NO_MULTICAST, "FLUX_NODES": "two-level"}
        each = world // nodes
        answers = spawn(measure, world, timeout_s=timeout_s, backend=backend, env=env, ranks_per_node=each)
        yield from findings(answers[0], nodes, path, "emulated on this machine")
        return
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", place[0])))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        answer = measure(*place)
    finally:
        dist.destroy_process_group()
    yield from findings(answer, nodes, path if place[0] == 0 else None, "measured")


def findings(answer: dict[str, Any], nodes: int, path: Path | None, how: str) -> Iterator[Finding]:
    if "why_not" in answer:
        yield Finding(_SECTION, "topology", answer["why_not"], "bad", _ADVICE)
        return
    if "busy" in answer:
        yield Finding(_SECTION, "rates", answer["busy"], "bad", "what else runs here? End it, measure again")
        return
    if answer["nodes"] != nodes:
        value = f"{answer['nodes']} nodes x {answer['ranks']}, not {nodes} nodes"
        yield Finding(_SECTION, "topology", value, "bad", _ADVICE)
        return
    yield Finding(_SECTION, "topology", f"{nodes} nodes x {answer['ranks']}, {how}", "ok")
    yield Finding(_SECTION, "exchange", f"works, by {answer['engine']}", "ok")
    source = f"{how}, {nodes} nodes x {answer['ranks']}, {answer['engine']}, {machine.now()[:10]}"
    rates = {name: answer[name] for name in ("nic_gb_per_s", "nvlink_gb_per_s", "latency_us")}
    found = Links(**rates, source=source)
    told = f"{found.nic_gb_per_s:.3g} GB/s from each rank while all send"
    yield Finding(_SECTION, "between nodes", told, "info", None, answer)
    yield Finding(_SECTION, "exchange without bytes", f"{found.latency_us:.0f} µs", "info")
    if answer["ranks"] > 1:
        yield Finding(_SECTION, "inside a node", f"{found.nvlink_gb_per_s:.3g} GB/s from each rank", "info")
    if path is not None:
        write_links(path, found)
        yield Finding(_SECTION, "rates", f"written: set FLUX_LINKS={path} on all ranks", "ok")


def measure(rank: int, world_size: int) -> dict[str, Any]:
    """Rates among the ranks of the default group, the same on all: those of the slowest. A collective."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and dist.get_backend(device="cuda") == "nccl":  # type: ignore[call-arg]
        device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    workspace = registry.get(group, device, "doctor")
    if not isinstance(workspace, NodesWorkspace):
        return {"why_not": workspace.why_not or "all ranks are on one node"}
    if workspace.rail is None:
        return {"why_not": workspace.why_not}
    big = (64 << 20) if device.type == "cuda" else (4 << 20)
    to, source = shifts(workspace.topology.nodes, workspace.node)[0]

    def exchange(nbytes: int) -> Callable[[], None]:
        send = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        receive = torch.empty_like(send)

        def swap() -> None:
            workspace.wait(workspace.rail.swap(send, to, receive, source), "doctor")

        return swap

    rows = torch.zeros(big // 4096, 1024, device=device)

    def inside() -> None:
        all_gather.call(rows, workspace.node_group)

    with workspace.naming("doctor"):
        empty_us = _slowest_us(exchange(16), 50, group, device)
        full_us = _slowest_us(exchange(big), 8, group, device)
        if full_us < 2 * empty_us:
            return {"busy": f"an exchange took {full_us:.0f} µs, and {empty_us:.0f} without bytes"}
        ranks = workspace.topology.ranks
        inside_us = _slowest_us(inside, 8, group, device) if ranks > 1 else 0.0
    return {
        "nodes": workspace.topology.nodes,
        "ranks": ranks,
        "engine": workspace.engine,
        "latency_us": empty_us,
        "nic_gb_per_s": big / (full_us - empty_us) / 1e3,
        "nvlink_gb_per_s": (ranks - 1) * rows.nbytes / inside_us / 1e3
        if inside_us
        else Links().nvlink_gb_per_s,
    }


def _slowest_us(call: Callable[[], None], count: int, group: Any, device: torch.device) -> float:
    """Microseconds of a call on the slowest rank, which all make at the same time."""
    for _ in range(3):
        call()
    dist.barrier(group)
    _finish(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _finish(device)
    return all_max([(time.perf_counter() - start) / count * 1e6], group, device)[0]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
