"""One rank's part of the experts, as vLLM's adapter calls it: exact where C++ repeats it, and in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux.integrations.vllm.experts import own_experts
from flux.moe import reference, routing, rows
from flux.ops import grouped_gemm

EXPERTS, HIDDEN, COLUMNS, TOP_K = 8, 264, 72, 4


@pytest.fixture
def alone() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def layer(seed: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, experts, their weights, w13 and w2, on the CPU. All products are exact in 16 bits, because gates are
    32 or 0, and so is silu of them; all sums in fp32.
    """
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=g).float()

    x, gates = integers(0, 1, tokens, HIDDEN), torch.zeros(EXPERTS, COLUMNS, HIDDEN)
    x[:, 0], gates[:, :, 0] = 1, 32 * integers(0, 1, EXPERTS, COLUMNS)
    w13 = torch.cat((gates, integers(-1, 1, EXPERTS, COLUMNS, HIDDEN)), 1)
    w2 = integers(-1, 1, EXPERTS, HIDDEN, COLUMNS) * (integers(0, 3, EXPERTS, HIDDEN, COLUMNS) == 0) / 32
    ids, weights = integers(-1, EXPERTS - 1, tokens, TOP_K).int(), integers(1, 3, tokens, TOP_K)
    return [x.to(dtype), ids, weights, w13.to(dtype), w2.to(dtype)]


def expected(x: torch.Tensor, ids: Any, weights: Any, *experts: torch.Tensor) -> torch.Tensor:
    made = reference.moe_mlp(x.float(), ids, weights, *(each.float() for each in experts))
    return made.to(x.dtype)


def on_gpu(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.cuda() for each in given]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 300, 2049])
def test_layers_are_repeated(
    tokens: int, dtype: torch.dtype, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise AssertionError("launched by Python")

    kept = []
    for seed in range(4):
        given = layer(seed, tokens, dtype)
        kept.append((own_experts(*on_gpu(given), alone), expected(*given)))
        for module, name in ((routing, "_kernel"), (grouped_gemm, "_kernel"), (rows, "_combine_kernel")):
            monkeypatch.setattr(module, name, refuses)
    for result, right in kept:
        assert torch.equal(result.cpu(), right)


def test_a_graph_is_captured_between_known_calls(alone: str) -> None:
    tokens = 300
    held = on_gpu(layer(0, tokens, torch.bfloat16))
    for _ in range(2):
        own_experts(*held, alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = own_experts(*held, alone)
    for seed in range(1, 4):
        given = layer(seed, tokens, torch.bfloat16)
        for there, new in zip(held, given, strict=True):
            there.copy_(new)
        graph.replay()
        assert torch.equal(replayed.cpu(), expected(*given))
        assert torch.equal(own_experts(*held, alone).cpu(), expected(*given))
