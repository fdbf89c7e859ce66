"""Grouped GEMM: rows that are sorted by expert, each times the weight of its expert."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from flux import _invariance, _native
from flux._invariance import refuse
from flux._log import say_once
from flux._memory import aligned_experts, readable, taken
from flux.calls import argument_types, checks
from flux.calls.schemas import library
from flux.comm import cuda, repeat
from flux.fp8 import scales as fp8
from flux.fp8.scales import Scales
from flux.fp8.wide_product import wide_expert
from flux.ops.quantize import dequantized
from flux.plan.choose import PlanInput, can_run_fused

ACTIVATIONS = ("silu", "gelu", "swiglu")  # in the order of csrc/moe/activation.cuh
NUMBERS = {None: 0} | {name: 1 + i for i, name in enumerate(ACTIVATIONS)}
_OP = repeat.operator()
_BLOCK_M: int = _native.core.tile_configs()[0].block_m


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    activation: str | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> torch.Tensor:
    """activation(x[rows] · weight[e]ᵀ) for the rows of each expert e, accumulated in fp32 and rounded once.

    Experts may have any number of rows, none too. Nothing is read on the host, but for types and sizes that
    torch has no grouped GEMM for.

    Args:
        x: [M, K], bfloat16, float16, float32 or float64; with scales fp8, as in flux.gemm.
        weight: [E, N, K], each expert's as in nn.Linear; dtype and device of x. With scales float8_e4m3fn,
            K in one piece.
        offsets: int32 [E + 1]. Rows offsets[e] to offsets[e + 1] are expert e's; the first entry is 0, none
            is smaller than the one before, and the last is at most R. Checked on CPUs only.
        rows: int32 or int64 [R]: result row i is made of x[rows[i]]. None: of x[i]. Checked on CPUs only, for
            the rows of experts.
        activation: "silu", "gelu" (the exact one), "swiglu" (silu of the first N/2 columns times the last
            N/2), or None.
        scale_x: of x: one entry, [M, 1], or [M, K / 128], as in flux.gemm.
        scale_w: of the weights: one entry, [E], [E, N], or with block scales [E, N / 128, K / 128].
        out_dtype, accumulate: as in flux.gemm.

    Returns:
        [R, N] (without `rows` [M, N]; for "swiglu" N/2 columns) in x's dtype, with scales in `out_dtype`, a
        fresh tensor. What its rows from offsets[E] on hold is not specified.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with scales.

    Example::

        x, weight = torch.randn(6, 64), torch.randn(3, 32, 64)
        offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)  # 2 rows, none, 4 rows
        out = flux.grouped_gemm(x, weight, offsets, activation="silu")
        assert out.shape == (6, 32)
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if not torch.compiler.is_compiling():
        given = (_OP, _invariance.active(), x, weight, offsets, rows, activation, *scaling)
        done: torch.Tensor | None = repeat.without_group().call(*given)
        if done is not None:
            return done
    of_scales = fp8.named(scale_x, scale_w, out_dtype, accumulate)
    others = {"offsets": offsets, "rows": rows, "activation": activation}
    argument_types.check("grouped_gemm", x=x, weight=weight, **others, **of_scales)
    if scaling:
        fp8.no_backward("grouped_gemm", x=x, weight=weight, scale_x=scale_x, scale_w=scale_w)
    result: torch.Tensor = _op(x, weight, offsets, rows, activation, *scaling)
    return result


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None = None,
    activation: str | None = None,
    *scaling: Any,
) -> torch.Tensor:
    """grouped_gemm with torch only, expert by expert; rows without an expert are zero. Reads the offsets on
    the host. scaling: as in gemm.reference.
    """
    scales = fp8.given("grouped_gemm", *scaling)
    shape = _checked(x, weight, offsets, rows, activation, scales)
    out = x.new_zeros(shape, dtype=fp8.result_dtype(x, scales))
    bounds = _checked_bounds(x, offsets, rows)
    if scales is not None:
        scales = scales.canonical_experts(*weight.shape)
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        mine = slice(first, last) if rows is None else rows[first:last].long()
        some = x[mine] if isinstance(mine, slice) else taken(x, mine)
        of_expert = expert_product(some, weight, expert, scales, mine)
        out[first:last] = activate(of_expert, activation)
    return out


