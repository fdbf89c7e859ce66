"""Generates with a model in this process and its workers, and writes down what was said and what flux did.

    python vllm_generate.py MODEL eager|traced|ranges|sums|sequence RESULT.json

eager: no compiler. traced: compiled as vLLM does it on CPUs. ranges: compiled as it does it on GPUs, for
ranges of token counts and with its passes. sums: as ranges, but all layers stay vLLM's. sequence: as ranges.
Whether flux takes part is up to FLUX_VLLM, and how to FLUX_VLLM_SEQUENCE. Started by test_with_vllm.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm_workers

RANKS = 2
NEW_TOKENS = 12
PROMPT_TOKENS = (5, 40, 200)

# At import: processes that vLLM spawns import this file too, and each must compile alike.
if {"ranges", "sums", "sequence"} & set(sys.argv):
    vllm_workers.compile_as_on_gpus()
if "sums" in sys.argv:
    vllm_workers.leave_layers_to_vllm()


def arguments(model: str, mode: str) -> dict[str, Any]:
    """Of vllm.LLM."""
    compilation = {"mode": 3, "cudagraph_mode": "NONE", "compile_sizes": []}
    return {
        "model": model,
        "tensor_parallel_size": RANKS,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "worker_extension_cls": "vllm_workers.FluxCalls",
        **({"enforce_eager": True} if mode == "eager" else {"compilation_config": compilation}),
    }


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Token ids without those at the ends of the vocabulary, which may be special."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"prompt_token_ids": torch.randint(3, vocabulary - 12, (n,), generator=generator).tolist()}
        for n in PROMPT_TOKENS
    ]


def main(model: str, mode: str, result: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments(model, mode))
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, logprobs=3, ignore_eos=True, detokenize=False
    )
    # What came before was vLLM measuring its memory.
    llm.collective_rpc("forget_flux_calls")
    answers = llm.generate(prompts(llm.model_config.get_vocab_size()), sampling)
    said = [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                {token: entry.logprob for token, entry in step.items()} for step in answer.outputs[0].logprobs
            ],
        }
        for answer in answers
    ]
    Path(result).write_text(json.dumps({"said": said, "ranks": llm.collective_rpc("flux_calls")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
