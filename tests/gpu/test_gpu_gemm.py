"""The GEMM kernel on one GPU: every tile shape and cluster, ragged sizes, strides, and nothing written beside
the result.
"""

from __future__ import annotations

import pytest
import torch

import flux
from flux._native import core
from flux.ops import gemm
from flux.testing import GemmRsCase, tolerance

CLUSTERS = (1, 2, 3)
KEEPING = [tile.id for tile in core.tile_configs() if tile.supports_keeping]
DTYPES = [torch.bfloat16, torch.float16]
# Ragged in every direction; K shorter than one block, longer than a ring of stages, and not a multiple of a
# block.
SHAPES = [(1, 8, 8), (127, 200, 72), (128, 256, 64), (129, 264, 520), (1000, 1032, 1096), (2048, 2048, 4096)]


def assert_exact(case: GemmRsCase, choice: int, num_sms: int = 0) -> None:
    """Also that nothing is written beside the result, which lies inside a larger buffer of sevens."""
    x, weight, bias = case.inputs(0, "cuda")
    margin, size = 4096, case.m * case.n
    whole = torch.full((size + 2 * margin,), 7, dtype=case.dtype, device="cuda")
    out = whole[margin : margin + size].view(case.m, case.n)
    torch.ops.flux._gemm(x, weight, bias, out, case.transpose_weight, choice, num_sms)
    assert torch.equal(out, case.expected(0, "cuda")), (case, choice)
    assert (whole[:margin] == 7).all() and (whole[-margin:] == 7).all(), "written beside the result"


def has_kernel(config: int, transpose_weight: bool) -> bool:
    """Not every tile shape is compiled for [K, N] weights."""
    swaps = config >= core.FIRST_SWAP_AB
    return not transpose_weight or swaps or core.tile_configs()[config].supports_transposed_weight


