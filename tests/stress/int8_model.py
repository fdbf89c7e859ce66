"""Sums over ranks whose contributions were rounded to int8, by their definition (docs/fp8.md)."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def model(parts: list[Tensor], rank: int, rounds_own: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The sum in fp32 of what ranks have for one of them [rows, n]; the exact sum; and by how much they may
    differ.
    """
    total = torch.zeros(parts[0].shape)
    exact, bound = total.double(), total.double()
    for source, part in enumerate(parts):
        wide = part.float()
        exact += part.double()
        if source == rank and not rounds_own:
            total += wide
            continue
        for first in range(0, wide.shape[1], 128):
            group = wide[:, first : first + 128]
            most = group.abs().max(1, keepdim=True).values.clamp(min=1e-10)
            step = most / torch.tensor(127.0)
            total[:, first : first + 128] += (group * (1 / step)).round().clamp(-127, 127) * step
            bound[:, first : first + 128] += most.double() / 254 * (1 + 2**-20)
    largest = sum((part.double().abs() for part in parts), torch.zeros_like(exact))
    return total, exact, bound + 2**-23 * len(parts) * largest


def data(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Groups of very different sizes."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 7, shape, generator=g).float())
    return (torch.randn(shape, generator=g) * sizes).to(dtype)
