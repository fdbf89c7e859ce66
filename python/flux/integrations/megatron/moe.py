"""Megatron's layer of experts: what is between its router and its sum with shared experts is flux's.
Parameters, router, losses, shared experts, checkpoints and everything that flux does not do are Megatron's.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import distributed_data_parallel as data_parallel
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from flux.calls import transforms
from flux.integrations.megatron.experts import SharedTokens, expert_layer, lay_out
from flux.integrations.megatron.linear import DTYPES, FluxLinear, collects, prepare_capture, tell
from flux.layers import DeferredGrads
from flux.moe import route
from flux.moe.routing import MAX_TOP_K

Tensor = torch.Tensor
_LINEARS = ("linear_fc1", "linear_fc2")  # of an expert
# Stand-ins if Transformer Engine is missing.
OF_TRANSFORMER_ENGINE = tuple(
    cls for name, cls in vars(te).items() if isinstance(cls, type) and name[:2] == "TE" and "Linear" in name
)
# Transformer Engine's, of grouped experts; None or stand-ins if it is missing.
GROUPED_LINEARS = tuple(
    getattr(te, name, None) for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
)
# Whose results Megatron's fine-grained offloading moves to the CPU.
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}


class FluxMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoELayer with flux.moe.route, ag_scatter_gemm and gemm_gather_rs in place of a token
    dispatcher and the calls of single experts; for tensor and expert parallelism and both.

    Arguments, parameters, state and results are those of Megatron's class.

    Example::

        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from flux.integrations.megatron import FluxMoELayer, convert_spec

        spec = convert_spec(get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False))
        assert spec.submodules.mlp.module is FluxMoELayer
    """

    token_dispatcher: Any
    flux_unfit: str | None = "it is not built yet"

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **options)
        self._begin(groups)

    @classmethod
    def adopt(cls, layer: MoELayer) -> None:
        """Makes a layer of Megatron's class one of this class, in place."""
        layer.__class__ = cls
        old = layer.token_dispatcher
        groups = types.SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
        layer._begin(groups)

    def _begin(self, groups: Any) -> None:
        self.flux_group = groups.tp_ep
        prepare_capture(self.config, groups.tp_ep)
        self.flux_ep_size = groups.tp_ep.size() // groups.expt_tp.size()
        self.flux_unfit = self._reason(groups)
        self.flux_accumulates = self.config.gradient_accumulation_fusion
        self._modules_below = _Modules(self.experts)
        # Of fc1 and fc2; only if the experts are flux's, whose backward_dw completes the gradients.
        linears = self._modules_below.linears
        delays = all(isinstance(layer, FluxLinear) and layer.flux_deferred is not None for layer in linears)
        self._deferred = tuple(DeferredGrads() if delays else None for _ in range(2))
        self._flux_runs = False
        self._dispatchers = {False: self.token_dispatcher}
        if self.flux_unfit is None:
            self._dispatchers[True] = _NoDispatcher(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
            )
        self.lay_out_experts()

    def lay_out_experts(self) -> None:
        """Moves the experts' weights of fc1 into one tensor, and those of fc2 into another, so that no pass
        copies them. Leaves those alone that share memory already.
        """
        if self.why_never() is None:
            for name in _LINEARS:
                lay_out(self._weights(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FluxMoELayer:
        # As of .to() and .cuda(), which give each parameter memory of its own.
        super()._apply(fn, recurse)
        self.lay_out_experts()
        return self

    def why_never(self) -> str | None:
        """Why all calls run in Megatron's own code, or None. The same on all ranks."""
        if self.flux_unfit is None and not self._look_below().are_known:
            return "other modules are around its experts' linear layers, such as adapters"
        return self.flux_unfit

    def _reason(self, groups: Any) -> str | None:
        """Why all calls run in Megatron's own code, or None. The same on all ranks."""
        config = self.config
        are_grouped = type(self.experts) is TEGroupedMLP
        reasons = {
            "the group of its experts has one rank": groups.tp_ep.size() == 1,
            f"its experts are {type(self.experts).__name__}, neither SequentialMLP nor TEGroupedMLP": (
                type(self.experts) is not SequentialMLP and not are_grouped
            ),
            "its experts have biases": config.add_bias_linear,
            "its experts compute in fp8 or fp4": config.fp8 or config.fp4,
            "its activation is Transformer Engine's": config.use_te_activation_func,
            "probabilities are applied before the experts": config.moe_apply_probs_on_input,
            "experts' inputs are padded to their capacity": config.moe_pad_expert_input_to_capacity,
            "shared experts overlap with its dispatcher": config.moe_shared_expert_overlap,
            "its communication overlaps with another batch": config.overlap_moe_expert_parallel_comm,
            "its dispatcher's backward pass overlaps with weight gradients": (
                getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
            ),
            "its token dispatcher is flex": config.moe_token_dispatcher_type == "flex",
            f"its tokens choose more than {MAX_TOP_K} experts": config.moe_router_topk > MAX_TOP_K,
            "the ranks of its group are in another order": (
                groups.tp_ep.rank() != groups.ep.rank() * groups.expt_tp.size() + groups.expt_tp.rank()
            ),
        }
        if are_grouped:
            reasons |= _reasons_of_grouped(self.experts, config, _is_swiglu(config))
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _why_not(self, x: Tensor) -> str | None:
        """Why this call runs in Megatron's own code, or None. The same on all ranks."""
        if (never := self.why_never()) is not None:
            return never
        if self.token_dispatcher not in self._dispatchers.values():
            return "another dispatcher was chosen for this call"  # such as that of the inference engine
        if getattr(self.config, "_cpu_offloading_context", None) is not None:
            return "activations are offloaded to the CPU"
        below = self._modules_below
        if not all(_only_fetches(hook) for _, hook in below.hooks()):
            return "hooks run before its experts"  # flux does not call these modules
        if transforms.enabled(x.device):
            return None
        if x.dtype not in DTYPES or below.dtypes() != {x.dtype}:
            return f"x is {x.dtype}, and its experts are another type or none that flux takes"
        return None

    def preprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        self._choose(hidden_states)
        return super().preprocess(hidden_states, *args, **options)

    def router_and_preprocess(self, hidden_states: Tensor) -> Any:
        # Megatron-Core 0.15 has no preprocess, later releases do not call this.
        self._choose(hidden_states)
        return super().router_and_preprocess(hidden_states)

    def _choose(self, hidden_states: Tensor) -> None:
        """Who runs this call: flux or Megatron."""
        reason = self._why_not(hidden_states)
        self._flux_runs = reason is None
        if self.token_dispatcher in self._dispatchers.values():
            self.token_dispatcher = self._dispatchers[self._flux_runs]
        if reason is not None:
            tell(type(self).__name__, reason)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor, *args: Any) -> Any:
        if not self._flux_runs:
            return super().routed_experts_compute(hidden_states, probs, *args)
        ids, scores = chosen(
            self.token_dispatcher.routing_map, probs, self.config.moe_router_topk, self.num_local_experts
        )
        self.token_dispatcher.routing_map = None
        routing = route(
            ids,
            scores.detach(),  # the second layer makes their gradient
            self.config.num_moe_experts,
            group=self.flux_group,
            ep_size=self.flux_ep_size,
            max_tokens=self._most_tokens(hidden_states),
        )
        for module, hook in self._modules_below.hooks():
            hook(module, ())
        w1, w2 = (self._weights(name) for name in _LINEARS)
        fusion = collects(self, *w1, *w2)
        first, second = self._deferred
        tokens = SharedTokens()
        product = expert_layer(0, hidden_states, w1, routing, fusion, first, tokens=tokens)
        activation = "swiglu" if _is_swiglu(self.config) else None
        rows = self._activate(product) if activation is None else product
        # Megatron multiplies by the probabilities before the second product: the same, it is linear.
        return expert_layer(1, rows, w2, routing, fusion, second, activation, scores, tokens), None

    def backward_dw(self, *args: Any, **options: Any) -> None:
        """Gradients of weights that the oldest backward pass left (delay_wgrad_compute)."""
        # Megatron-Core 0.15 has no arguments; later ones choose routed_experts, shared_experts or both.
        if args[0] if args else options.get("routed_experts", True):
            for deferred in reversed(self._deferred):
                if deferred:
                    deferred.compute()
        # Hooks of data parallelism are the experts' own.
        super().backward_dw(*args, **options)

    def _look_below(self) -> _Modules:
        """The modules that flux does not call, as they are now."""
        if not self._modules_below.are_of(self.experts):
            self._modules_below = _Modules(self.experts)
        return self._modules_below

    def _weights(self, name: str) -> list[Tensor]:
        """Of the experts' fc1 or fc2. The last expert comes first, as in `chosen`."""
        below = self._modules_below
        try:
            return below.weights(name)
        except KeyError:  # such as those with a parametrization
            return [getattr(linear, weight) for linear, weight in below.owners(name)]

    def _most_tokens(self, x: Tensor) -> int | None:
        """What no rank exceeds; None if all have as many as this one. Read on the host."""
        if not self.config.variable_seq_lengths:
            return None
        most = torch.tensor(x.shape[0], device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.flux_group)
        return int(most)

    def _activate(self, product: Tensor) -> Tensor:
        """Megatron's activation. Not in the GEMM: there the product would have to be made again backward."""
        config = self.config
        activation = config.activation_func
        if not config.gated_linear_unit:
            result: Tensor = activation(product)
            return result
        gate, up = product.chunk(2, dim=-1)
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        gated: Tensor = activation(gate) * (up + config.glu_linear_offset)
        return gated


class _Modules:
    """A module of experts and all below it, in order. A walk over hundreds takes longer than the launches of
    a call: it is made once, and again if a module was replaced.
    """

    def __init__(self, experts: torch.nn.Module) -> None:
        self._all = list(experts.modules())
        self._children = [module._modules.copy() for module in self._all]
        self._owners: dict[str, list[tuple[Any, str]]] = {}
        parents = getattr(experts, "local_experts", (experts,))  # grouped: both hold all experts
        self.linears = [getattr(parent, name, parent) for parent in parents for name in _LINEARS]
        parallel = (ColumnParallelLinear, RowParallelLinear, *OF_TRANSFORMER_ENGINE)
        self.are_known = all(isinstance(linear, parallel) for linear in self.linears)
        self._only_weights = False  # of the experts: whether there are no other parameters, once it is known

    def are_of(self, experts: torch.nn.Module) -> bool:
        """Whether a walk would find the same modules."""
        # Lists and dicts of modules: compared by identity, and in C.
        return self._all[0] is experts and [module._modules for module in self._all] == self._children

    def owners(self, name: str) -> list[tuple[Any, str]]:
        """The modules that hold the weights of the experts' fc1 or fc2, and what they call them. The last
        expert comes first.
        """
        if name not in self._owners:
            experts: Any = self._all[0]
            if type(experts) is TEGroupedMLP:
                linear = getattr(experts, name)
                found = [(linear, weight) for weight in _names_of_weights(linear)]
            else:
                found = [(getattr(expert, name), "weight") for expert in reversed(experts.local_experts)]
            self._owners[name] = found
        return self._owners[name]

    def weights(self, name: str) -> list[Tensor]:
        """Those that are parameters of `owners`; KeyError if one is none."""
        # A fifth of the time of getattr.
        return [module._parameters[weight] for module, weight in self.owners(name)]

    def hooks(self) -> list[tuple[torch.nn.Module, Callable[..., Any]]]:
        """Those before the modules' forward passes, in Megatron's order."""
        with_hooks = [module for module in self._all if module._forward_pre_hooks]
        return [(module, hook) for module in with_hooks for hook in module._forward_pre_hooks.values()]

    def dtypes(self) -> set[torch.dtype]:
        """Of all parameters."""
        if self._only_weights:  # a third of the time of the walk below
            with contextlib.suppress(KeyError):  # it is no parameter any more
                return {w.dtype for w in self.weights(_LINEARS[0]) + self.weights(_LINEARS[1])}
        of_modules = [module._parameters.values() for module in self._all if module._parameters]
        parameters = [p for parameters in of_modules for p in parameters if p is not None]
        owners = [owner for name in _LINEARS for owner in self.owners(name)]
        weights = [module._parameters.get(weight) for module, weight in owners]
        self._only_weights = {*map(id, parameters)} == {*map(id, weights)}
        return {p.dtype for p in parameters}


class _NoDispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Flattens tokens and keeps the routing map, as flux needs it. flux.moe communicates."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def _names_of_weights(linear: Any) -> list[str]:
    """Of fc1 or fc2, the last expert's first."""
    return [f"weight{number}" for number in reversed(range(linear.num_gemms))]


def _reasons_of_grouped(experts: Any, config: Any, is_swiglu: bool) -> dict[str, bool]:
    """Options of this class, or that Transformer Engine's layers carry out, which flux does not serve."""
    linears = (experts.linear_fc1, experts.linear_fc2)
    are_known = tuple(map(type, linears)) == GROUPED_LINEARS
    are_separate = are_known and all(
        each._parameters.get(name) is not None for each in linears for name in _names_of_weights(each)
    )
    selective = config.recompute_granularity == "selective"
    recomputed = selective and "moe_act" in (config.recompute_modules or ())
    offloads = getattr(config, "fine_grained_activation_offloading", False)
    offloaded = _OFFLOADED & set(getattr(config, "offload_modules", None) or ())
    interleaved = getattr(config, "moe_mlp_glu_interleave_size", None) is not None
    return {
        "the linear layers of its experts are not Transformer Engine's": not are_known,
        "the weights of its experts are one parameter": are_known and not are_separate,
        "its experts have a recipe of quantization": getattr(config, "quant_recipe", None) is not None,
        "the weights of its experts are split over another group too (generalized tensor parallelism)": (
            any(getattr(w, "gtp_remat_size", None) not in (None, 1) for w in experts.parameters())
        ),
        "its experts are one operation of Transformer Engine's": getattr(experts, "_with_fused_impl", False),
        "Transformer Engine delays the gradients of its weights": config.delay_wgrad_compute,
        "gates and ups alternate in its experts' weights": config.gated_linear_unit and interleaved,
        "its activation keeps its input in fp8": (
            config.bias_activation_fusion and config.activation_func_fp8_input_store
        ),
        # flux keeps no result of SwiGLU anyway. What it keeps of others is as much as without the option.
        "its activation is recomputed": recomputed and not is_swiglu,
        "activations of its experts are offloaded to the CPU": bool(offloads and offloaded),
    }


def _is_swiglu(config: Any) -> bool:
    """Whether the activation is silu(gate) * up and nothing else."""
    gated = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    return gated and config.activation_func_clamp_value is None and config.glu_linear_offset == 0


def _only_fetches(hook: Callable[..., Any]) -> bool:
    """Whether a hook waits for a module's parameters (overlap_param_gather); its arguments are nothing."""
    name: str = getattr(hook, "__qualname__", "")
    of_data_parallel = name.startswith("DistributedDataParallel._make_forward_pre_hook.")
    return of_data_parallel and getattr(hook, "__module__", "") == data_parallel.__name__


def chosen(routing_map: Tensor, probs: Tensor, top_k: int, local_experts: int) -> tuple[Tensor, Tensor]:
    """Experts, -1 for none, and probabilities [tokens, k] of a map and of probabilities [tokens, experts].

    Experts are numbered in reverse within each slice of `local_experts`: on every rank, whatever the layout
    of its weights, for all ranks must number alike (flux.integrations.megatron.experts says what for).
    """
    # A stable sort: the first k are the chosen experts, in order, whatever the machine.
    found, experts = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    experts, last = experts[:, :top_k], local_experts - 1
    is_power = local_experts & last == 0  # then slices begin at multiples of their size: one launch
    numbers = experts ^ last if is_power else experts + last - 2 * (experts % local_experts)
    return torch.where(found[:, :top_k] > 0, numbers, -1), probs.gather(1, experts)
