"""A vLLM of vllm_throughput.py, in a process of its own.

:class:`Engine` is the benchmark's end of a pipe. At the other end :func:`serve` builds vLLM and then obeys
commands. What it brings into vLLM's workers is in vllm_probe.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_models import Model, write_tokenizer

# The name of a run (vllm_throughput.py).
RUN = re.compile(
    r"(stock|flux(-from(?P<first>[1-9]\d*))?(-seq(?P<sequence>[1-9]\d*))?)"
    r"(-nccl)?(-unfused)?-(graph|eager)"
)
LOG_LINES = 40
CAUSES = 5
COMMAND_S, TRACE_S = 90, 600
STOP_S = 15
# A sample is the median over so long, after as long that does not count: a GPU that was idle
# needs a while to reach its clock, and an engine that was stopped to be back in the caches.
STEADY_S = 0.5
# Of a single prompt at least so many times.
PROMPT_TIMES = 5
# To the end of vLLM's own list: a prompt of 512 tokens runs in a graph there.
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
# With these, and those of flux.machine, nothing makes NVLink multicast objects. Each engine's process
# sets them (forbid_multicast): importing flux takes seconds, and no other engine should wait for that.
NO_MULTICAST = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_WIN_ENABLE": "0",
    # FlashInfer's other backend sums by multicast. This one stores into memory that torch shares between
    # GPUs, of which torch makes no multicast object where flux.machine forbids it.
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
# Without vLLM's defaults, nothing of FlashInfer runs: it compiles when it is used first.
NO_FLASHINFER = {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
# Nothing goes to a network.
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_PLUGINS": "flux",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    # To torch's monitor, an engine that was stopped for minutes looks as if it hung.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# An API server passes on what Probe is asked, and all clients draw the same prompts: by hashes of strings.
API_SERVER = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}
# Fusions of the all-reduce: with RMSNorm by FlashInfer; into a reduce-scatter.
PASSES_OFF = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        min_tokens: FLUX_VLLM_MIN_TOKENS; None: flux's default.
        defaults: vLLM's fusions are on if it would have them on, and multicast too if the machine allows it.
        longest: tokens of the longest sequence, if the model's are shorter.
        api_server: vLLM is asked through its API server (vllm_server.py).
    """

    model: Model
    tp: int
    min_tokens: int | None
    gpu_memory: float
    timeout_s: int
    cpu: bool
    folder: Path
    defaults: bool = False
    longest: int = 0
    api_server: bool = False

    def fuses(self, run: str) -> bool:
        """Whether vLLM may fuse an all-reduce with what follows."""
        return self.defaults and "-unfused-" not in run

    def arguments(self, run: str) -> dict[str, Any]:
        """Of vllm.LLM."""
        arguments: dict[str, Any] = {
            "model": str(self.folder / "model"),
            "tensor_parallel_size": self.tp,
            "dtype": self.model.dtype,
            "load_format": "dummy",
            "seed": 0,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_model_len": max(self.model.length, self.longest),
            "max_num_batched_tokens": self.model.batched_tokens,
            "max_num_seqs": self.model.sequences,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "disable_custom_all_reduce": "-nccl-" in run,
            "enforce_eager": run.endswith("-eager"),
            "compilation_config": {},
        }
        if not self.cpu:
            # vLLM would find a size for its KV cache by watching the GPU's free memory, of which the other
            # engines take a part at the same time.
            arguments["kv_cache_memory_bytes"] = self.model.kv_bytes(self.tp)
            arguments["gpu_memory_utilization"] = self.gpu_memory
        if run.endswith("-graph"):
            on_cpu = {"mode": 3, "cudagraph_mode": "NONE", "compile_sizes": []}
            # Where requests come and go, batches are of all sizes: vLLM captures what it does for users.
            on_gpu = {} if self.api_server else {"cudagraph_capture_sizes": CAPTURED}
            arguments["compilation_config"] = on_cpu if self.cpu else on_gpu
        return arguments

    def environment(self, run: str) -> dict[str, str]:
        with_flux = run.startswith("flux")
        named = RUN.fullmatch(run)
        own: dict[str, str | None] = named.groupdict() if named else {}
        first, sequence = (own.get(name) for name in ("first", "sequence"))
        first = first or ("auto" if self.min_tokens is None else str(self.min_tokens))
        paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **ENVIRONMENT,
            **({} if self.defaults else NO_FLASHINFER),
            **(CPU_ENVIRONMENT if self.cpu else {}),
            "PYTHONPATH": os.pathsep.join(paths),
            "FLUX_VLLM": "auto" if with_flux else "off",
            "FLUX_VLLM_MOE": "auto" if with_flux and self.model.experts else "off",
            "FLUX_VLLM_MIN_TOKENS": first,
            **({"FLUX_VLLM_SEQUENCE": sequence} if sequence else {}),
            **(API_SERVER if self.api_server else {}),
            # Compiling takes ranks different times.
            "FLUX_TIMEOUT_S": str(self.timeout_s),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(self.timeout_s),
            # An engine may be stopped in the empty step that follows its last answer.
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(self.timeout_s),
            "VLLM_CACHE_ROOT": str(self.folder / "cache" / run),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor" / run),
        }

    def write_model(self) -> None:
        path = self.folder / "model" / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.model.config(), indent=1))
        if self.api_server:
            write_tokenizer(path.parent, self.model.vocabulary)


