"""Parallel styles for torch.distributed.tensor.parallel.parallelize_module that run on flux.

Parameters become DTensors exactly as with the styles of torch, so FSDP2, checkpoints and gradient clipping
see no difference. What changes is the forward pass of the module, and with it the backward pass.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import flux
from flux._log import say_once
from flux.layers import row_linear

__all__ = [
    "FluxColwiseParallel",
    "FluxRowwiseParallel",
    "FluxSharedColwiseParallel",
    "convert_plan",
    "gemm_ar",
]

Tensor = torch.Tensor
ForwardOfMany = Callable[[Sequence[nn.Linear], Tensor], list[Tensor]]


class FluxColwiseParallel(ColwiseParallel):
    """ColwiseParallel whose gather of a sequence-parallel input runs in the GEMM, through flux.ag_gemm.

    Arguments are those of ColwiseParallel. flux serves nn.Linear whose input is ``Shard(dim)``, where `dim`
    counts rows (not the last dimension): a DTensor of this placement, or a tensor with
    ``input_layouts=Shard(dim)``. Everything else, and a weight or a DTensor's rows that do not divide by the
    ranks, is left to torch.

    The output [..., N/p] has dimension `dim` first in memory: where that is not dimension 0, the next
    FluxRowwiseParallel takes it without a copy, and code that flattens it needs reshape instead of view.

    Example::

        from torch.distributed.tensor import Shard, parallel

        from flux.integrations.dtensor import FluxColwiseParallel

        mesh, style = dist.init_device_mesh("cpu", (p,)), FluxColwiseParallel(input_layouts=Shard(0))
        layer = parallel.parallelize_module(torch.nn.Linear(64, 32 * p), mesh, style)
        assert layer(torch.randn(8, 64)).shape == (8 * p, 32)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        why_not = why_not_linear(module, device_mesh.size(), 0)
        if why_not is not None:
            say_once(f"{type(self).__name__}: left to torch: {why_not}", logging.INFO)
            return super()._apply(module, device_mesh)
        if not isinstance(self.input_layouts[0], Shard):
            why_not = f"input_layouts={self.input_layouts[0]}: only DTensors cut in rows are gathered"
            say_once(f"{type(self).__name__}: {why_not}", logging.INFO)
        compute = self._forward(device_mesh)

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            return compute([module], x)[0]

        return _with_forward(distribute_module(module, device_mesh, self._partition_linear_fn), forward)

    def _forward(self, mesh: DeviceMesh) -> ForwardOfMany:
        """A function that computes the outputs of some layers for the same input, which it gathers once."""
        (source,), (target,), local = self.input_layouts, self.output_layouts, self.use_local_output
        group, p = str(mesh.get_group().group_name), mesh.size()

        def compute(layers: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
            layout, parts = source, 1
            if isinstance(x, DTensor):
                # Its shape is that of the whole; a tensor's is that of one of p equal parts.
                layout, parts = x.placements[0], p
                if layout.is_partial() and isinstance(source, Shard):
                    layout = source
            if type(layout) is not Shard or not _are_rows(x, layout.dim, parts):
                return _through_dtensor(layers, x, mesh, (layout, Replicate(), target), local)
            weights, biases = zip(*((local_part(a.weight), local_part(a.bias)) for a in layers), strict=True)
            rows = _local_input(x, mesh, layout).movedim(layout.dim, 0)
            outs = flux.ag_gemm(rows, list(weights), list(biases), group=group)
            return [_laid_out(out.movedim(0, layout.dim), mesh, Shard(-1), target, local) for out in outs]

        return compute


class FluxSharedColwiseParallel(ParallelStyle):
    """FluxColwiseParallel for several layers of a module that read the same input, gathered once for all.

    For the module that contains them: ``{"feed_forward": FluxSharedColwiseParallel("gate", "up",
    input_layouts=Shard(1))}``. Within a call of that module the layer that is called first computes all
    outputs, in one flux.ag_gemm; the others, called with the same tensor, return theirs. A layer that is
    called with another tensor, twice, after a change of the weights or of the grad mode, computes anew, and
    so does one that is called outside of a call of the module. Nothing is kept from call to call.

    Args:
        names: of the layers, in the module.
        input_layouts: placement of the module's input, Shard of a dimension of rows.
        use_local_output: return plain tensors, not DTensors.

    Example::

        from torch import nn
        from torch.distributed.tensor import Shard, parallel

        from flux.integrations.dtensor import FluxSharedColwiseParallel

        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.up = nn.Linear(64, 32 * p), nn.Linear(64, 32 * p)

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.silu(self.gate(x)) * self.up(x)

        style = FluxSharedColwiseParallel("gate", "up", input_layouts=Shard(0))
        block = parallel.parallelize_module(Gated(), dist.init_device_mesh("cpu", (p,)), style)
        assert block(torch.randn(8, 64)).shape == (8 * p, 32)
    """

    def __init__(self, *names: str, input_layouts: Placement, use_local_output: bool = True) -> None:
        super().__init__()
        self.names = names
        self.style = FluxColwiseParallel(input_layouts=input_layouts, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.style.src_data_rank = self.src_data_rank
        layers = [module.get_submodule(name) for name in self.names]
        if any(why_not_linear(layer, device_mesh.size(), 0) is not None for layer in layers):
            for layer in layers:
                self.style._apply(layer, device_mesh)
            return module
        shared = SharedOutputs(layers, self.style._forward(device_mesh))
        for i, layer in enumerate(layers):
            distribute_module(layer, device_mesh, self.style._partition_linear_fn)
            layer.forward = partial(shared.output, i)
        module.register_forward_pre_hook(partial(shared.turn, True))
        module.register_forward_hook(partial(shared.turn, False), always_call=True)
        return module


class FluxRowwiseParallel(RowwiseParallel):
    """RowwiseParallel whose reduction runs in the GEMM, through flux.gemm_rs or flux.gemm_ar.

    Arguments are those of RowwiseParallel. flux serves nn.Linear with ``input_layouts=Shard(-1)``, and
    ``output_layouts=Shard(dim)``, where `dim` counts rows (gemm_rs), or ``Replicate()`` (gemm_ar). Everything
    else, and a weight or number of rows that does not divide by the ranks, is left to RowwiseParallel.

    Example::

        from torch.distributed.tensor import Shard, parallel

        from flux.integrations.dtensor import FluxRowwiseParallel

        mesh, style = dist.init_device_mesh("cpu", (p,)), FluxRowwiseParallel(output_layouts=Shard(0))
        layer = parallel.parallelize_module(torch.nn.Linear(16 * p, 64), mesh, style)
        assert layer(torch.randn(8 * p, 16)).shape == (8, 64)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, p = type(self).__name__, device_mesh.size()
        why_not = why_not_linear(module, p, 1)
        (source,), (target,) = self.input_layouts, self.output_layouts
        if why_not is None and source != Shard(-1):
            why_not = f"input_layouts={source}, not {Shard(-1)}"
        if why_not is None and not isinstance(target, Shard | Replicate):
            why_not = f"output_layouts={target}"
        if why_not is not None:
            say_once(f"{name}: left to torch: {why_not}", logging.INFO)
            return super()._apply(module, device_mesh)
        group = str(device_mesh.get_group().group_name)

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            if isinstance(target, Shard) and not _are_rows(x, target.dim, p):
                layouts = (source, source, target)
                return _through_dtensor([module], x, device_mesh, layouts, self.use_local_output)[0]
            local_x, weight = _local_input(x, device_mesh, source), local_part(module.weight)
            if isinstance(target, Shard):
                bias = None if module.bias is None else _summed_gradient(module.bias)
                rows = local_x.movedim(target.dim, 0)
                out = flux.gemm_rs(rows, weight, bias, group=group).movedim(0, target.dim)
            else:
                out = gemm_ar(local_x, weight, local_part(module.bias), group)
            return _laid_out(out, device_mesh, target, target, self.use_local_output)

        return _with_forward(distribute_module(module, device_mesh, self._partition_linear_fn), forward)


def convert_plan(plan: Any) -> Any:
    """A plan for parallelize_module that does on flux what flux can fuse, and the rest by torch's styles.

    ColwiseParallel and RowwiseParallel become flux's, with the same arguments. If a PrepareModuleInput or
    PrepareModuleInputOutput gathers one input, from ``Shard(dim)`` to ``Replicate()``, the gather moves into
    the GEMMs of the column-parallel layers directly in that module, one gather for all. The module then gets
    the DTensor before the gather, of the same shape; it must not call to_local() on it. Styles that flux does
    not know stay, and with them the gather for a module that they are applied in. The logger `flux` names
    what stays with torch, at level INFO.

    Args:
        plan: a style, or a dict of names of modules, which may have wildcards, to styles. It is not changed.

    Returns:
        The same for flux. Layers that get a gather are converted under the name of their module, not theirs.

    Raises:
        TypeError: `plan` is neither of these, or holds something that is no ParallelStyle.

    Example::

        from torch import nn
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

        from flux.integrations.dtensor import convert_plan

        plan = {
            "0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "0.0": ColwiseParallel(),
        }
        layers = nn.Sequential(nn.Sequential(nn.Linear(64, 32 * p), nn.ReLU()))
        parallelize_module(layers, dist.init_device_mesh("cpu", (p,)), convert_plan(plan))
        assert layers(torch.randn(8, 64)).shape == (8 * p, 32)
    """
    if isinstance(plan, ParallelStyle):
        return convert_plan({"": plan})[""]
    if not isinstance(plan, dict) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        got = {key: type(style).__name__ for key, style in plan.items()} if isinstance(plan, dict) else plan
        raise TypeError(f"convert_plan: plan: expected a ParallelStyle or a dict of them, got {got!r}")
    converted = {key: _on_flux(style) for key, style in plan.items()}
    left = {key: type(style).__name__ for key, style in converted.items() if not isinstance(style, _OURS)}
    for key, style in plan.items():
        if type(style) not in _GATHERING:
            continue
        prepare: Any = getattr(style, "prepare_module_input", style)
        inside = f"{key}." if key else ""
        parts = {name.removeprefix(inside): name for name in plan if name != key and name.startswith(inside)}
        direct = {part: converted[name] for part, name in parts.items() if "." not in part}
        layers = {part: layer for part, layer in direct.items() if isinstance(layer, FluxColwiseParallel)}
        unknown = {type(plan[name]).__name__ for name in parts.values() if type(plan[name]) not in _KNOWN}
        gathers, bare = _without_gathers(style)
        if gathers != 1:
            left[key] += f", which gathers {gathers} inputs"
        elif prepare.use_local_output:
            left[key] += ", whose module reads tensors, not DTensors"
        elif unknown or not layers:
            left[key] += f", with {', '.join(sorted(unknown)) or 'no column-parallel layers'} in it"
        else:
            converted[key] = _GatherInLayers(style, bare, layers)
            del left[key]
            for part in layers:
                del converted[parts[part]]
    if left:
        told = "; ".join(f"{key!r}: {why}" for key, why in left.items())
        say_once(f"convert_plan: left to torch: {told}", logging.INFO)
    return converted


def _on_flux(style: Any) -> Any:
    """Flux's style for one of torch's, or the same."""
    ours: Any = {ColwiseParallel: FluxColwiseParallel, RowwiseParallel: FluxRowwiseParallel}.get(type(style))
    if ours is None:
        return style
    (source,), (target,) = style.input_layouts, style.output_layouts
    return ours(input_layouts=source, output_layouts=target, use_local_output=style.use_local_output)


def _without_gathers(style: Any) -> tuple[int, Any]:
    """How many inputs PrepareModuleInput gathers, and one that leaves those as they are."""
    style, gathers = copy.copy(style), 0
    if isinstance(style, styles.PrepareModuleInputOutput):
        gathers, style.prepare_module_input = _without_gathers(style.prepare_module_input)
        return gathers, style

    def kept(source: Placement | None, wanted: Placement | None) -> Placement | None:
        nonlocal gathers
        gather = type(source) is Shard and wanted == Replicate()
        gathers += gather
        return source if gather else wanted

    if style.input_layouts is not None:
        style.desired_input_layouts = tuple(map(kept, style.input_layouts, style.desired_input_layouts))
    layouts, wanted = style.input_kwarg_layouts, style.desired_input_kwarg_layouts
    style.desired_input_kwarg_layouts = {name: kept(layouts[name], wanted.get(name)) for name in layouts}
    return gathers, style


class _GatherInLayers(ParallelStyle):
    """A style that gathers a module's input, or one without the gather if layers of the module do it."""

    def __init__(self, gathering: Any, bare: Any, layers: dict[str, FluxColwiseParallel]) -> None:
        super().__init__()
        self.gathering, self.bare, self.layers = gathering, bare, layers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        children, chosen = dict(module.named_children()), dict[str, FluxColwiseParallel]()
        for pattern, style in self.layers.items():
            names = [name for name in children if fnmatch(name, pattern)]
            chosen |= dict.fromkeys(names, style)
            if not names:  # torch warns, too
                warnings.warn(f"no submodule matching {pattern!r} in {type(module).__name__}", stacklevel=2)
        served = [why_not_linear(children[name], device_mesh.size(), 0) is None for name in chosen]
        (self.bare if served and all(served) else self.gathering)._apply(module, device_mesh)
        # Layers with the same arguments and size of input share a gather.
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, style in chosen.items():
            kind = style.input_layouts, style.output_layouts, style.use_local_output
            groups.setdefault((*kind, getattr(children[name], "in_features", None)), []).append(name)
        for names in groups.values():
            shared = FluxSharedColwiseParallel(*names, input_layouts=Replicate())
            shared.style, shared.src_data_rank = chosen[names[0]], self.src_data_rank
            shared._apply(module, device_mesh)
        return module


_OURS = (FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel, _GatherInLayers)
_GATHERING = (styles.PrepareModuleInput, styles.PrepareModuleInputOutput)
_KNOWN = {*_OURS, *_GATHERING, ColwiseParallel, RowwiseParallel}
_KNOWN |= {styles.SequenceParallel, styles.PrepareModuleOutput}


def gemm_ar(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    """flux.gemm_ar for model code in which the result, and hence its gradient, is the same on all ranks.

    The backward pass then needs no communication, as in tensor parallelism everywhere.

    Args:
        x: [..., K/p]; bfloat16, float16, float32 or float64.
        weight: [N, K/p], dtype and device of x.
        bias: [N], dtype and device of x, the same on all ranks, or None.
        group: name of the process group.

    Returns:
        [..., N] in x's dtype, the sum over ranks.

    Raises:
        TypeError, ValueError, CommTimeoutError, RuntimeError: as flux.gemm_ar.

    Example::

        from flux.integrations.dtensor import gemm_ar

        x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(32, 64)
        gemm_ar(x, weight, None, dist.group.WORLD.group_name).sum().backward()
        assert x.grad.shape == (4, 64)
    """
    if x.dim() == 1:
        return gemm_ar(x[None], weight, bias, group)[0]
    if not torch.is_grad_enabled():
        return flux.gemm_ar(x, weight, bias, group=group)
    return row_linear(x, weight, bias, group=group, sequence_parallel=False)


class SharedOutputs:
    """Layers of a module that read the same input: the outputs of all are computed when the first is called,
    and kept until they are returned, within one call of the module.
    """

    def __init__(self, layers: Sequence[Any], compute: ForwardOfMany) -> None:
        self._layers, self._compute = layers, compute
        self._inside = False
        self._outputs: dict[int, Tensor] = {}
        self._read: list[Tensor] = []  # the tensors from which outputs were computed
        self._state: tuple[Any, ...] = ()

    def turn(self, inside: bool, *of_call: object) -> None:
        """Hook at the start of a call of the module, and at its end, also if it failed."""
        self._inside = inside
        self._forget()

    def output(self, i: int, x: Tensor) -> Tensor:
        """The output of layer `i` for x."""
        if not self._inside:
            # The weights may have changed unnoticed: FSDP2 writes them without autograd's version counters.
            return self._compute([self._layers[i]], x)[0]
        read, state = self._what_it_depends_on(x)
        same = len(read) == len(self._read) and all(a is b for a, b in zip(read, self._read, strict=True))
        if not same or state != self._state or i not in self._outputs:
            self._outputs = dict(enumerate(self._compute(self._layers, x)))
            self._read, self._state = read, state
        out = self._outputs.pop(i)
        if not self._outputs:
            self._forget()
        return out

    def _forget(self) -> None:
        self._outputs, self._read, self._state = {}, [], ()

    def _what_it_depends_on(self, x: Tensor) -> tuple[list[Tensor], tuple[Any, ...]]:
        """The tensors on which outputs depend, their versions, and the gradient modes."""
        parameters = [p for layer in self._layers for p in (layer.weight, layer.bias) if p is not None]
        read = [x, *parameters]
        # The compiler traces functionalised tensors, which are never overwritten.
        if torch.compiler.is_compiling():
            return read, (torch.is_grad_enabled(),)
        versions = [(each.requires_grad, 0 if each.is_inference() else each._version) for each in read]
        return read, (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *versions)


def why_not_linear(module: nn.Module, p: int, dim: int) -> str | None:
    """Why flux cannot serve a module whose weight is cut in dimension `dim`, or None."""
    if type(module).forward is not nn.Linear.forward or not isinstance(module, nn.Linear):
        return f"{type(module).__name__} is no nn.Linear"
    if p == 1:
        return "the mesh has one rank"
    if module.weight.shape[dim] % p:
        return f"a weight {list(module.weight.shape)} does not divide by {p} ranks"
    return None


def _are_rows(x: Tensor, dim: int, p: int) -> bool:
    """Whether dimension `dim` of x counts rows, and is divisible by p."""
    return dim % x.dim() != x.dim() - 1 and x.shape[dim] % p == 0


def _with_forward(module: nn.Module, forward: Callable[[nn.Linear, Tensor], Tensor]) -> nn.Module:
    # A bound method, which copy.deepcopy binds to the copy, with the copy's weights.
    module.forward = MethodType(forward, module)
    return module


def local_part(parameter: Any) -> Any:
    """The local part of a parameter, if there is one; its gradient has the placement of the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _summed_gradient(bias: Tensor) -> Tensor:
    """A replicated bias of which each rank uses a copy for its own rows."""
    assert isinstance(bias, DTensor)
    # Backward: each rank has the gradient of its rows (Partial); redistribute to Replicate sums them.
    return bias.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _local_input(x: Tensor, mesh: DeviceMesh, layout: Placement) -> Tensor:
    return x.redistribute(mesh, [layout]).to_local() if isinstance(x, DTensor) else x


def _laid_out(out: Tensor, mesh: DeviceMesh, layout: Placement, target: Placement, local: bool) -> Tensor:
    """A result, of which each rank has what `layout` says, as its style was asked for."""
    if local and layout == target:
        return out
    distributed = DTensor.from_local(out, mesh, [layout]).redistribute(mesh, [target])
    return distributed.to_local() if local else distributed


def _through_dtensor(
    layers: Sequence[nn.Linear], x: Tensor, mesh: DeviceMesh, layouts: Sequence[Placement], local: bool
) -> list[Tensor]:
    """As in torch's styles: redistributes x from one layout to a second, and results to a third."""
    source, wanted, target = layouts
    distributed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [source])
    if source != wanted:
        distributed = distributed.redistribute(mesh, [wanted])
    forward: Any = nn.Linear.forward
    outs = [forward(layer, distributed).redistribute(mesh, [target]) for layer in layers]
    return [out.to_local() for out in outs] if local else outs
