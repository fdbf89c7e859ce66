"""A GPU that does nothing, for benchmarks/host_cost.py: builds fake_cuda.cc, shows it to torch and flux."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
ROOM = 1 << 40  # bytes of the workspace, which nobody writes


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _build(kernels: Path, into: Path) -> tuple[Path, Path]:
    """The device, and the kernels' host code linked against it instead of CUDA's runtime."""
    into.mkdir(parents=True, exist_ok=True)
    device, library = into / "fake_cuda.so", into / "_C.so"
    source, torch = HERE / "fake_cuda.cc", _torch_folder()
    link = ["-L" + str(torch / "lib"), "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    if not device.exists() or device.stat().st_mtime < source.stat().st_mtime:
        headers = ["-I" + str(torch / "include"), "-I" + sysconfig.get_paths()["include"]]
        command = ["g++", "-O2", "-std=c++20", "-fPIC", "-shared", *headers, str(source), "-o", str(device)]
        subprocess.run([*command, *link], check=True)
    folders = [path for path in (kernels / "CMakeFiles").glob("*.dir") if not path.name.startswith("_core")]
    objects = [str(path) for folder in folders for path in sorted(folder.rglob("csrc/**/*.o"))]
    if not objects:
        raise SystemExit(f"{kernels} holds no kernels: run make kernels first")
    options = ["-shared", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-o", str(library)]
    subprocess.run(["g++", *options, *objects, str(device), *link], check=True)
    return device, library


def start(kernels: Path, into: Path) -> Any:
    """Imports torch and flux with the device and the kernels. Returns a group of two ranks, of which this
    process is the first.
    """
    device, library = _build(kernels, into)
    lib = _torch_folder() / "lib"
    for path in (lib / "libc10.so", lib / "libtorch_cpu.so", device):  # before torch looks for a device
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.path.insert(0, str(into))
    import fake_cuda  # type: ignore[import-not-found]

    c, properties = vars(torch._C), SimpleNamespace(multi_processor_count=132, uuid="fake")
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"):
        c[name] = getattr(fake_cuda, name)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = fake_cuda._cuda_isCurrentStreamCapturing
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(stream_id=1)  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None

    import flux._native as native

    torch.ops.load_library(str(library))
    native._why_not = None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return _workspace(dist.group.WORLD)


def by_way(way: str) -> Any:
    """A group of the same ranks, whose calls all run in one way (flux.measured.times.WAYS)."""
    import torch
    import torch.distributed as dist

    from flux.comm import registry
    from flux.measured.times import Tuning

    group = _workspace(dist.new_group([0, 1]))
    registry.get(group, torch.device("cuda", 0), "bench").tuning = Tuning(forced=way)
    return group


def _workspace(group: Any) -> Any:
    import torch

    from flux.comm import cuda, repeat, symm_mem, workspace
    from flux.measured import files
    from flux.measured.times import NO_FACTS

    class Echo:
        """A meeting whose other rank says what this one says, from another GPU."""

        def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
            return [facts, {**facts, "uuid": "another"} if "uuid" in facts else facts]

    class Memory:
        def __init__(self, nbytes: int, *_: object) -> None:
            self.peers = [1 << 41, 1 << 42]
            self.tensor = SimpleNamespace(__getitem__=None)

    cuda.why_fake = lambda group: None  # type: ignore[assignment]
    symm_mem.why_not = lambda group, device: None  # type: ignore[assignment]
    symm_mem.unreachable_peer = lambda device, uuids, rank: None  # type: ignore[assignment]
    files.local = lambda device: NO_FACTS  # type: ignore[assignment]
    zeros = torch.zeros
    torch.zeros = lambda *size, pin_memory=False, **how: zeros(*size, **how)  # type: ignore[assignment]
    device = torch.device("cuda", 0)
    turn = workspace.turn(group, device)
    meeting: Any = Echo()
    met = cuda.CudaWorkspace.meet(group, device, "gemm_rs", meeting)
    made = cuda.CudaWorkspace(cuda.Met(group, device, "gemm_rs", meeting, turn, met))
    torch.zeros = zeros
    core = cuda._native.core
    made._symm_buffer = core.SymmBuffer(0, 2, [1 << 41, 1 << 42], 1 << 30, ROOM, ROOM, made._error_address, 1)
    made._address = made._copy_address = int(made._symm_buffer.address)
    made.signal_bytes, made.slot_bytes, made.exchange_bytes = 1 << 30, ROOM, ROOM
    made._copy_room = (1 << 30, ROOM)
    workspace.made[group, device] = made
    repeat.of_groups[group] = made.known
    return group
