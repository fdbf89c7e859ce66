"""Generates with vLLM under tensor parallelism. Nothing in it mentions flux: the plugin is on where flux is
installed.

    python examples/vllm_serve.py MODEL [--ranks 2] [--prompts 64] [--prompt-tokens 512] [--tokens 32]
    FLUX_VLLM=off python examples/vllm_serve.py MODEL

Prints tokens per second and a fingerprint of what was said; the two runs can be compared. In bf16 rounding
differs between them, and a close race between two tokens may end differently.
"""

from __future__ import annotations

import argparse
import hashlib
import time

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, for timing")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    llm = LLM(
        model=options.model,
        tensor_parallel_size=options.ranks,
        max_model_len=options.prompt_tokens + options.tokens,
        load_format=options.load_format,
        dtype=options.dtype,
        enforce_eager=options.eager,
        skip_tokenizer_init=True,
    )
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 500 + 1 for j in range(options.prompt_tokens)]}
        for i in range(options.prompts)
    ]
    sampling = SamplingParams(
        max_tokens=options.tokens, min_tokens=options.tokens, temperature=0, detokenize=False
    )
    llm.generate(prompts[:1], sampling)
    start = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    said = str([list(answer.outputs[0].token_ids) for answer in answers])
    count = options.prompts * (options.prompt_tokens + options.tokens)
    print(f"{count / seconds:.0f} tokens/s, said {hashlib.sha256(said.encode()).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
