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
from pytest import LogCaptureFixture, MonkeyPatch

from flux import _log
from flux.integrations.vllm import thresholds
from flux.integrations.vllm.ranges import Layer, Ranges, Settings, ranges_of, ranges_on
from flux.integrations.vllm.report import NEVER
from flux.integrations.vllm.thresholds import Decode, Measured, Prefill, Row, Sum
from flux.measured import files
from flux.measured.machine import Machine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (4096, 2048, 2)


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: MonkeyPatch) -> None:
    for name in ("MIN_TOKENS", "TUNING", "SEQUENCE"):
        monkeypatch.delenv(f"FLUX_VLLM_{name}", raising=False)


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
    assert ranges_of(Layer(*SHAPE), Measured(tuple(measured), ()), Settings()).begin == tokens


def decide(measured: list[Row], **layer: Any) -> tuple[int, str]:
    found = ranges_of(Layer(*SHAPE, **layer), Measured(tuple(measured), (), source="here"), Settings())
    return found.begin, found.why


def test_fp8() -> None:
    """Measurements of other operands say nothing of it, and nothing is assumed of large sums."""
    fp8 = [Row(2, 4096, 2048, 16**i, speedup, "row") for i, speedup in enumerate((0.9, 1.2, 1.1))]
    bf16, why = rows(1.3, 1.3), "fp8 with block scales was not measured on 2 such GPUs"
    assert decide(bf16 + fp8, scales="row") == (16, "here, weight [4096, 2048]")
    assert decide(bf16 + fp8, scales="block") == (NEVER, why)
    assert decide(bf16 + fp8[:1], scales="row")[0] == NEVER
    assert decide(bf16 + fp8) == (1, "here, weight [4096, 2048]")
    assert decide(rows(1.3, ranks=8))[1] == "no measurement of 2 such GPUs: only large sums"


def written(path: Path, *rows: dict[str, Any], **machine: Any) -> Path:
    """A result of flux bench."""
    path.write_text(json.dumps({"machine": machine or {"device": "cpu"}, "rows": rows}))
    return path


