"""flux behind torch's asynchronous tensor parallelism.

Inductor's micro-pipeline pass rewrites all-gather + matmul and matmul + reduce-scatter, forward and
backward, to two operators of torch.ops.symm_mem, and two scaled ones for fp8. torchtitan's async tensor
parallelism is that pass. :func:`install` gives these operators an implementation in flux; neither compiler
nor model code notices.
"""

from __future__ import annotations

import importlib
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed._symmetric_memory  # defines the operators

import flux
from flux._log import say_once
from flux.comm.group import process_group
from flux.fp8.scales import FP8, OUT, Scaling
from flux.ops.explain import why_unfused

__all__ = ["install", "uninstall"]

_torch_library: Any = torch.library  # parts of these two are not typed
_symm_mem: Any = torch.distributed._symmetric_memory

Tensor = torch.Tensor
Gathered = tuple[Tensor | None, list[Tensor]]
# While installed: what owns the registrations, and ends them by _destroy.
_installed: list[Any] = []
# Older versions do not take several graph passes, and merge waits themselves.
_REWRITES = torch.__version__ >= "2.13"


def install() -> None:
    """Puts flux behind torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, and behind
    their scaled variants for fp8, fused_all_gather_scaled_matmul and fused_scaled_matmul_reduce_scatter.

    Arguments and results stay those of torch, strides included. Calls that flux would not run fused go on to
    torch's own implementation, and the logger "flux" says so once: a dimension to gather or scatter that is
    the last one, types and shapes that the kernels do not take, groups of one rank or whose ranks cannot
    reach each other; of scaled calls also those with a result scale or no out_dtype, and reductions with a
    bias, which torch adds on every rank. CPU tensors, for which torch has no implementation, take flux's CPU
    path. Scaled calls with use_fast_accum=False are promoted, as torch's are.

    With torch 2.13 and newer, `torch._inductor.config.post_grad_custom_pre_pass` gets one more pass. It
    writes gathers of one x by several layers, and scatters of a dimension that was moved to the front, as
    the compiler's own pass finds them; they would stay unfused.

    Process-wide; a second call does nothing. Needs neither a GPU nor a process group.

    Example::

        from flux.integrations import async_tp

        async_tp.install()
        x, weight = torch.randn(8, 64), torch.randn(64, 32)
        gathered, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [weight], gather_dim=0, group_name=dist.group.WORLD.group_name
        )
        assert out.shape == (8 * p, 32)
    """
    if _installed:
        return
    library = _torch_library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # Replacing the kernel is intended.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, implementation in _IMPLEMENTATIONS.items():
            # For CPU tensors torch's reference, written with functional collectives, is registered as Meta.
            for key, torchs_key in (("CUDA", "CUDA"), ("CPU", "Meta")):
                torchs = _torch_library.get_kernel(f"symm_mem::{name}", torchs_key)
                function = partial(_ours_or_torchs, implementation, torchs)
                library.impl(name, function, key, with_keyset=True, allow_override=True)
    _installed.append(library)
    if _REWRITES:
        _installed.append(_Rewrites())


class _Rewrites:
    """While it lives, torch's compiler changes graphs before its own passes."""

    def __init__(self) -> None:
        # Not at the top: importing inductor takes a second.
        self.config: Any = importlib.import_module("torch._inductor.config")
        self.passes: Any = importlib.import_module("torch._inductor.custom_graph_pass")
        self.ours: Any = None
        version = self.passes.get_hash_for_files((__file__,))

        class Pass(self.passes.CustomGraphPass):  # type: ignore[misc,name-defined]
            def __call__(self, graph: torch.fx.Graph) -> None:
                _merge_waits(graph)
                _scatter_in_place(graph)

            def uuid(self) -> Any:  # part of the key of compiled code in caches
                return version

        self.ours = Pass()
        self._put(self.ours)

    def _put(self, *ours: Any) -> None:
        found = self.passes.get_custom_graph_passes(self.config.post_grad_custom_pre_pass)
        passes = [*ours, *(each for each in found if each is not self.ours)]
        self.config.post_grad_custom_pre_pass = passes or None

    def _destroy(self) -> None:
        self._put()


