"""Modules that hold this rank's slices of whole parameters: initialisation and loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from flux.comm.group import GroupLike, resolve_group

Init: TypeAlias = Callable[[torch.Tensor], object]


class ShardedModule(nn.Module):
    """Base of modules whose parameters are slices of whole ones, cut over the ranks of a group.

    The group is kept by its name, so that the module can be copied and pickled. A pickled module holds the
    parameters of its rank; on another rank, load a state dict.

    Attributes:
        group_name: of the process group.
        rank, world_size: in the group.
    """

    def __init__(self, group: GroupLike) -> None:
        super().__init__()
        process_group = resolve_group(group, type(self).__name__)
        self.group_name = str(process_group.group_name)
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.register_load_state_dict_pre_hook(_take_own_slices)  # type: ignore[no-untyped-call]

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter `name` before it is cut."""
        raise NotImplementedError

    def own_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole parameter `name`."""
        raise NotImplementedError

    def _draw(self, name: str, parameter: torch.Tensor) -> None:
        """Draws the whole parameter `name` and writes this rank's slice of it to `parameter`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws the parameters again; those on the meta device are left alone.

        Every rank draws the whole tensors and keeps its slices. So with equal seeds on all ranks the model is
        the same for every world size, and the ranks' generators stay equal.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if not parameter.is_meta:
                    self._draw(name, parameter)


def fill(op: str, init: Init, whole: torch.Tensor) -> None:
    """Calls a user's `init` on a whole tensor, which it must fill in place.

    Raises:
        ValueError: it returned another tensor, as torch.randn_like does, and so left this one as it was.
    """
    returned = init(whole)
    # Compares addresses, not `is`: init may have filled whole.data, and returned that.
    if (
        isinstance(returned, torch.Tensor)
        and returned.untyped_storage()._cdata != whole.untyped_storage()._cdata
    ):
        raise ValueError(
            f"{op}: init: expected a function that fills a tensor in place, got one that returns another one"
        )


def _take_own_slices(
    module: ShardedModule, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Hook before a state dict is loaded: replaces whole tensors in it by this rank's slices."""
    for name, parameter in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if not isinstance(given, torch.Tensor) or given.shape == parameter.shape:
            continue
        if given.shape != module.whole_shape(name):
            continue  # torch says that the sizes don't match
        own = module.own_slice(name, given)
        # With assign=True the slice becomes the parameter; as a view it would keep the whole tensor alive.
        state[prefix + name] = own.clone() if metadata.get("assign_to_params_buffers") else own
