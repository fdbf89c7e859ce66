"""What kind of machine measurements are valid for: rates, never names."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch

from flux._files import Count, NotNegative, Positive, parse

# Rates of one kind of machine differ by less, of two kinds by more.
_SAME = 0.03
# GB/s of an NVLink in one direction, by its version (nvidia-smi nvlink -s).
_NVLINK_GB_PER_S = {2: 25.781, 3: 25.0, 4: 26.562, 5: 53.125}
_MAX_LINKS = 18


@dataclass(frozen=True)
class Machine:
    """One GPU of a machine, or its CPUs. None: unknown, which is equal to anything.

    Attributes:
        arch: compute capability, as "sm_90", or "cpu".
        sms: streaming multiprocessors; of CPUs nothing.
        sm_mhz: highest clock of the SMs.
        memory_gb_per_s: rate of the memory.
        link_gb_per_s: rate of all NVLinks in one direction.
    """

    arch: str
    sms: Count | None = None
    sm_mhz: Positive | None = None
    memory_gb_per_s: Positive | None = None
    link_gb_per_s: NotNegative | None = None

    def difference(self, other: Machine) -> str | None:
        """The first fact in which two machines differ, as text, or None."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine is None or theirs is None or mine == theirs:
                continue
            if isinstance(mine, float | int) and each.name != "sms" and abs(mine - theirs) <= _SAME * theirs:
                continue
            return f"{each.name} {mine}, not {theirs}"
        return None


class _About(TypedDict):
    """The facts of a machine in a result of bench (flux.machine.describe)."""

    device: str


class _OfGpus(TypedDict, total=False):
    kind: Machine
    arch: str
    sms: Count


def of_result(about: object, where: str) -> Machine:
    """The machine of a result of bench. Older ones do not tell its rates.

    Raises:
        ValueError: it is no part of a result.
    """
    device: _About = parse(_About, about, where, "machine")
    gpus: _OfGpus = parse(_OfGpus, about, where, "machine")
    return gpus.get("kind") or Machine(gpus.get("arch", device["device"]), gpus.get("sms"))


def of_device(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type)
    properties: Any = torch.cuda.get_device_properties(device)
    memory_khz, bits = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    sm_khz = getattr(properties, "clock_rate", None)
    return Machine(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        sm_khz / 1e3 if sm_khz else None,
        round(2 * memory_khz * bits / 8e6, 1) if memory_khz and bits else None,
        link_gb_per_s(str(getattr(properties, "uuid", ""))),
    )


def link_gb_per_s(uuid: str, library: Any = None) -> float | None:
    """Rate of a GPU's active NVLinks, or None if the driver's library does not tell. 0: it has none."""
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
        gpu, up, version = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(gpu)):
            return None
        rate = 0.0
        for link in range(_MAX_LINKS):
            if nvml.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(up)) or not up.value:
                continue
            if nvml.nvmlDeviceGetNvLinkVersion(gpu, link, ctypes.byref(version)):
                return None
            if version.value not in _NVLINK_GB_PER_S:
                return None
            rate += _NVLINK_GB_PER_S[version.value]
        return round(rate, 1)
    except (OSError, AttributeError):
        return None
