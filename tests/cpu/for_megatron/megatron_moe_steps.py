"""Backward passes of Megatron's experts on flux: what they call, gradients of routing weights, and gradients
that are delayed. Scenarios of test_megatron_moe.py.
"""

from __future__ import annotations

from typing import Any

import torch
from cases import Calls
from megatron_models import (
    SWIGLU,
    MoECalls,
    assert_alike,
    forward,
    make_moe_config,
    moe_pair,
    of_experts,
    replicas,
    summed_grads,
)


def recorded(result: torch.Tensor) -> set[str]:
    """Names of what autograd has recorded."""
    names, todo, seen = set(), [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            todo += [following for following, _ in node.next_functions]
    return names


def what_training_costs(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """No routing is recorded, and both backward passes of a layer share the tokens of rows."""
    _, ours = moe_pair(make_moe_config(layout, **SWIGLU), rank)
    loss = forward(ours, rank)
    names = recorded(loss)
    assert any("_Layer" in name for name in names) and not [name for name in names if "route" in name]
    with Calls() as calls:
        loss.backward()
    assert calls.names.count("moe_tokens_of_rows") == len(ours.decoder.layers) == 2
    assert calls.names.count("reduce_scatter") == 2


def gradients_of_scores(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """Bit for bit those that a recorded routing gives, whatever the numbers of tokens, none too."""
    from flux.integrations.megatron.experts import SharedTokens, expert_layer
    from flux.moe import ag_scatter_gemm, gemm_gather_rs, route

    g = torch.Generator().manual_seed(rank)
    weights = [torch.randint(-2, 3, (2, 4, 4), generator=g).float() for _ in range(2)]
    for tokens, dtype in (((3, 5), torch.float32), ((0, 5), torch.bfloat16), ((0, 0), torch.float32)):
        count = tokens[rank]
        x = torch.randint(-2, 3, (count, 4), generator=g).float()
        ids = torch.stack([torch.randperm(4, generator=g)[:3] for _ in range(count)] or [torch.ones(3)])
        ids = ids[:count].long()
        scores = torch.randint(1, 4, (count, 3), generator=g).to(dtype)
        found = []
        for records in (True, False):
            leaves = [t.clone().requires_grad_() for t in (x, scores, *weights)]
            given = leaves[1] if records else leaves[1].detach()
            routing = route(ids, given, 4, ep_size=2, max_tokens=max(tokens))
            if records:
                out = gemm_gather_rs(ag_scatter_gemm(leaves[0], leaves[2], routing), leaves[3], routing)
            else:
                shared = SharedTokens()
                rows = expert_layer(0, leaves[0], leaves[2].unbind(), routing, False, tokens=shared)
                out = expert_layer(
                    1, rows, leaves[3].unbind(), routing, False, scores=leaves[1], tokens=shared
                )
            out.backward(torch.ones_like(out))
            found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert found[0][2].shape == (count, 3) and found[0][2].count_nonzero() >= count


def delayed_gradients(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """delay_wgrad_compute: backward_dw computes gradients of experts, and calls data parallelism's hooks."""
    from flux.integrations.megatron import accumulate_into_main_grad

    config, grads = make_moe_config(layout, moe_shared_expert_intermediate_size=16), []
    models = [moe_pair(config, rank)[0]]
    config.delay_wgrad_compute = True  # its constructor wants a schedule that runs on GPUs only
    models += [moe_pair(config, rank)[1] for _ in range(2)]
    for number, model in enumerate(models):
        accumulate_into_main_grad(model, number == 2)
        wrapped = replicas(model, delay_wgrad_compute=number > 0)
        with MoECalls() as calls:
            for seed in (rank, 2 + rank):
                forward(wrapped, seed).backward()
        assert ("ag_scatter_gemm" in calls.names) == (number > 0)
        assert all(p.main_grad.any() != (number > 0) and p.grad is None for p in of_experts(model).values())
        for _ in range(2 if number else 0):
            for layer in model.decoder.layers:
                layer.mlp.backward_dw(routed_experts=False, shared_experts=True)
                layer.mlp.backward_dw()
                layer.self_attention.backward_dw()
        grads.append(summed_grads(wrapped))
    assert_alike(grads[1], grads[0])
    assert_alike(grads[2], grads[0])
