"""Root mean square normalisation, and the gradients of parameters that every rank holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flux._sharded import hold, is_partial, is_placed, local, local_parts, placed_like, take_own_parts
from flux.calls import argument_types, checks
from flux.comm.group import GroupLike, resolve_group


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        hidden_size: length of the last dimension of x.
        eps: added to the mean. None means what it means to torch.nn.RMSNorm.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group, if there
            is one; without torch.distributed the weight is a plain parameter.
        sequence_parallel: x is the rank's rows, so the weight's gradient is a sum over ranks: a DTensor with
            the placement Partial, which reduce_replicated_grads sums for all norms at once. The weight has an
            attribute of the same name, which Megatron reads.
        device, dtype: of the weight; default: torch's.

    Raises:
        ValueError: hidden_size is less than 1, eps is negative, dtype is not a floating one of flux's, or
            there is no such group.
        TypeError: an argument is of another type.

    Example::

        from flux.layers import RMSNorm

        norm = RMSNorm(64)
        assert norm(torch.randn(8, 64)).shape == (8, 64)
    """

    sequence_parallel = False

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-6,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        op = type(self).__name__
        hidden_size = argument_types.size(op, "hidden_size", hidden_size, 1)
        if eps is not None:
            if not isinstance(eps, (int, float)) or isinstance(eps, bool):
                argument_types.wrong_type(op, "eps", "a number or None", eps)
            if not eps >= 0.0:
                checks.fail(op, "eps", "a number that is not negative", eps)
        argument_types.flag(op, "sequence_parallel", sequence_parallel)
        argument_types.device(op, "device", device)
        argument_types.floating_dtype(op, "dtype", dtype)
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        if group is not None or dist.is_initialized():
            hold(self, "weight", [hidden_size], [None], group, device, dtype)
            self.reset_parameters()
            self.register_load_state_dict_pre_hook(take_own_parts)  # type: ignore[no-untyped-call]
        self.sequence_parallel = sequence_parallel
        self._mark_weight()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = local_parts([self.weight], is_sum=self.sequence_parallel)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    @property
    def replicated_parameters(self) -> tuple[str, ...]:
        """The names of parameters whose gradients reduce_replicated_grads sums."""
        return ("weight",) if self.sequence_parallel else ()

    def _mark_weight(self) -> None:
        # When torch replaces a parameter, it does not copy its attributes.
        if isinstance(self._parameters.get("weight"), torch.Tensor):
            self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_weight()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RMSNorm:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_weight()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_weight()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


def mark_replicated(module: nn.Module, *names: str) -> None:
    """Says that parameters of a module are held by all ranks, each of which applies them to its rows only.

    reduce_replicated_grads sums their gradients. Unlike an attribute of a weight, the mark survives
    fully_shard, to_empty, load_state_dict(assign=True) and copies. RMSNorm has it.

    Args:
        module: that owns the parameters, such as a norm under sequence parallelism.
        names: of its parameters. They replace those of an earlier call.

    Raises:
        TypeError: `module` is no torch.nn.Module.
        ValueError: it has no such parameter, or decides itself what is replicated, as RMSNorm does.

    Example::

        from flux.layers import mark_replicated, reduce_replicated_grads

        norm = torch.nn.LayerNorm(64)
        mark_replicated(norm, "weight", "bias")
        norm(torch.ones(8, 64)).sum().backward()
        reduce_replicated_grads(norm)
        assert (norm.bias.grad == 8 * p).all()
    """
    op = "mark_replicated"
    if not isinstance(module, nn.Module):
        argument_types.wrong_type(op, "module", "a torch.nn.Module", module)
    if isinstance(getattr(type(module), "replicated_parameters", None), property):
        checks.fail(op, "module", "a module without marks of its own", type(module).__name__)
    for name in names:
        if not isinstance(module._parameters.get(name), nn.Parameter):
            checks.fail(op, "names", f"parameters of {type(module).__name__}", repr(name))
    module.replicated_parameters = names  # type: ignore[assignment]


