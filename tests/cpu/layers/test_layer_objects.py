"""flux.layers as objects: what they refuse, how they are copied, stored, and built without memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import integers, scenario_test
from layer_models import EXPERTS, F64, FFN, HIDDEN, Model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flux._sharded import local
from flux.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    clip_grad_norm_,
    column_linear,
    mark_replicated,
    reduce_replicated_grads,
    row_linear,
)
from flux.moe import MoEMLP


def whole_state(seed: int) -> dict[str, torch.Tensor]:
    g, parameters = torch.Generator().manual_seed(seed), Model(device="meta").state_dict()
    return {n: torch.randint(-2, 3, value.shape, generator=g).double() for n, value in parameters.items()}


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(a.named_parameters(), b.named_parameters(), strict=True))
    return all(m == n and x.dtype == y.dtype and torch.equal(local(x), local(y)) for (m, x), (n, y) in pairs)


def side_by_side(mlp: ParallelMLP) -> bool:
    gate, up = local(mlp.gate_proj.weight), local(mlp.up_proj.weight)
    return up.data_ptr() == gate.data_ptr() + gate.nbytes


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def summed(norm: RMSNorm, model: nn.Module, rank: int, p: int) -> bool:
    """Whether reduce_replicated_grads takes the weight of a norm for one that all ranks hold."""
    norm.weight.grad = None
    norm(torch.full((1, HIDDEN), rank + 1.0, dtype=norm.weight.dtype)).backward(
        torch.full((1, HIDDEN), rank + 1.0, dtype=norm.weight.dtype)
    )
    before = local(norm.weight.grad).clone()
    reduce_replicated_grads(model)
    totals = [torch.empty_like(before) for _ in range(p)]
    dist.all_gather(totals, before)
    return torch.allclose(local(norm.weight.grad), torch.stack(totals).sum(0), rtol=1e-6)


def copies(rank: int, p: int) -> None:
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("tp",))
    x = torch.arange(4.0 * HIDDEN, dtype=F64).view(4, HIDDEN) % 7
    for group in (None, dist.group.WORLD, mesh, dist.group.WORLD.group_name):
        model = Model(group=group)
        expected, before = model(x), {k: v.clone() for k, v in model.state_dict().items()}
        for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved):
            other = make(model)
            assert same_parameters(other, model)
            assert repr(other) == repr(model)
            assert torch.equal(other(x), expected)
            assert side_by_side(other.mlp), "their gradients would be copied"
            assert other.norm.weight.sequence_parallel is True, "what Megatron reads"
            assert summed(other.norm, other, rank, p)
            # The copy loads whole tensors, and shares nothing with the original.
            other.load_state_dict(whole_state(1))
            model.load_state_dict(whole_state(1))
            assert same_parameters(other, model)
            model.load_state_dict(before)
            assert not same_parameters(other, model)


def built_without_memory(rank: int, p: int) -> None:
    torch.manual_seed(4)
    expected = Model()
    model = Model(device="meta")
    assert all(q.is_meta for q in model.parameters())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # nothing to do yet
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert same_parameters(model, expected)
    assert side_by_side(model.mlp)
    assert model.norm.weight.sequence_parallel is True
    assert summed(model.norm, model, rank, p)


def assigned(rank: int, p: int) -> None:
    """load_state_dict(assign=True) gives memory to a model on the meta device."""
    copied, model = Model(), Model(device="meta")
    whole = whole_state(2)
    copied.load_state_dict(whole)
    model.load_state_dict(whole, assign=True)
    assert same_parameters(model, copied)
    assert side_by_side(model.mlp)
    assert model.norm.weight.sequence_parallel is True
    assert summed(model.norm, model, rank, p)
    if p > 1:
        storages = {t.untyped_storage().data_ptr() for t in whole.values() if t.dim() > 1}
        kept = [n for n, q in model.named_parameters() if local(q).untyped_storage().data_ptr() in storages]
        assert kept == [], "slices would keep the whole tensors alive"


def norms_of_ranks(rank: int, p: int) -> None:
    norm = RMSNorm(HIDDEN)
    norm.weight = nn.Parameter(torch.ones(HIDDEN))  # as FSDP and weight tying do
    assert norm.weight.sequence_parallel is True
    norm._parameters["weight"] = nn.Parameter(torch.ones(HIDDEN))
    assert summed(norm, nn.Sequential(norm), rank, p)
    whole = RMSNorm(HIDDEN, sequence_parallel=False)
    assert whole.weight.sequence_parallel is False
    assert summed(whole, nn.Sequential(whole), rank, p) == (p == 1)
    marked = nn.LayerNorm(HIDDEN)
    marked.weight.sequence_parallel = True
    assert summed(marked, nn.Sequential(marked), rank, p)
    assert "sequence_parallel=True" in repr(norm)
    # eps None has torch's meaning.
    x = torch.tensor([[1e-5] * HIDDEN])
    for eps in (None, 1e-3):
        assert torch.equal(RMSNorm(HIDDEN, eps)(x), nn.RMSNorm(HIDDEN, eps)(x))


def marked_modules(rank: int, p: int) -> None:
    """A module's mark outlives its parameters, whatever torch replaces them by."""
    mesh = init_device_mesh("cpu", (1, p), mesh_dim_names=("dp", "tp"))

    class Scale(nn.LayerNorm):
        pass

    def marked(**options: Any) -> nn.Module:
        norm = Scale(HIDDEN, **options)
        mark_replicated(norm, "weight", "bias")
        return nn.Sequential(norm)

    sharded, empty = fully_shard(marked(), mesh=mesh["dp"]), marked(device="meta").to_empty(device="cpu")
    loaded = marked(device="meta")
    loaded.load_state_dict(marked().state_dict(), assign=True)
    for model in (
        sharded,
        empty,
        loaded,
        copy.deepcopy(marked()),
        fully_shard(copy.deepcopy(marked()), mesh=mesh["dp"]),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1)
        reduce_replicated_grads(model, group=mesh["tp"])
        for parameter in model.parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            assert (grad == p * (p + 1) // 2).all()


def without_partners(rank: int, p: int) -> None:
    """All ranks raise, where one of them would sum other gradients than the rest."""
    model = nn.Sequential(RMSNorm(HIDDEN), RMSNorm(HIDDEN))
    for norm in model[: 2 if rank else 1]:
        norm.weight.grad = torch.ones(HIDDEN)
    if p > 1:
        with pytest.raises(ValueError, match=r"the same gradients on all ranks, got 1\.weight on some only"):
            reduce_replicated_grads(model)
    lost = nn.LayerNorm(HIDDEN)
    lost.weight.sequence_parallel = True
    lost.weight = nn.Parameter(torch.ones(HIDDEN))
    with pytest.raises(ValueError, match="expected parameters that modules mark .* got none"):
        reduce_replicated_grads(nn.Sequential(lost))
    gone = nn.LayerNorm(HIDDEN)
    with pytest.raises(
        ValueError, match="mark_replicated: names: expected parameters of LayerNorm, got 'wei'"
    ):
        mark_replicated(gone, "wei")
    with pytest.raises(ValueError, match="module: expected a module without marks of its own, got RMSNorm"):
        mark_replicated(RMSNorm(8), "weight")
    mark_replicated(gone, "weight")
    gone.weight = None
    with pytest.raises(ValueError, match=r"'weight' of LayerNorm, which has no such parameter"):
        reduce_replicated_grads(nn.Sequential(gone))
    # Nothing to sum is no error where modules say so.
    reduce_replicated_grads(RMSNorm(HIDDEN, sequence_parallel=False))


def mixed_biases(rank: int, p: int) -> None:
    """One of two weights has a bias: outputs and gradients against plain torch, on integers."""
    rows, x, *weights = 2 * p, *(integers(size, size * p, 5, dtype=F64) for size in (2, 3, 4))
    for place in (0, 1):
        bias = integers(place, len(weights[place]), dtype=F64)
        grads = [integers(8 + place, rows, len(weight), dtype=F64) for weight in weights]
        plain = [t.clone().requires_grad_() for t in (x, *weights, bias)]
        outs = [plain[0] @ w.t() for w in plain[1:3]]
        outs[place] = outs[place] + plain[3]
        torch.autograd.backward(outs, grads)
        for sequence_parallel in (True, False):
            own = [w.chunk(p)[rank].clone().requires_grad_() for w in (*weights, bias)]
            biases: list[torch.Tensor | None] = [None, None]
            biases[place] = own[2]
            mine = (x.chunk(p)[rank] if sequence_parallel else x).clone().requires_grad_()
            results = column_linear(mine, own[:2], biases, sequence_parallel=sequence_parallel)
            for result, out in zip(results, outs, strict=True):
                assert torch.equal(result, out.detach().chunk(p, 1)[rank])
            torch.autograd.backward(results, [grad.chunk(p, 1)[rank] for grad in grads])
            whole = plain[0].grad
            assert torch.equal(mine.grad, whole.chunk(p)[rank] if sequence_parallel else whole)
            for part, tensor in zip(own, plain[1:], strict=True):
                assert torch.equal(part.grad, tensor.grad.chunk(p)[rank])
            nothing = column_linear(
                x[: rows // p], own[:2], [None, None], sequence_parallel=sequence_parallel
            )
            assert len(nothing) == 2


def wrong_calls(p: int) -> dict[type[Exception], list[tuple[str, Callable[[], Any]]]]:
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    return {
        ValueError: [
            (
                "ColumnParallelLinear: in_features: expected an integer of at least 0, got -8",
                lambda: ColumnParallelLinear(-8, 24),
            ),
            (
                "ColumnParallelLinear: dtype: expected bfloat16, float16, float32 or float64, got torch.int8",
                lambda: ColumnParallelLinear(8, 24, dtype=torch.int8),
            ),
            ("RowParallelLinear: device: .* got 'gpu'", lambda: RowParallelLinear(24, 8, device="gpu")),
            (
                "RowParallelLinear: init: expected a function that fills a tensor in place, got one that",
                lambda: RowParallelLinear(24, 8, init=torch.randn_like),
            ),
            (
                "ParallelMLP: ffn_size: expected (a multiple of the|an integer of at least 0)",
                lambda: ParallelMLP(8, 24 * p + 1) if p > 1 else ParallelMLP(8, -1),
            ),
            ("RMSNorm: hidden_size: expected an integer of at least 1, got 0", lambda: RMSNorm(0)),
            ("RMSNorm: eps: expected a number that is not negative, got -1e-06", lambda: RMSNorm(8, -1e-6)),
            ("RMSNorm: eps: .* got nan", lambda: RMSNorm(8, float("nan"))),
            (
                "ParallelMLP: activation: expected .* got 'relu'",
                lambda: ParallelMLP(8, 24, activation="relu"),
            ),
            ("out_features: expected an integer of 64 bits", lambda: ColumnParallelLinear(8, 2**63)),
            ("device: expected a torch.device", lambda: ColumnParallelLinear(8, 8, device=2**63)),
            ("RMSNorm: dtype: .* got torch.complex64", lambda: RMSNorm(8, dtype=torch.complex64)),
        ],
        TypeError: [
            (r"weight\[1\]: expected a tensor, got NoneType", lambda: column_linear(x, [w, None])),
            (
                "reduce_replicated_grads: module: expected a torch.nn.Module, got list",
                lambda: reduce_replicated_grads([w]),
            ),
            ("clip_grad_norm_: parameters: expected .* got int 3", lambda: clip_grad_norm_(3, 1.0)),
            ("parameters: expected tensors, got str 'w'", lambda: clip_grad_norm_([w, "w"], 1.0)),
            ("group: .* got Tensor", lambda: reduce_replicated_grads(nn.Linear(1, 1), group=w)),
            ("out_features: expected an integer, got bool True", lambda: ColumnParallelLinear(8, True)),
            ("out_features: expected an integer, got str '24'", lambda: ColumnParallelLinear(8, "24")),
            ("dtype: .* got str 'bfloat16'", lambda: RowParallelLinear(24, 8, dtype="bfloat16")),
            ("RowParallelLinear: device: .* got float 1.0", lambda: RowParallelLinear(24, 8, device=1.0)),
            ("RowParallelLinear: bias: .* got NoneType", lambda: RowParallelLinear(24, 8, None)),
            ("init: expected a function or None, got float", lambda: RowParallelLinear(24, 8, init=0.02)),
            ("RowParallelLinear: group: .* got int", lambda: RowParallelLinear(24, 8, group=1)),
            ("unexpected keyword argument 'gather'", lambda: ColumnParallelLinear(8, 24, gather=True)),
            ("ParallelMLP: hidden_size: expected an integer, got float 8.5", lambda: ParallelMLP(8.5, 24)),
            ("ParallelMLP: init: .* got str 'normal'", lambda: ParallelMLP(8, 24, init="normal")),
            ("unexpected keyword argument", lambda: ParallelMLP(8, 24, seqence_parallel=True)),
            ("ParallelMLP: group: .* got Tensor", lambda: ParallelMLP(8, 24, group=w)),
            ("RMSNorm: hidden_size: expected an integer, got list", lambda: RMSNorm([8])),
            ("RMSNorm: eps: expected a number or None, got str '1e-6'", lambda: RMSNorm(8, "1e-6")),
            ("RMSNorm: sequence_parallel: .* got int 1", lambda: RMSNorm(8, sequence_parallel=1)),
        ],
    }


def wrong_experts(p: int) -> dict[type[Exception], list[tuple[str, Callable[[], Any]]]]:
    layer = MoEMLP(6, FFN, EXPERTS, dtype=F64)
    x, ids, weights = torch.ones(5, 6, dtype=F64), torch.zeros(5, 2).long(), torch.ones(5, 2)
    return {
        ValueError: [
            ("MoEMLP: hidden_size: expected an integer of at least 0, got -6", lambda: MoEMLP(-6, 24, 4)),
            ("MoEMLP: num_experts: expected an integer of at least 1, got 0", lambda: MoEMLP(6, FFN, 0)),
            (
                "MoEMLP: ep_size: expected an integer of at least 1, got 0",
                lambda: MoEMLP(6, 24, 4, ep_size=0),
            ),
            (
                f"MoEMLP: ep_size: expected a divisor of the {p} ranks",
                lambda: MoEMLP(6, 24, 4, ep_size=p + 1),
            ),
            ("MoEMLP: activation: .* got 'relu'", lambda: MoEMLP(6, 24, 4, activation="relu")),
            ("MoEMLP: max_tokens: .* at least 0, got -1", lambda: MoEMLP(6, 24, 4, max_tokens=-1)),
            ("MoEMLP: dtype: .* got torch.int32", lambda: MoEMLP(6, 24, 4, dtype=torch.int32)),
            ("MoEMLP: device: .* got 'gpu'", lambda: MoEMLP(6, 24, 4, device="gpu")),
            ("MoEMLP: init: .* returns another", lambda: MoEMLP(6, 24, 4, init=torch.randn_like)),
            (r"MoEMLP: x: expected \[..., 6\], got shape \[5, 5\]", lambda: layer(x[:, :5], ids, weights)),
            ("MoEMLP: x: expected dtype torch.float64, that of the", lambda: layer(x.float(), ids, weights)),
            (r"MoEMLP: topk_ids: .* for 4 tokens, .* got shape \[5, 2\]", lambda: layer(x[:4], ids, weights)),
            (r"MoEMLP: topk_weights: .* for 5 tokens, .* shape \[2, 2\]", lambda: layer(x, ids, weights[:2])),
            ("MoEMLP: topk_ids: expected at least 2 dimensions, got 1", lambda: layer(x, ids[:, 0], weights)),
        ],
        TypeError: [
            ("MoEMLP: ffn_size: expected an integer, got float 8.0", lambda: MoEMLP(6, 8.0, 4)),
            ("MoEMLP: max_tokens: .* got float 1.5", lambda: MoEMLP(6, 24, 4, max_tokens=1.5)),
            ("MoEMLP: group: .* got int", lambda: MoEMLP(6, 24, 4, group=7)),
            ("MoEMLP: init: expected a function or None, got float", lambda: MoEMLP(6, 24, 4, init=1.0)),
            ("MoEMLP: topk_ids: expected a tensor, got NoneType", lambda: layer(x, None, weights)),
        ],
    }


def wrong_sizes(p: int) -> list[tuple[str, Callable[[], Any]]]:
    """Of several ranks, which do not divide them."""
    told = f"row_linear: x: expected dimension 0 divisible by the {p} ranks of the group, got shape"
    return [
        (told, lambda: row_linear(torch.ones(2 * p + 1, 6), torch.ones(3, 6))),
        (f"ColumnParallelLinear: out_features: .* {p} ranks.*got 25", lambda: ColumnParallelLinear(8, 25)),
        ("RowParallelLinear: in_features: .*got 25", lambda: RowParallelLinear(25, 8)),
        (f"MoEMLP: num_experts: .* multiple of ep_size = {p}, got", lambda: MoEMLP(6, 8, p + 1, ep_size=p)),
        (f"MoEMLP: ffn_size: expected a multiple of the {p} ranks", lambda: MoEMLP(6, FFN * p + 1, 4)),
    ]


def refused(rank: int, p: int) -> None:
    """One rank alone is told: whatever it exchanged with the others before would take its timeout."""
    calls = [*wrong_calls(p).items(), *wrong_experts(p).items()] if rank == 0 else []
    calls += [(ValueError, wrong_sizes(p))] if (rank, p > 1) == (0, True) else []
    for kind, (message, call) in ((kind, each) for kind, some in calls for each in some):
        with pytest.raises(kind, match=message):
            call()
    assert row_linear(torch.ones(2 * p, 6), torch.ones(3, 6)).shape == (2, 3)
    ids = torch.zeros(5, 2).long()
    assert MoEMLP(6, FFN, EXPERTS)(torch.ones(5, 6), ids, torch.ones(5, 2)).shape == (5, 6)


def initialised_in_place(rank: int, p: int) -> None:
    layer = ColumnParallelLinear(8, 24, sequence_parallel=False, device="meta", dtype=torch.bfloat16)
    told = f"in_features=8, out_features=24, bias=True, rank={rank} of {p}, sequence_parallel=False"
    assert layer.weight.is_meta and layer.extra_repr() == told
    for init in (
        nn.init.ones_,
        lambda w: w.fill_(1),
        lambda w: w.data.fill_(1),
        lambda w: None if w.fill_(1) is None else None,
    ):
        assert bool((RowParallelLinear(2 * p, 3, init=init).weight == 1).all())


def experts_represented_and_initialised(rank: int, p: int) -> None:
    layer = MoEMLP(HIDDEN, FFN, 2 * p, ep_size=p, activation="gelu", max_tokens=7)
    told = f"hidden_size={HIDDEN}, ffn_size={FFN}, num_experts={2 * p}, ep_size={p}, activation='gelu', "
    assert repr(layer) == f"MoEMLP({told}max_tokens=7, rank={rank} of {p})"
    seen: list[tuple[int, ...]] = []

    def init(whole: torch.Tensor) -> None:
        seen.append(tuple(whole.shape))
        whole.copy_(torch.arange(whole.numel()).view(whole.shape))

    layer = MoEMLP(HIDDEN, FFN, EXPERTS, dtype=F64, init=init)
    assert seen == [(2 * FFN, HIDDEN)] * EXPERTS + [(HIDDEN, FFN)] * EXPERTS
    columns = slice(rank * FFN // p, (rank + 1) * FFN // p)
    w1 = torch.arange(2.0 * FFN * HIDDEN, dtype=F64).view(2, FFN, HIDDEN)[:, columns]
    w2 = torch.arange(1.0 * FFN * HIDDEN, dtype=F64).view(HIDDEN, FFN)[:, columns]
    assert torch.equal(local(layer.w1), w1.expand(EXPERTS, -1, -1, -1))
    assert torch.equal(local(layer.w2), w2.expand(EXPERTS, -1, -1))


_SCENARIOS = (
    *(copies, built_without_memory, assigned, norms_of_ranks, marked_modules, without_partners),
    *(mixed_biases, refused, initialised_in_place, experts_represented_and_initialised),
)
test_layers_as_objects = scenario_test([1, 2, 3], *_SCENARIOS)