def expert_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert: int,
    scales: Scales | None,
    rows: slice | torch.Tensor = slice(None),
) -> torch.Tensor:
    """Rows x [m, k] times the weight of their expert, of weights [experts, n, k], in the wide type. scales:
    canonical, of all rows and experts; rows: which of them these are.
    """
    scale = None if scales is None else scales.x_of(rows)
    return wide_expert(weight, expert, scales).times(x, scale=scale)


def _checked_bounds(x: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor | None) -> list[int]:
    """Checks the values of offsets and rows; returns the offsets."""
    op = "grouped_gemm"
    bounds = checked_bounds(op, offsets, x.shape[0] if rows is None else rows.shape[0])
    if rows is not None and bounds[-1] > 0:
        low, high = (int(bound) for bound in rows[: bounds[-1]].aminmax())
        if low < 0 or high >= x.shape[0]:
            checks.fail(op, "rows", f"numbers of the {x.shape[0]} rows of x", low if low < 0 else high)
    return bounds


def checked_bounds(op: str, offsets: torch.Tensor, count: int) -> list[int]:
    """The offsets of experts' rows, on the host, checked. count: of all rows."""
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0:
        checks.fail(op, "offsets", "0 as the first entry", bounds[0])
    for before, after in zip(bounds, bounds[1:], strict=False):
        if after < before:
            checks.fail(op, "offsets", "entries that do not decrease", f"{after} after {before}")
    if bounds[-1] > count:
        checks.fail(op, "offsets", f"entries up to the {count} rows", bounds[-1])
    return bounds


def activate(product: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of products in their wide type."""
    if activation == "swiglu":
        gate, up = product.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if activation == "silu":
        return torch.nn.functional.silu(product)
    return torch.nn.functional.gelu(product) if activation == "gelu" else product


def silu_slope(z: torch.Tensor) -> torch.Tensor:
    """The derivative of silu, by hand: aten.silu_backward has no derivative itself."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def expert_weight(
    op: str, x: torch.Tensor, weight: torch.Tensor, activation: str | None, scales: Scales | None = None
) -> int:
    """Checks x [M, K], weight [E, N, K] and the activation; returns the columns of the result."""
    refuse(op)
    if x.dim() != 2:
        checks.fail(op, "x", "2 dimensions [m, k]", f"{x.dim()}")
    if weight.dim() != 3:
        checks.fail(op, "weight", "3 dimensions [experts, n, k]", f"{weight.dim()}")
    if weight.shape[2] != x.shape[1]:
        checks.fail(
            op,
            "weight",
            f"[experts, n, k] with k = {x.shape[1]}, the last dimension of x",
            f"shape {list(weight.shape)}",
        )
    if scales is not None:
        scales.check_experts(op, x, weight)
    else:
        checks.floating(op, x, with_scales=True)
        if weight.dtype != x.dtype:
            checks.fail(op, "weight", f"dtype {x.dtype}, that of x", weight.dtype)
    if weight.device != x.device:
        checks.fail(op, "weight", f"device {x.device}, that of x", weight.device)
    if activation is not None and activation not in ACTIVATIONS:
        checks.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
    n = weight.shape[1]
    if activation != "swiglu":
        return n
    if n % 2:
        checks.fail(op, "weight", "an even n for swiglu", f"shape {list(weight.shape)}")
    return n // 2


