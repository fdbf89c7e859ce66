"""The machine of a result: versions, GPUs, clocks, commit. Everything here only reads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from flux import _native
from flux.measured.machine import of_device
from flux.peers import versions

# flux never uses multicast; results of peers with multicast would not be comparable.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}

_SMI_FIELDS = {
    "index": "index",
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory_mib",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.max.mem": "mem_max_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}
_SMI_TEXT = ("name", "driver")
# Share of the highest SM clock. Healthy H100s and H200s keep over 0.7 of it under their power limit.
LEAST_CLOCK = 0.6


def disable_multicast() -> None:
    """Keeps flux and its peers from creating multicast objects; call before NCCL starts."""
    os.environ.update(NO_MULTICAST)


def multicast_is_forbidden() -> bool:
    """Whether the environment says to one of flux's peers that it must not create multicast objects."""
    return any(os.environ.get(name) == value for name, value in NO_MULTICAST.items())


def run_text(command: Sequence[str], timeout_s: float = 20.0) -> str | None:
    """Standard output of a command, or None if it is absent, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def parse_smi(text: str) -> list[dict[str, Any]]:
    """One dict per GPU from what nvidia-smi prints for the fields this module asks for."""
    gpus = []
    for line in text.strip().splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_SMI_FIELDS):
            continue
        gpu = dict(zip(_SMI_FIELDS.values(), values, strict=True))
        gpus.append({key: value if key in _SMI_TEXT else _number(value) for key, value in gpu.items()})
    return gpus


def _number(value: str) -> float | None:
    """Parses a number; None if the driver does not report it ("[N/A]")."""
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        return None


def smi(devices: Sequence[torch.device] | None = None) -> list[dict[str, Any]]:
    """Per GPU (None: per GPU of the machine): name, driver, clocks (MHz, now and maximum), power (W),
    temperature. [] without nvidia-smi.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    if devices is not None:
        # CUDA_VISIBLE_DEVICES numbers GPUs anew for torch, but not for nvidia-smi.
        properties: Any = torch.cuda.get_device_properties
        query.append("--id=" + ",".join(f"GPU-{properties(device).uuid}" for device in devices))
    return parse_smi(run_text(query) or "")


def smi_under_load(
    devices: Sequence[torch.device], read: Sequence[torch.device] | None = None
) -> list[dict[str, Any]]:
    """Multiplies matrices for about two seconds on each of `devices`, so that clocks settle. Returns `smi` of
    that time.

    Args:
        read: of which GPUs, if not of these: other processes may do the same on theirs.

    Returns:
        [] if `read` is empty, or if it was over too soon.
    """
    cuda: Any = torch.cuda
    read = devices if read is None else read
    ends = []
    for device in devices:
        with cuda.device(device):
            x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16).mul_(0.1)
            out = torch.empty_like(x)
            for _ in range(900):
                torch.mm(x, x, out=out)
            ends.append(cuda.Event())
            ends[-1].record()
    load = smi(read) if read and not any(end.query() for end in ends) else []
    for end in ends:
        end.synchronize()
    return load


def throttled(gpus: Sequence[dict[str, Any]]) -> list[str]:
    """Of `smi_under_load`: GPUs that are too hot or too short of power for their times to count."""
    return [
        f"GPU {gpu['index']} runs at {now} of {highest} MHz under load, at {gpu['temperature_c']} °C"
        for gpu in gpus
        for now, highest in [(gpu["sm_mhz"], gpu["sm_max_mhz"])]
        if now and highest and now < LEAST_CLOCK * highest
    ]


def commit() -> str:
    """``git describe`` of the source tree; without one FLUX_COMMIT, or what the wheel was built from."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--tags"]
    # An installed copy may be inside an unrelated repository, so use git only if it tracks this file.
    tracked = run_text(["git", "-C", str(here), "ls-files", "--error-unmatch", "machine.py"])
    described = run_text(command) if tracked else None
    given = os.environ.get("FLUX_COMMIT") or _native.core.COMMIT
    return (described or "").strip() or given or "unknown"


def nccl_version() -> str | None:
    """NCCL's version as torch reports it; None in a build without NCCL."""
    try:
        nccl: Any = torch.cuda.nccl
        version = nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def describe(device: str) -> dict[str, Any]:
    """The ``machine`` part of a result file."""
    info: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "multicast": "off",
        "peers": versions(),
    }
    if device == "cuda":
        gpus = smi()
        properties = torch.cuda.get_device_properties(0)
        info |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "arch": f"sm_{properties.major}{properties.minor}",
            # What plans and thresholds match machines by.
            "kind": asdict(of_device(torch.device("cuda", 0))),
            "driver": gpus[0]["driver"] if gpus else None,
            "gpus_idle": gpus,
        }
    return info


def now() -> str:
    """UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
