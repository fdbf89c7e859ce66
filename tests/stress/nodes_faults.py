"""Signals to ranks at random moments of random calls, on one node or on several emulated ones. If a rank or a
node dies or is late, every other rank must raise CommTimeoutError in time, name who is behind, and go on. An
interrupt and a short stop must change nothing.

python tests/stress/nodes_faults.py --cases 20 --seed 7    # of each; exit status 1 if one ends otherwise
python tests/stress/nodes_faults.py --nodes 1x4
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import nodes_cases
import torch
import torch.distributed as dist

import flux
from flux.testing import GemmRsCase, RankFailure, spawn

DEADLY = {"killed rank": signal.SIGKILL, "terminated rank": signal.SIGTERM, "killed node": signal.SIGKILL}
HARMLESS = {"interrupted rank": signal.SIGINT, "paused rank": signal.SIGSTOP}
KINDS = (*DEADLY, *HARMLESS, "late node")
PAUSE_S = 0.5
CHECKS: dict[str, Any] = nodes_cases.CHECKS
DEADLINE_S = 2.0
# A rank may wait for one deadline inside its node, and for the word of its peers. The machine may be slow.
MOST_S = 4 * DEADLINE_S + 8.0


@dataclass(frozen=True)
class Told:
    """What a rank has seen: its error, when it came after the fault, and whether it went on."""

    peer: int
    detail: str
    seconds: float
    went_on: str


def victims_of(kind: str, nodes: int, ranks: int, draw: random.Random) -> list[int]:
    node = draw.randrange(nodes)
    if kind.endswith("rank"):
        return [node * ranks + draw.randrange(ranks)]
    return list(range(node * ranks, (node + 1) * ranks))


def work(rank: int, world_size: int, kind: str, victims: list[int], seed: int, delay_s: float) -> Told | str:
    group = dist.group.WORLD
    assert group is not None
    inside = [dist.new_group(list(members)) for members in _nodes_of(world_size)]
    own = next(each for each in inside if each is not dist.GroupMember.NON_GROUP_MEMBER)
    assert CHECKS["gemm_rs"](group, random.Random(seed), 0)
    dist.barrier()
    start = time.monotonic()
    if rank in victims and kind == "late node":
        # In the middle of whatever the rank does by then.
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(3 * DEADLINE_S))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    elif rank in victims:
        if kind == "paused rank":
            subprocess.Popen(["sh", "-c", f"sleep {delay_s + PAUSE_S}; kill -CONT {os.getpid()}"])
        number = (DEADLY | HARMLESS)[kind]
        threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
    try:
        for number in range(80 if kind in HARMLESS else 100_000):
            op = random.Random(f"{seed} {number}").choice(list(CHECKS))
            # What runs unfused has torch's errors, and its deadlines.
            more = {"spans": 0.0} if op == "moe" else {}
            if not CHECKS[op](group, random.Random(f"{seed} {number} {op}"), number, **more):
                return f"{op}, call {number}: not exact"
            if time.monotonic() - start > MOST_S + delay_s + 5:
                return "no error"
        return ""
    except flux.CommTimeoutError as error:
        seconds = time.monotonic() - start - delay_s
        return Told(error.peer, error.detail, seconds, _goes_on(rank, group, own, kind, error))


def _nodes_of(world_size: int) -> list[range]:
    ranks = int(os.environ["FLUX_TEST_RANKS"])
    return [range(first, first + ranks) for first in range(0, world_size, ranks)]


def _goes_on(rank: int, group: Any, own: Any, kind: str, first: flux.CommTimeoutError) -> str:
    """After the error: the same error again, then, if all ranks live, exact results after a release.
    Otherwise the ranks of a node that lives as a whole call each other.
    """
    try:
        flux.all_reduce(torch.ones(4), group=group)
        return "a call after the failure did not raise"
    except flux.CommTimeoutError as error:
        if str(error) != str(first):
            return f"another error: {error}"
    try:
        flux.check(group=group)
        return "check after the failure did not raise"
    except flux.CommTimeoutError:
        pass
    flux.release(group=group)
    if kind == "late node":
        dist.barrier()
        case = GemmRsCase(20 * group.size(), 16, 8, group.size(), seed=1)
        x, weight, _ = case.inputs(rank)
        return "" if torch.equal(flux.gemm_rs(x, weight), case.expected(rank)) else "wrong after the release"
    if first.peer // own.size() == rank // own.size():
        return ""  # a rank of this node is dead
    dist.barrier(group=own)  # ranks notice at different times
    total = flux.all_reduce(torch.ones(4), group=own)
    return "" if (total == own.size()).all() else "wrong inside the node"


def wrong_with(kind: str, nodes: int, ranks: int, seed: int) -> str:
    """How one case ended otherwise than it must, or nothing."""
    draw = random.Random(f"{kind} {seed}")
    victims, delay_s = victims_of(kind, nodes, ranks, draw), draw.uniform(0.0, 0.6)
    env = {"FLUX_TIMEOUT_S": str(DEADLINE_S), "FLUX_TEST_RANKS": str(ranks)}
    world_size = nodes * ranks
    dead = victims if kind in DEADLY else []
    results = spawn(
        work,
        world_size,
        kind,
        victims,
        seed,
        delay_s,
        ranks_per_node=ranks,
        env=env,
        may_die=dead,
        timeout_s=120,
    )
    if kind in HARMLESS:
        return "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(results) if told != "")
    named = set()
    for rank, told in enumerate(results):
        if rank in dead:
            if not isinstance(told, RankFailure) or told.exit_code != -DEADLY[kind]:
                return f"rank {rank} was not killed: {told}"
            continue
        if not isinstance(told, Told):
            return f"rank {rank}: {told}"
        if told.went_on:
            return f"rank {rank}: {told.went_on}"
        if told.seconds > MOST_S:
            return f"rank {rank} raised after {told.seconds:.1f} s"
        named.add(told.peer)
        if rank not in victims and told.peer not in victims and nodes > 1:
            return f"rank {rank} named rank {told.peer}, not one of {victims}: {told.detail}"
        where = f"node {told.peer // ranks}, rank {told.peer}, in "
        if rank not in victims and where not in told.detail and nodes > 1:
            return f"rank {rank}: expected {where!r} in {told.detail!r}"
    # On one node a rank names whom it waits for itself, who may wait for another.
    return "" if named.intersection(victims) else f"{victims} are behind, ranks named {named}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", default="2x2", help="nodes and ranks of each, such as 3x2")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    given = parser.parse_args()
    nodes, ranks = nodes_cases.parse(given.nodes)
    bad = 0
    for kind in given.kinds:
        good = 0
        for seed in range(given.seed, given.seed + given.cases):
            told = wrong_with(kind, nodes, ranks, seed)
            good += not told
            if told:
                print(f"{kind} --seed {seed}: {told}", flush=True)
        bad += given.cases - good
        print(f"{kind}: {good} of {given.cases} on {given.nodes}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
