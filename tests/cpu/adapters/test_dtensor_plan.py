"""convert_plan: the tensor- and sequence-parallel plan of a Llama, as for torch's styles, trained as usual:
FSDP2 x TP, activations recomputed, gradients clipped, and checkpoints that go on at another TP, or in the
other's styles.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import counted
from effort import some
from test_dtensor import Mlp, integers, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flux
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, convert_plan
from flux.testing import spawn

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDE, BLOCKS = 64, 32, 8, 4, 64, 2
BATCH, SEQUENCE, STEPS = 4, 8, some(20)
HEAD = HIDDEN // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [batch, sequence, heads, HEAD] by angles [sequence, HEAD / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (layer(x).view(batch, sequence, -1, HEAD) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(q, angles), rotated(k, angles)
        heads = [part.transpose(1, 2) for part in (q, k, v)]
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(), Attention()
        self.ffn_norm, self.feed_forward = Norm(), FeedForward()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.output = Norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1]), 0.5 ** torch.arange(HEAD // 2))
        x = self.embeddings(tokens)
        for block in self.layers:
            x = checkpoint(block, x, angles, use_reentrant=False)
        return self.output(self.norm(x))


def plan() -> dict[str, Any]:
    whole, cut = Replicate(), Shard(1)
    return {
        "embeddings": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(cut, None), desired_input_layouts=(whole, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=cut),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=cut),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }


Trainee = tuple[nn.Module, torch.optim.Optimizer]


def build(mesh: DeviceMesh, styles: dict[str, Any]) -> Trainee:
    torch.manual_seed(5)
    model = parallelize_module(Llama(), mesh["tp"], styles)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(trainee: Trainee, mesh: DeviceMesh, number: int) -> dict[str, torch.Tensor]:
    """The loss of all ranks, the norm of the gradient before it was clipped, and the clipped gradients."""
    model, optimizer = trainee
    g = torch.Generator().manual_seed(number)
    batch = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=g)
    batch = batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    optimizer.zero_grad()
    logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert isinstance(norm, DTensor)
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return {"loss": mean / dist.get_world_size(), "norm": norm.full_tensor(), **grads}


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


def train(rank: int, p: int) -> None:
    mesh, other = (init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in ((2, 2), (1, 4)))
    stock, ours = build(mesh, plan()), build(mesh, convert_plan(plan()))
    trainees = {"on flux": (ours, mesh)}
    for number in range(STEPS):
        if number == STEPS // 2:
            trainees |= {
                "on flux, TP 4": (saved(ours, build(other, convert_plan(plan()))), other),
                "saved by torch": (saved(stock, build(mesh, convert_plan(plan()))), mesh),
                "saved on flux": (saved(ours, build(mesh, plan())), mesh),
            }
        expected = step(stock, mesh, number)
        for name, trainee in trainees.items():
            with counted("ag_gemm", "gemm_rs") as (ag, rs):
                found = step(*trainee, number)
            # One for q, k and v, and one for w1 and w3; both again when the block is recomputed.
            calls = (0, 0) if name == "saved on flux" else (BLOCKS * 2 * 2 + 1, BLOCKS * 2 * 2)
            assert (ag.call_count, rs.call_count) == calls, name
            assert found.keys() == expected.keys() and len(found) > 10
            for part, wanted in expected.items():
                rtol, atol = (1e-6, 0.0) if part in ("loss", "norm") else (1e-4, 1e-6)
                at = f"step {number}, {name}, {part}: "
                torch.testing.assert_close(found[part], wanted, rtol=rtol, atol=atol, msg=at.__add__)


def test_llama_trains_as_with_torchs_styles() -> None:
    spawn(train, 4, backend="gloo", timeout_s=120)


class Doubled(Mlp):
    """Its layers do not read the same tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x * 2))


