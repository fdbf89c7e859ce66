"""Grouped GEMM: rows that are sorted by expert, each times the weight of its expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch

from flux import _invariance, _native
from flux._invariance import refuse
from flux._log import say_once
from flux._memory import aligned_experts, readable, taken
from flux.calls import checks, front
from flux.comm import cuda, repeat
from flux.fp8 import scales as fp8
from flux.fp8.products import wide_expert
from flux.fp8.scales import Scales
from flux.ops.quantize import dequantized
from flux.plan.choose import PlanInput, why_not_fused

Tensor = torch.Tensor
ACTIVATIONS = ("silu", "gelu", "swiglu")  # in the order of csrc/moe/activation.cuh
NUMBERS = {None: 0} | {name: 1 + i for i, name in enumerate(ACTIVATIONS)}
_NAME = "grouped_gemm"
_BLOCK_M: int = _native.core.tile_configs()[0].block_m


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    activation: str | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> Tensor:
    """activation(x[rows] · weight[e]ᵀ) for the rows of each expert e, accumulated in fp32 and rounded once.

    Experts may have any number of rows, none too. Nothing is read on the host, but for types and sizes that
    torch has no grouped GEMM for.

    Args:
        x: [M, K], bfloat16, float16, float32 or float64; with scales
            float8_e4m3fn or float8_e5m2.
        weight: [E, N, K], each expert's as in nn.Linear; dtype and device of x. With scales float8_e4m3fn,
            K in one piece.
        offsets: int32 [E + 1]. Rows offsets[e] to offsets[e + 1] are expert e's; the first entry is 0, none
            is smaller than the one before, and the last is at most R. Checked on CPUs only.
        rows: int32 or int64 [R]: result row i is made of x[rows[i]]. None: of x[i]. Checked on CPUs only, for
            the rows of experts.
        activation: "silu", "gelu" (the exact one), "swiglu" (silu of the first N/2 columns times the last
            N/2), or None.
        scale_x: of x: one entry, [M, 1], or [M, K / 128].
        scale_w: of the weights: one entry, [E], [E, N], or with block scales [E, N / 128, K / 128].
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast").

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
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if not torch.compiler.is_compiling():
        known = (GROUPED_GEMM.number, _invariance.active(), x, weight, offsets, rows, activation)
        done = repeat.without_group().call(*known, *scaling, None)
        if done is not None:
            return cast(Tensor, done)
    given = {"x": x, "weight": weight, "offsets": offsets, "rows": rows, "activation": activation}
    return cast(Tensor, front.enter(GROUPED_GEMM, given, scaling=scaling))


class Grouped(NamedTuple):
    """The arguments of flux.grouped_gemm, the scales in one."""

    x: Tensor
    weight: Tensor
    offsets: Tensor
    rows: Tensor | None = None
    activation: str | None = None
    scales: Scales | None = None
    out: Any = None

    def sizes(self, p: int = 1) -> front.Sizes:
        x, offsets, rows = self.x, self.offsets, self.rows
        columns = expert_weight(_NAME, x, self.weight, self.activation, self.scales)
        experts = self.weight.shape[0]
        if list(offsets.shape) != [experts + 1]:
            expected = f"shape [{experts + 1}], one more than experts"
            checks.fail(_NAME, "offsets", expected, list(offsets.shape))
        if offsets.dtype != torch.int32:
            checks.fail(_NAME, "offsets", "dtype int32", offsets.dtype)
        if rows is not None and rows.dim() != 1:
            checks.fail(_NAME, "rows", "1 dimension", rows.dim())
        if rows is not None and rows.dtype not in (torch.int32, torch.int64):
            checks.fail(_NAME, "rows", "dtype int32 or int64", rows.dtype)
        for name, tensor in (("offsets", offsets), ("rows", rows)):
            if tensor is not None and tensor.device != x.device:
                checks.fail(_NAME, name, f"device {x.device}, that of x", tensor.device)
        m = (x if rows is None else rows).shape[0]
        return [m, columns], m, columns, x.shape[1]

    def canonical(self, sizes: front.Sizes = ([], 0, 0, 0)) -> Grouped:
        """With scales as kernels read them."""
        if self.scales is None:
            return self
        return self._replace(scales=self.scales.canonical_experts(*self.weight.shape))

    def gathered(self) -> Grouped:
        """Of rows in order."""
        if self.rows is None:
            return self
        rows = self.rows.clamp(min=0)  # entries after the last expert's rows may be invalid
        scales = None if self.scales is None else self.scales._replace(x=self.scales.x_of(rows))
        return self._replace(x=taken(self.x, rows), rows=None, scales=scales)


