"""``flux doctor --vllm MODEL``: what of a model would run on flux in vLLM, and why the rest would not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from flux._files import read_json
from flux.cli.findings import Finding
from flux.fp8.scales import BLOCK
from flux.integrations import vllm as plugin
from flux.integrations.vllm import predict, ranges
from flux.integrations.vllm.report import setting, where_from
from flux.integrations.vllm.thresholds import MEASURED_GPU
from flux.moe.routing import MAX_TOP_K

_WANTED = "doctor: --vllm expected a folder with config.json, or a model in the local cache of the hub"


def model(name: str) -> predict.Model:
    """Of a folder, a config.json, or a name in the local cache of the hub; nothing is downloaded.

    Raises:
        ValueError: there is none, or it is no transformer.
    """
    path = _config(name)
    if path is None:
        raise ValueError(f"{_WANTED}, got {name!r}")
    try:
        return predict.model_of(read_json(path), name)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{_WANTED}, got {name!r}: {error}") from error


def _config(name: str) -> Path | None:
    given = Path(name)
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = sorted(hub.glob(f"models--{name.strip('/').replace('/', '--')}/snapshots/*/config.json"))
    found = [given] if given.is_file() else [given / "config.json", *cached]
    return next((path for path in found if path.is_file()), None)


def examine(model: predict.Model, ranks: int) -> Iterator[Finding]:
    """What the plugin would decide for a model on GPUs of this machine, with the settings of this process."""
    section = f"vLLM: {model.name} on {ranks} rank{'s' if ranks > 1 else ''}"
    device, where = MEASURED_GPU, "none here: as on GPUs that were measured"
    if torch.cuda.is_available():
        device, where = torch.device("cuda", 0), torch.cuda.get_device_name(0)
    yield Finding(section, "vLLM", plugin.installed_version() or "not installed in this environment")
    yield Finding(section, "GPU", where)
    if setting("FLUX_VLLM") == "off":
        yield Finding(section, "flux", "not used, because FLUX_VLLM is off")
        return
    found = predict.predict(model, ranks, device)
    for name, (k, of_layer) in found.layers.items():
        shape = f"{name} [{model.hidden}, {k}]"
        if isinstance(of_layer, str):
            yield Finding(section, shape, f"vLLM's own: {of_layer}")
        else:
            yield Finding(section, shape, f"flux {where_from(of_layer.begin)} ({of_layer.why})", "ok")
    if model.experts:
        reason = next(why for why, applies in _against_experts(model, ranks) if applies)
        begin, why = ranges.experts_from()
        flux = f"flux {where_from(begin)} ({why})"
        yield Finding(section, "experts", reason or flux, "info" if reason else "ok")
    yield _norms(section, model, found)
    few, fused = found.few, min(found.fused, found.many - 1)
    stay = [(1, min(fused, few.start - 1)), (few.stop, fused)] if few else [(1, fused)]
    which = " and ".join(f"{start} to {end}" for start, end in stay if start <= end)
    if which:
        yield Finding(section, "vLLM's fusion", f"compiled batches of {which} tokens stay vLLM's")
    first, why = found.sequence, found.why_not_sequence
    if first is not None and fused >= predict.MOST_TOKENS:
        first, why = None, f"vLLM fuses sums of up to {fused} tokens"
    parallel = f"no: {why}" if first is None else f"compiled batches from {max(first, fused + 1)} tokens on"
    yield Finding(section, "sequence parallel", parallel, "info" if first is None else "ok")
    ends = [start - 1 for start, _ in found.runs[1:]] + [predict.MOST_TOKENS]
    for (start, what), end in zip(found.runs, ends, strict=True):
        yield Finding(section, f"{start} to {end} tokens", what)


def _against_experts(model: predict.Model, ranks: int) -> Iterator[tuple[str, bool]]:
    """Why experts stay vLLM's, and whether each reason applies; at last, none."""
    yield "vLLM's own: they are not sharded over ranks", ranks == 1
    in_blocks = model.quantised == "block"
    yield "vLLM's own: weights are quantised", bool(model.quantised) and not in_blocks
    forced = setting("FLUX_VLLM_MIN_TOKENS")
    yield "vLLM's own: weights are fp8, and FLUX_VLLM_MIN_TOKENS is not set", in_blocks and not forced
    yield f"vLLM's own: tokens choose more than {MAX_TOP_K} experts", model.top_k > MAX_TOP_K
    unit = BLOCK if in_blocks else ranges.ALIGNMENT
    aligned = model.expert % (ranks * unit) == 0 and model.hidden % unit == 0
    yield f"vLLM's own: sizes are not multiples of {unit}", not aligned
    yield "vLLM's own: FLUX_VLLM_MOE is off", setting("FLUX_VLLM_MOE") == "off"
    yield "", True


def _norms(section: str, model: predict.Model, found: predict.Prediction) -> Finding:
    if not model.plain_norm:
        return Finding(section, "norms", "vLLM's own: they do not follow the addition of the residual")
    used = sorted({name for _, what in found.runs for name in ("gemm_ar", "all_reduce") if name in what})
    if used:
        return Finding(section, "norms", f"part of flux.{' and flux.'.join(used)}, where those run", "ok")
    return Finding(section, "norms", "vLLM's own: no sum in front of them is flux's")
