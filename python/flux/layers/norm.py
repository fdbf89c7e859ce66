"""Root mean square normalisation, and the gradients of parameters that every rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flux.comm.group import GroupLike, resolve_group
from flux.ops import _arguments, _check


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        hidden_size: length of the last dimension of x.
        eps: added to the mean. None means what it means to torch.nn.RMSNorm.
        sequence_parallel: x is the rank's rows, so the weight's gradient lacks those of other ranks.
            reduce_replicated_grads adds them. The weight has an attribute of the same name, which Megatron
            reads.
        device, dtype: of the weight; default: torch's.

    Raises:
        ValueError: hidden_size is less than 1, eps is negative, or dtype is not a floating one of flux's.
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
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        op = type(self).__name__
        hidden_size = _arguments.size(op, "hidden_size", hidden_size, 1)
        if eps is not None and (not isinstance(eps, (int, float)) or isinstance(eps, bool)):
            _arguments.wrong_type(op, "eps", "a number or None", eps)
        if eps is not None and not eps >= 0.0:
            _check.fail(op, "eps", "a number that is not negative", eps)
        _arguments.flag(op, "sequence_parallel", sequence_parallel)
        _arguments.device(op, "device", device)
        _arguments.floating_dtype(op, "dtype", dtype)
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        self._mark_weight()

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


def reduce_replicated_grads(module: nn.Module, *, group: GroupLike = None) -> None:
    """Sums over ranks the gradients of parameters that all ranks hold, but each applied to its rows only.

    To be called between the backward pass and the optimizer's step, if the model has norms under sequence
    parallelism. A collective: ranks must have gradients for the same parameters.

    Args:
        module: the model. Meant are the weights of every RMSNorm with `sequence_parallel`, and parameters
            with a true attribute of that name; of each its `main_grad`, if it has one, else its `grad`.
        group: the tensor-parallel group.

    Raises:
        TypeError: `module` is no torch.nn.Module.
        ValueError: there is no such group.

    Example::

        from flux.layers import RMSNorm, reduce_replicated_grads

        norm = RMSNorm(64)
        norm(torch.ones(8, 64)).sum().backward()
        own = norm.weight.grad.clone()
        reduce_replicated_grads(norm)
        assert torch.allclose(norm.weight.grad, p * own)
    """
    if not isinstance(module, nn.Module):
        _arguments.wrong_type("reduce_replicated_grads", "module", "a torch.nn.Module", module)
    process_group = resolve_group(group, "reduce_replicated_grads")
    grads: dict[torch.dtype, list[torch.Tensor]] = {}
    norms = [norm for norm in module.modules() if isinstance(norm, RMSNorm) and norm.sequence_parallel]
    of_norms = {id(norm.weight) for norm in norms}
    for parameter in module.parameters():
        if id(parameter) in of_norms or getattr(parameter, "sequence_parallel", False):
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                # For a DTensor, as in FSDP2: the local part.
                with torch.no_grad():
                    grad = grad.to_local() if hasattr(grad, "to_local") else grad
                grads.setdefault(grad.dtype, []).append(grad)
    for alike in grads.values():
        # One all-reduce of the concatenated gradients, because they are short.
        flat = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(flat, group=process_group)
        totals = torch.split(flat, [grad.numel() for grad in alike])
        for grad, total in zip(alike, totals, strict=True):
            grad.copy_(total.view_as(grad))
