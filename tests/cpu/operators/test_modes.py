"""Torch's modes around calls. Activation checkpointing and saved-tensor hooks around all of flux that has
gradients: results and gradients are those without them, and a hook that raises leaves the group usable.
Inference mode of calls that allocate memory for later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from dense_calls import is_exact
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import flux
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import ParallelMLP, RMSNorm, column_linear, row_linear
from flux.testing import GemmRsCase, spawn

F64 = torch.float64
K, N, E = 8, 6, 4
Run = Callable[[Tensor], Any]


class Region(NamedTuple):
    run: Run
    x: Tensor
    leaves: list[Tensor]  # besides x


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(size, inner, dtype=dtype) for _ in range(2))
        self.c = nn.Linear(inner, size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x)) * self.b(x))  # type: ignore[no-any-return]


def regions(rank: int, p: int) -> Iterator[tuple[str, Region]]:
    """All of them, with a rank's own integers as operands."""
    draw = torch.Generator().manual_seed(rank)

    def ints(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=draw).to(F64)

    def region(run: Run, shape: tuple[int, ...], *leaves: Tensor) -> Region:
        return Region(run, ints(*shape), list(leaves))

    def of_module(module: nn.Module, *shape: int) -> Region:
        for parameter in module.parameters():
            local = getattr(parameter, "_local_tensor", parameter).data
            local.copy_(ints(*local.shape))
        return region(module, shape, *module.parameters())

    w, v, b, down = (ints(*shape).requires_grad_() for shape in ((N, K), (N, K), (N,), (K, N)))
    rows = (2 * p, 3, K)
    yield "gemm", region(lambda x: flux.gemm(x, w, b), rows, w, b)
    yield "gemm_rs", region(lambda x: flux.gemm_rs(x, w, b), rows, w, b)
    yield "ag_gemm", region(lambda x: flux.ag_gemm(x, w, b), rows, w, b)
    yield "ag_gemm of two", region(lambda x: tuple(flux.ag_gemm(x, [w, v], [b, None])), rows, w, v, b)
    yield "gathered", region(lambda x: flux.ag_gemm(x, w, return_gathered=True), rows, w)
    yield "all_gather", region(flux.all_gather, rows)
    yield "reduce_scatter", region(lambda x: flux.reduce_scatter(x.square()), rows)
    yield "pair", region(lambda x: flux.gemm_rs(flux.ag_gemm(x, w).relu(), down), rows, w, down)
    offsets = torch.tensor([0, 2, 2, p, 2 * p], dtype=torch.int32)
    experts = ints(E, N, K).requires_grad_()
    yield "grouped_gemm", region(lambda x: flux.grouped_gemm(x, experts, offsets), (2 * p, K), experts)
    for sp in (True, False):
        linear = partial(column_linear, sequence_parallel=sp)
        yield f"column_linear {sp}", region(lambda x, f=linear: tuple(f(x, [w, v], [b, None])), rows, w, v, b)
        linear = partial(row_linear, sequence_parallel=sp)
        yield f"row_linear {sp}", region(lambda x, f=linear: f(x, w, b), rows, w, b)
        mlp = nn.Sequential(RMSNorm(K, dtype=F64), ParallelMLP(K, 2 * N, sequence_parallel=sp, dtype=F64))
        yield f"MLP {sp}", of_module(mlp, *rows)
    scores = ints(5, 2).requires_grad_()
    ids = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]])
    moe = flux.moe.MoEMLP(K, 2 * N, E, dtype=F64)
    yield "MoEMLP", of_module(moe, 5, K)._replace(run=lambda x: moe(x, ids, scores))
    w1, w2 = ints(E, 2 * N, K).requires_grad_(), ints(E, K, N).requires_grad_()

    def layers(x: Tensor) -> Tensor:
        routing = flux.moe.route(ids, scores, E)
        hidden = flux.moe.ag_scatter_gemm(x, w1, routing, activation="swiglu")
        return flux.moe.gemm_gather_rs(hidden, w2, routing)

    yield "MoE", region(layers, (5, K), w1, w2, scores)
    mesh = init_device_mesh("cpu", (p,))
    for shared in (True, False):
        of: Any = {"input_layouts": Shard(1)}
        into: Any = {"": FluxSharedColwiseParallel("a", "b", **of)}
        if not shared:
            into = {name: FluxColwiseParallel(**of) for name in ("a", "b")}
        out = Shard(1) if shared else Replicate()
        plan = into | {"c": FluxRowwiseParallel(output_layouts=out)}
        yield (
            f"styles {shared}",
            of_module(parallelize_module(FeedForward(K, 2 * N, F64), mesh, plan), 3, 2, K),
        )


def step(region: Region, how: Callable[[Run, Tensor], Any], backward: Any = nullcontext) -> list[Tensor]:
    """Results and gradients."""
    x = region.x.clone().requires_grad_()
    for leaf in region.leaves:
        leaf.grad = None
    results = how(region.run, x)
    flat = torch.utils._pytree.tree_leaves(results)
    loss = sum((each * (torch.arange(each.numel()) % 5).view(each.shape)).sum() for each in flat)
    with backward():
        loss.backward()  # type: ignore[union-attr]
    grads = [leaf.grad for leaf in region.leaves if leaf.grad is not None]
    assert len(grads) == len(region.leaves)
    return [each.detach() for each in (*flat, x.grad, *(getattr(g, "_local_tensor", g) for g in grads))]


