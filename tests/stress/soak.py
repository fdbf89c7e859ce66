"""Random valid calls of all operators, each compared with its exact result. `make soak` runs 10,000 of them.

A case is a number: its operator, shapes, types and options follow from it, on every rank alike.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dense_calls import COLLECTIVES, Call, differs, size, wrong

import flux
from flux._native import core
from flux.comm.cpu import CpuWorkspace
from flux.testing import spawn
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import random_case

Tensor = torch.Tensor
OPS = ("gemm", *COLLECTIVES, "gradients", "grouped_gemm", "moe")


class Case:
    """One random call."""

    def __init__(self, number: int, rank: int, p: int) -> None:
        self.number, self.rank, self.p = number, rank, p
        self.dice = random.Random(number)
        self.op = self.dice.choice(OPS)
        self.dtype = self.dice.choice(tuple(EXACT_LIMIT))
        self.transpose = self.dice.random() < 0.5

    def size(self, most: int) -> int:
        return size(self.dice, most)

    def run(self) -> str:
        """What is wrong with the result, or nothing."""
        if self.op in ("gradients", "grouped_gemm", "moe"):
            return str(getattr(self, self.op)())
        return "; ".join(wrong(Call(self.dice, self.number).make(self.op)))

    def gradients(self) -> str:
        """Of gemm_rs(ag_gemm(x, w1), w2), against the same in float64 on one rank."""
        p, rows = self.p, self.size(40)
        hidden, inner, columns = self.size(20), self.size(20), self.size(20)

        def integers(salt: int, *shape: int) -> Tensor:
            g = torch.Generator().manual_seed(31 * self.number + salt)
            return torch.randint(-1, 2, shape, generator=g).double()

        xs = [integers(10 + r, rows, hidden) for r in range(p)]
        w1 = [integers(20 + r, inner, hidden) for r in range(p)]
        w2 = [integers(30 + r, columns, inner) for r in range(p)]
        of = [integers(40 + r, rows, columns) for r in range(p)]  # gradients of the results
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        x, a, b = (t[self.rank].clone().to(dtype).requires_grad_() for t in (xs, w1, w2))
        flipped = (a.t(), b.t()) if self.transpose else (a, b)
        middle = flux.ag_gemm(x, flipped[0], transpose_weight=self.transpose)
        result = flux.gemm_rs(middle, flipped[1], transpose_weight=self.transpose)
        result.backward(of[self.rank].to(dtype))
        leaves = [[t.clone().requires_grad_() for t in tensors] for tensors in (xs, w1, w2)]
        everybody = torch.cat(leaves[0])
        whole = sum(everybody @ w.t() @ v.t() for w, v in zip(leaves[1], leaves[2], strict=True))
        assert isinstance(whole, Tensor)
        whole.backward(torch.cat(of))
        expected = [whole.detach().view(p, rows, columns)[self.rank]]
        expected += [tensors[self.rank].grad for tensors in leaves]  # type: ignore[misc]
        got = [result.detach(), x.grad, a.grad, b.grad]
        names = ("result", "gradient of x", "gradient of w1", "gradient of w2")
        told = [
            differs(name, one, two.to(dtype)) for name, one, two in zip(names, got, expected, strict=True)
        ]
        return "; ".join(filter(None, told))

    def grouped_gemm(self) -> str:
        g = torch.Generator().manual_seed(self.number)
        experts, m, n, k = self.dice.randint(1, 6), self.size(200), self.size(60), self.size(60)
        x = torch.randint(-1, 2, (m, k), generator=g).to(self.dtype)
        weight = torch.randint(-1, 2, (experts, n, k), generator=g).to(self.dtype)
        cuts = sorted(self.dice.randint(0, m) for _ in range(experts - 1))
        offsets = torch.tensor([0, *cuts, m], dtype=torch.int32)
        rows = torch.randperm(m, generator=g) if self.number % 2 else None
        result = flux.grouped_gemm(x, weight, offsets, rows=rows)
        taken = (x if rows is None else x[rows]).double()
        sizes = [last - first for first, last in zip([0, *cuts], [*cuts, m], strict=True)]
        parts = zip(taken.split(sizes), weight.double(), strict=True)
        return differs("products", result, torch.cat([part @ w.t() for part, w in parts]).to(self.dtype))

    def moe(self) -> str:
        case = random_case(self.number, self.p)
        if 2 * case.top_k * (self.p // case.ep_size) > EXACT_LIMIT[case.dtype]:
            return ""
        ids, scores = case.routing(self.rank)
        routing = flux.moe.route(
            ids, scores, case.num_experts, ep_size=case.ep_size, max_tokens=case.max_tokens
        )
        rows = flux.moe.ag_scatter_gemm(case.x(self.rank), case.w1(self.rank), routing)
        count = int(routing.offsets[-1])
        told = differs("layer 0", rows[:count], case.layer0(self.rank))
        hidden = case.hidden_rows(self.rank, len(rows))
        result = flux.moe.gemm_gather_rs(hidden, case.w2(self.rank), routing)
        return told or differs("layer 1", result, case.layer1(self.rank))


@contextmanager
def disturbed(rank: int) -> Iterator[None]:
    """Signals come late at random, and every other sum goes by the exchange of large ones."""
    delays, signal, mode = random.Random(rank), CpuWorkspace.signal, core.all_reduce_mode
    modes = (core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT)

    def late_signal(self: CpuWorkspace, *args: Any) -> None:
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.003)
        signal(self, *args)

    flux.release()  # and with it the plans: the workspace grows again
    CpuWorkspace.signal = late_signal  # type: ignore[method-assign]
    core.all_reduce_mode = lambda m, n, *_: modes[m * n // 8 % 2]
    try:
        yield
    finally:
        flux.release()
        CpuWorkspace.signal, core.all_reduce_mode = signal, mode  # type: ignore[method-assign]


def soak(rank: int, p: int, seed: int, count: int, seconds: float) -> tuple[dict[str, int], list[str], float]:
    """Calls by operator, and what was wrong. Stops after `seconds`, on all ranks at the same case."""
    made: Counter[str] = Counter()
    found = []
    begin = time.monotonic()
    for first in range(seed, seed + count, 50):
        late = torch.tensor([time.monotonic() - begin > seconds], dtype=torch.int32)
        dist.all_reduce(late)
        if int(late):
            break
        with disturbed(rank) if first // 50 % 2 else nullcontext():
            for number in range(first, min(first + 50, seed + count)):
                if random.Random(f"{number} {rank}").random() < 0.05:
                    time.sleep(0.01)
                case = Case(number, rank, p)
                told = case.run()
                made[case.op] += 1
                if told:
                    found.append(f"case {number}, {p} ranks, rank {rank}: {case.op}: {told}")
    return dict(made), found, time.monotonic() - begin


def campaign(seed: int, count: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Cases on 1 to 4 ranks, fused and not."""
    made: Counter[str] = Counter()
    wrong: list[str] = []
    # Unfused calls are torch's own: fewer of them.
    shares = [(1, "auto", 0.1), (2, "auto", 0.25), (3, "auto", 0.25), (4, "auto", 0.25), (3, "off", 0.15)]
    for part, (p, fused, share) in enumerate(shares):
        env = {"FLUX_FUSED": fused, "OMP_NUM_THREADS": "1"}
        first = 1_000_000 * seed + 100_000 * part
        results = spawn(
            soak,
            p,
            first,
            round(share * count),
            share * seconds,
            backend="gloo",
            env=env,
            timeout_s=seconds + 300,
        )
        made.update(results[0][0])
        found = [line for _, lines, _ in results for line in lines]
        wrong += found
        calls, took = sum(results[0][0].values()), results[0][2]
        print(f"{p} ranks, FLUX_FUSED={fused}: {calls} cases in {took:.0f} s, {len(found)} wrong", flush=True)
    return made, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1800.0, help="stop after about so long")
    arguments = parser.parse_args()
    if not 0 <= arguments.seed < 1 << 16:  # the data of a case are made from products of it
        parser.error(f"--seed: expected 0 to 65535, got {arguments.seed}")
    print(f"seed {arguments.seed}: repeat with --seed {arguments.seed}", flush=True)
    made, wrong = campaign(arguments.seed, arguments.cases, arguments.seconds)
    print("".join(f"{line}\n" for line in wrong), end="")
    print(", ".join(f"{op} {count}" for op, count in sorted(made.items())))
    print(f"{sum(made.values())} cases, {len(wrong)} wrong, seed {arguments.seed}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
