"""What Megatron-Bridge does with layers: adapters around them, and weights split along the dimension that it
finds. Scenarios of test_megatron_te.py, with as much of Bridge 0.7 as sees layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron_models import KINDS, SWIGLU, assert_alike, make_config, train

RANK = 4


def dimension(module: Any, name: str) -> int | None:
    """As AutoMapping finds it for classes that are not in its registry."""
    kind = type(module).__name__
    if "LayerNormColumnParallelLinear" in kind:
        return None if "layer_norm" in name else 0
    if hasattr(module, "tensor_model_parallel"):
        return int(module.partition_dim)
    assert "Norm" in kind, f"Cannot determine parallelism type for module {kind!r}"
    return None


def walk(module: Any, func: Callable[..., Any], name: str = "") -> Any:
    """In place of modules, what func makes of them; of those with a method `map`, what that returns."""
    if hasattr(module, "map"):
        return module.map(func, leaf_only=False, recurse=True, i=0, name=name, prefix="")
    made = func(module, name=name)
    for child, below in module.named_children():
        setattr(made, child, walk(below, func, child))
    return made


class Adapter(torch.nn.Module):
    """As LoRALinear, with weights that are whole on all ranks."""

    def __init__(self, to_wrap: Any) -> None:
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.tensor_parallel.layers import RowParallelLinear

        super().__init__()
        self.to_wrap, self.is_sharded = to_wrap, to_wrap.config.sequence_parallel
        self.is_row = isinstance(to_wrap, (RowParallelLinear, te.TERowParallelLinear))
        if isinstance(to_wrap, te.TELayerNormColumnParallelLinear):
            to_wrap.return_layernorm_output = True
            to_wrap.return_layernorm_output_gathered = self.is_sharded
        n, k = next(to_wrap.parameters()).shape
        self.down = torch.nn.Parameter(torch.linspace(-0.3, 0.3, RANK * k).view(RANK, k))
        self.up = torch.nn.Parameter(torch.linspace(-0.2, 0.3, n * RANK).view(n, RANK))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        from megatron.core.tensor_parallel import mappings

        y, bias, *of_norm = self.to_wrap(x, *args)
        y, *of_norm = y if isinstance(y, tuple) else (y, *of_norm)
        x = of_norm[0] if of_norm else x
        is_gathered = getattr(self.to_wrap, "return_layernorm_output_gathered", False)
        if self.is_sharded and not self.is_row and not is_gathered:
            x = mappings.gather_from_sequence_parallel_region(x)
        low = x @ self.down.t()
        if self.is_row:
            low = mappings.reduce_from_tensor_model_parallel_region(low)
            low = mappings.scatter_to_sequence_parallel_region(low) if self.is_sharded else low
        return y + low @ self.up.t(), bias


def layers_in_adapters(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Weights are split as stock's. Losses and gradients are those of stock in adapters; experts there, of
    Megatron's own code.
    """
    from test_megatron_te import pair

    from flux.integrations.megatron import coverage

    experts = KINDS["shared experts"]
    models = ({}, {"sequence_parallel": False}, {"add_bias_linear": True}, SWIGLU, KINDS["MLA"])
    mixtures = (experts, {**experts, "moe_grouped_gemm": True})
    attention = ("linear_qkv", "linear_proj", "linear_q_up_proj", "linear_kv_up_proj")
    for options in models if layout["tensor_model_parallel_size"] > 1 else mixtures:
        for targets in (attention, (*attention, "linear_fc1", "linear_fc2")):

            def adapted(module: Any, name: str, targets: tuple[str, ...] = targets) -> Any:
                return Adapter(module) if name in targets else module

            config = make_config(**{**layout, **options})
            stock, ours = (model.requires_grad_(False) for model in pair(config))
            for name, _ in stock.named_parameters():
                theirs, mine = (m.get_submodule(name.rpartition(".")[0]) for m in (stock, ours))
                if "Flux" in type(mine).__name__ and name.endswith("weight"):
                    expected = None if "norm" in name else int("Row" in type(theirs).__name__)
                    assert dimension(mine, name) == expected, name
            found = []
            for model in (walk(stock, adapted), walk(ours, adapted), ours):
                loss, grads = train(model)
                found.append((loss, {n: grad for n, grad in grads.items() if n.endswith((".down", ".up"))}))
                for module in ours.modules() if model is ours else ():
                    if getattr(module, "return_layernorm_output", False):
                        module.return_layernorm_output_gathered = config.sequence_parallel
            for number in (1, 2):  # rows of a rank, and of all
                assert_alike(found[number], found[0], f"{options}, {targets}, {number}")
            reason = coverage(ours).get("decoder.layers.0.mlp")
            assert (reason is not None) == ("num_moe_experts" in options and "linear_fc1" in targets), reason
