"""fp8 on one GPU: quantisation has the bits of the CPU path, and GEMMs of small integers are exact."""

from __future__ import annotations

import pytest
import torch

import flux
from flux.ops.quantize import QUANTS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def bits(q: torch.Tensor) -> torch.Tensor:
    return q.cpu().view(torch.uint8)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_has_the_bits_of_the_cpu_path(quant: str, dtype: torch.dtype, ue8m0: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in [(1, 8), (3, 136), (130, 264), (2, 130, 1032), (2048, 4096)]:
        x = torch.randn(shape, generator=generator)
        x *= torch.exp2(torch.randint(-14, 3, shape, generator=generator))
        for x16 in (x.to(torch.bfloat16), x.half()):
            expected, scales = flux.quantize(x16, quant, ue8m0=ue8m0, dtype=dtype)
            q, found = flux.quantize(x16.cuda(), quant, ue8m0=ue8m0, dtype=dtype)
            assert torch.equal(found.cpu(), scales)
            assert torch.equal(bits(q), bits(expected))


def test_quantize_edges() -> None:
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    for quant in QUANTS:
        expected, scales = flux.quantize(x, quant)
        q, found = flux.quantize(x.cuda(), quant)
        assert torch.equal(found.cpu().nan_to_num(7, 8), scales.nan_to_num(7, 8))
        assert torch.equal(bits(q), bits(expected))


@pytest.mark.parametrize("quant", ["tensor", "row", "block"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 128), (40, 200, 256), (129, 264, 640), (1000, 1032, 2048)])
def test_gemm_is_exact(quant: str, m: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x = torch.randint(-2, 3, (m, k), generator=generator).float().to(E4M3)
    weight = torch.randint(-2, 3, (n, k), generator=generator).float().to(E4M3)
    shapes = {
        "tensor": ((), ()),
        "row": ((m, 1), (n,)),
        "block": ((m, k // 128), (-(-n // 128), k // 128)),
    }[quant]
    scale_x, scale_w = (torch.exp2(torch.randint(0, 2, shape, generator=generator)) for shape in shapes)
    expected = flux.gemm(x, weight, scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float32)
    cuda = [tensor.cuda() for tensor in (x, weight, scale_x, scale_w)]
    out = flux.gemm(*cuda[:2], scale_x=cuda[2], scale_w=cuda[3], out_dtype=torch.float32)
    assert torch.equal(out.cpu(), expected)
