"""What ranks do in test_dist_layers.py. Returns what was wrong, so an empty list is a pass."""

from __future__ import annotations

import torch
from dist_workers import DTYPES, differs
from torch import nn

import flux
from flux.layers import ParallelMLP, RMSNorm, reduce_replicated_grads
from flux.testing import AgGemmCase, GemmRsCase

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