def reference(
    x: Tensor, weight: Tensor, offsets: Tensor, rows: Any = None, activation: Any = None, *scaling: Any
) -> Tensor:
    """grouped_gemm with torch only, expert by expert; rows without an expert are zero."""
    call = Grouped(x, weight, offsets, rows, activation, fp8.given(_NAME, *scaling))
    shape, *_ = call.sizes()
    return _by_expert(shape, call.canonical())


def _by_expert(shape: Sequence[int], call: Grouped) -> Tensor:
    x, rows = call.x, call.rows
    out = x.new_zeros(shape, dtype=fp8.result_dtype(x, call.scales))
    bounds = checked_bounds(_NAME, call.offsets, shape[0])
    if rows is not None and bounds[-1] > 0:
        low, high = (int(bound) for bound in rows[: bounds[-1]].aminmax())
        if low < 0 or high >= x.shape[0]:
            checks.fail(_NAME, "rows", f"numbers of the {x.shape[0]} rows of x", low if low < 0 else high)
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        mine = slice(first, last) if rows is None else rows[first:last].long()
        some = x[mine] if isinstance(mine, slice) else taken(x, mine)
        product = expert_product(some, call.weight, expert, call.scales, mine)
        out[first:last] = activate(product, call.activation)
    return out


def expert_product(
    x: Tensor, weight: Tensor, expert: int, scales: Scales | None, rows: slice | Tensor = slice(None)
) -> Tensor:
    """Rows x times their expert's weight, in the wide type. scales: canonical, of all; rows: which."""
    scale = None if scales is None else scales.x_of(rows)
    return wide_expert(weight, expert, scales).times(x, scale=scale)


def checked_bounds(op: str, offsets: Tensor, count: int) -> list[int]:
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


def activate(product: Tensor, activation: str | None) -> Tensor:
    if activation == "swiglu":
        gate, up = product.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if activation == "silu":
        return torch.nn.functional.silu(product)
    return torch.nn.functional.gelu(product) if activation == "gelu" else product


