"""Routings that C++ repeats (flux.comm.repeat): what the kernel is given, and what memory results share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import Machine, tensor

from flux import moe
from flux._native import core
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.moe import routing

pytest_plugins = ("repeated",)  # fixtures


@pytest.mark.parametrize(
    ("ranks", "top_k", "tokens"), [(1, 2, 99 * 1024), (2, 8, 49 * 1024), (8, 8, 12 * 1024), (8, 16, 12 * 512)]
)
def test_routing_leaves_sms_to_kernels_that_wait_for_peers(ranks: int, top_k: int, tokens: int) -> None:
    for more, fused in ((0, True), (1, False)):
        layout = core.MoeLayout(ranks, 0, 1, 8, top_k, tokens + more)
        plan = routing._make_plan(layout, None, 132, "stores")
        assert plan.by_flux == fused == (layout.route_ctas <= 132 - 32)
        assert fused or f"{tokens + 1} tokens on each rank, more than the GPU can count" in plan.reason


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors say that they are on one, so that the kernel routes."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


def test_arrays_of_a_known_routing_share_one_block(
    machine: Machine, workspace: CudaWorkspace, on_gpu: None
) -> None:
    """Which no other routing has, and in which none of them reaches into another."""
    ids, weights = tensor(8, 2, dtype=torch.int64), tensor(8, 2, dtype=torch.float32)
    first, *known_ones = [moe.route(ids, weights, 4) for _ in range(3)]
    assert len(machine.repeated) == 2
    blocks = [{t.untyped_storage().data_ptr() for t in routing[:10]} for routing in known_ones]
    assert [len(block) for block in blocks] == [1, 1] and blocks[0] != blocks[1]
    for number, found in enumerate(known_ones):
        assert all(t.is_contiguous() and not t._is_view() for t in found[:10])
        assert all(t.data_ptr() % 128 == found.offsets.data_ptr() % 128 for t in found[:10])
        for value, array in enumerate(found[:10]):
            array.fill_(10 * number + value)
    for number, found in enumerate(known_ones):
        for value, (array, like) in enumerate(zip(found[:10], first[:10], strict=True)):
            assert array.shape == like.shape and (array == 10 * number + value).all()
    # Scratch memory follows the arrays, and ends with the block.
    *_, scratch = machine.repeated[-1][1]
    block, layout = known_ones[-1].offsets.untyped_storage(), core.MoeLayout(2, 0, 1, 4, 2, 8)
    end = max(t.data_ptr() + t.nbytes for t in known_ones[-1][:10])
    assert scratch is not None and end <= scratch
    assert scratch + 4 * layout.route_scratch_words <= block.data_ptr() + block.nbytes()


def test_a_routing_below_the_dispatcher_shares_no_memory(
    machine: Machine, workspace: CudaWorkspace, on_gpu: None
) -> None:
    """An operator's results may not alias."""
    ids, weights = tensor(8, 2, dtype=torch.int32), tensor(8, 2, dtype=torch.float32)
    moe.route(ids, weights, 4)
    name: Any = dist.group.WORLD.group_name
    machine.repeated.clear()
    arrays = torch.ops.flux.moe_route.default(ids, weights, 4, 1, 8, name, None)
    assert len(machine.repeated) == 1
    assert len({array.untyped_storage().data_ptr() for array in arrays}) == 11


@pytest.mark.parametrize(("offset", "fits"), [(0, True), (4, True), (5, False), (-1, False)])
def test_a_part_of_a_block_lies_within_it(offset: int, fits: bool, workspace: CudaWorkspace) -> None:
    fresh = [((2, 2), None, 1, None, ((2, 1), offset))]
    given = (repeat.operator(), tensor(8))
    for block in ((8,), None):
        if fits and block is not None:
            assert workspace.known.remember(given, fresh, [], [-1], True, (block, None, 1, None, None))
        else:
            with pytest.raises(ValueError, match="offset" if block else "block"):
                workspace.known.remember(given, fresh, [], [-1], True, block and (block, None, 1, None, None))


def test_a_torch_without_quick_views_makes_tensors(
    machine: Machine, workspace: CudaWorkspace, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, weights = tensor(8, 2, dtype=torch.int32), tensor(8, 2, dtype=torch.float32)
    monkeypatch.delattr(torch._C._dynamo.guards, "_reinterpret_tensor")
    repeat._torch.cache_clear()
    workspace.known = repeat.of_groups[workspace.group] = repeat.make(
        workspace.turn, workspace._order, workspace._error_address
    )
    found = [moe.route(ids, weights, 4) for _ in range(2)][1]
    repeat._torch.cache_clear()
    assert len(machine.repeated) == 1
    assert len({array.untyped_storage().data_ptr() for array in found[:11]}) == 11
