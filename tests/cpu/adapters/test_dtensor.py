"""The DTensor styles against those of torch: the same outputs, gradients and placements, on integers for
which both are exact.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from cases import asked_at, scenario_test
from cases import compare as difference
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flux
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import functional

HIDDEN, WIDE = 16, 32


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=bias) for shape in ((HIDDEN, WIDE), (HIDDEN, WIDE), (WIDE, HIDDEN))
        )
        g = torch.Generator().manual_seed(8)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=g).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def same(name: str, result: torch.Tensor, expected: torch.Tensor) -> str:
    if isinstance(expected, DTensor):
        if not isinstance(result, DTensor) or result.placements != expected.placements:
            return f"{name}: {type(result)} {getattr(result, 'placements', '')}, not {expected.placements}"
        if result.shape != expected.shape:
            return f"{name}: {result.shape}, expected {expected.shape}"
        result, expected = result.to_local(), expected.to_local()
    wrong = difference(result, expected)
    return f"{name}: {wrong}" if wrong else ""


def parallel(
    mesh: DeviceMesh,
    styles: tuple[type, type],
    layout: Placement,
    bias: bool,
    local: bool = True,
    shared: bool = False,
) -> nn.Module:
    colwise, rowwise = styles
    column = colwise(input_layouts=layout)
    plan: dict[str, Any] = {"gate": column, "up": copy.copy(column)}
    if shared:
        plan = {"": FluxSharedColwiseParallel("gate", "up", input_layouts=layout)}
    plan["down"] = rowwise(output_layouts=layout, use_local_output=local)
    return parallelize_module(Mlp(bias), mesh, plan)


Run = tuple[list[tuple[str, torch.Tensor]], dict[str, int]]


def run(
    mesh: DeviceMesh,
    styles: tuple[type, type],
    layout: Placement,
    x: torch.Tensor,
    bias: bool,
    local: bool = True,
    compile_it: bool = False,
    shared: bool = False,
) -> Run:
    """Output, gradients and parameters of an MLP, and how often its forward pass called flux."""
    model = parallel(mesh, styles, layout, bias, local, shared)
    leaf = x.clone().requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
    ops = () if compile_it else ("ag_gemm", "gemm_rs", "gemm_ar")  # the compiler takes no mocks
    owners = {"gemm_ar": functional}  # of the functions that are called
    patches = {op: mock.patch.object(owners.get(op, flux), op, wraps=getattr(flux, op)) for op in ops}
    calls = {op: patch.start() for op, patch in patches.items()}
    try:
        out = run(leaf)
        counts = {op: call.call_count for op, call in calls.items()}
    finally:
        for patch in patches.values():
            patch.stop()
    local_out = out.to_local() if isinstance(out, DTensor) else out
    marks = (torch.arange(local_out.numel()) % 7 - 3).view(local_out.shape).float()
    (local_out * marks).sum().backward()
    results = [("out", out), ("dx", leaf.grad)]
    for name, parameter in model.named_parameters():
        results += [(name, parameter.data), (f"d {name}", parameter.grad)]
    return results, counts


STOCK, FLUX = (ColwiseParallel, RowwiseParallel), (FluxColwiseParallel, FluxRowwiseParallel)


def compare(
    rank: int, expected_calls: tuple[int, int, int], *args: Any, shared: bool = False, **kwargs: Any
) -> str:
    wanted, _ = run(args[0], STOCK, *args[1:], **kwargs)
    results, calls = run(args[0], FLUX, *args[1:], shared=shared, **kwargs)
    answers = [same(*result, expected) for result, (_, expected) in zip(results, wanted, strict=True)]
    if tuple(calls.values()) != expected_calls:
        answers.append(f"flux was called {calls}")
    return "; ".join(a for a in answers if a)


def integers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(77 + rank)).float()


def work(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    answers = {}
    for bias in (False, True) if world_size == 2 else (True,):
        for layout, shape in (
            (Shard(0), (6, HIDDEN)),
            (Shard(0), (3, 4, HIDDEN)),
            (Shard(1), (2, 5, HIDDEN)),
        ):
            x = integers(rank, *shape)
            answers[f"{layout} {shape} {bias=}"] = compare(rank, (2, 1, 0), mesh, layout, x, bias)
            answers[f"{layout} {shape} {bias=}, shared"] = compare(
                rank, (1, 1, 0), mesh, layout, x, bias, shared=True
            )
        x = integers(0, 6, 3, HIDDEN)
        answers[f"replicated {bias=}"] = compare(rank, (0, 0, 1), mesh, Replicate(), x, bias)
    x = integers(rank, 2, 5, HIDDEN)
    answers["DTensors out"] = compare(rank, (2, 1, 0), mesh, Shard(1), x, True, local=False)
    whole = integers(0, 2, 5, HIDDEN)
    answers["replicated DTensors out"] = compare(rank, (0, 0, 1), mesh, Replicate(), whole, True, local=False)
    # What flux does not serve.
    x = integers(rank, 6, HIDDEN // world_size)
    answers["last dimension"] = compare(rank, (0, 0, 0), mesh, Shard(1), x, False)
    answers["nothing to share"] = compare(rank, (0, 0, 0), mesh, Shard(1), x, False, shared=True)
    return {name: answer for name, answer in answers.items() if answer}


LEFT_OUT = "torch raises"


def one_layer(mesh: DeviceMesh, place: int, options: dict[str, Any], x: torch.Tensor, grads: str) -> str:
    """Results of a layer, with gradients of the parameters and inputs that `grads` names (x, w, b)."""
    results = []
    for styles in (STOCK, FLUX):
        layer = nn.Linear(HIDDEN, WIDE, bias="b" in grads)
        for i, parameter in enumerate(layer.parameters()):
            parameter.data = integers(i, *parameter.shape)
        parallelize_module(layer, mesh, styles[place](**options)).requires_grad_("w" in grads)
        # Not a copy of its values only: the strides and the subclass of x count.
        leaf = x.detach().requires_grad_("x" in grads)
        try:
            out = layer(leaf)
            local = out.to_local() if isinstance(out, DTensor) else out
            (local * (torch.arange(local.numel()) % 7 - 3).view(local.shape)).sum().backward()
        except RuntimeError:
            if styles is FLUX:
                raise
            return LEFT_OUT
        found = {"out": out.detach()}
        for part, tensor in {"dx": leaf, "dw": layer.weight, "db": layer.bias}.items():
            grad = None if tensor is None else tensor.grad
            if grad is not None:  # torch leaves some in other placements than their tensors
                found[part] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        results.append(found)
    assert results[0].keys() == results[1].keys()
    return "; ".join(filter(None, (same(name, results[1][name], a) for name, a in results[0].items())))


@asked_at(4)
def one_layer_each(rank: int, p: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("tp",))
    own = HIDDEN // p

    def placed(placement: Placement, *shape: int) -> DTensor:
        if placement.is_partial():
            return DTensor.from_local(integers(rank, *shape), mesh, [placement])
        return distribute_tensor(integers(0, *shape), mesh, [placement])

    def waited_for(*shape: int) -> torch.Tensor:
        """What torch's styles return: the result of a collective that nobody has waited for."""
        return (
            placed(Shard(0), p * shape[0], *shape[1:])
            .redistribute(mesh, [Replicate()], async_op=True)
            .to_local()
        )

    column = {
        "a vector, cut": ({"input_layouts": Shard(0)}, integers(rank, own)),
        "a vector": ({}, integers(0, HIDDEN)),
        "as torch's styles return it": ({"input_layouts": Shard(0)}, waited_for(3, HIDDEN)),
        "transposed": ({"input_layouts": Shard(0)}, integers(rank, 2, 5, HIDDEN).transpose(0, 1)),
        "all outputs": (
            {"input_layouts": Shard(1), "output_layouts": Replicate()},
            integers(rank, 2, 5, HIDDEN),
        ),
    }
    row = {
        "a vector": ({}, integers(rank, own)),
        "a vector, scattered": ({"output_layouts": Shard(0)}, integers(rank, own)),
        "uneven rows": ({"output_layouts": Shard(0)}, integers(rank, 2 * p + 1, own)),
        "transposed": ({"output_layouts": Shard(0)}, integers(rank, 3, p, own).transpose(0, 1)),
        "transposed, summed": ({}, integers(rank, 3, p, own).transpose(0, 1)),
    }
    for given in (Replicate(), Partial(), Shard(0), Shard(1), Shard(2)):
        for rows in (p, 2 * p + 1):
            for asked in (Replicate(), Shard(0), Shard(1)):
                x, name = placed(given, rows, rows, HIDDEN), f"{given}, not {asked}, {rows} rows"
                column[name] = ({"input_layouts": asked}, x)
                row[name] = ({"output_layouts": asked, "use_local_output": False}, x)
    answers = {}
    for place, cases in enumerate((column, row)):
        for name, (options, x) in cases.items():
            for grads in ("xwb",) if isinstance(x, DTensor) else ("xwb", "xb", "w"):
                answers[f"{place}: {name}: {grads}"] = one_layer(mesh, place, options, x, grads)
    left_out = sum(answer == LEFT_OUT for answer in answers.values())
    assert left_out < len(answers) / 4, f"torch raises in {left_out} of {len(answers)} cases"
    return {name: answer for name, answer in answers.items() if answer not in ("", LEFT_OUT)}


