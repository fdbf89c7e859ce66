"""Trains a small MLP stack with tensor and sequence parallelism by DTensor, on torch's styles and on flux's.

    python examples/dtensor_tp.py [--ranks 2] [--steps 20] [--hidden 256]

Uses one GPU per rank in bf16 if there are as many, else CPU processes in fp32. The two styles are all that
differs between the runs. Prints the losses, which must agree, and the time of a step.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel
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


def train(rank: int, ranks: int, steps: int, hidden: int, on_flux: bool) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of one."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden) for _ in range(LAYERS))).to(device, dtype)
    colwise, rowwise = (
        (FluxColwiseParallel, FluxRowwiseParallel) if on_flux else (ColwiseParallel, RowwiseParallel)
    )
    for block in model:
        # Activations [batch, sequence, hidden] between the blocks are cut along the sequence.
        parallelize_module(
            block,
            mesh,
            {"up": colwise(input_layouts=Shard(1)), "down": rowwise(output_layouts=Shard(1))},
        )
    x, target = torch.randn(2, 1, SEQUENCE, hidden).to(device, dtype).chunk(ranks, dim=2)[rank].unbind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, start = [], 0.0
    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        for block in model:  # each rank has seen its part of the sequence
            torch.distributed.all_reduce(block.norm.weight.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) / (steps - steps // 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    for on_flux in (False, True):
        results = spawn(train, options.ranks, options.steps, options.hidden, on_flux, timeout_s=600)
        losses, seconds = results[0]
        name = "flux " if on_flux else "torch"
        print(f"{name}  loss {losses[0]:.5f} -> {losses[-1]:.5f}  {1e3 * seconds:.2f} ms a step")


if __name__ == "__main__":
    main()
