"""Plans of gemm_ar, all_reduce and reduce_scatter, and what their kernels are given."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from flux._native import core
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import round_up
from flux.fp8.scales import Scaling
from flux.ops.norm_and_quant import NONE, End
from flux.ops.ways import exchange
from flux.ops.ways import gemm_ar as gemm_ar_ways
from flux.plan.choose import PLANNERS, WAYS, Plan, PlanInput
from flux.plan.sums import MAX_EXCHANGE_BYTES, exchange_room

SCATTER: dict[str, Any] = {"op": "reduce_scatter", "m": 64, "n": 1024, "k": 0}
FP8: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "scaling": Scaling("row", torch.bfloat16, fast=False)}


def plan(op: str = "gemm_ar", by_kernel: bool = False, **change: Any) -> Plan:
    """by_kernel: of the kernel that multiplies and sums, also where it is not the sooner way."""
    facts: dict[str, Any] = {
        "device_type": "cuda",
        "m": 16,
        "n": 4096,
        "k": 512,
        "dtype": torch.bfloat16,
        "transpose_weight": False,
        "world_size": 4,
        "why_not": None,
        "num_sms": 132,
        "transport": "links",
        **change,
    }
    if by_kernel:
        made = WAYS[op, "kernel"](PlanInput(**facts), "")
        assert made is not None
        return made
    return PLANNERS[op](PlanInput(**facts))


@pytest.mark.parametrize(
    ("change", "fused", "mode", "words"),
    [
        ({"m": 48, "n": 1024}, True, 0, "one-shot sends 288.0 KiB in one trip, two-shot would send 144.0"),
        ({"m": 192}, True, 1, "two-shot sends 2304.0 KiB in two"),
        # Kernels that multiply and sum are sooner with some rows between four ranks, of 16-bit operands.
        *(({"m": m}, True, -1, "a product, then its sum") for m in (1, 16, 47, 193, 256, 512)),
        *(({"m": 128, "world_size": p}, True, -1, "a product, then its sum") for p in (2, 3, 8)),
        ({"m": 128, **FP8}, True, -1, "a product, then its sum"),
        ({"m": 128, **FP8, "op": "gemm_ar_norm"}, True, -1, "a product, then its sum"),
        ({"m": 128, "n": 8192, "op": "gemm_ar_norm"}, True, 1, "two-shot"),
        *(({"m": m, "by_kernel": True}, True, 0, "one-shot") for m in (17, 32)),
        *(({"m": m, "world_size": 2, "by_kernel": True}, True, 0, "one-shot") for m in (17, 256)),
        ({"m": 512, "n": 8192, "world_size": 2, "device_type": "cpu", "num_sms": 0}, True, 0, "one-shot"),
        ({"dtype": torch.float32}, False, -1, "not float32"),
        ({"n": 4100}, False, -1, "n = 4100 is not a multiple of 8"),
        ({"k": 36}, False, -1, "k = 36 is not a multiple of 8"),
        ({"m": 0}, False, -1, "empty"),
        ({"why_not": "rank 1: no way"}, False, -1, "rank 1: no way"),
        ({"m": 1532}, True, -1, "a product, then its sum"),
        ({"m": 1536}, True, -1, "a sum of 12 MiB is sooner there as gemm_rs + all_gather"),
        ({"m": 1537}, True, -1, "a product, then its sum"),
        ({"m": 3071}, True, -1, "a product, then its sum"),
        (
            {"m": 3073},
            True,
            -1,
            "a sum of 24 MiB is sooner there as gemm_rs + all_gather, of 1 rows by exchange",
        ),
        ({"m": 8191}, True, -1, "gemm_rs + all_gather, of 3 rows by exchange"),
        ({"m": 8192}, True, -1, "a sum of 64 MiB is sooner there as gemm_rs + all_gather"),
        ({"m": 8196}, True, -1, "gemm_rs + all_gather"),
        ({"m": 4096, "world_size": 2}, True, -1, "a product, then its sum"),
        ({"m": 6144, "world_size": 2}, True, -1, "a sum of 48 MiB is sooner there as gemm_rs + all_gather"),
        ({"m": 6145, "world_size": 2}, True, -1, "a product, then its sum"),
        ({"m": 8193, "world_size": 2}, True, -1, "gemm_rs + all_gather, of 1 rows by exchange"),
        ({"op": "gemm_ar_norm", "m": 8192, "world_size": 2}, True, -1, "a product, then its sum"),
        ({"op": "gemm_ar_norm", "m": 8194, "world_size": 2}, True, -1, "gemm_rs + all_gather"),
        ({"op": "gemm_ar_norm", "m": 1536}, True, -1, "a sum of 12 MiB is sooner there"),
        ({"m": 8197}, True, -1, "gemm_rs + all_gather, of 1 rows by exchange"),
        ({"m": 3, "n": 8 << 20}, True, -1, "a product, then its sum"),
        ({"m": 3, "n": 16 << 20}, False, -1, "m = 3 cannot be dealt to 4 ranks"),
        ({"device_type": "cpu", "n": 4100, "k": 3, "num_sms": 0}, True, 0, "share memory; one-shot"),
        ({"op": "all_reduce_norm", "m": 3}, True, 0, "one-shot sends"),
        ({"op": "all_reduce_norm", "m": 1022}, True, 1, "two-shot sends"),
        ({"op": "all_reduce_norm", "m": 8193}, False, -1, "more than an exchange holds"),
        ({"op": "all_reduce_norm", "n": 4100}, False, -1, "4100 elements are no whole number"),
        ({"op": "all_reduce", "m": 3, "n": 8}, True, 0, "one-shot sends 0.1 KiB"),
        ({"op": "all_reduce", "m": 8192}, True, 1, "two-shot"),
        ({"op": "all_reduce", "m": 8193}, False, -1, "more than an exchange holds"),
        ({"op": "all_reduce", "m": 3, "n": 5}, False, -1, "15 elements are no whole number"),
        ({"op": "all_reduce", "m": 3, "n": 5, "device_type": "cpu"}, True, 0, "share memory"),
        ({"op": "all_reduce", "dtype": torch.float32}, False, -1, "not float32"),
        ({"op": "all_reduce", "n": 0}, False, -1, "empty"),
        ({"op": "all_reduce", "world_size": 1}, False, -1, "one rank"),
        ({**SCATTER}, True, 2, "supported by the kernel"),
        ({**SCATTER, "m": 4, "n": 8}, True, 2, "supported by the kernel"),
        ({**SCATTER, "m": 8, "n": 4}, True, 2, "supported by the kernel"),
        ({**SCATTER, "m": 4, "n": 12}, False, -1, "12 elements are no whole number"),
        ({**SCATTER, "m": 4, "n": 12, "device_type": "cpu"}, True, 2, "share memory"),
        ({**SCATTER, "m": 32768}, True, 2, "supported by the kernel"),
        ({**SCATTER, "m": 32772}, False, -1, "more than an exchange holds"),
        ({**SCATTER, "dtype": torch.float32}, False, -1, "not float32"),
        ({**SCATTER, "m": 0}, False, -1, "empty"),
        ({**SCATTER, "world_size": 1}, False, -1, "one rank"),
        ({**SCATTER, "why_not": "no links"}, False, -1, "no links"),
    ],
)
def test_what_is_exchanged_and_how(change: dict[str, Any], fused: bool, mode: int, words: str) -> None:
    made = plan(**change)
    assert (made.by_flux, made.mode) == (fused, mode), made
    assert words in made.reason, made
    if mode < 0:
        assert made.signal_bytes == made.slot_bytes == made.exchange_bytes == 0
        return
    assert made.transport.endswith(["one-shot", "two-shot", ""][mode])
    assert mode != 2 or made.m == made.world_size
    # A sum in a launch of its own may deal out rows, to all ranks alike.
    alone = change.get("op") == "all_reduce_norm"
    rows = round_up(made.m, made.world_size) if alone and mode == 1 else made.m
    layout = core.exchange(rows, round_up(made.n, 8), made.world_size, core.ExchangeMode(mode))
    on_gpu = change.get("device_type") != "cpu"
    assert (made.exchange_bytes if on_gpu else made.slot_bytes) == round_up(layout.bytes)
    assert (made.slot_bytes if on_gpu else made.exchange_bytes) == 0
    assert made.config >= 0, "ranks could not tell each other"


@pytest.mark.parametrize(
    ("op", "m", "mode"),
    [
        *(("all_reduce_norm", m, mode) for m, mode in ((1, 0), (48, 0), (64, 1))),
        *(("all_reduce", m, mode) for m, mode in ((16, 0), (48, 1))),
        *(("gemm_ar_norm", m, mode) for m, mode in ((20, 0), (28, 0), (32, 1))),
        *(("gemm_ar", m, mode) for m, mode in ((64, 0), (128, 1))),
    ],
)
def test_a_norm_changes_when_two_trips_are_sooner(op: str, m: int, mode: int) -> None:
    """As measured on four GPUs. Two ranks send as much either way, and CPUs sum as without a norm."""
    alone = op.startswith("all")
    how: dict[str, Any] = {"m": m, "n": 8192 if alone else 2048, "by_kernel": not alone}
    assert plan(op, **how).mode == mode
    assert plan(op, **how, world_size=2).mode == 0
    without = op.removesuffix("_norm")
    assert plan(op, **how, device_type="cpu").mode == plan(without, **how, device_type="cpu").mode


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_what_is_reserved_suffices_for_every_smaller_sum(world_size: int, device_type: str) -> None:
    rng = random.Random(world_size)
    for max_m, max_n in [(1, 1), (64, 8192), (4096, 16), (16384, 8192), (7, 3000), (40000, 3)]:
        room = exchange_room(device_type, max_m, max_n, world_size, torch.bfloat16)
        sizes = [(max_m, max_n)]
        sizes += [(rng.randint(1, max_m), rng.randint(1, max_n)) for _ in range(200)]
        # As many rows as an exchange takes, and what just goes one-shot, are the extremes.
        sizes += [(min(max_m, MAX_EXCHANGE_BYTES // 2 // n), n) for n in range(1, max_n + 1, 8)]
        for m, n in sizes:
            for op in ("gemm_ar", "gemm_ar_norm", "all_reduce", "all_reduce_norm", "reduce_scatter"):
                rows = m - m % world_size if op == "reduce_scatter" else m
                made = plan(op, m=rows, n=n, device_type=device_type, world_size=world_size)
                for name in ("signal_bytes", "slot_bytes", "exchange_bytes"):
                    # Composed plans say nothing of their parts.
                    assert getattr(made, name) <= room[name], (op, m, n, name)


def gpu_workspace(monkeypatch: pytest.MonkeyPatch, p: int = 4) -> Any:
    workspace: Any = CudaWorkspace.__new__(CudaWorkspace)
    facts = {"enter": lambda plan: nullcontext((77, 0)), "num_sms": 114, "world_size": p, "why_not": None}
    for name, value in facts.items():
        monkeypatch.setattr(workspace, name, value, raising=False)
    return workspace


def launch(
    workspace: Any,
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor,
    end: End = NONE,
) -> Any:
    call = gemm_ar_ways.Call(x, weight, None, plan.transpose_weight, residual, end, total)
    return gemm_ar_ways.kernel(workspace, plan, call)


def test_what_the_kernels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gemm_ar_ways, "_kernel", lambda *arguments: told.append(arguments))
    monkeypatch.setattr(exchange, "_kernel", lambda *arguments: told.append(arguments))
    workspace = gpu_workspace(monkeypatch)
    made = plan(m=48, n=16, k=8)
    x, weight = torch.ones(4, 8).bfloat16(), torch.ones(16, 8).bfloat16()
    total = torch.zeros(4, 16).bfloat16()
    shifted = torch.ones(65).bfloat16()[1:].view(4, 16)  # not at a multiple of 16 bytes
    end = End(shifted[0], 1e-5)
    assert launch(workspace, made, x, weight, None, total) is None
    normed = launch(workspace, made, x, weight, shifted, total, end)
    assert normed is not None
    plain, norm = told
    assert plain[:2] == (x, weight) and plain[2] is None and plain[3] is total
    assert plain[4:] == (False, 77, made.choice, 114, made.mode, None, None, 0.0, None)
    assert norm[3] is normed.normalised and norm[12] is total and norm[11] == 1e-5
    assert plain[7] == norm[7] == 114, "CTAs wait for those of peers that have the same share"
    for aligned, given in ((norm[9], shifted), (norm[10], shifted[0])):
        assert aligned.data_ptr() % 16 == 0 and torch.equal(aligned, given)
    launch(workspace, made, x, weight, total, total)
    assert told[2][9] is told[2][3] is total, "the thread that adds a residual writes the element"
    # A result that a kernel cannot write where it shall lie.
    monkeypatch.setattr(gemm_ar_ways, "_kernel", lambda *arguments: arguments[3].fill_(5))
    launch(workspace, made, x, weight, None, shifted)
    assert (shifted == 5).all()
    exchange.kernel(workspace, plan("all_reduce", m=1, n=64), exchange.Call(x, out=total))
    assert told[3] == (x, total, 77, 114, 0, None, None, 0.0, None)
    plain_plan = plan("all_reduce", m=1, n=64)
    assert exchange.kernel(workspace, plain_plan, exchange.Call(x, shifted, out=total)) is None
    summed = exchange.kernel(workspace, plain_plan, exchange.Call(x, None, end, total))
    assert summed is not None
    assert told[4][:5] == (x, total, 77, 114, 0) and torch.equal(told[4][5], shifted)
    assert told[5][:3] == (x, summed.normalised, 77) and told[5][3] == 114 and told[5][7:] == (1e-5, total)
    assert told[4][5].data_ptr() % 16 == 0 and told[5][6].data_ptr() % 16 == 0
    scatters, rows = plan(**SCATTER), torch.zeros(1, 8).bfloat16()
    exchange.kernel(workspace, scatters, exchange.Call(x, out=rows))
    assert told[6] == (x, rows, 77, 114, 2, None, None, 0.0, None)
    monkeypatch.setattr(exchange, "_kernel", lambda *arguments: arguments[1].fill_(5))
    exchange.kernel(workspace, scatters, exchange.Call(x, out=shifted[:1, :8]))
    assert (shifted[0, :8] == 5).all()


def test_what_the_kernels_are_given_of_quantisation(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    for module in (gemm_ar_ways, exchange):
        monkeypatch.setattr(module, "_kernel", lambda *arguments, **how: told.append(how))
    workspace = gpu_workspace(monkeypatch)
    made, total = plan(m=48, n=256, k=16), torch.zeros(4, 256).bfloat16()
    x, weight = (torch.ones(rows, 16).bfloat16() for rows in (4, 256))
    static = torch.tensor([0.5])
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((1,), (1,)),
        "tensor, static": ((1,), (1,)),
        "row": ((4,), (4, 1)),
        "group128": ((4, 2), (4, 2)),
    }
    for name, (of_kernel, of_result) in shapes.items():
        quant, scale = name.split(",")[0], static if "static" in name else None
        end = End(torch.ones(256).bfloat16(), 1e-5, quant, scale, quant == "row", True)
        results = [
            (launch(workspace, made, x, weight, None, total, end), total),
            (exchange.kernel(workspace, made, exchange.Call(total, None, end, total.clone())), total),
        ]
        for how, (found, summed) in zip(told[-2:], results, strict=True):
            assert found is not None
            q, q_scale = found.quantised  # type: ignore[misc]
            assert how["q"] is q and how["q_scale"].data_ptr() == q_scale.data_ptr()
            assert how["q_scale"].shape == of_kernel and how["quant_scale"] is scale
            granularity = ("tensor", "row", "group128").index(quant)
            assert (how["granularity"], how["ue8m0"]) == (granularity, quant == "row")
            told_q, told_scale, *rest = end.of(summed, found)
            assert told_q.dtype == torch.float8_e4m3fn and told_q.shape == (4, 256)
            assert told_scale.shape == of_result and rest[0] is summed and rest[1].shape == (4, 256)
            assert (how["parts"] is None) == (quant != "tensor" or scale is not None)


class Made(TorchDispatchMode):
    """Counts elements of the tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, torch.Tensor)]
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements[result.dtype] = self.elements.get(result.dtype, 0) + result.numel()
        return result


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@pytest.mark.parametrize("in_place", [False, True])
def test_unfused_on_gpus_makes_no_second_result(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """Nor one in fp32: vLLM measures its memory with a smaller batch."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    x, weight, bias, residual = (
        torch.full(shape, 2.0).bfloat16() for shape in ((64, 8), (32, 8), (32,), (64, 32))
    )
    total = residual if in_place else torch.empty_like(residual)
    with Made() as made:
        call = gemm_ar_ways.Call(x.as_subclass(OnGpu), weight, bias, False, residual, out=total)
        world: Any = SimpleNamespace(group=dist.group.WORLD)
        gemm_ar_ways.by_torch(world, plan(), call, repeat.Recipe(0, {}))
    assert (total == 2 * 32 + 2 + 2).all()
    assert made.elements == ({torch.bfloat16: 64 * 32} if in_place else {})
