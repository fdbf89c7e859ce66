"""Times a decoder layer with few tokens between GPUs, where other kernels stand between those of flux.

    python benchmarks/decode_layer.py [--model llama-3-70b] [--m 1 16 64 128 256] [--arms NAME ...]
        [--json FILE]

The layer is one of --model. In place of attention, a kernel reads as many bytes of keys and values. A
CUDA graph has several layers with weights of their own, so no weight is in the L2. Arms:

- "FlashInfer", "vLLM": cuBLAS, and all-reduce, residual and RMSNorm of that package, where it is installed;
- "flux": gemm_ar with residual and norm, the other two products by cuBLAS;
- "gemm": these two by flux.gemm, too;
- "reduced": cuBLAS, and flux.all_reduce with residual and norm;
- "reduced, gate": and the product with gate and up projection, which multiplies them, too, by a kernel of
  flux that begins to load its weight before the one in front has ended;
- "reduced, behind": and all other products that are not summed by such kernels;
- "apart": and those that are summed;
- "parts": as "flux", but by flux.gemm and flux.all_reduce;
- "FlashInfer, behind", "FlashInfer, small", "FlashInfer, all": the package sums, and flux multiplies: behind
  norms; by weights of at most 128 MiB; everywhere. The same with "vLLM".

With --mode, flux sums in one trip or in two, whatever its plan would choose.

The file has microseconds a layer, for each number of tokens and arm: the median of rounds with a drawn order.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux import machine, peers
from flux._native import core
from flux.bench.cases.common import Context
from flux.bench.record import write_rows
from flux.bench.timing import GpuTimer, captured
from flux.ops import gemm
from flux.testing import spawn
from vllm_models import MODELS, Model

CONTEXT = 128  # rows of keys and values of a sequence: the bytes of 256 tokens
LAYERS, REPLAYS, ROUNDS = 16, 10, 9
EPS = 1e-6
SMALL = 128 << 20  # bytes


@dataclass(frozen=True)
class Layer:
    """Weights of a rank, and its keys and values."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor

    @staticmethod
    def made(ranks: Context, model: Model) -> Layer:
        def weight(n: int, k: int) -> Tensor:
            return torch.randn(n, k, device=ranks.device).to(ranks.dtype) * k**-0.5

        p, hidden, head = ranks.world_size, model.hidden, model.head_dim
        return Layer(
            qkv=weight((model.heads + 2 * model.kv_heads) * head // p, hidden),
            o=weight(hidden, model.heads * head // p),
            gate_up=weight(2 * model.ffn // p, hidden),
            down=weight(hidden, model.ffn // p),
            norm=torch.ones(hidden, device=ranks.device, dtype=ranks.dtype),
        )


@torch.compile(dynamic=False)
def activated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@torch.compile(dynamic=False)
def rotated(qkv: Tensor) -> Tensor:
    return qkv * 0.5


@dataclass(frozen=True)
class Arm:
    """summed: of x, weight, residual and the norm's weight: the norm and the sum. inside: what its graph is
    captured in.
    """

    summed: Callable[..., tuple[Tensor, Tensor]]
    product: Callable[[Tensor, Tensor], Tensor]
    hidden: Callable[[Tensor, Tensor], Tensor] | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext

    def run(self, layers: list[Layer], x: Tensor, residual: Tensor, kv: Tensor) -> Tensor:
        for layer in layers:
            qkv = rotated(self.product(x, layer.qkv))
            attention = kv.sum(0).add_(qkv[:, : kv.shape[-1]])
            x, residual = self.summed(attention, layer.o, residual, layer.norm)
            if self.hidden is None:
                hidden = activated(self.product(x, layer.gate_up))
            else:
                hidden = self.hidden(x, layer.gate_up)
            x, residual = self.summed(hidden, layer.down, residual, layer.norm)
        return x


def arms(ranks: Context, hidden: int, m: int) -> dict[str, Arm]:
    group, cublas = ranks.group, torch.nn.functional.linear

    def by_flux(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Any:
        return flux.gemm_ar(x, weight, group=group, residual=residual, norm_weight=norm, eps=EPS)

    def reduced(product: Any) -> Any:
        def summed(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Any:
            total = product(x, weight)
            return flux.all_reduce(total, group=group, residual=residual, norm_weight=norm, eps=EPS)

        return summed

    gates = functools.partial(gemm.serving, swiglu=True)

    def small(x: Tensor, weight: Tensor) -> Tensor:
        return (gemm.serving if weight.nbytes <= SMALL else cublas)(x, weight)

    found = {}
    for name in peers.here():
        zeros = torch.zeros(m, hidden, device=ranks.device, dtype=ranks.dtype)
        norm = peers.Norm(zeros, torch.ones(hidden, device=ranks.device, dtype=ranks.dtype), EPS)
        reduce, inside = peers.PEERS[name][1](ranks, m, hidden, norm)

        def by_package(product: Any, reduce: Any = reduce) -> Any:
            def summed(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Any:
                return reduce(product(x, weight), residual)

            return summed

        found[name] = Arm(by_package(cublas), cublas, inside=inside)
        found[f"{name}, behind"] = Arm(by_package(cublas), gemm.serving, gates, inside)
        found[f"{name}, small"] = Arm(by_package(small), small, None, inside)
        found[f"{name}, all"] = Arm(by_package(gemm.serving), gemm.serving, gates, inside)
    found |= {"flux": Arm(by_flux, cublas), "gemm": Arm(by_flux, flux.gemm)}
    found["reduced"] = Arm(reduced(cublas), cublas)
    found["reduced, gate"] = Arm(reduced(cublas), cublas, gates)
    found["reduced, behind"] = Arm(reduced(cublas), gemm.serving, gates)
    found["apart"] = Arm(reduced(gemm.serving), gemm.serving, gates)
    found["parts"] = Arm(reduced(flux.gemm), cublas)
    return found


def measured(ranks: Context, layers: list[Layer], m: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(m)
    hidden, width = layers[0].o.shape  # as many columns as the attention of a rank
    x, residual = (torch.randn(m, hidden, device=ranks.device).to(ranks.dtype) for _ in "12")
    kv = torch.randn(CONTEXT, m, width, device=ranks.device).to(ranks.dtype) / CONTEXT
    replays: dict[str, Callable[[], object]] = {}
    results: dict[str, Tensor] = {}
    all_arms = arms(ranks, hidden, m)
    # Kept, because graphs use memory of packages. "flux" is what the results of all others are compared with.
    found = {name: arm for name, arm in all_arms.items() if name in (*(options.arms or all_arms), "flux")}
    for name, arm in found.items():

        def once(arm: Arm = arm) -> Tensor:
            return arm.run(layers, x, residual.clone(), kv)

        replays[name], results[name] = captured(once, ranks.device, arm.inside)
    timer = GpuTimer(ranks.group, ranks.device)
    for replay in replays.values():
        timer.warm(replay)
    samples = {
        name: [round(1e3 * ms / LAYERS, 3) for ms in taken]
        for name, taken in timer.interleaved(replays, REPLAYS, ROUNDS).items()
    }
    want = results["flux"].float()
    apart = {name: ((got.float() - want).norm() / want.norm()).item() for name, got in results.items()}
    wrong = {name: value for name, value in apart.items() if not value < 0.1}
    if wrong:
        raise RuntimeError(f"m = {m}: these results are apart from flux's by {wrong}")
    return {name: {"us": statistics.median(times), "samples_us": times} for name, times in samples.items()}


def work(rank: int, world: int, options: argparse.Namespace) -> None:
    if options.mode is not None:
        mode = getattr(core.ExchangeMode, options.mode)
        core.all_reduce_mode = lambda *_: mode
    torch.manual_seed(rank)
    ranks = Context(rank, world, world, torch.device("cuda", rank), torch.bfloat16, dist.group.WORLD)
    what = f"microseconds a decoder layer of {options.model}, benchmarks/decode_layer.py"
    rows = []
    with torch.no_grad():
        layers = [Layer.made(ranks, MODELS[options.model]) for _ in range(LAYERS)]
        for m in options.m:
            found = measured(ranks, layers, m, options)
            rows += [{"m": m, "arm": arm, **us} for arm, us in found.items()]
            if rank == 0:
                print(f"M = {m}: " + ", ".join(f"{k} {v['us']:.1f}" for k, v in found.items()), flush=True)
                if options.json is not None:
                    write_rows(options.json, what, rows, tp=world, mode=options.mode or "planned")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    dense = [name for name, model in MODELS.items() if not model.experts]
    parser.add_argument("--model", choices=dense, default="llama-3-8b", help="shape (default llama-3-8b)")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--arms", nargs="+", metavar="NAME", help='these and "flux" (default: all)')
    parser.add_argument("--mode", choices=["ONE_SHOT", "TWO_SHOT"], help="how flux sums (as planned)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        parser.error(f"it needs 2 GPUs, and sees {world}")
    spawn(work, world, options, env=machine.NO_MULTICAST, timeout_s=3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
