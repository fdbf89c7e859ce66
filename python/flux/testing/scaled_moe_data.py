"""Exact fp8 data for both expert layers: the routing of a MoeCase, tokens and weights of ScaledCases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import flux
from flux.moe.routing import tokens_of_rows
from flux.testing import ScaledCase
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_data import BLOCK, dequantized

Tensor = torch.Tensor


@dataclass(frozen=True)
class ScaledMoe:
    """moe: of fp8 operands; its dtype does not matter."""

    moe: MoeCase
    kind: str = "block"
    x_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.bfloat16

    def _data(self, m: int, n: int, k: int, terms: int, salt: int) -> ScaledCase:
        """terms: products that are summed to one element of a result."""
        data = ScaledCase(m, n, k, terms, self.kind, self.x_dtype, self.out_dtype, sums=True)
        return replace(data, seed=1000 * self.moe.seed + salt)

    def _experts(self, rank: int, n: int, k: int, terms: int, salt: int) -> tuple[Tensor, Tensor]:
        """Weights [experts, n, k] of one rank and their scales."""
        first = self.moe.slice_of(rank) * self.moe.local_experts
        of_all = [self._data(1, n, k, terms, salt + first + e) for e in range(self.moe.local_experts)]
        weights, scales = zip(*(data.weight(rank) for data in of_all), strict=True)
        stacked = torch.stack([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)
        return stacked, torch.cat(scales) if self.kind == "tensor" else torch.stack(scales)

    @property
    def _terms(self) -> int:
        """Summands of layer 1: routing weights are 1 or 2."""
        return 2 * self.moe.top_k * (self.moe.world_size // self.moe.ep_size)

    @property
    def needs(self) -> int:
        """Twice as many contributions as an element has: what the type of the result must represent."""
        blocks = -(-max(self.moe.hidden, self.moe.columns) // 128) if self.kind == "block" else 1
        return 4 * blocks * self._terms + 8

    def x(self, rank: int) -> tuple[Tensor, Tensor]:
        return self._data(self.moe.tokens[rank], 1, self.moe.hidden, 1, 1).x(rank)

    def w1(self, rank: int) -> tuple[Tensor, Tensor]:
        return self._experts(rank, self.moe.columns, self.moe.hidden, 1, 100)

    def hidden_rows(self, rank: int, max_rows: int) -> tuple[Tensor, Tensor]:
        """Input of layer 1 with so many rows, of which the last ones are NaN."""
        count = len(self.moe.rows(rank))
        x, scale = self._data(count, 1, self.moe.columns, self._terms, 300).x(rank)
        rows = torch.full((max_rows, self.moe.columns), float("nan"))
        rows[:count] = x.float()
        if self.kind != "tensor":
            scale = torch.cat([scale, torch.full((max_rows - count, scale.shape[1]), float("nan"))])
        return rows.to(self.x_dtype), scale

    def w2(self, rank: int) -> tuple[Tensor, Tensor]:
        return self._experts(rank, self.moe.hidden, self.moe.columns, self._terms, 400)

    def _products(self, rank: int, values: Tensor, experts: tuple[Tensor, Tensor]) -> Tensor:
        """The exact product of each row [rows, k] of a rank, in float64, with the weight of its expert."""
        weights, scales = experts
        local = self.moe.rows(rank)[:, 0] - self.moe.slice_of(rank) * self.moe.local_experts
        out = torch.zeros(len(local), weights.shape[1], dtype=torch.float64)
        for expert in range(self.moe.local_experts):
            scale = scales[expert : expert + 1] if self.kind == "tensor" else scales[expert]
            out[local == expert] = values[local == expert] @ dequantized(weights[expert], scale, BLOCK).t()
        return out

    def layer0(self, rank: int) -> Tensor:
        """The exact result of layer 0 without activation, for the valid rows."""
        _, sources, tokens = self.moe.rows(rank).unbind(1)
        begins = torch.tensor(self.moe.tokens).cumsum(0) - torch.tensor(self.moe.tokens)
        every = torch.cat([dequantized(*self.x(source)) for source in range(self.moe.world_size)])
        values = every[begins[sources] + tokens]
        return self._products(rank, values, self.w1(rank)).to(self.out_dtype)

    def layer1(self, rank: int) -> Tensor:
        """The exact result of layer 1 on hidden rows: [tokens, hidden] of one rank."""
        out = torch.zeros(self.moe.tokens[rank], self.moe.hidden, dtype=torch.float64)
        ids, weights = self.moe.routing(rank)
        for holder in range(self.moe.world_size):
            rows = self.moe.rows(holder)
            values = dequantized(*self.hidden_rows(holder, len(rows)))
            products = self._products(holder, values, self.w2(holder))
            mine = rows[:, 1] == rank
            expert, _, token = rows[mine].unbind(1)
            choice = (ids[token] == expert[:, None]).int().argmax(1)
            out.index_add_(0, token, weights[token, choice].double()[:, None] * products[mine])
        return out.to(self.out_dtype)

    def order(self, rank: int, routing: Any) -> Tensor:
        """For each row of a routing its number in the order of MoeCase: on several nodes, tokens of other
        nodes are among those of the own one.
        """
        rows = [tuple(row) for row in self.moe.rows(rank).tolist()]
        first, limit = self.moe.slice_of(rank) * self.moe.local_experts, self.moe.max_tokens
        count = int(routing.offsets[-1])
        places = tokens_of_rows(routing)[:count].tolist() if count else []
        experts = torch.searchsorted(routing.offsets.cpu(), torch.arange(count), right=True) - 1 + first
        found = zip(experts.tolist(), places, strict=True)
        return torch.tensor([rows.index((e, p // limit, p % limit)) for e, p in found], dtype=torch.int64)

    def route(self, rank: int, device: str = "cpu") -> Any:
        ids, scores = (made.to(device) for made in self.moe.routing(rank))
        ep_size, limit = self.moe.ep_size, self.moe.max_tokens
        return flux.moe.route(ids, scores, self.moe.num_experts, ep_size=ep_size, max_tokens=limit)
