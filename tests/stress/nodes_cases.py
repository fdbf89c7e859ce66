"""Random calls on several emulated nodes, each compared with its exact result, as a program of
every operator; exit status 1 if one differs.

python tests/stress/nodes_cases.py --nodes 2x2 --cases 500 --seed 7
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from dense_calls import COLLECTIVES, Call, check_experts, wrong

import flux
from flux.comm import registry
from flux.comm.topology import Topology
from flux.comm.workspace import MAX_WORLD_SIZE
from flux.plan.plan import Planned
from flux.testing import spawn
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import MoeCase, random_case

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of a rank: around the tiles of 128 rows, and around the sizes at which schedules change.
_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 48, 50, 63, 96, 130)
_COLUMNS = (1, 3, 8, 24, 33, 64, 130, 264)
_INNER = (1, 5, 16, 40, 64, 96)

SEEN: Counter[str] = Counter()  # schedules of layers, which have no plans to be counted
Group = dist.ProcessGroup
Check = Callable[[Group, random.Random, int], bool]


def _sizes(dice: random.Random) -> tuple[int, int, int]:
    return dice.choice(_ROWS), dice.choice(_COLUMNS), dice.choice(_INNER)


def _dense(op: str, group: Group, dice: random.Random, seed: int) -> bool:
    return not wrong(Call(dice, seed, group, _sizes, _DTYPES).make(op))


def moe(group: Group, draw: random.Random, seed: int, spans: float = 0.17) -> bool:
    """Routing and both layers. Half of the cases have a bound for what crosses, which is large enough; one in
    six has slices of experts that span nodes.
    """
    workspace = registry.get(group, torch.device("cpu"), "moe.route")
    p, rank = group.size(), group.rank()
    topology = workspace.topology or Topology(1, p)
    nodes = topology.nodes
    case = random_case(draw.randrange(1 << 20), p, _DTYPES)
    whole = [ep for ep in range(nodes, p + 1, nodes) if p % ep == 0]
    spanning = [ep for ep in range(1, p + 1) if p % ep == 0 and ep % nodes]
    few = p <= MAX_WORLD_SIZE  # layers of more ranks need slices inside nodes
    ep_size = draw.choice(spanning if draw.random() < spans and few and spanning else whole)
    experts = ep_size * max(1, case.num_experts // case.ep_size)
    case = replace(case, ep_size=ep_size, num_experts=experts, seed=seed, ranks_per_node=topology.ranks)
    if 2 * case.top_k * (p // ep_size) > EXACT_LIMIT[case.dtype]:
        case = replace(case, top_k=2)
    share = None
    if nodes > 1 and draw.random() < 0.5:
        # Few choices, so that a share is smaller than all tokens.
        case = replace(case, top_k=draw.choice((1, 1, 2)), skew=draw.choice(("even", "skewed")), dropped=0.4)
        share = max(_most(case, source, topology.ranks, nodes) for source in range(p))
        share = min(share + draw.choice((0, 0, 1, 7)), case.max_tokens)
    ids, weights = case.routing(rank)
    routing = flux.moe.route(
        ids, weights, experts, group=group, ep_size=ep_size, max_tokens=case.max_tokens, max_node_tokens=share
    )
    shares = nodes > 1 and routing.incoming.shape[1] != case.max_tokens
    crosses = "spanning nodes" if ep_size % nodes else "shares" if shares else "all tokens"
    SEEN[f"moe {crosses if nodes > 1 else 'one node'}"] += 1
    case = replace(case, own_last=shares)
    count = len(case.rows(rank))
    x, w1, w2 = case.x(rank), case.w1(rank), case.w2(rank)
    rows = flux.moe.ag_scatter_gemm(x, w1, routing)
    hidden = case.hidden_rows(rank, routing.rows.shape[0])
    out = flux.moe.gemm_gather_rs(hidden, w2, routing)
    offsets = torch.bincount(case.rows(rank)[:, 0], minlength=experts).view(ep_size, -1)[case.slice_of(rank)]
    return (
        torch.equal(rows[:count], case.layer0(rank))
        and torch.equal(out, case.layer1(rank))
        and routing.offsets.tolist() == [0, *offsets.cumsum(0).tolist()]
    )


def _most(case: MoeCase, source: int, ranks: int, nodes: int) -> int:
    """The most tokens of a rank that another node needs."""
    ids = case.routing(source)[0]
    found = [((ids >= 0) & (ids * nodes // case.num_experts == node)).any(1).sum() for node in range(nodes)]
    return max(int(count) for node, count in enumerate(found) if node != source // ranks)


def gradients_of_experts(rank: int, world_size: int, ranks: int) -> None:
    """With experts cut in several ways on nodes of `ranks`: even tokens, uneven ones with an empty rank, a
    bound, slices over nodes.
    """
    nodes, p = world_size // ranks, world_size
    for ep_size, tokens in ((p, [5] * p), (nodes, [(7, 3, 0, 5)[i % 4] for i in range(p)])):
        check_experts(rank, p, ep_size, tokens)
    if nodes > 1:
        for tokens in ([14] * p, [14, 9, 0, *[14] * (p - 3)]):
            check_experts(rank, p, nodes, tokens, nodes=nodes)
        check_experts(rank, p, 1, [4] * p)


CHECKS: dict[str, Check] = {**{op: partial(_dense, op) for op in COLLECTIVES}, "moe": moe}


def schedules(group: Group) -> Counter[str]:
    """How often each schedule of each operator has been planned so far."""
    workspace = registry.find(group, torch.device("cpu"))
    plans = set() if workspace is None else {p[0] for p in workspace.plans.values() if isinstance(p, Planned)}
    return Counter(
        f"{plan.op} {plan.levels.schedule}" + (f" in {plan.levels.parts}" if plan.levels.parts > 1 else "")
        for plan in plans
        if plan.levels is not None and plan.op != "moe.route"  # whose messages are all_gather's
    )


def subgroups(nodes: int, ranks: int) -> dict[str, list[list[int]]]:
    """Members of the groups of every kind that such ranks can make."""
    p = nodes * ranks
    of_node = [list(range(i * ranks, (i + 1) * ranks)) for i in range(nodes)]
    return {
        "rails": [list(range(i, p, ranks)) for i in range(ranks)],
        "nodes": of_node,
        "pairs across": [[i, i + ranks] for i in range(p - ranks)],
        "parts of nodes": [[node[i] for node in of_node for i in (0, 1)]] if ranks > 2 else [],
        "uneven": [list(range(ranks + 1))] if ranks > 1 and nodes > 1 else [],
    }


def run(
    rank: int, world_size: int, ops: list[str], cases: int, seed: int, ranks: int = 0
) -> tuple[list[str], Counter[str]]:
    """All cases on one rank: those that were not exact, and the schedules that ran.

    ranks: of a node, for cases that take turns on subgroups; 0 for cases on all ranks.
    """
    assert dist.group.WORLD is not None
    groups = [(dist.group.WORLD, dist.group.WORLD, "")]
    if ranks:
        kinds = subgroups(world_size // ranks, ranks)
        groups = [(dist.new_group(of), of, kind) for kind, lists in kinds.items() for of in lists if of[1:]]
    found = []
    for number in range(cases):
        group, members, kind = groups[number % len(groups)]
        if ranks and rank not in members:
            continue
        for op in ops:
            draw = random.Random(f"{seed} {op} {number}")
            if not (kind == "uneven" and op == "moe") and not CHECKS[op](group, draw, number):
                found.append(f"{op} --seed {seed}, case {number}, rank {rank}, group {members}")
    flux.check()
    seen = sum((schedules(group) for group, members, _ in groups if not ranks or rank in members), SEEN)
    return found, seen


def parse(nodes: str) -> tuple[int, int]:
    """Nodes and ranks of "2x4"."""
    count, ranks = nodes.split("x")
    return int(count), int(ranks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="2x2", help="nodes and ranks of each, such as 2x4")
    parser.add_argument("--cases", type=int, default=500, help="of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", nargs="*", default=list(CHECKS))
    parser.add_argument("--subgroups", action="store_true", help="cases take turns on subgroups of all kinds")
    given = parser.parse_args()
    nodes, ranks = parse(given.nodes)
    env = {"FLUX_TIMEOUT_S": "120"}
    start = time.monotonic()
    call = (given.ops, given.cases, given.seed, ranks if given.subgroups else 0)
    results = spawn(run, nodes * ranks, *call, ranks_per_node=ranks, env=env, timeout_s=1e5)
    wrong = [line for found, _ in results for line in found]
    print("\n".join(wrong[:20]))
    print(", ".join(f"{name}: {count}" for name, count in sorted(results[0][1].items())))
    where = f"{'subgroups of ' if given.subgroups else ''}{nodes} nodes x {ranks}"
    told = f"{given.cases} cases of {len(given.ops)} operators on {where}"
    print(f"{told}: {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