def count_gathers(model: nn.Module, x: torch.Tensor) -> int:
    """How many gathering GEMMs the compiler sees in a forward pass."""
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    return sum("ag_gemm" in target for target in targets)


@asked_at(2)
def compiled(rank: int, world_size: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    answers = {}
    for layout, x in ((Shard(1), integers(rank, 2, 5, HIDDEN)), (Replicate(), integers(0, 6, HIDDEN))):
        wanted, _ = run(mesh, STOCK, layout, x, True)
        for shared in (False, True):
            results, _ = run(mesh, FLUX, layout, x, True, compile_it=True, shared=shared)
            told = (same(*result, expected) for result, (_, expected) in zip(results, wanted, strict=True))
            answers[f"{layout} {shared=}"] = "; ".join(filter(None, told))
    x = integers(rank, 2, 5, HIDDEN)
    gathers = count_gathers(parallel(mesh, FLUX, Shard(1), True, shared=True), x)
    answers["gathers"] = "" if gathers == 1 else f"{gathers} gathers"
    return {name: answer for name, answer in answers.items() if answer}


class Branches(Mlp):
    """Two layers that read the same input; `switch` happens between them."""

    def forward(self, x: torch.Tensor, switch: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self.gate(x)
        if switch is not None:
            switch()
        return gate, self.up(x)


@asked_at(2)
def no_stale_outputs(rank: int, p: int) -> str:
    """One input tensor for all steps, as in a loop over a static buffer, and layers called one at a time."""
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("tp",))
    column = ColwiseParallel(input_layouts=Shard(0))
    stock = parallelize_module(Branches(True), mesh, {"gate": column, "up": copy.copy(column)})
    plan = {"": FluxSharedColwiseParallel("gate", "up", input_layouts=Shard(0))}
    model = parallelize_module(Branches(True), mesh, plan)
    x = integers(rank, 6, HIDDEN)
    found = []

    def compare(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        found.append(same(name, result, expected))
        if result.requires_grad != expected.requires_grad:
            found.append(f"{name}: requires_grad={result.requires_grad}")

    def update(change: Any) -> None:
        for branches in (stock, model):
            with torch.no_grad():
                change(branches.up)

    with torch.no_grad():
        model.gate(x), stock.gate(x)
    compare("with gradients, after a call without", model.up(x), stock.up(x))
    model.gate(x), stock.gate(x)
    update(lambda up: up.weight.mul_(2))
    compare("after an update", model.up(x), stock.up(x))
    model.gate(x), stock.gate(x)
    update(lambda up: up.weight.to_local().data.add_(1))
    compare("after an update that autograd does not see", model.up(x), stock.up(x))
    compare("another call", model(x)[1], stock(x)[1])
    state = {name: torch.ones_like(value) for name, value in stock.state_dict().items()}
    for branches in (stock, model):
        branches.gate(x)
        branches.load_state_dict(state, assign=True)
    compare("after load_state_dict(assign=True)", model.up(x), stock.up(x))
    y, z = x.clone(), x.clone()
    ours, theirs = model(y, lambda: y.add_(10)), stock(z, lambda: z.add_(10))
    compare("an input that changes between its layers", ours[1], theirs[1])
    for branches in (stock, model):
        with contextlib.suppress(ZeroDivisionError):
            branches(x, lambda: 1 // 0)
    update(lambda up: up.weight.to_local().data.mul_(3))
    compare("after a forward pass that failed", model.up(x), stock.up(x))

    def with_gradients() -> None:
        torch.set_grad_enabled(True)

    results = []
    for branches in (model, stock):
        with torch.no_grad():
            results.append(branches(x, with_gradients))
    for name, result, expected in zip(("gate", "up"), *results, strict=True):
        compare(f"{name}, gradients switched on inside", result, expected)
    with mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as calls:
        model(x)
    if calls.call_count != 1:
        found.append(f"one call of the module gathers {calls.call_count} times")
    return "; ".join(filter(None, found))


@asked_at(2)
def copies(rank: int, p: int) -> str:
    """A deep copy, such as an average of weights, computes with its own weights."""
    mesh = init_device_mesh("cpu", (p,), mesh_dim_names=("tp",))
    found = []
    for shared in (False, True):
        for layout in (Shard(0), Replicate()):
            if shared and layout == Replicate():
                continue
            results = []
            for styles in (STOCK, FLUX):
                model = parallel(mesh, styles, layout, True, shared=shared and styles == FLUX)
                x = integers(rank if layout == Shard(0) else 0, 6, HIDDEN)
                before = model(x)
                other = copy.deepcopy(model)
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.mul_(2)
                results.append((other(x), model(x), before))
            for name, expected, result in zip(("copy", "original", "before"), *results, strict=True):
                found.append(same(f"{name} {layout} {shared=}", result, expected))
            if torch.equal(results[1][0], results[1][1]):
                found.append("the copy computes what the original does")
    return "; ".join(filter(None, found))


@asked_at(2)
def under_autocast(rank: int, world_size: int) -> dict[str, str]:
    """Dtypes of results and gradients, for x of two dtypes and fp32 weights: those of torch's styles."""
    mesh = init_device_mesh("cpu", (world_size,))
    cases = {
        "column": (0, {"input_layouts": Shard(0)}, (6, HIDDEN)),
        "row, scattered": (1, {"output_layouts": Shard(0)}, (6 * world_size, HIDDEN // world_size)),
        "row, summed": (1, {}, (6, HIDDEN // world_size)),
    }
    answers = {}
    for name, (place, options, shape) in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            results = []
            for styles in (STOCK, FLUX):
                torch.manual_seed(1)
                layer = parallelize_module(nn.Linear(HIDDEN, HIDDEN), mesh, styles[place](**options))
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.mul_(16).round_()
                x = integers(rank, *shape).to(dtype).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    y = layer(x)
                (y * (torch.arange(y.numel()) % 7 - 3).view(y.shape)).sum().backward()
                results.append({"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad})
            for part, expected in results[0].items():
                got = results[1][part]
                if got.dtype != expected.dtype:
                    answers[f"{name} {dtype} {part}"] = f"{got.dtype}, not {expected.dtype}"
                elif wrong := same(part, got, expected):
                    answers[f"{name} {dtype} {part}"] = wrong
    return answers


test_styles = scenario_test(
    (2, 4), work, one_layer_each, compiled, no_stale_outputs, copies, under_autocast, timeout_s=240
)
