"""Twenty steps of training with Megatron-Core's schedules, data parallelism and every kind of layer, stock
and on flux: in each step the same loss and the same gradient of every parameter.

`make megatron` sets up what this needs, and runs it for several releases of Megatron-Core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flux.testing import spawn
from megatron_models import (
    KINDS,
    OnCpu,
    Told,
    make_config,
    make_model,
    prepare,
    sizes,
    stock_spec,
    token_losses,
)

pytestmark = pytest.mark.skipif(
    Path(sys.prefix).name != ".venv-megatron", reason="takes minutes for each release: make megatron"
)

STEPS = 20
BATCH = 2
LEARNING_RATE = 0.05
WITH_EXPERTS = ("MoE", "shared experts")
# Ranks, how they share a model, and which models.
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "TP 2": (2, {"tensor_model_parallel_size": 2}, tuple(KINDS)),
    "TP 4": (4, {"tensor_model_parallel_size": 4}, tuple(KINDS)),
    "TP 2, EP 2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
        },
        WITH_EXPERTS,
    ),
    "TP 2, DP 2, PP 2": (
        8,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        tuple(KINDS),
    ),
}


def configure(layout: dict[str, int], kind: str) -> Any:
    pipeline = {"pipeline_dtype": torch.float32, "batch_p2p_comm": False}
    config = make_config(**{**KINDS[kind], **layout, **pipeline}, sequence_parallel=True)
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    config.finalize_model_grads_func = finalize_model_grads
    return config


class Trainee:
    """This rank's part of a model, and its steps."""

    def __init__(self, config: Any, spec: Any, on_flux: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from flux.integrations.megatron import accumulate_into_main_grad, convert_model

        self.model = make_model(
            config,
            spec,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        if on_flux:
            left = {name: why for name, why in convert_model(self.model).items() if why is not None}
            assert all(name == "embedding.word_embeddings" for name in left), left
            accumulate_into_main_grad(self.model)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self.wrapped = DistributedDataParallel(config, options, self.model)
        self.seeds = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def step(self, number: int) -> dict[str, torch.Tensor]:
        """Losses of two micro-batches, on the last stage of the pipeline, and gradients of all parameters."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.wrapped.zero_grad_buffer()
        replicas, replica = self.seeds

        def forward_step(batches: Any, model: Any) -> Any:
            losses = token_losses(model, next(batches), BATCH)
            return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

        told = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(2 * (number * replicas + replica) + i for i in range(2)),
            model=[self.wrapped],
            num_microbatches=2,
            seq_length=sizes(self.model.config)[1],
            micro_batch_size=BATCH,
            forward_only=False,
        )
        found = {f"loss {i}": part["loss"] for i, part in enumerate(told)}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                found[name] = parameter.main_grad.clone()
                parameter.sub_(LEARNING_RATE * parameter.main_grad)
        return found


def train(layout: dict[str, int], kind: str) -> None:
    from flux.integrations.megatron import convert_spec

    told = Told()
    config = configure(layout, kind)
    stock = Trainee(config, stock_spec(config), False)
    ours = Trainee(config, convert_spec(stock_spec(config)), True)
    seen: list[float] = []
    for number in range(STEPS):
        expected, found = stock.step(number), ours.step(number)
        assert found.keys() == expected.keys() and len(found) >= 5
        # fp32, other orders of sums, and what twenty steps make of them.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
        seen += [float(expected["loss 0"])] if "loss 0" in expected else []
        assert all(grad.any() for name, grad in found.items() if "loss" not in name), "a gradient is missing"
    assert not seen or seen[-1] != seen[0], "nothing was trained"
    assert not [message for message in told.messages if "Megatron's own code" in message], told.messages


def run(rank: int, world_size: int, layout_name: str) -> bool:
    _, layout, kinds = LAYOUTS[layout_name]
    # The size of the tensor-parallel group has another name among Megatron's groups.
    sizes = dict(layout)
    prepare(sizes.pop("tensor_model_parallel_size"), **sizes)
    with OnCpu():
        for kind in kinds:
            try:
                train(layout, kind)
            except Exception as error:
                error.add_note(f"in the model: {kind}")
                raise
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore")
def test_steps_equal_stock_megatron(layout: str) -> None:
    world_size = LAYOUTS[layout][0]
    assert spawn(run, world_size, layout, backend="gloo", timeout_s=480) == [True] * world_size
