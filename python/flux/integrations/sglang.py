"""Plugin for SGLang: with --enable-layernorm-sp, its prefill runs as flux.ag_gemm and flux.gemm_rs; with
FLUX_SGLANG_ALL_REDUCE=on, its all-reduces run as flux.all_reduce.

SGLang calls :func:`register` in every process that it starts, through the entry point "sglang.srt.plugins".
docs/pytorch.md describes what is served.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

import flux
from flux import _env
from flux._log import say_once
from flux.integrations import async_tp
from flux.ops.explain import why_unfused

__all__ = ["register"]

_ALL_REDUCE = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce"
_SEQUENCE_PARALLELISM = "sglang.srt.layers.layernorm_sp"


def register() -> None:
    """Puts flux behind the fused operators of SGLang's sequence parallelism, and logs for each model whether
    it uses them; with FLUX_SGLANG_ALL_REDUCE=on also behind the sums of SGLang's groups.

    SGLang calls this itself. To prevent it, set SGLANG_PLUGINS to a list of plugins without flux.

    Raises:
        ImportError: SGLang is missing, or has no plugins. SGLang logs the error and goes on without flux.
        ValueError: FLUX_SGLANG_ALL_REDUCE is neither on nor off. As above.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sums = _env.get("FLUX_SGLANG_ALL_REDUCE") == "on"
    async_tp.install()
    if sums:
        say_once("flux: SGLang: sums of groups run on flux (FLUX_SGLANG_ALL_REDUCE)", logging.INFO)
        HookRegistry.register(_ALL_REDUCE, _all_reduce, HookType.AROUND)
    if importlib.util.find_spec(_SEQUENCE_PARALLELISM) is None:
        say_once("flux: SGLang: not used, because this version has no sequence parallelism", logging.WARNING)
        return
    HookRegistry.register(f"{_SEQUENCE_PARALLELISM}.initialize_layernorm_sp", _tell, HookType.AFTER)


def _tell(result: object, *args: Any, **kwargs: Any) -> None:
    """Hook after a process has decided whether its model is sequence parallel."""
    if importlib.import_module(_SEQUENCE_PARALLELISM).layernorm_sp_enabled():
        say_once("flux: SGLang: prefill is sequence parallel; its bias-free 16-bit linear layers run on flux")
    else:
        why = "the model is not sequence parallel (--enable-layernorm-sp)"
        say_once(f"flux: SGLang: not used, because {why}", logging.INFO)


def _all_reduce(stock: Callable[..., Any], group: Any, x: torch.Tensor) -> Any:
    """Hook around the sum of x over a group. Chooses by facts that are equal on all ranks."""
    if torch.compiler.is_compiling():  # SGLang then calls an operator of its own
        return stock(group, x)
    why_not = _why_not(group, x)
    if why_not is not None:
        say_once(f"flux: SGLang: sums stay SGLang's: {why_not}", logging.INFO)
        return stock(group, x)
    return flux.all_reduce(x, group=group.device_group)


def _why_not(group: Any, x: torch.Tensor) -> str | None:
    if group.world_size == 1:
        return "the group has one rank"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}"
    if not x.is_contiguous() or not x.numel():
        return "x is not contiguous, or empty"
    name = str(group.device_group.group_name)
    return why_unfused("all_reduce", 1, x.numel(), 0, x.dtype, x.device, name)
