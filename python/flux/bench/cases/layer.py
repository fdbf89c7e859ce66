"""The linear layers of a transformer block, forward and backward: flux against Megatron-Core.

Attention itself and the norms are left out: they are the same for both. Sequence parallelism is on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from flux.bench.cases import ranks
from flux.bench.cases.common import Context, Lineup, library
from flux.bench.cases.operands import normal
from flux.bench.suites import Problem, Request
from flux.testing.compare import agree

_M = (2048, 4096, 8192)
_CPU_M = (64,)

Make = Callable[[int, int], nn.Module]
Makes = tuple[Make, Make]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Model:
    """key_values: features of the keys, and as many of the values. ffn: of the MLP, 0 for a model whose MLP
    is a mixture of experts, which `bench moe` measures.
    """

    hidden: int
    key_values: int
    ffn: int


MODELS = {
    "llama-3-8b": Model(4096, 1024, 14336),
    "llama-3-70b": Model(8192, 1024, 28672),
    "mixtral-8x7b": Model(4096, 1024, 0),
    "tiny": Model(128, 64, 256),
}


def rows(request: Request) -> list[Problem]:
    ms = request.m or (_M if request.cuda else _CPU_M)
    return [LayerProblem.of(request.op, model, m) for model in request.pick(tuple(MODELS)) for m in ms]


@dataclass(frozen=True)
class LayerProblem(Problem):
    """One row: all projections of the block as one matrix of n rows, k columns and as many weights.

    op: "layer_forward", or "layer_training" for forward and backward, with all gradients.
    """

    @classmethod
    def of(cls, op: str, model: str, m: int) -> LayerProblem:
        shape = MODELS[model]
        return cls(
            op, model, op, m, sum(n * k for n, k, _ in _projections(shape)) // shape.hidden, shape.hidden
        )

    @property
    def training(self) -> bool:
        return self.op == "layer_training"

    def local(self, tp: int) -> tuple[int, int, int]:
        shape = MODELS[self.model]
        for size in (self.m, shape.hidden, shape.key_values, shape.ffn):
            if size % tp:
                raise ValueError(f"{self.op}: sizes must be divisible by the {tp} ranks, got {size}")
        return self.m, self.n // tp, self.k

    def on_wire(self, tp: int, element_bytes: int) -> int:
        """Each projection gathers or scatters M x hidden, and its gradient the same the other way round."""
        passes = len(_projections(MODELS[self.model])) * (2 if self.training else 1)
        return passes * (tp - 1) * self.m * self.k * element_bytes // tp


def _projections(shape: Model) -> list[tuple[int, int, str]]:
    """(N, K, pattern) of each, uncut: queries, keys and values; output; gate and up; down."""
    h, ffn = shape.hidden, shape.ffn
    attention = [(h + 2 * shape.key_values, h, "ag_gemm"), (h, h, "gemm_rs")]
    return attention + ([(2 * ffn, h, "ag_gemm"), (h, ffn, "gemm_rs")] if ffn else [])


class Block(nn.Module):
    """The projections of a block, of layers that `column` and `row` make from (in_features, out_features)."""

    def __init__(self, shape: Model, column: Make, row: Make) -> None:
        super().__init__()
        h, ffn = shape.hidden, shape.ffn
        self.qkv, self.out = column(h, h + 2 * shape.key_values), row(h, h)
        self.gate_up = column(h, 2 * ffn) if ffn else None
        self.down = row(ffn, h) if ffn else None

    def forward(self, x: Tensor, attended: Tensor) -> list[Tensor]:
        """x: this rank's rows [M/p, 1, hidden]; attended: what stands for the result of attention [M, 1,
        hidden/p]. Returns queries, keys and values; the projected output; and the MLP's result.
        """
        results = [_output(self.qkv(x)), _output(self.out(attended))]
        if self.gate_up is not None and self.down is not None:
            gate, up = _output(self.gate_up(x)).chunk(2, -1)
            results.append(_output(self.down(nn.functional.silu(gate) * up)))
        return results


def _output(result: Any) -> Tensor:
    """The output without the bias, which Megatron's layers also return."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _megatron_layers(context: Context) -> tuple[Makes, Makes]:
    """Makers of column- and row-parallel layers from (in_features, out_features): Megatron's, and flux's."""
    # Megatron calls collectives by names that newer torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if not context.cuda:
        # Megatron allocates on "the current CUDA device" whatever the model is on. Only in this process,
        # which does nothing but measure.
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
        torch.cuda.current_device = lambda: context.device  # type: ignore[assignment,return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are not needed
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig

        from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(context.world_size)
        # The first three are for attention and not for single layers.
        config = TransformerConfig(
            num_layers=1,
            num_attention_heads=context.world_size,
            hidden_size=context.world_size,
            tensor_model_parallel_size=context.world_size,
            sequence_parallel=True,
            params_dtype=context.dtype,
            use_cpu_initialization=not context.cuda,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
    common = {"config": config, "init_method": nn.init.zeros_, "bias": False, "skip_bias_add": True}

    def makes(column: Any, row: Any) -> Makes:
        return (
            lambda k, n: column(k, n, gather_output=False, **common),
            lambda k, n: row(k, n, input_is_parallel=True, **common),
        )

    ours = makes(FluxColumnParallelLinear, FluxRowParallelLinear)
    return makes(ColumnParallelLinear, RowParallelLinear), ours


@dataclass(frozen=True)
class _Pair:
    """Both blocks with the same weights, and their inputs."""

    ours: Block
    stock: Block
    inputs: tuple[Tensor, Tensor]
    grads: list[Tensor]

    @classmethod
    def of(cls, problem: Problem, context: Context) -> _Pair:
        shape, p, draw = MODELS[problem.model], context.world_size, normal(context)
        stock, ours = (Block(shape, *makes) for makes in _megatron_layers(context))
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            theirs.data.copy_(draw(*theirs.shape))
            getattr(mine, "_local_tensor", mine).data = theirs.data  # flux's are DTensors
        x = draw(problem.m // p, 1, shape.hidden).requires_grad_()
        attended = draw(problem.m, 1, shape.hidden // p).requires_grad_()
        with torch.no_grad():
            grads = [draw(*y.shape) for y in stock(x, attended)]
        return cls(ours, stock, (x, attended), grads)

    def run(self, block: Block, training: bool) -> list[Tensor]:
        if not training:
            return list(block(*self.inputs))
        with torch.enable_grad():
            results = block(*self.inputs)
            wanted = [*self.inputs, *block.parameters()]
            grads: Any = torch.autograd.grad(results, wanted, self.grads)
            return [*results, *(grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads)]


def check(problem: Problem, context: Context) -> str:
    """Every projection on exact integers, then the block and its gradients against stock."""
    for n, k, pattern in _projections(MODELS[problem.model]):
        found = ranks.check(Problem(pattern, problem.model, pattern, problem.m, n, k), context)
        if found != "exact":
            return f"{pattern} with N={n}, K={k}: {found}"
    pair = _Pair.of(problem, context)
    names = ["qkv", "out", "mlp"][: len(pair.grads)]
    names += [f"gradient of {name}" for name in ("x", "attended", *dict(pair.stock.named_parameters()))]
    got = pair.run(pair.ours, training=True)
    want = pair.run(pair.stock, training=True)
    return agree(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


def prepare(problem: Problem, context: Context) -> Lineup:
    assert isinstance(problem, LayerProblem)
    pair, training = _Pair.of(problem, context), problem.training
    lineup = Lineup(context)
    lineup.add_call("flux", "flux", lambda: pair.run(pair.ours, training))
    lineup.add_call(library(context), "gemm", _gemms_alone(problem, context))
    lineup.add_call("Megatron", "serial", lambda: pair.run(pair.stock, training))
    stock = f"megatron-core {version('megatron-core')}"
    lineup.notes.append(f"stock: {stock}; its counterpart: {type(pair.ours.qkv).__module__}")
    if context.cuda:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset; Megatron recommends 1")
        lineup.notes.append(f"CUDA_DEVICE_MAX_CONNECTIONS: {connections}")
    if not MODELS[problem.model].ffn:
        lineup.notes.append("attention projections only: the experts are in `bench moe`")
    return lineup


def _gemms_alone(problem: LayerProblem, context: Context) -> Callable[[], None]:
    """The GEMMs of one rank: for training of the gradients too, which take as many operations each."""
    operands = []
    for n, k, pattern in _projections(MODELS[problem.model]):
        m, n, k = Problem(pattern, "", pattern, problem.m, n, k).local(context.tp)
        make = {"device": context.device, "dtype": context.dtype}
        x, weight, grad = (torch.randn(*size, **make).mul_(0.1) for size in ((m, k), (n, k), (m, n)))  # type: ignore[call-overload]
        operands.append((x, weight, grad))

    def run() -> None:
        for x, weight, grad in operands:
            torch.mm(x, weight.t())
            if problem.training:
                torch.mm(grad, weight)
                torch.mm(grad.t(), x)

    return run
