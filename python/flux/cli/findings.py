"""Findings of `flux doctor`, and its passive checks: versions, libraries, GPUs, environment, memory."""

from __future__ import annotations

import difflib
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

import flux
import flux_kernels
from flux import _env, _native, machine

# Below this, a moderate CPU call cannot allocate its workspace (a default container has 64 MiB in all).
_SHM_FREE_MIB = 256


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: "ok", "info" (neither good nor bad), "bad" (advice says what to do)."""

    section: str
    name: str
    value: str
    state: Annotated[str, Literal["ok", "info", "bad"]] = "info"
    advice: str | None = None
    data: Any = None


def judged(section: str, name: str, value: str, good: bool, advice: str, data: Any = None) -> Finding:
    return Finding(section, name, value, "ok" if good else "bad", None if good else advice, data)


def kernels_fit(index: int) -> bool:
    """Whether flux's kernels can run on this GPU: they are built for sm_90a only."""
    return tuple(torch.cuda.get_device_capability(index)) == (9, 0)


def versions() -> Iterator[Finding]:
    section = "versions"
    yield Finding(section, "flux-kernels", f"{flux.__version__} ({machine.commit()})")
    if other := flux_kernels.other_project():
        yield Finding(section, "other project", "the PyPI project `flux` is here too", "bad", other)
    yield Finding(section, "python", platform.python_version())
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding(section, "torch", f"{torch.__version__} ({cuda})")
    if torch.version.cuda:
        yield Finding(section, "NCCL", machine.nccl_version() or "not in this torch")
    gpus = machine.smi()
    if gpus:
        yield Finding(section, "driver", str(gpus[0]["driver"]))
        if not torch.cuda.is_available():
            advice = "torch cannot use the GPUs that nvidia-smi sees: install a CUDA build for this driver"
            yield Finding(section, "torch.cuda", "not available", "bad", advice)
    nvcc = shutil.which("nvcc")
    yield Finding(
        section, "nvcc, CUTLASS", f"not needed to run ({'nvcc is at ' + nvcc if nvcc else 'no nvcc found'})"
    )


def native() -> Iterator[Finding]:
    section = "native library"
    cpu = sum(1 for _ in _native.core.tile_configs())
    yield Finding(section, "_core (plans, CPU path)", f"loaded, {cpu} tile shapes", "ok")
    why = _native.why_not()
    name = "_C (CUDA kernels)"
    if why is None:
        yield Finding(section, name, f"loaded from {_native.library_path}", "ok")
    elif not torch.cuda.is_available():
        yield Finding(section, name, f"absent, and no GPU to use it: {why}")
    elif not any(kernels_fit(i) for i in range(torch.cuda.device_count())):
        yield Finding(section, name, f"absent, and no GPU it would fit: {why}")
    else:
        advice = "every op runs unfused: reinstall with FLUX_CUDA=on and nvcc on PATH"
        yield Finding(section, name, why, "bad", advice)


def gpus() -> Iterator[Finding]:
    section = "GPUs"
    if not torch.cuda.is_available():
        yield Finding(section, "GPUs", "none: flux runs its CPU path", "ok")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        value = f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {memory}"
        advice = f"GPU {i} is not Hopper (sm_90): flux runs its ops unfused through torch there"
        yield judged(section, f"GPU {i}", value, kernels_fit(i), advice)
    for gpu in machine.smi():
        limit = gpu["power_limit_w"]
        clocks = (
            f"SM {gpu['sm_mhz']}/{gpu['sm_max_mhz']} MHz, memory {gpu['mem_mhz']}/{gpu['mem_max_mhz']} MHz"
        )
        yield Finding(section, f"GPU {gpu['index']} clocks", f"{clocks}, power limit {limit} W")


def multicast() -> Iterator[Finding]:
    """Reads three variables. Nothing here may ever create a multicast object."""
    for name, off in machine.NO_MULTICAST.items() if torch.cuda.is_available() else ():
        value = os.environ.get(name)
        shown = "not set" if value is None else f"{value}{' (off)' if value == off else ''}"
        yield Finding("multicast, which flux never uses", name, shown)


def environment() -> Iterator[Finding]:
    """Variables of flux that are set, and others that are and probably misspelt."""
    section = "environment"
    known = {v.name for v in _env.VARIABLES}
    given = [(v, text) for v in _env.VARIABLES if (text := os.environ.get(v.name)) is not None]
    unset = f"{len(known) - len(given)} are not set (docs/troubleshooting.md lists them)"
    yield Finding(section, "FLUX_* variables", unset)
    for variable, text in given:
        shown = _visible(text)
        try:
            _env.get(variable.name)
        except ValueError as error:
            yield Finding(section, variable.name, shown, "bad", f"{error}: unset it or correct it")
            continue
        state = "ok" if variable.read == "run" else "info"
        shown += "" if variable.read == "run" else " (read when flux is built)"
        yield Finding(section, variable.name, f"{shown} · {variable.meaning}", state)
    for name in sorted(name for name in os.environ if name.startswith("FLUX_") and name not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f"flux does not read {_visible(name)}: is {near[0]} meant?" if near else None
        shown = f"{_visible(os.environ[name])} (flux does not read it)"
        yield Finding(section, _visible(name), shown, "bad" if near else "info", hint)


def _visible(text: str) -> str:
    """A value on one line, without control characters of the terminal."""
    return text if text and text.isprintable() else repr(text)


def shared_memory() -> Iterator[Finding]:
    """Where the CPU path keeps its workspaces."""
    section = "shared memory"
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        advice = "the CPU path needs /dev/shm between processes: mount a tmpfs there"
        yield Finding(
            section, "/dev/shm", str(error), "bad" if not torch.cuda.is_available() else "info", advice
        )
        return
    total, free = (blocks * stat.f_frsize / 2**20 for blocks in (stat.f_blocks, stat.f_bavail))
    value = f"{free:.0f} MiB free of {total:.0f} MiB"
    if free < _SHM_FREE_MIB and torch.cuda.is_available():
        yield Finding(section, "/dev/shm", value)
        return
    little = f"less than {_SHM_FREE_MIB} MiB free: CPU workspaces may not fit"
    advice = f"{little} (in a container: --shm-size=2g)"
    yield judged(section, "/dev/shm", value, free >= _SHM_FREE_MIB, advice)
