"""flux.moe.MoEMLP as a module: how it is drawn, copied, stored and loaded, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import asked_at, scenario_test

from flux._sharded import local
from flux.moe import MoEMLP, reference
from flux.testing import spawn

H, WIDE, E, K = 6, 8, 4, 2
F64 = torch.float64


def layouts(p: int) -> Iterator[tuple[int, str | None]]:
    for ep_size in (1, 2, 4):
        if p % ep_size == 0:
            yield from ((ep_size, activation) for activation in ("swiglu", "silu", "gelu", None))


def make(ep_size: int, activation: str | None, **options: Any) -> MoEMLP:
    return MoEMLP(H, WIDE, E, ep_size=ep_size, activation=activation, dtype=F64, **options)


def whole_state(activation: str | None, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    gates = 2 if activation == "swiglu" else 1
    return {
        "w1": torch.randn(E, gates * WIDE, H, generator=g, dtype=F64),
        "w2": torch.randn(E, H, WIDE, generator=g, dtype=F64),
    }


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(40 + rank)
    weights, ids = torch.rand(5, E, generator=g).topk(K)
    return torch.randn(5, H, generator=g, dtype=F64), ids, weights


def whole_checkpoints(rank: int, p: int) -> None:
    """A layer that has loaded the whole weights computes what one rank with all experts computes, with any
    number of tokens on each rank, and the same bits again.
    """
    arguments = [each[: 5 - rank] for each in tokens(rank)]
    x, ids, weights = (each[None] for each in arguments)
    for ep_size, activation in layouts(p):
        whole = whole_state(activation)
        expected = reference.moe_mlp(*arguments, whole["w1"], whole["w2"], activation)[None]
        layer = make(ep_size, activation, max_tokens=5)
        assert torch.allclose(layer(x, ids, weights), expected, atol=1e-12) is False
        layer.load_state_dict(whole)
        result = layer(x, ids, weights)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(layer(x, ids, weights), result)
        own = {name: value.clone() for name, value in layer.state_dict().items()}
        gates = (2,) if activation == "swiglu" else ()
        parts, tp = 1 + len(gates), p // ep_size
        assert local(own["w1"]).shape == (E // ep_size, *gates, WIDE // tp, H)
        assert local(own["w2"]).shape == (E // ep_size, H, WIDE // tp)
        assert all(torch.equal(own[name].full_tensor().view_as(whole[name]), whole[name]) for name in own)
        for assign in (False, True):
            for state in (own, whole):
                other = make(ep_size, activation, device="meta" if assign else None)
                other.load_state_dict(state, assign=assign)
                assert all(
                    torch.equal(local(value), local(own[name])) for name, value in other.state_dict().items()
                )
                assert local(other.w1).is_contiguous() and local(other.w2).is_contiguous()
        with pytest.raises(RuntimeError, match="size mismatch for w1"):
            layer.load_state_dict({**whole, "w1": torch.zeros(E, 3 * parts * WIDE, H)})


def represented(rank: int, p: int) -> None:
    layer = make(p, "gelu", max_tokens=7)
    assert repr(layer) == (
        f"MoEMLP(hidden_size={H}, ffn_size={WIDE}, num_experts={E}, ep_size={p}, activation='gelu', "
        f"max_tokens=7, rank={rank} of {p})"
    )


def initialised(rank: int, p: int) -> None:
    seen: list[tuple[int, ...]] = []

    def init(whole: torch.Tensor) -> None:
        seen.append(tuple(whole.shape))
        whole.copy_(torch.arange(whole.numel()).view(whole.shape))

    layer = make(1, "swiglu", init=init)
    assert seen == [(2 * WIDE, H)] * E + [(H, WIDE)] * E
    columns = slice(rank * WIDE // p, (rank + 1) * WIDE // p)
    w1 = torch.arange(2.0 * WIDE * H, dtype=F64).view(2, WIDE, H)[:, columns]
    w2 = torch.arange(1.0 * WIDE * H, dtype=F64).view(H, WIDE)[:, columns]
    assert torch.equal(local(layer.w1), w1.expand(E, -1, -1, -1))
    assert torch.equal(local(layer.w2), w2.expand(E, -1, -1))


@asked_at(2)
def compiled(rank: int, p: int) -> None:
    layer, arguments = make(1, "swiglu", group=dist.group.WORLD), tokens(rank)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(function(*arguments), layer(*arguments))


def wrong_calls(p: int) -> dict[type[Exception], list[tuple[str, Callable[[], Any]]]]:
    layer = make(1, "swiglu")
    x, ids, weights = tokens(0)
    return {
        ValueError: [
            ("hidden_size: expected an integer of at least 0, got -6", lambda: MoEMLP(-6, 8, 4)),
            ("num_experts: expected an integer of at least 1, got 0", lambda: MoEMLP(6, 8, 0)),
            ("ep_size: expected an integer of at least 1, got 0", lambda: MoEMLP(6, 8, 4, ep_size=0)),
            (f"ep_size: expected a divisor of the {p} ranks", lambda: MoEMLP(6, 8, 4, ep_size=p + 1)),
            ("activation: .* got 'relu'", lambda: MoEMLP(6, 8, 4, activation="relu")),
            ("max_tokens: .* at least 0, got -1", lambda: MoEMLP(6, 8, 4, max_tokens=-1)),
            ("dtype: .* got torch.int32", lambda: MoEMLP(6, 8, 4, dtype=torch.int32)),
            ("device: .* got 'gpu'", lambda: MoEMLP(6, 8, 4, device="gpu")),
            ("init: .* returns another", lambda: MoEMLP(6, 8, 4, init=torch.randn_like)),
            (r"x: expected \[..., 6\], got shape \[5, 5\]", lambda: layer(x[:, :5], ids, weights)),
            ("x: expected dtype torch.float64, that of the", lambda: layer(x.float(), ids, weights)),
            (r"topk_ids: .* for 4 tokens, .* got shape \[5, 2\]", lambda: layer(x[:4], ids, weights)),
            (r"topk_weights: .* for 5 tokens, .* shape \[2, 2\]", lambda: layer(x, ids, weights[:2])),
            ("topk_ids: expected at least 2 dimensions, got 1", lambda: layer(x, ids[:, 0], weights)),
        ],
        TypeError: [
            ("ffn_size: expected an integer, got float 8.0", lambda: MoEMLP(6, 8.0, 4)),
            ("max_tokens: .* got float 1.5", lambda: MoEMLP(6, 8, 4, max_tokens=1.5)),
            ("group: .* got int", lambda: MoEMLP(6, 8, 4, group=7)),
            ("init: expected a function or None, got float", lambda: MoEMLP(6, 8, 4, init=1.0)),
            ("topk_ids: expected a tensor, got NoneType", lambda: layer(x, None, weights)),
        ],
    }


def refused(rank: int, p: int) -> None:
    """One rank alone is told: whatever it exchanged with the others before would take its timeout."""
    if rank == 0:
        for kind, calls in wrong_calls(p).items():
            for message, call in calls:
                with pytest.raises(kind, match=f"MoEMLP: {message}"):
                    call()
        if p > 1:
            with pytest.raises(ValueError, match=f"MoEMLP: num_experts: .* multiple of ep_size = {p}, got"):
                MoEMLP(6, 8, p + 1, ep_size=p)
            with pytest.raises(ValueError, match=f"MoEMLP: ffn_size: expected a multiple of the {p} ranks"):
                MoEMLP(6, 8 * p + 1, 4)
    make(1, "swiglu")(*tokens(rank))


_SCENARIOS = (whole_checkpoints, represented, initialised, compiled, refused)
test_moe_mlp = scenario_test([1, 2, 4], *_SCENARIOS)


Drawn = dict[tuple[int, str | None], tuple[torch.Tensor, torch.Tensor]]


def draw(rank: int, world_size: int) -> tuple[Drawn, torch.Tensor]:
    """Parameters of this rank in every layout, and what its generator gives next."""
    torch.manual_seed(11)
    drawn: Drawn = {}
    for ep_size, activation in layouts(world_size):
        torch.manual_seed(12)
        layer = make(ep_size, activation)
        drawn[ep_size, activation] = local(layer.w1).flatten(1, -2), local(layer.w2)
    return drawn, torch.rand(3)


def test_every_world_size_starts_from_the_same_layer() -> None:
    """One seed on all ranks: the same layer, and another part of it on every rank."""
    ((whole, after),) = spawn(draw, 1, backend="gloo")
    w1, w2 = whole[1, "gelu"]
    assert abs(w1.std() * H**0.5 - 1) < 0.2 and abs(w2.std() * WIDE**0.5 - 1) < 0.2
    assert not torch.equal(w1[0], w1[1]), "experts differ"
    for p in (2, 4):
        answers = spawn(draw, p, backend="gloo")
        assert all(torch.equal(after, other) for _, other in answers)
        for (ep_size, activation), _ in answers[0][0].items():
            tp, parts = p // ep_size, 2 if activation == "swiglu" else 1
            for rank, (drawn, _) in enumerate(answers):
                w1, w2 = whole[1, activation]
                experts = slice(rank // tp * E // ep_size, (rank // tp + 1) * E // ep_size)
                columns = slice(rank % tp * WIDE // tp, (rank % tp + 1) * WIDE // tp)
                own1, own2 = drawn[ep_size, activation]
                assert torch.equal(own1, w1.view(E, parts, WIDE, H)[experts, :, columns].flatten(1, 2))
                assert torch.equal(own2, w2[experts, :, columns])
            assert not torch.equal(
                answers[0][0][ep_size, activation][0], answers[1][0][ep_size, activation][0]
            )