def test_fp8_in_a_result_file(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    times = {"flux": {"median_ms": 1.0, "role": "flux"}, "GEMM+NCCL": {"median_ms": 1.5, "role": "serial"}}
    common = {"op": "gemm_ar", "tp": 2, "local": [8, 4096, 2048], "times": times}
    of_fp8 = [{**common, "dtype": "float8_e4m3fn", "scales": scales} for scales in ("tensor", "block")]
    path = written(tmp_path / "all.json", *of_fp8, {**common, "dtype": "bfloat16"})
    assert [row.scales for row in thresholds.measured_in(path)[1].rows] == ["row", "block", ""]
    path = written(tmp_path / "tuning.json", of_fp8[0])
    row, block = Layer(*SHAPE, scales="row"), Layer(*SHAPE, scales="block")
    assert not ranges_on(CPU, row).any
    monkeypatch.setenv("FLUX_VLLM_TUNING", str(path))
    assert (ranges_on(CPU, row).begin, ranges_on(CPU, row).sequence) == (8, 3210)
    assert not ranges_on(CPU, block).any
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", "64")
    assert ranges_on(CPU, block).sequence == 64


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
def test_where_vllm_would_fuse(prefills: list[tuple[int, int, float]], tokens: int) -> None:
    """Sequence-parallel batches, if a model of about that size was measured to be faster."""
    measured = Measured(tuple(rows(1.1)), (), tuple(Prefill(*each) for each in prefills))
    assert ranges_of(Layer(*SHAPE), measured, Settings()).many == tokens
    assert ranges_of(Layer(*SHAPE, scales="row"), measured, Settings(sequence=9)).many == NEVER
    assert ranges_of(Layer(*SHAPE), measured, Settings(sequence=0)).many == NEVER


@pytest.mark.parametrize(
    ("decodes", "tokens"),
    [
        ([(2, 4096, 1, 1.05), (2, 4096, 64, 1.1)], range(1, 65)),
        ([(2, 4096, *of) for of in ((64, 1.1), (1, 1.005), (128, 1.02), (256, 1.005))], range(64, 129)),
        ([(2, 4096, 1, 1.05), (2, 4096, 16, 0.99), (2, 4096, 64, 1.1), (2, 4096, 65, 1.1)], range(64, 66)),
        ([(2, 4096, 1, 1.05), (2, 4096, 16, 0.99), (2, 4096, 64, 1.1)], range(1, 2)),
        ([(2, 4096, 16, 1.05), (2, 4096, 16, 0.9)], range(0)),
        ([(2, 4096, 16, 1.05), (2, 2048, 16, 0.9)], range(16, 17)),
        ([(2, 2048, 16, 0.9), (2, 16384, 16, 1.05)], range(0)),
        ([(2, 4096, 16, 1.05), (2, 16384, 16, 0.9), (2, 1024, 16, 0.9), (4, 4096, 16, 0.9)], range(16, 17)),
        ([(4, 4096, 16, 1.05)], range(0)),
        ([], range(0)),
    ],
)
def test_with_how_few_tokens_where_vllm_would_fuse(
    decodes: list[tuple[int, int, int, float]], tokens: range
) -> None:
    measured = Measured(tuple(rows(1.1)), (), (), tuple(Decode(*each) for each in decodes))
    assert ranges_of(Layer(*SHAPE), measured, Settings()).few == tokens
    assert ranges_of(Layer(*SHAPE, scales="row"), measured, Settings(sequence=9)).few == range(0)
    assert ranges_of(Layer(*SHAPE), measured, Settings(sequence=0)).few == range(0)


def test_a_layer_that_begins_later_than_few_tokens() -> None:
    """The measured model had such layers, too; of one that only has about its size nothing is known."""
    measured = Measured(tuple(rows(1.1)), (), (), (Decode(2, 4096, 16, 1.1), Decode(2, 4096, 64, 1.1)))
    for n, begin, few in ((4096, 16, range(16, 65)), (5120, 16, range(16, 65)), (4096, 17, range(16, 65))):
        assert ranges_of(Layer(n, 2048, 2), measured, Settings(begin)).few == few
    assert ranges_of(Layer(5120, 2048, 2), measured, Settings(17)).few == range(0)


FUSED = Measured(
    tuple(rows(1.1)),
    (Sum(2, 64 * 8192, 1.2),),
    (Prefill(2, 4096, 1.1),),
    (Decode(2, 4096, 1, 1.1), Decode(2, 4096, 64, 1.1)),
    "here",
)
WHY, FEW = "here, weight [4096, 2048]", range(1, 65)
BY_DEFAULT = Ranges(1, WHY, 1536, FEW, 1536, 0, FEW, FEW, 64 * 8192)
NOT_OVER_FUSION: dict[str, Any] = {"few": range(0), "many": NEVER}
NEVER_SEQUENCE: dict[str, Any] = {"sequence": None, **NOT_OVER_FUSION}
NOTHING_BEHIND: dict[str, Any] = {"behind": range(0)}
UNMEASURED = "fp8 with row scales was not measured on 2 such GPUs"
FROM_9: dict[str, Any] = {"behind": range(9, 65), "sums": range(9, 8193), "sum_bytes": 64 << 20}
HOST = "eager calls of fewer are bound by the host"


@pytest.mark.parametrize(
    ("layer", "settings", "begin", "why", "changes"),
    [
        ({}, {}, 1, WHY, {}),
        ({"fused": 8192}, {}, 1, WHY, {"fused": 8192}),
        ({"fused": 32}, {}, 1, WHY, {"fused": 32, "few": range(1, 33)}),
        ({}, {"min_tokens": 9}, 9, "FLUX_VLLM_MIN_TOKENS", {**FROM_9}),
        ({}, {"sequence": 32}, 1, WHY, {"sequence": 32, "many": 32, **NOTHING_BEHIND}),
        ({}, {"sequence": 0}, 1, WHY, NEVER_SEQUENCE),
        ({"scatters": False}, {}, 1, WHY, NEVER_SEQUENCE),
        ({"experts": True}, {}, 1, WHY, {"sequence": 3210, **NOT_OVER_FUSION}),
        ({"eager": True}, {"sequence": 32}, 256, HOST, NEVER_SEQUENCE | NOTHING_BEHIND),
        ({"scales": "row"}, {}, NEVER, UNMEASURED, NEVER_SEQUENCE | NOTHING_BEHIND),
        (
            {},
            {"invariant": True, "min_tokens": 9, "sequence": 9},
            1,
            "batch invariant",
            {"sums": range(1, 1), "sum_bytes": 0, **NEVER_SEQUENCE, **NOTHING_BEHIND},
        ),
    ],
)
def test_all_that_is_decided_of_a_layer(
    layer: dict[str, Any], settings: dict[str, Any], begin: int, why: str, changes: dict[str, Any]
) -> None:
    expected = replace(BY_DEFAULT, begin=begin, why=why, **changes)
    assert ranges_of(Layer(*SHAPE, **layer), FUSED, Settings(**settings)) == expected


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
    known = Measured((), (*others, *(Sum(2, *each) for each in measured)))
    assert ranges_of(Layer(1, 1, 2, 1), known, Settings()).sum_bytes == nbytes


H200 = Machine("sm_90", 132, 1980.0, 4916.7, 478.1)
# As many SMs at the same clock; the memory is slower.
H100 = replace(H200, memory_gb_per_s=3352.3)


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    thresholds._measured.cache_clear()
    with mock.patch.object(thresholds, "of_device", lambda device: machine):
        yield
    thresholds._measured.cache_clear()


def test_what_is_shipped_is_for_one_kind_of_gpu(caplog: LogCaptureFixture) -> None:
    ((shipped, _),) = files.of_vllm()
    for same in (shipped, H200, replace(H200, memory_gb_per_s=4800.0), replace(H200, link_gb_per_s=None)):
        with on(same):
            found = ranges_on(GPU, Layer(*SHAPE))
            assert found.begin < 256 and "measured on such GPUs" in found.why
            assert ranges_on(GPU, Layer(*SHAPE, eager=True)).begin == 256
            assert found.sums.start == 1 and 1 << 20 < found.sum_bytes < 12 << 20 and found.many < NEVER
            others = ranges_on(GPU, Layer(4096, 2048, 3))
            assert (others.begin, others.sum_bytes) == (1536, 0)
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
            found = ranges_on(GPU, Layer(*SHAPE))
            assert (found.begin, found.why) == (1536, "no measurement of 2 such GPUs: only large sums")
            assert (found.sum_bytes, found.few, found.many) == (0, range(0), NEVER)
            assert ranges_on(GPU, Layer(8192, 2048, 2)).sequence == 1536, "twice as large sums"
        (line,) = [record.message for record in caplog.records]
        assert f"no measurements of such GPUs: those that flux has are of others ({words})" in line
    assert ranges_on(CPU, Layer(*SHAPE, itemsize=4)).begin == 768
    assert ranges_on(thresholds.MEASURED_GPU, Layer(*SHAPE)).begin < 256


def test_a_result_of_another_machine_is_not_used(
    monkeypatch: MonkeyPatch, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    times = {"flux": {"median_ms": 1.0, "role": "flux"}, "a": {"median_ms": 1.5, "role": "serial"}}
    row = {"op": "gemm_ar", "tp": 2, "local": [8, 4096, 2048], "times": times, "dtype": "bfloat16"}
    told = {"device": "cuda", "arch": "sm_90", "sms": 132}
    file = written(tmp_path / "own.json", row, **told, kind=asdict(H100))
    older = written(tmp_path / "older.json", row, **told)
    for own, here, used in ((file, H100, True), (file, H200, False), (older, H200, True)):
        monkeypatch.setenv("FLUX_VLLM_TUNING", str(own))
        with on(here):
            found = ranges_on(GPU, Layer(*SHAPE))
            assert (found.begin == 8 and str(own) in found.why) == used, found.why
    assert f"{file} is of another machine (memory_gb_per_s 3352.3, not 4916.7)" in caplog.text


def test_the_users_own_measurement(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:

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
    found = ranges_on(CPU, Layer(64, 32, 8))
    assert (found.begin, found.why) == (7, f"measured in {file}, weight [64, 32]")
    assert (found.sums, found.sum_bytes) == (range(1, 3), 2 * 64 * 2)
    monkeypatch.setenv("FLUX_VLLM_MIN_TOKENS", "3")
    found = ranges_on(CPU, Layer(64, 32, 8, eager=True))
    assert (found.sums.start, found.sum_bytes) == (3, 64 << 20)
    assert (found.begin, found.why) == (3, "FLUX_VLLM_MIN_TOKENS")


def test_a_file_of_another_kind(monkeypatch: MonkeyPatch, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    for text in ("no json", "{}", "[]"):
        file = tmp_path / f"{len(text)}.json"
        file.write_text(text)
        monkeypatch.setenv("FLUX_VLLM_TUNING", str(file))
        assert ranges_on(CPU, Layer(*SHAPE)).begin == 1536
        line = caplog.records[-1].message
        assert f"FLUX_VLLM_TUNING: result of flux bench {file}: expected" in line and "not used" in line
