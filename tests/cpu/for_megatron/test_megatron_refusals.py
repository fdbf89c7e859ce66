"""Linear layers of Megatron-Core that flux does not serve: which, and what the log says."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_models import Told, make_config, needs_megatron, prepare

from flux.testing import spawn

pytestmark = needs_megatron


def falls_back(rank: int, world_size: int) -> None:
    """Where flux does not apply, Megatron's own code runs, and one line says why."""
    prepare(2)
    from flux.integrations.megatron import FluxColumnParallelLinear, FluxRowParallelLinear

    told = Told()
    alone = dist.new_group([rank], use_local_synchronization=True)
    common: dict[str, Any] = {"init_method": torch.nn.init.ones_, "bias": False, "skip_bias_add": True}
    config = make_config()
    rows = torch.ones(4, 1, 8)
    for _ in range(2):
        y, _ = FluxColumnParallelLinear(8, 4, config=config, tp_group=alone, **common)(rows)
        assert (y == 8).all() and y.shape[-1] == 4
        row = FluxRowParallelLinear(8, 4, config=config, tp_group=alone, input_is_parallel=True, **common)
        assert (row(rows)[0] == 8).all()
    y, _ = FluxRowParallelLinear(8, 4, config=config, input_is_parallel=False, **common)(rows)
    assert (y == 8).all()
    layer = FluxColumnParallelLinear(8, 4, config=config, disable_grad_reduce=True, **common)
    assert (layer(rows)[0] == 8).all()
    layer = FluxColumnParallelLinear(8, 4, config=config, **common)
    layer.explicit_expert_comm = True  # as SharedExpertMLP sets it, after construction
    assert (layer(rows)[0] == 8).all()
    layer.explicit_expert_comm, layer.gtp_remat_size = False, 2
    assert layer.why_never() == "its weight is split over another group too (generalized tensor parallelism)"
    layer.gtp_remat_size = 1
    assert layer.why_never() is None
    assert layer._why_not(rows.half(), layer.weight) == "x is torch.float16 and the weight torch.float32"
    assert layer._why_not(rows.int(), layer.weight.int()) == "x is torch.int32 and the weight torch.int32"
    offloading, deferring = copy.copy(config), copy.copy(config)
    offloading._cpu_offloading_context = contextlib.nullcontext()
    layer = FluxColumnParallelLinear(8, 4, config=offloading, **common)
    assert layer._why_not(rows, layer.weight) == "activations are offloaded to the CPU"
    deferring.defer_embedding_wgrad_compute = True
    buffers: dict[str, Any] = {"grad_output_buffer": [], "embedding_activation_buffer": []}
    layer = FluxColumnParallelLinear(8, 4, config=deferring, **common, **buffers)
    assert layer.why_never() == "the gradient of its weight is deferred"
    assert [m.split(": ", 2)[1:] for m in told.messages] == [
        ["FluxColumnParallelLinear runs in Megatron's own code", "the tensor-parallel group has one rank"],
        ["FluxRowParallelLinear runs in Megatron's own code", "the tensor-parallel group has one rank"],
        ["FluxRowParallelLinear runs in Megatron's own code", "its input is not split over ranks"],
        [
            "FluxColumnParallelLinear runs in Megatron's own code",
            "somebody else sums the gradient of its input",
        ],
        [
            "FluxColumnParallelLinear runs in Megatron's own code",
            "the token dispatcher communicates for the layers of experts",
        ],
    ]
    with pytest.raises(ValueError, match="FluxColumnParallelLinear: config.fp8"):
        fp8 = copy.copy(config)
        fp8.fp8 = "hybrid"
        FluxColumnParallelLinear(8, 4, config=fp8, **common)


@pytest.mark.filterwarnings("ignore")
def test_refusals() -> None:
    assert spawn(falls_back, 2, backend="gloo", timeout_s=120) == [None] * 2
