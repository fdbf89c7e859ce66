"""A GPU and its kernels as flux.comm.repeat sees them, on CPU tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux
from flux import moe
from flux._native import core
from flux.comm import cuda, repeat
from flux.comm import workspace as workspaces
from flux.comm.cuda import CudaWorkspace, Launch
from flux.measured import files
from flux.measured.times import NO_FACTS, Tuning
from flux.moe import routing, rows
from flux.ops import add_norm, grouped_gemm, quantize
from flux.ops import gemm as plain
from flux.ops.ways import ag_gemm, all_gather, exchange, gemm_rs
from flux.ops.ways import gemm_ar as gemm_ar_ways
from flux.plan import sums
from flux.plan.choose import plan_without_workspace

DEVICE = torch.device("cpu")  # where the tensors are; their workspace plans for GPUs
ROOM = 1 << 30
STREAM = 7
_alive: list[Any] = []


def tensors_of(name: str, arguments: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """The tensors that a kernel's operator is given, in the order of its schema; None for those it is not."""
    schema = getattr(torch.ops, name.replace("::", ".").split(".")[0])
    schema = getattr(schema, name.split("::")[1]).default._schema
    found: list[torch.Tensor | None] = []
    for i, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type):
            given = arguments[i] if i < len(arguments) else None
            found.extend(given if isinstance(given, (list, tuple)) else [given])
    return found


def moved(name: str, arguments: tuple[Any, ...], addresses: Any) -> list[Any]:
    """The arguments of a kernel's operator with contiguous tensors of the same shapes at other addresses."""
    there = {}
    for tensor, address in zip(tensors_of(name, arguments), addresses, strict=False):
        if tensor is not None:
            assert tensor.is_contiguous()
            memory = (ctypes.c_char * tensor.nbytes).from_address(address)
            there[id(tensor)] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    def found(argument: Any) -> Any:
        if isinstance(argument, list):
            return [found(each) for each in argument]
        return there.get(id(argument), argument)

    return [found(argument) for argument in arguments]


class Machine:
    """Kernels that are kept and enqueued as if there were a GPU, and what is asked of it.

    Attributes:
        dispatched: the name and arguments of each kernel that Python launched.
        follows: the streams, last and next, of each wait between streams that C++ enqueued.
        repeated: the operator and the addresses of each launch that C++ repeated, and its copy epoch.
        computes: by operators: what a kernel does with the arguments of its operator. Others do nothing.
    """

    def __init__(self) -> None:
        self.dispatched: list[tuple[str, tuple[Any, ...]]] = []
        self.repeated: list[tuple[str, list[int | None], int]] = []
        self.dropped: list[int] = []
        self.follows: list[tuple[int, int]] = []
        self.computes: dict[str, Callable[..., object]] = {}
        self.stream, self.is_ready, self.error = STREAM, True, b""
        self.is_captured = False  # the stream of the last call
        self.during: Callable[[], object] = lambda: None
        self.running, self.addresses = 0, None  # of the launch that runs
        # The operators of launches, their number of tensors, and their arguments if they compute.
        self._keeping: list[tuple[str, int, tuple[Any, ...]]] | None = None
        self._kept: list[tuple[str, int, tuple[Any, ...]]] = []
        ready = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
        pointers = ctypes.POINTER(ctypes.c_void_p)
        run = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, pointers, ctypes.c_uint32, ctypes.c_void_p)
        drop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        follow = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        _alive.append(self)  # known calls call its functions when they are freed
        self._functions = (
            ready(self._ready),
            follow(self._follow),
            run(self._run),
            drop(self.dropped.append),
        )
        self._table = (ctypes.c_void_p * 4)(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._functions))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.table = new(ctypes.addressof(self._table), core.LAUNCH_TABLE, None)

    def kernel(self, operator: Any) -> Callable[..., None]:
        """In place of a kernel's operator."""
        name = operator._schema.name

        def launch(*arguments: Any, **fp8: Any) -> None:
            if fp8:
                schema = operator._schema.arguments
                arguments += tuple(
                    fp8.get(each.name, each.default_value) for each in schema[len(arguments) :]
                )
            if self._keeping is None:
                self.dispatched.append((name, arguments))
                if name in self.computes:
                    self.computes[name](*arguments)
            else:
                count = len(tensors_of(name, arguments))
                self._keeping.append((name, count, arguments if name in self.computes else ()))

        return launch

    def keep(self, launch: Callable[[], object]) -> list[int]:
        self._keeping = []
        launch()
        first = len(self._kept) + 1
        self._kept += self._keeping
        self._keeping = None
        return list(range(first, len(self._kept) + 1))

    def _ready(self, device: int, stream: Any) -> bool:
        stream[0] = self.stream
        return self.is_ready

    def _follow(self, device: int, last: int | None, next_one: int | None) -> bool:
        if not self.is_captured:
            self.follows.append((last or 0, next_one or 0))
        return not self.is_captured

    def _run(self, launch: int, addresses: Any, epoch: int, stream: int) -> int | None:
        name, count, arguments = self._kept[launch - 1]
        self.running, self.addresses = launch, addresses
        self.during()
        self.repeated.append((name, [addresses[i] for i in range(count)], epoch))
        if name in self.computes:
            self.computes[name](*moved(name, arguments, addresses))
        return ctypes.cast(ctypes.c_char_p(self.error), ctypes.c_void_p).value if self.error else None


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def machine(world: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    layers = [sys.modules[layer.__module__] for layer in (moe.ag_scatter_gemm, moe.gemm_gather_rs)]
    for module in (
        plain,
        gemm_rs,
        gemm_ar_ways,
        ag_gemm,
        all_gather,
        grouped_gemm,
        exchange,
        add_norm,
        routing,
        quantize,
        *layers,
    ):
        monkeypatch.setattr(module, "_kernel", made.kernel(module._kernel))
    monkeypatch.setattr(ag_gemm, "_collect", made.kernel(ag_gemm._collect))
    monkeypatch.setattr(rows, "_combine_kernel", made.kernel(rows._combine_kernel))
    monkeypatch.setattr(sums, "KERNEL_ROWS", range(1, 257))  # also of calls with eight
    monkeypatch.setattr(repeat, "keep", made.keep)
    monkeypatch.setattr(repeat, "_launch_table", lambda: made.table)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=1))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(workspaces, "made", {})
    monkeypatch.setattr(workspaces, "turns", {})
    monkeypatch.setattr(repeat, "of_groups", {})
    yield made


