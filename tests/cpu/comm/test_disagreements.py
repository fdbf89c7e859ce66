"""Ranks that make different calls are all told so, whatever the difference, and their group works on."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from dense_calls import is_exact
from refusals import said

import flux
from flux.comm import workspace
from flux.comm.cpu import CpuWorkspace
from flux.ops.gemm_rs_with_gather import gemm_rs_with_gather
from flux.testing import spawn

Call = Callable[[], Any]
ROWS, N, K = 8, 6, 4  # ROWS of each rank can be dealt to 2 and 4 ranks


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def product(op: Callable[..., Any], **change: Any) -> Call:
    given = {"x": ones(ROWS, K), "weight": ones(N, K), "bias": None} | change
    return lambda: op(**given)


def of_tensor(op: Callable[..., Any], x: torch.Tensor | None = None) -> Call:
    return lambda: op(ones(ROWS, K) if x is None else x)


gemm_rs, ag_gemm, gemm_ar = (partial(product, op) for op in (flux.gemm_rs, flux.ag_gemm, flux.gemm_ar))
all_gather, all_reduce, reduce_scatter = (
    partial(of_tensor, op) for op in (flux.all_gather, flux.all_reduce, flux.reduce_scatter)
)


def normed(**change: Any) -> Call:
    return gemm_ar(**({"norm_weight": ones(N), "eps": 1e-6} | change))


def composed(**change: Any) -> Call:
    """A sum so large that gemm_ar is made of gemm_rs and all_gather."""
    return gemm_ar(**({"x": ones(512, 1), "weight": ones(6144, 1)} | change))


def scaled(op: Callable[..., Any], by_block: bool = False, **change: Any) -> Call:
    """With fp8 operands, with scales of rows or of blocks."""
    x, weight = ones(ROWS, 256).to(E4M3), ones(N, 256).to(E4M3)
    scales = (ones(ROWS, 2), ones(1, 2)) if by_block else (ones(ROWS, 1), ones(N))
    return lambda: op(x, weight, scale_x=scales[0], scale_w=scales[1], **change)


def batch_invariant(call: Call) -> Any:
    with flux.batch_invariant():
        return call()


def with_gather(**change: Any) -> Call:
    given = {"x": ones(ROWS, K), "weight": ones(N, K), "rows": ones(ROWS, K)} | change
    return lambda: gemm_rs_with_gather(**given)


def reserve(**change: Any) -> Call:
    given = {"max_m": 100_000, "max_n": 64, "max_k": 64, "dtype": torch.float32} | change
    return lambda: flux.reserve(**given)


def route(tokens: int = ROWS, top_k: int = 2, **change: Any) -> Call:
    given = {"num_experts": 4, "ep_size": 1, "max_tokens": ROWS} | change
    ids = torch.arange(tokens * top_k).view(tokens, top_k) % 2
    return lambda: flux.moe.route(ids, ones(tokens, top_k), **given)


def layer0(routing: Any, **change: Any) -> Call:
    given = {"x": ones(ROWS, K), "weight": ones(4, N, K), "activation": None} | change
    return lambda: flux.moe.ag_scatter_gemm(routing=routing, **given)


def layer1(routing: Any, **change: Any) -> Call:
    given = {"x": ones(len(routing.rows), N), "weight": ones(4, K, N)} | change
    return lambda: flux.moe.gemm_gather_rs(routing=routing, **given)


half, E4M3 = torch.float16, torch.float8_e4m3fn


def disagreements() -> list[tuple[str, Call, Call]]:
    """(what differs, the call of all ranks but one, the call of that one)."""
    routing = route()()
    slices = route(ep_size=2)()
    single = route(top_k=1)()
    eight = route(num_experts=8)()
    x, weight, bias, residual = ones(ROWS, K), ones(N, K), ones(N), ones(ROWS, N)
    products: list[tuple[str, Callable[..., Call]]] = [
        ("gemm_rs", gemm_rs),
        ("ag_gemm", ag_gemm),
        ("gemm_ar", gemm_ar),
    ]
    found: list[tuple[str, Call, Call]] = []
    for name, make in products:
        good = make()
        found += [
            (f"{name} m", good, make(x=ones(2 * ROWS, K))),
            (f"{name} m, much", good, make(x=ones(500 * ROWS, K))),
            (f"{name} n", good, make(weight=ones(N + 1, K))),
            (f"{name} n, much", good, make(weight=ones(3000, K))),
            (f"{name} k", good, make(x=ones(ROWS, K + 1), weight=ones(N, K + 1))),
            (f"{name} dtype", good, make(x=x.to(half), weight=weight.to(half))),
            (f"{name} double", good, make(x=x.double(), weight=weight.double())),
            (f"{name} transpose_weight", good, make(weight=weight.t().contiguous(), transpose_weight=True)),
            (f"{name} bias", good, make(bias=bias)),
            (f"{name} no bias", make(bias=bias), good),
            (f"{name} no rows", good, make(x=x[:0])),
            (f"{name} no columns", good, make(weight=weight[:0])),
            (f"{name} no k", good, make(x=x[:, :0], weight=weight[:, :0])),
            (f"{name} all_reduce", good, all_reduce()),
            (f"{name} all_gather", good, all_gather()),
        ]
    for op in (flux.gemm_rs, flux.ag_gemm, flux.gemm_ar):
        good = scaled(op)
        found += [
            (f"{op.__name__} scaling", good, scaled(op, True)),
            (f"{op.__name__} scaling, result", good, scaled(op, out_dtype=half)),
            (f"{op.__name__} scaling, accumulate", good, scaled(op, accumulate="fast")),
        ]
    if os.environ["FLUX_FUSED"] == "auto":  # unfused calls are refused in the mode
        found.append(("gemm_ar batch_invariant", gemm_ar(), partial(batch_invariant, gemm_ar())))
    of_fp8 = {"x": ones(ROWS, 256).to(E4M3), "weight": ones(4, N, 256).to(E4M3)}
    of_rows = of_fp8 | {"scale_x": ones(ROWS, 1), "scale_w": ones(4, N)}
    of_blocks = of_fp8 | {"scale_x": ones(ROWS, 2), "scale_w": ones(4, 1, 2)}
    found += [
        ("gemm_ar residual", gemm_ar(), gemm_ar(residual=residual)),
        ("gemm_ar no residual", gemm_ar(residual=residual), gemm_ar()),
        ("gemm_ar norm_weight", gemm_ar(), normed()),
        ("gemm_ar no norm_weight", normed(), gemm_ar()),
        ("gemm_ar eps", normed(), normed(eps=1e-5)),
        ("gemm_ar eps of torch", normed(), normed(eps=None)),
        ("gemm_ar eps 0", normed(), normed(eps=0.0)),
        ("gemm_ar norm and residual", normed(), normed(residual=residual)),
        ("gemm_ar composed, residual", composed(), composed(residual=ones(512, 6144))),
        ("gemm_ar composed, bias", composed(), composed(bias=ones(6144))),
        ("gemm_ar composed, norm", composed(), composed(norm_weight=ones(6144))),
        ("gemm_ar composed, or not", composed(), composed(x=ones(511, 1))),
        ("ag_gemm weights", ag_gemm(), ag_gemm(weight=[weight, weight])),
        ("ag_gemm weights 2", ag_gemm(weight=[weight] * 2), ag_gemm(weight=[weight] * 3)),
        ("ag_gemm n of one", ag_gemm(weight=[weight] * 2), ag_gemm(weight=[weight, ones(N + 3, K)])),
        (
            "ag_gemm bias of one",
            ag_gemm(weight=[weight] * 2, bias=[bias, bias]),
            ag_gemm(weight=[weight] * 2, bias=[None, bias]),
        ),
        ("ag_gemm gemm_rs", ag_gemm(), gemm_rs()),
        ("gemm_rs gemm_ar", gemm_rs(), gemm_ar()),
        ("all_gather m", all_gather(), all_gather(ones(ROWS + 1, K))),
        ("all_gather k", all_gather(), all_gather(ones(ROWS, K + 1))),
        ("all_gather dtype", all_gather(), all_gather(x.to(half))),
        ("all_gather nothing", all_gather(), all_gather(x[:0])),
        ("all_gather much", all_gather(), all_gather(ones(9000, 40))),
        ("all_reduce numel", all_reduce(), all_reduce(ones(ROWS, K + 1))),
        ("all_reduce dtype", all_reduce(), all_reduce(x.to(half))),
        ("all_reduce nothing", all_reduce(), all_reduce(x[:0])),
        ("all_reduce much", all_reduce(), all_reduce(ones(100_000))),
        ("all_reduce residual", all_reduce(), lambda: flux.all_reduce(x, residual=x)),
        ("all_reduce eps", *(partial(flux.all_reduce, x, norm_weight=x[0], eps=eps) for eps in (0.0, 1e-6))),
        ("all_reduce reduce_scatter", all_reduce(), reduce_scatter()),
        ("reduce_scatter numel", reduce_scatter(), reduce_scatter(ones(2 * ROWS, K))),
        ("reduce_scatter dtype", reduce_scatter(), reduce_scatter(x.to(half))),
        ("reduce_scatter nothing", reduce_scatter(), reduce_scatter(x[:0])),
        ("reduce_scatter wire", reduce_scatter(), partial(flux.reduce_scatter, x, wire="int8")),
        ("reduce_scatter all_gather", reduce_scatter(), all_gather()),
        ("with_gather n", with_gather(), with_gather(weight=ones(N + 1, K))),
        ("with_gather gemm_ar", with_gather(), gemm_ar()),
        ("reserve max_m", reserve(), reserve(max_m=200_000)),
        ("reserve max_n", reserve(max_n=4096), reserve(max_n=9192)),
        ("reserve dtype", reserve(), reserve(dtype=torch.float64)),
        ("route experts", route(), route(num_experts=8)),
        ("route ep_size", route(), route(ep_size=2)),
        ("route max_tokens", route(), route(max_tokens=2 * ROWS)),
        ("route top_k", route(), route(top_k=1)),
        ("route no tokens", route(), route(tokens=0, max_tokens=0)),
        ("route gemm_rs", route(), gemm_rs()),
        ("layer 0 n", layer0(routing), layer0(routing, weight=ones(4, N + 2, K))),
        ("layer 0 k", layer0(routing), layer0(routing, x=ones(ROWS, 5), weight=ones(4, N, 5))),
        ("layer 0 dtype", layer0(routing), layer0(routing, x=x.to(half), weight=ones(4, N, K).to(half))),
        ("layer 0 activation", layer0(routing), layer0(routing, activation="silu")),
        ("layer 0 activations", layer0(routing, activation="gelu"), layer0(routing, activation="silu")),
        ("layer 0 swiglu", layer0(routing), layer0(routing, activation="swiglu")),
        ("layer 0 slices", layer0(routing), layer0(slices, weight=ones(2, N, K))),
        ("layer 0 top_k", layer0(routing), layer0(single)),
        ("layer 0 experts", layer0(routing), layer0(eight, weight=ones(8, N, K))),
        ("layer 0 scaling", layer0(routing, **of_rows), layer0(routing, **of_blocks)),
        ("layer 0 scaling, result", layer0(routing, **of_rows), layer0(routing, **of_rows, out_dtype=half)),
        ("layer 1 n", layer1(routing), layer1(routing, weight=ones(4, K + 1, N))),
        ("layer 1 slices", layer1(routing), layer1(slices, weight=ones(2, K, N))),
        ("layer 1 top_k", layer1(routing), layer1(single)),
        ("layer 1 experts", layer1(routing), layer1(eight, weight=ones(8, K, N))),
        ("layer 1 layer 0", layer1(routing), layer0(routing)),
    ]
    return found


def disagree(rank: int, p: int) -> list[tuple[str, str]]:
    told = []
    for number, (what, common, odd) in enumerate(disagreements()):
        mine = odd if rank == number % p else common
        message = "no error"
        try:
            mine()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        # The group works on as if nothing had happened.
        try:
            message += (
                ""
                if is_exact("gemm_rs", number) and is_exact("ag_gemm", number)
                else "; and then a wrong result"
            )
        except Exception as error:
            message += f"; and then {error}"
        told.append((what, message))
        flux.release()  # what was reserved, so that the next reserve must ask
    return told


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "fused"),
    [(2, None, "auto"), (4, None, "auto"), (2, None, "off"), (4, None, "off"), (4, 2, "auto")],
)
def test_whatever_ranks_disagree_about_all_are_told(
    world_size: int, ranks_per_node: int | None, fused: str
) -> None:
    how: Any = {"env": {"FLUX_TIMEOUT_S": "20", "FLUX_FUSED": fused}, "ranks_per_node": ranks_per_node}
    results = spawn(disagree, world_size, backend="gloo", timeout_s=400, **how)
    assert len(results[0]) >= 100
    complaints = []
    for told in zip(*results, strict=True):
        what, messages = told[0][0], {message for _, message in told}
        if (fused == "off" or ranks_per_node) and what.startswith("reserve"):
            continue  # there is no workspace to make larger, or one of each node, whose ranks alone are told
        named = next((word for word in ("scaling", "batch_invariant", "wire") if word in what), "")
        # Where operators differ, each rank names its own.
        same = {text.split(": ", 2)[-1] for text in messages}
        form = r"Disagreement: [\w.]+: expected the same call on all ranks of the group, got "
        form += "; ".join(rf"rank {rank}: \w+=.+" for rank in range(world_size))
        right = len(same) == 1 and all(f"{named}=" in text for text in messages if named)
        if not right or not all(re.fullmatch(form, text) for text in messages):
            complaints.append(f"{what}: {sorted(messages)}"[:400])
    assert complaints == []


def contents(rank: int, p: int) -> list[str]:
    x, weight = ones(ROWS, K), ones(N, K)
    odd = float(rank == p - 1)
    scores = ones(ROWS, 2) + odd * torch.eye(ROWS, 2)
    ids = torch.arange(2 * ROWS).view(ROWS, 2) % 4
    routing = flux.moe.route(ids, ones(ROWS, 2), 4)
    spoilt = routing._replace(weights=routing.weights + odd)
    calls: list[Call] = [
        lambda: flux.gemm_rs(x, weight, ones(N) + odd),
        lambda: flux.gemm_ar(x, weight, ones(N) + odd),
        lambda: flux.gemm_ar(x, weight, residual=ones(ROWS, N) + odd),
        lambda: flux.gemm_ar(x, weight, norm_weight=ones(N) + odd),
        lambda: flux.moe.ag_scatter_gemm(x, ones(4, N, K), spoilt),
        lambda: flux.moe.gemm_gather_rs(ones(len(routing.rows), N), ones(4, K, N), spoilt),
        # These may differ.
        lambda: flux.ag_gemm(x + odd, weight + odd, ones(N) + odd),
        lambda: flux.gemm_rs(x + odd, weight + odd, ones(N)),
        lambda: flux.moe.route(ids, scores, 4),
    ]
    return [said(call) for call in calls]


@pytest.mark.parametrize(("everywhere", "ranks_per_node"), [(True, None), (False, None), (True, 1)])
def test_contents_are_compared_if_asked_for(everywhere: bool, ranks_per_node: int | None) -> None:
    how: Any = {"env": {"FLUX_DEBUG": "compare"} if everywhere else {}, "ranks_per_node": ranks_per_node}
    results = spawn(contents if everywhere else only_one_asks, 2, backend="gloo", **how)
    assert results[0] == results[1]
    names = ["bias", "bias", "residual", "norm_weight", "routing weights", "routing weights"]
    for message, name in zip(results[0], names, strict=False):
        assert "expected the same call" in message and f"digest of {name}=" in message, message
    assert results[0][len(names) :] == ["no error"] * 3


def only_one_asks(rank: int, p: int) -> list[str]:
    os.environ["FLUX_DEBUG"] = "compare" if rank == 1 else "off"
    return contents(rank, p)


def test_without_being_asked_contents_are_not_compared() -> None:
    assert spawn(contents, 2, backend="gloo") == [["no error"] * 9] * 2


SETTINGS = {
    "FLUX_BATCH_INVARIANT": "perhaps",
    "FLUX_DEBUG": "all",
    "FLUX_FUSED": "never",
    "FLUX_GROUPED_WGRAD": "cublas",
    "FLUX_LINKS": "/none",
    "FLUX_NODES": "round",
    "FLUX_RECORD_SHAPES": "/none/shapes",
    "FLUX_SYMM_BACKEND": "mpi",
    "FLUX_TIMEOUT_S": "soon",
    "FLUX_TUNING": "/none",
}
FIRST: list[Callable[[], Call]] = [gemm_rs, ag_gemm, gemm_ar, all_gather, all_reduce, reduce_scatter]
FIRST += [reserve, route, with_gather, normed]


@contextlib.contextmanager
def other_build() -> Iterator[None]:
    with mock.patch.object(workspace, "BUILD", "0.0 with layout 0"):
        yield


@contextlib.contextmanager
def no_facts() -> Iterator[None]:
    with mock.patch.object(CpuWorkspace, "handshake", side_effect=OSError("no such GPU")):
        yield


def first_calls(rank: int, p: int) -> list[tuple[str, str]]:
    """What all ranks are told where the last one differs at the group's first call."""
    calls: list[Callable[[], object]] = [FIRST[i % len(FIRST)] for i in range(len(SETTINGS))]
    tried = list(zip(SETTINGS, calls, strict=True)) + [("FLUX_BATCH_INVARIANT", call) for call in FIRST]
    ways: list[tuple[str, Any, Callable[[], Call]]] = [
        (name, mock.patch.dict(os.environ, {name: SETTINGS[name]}), call) for name, call in tried
    ]
    ways += [("build", other_build(), gemm_rs), ("facts", no_facts(), gemm_rs)]
    told = []
    for name, differing, call in ways:
        made, start = call(), time.monotonic()
        with differing if rank == p - 1 else contextlib.nullcontext():
            try:
                made()
                told.append((name, "no error"))
            except Exception as error:
                told.append((name, f"{type(error).__name__}: {error}"))
        assert time.monotonic() - start < 15, "until the deadline"
    assert torch.equal(gemm_rs()(), torch.full((ROWS // p, N), float(p * K)))
    return told


def test_a_rank_that_cannot_begin_says_so_to_all() -> None:
    """A malformed variable, another build or an exception of one rank was a timeout of all others."""
    results = spawn(first_calls, 2, backend="gloo", env={"FLUX_TIMEOUT_S": "20"})
    assert results[0] == results[1]
    assert len(results[0]) == len(SETTINGS) + len(FIRST) + 2
    for name, message in results[0]:
        assert message.startswith("Disagreement: "), (name, message)
        if name == "build":
            assert "flux: expected the same on all ranks of the group, got" in message
            assert message.endswith(f"{workspace.BUILD} on rank 0, 0.0 with layout 0 on rank 1")
        elif name == "facts":
            assert message.endswith(": rank 1: OSError: no such GPU")
        else:
            assert re.search(rf": rank 1: {name}\b.*(must be|could not|No such file)", message), message
