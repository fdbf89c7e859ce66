"""Sequence parallelism of vLLM's eager models: what tensors with own rows do, and which layers make them."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vllm_stand_in as stand_in
from torch.nn.functional import linear

import flux
from flux.integrations import vllm as plugin
from flux.integrations.vllm import eager
from flux.integrations.vllm import report as reports
from flux.testing import spawn

vllm, row_parallel = stand_in.vllm, stand_in.row_parallel
N, K, LAYERS, FROM = 16, 8, 3, 4


class RMSNorm(torch.nn.Module):
    """vLLM's, with another norm."""

    def __init__(self, weight: torch.Tensor, size: int | None = None) -> None:
        super().__init__()
        self.weight, self.has_weight, self.variance_epsilon = weight, True, 1e-5
        self.variance_size_override = size
        self.calls = 0

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        self.calls += 1
        assert type(x) is torch.Tensor
        total = x if residual is None else x + residual
        normed = stand_in.exact_norm(total, self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, total)


def integers(rank: int, *shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, shape, generator=g).float()


def model(x: torch.Tensor, rank: int, group: str, norms: list[RMSNorm], sums: Any) -> list[torch.Tensor]:
    """A transformer without attention: its result, and states plus residual, as draft models take them."""
    hidden, residual, seen = norms[0](x), x, []
    for i in range(LAYERS):
        attended = linear(hidden, integers(10 * i + rank, K, N), integers(i, K)).remainder(5) - 2
        hidden = sums(attended, integers(100 + 10 * i + rank, N, K), integers(50 + i, N), group)
        hidden, residual = norms[2 * i + 1](hidden, residual)
        seen.append(hidden + residual)
        up = linear(hidden, integers(200 + 10 * i + rank, K, N)).remainder(3) - 1
        hidden = sums(up, integers(300 + 10 * i + rank, N, K), None, group)
        hidden, residual = norms[2 * i + 2](hidden, residual)
    return [hidden, residual, *seen]


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    total = linear(x, weight)
    dist.all_reduce(total)
    return total if bias is None else total + bias


