"""Trains a small GPT of Megatron-Core twice, on Megatron's own layers and on flux's, and plots both losses.

    python examples/megatron_gpt.py [--ranks 2] [--steps 200] [--plot megatron_gpt.svg] [--json FILE]

Uses one GPU per rank in bf16 if there are as many, else CPU processes in fp32. Needs megatron-core and
matplotlib. The only line that puts the model on flux is the one with `convert_spec`. The text is generated:
sums, written in words.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import time
from typing import Any

import torch

from flux.testing import spawn

SEQUENCE, BATCH, VOCABULARY = 128, 8, 128
WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


def device_of(ranks: int) -> str:
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ASCII codes [BATCH, SEQUENCE] of sums such as "three plus four is seven.", and those one further."""
    rng, words = random.Random(step), WORDS.split()
    rows = []
    for _ in range(BATCH):
        text = ""
        while len(text) <= SEQUENCE:
            a, b = rng.randrange(8), rng.randrange(8)
            text += f"{words[a]} plus {words[b]} is {words[a + b]}. "
        rows.append(list(text.encode()[: SEQUENCE + 1]))
    codes = torch.tensor(rows, device=device)
    return codes[:, :-1], codes[:, 1:]


def initialise(ranks: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if device_of(ranks) == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        # Megatron asks for the CUDA device and its random numbers even on a machine that has none.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


def build(ranks: int, on_flux: bool) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flux.integrations.megatron import FluxNorm, convert_spec

    on_gpu = device_of(ranks) == "cuda"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        sequence_parallel=True,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        bf16=on_gpu,
        masked_softmax_fusion=False,  # a kernel of Apex
    )
    layer = get_gpt_layer_local_spec()
    # Stock Megatron has no norm for sequence parallelism without Apex or Transformer Engine.
    parts = dataclasses.replace(layer.submodules, input_layernorm=FluxNorm, pre_mlp_layernorm=FluxNorm)
    layer = dataclasses.replace(layer, submodules=parts)
    spec = TransformerBlockSubmodules([layer] * config.num_layers, FluxNorm)
    if on_flux:
        spec = convert_spec(spec)
    torch.manual_seed(1)
    return GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")


def train(model: torch.nn.Module, steps: int, device: str) -> list[float]:
    """Losses of all steps."""
    from flux.layers import reduce_replicated_grads

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    losses = []
    for step in range(steps):
        tokens, labels = batch(step, device)
        loss = model(tokens, positions, mask, labels=labels).float().mean()
        optimizer.zero_grad()
        loss.backward()
        reduce_replicated_grads(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(rank: int, ranks: int, steps: int) -> dict[str, list[float]]:
    initialise(ranks)
    curves = {}
    for name in ("stock Megatron", "Megatron on flux"):
        start = time.perf_counter()
        curves[name] = train(build(ranks, name.endswith("flux")), steps, device_of(ranks))
        if rank == 0:
            seconds = time.perf_counter() - start
            print(
                f"{name}: loss {curves[name][0]:.4f} -> {curves[name][-1]:.4f} in {seconds:.0f} s", flush=True
            )
    return curves


def plot(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles: list[dict[str, Any]] = [{"linewidth": 5, "alpha": 0.35}, {"linewidth": 1.2}]
    for (name, losses), style in zip(curves.items(), styles, strict=True):
        axes.plot(losses, label=name, **style)
    axes.set(xlabel="step", ylabel="loss (nats per character)", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", default="megatron_gpt.svg")
    parser.add_argument("--json", help="file for the losses of all steps")
    options = parser.parse_args()
    # Megatron overlaps communication by it, and asks for it under sequence parallelism.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    curves = spawn(run, options.ranks, options.steps, env=env, timeout_s=3600)[0]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(curves, file)
    stock, ours = curves.values()
    print(
        f"largest difference of the losses: {max(abs(a - b) for a, b in zip(stock, ours, strict=True)):.2e}"
    )
    plot(curves, options.plot)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
