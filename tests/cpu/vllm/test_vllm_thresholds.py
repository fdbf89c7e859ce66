"""From how many tokens on the vLLM plugin uses flux."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flux import _log
from flux.integrations.vllm import thresholds
from flux.integrations.vllm.report import NEVER
from flux.integrations.vllm.thresholds import (
    Decode,
    Measured,
    Prefill,
    Row,
    Sum,
    decide,
    few_over_fusion,
    from_tokens,
    over_fusion_from,
    sequence_from,
    sums,
    up_to_bytes,
)
from flux.measured import files
from flux.measured.machine import Machine

BF16, CPU, GPU = torch.bfloat16, torch.device("cpu"), torch.device("cuda", 0)


def rows(*speedups: float, ranks: int = 2, n: int = 4096, k: int = 2048) -> list[Row]:
    """Measurements of 1, 16, 256, … rows."""
    return [Row(ranks, n, k, 16**i, speedup) for i, speedup in enumerate(speedups)]


@pytest.mark.parametrize(
    ("measured", "tokens"),
    [
        (rows(1.3, 1.2, 1.1), 1),
        (rows(0.9, 1.2, 1.1), 16),
        (rows(1.3, 0.99, 1.1), 256),
        (rows(1.3, 1.01, 1.1), 256),
        # Not faster at the largest size: from 12 MiB on.
        (rows(1.3, 1.3, 1.01), 1536),
        (rows(1.3, 1.3, 1.3, ranks=4), 1536),
        ([], 1536),
        # The nearest shape counts.
        (rows(0.9, 0.9, 1.1) + rows(1.3, 1.3, 1.1, k=512), 256),
        (rows(0.9, 0.9, 1.1, n=8192, k=8192) + rows(1.3, 1.3, 1.1, k=512), 1),
        (rows(0.9, 0.9, 1.1) + rows(1.3, 1.3, 1.1, ranks=4), 256),
        # Whatever was measured, large sums are flux's.
        (rows(0.9, 0.9, 0.9, 1.1), 1536),
    ],
)
def test_decision(measured: list[Row], tokens: int) -> None:
    assert decide(4096, 2048, BF16, 2, measured, "measured")[0] == tokens


def test_reasons() -> None:
    assert decide(4096, 1024, BF16, 2, rows(1.3), "measured in x") == (
        1,
        "measured in x, weight [4096, 2048]",
    )
    assert decide(4096, 1024, BF16, 8, rows(1.3), "")[1] == "no measurement of 8 such GPUs: only large sums"


def test_fp8() -> None:
    """Measurements of other operands say nothing of it, and nothing is assumed of large sums."""
    fp8 = [Row(2, 4096, 2048, 16**i, speedup, "row") for i, speedup in enumerate((0.9, 1.2, 1.1))]
    bf16, why = rows(1.3, 1.3), "fp8 with block scales was not measured on 2 such GPUs"
    assert decide(4096, 2048, BF16, 2, bf16 + fp8, "here", "row") == (16, "here, weight [4096, 2048]")
    assert decide(4096, 2048, BF16, 2, bf16 + fp8, "here", "block") == (NEVER, why)
    assert decide(4096, 2048, BF16, 2, bf16 + fp8[:1], "here", "row")[0] == NEVER
    assert decide(4096, 2048, BF16, 2, bf16 + fp8, "here")[0] == 1


def written(path: Path, *rows: dict[str, Any], **machine: Any) -> Path:
    """A result of flux bench."""
    path.write_text(json.dumps({"machine": machine or {"device": "cpu"}, "rows": rows}))
    return path


def test_fp8_in_a_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "flux": {"median_ms": 1.0, "role": "flux"},
        "GEMM+NCCL": {"median_ms": 1.5, "role": "serial"},
    }
    common = {"op": "gemm_ar", "tp": 2, "local": [8, 4096, 2048], "times": times}
    of_fp8 = [{**common, "dtype": "float8_e4m3fn", "scales": scales} for scales in ("tensor", "block")]
    path = written(tmp_path / "all.json", *of_fp8, {**common, "dtype": "bfloat16"})
    assert [row.scales for row in thresholds.measured_in(path)[1].rows] == ["row", "block", ""]
    path = written(tmp_path / "tuning.json", of_fp8[0])
    for name in ("MIN_TOKENS", "SEQUENCE"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    assert sequence_from(4096, BF16, 2, CPU, "row") is None
    monkeypatch.setenv("FLUX_VLLM_TUNING", str(path))
    assert from_tokens(4096, 2048, BF16, 2, CPU, scales="row")[0] == 8
    assert from_tokens(4096, 2048, BF16, 2, CPU, scales="block")[0] == NEVER
    assert sequence_from(4096, BF16, 2, CPU, "row") == 3210
    assert sequence_from(4096, BF16, 2, CPU, "block") is None
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "64")
    assert sequence_from(4096, BF16, 2, CPU, "block") == 64


@pytest.mark.parametrize(
    ("prefills", "tokens"),
    [
        ([(2, 4096, 1.03), (2, 4096, 1.1)], 1536),
        ([(2, 2048, 1.1)], 1536),
        ([(2, 8192, 1.1)], 1536),
        ([(2, 4096, 1.01), (2, 4096, 1.1)], NEVER),
        ([(2, 16384, 1.1), (2, 1024, 1.1)], NEVER),
        ([(4, 4096, 1.1)], NEVER),
        ([], NEVER),
    ],
)
def test_where_vllm_would_fuse(
    monkeypatch: pytest.MonkeyPatch, prefills: list[tuple[int, int, float]], tokens: int
) -> None:
    """Sequence-parallel batches, if a model of about that size was measured to be faster."""
    for name in ("SEQUENCE", "TUNING"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    known = tuple(Prefill(*each) for each in prefills)
    measured = Measured(tuple(rows(1.1)), (), known)
    monkeypatch.setattr(thresholds, "_measured", lambda tuning, machine: measured)
    assert over_fusion_from(4096, BF16, 2, CPU) == tokens
    assert over_fusion_from(4096, BF16, 2, CPU, "row") == NEVER, "of fp8 no model was measured"
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "off")
    assert over_fusion_from(4096, BF16, 2, CPU) == NEVER


@pytest.mark.parametrize(
    ("decodes", "tokens"),
    [
        ([(2, 4096, 1, 1.05), (2, 4096, 64, 1.1)], range(1, 65)),
        (
            [(2, 4096, 64, 1.1), (2, 4096, 1, 1.005), (2, 4096, 128, 1.02), (2, 4096, 256, 1.005)],
            range(64, 129),
        ),
        ([(2, 4096, 1, 1.05), (2, 4096, 16, 0.99), (2, 4096, 64, 1.1), (2, 4096, 65, 1.1)], range(64, 66)),
        ([(2, 4096, 1, 1.05), (2, 4096, 16, 0.99), (2, 4096, 64, 1.1)], range(1, 2)),
        ([(2, 4096, 16, 1.05), (2, 4096, 16, 0.9)], range(0)),
        ([(2, 4096, 16, 1.05), (2, 2048, 16, 0.9)], range(16, 17)),
        ([(2, 2048, 16, 0.9), (2, 16384, 16, 1.05)], range(0)),
        (
            [(2, 4096, 16, 1.05), (2, 16384, 16, 0.9), (2, 1024, 16, 0.9), (4, 4096, 16, 0.9)],
            range(16, 17),
        ),
        ([(4, 4096, 16, 1.05)], range(0)),
        ([], range(0)),
    ],
)
def test_with_how_few_tokens_where_vllm_would_fuse(
    monkeypatch: pytest.MonkeyPatch, decodes: list[tuple[int, int, int, float]], tokens: range
) -> None:
    for name in ("SEQUENCE", "TUNING"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    measured = Measured(tuple(rows(1.1)), (), (), tuple(Decode(*each) for each in decodes))
    monkeypatch.setattr(thresholds, "_measured", lambda tuning, machine: measured)
    assert few_over_fusion(4096, 1, BF16, 2, CPU) == tokens
    assert few_over_fusion(4096, 1, BF16, 2, CPU, "row") == range(0), "of fp8 no model was measured"
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "off")
    assert few_over_fusion(4096, 1, BF16, 2, CPU) == range(0)


def test_a_layer_that_begins_later_than_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured model had such layers, too; of one that only has about its size nothing is known."""
    for name in ("SEQUENCE", "TUNING"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    measured = Measured(tuple(rows(1.1)), (), (), (Decode(2, 4096, 16, 1.1), Decode(2, 4096, 64, 1.1)))
    monkeypatch.setattr(thresholds, "_measured", lambda tuning, machine: measured)
    for n in (4096, 5120):
        assert few_over_fusion(n, 16, BF16, 2, CPU) == range(16, 65)
    assert few_over_fusion(4096, 17, BF16, 2, CPU) == range(16, 65)
    assert few_over_fusion(5120, 17, BF16, 2, CPU) == range(0)


@pytest.mark.parametrize(
    ("measured", "nbytes"),
    [
        ([(8, 1.5), (64, 1.2)], 64),
        ([(64, 1.2), (8, 1.01)], 0),
        ([(8, 1.5), (64, 1.01), (512, 1.4)], 8),
        ([(8, 1.5), (64, 1.3), (64, 0.9)], 8),
        ([], 0),
    ],
)
def test_how_large_a_sum(measured: list[tuple[int, float]], nbytes: int) -> None:
    others = [Sum(4, 9000, 2.0)]
    assert up_to_bytes(2, [*others, *(Sum(2, *each) for each in measured)]) == nbytes


H200 = Machine("sm_90", 132, 1980.0, 4916.7, 478.1)
# As many SMs at the same clock; the memory is slower.
H100 = replace(H200, memory_gb_per_s=3352.3)


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    thresholds._measured.cache_clear()
    with mock.patch.object(thresholds, "of_device", lambda device: machine):
        yield
    thresholds._measured.cache_clear()


def test_what_is_shipped_is_for_one_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MIN_TOKENS", "TUNING"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    ((shipped, _),) = files.of_vllm()
    for same in (shipped, H200, replace(H200, memory_gb_per_s=4800.0), replace(H200, link_gb_per_s=None)):
        with on(same):
            tokens, why = from_tokens(4096, 2048, BF16, 2, GPU)
            assert tokens < 256 and "measured on such GPUs" in why
            assert from_tokens(4096, 2048, BF16, 2, GPU, eager=True)[0] == 256
            assert from_tokens(4096, 2048, BF16, 3, GPU)[0] == 1536
            assert sums(2, GPU)[0] == 1 and 1 << 20 < sums(2, GPU)[1] < 12 << 20
            assert sums(3, GPU) == (1, 0)
            assert over_fusion_from(4096, BF16, 2, GPU) < NEVER
    for other, words in (
        (H100, "memory_gb_per_s 4916.7, not 3352.3"),
        (replace(H200, arch="sm_100"), "arch sm_90, not sm_100"),
        (replace(H200, sms=131), "sms 132, not 131"),
        (replace(H200, sm_mhz=1785.0), "sm_mhz 1980.0, not 1785.0"),
        (replace(H200, link_gb_per_s=212.5), "link_gb_per_s 478.1, not 212.5"),
    ):
        caplog.clear()
        _log._said.clear()
        with on(other), caplog.at_level("INFO", "vllm.flux"):
            assert from_tokens(4096, 2048, BF16, 2, GPU) == (
                1536,
                "no measurement of 2 such GPUs: only large sums",
            )
            assert sums(2, GPU) == (1, 0) and over_fusion_from(4096, BF16, 2, GPU) == NEVER
            assert few_over_fusion(4096, 1, BF16, 2, GPU) == range(0)
            assert sequence_from(8192, BF16, 2, GPU) == 1536, "twice as large sums"
        (line,) = [record.message for record in caplog.records]
        assert f"no measurements of such GPUs: those that flux has are of others ({words})" in line
    assert from_tokens(4096, 2048, torch.float32, 2, CPU)[0] == 768
    assert from_tokens(4096, 2048, BF16, 2, thresholds.MEASURED_GPU)[0] < 256


def test_a_result_of_another_machine_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS", raising=False)
    times = {"flux": {"median_ms": 1.0, "role": "flux"}, "a": {"median_ms": 1.5, "role": "serial"}}
    row = {"op": "gemm_ar", "tp": 2, "local": [8, 4096, 2048], "times": times, "dtype": "bfloat16"}
    told = {"device": "cuda", "arch": "sm_90", "sms": 132}
    file = written(tmp_path / "own.json", row, **told, kind=asdict(H100))
    older = written(tmp_path / "older.json", row, **told)
    for own, here, used in ((file, H100, True), (file, H200, False), (older, H200, True)):
        monkeypatch.setenv("FLUX_VLLM_TUNING", str(own))
        with on(here):
            tokens, why = from_tokens(4096, 2048, BF16, 2, GPU)
            assert (tokens == 8 and str(own) in why) == used, why
    assert f"{file} is of another machine (memory_gb_per_s 3352.3, not 4916.7)" in caplog.text


def test_the_users_own_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS", raising=False)

    def row(op: str, m: int, flux: float, **others: tuple[str, float]) -> dict[str, Any]:
        times = {name: {"role": role, "median_ms": ms} for name, (role, ms) in others.items()}
        times["flux"] = {"role": "flux", "median_ms": flux}
        return {"op": op, "tp": 8, "m": m, "local": [m, 64, 32], "dtype": "bfloat16", "times": times}

    file = written(
        tmp_path / "gemm_ar.json",
        row("gemm_ar", 1, 2.0, a=("serial", 4.0), b=("peer", 1.9), c=("comm", 9.0)),
        row("gemm_ar", 7, 2.0, a=("serial", 4.0), b=("peer", 3.0), c=("gemm", 1.0)),
        row("gemm_ar", 9, 2.0, c=("gemm", 1.0)),
        row("all_reduce", 2, 2.0, a=("peer", 3.0)),
        row("gemm_rs", 9, 2.0, a=("serial", 1.0)),
    )
    monkeypatch.setenv("FLUX_VLLM_TUNING", str(file))
    assert from_tokens(64, 32, BF16, 8, CPU) == (7, f"measured in {file}, weight [64, 32]")
    assert sums(8, CPU) == (1, 2 * 64 * 2)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "3")
    assert sums(8, CPU) == (3, 64 << 20)
    assert from_tokens(64, 32, BF16, 8, CPU, eager=True) == (3, "FLUX_VLLM_MIN_TOKENS")


