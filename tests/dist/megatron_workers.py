"""What ranks do in test_dist_megatron.py. Returns what was wrong, so an empty list is a pass.

Everything here also runs between CPU processes, where that is slow.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from megatron_models import (
    BATCH,
    LAYOUTS,
    MODELS,
    RECOMPUTED,
    SWIGLU,
    Told,
    full_graphs,
    grouped_config,
    grouped_pair,
    losses_of,
    make_config,
    make_moe_config,
    moe_pair,
    pair,
    prepare,
    prepare_layout,
    replicas,
    sizes,
    summed_grads,
    token_losses,
    tokens_of,
)

from flux.comm import registry
from flux.testing import tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With these flux's kernels take every product: all sizes are multiples of 8 on up to four ranks.
LARGE: dict[str, Any] = {"hidden_size": 512, "params_dtype": torch.bfloat16, "bf16": True}
MOE_MODELS: dict[str, dict[str, Any]] = {
    "gelu, aux loss": {"moe_aux_loss_coeff": 0.1},
    "swiglu": SWIGLU,
    "recomputed": {**SWIGLU, **RECOMPUTED},
    "shared expert": {**SWIGLU, "moe_shared_expert_intermediate_size": 256},
}
# Most products that are behind each other: queries, scores, values, output, router, both of the MLP, in two
# layers, and the logits.
FORWARD = 2 * 7 + 1
BEFORE = 2.0**-12  # in main_grad, of the size of gradients
Grads = dict[str, torch.Tensor]


def allowed(products: int, config: Any, p: int) -> float:
    """How far a tensor behind so many products may be from stock's, as a share of its root mean square.

    Of a result with variance 1, of K columns on each of p ranks, flux.testing.tolerance allows an element six
    standard deviations of the errors of sums and of parts that travel, and the rounding of itself; all
    elements together show one. Stock and flux both err by as much, in another order. Errors of products are
    independent, so n of them make sqrt(n) of one; and what is between products (norms, softmax, activations,
    sums with the residual) leaves a relative error about as it is.
    """
    k = max(config.hidden_size, config.ffn_hidden_size)
    atol, rtol = tolerance(k, config.params_dtype, p, weight_std=(k * p) ** -0.5)
    return math.sqrt(2 * products) * (atol / 6 + rtol)


def compare(name: str, got: torch.Tensor | None, expected: torch.Tensor, share: float) -> list[str]:
    """All elements together, and each: one may err by six standard deviations, of itself and of all."""
    if got is None or got.shape != expected.shape:
        return [f"{name}: {None if got is None else got.shape}, expected {expected.shape}"]
    wide = expected.double()
    error, rms = (got.double() - wide).abs(), wide.square().mean().sqrt()
    mean = error.square().mean().sqrt()
    worst = (error - 6 * share * (wide.abs() + rms)).max()
    # Written so that a NaN fails, and a gradient that is zero for both passes.
    if mean <= share * rms and worst <= 0:
        return []
    return [
        f"{name}: off by {mean / rms:.3f} of its rms, {error.max() / rms:.3f} at most; allowed {share:.3f}"
    ]


def train(model: Any, *seeds: int, batch: int = BATCH) -> tuple[torch.Tensor, Grads]:
    """Losses of all tokens [batches, batch, sequence], and gradients."""
    model.zero_grad(set_to_none=True)
    losses = []
    for seed in seeds:
        of_tokens = token_losses(model, seed, batch)
        of_tokens.mean().backward()
        losses.append(of_tokens.detach().float())
    return torch.stack(losses), {name: q.grad for name, q in model.named_parameters()}


def against_stock(
    name: str, got: tuple[torch.Tensor, Grads], expected: tuple[torch.Tensor, Grads], config: Any, p: int
) -> list[str]:
    (our_losses, ours), (losses, grads) = got, expected
    mean = losses.mean()  # what the model has not learnt: all losses are about as high
    wrong = compare(f"{name}: losses", our_losses - mean, losses - mean, allowed(FORWARD, config, p))
    if ours.keys() != grads.keys() or len(grads) < 11:
        wrong.append(f"{name}: gradients of {sorted(ours)}, expected {sorted(grads)}")
    for parameter, grad in grads.items():
        # At most forward, back again, and the product that makes the gradient.
        share = allowed(2 * FORWARD + 1, config, p)
        wrong += compare(f"{name}: {parameter}", ours.get(parameter), grad, share)
    return wrong


def unfused(group: Any, ops: set[str]) -> list[str]:
    """Calls on a group that did not run fused, and those of the operators that nobody called.

    Not those that sum gradients of routing weights in float32, which the kernels do not take.
    """
    plans = [plan for workspace in registry.existing(group) for plan in workspace.plans.values()]
    # An AllGather+GEMM has that of the whole call, and one for each weight.
    calls = [plan[0] if isinstance(plan, tuple) else plan for plan in plans]
    told = [
        f"{call.op} of {call.m}, {call.n}, {call.k}: {call.reason}"
        for call in calls
        if not (call.by_flux or (call.op, call.dtype) == ("reduce_scatter", torch.float32))
    ]
    missing = ops - {call.op for call in calls}
    return told + [f"never called: {sorted(missing)}"] * bool(missing)


def dense(rank: int, p: int, names: list[str], batch: int) -> list[str]:
    from megatron.core import parallel_state

    prepare(p, DEVICE)
    told, wrong, ops = Told(), [], set()
    for name in names:
        config = make_config(**LARGE, tensor_model_parallel_size=p, **MODELS[name])
        stock, ours = pair(config, DEVICE)
        expected = train(stock, 0, batch=batch)
        wrong += against_stock(name, train(ours, 0, batch=batch), expected, config, p)
        ops |= {"ag_gemm", "gemm_rs"} if config.sequence_parallel else {"gemm_ar"}
    return wrong + told.messages + unfused(parallel_state.get_tensor_model_parallel_group(), ops)


def main_grads(rank: int, p: int) -> list[str]:
    """Two micro-batches into main_grad in fp32, without Apex."""
    from flux.integrations.megatron import accumulate_into_main_grad

    prepare(p, DEVICE)
    wrong = []
    for options in ({"sequence_parallel": True}, {}):
        config = make_config(**LARGE, tensor_model_parallel_size=p, **options)
        stock, ours = pair(config, DEVICE)
        expected = train(stock, 0, 1)
        accumulate_into_main_grad(ours)
        by_flux = [name for name in expected[1] if ".linear_" in name and name.endswith(".weight")]
        for name in by_flux:
            weight = ours.get_parameter(name)
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        losses, grads = train(ours, 0, 1)
        if len(by_flux) != 8 or any(grads[name] is not None for name in by_flux):
            wrong.append(f"{options}: expected no other gradient of {by_flux}")
        grads |= {name: ours.get_parameter(name).main_grad for name in by_flux}
        wrong += against_stock(f"{options}", (losses, grads), expected, config, p)
    return wrong


def data_parallel(rank: int, p: int) -> list[str]:
    """Two replicas: gradients are summed over them while flux's kernels go on with the backward pass."""
    from megatron.core import parallel_state

    from flux.integrations.megatron import accumulate_into_main_grad

    prepare(p // 2, DEVICE)
    config = make_config(**LARGE, tensor_model_parallel_size=p // 2, sequence_parallel=True)
    results = []
    for model in pair(config, DEVICE):
        if results:
            accumulate_into_main_grad(model)
        wrapped = replicas(model, overlap_grad_reduce=True, bucket_size=2**19)
        losses = token_losses(wrapped, parallel_state.get_data_parallel_rank())
        losses.mean().backward()
        results.append((losses.detach(), summed_grads(wrapped)))
    stock, ours = results
    return against_stock("two replicas", ours, stock, config, p // 2)


def experts(rank: int, p: int, name_of_layout: str, are_grouped: bool = False) -> list[str]:
    """are_grouped: Transformer Engine's model, with grouped experts."""
    _, layout = LAYOUTS[name_of_layout]
    tp = layout["tensor_model_parallel_size"]
    prepare_layout(layout, DEVICE)
    told, wrong = Told(), []
    for name, options in MOE_MODELS.items():
        make, pair_of = (grouped_config, grouped_pair) if are_grouped else (make_moe_config, moe_pair)
        # Biases of norms get sums that cancel, whose rounding depends on the norm's kernel.
        options = {**options, "normalization": "RMSNorm"} if are_grouped else options
        config = make(layout, **LARGE, moe_enable_routing_replay=True, **options)
        stock, ours = pair_of(config, rank, DEVICE)
        seed = rank // tp  # without tensor parallelism ranks are replicas, with batches of their own
        expected, got = train_alike(stock, ours, seed)
        wrong += against_stock(f"{name_of_layout}, {name}", got, expected, config, p)
    group = ours.decoder.layers[0].mlp.flux_group
    return wrong + of_experts(told, tp) + unfused(group, {"moe.ag_scatter_gemm", "moe.gemm_gather_rs"})


def of_experts(told: Told, tp: int) -> list[str]:
    """What was said. On one rank attention has nothing to communicate, and says so: not that."""
    return [message for message in told.messages if tp > 1 or "group has one rank" not in message]


def train_alike(
    stock: Any, ours: Any, seed: int
) -> tuple[tuple[torch.Tensor, Grads], tuple[torch.Tensor, Grads]]:
    """`train` of both. A rounding may decide which expert a token chooses: both choose the same ones."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    routers = [[layer.mlp.router.router_replay for layer in m.decoder.layers] for m in (stock, ours)]
    for theirs in routers[0]:
        theirs.set_router_replay_action(RouterReplayAction.RECORD)
    expected = train(stock, seed)
    for theirs, mine in zip(*routers, strict=True):
        mine.set_target_indices(theirs.get_recorded_indices())
        mine.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return expected, train(ours, seed)


def expert_main_grads(rank: int, p: int, name_of_layout: str) -> list[str]:
    """Gradients are added to the main_grads of experts, which lie as in a buffer of data parallelism."""
    from flux.integrations.megatron import accumulate_into_main_grad

    _, layout = LAYOUTS[name_of_layout]
    prepare_layout(layout, DEVICE)
    config = make_moe_config(layout, **LARGE, moe_enable_routing_replay=True, **SWIGLU)
    stock, ours = moe_pair(config, rank, DEVICE)
    accumulate_into_main_grad(ours)
    added = []
    for number, layer in enumerate(ours.decoder.layers):
        pairs = [
            (expert.linear_fc2.weight, expert.linear_fc1.weight) for expert in layer.mlp.experts.local_experts
        ]
        weights = [weight for pair_of_one in reversed(pairs) for weight in pair_of_one]
        buffer = torch.full([sum(w.numel() for w in weights)], BEFORE, device=DEVICE)
        for weight, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
            weight.main_grad = part.view_as(weight)
        added += [
            f"decoder.layers.{number}.mlp.experts.local_experts.{i}.linear_fc{j}.weight"
            for i in range(len(pairs))
            for j in (1, 2)
        ]
    expected, (losses, grads) = train_alike(stock, ours, rank // layout["tensor_model_parallel_size"])
    wrong = [f"{name}: has a gradient, too" for name in added if grads[name] is not None]
    grads |= {name: ours.get_parameter(name).main_grad - BEFORE for name in added}
    return wrong + against_stock(f"{name_of_layout}, main_grad", (losses, grads), expected, config, p)


def full_graph(rank: int, p: int, name_of_layout: str) -> list[str]:
    """Megatron's graph of a whole iteration, of two micro-batches: each replay gives the losses and gradients
    of an eager model on flux, with other tokens, which choose other experts.
    """
    _, layout = LAYOUTS[name_of_layout]
    prepare_layout(layout, DEVICE, graphs=True)
    told = Told()
    config = make_moe_config(layout, **LARGE, **SWIGLU, **full_graphs(), moe_aux_loss_coeff=0.1)
    models = [moe_pair(config, rank, DEVICE)[1] for _ in range(2)]
    tp = layout["tensor_model_parallel_size"]
    return graphed_as_eager(models, rank // tp, BATCH) + of_experts(told, tp)


def full_graph_of_dense(rank: int, p: int, batch: int) -> list[str]:
    prepare(p, DEVICE, graphs=True)
    told = Told()
    options = MODELS["swiglu, rms norm"]
    config = make_config(**LARGE, **options, **full_graphs(), tensor_model_parallel_size=p)
    return graphed_as_eager([pair(config, DEVICE)[1] for _ in range(2)], 0, batch) + told.messages


def graphed_as_eager(models: list[Any], seed: int, batch: int) -> list[str]:
    """Trains the first model as it is and the second one from a CUDA graph. Seed: of the rank's tokens."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    def step(*, model: Any, data_iterator: Any, num_microbatches: int, **_: Any) -> torch.Tensor:
        losses = []
        for _ in range(num_microbatches):
            of_tokens = losses_of(model, next(data_iterator[0])["tokens"])
            of_tokens.mean().backward()
            losses.append(of_tokens.detach())
        return torch.stack(losses)

    warm, steps = (2, 5) if DEVICE == "cuda" else (9, 2)  # without a GPU, all steps are eager
    runs = (step, FullCudaGraphWrapper(step, cuda_graph_warmup_steps=warm))
    config, wrong = models[0].config, []
    about = {"num_microbatches": 2, "seq_length": sizes(config)[1], "forward_only": False}
    for model in models:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)  # where a graph leaves them
    for number in range(steps):
        results = []
        for model, run in zip(models, runs, strict=True):
            seeds = [100 * number + 10 * i + seed for i in range(2)]
            batches = [{"tokens": tokens_of(config, s, batch).to(DEVICE)} for s in seeds]
            for weight in model.parameters():
                weight.grad.zero_()
            losses = run(model=model, data_iterator=[iter(batches)], **about).clone()
            results.append((losses, {name: q.grad.clone() for name, q in model.named_parameters()}))
        (expected, grads), (got, ours) = results
        if not torch.equal(got, expected):
            wrong.append(f"step {number}: losses are up to {(got - expected).abs().max()} apart")
        apart = [name for name, grad in grads.items() if not torch.equal(ours[name], grad)]
        none = [name for name, grad in grads.items() if not grad.any()]
        if apart or none:
            wrong.append(f"step {number}: other gradients {apart}, zero {none}")
    if (FullCudaGraphWrapper.cuda_graph["training"] is None) == (DEVICE == "cuda"):
        wrong.append("on GPUs, the last steps must have come from a CUDA graph")
    return wrong


def loss_curves(rank: int, p: int, steps: int) -> list[str]:
    """The example: flux may be ahead of stock, or behind it, by a tenth of the steps.

    Roundings differ in every step, and training in bf16 multiplies them: nobody could bound single losses.
    But a model whose gradients are good learns as fast. One rank's part of them missing, or a tile of an
    earlier call now and then, slows that down or ends it.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_gpt as example

    late = steps // 10
    example.initialise(p)
    stock, ours = (
        example.train(example.build(p, on_flux), steps + (0 if on_flux else late), example.device_of(p))
        for on_flux in (False, True)
    )
    told = []
    if abs(stock[0] - ours[0]) > 2**-8 * stock[0]:
        told.append(f"first losses: {ours[0]}, of stock {stock[0]}")
    for step, loss in enumerate(ours):
        near = stock[max(0, step - late) : step + late + 1]
        # Written so that a NaN fails.
        if not min(near) - 2**-8 * stock[0] <= loss <= max(near) + 2**-8 * stock[0]:
            told.append(f"step {step}: {loss}, of stock around it {min(near)} to {max(near)}")
    return told if ours[-1] < stock[0] / 2 else [*told, f"learnt nothing: {ours}"]
