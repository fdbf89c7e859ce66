"""Argument checks, shared by the fake, reference, CPU and CUDA implementations of every operator.

Every message names operator, argument, what was expected and what came.
"""

from __future__ import annotations

from typing import NoReturn

import torch

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def no_grad_needed(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuses inputs that a backward pass would reach: the operators have none."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            fail(
                op,
                name,
                "a tensor that needs no gradient (there is no backward pass; call it under torch.no_grad())",
                "requires_grad=True in grad mode",
            )


def gemm_args(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    world_size: int = 1,
) -> tuple[list[int], int, int, int]:
    """Checks x [..., k] · weight [n, k] (or [k, n]) + bias [n], rows scattered over `world_size` ranks.

    Returns:
        shape of the result, m (rows of x, flattened), n, k
    """
    shape = x.shape
    weight_shape = weight.shape
    if len(shape) < 2:
        fail(op, "x", "at least 2 dimensions [m, k]", f"{len(shape)}")
    if len(weight_shape) != 2:
        fail(op, "weight", "2 dimensions", f"{len(weight_shape)}")
    k = shape[-1]
    if transpose_weight:
        weight_k, n = weight_shape
    else:
        n, weight_k = weight_shape
    if weight_k != k:
        layout = "[k, n] (transpose_weight=True)" if transpose_weight else "[n, k]"
        fail(op, "weight", f"{layout} with k = {k}, the last dimension of x", f"shape {list(weight_shape)}")
    dtype = x.dtype
    if dtype not in FLOATING:
        fail(op, "x", "dtype bfloat16, float16, float32 or float64", dtype)
    if weight.dtype != dtype:
        fail(op, "weight", f"dtype {dtype}, that of x", weight.dtype)
    device = x.device
    if weight.device != device:
        fail(op, "weight", f"device {device}, that of x", weight.device)
    if bias is not None:
        if list(bias.shape) != [n]:
            fail(op, "bias", f"shape [{n}], one entry for each column", f"shape {list(bias.shape)}")
        if bias.dtype != dtype:
            fail(op, "bias", f"dtype {dtype}, that of x", bias.dtype)
        if bias.device != device:
            fail(op, "bias", f"device {device}, that of x", bias.device)
    rows = shape[0]
    if rows % world_size:
        fail(op, "x", f"dimension 0 divisible by the {world_size} ranks of the group", f"shape {list(shape)}")
    if len(shape) == 2:
        return [rows // world_size, n], rows, n, k
    m = rows
    for size in shape[1:-1]:
        m = m * size
    return [rows // world_size, *shape[1:-1], n], m, n, k


def out_arg(op: str, out: torch.Tensor, shape: list[int], x: torch.Tensor) -> None:
    """Checks the `out` argument against the result's shape, and x's dtype and device."""
    if list(out.shape) != shape:
        fail(op, "out", f"shape {shape}", f"shape {list(out.shape)}")
    if out.dtype != x.dtype:
        fail(op, "out", f"dtype {x.dtype}, that of x", out.dtype)
    if out.device != x.device:
        fail(op, "out", f"device {x.device}, that of x", out.device)
    if not out.is_contiguous():
        fail(op, "out", "a contiguous tensor", f"strides {list(out.stride())}")
