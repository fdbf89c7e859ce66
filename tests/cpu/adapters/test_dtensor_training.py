"""FSDP2 x tensor parallelism on a mesh of two dimensions, trained for twenty steps: torch's styles, flux's,
and checkpoints that one writes and the other goes on from, all with the same losses and gradients.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from effort import some
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flux.integrations.dtensor import FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import RMSNorm, reduce_replicated_grads
from flux.testing import spawn

HIDDEN, WIDE, BLOCKS, STEPS = 16, 32, 2, some(20)


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


Trainee = tuple[nn.Module, torch.optim.Optimizer]


def plan(on_flux: bool) -> dict[str, Any]:
    if on_flux:
        columns = {"": FluxSharedColwiseParallel("gate", "up", input_layouts=Shard(1))}
        return {**columns, "down": FluxRowwiseParallel(output_layouts=Shard(1))}
    columns = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
    return {**columns, "down": RowwiseParallel(output_layouts=Shard(1))}


def build(mesh: DeviceMesh, on_flux: bool) -> Trainee:
    torch.manual_seed(2)
    model = nn.Sequential(*(Block(mesh["tp"]) for _ in range(BLOCKS)))
    for block in model:
        parallelize_module(block, mesh["tp"], plan(on_flux))
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(trainee: Trainee, mesh: DeviceMesh, number: int) -> dict[str, torch.Tensor]:
    """The loss, and the local part of every gradient."""
    model, optimizer = trainee
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    g = torch.Generator().manual_seed(100 * number + dp)
    x, target = torch.randn(2, 2, 8, HIDDEN, generator=g).chunk(mesh["tp"].size(), dim=2)[tp].unbind()
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    reduce_replicated_grads(model, group=mesh["tp"])
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        found[name] = parameter.grad.to_local().clone()
    optimizer.step()
    return found


def saved(trainee: Trainee, other: Trainee) -> Trainee:
    """`other`, with the state of `trainee`, through a checkpoint on disk."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0])) / "checkpoint"
    model, optimizer = get_state_dict(*trainee)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    model, optimizer = get_state_dict(*other)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path.parent)
    return other


def train(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    stock, ours = build(mesh, False), build(mesh, True)
    # Trained by one until half of the steps are done, and by the other then.
    moved = {"saved on flux": build(mesh, True), "saved by torch": build(mesh, False)}
    for number in range(STEPS):
        if number == STEPS // 2:
            moved["saved on flux"] = saved(moved["saved on flux"], build(mesh, False))
            moved["saved by torch"] = saved(moved["saved by torch"], build(mesh, True))
        expected = step(stock, mesh, number)
        for name, trainee in {"on flux": ours, **moved}.items():
            found = step(trainee, mesh, number)
            assert found.keys() == expected.keys()
            for part, wanted in expected.items():
                torch.testing.assert_close(
                    found[part],
                    wanted,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda text, where=(name, number, part): f"{where}: {text}",
                )
    return ""


def test_training_and_checkpoints() -> None:
    assert spawn(train, 4, backend="gloo", timeout_s=120) == [""] * 4