def reduce_replicated_grads(module: nn.Module, *, group: GroupLike = None) -> None:
    """Sums over ranks the gradients of parameters that all ranks hold, but each applied to its rows only.

    To be called between the backward pass and the optimizer's step, if the model has norms under sequence
    parallelism. DTensors whose placement is no longer Partial have been summed, by FSDP2 for example, and are
    left alone. A collective. On GPUs it waits for the gradients, to compare what ranks have.

    Args:
        module: the model. Meant are the weights of every RMSNorm with `sequence_parallel`, parameters that
            mark_replicated names, and parameters with a true attribute `sequence_parallel`, as Megatron sets
            it; of each its `main_grad`, if it has one, else its `grad`.
        group: the tensor-parallel group.

    Raises:
        TypeError: `module` is no torch.nn.Module.
        ValueError: there is no such group, or a gradient is a sum over another one; no module says that it
            has such parameters, or one names a parameter that it no longer has; or a parameter has a gradient
            on some ranks only. All ranks of the group raise the last.

    Example::

        from flux.layers import RMSNorm, reduce_replicated_grads

        norm = RMSNorm(64)
        norm(torch.ones(8, 64)).sum().backward()
        own = norm.weight.grad.to_local().clone()
        reduce_replicated_grads(norm)
        assert torch.allclose(norm.weight.grad.to_local(), p * own)
    """
    op = "reduce_replicated_grads"
    if not isinstance(module, nn.Module):
        argument_types.wrong_type(op, "module", "a torch.nn.Module", module)
    process_group = resolve_group(group, op)
    found, marked = {}, _replicated(module)
    for name, parameter in marked.items():
        main = getattr(parameter, "main_grad", None)
        grad = parameter.grad if main is None else main
        if grad is not None and not _is_summed(name, grad, process_group):
            found[name] = local(grad)
    _check_alike(module, list(marked), found, process_group)
    grads: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in found.values():
        grads.setdefault(grad.dtype, []).append(grad)
    with torch.no_grad():
        for alike in grads.values():
            # One all-reduce of the concatenated gradients, because they are short.
            flat = torch.cat([grad.flatten() for grad in alike])
            dist.all_reduce(flat, group=process_group)
            for grad, total in zip(alike, torch.split(flat, [grad.numel() for grad in alike]), strict=True):
                grad.copy_(total.view_as(grad))
    for parameter in (marked[name] for name in found):
        if parameter.grad is not None and is_partial(parameter.grad):
            parameter.grad = placed_like(local(parameter.grad), parameter)


def _is_summed(name: str, grad: Any, group: dist.ProcessGroup) -> bool:
    """Whether a gradient is a DTensor on a mesh with the group, and no longer a sum over it."""
    if not is_placed(grad):
        return False
    mesh = grad.device_mesh
    groups = [mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
    others = [name for name, placed in zip(groups, grad.placements, strict=True) if placed.is_partial()]
    if others not in ([], [group.group_name]):
        expected = f"gradients that are sums over the group {group.group_name}"
        checks.fail("reduce_replicated_grads", "group", expected, f"{name}, a sum over {', '.join(others)}")
    return group.group_name in groups and not others


def _replicated(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that modules mark, and those that are marked themselves, each once."""
    op, is_said = "reduce_replicated_grads", False
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, owner in module.named_modules():
        names = getattr(owner, "replicated_parameters", None)
        is_said |= names is not None
        own = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
        marked = [name for name, value in own.items() if getattr(value, "sequence_parallel", False)]
        for name in dict.fromkeys([*(names or ()), *marked]):
            if name not in own:
                of = f"{name!r} of {type(owner).__name__}"
                raise ValueError(f"{op}: module: {path} marks {of}, which has no such parameter")
            found.setdefault(id(own[name]), (f"{path}.{name}".lstrip("."), own[name]))
    if not found and not is_said:
        marks = "(RMSNorm, mark_replicated; torch drops attributes of weights)"
        checks.fail(op, "module", f"parameters that modules mark {marks}", "none")
    return dict(found.values())


def _check_alike(
    module: nn.Module, marked: list[str], found: dict[str, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Raises on all ranks, if they would sum different gradients."""
    devices = (tensor.device for tensor in (*found.values(), *module.parameters()))
    device = next(devices, torch.device("cpu"))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    op, expected = "reduce_replicated_grads", "the same gradients on all ranks"
    if _equal(marked + [(name, grad.shape, grad.dtype) for name, grad in found.items()], device, group):
        return
    if not _equal(marked, device, group):
        checks.fail(op, "module", "the same marked parameters on all ranks", ", ".join(marked) or "none")
    holders = torch.tensor([name in found for name in marked], dtype=torch.int32, device=device)
    dist.all_reduce(holders, group=group)
    some = [name for name, count in zip(marked, holders.tolist(), strict=True) if 0 < count < group.size()]
    checks.fail(op, "module", expected, f"{', '.join(some) or 'other shapes or dtypes'} on some only")


def _equal(value: list[Any], device: torch.device, group: dist.ProcessGroup) -> bool:
    digest = zlib.crc32(repr(value).encode())
    largest = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return not largest.sum()
