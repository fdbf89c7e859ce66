"""flux's rewrites of graphs that vLLM 0.32 has made (vllm_graphs): models of two layers on two ranks, as flux
gets them. `vllm_workers.save_graphs` wrote them.

vLLM 0.26 and 0.33 do not run without a GPU, so there are no graphs of theirs. The operators that flux matches
have the same parameters in all three: OPERATORS, read in their wheels.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import saved_graphs
import torch
from torch import fx
from vllm_stand_in import define_all_reduce, define_norm

from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import sequence
from flux.testing import spawn

FOLDER = Path(__file__).with_name("vllm_graphs")
SUMS = 4
# In vLLM 0.26.0, 0.32.0 and 0.33.0 (vllm/ir/ops/layernorm.py, vllm/distributed/parallel_state.py).
OPERATORS = {
    "fused_add_rms_norm": ["x", "x_residual", "weight", "epsilon", "variance_size"],
    "rms_norm": ["x", "weight", "epsilon", "variance_size"],
    "all_reduce": ["tensor", "group_name"],
}


def in_a_process(rank: int, world_size: int, name: str, arguments: tuple[bool, ...]) -> None:
    """Runs a check where nothing else defines vLLM's operators."""
    libraries = [define_all_reduce(), define_norm()]
    libraries[1].define(
        "fused_add_rms_norm.maybe_inplace(Tensor x, Tensor x_residual, Tensor? weight, float epsilon,"
        " int? variance_size=None) -> (Tensor, Tensor)"
    )
    globals()[name](*arguments)
    del libraries


@pytest.mark.parametrize(
    "check, arguments",
    [
        ("a_dense_model_becomes_sequence_parallel", ()),
        ("large_batches_stay_sequence_parallel", ()),
        ("smaller_batches_are_sums_with_norm", ()),
        ("the_smallest_batches_are_vllms", (False,)),
        ("the_smallest_batches_are_vllms", (True,)),
        ("the_graphs_call_operators_of_all_versions", ()),
    ],
)
def test_saved_graphs(check: str, arguments: tuple[bool, ...]) -> None:
    spawn(in_a_process, 1, check, arguments, backend="gloo")


def load(name: str) -> list[fx.Graph]:
    return [saved_graphs.load(path) for path in sorted(FOLDER.glob(f"{name}*.json"))]


def count(found: list[fx.Graph], name: str) -> int:
    """Calls of operators of a name."""
    nodes = [node for graph in found for node in graph.nodes if node.op == "call_function"]
    return sum(node.target.__name__.partition(".")[0] == name for node in nodes)


def a_dense_model_becomes_sequence_parallel() -> None:
    (graph,) = load("qwen3-model")
    assert count([graph], "linear_all_reduce") == count([graph], "fused_add_rms_norm") == SUMS
    asked = []

    def begins(n: int, k: int, dtype: torch.dtype, group: str) -> int:
        asked.append((n, k, dtype))
        return 33

    assert sequence.shard(graph, begins) == sequence.Sharded(SUMS, 33)
    assert asked == [(256, 128, torch.float32), (256, 256, torch.float32)] * 2
    graph.lint()
    assert count([graph], "linear_scatter") == SUMS
    assert count([graph], "norm_gather_linear") == SUMS - 1 and count([graph], "norm_gather") == 1
    assert count([graph], "linear_all_reduce") == count([graph], "fused_add_rms_norm") == 0


def settled(start: int, end: int) -> list[fx.Graph]:
    """The pieces of the dense model in a range, as vLLM would have them of flux's pass before it fuses."""
    pieces = load("qwen3-piece")
    for piece in pieces:
        graphs.settle_sums(piece, start, end)
        sequence.unshard(piece, end)
        piece.lint()
    return pieces


def large_batches_stay_sequence_parallel() -> None:
    assert sum(sequence.count_sharded(piece) for piece in settled(33, 512)) == SUMS


def smaller_batches_are_sums_with_norm() -> None:
    pieces = settled(17, 32)
    assert count(pieces, "linear_scatter") == 0 and sum(map(graphs.count_kept, pieces)) == SUMS
    assert sum(graphs.unfuse(piece, 32) for piece in pieces) == 0
    assert sum(graphs.fuse_norm(piece, 17) for piece in pieces) == SUMS
    assert count(pieces, "linear_all_reduce_norm") == SUMS and count(pieces, "fused_add_rms_norm") == 0


def the_smallest_batches_are_vllms(served: bool) -> None:
    pieces = settled(1, 16)
    assert sum(graphs.unfuse(piece, 16) for piece in pieces) == SUMS
    # vLLM also sums the embedding, in front of a norm that adds nothing.
    assert count(pieces, "all_reduce") == SUMS + 1 and count(pieces, "fused_add_rms_norm") == SUMS
    rules = {"tp:0": graphs.SumRule("7", 1, 16 * 256 * 4 if served else 16 * 256 * 4 - 1)}
    fused = sum(graphs.fuse_sum_and_norm(piece, 1, 16, rules) for piece in pieces)
    assert fused == count(pieces, "all_reduce_norm") == (SUMS if served else 0)
    for piece in pieces:
        piece.lint()


def the_graphs_call_operators_of_all_versions() -> None:
    """Every call fits the parameters that the operator has in each of them."""
    called: set[str] = set()
    for graph in load("qwen3"):
        for node in graph.nodes:
            name = str(getattr(node.target, "__name__", "")).partition(".")[0]
            if node.op == "call_function" and name in OPERATORS:
                kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
                names = [
                    inspect.Parameter(n, kinds, default=None if n == "variance_size" else inspect._empty)
                    for n in OPERATORS[name]
                ]
                inspect.Signature(names).bind(*node.args, **node.kwargs)
                called.add(name)
    assert called == OPERATORS.keys()
