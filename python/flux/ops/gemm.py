"""Plain GEMM: x · weightᵀ + bias. The baseline of the fused operators, and their result on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch

from flux import _invariance, _native
from flux._memory import aligned, readable_if_any, writable
from flux.calls import checks, front
from flux.calls.checks import Product
from flux.comm import cuda, repeat
from flux.fp8 import scales as fp8
from flux.fp8.products import product, scaled_mm
from flux.plan.choose import PlanInput, plan_without_workspace, require

Tensor = torch.Tensor
_left_free = 0  # SMs, by leaving_free
_ALIGNED = 8  # elements in 16 bytes
# Of a model that serves: with more tokens, kernels that load weights early win nothing.
SERVED_TOKENS = 64


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_weight: bool = False,
    out: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> Tensor:
    """x · weightᵀ + bias, accumulated in fp32 and rounded once.

    With scales, x and weight are fp8: each block's sum of products is multiplied by the scales of its row and
    column and added in fp32, then the bias is added.

    Args:
        x: [..., K], bfloat16 or float16 for the kernel; float32 and float64 go through torch. With scales
            float8_e4m3fn or float8_e5m2.
        weight: [N, K] as in nn.Linear, or [K, N] with `transpose_weight`; dtype and device of x. With scales
            float8_e4m3fn, K in one piece: stride(1) == 1, or with `transpose_weight` stride(0) == 1.
        bias: [N], dtype of the result and device of x.
        transpose_weight: weight is [K, N].
        out: contiguous [..., N] to write to.
        scale_x: float32 (or float8_e8m0fnu) factors of x: one entry, one for each row ([..., 1]), or one for
            each 128 of K ([..., K / 128]; column-major, with M rounded up to 4, it is not copied).
        scale_w: of weight: one entry, one for each column ([N], [1, N] or [N, 1]), or with block scales of x
            one for each 128 by 128 block, [N / 128, K / 128], with `transpose_weight` [K / 128, N / 128].
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32.
        accumulate: with scales: "promoted" adds the tensor core's sums of each 128 of K in fp32, or of
            each 256 if scales are not of blocks. "fast" leaves them in the tensor core, which keeps 13 bits
            of them; not with block scales.

    Returns:
        [..., N] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out` or scales; or `out`
            shares memory with an input.

    Example::

        x, weight, bias = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
        assert flux.gemm(x, weight, bias).shape == (8, 32)
        (q, scale_x), (w, scale_w) = flux.quantize(x, "row"), flux.quantize(weight, "row")
        assert flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w).dtype == torch.bfloat16
    """
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if not torch.compiler.is_compiling():
        given = (GEMM.number, _invariance.active(), x, weight, bias, transpose_weight, out, *scaling)
        done = repeat.without_group().call(*given)
        if done is not None:
            return cast(Tensor, done)
    named = {"x": x, "weight": weight, "bias": bias, "transpose_weight": transpose_weight, "out": out}
    return cast(Tensor, front.enter(GEMM, named, scaling=scaling))


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transpose_weight: bool = False, *scaling: Any
) -> Tensor:
    """gemm with torch only: product and bias in fp32 (float64: in float64), rounded once."""
    call = Product(x, weight, bias, transpose_weight, None, fp8.given("gemm", *scaling))
    found = checks.gemm_args("gemm", call)
    return _by_reference(call.matrices(found)).view(found[0])


def _by_reference(call: Product) -> Tensor:
    total = product(call.x, call.weight, call.transpose_weight, call.scales)
    if call.bias is not None:
        total += call.bias.to(total.dtype)
    return total.to(fp8.result_dtype(call.x, call.scales))


def run(call: Product, within: repeat.Recipe | None = None) -> None:
    """A call of matrices. within: of the call that this one is a part of (flux.comm.repeat)."""
    recipe = None
    if within is not None:
        recipe = repeat.Recipe(GEMM.number, front.known(call), within)
        recipe.out = call.out
    launch(call, recipe)


def launch(call: Product, recipe: repeat.Recipe | None = None, weight_is_constant: bool = False) -> None:
    """A call of matrices, in the kernel or with torch. recipe: of the call, if it is to be known."""
    x, weight, bias, transpose_weight, out, scales = call
    if not x.is_cuda:
        out.copy_(_by_reference(call))
        return
    (m, k), n = x.shape, out.shape[1]
    scaling = None if scales is None else scales.of_product(k)
    problem = PlanInput("cuda", m, n, k, x.dtype, transpose_weight, scaling=scaling)
    plan = plan_without_workspace("gemm", problem, x.device, _invariance.active())
    require(plan)
    if not plan.by_flux:
        unfused(call)
        if recipe is not None and scales is None:
            _remember_torchs(recipe, transpose_weight)
        return
    target = writable(out)
    operands = (aligned(x), aligned(weight), readable_if_any(bias), target)
    num_sms = cuda.num_sms(x.device) - _left_free if _left_free else 0
    how = {"weight_is_constant": weight_is_constant, **({} if scales is None else scales.for_kernel(x))}
    enqueue = functools.partial(_kernel, *operands, transpose_weight, plan.choice, num_sms, **how)
    enqueue()
    front.remember("_gemm", recipe, enqueue)
    if target is not out:
        out.copy_(target)


def _remember_torchs(recipe: repeat.Recipe, transpose_weight: bool) -> None:
    """Makes a product of torch known: C++ then calls torch with the tensors of the call."""

    def again(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if x.dim() != 2:
            x, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        unfused(Product(x, weight, bias, transpose_weight, out))

    names = ("bias",) if isinstance(recipe.given[recipe.number("bias")], Tensor) else ()
    operands = [*recipe.numbers("x", "weight"), recipe.returns(recipe.out, "out"), *recipe.numbers(*names)]
    step = [(operands, 0, again)]
    repeat.remember(repeat.without_group(), recipe, lambda: None, (), kernels=step)


def serving(x: Tensor, weight: Tensor, *, swiglu: bool = False) -> Tensor:
    """x · weightᵀ of few rows, in a model that only serves: in a CUDA graph the kernel loads weights early.
    swiglu: the first half of the columns is a gate: returns silu(gate) * others.
    """
    call = Product(x, weight, None, False)
    shape, m, n, k = found = checks.gemm_args("gemm", call)
    is_constant = in_graph(x)
    if not swiglu:
        out = x.new_empty(*shape)
        launch(call._replace(out=out).matrices(found), None, is_constant)
        return out
    fits = x.dtype in (torch.bfloat16, torch.float16) and n % (2 * _ALIGNED) == k % _ALIGNED == 0
    has_kernel = x.is_cuda and fits and not cuda.why_not(x.device)
    choice = _gating_choice(m, n, k, cuda.num_sms(x.device)) if has_kernel else -1
    if choice < 0:
        gate, others = serving(x, weight).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * others
    out = x.new_empty(*shape[:-1], n // 2)
    operands = (aligned(x.reshape(m, k)), aligned(weight), None, out.view(m, n // 2))
    _kernel(*operands, False, choice, 0, swiglu=True, weight_is_constant=is_constant)
    return out


def in_graph(x: Tensor) -> bool:
    """Whether a CUDA graph of a model that only serves is captured: none of its kernels writes a weight."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.cache
def _gating_choice(m: int, n: int, k: int, num_sms: int) -> int:
    """Packed choice of a tile that has columns of a gate and of what it gates; -1: there is none."""
    found = _native.core.select_gemm(m, n, k, False, num_sms, swiglu=True)
    return int(found.packed) if found.split > 0 else -1


@contextmanager
def leaving_free(sms: int) -> Iterator[None]:
    """Launches inside leave that many SMs to the work of others, such as NCCL's."""
    global _left_free
    calls = repeat.without_group()
    kept, _left_free = _left_free, sms
    calls.paused = bool(sms)  # its launches take all SMs
    try:
        yield
    finally:
        _left_free = kept
        calls.paused = bool(kept)


def unfused(call: Product) -> None:
    x, weight, bias, transpose_weight, out, scales = call
    if scales is not None:
        scaled_mm(x, weight, bias, scales, out)
        return
    w = weight if transpose_weight else weight.t()
    if bias is None:
        torch.mm(x, w, out=out)
    else:
        torch.addmm(bias, x, w, out=out)


GEMM = front.Collective(
    "gemm", Product, functools.partial(checks.gemm_args, "gemm"), matrices=Product.matrices, alone=launch
)
front.register(GEMM, "_out", casts=True)
_kernel: Any = torch.ops.flux._gemm.default
