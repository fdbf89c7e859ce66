"""flux.layers between CPU processes, against the same model in plain torch on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Calls, asked_of_one_and_of_several, scenario_test
from layer_models import F64, FFN, HIDDEN, Dense, Plain, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flux._sharded import local
from flux.layers import (
    ColumnParallelLinear,
    DeferredGrads,
    ParallelMLP,
    RowParallelLinear,
    column_linear,
    reduce_replicated_grads,
    row_linear,
)

WORLD_SIZES = [1, 2, 3]
ROWS, BATCH = 4, 3


def data(p: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.randn(ROWS * p, BATCH, HIDDEN, dtype=F64, generator=g)


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and gradient of x."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y.sin() * torch.arange(1.0, 1 + HIDDEN, dtype=F64)).sum().backward()
    return y.detach(), x.grad


def models(rank: int, p: int, **options: Any) -> Iterator[tuple[Plain, Dense, bool]]:
    """Pairs of equal parameters: in plain torch, and on this rank."""
    for activation, bias, sequence_parallel in (
        ("swiglu", False, True),
        ("swiglu", True, False),
        ("gelu", True, True),
        ("gelu", False, False),
    ):
        torch.manual_seed(3)
        plain = Plain(activation, bias)
        block = Dense(activation, bias, sequence_parallel=sequence_parallel, **options)
        block.load_state_dict(plain.state_dict())
        yield plain, block, sequence_parallel


def part(x: torch.Tensor, rank: int, p: int, sequence_parallel: bool) -> torch.Tensor:
    return x.chunk(p)[rank] if sequence_parallel else x


def gradients(rank: int, p: int) -> None:
    for save_gathered in (False, True, "auto"):
        for plain, block, sequence_parallel in models(rank, p, save_gathered=save_gathered):
            results = run(plain, data(p))
            for got, all_rows in zip(
                run(block, part(data(p), rank, p, sequence_parallel)), results, strict=True
            ):
                torch.testing.assert_close(got, part(all_rows, rank, p, sequence_parallel))
            reduce_replicated_grads(block)
            expected = {name: q.grad for name, q in plain.named_parameters()}
            torch.testing.assert_close(whole({n: q.grad for n, q in block.named_parameters()}), expected)


@asked_of_one_and_of_several
def compiled(rank: int, p: int) -> None:
    for number, fusion in enumerate((False, True)):
        made = models(rank, p, gradient_accumulation_fusion=fusion)
        for plain, block, sequence_parallel in itertools.islice(made, number, number + 1):
            weight = block.mlp.up_proj.weight
            for each in block.parameters() if fusion else ():
                each.main_grad = torch.zeros_like(each)
            function = torch.compile(block, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(
                run(function, part(data(p), rank, p, sequence_parallel)),
                tuple(part(t, rank, p, sequence_parallel) for t in run(plain, data(p))),
            )
            found = (weight.main_grad if fusion else weight.grad).full_tensor()
            torch.testing.assert_close(found, plain.mlp.up_proj.weight.grad)
            of_norm = block.norm.weight.grad.full_tensor()  # sums what is Partial
            torch.testing.assert_close(of_norm, plain.norm.weight.grad)


def what_travels(rank: int, p: int) -> None:
    for sequence_parallel, save_gathered, expected in (
        (True, False, "ag_gemm gemm_rs | ag_gemm gemm_rs_with_gather"),
        (True, True, "ag_gemm gemm_rs | ag_gemm gemm_rs"),
        # Nothing is gathered beside a GEMM on CPUs.
        (True, "auto", "ag_gemm gemm_rs | ag_gemm gemm_rs"),
        (False, False, "gemm gemm gemm_ar | gemm gemm_ar"),
    ):
        mlp = ParallelMLP(HIDDEN, FFN, sequence_parallel=sequence_parallel, save_gathered=save_gathered)
        x = torch.ones(ROWS, HIDDEN, requires_grad=True)
        with Calls() as forward:
            y = mlp(x)
        with Calls() as backward:
            y.sum().backward()
        assert " ".join([*forward.names, "|", *backward.names]) == expected


class Copies(TorchDispatchMode):
    """How often tensors are copied next to each other."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


def nothing_is_copied(rank: int, p: int) -> None:
    """Gate and up are one matrix to the backward pass, wherever the module has been moved."""
    mlp = ParallelMLP(HIDDEN, FFN)
    for change in (lambda: mlp, mlp.double, lambda: mlp.load_state_dict(mlp.state_dict()), mlp.bfloat16):
        before = [local(q).clone() for q in mlp.parameters()]
        change()
        for old, new in zip(before, mlp.parameters(), strict=True):
            assert torch.equal(old.to(new.dtype), local(new))
        gate, up = local(mlp.gate_proj.weight), local(mlp.up_proj.weight)
        assert gate.is_contiguous() and up.data_ptr() == gate.data_ptr() + gate.nbytes
        y = mlp(torch.ones(ROWS, HIDDEN, dtype=gate.dtype, requires_grad=True))
        with Copies() as copies:
            y.sum().backward()
        assert copies.count == 0
    mlp.up_proj.weight._local_tensor = local(mlp.up_proj.weight).clone()
    y = mlp(torch.ones(ROWS, HIDDEN, dtype=gate.dtype, requires_grad=True))
    with Copies() as copies:
        y.sum().backward()
    assert copies.count == 1, "weights that lie apart are copied, gradients are not"


