"""The links between the GPUs of this machine, and their bandwidth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flux.cli.findings import Finding, judged
from flux.machine import run_text

# Payload over raw rate: copy engines moved 383-391 of 478 GB/s over 18 NVLink-4 links.
PAYLOAD_SHARE = 0.80
# A pair with less than this share of the expected bandwidth is reported; noise is smaller.
_ACCEPT = 0.85
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parse_topology(text: str) -> list[list[str]]:
    """The GPU-to-GPU part of ``nvidia-smi topo -m``: "X", "NV18", "PIX", "SYS", ... per pair."""
    rows = []
    for line in _ANSI.sub("", text).splitlines():
        cells = line.split()
        if len(cells) > 1 and re.fullmatch(r"GPU\d+", cells[0]) and not cells[1].startswith("GPU"):
            rows.append(cells[1:])
    return [row[: len(rows)] for row in rows]


def parse_nvlink(text: str) -> dict[int, list[float]]:
    """``nvidia-smi nvlink -s``: GB/s and direction of each active link, per GPU index."""
    links: dict[int, list[float]] = {}
    gpu = None
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head.group(1))
            links[gpu] = []
        elif gpu is not None and (speed := re.search(r"Link \d+: ([\d.]+) GB/s", line)):
            links[gpu].append(float(speed.group(1)))
    return links


def expected_gb_per_s(links: dict[int, list[float]]) -> float | None:
    """The expected bandwidth of the slowest GPU's copy engine, or None without NVLink."""
    totals = [sum(speeds) for speeds in links.values()]
    return PAYLOAD_SHARE * min(totals) if totals and min(totals) > 0 else None


def probe(what: str, timeout_s: float) -> dict[str, Any]:
    """Runs one active probe and returns its answer, or {"error": ...}.

    In a process of its own: a broken link must neither hang the doctor nor poison its CUDA context.
    """
    command = [sys.executable, "-m", "flux.cli.probe", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"exit status {done.returncode}: {last}"}


def links(*, active: bool = True) -> Iterator[Finding]:
    """Topology, peer access, symmetric memory, bandwidth; nothing if there is one GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    section = "links"
    topology = parse_topology(run_text(["nvidia-smi", "topo", "-m"]) or "")
    kinds = sorted({kind for i, row in enumerate(topology) for j, kind in enumerate(row) if i != j})
    if kinds:
        good = all(kind.startswith("NV") for kind in kinds)
        advice = "some GPUs are not joined by NVLink: fused ops move their tiles over PCIe there"
        yield judged(section, "topology", ", ".join(kinds), good, advice, topology)
    speeds = parse_nvlink(run_text(["nvidia-smi", "nvlink", "-s"]) or "")
    expected = expected_gb_per_s(speeds)
    if expected is not None:
        counts = sorted({len(s) for s in speeds.values()})
        raw = f"{expected / PAYLOAD_SHARE:.0f} GB/s raw per direction"
        value = f"{'/'.join(map(str, counts))} links active per GPU, {raw}"
        advice = (
            "the GPUs do not have the same number of active links: look at nvidia-smi nvlink -s and dmesg"
        )
        yield judged(section, "NVLink", value, len(counts) == 1, advice)
    yield _peer_access(count)
    if not active:
        return
    yield from _symmetric_memory(section, count)
    yield from _bandwidth(section, expected)


def _peer_access(count: int) -> Finding:
    matrix = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    missing = [f"{i}→{j}" for i in range(count) for j in range(count) if not matrix[i][j]]
    value = f"missing: {', '.join(missing)}" if missing else f"all {count * (count - 1)} pairs"
    advice = "these GPUs cannot write to each other's memory: check IOMMU, ACS and the container's set-up"
    return judged("links", "peer access", value, not missing, advice, matrix)


def _symmetric_memory(section: str, count: int) -> Iterator[Finding]:
    answer = probe("symm", 120.0)
    if "error" in answer:
        advice = (
            "flux cannot share memory between these GPUs: try FLUX_SYMM_BACKEND=nvshmem, and see the error"
        )
        yield Finding(section, "symmetric memory", answer["error"], "bad", advice)
        return
    yield Finding(section, "symmetric memory", f"works on {count} GPUs ({answer['backend']} backend)", "ok")
    if "gemm_rs" in answer:
        said, advice = answer["gemm_rs"], "run `python -m flux verify` and report its table"
        yield judged(section, "fused call through it", said, said == "exact", advice)


def _bandwidth(section: str, expected: float | None) -> Iterator[Finding]:
    answer = probe("push", 120.0)
    if "error" in answer:
        failed = "a plain copy between two GPUs failed"
        yield Finding(section, "copy-engine push", answer["error"], "bad", failed)
        return
    pairs = {tuple(map(int, key.split("-"))): value for key, value in answer["pairs"].items()}
    should = f", should give {expected:.0f}" if expected else ""
    least = _ACCEPT * (expected or 0.0)
    slow = ", ".join(f"{i}→{j} {v:.0f}" for (i, j), v in pairs.items() if v < least)
    value = f"{min(pairs.values()):.0f}–{max(pairs.values()):.0f} GB/s between pairs{should}"
    advice = f"slow: {slow} GB/s; look for other jobs on these GPUs and for link errors"
    found = [judged(section, "copy-engine push", value, not slow, advice, answer)]
    value = f"{answer['ring']:.0f} GB/s from the slowest GPU{should}"
    advice = "links are slower when all GPUs push at once: the fabric or another job is in the way"
    found.append(judged(section, "push, all GPUs at once", value, answer["ring"] >= least, advice))
    yield from found if expected else (replace(each, state="info") for each in found)
