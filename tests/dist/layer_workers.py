"""What ranks do in test_dist_layers.py: layers, operators with fp8 operands, mixtures of experts. Returns
what was wrong, so an empty list is a pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import soak
import torch
import torch.distributed as dist
from dense_calls import wrong_layers
from dist_workers import DTYPES, differs
from int8_model import data, model
from torch import nn

import flux
from flux.integrations.vllm.experts import summed_experts
from flux.layers import ParallelMLP, RMSNorm, reduce_replicated_grads
from flux.moe import reference
from flux.ops.ways import int8_sum
from flux.testing import AgGemmCase, GemmRsCase, ScaledCase
from flux.testing.moe_data import SKEWS, MoeCase, random_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sparse(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A few ones in each column, so that sums over rows stay exact in 16 bits."""
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(rows, columns)
    x[torch.randint(rows, (4, columns), generator=g), torch.arange(columns)] = 1
    return x.to(DEVICE, dtype)


def gradients(rank: int, p: int) -> list[str]:
    """Of x: marked by every rank, see flux.testing.data. Of weights: sums of four of those rows."""
    told = []
    rows, n, k = 256, 512, 256
    for number, dtype in enumerate(DTYPES):
        for flipped in (False, True):
            name = f"{dtype} transpose_weight={flipped}"
            gathers = AgGemmCase(rows * p, k, n, p, dtype, not flipped, seed=number)
            grad, weight, _ = gathers.inputs(rank, DEVICE)
            x, w = sparse(rows * p, k, dtype, rank).requires_grad_(), weight.requires_grad_()
            flux.gemm_rs(x, w, transpose_weight=flipped).backward(grad)
            of_weight = (gathers.gathered(DEVICE).float().t() @ x.detach().float()).to(dtype)
            told += differs(f"gemm_rs {name} x", x.grad, gathers.expected(rank, DEVICE))
            told += differs(f"gemm_rs {name} weight", w.grad, of_weight.t() if flipped else of_weight)

            scatters = GemmRsCase(rows * p, k, 2 * n, p, dtype, not flipped, seed=number)
            grad, weight, _ = scatters.inputs(rank, DEVICE)
            xs = [sparse(rows, k, dtype, 10 + r) for r in range(p)]
            x = xs[rank].clone().requires_grad_()
            parts = [w.clone().requires_grad_() for w in weight.split(n, 1 if flipped else 0)]
            grads = [g.contiguous() for g in grad.split(n, 1)]
            torch.autograd.backward(flux.ag_gemm(x, parts, transpose_weight=flipped), grads)
            told += differs(f"ag_gemm {name} x", x.grad, scatters.expected(rank, DEVICE))
            for i, (part, g) in enumerate(zip(parts, grads, strict=True)):
                of_weight = (g.float().t() @ torch.cat(xs).float()).to(dtype)
                told += differs(
                    f"ag_gemm {name} weight {i}", part.grad, of_weight.t() if flipped else of_weight
                )
    flux.check()
    return told


def main_grads(rank: int, p: int) -> list[str]:
    """fp32 buffers keep what 16 bits would round away."""
    told = []
    for dtype in DTYPES:
        grad, x = sparse(640, 72, dtype, 1) * 3, sparse(640, 136, dtype, 2)
        product = grad.float().t() @ x.float()
        for main_dtype in (torch.float32, dtype):
            main_grad = torch.full((72, 136), 2048.0 if main_dtype == torch.float32 else 4.0, device=DEVICE)
            main_grad = main_grad.to(main_dtype)
            expected = (main_grad.float() + 2 * product).to(main_dtype)
            for _ in range(2):
                flux.wgrad_accum(grad.view(8, 80, 72), x.view(8, 80, 136), main_grad)
            told += differs(f"wgrad_accum {dtype} into {main_dtype}", main_grad, expected)
    return told


