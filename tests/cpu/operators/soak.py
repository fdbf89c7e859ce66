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
from typing import Any

import torch
import torch.distributed as dist

import flux
from flux.testing import AgGemmCase, GemmRsCase, spawn
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import random_case

Tensor = torch.Tensor
OPS = (
    "gemm",
    "gemm_rs",
    "ag_gemm",
    "ag_gemm of several",
    "gemm_ar",
    "gemm_ar with norm",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "gradients",
    "grouped_gemm",
    "moe",
)


def differs(what: str, result: Tensor, expected: Tensor) -> str:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{what}: {list(result.shape)} {result.dtype}, not {list(expected.shape)} {expected.dtype}"
    wrong = int((result != expected).sum())
    return f"{what}: {wrong} of {result.numel()} elements are wrong" if wrong else ""


class Case:
    """One random call."""

    def __init__(self, number: int, rank: int, p: int) -> None:
        self.number, self.rank, self.p = number, rank, p
        self.dice = random.Random(number)
        self.op = self.dice.choice(OPS)
        self.dtype = self.dice.choice(tuple(EXACT_LIMIT))
        self.transpose = self.dice.random() < 0.5
        self.bias = self.dice.random() < 0.5
        self.gives_out = self.dice.random() < 0.3
        self.leading = self.dice.random() < 0.3  # x has three dimensions

    def size(self, most: int) -> int:
        """Mostly small, sometimes 1, sometimes next to a tile's edge."""
        edge = self.dice.choice((1, 127, 128, 129, 256, 257))
        return min(most, self.dice.choice((self.dice.randint(1, 40), self.dice.randint(1, most), edge)))

    def run(self) -> str:
        """What is wrong with the result, or nothing."""
        return {
            "gemm": self.gemm,
            "gemm_rs": self.gemm_rs,
            "ag_gemm": lambda: self.ag_gemm(1),
            "ag_gemm of several": lambda: self.ag_gemm(self.dice.randint(2, 4)),
            "gemm_ar": lambda: self.gemm_ar(False),
            "gemm_ar with norm": lambda: self.gemm_ar(True),
            "all_gather": self.all_gather,
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
            "gradients": self.gradients,
            "grouped_gemm": self.grouped_gemm,
            "moe": self.moe,
        }[self.op]()

    def scatter_case(self, p: int) -> GemmRsCase:
        m, n, k = p * self.size(300), self.size(300), self.size(64) + 1
        return GemmRsCase(m, n, k, p, self.dtype, self.transpose, self.bias, self.number)

    def deep(self, x: Tensor, rows: int) -> tuple[Tensor, tuple[int, ...]]:
        """x, or the same with a dimension more; and the leading dimensions of a result with so many rows."""
        if not self.leading:
            return x, (rows,)
        return x.view(x.shape[0], 1, x.shape[1]), (rows, 1)

    def out(self, *shape: int) -> dict[str, Tensor]:
        return {"out": torch.full(shape, 77, dtype=self.dtype)} if self.gives_out else {}

    def gemm(self) -> str:
        case = self.scatter_case(1)
        x, weight, bias = case.inputs(0)
        x, rows = self.deep(x, case.m)
        options = self.out(*rows, case.n)
        result = flux.gemm(x, weight, bias, transpose_weight=self.transpose, **options)
        return differs("product", result.view(case.m, case.n), case.expected(0))

    def gemm_rs(self) -> str:
        case = self.scatter_case(self.p)
        x, weight, bias = case.inputs(self.rank)
        x, rows = self.deep(x, case.m // self.p)
        options = self.out(*rows, case.n)
        result = flux.gemm_rs(x, weight, bias, transpose_weight=self.transpose, **options)
        return differs("sum", result.view(-1, case.n), case.expected(self.rank))

    def ag_gemm(self, count: int) -> str:
        m, k = self.p * self.size(200), self.size(64) + 1
        cases = [
            AgGemmCase(m, self.size(200), k, self.p, self.dtype, self.transpose, self.bias, self.number)
            for _ in range(count)
        ]
        inputs = [case.inputs(self.rank) for case in cases]
        x, rows = self.deep(inputs[0][0], m)
        weights, biases = [weight for _, weight, _ in inputs], [bias for _, _, bias in inputs]
        gathered = self.dice.random() < 0.3
        options: dict[str, Any] = {"transpose_weight": self.transpose, "return_gathered": gathered}
        if self.gives_out:
            options["out"] = [torch.full((*rows, case.n), 77, dtype=self.dtype) for case in cases]
        if count == 1:
            weights, biases = weights[0], biases[0]  # type: ignore[assignment]
            options["out"] = options["out"][0] if self.gives_out else None
        elif not self.bias:
            biases = None  # type: ignore[assignment]
        result = flux.ag_gemm(x, weights, biases, **options)
        answer, everybody = result if gathered else (result, None)
        answers = [answer] if count == 1 else answer
        told = [
            differs(f"product {i}", one.view(m, case.n), case.expected(self.rank))
            for i, (one, case) in enumerate(zip(answers, cases, strict=True))
        ]
        if everybody is not None:
            told.append(differs("gathered x", everybody.view(m, k), cases[0].gathered()))
        return "; ".join(filter(None, told))

    def gemm_ar(self, norm: bool) -> str:
        case = self.scatter_case(self.p)
        x, weight, bias = case.inputs(self.rank)
        x, rows = self.deep(x, case.m)
        total = case.expected_sum()
        options: dict[str, Any] = {}
        if self.dice.random() < 0.5:
            # Half of what may be added: the sum must stay exact.
            residual = case.residual() if self.dtype != torch.bfloat16 else torch.zeros_like(total)
            options["residual"] = residual.view(*rows, case.n)
            total = total + residual
        if norm:
            options |= {"norm_weight": torch.full((case.n,), 2, dtype=self.dtype), "eps": 1e-5}
        else:
            options |= self.out(*rows, case.n)
        result = flux.gemm_ar(x, weight, bias, transpose_weight=self.transpose, **options)
        if not norm:
            return differs("sum", result.view(total.shape), total)
        normalised, summed = result
        # Elsewhere it is tested against torch's; here all ranks must have the same bits.
        mine = normalised.contiguous().view(torch.uint8).flatten()
        others = [torch.empty_like(mine) for _ in range(self.p)]
        dist.all_gather(others, mine)
        same = "" if all(torch.equal(mine, other) for other in others) else "norms differ between ranks"
        return differs("sum", summed.view(total.shape), total) or same

    def all_gather(self) -> str:
        case = AgGemmCase(
            self.p * self.size(300), 1, self.size(300) + 1, self.p, self.dtype, seed=self.number
        )
        x = case._x(self.rank, "cpu")
        result = flux.all_gather(x, **self.out(case.m, case.k))
        return differs("rows", result, case.gathered())

    def _summed(self) -> tuple[GemmRsCase, Tensor]:
        case = self.scatter_case(self.p)
        x, weight, _ = case.inputs(self.rank)
        return case, flux.gemm(x, weight, transpose_weight=self.transpose)

    def all_reduce(self) -> str:
        self.bias = False
        case, part = self._summed()
        residual = 2 * torch.ones_like(part) if self.number % 3 else None
        expected = case.expected_sum() if residual is None else case.expected_sum() + 2
        if self.number % 5 == 0 and part.dim() == 2:
            _, total = flux.all_reduce(part, residual=residual, norm_weight=torch.ones_like(part[0]))
            return differs("sum of a norm", total, expected)
        options = {"out": part} if self.gives_out else {}  # in place
        return differs("sum", flux.all_reduce(part, residual=residual, **options), expected)

    def reduce_scatter(self) -> str:
        self.bias = False
        case, part = self._summed()
        result = flux.reduce_scatter(part, **self.out(case.m // self.p, case.n))
        return differs("sum", result, case.expected(self.rank))

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
        rows = torch.randperm(m, generator=g) if self.bias else None
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


def soak(rank: int, p: int, seed: int, count: int, seconds: float) -> tuple[dict[str, int], list[str], float]:
    """Calls by operator, and what was wrong. Stops after `seconds`, on all ranks at the same case."""
    made: Counter[str] = Counter()
    wrong = []
    begin = time.monotonic()
    for number in range(seed, seed + count):
        if number % 50 == 0:
            late = torch.tensor([time.monotonic() - begin > seconds], dtype=torch.int32)
            dist.all_reduce(late)
            if int(late):
                break
        case = Case(number, rank, p)
        told = case.run()
        made[case.op] += 1
        if told:
            wrong.append(f"case {number}, {p} ranks, rank {rank}: {case.op}: {told}")
    return dict(made), wrong, time.monotonic() - begin


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
