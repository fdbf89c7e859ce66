"""How benchmarks/vllm_throughput.py runs its engines, and when; how it measures vLLM's API server
(vllm_server.py), with fixed requests (vllm_trace.py). What vllm_compare.py concludes. Needs no vLLM.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_rows import script
from leftovers import ENDED, STOPPED, become

benchmark = script("vllm_throughput")


# Of runs of models: FLUX_VLLM, _MOE, _MIN_TOKENS, _SEQUENCE.
SETTINGS = {
    ("stock-graph", "llama-3-8b"): ["off", "off", "auto", None],
    ("stock-eager", "qwen3-30b-a3b"): ["off", "off", "auto", None],
    ("flux-eager", "llama-3-8b"): ["auto", "off", "auto", None],
    ("flux-graph", "qwen3-30b-a3b"): ["auto", "auto", "auto", None],
    ("flux-from256-unfused-graph", "llama-3-8b"): ["auto", "off", "256", None],
    ("flux-seq1024-graph", "llama-3-8b"): ["auto", "off", "auto", "1024"],
    ("flux-from8-seq1024-graph", "llama-3-8b"): ["auto", "off", "8", "1024"],
}


def test_settings_are_those_of_the_run(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_VLLM_MOE", "auto")  # that of the shell counts for nothing
    monkeypatch.delenv("FLUX_VLLM_SEQUENCE", raising=False)
    for (run, model), expected in SETTINGS.items():
        settings = benchmark.Settings(benchmark.MODELS[model], 2, None, 0.1, 60, False, tmp_path, True)
        environment = settings.environment(run)
        names = ("", "_MOE", "_MIN_TOKENS", "_SEQUENCE")
        assert [environment.get(f"FLUX_VLLM{name}") for name in names] == expected
        assert "VLLM_ALLREDUCE_USE_FLASHINFER" not in environment
        assert benchmark.options_of(["--runs", run]).runs == [run]
    for wrong in ("stock-from256-graph", "flux-from-graph"):
        with pytest.raises(SystemExit):
            benchmark.options_of(["--runs", wrong])
    environment = replace(settings, min_tokens=1, defaults=False).environment("flux-graph")
    assert environment["FLUX_VLLM_MIN_TOKENS"] == "1"
    assert environment["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"


def test_an_engine_that_does_not_come_up_says_why(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = benchmark.Settings(benchmark.TWINS["llama-3-8b"], 2, 1, 0.1, 60, True, tmp_path)
    engine = benchmark.Engine("stock-eager", settings)
    try:
        with pytest.raises(benchmark.Gone, match="process ended"):
            engine.receive(time.monotonic() + 60)
        assert "RuntimeError: none here" in engine.log_end()
    finally:
        benchmark.stop({"stock-eager": engine})
    assert engine.process.returncode not in (None, 0)


# A vLLM with a child, which ends with it. It says how it finds both of them in /proc.
_VLLM = """
import subprocess
from pathlib import Path

def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

class LLM:
    def __init__(self, **arguments):
        self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def collective_rpc(self, name):
        return {pid: state(pid) for pid in ("self", self.child.pid)}
"""


# Its server, which says how it was started.
_SERVE = """
import http.server, json, os, sys
from types import SimpleNamespace

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"results": [{"pid": os.getpid(), "argv": sys.argv, **asked}]}).encode())
    do_POST = do_GET

def ServeSubcommand():
    port = int(sys.argv[sys.argv.index("--port") + 1])
    serve = lambda _: http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return SimpleNamespace(subparser_init=lambda _: None, validate=lambda _: None, cmd=serve)
"""
_FILES = {
    "__init__.py": _VLLM,
    "config/compilation.py": "import dataclasses\n\n@dataclasses.dataclass\nclass PassConfig: ...\n",
    "entrypoints/cli/serve.py": _SERVE,
    "utils/argparse_utils.py": "from unittest.mock import Mock as FlexibleArgumentParser",
}


@pytest.fixture
def settings(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an engine whose vLLM are _FILES."""
    for name, text in _FILES.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return benchmark.Settings(benchmark.TWINS["llama-3-8b"], 2, 1, 0.1, 450, True, tmp_path)


def test_engines_run_only_while_they_are_asked(benchmark: Any, settings: Any) -> None:
    """They poll: with six of them on 32 cores, samples of one engine were up to 80 % apart. No deadline of
    vLLM ends meanwhile.
    """
    environment = settings.environment("stock-graph")
    assert environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "450"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    engine = benchmark.Engine("stock-graph", settings)
    try:
        measured = benchmark.Measurement({"stock-graph": engine}, benchmark.TINY_WORK, settings.model, 0.0)
        measured.wait_until_ready(time.monotonic() + 60)
        assert measured.faults == []
        assert become(STOPPED, engine.process.pid)
        for _ in range(2):
            states = engine.ask(time.monotonic() + 60, "state")
            child = max(pid for pid in states if pid != "self")
            assert "T" not in states.values(), "while it was asked"
            assert become(STOPPED, engine.process.pid, child)
    finally:
        benchmark.stop({"stock-graph": engine})
    assert engine.process.returncode == 0, "it ended by itself"
    assert become(ENDED, child)


