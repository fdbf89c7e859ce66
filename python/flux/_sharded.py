"""Modules that hold this rank's parts of whole parameters, as DTensors (docs/design/decisions.md), which they
import when they need it: torch.distributed.tensor takes as long as torch's other parts together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from flux.comm.group import GroupLike, resolve_group
from flux.errors import fail

Tensor = torch.Tensor
Init: TypeAlias = Callable[[Tensor], object]


class ShardedModule(nn.Module):
    """Base of modules whose parameters are parts of whole ones, cut over the ranks of a group. It keeps the
    name of the group, so that it can be copied and pickled. A pickled module is one of its rank.
    """

    def __init__(self, group: GroupLike) -> None:
        super().__init__()
        process_group = resolve_group(group, type(self).__name__)
        self.group_name = str(process_group.group_name)
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.register_load_state_dict_pre_hook(take_own_parts)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        name = type(self).__name__
        if dist.is_initialized() and resolve_group(self.group_name, name).rank() != self.rank:
            got = f"that of rank {self.rank}; load a state dict instead"
            raise ValueError(f"{name}: expected a module of this rank, got {got}")

    def _draw(self, name: str, part: Tensor, own: tuple[slice, ...], shape: torch.Size) -> None:
        """Draws the whole parameter `name`, of this shape, and writes what `own` selects to `part`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws whole parameters, but those on meta, and keeps parts: with one seed the same for every p."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if not parameter.is_meta:
                    self._draw(name, local(parameter), own_part(parameter), parameter.shape)


def mesh_of(group: GroupLike, op: str, device: torch.device, slices: int = 1) -> DeviceMesh:
    """The given mesh of a group, one of one dimension, or [slices, ranks of each], a collective once."""
    process_group, kind = resolve_group(group, op), device.type
    slices = slices if slices < process_group.size() else 1
    if isinstance(group, DeviceMesh) and slices <= 1:
        return group
    if kind == "meta":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    with unset_fake_temporarily():  # a mesh outlives a dry run, and reads its own tensor
        return _new_mesh(process_group, kind, slices)


@functools.cache
def _new_mesh(process_group: dist.ProcessGroup, kind: str, slices: int) -> DeviceMesh:
    if slices == 1:
        return DeviceMesh.from_group(process_group, kind)
    ranks = torch.tensor(dist.get_process_group_ranks(process_group)).view(slices, -1)
    of_slice, place = divmod(process_group.rank(), ranks.shape[1])
    backend = dist.get_backend_config(process_group)
    groups = [
        dist.new_group(members.tolist(), backend=backend, use_local_synchronization=True)
        for members in (ranks[:, place], ranks[of_slice])
    ]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("ep", "tp"))


def hold(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    cuts: Sequence[int | None],
    group: GroupLike,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    slices: int = 1,
) -> None:
    """Adds a parameter of that whole shape to a module: a DTensor with uninitialised memory for this rank's
    part. cuts: which dimension of it each dimension of the mesh cuts, evenly; None: every rank has all.
    """
    from torch.distributed.tensor import Replicate, Shard

    some = torch.empty(0, device=device, dtype=dtype)
    mesh, own = mesh_of(group, type(module).__name__, some.device, slices), list(shape)
    for axis, cut in enumerate(cuts):
        if cut is not None:
            own[cut] //= mesh.size(axis)
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    placed = _placed(some.new_empty(own), mesh, placements, torch.Size(shape))
    module.register_parameter(name, nn.Parameter(placed))


def _placed(part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size) -> Tensor:
    """A DTensor of this shape with this rank's `part`, wherever that lies: from_local would move it."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    how: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
    spec = DTensor.from_local(part.to("meta"), mesh, placements, **how)._spec
    placed: Any = DTensor
    return placed(part, spec, requires_grad=False)  # type: ignore[no-any-return]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that may be a DTensor, for use without gradients."""
    return getattr(tensor, "_local_tensor", tensor)


def own_part(parameter: Any) -> tuple[slice, ...]:
    """Which part of a whole parameter this rank has. FSDP2 may have cut it further."""
    if not is_placed(parameter):
        return tuple(slice(0, size) for size in parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = parameter.shape, parameter.device_mesh, parameter.placements
    with unset_fake_temporarily():  # the mesh's tensor is real in a dry run, too
        sizes, begins = compute_local_shape_and_global_offset(*placed)
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def is_placed(tensor: object) -> bool:
    """Whether a tensor is a DTensor; in eager mode it imports nothing."""
    if torch.compiler.is_compiling():  # dynamo's tensors do not tell their attributes
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)
    return hasattr(tensor, "to_local")


