"""Pipeline parallelism x tensor parallelism with torch.distributed.pipelining: losses and gradients of
torch's styles and of flux's, for schedules of one and of two stages per rank.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_dtensor_training import HIDDEN, Block, plan
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import flux
from flux.layers import reduce_replicated_grads
from flux.testing import spawn

MICROBATCHES, STEPS = 4, 3
RANKS = 2  # of a pipeline
# The stages of the first rank; the second one has the others.
SCHEDULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "GPipe": (ScheduleGPipe, (0,)),
    "1F1B": (Schedule1F1B, (0,)),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, (0, 2)),
    # These run the backward passes of inputs and of weights apart.
    "zero bubble": (ScheduleInterleavedZeroBubble, (0, 2)),
    "zero bubble, V": (ScheduleZBVZeroBubble, (0, 3)),
}


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


def compare(rank: int, p: int, schedule: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (RANKS, p // RANKS), mesh_dim_names=("pp", "tp"))
    stock = train(mesh, schedule, False)
    with (
        mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as ag,
        mock.patch.object(flux, "gemm_rs", wraps=flux.gemm_rs) as rs,
    ):
        ours = train(mesh, schedule, True)
    for expected, got in zip(stock, ours, strict=True):
        assert got.keys() == expected.keys() and len(got) >= 5
        last = RANKS * len(SCHEDULES[schedule][1]) - 1
        assert ("loss 3" in got) == any(name.startswith(f"{last}.") for name in got)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    return ag.call_count, rs.call_count


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_train_as_with_torchs_styles(schedule: str) -> None:
    if "zero bubble" in schedule and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 splits no backward pass of a function that is written in Python")
    calls = spawn(compare, 4, schedule, backend="gloo", timeout_s=120)
    # The forward passes; torch may make one more of each stage to learn the shapes.
    stages = len(SCHEDULES[schedule][1])
    passes = stages * STEPS * MICROBATCHES
    assert all(passes <= n <= passes + stages for pair in calls for n in pair), calls
