"""transformers' tensor parallelism with and without flux: a small Llama with random weights in float64, in
which only a wrong sum can differ by more than the last digits.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flux
from flux.testing import spawn

try:
    import accelerate  # noqa: F401  (transformers needs it for a plan)
    import transformers as hf
    import transformers.distributed.tensor_parallel as hf_styles
except ImportError as error:
    pytest.skip(f"needs transformers 5.16 or newer and accelerate: {error}", allow_module_level=True)

LAYERS = 2


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    from flux.integrations import transformers as ours

    ours.uninstall()


def save_llama(folder: Path, bias: bool) -> None:
    torch.manual_seed(1)
    config = hf.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
        mlp_bias=bias,
    )
    model = hf.LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)


def load(folder: str, plan: Any) -> Any:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    return hf.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)


def answers(folder: str, plan: Any) -> tuple[dict[str, torch.Tensor], int]:
    """What a model says and learns, and how often its forward pass called flux."""
    ids = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(5))
    model = load(folder, plan)
    with mock.patch.object(flux, "gemm_ar", wraps=flux.gemm_ar) as ours, torch.no_grad():
        result = {"logits": model(ids).logits}
    result["tokens"] = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    loss = model(ids, labels=ids).loss
    loss.backward()
    result["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        result[name] = (
            parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        )
    return result, ours.call_count


def differences(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, str]:
    assert result.keys() == expected.keys()
    found = {}
    for name, tensor in expected.items():
        if not torch.allclose(result[name].double(), tensor.double(), rtol=1e-9, atol=1e-9):
            found[name] = f"differs by {(result[name] - tensor).abs().max()}"
    return found


def work(rank: int, world_size: int, folder: str) -> dict[str, str]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    from flux.integrations import transformers as ours

    stock, calls = answers(folder, "auto")
    assert calls == 0
    ours.register()
    # Older versions take a plan as the whole plan, newer ones as changes; 5.16.0 ignores it.
    plan = {f"model.{name}": style for name, style in hf.LlamaConfig.base_model_tp_plan.items()}
    chosen, calls = answers(folder, plan | {"model.layers.*.self_attn.o_proj": "flux_rowwise"})
    takes_plans = hf.__version__ != "5.16.0"
    assert calls == LAYERS * takes_plans, f"one style in the plan: {calls} calls"
    ours.install()
    ours.install()
    everywhere, calls = answers(folder, "auto")
    assert calls == 2 * LAYERS, f"installed: {calls} calls"
    ours.uninstall()
    after, calls = answers(folder, "auto")
    assert calls == 0, "uninstalled"
    told = {"chosen " + k: v for k, v in differences(chosen, stock).items()}
    told |= {"everywhere " + k: v for k, v in differences(everywhere, stock).items()}
    if rank == 0:
        whole = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        ids = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            told |= differences({"logits": everywhere["logits"]}, {"logits": whole(ids).logits})
    return told


def all_models(rank: int, world_size: int, *folders: str) -> list[dict[str, str]]:
    return [work(rank, world_size, folder) for folder in folders]


def test_llama_as_without_flux(tmp_path: Path) -> None:
    folders = [tmp_path / "plain", tmp_path / "bias"]
    for folder in folders:
        save_llama(folder, folder.name == "bias")
    told = spawn(all_models, 2, *map(str, folders), backend="gloo", timeout_s=300)
    assert told == [[{}, {}]] * 2


def test_what_stays_with_transformers(caplog: pytest.LogCaptureFixture) -> None:
    from flux.integrations import transformers as ours

    class Quantised(nn.Linear):
        pass

    layers = [nn.Embedding(8, 4), nn.Linear(7, 4), Quantised(8, 4)]
    layers[2]._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
    mesh = mock.Mock(ndim=1, get_group=lambda: mock.Mock(size=lambda: 2))
    with (
        caplog.at_level(logging.INFO, "flux"),
        mock.patch.object(hf_styles.RowwiseParallel, "install_forward"),
    ):
        for layer in layers:
            forward = layer.forward
            assert ours.FluxRowwiseParallel().install_forward(layer, mesh) is layer
            assert layer.forward == forward
    assert [message.partition("with transformers: ")[2] for message in caplog.messages] == [
        "Embedding is no nn.Linear",
        "a weight [4, 7] does not divide by 2 ranks",
        "it is quantised",
    ]


def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "flux.integrations.transformers"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    # What transformers 5.15 lacks.
    monkeypatch.delattr(hf.distributed, "tensor_parallel")
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    with pytest.raises(ImportError, match=f"expected transformers 5.16 or newer, got {hf.__version__}"):
        importlib.import_module(ours)
