"""vLLM with and without flux on 2 or more GPUs: tokens per second, and whether both say the same.

    python benchmarks/vllm_throughput.py [--model llama-3-8b] [--tp 2] [--layers 8] [--json FILE]
    python benchmarks/vllm_throughput.py --cpu      a rehearsal: a tiny model, vLLM's build for CPUs

The model has the shape of a known one (--model), but fewer layers, a smaller vocabulary and seeded random
weights. A run is a vLLM engine of its own, named by what it has:

    (stock|flux)    without or with flux
    [-from<N>]      of flux only: FLUX_VLLM_MIN_TOKENS=N
    [-seq<N>]       of flux only: FLUX_VLLM_SEQUENCE=N
    [-nccl]         without vLLM's custom all-reduce
    [-unfused]      without its fusion of the all-reduce with RMSNorm, which flux leaves alone by default
    -(graph|eager)  compiled and in CUDA graphs, or neither

All engines start at the same time and stay up, but work one at a time: those that are up and wait are
stopped (SIGSTOP), because vLLM's processes poll. Each takes every metric once, which does not count: kernels
of Triton are compiled at the first call of a size. Then samples are taken in rounds whose order rotates. Of
every metric the median counts.

- prefill: prompts' tokens per second until each prompt has its first token.
- prompt N (--prompts): the same of a single prompt of N tokens.
- decode N: tokens per second of N sequences at once; the same prompts with one token each are subtracted.
- trace (--api-server, instead of these): tokens of answers per second of 2,000 requests with random lengths,
  always the same (vllm_trace.py), by HTTP to `vllm serve` (vllm_server.py), all at once; with --arrivals,
  also the times to their first and further tokens if so many arrive in a second.
- forced: log-probabilities at every position of given prompts. stock-nccl-graph against stock-graph shows how
  far two stock engines are apart that only sum in another order: flux should not be further.

All that uses NVLink multicast is off, and so is vLLM's fusion in all runs. With --defaults, vLLM and flux are
as users have them, and a run of flux may leave all to vLLM; multicast is on then, unless the environment
forbids it (NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1), in which case FlashInfer sums without.
The file is written after each round, and no round begins that would not end before --timeout.
Ends with 1 if something is wrong: a GPU whose clock is low under load (then no engine is waited for), an
engine that did not come up, a flux run without flux (be it only for its experts), a stock run with it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vllm_compare import compare_all, faults_of
from vllm_engine import RUN, Engine, Gone, Settings, stop
from vllm_models import MODELS, POSITIONS, TWINS, Model
from vllm_trace import requests
from whole_models import told

# Of --timeout: what then is not up would take the others' time.
START_SHARE = 2 / 3
RUNS = ["stock-graph", "flux-graph", "stock-nccl-graph", "stock-eager", "flux-eager"]
# The share of a trace's requests that come before its samples.
WARM_UP_SHARE = 4
# For what comes after the rounds, and for engines to end.
LAST_S = 25
# For a quarter of a trace and a whole one.
LEAST_TRACE_S = 20


@dataclass(frozen=True)
class Work:
    """What a run is asked. prefill and forced: (prompts, tokens of each); decode: how many sequences at once;
    trace: how many requests; arrivals: how many of them in a second, for each way to serve them (0: all at
    once); trace_rounds: how often; singles: tokens of prompts that come alone; api_server: only the trace, by
    HTTP."""

    prefill: tuple[int, int]
    decode: tuple[int, ...]
    decode_tokens: int
    forced: tuple[int, int]
    trace: int
    arrivals: tuple[float, ...] = (0.0,)
    trace_rounds: int = 3
    singles: tuple[int, ...] = ()
    api_server: bool = False


# Each forced prompt alone is long enough to be sequence parallel: vLLM may take the first one by itself.
WORK = Work((16, 1024), (16, 64), 128, (2, 1600), 2000)
TINY_WORK = Work((4, 64), (2, 4), 4, (2, 48), 20)


class Measurement:
    """Of engines that are up, what they said and how fast. `faults` says what went wrong with which."""

    def __init__(self, engines: dict[str, Engine], work: Work, model: Model, deadline: float) -> None:
        self.engines = engines
        self.work = work
        self.model = model
        self.deadline = deadline
        self.faults: list[str] = []
        self.forced_prompts: list[list[int]] = []
        self.runs: dict[str, dict[str, Any]] = {run: {"samples_s": {}} for run in engines}

    def lose(self, run: str, error: Gone) -> None:
        engine = self.engines[run]
        engine.ready = False
        engine.kill()
        self.faults.append(f"{run}: {error}")
        say(f"{self.faults[-1]}\n{engine.log_end()}")

    def wait_until_ready(self, deadline: float) -> None:
        start = time.monotonic()
        waiting: dict[Any, str] = {engine.connection: run for run, engine in self.engines.items()}
        while waiting:
            readable = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for connection in readable or list(waiting):  # those that are late are lost in come_up
                run = waiting.pop(connection)
                try:
                    self.engines[run].come_up(deadline)
                except Gone as error:
                    self.lose(run, error)
                    continue
                self.runs[run]["start_s"] = round(time.monotonic() - start, 1)
                say(f"{run} is up after {self.runs[run]['start_s']} s")

    def each(self, command: str, *arguments: Any, rotate: int = 0) -> dict[str, Any]:
        """What all that are up answer, asked one after the other."""
        runs = list(self.engines)
        answers = {}
        for run in runs[rotate % len(runs) :] + runs[: rotate % len(runs)]:
            if not self.engines[run].ready:
                continue
            try:
                answers[run] = self.engines[run].ask(self.deadline, command, *arguments)
            except Gone as error:
                self.lose(run, error)
        return answers

    def keep(self, key: str, answers: dict[str, Any]) -> None:
        for run, answer in answers.items():
            self.runs[run][key] = answer

    def sample(self, metric: str, answers: dict[str, float]) -> None:
        for run, seconds in answers.items():
            self.runs[run]["samples_s"].setdefault(metric, []).append(round(seconds, 6))

    def take_all(self, rounds: int, write: Callable[[], None]) -> None:
        """In the order of what is wanted most, should there be no time for all; `write` after each round."""
        work, generator = self.work, random.Random(0)

        def prompts(*lengths: int) -> list[list[int]]:
            # Without the ends of the vocabulary, which may be special.
            return [[generator.randrange(3, self.model.vocabulary - 12) for _ in range(n)] for n in lengths]

        self.keep("state_at_start", self.each("state"))
        if work.api_server:
            self.take_traces(write)
            self.keep("state", self.each("state"))
            return
        count, length = work.prefill
        long = prompts(*[length] * count)
        short = {size: prompts(*[16] * size) for size in work.decode}
        metrics: dict[str, tuple[Any, ...]] = {"prefill": ("prefill", long)}
        metrics |= {f"prompt {size}": ("prompt", prompts(size)) for size in work.singles}
        metrics |= {f"decode {size}": ("decode", batch, work.decode_tokens) for size, batch in short.items()}
        for asked in metrics.values():
            self.each(*asked)
        start = time.monotonic()
        for turn in range(rounds):
            if not self.has_time(start, turn, LAST_S):
                say(f"no time for more than {turn} rounds")
                break
            for metric, asked in metrics.items():
                self.sample(metric, self.each(*asked, rotate=turn))
            self.keep("state", self.each("state"))
            write()
        count, length = work.forced
        self.forced_prompts = prompts(*[length] * count)
        self.keep("forced", self.each("forced", self.forced_prompts))
        write()
        self.keep("state", self.each("state"))

    def take_traces(self, write: Callable[[], None]) -> None:
        work, model = self.work, self.model
        if not work.trace or not self.has_time(time.monotonic(), 0, LEAST_TRACE_S * len(self.engines)):
            return
        self.each("trace", -(-work.trace // WARM_UP_SHARE), model.length, 0.0)
        start = time.monotonic()
        for turn in range(work.trace_rounds):
            if not self.has_time(start, turn):
                say(f"no time for more than {turn} traces")
                break
            for per_s in work.arrivals:
                answers = self.each("trace", work.trace, model.length, per_s, rotate=turn)
                for run, answer in answers.items():
                    traces = self.runs[run].setdefault("traces", {})
                    traces.setdefault(f"{per_s:g} per s" if per_s else "at once", []).append(answer)
                if not per_s:
                    self.sample("trace", {run: answer["seconds"] for run, answer in answers.items()})
            write()

    def add_rates(self) -> None:
        """Tokens per second of every run: of its median sample."""
        tokens = {"prefill": math.prod(self.work.prefill)}
        tokens |= {f"prompt {size}": size for size in self.work.singles}
        tokens |= {f"decode {size}": size * self.work.decode_tokens for size in self.work.decode}
        tokens["trace"] = sum(each.answer for each in requests(self.work.trace, self.model.length))
        for run in self.runs.values():
            medians = {metric: statistics.median(samples) for metric, samples in run["samples_s"].items()}
            run["tokens_per_s"] = {metric: tokens[metric] / seconds for metric, seconds in medians.items()}

    def to_json(self) -> dict[str, Any]:
        """All but what was said, which the comparisons sum up."""
        return {run: {k: v for k, v in data.items() if k != "forced"} for run, data in self.runs.items()}

    def has_time(self, start: float, turns: int, reserve: float = 0.0) -> bool:
        """Whether one more turn, after as many since `start`, will end before the deadline."""
        now = time.monotonic()
        return now + (now - start) / max(1, turns) + reserve <= self.deadline


def describe(settings: Settings, work: Work) -> dict[str, Any]:
    from flux import machine
    from flux.bench.record import head
    from flux.integrations.vllm import installed_version

    result = head("vllm", "cpu" if settings.cpu else "cuda")
    result["machine"]["vllm"] = installed_version()
    if settings.defaults and not machine.multicast_is_forbidden():
        result["machine"]["multicast"] = "as vLLM has it"
    min_tokens = "auto" if settings.min_tokens is None else settings.min_tokens
    kept = {"tp": settings.tp, "min_tokens": min_tokens, "gpu_memory": settings.gpu_memory}
    kept |= {"defaults": settings.defaults, "model": asdict(settings.model), "work": asdict(work)}
    return {**result, "settings": kept}


def complete(record: dict[str, Any], measured: Measurement, options: argparse.Namespace) -> None:
    """Adds to a result what was measured up to now, and writes its file."""
    measured.add_rates()
    comparisons = compare_all(measured.runs, measured.forced_prompts)
    faults = measured.faults + faults_of(measured.runs, comparisons, options.cpu, options.defaults)
    record |= {"runs": measured.to_json(), "comparisons": comparisons, "faults": faults}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    def run(name: str) -> str:
        if not RUN.fullmatch(name):
            expected = "(stock|flux[-from<N>][-seq<N>])[-nccl][-unfused]-(graph|eager)"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {name!r}")
        return name

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="GPUs (default 2)")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="shape (default llama-3-8b)")
    parser.add_argument("--layers", type=int, help="default 8; with --cpu 2")
    parser.add_argument("--runs", nargs="+", type=run, default=RUNS, help=f"default {' '.join(RUNS)}")
    parser.add_argument(
        "--min-tokens", type=int, help="FLUX_VLLM_MIN_TOKENS (default 1; with --defaults flux's own)"
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="leave vLLM's fusions on, and with them NVLink multicast if the environment does not forbid it: "
        "on machines of your own only",
    )
    parser.add_argument(
        "--fp8", action="store_true", help="linear layers in fp8; not for models with experts"
    )
    parser.add_argument("--decode", nargs="+", type=int, metavar="N", help="sequences (default 16 64)")
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="single prompts of N tokens, too, which takes little time",
    )
    parser.add_argument(
        "--trace", type=int, metavar="N", help="requests of the trace (default 2000; 0: none)"
    )
    parser.add_argument(
        "--arrivals",
        nargs="+",
        type=float,
        default=[],
        metavar="R",
        help="with --api-server: serve it at R requests a second, too",
    )
    parser.add_argument(
        "--api-server", action="store_true", help="the trace only, by HTTP, as `vllm bench serve` sends it"
    )
    parser.add_argument("--rounds", type=int, default=7, help="samples of each metric (default 7)")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share of each engine (default 0.12)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for all of it (default 300)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument(
        "--logs", type=Path, help="folder of the engines' logs and caches (default temporary)"
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model in float32, on CPUs")
    options = parser.parse_args(arguments)
    if len(set(options.runs)) < len(options.runs):
        parser.error("--runs: a run twice")
    if not all(0 < size < POSITIONS for size in options.prompts):
        parser.error(f"--prompts: at most {POSITIONS - 1} tokens, and one at least")
    if options.api_server and (options.decode or options.prompts):
        parser.error("--api-server: without --decode and --prompts")
    if options.arrivals and not options.api_server:
        parser.error("--arrivals: with --api-server")
    if options.fp8 and MODELS[options.model].experts:
        parser.error(f"--fp8: {options.model} has experts")
    return options


def main() -> int:
    options = options_of()
    # So that whoever ends this process ends the engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    start = time.monotonic()
    model, work = (TWINS[options.model], TINY_WORK) if options.cpu else (MODELS[options.model], WORK)
    name = f"{model.name} in fp8" if options.fp8 else model.name
    model = replace(model, name=name, layers=options.layers or model.layers, fp8=options.fp8)
    work = replace(
        work,
        decode=tuple(options.decode or work.decode),
        trace=work.trace if options.trace is None else options.trace,
        arrivals=(*work.arrivals, *options.arrivals),
        singles=tuple(options.prompts),
        api_server=options.api_server,
    )
    if options.api_server:
        work = replace(work, trace_rounds=options.rounds)
    folder = (options.logs or Path(tempfile.mkdtemp(prefix="vllm-throughput-"))).resolve()
    min_tokens = 1 if options.min_tokens is None and not options.defaults else options.min_tokens
    limits = (options.gpu_memory, options.timeout)
    settings = Settings(
        *(model, options.tp, min_tokens, *limits, options.cpu, folder, options.defaults),
        longest=max(options.prompts, default=0) + 1,  # with the first token of its answer
        api_server=options.api_server,
    )
    settings.write_model()
    say(f"logs in {folder}")
    engines: dict[str, Engine] = {}
    try:
        for run in options.runs:
            engines[run] = Engine(run, settings)
        from flux.bench.record import take_clocks  # takes seconds, while they come up

        record = describe(settings, work)
        measured = Measurement(engines, work, model, start + options.timeout)

        def write() -> None:
            complete(record, measured, options)

        if not options.cpu:
            measured.faults += take_clocks(record, "gpus_load")
        if not measured.faults:
            measured.wait_until_ready(start + START_SHARE * options.timeout)
            measured.take_all(options.rounds, write)
            if not options.cpu:
                measured.faults += take_clocks(record, "gpus_after")
        write()
        print(*told(record), sep="\n")
    finally:
        stop(engines)
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
