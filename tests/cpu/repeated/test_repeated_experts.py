"""A layer of experts in vLLM: C++ repeats all of it, and what it puts on streams is four kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import Machine, fp8, scale, tensor

import flux
from flux.comm import cuda, repeat
from flux.comm.cuda import CudaWorkspace
from flux.integrations.vllm.experts import own_experts, summed_experts
from flux.measured.times import NO_FACTS, Tuning
from flux.moe import reference, routing
from flux.ops import grouped_gemm
from flux.ops.ways.all_gather import AWAITED_BY_SMS_BYTES, gather_plan
from flux.plan.gather import COPY_FROM_BYTES
from flux.plan.moe import BLOCK_M

pytest_plugins = ("repeated",)  # fixtures

EXPERTS, HIDDEN, INNER, TOP_K = 4, 4096, 16, 2
KERNELS = ["moe_route", "grouped_gemm", "moe_gemm_gather_rs", "all_gather"]
OWN_KERNELS = ["moe_route", "grouped_gemm", "grouped_gemm", "moe_combine"]


@pytest.fixture
def on_gpu(gemms: Any, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(cuda, "num_sms", lambda device: 132)
    workspace.tuning = NO_FACTS


# 2051: a last share with fewer tokens, and weights at addresses that are no multiples of 16.
@pytest.mark.parametrize("tokens", [2048, 2051])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_of_vllms_experts_is_repeated(rank: int, tokens: int, machine: Machine, on_gpu: None) -> None:
    w13, w2 = tensor(EXPERTS, 2 * INNER, HIDDEN), tensor(EXPERTS, HIDDEN, INNER)
    share = -(-tokens // 2)
    assert share * HIDDEN * 2 >= COPY_FROM_BYTES  # of which copy engines carry a gather that something hides
    for _ in range(3):
        machine.dispatched.clear(), machine.repeated.clear()
        x, ids = tensor(tokens, HIDDEN), tensor(tokens, TOP_K, dtype=torch.int32)
        weights = tensor(tokens, TOP_K, dtype=torch.float32)
        with torch.inference_mode():
            total = summed_experts(x, ids, weights, w13, w2, dist.group.WORLD.group_name, rank, 2)
        assert total.shape == x.shape
    assert not machine.dispatched
    assert [name.split("::_")[1] for name, _, _ in machine.repeated] == KERNELS
    assert [epoch for _, _, epoch in machine.repeated] == [0] * 4, "no copy engine"
    own = rank * share
    assert machine.repeated[0][1][:2] == [ids[own:].data_ptr(), weights[own:].data_ptr()], "read in place"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("shard", "copied", "copied_at_once"),
    [
        (COPY_FROM_BYTES - 8192, False, False),
        (COPY_FROM_BYTES, True, False),
        (AWAITED_BY_SMS_BYTES, True, False),
        (AWAITED_BY_SMS_BYTES + 8192, True, True),
    ],
)
def test_who_carries_rows_that_are_awaited(
    shard: int, copied: bool, copied_at_once: bool, at_once: bool, on_gpu: None, workspace: CudaWorkspace
) -> None:
    rows = torch.empty(shard // 8192, 4096, dtype=torch.bfloat16, device="meta")
    plan = gather_plan(workspace, rows, at_once=at_once)
    assert plan.by_flux and plan.copied == (copied_at_once if at_once else copied)
    assert plan.copied or plan.chunk_rows == 0


def test_a_forced_way_holds_for_rows_that_are_awaited(on_gpu: None, workspace: CudaWorkspace) -> None:
    workspace.tuning = Tuning(forced="torch")
    rows = torch.empty(AWAITED_BY_SMS_BYTES // 8192, 4096, dtype=torch.bfloat16, device="meta")
    assert not gather_plan(workspace, rows, at_once=True).by_flux


@pytest.fixture
def alone(gemms: Any) -> Any:
    """A group of this rank alone."""
    return dist.new_group([0])


@pytest.fixture
def computes(machine: Machine, on_gpu: None) -> None:
    """Kernels compute: with torch, on CPUs."""

    def route(*given: Any) -> None:
        ids, weights, arrays, all_weights, _, symm_buffer, rank, ep_size, experts, block_m = given
        assert symm_buffer == 0 and block_m == BLOCK_M
        layout = routing._layout(1, rank, ep_size, experts, ids.shape[1], all_weights.shape[1])
        all_ids = torch.full(all_weights.shape, -1, dtype=torch.int32)
        all_ids[0, : len(ids)], all_weights[0, : len(ids)] = ids.int(), weights
        for array, made in zip(arrays, routing.route_on_host(layout, all_ids, shapes(arrays)), strict=True):
            array.copy_(made)

    def multiply(*given: Any) -> None:
        x, weight, offsets, rows, number, out, *_ = given
        activation = next(name for name, each in grouped_gemm.NUMBERS.items() if each == number)
        out.copy_(grouped_gemm.reference(x, weight, offsets, rows, activation))

    def combine(products: torch.Tensor, positions: Any, weights: Any, out: torch.Tensor) -> None:
        out.copy_(reference.weighted_sum(products, positions, weights))

    kernels = {"_moe_route": route, "_grouped_gemm": multiply, "_moe_combine": combine}
    machine.computes = {f"flux::{name}": kernel for name, kernel in kernels.items()}


def shapes(arrays: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(array.shape) for array in arrays)


class Layer:
    """Small integers, of which all sums are exact in 16 bits, and the experts' results for them."""

    def __init__(
        self, seed: int, tokens: int = 12, dtype: torch.dtype = torch.bfloat16, **others: Any
    ) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.x = self.integers(0, 2, tokens, 32).to(dtype)
        self.x[:, 0] = 1
        # Gates are 32 or 0, and so is silu of them.
        gates = torch.zeros(EXPERTS, INNER // 2, 32)
        gates[:, :, 0] = self.integers(0, 2, EXPERTS, INNER // 2) * 32
        self.w13 = torch.cat((gates, self.integers(-1, 2, EXPERTS, INNER // 2, 32)), 1).to(dtype)
        self.w2 = (self.integers(-1, 2, EXPERTS, 64, INNER // 2) / 32).to(dtype)
        self.ids = self.integers(-1, EXPERTS, tokens, TOP_K).to(others.get("ids", torch.int32))
        self.weights = self.integers(1, 4, tokens, TOP_K).to(others.get("weights", torch.float32))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.draw).float()

    def expected(self) -> torch.Tensor:
        experts = (each.float() for each in (self.w13, self.w2))
        return reference.moe_mlp(self.x.float(), self.ids, self.weights, *experts)

    def run(self, group: Any) -> torch.Tensor:
        given = (self.x, self.ids, self.weights, self.w13, self.w2)
        return own_experts(*given, group.group_name)

    def gave(self, result: torch.Tensor) -> bool:
        expected = self.expected()
        assert result.dtype == self.x.dtype and expected.count_nonzero() > 100
        return torch.equal(result.float(), expected)

    def is_right(self, group: Any) -> bool:
        return self.gave(self.run(group))


def names(launches: list[Any]) -> list[str]:
    return [name.split("::_")[1] for name, *_ in launches]


def test_a_layer_s_own_part_is_repeated(machine: Machine, computes: None, alone: Any) -> None:
    made = []
    for seed in range(3):  # three layers: other weights, other tokens, other choices
        machine.dispatched.clear(), machine.repeated.clear()
        layer = Layer(seed)
        made.append((layer, layer.run(alone)))
        assert names(machine.repeated if seed else machine.dispatched) == OWN_KERNELS
        assert names(machine.dispatched if seed else machine.repeated) == []
        assert all(layer.gave(result) for layer, result in made), "a later call writes to no result"


@pytest.mark.parametrize(
    ("other", "anew"),
    [
        ({"tokens": 13}, OWN_KERNELS),
        ({"dtype": torch.float16}, OWN_KERNELS[1:]),
        ({"ids": torch.int64}, OWN_KERNELS[:1]),
        ({"weights": torch.bfloat16}, OWN_KERNELS[:1] * 2),  # routing reads a copy
    ],
    ids=str,
)
def test_another_own_part_is_not_taken_for_a_known_one(
    other: dict[str, Any], anew: list[str], machine: Machine, computes: None, alone: Any
) -> None:
    for seed in range(2):
        assert Layer(seed).is_right(alone)
    machine.dispatched.clear()
    for seed in range(2):
        assert Layer(seed, **other).is_right(alone)
        assert Layer(seed).is_right(alone)
    assert names(machine.dispatched) == anew


def test_an_own_part_that_cannot_be_repeated_now_is_right(
    machine: Machine, computes: None, alone: Any
) -> None:
    for seed in range(2):
        assert Layer(seed).is_right(alone)

    def is_made_anew(seed: int) -> bool:
        machine.dispatched.clear(), machine.repeated.clear()
        return Layer(seed).is_right(alone) and names(machine.dispatched) == OWN_KERNELS

    machine.is_ready = False  # such as while a CUDA graph is captured
    assert is_made_anew(2) and not machine.repeated
    machine.is_ready = True
    with torch.profiler.profile():
        assert is_made_anew(3) and not machine.repeated
    assert not is_made_anew(4) and names(machine.repeated) == OWN_KERNELS


def test_gradients_of_an_own_part_s_layer_are_not_lost(machine: Machine, computes: None, alone: Any) -> None:
    layer = Layer(0)
    for _ in range(2):
        assert layer.is_right(alone)
    layer.w13.requires_grad_(), layer.w2.requires_grad_()
    machine.dispatched.clear(), machine.repeated.clear()
    result = layer.run(alone)
    assert layer.gave(result) and not result.requires_grad and names(machine.repeated) == OWN_KERNELS
    made = flux.moe.route(layer.ids, layer.weights, EXPERTS, group=alone)
    rows = tensor(len(made.rows), INNER // 2)
    assert flux.moe.gemm_gather_rs(rows, layer.w2, made).requires_grad
    with torch.no_grad():
        assert not flux.moe.gemm_gather_rs(rows, layer.w2, made).requires_grad


@pytest.mark.parametrize("apart_first", [True, False])
def test_rows_and_weights_in_the_same_memory(
    apart_first: bool, machine: Machine, computes: None, alone: Any
) -> None:
    layer = Layer(0)
    made = flux.moe.route(layer.ids, layer.weights, EXPERTS, group=alone)
    rows = len(made.rows)
    memory = layer.integers(-2, 3, max(rows, EXPERTS * 64) * 8).bfloat16()
    together = memory[: rows * 8].view(rows, 8), memory[: EXPERTS * 64 * 8].view(EXPERTS, 64, 8)
    apart = together[0].clone(), layer.integers(-2, 3, EXPERTS, 64, 8).bfloat16()

    def is_right(x: torch.Tensor, weight: torch.Tensor) -> bool:
        product = grouped_gemm.reference(x, weight, made.offsets)
        expected = reference.weighted_sum(product, made.positions, made.weights)[0].bfloat16()
        return torch.equal(flux.moe.gemm_gather_rs(x, weight, made), expected)

    for _ in range(2):
        for given in (apart, together) if apart_first else (together, apart):
            assert is_right(*given)


def test_a_product_that_is_known_by_itself_is_known_in_a_layer(
    machine: Machine, computes: None, alone: Any
) -> None:
    layer = Layer(0)
    made = flux.moe.route(layer.ids, layer.weights, EXPERTS, group=alone)
    rows = tensor(len(made.rows), INNER // 2)
    for _ in range(2):
        flux.grouped_gemm(rows, layer.w2, made.offsets)
    for _ in range(2):
        flux.moe.gemm_gather_rs(rows, layer.w2, made)
    assert names(machine.repeated) == [OWN_KERNELS[2], *OWN_KERNELS[2:]]


def test_fewer_tokens_than_an_own_part_may_have(machine: Machine, computes: None, alone: Any) -> None:
    layer = Layer(0)
    for tokens in (12, 0, 12, 5, 12, 5):
        machine.repeated.clear()
        ids, weights = layer.ids[:tokens], layer.weights[:tokens]
        made = flux.moe.route(ids, weights, EXPERTS, group=alone, max_tokens=12)
        x = flux.grouped_gemm(layer.x, layer.w13, made.offsets, rows=made.rows, activation="swiglu")
        result = flux.moe.gemm_gather_rs(x, layer.w2, made)
        assert torch.equal(result.float(), layer.expected()[:tokens])
    assert names(machine.repeated) == OWN_KERNELS


def test_an_own_part_of_fp8_is_repeated(machine: Machine, on_gpu: None, alone: Any) -> None:
    hidden, inner = 512, 256
    w13, w2 = fp8(EXPERTS, 2 * inner, hidden), fp8(EXPERTS, hidden, inner)
    scales = scale(EXPERTS, 2 * inner // 128, hidden // 128), scale(EXPERTS, hidden // 128, inner // 128)
    for _ in range(3):
        machine.repeated.clear()
        x, ids = tensor(8, hidden), tensor(8, TOP_K, dtype=torch.int32)
        weights = tensor(8, TOP_K, dtype=torch.float32)
        result = own_experts(x, ids, weights, w13, w2, alone.group_name, scales)
        assert result.shape == x.shape and result.dtype == x.dtype
    route, *products, combine = OWN_KERNELS
    assert names(machine.repeated) == [route, "quantize", products[0], "quantize", products[1], combine]
    given = [tensor.data_ptr() for tensor in (w2, scales[1])]
    last = machine.repeated[-2][1]
    assert [last[1], last[-1]] == given and last[-2] == machine.repeated[-3][1][2]


def test_a_destroyed_group_of_one_rank_is_forgotten(machine: Machine, computes: None) -> None:
    first, second = dist.new_group([0]), dist.new_group([0])
    assert Layer(0).is_right(first) and repeat.of(first) is not None
    dist.destroy_process_group(first)
    assert repeat.of(first) is None
    assert Layer(0).is_right(second)
    assert first not in repeat.of_groups and second in repeat.of_groups
