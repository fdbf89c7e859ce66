"""Routing and the orders of both layers, enumerated: what the kernels will follow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from flux import _native
from flux.moe import reference
from flux.testing.moe_data import MoeCase, random_case

core = _native.core
NAMES = ("offsets", "counts", "rows", "positions", "incoming", "received", "sent", "firsts")


def make_layout(case: MoeCase, rank: int) -> Any:
    return core.MoeLayout(case.world_size, rank, case.ep_size, case.num_experts, case.top_k, case.max_tokens)


def host_route(layout: Any, block_m: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = [t.shape for t in reference.routing_tensors(layout, block_m, ids)]
    arrays = [torch.full(shape, 77, dtype=torch.int32) for shape in shapes]
    core.moe_route(layout, block_m, ids.data_ptr(), [array.data_ptr() for array in arrays])
    return dict(zip((*NAMES, "tiles", "num_tiles"), arrays, strict=True))


def entries(counts: torch.Tensor) -> dict[tuple[int, int], int]:
    """What is not zero, by index."""
    return {(e, s): int(counts[e, s]) for e, s in counts.nonzero().tolist()}


@pytest.mark.parametrize("number", range(60))
def test_routing_holds_each_pair_once_in_order(number: int) -> None:
    case = random_case(number)
    ids = case.all_choices()[0]
    for rank in range(case.world_size):
        layout = make_layout(case, rank)
        told = host_route(layout, 128, ids)
        for name, array, other in zip(
            told, told.values(), reference.routing_tensors(layout, 128, ids), strict=True
        ):
            assert torch.equal(array, other), name
        first = case.slice_of(rank) * case.local_experts
        expected = case.rows(rank).tolist()
        offsets = told["offsets"].tolist()
        assert offsets == [sum(e < first + i for e, _, _ in expected) for i in range(case.local_experts + 1)]
        counted = Counter((e - first, (rank - source) % case.world_size) for e, source, _ in expected)
        assert entries(told["counts"]) == counted
        # Row -> slot row -> token, and token -> row, lead to the same pairs.
        rows, incoming = told["rows"], told["incoming"]
        assert (rows[len(expected) :] == -1).all()
        for row, (expert, source, token) in enumerate(expected):
            where = int(rows[row])
            assert where // case.max_tokens == source
            assert int(incoming[source, where % case.max_tokens]) == token
            assert where % case.max_tokens < int(told["received"][source])
            j = ids[source, token].tolist().index(expert)
            assert int(told["positions"][source, token, j]) == row
        assert int((told["positions"] >= 0).sum()) == len(expected)


@pytest.mark.parametrize("number", range(20))
def test_what_is_sent_is_what_is_expected(number: int) -> None:
    """Sender and receiver number the tokens that travel by themselves; both must arrive at the same."""
    case = random_case(100 + number)
    ids = case.all_choices()[0]
    told = [host_route(make_layout(case, rank), 128, ids) for rank in range(case.world_size)]
    for sender in range(case.world_size):
        for receiver in range(case.world_size):
            to = case.slice_of(receiver)
            if sender == receiver:
                continue
            incoming, count = told[receiver]["incoming"][sender], int(told[receiver]["received"][sender])
            sent = told[sender]["sent"][to].tolist()
            tokens = {t for _, source, t in case.rows(receiver).tolist() if source == sender}
            assert {t for t, slot in enumerate(sent) if slot >= 0} == tokens
            numbered = torch.full_like(incoming, -1)
            for token in tokens:
                numbered[sent[token]] = token
            assert torch.equal(incoming, numbered)
            assert count == max(sent, default=-1) + 1
            if case.ep_size > 1:
                assert count == len(tokens), "only what is needed travels"
            firsts = told[sender]["firsts"][to].tolist()
            experts = [(ids[sender, t] - to * case.local_experts).tolist() for t in range(len(firsts))]
            local = [[e for e in those if 0 <= e < case.local_experts] for those in experts]
            assert firsts == [min(those, default=-1) for those in local]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (128, 8), (24, 16)])
@pytest.mark.parametrize("max_tokens", [1, 300, 2048])
def test_tokens_leave_once_and_in_the_order_of_experts(
    world_size: int, experts: int, top_k: int, max_tokens: int
) -> None:
    for ep_size in (1, world_size):
        for rank in range(world_size):
            layout = core.MoeLayout(world_size, rank, ep_size, experts * ep_size, top_k, max_tokens)
            order = core.MoeSendOrder(layout)
            ends = order.ends
            assert ends == sorted(set(ends)), "no share is empty by design"
            assert ends[-1] == experts, "every expert's tokens leave"
            assert (order.parts - 1) * order.part_tokens < max_tokens <= order.parts * order.part_tokens
            peers = [(rank + i) % world_size for i in range(1, world_size)]
            signals = [(s, part) for s in range(len(ends)) for part in range(order.parts)]
            assert order.units == [(s, part, peer) for s, part in signals for peer in peers]
            assert [order.signal(*signal) for signal in signals] == list(range(order.signals))
            if max_tokens * len(peers) >= 256:
                assert len(order.units) >= 32, "each of 16 CTAs that send has two"


def test_shares_are_about_as_large() -> None:
    ids = torch.rand(4096, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    for ep_size in (1, 4):
        order = core.MoeSendOrder(core.MoeLayout(4, 0, ep_size, 128, 8, 4096))
        here = torch.where(ids < 128 // ep_size, ids, 128).amin(1)
        sent = here.bincount(minlength=129).cumsum(0)[[end - 1 for end in order.ends]]
        sizes = sent.diff(prepend=torch.tensor([0]))
        assert len(sizes) == 8 and sizes.min() > 0.3 * sizes.max(), sizes


@pytest.mark.parametrize("block_m", [1, 64, 128])
@pytest.mark.parametrize("number", range(20))
def test_tiles_come_once_and_local_ones_first(number: int, block_m: int) -> None:
    case = random_case(200 + number)
    ids = case.all_choices()[0]
    rank = number % case.world_size
    layout = make_layout(case, rank)
    told = host_route(layout, block_m, ids)
    offsets, counts = told["offsets"].tolist(), told["counts"].tolist()
    early = core.MoeSendOrder(layout).early_experts
    assert 1 <= early <= case.local_experts
    assert int(told["num_tiles"]) <= layout.max_tiles(block_m)
    assert (told["tiles"][int(told["num_tiles"]) :] == 0).all()
    for n_tiles in (1, 3):
        order = core.moe_tiles(told["tiles"].data_ptr(), int(told["num_tiles"]), n_tiles)
        expected = {
            (e, m, n)
            for e in range(case.local_experts)
            for m in range(-(-(offsets[e + 1] - offsets[e]) // block_m))
            for n in range(n_tiles)
        }
        assert Counter(order) == Counter(expected)
        places = []
        for expert, m, _ in order:
            last_row = min((m + 1) * block_m, offsets[expert + 1] - offsets[expert]) - 1
            own = last_row < counts[expert][0]
            places.append((not (own and expert < early), expert))
        assert places == sorted(places), "the weight of an expert once, but for early tiles of own tokens"


def test_groups_of_tiles_share_columns_and_stay_small() -> None:
    case = MoeCase((5000,), 4, 4, 1, 1)
    layout = make_layout(case, 0)
    told = host_route(layout, 128, case.all_choices()[0])
    order = [(m, n) for _, m, n in core.moe_tiles(told["tiles"].data_ptr(), 40, 2)]
    assert order[:16] == [(m, 0) for m in range(16)]
    assert order[16:32] == [(m, 1) for m in range(16)]
    assert order[-8:] == [(m, 1) for m in range(32, 40)]


def test_a_token_that_names_an_expert_twice_has_one_row_there() -> None:
    ids = torch.tensor([[[1, 1, 0], [1, 2, 1]]], dtype=torch.int32)
    layout = core.MoeLayout(1, 0, 1, 2, 3, 2)
    told = host_route(layout, 128, ids)
    assert told["offsets"].tolist() == [0, 1, 3]
    assert told["rows"].tolist() == [0, 0, 1, -1]
    assert told["positions"].tolist() == [[[1, 1, 0], [2, -1, 2]]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("blocks", "chunks"), [(1, 1), (1, 4), (3, 1), (5, 3)])
def test_sums_come_after_the_sends_that_they_wait_for(world_size: int, blocks: int, chunks: int) -> None:
    for rank in range(world_size):
        units = core.moe_comm_units(world_size, rank, blocks, chunks)
        every = [(c, q, b) for c in range(chunks) for q in range(world_size) for b in range(blocks)]
        assert Counter(units) == Counter(every)
        place = {unit: i for i, unit in enumerate(units)}
        for chunk in range(chunks):
            sends = [place[chunk, q, b] for q in range(world_size) if q != rank for b in range(blocks)]
            sums = [place[chunk, rank, b] for b in range(blocks)]
            assert max(sends, default=-1) < min(sums), "what others wait for comes first"
            if chunk + 1 < chunks:
                later = [
                    place[chunk + 1, q, b] for q in range(world_size) if q != rank for b in range(blocks)
                ]
                assert max(later, default=-1) < min(sums), "a sum comes a chunk late, and seldom waits"
        peers = [q for c, q, b in units if c == 0 and q != rank]
        assert peers == [(rank + i) % world_size for i in range(1, world_size)] * blocks, "peers take turns"


@pytest.mark.parametrize("n", [8, 512, 2880, 4096, 7168])
def test_column_chunks_cover_all_columns(n: int) -> None:
    chunks = core.moe_column_chunks(n, 128)
    tiles = [tile for first, size in chunks for tile in range(first, first + size)]
    assert tiles == list(range(-(-n // 128)))
    assert len(chunks) <= 8, "x is read again for each"
    assert len(chunks) >= min(3, len(tiles)), "else nothing overlaps"


def test_communication_ctas_follow_the_work() -> None:
    def ctas(m: int, n: int, k: int, top_k: int, p: int, experts: int = 8) -> int:
        return core.moe_communication_ctas(m * top_k, m // p, experts, n, k, p, 100)

    assert ctas(8192, 4096, 384, 8, 4) > ctas(8192, 4096, 3584, 2, 4), "a small k has less to hide behind"
    assert ctas(8192, 4096, 192, 8, 8) > ctas(8192, 4096, 384, 8, 4)
    assert ctas(8192, 4096, 10**6, 1, 2) == 1
    few, many = ctas(8192, 4096, 384, 8, 4), ctas(8192, 4096, 384, 8, 4, 1024)
    assert many < 2 * few // 3, "reading weights takes longer"
    assert ctas(512, 4096, 768, 8, 2, 4096) == 12, "fewer SMs read weights as fast"
    assert ctas(8192, 4096, 1, 8, 4) == 50, "at most half of the SMs"