def test_a_server_runs_while_it_is_asked_and_ends_with_the_benchmark(benchmark: Any, settings: Any) -> None:
    settings = replace(settings, api_server=True)
    settings.write_model()
    engine = benchmark.Engine("stock-eager", settings)
    try:
        engine.come_up(time.monotonic() + 60)
        (state,) = engine.ask(time.monotonic() + 60, "state")
        assert state["method"] == "probe_state"
        # vLLM's client draws a prompt by Python's hash of a string, which else differs between processes.
        assert settings.environment("stock-eager")["PYTHONHASHSEED"] == "0"
        assert state["argv"][1:3] == ["serve", str(settings.folder / "model")]
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


def test_requests_are_always_the_same(benchmark: Any) -> None:
    wanted = benchmark.requests(2000, 2048)
    lengths = str([(each.prompt, each.answer) for each in wanted]).encode()
    assert hashlib.sha256(lengths).hexdigest()[:16] == "4e9253bebc5b665e"
    assert benchmark.requests(20, 2048) == wanted[:20]


@pytest.mark.parametrize("lacks", [None, "completed", "total_output_tokens"])
def test_answers_that_are_missing_are_no_sample(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str | None
) -> None:
    server = importlib.import_module("vllm_server")
    client = server.Client("a URL", tmp_path / "model")
    tokens = sum(each.answer for each in benchmark.requests(3, 512))
    found = {"completed": 3, "total_output_tokens": tokens, "duration": 2.0, "output_throughput": 30.0}
    found |= {"median_ttft_ms": 20.0, "p99_ttft_ms": 50.0, "median_tpot_ms": 4.0, "p99_tpot_ms": 8.0}
    monkeypatch.setattr(server, "run_client", lambda options: found)
    if lacks is not None:
        found[lacks] -= 1
        with pytest.raises(RuntimeError, match="of 3 answers"):
            client.trace(3, 512, 2.0)
        return
    first, further = {"median": 0.02, "p99": 0.05}, {"median": 0.004, "p99": 0.008}
    expected = {"seconds": 2.0, "tokens_per_s": 30.0, "first_s": first, "further_s": further}
    assert client.trace(3, 512, 2.0) == expected