class Gone(Exception):
    """An engine that is not there any more, or not in time."""


class Engine:
    """A process with a vLLM in it, and the pipe to it. Its output goes to a file.

    vLLM's processes poll while they wait, and would take CPU time from the engine that is measured. So once
    an engine is up, its processes run only while they are asked something: between commands they are stopped.
    """

    def __init__(self, run: str, settings: Settings) -> None:
        self.log = log = settings.folder / f"{run}.log"
        self.ready = False
        self.connection, theirs = multiprocessing.Pipe()
        # With -c there is no main module that processes spawned by vLLM would import once more.
        module = "vllm_server" if settings.api_server else "vllm_engine"
        code = f"import {module}; {module}.serve({theirs.fileno()})"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=settings.environment(run),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        # Stopped processes do not notice that the benchmark was killed. This shell does, and continues them;
        # then they read the end of the pipe, and end.
        self.guard = subprocess.Popen(
            ["sh", "-c", f"read _; kill -s CONT -- -{self.process.pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._send((settings.arguments(run), settings.defaults, settings.fuses(run)))

    def come_up(self, deadline: float) -> None:
        """Waits until vLLM is ready, and stops it. Raises Gone if that fails."""
        self.receive(deadline)
        self.ready = True
        self._signal(signal.SIGSTOP)

    def receive(self, deadline: float) -> Any:
        """The answer to a command, or "ready". Raises Gone if there is none."""
        try:
            if self.connection.poll(max(0.0, deadline - time.monotonic())):
                return self.connection.recv()
        except (EOFError, OSError) as error:
            raise Gone("its process ended") from error
        raise Gone("no answer in time")

    def log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        # vLLM's processes all write there, and the first to fail may not be the last to say so.
        causes = [line for line in lines[:-LOG_LINES] if "Error:" in line][-CAUSES:]
        return "\n".join([*causes, f"{self.log} ends:", *lines[-LOG_LINES:]])

    def ask(self, deadline: float, command: str, *arguments: Any) -> Any:
        """The answer to a command. Raises Gone if there is none."""
        limit = TRACE_S if command == "trace" else COMMAND_S
        with self._running():
            self._send((command, arguments))
            return self.receive(min(deadline, time.monotonic() + limit))

    def close(self) -> None:
        """Lets it go on, and end by itself."""
        self.connection.close()
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.guard.communicate()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """To all of its processes: vLLM's stay in the group of the one that started them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # receive will know why
            self.connection.send(message)


def stop(engines: dict[str, Engine]) -> None:
    """Ends all, those that are up with a chance to clean up first, and whatever they started."""
    for engine in engines.values():
        engine.close()
    patience = time.monotonic() + STOP_S
    for engine in engines.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.process.wait(max(0.0, patience - time.monotonic()) if engine.ready else 0)
    for engine in engines.values():
        engine.kill()


def obey(fd: int, start: Callable[[dict[str, Any]], AbstractContextManager[Any]]) -> None:
    """Takes vllm.LLM's arguments from the pipe, whether vLLM's defaults hold, and whether it fuses sums. Says
    "ready", then obeys (method of what `start` gives, its arguments) until the pipe is closed.
    """
    connection = Connection(fd)
    try:
        arguments, defaults, fuses = connection.recv()
        forbid_multicast(defaults)
        if not fuses:
            turn_fusions_off(arguments)
        with start(arguments) as commands:
            connection.send("ready")
            while True:
                try:
                    name, given = connection.recv()
                except EOFError:  # the benchmark has ended
                    return
                connection.send(getattr(commands, name)(*given))
    except Exception:
        traceback.print_exc()  # before the pipe is closed, upon which the benchmark reads the log
        sys.exit(1)
    finally:
        connection.close()


def serve(fd: int) -> None:
    obey(fd, _engine)


@contextlib.contextmanager
def _engine(arguments: dict[str, Any]) -> Iterator[Commands]:
    from vllm import LLM

    yield Commands(LLM(**arguments, worker_extension_cls="vllm_probe.Probe"))


def turn_fusions_off(arguments: dict[str, Any]) -> None:
    """In vllm.LLM's arguments, for a run whose all-reduces stay what they are."""
    from vllm.config.compilation import PassConfig

    known = {field.name for field in dataclasses.fields(PassConfig)}
    arguments["compilation_config"]["pass_config"] = {p: False for p in PASSES_OFF if p in known}


def forbid_multicast(defaults: bool) -> bool:
    """Turns NVLink multicast off, here and in processes to come: with vLLM's defaults only where the machine
    forbids it. Returns whether it did.
    """
    from flux import machine

    off = not defaults or machine.multicast_is_forbidden()
    if off:
        machine.disable_multicast()
        os.environ.update(NO_MULTICAST)
    return off


class Commands:
    """What the benchmark asks of an engine. Prompts are lists of token ids."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def forced(self, prompts: list[list[int]]) -> list[list[dict[int, float]]]:
        """Per prompt and position but the first: {token: logprob} of the prompt's and the best token."""
        answers = self._generate(prompts, 1, prompt_logprobs=1)
        return [[_logprobs(step) for step in answer.prompt_logprobs[1:]] for answer in answers]

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds until every prompt has its first token."""
        return self._steady(prompts, 1)

    def prompt(self, prompts: list[list[int]]) -> float:
        """prefill of a single prompt."""
        return self._steady(prompts, PROMPT_TIMES)

    def decode(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of `count` steps of all prompts at once: with them, less without them."""
        first = self._steady(prompts, 1)
        return self._steady(prompts, 1, 1 + count) - first

    def state(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self.llm.collective_rpc("probe_state")
        return states

    def _steady(self, prompts: list[list[int]], least: int, count: int = 1) -> float:
        """Median seconds until each prompt has `count` tokens: of at least so many times, and over STEADY_S,
        after STEADY_S that do not count.
        """
        for enough in (1, least):
            samples: list[float] = []
            while len(samples) < enough or sum(samples) < STEADY_S:
                samples.append(self._timed(prompts, count))
        return statistics.median(samples)

    def _timed(self, prompts: list[list[int]], count: int) -> float:
        start = time.perf_counter()
        self._generate(prompts, count)
        return time.perf_counter() - start

    def _generate(self, prompts: list[list[int]], count: int, **more: int) -> Any:
        from vllm import SamplingParams

        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False, **more}
        sampling = SamplingParams(max_tokens=count, min_tokens=count, **greedy)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)


def _logprobs(step: dict[int, Any]) -> dict[int, float]:
    return {int(token): float(entry.logprob) for token, entry in step.items()}
