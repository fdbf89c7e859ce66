"""Exact data for products of fp8 operands, in which every scale of every contribution is visible.

Every rank's x has, in each row and block of K, an odd number of entries that are 1 or -1, every entry of its
weight is 1 or -1, and scales are powers of two: so each block's product is odd, and its contribution an odd
number times a small power of two. Why no wrong scale can pass a comparison for equality:

- A contribution that is left out, added twice, doubled or halved (its scale of another row, column, block or
  rank, missing or applied twice, where that differs) changes the element by a nonzero number.
- Scales of neighbouring rows, blocks and ranks differ: they are drawn from all powers of two that fit.

Sums stay below what the type of the result represents exactly, so that every order of additions and every
rounding on the way gives the same matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flux.testing.data import EXACT_LIMIT

BLOCK = 128
Device = torch.device | str
_MAX_BIAS = 8


@dataclass(frozen=True)
class ScaledCase:
    """One product of fp8 operands on each rank: x[m, k], weight[n, k] and their scales.

    Args:
        m: rows of x on one rank.
        n: columns of the result on one rank.
        k: columns of x on one rank.
        world_size: ranks.
        scales: "tensor", "row" (rows and columns) or "block" (1 by 128 and 128 by 128).
        x_dtype: float8_e4m3fn or float8_e5m2.
        out_dtype: bfloat16, float16 or float32.
        bias: whether there is one; the same on all ranks.
        sums: results are sums over ranks (flux.gemm_rs, flux.gemm_ar).
        seed: of the data.

    Raises:
        ValueError: so many contributions are not exact in `out_dtype`. Raised when the data is asked for.

    Example::

        from flux.testing import ScaledCase

        case = ScaledCase(m=8, n=32, k=256, world_size=p, scales="block")
        x, weight, scale_x, scale_w, bias = case.inputs(rank)
        out = flux.gemm(x, weight, bias, scale_x=scale_x, scale_w=scale_w)
        assert torch.equal(out, case.product(rank, rank).to(out.dtype))
    """

    m: int
    n: int
    k: int
    world_size: int
    scales: str = "block"
    x_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    sums: bool = False
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of K with a scale of their own."""
        return -(-self.k // BLOCK) if self.scales == "block" else 1

    @property
    def contributions(self) -> int:
        """Scaled products whose sum is an element of the result."""
        return self.blocks * (self.world_size if self.sums else 1)

    @property
    def _room(self) -> int:
        return (EXACT_LIMIT[self.out_dtype] - _MAX_BIAS) // self.contributions

    @property
    def fits(self) -> bool:
        """Whether so many contributions are exact in `out_dtype`."""
        return self._room >= 2

    @property
    def exponents(self) -> tuple[int, int]:
        """The largest exponents of scales of x and of the weight."""
        if not self.fits:
            raise ValueError(f"{self.contributions} contributions are not exact in {self.out_dtype}")
        most = min(self._room.bit_length() - 1, 4 if self.scales == "tensor" else 3)
        return most - most // 2, most // 2

    @property
    def nonzeros(self) -> int:
        """Entries of a row and a block of x that are not zero, an odd number."""
        room = self._room >> sum(self.exponents)
        smallest = self.k if self.scales != "block" else (self.k - 1) % BLOCK + 1
        return (min(room, smallest, 33) - 1) // 2 * 2 + 1

    def inputs(
        self, rank: int, device: Device = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [m, k], weight [n, k], scale_x, scale_w, and bias [n] or None of one rank; scales as
        flux.quantize returns them. The same on every call and every device of a kind.
        """
        x, of_rows = self.x(rank, device)
        weight, of_columns = self.weight(rank, device)
        return x, weight, of_rows, of_columns, self._bias(device)

    def x(self, rank: int, device: Device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        g = self._generator(1, rank, device)
        x = torch.zeros(self.m, self.k, device=device)
        size = self.k if self.scales != "block" else BLOCK
        for block in range(self.blocks):
            part = x[:, block * size : (block + 1) * size]
            columns = torch.rand(part.shape, generator=g, device=device).topk(self.nonzeros, dim=1).indices
            signs = torch.randint(2, columns.shape, generator=g, device=device).float() * 2 - 1
            part.scatter_(1, columns, signs)
        shape = {"tensor": (1,), "row": (self.m, 1), "block": (self.m, self.blocks)}[self.scales]
        return x.to(self.x_dtype), self._powers(shape, self.exponents[0], g)

    def weight(self, rank: int, device: Device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        g = self._generator(2, rank, device)
        weight = torch.randint(2, (self.n, self.k), generator=g, device=device).float() * 2 - 1
        blocks = (-(-self.n // BLOCK), self.blocks)
        shape = {"tensor": (1,), "row": (self.n,), "block": blocks}[self.scales]
        return weight.to(torch.float8_e4m3fn), self._powers(shape, self.exponents[1], g)

    def _powers(self, shape: tuple[int, ...], most: int, g: torch.Generator) -> torch.Tensor:
        least = min(most, 1) if self.scales == "tensor" else 0  # where it is the only one, not 1
        exponents = torch.randint(least, most + 1, shape, generator=g, device=g.device)
        return torch.ldexp(torch.ones(shape, device=g.device), exponents)

    def _bias(self, device: Device = "cpu") -> torch.Tensor | None:
        if not self.bias:
            return None
        g = self._generator(3, 0, device)
        half = torch.randint(-_MAX_BIAS // 2, _MAX_BIAS // 2 + 1, (self.n,), generator=g, device=device)
        return (2 * half).to(self.out_dtype)

    def residual(self) -> torch.Tensor:
        """[m, n], the same on all ranks: zeros and ones, so that a sum without bias stays exact."""
        return (torch.arange(self.m * self.n).view(self.m, self.n) % 2).to(self.out_dtype)

    def _generator(self, what: int, rank: int, device: Device = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(1_000_003 * self.seed + 101 * what + rank)

    def product(self, source: int, holder: int, device: Device = "cpu") -> torch.Tensor:
        """x of one rank times the weight of another one [m, n], plus bias, in float64."""
        total = exact_product(*self.x(source, device), *self.weight(holder, device))
        bias = self._bias(device)
        return total if bias is None else total + bias.double()

    def gathered(self, rank: int, device: Device = "cpu") -> torch.Tensor:
        """The rows of all ranks times the weight of one, plus bias: what AllGather+GEMM gives [p m, n]."""
        products = [self.product(source, rank, device) for source in range(self.world_size)]
        return torch.cat(products).to(self.out_dtype)

    def total(self, device: Device = "cpu") -> torch.Tensor:
        """The sum of all ranks' products, plus bias: what GEMM+AllReduce gives to each [m, n]."""
        total = torch.zeros(self.m, self.n, dtype=torch.float64, device=device)
        for rank in range(self.world_size):
            total += exact_product(*self.x(rank, device), *self.weight(rank, device))
        bias = self._bias(device)
        return (total if bias is None else total + bias.double()).to(self.out_dtype)


def exact_product(
    x: torch.Tensor, of_rows: torch.Tensor, weight: torch.Tensor, of_columns: torch.Tensor
) -> torch.Tensor:
    """The product in float64 of what fp8 operands stand for; scales as flux.quantize returns them."""
    return dequantized(x, of_rows) @ dequantized(weight, of_columns, blocks=BLOCK).t()


def dequantized(q: torch.Tensor, scale: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    """A matrix in float64 from fp8. blocks: rows that share a block's scale."""
    scale = scale.double()
    if scale.dim() == 1:
        return q.double() * (scale if scale.shape[0] == 1 else scale[:, None])
    if scale.shape[1] == 1:
        return q.double() * (scale if scale.shape[0] == q.shape[0] else _rows(scale, q, blocks))
    return q.double() * _rows(scale, q, blocks).repeat_interleave(BLOCK, 1)[:, : q.shape[1]]


def _rows(scale: torch.Tensor, q: torch.Tensor, blocks: int) -> torch.Tensor:
    return scale.repeat_interleave(blocks, 0)[: q.shape[0]]
