"""The steps of a campaign (campaign.py), for each number of GPUs, in the order of their worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
SCALES = ("row", "block", "tensor")  # of fp8 operands
MOE_MODELS = ("mixtral-8x7b", "qwen3-235b", "flux-demo", "deepseek-v3")
RESULT = "RESULT"  # stands for the file that a step writes
PARTS = ("verify", "dist", "dense", "decode", "moe", "fp8", "killed", "gpu", "models", "nodes", "sanitizer")


@dataclass(frozen=True)
class Step:
    """One command.

    name: of the step, unique.
    part: one of PARTS, which a user may ask for.
    seconds: it is stopped after that.
    command: behind the Python interpreter.
    result: the name of a file of flux bench to which this step's rows belong, or empty.
    gpus: 0 for all of the machine. Steps with 1 that are not timed run side by side.
    says: what the last line must contain, so that tests that were all skipped are no success.
    """

    name: str
    part: str
    seconds: int
    command: tuple[str, ...]
    result: str = ""
    gpus: int = 0
    says: str = ""

    @property
    def beside(self) -> bool:
        return self.gpus == 1 and not self.result


def steps(gpus: int) -> list[Step]:
    """All steps of a machine, the most worthwhile first: exact results, the main operators, then the rest."""
    found = [*_verify(), *(_across(gpus) if gpus > 1 else _alone(gpus))]
    return sorted(found, key=lambda step: PARTS.index(step.part))  # stable


def _verify() -> Iterator[Step]:
    yield Step("doctor", "verify", 60, ("-m", "flux", "doctor", "--json", RESULT))
    yield Step("verify", "verify", 240, ("-m", "flux", "verify", "--json", RESULT))


def _across(gpus: int) -> Iterator[Step]:
    yield from _tests("dist", 400, "-k", "not killed")
    yield from _tests("killed", 300, "-k", "killed")
    yield from _alone(gpus)
    yield _bench("gemm_rs", "dense", 300, "gemm_rs")
    yield _bench("ag_gemm", "dense", 300, "ag_gemm")
    for op in ("gemm_ar", "all_reduce", "gemm_ar_norm", "all_reduce_norm"):
        yield _bench(op, "decode", 300, op, "--suite", "decode")
    yield from _fp8("gemm_rs", "gemm_rs")
    yield from _fp8("ag_gemm", "ag_gemm")
    yield from _fp8("gemm_ar", "gemm_ar", "--suite", "decode")
    for model in MOE_MODELS:
        chosen = ("--imbalance", "0.032", "--model", model)
        yield from _fp8("moe", "moe_layer0", "moe_layer1", *chosen, name=f"moe-{model}")
    yield _bench("moe_route", "moe", 150, "moe_route", "--imbalance", "0.032")
    for imbalance in ("0.032", "hot"):
        for model in MOE_MODELS:
            chosen = ("--imbalance", imbalance, "--model", model)
            yield _bench(
                f"moe-{model}-{imbalance}", "moe", 300, "moe_layer0", "moe_layer1", *chosen, of="moe"
            )
        whole = [model for model in MOE_MODELS if model != "flux-demo"]  # which has no gate
        names = [part for model in whole for part in ("--model", model)]
        yield _bench(
            f"moe_mlp-{imbalance}", "moe", 300, "moe_mlp", "--imbalance", imbalance, *names, of="moe_mlp"
        )
    for model in MOE_MODELS:
        chosen = ("--imbalance", "0", "--ep", "1", "--model", model)
        yield _bench(f"moe_ctas-{model}", "moe", 150, "moe_ctas", *chosen, of="moe_ctas")
    if gpus >= 8:
        for model in MOE_MODELS:  # experts cut in slices, slices in columns
            chosen = ("--imbalance", "0.032", "--ep", str(gpus // 2), "--model", model)
            yield _bench(
                f"moe-{model}-mixed", "moe", 300, "moe_layer0", "moe_layer1", *chosen, of="moe_mixed"
            )
    for op in ("layer_forward", "layer_training", "e2e_prefill", "e2e_decode"):
        for model in ("llama-3-8b", "llama-3-70b"):
            family = op.split("_")[0]
            yield _bench(f"{op}-{model}", "models", 300, op, "--model", model, of=family)
    for nodes in (2, 4):
        if gpus % nodes == 0 and gpus > nodes:
            told = ("--nodes", str(nodes))
            command = ("-m", "flux", "verify", *told, "--json", RESULT)
            yield Step(f"verify-{nodes}-nodes", "nodes", 300, command)
            yield _bench(f"{nodes}-nodes", "nodes", 400, *told)


def _alone(gpus: int) -> Iterator[Step]:
    """What one GPU is enough for."""
    yield _bench("gemm", "dense", 400, "gemm", "--tp", str(gpus), gpus=1)
    yield from _fp8("gemm", "gemm", "--tp", str(gpus), gpus=1)
    yield from _fp8("gemm-decode", "gemm", "--suite", "decode", "--tp", str(gpus), gpus=1)
    yield from _fp8("quantize", "quantize", "--tp", str(gpus), gpus=1)
    for step in _tests("gpu", 400):
        if "sanitizer" not in step.name:
            yield step
    for check in ("memcheck", "racecheck", "synccheck"):
        file = "tests/gpu/test_gpu_sanitizer.py"
        command = ("-m", "pytest", "-q", file, "-k", check)
        yield Step(check, "sanitizer", 590, command, gpus=1, says=" passed")


def _fp8(of: str, *options: str, name: str = "", gpus: int = 0) -> Iterator[Step]:
    for kind in SCALES:
        told = (*options, "--dtype", "fp8", "--scales", kind)
        yield _bench(f"{name or of}-fp8-{kind}", "fp8", 300, *told, of=f"{of}-fp8", gpus=gpus)


def _tests(part: str, seconds: int, *options: str) -> Iterator[Step]:
    folder = "gpu" if part == "gpu" else "dist"
    for file in sorted((TESTS / folder).glob("test_*.py")):
        if part == "killed" and "killed" not in file.read_text():
            continue
        name = file.stem.removeprefix("test_") + ("-killed" if part == "killed" else "")
        command = ("-m", "pytest", "-q", f"tests/{folder}/{file.name}", *options)
        yield Step(name, part, seconds, command, gpus=int(part == "gpu"), says=" passed")


def _bench(name: str, part: str, seconds: int, *options: str, of: str = "", gpus: int = 0) -> Step:
    command = ("-m", "flux", "bench", *options, "--json", RESULT)
    return Step(name, part, seconds, command, result=of or name, gpus=gpus)
