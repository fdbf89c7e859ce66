"""Runs vLLM's engines for the tests, one after the other.

    python vllm_engines.py        reads jobs from stdin, a line of JSON each; answers each with an exit status

This process imports vLLM once. Each engine is a fork of it, and so are the engine's workers: importing vLLM
in each of them takes three times as long as what is tested. test_serving.py starts vLLM as users do.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 6
LISTED = 3  # log-probabilities, of the most probable tokens
# What an engine and its workers import when they are built.
_PRELOADED = (
    "flux.integrations.vllm",
    "torch._inductor.compile_fx",
    "transformers",
    "vllm.compilation.backends",
    "vllm.compilation.passes.pass_manager",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen2_moe",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def main() -> None:
    # vLLM may log to stdout, where answers are to be.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in _PRELOADED:
        importlib.import_module(module)
    _fork_everything()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_and_exit(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _fork_everything() -> None:
    """Makes vLLM fork its workers, and look at models in this process."""
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_fork(cls: type, config: Any) -> None:
        update(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(update_and_fork)
    registry._run_in_subprocess = lambda function: function()


def _run_and_exit(job: dict[str, Any]) -> None:
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job["environment"])
        said = _generate(job)
        Path(job["result"]).write_text(json.dumps(said))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _generate(job: dict[str, Any]) -> list[dict[str, Any]]:
    """For each batch of prompts, what the model says and what flux did meanwhile."""
    import vllm_workers
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    for name in job["changes"]:
        getattr(vllm_workers, name)()
    llm = LLM(**job["engine"], worker_extension_cls="vllm_workers.FluxCalls")
    # With adapters, vLLM for CPUs fails if it is asked for those of prompts.
    of_prompt = None if job["adapter"] else LISTED
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=LISTED,
        prompt_logprobs=of_prompt,
        ignore_eos=True,
        detokenize=False,
    )
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    found = []
    for lengths in job["batches"]:
        llm.collective_rpc("forget_flux_calls")
        prompts = _prompts(lengths, llm.model_config.get_vocab_size())
        answers = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        said = [
            {
                "tokens": list(answer.outputs[0].token_ids),
                # Of the first token of a prompt there is none.
                "of prompt": [_numbers(step) for step in (answer.prompt_logprobs or [])[1:]],
                "logprobs": [_numbers(step) for step in answer.outputs[0].logprobs],
            }
            for answer in answers
        ]
        found.append({"said": said, "ranks": llm.collective_rpc("flux_calls")})
    return found


def _numbers(step: dict[int, Any]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in step.items()}


def _prompts(lengths: list[int], vocabulary: int) -> list[dict[str, list[int]]]:
    """Token ids without those at the ends of the vocabulary, which may be special."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [
        {"prompt_token_ids": torch.randint(3, vocabulary - 12, (n,), generator=generator).tolist()}
        for n in lengths
    ]


if __name__ == "__main__":
    main()
