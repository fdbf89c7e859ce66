"""The grouped GEMM kernel on one GPU: tile shapes, uneven and empty experts, rows by index, activations."""

from __future__ import annotations

import pytest
import torch

import flux
from flux.ops import grouped_gemm as grouped

DTYPES = [torch.bfloat16, torch.float16]
CONFIGS = [0, 3, 5, 9]
# Rows of each expert: none, one, a tile and one more, many.
COUNTS = [[0, 1, 129, 0, 300, 128], [5], [0, 0, 64], [700, 3]]


def inputs(
    counts: list[int], n: int, k: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, offsets and rows: small integers whose products are exact, a shuffled order of rows."""
    g = torch.Generator("cuda").manual_seed(seed)
    total, experts = sum(counts), len(counts)
    x = torch.zeros(total + 7, k, device="cuda")
    # Three entries of each row: no product exceeds 3 * 4 in absolute value.
    columns = torch.randint(k, (total + 7, 3), generator=g, device="cuda")
    x.scatter_(1, columns, torch.randint(1, 3, columns.shape, generator=g, device="cuda").float())
    weight = torch.randint(-2, 3, (experts, n, k), generator=g, device="cuda")
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    rows = torch.randperm(total + 7, generator=g, device="cuda")[:total].int()
    return x.to(dtype), weight.to(dtype), offsets, rows


def laid_out(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights [E, N, K] as others store them; between them is NaN, which nothing may be multiplied by."""
    experts, n, k = weight.shape

    def view(shape: tuple[int, int, int], transposed: bool) -> torch.Tensor:
        room = torch.full(shape, float("nan"), dtype=weight.dtype, device="cuda")
        found = room.transpose(1, 2)[:, :n, :k] if transposed else room[:, :n, :k]
        return found.copy_(weight)

    return {
        "[N, K]": weight,
        "[N, K], apart": view((experts, n + 24, k + 8), False),
        "[K, N]": view((experts, k, n), True),
        "[K, N], apart": view((experts, k + 24, n + 8), True),
    }


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_read_where_they_lie(config: int, dtype: torch.dtype) -> None:
    for seed, (n, k) in enumerate([(8, 8), (200, 72), (520, 264), (136, 1608)]):
        x, weight, offsets, rows = inputs([0, 1, 129, 300], n, k, dtype, seed)
        expected = grouped.reference(x, weight, offsets, rows)
        for name, each in laid_out(weight).items():
            assert grouped.readable_weight(each, None, None) is each
            out = torch.full_like(expected, 7)
            grouped.launch(grouped.Grouped(x, each, offsets, rows), out, config)
            assert torch.equal(out, expected), (name, n, k)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_shape(config: int, dtype: torch.dtype) -> None:
    for seed, counts in enumerate(COUNTS):
        # The last has rows long enough that the next tile is asked for in the middle of one.
        for n, k in [(8, 8), (200, 72), (520, 264), (136, 1608)]:
            x, weight, offsets, rows = inputs(counts, n, k, dtype, seed)
            for chosen in (rows, None):
                source = x if chosen is not None else x[: sum(counts)]
                out = torch.full((sum(counts) + 3, n), 7, dtype=dtype, device="cuda")
                grouped.launch(grouped.Grouped(source, weight, offsets, chosen), out[: sum(counts)], config)
                expected = grouped.reference(source, weight, offsets, chosen)
                assert torch.equal(out[: sum(counts)], expected), (counts, n, k, chosen is None)
                assert (out[sum(counts) :] == 7).all(), "written behind the last row"


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_activations(activation: str) -> None:
    x, weight, offsets, rows = inputs([40, 0, 200], 272, 136, torch.bfloat16, 1)
    out = flux.grouped_gemm(x, weight, offsets, rows=rows, activation=activation)
    expected = grouped.reference(x, weight, offsets, rows, activation)
    # The products are exact; one rounding, and what the fast exponential loses.
    assert out.shape == expected.shape
    limit = 1.01 * torch.finfo(torch.bfloat16).eps * expected.float().abs() + 1e-6
    assert ((out.float() - expected.float()).abs() <= limit).all()


@pytest.mark.parametrize("num_sms", [1, 5, 0])
def test_any_number_of_sms(num_sms: int) -> None:
    x, weight, offsets, rows = inputs([260, 130, 0, 9], 1032, 200, torch.bfloat16, 2)
    out = torch.empty(399, 1032, dtype=torch.bfloat16, device="cuda")
    grouped.launch(grouped.Grouped(x, weight, offsets, rows), out, -1, num_sms)
    assert torch.equal(out, grouped.reference(x, weight, offsets, rows))


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_of_the_tile_before_do_not_matter(config: int) -> None:
    """One CTA computes a full tile of NaNs, then a tile of three rows whose other rows nobody loads."""
    x, weight, offsets, rows = inputs([128, 3], 264, 1608, torch.bfloat16, 4)
    x[rows[:128].long()] = float("nan")
    out = torch.empty(131, 264, dtype=torch.bfloat16, device="cuda")
    grouped.launch(grouped.Grouped(x, weight, offsets, rows), out, config, 1)
    assert out[:128].isnan().all()
    assert torch.equal(out[128:], grouped.reference(x, weight, offsets, rows)[128:])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, indexed: bool) -> None:
    """Exact, as on the CPU; gradients of rows that no expert has are zero, whatever comes for them."""
    x, weight, offsets, rows = inputs([0, 1, 129, 40], 264, 136, dtype, 5)
    source = x if indexed else torch.cat([x[:170], x.new_full((3, 136), float("nan"))])
    answers = []
    for device in ("cuda", "cpu"):
        leaves = [each.detach().to(device).requires_grad_() for each in (source, weight)]
        given = rows.to(device) if indexed else None
        result = flux.grouped_gemm(*leaves, offsets.to(device), rows=given)
        grad = (torch.arange(result.numel(), device=device).view(result.shape) % 3 - 1).to(dtype)
        grad[170:] = float("nan")
        result.backward(grad)
        answers.append([leaf.grad.cpu() for leaf in leaves])
    for ours, right in zip(*answers, strict=True):
        assert torch.equal(ours, right) and ours.isfinite().all()


def test_replays_in_a_graph_with_other_offsets() -> None:
    x, weight, offsets, rows = inputs([260, 130, 0, 9], 264, 200, torch.bfloat16, 3)
    flux.grouped_gemm(x, weight, offsets, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flux.grouped_gemm(x, weight, offsets, rows=rows)
    for counts in ([0, 0, 399, 0], [100, 100, 100, 99], [1, 2, 3, 4]):
        offsets.copy_(torch.tensor([0, *counts], device="cuda").cumsum(0))
        graph.replay()
        used = sum(counts)
        assert torch.equal(out[:used], grouped.reference(x, weight, offsets, rows)[:used])
