"""Every form of an exact call of a dense collective beside what it must give: on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import references
import torch
from torch import Tensor

import flux
from flux.ops import gemm, gemm_ar
from flux.testing import AgGemmCase, GemmRsCase

Forms = Iterator[tuple[str, Tensor, Tensor]]  # what it is, a result, and what that must be


def into(call: Callable[..., Any], like: Tensor, **options: Any) -> Tensor:
    """What a call writes to ``out``, which it must return."""
    out = torch.full_like(like, 7)
    result = call(out=out, **options)
    assert (result[0] if isinstance(result, tuple) else result) is out, "out is not returned"
    return out


def of_gemm(case: GemmRsCase, rank: int, device: str = "cpu") -> Forms:
    x, weight, bias = case.inputs(rank, device)
    expected = case.expected_sum(device)
    call = partial(flux.gemm, x, weight, bias, transpose_weight=case.transpose_weight)
    yield "result", call(), expected
    yield "out", into(call, expected), expected
    if device == "cpu":
        yield "reference", gemm.reference(x, weight, bias, case.transpose_weight), expected


def of_gemm_rs(case: GemmRsCase, rank: int, device: str = "cpu") -> Forms:
    """Also reduce_scatter, of the products."""
    x, weight, bias = case.inputs(rank, device)
    expected = case.expected(rank, device)
    call = partial(flux.gemm_rs, x, weight, bias, transpose_weight=case.transpose_weight)
    yield "result", call(), expected
    yield "out", into(call, expected), expected
    product = gemm.reference(x, weight, None, case.transpose_weight)
    rows = expected if bias is None else expected - bias
    scatter = partial(flux.reduce_scatter, product)
    yield "reduce_scatter", scatter(), rows
    yield "out of reduce_scatter", into(scatter, rows), rows
    if device == "cpu":
        yield "reference", references.gemm_rs(x, weight, bias, None, case.transpose_weight), expected
        yield "reference of reduce_scatter", references.reduce_scatter(product), rows


def of_ag_gemm(case: AgGemmCase, rank: int, device: str = "cpu") -> Forms:
    """Also all_gather."""
    x, weight, bias = case.inputs(rank, device)
    expected, everything = case.expected(rank, device), case.gathered(device)
    call = partial(flux.ag_gemm, x, weight, bias, transpose_weight=case.transpose_weight)
    yield "result", call(), expected
    yield "out", into(call, expected), expected
    yield "out beside gathered rows", into(call, expected, return_gathered=True), expected
    result, gathered = call(return_gathered=True)
    yield "result beside gathered rows", result, expected
    yield "gathered rows", gathered, everything
    both = flux.ag_gemm(x, [weight, weight], [bias, bias], transpose_weight=case.transpose_weight)
    yield "of two weights", torch.stack(both), torch.stack([expected, expected])
    yield "all_gather", flux.all_gather(x), everything
    yield "out of all_gather", into(partial(flux.all_gather, x), everything), everything
    if device == "cpu":
        yield "reference", references.ag_gemm(x, weight, bias, None, case.transpose_weight), expected
        yield "reference of all_gather", references.all_gather(x), everything


def of_gemm_ar(case: GemmRsCase, rank: int, device: str = "cpu") -> Forms:
    """Also all_reduce of the products; with residuals, and norms, which kernels sum in another order."""
    x, weight, bias = case.inputs(rank, device)
    expected, residual = case.expected_sum(device), case.residual(device)
    call = partial(flux.gemm_ar, x, weight, bias, transpose_weight=case.transpose_weight)
    yield "result", call(), expected
    yield "out", into(call, expected), expected
    yield "residual", call(residual=residual) - residual, expected
    # What one rank computes carries its mark in every element.
    product = gemm.reference(x, weight, None, case.transpose_weight)
    total = expected if bias is None else expected - bias
    reduce = partial(flux.all_reduce, product)
    yield "all_reduce", reduce(), total
    yield "out of all_reduce", into(reduce, total), total
    in_place = residual.clone()
    reduce(residual=in_place, out=in_place)
    yield "all_reduce over its residual", in_place - residual, total
    norm_weight = torch.arange(case.n, device=device).remainder(3).add(1).to(case.dtype)
    for added in (None, residual):
        norm, summed = reduce(residual=added, norm_weight=norm_weight)
        yield "sum beside a norm", summed if added is None else summed - residual, total
        if device == "cpu":
            yield "norm", norm, gemm_ar.rms_norm(summed, norm_weight, 1e-6)
    if device == "cpu":
        yield "reference", references.gemm_ar(x, weight, bias, None, case.transpose_weight), expected
        yield "reference of all_reduce", references.all_reduce(product), total
        yield "reference with a residual", references.all_reduce(product, residual=residual), total + residual
    over = product.clone()
    flux.all_reduce(over, residual=residual, out=over)
    yield "all_reduce over x, with a residual", over - residual, total
    flux.all_reduce(product, out=product)
    yield "all_reduce in place", product, total


FORMS: dict[str, Callable[..., Forms]] = {
    "gemm": of_gemm,
    "gemm_rs": of_gemm_rs,
    "ag_gemm": of_ag_gemm,
    "gemm_ar": of_gemm_ar,
}
