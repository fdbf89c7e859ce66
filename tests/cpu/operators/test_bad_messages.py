"""What errors of dense operators say: the operator, the argument, what is expected and what it got.
test_bad_calls.py has thousands of such calls, and looks at the form of the message only.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flux
from flux.testing import spawn

X, W, B = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
X2 = torch.ones(5, 8)
ROWS = {"gemm": 4, "gemm_rs": 2, "ag_gemm": 8, "gemm_ar": 4}  # of a result, on two ranks
Bad = list[tuple[str, dict[str, Any], tuple[str, ...]]]  # what is wrong, the arguments, words of the message


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


def of_products(rows: int) -> Bad:
    """x, weight, bias and out, which these operators share."""
    out = {"out": torch.ones(rows, 6)}
    return [
        ("x one-dimensional", {"x": torch.ones(8)}, ("x", "2 dimensions", "1")),
        ("k differs", {"weight": torch.ones(6, 7)}, ("weight", "k = 8", "[6, 7]")),
        ("k differs, transposed", {"transpose_weight": True}, ("weight", "[k, n]", "k = 8", "[6, 8]")),
        ("weight three-dimensional", {"weight": torch.ones(1, 6, 8)}, ("weight", "2 dimensions", "3")),
        ("weight dtype", {"weight": W.bfloat16()}, ("weight", "torch.float32", "torch.bfloat16")),
        ("weight device", {"weight": W.to("meta")}, ("weight", "cpu", "meta")),
        ("integers", {"x": X.int(), "weight": W.int()}, ("x", "bfloat16, float16, float32", "torch.int32")),
        ("bias dtype", {"bias": B.half()}, ("bias", "torch.float32", "torch.float16")),
        ("bias shape", {"bias": torch.ones(5)}, ("bias", "[6]", "[5]")),
        ("bias two-dimensional", {"bias": torch.ones(1, 6)}, ("bias", "[6]", "[1, 6]")),
        ("bias device", {"bias": B.to("meta")}, ("bias", "cpu", "meta")),
        ("out shape", {"out": torch.ones(rows, 5)}, ("out", f"[{rows}, 6]", f"[{rows}, 5]")),
        ("out dtype", {"out": torch.ones(rows, 6).half()}, ("out", "torch.float32", "torch.float16")),
        ("out strides", {"out": torch.ones(6, rows).t()}, ("out", "contiguous", f"[1, {rows}]")),
        ("out device", {"out": torch.ones(rows, 6, device="meta")}, ("out", "cpu", "meta")),
        ("x needs grad", {"x": leaf(X), **out}, ("x", "no_grad", "requires_grad")),
        ("weight needs grad", {"weight": leaf(W), **out}, ("weight", "no_grad", "requires_grad")),
        ("bias needs grad", {"bias": leaf(B), **out}, ("bias", "no_grad", "requires_grad")),
    ]


LISTS: Bad = [
    ("no weight", {"weight": [], "bias": None}, ("weight", "at least one", "empty list")),
    ("a weight of a list", {"weight": [W, W[:, 1:]], "bias": None}, ("weight[1]", "k = 8", "[6, 7]")),
    ("a bias of a list", {"weight": [W, W], "bias": [None, B[1:]]}, ("bias[1]", "[6]", "[5]")),
    ("too few biases", {"weight": [W, W], "bias": [B]}, ("bias", "2 entries", "1")),
    ("one bias for a list", {"weight": [W, W]}, ("bias", "a list of 2", "Tensor")),
    ("a list of biases for one", {"bias": [B]}, ("bias", "weight is one tensor", "a list")),
    ("one out for a list", {"weight": [W], "bias": None, "out": X}, ("out", "a list of 1", "Tensor")),
    (
        "an out of a list",
        {"weight": [W, W], "bias": None, "out": [torch.ones(8, 6), X]},
        ("out[1]", "[8, 6]"),
    ),
    (
        "in a list needs grad",
        {"weight": [W, leaf(W)], "bias": None, "out": [torch.ones(8, 6)] * 2},
        ("weight[1]", "no_grad"),
    ),
    ("out with gathered", {"out": torch.ones(4), "return_gathered": True}, ("out", "[8, 6]", "[4]")),
    (
        "x without dimensions, all asked for",
        {"x": torch.tensor(1.0), "out": torch.ones(8, 6), "return_gathered": True},
        ("x", "2 dimensions", "0"),
    ),
]
NORMS: Bad = [
    ("residual shape", {"residual": torch.ones(6)}, ("residual", "[4, 6]", "[6]")),
    ("residual dtype", {"residual": torch.ones(4, 6).half()}, ("residual", "torch.float32", "torch.float16")),
    ("norm_weight shape", {"norm_weight": torch.ones(4, 6)}, ("norm_weight", "[6]", "[4, 6]")),
    ("norm_weight device", {"norm_weight": B.to("meta")}, ("norm_weight", "cpu", "meta")),
    ("eps", {"norm_weight": B, "eps": -1.0}, ("eps", "not negative", "-1.0")),
    ("eps no number", {"norm_weight": B, "eps": float("nan")}, ("eps", "not negative", "nan")),
    ("out with a norm", {"norm_weight": B, "out": torch.ones(4, 6)}, ("out", "None with norm_weight")),
    ("x needs grad, without out", {"x": leaf(X)}, ("x", "no_grad", "requires_grad")),
    ("residual needs grad", {"residual": leaf(X)}, ("residual", "no_grad")),
    ("norm_weight needs grad", {"norm_weight": leaf(B)}, ("norm_weight", "no_grad", "requires_grad")),
]
INTEGERS = ("integers", {"x": X.int()}, ("x", "bfloat16, float16, float32", "torch.int32"))
TABLES: dict[str, Bad] = {
    **{op: of_products(rows) for op, rows in ROWS.items()},
    "all_gather": [
        INTEGERS,
        ("x without dimensions", {"x": torch.tensor(1.0)}, ("x", "1 dimension", "0")),
        ("out shape", {"x": X, "out": X}, ("out", "[8, 8]", "[4, 8]")),
        ("needs grad", {"x": leaf(X), "out": torch.ones(8, 8)}, ("x", "no_grad", "requires_grad")),
    ],
    "all_reduce": [
        INTEGERS,
        ("out shape", {"x": X, "out": W}, ("out", "[4, 8]", "[6, 8]")),
        ("out dtype", {"x": X, "out": X.half()}, ("out", "torch.float32", "torch.float16")),
        ("needs grad", {"x": leaf(X)}, ("x", "no_grad", "requires_grad")),
        ("residual shape", {"x": X, "residual": B}, ("residual", "[4, 8]", "[6]")),
        ("residual needs grad", {"x": X, "residual": leaf(X)}, ("residual", "no_grad")),
        ("norm_weight shape", {"x": X, "norm_weight": B}, ("norm_weight", "[8]", "[6]")),
        ("norm of a number", {"x": torch.tensor(1.0), "norm_weight": B}, ("x", "1 dimension", "0")),
        ("eps", {"x": X, "norm_weight": X[0], "eps": -1.0}, ("eps", "not negative", "-1.0")),
        ("out with a norm", {"x": X, "norm_weight": X[0], "out": X}, ("out", "None with norm_weight")),
        ("part of residual", {"x": X, "residual": X2[:4], "out": X2[1:5]}, ("out", "memory of its own")),
    ],
    "reduce_scatter": [
        INTEGERS,
        ("no rows", {"x": torch.tensor(1.0)}, ("x", "1 dimension", "got 0")),
        ("rows", {"x": X[1:]}, ("x", "dimension 0 divisible by the 2 ranks", "[3, 8]")),
        ("out shape", {"x": X, "out": X}, ("out", "[2, 8]", "[4, 8]")),
        ("out dtype", {"x": X, "out": X[:2].half()}, ("out", "torch.float32", "torch.float16")),
        ("out strides", {"x": X, "out": torch.ones(8, 2).t()}, ("out", "contiguous", "[1, 2]")),
        ("needs grad", {"x": leaf(X), "out": X[:2].clone()}, ("x", "no_grad")),
    ],
}
TABLES["ag_gemm"] += LISTS
TABLES["gemm_ar"] += NORMS


def message(op: str, arguments: dict[str, Any]) -> str:
    try:
        getattr(flux, op)(**arguments)
    except ValueError as error:
        return str(error)
    return "no error"


def all_messages(rank: int, world_size: int) -> dict[str, list[str]]:
    told = {}
    for op, table in TABLES.items():
        good = {"x": X, "weight": W, "bias": B} if op in ROWS else {}
        told[op] = [message(op, good | change) for _, change, _ in table]
    told["disagreement"] = [message("reduce_scatter", {"x": X if rank else X[:2]})]
    # Nobody was waited for, and the group works on.
    for op, rows in ROWS.items():
        with torch.no_grad():
            result = getattr(flux, op)(X, torch.nn.Parameter(W))
        assert result.shape == (rows, 6) and not result.requires_grad
    assert torch.equal(flux.reduce_scatter(X), 2 * X[:2])
    return told


@functools.cache
def answers() -> list[dict[str, list[str]]]:
    return spawn(all_messages, 2, backend="gloo")


@pytest.mark.parametrize("op", TABLES)
def test_they_name_operator_argument_expected_and_got(op: str) -> None:
    for told in answers():
        for (name, _, words), message in zip(TABLES[op], told[op], strict=True):
            assert message.startswith(f"{op}: {words[0]}: expected "), f"{name}: {message}"
            assert ", got " in message
            for word in words[1:]:
                assert word in message, f"{name}: {message}"


def test_one_of_ranks_that_differ() -> None:
    for told in answers():
        assert told["disagreement"][0].startswith("reduce_scatter: expected the same call on all ranks")