@pytest.mark.parametrize(
    ("defaults", "given", "off"),
    [
        (False, {}, True),
        (True, {}, False),
        (True, {"NCCL_NVLS_ENABLE": "0"}, True),
        (True, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, True),
        (True, {"NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}, False),
    ],
)
def test_by_default_multicast_is_on_only_where_the_machine_allows_it(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, defaults: bool, given: dict[str, str], off: bool
) -> None:
    engine = importlib.import_module("vllm_engine")
    forbidden = {**engine.NO_MULTICAST, **importlib.import_module("flux.machine").NO_MULTICAST}
    monkeypatch.setattr(os, "environ", dict(given))
    assert engine.forbid_multicast(defaults) is off
    assert os.environ == ({**given, **forbidden} if off else given)
    assert os.environ.get("VLLM_FLASHINFER_ALLREDUCE_BACKEND") == ("trtllm" if off else None)


def test_an_engine_is_timed_when_it_is_steady(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was stopped is slow for its first 0.4 s; later one time in five is."""
    engine = importlib.import_module("vllm_engine")
    commands = engine.Commands(None)
    taken: list[float] = []

    def timed(prompts: Any, count: int) -> float:
        slow = sum(taken) < 0.4 or len(taken) % 5 == 0
        taken.append(0.08 if slow else 0.04)
        return taken[-1]

    monkeypatch.setattr(commands, "_timed", timed)
    assert commands.prefill([[1]]) == 0.04
    assert 1.0 <= sum(taken) < 1.2, "half a second that does not count, and half a second that does"
    taken.clear()
    monkeypatch.setattr(commands, "_timed", lambda prompts, count: taken.append(2.0) or 2.0)
    assert commands.prefill([[1]]) == 2.0 and len(taken) == 2
    taken.clear()
    assert commands.prompt([[1]]) == 2.0 and len(taken) == 1 + engine.PROMPT_TIMES
    taken.clear()
    monkeypatch.setattr(commands, "_timed", lambda prompts, count: taken.append(count) or 0.2 + 0.01 * count)
    assert commands.decode([[1]], 50) == pytest.approx(0.5)
    assert taken == [1] * 6 + [51] * 2


class _Clock:
    """An engine each of whose answers takes so many seconds of a clock that is made up."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.ready = 0.0, seconds, True
        self.asked: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def ask(self, deadline: float, command: str, *arguments: Any) -> Any:
        self.asked.append(command)
        self.arguments.append(arguments)
        self.now += self.seconds
        return self.seconds


def test_the_first_call_of_every_metric_is_no_sample(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There Triton compiles: samples of one engine had been up to 370 % apart."""

    class Compiling(_Clock):
        def ask(self, deadline: float, command: str, *arguments: Any) -> Any:
            asked = f"{command} of {[len(prompt) for prompt in arguments[0]] if arguments else []}"
            new = asked not in self.told
            self.told.add(asked)
            seconds = super().ask(deadline, command, *arguments)
            return 100.0 if new else seconds

        told: set[str] = set()

    engine = Compiling(1.0)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: engine.now)
    work = replace(benchmark.TINY_WORK, trace=0, singles=(8, 24))
    measured = benchmark.Measurement({"flux-graph": engine}, work, benchmark.TWINS["llama-3-8b"], 1e3)
    measured.take_all(2, lambda: None)
    samples = measured.runs["flux-graph"]["samples_s"]
    metrics = ("prefill", "prompt 8", "prompt 24", "decode 2", "decode 4")
    assert samples == {name: [1.0, 1.0] for name in metrics}
    measured.add_rates()
    assert measured.runs["flux-graph"]["tokens_per_s"]["prompt 24"] == 24.0
    single = engine.arguments[engine.asked.index("prompt")][0]
    assert [len(prompt) for prompt in single] == [8]


def test_a_gpu_with_a_low_clock_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at 85 °C and 390 MHz had slowed down all engines to a third."""
    from flux import machine
    from flux.bench.record import take_clocks

    names = ("index", "sm_mhz", "sm_max_mhz", "temperature_c")
    told = ((0, 390, 1980, 85), (1, 1410, 1980, 54), (2, None, None, None))
    gpus = [dict(zip(names, each, strict=True)) for each in told]
    monkeypatch.setattr(machine, "smi_under_load", lambda devices: gpus)
    record: dict[str, Any] = {"machine": {}}
    fault = "GPU 0 runs at 390 of 1980 MHz under load, at 85 °C"
    assert take_clocks(record, "gpus_load") == [fault]
    assert record["machine"]["gpus_load"] == gpus


compare = script("vllm_compare")


def test_forced_positions(compare: Any) -> None:
    prompt = [9, 1, 2, 3]  # nothing is said of its first token
    ours = [{1: -0.5}, {2: -2.0, 5: -0.5}, {3: -1.0, 6: -0.5}]
    theirs = [{1: -0.75}, {2: -2.5, 8: -0.5}, {3: math.nan, 6: -0.5}]
    assert compare.compare_forced([prompt], [ours], [theirs]) == {
        "positions": 2,
        "not_finite": 1,
        "first_equal_percent": 50.0,
        "mean_apart": 0.375,
        "max_apart": 0.5,
    }


def _run(
    before: tuple[int, int], calls: tuple[int, int], *through: str, experts: int = 0, weights: float = 1.5
) -> dict[str, Any]:
    """Of one rank, whose linear layers and experts had called flux that often at the start and the end."""
    start, end = (
        {
            "flux_calls": {"linear": linear, "experts": of_experts, "captured": 0},
            "flux_through": list(through),
            "row_parallel": {"RowParallelLinear": 2},
            "experts": {"MoERunner": experts} if experts else {},
            "weights": weights,
        }
        for linear, of_experts in (before, calls)
    )
    return {"state_at_start": [start], "state": [end]}


STOCK = {"stock-eager": _run((0, 0), (0, 0))}


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        (STOCK | {"flux-eager": _run((4, 0), (8, 0), "stores")}, None),
        (STOCK | {"flux-eager": _run((4, 4), (8, 8), "stores", experts=2)}, None),
        ({"stock-eager": _run((0, 0), (4, 0))}, "called flux 4 times"),
        ({"stock-eager": _run((0, 0), (0, 3), experts=2)}, "called flux 3 times"),
        ({"flux-graph": _run((0, 0), (0, 0))}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 0), (4, 0), "stores")}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 4), (8, 4), "stores", experts=2)}, "did not run flux's kernels for experts"),
        ({"flux-graph": _run((4, 4), (4, 8), "stores", experts=2)}, "did not run flux's kernels for linear"),
        ({"flux-graph": _run((4, 0), (4, 0), "stores", experts=2)}, "for linear and experts"),
        ({"flux-graph": _run((4, 4), (8, 8), experts=2)}, "did not run flux"),
        (STOCK | {"flux-eager": _run((4, 0), (8, 0), "stores", weights=2.5)}, "same weights"),
    ],
)
def test_a_run_that_was_not_what_its_name_says_is_found(compare: Any, runs: Any, fault: str | None) -> None:
    faults = compare.faults_of(runs, [], cpu=False)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_found_on_either_side(compare: Any, bad: float) -> None:
    good, broken = [[{1: -0.5, 8: -1.0}]], [[{1: bad, 8: -1.0}]]
    for ours, theirs in (good, broken), (broken, good):
        found = compare.compare_forced([[9, 1]], ours, theirs)
        assert found == {"positions": 0, "not_finite": 1}
        assert compare.faults_of({}, [{"runs": ["a", "b"], "forced": found}], cpu=False)
