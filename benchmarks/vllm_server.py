"""vLLM's API server for vllm_throughput.py (--api-server), and the client that sends it requests.

:func:`serve` is the other end of a vllm_engine.Engine. It starts `vllm serve` as a process beside its own,
which is the client: vLLM's own benchmark (`vllm bench serve`), with the requests of vllm_trace.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import vllm_engine
import vllm_trace

HOST = "127.0.0.1"
# The benchmark has a deadline for all engines; this only ends a process that nobody waits for any more.
START_S = 1800
POLL_S = 0.2
STOP_S = 10
REPLY_S = 60
# With -c there is no main module that processes spawned by vLLM would import once more.
RUN = "import sys, vllm_server; vllm_server.run(sys.argv[1:])"


def command_line(arguments: dict[str, Any], port: int) -> list[str]:
    given = dict(arguments)
    options = ["serve", given.pop("model"), "--host", HOST, "--port", str(port)]
    given.pop("skip_tokenizer_init")
    if not given.pop("enable_prefix_caching"):
        options.append("--no-enable-prefix-caching")
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [option] * value
        else:
            options += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*options, "--worker-extension-cls", "vllm_probe.Probe", "--disable-uvicorn-access-log"]


def serve(fd: int) -> None:
    vllm_engine.obey(fd, _server)


@contextlib.contextmanager
def _server(arguments: dict[str, Any]) -> Iterator[Client]:
    # All requests of a trace may be under way at once, each with a connection.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", RUN, *command_line(arguments, port)])
    try:
        client = Client(f"http://{HOST}:{port}", Path(arguments["model"]))
        client.wait_until_ready(server)
        yield client
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)


def run(options: list[str]) -> None:
    """`vllm serve` with these options.

    vLLM's main function asks for a package named vllm, and builds for CPUs have another name.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(options)
    command.validate(arguments)
    command.cmd(arguments)


class Client:
    """What the benchmark asks of an API server."""

    def __init__(self, url: str, model: Path) -> None:
        self.url = url
        self.model = model

    def wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        """Raises RuntimeError if the server ends, or does not answer for START_S."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {server.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=REPLY_S):
                return
            time.sleep(POLL_S)
        raise RuntimeError(f"vllm serve was not up after {START_S} s")

    def state(self) -> list[dict[str, Any]]:
        body = json.dumps({"method": "probe_state"}).encode()
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/collective_rpc", body, kind)
        with urllib.request.urlopen(asked, timeout=REPLY_S) as reply:
            states: list[dict[str, Any]] = json.load(reply)["results"]
        return states

    def trace(self, count: int, longest: int, per_s: float) -> dict[str, Any]:
        """Of the first requests of vllm_trace.py, which arrive `per_s` a second, 0: all at once: seconds,
        tokens of answers a second, seconds to first and to further tokens. Raises RuntimeError if a request
        was not answered in full.
        """
        wanted = vllm_trace.requests(count, longest)
        path = self.model.parent / "trace.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in timed(wanted, per_s)))
        found = run_client(
            [
                *("--backend", "openai", "--base-url", self.url, "--model", str(self.model)),
                *("--dataset-name", "timed_trace", "--dataset-path", str(path)),
                # One seed for each prompt makes all of it.
                *("--timed-trace-chunk-hash-size", str(longest), "--num-prompts", str(count)),
                *("--temperature", "0", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"),
                *("--ready-check-timeout-sec", "0", "--disable-tqdm"),
            ]
        )
        got, asked = found["total_output_tokens"], sum(each.answer for each in wanted)
        if found["completed"] < count or got != asked:
            raise RuntimeError(f"{found['completed']} of {count} answers, {got} of {asked} tokens")
        return summary(found)


def timed(wanted: Sequence[vllm_trace.Request], per_s: float) -> list[dict[str, Any]]:
    """Requests as lines of a "timed_trace" of vLLM's benchmark. A prompt is random tokens of its own seed."""
    return [
        {
            "timestamp": each.arrives / per_s if per_s else 0.0,
            "input_length": each.prompt,
            "output_length": each.answer,
            "hash_ids": [number],
        }
        for number, each in enumerate(wanted)
    ]


def run_client(options: list[str]) -> dict[str, Any]:
    """What `vllm bench serve` with these options would write into its file."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    found: dict[str, Any] = asyncio.run(main_async(parser.parse_args(options)))
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    def seconds(name: str) -> dict[str, float]:
        return {part: float(found[f"{part}_{name}_ms"]) / 1e3 for part in ("median", "p99")}

    return {
        "seconds": found["duration"],
        "tokens_per_s": found["output_throughput"],
        "first_s": seconds("ttft"),
        "further_s": seconds("tpot"),
    }