def test_a_file_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FLUX_VLLM_MIN_TOKENS", raising=False)
    for text in ("no json", "{}", "[]"):
        file = tmp_path / f"{len(text)}.json"
        file.write_text(text)
        monkeypatch.setenv("FLUX_VLLM_TUNING", str(file))
        assert from_tokens(4096, 2048, BF16, 2, CPU)[0] == 1536
        line = caplog.records[-1].message
        assert f"FLUX_VLLM_TUNING: result of flux bench {file}: expected" in line and "not used" in line


def test_sequence_parallel_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEQUENCE", "TUNING"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)
    with on(H200):
        # On 8 nothing was measured: twice as large sums.
        assert [sequence_from(8192, BF16, ranks, GPU) for ranks in (2, 4, 8)] == [768, 768, 1536]
        # Where a layer is several calls of flux, the host needs work for the GPU meanwhile.
        assert [sequence_from(8192, BF16, p, GPU, experts=True) for p in (2, 4, 8)] == [803, 1605, 3210]
        assert sequence_from(4096, BF16, 2, GPU) == 1536
        assert sequence_from(16384, BF16, 2, GPU) == 384, "12 MiB"
    with on(replace(H200, arch="sm_100", sms=148)):
        assert sequence_from(16384, BF16, 2, GPU) == 768, "not measured: twice as large sums"
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "77")
    assert sequence_from(4096, BF16, 2, CPU) == 77
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "off")
    assert sequence_from(4096, BF16, 2, CPU) is None