@pytest.fixture
def gemms(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The known calls of flux.gemm, which runs in the kernel."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    monkeypatch.setattr(files, "local", lambda device: NO_FACTS)
    plan_without_workspace.cache_clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    calls = repeat.make()
    monkeypatch.setattr(repeat, "without_group", lambda: calls)
    return calls


@pytest.fixture
def workspace(machine: Machine) -> CudaWorkspace:
    return add_workspace(dist.group.WORLD)


def add_workspace(group: Any) -> CudaWorkspace:
    """One that has room for every call, and nobody to meet."""
    workspace = CudaWorkspace.__new__(CudaWorkspace)
    turn, order = workspaces.turn(group, DEVICE), core.LaunchOrder()
    error = torch.zeros(16, dtype=torch.int32)
    symm_buffer = core.SymmBuffer(
        0, group.size(), [4096] * group.size(), ROOM, ROOM, ROOM, error.data_ptr(), 1
    )
    vars(workspace).update(
        group=group,
        device=torch.device("cuda", 0),
        rank=0,
        world_size=group.size(),
        timeout_s=30.0,
        why_not=None,
        num_sms=132,
        transport="stores to peers' symmetric memory",
        tuning=Tuning(forced="kernel"),
        plans={},
        _plans_left_free={},
        failure=None,
        signal_bytes=ROOM,
        slot_bytes=ROOM,
        exchange_bytes=ROOM,
        _symm_buffer=symm_buffer,
        _address=int(symm_buffer.address),
        _index=0,
        _launch=Launch(workspace, copies=False),
        _copy_launch=Launch(workspace, copies=True),
        _captured=False,
        _copy_room=(ROOM, ROOM),
        _copy_address=int(symm_buffer.address),
        _order=order,
        known=repeat.make(turn, order, error.data_ptr(), str(group.group_name)),
        turn=turn,
        _error=error,
        _error_address=error.data_ptr(),
        _error_code=ctypes.c_uint32.from_address(error.data_ptr()),
    )
    order.stream = STREAM
    workspaces.made[group, DEVICE] = workspace
    repeat.of_groups[group] = workspace.known
    return workspace


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def make_routing() -> moe.Routing:
    """Of 8 tokens on each of 2 ranks, 2 of 4 experts."""
    shapes = routing.checked_shapes(2, 4, 1, 8, 8, 2)
    arrays = [tensor(*shape, dtype=torch.int32) for shape in shapes]
    name = dist.group.WORLD.group_name
    return moe.Routing(*arrays, tensor(2, 8, 2, dtype=torch.float32), 4, 1, 8, 8, name)


def fp8(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.float8_e4m3fn)


def scale(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def column_major(rows: int, columns: int) -> torch.Tensor:
    """Block scales as kernels read them."""
    return scale(columns, -(-rows // 4) * 4).t()[:rows]


def scaled(op: str, transpose: bool) -> dict[str, Any]:
    """fp8 operands of a call, with scales of rows or of blocks."""
    if "moe" in op:
        sizes = (8, 4, 32, 256) if "scatter" in op else (32, 4, 64, 256)
        (m, experts, n, k), routing_of = sizes, {"routing": make_routing()}
        of_blocks = {"scale_x": column_major(m, k // 128), "scale_w": scale(experts, 1, k // 128)}
        return {"x": fp8(m, k), "weight": fp8(experts, n, k), **routing_of, **of_blocks}
    weight = fp8(16, 256).t() if transpose else fp8(16, 256)
    made = {"x": fp8(8, 256), "weight": weight, "transpose_weight": transpose}
    if "rows" in op:
        return made | {"scale_x": scale(8, 1), "scale_w": scale(16), "out_dtype": torch.float16}
    return made | {"scale_x": column_major(8, 2), "scale_w": scale(2, 1) if transpose else scale(1, 2)}


# What calls have besides x and a weight. Each tensor has another size, so that addresses cannot be mistaken.
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "gemm_ar norm": lambda: {"residual": tensor(8, 16), "norm_weight": tensor(16), "eps": 1e-5},
    "gemm_ar quant": lambda: {"norm_weight": tensor(16), "quant": "tensor"},
    "gemm_ar fp8 quant": lambda: {"norm_weight": tensor(16), "quant": "group128", "return_norm": True},
    "all_reduce norm": lambda: {"residual": tensor(8, 64), "norm_weight": tensor(64)},
    "all_reduce quant": lambda: {"norm_weight": tensor(64), "quant": "row", "ue8m0": True},
    "all_reduce quant static": lambda: {
        "norm_weight": tensor(64),
        "quant": "tensor",
        "quant_scale": scale(1),
        "ue8m0": False,
    },
    "moe.ag_scatter_gemm": lambda: {
        "weight": tensor(4, 32, 64),
        "routing": make_routing(),
        "activation": "swiglu",
    },
    "moe.gemm_gather_rs": lambda: {
        "x": tensor(32, 16),
        "weight": tensor(4, 64, 16),
        "routing": make_routing(),
    },
}


def arguments(op: str, transpose: bool = False) -> dict[str, Any]:
    """Tensors of a call by the names of its parameters; all different tensors."""
    if op == "moe.route":  # by the kernel only on GPUs
        ids, weights = tensor(8, 2, dtype=torch.int32), tensor(8, 2, dtype=torch.float32)
        return {"topk_ids": ids, "topk_weights": weights, "num_experts": 4}
    made: dict[str, Any] = scaled(op, transpose) if "fp8" in op else {"x": tensor(8, 64)}
    if "gemm" in op and "moe" not in op and "fp8" not in op:
        weight = tensor(64, 16) if transpose else tensor(16, 64)
        made |= {"weight": weight, "transpose_weight": transpose}
    if op.endswith("list"):
        for name in made.keys() & {"weight", "scale_w"}:
            made[name] = [made[name], made[name].clone()]
        made |= {"bias": [None, tensor(16)], "return_gathered": True}
    return made | MORE.get(op, dict)()


CALLS: dict[str, Callable[..., Any]] = {
    "gemm_rs": flux.gemm_rs,
    "ag_gemm": flux.ag_gemm,
    "ag_gemm list": flux.ag_gemm,
    "gemm_ar": flux.gemm_ar,
    "gemm_ar norm": flux.gemm_ar,
    "all_reduce": flux.all_reduce,
    "all_reduce norm": flux.all_reduce,
    "reduce_scatter": flux.reduce_scatter,
    "all_gather": flux.all_gather,
    "moe.ag_scatter_gemm": moe.ag_scatter_gemm,
    "moe.gemm_gather_rs": moe.gemm_gather_rs,
    "gemm_rs fp8": flux.gemm_rs,
    "gemm_rs fp8 rows": flux.gemm_rs,
    "ag_gemm fp8": flux.ag_gemm,
    "ag_gemm fp8 list": flux.ag_gemm,
    "gemm_ar quant": flux.gemm_ar,
    "all_reduce quant": flux.all_reduce,
    "all_reduce quant static": flux.all_reduce,
    "moe.ag_scatter_gemm fp8": moe.ag_scatter_gemm,
    "moe.gemm_gather_rs fp8": moe.gemm_gather_rs,
}
# Of several kernels: none multiplies fp8 operands and sums.
FP8_SUMS = {"gemm_ar fp8 rows": flux.gemm_ar, "gemm_ar fp8 quant": flux.gemm_ar}
FP8 = ("gemm_rs fp8", "gemm_rs fp8 rows", "ag_gemm fp8")
WITH_OUT = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter", "all_gather", *FP8)


def roles(given: dict[str, Any], results: Any) -> dict[int, str]:
    """What lies at an address: an argument or a result."""
    found: dict[int, str] = {}
    flat = {name: value for name, value in given.items() if not isinstance(value, (list, tuple))}
    for name, value in given.items():
        if isinstance(value, (list, tuple)):
            flat |= {f"{name}[{i}]": entry for i, entry in enumerate(value)}
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    nested = [entry for result in results for entry in (result if isinstance(result, list) else [result])]
    flat |= {f"result {i}": result for i, result in enumerate(nested)}
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            found.setdefault(value.data_ptr(), name)
    return found


def told(named: dict[int, str], addresses: list[int | None]) -> list[str | None]:
    return [None if address is None else named.get(address, "scratch") for address in addresses]


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return (
        [entry for result in results for entry in flat(result)] if isinstance(results, (list, tuple)) else []
    )