class Block(nn.Module):
    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "device": DEVICE, "dtype": torch.bfloat16}
        self.norm = RMSNorm(512, **options)
        self.mlp = ParallelMLP(512, 2048, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def plain(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.rms_norm(x, (512,), state["norm.weight"], 1e-6)
    gate, up, down = (state[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (nn.functional.silu(y @ gate.t()) * (y @ up.t())) @ down.t()


def layers(rank: int, p: int) -> list[str]:
    """Result and gradients in bf16 are as near to the fp64 ones as those of torch on one rank, in bf16."""
    told = []
    for sequence_parallel in (True, False):
        torch.manual_seed(3)
        block = Block(sequence_parallel)
        torch.manual_seed(4)
        x = torch.randn(128 * p, 2, 512, device=DEVICE, dtype=torch.bfloat16)
        grad = torch.randn_like(x)
        whole = {}
        for name, value in block.state_dict().items():
            whole[name] = value.full_tensor()

        def run(dtype: torch.dtype, whole=whole, x=x, grad=grad) -> dict[str, torch.Tensor]:
            leaves = {name: value.to(dtype).requires_grad_() for name, value in whole.items()}
            rows = x.to(dtype).requires_grad_()
            y = plain(leaves, rows)
            y.backward(grad.to(dtype))
            return {"y": y.detach(), "x": rows.grad, **{name: leaf.grad for name, leaf in leaves.items()}}

        def own(name: str, value: torch.Tensor, sp: bool = sequence_parallel) -> torch.Tensor:
            if name in ("x", "y"):
                return value.chunk(p)[rank] if sp else value
            return value if "norm" in name else value.chunk(p, 1 if "down" in name else 0)[rank]

        rows = own("x", x).clone().requires_grad_()
        y = block(rows)
        y.backward(own("x", grad))
        reduce_replicated_grads(block)
        got = {"y": y.detach(), "x": rows.grad, **{n: q.grad.to_local() for n, q in block.named_parameters()}}
        ideal, usual = run(torch.float64), run(torch.bfloat16)
        for name, value in got.items():
            error = (value - own(name, ideal[name])).norm()
            allowed = (own(name, usual[name]) - own(name, ideal[name])).norm()
            # Partial sums that travel are rounded to bf16, p of them where torch rounds one.
            if not error <= 2 * p**0.5 * allowed:
                told.append(f"{name}, sequence_parallel={sequence_parallel}: off by {error}, torch {allowed}")
    flux.check()
    return told


OF_FP8 = [each.__name__ for each in soak.OF_FP8]
CALLS = 3  # the same call again goes shorter ways through the host code


def fp8_exact(rank: int, world_size: int) -> list[str]:
    """Random calls. No operator may have been tested unfused."""
    _, told = soak.sweep(rank, world_size, OF_FP8, 5_000_000, 25 * len(OF_FP8))
    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        for kind in ("tensor", "row", "block"):
            plan = flux.explain(op, 64 * world_size, 264, 256, dtype=torch.float8_e4m3fn, scales=kind)
            if not plan.by_flux:
                told.append(str(plan))
    flux.check()
    return told


def given(case: ScaledCase, rank: int) -> dict[str, Any]:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    tensors = {"x": x, "weight": weight, "scale_x": scale_x, "scale_w": scale_w}
    found: dict[str, Any] = {name: tensor.cuda() for name, tensor in tensors.items()}
    found["bias"] = None if bias is None else bias.cuda()
    return found | {"out_dtype": case.out_dtype}


def fp8_graphs(rank: int, world_size: int) -> list[str]:
    """Captured calls, replayed with other operands and scales; eager calls without scales between them."""
    told = []
    cases = [ScaledCase(64, 264, 256, world_size, "block", sums=True, seed=seed) for seed in range(3)]
    static = given(cases[0], rank)
    rows = {**static, "bias": None}
    flux.reserve(max_m=64 * world_size, max_n=264, max_k=256)
    norm_weight = torch.ones(264, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scattered = flux.gemm_rs(**static)
        summed = flux.gemm_ar(**static)
        gathered = flux.ag_gemm(**rows)
        q, q_scale, _, norm = flux.gemm_ar(**static, norm_weight=norm_weight, quant="row", return_norm=True)
    plain = torch.full((64, 256), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    for number in range(30):
        case = cases[number % 3]
        for name, new in given(case, rank).items():
            if isinstance(new, torch.Tensor):
                static[name].copy_(new)
        graph.replay()
        total = case.total().cuda()
        told += differs(f"replay {number}", scattered, total.chunk(world_size)[rank])
        told += differs(f"replay {number}", summed, total)
        expected = replace(case, sums=True).gathered(rank).cuda()
        told += differs(f"replay {number} of rows", gathered, expected)
        of_norm, scale = flux.quantize(norm.cpu(), "row")
        told += differs(f"replay {number}, scales", q_scale.cpu(), scale)
        told += differs(f"replay {number}, fp8", q.cpu().view(torch.uint8), of_norm.view(torch.uint8))
        told += differs(f"eager {number}", flux.all_gather(plain)[:64], torch.full_like(plain, 1.0))
    flux.check()
    return told


def int8_between_ranks(rank: int, world_size: int) -> list[str]:
    """Sums with wire="int8" have the bits of rounding on the CPU: eager, replayed, and of products."""
    told: list[str] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, n in ((1, 128), (64, 300), (130, 1032)):  # 300: not in the kernel
            whole = [data((rows * world_size, n), source, dtype) for source in range(world_size)]
            expected = model([each.chunk(world_size)[rank] for each in whole], rank)[0].to(dtype).cuda()
            x = whole[rank].cuda()
            for _ in range(CALLS):
                told += differs(f"{rows} x {n}, {dtype}", flux.reduce_scatter(x, wire="int8"), expected)
            with mock.patch.object(int8_sum, "rows_at_once", lambda n, p: 50):  # several exchanges
                told += differs(f"{rows} x {n}, in parts", flux.reduce_scatter(x, wire="int8"), expected)
    x, weight = data((64 * world_size, 256), rank, torch.bfloat16).cuda(), torch.eye(256).bfloat16().cuda()
    expected = flux.reduce_scatter(x, wire="int8")
    told += differs("gemm_rs", flux.gemm_rs(x, weight, wire="int8"), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = flux.reduce_scatter(x, wire="int8")
    for factor in (2, 4, 8):
        x *= 2
        graph.replay()
        told += differs(f"replay times {factor}", replayed, expected * factor)
    flux.check()
    return told


def random_cases(rank: int, world_size: int, first: int, count: int) -> list[str]:
    dtypes = (torch.bfloat16, torch.float16)
    wrong = []
    for number in range(first, first + count):
        wrong += wrong_layers(random_case(number, world_size, dtypes), rank, device="cuda")
    flux.check()
    return wrong


def skews(rank: int, world_size: int) -> list[str]:
    p, wrong = world_size, []
    for number, skew in enumerate(SKEWS):
        for ep_size in [d for d in (1, 2, 4) if p % d == 0]:
            case = MoeCase((700,) * p, 264, 72, 16, 4, ep_size, skew=skew, seed=number)
            wrong += wrong_layers(case, rank, device="cuda")
    return wrong


def moe_graphs(rank: int, world_size: int) -> list[str]:
    """One capture, replayed with other tokens, experts and weights: routing and both layers are in it."""
    cases = [MoeCase((192,) * world_size, 264, 72, 8, 2, world_size, seed=seed) for seed in range(4)]

    def inputs(case: MoeCase) -> list[torch.Tensor]:
        ids, weights = case.routing(rank)
        made = (ids, weights, case.x(rank), case.w1(rank), case.w2(rank), case.hidden_rows(rank, max_rows))
        return [t.cuda() for t in made]

    def layers() -> list[torch.Tensor]:
        routing = flux.moe.route(ids, weights, 8, ep_size=world_size)
        return [flux.moe.ag_scatter_gemm(x, w1, routing), flux.moe.gemm_gather_rs(hidden, w2, routing)]

    max_rows = world_size * 192 * min(2, 8 // world_size)
    ids, weights, x, w1, w2, hidden = held = inputs(cases[0])
    layers()  # workspaces are made here, collectively
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    wrong: list[str] = []
    for case in cases:
        for there, new in zip(held, inputs(case), strict=True):
            there.copy_(new)
        graph.replay()
        for name, result, expected in (
            ("0", results[0], case.layer0(rank)),
            ("1", results[1], case.layer1(rank)),
        ):
            wrong += differs(f"layer {name} of {case}, replayed", result[: len(expected)].cpu(), expected)
    flux.check()
    return wrong


def without_synchronisation(rank: int, world_size: int) -> list[str]:
    case = MoeCase((256,) * world_size, 264, 72, 8, 2, world_size)
    ids, weights = (t.cuda() for t in case.routing(rank))
    x, w1, w2 = case.x(rank).cuda(), case.w1(rank).cuda(), case.w2(rank).cuda()

    def layer() -> torch.Tensor:
        routing = flux.moe.route(ids, weights, 8, ep_size=world_size)
        return flux.moe.gemm_gather_rs(flux.moe.ag_scatter_gemm(x, w1, routing), w2, routing)

    expected = layer()  # workspaces are made here, collectively
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [] if torch.equal(result, expected) else ["two calls differ"]


def vllms_experts(rank: int, world_size: int) -> list[str]:
    """Experts where all ranks have all tokens, called and captured. Exact in 16 bits: gates are 0 or so large
    that silu changes nothing, and few small integers are added up.
    """
    p, experts, hidden, columns, top_k = world_size, 16, 256, 64, 2
    g = torch.Generator().manual_seed(p)

    def sparse(low: int, high: int, entries: int, *shape: int) -> torch.Tensor:
        """Rows with integers in some places, else zeros."""
        places = torch.randint(shape[-1], (*shape[:-1], entries), generator=g)
        values = torch.randint(low, high + 1, places.shape, generator=g)
        return torch.zeros(shape).scatter_(-1, places, values.float())

    def inputs(tokens: int) -> list[torch.Tensor]:
        x = torch.randint(2, (tokens, hidden), generator=g).float()
        ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices.int()
        return [x, ids, torch.randint(1, 5, (tokens, top_k), generator=g) / 4]

    gates, ups = (sparse(*values, 1, experts, p, columns, hidden) for values in ((0, 1), (-2, 2)))
    w13 = torch.stack([32 * gates, ups], 2)
    w2 = sparse(-1, 1, 4, experts, hidden, p, columns)
    whole = w13.transpose(1, 2).reshape(experts, -1, hidden), w2.reshape(experts, hidden, -1)
    mine = [
        weight.cuda().bfloat16().contiguous()
        for weight in (w13[:, rank].reshape(experts, -1, hidden), w2[:, :, rank])
    ]
    group, wrong = dist.group.WORLD.group_name, []

    def on_gpu(x: torch.Tensor, *routing: torch.Tensor) -> list[torch.Tensor]:
        return [x.cuda().bfloat16(), *(t.cuda() for t in routing)]

    def check(name: str, result: torch.Tensor, made: list[torch.Tensor]) -> None:
        if not torch.equal(result.float().cpu(), reference.moe_mlp(*made, *whole)):
            wrong.append(name)

    for tokens in (1, p - 1, p + 1, 64, 700):
        made = inputs(tokens)
        check(f"{tokens} tokens", summed_experts(*on_gpu(*made), *mine, group, rank, p), made)
    held = on_gpu(*inputs(63))  # not a multiple of the ranks
    summed_experts(*held, *mine, group, rank, p)  # workspaces are made here, collectively
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = summed_experts(*held, *mine, group, rank, p)
    for number in range(3):
        made = inputs(63)
        for there, new in zip(held, on_gpu(*made), strict=True):
            there.copy_(new)
        graph.replay()
        check(f"replay {number}", replayed, made)
    flux.check()
    return wrong
