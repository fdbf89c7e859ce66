"""Plugin for SGLang: with --enable-layernorm-sp, its prefill runs as flux.ag_gemm and flux.gemm_rs.

SGLang calls :func:`register` in every process that it starts, through the entry point "sglang.srt.plugins".
docs/pytorch.md describes what is served.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from flux._log import say_once
from flux.integrations import async_tp

__all__ = ["register"]

_SEQUENCE_PARALLELISM = "sglang.srt.layers.layernorm_sp"


def register() -> None:
    """Puts flux behind the fused operators of SGLang's sequence parallelism, and logs for each model whether
    it uses them.

    SGLang calls this itself. To prevent it, set SGLANG_PLUGINS to a list of plugins without flux.

    Raises:
        ImportError: SGLang is missing, or has no plugins. SGLang logs the error and goes on without flux.

    Example::

        from flux.integrations import sglang

        try:
            sglang.register()
        except ImportError:
            pass  # SGLang is not installed
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    async_tp.install()
    if importlib.util.find_spec(_SEQUENCE_PARALLELISM) is None:
        say_once("flux: SGLang: not used, because this version has no sequence parallelism", logging.WARNING)
        return
    HookRegistry.register(f"{_SEQUENCE_PARALLELISM}.initialize_layernorm_sp", _tell, HookType.AFTER)


def _tell(result: object, *args: Any, **kwargs: Any) -> None:
    """Hook after a process has decided whether its model is sequence parallel."""
    enabled = importlib.import_module(_SEQUENCE_PARALLELISM).layernorm_sp_enabled()
    if enabled:
        say_once("flux: SGLang: prefill is sequence parallel; its bias-free 16-bit linear layers run on flux")
    else:
        say_once(
            "flux: SGLang: not used, because the model is not sequence parallel (--enable-layernorm-sp)",
            logging.INFO,
        )