class Negative(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def negative(bias: bool) -> Mlp:
    """With a layer that flux does not serve."""
    mlp = Mlp(bias)
    layer = Negative(mlp.up.in_features, mlp.up.out_features)
    layer.weight, layer.bias, mlp.up = mlp.up.weight, mlp.up.bias, layer
    return mlp


WHOLE, CUT = Replicate(), Shard(1)
GATHER = PrepareModuleInput(input_layouts=CUT, desired_input_layouts=WHOLE)
GATHER_NAMED = PrepareModuleInput(input_kwarg_layouts={"x": CUT}, desired_input_kwarg_layouts={"x": WHOLE})
GATHER_BOTH = PrepareModuleInputOutput(
    input_layouts=CUT, desired_input_layouts=WHOLE, output_layouts=CUT, desired_output_layouts=WHOLE
)
LOCAL = PrepareModuleInput(input_layouts=CUT, desired_input_layouts=WHOLE, use_local_output=True)
# Module, style, whether its layers return DTensors, whether x is one of 5 rows, how often flux gathers.
CASES: dict[str, tuple[Callable[[bool], Mlp], Any, bool, bool, int]] = {
    "one input": (Mlp, GATHER, False, False, 1),
    "DTensors between layers": (Mlp, GATHER, True, False, 1),
    "by name": (Mlp, GATHER_NAMED, False, False, 1),
    "with outputs": (Mlp, GATHER_BOTH, False, False, 1),
    "different inputs of layers": (Doubled, GATHER, False, False, 2),
    "uneven rows": (Mlp, GATHER, True, True, 0),
    "a layer of another class": (negative, GATHER, False, False, 0),
    "a module of tensors": (Mlp, LOCAL, False, False, 0),
}


def gathers_in_layers(rank: int, p: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("tp",))
    answers = {}
    for name, (make, style, dtensors, uneven, expected_calls) in CASES.items():
        column, results = ColwiseParallel(use_local_output=not dtensors), []
        styles = {"": style, "[gu]*": column, "down": RowwiseParallel(output_layouts=CUT)}
        for chosen in (styles, convert_plan(styles)):
            x = integers(rank, 3, 4, 16).requires_grad_()
            if uneven:
                x = distribute_tensor(integers(0, 3, 5, 16), mesh, [CUT]).requires_grad_()
            mlp = parallelize_module(make(True), mesh, chosen)
            with mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as calls:
                out = mlp(x=x) if style is GATHER_NAMED else mlp(x)
            (out * (torch.arange(out.numel()) % 7 - 3).view(out.shape)).sum().backward()
            grads = [("dx", x), *mlp.named_parameters()]
            results.append([("out", out), *((part, tensor.grad) for part, tensor in grads)])
        told = [same(part, got, wanted) for (part, wanted), (_, got) in zip(*results, strict=True)]
        if calls.call_count != expected_calls:
            told.append(f"{calls.call_count} gathers")
        answers[name] = "; ".join(filter(None, told))
    one = {"": GATHER, "[gu]*": ColwiseParallel(), "down": RowwiseParallel(output_layouts=CUT)}
    mlp, x = parallelize_module(Mlp(True), mesh, convert_plan(one)), integers(rank, 3, 4, 16)
    answers["compiled"] = same("", torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), mlp(x))
    with pytest.warns(UserWarning, match="'absent'"):
        parallelize_module(Mlp(True), mesh, convert_plan({"": GATHER, "absent": ColwiseParallel()}))
    return {name: answer for name, answer in answers.items() if answer}


def test_gathers_in_layers() -> None:
    assert spawn(gathers_in_layers, 2, backend="gloo", timeout_s=60) == [{}] * 2


class Mine(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


def test_what_is_not_converted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    two = PrepareModuleInput(input_layouts=(CUT, CUT), desired_input_layouts=(WHOLE, WHOLE))
    left = {
        "norm": (SequenceParallel(), "SequenceParallel"),
        "a": (GATHER, "PrepareModuleInput, with Mine in it"),
        "a.router": (Mine(), "Mine"),
        "b": (two, "PrepareModuleInput, which gathers 2 inputs"),
        "c": (LOCAL, "PrepareModuleInput, whose module reads tensors, not DTensors"),
        "d": (GATHER_BOTH, "PrepareModuleInputOutput, with no column-parallel layers in it"),
    }
    styles = {name: style for name, (style, _) in left.items()}
    ours = {f"{name}.{part}": ColwiseParallel() for name in "abc" for part in ("w1", "deeper.w1")}
    with caplog.at_level(logging.INFO, "flux"):
        converted = convert_plan({**styles, **ours})
    assert converted.keys() == styles.keys() | ours.keys()
    assert all(converted[name] is style for name, style in styles.items())
    assert {type(converted[name]) for name in ours} == {FluxColwiseParallel}
    told = "; ".join(f"{name!r}: {why}" for name, (_, why) in left.items())
    assert caplog.messages == [f"convert_plan: left to torch: {told}"]
    alone = convert_plan(RowwiseParallel(output_layouts=CUT, use_local_output=False))
    assert type(alone) is FluxRowwiseParallel and not alone.use_local_output
    again = convert_plan(plan())
    assert convert_plan(again) == again and len(again) == len(plan()) - 3
    for wrong in ({"norm": nn.LayerNorm(4)}, [SequenceParallel()]):
        with pytest.raises(TypeError, match="convert_plan: plan: expected a ParallelStyle or a dict"):
            convert_plan(wrong)
