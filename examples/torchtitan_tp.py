"""Trains torchtitan's small Llama with tensor parallelism, on torchtitan's layers and on flux's operators.

    python examples/torchtitan_tp.py [--ranks 2] [--steps 20] [--compile] [--plot FILE.svg]

Needs torchtitan 0.3 and triton. The stock run takes torchtitan's default, collectives beside GEMMs; the other
one `tp_gemm_backend="dist_gemm"` with flux behind it, or with --compile compiled blocks with async tensor
parallelism. Runs in CPU processes in fp32, with torch's attention, because torchtitan's needs a GPU, without
FSDP. Prints the losses, which must agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch import nn

from flux.integrations import async_tp
from flux.testing import spawn

LAYERS, BATCH, SEQUENCE = 2, 4, 64
Tensor = torch.Tensor


class Attention(nn.Module):
    """Causal attention of [batch, sequence, heads, size]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


class Trainee:
    """This rank's part of the model, and its steps."""

    def __init__(self, rank: int, ranks: int, on_flux: bool, compiled: bool = False) -> None:
        from torchtitan.config import CompileConfig
        from torchtitan.distributed import ParallelDims, utils
        from torchtitan.distributed.compile import apply_compile
        from torchtitan.models.llama3 import model_registry
        from torchtitan.models.llama3.config_registry import llama3_debugmodel

        config = llama3_debugmodel()
        config.model_spec = model_registry(
            "debugmodel", tp_gemm_backend="dist_gemm" if on_flux and not compiled else "default"
        )
        config.parallelism.tensor_parallel_degree = ranks
        config.parallelism.spmd_backend = "spmd_types"
        config.training.seq_len = SEQUENCE
        utils.set_spmd_backend("spmd_types")
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=1,
            cp=1,
            tp=ranks,
            pp=1,
            ep=1,
            world_size=ranks,
            spmd_backend="spmd_types",
        )
        made: Any = config.model_spec.model
        made.layers = made.layers[:LAYERS]
        made.update_from_config(config=config)
        with torch.device("meta"):
            self.model = made.build()
        for layer in self.model.layers.values():
            layer.attention.inner_attention = Attention()
        self.model.parallelize(dims)
        self.model.to_empty(device="cpu")
        for module in self.model.modules():
            if hasattr(module, "_init_self_buffers"):
                module._init_self_buffers(buffer_device=torch.device("cpu"))
        g = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.fill_(1.0) if "norm" in name else p.copy_(torch.randn(p.shape, generator=g) * 0.05)
        if compiled:
            options = CompileConfig(enable=True, enable_async_tensor_parallel=on_flux)
            apply_compile(self.model, compile_config=options, parallel_dims=dims)
        self.vocabulary = made.vocab_size
        self.context = utils.get_spmd_context(parallel_dims=dims)
        # Not Adam, which makes steps of the signs of gradients that are roundings.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        g = torch.Generator().manual_seed(7)
        self.batches = torch.randint(self.vocabulary, (4, BATCH, SEQUENCE + 1), generator=g)

    def step(self, number: int) -> dict[str, Tensor]:
        """The loss, and this rank's gradients."""
        from torchtitan.components.loss import cross_entropy_loss

        tokens = self.batches[number % len(self.batches)]
        self.optimizer.zero_grad()
        with on_cpu(), self.context():
            logits = self.model(tokens[:, :-1])
            labels = tokens[:, 1:].contiguous()
            loss = cross_entropy_loss(logits, labels, global_vocab_size=self.vocabulary) / labels.numel()
            loss.backward()
        found = {"loss": loss.detach()}
        for name, p in self.model.named_parameters():
            if "norm" in name:  # each rank has its part of the sequence; FSDP would sum these
                dist.all_reduce(p.grad)
            found[name] = p.grad.clone()
        self.optimizer.step()
        return found


@contextmanager
def on_cpu() -> Iterator[None]:
    """torchtitan's modules ask for products in fp32 of bf16, which torch has on GPUs only, and the compiler's
    pass for NCCL and symmetric memory, which flux does not need.
    """
    mm = torch.mm
    symmetric_memory: Any = torch.distributed._symmetric_memory

    def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    with (
        mock.patch.object(torch, "mm", product),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
    ):
        yield


def train(rank: int, ranks: int, steps: int, on_flux: bool, compiled: bool) -> list[float]:
    """The loss of each step."""
    if on_flux:
        async_tp.install()
    trainee = Trainee(rank, ranks, on_flux, compiled and on_flux)
    return [float(trainee.step(number)["loss"]) for number in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="flux behind async tensor parallelism")
    parser.add_argument("--plot", help="file for a picture of both losses")
    options = parser.parse_args()
    curves = {}
    for name, on_flux in (("torchtitan", False), ("flux", True)):
        how = (options.steps, on_flux, options.compile)
        results = spawn(train, options.ranks, *how, backend="gloo", timeout_s=900)
        curves[name] = results[0]
        print(f"{name:10}  loss {curves[name][0]:.5f} -> {curves[name][-1]:.5f}")
    pairs = zip(*curves.values(), strict=True)
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in pairs):.1e}")
    if options.plot:
        from dtensor_tp import plot

        plot(curves, options.plot)


if __name__ == "__main__":
    main()