def under(context: Any, run: Run, x: Tensor) -> Any:
    with context():
        return run(x)


def early_stop_off(run: Run, x: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(run, x, use_reentrant=False)


def selective(kept: str) -> Callable[[Run, Tensor], Any]:
    """Recomputes all but the operators whose names begin so."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = str(op).startswith(kept)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda run, x: checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def twice(run: Run, x: Tensor) -> Any:
    return checkpoint(lambda x: checkpoint(run, x, use_reentrant=False), x, use_reentrant=False)


HOW: dict[str, Callable[[Run, Tensor], Any]] = {
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "early stop": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "early stop off": early_stop_off,
    "nested": twice,
    "flux saved": selective("flux."),
    "relu saved": selective("aten.relu"),
    "save_on_cpu": partial(under, save_on_cpu),
}


class Boom(Exception):
    """Of a hook."""


class Hooks:
    """Saved-tensor hooks of which one raises when it is called the n-th time."""

    def __init__(self, which: str, at: int) -> None:
        self.count = {"pack": 0, "unpack": 0}
        self._which, self._at = which, at

    def _hook(self, which: str, tensor: Tensor) -> Tensor:
        self.count[which] += 1
        if which == self._which and self.count[which] == self._at:
            raise Boom
        return tensor

    def __call__(self, run: Run, x: Tensor) -> Any:
        with saved_tensors_hooks(partial(self._hook, "pack"), partial(self._hook, "unpack")):
            return run(x)


def raising(rank: int, p: int, name: str, region: Region) -> Iterator[str]:
    """What is wrong after hooks have raised."""
    counting = Hooks("", 0)
    step(region, counting)
    for which, count in counting.count.items():
        for at in {1, count} if count else ():
            with pytest.raises(Boom):
                step(region, Hooks(which, at))
            if not is_exact("gemm_rs", at):
                yield f"{name}: call after a {which} hook that raised at {at} of {count}"
    # Of one call and on one rank only: the call is made, and ranks remain in step.
    if name in ("gemm_rs", "ag_gemm", "gathered"):
        with pytest.raises(Boom) if rank == 0 else nullcontext():
            Hooks("pack", int(rank == 0))(region.run, region.x.clone().requires_grad_())
        if not is_exact("gemm_rs", 77):
            yield f"{name}: call after a hook that raised on rank 0"


def work(rank: int, p: int, ways: list[str]) -> list[str]:
    torch.manual_seed(0)
    wrong = []
    for name, region in regions(rank, p):
        expected = step(region, lambda run, x: run(x))
        for how in ways:
            got = step(region, HOW[how])
            if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                wrong.append(f"{name}, {how}")
        if name in ("gemm_rs", "ag_gemm of two") and len(ways) == len(HOW):
            compiling = partial(compiled_autograd._enable, torch.compile(backend="eager"))
            got = step(region, HOW["early stop"], compiling)
            wrong += [] if all(map(torch.equal, got, expected)) else [f"{name}, compiled autograd"]
        wrong += raising(rank, p, name, region)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "ways"),
    [(2, None, list(HOW)), (4, 2, ["early stop", "flux saved"])],
    ids=["one node", "nodes"],
)
def test_results_and_gradients(ranks: int, ranks_per_node: int | None, ways: list[str]) -> None:
    of: Any = {"ranks_per_node": ranks_per_node, "backend": "gloo", "timeout_s": 200}
    assert spawn(work, ranks, ways, **of) == [[]] * ranks


def inference(rank: int, p: int) -> list[str]:
    """Ranks make a group's first call in inference mode, let it grow there, and go on in other modes."""
    wrong = []

    def call(name: str, mode: Any, rows: int) -> None:
        with mode():
            case = GemmRsCase(rows * p, N, K, p, torch.float32, bias=True, seed=rows)
            x, weight, bias = case.inputs(rank)
            if mode is nullcontext:
                weight.requires_grad_()
            gathered = flux.all_gather(x)
            summed = [flux.gemm_rs(x, weight, bias), flux.reduce_scatter(flux.gemm(x, weight)) + bias]
            reduced = flux.all_reduce(torch.full((rows, K), rank + 1.0))
            right = torch.equal(gathered.view(p, *x.shape)[rank], x) and (reduced == p * (p + 1) / 2).all()
            if not right or not all(torch.equal(each, case.expected(rank)) for each in summed):
                wrong.append(f"{name}: {mode.__name__}")

    for name, first in (("first", torch.inference_mode), ("first later", nullcontext)):
        for rows in (2, 400, 3000):  # grows
            for mode in (first, torch.inference_mode, torch.no_grad, nullcontext):
                call(f"{name}, {rows} rows", mode, rows)
        flux.release()
    return wrong


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, None), (4, 2)], ids=["one node", "nodes"])
def test_inference_mode(ranks: int, ranks_per_node: int | None) -> None:
    results = spawn(inference, ranks, ranks_per_node=ranks_per_node, backend="gloo", timeout_s=100)
    assert results == [[]] * ranks
