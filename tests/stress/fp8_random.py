"""Random fp8 calls of all operators, each compared with its exact result: any kind and layout of scales,
types, shapes, options. As a program: 500 of each operator on 1 to 4 processes, or on all GPUs there are.
`make test` runs a part of them.

A case is a number: everything else follows from it, on every rank alike.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from dense_calls import differs, size
from fp8_layouts import LAYOUTS
from int8_model import data, model

import flux
from flux._memory import taken
from flux.ops.norm_and_quant import QUANTS, rms_norm
from flux.testing import ScaledCase, spawn
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import random_case
from flux.testing.scaled_data import exact_product
from flux.testing.scaled_moe_data import ScaledMoe

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved(found: Any, device: str) -> Any:
    """Tensors, also those in tuples and dictionaries, on a device; everything else as it is."""
    if isinstance(found, Tensor):
        return found.to(device)
    if isinstance(found, dict):
        return {name: moved(value, device) for name, value in found.items()}
    return type(found)(moved(value, device) for value in found) if type(found) is tuple else found


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    inner = found.values() if isinstance(found, dict) else found if type(found) is tuple else ()
    return [tensor for part in inner for tensor in tensors(part)]


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an operator on the GPU if there is one. Data are made, and results compared, on the CPU.

    On a GPU three times, with operands at other addresses: C++ repeats the second and third call. Operands of
    earlier calls are wiped, so that one that is read again is seen.
    """
    if DEVICE == "cpu":
        return op(*args, **kwargs)
    wiped: list[Tensor] = []
    for _ in range(3):
        for tensor in wiped:
            tensor.zero_()
        given = moved((args, kwargs), DEVICE)
        result = op(*given[0], **given[1])
        torch.cuda.synchronize()
        wiped += tensors(given)
    return moved(result, "cpu")


