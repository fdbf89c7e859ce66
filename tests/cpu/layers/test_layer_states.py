"""What layers keep says whose part it is: checkpoints between world sizes, state dicts, gradient norms and
FSDP2, against the same model on one rank. Every element of a state is a number of its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import scenario_test
from layer_models import EXPERTS, F64, FFN, HIDDEN, Dense, Plain, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flux._sharded import local, own_part
from flux.layers import (
    ColumnParallelLinear,
    Fp8,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    clip_grad_norm_,
    reduce_replicated_grads,
)
from flux.moe import MoEMLP
from flux.testing import spawn

ROWS = 8


def everything(p: int, **options: Any) -> nn.ModuleDict:
    """Every dense layer, and every way in which p ranks share experts; the names are those of four ranks."""
    make = partial(MoEMLP, HIDDEN, FFN, EXPERTS, dtype=F64, **options)
    sizes = {"tp": 1, "ep": 1 if p == 3 else p, "both": 2 if p == 4 else 1}
    made = {name: make(ep_size=size) for name, size in sizes.items()}
    experts = nn.ModuleDict({**made, "ungated": make(activation="gelu")})
    return nn.ModuleDict({"dense": Dense(**options), "experts": experts})


def marked(model: nn.Module, offset: int = 0) -> dict[str, torch.Tensor]:
    """A whole state, the same for every world size."""
    state = {}
    for number, (name, value) in enumerate(model.state_dict().items()):
        flat = torch.arange(value.numel(), dtype=value.dtype) + 10_000 * number + offset
        state[name] = flat.view(value.shape)
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_states(p: int, offset: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which has states of its own."""
    model = everything(p)
    model.load_state_dict(marked(model, offset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()  # the momentum is what the parameter is
    optimizer.step()
    return model, optimizer


def saved(rank: int, p: int, path: str) -> bool:
    model, optimizer = get_state_dict(*with_states(p, 0))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return True


def loaded(rank: int, p: int, path: str) -> bool:
    made = with_states(p, 5)
    model, optimizer = get_state_dict(*made)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(*made, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = marked(made[0])
    momenta = {n: made[1].state[q]["momentum_buffer"] for n, q in made[0].named_parameters()}
    return same(whole(made[0].state_dict()), expected) and same(whole(momenta), expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("checkpoint"))
    assert spawn(saved, 2, path, backend="gloo") == [True] * 2
    return path


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_checkpoints_of_two_ranks(world_size: int, checkpoint: str) -> None:
    assert spawn(loaded, world_size, checkpoint, backend="gloo") == [True] * world_size


def state_dicts(rank: int, p: int) -> None:
    """From the whole tensor, and from the rank's own file; for export, whole plain tensors."""
    model = everything(p)
    state = marked(model)
    flat = {n: v.flatten(1, 2) if v.dim() == 4 else v for n, v in state.items()}  # gates, then ups
    for given in (state, flat):
        model.load_state_dict(marked(model, 3))
        model.load_state_dict(given)
        assert same(whole(model.state_dict()), state)
    set_model_state_dict(model, marked(model, 7), options=StateDictOptions(full_state_dict=True))
    export = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        assert same(export, marked(model, 7)) and all(type(v) is torch.Tensor for v in export.values())
    for assign, given in product((False, True), (file_of(model), marked(model, 7))):
        again = everything(p, device="meta" if assign else None)
        again.load_state_dict(given, assign=assign)
        assert same(whole(again.state_dict()), marked(model, 7))
        assert all(local(each).is_contiguous() for each in again.parameters())
    own = local(again["experts"]["tp"].w1)  # type: ignore[index]
    assert own.shape == (EXPERTS, 2, FFN // p, HIDDEN)
    for name, leading in (("dense.mlp.up_proj.weight", ()), ("experts.tp.w1", (EXPERTS,))):
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            again.load_state_dict({**state, name: torch.zeros(*leading, FFN * 7, HIDDEN)})


def file_of(model: nn.Module) -> Any:
    """A state dict, from what torch.save writes."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def parts_of_others(rank: int, p: int) -> None:
    layers: list[Callable[[], nn.Module]] = [
        lambda: ColumnParallelLinear(HIDDEN, FFN),
        lambda: RowParallelLinear(FFN, HIDDEN),
        lambda: ParallelMLP(HIDDEN, FFN),
        *(
            lambda size=size: MoEMLP(HIDDEN, FFN, EXPERTS, ep_size=size)
            for size in {1, 2, p}
            if p % size == 0
        ),
    ]
    for make in layers:
        layer = make()
        files: list[Any] = [None] * p
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        dist.all_gather_object(files, file.getvalue())
        for other in range(p):
            given = torch.load(io.BytesIO(files[other]))
            if other == rank:
                layer.load_state_dict(given)
            else:
                with pytest.raises(ValueError, match="expected the part at .*got that at"):
                    layer.load_state_dict(given)
        modules: list[Any] = [None] * p
        dist.all_gather_object(modules, pickle.dumps(layer))
        if p > 1:
            with pytest.raises(
                ValueError, match=f"expected a module of this rank, got that of rank {(rank + 1) % p}"
            ):
                pickle.loads(modules[(rank + 1) % p])
        parts = {name: local(value).clone() for name, value in layer.state_dict().items()}
        if p > 1:
            with pytest.raises(ValueError, match="a part that does not say of which rank it is"):
                layer.load_state_dict(parts)
        weights = dict(layer.named_parameters())
        layer.load_state_dict(
            {
                n: DTensor.from_local(v, weights[n].device_mesh, weights[n].placements, run_check=False)  # type: ignore[attr-defined]
                for n, v in parts.items()
            }
        )
        elsewhere = init_device_mesh("cpu", (1, p))
        with pytest.raises(ValueError, match="expected a DTensor .* on DeviceMesh.*got"):
            layer.load_state_dict(
                {n: DTensor.from_local(v, elsewhere, run_check=False) for n, v in parts.items()}
            )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda q: torch.optim.AdamW(q, lr=0.1),
    "foreach": lambda q: torch.optim.AdamW(q, lr=0.1, foreach=True),
    "fused": lambda q: torch.optim.AdamW(q, lr=0.1, fused=True),
    "sgd": lambda q: torch.optim.SGD(q, lr=0.1, momentum=0.9, foreach=True),
}


def data(parts: int, part: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    return torch.randint(-3, 4, (ROWS, 3, HIDDEN), generator=g).to(F64).chunk(parts)[part]


def trained(model: nn.Module, make: Any, x: torch.Tensor, clip: Any, reduces: bool) -> list[float]:
    """The norms of three steps."""
    norms, optimizer = [], make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for rows in x.chunk(2, 1):  # two micro-batches
            (model(rows).square().sum() / 8).backward()
        if reduces:
            reduce_replicated_grads(model)
        norms.append(float(local(clip(model.parameters(), 0.5))))
        optimizer.step()
    return norms


def one_norm(rank: int, p: int) -> None:
    """torch's clipping and optimizers do on every rank what they do on one."""
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        clip = clip_grad_norm_ if number == 0 else nn.utils.clip_grad_norm_
        torch.manual_seed(1)
        plain, model = Plain(), Dense()
        model.load_state_dict(plain.state_dict())
        expected = trained(plain, make, data(1, 0), nn.utils.clip_grad_norm_, False)
        # Where norms' gradients are not summed before, torch does it.
        got = trained(model, make, data(p, rank), clip, reduces=number % 2 == 0)
        assert expected[0] > 0.5
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)
        torch.testing.assert_close(whole(model.state_dict()), dict(plain.state_dict()), msg=name)


def norms_of_marks(rank: int, p: int) -> None:
    """Parts count on their ranks, what all have once; for all layers, whatever their meshes."""
    model = everything(p)
    model.extra = nn.Linear(2, 2, dtype=F64)
    parameters, squares = list(model.parameters()), {}
    for number, parameter in enumerate(parameters):
        marks = (torch.arange(parameter.numel(), dtype=F64) % 7 + number).view(parameter.shape)
        parameter.grad = parameter.detach().clone()
        local(parameter.grad).copy_(marks[own_part(parameter)])
        squares[parameter] = int(marks.square().sum())
    total = sum(squares.values()) ** 0.5
    before = [local(q.grad).clone() for q in parameters]
    with pytest.raises(RuntimeError, match="must have the same mesh|mixed torch.Tensor and DTensor"):
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert float(clip_grad_norm_(parameters, 2.0)) == pytest.approx(total, rel=1e-12)
    for old, parameter in zip(before, parameters, strict=True):
        torch.testing.assert_close(local(parameter.grad), old * (2.0 / (total + 1e-6)))


def fp8_norm(rank: int, p: int) -> None:
    model = Dense(fp8=Fp8(), dtype=torch.float32)
    model(data(p, rank).float()).square().sum().backward()
    expected = sum(float(q.grad.full_tensor().double().square().sum()) for q in model.parameters())
    got = local(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert float(got) == pytest.approx(expected**0.5, rel=1e-5)


def fsdp(rank: int, p: int) -> None:
    """FSDP2 x tensor parallelism on meshes of one root: states, norms and steps of one rank."""
    mesh = init_device_mesh("cpu", (max(p // 2, 1), min(p, 2)), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    torch.manual_seed(1)
    plain, model = Plain(), Dense(group=mesh["tp"])
    for layer in (model.norm, model.mlp, model):
        fully_shard(layer, mesh=mesh["dp"])
    for _ in range(2):
        model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
        model.load_state_dict(plain.state_dict())
        export = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            assert same(export, dict(plain.state_dict()))
    drawn = []
    for each in (model, Dense(group=mesh["tp"])):
        torch.manual_seed(4)
        for layer in (each.mlp.up_proj, each.down):
            layer.reset_parameters()
        drawn.append(
            whole({n: v for n, v in each.state_dict().items() if n.startswith(("mlp.up_proj", "down"))})
        )
    assert same(*drawn)
    model.load_state_dict(plain.state_dict())
    parts = mesh["dp"].size()
    whole_x = data(1, 0)
    mine = whole_x.chunk(parts)[dp].chunk(mesh["tp"].size())[tp]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (plain(whole_x).square().sum() / parts).backward()  # FSDP2 averages
        model(mine).square().sum().backward()
        reduce_replicated_grads(model, group=mesh["tp"])
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (plain, model)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(whole(model.state_dict()), dict(plain.state_dict()))


def gradients_that_are_sums(rank: int, p: int) -> None:
    """A norm's gradient is Partial until it is summed, once; a sum over another group is an error."""
    norm = RMSNorm(HIDDEN, dtype=F64)
    x = torch.full((1, HIDDEN), 1.0, dtype=F64)
    norm(x).backward(torch.full((1, HIDDEN), float(10**rank), dtype=F64))
    assert norm.weight.grad.placements[0].is_partial()
    before = local(norm.weight.grad).clone()
    for _ in range(2):
        reduce_replicated_grads(norm)
        assert norm.weight.grad.placements[0].is_replicate()
        assert torch.equal(local(norm.weight.grad).round(), torch.full((HIDDEN,), float("1" * p), dtype=F64))
    assert before.round()[0] == 10**rank
    # One more micro-batch adds to what is summed.
    norm(x).backward(torch.full((1, HIDDEN), float(10**rank), dtype=F64))
    assert torch.equal(
        norm.weight.grad.full_tensor().round(), torch.full((HIDDEN,), 2.0 * int("1" * p), dtype=F64)
    )
    alone = dist.new_group([rank], use_local_synchronization=True)
    norm.weight.grad = None
    norm(x).sum().backward()
    with pytest.raises(ValueError, match="group: expected gradients that are sums over the group"):
        reduce_replicated_grads(norm, group=alone)


_SCENARIOS = (state_dicts, parts_of_others, one_norm, norms_of_marks, fp8_norm, fsdp, gradients_that_are_sums)
test_states_of_layers = scenario_test([1, 2, 4], *_SCENARIOS)


def drawn(rank: int, p: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Whole parameters that follow from a seed, and what the generator gives next."""
    torch.manual_seed(11)
    of_init = RowParallelLinear(FFN, HIDDEN, init=lambda w: nn.init.normal_(w, std=0.02), dtype=F64)
    model = nn.ModuleDict({"everything": everything(p), "of init": of_init})
    return {n: q.clone() for n, q in whole(model.state_dict()).items()}, torch.rand(3)


def test_every_world_size_starts_from_the_same_model() -> None:
    """One seed on all ranks: the same model, and another part of it on every rank."""
    ((model, after),) = spawn(drawn, 1, backend="gloo")
    gate = model["everything.dense.mlp.gate_proj.weight"]
    assert gate.abs().max() <= HIDDEN**-0.5 and gate.std() > 0.1  # as nn.Linear draws
    w1, w2 = (model[f"everything.experts.ungated.{name}"] for name in ("w1", "w2"))
    assert abs(w1.std() * HIDDEN**0.5 - 1) < 0.2 and abs(w2.std() * FFN**0.5 - 1) < 0.2
    assert not torch.equal(w1[0], w1[1]), "experts differ"
    assert len(gate.unique()) == gate.numel(), "so do parts"
    for p in (2, 3, 4):
        for found, other in spawn(drawn, p, backend="gloo"):
            assert torch.equal(after, other)
            assert found.keys() == model.keys()
            for name, value in found.items():
                assert torch.equal(value.view_as(model[name]), model[name]), name
