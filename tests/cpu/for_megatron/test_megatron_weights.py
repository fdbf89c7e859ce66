"""The weights of Megatron's experts as one tensor: where a view takes the place of a copy, and that results
and gradients do not depend on it. Integers, so that sums are exact.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Calls
from megatron_models import needs_megatron

from flux.moe import route

pytestmark = needs_megatron

EXPERTS, TOKENS, HIDDEN, COLUMNS = 3, 5, 8, 12
IDS = torch.tensor([[0, 1], [2, 0], [1, 2], [2, -1], [0, 2]])
GRAD = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN) % 3 - 1.0
Weights = list[torch.nn.Parameter]


def marked(expert: int, rows: int, columns: int) -> torch.nn.Parameter:
    """Integers that say to which expert they belong."""
    values = torch.arange(rows * columns).reshape(rows, columns) % 5 - 2 + 3 * expert
    return torch.nn.Parameter(values.float())


def apart() -> tuple[Weights, Weights]:
    return (
        [marked(e, COLUMNS, HIDDEN) for e in range(EXPERTS)],
        [marked(7 + e, HIDDEN, COLUMNS) for e in range(EXPERTS)],
    )


def together() -> tuple[Weights, Weights]:
    from flux.integrations.megatron.experts import lay_out

    first, second = apart()
    lay_out(first)
    lay_out(second)
    return first, second


def buffered(order: Callable[[Any], Iterator[int]]) -> tuple[Weights, Weights]:
    """As in a buffer of data parallelism: fc2 and fc1 of each expert, and 64 elements between them."""
    first, second = apart()
    buffer, place = torch.full([10_000], torch.nan), 64
    for e in order(range(EXPERTS)):
        for weight in (second[e], first[e]):
            part = buffer[place : place + weight.numel()].view(weight.shape)
            weight.data = part.copy_(weight.data)
            place += weight.numel() + 64
    return first, second


def mixed() -> tuple[Weights, Weights]:
    """One expert has left the tensor of the others."""
    first, second = together()
    first[1].data = first[1].data.clone()
    second[2].data = second[2].data.clone()
    return first, second


# Of both weights: whether they are read in place.
LAYOUTS: dict[str, tuple[Callable[[], tuple[Weights, Weights]], bool]] = {
    "apart": (apart, False),
    "laid out": (together, True),
    "in a buffer": (lambda: buffered(iter), True),
    "in a buffer, last expert first": (lambda: buffered(reversed), False),
    "mixed": (mixed, False),
}


def run(
    first: Weights, second: Weights, between: Callable[[], None] | None = None, layers: Any = None
) -> list[torch.Tensor]:
    """The results of both layers, and the gradients of all. between: the forward and the backward pass."""
    x, scores = inputs()
    out = (layers or on_flux)(x, scores, first, second)
    if between:
        between()
    out.backward(GRAD)
    return [out.detach(), *(leaf.grad for leaf in (x, scores, *first, *second))]  # type: ignore[list-item]


def expected() -> list[torch.Tensor]:
    """The same, by torch and token by token."""
    return run(*apart(), layers=by_torch)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN) % 7 - 3.0
    scores = torch.arange(2 * TOKENS).reshape(TOKENS, 2) % 3 + 1.0
    return x.requires_grad_(), scores.requires_grad_()


def on_flux(x: torch.Tensor, scores: torch.Tensor, first: Weights, second: Weights) -> torch.Tensor:
    from flux.integrations.megatron.experts import SharedTokens, expert_layer

    routing, tokens = route(IDS, scores.detach(), EXPERTS, max_tokens=TOKENS + 2), SharedTokens()
    rows = expert_layer(0, x, first, routing, False, tokens=tokens)
    return expert_layer(1, rows, second, routing, False, scores=scores, tokens=tokens)


def by_torch(x: torch.Tensor, scores: torch.Tensor, first: Weights, second: Weights) -> torch.Tensor:
    out = torch.zeros(TOKENS, HIDDEN)
    for token, choice in (IDS >= 0).nonzero().tolist():
        expert = int(IDS[token, choice])
        row = torch.nn.functional.linear(torch.nn.functional.linear(x[token], first[expert]), second[expert])
        out = out.index_add(0, torch.tensor([token]), (scores[token, choice] * row)[None])
    return out


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_the_layout(layout: str) -> None:
    make, in_place = LAYOUTS[layout]
    first, second = make()
    for weights, originals in zip((first, second), apart(), strict=True):
        assert all(torch.equal(w, o) for w, o in zip(weights, originals, strict=True))
    with mock.patch.object(torch, "stack", side_effect=torch.stack) as stack:
        found = run(first, second)
    assert stack.call_count == (0 if in_place else 4), "both layers, forward and backward"
    assert all(map(torch.equal, found, expected())) and all(t.count_nonzero() > 7 for t in found)
    # One tensor has the gradients of a layer: autograd stores its parts, and copies nothing.
    for weights in (first, second):
        assert len({weight.grad.untyped_storage().data_ptr() for weight in weights}) == 1  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_rank")
def test_weights_may_move_between_the_passes() -> None:
    """As into the buffer of an optimizer that is made late."""
    first, second = together()
    gone = []

    def move() -> None:
        for weight in (first[1], *second):
            gone.append(weight.data)
            weight.data = weight.data.clone()
            gone[-1].fill_(torch.nan)

    with mock.patch.object(torch, "stack", side_effect=torch.stack) as stack:
        found = run(first, second, move)
    assert stack.call_count == 2 and len(gone) == 1 + EXPERTS
    assert all(map(torch.equal, found, expected()))


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_gradients() -> None:
    """Those of routing weights too, which the routing itself does not record."""
    found = []
    for layers in (on_flux, by_torch):
        first, second = apart()
        leaves = [*inputs(), *first, *second]
        out = layers(leaves[0], leaves[1], first, second)
        grads = torch.autograd.grad(out, leaves, GRAD, create_graph=True)
        marks = [torch.arange(grad.numel()).view_as(grad) % 3 - 1.0 for grad in grads]
        found.append([*grads, *torch.autograd.grad(grads, leaves, marks)])
    assert all(map(torch.equal, *found)) and all(t.count_nonzero() > 7 for t in found[1])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("needed", ["all", "but scores", "but x and fc1", "but fc2"])
def test_what_a_backward_pass_computes(needed: str) -> None:
    """Tokens of rows once for both layers; they are kept no longer. Nothing for what needs no gradient."""
    first, second = together()
    x, scores = inputs()
    without = {"but scores": [scores], "but x and fc1": [x, *first], "but fc2": second}.get(needed, [])
    for leaf in without:
        leaf.requires_grad_(False)
    with Calls() as forward:
        out = on_flux(x, scores, first, second)
    assert forward.names == ["moe_route", "moe_ag_scatter_gemm", "moe_gemm_gather_rs"]
    for times in range(2):  # the graph is kept, the tokens are not
        with Calls() as backward:
            out.backward(GRAD, retain_graph=True)
        assert backward.names.count("moe_tokens_of_rows") == (0 if times and needed == "but x and fc1" else 1)
        assert backward.names.count("reduce_scatter") == (0 if needed == "but scores" else 1)
    leaves = [x, scores, *first, *second]
    assert [leaf.grad is None for leaf in leaves] == [
        any(leaf is other for other in without) for leaf in leaves
    ]
    for leaf, grad in zip(leaves, expected()[1:], strict=True):
        assert leaf.grad is None or torch.equal(leaf.grad, 2 * grad)


@pytest.mark.parametrize(
    ("distance", "large", "kernel"),
    [
        (12, False, False),
        (16, False, False),
        (None, False, False),
        (12, True, False),
        (12, True, True),
        (None, True, True),
    ],
)
def test_main_grads_at_equal_distances_are_one_tensor(
    monkeypatch: pytest.MonkeyPatch, distance: int | None, large: bool, kernel: bool
) -> None:
    """As in buffers of Megatron's data parallelism. torch adds others (None) and large ones one by one."""
    from flux.integrations.megatron import experts

    monkeypatch.setattr(experts, "uses_kernel", lambda *_: kernel)
    if large:
        monkeypatch.setattr(experts, "_ADDED_AT_ONCE", 11)
    buffer = torch.zeros(100)
    places = [0, 12, 32] if distance is None else [0, distance, 2 * distance]
    weights = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in places]
    for weight, place in zip(weights, places, strict=True):
        weight.main_grad = buffer[place : place + 12].view(3, 4)  # type: ignore[attr-defined]
    given: list[Any] = []
    add = experts.add_expert_grads
    monkeypatch.setattr(experts, "add_expert_grads", lambda *args: (given.append(args[-1]), add(*args)))
    offsets = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    grad, x = torch.arange(1.0, 10).view(3, 3), torch.arange(12.0).view(3, 4)
    for _ in range(2):
        experts._of_weights(weights, grad, x, offsets)
    assert {isinstance(main_grads, torch.Tensor) for main_grads in given} == {
        distance is not None and (kernel or not large)
    }
    assert torch.equal(buffer[:12].view(3, 4), 2 * grad[:1].t() @ x[:1])
    assert torch.equal(buffer[places[2] : places[2] + 12].view(3, 4), 2 * grad[1:].t() @ x[1:])
    assert buffer.count_nonzero() == 9 + 12  # x begins with a zero; nothing else was written