class Case:
    """One random call."""

    def __init__(self, number: int, rank: int, p: int) -> None:
        self.number, self.rank, self.p = number, rank, p
        self.dice = random.Random(number)

    def size(self, most: int) -> int:
        return size(self.dice, most)

    def padded(self, size: int, multiple: int) -> int:
        """Mostly what the kernels take."""
        return size if self.dice.random() < 0.3 else -(-size // multiple) * multiple

    def scaled(self, m: int, sums: bool) -> ScaledCase:
        """x of m rows on each rank, and a weight."""
        kind = self.dice.choice(("tensor", "row", "block"))
        return ScaledCase(
            m,
            self.padded(self.size(300), 8),
            self.padded(self.size(700), 128 if kind == "block" else 16),
            self.p,
            kind,
            self.dice.choice((E4M3, E5M2)),
            self.dice.choice(OUT),
            self.dice.random() < 0.5,
            sums,
            self.number,
        )

    def arguments(self, case: ScaledCase) -> dict[str, Any]:
        """The call's arguments: those of the case in the layout of some library."""
        x, weight, scale_x, scale_w, bias = case.inputs(self.rank)
        found = {"x": x, "weight": weight, "bias": bias, "scale_x": scale_x, "scale_w": scale_w}
        name = self.dice.choice(sorted(LAYOUTS))
        found |= LAYOUTS[name](x, weight, scale_x, scale_w) or {}
        found["out_dtype"] = case.out_dtype
        if case.scales != "block" and self.dice.random() < 0.3:
            found["accumulate"] = "fast"
        return found

    def out(self, *shape: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"out": torch.full(shape, 77, dtype=dtype)} if self.dice.random() < 0.3 else {}


def gemm(call: Case) -> str:
    case = call.scaled(call.size(300), False)
    out = call.out(case.m, case.n, dtype=case.out_dtype)
    result = run(flux.gemm, **call.arguments(case), **out)
    return differs("product", result, case.product(call.rank, call.rank).to(case.out_dtype))


def gemm_rs(call: Case) -> str:
    rows = call.size(150)
    case = call.scaled(call.p * rows, True)
    out = call.out(rows, case.n, dtype=case.out_dtype)
    result = run(flux.gemm_rs, **call.arguments(case), **out)
    return differs("sum", result, case.total()[call.rank * rows :][:rows])


def ag_gemm(call: Case) -> str:
    case = call.scaled(call.size(150), False)
    rows = call.p * case.m
    out = call.out(rows, case.n, dtype=case.out_dtype)
    arguments, keeps = call.arguments(case), call.dice.random() < 0.3
    told = run(flux.ag_gemm, **arguments, **out, return_gathered=keeps)
    if not keeps:
        return differs("product", told, case.gathered(call.rank))
    result, gathered, scale = told
    everybody = [case.x(source) for source in range(call.p)]
    expected = torch.cat([q.float() for q, _ in everybody])
    of_rows = torch.cat([s.expand(case.m, 1) if s.dim() == 1 else s for _, s in everybody])
    return (
        differs("product", result, case.gathered(call.rank))
        or differs("rows", gathered.float(), expected)
        or differs("their scales", scale, of_rows)
    )


def gemm_ar(call: Case) -> str:
    """The sum, or with a norm the quantised norm."""
    case = call.scaled(call.size(150), True)
    arguments, expected = call.arguments(case), case.total()
    if not case.bias and call.dice.random() < 0.5:  # else the sum would be too large to be exact
        arguments["residual"] = case.residual()
        expected = (expected.double() + case.residual()).to(case.out_dtype)
    if call.dice.random() < 0.5:
        out = call.out(case.m, case.n, dtype=case.out_dtype)
        return differs("sum", run(flux.gemm_ar, **arguments, **out), expected)
    return quantised_end(call, functools.partial(run, flux.gemm_ar, **arguments), expected)


def all_reduce(call: Case) -> str:
    case = call.scaled(call.size(150), True)
    partial = exact_product(*case.x(call.rank), *case.weight(call.rank)).to(case.out_dtype)
    bias = case.inputs(0)[4]
    total = case.total() if bias is None else (case.total().double() - bias.double()).to(case.out_dtype)
    return quantised_end(call, functools.partial(run, flux.all_reduce, partial), total)


def quantised_end(call: Case, op: Callable[..., Any], total: Tensor) -> str:
    """Bit for bit flux.quantize of the returned norm, which is that of the exact sum."""
    quant = call.dice.choice(QUANTS)
    static, ue8m0 = quant == "tensor" and call.dice.random() < 0.5, call.dice.random() < 0.5
    how: dict[str, Any] = {"scale": torch.tensor([0.02])} if static else {"ue8m0": ue8m0}
    norm_weight = torch.arange(total.shape[-1]).remainder(3).add(1).to(total.dtype)
    q, scale, summed, norm = op(
        norm_weight=norm_weight,
        quant=quant,
        quant_scale=how.get("scale"),
        ue8m0=how.get("ue8m0", False),
        return_norm=True,
    )
    expected, scales = flux.quantize(norm, quant, **how)
    exact_norm = rms_norm(total, norm_weight, 1e-6)
    if DEVICE == "cuda" and torch.allclose(norm, exact_norm, rtol=2**-7, atol=0):
        exact_norm = norm  # kernels add the squares of a row in another order
    return (
        differs("sum", summed, total)
        or differs("norm", norm, exact_norm)
        or differs("scales", scale, scales)
        or differs("quantised", q.view(torch.uint8), expected.view(torch.uint8))
    )


def grouped_gemm(call: Case) -> str:
    experts, kind = call.dice.randint(1, 5), call.dice.choice(("tensor", "row", "block"))
    m, n, seed = call.size(200), call.padded(call.size(150), 8), 10 * call.number
    k = call.padded(call.size(300), 128 if kind == "block" else 16)
    out_dtype = call.dice.choice(OUT)
    data = [ScaledCase(m, n, k, 1, kind, E4M3, out_dtype, seed=seed + e) for e in range(experts)]
    x, scale_x = data[0].x(0)
    weights, scales = zip(*(each.weight(0) for each in data), strict=True)
    weight = torch.stack([each.view(torch.uint8) for each in weights]).view(E4M3)
    scale_w = torch.cat(scales) if kind == "tensor" else torch.stack(scales)
    cuts = [0, *sorted(call.dice.randint(0, m) for _ in range(experts - 1)), m]
    g = torch.Generator().manual_seed(call.number)
    rows = torch.randperm(m, generator=g) if call.dice.random() < 0.5 else None
    offsets = torch.tensor(cuts, dtype=torch.int32)
    how = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}
    result = run(flux.grouped_gemm, x, weight, offsets, rows=rows, **how)
    order = torch.arange(m) if rows is None else rows
    of_all = torch.stack([exact_product(x, scale_x, w, s) for w, s in zip(weights, scales, strict=True)])
    parts = [
        of_all[e][order[first:last]] for e, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    return differs("products", result, torch.cat(parts).to(out_dtype))


def moe(call: Case) -> str:
    kind, x_dtype = call.dice.choice(("tensor", "row", "block")), call.dice.choice((E4M3, E5M2))
    sizes = random_case(call.number, call.p)
    multiple = 128 if kind == "block" else 16
    sizes = replace(
        sizes, hidden=call.padded(sizes.hidden, multiple), columns=call.padded(sizes.columns, multiple)
    )
    case = ScaledMoe(sizes, kind, x_dtype, call.dice.choice(OUT))
    if case.out_dtype != torch.float32 and case.needs > EXACT_LIMIT[case.out_dtype]:
        case = replace(case, out_dtype=torch.float32)
    routing = case.route(call.rank, DEVICE)
    how: dict[str, Any] = {"out_dtype": case.out_dtype}
    (x, scale_x), (w, scale_w) = case.x(call.rank), case.w1(call.rank)
    rows = run(flux.moe.ag_scatter_gemm, x, w, routing, scale_x=scale_x, scale_w=scale_w, **how)
    order = case.order(call.rank, routing)
    told = differs("layer 0", rows[: len(order)], case.layer0(call.rank)[order])
    (x, scale_x), (w, scale_w) = case.hidden_rows(call.rank, len(rows)), case.w2(call.rank)
    x[: len(order)] = taken(x, order)
    if scale_x.dim() == 2:
        scale_x[: len(order)] = scale_x[order]
    result = run(flux.moe.gemm_gather_rs, x, w, routing, scale_x=scale_x, scale_w=scale_w, **how)
    return told or differs("layer 1", result, case.layer1(call.rank))


def int8_wire(call: Case) -> str:
    """Sums whose contributions travel as int8, bit for bit."""
    dtype, columns = call.dice.choice(OUT), call.size(700)
    inner = (call.size(3), columns) if call.dice.random() < 0.3 else (columns,)
    shape = (call.p * call.size(40), *inner)
    # Every rank knows what the others have.
    whole = [data(shape, 10 * call.number + rank, dtype) for rank in range(call.p)]
    mine = [each.chunk(call.p)[call.rank].reshape(-1, columns) for each in whole]
    expected = model(mine, call.rank)[0].to(dtype)
    out = call.out(shape[0] // call.p, *inner, dtype=dtype)
    result = run(flux.reduce_scatter, whole[call.rank], wire="int8", **out)
    return differs("sum", result.reshape(-1, columns), expected)


OPS: dict[str, Callable[[Case], str]] = {
    f.__name__: f for f in (gemm, gemm_rs, ag_gemm, gemm_ar, all_reduce, grouped_gemm, moe, int8_wire)
}


def sweep(rank: int, p: int, ops: list[str], first: int, count: int) -> list[str]:
    """What is wrong with so many cases of each operator."""
    told = {(op, n): OPS[op](Case(n, rank, p)) for op in ops for n in range(first, first + count)}
    return [f"{op} case {n}, {p} ranks, rank {rank}: {wrong}" for (op, n), wrong in told.items() if wrong]


def campaign(ops: Iterable[str], first: int, count: int, timeout_s: float = 1200.0) -> list[str]:
    """So many cases of each operator on 1 to 4 processes, fused and not, and on two nodes of two processes.
    GPUs: on as many as there are.
    """
    shares = [(1, "auto", 0.1), (2, "auto", 0.3), (3, "auto", 0.2), (4, "auto", 0.2), (2, "off", 0.1)]
    shares += [(4, "nodes", 0.1)]
    if DEVICE == "cuda":
        shares = [share for share in shares if share[0] <= torch.cuda.device_count()]
    whole = sum(share for _, _, share in shares)
    wrong: list[str] = []
    for part, (p, fused, share) in enumerate(shares):
        # FLUX_TUNING: the kernels are to run, also where other ways are faster.
        env = {
            "FLUX_FUSED": "off" if fused == "off" else "auto",
            "OMP_NUM_THREADS": "1",
            "FLUX_TUNING": "off",
        }
        number = first + 100_000 * part
        cases = max(1, round(share / whole * count))
        nodes: dict[str, Any] = {"ranks_per_node": 2} if fused == "nodes" else {}
        told = spawn(sweep, p, list(ops), number, cases, env=env, timeout_s=timeout_s, **nodes)
        wrong += [line for lines in told for line in lines]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500, help="of each operator")
    parser.add_argument("--op", choices=sorted(OPS), action="append")
    arguments = parser.parse_args()
    begin, ops = time.monotonic(), arguments.op or list(OPS)
    wrong = campaign(ops, 1_000_000 * arguments.seed, arguments.cases)
    print("".join(f"{line}\n" for line in wrong), end="")
    took = time.monotonic() - begin
    print(f"{arguments.cases} cases of {', '.join(ops)} in {took:.0f} s, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
