"""Exact-integer data in which every rank's contribution to every element is marked.

Common to both cases: every number involved is an integer that the output type represents exactly (256 for
bfloat16, 2048 for float16): the inputs, each rank's partial sum of each element, and the total. So fp32
accumulation, the rounding of partial sums that travel as 16-bit values, and the final rounding change
nothing, whatever the order: the result is one exact matrix.

Why nothing missing, doubled or misplaced in a GEMM+ReduceScatter can pass a comparison for equality:

- Rank r's partial sum of *every* element is odd: one column c of its x is all ones and its weight there is
  the odd mark 2r + 1, all other weights are even. An odd number is not zero, so leaving out any rank's
  contribution to any element, or adding it twice, changes that element.
- The even part is random, from about `nonzeros` positions of each row of x, scattered over all of K, times
  dense random weights: a tile at the wrong place, a tile of an earlier call, or a K block left out for a
  128-row tile changes its elements.

Bound: a partial sum is at most 2*nonzeros + 2r + 1, the total of p ranks at most p*(2*nonzeros + p), plus the
bias, which is even and at most 8; `nonzeros` is chosen so that this fits.

Why no wrong row in an AllGather+GEMM can pass:

- One column c of x holds the mark of its source and call, 1 + source + p*(seed mod 3); every weight there
  is 1, and every other weight is Q or -Q, Q a power of two above all marks. So every element of the product
  is the row's mark modulo Q. A row of another rank, a row that nobody wrote (zeros), or a row of an earlier
  call whose seed differs by no multiple of 3 has another mark: it changes *every* element of its row. Both
  buffers of a workspace hold rows of the last two calls: number calls 0, 1, 2, ...
- The rest of a row of x is `nonzeros` entries of one sign, in different blocks of 64 columns as far as
  there are as many; successive rows go on where the last one ended. So 128 rows, a tile, have an entry in
  every block of up to 128*nonzeros blocks, and one entry is worth Q or -Q in every element of its row: a K
  block left out for a tile changes it. Columns and sign are random, so rows differ: one that lies at the
  place of another one changes about 3 elements in 4.
- The bias is odd, hence not zero: forgetting it, or adding it twice, changes every element.

Bound: nonzeros*Q + Q - 1, plus the bias of at most 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EXACT_LIMIT = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 2**24, torch.float64: 2**53}
_MAX_BIAS = 8


@dataclass(frozen=True)
class _Case:
    m: int
    n: int
    k: int
    world_size: int
    dtype: torch.dtype = torch.bfloat16
    transpose_weight: bool = False
    bias: bool = False
    seed: int = 0

    def _generator(self, number: int, device: torch.device | str) -> torch.Generator:
        return torch.Generator(device).manual_seed(1_000_003 * self.seed + number)


class GemmRsCase(_Case):
    """One GEMM+ReduceScatter problem: x[m, k] on each rank times weight[n, k]ᵀ, summed, rows scattered over
    ranks.

    `k` is what one rank holds. With world_size 1 it is a plain GEMM. Every rank can make every rank's data
    from the seed, so the expected result needs no communication.

    Args:
        m: rows of x on each rank, a multiple of `world_size`.
        n: columns of the result.
        k: columns of x on one rank.
        world_size: ranks.
        dtype: bfloat16, float16, float32 or float64.
        transpose_weight: weight is [k, n].
        bias: whether there is one.
        seed: of the data.

    Raises:
        ValueError: so many ranks cannot be marked in `dtype`. Raised when the data is asked for.

    Example::

        from flux.testing import GemmRsCase

        case = GemmRsCase(m=8 * p, n=32, k=64, world_size=p, bias=True)
        x, weight, bias = case.inputs(rank)
        assert torch.equal(flux.gemm_rs(x, weight, bias), case.expected(rank))
    """

    @property
    def nonzeros(self) -> int:
        """Random positions of a row of x that are not zero."""
        p = self.world_size
        room = (EXACT_LIMIT[self.dtype] - _MAX_BIAS - p * p) // (2 * p)
        if room < 1:
            raise ValueError(f"{p} ranks cannot be marked in {self.dtype}")
        return min(self.k - 1, room, 64)

    def inputs(
        self, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [m, k], weight [n, k] (or [k, n]), bias [n] or None of one rank. The same on every call and every
        device of a kind.
        """
        g = self._generator(rank, device)
        x = torch.zeros(self.m, self.k, device=device)
        if self.nonzeros > 0:
            shape = (self.m, self.nonzeros)
            columns = torch.randint(self.k, shape, generator=g, device=device)
            # scatter_add_, because the result of two plain writes to one position is undefined on a GPU.
            x.scatter_add_(1, columns, torch.randint(2, shape, generator=g, device=device).float() * 2 - 1)
        weight = torch.randint(-1, 2, (self.n, self.k), generator=g, device=device).float() * 2
        mark = (7 * rank + 13 * self.seed) % self.k
        x[:, mark] = 1
        weight[:, mark] = 2 * rank + 1
        x, weight = x.to(self.dtype), weight.to(self.dtype)
        if self.transpose_weight:
            weight = weight.t().contiguous()
        return x, weight, self._bias(device)

    def residual(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[m, n], the same on all ranks, to add to the sum: small even integers, so that it stays exact."""
        return (torch.arange(self.m * self.n, device=device).view(self.m, self.n) % 5 * 2 - 4).to(self.dtype)

    def _bias(self, device: torch.device | str) -> torch.Tensor | None:
        if not self.bias:
            return None
        g = self._generator(999_983, device)
        half = torch.randint(-_MAX_BIAS // 2, _MAX_BIAS // 2 + 1, (self.n,), generator=g, device=device)
        return (2 * half).to(self.dtype)

    def expected(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The exact result [m / world_size, n] of one rank."""
        rows = self.m // self.world_size
        return self._expected(slice(rank * rows, (rank + 1) * rows), device)

    def expected_sum(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The exact sum of all ranks' products [m, n], plus the bias: what GEMM+AllReduce gives to each."""
        return self._expected(slice(0, self.m), device)

    def _expected(self, rows: slice, device: torch.device | str) -> torch.Tensor:
        total = torch.zeros(rows.stop - rows.start, self.n, device=device)
        for peer in range(self.world_size):
            x, weight, _ = self.inputs(peer, device)
            weight = weight if self.transpose_weight else weight.t()
            # In fp32 every product and sum is a small integer, exact even where a GPU multiplies in TF32 or
            # 16 bits.
            total += x[rows].float() @ weight.float()
        bias = self._bias(device)
        if bias is not None:
            total += bias.float()
        return total.to(self.dtype)


_BLOCK_K = 64  # of the kernels


class AgGemmCase(_Case):
    """One AllGather+GEMM problem: x[m / world_size, k] of all ranks, gathered, times weight[n, k]ᵀ of one.

    `m` counts the rows of all ranks, `n` what one rank computes. Every rank can make every rank's data from
    the seed, so the expected result needs no communication. x does not depend on `n`: cases that differ only
    there are several weights for one x.

    Args:
        m: rows of all ranks, a multiple of `world_size`.
        n: columns of the result on one rank.
        k: columns of x.
        world_size: ranks.
        dtype: bfloat16, float16, float32 or float64.
        transpose_weight: weight is [k, n].
        bias: whether there is one.
        seed: of the data; number the calls of a test 0, 1, 2, ...

    Raises:
        ValueError: so many ranks cannot be marked in `dtype`. Raised when the data is asked for.

    Example::

        from flux.testing import AgGemmCase

        case = AgGemmCase(m=8 * p, n=32, k=64, world_size=p)
        x, weight, bias = case.inputs(rank)
        assert torch.equal(flux.ag_gemm(x, weight, bias), case.expected(rank))
    """

    @property
    def unit(self) -> int:
        """Q, of which every product but that with the mark is a multiple."""
        return 1 << (3 * self.world_size).bit_length()

    @property
    def nonzeros(self) -> int:
        """Random positions of a row of x that are not zero."""
        room = (EXACT_LIMIT[self.dtype] - _MAX_BIAS - self.unit) // self.unit
        if room < 1:
            raise ValueError(f"{self.world_size} ranks cannot be marked in {self.dtype}")
        return min(self.k - 1, room, 64)

    def mark(self, source: int) -> int:
        """What every element of the product is modulo `unit`, in the rows of one rank."""
        return 1 + source + self.world_size * (self.seed % 3)

    def inputs(
        self, rank: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [m / world_size, k], weight [n, k] (or [k, n]), bias [n] or None of one rank. The same on every
        call and every device of a kind.
        """
        weight = self._weight(rank, device)
        weight = weight.t().contiguous() if self.transpose_weight else weight
        return self._x(rank, device), weight, self._bias(rank, device)

    def expected(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The exact result [m, n] of one rank."""
        # In fp32 every product and sum is a small integer, exact even where a GPU multiplies in TF32 or 16
        # bits.
        total = self.gathered(device).float() @ self._weight(rank, device).float().t()
        bias = self._bias(rank, device)
        if bias is not None:
            total += bias.float()
        return total.to(self.dtype)

    def gathered(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """x of all ranks [m, k]."""
        return torch.cat([self._x(source, device) for source in range(self.world_size)])

    @property
    def _mark_column(self) -> int:
        return 13 * self.seed % self.k

    def _x(self, source: int, device: torch.device | str) -> torch.Tensor:
        g = self._generator(source, device)
        rows = self.m // self.world_size
        x = torch.zeros(rows, self.k, device=device)
        if self.nonzeros > 0:
            shape = (rows, self.nonzeros)
            blocks = -(-self.k // _BLOCK_K)
            entries = torch.arange(rows * self.nonzeros, device=device).view(shape)
            first = entries % blocks * _BLOCK_K
            offset = torch.randint(_BLOCK_K, shape, generator=g, device=device)
            columns = first + offset % (self.k - first).clamp(max=_BLOCK_K)
            # One sign for each row: entries of the same column add up, and never cancel.
            sign = torch.randint(2, (rows, 1), generator=g, device=device).float() * 2 - 1
            x.scatter_add_(1, columns, sign.expand(shape))
        x[:, self._mark_column] = self.mark(source)
        return x.to(self.dtype)

    def _weight(self, rank: int, device: torch.device | str) -> torch.Tensor:
        g = self._generator(31 * self.n + rank + 500_009, device)
        weight = torch.randint(2, (self.n, self.k), generator=g, device=device).float() * 2 - 1
        weight *= self.unit
        weight[:, self._mark_column] = 1
        return weight.to(self.dtype)

    def _bias(self, rank: int, device: torch.device | str) -> torch.Tensor | None:
        if not self.bias:
            return None
        g = self._generator(31 * self.n + rank + 999_983, device)
        half = torch.randint(-_MAX_BIAS // 2, _MAX_BIAS // 2, (self.n,), generator=g, device=device)
        return (2 * half + 1).to(self.dtype)
