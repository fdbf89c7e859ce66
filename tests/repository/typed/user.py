"""A user's program, in the ways the documentation shows: every public function and layer of flux.

`mypy --strict` accepts it, and it runs on CPU ranks (tests/repository/test_typing.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import flux
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import (
    ColumnParallelLinear,
    DeferredGrads,
    Fp8,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    clip_grad_norm_,
    column_linear,
    mark_replicated,
    reduce_replicated_grads,
    row_linear,
)
from flux.testing import spawn

ROWS, HIDDEN, FFN, EXPERTS, TOP_K = 8, 8, 16, 4, 2


def dense(group: dist.ProcessGroup | DeviceMesh | str | None, p: int) -> Tensor:
    """GEMMs with their collectives, and the collectives alone."""
    x, weight, bias = torch.ones(ROWS, HIDDEN), torch.ones(FFN, HIDDEN), torch.ones(FFN)
    rows: Tensor = flux.gemm_rs(x, weight, bias, group=group)
    rows = flux.gemm_rs(x, weight.t(), transpose_weight=True, out=torch.empty_like(rows), group=group)

    one: Tensor = flux.ag_gemm(x, weight, bias, group=group)
    one = flux.ag_gemm(x, weight, out=one, group=group)
    pair: tuple[Tensor, Tensor] = flux.ag_gemm(x, weight, group=group, return_gathered=True)
    many: list[Tensor] = flux.ag_gemm(x, [weight, weight], [bias, None], group=group)
    q, k, v = flux.ag_gemm(x, (weight, weight, weight), group=group)
    both: tuple[list[Tensor], Tensor] = flux.ag_gemm(x, [weight], group=group, return_gathered=True)

    product: Tensor = flux.gemm(x, weight, bias, out=torch.empty(ROWS, FFN))
    gathered: Tensor = flux.all_gather(x, group=group)
    scattered: Tensor = flux.reduce_scatter(x, group=group)
    total: Tensor = flux.all_reduce(x, group=group, out=torch.empty_like(x))
    normed: tuple[Tensor, Tensor] = flux.all_reduce(x, residual=x, norm_weight=x[0], eps=None)
    main_grad = torch.zeros(FFN, HIDDEN)
    flux.wgrad_accum(torch.ones(ROWS, FFN), x, main_grad)

    sizes = [one, pair[0], *many, q, k, v, *both[0], product, gathered, scattered, total, *normed, main_grad]
    return torch.stack([t.sum() for t in (rows, *sizes)])


@torch.no_grad()
def decode(norm: nn.RMSNorm) -> Tensor:
    """GEMM, all-reduce, residual and norm in one call; there is no backward pass."""
    x, weight, residual = torch.ones(3, HIDDEN), torch.ones(HIDDEN, HIDDEN), torch.ones(3, HIDDEN)
    with flux.batch_invariant():
        h: Tensor = flux.gemm_ar(x, weight, residual=residual)
    h, residual = flux.gemm_ar(h, weight, residual=residual, norm_weight=norm.weight, eps=norm.eps)
    return h + residual


def quantised(group: dist.ProcessGroup | None, p: int) -> Tensor:
    """fp8 operands with their scales."""
    x, weight = torch.ones(ROWS, 256), torch.ones(FFN, 256)
    (q, scale_x), (w, scale_w) = flux.quantize(x, ue8m0=True), flux.quantize(weight, "block128")
    product: Tensor = flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float16)
    row: tuple[Tensor, Tensor] = flux.quantize(x, "row", dtype=torch.float8_e5m2)
    columns = flux.quantize(weight, "tensor", scale=torch.ones(1))
    rows: Tensor = flux.gemm_rs(
        row[0], columns[0], scale_x=row[1], scale_w=columns[1], accumulate="fast", group=group
    )
    return product.float().sum() + rows.float().sum()


def mixture(group: dist.ProcessGroup | None, p: int) -> Tensor:
    """Both layers of a mixture of experts, the module, and the grouped GEMM alone."""
    x, logits = torch.ones(ROWS, HIDDEN), torch.ones(ROWS, EXPERTS)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    routing: flux.moe.Routing = flux.moe.route(ids, weights, EXPERTS, group=group, ep_size=p, max_tokens=ROWS)
    w1, w2 = torch.ones(EXPERTS // p, 2 * FFN, HIDDEN), torch.ones(EXPERTS // p, HIDDEN, FFN)
    hidden: Tensor = flux.moe.ag_scatter_gemm(x, w1, routing, activation="swiglu")
    out: Tensor = flux.moe.gemm_gather_rs(hidden, w2, routing)
    layer = flux.moe.MoEMLP(
        HIDDEN,
        FFN,
        num_experts=EXPERTS,
        group=group,
        ep_size=p,
        activation="swiglu",
        max_tokens=None,
        init=nn.init.zeros_,
        dtype=torch.float32,
        device="cpu",
    )
    layer.reset_parameters()
    again: Tensor = layer(x, ids, weights)
    offsets = torch.tensor([0, 3, 3, 5, 8], dtype=torch.int32)
    grouped: Tensor = flux.grouped_gemm(x, torch.ones(EXPERTS, FFN, HIDDEN), offsets, activation="gelu")
    grads: Tensor = flux.grouped_wgrad(grouped, x, offsets)
    flux.grouped_wgrad_accum(grouped.detach(), x, offsets, torch.zeros(EXPERTS, FFN, HIDDEN))
    return out.sum() + again.sum() + grouped.sum() + grads.sum()


class Block(nn.Module):
    """Every layer of flux.layers, with every option."""

    def __init__(self, group: DeviceMesh) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, eps=None, group=group, device="cpu", dtype=torch.float32)
        self.mlp = ParallelMLP(
            HIDDEN,
            FFN,
            activation="swiglu",
            bias=True,
            group=group,
            sequence_parallel=True,
            save_gathered=True,
            gradient_accumulation_fusion=False,
            init=lambda weight: nn.init.normal_(weight, std=0.02),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        self.up = ColumnParallelLinear(HIDDEN, FFN, bias=False, group=group, save_gathered=True)
        self.down = RowParallelLinear(FFN, HIDDEN, group=group, init=nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        hidden: Tensor = self.up(x)
        out: Tensor = self.down(hidden.relu())
        return x + out


def train(mesh: DeviceMesh) -> Tensor:
    block: Block = Block(mesh)
    mark_replicated(nn.LayerNorm(HIDDEN), "weight", "bias")
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    loss: Tensor = block(torch.ones(ROWS, HIDDEN)).square().mean()
    torch.autograd.backward(loss)  # torch has no types for loss.backward()
    reduce_replicated_grads(block, group=mesh)
    norm: Tensor = clip_grad_norm_(block.parameters(), 1.0)
    assert norm.dim() == 0
    optimizer.step()

    x, weight = torch.ones(ROWS, HIDDEN), torch.ones(FFN, HIDDEN)
    gate, up = column_linear(x, [weight, weight], [None, torch.ones(FFN)], group=mesh)
    out: Tensor = row_linear(gate * up, weight.t().contiguous(), group=mesh, sequence_parallel=False)
    scaled: Tensor = column_linear(x, weight, group=mesh, fp8=Fp8("block"))
    assert scaled.dim() == 2
    later, leaf = DeferredGrads(), weight.clone().requires_grad_()
    (kept,) = column_linear(x, [leaf], group=mesh, save_gathered="auto", deferred=later)
    torch.autograd.backward(kept.sum())
    for _ in range(len(later)):
        later.compute()
    return loss.detach() + out.sum()


def shard(mesh: DeviceMesh) -> nn.Module:
    """The DTensor styles."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN)
            self.down, self.out = nn.Linear(FFN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.down(self.gate(x) * self.up(x))
            return hidden

    plan = {
        "": FluxSharedColwiseParallel("gate", "up", input_layouts=Shard(0)),
        "down": FluxRowwiseParallel(output_layouts=Shard(0)),
        "out": FluxColwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(Mlp(), mesh, plan)


def plan_ahead(group: str, p: int) -> list[str]:
    """What will happen, room for it, and errors."""
    flux.expect_graphs(group=group)
    flux.reserve(group=group, max_m=64, max_n=64, max_k=64, dtype=torch.float32)
    plan: flux.Plan = flux.explain("gemm_rs", 64, 64, 64, dtype=torch.float32, group=group)
    try:
        flux.check(group=group)
    except flux.CommTimeoutError as error:
        lost: int = error.peer
        return [str(lost)]
    flux.release(group=group)
    return [flux.__version__, str(plan.by_flux), plan.reason, plan.config_name]


def install_adapters() -> None:
    """Adapters of frameworks; only checked, as the frameworks need not be there."""
    from flux.integrations import async_tp

    async_tp.install()
    async_tp.uninstall()


def run(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    dense(None, world_size)
    dense(mesh, world_size)
    decode(nn.RMSNorm(HIDDEN))
    quantised(group, world_size)
    mixture(group, world_size)
    train(mesh)
    flux.layers.ParallelMLP(HIDDEN, FFN)
    out: Tensor = shard(mesh)(torch.ones(ROWS, HIDDEN))
    return [*plan_ahead(group.group_name, world_size), str(list(out.shape))]


if __name__ == "__main__":
    answers: list[list[str]] = spawn(run, 2)
    print(answers[0])