def _checked(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    scales: Scales | None = None,
) -> list[int]:
    op = "grouped_gemm"
    columns = expert_weight(op, x, weight, activation, scales)
    experts = weight.shape[0]
    if list(offsets.shape) != [experts + 1]:
        checks.fail(op, "offsets", f"shape [{experts + 1}], one more than experts", list(offsets.shape))
    if offsets.dtype != torch.int32:
        checks.fail(op, "offsets", "dtype int32", offsets.dtype)
    if offsets.device != x.device:
        checks.fail(op, "offsets", f"device {x.device}, that of x", offsets.device)
    if rows is None:
        return [x.shape[0], columns]
    if rows.dim() != 1:
        checks.fail(op, "rows", "1 dimension", rows.dim())
    if rows.dtype not in (torch.int32, torch.int64):
        checks.fail(op, "rows", "dtype int32 or int64", rows.dtype)
    if rows.device != x.device:
        checks.fail(op, "rows", f"device {x.device}, that of x", rows.device)
    return [rows.shape[0], columns]


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    *scaling: Any,
) -> torch.Tensor:
    scales = fp8.given("grouped_gemm", *scaling)
    shape = _checked(x, weight, offsets, rows, activation, scales)
    return x.new_empty(shape, dtype=fp8.result_dtype(x, scales))


def _cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    *scaling: Any,
) -> torch.Tensor:
    return _on_gpu(x, weight, offsets, rows, activation, fp8.given("grouped_gemm", *scaling))


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    scales: Scales | None = None,
    within: repeat.Recipe | None = None,
) -> torch.Tensor:
    """grouped_gemm of rows in order, without gradients and without torch's dispatcher. within: of the call
    that this one is a part of, if that is to be known (flux.comm.repeat).
    """
    if x.is_cuda:
        return _on_gpu(x, weight, offsets, None, None, scales, within)
    return reference(x, weight, offsets, None, None, *(scales or ()))


def _on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    scales: Scales | None,
    within: repeat.Recipe | None = None,
) -> torch.Tensor:
    given = {"batch_invariant": _invariance.active(), "x": x, "weight": weight, "offsets": offsets}
    given |= {"rows": rows, "activation": activation, **fp8.by_name(scales)}
    recipe = repeat.Recipe(_OP, given, within)
    if within is None:
        done: torch.Tensor | None = repeat.without_group().call_below(*recipe.given)
        if done is not None:
            return done
    shape, dtype = _checked(x, weight, offsets, rows, activation, scales), fp8.result_dtype(x, scales)
    if 0 in shape or x.shape[1] == 0:
        return x.new_zeros(shape, dtype=dtype)
    if scales is not None:
        scales = scales.canonical_experts(*weight.shape)
    if why_not(x, weight.shape[1], shape[1], scales) is None:
        out = x.new_empty(shape, dtype=dtype)
        launch(x, weight, offsets, rows, activation, out, scales=scales, recipe=recipe)
        return out
    if rows is not None:
        # Entries after the last expert's rows may be invalid.
        rows = rows.clamp(min=0)
        x = taken(x, rows)
        scales = None if scales is None else scales._replace(x=scales.x_of(rows))
    if scales is not None:
        return unfused_scaled(x, weight, offsets, activation, scales)
    return unfused(x, weight, offsets, activation)


def why_not(x: torch.Tensor, n: int, columns: int, scales: Scales | None) -> str | None:
    """Why the kernel does not support the arguments, or None. columns: of the result, n: of the products."""
    if scales is not None:
        problem = PlanInput("cuda", 1, columns, x.shape[1], x.dtype, scaling=scales.scaling(x.shape[1]))
        fused, reason = can_run_fused("grouped_gemm", problem)
        if fused and scales.x.dim() == 2 and columns < n and columns % fp8.BLOCK:
            return f"halves of {columns} columns share a block's scale"
        return cuda.why_not(x.device) if fused else reason
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
    if x.shape[1] % 8 or columns % 8:
        return f"n, k = {columns}, {x.shape[1]} are not multiples of 8: TMA needs 16-byte aligned rows"
    return cuda.why_not(x.device)


