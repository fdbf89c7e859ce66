"""Models of flux.layers, and what they compute in plain torch on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu, silu

from flux.layers import ColumnParallelLinear, ParallelMLP, RMSNorm, RowParallelLinear
from flux.moe import MoEMLP

F64 = torch.float64
HIDDEN, FFN, EXPERTS = 10, 24, 4


class Plain(nn.Module):
    """What Dense computes, with the same names."""

    def __init__(self, activation: str = "swiglu", bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, 1e-6, dtype=F64)
        self.mlp = nn.Module()
        for name in ("gate_proj", "up_proj") if activation == "swiglu" else ("up_proj",):
            self.mlp.add_module(name, nn.Linear(HIDDEN, FFN, bias, dtype=F64))
        self.mlp.down_proj = nn.Linear(FFN, HIDDEN, bias, dtype=F64)
        self.up, self.down = (nn.Linear(*sizes, dtype=F64) for sizes in ((HIDDEN, FFN), (FFN, HIDDEN)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mlp = self.norm(x), self.mlp
        up = mlp.up_proj(y)
        x = x + mlp.down_proj(silu(mlp.gate_proj(y)) * up if hasattr(mlp, "gate_proj") else gelu(up))
        result: torch.Tensor = x + self.down(self.up(x).relu())
        return result


class Dense(nn.Module):
    """Every dense layer."""

    def __init__(self, activation: Any = "swiglu", bias: bool = True, **options: Any) -> None:
        super().__init__()
        options = {"dtype": F64, **options}
        of_norm = options.keys() & {"dtype", "device", "group", "sequence_parallel"}
        self.norm = RMSNorm(HIDDEN, **{name: options[name] for name in of_norm})
        self.mlp = ParallelMLP(HIDDEN, FFN, activation=activation, bias=bias, **options)
        self.up = ColumnParallelLinear(HIDDEN, FFN, **options)
        options.pop("save_gathered", None)
        self.down = RowParallelLinear(FFN, HIDDEN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        result: torch.Tensor = x + self.down(self.up(x).relu())
        return result


class Model(Dense):
    """Every layer of flux.layers, and one of experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.experts = MoEMLP(HIDDEN, FFN, EXPERTS, dtype=F64, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        ids = torch.arange(2 * len(x)).view(-1, 2) % EXPERTS
        result: torch.Tensor = x + self.experts(x, ids, torch.ones(ids.shape))
        return result


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks together."""
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
