"""Root mean square normalisation, and the gradients of parameters that every rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flux.comm.group import GroupLike, resolve_group


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        hidden_size: length of the last dimension of x.
        eps: added to the mean.
        sequence_parallel: x is the rank's rows, so the weight's gradient lacks those of other ranks. By an
            attribute of this name on the weight, reduce_replicated_grads and Megatron know.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def reduce_replicated_grads(module: nn.Module, *, group: GroupLike = None) -> None:
    """Sums over ranks the gradients of parameters that all ranks hold, but each applied to its rows only.

    To be called between the backward pass and the optimizer's step, if the model has norms under sequence
    parallelism. A collective: ranks must have gradients for the same parameters.

    Args:
        module: the model. Parameters with a true attribute `sequence_parallel` are meant; of each its
            `main_grad`, if it has one, else its `grad`.
        group: the tensor-parallel group.
    """
    process_group = resolve_group(group, "reduce_replicated_grads")
    grads: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if getattr(parameter, "sequence_parallel", False):
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                grads.setdefault(grad.dtype, []).append(grad)
    for alike in grads.values():
        # One message: they are short.
        flat = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(flat, group=process_group)
        totals = torch.split(flat, [grad.numel() for grad in alike])
        for grad, total in zip(alike, totals, strict=True):
            grad.copy_(total.view_as(grad))
