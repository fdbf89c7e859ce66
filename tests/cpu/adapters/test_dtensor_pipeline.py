"""Pipeline parallelism x tensor parallelism with torch.distributed.pipelining: losses and gradients of
torch's styles and of flux's, for schedules of one and of two stages per rank.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import Answers, counted, run_scenarios
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flux.integrations.dtensor import FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import RMSNorm, reduce_replicated_grads

HIDDEN, WIDE, MICROBATCHES, STEPS = 16, 32, 4, 3
RANKS = 2  # of a pipeline
# The stages of the first rank; the second one has the others.
SCHEDULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "GPipe": (ScheduleGPipe, (0,)),
    "1F1B": (Schedule1F1B, (0,)),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, (0, 2)),
}
# These run the backward passes of inputs and of weights apart, which torch before 2.13 cannot with functions
# that are written in Python.
if torch.__version__ >= "2.13":
    SCHEDULES["zero bubble"] = ScheduleInterleavedZeroBubble, (0, 2)
    SCHEDULES["zero bubble, V"] = ScheduleZBVZeroBubble, (0, 3)


class Block(nn.Module):
    def __init__(self, group: DeviceMesh) -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN, group=group)
        self.gate, self.up = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        out: torch.Tensor = x + self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))
        return out


def plan(on_flux: bool) -> dict[str, Any]:
    if on_flux:
        columns = {"": FluxSharedColwiseParallel("gate", "up", input_layouts=Shard(1))}
        return {**columns, "down": FluxRowwiseParallel(output_layouts=Shard(1))}
    columns = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
    return {**columns, "down": RowwiseParallel(output_layouts=Shard(1))}


def build(mesh: DeviceMesh, on_flux: bool, stage: int) -> nn.Module:
    """The block of a stage."""
    torch.manual_seed(5 + stage)
    block = Block(mesh["tp"])
    return parallelize_module(block, mesh["tp"], plan(on_flux))


def train(mesh: DeviceMesh, schedule: str, on_flux: bool) -> list[dict[str, torch.Tensor]]:
    """Of each step, the losses of micro-batches on the last stage, and the local part of every gradient."""
    make, own = SCHEDULES[schedule]
    count = RANKS * len(own)
    if mesh.get_local_rank("pp") == 1:
        own = tuple(sorted(set(range(count)) - set(own)))
    blocks = nn.ModuleDict({str(stage): build(mesh, on_flux, stage) for stage in own})
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    group, device = mesh["pp"].get_group(), torch.device("cpu")
    stages = [PipelineStage(blocks[str(i)], i, count, device, group=group) for i in own]
    run = make(
        stages if len(own) > 1 else stages[0],
        MICROBATCHES,
        loss_fn=lambda y, target: (y - target).square().mean(),
    )
    found = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        batch = torch.randn(2, 2 * MICROBATCHES, 8, HIDDEN, generator=g)
        x, target = batch.chunk(mesh["tp"].size(), dim=2)[mesh.get_local_rank("tp")].contiguous().unbind()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (x,) if 0 in own else ()
        if count - 1 in own:
            run.step(*inputs, target=target, losses=losses)
        else:
            run.step(*inputs)
        reduce_replicated_grads(blocks, group=mesh["tp"])
        result = {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}
        for name, p in blocks.named_parameters():
            assert p.grad is not None, name
            result[name] = (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone()
        optimizer.step()
        found.append(result)
    return found


@cache  # of two that are equal, torch may give DTensors the first, whose groups are others
def make_mesh(p: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS, p // RANKS), mesh_dim_names=("pp", "tp"))


def compare(rank: int, p: int, schedule: str) -> None:
    mesh = make_mesh(p)
    stock = train(mesh, schedule, False)
    with counted("ag_gemm", "gemm_rs") as (ag, rs):
        ours = train(mesh, schedule, True)
    for expected, got in zip(stock, ours, strict=True):
        assert got.keys() == expected.keys() and len(got) >= 5
        last = RANKS * len(SCHEDULES[schedule][1]) - 1
        assert ("loss 3" in got) == any(name.startswith(f"{last}.") for name in got)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    # The forward passes; torch may make one more of each stage to learn the shapes.
    stages = len(SCHEDULES[schedule][1])
    passes = stages * STEPS * MICROBATCHES
    calls = (ag.call_count, rs.call_count)
    assert all(passes <= n <= passes + stages for n in calls), calls


scenarios = {name: partial(compare, schedule=name) for name in SCHEDULES}
answers = Answers(partial(run_scenarios, scenarios), timeout_s=240)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_train_as_with_torchs_styles(schedule: str) -> None:
    told = answers.of(4, schedule)
    assert told == [""] * 4, "\n".join(told)