def test_what_is_copied() -> None:
    from flux.integrations.megatron.experts import stacked

    flat = torch.arange(400.0)

    def parts(*starts: int, shape: tuple[int, int] = (4, 8)) -> list[torch.Tensor]:
        return [flat[s : s + shape[0] * shape[1]].view(shape) for s in starts]

    def is_view(weights: list[torch.Tensor]) -> bool:
        made, _ = stacked(weights)
        assert torch.equal(made, torch.stack(weights))
        return made.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()

    assert is_view(parts(4, 44, 84)) and is_view(parts(0, 32)) and is_view(parts(8))
    for reason, weights in {
        "not at equal distances": parts(0, 32, 68),
        "backwards": parts(64, 32, 0),
        "twice the same": parts(32, 32),
        "overlapping": parts(0, 28, 56),
        "first address": parts(1, 33, 65),
        "distance of 34 elements": parts(0, 34, 68),
        "transposed": [part.t() for part in parts(0, 32)],
        "another storage": [*parts(0), torch.ones(4, 8)],
    }.items():
        assert not is_view(weights), reason
    leaf = flat.clone().requires_grad_()
    recorded, _ = stacked([leaf[:32].view(4, 8), leaf[32:64].view(4, 8)])
    recorded.sum().backward()
    assert torch.equal(leaf.grad, (torch.arange(400) < 64).float()), "each weight gets its gradient"  # type: ignore[arg-type]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert stacked([torch.empty(4, 8), torch.empty(4, 8)])[0].shape == (2, 4, 8)
    assert stacked([torch.empty(4, 8, device="meta")] * 2)[0].is_meta


