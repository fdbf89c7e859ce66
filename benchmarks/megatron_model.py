"""Forward pass and training step of GPTs of Megatron-Core on one host: stock, Transformer Engine, flux.

    python benchmarks/megatron_model.py --tp 2 --json FILE            # every model of the default list
    python benchmarks/megatron_model.py --models mixtral-8x7b:2       # experts in 2 slices
    python benchmarks/megatron_model.py --cpu                         # tiny models in fp32, in processes

Every candidate is the same model with the same weights, in bf16, with sequence parallelism. All candidates of
a model are timed in turns, in an order that each round draws anew. Stock and flux differ only in
`convert_spec` and `convert_model`; norms and attention are torch's. A training step is a forward and a
backward pass, without an optimizer.

Models with experts run with both of Megatron's dispatchers that need no further package, allgather ("stock")
and alltoall. Their experts are Megatron's, one GEMM after the other, and for "grouped GEMM" torch's grouped
GEMM. With Transformer Engine installed, its spec runs stock, with its overlap (tp_comm_overlap), and on flux.
A candidate that cannot run is listed with the reason.

Each model has processes of its own, and the file is written after each. A model that would not end before
--timeout does not begin. With --graphs, a training step is replayed from a
CUDA graph, too, as by Megatron's cuda_graph_impl="full_iteration": of stock and flux, with experts only of
flux, because stock dispatchers read the numbers of rows on the host. Ends with 1 if something is wrong: a GPU
whose clock is low under load, another loss or other gradients than stock's, or a model that failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux.testing import SpawnError, spawn
from megatron_candidates import (
    ENGINE,
    MODELS,
    Batch,
    Settings,
    batch_of,
    candidates,
    captured,
    initialise,
    loss_of,
    usual_name,
)
from whole_models import told

Tensor = torch.Tensor
DEFAULT = ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "mixtral-8x7b:2", "qwen3-30b-a3b", "qwen3-30b-a3b:2"]
# How far a loss, and all gradients as one vector, may be from stock's, as a share of it. Without one rank's
# part gradients are 0.7 off. Of close scores rounding lets a router choose others among the experts.
LOSS_SHARE, GRADIENT_SHARE, ROUTED_SHARE, EXACT_SHARE = 0.01, 0.1, 0.4, 1e-4


def measure(rank: int, world_size: int, settings: Settings) -> dict[str, Any]:
    """What each candidate has shown, and those that could not run. The same on all ranks."""
    from flux.bench.timing import all_max, make_timer

    device = initialise(settings)
    timer = make_timer(device, dist.group.WORLD)
    batch = batch_of(settings, device)
    models, skipped, runs = {}, {}, {}
    gradients: dict[str, Tensor] = {}
    makers = candidates(settings, device, {})
    if unknown := set(settings.names) - makers.keys():
        raise ValueError(f"--candidates: expected some of {sorted(makers)}, got {sorted(unknown)}")
    for name, make in makers.items():
        if settings.names and name not in ("stock", *settings.names):
            continue
        try:
            model = make()
            loss = loss_of(model, batch)
            loss.backward()
        except Exception as error:
            if not (settings.model.experts or name.startswith(ENGINE)):
                raise
            skipped[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        found = {usual_name(key): p.grad for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        gradients = gradients or found
        (apart,) = all_max([distance(found, gradients)], dist.group.WORLD, device)
        runs[name] = {"loss": float(loss), "gradients_apart": apart, "samples_ms": {}, "host_bound": []}
        models[name] = model
    del gradients, found, loss
    passes: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "training": {}}
    for name, model in models.items():
        passes["forward"][name] = functools.partial(_forward, model, batch)
        passes["training"][name] = functools.partial(_train, model, batch)
    for kind, calls in passes.items():
        for name, call in calls.items():
            timer.warm(call)
            if not settings.cpu and kind == "training":
                runs[name]["step_mib"] = step_mib(call)
        for name, samples in timer.interleaved(calls, settings.iters, settings.rounds).items():
            runs[name]["samples_ms"][kind] = samples
            runs[name]["host_bound"] += [kind] * (name in timer.host_bound)
    if settings.graphs:
        for forward in passes["forward"].values():
            # Stock dispatchers keep tensors of their last step, and so autograd's nodes of the parameters
            # that all models share. A capture must not meet nodes that belong to another stream.
            forward()
        replays = {}
        for name, step in passes["training"].items():
            if name.startswith("flux") or not (settings.model.experts or name.startswith(ENGINE)):
                replays[name], loss = captured(step)
                timer.warm(replays[name])
                runs[name]["graph_loss"] = float(loss)
        for name, samples in timer.interleaved(replays, settings.iters, settings.rounds).items():
            runs[name]["samples_ms"]["graph"] = samples
            runs[name]["host_bound"] += ["graph"] * (name in timer.host_bound)
    return {"candidates": runs, "skipped": skipped}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all gradients as one vector, |ours - theirs| / |theirs|; of the parameters that both have."""
    both = ours.keys() & theirs.keys()
    apart = sum(float((ours[name].float() - theirs[name].float()).square().sum()) for name in both)
    return float((apart / sum(float(theirs[name].float().square().sum()) for name in both)) ** 0.5)


