"""How benchmarks/vllm_throughput.py measures vLLM's API server (vllm_server.py). Needs no vLLM."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import script
from leftovers import ENDED, STOPPED, become

FOUND = {
    "completed": 3,
    "total_output_tokens": 0,
    "duration": 2.0,
    "output_throughput": 30.0,
    **{"median_ttft_ms": 20.0, "p99_ttft_ms": 50.0, "median_tpot_ms": 4.0, "p99_tpot_ms": 8.0},
}
# What `vllm serve` is made of here: a server that says how it was started.
SERVE = """
import http.server, json, os, sys

class ServeSubcommand:
    def subparser_init(self, parsers):
        self.parser = parsers.add_parser("serve")
        self.parser.add_argument("model")
        self.parser.add_argument("--port", type=int)

    def validate(self, arguments): ...

    def cmd(self, arguments):
        if "ENDS" in os.environ:
            sys.exit("it cannot serve")
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({})
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply({"results": [{"pid": os.getpid(), **asked, "argv": sys.argv}]})
            def reply(self, what):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(what).encode())
        http.server.HTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
"""
PARSER = """
import argparse

class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, options):
        return self.parse_known_args(options)[0]
"""


benchmark = script("vllm_throughput")


@pytest.fixture
def server(benchmark: Any) -> Any:
    return importlib.import_module("vllm_server")


@pytest.fixture
def settings(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in {"entrypoints/cli/serve.py": SERVE, "utils/argparse_utils.py": PARSER}.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = benchmark.TWINS["llama-3-8b"]
    return benchmark.Settings(model, 2, 1, 0.1, 60, True, tmp_path, True, api_server=True)


def test_a_server_runs_while_it_is_asked_and_ends_with_the_benchmark(benchmark: Any, settings: Any) -> None:
    settings.write_model()
    engine = benchmark.Engine("stock-eager", settings)
    try:
        engine.come_up(time.monotonic() + 60)
        (state,) = engine.ask(time.monotonic() + 60, "state")
        assert state["method"] == "probe_state"
        assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(state["argv"])
        assert become(STOPPED, engine.process.pid, state["pid"])
    finally:
        benchmark.stop({"stock-eager": engine})
    assert become(ENDED, engine.process.pid, state["pid"])


def test_a_server_that_cannot_start_says_why(
    benchmark: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDS", "1")
    engine = benchmark.Engine("stock-eager", settings)
    measured = benchmark.Measurement({"stock-eager": engine}, benchmark.TINY_WORK, settings.model, 0.0)
    measured.wait_until_ready(time.monotonic() + 60)
    assert measured.faults == ["stock-eager: its process ended"]
    assert "it cannot serve" in engine.log_end() and "vllm serve ended with 1" in engine.log_end()


def test_options_are_those_of_the_engine(server: Any, settings: Any) -> None:
    on_gpu = replace(settings, cpu=False)
    options = server.command_line(on_gpu.arguments("flux-graph"), 8000)
    assert options[:2] == ["serve", str(settings.folder / "model")]
    assert options[options.index("--tensor-parallel-size") + 1] == "2"
    # vLLM captures graphs of the batches that it captures for users.
    assert options[options.index("--compilation-config") + 1] == "{}"
    assert "--enforce-eager" not in options and "--skip-tokenizer-init" not in options
    assert on_gpu.environment("flux-graph")["VLLM_SERVER_DEV_MODE"] == "1"
    # vLLM's client draws a prompt by Python's hash of a string, which else differs between processes.
    assert on_gpu.environment("flux-graph")["PYTHONHASHSEED"] == "0"
    assert "VLLM_SERVER_DEV_MODE" not in replace(on_gpu, api_server=False).environment("flux-graph")


def test_as_many_tokens_come_out_of_a_prompt_as_went_in(benchmark: Any, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, which vLLM brings")
    importlib.import_module("vllm_models").write_tokenizer(tmp_path, 3000)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = list(range(3000))
    assert tokenizer.encode(tokenizer.decode(tokens)).ids == tokens


def test_requests_arrive_as_those_of_the_engine(server: Any) -> None:
    request = importlib.import_module("vllm_trace").Request
    lines = server.timed([request(7, 2, 0.0), request(3, 5, 3.0)], 2.0)
    assert lines == [
        {"timestamp": 0.0, "input_length": 7, "output_length": 2, "hash_ids": [0]},
        {"timestamp": 1.5, "input_length": 3, "output_length": 5, "hash_ids": [1]},
    ]
    assert [line["timestamp"] for line in server.timed([request(3, 5, 3.0)], 0)] == [0.0]


def test_answers_that_are_missing_are_no_sample(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.Client("a URL", tmp_path / "model")
    wanted = importlib.import_module("vllm_trace").requests(3, 512)
    tokens = sum(each.answer for each in wanted)
    for lacks in ({}, {"completed": 2}, {"total_output_tokens": tokens - 1}):
        found = {**FOUND, "total_output_tokens": tokens, **lacks}
        monkeypatch.setattr(server, "run_client", lambda options, found=found: found)
        if lacks:
            with pytest.raises(RuntimeError, match="of 3 answers"):
                client.trace(3, 512, 2.0)
            continue
        assert client.trace(3, 512, 2.0) == {
            "seconds": 2.0,
            "tokens_per_s": 30.0,
            "first_s": {"median": 0.02, "p99": 0.05},
            "further_s": {"median": 0.004, "p99": 0.008},
        }


def test_only_the_trace_goes_through_a_server(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(benchmark.TINY_WORK, api_server=True, arrivals=(0.0, 4.0), trace_rounds=2)
    measured = benchmark.Measurement({"stock-eager": None}, work, benchmark.TWINS["llama-3-8b"], float("inf"))
    asked = []

    def each(command: str, *arguments: Any, rotate: int = 0) -> dict[str, Any]:
        asked.append((command, *arguments[2:3]))
        return {"stock-eager": {"seconds": 2.0} if command == "trace" else []}

    monkeypatch.setattr(measured, "each", each)
    measured.take_all(2, lambda: None)
    trace = [("trace", 0.0), ("trace", 4.0)]
    assert asked == [("state",), trace[0], *trace, *trace, ("state",)]
    run = measured.runs["stock-eager"]
    assert run["samples_s"] == {"trace": [2.0, 2.0]} and len(run["traces"]["4 per s"]) == 2


@pytest.mark.parametrize("options", [["--decode", "1"], ["--prompts", "256"]])
def test_what_a_server_is_not_asked(benchmark: Any, options: list[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.options_of(["--api-server", *options])
    assert benchmark.options_of(["--api-server", "--arrivals", "20"]).api_server
    with pytest.raises(SystemExit):
        benchmark.options_of(["--arrivals", "20"])
