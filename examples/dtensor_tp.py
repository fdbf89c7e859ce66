"""Trains a small MLP stack with tensor and sequence parallelism by DTensor, on torch's styles and on flux's.

    python examples/dtensor_tp.py [--ranks 2] [--fsdp 1] [--steps 20] [--hidden 256] [--plot FILE.svg]

With --fsdp N, N groups of ranks share the parameters by FSDP2, each with a batch of its own. Uses one GPU per
rank in bf16 if there are as many, else CPU processes in fp32. The two styles are all that differs between the
runs. Prints the losses, which must agree, and the time of a step.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flux.integrations.dtensor import convert_plan
from flux.layers import mark_replicated, reduce_replicated_grads
from flux.testing import spawn

LAYERS, SEQUENCE = 4, 512


class Block(nn.Module):
    """x + down(silu(up(norm(x))))"""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return out


def train(
    rank: int, ranks: int, fsdp: int, steps: int, hidden: int, on_flux: bool
) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of one."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    mesh = init_device_mesh(device, (fsdp, ranks // fsdp), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden) for _ in range(LAYERS))).to(device, dtype)
    # Activations [batch, sequence, hidden] between the blocks are cut along the sequence.
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    for block in model:
        parallelize_module(block, tp, convert_plan(plan) if on_flux else plan)
        mark_replicated(block.norm, "weight")  # each rank sees its part of the sequence
        if fsdp > 1:
            fully_shard(block, mesh=mesh["dp"])
    if fsdp > 1:
        fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(1 + mesh.get_local_rank("dp"))
    batch = torch.randn(2, 1, SEQUENCE, hidden).to(device, dtype)
    x, target = batch.chunk(tp.size(), dim=2)[tp.get_local_rank()].unbind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, start = [], 0.0
    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        reduce_replicated_grads(model, group=tp)
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) / (steps - steps // 2)


def plot(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), width in zip(curves.items(), (5.0, 1.2), strict=True):
        axes.plot(losses, label=name, linewidth=width, alpha=0.35 if width > 2 else 1.0)
    axes.set(xlabel="step", ylabel="loss of rank 0", ylim=(0, None))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--plot", help="file for a picture of both losses")
    options = parser.parse_args()
    curves = {}
    for on_flux in (False, True):
        sizes = (options.fsdp, options.steps, options.hidden)
        results = spawn(train, options.ranks, *sizes, on_flux, timeout_s=600)
        losses, seconds = results[0]
        name = "flux " if on_flux else "torch"
        curves[name.strip()] = losses
        print(f"{name}  loss {losses[0]:.5f} -> {losses[-1]:.5f}  {1e3 * seconds:.2f} ms a step")
    pairs = zip(*curves.values(), strict=True)
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in pairs):.1e}")
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
