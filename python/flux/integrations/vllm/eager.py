"""Sequence parallelism in models that run without a compiler.

There is no graph that tells who reads a tensor. So a row-parallel layer returns a tensor of which only this
rank's rows are there: residual and norm keep it so, and a linear layer gathers the rows while it computes.
Any other operator gets all rows, from an all-gather.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map

import flux
from flux.integrations.vllm.op import plain, plain_if_any
from flux.integrations.vllm.rows import linear_of_own_rows, own_rows
from flux.ops.gemm_ar import row_norm
from flux.plan.sums import VECTOR

Tensor = torch.Tensor
_Subclass: Any = torch.Tensor  # parts of it are not typed
_installed: list[str] = []


class OwnRows(_Subclass):  # type: ignore[misc]
    """[M, N], of which this rank has its own rows (rows.py).

    Args:
        own: [⌈M/p⌉, N].
        count: M.
        group_name: of torch's process group.
    """

    @staticmethod
    def __new__(cls, own: Tensor, count: int, group_name: str) -> OwnRows:
        shape = (count, own.shape[1])
        made: OwnRows = _Subclass._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        return made

    def __init__(self, own: Tensor, count: int, group_name: str) -> None:
        self.group_name = group_name
        self._own: Tensor | None = own
        self._whole: Tensor | None = None

    def own(self) -> Tensor:
        """This rank's rows, with those that pad the last ranks'."""
        if self._own is None:
            assert self._whole is not None
            self._own = own_rows(self._whole, True, self.group_name)
        return self._own

    def whole(self) -> Tensor:
        """All rows. A collective, the first time."""
        if self._whole is None:
            self._whole = flux.all_gather(self.own(), group=self.group_name)[: self.shape[0]]
        return self._whole

    def data_ptr(self) -> int:
        """Of all rows, for kernels that are called past torch's dispatcher, as Triton's are."""
        pointer: int = self.whole().data_ptr()
        self._own = None  # they may write there
        return pointer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, weight, bias = (*args, None, None, None)[:3]
        if func is linear and not kwargs and type(x) is cls and x._whole is None and _fits(x, weight):
            with torch.no_grad():
                operands = (x.own(), plain(weight), plain_if_any(bias))
                return flux.ag_gemm(*operands, group=x.group_name)[: x.shape[0]]
        with torch._C.DisableTorchFunctionSubclass():  # results are not of this class
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        all_args, all_kwargs = tree_map(whole, given)
        result = func(*all_args, **all_kwargs)
        if func._schema.is_mutable:
            for x in tree_leaves(given):
                if isinstance(x, OwnRows):  # what was written is in all rows
                    x._own = None
        return result


def whole(x: Any) -> Any:
    """All rows of a tensor, and what is no tensor."""
    return x.whole() if isinstance(x, OwnRows) else x


def linear_own(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, *scales: Any, **result: Any
) -> OwnRows:
    """rows.linear_of_own_rows of x [M, K/p]."""
    own = linear_of_own_rows(x, weight, bias, group_name, *scales, **result)
    return OwnRows(own, len(x), group_name)


def install() -> None:
    """Lets vLLM's RMSNorm keep own rows; once."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    if _installed:
        return
    _installed.append("RMSNorm")
    forward = RMSNorm.forward

    @functools.wraps(forward)
    def forward_own(norm: Any, x: Any, residual: Any = None, *more: Any) -> Any:
        sharded = [t for t in (x, residual) if type(t) is OwnRows]
        if not sharded:
            return forward(norm, x, *([] if residual is None and not more else [residual]), *more)
        plain = norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == x.dtype
        if more or not plain:
            return forward(norm, whole(x), whole(residual), *more)
        count, group_name = x.shape[0], sharded[0].group_name
        total = _own(x, group_name)
        if residual is not None:
            total = total + _own(residual, group_name)
        normed = OwnRows(row_norm(total, norm.weight, norm.variance_epsilon), count, group_name)
        return normed if residual is None else (normed, OwnRows(total, count, group_name))

    RMSNorm.forward = forward_own


def _own(x: Tensor, group_name: str) -> Tensor:
    return x.own() if isinstance(x, OwnRows) else own_rows(x, True, group_name)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether flux.ag_gemm can run a linear layer."""
    return weight.dim() == 2 and weight.dtype == x.dtype and weight.shape[0] % VECTOR == 0
