"""Exact-integer data for mixtures of experts, and the expected results, computed pair by pair.

Why nothing missing, doubled or misplaced can pass a comparison for equality:

- Layer 0. Rows are the sum of a mark, 1 + source + p*(seed mod 3), and of random multiples of a power of two
  Q above all marks. So every element of a row is its source's mark modulo Q: a row of another rank, of
  nobody, or of an earlier call changes all elements of its row. A row of another token or a weight of another
  expert has other signs, and changes about half of them.
- Layer 1. Every product of a row with its expert's weight is 1 or -1, routing weights are 1 or 2, in random
  places: no summand is zero, so leaving out an expert or a rank, or adding it twice, changes the sum.

Bounds: layer 0, nonzeros*Q + Q - 1; layer 1, 2 * k * (ranks of a slice). Both are kept below what the type
represents exactly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from flux.testing.data import EXACT_LIMIT

SKEWS = ("even", "skewed", "half empty", "one expert", "one slice")


@dataclass(frozen=True)
class MoeCase:
    """One mixture-of-experts problem. Every rank can make every rank's data from the seed.

    Args:
        tokens: of each rank.
        skew: "even", "skewed" (expert e is chosen about as often as 1/(e+1)), "half empty" (odd experts by
            nobody), "one expert" (expert 0 by every token), "one slice" (the first experts only).
        dropped: share of choices that are not routed (-1).
        ranks_per_node: in a group with several nodes; 0: of one node. Changes the order of rows.
        own_last: a bound for what crosses nodes saves tokens; then those of the own node come last.
    """

    tokens: tuple[int, ...]
    hidden: int
    columns: int  # n of layer 0 and k of layer 1, of one rank
    num_experts: int
    top_k: int
    ep_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    skew: str = "even"
    dropped: float = 0.0
    seed: int = 0
    ranks_per_node: int = 0
    own_last: bool = False

    @property
    def world_size(self) -> int:
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        return max(self.tokens)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def unit(self) -> int:
        """Q: what every product but that with the mark is a multiple of."""
        return 1 << (3 * self.world_size).bit_length()

    def slice_of(self, rank: int) -> int:
        return rank * self.ep_size // self.world_size

    def _generator(self, what: int, rank: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.seed + 101 * what + rank)

    def routing(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_ids int64 and topk_weights float32 [tokens, k] of one rank; no token names an expert twice."""
        g = self._generator(1, rank)
        tokens, experts = self.tokens[rank], self.num_experts
        odds = torch.ones(experts)
        if self.skew == "skewed":
            odds = 1.0 / torch.arange(1, experts + 1)
        if self.skew == "half empty":
            odds[1::2] = 0
        if self.skew == "one slice":
            odds[max(self.local_experts, self.top_k) :] = 0
        # Weighted sampling without replacement: the largest values of random numbers to the power 1/odds.
        score = torch.rand(tokens, experts, generator=g) ** (1 / odds)
        if self.skew == "one expert":
            score[:, 0] = 2
        # If there are fewer wanted experts than choices, the remaining choices are not routed.
        ids = score.topk(min(self.top_k, experts)).indices
        ids = torch.nn.functional.pad(ids, (0, self.top_k - ids.shape[1]), value=-1)
        ids = torch.where((ids >= 0) & (odds[ids.clamp(min=0)] == 0), -1, ids)
        ids = torch.where(torch.rand(ids.shape, generator=g) < self.dropped, -1, ids)
        weights = torch.randint(1, 3, ids.shape, generator=g).float()
        return ids, weights

    def all_choices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """routing() of all ranks, int32 and float32 [p, max_tokens, k]; -1 for tokens that a rank lacks."""
        shape = (self.world_size, self.max_tokens, self.top_k)
        ids, weights = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape)
        for rank, tokens in enumerate(self.tokens):
            ids[rank, :tokens], weights[rank, :tokens] = self.routing(rank)
        return ids, weights

    def x(self, rank: int) -> torch.Tensor:
        """[tokens, hidden] of one rank."""
        g = self._generator(2, rank)
        room = (EXACT_LIMIT[self.dtype] - self.unit) // self.unit
        nonzeros = min(self.hidden - 1, room, 16)
        x = torch.zeros(self.tokens[rank], self.hidden)
        if nonzeros > 0:
            columns = torch.randint(1, self.hidden, (len(x), nonzeros), generator=g)
            sign = torch.randint(2, (len(x), 1), generator=g).float() * 2 - 1
            x.scatter_add_(1, columns, sign.expand(-1, nonzeros))
        x[:, 0] = 1 + rank + self.world_size * (self.seed % 3)
        return x.to(self.dtype)

    def w1(self, rank: int) -> torch.Tensor:
        """[local experts, columns, hidden] of one rank."""
        g = self._generator(3, rank)
        w = torch.randint(2, (self.local_experts, self.columns, self.hidden), generator=g).float() * 2 - 1
        w *= self.unit
        w[:, :, 0] = 1
        return w.to(self.dtype)

    def w2(self, rank: int) -> torch.Tensor:
        """[local experts, hidden, columns] of one rank."""
        g = self._generator(4, rank)
        w = -2.0 * torch.randint(2, (self.local_experts, self.hidden, self.columns), generator=g)
        w[:, :, 0] = 1
        return w.to(self.dtype)

    def rows(self, rank: int) -> torch.Tensor:
        """Expert of all, source and token [rows, 3] of each row of a rank, in order: by expert, then by step
        of the source, then by token; on several nodes see `_order_on_nodes`.
        """
        first = self.slice_of(rank) * self.local_experts
        found = []
        for step in range(self.world_size):
            source = (rank - step) % self.world_size
            ids = self.routing(source)[0]
            tokens, choice = ((ids >= first) & (ids < first + self.local_experts)).nonzero(as_tuple=True)
            found.append(torch.stack([ids[tokens, choice], torch.full_like(tokens, source), tokens], 1))
        rows = torch.cat(found)
        rows = rows[rows[:, 0].argsort(stable=True)]
        return rows if self.ranks_per_node == 0 else rows[self._order_on_nodes(rank, rows)]

    def _order_on_nodes(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        """By expert, step of the source inside its node, node, token. If slices of experts span nodes, as on
        one node.
        """
        ranks = self.ranks_per_node
        nodes = self.world_size // ranks
        if self.ep_size % nodes:
            return torch.arange(len(rows))
        expert, source, token = rows.unbind(1)
        node, step = source // ranks, (rank - source) % ranks
        if self.own_last:
            node = torch.where(node == rank // ranks, nodes, node)
        return (((expert * ranks + step) * (nodes + 1) + node) * (self.max_tokens + 1) + token).argsort()

    def layer0(self, rank: int) -> torch.Tensor:
        """The exact result of layer 0 without activation, for the valid rows."""
        w, first = self.w1(rank).float(), self.slice_of(rank) * self.local_experts
        rows = self.rows(rank)
        begins = torch.tensor(self.tokens).cumsum(0) - torch.tensor(self.tokens)
        x = torch.cat([self.x(source) for source in range(self.world_size)])
        x = x[begins[rows[:, 1]] + rows[:, 2]].float()
        sizes = torch.bincount(rows[:, 0] - first, minlength=self.local_experts).tolist()
        parts = [part @ w[expert].t() for expert, part in enumerate(torch.split(x, sizes))]
        return torch.cat(parts).to(self.dtype)

    def _column(self, rank: int, expert: Any, source: Any, token: Any) -> Any:
        """The column of a row's second 1."""
        return 1 + (7 * token + 3 * source + 5 * expert + rank + self.seed) % (self.columns - 1)

    def hidden_rows(self, rank: int, max_rows: int) -> torch.Tensor:
        """Input of layer 1 [max_rows, columns]; rows after the last one are NaN."""
        h = torch.zeros(max_rows, self.columns)
        rows = self.rows(rank)
        h[len(rows) :] = float("nan")
        h[: len(rows), 0] = 1
        h[torch.arange(len(rows)), self._column(rank, *rows.unbind(1))] = 1
        return h.to(self.dtype)

    def layer1(self, rank: int) -> torch.Tensor:
        """The exact result of layer 1 on hidden_rows: [tokens, hidden] of one rank."""
        p = self.world_size
        if 2 * self.top_k * (p // self.ep_size) > EXACT_LIMIT[self.dtype]:
            raise ValueError(f"sums of {self.top_k} experts are not exact in {self.dtype}")
        out = torch.zeros(self.tokens[rank], self.hidden)
        ids, weights = self.routing(rank)
        for holder in range(p):
            w, first = self.w2(holder).float(), self.slice_of(holder) * self.local_experts
            for expert in range(first, first + self.local_experts):
                tokens, choice = (ids == expert).nonzero(as_tuple=True)
                second = w[expert - first][:, self._column(holder, expert, rank, tokens)].t()
                out.index_add_(0, tokens, weights[tokens, choice, None] * (1 + second))
        return out.to(self.dtype)


def random_case(number: int, world_size: int | None = None, dtypes: tuple[torch.dtype, ...] = ()) -> MoeCase:
    """A case of any layout, skew and size; the same for the same number.

    Args:
        world_size: None: any up to 8.
        dtypes: to choose from; none: all of them.
    """
    choose = random.Random(number)
    p = world_size or choose.choice((1, 2, 3, 4, 8))
    ep_size = choose.choice([d for d in range(1, p + 1) if p % d == 0])
    most = choose.choice((1, 5, 60, 260))
    return MoeCase(
        tokens=tuple(choose.randint(0, most) for _ in range(p - 1)) + (most,),
        hidden=choose.choice((2, 24, 304)),
        columns=choose.choice((2, 24, 272)),
        num_experts=ep_size * choose.choice((1, 2, 3, 8, 20)),
        top_k=choose.choice((1, 2, 3, 4, 8, 16)),
        ep_size=ep_size,
        dtype=choose.choice(dtypes or tuple(EXACT_LIMIT)),
        skew=choose.choice(SKEWS),
        dropped=choose.choice((0.0, 0.0, 0.3)),
        seed=number,
    )