def silu_slope(z: Tensor) -> Tensor:
    """The derivative of silu, by hand: aten.silu_backward has no derivative itself."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def expert_weight(
    op: str, x: Tensor, weight: Tensor, activation: str | None, scales: Scales | None = None
) -> int:
    """Checks x [M, K], weight [E, N, K] and the activation; returns the columns of the result."""
    refuse(op)
    if x.dim() != 2:
        checks.fail(op, "x", "2 dimensions [m, k]", f"{x.dim()}")
    if weight.dim() != 3:
        checks.fail(op, "weight", "3 dimensions [experts, n, k]", f"{weight.dim()}")
    if weight.shape[2] != x.shape[1]:
        expected = f"[experts, n, k] with k = {x.shape[1]}, the last dimension of x"
        checks.fail(op, "weight", expected, f"shape {list(weight.shape)}")
    checks.operands(op, x, weight, scales)
    if activation is not None and activation not in ACTIVATIONS:
        checks.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
    n = weight.shape[1]
    if activation != "swiglu":
        return n
    if n % 2:
        checks.fail(op, "weight", "an even n for swiglu", f"shape {list(weight.shape)}")
    return n // 2


def below(call: Grouped, within: repeat.Recipe | None = None) -> Tensor:
    return cast(Tensor, front.below(GROUPED_GEMM, call, None, within=within))


def _run(call: Grouped, recipe: repeat.Recipe) -> Any:
    x, out = call.x, call.out
    if not x.is_cuda:
        return _by_expert(out.shape, call)
    if 0 in (out.numel(), x.shape[1]):
        return out.zero_()
    if _why_not(call, out.shape[1]) is not None:
        return unfused(call.gathered())
    launch(call, out, recipe=recipe)
    return out


def _why_not(call: Grouped, columns: int) -> str | None:
    """Why the kernel does not support a call, or None. columns: of the result."""
    x, scales, k = call.x, call.scales, call.x.shape[1]
    scaling = None if scales is None else scales.scaling(k)
    reason = why_not_fused(_NAME, PlanInput("cuda", 1, columns, k, x.dtype, scaling=scaling))
    by_block = scales is not None and scales.x.dim() == 2
    if reason is None and by_block and columns < call.weight.shape[1] and columns % fp8.BLOCK:
        return f"halves of {columns} columns share a block's scale"
    return reason or cuda.why_not(x.device)


def readable_weight(weight: Tensor, activation: str | None, scales: Scales | None) -> Tensor:
    """The weights of experts as the kernels read them: themselves, or a copy."""
    # wgmma takes fp8 along K only, and tiles of transposed weights are not split into gates and ups.
    return aligned_experts(weight, transposed=scales is None and activation != "swiglu")


def launch(
    call: Grouped, out: Tensor, config: int = -1, num_sms: int = 0, recipe: repeat.Recipe | None = None
) -> None:
    """Runs a checked call in the kernel. config: id of a tile shape; -1: the cost model chooses."""
    x, weight, offsets, rows, activation, scales, _ = call
    tiles = out.shape[0] // _BLOCK_M + weight.shape[0]  # of four words each, and their number
    schedule = torch.empty(4 * tiles + 1, dtype=torch.int32, device=x.device)
    operands = (readable(x), readable_weight(weight, activation, scales), offsets)
    numbers = (None if rows is None else rows.to(torch.int32), NUMBERS[activation])
    options = (out, schedule, config, num_sms)
    scaled = {} if scales is None else scales.for_kernel(x)
    enqueue = functools.partial(_kernel, *operands, *numbers, *options, **scaled)
    enqueue()
    front.remember("_grouped_gemm", recipe, enqueue)


def unfused(call: Grouped) -> Tensor:
    """A call of rows in order with torch; on a GPU with torch's grouped GEMM."""
    x, weight, offsets, _, activation, scales, _ = call
    experts, n, k = weight.shape
    shape = [x.shape[0], n // 2 if activation == "swiglu" else n]
    if scales is None:
        if x.dtype == torch.bfloat16 and not (n % 8 or k % 8):
            say_once("grouped GEMMs run unfused, through torch: there is no kernel for them yet")
            product = torch_grouped_mm()(x.contiguous(), weight.transpose(1, 2), offs=offsets[1:])
            return _activated(product, activation)
        say_once(
            f"grouped GEMM of {str(x.dtype).removeprefix('torch.')} with n, k = {n}, {k} runs expert by "
            "expert and synchronises with the host: torch's takes bfloat16 and multiples of 8"
        )
        return _by_expert(shape, call)
    if scales.out_dtype != torch.bfloat16 or n % 16 or k % 16:
        say_once(
            f"grouped GEMM of fp8 to {str(scales.out_dtype).removeprefix('torch.')}, n, k = {n}, {k}, runs "
            "expert by expert and synchronises with the host: torch's gives bfloat16 and multiples of 16"
        )
        return _by_expert(shape, call)
    if scales.x.dim() == 2:
        say_once("grouped GEMMs of block-scaled fp8 run through torch, with operands cast to bfloat16")
        x, weight = dequantized(x, scales.x, "group128"), dequantized(weight, scales.w, "block128")
        return unfused(call._replace(x=x.bfloat16(), weight=weight.bfloat16(), scales=None))
    say_once("grouped GEMMs of fp8 that the kernel does not take run through torch")
    of_x = scales.x.expand(x.shape[0]).contiguous()
    of_w = (scales.w if scales.w.dim() == 2 else scales.w[:, None].expand(experts, n)).contiguous()
    operands = (x.contiguous(), weight.transpose(1, 2), of_x, of_w)
    how: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": scales.accumulate == "fast"}
    return _activated(torch._scaled_grouped_mm(*operands, offs=offsets[1:], **how), activation)


def _activated(product: Tensor, activation: str | None) -> Tensor:
    return product if activation is None else activate(product.float(), activation).to(product.dtype)


def torch_grouped_mm() -> Any:
    """torch's grouped GEMM, under the preferred name of this torch version."""
    return getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)


GROUPED_GEMM = front.Collective(
    _NAME, Grouped, Grouped.sizes, matrices=Grouped.canonical, alone=_run, answer=lambda call, made: made
)
front.register(GROUPED_GEMM, casts=True)
_kernel: Any = torch.ops.flux._grouped_gemm.default
