"""flux.gemm on CPU tensors: numerics, arguments, and how torch sees the operator."""

from __future__ import annotations

import shutil

import pytest
import torch

import flux
from flux import _env
from flux.ops import gemm as ops
from flux.testing import GemmRsCase, tolerance

SHAPES = [(1, 1, 2), (3, 5, 7), (64, 48, 33), (129, 257, 100)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_exact_integers(dtype: torch.dtype, transpose_weight: bool, bias: bool) -> None:
    for seed, (m, n, k) in enumerate(SHAPES):
        case = GemmRsCase(m, n, k, 1, dtype, transpose_weight, bias, seed)
        x, weight, b = case.inputs(0)
        result = flux.gemm(x, weight, b, transpose_weight=transpose_weight)
        assert torch.equal(result, case.expected(0))
        out = torch.full_like(result, 7)
        assert flux.gemm(x, weight, b, transpose_weight=transpose_weight, out=out) is out
        assert torch.equal(out, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_data_within_derived_tolerance(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    m, n, k = 96, 80, 300
    x = torch.randn(m, k, generator=g).to(dtype)
    weight = torch.randn(n, k, generator=g).to(dtype)
    exact = x.double() @ weight.double().t()
    atol, rtol = tolerance(k, dtype)
    error = (flux.gemm(x, weight).double() - exact).abs()
    assert (error <= atol + rtol * exact.abs()).all(), error.max()
    # The tolerance is not so wide that a wrong K would pass.
    short = (flux.gemm(x[:, 1:], weight[:, 1:]).double() - exact).abs()
    assert (short > atol + rtol * exact.abs()).any()


def test_leading_dimensions_and_strides() -> None:
    x = torch.randn(4, 6, 16)
    weight = torch.randn(8, 16)
    expected = x @ weight.t()
    torch.testing.assert_close(flux.gemm(x, weight), expected)
    torch.testing.assert_close(flux.gemm(x.transpose(0, 1), weight), expected.transpose(0, 1))
    torch.testing.assert_close(flux.gemm(x[:, ::2], weight), expected[:, ::2])
    torch.testing.assert_close(flux.gemm(x, weight.t().contiguous().t()), expected)
    torch.testing.assert_close(flux.gemm(x, weight.t(), transpose_weight=True), expected)


def test_results_are_fresh_tensors() -> None:
    x, weight = torch.eye(4), torch.eye(4)
    result = flux.gemm(x, weight)
    result.fill_(9)
    assert torch.equal(flux.gemm(x, weight), torch.eye(4))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_sizes(m: int, n: int, k: int) -> None:
    bias = torch.ones(n)
    result = flux.gemm(torch.ones(m, k), torch.ones(n, k), bias)
    assert torch.equal(result, torch.ones(m, n) * (k + 1))


@pytest.mark.parametrize("transpose_weight", [False, True])
def test_opcheck(transpose_weight: bool) -> None:
    for bias in (None, torch.randn(6)):
        weight = torch.randn(8, 6) if transpose_weight else torch.randn(6, 8)
        x = torch.randn(4, 8)
        torch.library.opcheck(torch.ops.flux.gemm.default, (x, weight, bias, transpose_weight))
        out = torch.empty(4, 6)
        torch.library.opcheck(torch.ops.flux.gemm_out.default, (x, weight, bias, transpose_weight, out))


def test_meta_tensors() -> None:
    x = torch.empty(2, 4, 8, dtype=torch.float16, device="meta")
    result = flux.gemm(x, torch.empty(6, 8, dtype=torch.float16, device="meta"))
    assert (result.shape, result.dtype, result.device.type) == ((2, 4, 6), torch.float16, "meta")


def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    flux.gemm(x, weight, bias, out=out)
    return torch.relu(flux.gemm(x * 2, weight, bias)) + out


def test_compile_fullgraph() -> None:
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for m in (4, 9):
        x = torch.randn(m, 8)
        torch.testing.assert_close(compiled(x, weight, bias), function(x, weight, bias))


def test_compile_with_inductor() -> None:
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++")):
        pytest.skip("inductor needs a C++ compiler, this machine has none")
    # Nothing but flux calls: inductor's own kernels would take 10 s to compile.
    compiled = torch.compile(lambda x, w: flux.gemm(flux.gemm(x, w), w), fullgraph=True)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    torch.testing.assert_close(compiled(x, weight), flux.gemm(flux.gemm(x, weight), weight))


def test_explain_says_why() -> None:
    plan = flux.explain("gemm", 128, 256, 512)
    if torch.cuda.is_available():
        pytest.skip("explains the plan of this machine's GPU instead")
    assert not plan.by_flux
    assert "torch.mm" in plan.reason
    assert "unfused" in str(plan)
    with pytest.raises(ValueError, match="explain: op: expected one of gemm, gemm_rs, .*, got 'conv'"):
        flux.explain("conv", 1, 1, 1)
    with pytest.raises(ValueError, match="explain: dtype: expected .* got torch.int8"):
        flux.explain("gemm", 1, 1, 1, torch.int8)
    with pytest.raises(ValueError, match="explain: k: expected a size, got -1"):
        flux.explain("gemm", 1, 1, -1)


def test_reference_is_what_the_operator_computes() -> None:
    x, weight = torch.randn(5, 30).bfloat16(), torch.randn(7, 30).bfloat16()
    assert torch.equal(flux.gemm(x, weight), ops.reference(x, weight))


def test_environment_table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [variable.name for variable in _env.VARIABLES]
    assert len(set(names)) == len(names) and all(name.startswith("FLUX_") for name in names)
    for variable in _env.VARIABLES:
        variable.parse(variable.default)
        assert variable.name in _env.table()
    monkeypatch.setenv("FLUX_TIMEOUT_S", "2.5")
    assert _env.timeout_s() == 2.5
    monkeypatch.setenv("FLUX_TIMEOUT_S", "-1")
    with pytest.raises(ValueError, match="FLUX_TIMEOUT_S='-1': must be a positive number of seconds"):
        _env.timeout_s()
    monkeypatch.setenv("FLUX_SYMM_BACKEND", "mpi")
    with pytest.raises(ValueError, match="FLUX_SYMM_BACKEND='mpi': must be one of cuda, nvshmem"):
        _env.get("FLUX_SYMM_BACKEND")