def accumulation(rank: int, p: int) -> None:
    """main_grad collects two micro-batches; autograd gets nothing, or what Megatron's hooks wait for."""
    for hooks in (False, True):
        for plain, block, sequence_parallel in models(rank, p, gradient_accumulation_fusion=True):
            weights = {n: q for n, q in block.named_parameters() if q.dim() > 1}
            for weight in weights.values():
                weight.main_grad = torch.ones_like(weight)
                if hooks:
                    weight.grad_added_to_main_grad = False
                    weight.zero_out_wgrad = True
            for _ in range(2):
                run(plain, data(p))
                run(block, part(data(p), rank, p, sequence_parallel))
            for name, weight in weights.items():
                of_all = weight.main_grad.full_tensor() - 1
                torch.testing.assert_close(of_all, plain.get_parameter(name).grad)
                if hooks:
                    assert weight.grad_added_to_main_grad
                    assert weight.grad is not None and not local(weight.grad).any()
                else:
                    assert weight.grad is None


def deferred(rank: int, p: int) -> None:
    """Gradients of weights of two micro-batches, later and in order: bit by bit those of autograd."""
    g = torch.Generator().manual_seed(rank)
    column, row = (torch.randn(shape, generator=g) for shape in ((6, 8), (5, 6)))
    bias = torch.randn(5, generator=torch.Generator().manual_seed(9))
    batches = [torch.randn(2 * p, 8, generator=g) for _ in range(2)]

    def gradients(
        later: tuple[DeferredGrads, DeferredGrads] | None, sequence_parallel: bool, main: bool
    ) -> list[Any]:
        leaves = [t.clone().requires_grad_() for t in (column, row, bias)]
        for weight in leaves[:2] if main else ():
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        common: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "gradient_accumulation_fusion": main,
        }
        first, second = later or (None, None)
        found: list[Any] = []
        for batch in batches:
            x = batch.clone().requires_grad_()
            hidden = column_linear(x, leaves[0], deferred=first, **common)
            out = row_linear(hidden, leaves[1], leaves[2], deferred=second, **common)
            (out.sin() * batch[0, 0]).sum().backward()
            found.append(x.grad)
        if later is not None:
            assert leaves[0].grad is None and leaves[1].grad is None and leaves[2].grad is not None
            assert not any(getattr(weight, "main_grad", row.new_zeros(1)).any() for weight in leaves[:2])
            for queue in later:
                assert len(queue) == 2
                queue.compute()
                assert len(queue) == 1
                queue.compute()
                with pytest.raises(RuntimeError, match="DeferredGrads.compute: expected a call .*got none"):
                    queue.compute()
        return found + [getattr(leaf, "main_grad", leaf.grad) for leaf in leaves]

    for sequence_parallel in (True, False):
        for main in (False, True):
            expected = gradients(None, sequence_parallel, main)
            found = gradients((DeferredGrads(), DeferredGrads()), sequence_parallel, main)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    later = DeferredGrads()
    x = batches[0].clone().requires_grad_()
    frozen, trained = column.clone(), column.clone().requires_grad_()
    column_linear(x, [frozen], deferred=later)[0].sum().backward()
    assert not later, "a frozen weight has no gradient"
    column_linear(x, [frozen, trained], deferred=later)[1].sum().backward()
    later.compute()
    assert trained.grad is not None and frozen.grad is None
    with pytest.raises(ValueError, match="column_linear: deferred: expected weights that are leaves, got"):
        column_linear(x, [trained * 2], deferred=later)
    with pytest.raises(TypeError, match="row_linear: deferred: expected None or DeferredGrads, got bool"):
        row_linear(x, column.t(), deferred=True)  # type: ignore[arg-type]


def main_grad_of_16_bits(rank: int, p: int) -> None:
    """fp32 collects what bf16 would lose: 256 + 1 is 256 in bf16."""
    for main_dtype, expected in ((torch.float32, 257.0), (torch.bfloat16, 256.0)):
        layer = ColumnParallelLinear(8, 8 * p, False, gradient_accumulation_fusion=True, dtype=torch.bfloat16)
        layer.weight.main_grad = torch.full_like(layer.weight, 256, dtype=main_dtype)
        x = torch.zeros(1, 8, dtype=torch.bfloat16)
        x[0] = 1.0 if rank == 0 else 0.0
        layer(x).backward(torch.ones(p, 8, dtype=torch.bfloat16))
        assert (local(layer.weight.main_grad) == expected).all()


def changed_in_place(rank: int, p: int) -> None:
    """Results are no views, which nobody may change in place, as Megatron's loss does with logits."""
    x = torch.ones(2 * p, 3, 4, requires_grad=True)
    for sequence_parallel in (True, False):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        column = column_linear(x, torch.ones(8, 4), **options)
        for result in (column, row_linear(x, torch.ones(8, 4), **options)):
            x.grad = None
            result.mul_(2).sum().backward()
            assert x.grad is not None and x.grad.any()


def frozen(rank: int, p: int) -> None:
    for plain, block, sequence_parallel in models(rank, p):
        for weight in (block.mlp.up_proj.weight, block.mlp.down_proj.weight):
            weight.requires_grad_(False)
        y, dx = run(block, part(data(p), rank, p, sequence_parallel))
        torch.testing.assert_close(dx, part(run(plain, data(p))[1], rank, p, sequence_parallel))
        assert block.mlp.up_proj.weight.grad is None
        # No gradient of x: what the first layer of a model sees.
        layer = RowParallelLinear(p * 2, 4, sequence_parallel=sequence_parallel)
        layer(torch.ones(p, 2)).sum().backward()
        assert layer.bias.grad is not None and (local(layer.bias.grad) == p).all()
        with torch.no_grad():
            assert not block(part(data(p), rank, p, sequence_parallel)).requires_grad


SCENARIOS = (
    *(gradients, compiled, what_travels, nothing_is_copied, accumulation, deferred),
    *(main_grad_of_16_bits, changed_in_place, frozen),
)
test_layers = scenario_test(WORLD_SIZES, *SCENARIOS, timeout_s=300)