SPLITTING = [tile.id for tile in core.tile_configs() if tile.supports_split]
SWAPS = range(core.FIRST_SWAP_AB, core.FIRST_SWAP_AB + core.NUM_SWAP_AB)
PAIRS = [config for config in SWAPS if core.swap_ab_in_pairs(config - core.FIRST_SWAP_AB)]
# The last has more clusters than there are SMs for.
SPLIT_SHAPES = [(1, 8, 200), (129, 520, 1032), (512, 2560, 8192), (2048, 4104, 256)]
SWAP_SHAPES = [(1, 8, 512), (3, 136, 520), (16, 2048, 4096), (300, 1032, 1096), (1, 8, 1024)]
# A tile shape with its clusters, and what it multiplies. CTAs of a cluster of swap-AB tiles split K, or share
# the weight.
TILES = {
    **{f"{tile}": ([tile | c << 8 for c in CLUSTERS], SHAPES) for tile in KEEPING},
    **{f"{tile}, split": ([tile | c << 8 for c in (4, 5)], SPLIT_SHAPES) for tile in SPLITTING},
    **{f"{tile}": ([tile | c << 8 | 1 << 16 for c in (1, 2, 4, 8)], SWAP_SHAPES) for tile in SWAPS},
    **{f"{tile}, in pairs": ([tile | 1 << 8 | 2 << 16], SWAP_SHAPES) for tile in PAIRS},
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("transpose_weight", [False, True])
def test_every_tile_shape_and_cluster(tile: str, transpose_weight: bool) -> None:
    choices, shapes = TILES[tile]
    config = choices[0] & 0xFF
    if not has_kernel(config, transpose_weight):
        pytest.skip("this tile shape is not compiled for [K, N] weights")
    for i, choice in enumerate(choices):
        for number, (m, n, k) in enumerate(shapes):
            swaps = config >= core.FIRST_SWAP_AB
            if swaps and choice >> 8 & 0xFF > core.swap_ab_stage_blocks(config - core.FIRST_SWAP_AB, k):
                continue
            dtype = DTYPES[(number + i) % 2]
            assert_exact(GemmRsCase(m, n, k, 1, dtype, transpose_weight, number % 2 == 0, number), choice)


@pytest.mark.parametrize("transpose_weight", [False, True])
def test_nothing_that_stages_held_before_gets_into_a_result(transpose_weight: bool) -> None:
    # Rows and columns beyond the edge are not fetched, and computed from what the last call had there: NaN.
    n = 8192
    nan = torch.full((n, 520), torch.nan, dtype=torch.bfloat16, device="cuda")
    nan_weight = nan.t().contiguous() if transpose_weight else nan
    spoilt = torch.empty(384, n, dtype=nan.dtype, device="cuda")
    choices = [tile | cluster << 8 for tile in KEEPING for cluster in CLUSTERS]
    choices += [tile | split << 8 for tile in SWAPS for split in (1, 2)]
    choices += [tile | 1 << 8 | 2 << 16 for tile in PAIRS]
    for choice in choices:
        if not has_kernel(choice & 0xFF, transpose_weight):
            continue
        for m, columns in ((130, 1032), (150, 200), (260, 1048)):
            torch.ops.flux._gemm(nan[:384], nan_weight, None, spoilt, transpose_weight, choice, 0)
            assert_exact(GemmRsCase(m, columns, 520, 1, torch.bfloat16, transpose_weight, seed=m), choice)


def test_a_bias_and_a_row_that_lie_where_the_kernels_cannot_read_them() -> None:
    case = GemmRsCase(1, 136, 72, 1, bias=True)
    x, weight, bias = case.inputs(0, "cuda")
    assert bias is not None
    flat = torch.zeros(1 + bias.numel(), dtype=bias.dtype, device="cuda")
    flat[1:] = bias
    wide = torch.zeros(10, 73, dtype=x.dtype, device="cuda")
    wide[:1, :72] = x
    odd_row = wide[:1, :72]
    assert odd_row.is_contiguous() and odd_row.stride(0) == 73, "torch ignores the stride of one row"
    assert torch.equal(flux.gemm(odd_row, weight, flat[1:]), case.expected(0, "cuda"))


@pytest.mark.parametrize("num_sms", [2, 6, 64, 0])
def test_any_number_of_sms(num_sms: int) -> None:
    assert_exact(GemmRsCase(700, 904, 256, 1), -1, num_sms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_random_data_within_derived_tolerance(dtype: torch.dtype, transpose_weight: bool, bias: bool) -> None:
    for m, n, k in SHAPES:
        g = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=g, device="cuda").to(dtype)
        weight = torch.randn(*((k, n) if transpose_weight else (n, k)), generator=g, device="cuda").to(dtype)
        b = torch.randn(n, generator=g, device="cuda").to(dtype) if bias else None
        result = flux.gemm(x, weight, b, transpose_weight=transpose_weight)
        exact = x.double() @ (weight if transpose_weight else weight.t()).double()
        if b is not None:
            exact += b.double()
        atol, rtol = tolerance(k, dtype)
        assert ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all(), (m, n, k)
        assert torch.equal(result, flux.gemm(x, weight, b, transpose_weight=transpose_weight))


def views(x: torch.Tensor, weight: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The same matrices, laid out in memory in ways that TMA can and cannot read."""
    m, k = x.shape
    n = weight.shape[0]

    def inside(t: torch.Tensor, columns: int, first: int) -> torch.Tensor:
        room = torch.full((t.shape[0], columns), 9, dtype=t.dtype, device=t.device)
        room[:, first : first + t.shape[1]] = t
        return room[:, first : first + t.shape[1]]

    return {
        "wider rows": (inside(x, k + 64, 0), inside(weight, k + 8, 0)),
        "wider rows, offset": (inside(x, k + 64, 8), inside(weight, k + 64, 24)),
        "misaligned start": (inside(x, k + 8, 1), inside(weight, k + 8, 3)),
        "misaligned rows": (inside(x, k + 1, 0), inside(weight, k + 3, 0)),
        "columns first": (x.t().contiguous().t(), weight.t().contiguous().t()),
        "every second row": (x.repeat_interleave(2, 0)[::2], weight.repeat_interleave(2, 0)[::2]),
        "expanded row": (x[:1].expand(m, k), weight[:1].expand(n, k)),
    }


@pytest.mark.parametrize("how", list(views(torch.zeros(1, 1), torch.zeros(1, 1))))
def test_strides(how: str) -> None:
    case = GemmRsCase(300, 264, 136, 1)
    x, weight, _ = case.inputs(0, "cuda")
    x, weight = views(x, weight)[how]
    expected = (x.float() @ weight.float().t()).to(case.dtype)
    assert torch.equal(flux.gemm(x, weight), expected)
    assert torch.equal(flux.gemm(x, weight.t(), transpose_weight=True), expected)


def test_out_and_leading_dimensions() -> None:
    case = GemmRsCase(60, 40, 64, 1, bias=True)
    x, weight, bias = case.inputs(0, "cuda")
    expected = case.expected(0, "cuda")
    assert torch.equal(flux.gemm(x.view(3, 20, 64), weight, bias), expected.view(3, 20, 40))
    buffer = torch.zeros(60 * 40 + 1, dtype=case.dtype, device="cuda")
    for start in (0, 1):  # aligned and not
        out = buffer[start : start + 60 * 40].view(60, 40)
        assert flux.gemm(x, weight, bias, out=out) is out
        assert torch.equal(out, expected)


def test_graph_replay() -> None:
    cases = [GemmRsCase(300, 264, 136, 1, bias=True, seed=seed) for seed in range(4)]
    x, weight, bias = (t.clone() for t in cases[0].inputs(0, "cuda") if t is not None)
    flux.gemm(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = flux.gemm(x, weight, bias)
    for case in cases:
        for static, new in zip((x, weight, bias), case.inputs(0, "cuda"), strict=True):
            assert new is not None
            static.copy_(new)
        graph.replay()
        assert torch.equal(result, case.expected(0, "cuda"))


def test_compile_fullgraph_and_opcheck() -> None:
    x, weight, bias = (torch.randn(s, device="cuda").half() for s in ((24, 64), (40, 64), (40,)))
    torch.library.opcheck(torch.ops.flux.gemm.default, (x, weight, bias, False))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(flux.gemm(x, weight, bias))

    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_a_stream_of_its_own() -> None:
    case = GemmRsCase(512, 512, 512, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x, weight, _ = case.inputs(0, "cuda")
        torch.cuda._sleep(20_000_000)  # on the default stream the kernel would now run too early
        x = x.clone()
        result = flux.gemm(x, weight)
        expected = case.expected(0, "cuda")
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 17, 33, 64, 65, 128, 150, 192])
def test_products_in_the_graph_of_a_model_that_serves(m: int, dtype: torch.dtype) -> None:
    """Behind each other, so that each begins to load its weight before the one in front of it has ended."""
    k, inner = 1032, 520  # no multiples of a tile
    x = torch.randint(-2, 3, (m, k), device="cuda").to(dtype)
    shapes = ((2 * inner, k), (k, inner))
    w1, w2 = (torch.randint(-1, 2, shape, device="cuda").to(dtype) / 32 for shape in shapes)
    gemm.serving(gemm.serving(x, w1, swiglu=True), w2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = [gemm.serving(x, w1, swiglu=True)]
        for _ in range(2):  # more would leave the range of float16
            hidden.append(gemm.serving(gemm.serving(hidden[-1], w2), w1, swiglu=True))
        product = gemm.serving(x, w1)
    graph.replay()
    graph.replay()
    assert torch.equal(product, (x.float() @ w1.float().t()).to(dtype)), "sums of 32nds are exact"
    for number, got in enumerate(hidden):
        given = x if number == 0 else (hidden[number - 1].float() @ w2.float().t()).to(dtype)
        gate, others = (given.float() @ w1.float().t()).to(dtype).float().chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * others
        torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
