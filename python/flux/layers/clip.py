"""One norm of all gradients, whichever meshes they are on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flux.calls import argument_types


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``, also for parameters on several meshes and plain ones.

    torch's own is right if all gradients are DTensors on one mesh, and raises where they are not. A part
    counts on the rank that has it, and what all ranks have counts once; that includes plain parameters, whose
    gradients must be the same on all ranks. A collective.

    Args:
        parameters: such as model.parameters(), or one; of any shapes and dtypes.
        max_norm: the largest norm that gradients keep.
        norm_type: p of the p-norm, also inf.

    Returns:
        The norm before clipping, a plain tensor that is the same on all ranks.

    Raises:
        TypeError: max_norm or norm_type is no number, or something else than tensors is among parameters.

    Example::

        from flux.layers import ParallelMLP, clip_grad_norm_

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), ParallelMLP(64, 24 * p))
        model(torch.ones(8, 64)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
    """
    op = "clip_grad_norm_"
    argument_types.number(op, "max_norm", max_norm)
    argument_types.number(op, "norm_type", norm_type)
    if not isinstance(parameters, Iterable):
        argument_types.wrong_type(op, "parameters", "a tensor, or several", parameters)
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if not isinstance(parameter, torch.Tensor):
            argument_types.wrong_type(op, "parameters", "tensors", parameter)
        if parameter.grad is not None:
            alike.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [get_total_norm([p.grad for p in some], norm_type) for some in alike.values()]  # type: ignore[misc]
    total = get_total_norm([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms], norm_type)
    for some in alike.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total
