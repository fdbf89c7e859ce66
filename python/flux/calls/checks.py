"""Argument checks, shared by the fake, reference, CPU and CUDA implementations of every operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flux._memory import wide_type
from flux.errors import fail as fail
from flux.fp8.scales import FP8, Scales, result_dtype

Tensor = torch.Tensor
# The shape of the result; m, n and k of the problem. Of several weights, shapes and a tuple of n.
Sizes = tuple[Any, int, Any, int]
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def floating(op: str, x: Tensor, with_scales: bool = False) -> None:
    """Checks the dtype of x in a call without scales. with_scales: the operator takes fp8 operands too."""
    if x.dtype in FLOATING:
        return
    if with_scales and x.dtype in FP8:
        fail(op, "scale_x", f"a tensor, as x is {x.dtype}", None)
    fail(op, "x", "dtype bfloat16, float16, float32 or float64", x.dtype)


# Why calls with fp8 operands, and such as write to `out`, have no backward pass.
WITH_SCALES = "flux.layers trains with fp8; or "
THROUGH_OUT = "there is no backward pass through out=: leave it away, or "


def no_backward(op: str, why: str = "there is no backward pass; ", /, **tensors: Tensor | None) -> None:
    """Refuses tensors that need gradients, in a call without a backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            expected = f"a tensor that needs no gradient ({why}call it under torch.no_grad())"
            fail(op, name, expected, "requires_grad=True in grad mode")


class Product(NamedTuple):
    """The arguments of flux.gemm and flux.gemm_rs, the scales in one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transpose_weight: bool
    out: Any = None  # of ways: a tensor
    scales: Scales | None = None

    def matrices(self, sizes: Sizes) -> Product:
        """A call whose operands are matrices, and scales canonical."""
        (_, m, n, k), (x, weight, bias, transpose_weight, out, scales) = sizes, self
        if scales is None and x.dim() == 2:
            return self
        if scales is not None:
            weight = weight.t() if transpose_weight else weight
            scales, transpose_weight = scales.canonical(n, k, transpose_weight), False
        if x.dim() != 2:
            x = x.reshape(m, k)
            out = None if out is None else out.view(out.shape[:-1].numel(), n)
        return Product(x, weight, bias, transpose_weight, out, scales)


def gemm_args(op: str, call: Product, p: int = 1, which: str = "") -> Sizes:
    """Checks x [..., k] · weight [n, k] (or [k, n]) + bias [n], rows scattered over p ranks.
    Returns the result's shape, m (rows of x), n and k. which: "[i]" for number i of a list of weights.
    """
    x, weight, bias, transpose_weight, _, scales = call
    shape, weight_shape = x.shape, weight.shape
    if type(transpose_weight) is not bool:
        raise TypeError(f"{op}: transpose_weight: expected True or False, got {transpose_weight!r}")
    if len(shape) < 2:
        fail(op, "x", "at least 2 dimensions [m, k]", f"{len(shape)}")
    if len(weight_shape) != 2:
        fail(op, "weight" + which, "2 dimensions", f"{len(weight_shape)}")
    k = shape[-1]
    n, weight_k = weight_shape[::-1] if transpose_weight else weight_shape
    if weight_k != k:
        layout = "[k, n] (transpose_weight=True)" if transpose_weight else "[n, k]"
        expected = f"{layout} with k = {k}, the last dimension of x"
        fail(op, "weight" + which, expected, f"shape {list(weight_shape)}")
    operands(op, x, weight, scales, transpose_weight, which)
    if bias is not None:
        if list(bias.shape) != [n]:
            fail(op, "bias" + which, f"shape [{n}], one entry for each column", f"shape {list(bias.shape)}")
        like(op, "bias" + which, bias, [n], x, scales)
    rows = shape[0]
    if rows % p:
        fail(op, "x", f"dimension 0 divisible by the {p} ranks of the group", f"shape {list(shape)}")
    return [rows // p, *shape[1:-1], n], math.prod(shape[:-1]), n, k


def operands(
    op: str, x: Tensor, weight: Tensor, scales: Scales | None, transpose_weight: bool = False, which: str = ""
) -> None:
    """Checks the types of x and of a weight, or of experts' weights, whose shapes fit, and their scales."""
    if scales is not None:
        scales.check(op, x, weight, transpose_weight, which)
    else:
        floating(op, x, with_scales=True)
        if weight.dtype != x.dtype:
            fail(op, "weight" + which, f"dtype {x.dtype}, that of x", weight.dtype)
    if weight.device != x.device:
        fail(op, "weight" + which, f"device {x.device}, that of x", weight.device)


def ag_gemm_args(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transpose_weight: bool,
    world_size: int,
    scales: Sequence[Scales] = (),
) -> tuple[list[list[int]], int, tuple[int, ...], int]:
    """Checks gathered x times each weight, plus its bias, if any. Returns shapes, m, n of each, and k."""
    count = len(weights)
    if count == 0:
        fail(op, "weight", "at least one weight", "an empty list")
    for name, entries in (("bias", biases), ("scale_w", scales)):
        if entries and len(entries) != count:
            fail(op, name, f"{count} entries, one for each weight", f"{len(entries)}")
    shapes, ns = [], []
    m = k = 0
    for i, weight in enumerate(weights):
        which = f"[{i}]" if count > 1 else ""
        bias, scale = biases[i] if biases else None, scales[i] if scales else None
        call = Product(x, weight, bias, transpose_weight, None, scale)
        shape, m, n, k = gemm_args(op, call, 1, which)
        shape[0] = shape[0] * world_size
        shapes.append(shape)
        ns.append(n)
    return shapes, m * world_size, tuple(ns), k