def test_compiled_layers_copy() -> None:
    """A graph may get weights with other addresses than those it was traced with."""
    from flux.integrations.megatron.experts import stacked

    first, _ = together()
    compiled = torch.compile(lambda weights: stacked(weights)[0] + 1, backend="aot_eager", fullgraph=True)
    for weights in (first, [torch.nn.Parameter(w.detach() + 2) for w in first]):
        with torch.no_grad():
            assert torch.equal(compiled(weights), torch.stack(weights) + 1)


def test_laying_out_keeps_parameters() -> None:
    from flux.integrations.megatron.experts import lay_out

    weights, _ = apart()
    originals, identities = [w.detach().clone() for w in weights], [id(w) for w in weights]
    weights[1].mark = "kept"  # type: ignore[attr-defined]
    elsewhere = torch.nn.Module()
    elsewhere.tied = weights[0]
    lay_out(weights)
    assert [id(w) for w in weights] == identities and weights[1].mark == "kept"  # type: ignore[attr-defined]
    assert all(w.is_leaf and w.requires_grad and w._base is None and w.data._base is None for w in weights)
    assert all(map(torch.equal, weights, originals)) and torch.equal(elsewhere.tied, originals[0])
    assert elsewhere.tied.data_ptr() + weights[0].numel() * 4 == weights[1].data_ptr()
    addresses = [w.data_ptr() for w in weights]
    lay_out(weights)
    assert [w.data_ptr() for w in weights] == addresses, "they lie well already"
    # A checkpoint has the common memory once.
    saved = io.BytesIO()
    torch.save(weights, saved)
    separate = io.BytesIO()
    torch.save(originals, separate)
    assert saved.tell() < separate.tell() + 2048
    saved.seek(0)
    assert all(map(torch.equal, torch.load(saved), originals))


def test_what_is_left_alone() -> None:
    from flux.integrations.megatron.experts import lay_out

    def moves(weights: list[Any]) -> bool:
        before = [w.data_ptr() for w in weights]
        values = [w.detach().clone() for w in weights]
        lay_out(weights)
        assert all(w.is_meta or torch.equal(w, v) for w, v in zip(weights, values, strict=True))
        return [w.data_ptr() for w in weights] != before

    weights, _ = apart()
    assert moves(weights) and moves(mixed()[0]) is False, "one tensor may have views of the others"
    buffer = torch.arange(300.0)
    twice = marked(0, 4, 8)
    shared = [marked(e, 4, 8) for e in range(2)]
    shared[1].data.share_memory_()
    freed = [marked(e, 4, 8) for e in range(2)]
    with torch.inference_mode():
        inferred = [torch.nn.Parameter(torch.ones(4, 8), requires_grad=False) for _ in range(2)]
    for reason, weights in {
        "parts of a buffer": [torch.nn.Parameter(buffer[i : i + 32].view(4, 8)) for i in (0, 100, 150)],
        "tied": [twice, twice],
        "the same memory": [twice, torch.nn.Parameter(twice.data)],
        "memory of several processes": shared,
        "two dtypes": [marked(0, 4, 8), torch.nn.Parameter(torch.ones(4, 8, dtype=torch.float64))],
        "two shapes": [marked(0, 4, 8), marked(1, 8, 4)],
        "columns first": [torch.nn.Parameter(torch.ones(4, 8).t()) for _ in range(2)],
        "no memory": [torch.nn.Parameter(torch.empty(4, 8, device="meta")) for _ in range(2)],
        "inference": inferred,
        "one expert": [marked(0, 4, 8)],
    }.items():
        assert not moves(weights), reason
    freed[0].untyped_storage().resize_(0)
    addresses = [w.data_ptr() for w in freed]
    lay_out(freed)
    assert [w.data_ptr() for w in freed] == addresses, "memory that was freed for a while"
