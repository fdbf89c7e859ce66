"""Generates with a Llama under transformers' tensor parallelism, without flux and with it.

    python examples/transformers_tp.py [--ranks 2] [--model FOLDER] [--tokens 32]

Without --model a small one with random weights is made. Uses one GPU per rank in bf16 if there are as many,
else CPU processes in fp32. The only line that puts the model on flux is the one with `install`. Needs
transformers and accelerate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
import transformers
from transformers.distributed import DistributedConfig

from flux.testing import spawn

PROMPT_TOKENS = 64


def make_model(folder: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def generate(rank: int, ranks: int, folder: str, tokens: int, on_flux: bool) -> tuple[list[int], float]:
    """What the model says, and the tokens per second of the second of two runs."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if on_flux:
        from flux.integrations import transformers as flux_transformers

        flux_transformers.install()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    ids = torch.arange(1, PROMPT_TOKENS + 1, device=model.device)[None]
    for _ in range(2):
        start = time.perf_counter()
        answer = model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
        seconds = time.perf_counter() - start
    return answer[0, PROMPT_TOKENS:].tolist(), tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make_model(folder)
        for on_flux in (False, True):
            model = options.model or folder
            results = spawn(generate, options.ranks, model, options.tokens, on_flux, timeout_s=600)
            said, rate = results[0]
            name = "with flux   " if on_flux else "without flux"
            print(f"{name}  {rate:.1f} tokens/s  {said[:12]} ...")


if __name__ == "__main__":
    main()