def _merge_waits(graph: torch.fx.Graph) -> None:
    """Lets all readers of a collective's result read its first wait, rearranged once.

    Since 2.14 torch keeps a wait for each layer that gathers the same x, and finds only gathers with one.
    """
    aten = torch.ops.aten
    rearranges = {aten.slice.Tensor, aten.split.Tensor, aten.cat.default, aten.view.dtype, operator.getitem}
    rearranges |= {aten.view.default, aten.reshape.default, aten.permute.default}
    first: dict[Any, torch.fx.Node] = {}
    seen: set[torch.fx.Node] = set()  # waits, and what only rearranges them
    for node in list(graph.nodes):
        is_wait = node.target is torch.ops._c10d_functional.wait_tensor.default
        if not is_wait and (node.target not in rearranges or seen.isdisjoint(node.all_input_nodes)):
            continue
        earlier = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        seen.add(earlier)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _scatter_in_place(graph: torch.fx.Graph) -> None:
    """Writes scatters of a dimension that was moved to the front, as torchtitan's, with split and cat."""
    aten = torch.ops.aten

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = graph.call_function(target, args, kwargs)
        values: Any = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def source(node: torch.fx.Node, target: Any) -> Any:
        return node.args[0] if node.target is target else None

    collectives: Any = torch.ops._c10d_functional
    for scatter in graph.find_nodes(op="call_function", target=collectives.reduce_scatter_tensor.default):
        copied, (wait, *others) = scatter.args[0], scatter.users
        moved = source(copied, aten.clone.default)
        rows = None if moved is None else source(moved, aten.permute.default)
        if rows is None or others:
            continue
        (order, ranks), shape = (list(moved.args[1]), scatter.args[2]), rows.meta["val"].shape
        dim, swap = order[0], list(range(len(order)))
        swap[0], swap[dim] = dim, 0
        if dim == 0 or order != swap or not isinstance(shape[dim], int):
            continue
        with graph.inserting_before(wait):
            split = call(aten.split.Tensor, rows, shape[dim] // ranks, dim)
            parts = [call(operator.getitem, split, i) for i in range(ranks)]
            made = call(scatter.target, call(aten.cat.default, parts), *scatter.args[1:], **scatter.kwargs)
            done = call(wait.target, made)
            back = call(aten.permute.default, done, order)
        wait.replace_all_uses_with(back)
        for reader in list(back.users):
            if reader.target is aten.permute.default and reader.args[1] == order:
                reader.replace_all_uses_with(done)
        for node in (wait, scatter, copied, moved, *list(back.users), back):
            if not node.users and node.op != "output":
                graph.erase_node(node)


def uninstall() -> None:
    """Gives the operators back to torch. Does nothing if flux is not installed.

    Example::

        from flux.integrations import async_tp

        async_tp.install()
        async_tp.uninstall()
    """
    while _installed:
        _installed.pop()._destroy()


def _ours_or_torchs(ours: Callable[..., Any], torchs: Any, keys: Any, *args: Any, **options: Any) -> Any:
    """Flux's result, or torch's of a call that flux does not run fused (None)."""
    result = ours(*args, **options)
    return torchs.call_boxed(keys, *args, **options) if result is None else result


def _all_gather_matmul(
    a_shard: Tensor,
    bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,  # as torch calls it
) -> Gathered | None:
    """all_gather(a_shard) and its product with every b [k, n]; None for the former if not asked for."""
    if not _runs_fused("ag_gemm", a_shard, bs, gather_dim, group_name):
        return None
    return _gathered(a_shard, bs, gather_dim, group_name, return_A)


def _gathered(
    x: Tensor, bs: Sequence[Tensor], dim: int, group_name: str, return_x: bool, **scaling: Any
) -> Gathered:
    """flux.ag_gemm of rows in dimension `dim`: what was gathered, if it is to be returned, and products."""
    weights, transposed = _as_weights(bs)
    how: dict[str, Any] = {"group": group_name, "transpose_weight": transposed, **scaling}
    with torch.no_grad():
        if not return_x:
            return None, [p.movedim(0, dim) for p in flux.ag_gemm(x.movedim(dim, 0), weights, **how)]
        products, gathered, *_ = flux.ag_gemm(x.movedim(dim, 0), weights, return_gathered=True, **how)
    return gathered.movedim(0, dim), [product.movedim(0, dim) for product in products]


def _matmul_reduce_scatter(
    a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor | None:
    """reduce_scatter(a · b, scatter_dim), contiguous."""
    known_op = reduce_op in ("sum", "avg")  # torch raises an error for other reductions
    if not known_op or not _runs_fused("gemm_rs", a, [b], scatter_dim, group_name):
        return None
    return _scattered(a, b, scatter_dim, group_name, reduce_op)


def _scattered(x: Tensor, b: Tensor, dim: int, group_name: str, reduce_op: str, **scaling: Any) -> Tensor:
    """flux.gemm_rs of rows in dimension `dim`, contiguous."""
    (weight,), transposed = _as_weights([b])
    how: dict[str, Any] = {"group": group_name, "transpose_weight": transposed, **scaling}
    with torch.no_grad():
        total = flux.gemm_rs(x.movedim(dim, 0), weight, **how)
        if reduce_op == "avg":
            total /= process_group(group_name).size()
    return total.movedim(0, dim).contiguous()


def _all_gather_scaled_matmul(
    a_shard: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> Gathered | None:
    """As above, of fp8 operands; a_scale is one number, or one for each row of this rank or of all."""
    dtypes, fast = _dtypes(out_dtypes), all(use_fast_accum)
    why_not = _unscalable(a_shard, result_scales, dtypes, biases)
    scaling = Scaling("row", dtypes[0], fast)
    if not _runs_fused("ag_gemm", a_shard, bs, gather_dim, group_name, scaling, why_not):
        return None
    if a_scale.numel() > 1:
        rows = a_shard.shape[gather_dim]
        if a_scale.shape[gather_dim] != rows:
            rank = process_group(group_name).rank()
            a_scale = a_scale.narrow(gather_dim, rank * rows, rows)
        a_scale = a_scale.movedim(gather_dim, 0)
    return _gathered(
        *(a_shard, bs, gather_dim, group_name, True),
        bias=list(biases),
        scale_x=a_scale,
        scale_w=[scale.reshape(-1) for scale in b_scales],
        out_dtype=dtypes[0],
        accumulate="fast" if fast else "promoted",
    )


def _scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor | None:
    """As above, of fp8 operands; `a` may have one dimension for all leading ones of `output_shape`."""
    (dtype,) = _dtypes([out_dtype])
    leading = a.shape[:-1] if output_shape is None else torch.Size(output_shape[:-1])
    rows = a.flatten(0, -2).view(*leading, a.shape[-1])
    why_not = _unscalable(a, [result_scale], [dtype], [])
    if bias is not None:
        why_not = "torch adds a bias on every rank"
    if reduce_op not in ("sum", "avg"):
        why_not = f"reductions by {reduce_op}"
    scaling = Scaling("row", dtype, use_fast_accum)
    if not _runs_fused("gemm_rs", rows, [b], orig_scatter_dim, group_name, scaling, why_not):
        return None
    if a_scale.numel() > 1:
        a_scale = a_scale.reshape(*leading, 1).movedim(orig_scatter_dim, 0)
    return _scattered(
        *(rows, b, orig_scatter_dim, group_name, reduce_op),
        scale_x=a_scale,
        scale_w=b_scale.reshape(-1),
        out_dtype=dtype,
        accumulate="fast" if use_fast_accum else "promoted",
    )


_UNSCALED: tuple[Callable[..., Any], ...] = (_all_gather_matmul, _matmul_reduce_scatter)
_SCALED: tuple[Callable[..., Any], ...] = (_all_gather_scaled_matmul, _scaled_matmul_reduce_scatter)
_IMPLEMENTATIONS = {f"fused{each.__name__}": each for each in _UNSCALED + _SCALED}


def _dtypes(given: Sequence[Any]) -> list[Any]:
    """Types of results, or None; the dispatcher gives those in a list as numbers."""
    return list(_symm_mem._maybe_convert_scalar_types_to_dtypes(list(given)))


def _unscalable(
    a: Tensor, result_scales: Sequence[Tensor | None], dtypes: Sequence[Any], biases: Sequence[Tensor | None]
) -> str | None:
    """Why flux has no operator for a scaled call, or None."""
    if any(scale is not None for scale in result_scales):
        return "results have a scale"
    if dtypes[0] not in OUT or set(dtypes) != {dtypes[0]}:
        return f"results are of {', '.join(str(dtype) for dtype in dtypes)}"
    if any(bias is not None and bias.dtype != dtypes[0] for bias in biases):
        return "a bias has another dtype than the result"
    return None if a.dtype in FP8 else f"x is of {a.dtype}"


def _as_weights(bs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Matrices [k, n] as weights of flux without a copy, and the value of transpose_weight.

    In a forward pass b is the transpose of a weight [n, k] as it lies in memory, in a backward pass the
    weight itself.
    """
    if all(b.stride(0) == 1 for b in bs):
        return [b.t() for b in bs], False
    return list(bs), True


def _runs_fused(
    op: str,
    x: Tensor,
    bs: Sequence[Tensor],
    dim: int,
    group_name: str,
    scaling: Scaling | None = None,
    why_not: str | None = None,
) -> bool:
    """Whether flux runs a call fused, by facts that are equal on all ranks; if not, the log says why."""
    why_not = why_not or _why_not(op, x, bs, dim, group_name, scaling)
    if why_not is not None:
        say_once(f"async_tp: {op} goes through torch: {why_not}")
    return why_not is None


def _why_not(
    op: str, x: Tensor, bs: Sequence[Tensor], dim: int, group_name: str, scaling: Scaling | None
) -> str | None:
    ranks = process_group(group_name).size()
    if ranks == 1:
        return "the group has one rank"
    if not 0 <= dim < x.dim() - 1:
        return f"dimension {dim} of {x.dim()} does not count rows"
    _, transposed = _as_weights(bs)
    if scaling is not None and transposed:
        return "tensor cores read fp8 weights [k, n] column by column only"
    if x.is_cpu:
        return None  # torch's implementation is no faster there
    how: Any = {"transpose_weight": scaling is None and transposed, "scaling": scaling}
    m = math.prod(x.shape[:-1]) * (ranks if op == "ag_gemm" else 1)
    common = (x.shape[-1], x.dtype, x.device, group_name)
    reasons = (why_unfused(op, m, b.shape[1], *common, **how) for b in bs)
    return next((reason for reason in reasons if reason is not None), None)