def is_partial(tensor: Any) -> bool:
    return is_placed(tensor) and any(placement.is_partial() for placement in tensor.placements)


def local_parts(parameters: Sequence[Tensor | None], is_sum: bool = False) -> list[Any]:
    """This rank's parts of parameters; gradients are placed alike. is_sum: of what all have, as sums."""
    placed: list[Any] = [parameter for parameter in parameters if is_placed(parameter)]
    if not placed:
        return list(parameters)
    if torch.compiler.is_compiling():
        from torch.distributed.tensor import Partial

        sums = [[Partial()] * parameter.device_mesh.ndim if is_sum else None for parameter in placed]
        parts = [each.to_local(grad_placements=of) for each, of in zip(placed, sums, strict=True)]
    elif torch.is_grad_enabled() and any(parameter.requires_grad for parameter in placed):
        parts = _Parts.apply(is_sum, *placed)  # type: ignore[no-untyped-call]
    else:
        parts = [local(parameter) for parameter in placed]
    rest = iter(parts)
    return [next(rest) if is_placed(parameter) else parameter for parameter in parameters]


class _Parts(torch.autograd.Function):
    """DTensor.to_local of all parameters of a call at once, at a third of its cost."""

    @staticmethod
    def forward(ctx: Any, is_sum: bool, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.is_sum, ctx.like = is_sum, [(type(p), p._spec) for p in parameters]
        return tuple(p._local_tensor.detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(
            None if grad is None else _placed_grad(grad, kind, spec, ctx.is_sum)
            for grad, (kind, spec) in zip(grads, ctx.like, strict=True)
        )


def _placed_grad(grad: Tensor, kind: Any, spec: Any, is_sum: bool) -> Tensor:
    """The gradient of a DTensor of some spec, of which this rank has `grad`."""
    if is_sum:
        from torch.distributed.tensor import Partial

        spec = type(spec)(spec.mesh, (Partial(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    if grad.requires_grad:  # of second derivatives
        how = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
        return kind.from_local(grad, spec.mesh, spec.placements, **how)  # type: ignore[no-any-return]
    return kind(grad.contiguous(), spec, requires_grad=False)  # type: ignore[no-any-return]


def placed_like(part: Tensor, parameter: Any) -> Tensor:
    """A gradient of this rank's part of a parameter, as the gradient of the parameter."""
    return _placed_grad(part, type(parameter), parameter._spec, False) if is_placed(parameter) else part


def fill(op: str, init: Init, whole: Tensor) -> None:
    """Calls a user's `init` on a whole tensor, which it must fill in place, and not return another one."""
    returned = init(whole)
    # Compares addresses, not `is`: init may have filled whole.data, and returned that.
    if isinstance(returned, Tensor) and returned.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        fail(op, "init", "a function that fills a tensor in place", "one that returns another one")


def take_own_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Hook before a state dict is loaded: puts the rank's parts for whole tensors, and refuses others'."""
    parameters: dict[str, Any] = dict(module.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        given: Any = state.get(prefix + name)
        if not isinstance(given, Tensor) or not is_placed(parameter):
            continue
        where, mesh = (type(module).__name__, prefix + name), parameter.device_mesh
        if is_placed(given):
            told: Any = given
            wanted = f"a DTensor {parameter.placements} on {mesh}"
            if (told.device_mesh, told.placements) != (mesh, parameter.placements):
                fail(*where, wanted, f"{told.placements} on {told.device_mesh}")
            # A loaded file keeps the coordinate of the rank that has written it.
            place, own_place = told.device_mesh.get_coordinate(), (mesh.mesh == dist.get_rank()).nonzero()[0]
            if list(place or ()) != own_place.tolist():
                fail(*where, f"the part at {own_place.tolist()} of {mesh}", f"that at {place}")
            continue
        own, reshape = own_part(parameter), getattr(module, "as_whole", None)
        given = given if reshape is None else reshape(name, given)
        if given.shape == parameter.shape:
            part = given[own]
            # With assign=True the part becomes the parameter; as a view it would keep the whole tensor alive.
            part = part.clone() if metadata.get("assign_to_params_buffers") else part
            state[prefix + name] = _placed(part, mesh, parameter.placements, parameter.shape)
        elif given.shape == local(parameter).shape:
            got = f"{list(given.shape)}, a part that does not say of which rank it is; DTensor.from_local("
            got += "part, parameter.device_mesh, parameter.placements) says so"
            fail(*where, f"the whole tensor {list(parameter.shape)} or a DTensor", got)
        # Else torch says that the sizes don't match.