def step_mib(call: Callable[[], None]) -> float:
    """What a training step allocates through torch at its peak, beside parameters: activations, gradients."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return float((torch.cuda.max_memory_allocated() - before) / 2**20)


def _forward(model: Any, batch: Batch) -> None:
    with torch.no_grad():
        loss_of(model, batch)


def _train(model: Any, batch: Batch) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.detach()


def faults_of(runs: dict[str, Any], experts: bool, exact: bool) -> list[str]:
    """What makes times worth nothing: a candidate that computes something else than stock."""
    loss_share = EXACT_SHARE if exact else LOSS_SHARE
    gradient_share = EXACT_SHARE if exact else ROUTED_SHARE if experts else GRADIENT_SHARE
    expected = runs["stock"]["loss"]
    faults = []
    for name, run in runs.items():
        if not abs(run["loss"] - expected) <= loss_share * abs(expected):
            faults.append(f"{name}: loss {run['loss']}, of stock {expected}")
        if not abs(run.get("graph_loss", expected) - expected) <= loss_share * abs(expected):
            faults.append(f"{name}: loss {run['graph_loss']} from a CUDA graph, of stock {expected}")
        if not run["gradients_apart"] <= gradient_share:
            faults.append(f"{name}: gradients are {run['gradients_apart']:.2g} of stock's apart from them")
    return faults


def package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def measure_all(
    asked: Iterable[tuple[str, Settings]], record: dict[str, Any], deadline: float
) -> Iterator[None]:
    """Adds each model to the record, unless the one before it says that there is no time for it."""
    from flux import machine

    # Megatron requires one connection for its own overlap in the backward pass.
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    env = {**machine.NO_MULTICAST, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    longest = 0.0
    for name, settings in asked:
        start = time.monotonic()
        if start + longest > deadline:
            record["faults"].append(f"{name}: no time left")
            continue
        backend = "gloo" if settings.cpu else "nccl"
        try:
            found = spawn(
                measure, settings.tp, settings, backend=backend, env=env, timeout_s=deadline - start
            )[0]
        except SpawnError as error:
            record["faults"].append(f"{name}: {str(error).strip()[-2000:]}")
            continue
        longest = max(longest, time.monotonic() - start)
        model = {"name": name, "ep": settings.ep, "shape": dataclasses.asdict(settings.model), **found}
        record["models"].append(model)
        faults = faults_of(found["candidates"], settings.model.experts > 0, settings.cpu)
        record["faults"] += [f"{name}: {fault}" for fault in faults]
        yield


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=DEFAULT,
        metavar="NAME[:EP]",
        help=f"shapes ({', '.join(MODELS)}), and slices of their experts (default {' '.join(DEFAULT)})",
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--layers", type=int, help="default 4; with --cpu 2")
    parser.add_argument("--sequence", type=int, help="tokens of the sequence (default 4096; with --cpu 32)")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate (default 7)")
    parser.add_argument("--iters", type=int, default=3, help="steps of a sample (default 3)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for all of it (default 300)")
    parser.add_argument(
        "--candidates", nargs="+", default=[], metavar="NAME", help="beside stock (default all)"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="replay a training step from a CUDA graph, too (GPUs)"
    )
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--cpu", action="store_true", help="tiny models in fp32, in processes")
    options = parser.parse_args(arguments)
    if options.cpu and options.graphs:
        parser.error("--graphs: needs GPUs")
    for asked in options.models:
        name, _, ep = asked.partition(":")
        if name not in MODELS:
            parser.error(f"--models: expected one of {', '.join(MODELS)}, got {name!r}")
        if ep and not (MODELS[name].experts and ep.isdecimal() and int(ep) and options.tp % int(ep) == 0):
            parser.error(f"--models: expected experts and a divisor of --tp, got {asked!r}")
    return options


def settings_of(options: argparse.Namespace, asked: str) -> Settings:
    name, _, ep = asked.partition(":")
    model = MODELS[name].tiny() if options.cpu else MODELS[name]
    changes = {"layers": options.layers, "sequence": options.sequence}
    model = dataclasses.replace(model, **{key: value for key, value in changes.items() if value})
    limits = (options.rounds, options.iters, tuple(options.candidates), options.graphs)
    return Settings(model, options.tp, int(ep or 1), options.cpu, *limits)


def main(arguments: list[str] | None = None) -> int:
    from flux._files import write_json
    from flux.bench.record import head, take_clocks

    start = time.monotonic()
    options = options_of(arguments)
    record: dict[str, Any] = head("megatron_model", "cpu" if options.cpu else "cuda")
    record["machine"] |= {name: package(name) for name in ("megatron-core", "transformer-engine")}
    record["settings"] = {"tp": options.tp, "rounds": options.rounds, "iters": options.iters}
    record |= {"models": [], "faults": []}
    if not options.cpu:
        record["faults"] += take_clocks(record, "gpus_load")
    if not record["faults"]:
        asked = [(name, settings_of(options, name)) for name in options.models]
        for _ in measure_all(asked, record, start + options.timeout):
            if options.json:
                write_json(record, options.json)
        if not options.cpu:
            record["faults"] += take_clocks(record, "gpus_after")
    if options.json:
        write_json(record, options.json)
    print(*told(record), sep="\n")
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