def by_flux(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
    return eager.linear_own(x, weight, bias, group)


def computes_the_same(rank: int, p: int) -> list[str]:
    wrong, group = [], dist.group.WORLD.group_name
    layers = types.ModuleType("vllm.model_executor.layers.layernorm")
    vars(layers)["RMSNorm"] = RMSNorm
    with (
        mock.patch.dict(sys.modules, {"vllm.model_executor.layers.layernorm": layers}),
        torch.inference_mode(),
        mock.patch.object(eager, "row_norm", stand_in.exact_norm),
    ):
        for m in (p, 7, 8, 9, 13):
            x = integers(m, m, N)
            norms = [RMSNorm(integers(500 + i, N)) for i in range(2 * LAYERS + 1)]
            expected = model(x, rank, group, norms, by_torch)
            eager.install()
            eager.install()
            for norm in norms:
                norm.calls = 0
            with (
                mock.patch.object(flux, "gemm_rs", wraps=flux.gemm_rs) as scatters,
                mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as gathers,
                mock.patch.object(flux, "all_gather", wraps=flux.all_gather) as alls,
            ):
                results = model(x, rank, group, norms, by_flux)
                calls = [
                    scatters.call_count,
                    gathers.call_count,
                    alls.call_count,
                    sum(n.calls for n in norms),
                ]
                # States and residual are gathered where they are added, and what follows finds all rows.
                if calls != [2 * LAYERS, LAYERS - 1, 2 * LAYERS, 1]:
                    wrong.append(f"{m} tokens: {calls}")
                if [type(result) is eager.OwnRows for result in results] != [True, True, *[False] * LAYERS]:
                    wrong.append(f"{m} tokens: {[type(result) for result in results]}")
            if not all(
                torch.equal(eager.whole(ours), theirs) for ours, theirs in zip(results, expected, strict=True)
            ):
                wrong.append(f"{m} tokens differ")
    return wrong


@pytest.mark.parametrize("p", [2, 3])
def test_it_computes_the_same(p: int) -> None:
    assert spawn(computes_the_same, p, backend="gloo") == [[]] * p


def own_and_all(rank: int, p: int) -> list[str]:
    """What operators get that know nothing of own rows."""
    wrong, group = [], dist.group.WORLD.group_name
    rows = torch.arange(5 * N).reshape(5, N).float()
    padded = torch.cat([rows, torch.full((1, N), torch.nan)])

    def made() -> eager.OwnRows:
        return eager.OwnRows(padded[3 * rank :][:3].clone(), 5, group)

    x = made()
    assert x.shape == (5, N) and x.dtype == rows.dtype and len(x) == 5
    checks: dict[str, tuple[Any, Any]] = {
        "rows": (x[torch.tensor([4, 0])], rows[[4, 0]]),
        "view": (made().view(-1, 8), rows.view(-1, 8)),
        "out of two": (made() + made(), 2 * rows),
        "keyword": (torch.add(input=made(), other=1), rows + 1),
        "list": (torch.cat([made(), rows]), torch.cat([rows, rows])),
        "3 columns": (linear(made(), rows[:3]), rows @ rows[:3].t()),
        "other dtype": (linear(made().double(), rows[:8].double()), (rows @ rows[:8].t()).double()),
        "linear": (linear(made(), rows[[0, 1, 2, 3] * 2]), rows @ rows[[0, 1, 2, 3] * 2].t()),
    }
    written = made()
    written.add_(1)
    checks["written"] = written.whole(), rows + 1
    total = torch.zeros(5, N)
    total.add_(made())
    checks["added"] = total, rows
    checks["own"] = (written.own()[: 3 - rank], (rows + 1)[3 * rank :][:3])
    pointed = made()
    if pointed.data_ptr() != pointed.whole().data_ptr() or not pointed.data_ptr():
        wrong.append("a pointer to something else")
    pointed.whole().fill_(3)  # what is behind the pointer
    checks["written by pointer"] = pointed.own()[: 3 - rank], torch.full((3 - rank, N), 3.0)
    with mock.patch.object(flux, "ag_gemm", wraps=flux.ag_gemm) as gathers:
        weight = rows[:4].repeat(2, 1)
        checks["linear, gathered"] = linear(pointed, weight), pointed.whole() @ weight.t()
    if gathers.called:
        wrong.append("rows were gathered twice")
    for name, (found, expected) in checks.items():
        if type(found) is not torch.Tensor or not torch.equal(found, expected):
            wrong.append(f"{name}: {type(found)}, {found}")
    return wrong


def test_other_operators_get_all_rows() -> None:
    assert spawn(own_and_all, 2, backend="gloo") == [[]] * 2


@pytest.mark.parametrize("case", ["", "auto", "off", "stages", "compiled", "another norm", "small"])
def test_which_layers_give_own_rows(
    vllm: dict[str, types.ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    monkeypatch.setenv("FLUX_VLLM_SEQUENCE", {"auto": "auto", "off": "off"}.get(case, str(FROM)))
    monkeypatch.setattr(eager, "_installed", [])
    config = stand_in.configuration(mode="VLLM_COMPILE" if case == "compiled" else "NONE")
    config.parallel_config.pipeline_parallel_size = 2 if case == "stages" else 1
    norms = vllm["vllm.model_executor.layers.layernorm"]
    if case == "another norm":
        del norms.RMSNorm
    plugin.register()
    with mock.patch("flux.integrations.vllm.layer.get_current_vllm_config_or_none", lambda: config):
        layer = row_parallel(vllm, torch.ones(N, K))
    x = torch.ones(FROM - (case == "small"), K)
    with (
        mock.patch("flux.integrations.vllm.layer.linear_all_reduce", return_value="a sum"),
        mock.patch.object(eager, "linear_own", return_value="own rows") as ours,
    ):
        assert layer(x) == ("a sum" if case else "own rows")
        assert layer(x[None]) == "a sum"
    assert ours.call_count == (not case)
    eager_and_so = case in ("", "small")
    assert eager._installed == (["RMSNorm"] if eager_and_so else [])
    assert reports.report.sequence == (f"Sequence parallel from {FROM} tokens on" if eager_and_so else "")


def test_norms_that_are_not_plain_get_all_rows(vllm: dict[str, types.ModuleType], monkeypatch: Any) -> None:
    monkeypatch.setattr(eager, "_installed", [])
    norms = vllm["vllm.model_executor.layers.layernorm"]
    ours = type("RMSNorm", (RMSNorm,), {})
    norms.RMSNorm = ours  # type: ignore[attr-defined]
    eager.install()
    x = eager.OwnRows(torch.ones(2, N), 3, "7")
    with mock.patch.object(flux, "all_gather", return_value=torch.ones(4, N)) as gather:
        norm = ours(torch.ones(N), size=8)
        assert type(norm(x)) is torch.Tensor and norm.calls == 1
        assert norm(torch.ones(3, N), x)[1].shape == (3, N) and norm.calls == 2
    assert gather.call_count == 1, "the first time"
