"""Thousands of calls that do not fit: each ends in torch's own result, or in an error that names the argument
and says what is expected and what is wrong with what it got.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_calls import Good, bad_calls, good_calls

import flux
from flux.testing import spawn


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_of(entry)]
    return []


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """torch does not compare fp8."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same(result: Any, expected: Any) -> bool:
    got, wanted = tensors_of(result), tensors_of(expected)
    return len(got) == len(wanted) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and (a.is_meta or torch.equal(comparable(a), comparable(b.to(a.device))))
        for a, b in zip(got, wanted, strict=True)
    )


# What is compared with an argument: it may be named in its place.
COMPARED = {
    "x": "weight out residual scale_x grad_output main_grad routing rows offsets scale",
    "weight": "bias scale_w offsets",
    "out": "x weight bias",
    "topk_ids": "topk_weights",
    "rows": "offsets",
    "grad_output": "main_grad",
    "offsets": "main_grad",
    "scale_x": "scale_w",
    "routing": "x",
}
# What a message says of a tensor, if not its shape, type or device.
FACTS = ("nested", "negates", "requires_grad", "stride", "overlap", "after", "empty", "a tensor")


def tells(got: str, bad: Any) -> bool:
    """Whether a message says what is wrong with this value."""
    words = [type(bad).__name__, f"{bad!r}"[:30], "a list", "GROUP_MEMBER"]
    if isinstance(bad, list):
        words += [str(len(bad)), "empty"]
    if isinstance(bad, torch.Tensor):
        words += FACTS
        words += (
            [] if bad.is_nested else map(str, (list(bad.shape), bad.dtype, bad.dim(), bad.device, bad.layout))
        )
    return any(word in got for word in words)


def judge(good: Good, what: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What is wrong with how a bad call ends, empty if nothing is; and whether it is refused."""
    argument = what.split(":")[0]
    try:
        result = good.call(**arguments)
    except (TypeError, ValueError) as error:
        form = rf"{re.escape(good.op)}: (\w+)(?:\[\d+\])?: expected .+, got (.+)"
        found, name = re.fullmatch(form, str(error), re.DOTALL), argument.removesuffix("[0]")
        bad = arguments[name] if name == argument else arguments[name][0]
        right = found and (found[1] == name and (tells(found[2], bad) or name == "routing"))
        if right or (found and found[1] in COMPARED.get(name, "").split()):
            return "", True
        return f"says {error!r}", True
    except Exception as error:
        return f"raises {error!r}", False
    try:
        expected = good.reference(**arguments)
    except Exception as error:
        return f"returns {result!r}, torch raises {error!r}", False
    return "" if same(result, expected) else f"returns {result!r}, torch {expected!r}", False


Calls = set[tuple[int, str]]  # the number of a good call, and what is wrong with one that is made of it


def alone(rank: int, p: int) -> tuple[int, list[str], Calls]:
    """How many bad calls there are, what is wrong with how they end, and which of them are refused."""
    warnings.simplefilter("ignore")
    count, complaints, refused = 0, [], set()
    for number, good in enumerate(good_calls(p)):
        assert same(good.call(**good.arguments), good.reference(**good.arguments)), good.op
        for what, arguments in bad_calls(good_calls(p)[number]):
            count += 1
            said, is_refused = judge(good, what, arguments)
            if is_refused:
                refused.add((number, what))
            if said:
                complaints.append(f"{good.op}: {what}: {said}"[:300])
    return count, complaints, refused


@functools.cache
def of_one_rank() -> tuple[int, list[str], Calls]:
    ((count, complaints, refused),) = spawn(alone, 1, backend="gloo")
    return count, complaints, refused


def test_bad_calls_end_in_an_error_or_torchs_result() -> None:
    count, complaints, _ = of_one_rank()
    assert complaints == []
    assert count >= 2000


def of_several(routing: flux.moe.Routing) -> list[tuple[Callable[[], object], str]]:
    """Calls in which several arguments do not fit, or of which one rank is no example; what they say."""
    ids, scores, weight = torch.zeros(3, 17).long(), torch.ones(3, 17), torch.ones(4, 5, 4)
    route = functools.partial(flux.moe.route, ids[:, :2], scores[:, :2])
    offsets, swiglu = torch.zeros(5, dtype=torch.int32), {"activation": "swiglu"}
    return [
        (lambda: flux.reduce_scatter(scores), r"reduce_scatter: x: .* divisible by the 2 ranks .*\[3, 17\]"),
        (lambda: flux.moe.route(ids, scores, 4), r"moe.route: topk_ids: .*1 to 16.*\[3, 17\]"),
        (lambda: route(5, ep_size=2), "moe.route: num_experts: .*multiple of ep_size = 2, got 5"),
        (lambda: route(4, max_tokens=2**29), rf"moe.route: max_tokens: .*2\*\*30.*{2**29}"),
        (lambda: flux.grouped_gemm(scores[:, :4], weight, offsets, **swiglu), r"weight: .*even.*\[4, 5, 4\]"),
        (lambda: flux.moe.ag_scatter_gemm(torch.ones(8, 4), weight, routing, **swiglu), "weight: .*even"),
        (lambda: flux.ag_gemm(scores, scores, [scores[0]]), "bias: .*weight is one tensor, got a list"),
        (
            lambda: flux.ag_gemm(torch.tensor(1.0), scores, out=scores, return_gathered=True),
            r"ag_gemm: x: expected at least 2 dimensions \[m, k\], got 0",
        ),
    ]


def by_one_rank(rank: int, p: int, refused: Calls) -> tuple[int, list[str]]:
    """Rank 0 alone makes calls that are refused. They end before anything is exchanged: nobody notices."""
    warnings.simplefilter("ignore")
    count, complaints = 0, []
    routing = good_calls(p)[-4].arguments["routing"]
    for call, words in of_several(routing) if (rank, p) == (0, 2) else ():
        with pytest.raises(ValueError, match=words):
            call()
    for number, good in enumerate(good_calls(p)):
        begin = time.monotonic()
        for what, arguments in bad_calls(good) if rank == 0 else ():
            if (number, what) not in refused:
                continue
            count += 1
            try:
                good.call(**arguments)
                complaints.append(f"{good.op}: {what}: no error")
            except (TypeError, ValueError):
                pass
            except Exception as error:
                complaints.append(f"{good.op}: {what}: {error!r}"[:300])
        if time.monotonic() - begin > 20:
            complaints.append(f"{good.op}: refusing took {time.monotonic() - begin:.0f} s")
        fresh = good_calls(p)[number]
        if not same(fresh.call(**fresh.arguments), fresh.reference(**fresh.arguments)):
            complaints.append(f"{good.op}: wrong after bad calls of rank 0")
    return count, complaints


def test_bad_calls_of_one_rank_leave_no_trace() -> None:
    for world_size in (2, 4):
        results = spawn(
            by_one_rank, world_size, of_one_rank()[2], backend="gloo", env={"FLUX_TIMEOUT_S": "60"}
        )
        assert [complaint for _, complaints in results for complaint in complaints] == []
        assert results[0][0] >= 1000
