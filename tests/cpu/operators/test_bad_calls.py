"""Over a thousand calls that do not fit: each ends in an error that says what, or in torch's own result."""

from __future__ import annotations

import functools
import re
import time
import warnings
from typing import Any

import torch
from bad_calls import Good, bad_calls, good_calls

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


def judge(good: Good, what: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What is wrong with how a bad call ends, empty if nothing is; and whether it is refused."""
    argument = what.split(":")[0]
    try:
        result = good.call(**arguments)
    except (TypeError, ValueError) as error:
        # Two arguments that do not fit each other: either may be named.
        names = "|".join(re.escape(name) for name in {*arguments, argument, "group", "scale_x"})
        form = rf"{re.escape(good.op)}: ({names})(\[\d+\])?: expected .+, got .+"
        return "" if re.fullmatch(form, str(error), re.DOTALL) else f"says {error!r}", True
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


def by_one_rank(rank: int, p: int, refused: Calls) -> tuple[int, list[str]]:
    """Rank 0 alone makes calls that are refused. They end before anything is exchanged: nobody notices."""
    warnings.simplefilter("ignore")
    count, complaints = 0, []
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
