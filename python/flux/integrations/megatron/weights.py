"""The weights of a layer's experts as one tensor: where they lie in memory, and how to avoid copies of them.

Megatron's distributed optimizer moves all parameters into one buffer, in reverse order of registration: the
last expert's fc2, its fc1, then those of the expert before. So the experts of a layer are listed in reverse
here, and weights of one kind follow each other at a positive distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flux._log import say_once

Tensor = torch.Tensor
_ALIGNMENT = 16  # bytes: what TMA needs of an address, and of the distance of two experts
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Places(NamedTuple):
    """Where weights lie that a view reads as one tensor."""

    addresses: list[int]
    distance: int  # elements from each weight to the next one


def stacked(weights: Sequence[Tensor], before: Places | None = None) -> tuple[Tensor, Places | None]:
    """The weights [E, N, K] of E experts, each [N, K], and where they lie: a view if they lie at equal
    distances, else a copy and None.

    Never a view where gradients of the result are recorded, for those would reach the first weight only.

    Args:
        before: the second result for these weights in the forward pass. If they are at the same addresses
            still, nothing else about them is looked at.
    """
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return torch.stack(list(weights)), None
    compiling = torch.compiler.is_compiling()
    same = before is not None and not compiling and _addresses(weights) == before.addresses
    places = before if same else _places(weights)
    if places is None:
        if not compiling:
            say_once("weights of a layer's experts do not lie at equal distances: each pass copies them")
        return torch.stack(list(weights)), None
    return _whole(weights, places), places


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view [E, N, K] of E tensors [N, K] that lie at equal distances, such as the main_grads of a layer's
    experts; else None.
    """
    places = _places(tensors)
    return None if places is None else _whole(tensors, places)


def _whole(tensors: Sequence[Tensor], places: Places) -> Tensor:
    first = tensors[0]
    return first.as_strided((len(tensors), *first.shape), (places.distance, first.shape[1], 1))


def lay_out(weights: Sequence[Tensor]) -> None:
    """Moves the weights of E experts into one new tensor, in their order; each becomes a part of it.

    Parameters stay the same objects, with the same values. While it runs, memory holds the weights twice.
    Leaves weights alone that lie at equal distances already, that share memory with other tensors, such as
    those in a buffer of Megatron's data parallelism, and those without memory (meta).
    """
    if len(weights) < 2 or _places(weights) is not None or not _may_move(weights):
        return
    first = weights[0]
    with torch.no_grad():
        whole = first.new_empty(len(weights), *first.shape, requires_grad=False)
        for weight, place in zip(weights, whole, strict=True):
            place.copy_(weight)
            weight.data = place


def _addresses(weights: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, weights))


def _places(weights: Sequence[Tensor]) -> Places | None:
    """Where the weights lie, if their distances are the same everywhere, and kernels can read them."""
    if torch.compiler.is_compiling() or not _alike(weights):
        return None
    first, size, addresses = weights[0], weights[0].numel(), _addresses(weights)
    if len(weights) == 1 or size == 0:
        return Places(addresses, size)
    width = first.element_size()
    start, step = addresses[0], addresses[1] - addresses[0]
    if start % _ALIGNMENT or step % _ALIGNMENT or step < size * width:
        return None
    end = start + len(weights) * step
    if addresses != list(range(start, end, step)):
        return None
    storage = first.untyped_storage()
    last = storage.data_ptr() + storage.nbytes() - size * width
    return Places(addresses, step // width) if addresses[-1] <= last else None


def _alike(weights: Sequence[Tensor]) -> bool:
    """Whether they are ordinary contiguous tensors, with memory, of one shape and dtype."""
    # By sets and maps: a layer may have a hundred experts, and these run in each pass.
    return (
        set(map(type, weights)) <= _PLAIN
        and len({weight.dtype for weight in weights}) == 1
        and len({weight.shape for weight in weights}) == 1
        and all(map(Tensor.is_contiguous, weights))
        and not weights[0].is_meta
    )


def _may_move(weights: Sequence[Tensor]) -> bool:
    """Whether each weight is alone in its memory, and may get another one."""

    def is_alone(weight: Tensor) -> bool:
        storage = weight.untyped_storage()
        own = storage.nbytes() == weight.numel() * weight.element_size()
        shared = weight.device.type == "cpu" and storage.is_shared()  # by processes; CUDA's always say so
        return own and not shared and not weight.is_inference()

    if not _alike(weights) or torch.is_inference_mode_enabled():
        return False
    apart = len({weight.data_ptr() for weight in weights}) == len(weights)
    on_one_device = len({weight.device for weight in weights}) == 1
    return apart and on_one_device and all(map(is_alone, weights))