def schedule_words(num_rows: int, experts: int) -> int:
    """Number of int32 words of a tile schedule."""
    return 4 * (num_rows // _BLOCK_M + experts) + 1


def readable_weight(weight: torch.Tensor, activation: str | None, scales: Scales | None) -> torch.Tensor:
    """The weights of experts as the kernels read them: themselves, or a copy."""
    # wgmma takes fp8 along K only, and tiles of transposed weights are not split into gates and ups.
    return aligned_experts(weight, transposed=scales is None and activation != "swiglu")


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    config: int = -1,
    num_sms: int = 0,
    scales: Scales | None = None,
    recipe: repeat.Recipe | None = None,
) -> None:
    """Runs checked arguments in the kernel.

    Args:
        config: id of a tile shape; -1: the cost model chooses.
        recipe: of the call, if it is to be known (flux.comm.repeat).
    """
    words = schedule_words(out.shape[0], weight.shape[0])
    schedule = torch.empty(words, dtype=torch.int32, device=x.device)
    in_order = None if rows is None else rows.to(torch.int32)
    read = (readable(x), readable_weight(weight, activation, scales), offsets, in_order)
    options = (NUMBERS[activation], out, schedule, config, num_sms)
    scaled = fp8.for_kernel(x, scales)
    enqueue = functools.partial(_kernel, *read, *options, **scaled)
    enqueue()
    names = ("x", "weight", "offsets", "rows")
    by_name = dict(zip(names, read, strict=True)) | scaled
    if recipe is not None and recipe.in_place(**by_name):
        written = [recipe.returns(out), recipe.allocates(schedule)]
        used = [*recipe.numbers(*names), *written, *recipe.numbers("scale_x", "scale_w")]
        repeat.remember(repeat.without_group(), recipe, enqueue, [used])


def unfused(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, activation: str | None
) -> torch.Tensor:
    """grouped_gemm of sorted rows with torch; on a GPU with torch's grouped GEMM."""
    if x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0:
        say_once("grouped GEMMs run unfused, through torch: there is no kernel for them yet")
        product: torch.Tensor = torch_grouped_mm()(x.contiguous(), weight.transpose(1, 2), offs=offsets[1:])
        if activation is None:
            return product
        return activate(product.float(), activation).to(x.dtype)
    say_once(
        f"grouped GEMM of {str(x.dtype).removeprefix('torch.')} with n, k = {weight.shape[1]}, "
        f"{weight.shape[2]} runs expert by expert and synchronises with the host: torch's takes bfloat16 "
        "and multiples of 8"
    )
    return reference(x, weight, offsets, None, activation)


def unfused_scaled(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, activation: str | None, scales: Scales
) -> torch.Tensor:
    """unfused of fp8 operands, with canonical scales."""
    experts, n, k = weight.shape
    by_block = scales.x.dim() == 2
    if scales.out_dtype == torch.bfloat16 and not (n % 16 or k % 16):
        if by_block:
            say_once("grouped GEMMs of block-scaled fp8 run through torch, with operands cast to bfloat16")
            values = dequantized(x, scales.x, "group128"), dequantized(weight, scales.w, "block128")
            x, weight = (value.to(torch.bfloat16) for value in values)
            return unfused(x, weight, offsets, activation)
        say_once("grouped GEMMs of fp8 that the kernel does not take run through torch")
        of_x = scales.x.expand(x.shape[0]).contiguous()
        of_w = (scales.w if scales.w.dim() == 2 else scales.w[:, None].expand(experts, n)).contiguous()
        operands = (x.contiguous(), weight.transpose(1, 2), of_x, of_w)
        product: torch.Tensor = torch._scaled_grouped_mm(
            *operands, offs=offsets[1:], out_dtype=torch.bfloat16, use_fast_accum=scales.accumulate == "fast"
        )
        return product if activation is None else activate(product.float(), activation).bfloat16()
    say_once(
        f"grouped GEMM of fp8 to {str(scales.out_dtype).removeprefix('torch.')}, n, k = {n}, {k}, runs "
        "expert by expert and synchronises with the host: torch's gives bfloat16 and takes multiples of 16"
    )
    return reference(x, weight, offsets, None, activation, *scales)


def torch_grouped_mm() -> Any:
    """torch's grouped GEMM, under the preferred name of this torch version."""
    return getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)


library.impl("grouped_gemm", reference, "CPU")
library.impl("grouped_gemm", _cuda, "CUDA")
torch.library.register_fake("flux::grouped_gemm", _fake, lib=library)

_op: Any = torch.ops.flux.grouped_gemm.default
_kernel: Any = torch.ops.flux._grouped_gemm.default
