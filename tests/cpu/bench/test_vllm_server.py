"""How benchmarks/vllm_throughput.py measures vLLM's API server (vllm_server.py). Needs no vLLM."""

from __future__ import annotations

import importlib
import time
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
        # vLLM's client draws a prompt by Python's hash of a string, which else differs between processes.
        assert settings.environment("stock-eager")["PYTHONHASHSEED"] == "0"
        assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(state["argv"])
        assert become(STOPPED, engine.process.pid, state["pid"])
    finally:
        benchmark.stop({"stock-eager": engine})
    assert become(ENDED, engine.process.pid, state["pid"])


def test_as_many_tokens_come_out_of_a_prompt_as_went_in(benchmark: Any, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, which vLLM brings")
    importlib.import_module("vllm_models").write_tokenizer(tmp_path, 3000)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = list(range(3000))
    assert tokenizer.encode(tokenizer.decode(tokens)).ids == tokens


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
