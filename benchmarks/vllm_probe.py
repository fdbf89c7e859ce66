"""What vllm_throughput.py brings into workers of vLLM. :class:`Probe` becomes a base class of theirs. To
import this module gives the model of a worker weights that count, and puts counters around the functions of
flux that the plugin calls.
"""

from __future__ import annotations

import functools
import multiprocessing
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

# Of normal numbers in fp8, whose largest is 448.
FP8_SPREAD = 32
BACKENDS = ("pynccl_comm", "ca_comm", "symm_mem_comm", "fi_ar_comm")

_calls: Counter[str] = Counter()


class Probe:
    """Becomes a base class of vLLM's workers (worker_extension_cls)."""

    def probe_state(self) -> dict[str, Any]:
        """Of this rank, since it started: flux's calls for linear layers and experts, how many of
        these were made while a CUDA graph was captured, and through what tiles went; vLLM's all-reduce
        backends, row-parallel layers and layers of experts; a sum over weights.
        """
        from vllm.distributed import get_tp_group

        from flux.comm import registry

        group = get_tp_group()
        found = {name: getattr(group.device_communicator, name, None) for name in BACKENDS}
        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        kinds = [type(module).__name__ for module in model.modules()]
        return {
            "flux_calls": {kind: _calls[kind] for kind in ("linear", "experts", "captured")},
            "flux_through": [w.transport for w in registry.existing(group.device_group) if w.why_not is None],
            "backends": [n for n, b in found.items() if b is not None and not getattr(b, "disabled", False)],
            "row_parallel": dict(Counter(kind for kind in kinds if "RowParallel" in kind)),
            "experts": dict(Counter(kind for kind in kinds if "MoERunner" in kind)),
            "weights": model.weights_sum,
        }


def fill_with_weights(model: Any) -> None:
    """Seeded normal weights with which layers neither grow nor vanish. They differ from rank to rank, except
    where all ranks have the same: norms, and gates that choose experts. vLLM's dummy weights are within 1e-3
    of 0, norms too, and alike on all ranks: its layers would add less than rounding does. Weights in fp8 are
    FP8_SPREAD times as large, and their scales as much smaller.
    """
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    total = 0.0
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("_scale"):
                scaled = weights.get(name.removesuffix("_scale"))
                if scaled is not None:  # those of a KV cache say that there are none
                    weight.fill_(scaled.shape[-1] ** -0.5 / FP8_SPREAD)
                continue
            norm = "norm" in name
            shared = norm or ".gate." in name
            generator = torch.Generator(device=weight.device)
            generator.manual_seed(zlib.crc32(name.encode()) + (0 if shared else 7919 * (rank + 1)))
            if weight.element_size() == 1:
                wide = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
                weight.copy_(wide.normal_(std=FP8_SPREAD, generator=generator))
                total += float(weight.flatten()[:1000].double().abs().sum())
                continue
            weight.normal_(generator=generator)
            if norm:
                weight.mul_(0.1).add_(1.0)
            elif "embed" not in name:
                weight.mul_(weight.shape[-1] ** -0.5)
            total += float(weight.flatten()[:1000].double().abs().sum())
    model.weights_sum = total


def prepare_worker() -> None:
    """In a worker, before it has a model."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    import flux
    from flux.ops import add_norm as pair

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        fill_with_weights(model)

    DummyModelLoader.load_weights = load_weights
    flux.gemm_ar = _counted("linear", flux.gemm_ar)
    flux.gemm_rs = _counted("linear", flux.gemm_rs)
    pair.scatter_norm_gather = _counted("linear", pair.scatter_norm_gather)
    flux.moe.gemm_gather_rs = _counted("experts", flux.moe.gemm_gather_rs)


def _counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[kind] += 1
        _calls["captured"] += torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return function(*args, **kwargs)

    return counted


# Workers are processes that vLLM spawns; in the engine's own there is no model to prepare.
if multiprocessing.parent_process() is not None:
    prepare_worker()