def norm_eps(x: object) -> float:
    """torch's default of an RMSNorm's epsilon, which for 16-bit types is that of fp32."""
    return torch.finfo(wide_type(x.dtype) if isinstance(x, Tensor) else torch.float32).eps


def rows_args(op: str, x: Tensor, p: int, gathers: bool = False) -> list[int]:
    """Checks x [rows, ...], scattered over p ranks or gathered from them; returns the shape of the result."""
    if x.dim() < 1:
        fail(op, "x", "at least 1 dimension", "0")
    if not gathers or x.dtype not in FP8:  # gathered rows are only copied
        floating(op, x)
    if not gathers and x.shape[0] % p:
        fail(op, "x", f"dimension 0 divisible by the {p} ranks of the group", f"shape {list(x.shape)}")
    return [x.shape[0] * p if gathers else x.shape[0] // p, *x.shape[1:]]


def grads(op: str, x: Tensor, grad_output: Tensor, main_grad: Tensor | None, shape: list[int]) -> None:
    """Checks the types of x and of a gradient, and the sum of that shape to which their product is added."""
    floating(op, x)
    if grad_output.dtype != x.dtype:
        fail(op, "grad_output", f"dtype {x.dtype}, that of x", grad_output.dtype)
    if main_grad is not None and list(main_grad.shape) != shape:
        fail(op, "main_grad", f"shape {shape}", f"shape {list(main_grad.shape)}")
    if main_grad is not None and main_grad.dtype not in (x.dtype, wide_type(x.dtype)):
        fail(op, "main_grad", f"dtype {x.dtype}, that of x, or float32", main_grad.dtype)
    for name, tensor in (("grad_output", grad_output), ("main_grad", main_grad)):
        if tensor is not None and tensor.device != x.device:
            fail(op, name, f"device {x.device}, that of x", tensor.device)


def list_like(op: str, name: str, value: object, like: int | None) -> None:
    """Checks that an argument is a list of `like` entries if weight is a list, and no list otherwise."""
    if like is None and isinstance(value, (list, tuple)):
        fail(op, name, "a tensor or None, as weight is one tensor", "a list")
    if like is None or value is None:
        return
    if not isinstance(value, (list, tuple)):
        fail(op, name, f"None or a list of {like}, as weight is a list", type(value).__name__)
    if len(value) != like:
        fail(op, name, f"{like} entries, one for each weight", f"{len(value)}")


def out_arg(
    op: str, out: Tensor, shape: list[int], x: Tensor, which: str = "", scales: Scales | None = None
) -> None:
    """Checks the `out` argument against the result's shape and dtype, and x's device."""
    like(op, "out" + which, out, shape, x, scales)
    if not out.is_contiguous():
        fail(op, "out" + which, "a contiguous tensor", f"strides {list(out.stride())}")


def not_expanded(op: str, name: str, written: Tensor) -> None:
    if any(stride == 0 and count > 1 for count, stride in zip(written.shape, written.stride(), strict=True)):
        fail(op, name, "memory of its own for each element", f"strides {list(written.stride())}")


def separate(
    op: str, name: str, written: Tensor, *others: Tensor | None, may_be: Sequence[Tensor | None] = ()
) -> None:
    """Checks that an output shares no memory with itself or others, but `may_be`; tells autograd."""
    not_expanded(op, name, written)
    for other in others:
        if other is None or not share_memory(written, other):
            continue
        same = written.data_ptr() == other.data_ptr() and written.shape == other.shape
        if same and other.is_contiguous() and any(other is each for each in may_be):
            continue
        fail(op, name, "memory of its own", "a tensor that overlaps another argument")
    torch.autograd.graph.increment_version(written)


def share_memory(written: Tensor, other: Tensor) -> bool:
    """Whether a contiguous tensor and another one have an element in common."""
    if written.device != other.device or written.is_meta or 0 in (written.numel(), other.numel()):
        return False
    begin, end = written.data_ptr(), written.data_ptr() + written.nbytes
    size = other.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(other.shape, other.stride(), strict=True))
    first, last = other.data_ptr(), other.data_ptr() + (reach + 1) * size
    if last <= begin or end <= first:
        return False
    if reach + 1 == other.numel():
        return True
    # `other` has gaps, in which `written` may be. Mark every element of `other`, then look at the range.
    marks = torch.zeros(reach + 1, dtype=torch.bool)
    marks.as_strided(other.shape, other.stride()).fill_(True)
    low = max(0, (begin - first) // size)
    return bool(marks[low : -(-(end - first) // size)].any())


def like(
    op: str, name: str, tensor: Tensor, shape: list[int], x: Tensor, scales: Scales | None = None
) -> None:
    """Checks a tensor against a shape, x's device, and x's dtype, or with scales the result's."""
    if list(tensor.shape) != shape:
        fail(op, name, f"shape {shape}", f"shape {list(tensor.shape)}")
    if tensor.dtype != result_dtype(x, scales):
        whose = "x" if scales is None else "the result"
        fail(op, name, f"dtype {result_dtype(x, scales)}, that of {whose}", tensor.dtype)
    if tensor.device != x.device:
        fail(op, name, f"device {x.device}, that of x", tensor.device)
