"""Common parts of all benchmarked ops: context, candidates, data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import flux
from flux import _native
from flux import peers as packages
from flux.bench.model import FP8, in_way
from flux.bench.suites import Problem
from flux.bench.timing import Call, all_max
from flux.comm import registry
from flux.comm.cuda import CudaWorkspace
from flux.ops._scales import Scaling
from flux.ops.plan import ways_of, workspace_plan
from flux.ops.plan_nodes import SCHEDULES
from flux.testing import GemmRsCase
from flux.tuning.facts import Tuning

T = TypeVar("T")

# Below this M the weight would stay in L2 during a burst, unlike in a model: rotate over copies of it.
# Successive calls of a correctness check: they use both buffers of a workspace, and one of them again.
CALLS = 3
DECODE_M = 256
_MIN_WEIGHT_SETS = 3


@dataclass(frozen=True)
class Context:
    """One rank of a benchmark. ``group`` is None for a single rank."""

    rank: int
    world_size: int
    tp: int
    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    say: Callable[[str], None] = lambda text: None  # reports the progress of a long preparation
    twins: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group of an operator whose ranks talk to each other."""
        assert self.group is not None
        return self.group

    def ours(self, op: str, make: Callable[[str, str, dist.ProcessGroup], Candidate]) -> list[Candidate]:
        """What `make` gives for name, role and group of each way in which flux runs `op`: as planned, and as
        `twins` say.
        """
        ways = (*ways_of(op), *SCHEDULES.get(op, ()))
        twins = [(in_way(way), "parts", g) for way, g in self.twins.items() if way in ways]
        return [make(*each) for each in [("flux", "flux", self.ranks), *twins]]

    def with_twins(self, ways: Sequence[str]) -> Context:
        """With a group of the same ranks for each of these ways, whose calls all run so. A collective."""
        twins = {}
        for way in ways if self.group is not None else ():
            group = twins[way] = dist.new_group(list(range(self.world_size)))
            registry.get(group, self.device, "bench").tuning = Tuning(forced=way)
        return replace(self, twins=twins)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    role: "flux", "gemm" and "comm" (each alone), "serial", "peer", "parts" (flux in another way), "fast"
    (with less accurate sums of fp8 products), or "config" (one choice of a sweep).
    calls: how often `call` does the work: a CUDA graph holds several.
    eager: what its host cost is measured of, where that is not `call`.
    """

    name: str
    role: str
    call: Call
    calls: int = 1
    eager: Call | None = None


@dataclass
class Prepared:
    """The candidates of one row in the order in which they take turns."""

    candidates: list[Candidate]
    plan: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def tried(make: Callable[[], T], context: Context) -> tuple[T | None, str]:
    """make(), or None and why it cannot run on some rank. A collective: all ranks agree on which."""
    error, made = "", None
    try:
        made = make()
    except (RuntimeError, AttributeError, ImportError, ValueError, TypeError, AssertionError) as failure:
        error = (str(failure).strip().splitlines() or [type(failure).__name__])[0][:200]
    if all_max([1.0 if error else 0.0], context.group, context.device)[0]:
        return None, error or "it failed on another rank"
    return made, ""


def collectives(context: Context) -> str:
    """The library of torch's collectives on this device."""
    return "NCCL" if context.cuda else "gloo"


def random_operands(
    m: int, n: int, k: int, context: Context, weight_bytes: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [m, k] and one weight [n, k], several for decode shapes.

    Normal x 0.1: zeros and small integers draw less power and would run 10-20 % faster.
    weight_bytes: of an element of the weights that are timed, if not that of the context's dtype.
    """
    generator = torch.Generator(context.device).manual_seed(1234 + context.rank)

    def normal(rows: int) -> torch.Tensor:
        tensor = torch.randn(rows, k, generator=generator, device=context.device, dtype=context.dtype)
        return tensor.mul_(0.1)

    sets = 1
    if context.cuda and m <= DECODE_M:
        l2_bytes = torch.cuda.get_device_properties(context.device).L2_cache_size
        sets = max(_MIN_WEIGHT_SETS, -(-2 * l2_bytes // (n * k * (weight_bytes or context.dtype.itemsize))))
    return normal(m), [normal(n) for _ in range(sets)]


def rotating(weights: Sequence[T], call: Callable[[T], object]) -> Call:
    """Calls with the next weight each time."""
    if len(weights) == 1:
        only = weights[0]
        return lambda: call(only)
    position = 0

    def rotate() -> object:
        nonlocal position
        position = (position + 1) % len(weights)
        return call(weights[position])

    return rotate


def async_tp(
    weights: Sequence[T], fused: Callable[[T], object], context: Context
) -> tuple[list[Candidate], list[str]]:
    """PyTorch's own fused op as a peer, or a note that says why it cannot run. All ranks agree on which."""
    group = context.ranks
    call = rotating(weights, fused)

    def enabled() -> Candidate:
        from torch.distributed import _symmetric_memory as symm_mem

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch enables every group automatically
            symm_mem.enable_symm_mem_for_group(group.group_name)
        call()
        torch.cuda.synchronize(context.device)
        return Candidate("async-TP", "peer", call)

    found, error = tried(enabled, context)
    return ([], [f"async-TP could not run: {error}"]) if found is None else ([found], [])


def installed(
    kind: Mapping[str, tuple[str, Any]], make: Callable[[str], Candidate], context: Context
) -> tuple[list[Candidate], list[str]]:
    """Candidates of the packages of a kind (flux.peers) that are installed, and notes on those that fail."""
    candidates, notes = [], []
    for name in packages.here(kind):
        candidate, error = tried(lambda name=name: make(name), context)  # type: ignore[misc]
        if candidate is None:
            notes.append(f"{name} could not run: {error}")
        else:
            candidates.append(candidate)
    return candidates, notes


def of_packages(
    op: str,
    sizes: tuple[int, int, int],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    exact: Callable[[packages.Product], str],
    context: Context,
) -> tuple[list[Candidate], list[str]]:
    """Installed packages' ways to do `op` as peers, and notes on those that cannot run, or are wrong.

    sizes: m, n, k of a rank's GEMM. exact: compares what a peer computes, as `compare` says it.
    """
    kind = packages.PRODUCTS[op]

    def opened(name: str) -> Candidate:
        call = kind[name][1](context, *sizes)
        if (said := exact(call)) != "exact":
            raise RuntimeError(f"wrong: {said}")
        return Candidate(name, "peer", rotating(weights, lambda w: call(x, w)))

    return installed(kind, opened, context)


def compare(got: torch.Tensor, want: torch.Tensor) -> str:
    """ "exact", or where and by how much a result differs."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    wrong = got != want
    count = int(wrong.sum())
    if count == 0:
        return "exact"
    first = wrong.nonzero()[0].tolist()
    at = tuple(first)
    return f"{count} of {want.numel()} wrong; at {first} got {got[at].item():g}, expected {want[at].item():g}"


def marked(
    problem: Problem,
    context: Context,
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    whole: bool,
    depth: int = 0,
) -> str:
    """Compares call(x, weight), several times in a row, on integers that carry each rank's mark.

    Args:
        whole: the result is the sum over ranks, not only this rank's rows of it.
        depth: of the product that is summed, if not that of the problem.
    """
    m, n, k = problem.local(context.tp)
    results = []
    for seed in range(CALLS):
        case = GemmRsCase(m, n, depth or k, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        want = case.expected_sum(context.device) if whole else case.expected(context.rank, context.device)
        results.append(compare(call(x, weight), want))
    flux.check(context.group)
    return first_wrong(results)


def first_wrong(results: Sequence[str]) -> str:
    """The first answer of `compare` that is not "exact", if there is one."""
    return next((result for result in results if result != "exact"), "exact")


# Largest difference of two computations, relative to the root mean square of the result: single
# elements by this much, their mean by an eighth of it. Rounding moves elements by a few units of 2^-8 for
# bfloat16; if the contribution of one of p ranks is missing, all are wrong by about 1/sqrt(p).
_APART = {torch.bfloat16: 0.25, torch.float16: 0.03, torch.float32: 1e-4, torch.float64: 1e-9}


def agree(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    """ "agrees to ..." if all tensors are alike but for rounding, else the first that is not, and how far.

    For what cannot be computed exactly: activations, norms, whole models.
    """
    if got.keys() != want.keys():
        return f"results {sorted(got)}, expected {sorted(want)}"
    worst = 0.0
    for name, expected in want.items():
        if got[name].shape != expected.shape:
            return f"{name}: shape {list(got[name].shape)}, expected {list(expected.shape)}"
        reference = expected.detach().double()
        apart = (got[name].detach().double() - reference).abs()
        scale = max(float(reference.square().mean().sqrt()), 1e-30)
        most, mean = float(apart.max()) / scale, float(apart.square().mean().sqrt()) / scale
        limit = _APART[expected.dtype]
        # A negated comparison, so that a NaN fails.
        if not (most <= limit and mean <= limit / 8):
            return f"{name}: off by {most:.2g} of its rms at most and {mean:.2g} on average"
        worst = max(worst, mean)
    return f"agrees to {worst:.1e}" if worst else "agrees to the bit"


def kernel_plan(
    op: str, m: int, n: int, k: int, context: Context, scales: str = ""
) -> tuple[CudaWorkspace, Any]:
    """Workspace and plan of an operator whose kernel runs in every tile shape. scales: of fp8 operands."""
    workspace = registry.get(context.ranks, context.device, op)
    scaling = Scaling("block" if scales == "block" else "row", context.dtype, False) if scales else None
    dtype = getattr(torch, FP8) if scales else context.dtype
    plan = workspace_plan(workspace, op, m, n, k, dtype, False, scaling)
    if plan.way != "fused" or not isinstance(workspace, CudaWorkspace):
        raise RuntimeError(f"bench --all-configs needs the fused kernel: {plan.reason}")
    return workspace, plan


# Suffixes of the model's candidate names, and what they stand for in a packed choice (csrc/gemm/select.h).
_CLUSTERS = {"": 1, " pair-m": 2, " pair-n": 3, " split-2": 4, " split-3": 5}
# For swap-AB tiles: number of CTAs that split K, and that share the weight.
_SWAP_AB_CLUSTERS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2))


def packed_choices(plan: Any, operand_bytes: int = 2) -> list[tuple[str, int]]:
    """Every (tile shape, cluster) the cost model considered: its name, and the `config` of a low-level op."""
    core = _native.core
    known = {
        config.name + suffix: config.id | cluster << 8
        for config in core.tile_configs(operand_bytes)
        for suffix, cluster in _CLUSTERS.items()
    }
    first = core.NUM_SWAP_AB
    for tile in range(first) if operand_bytes == 2 else range(first, first + core.NUM_FP8_SWAP_AB):
        for split, sharers in _SWAP_AB_CLUSTERS:
            choice = core.FIRST_SWAP_AB + tile | split << 8 | sharers << 16
            known[core.select_gemm(1, 8, 8, False, 1, choice).name] = choice
    return [(name, known[name]) for name, _ in plan.candidates if name in known]


def explained(
    op: str, m: int, n: int, k: int, context: Context, scales: str | None = None
) -> dict[str, Any] | None:
    """plan_dict of a call, or None if explain would plan for a GPU that the benchmark does not use. scales:
    of fp8 operands.
    """
    if not context.cuda and torch.cuda.is_available():
        return None
    dtype = getattr(torch, FP8) if scales else context.dtype
    return plan_dict(flux.explain(op, m, n, k, dtype=dtype, group=context.group, scales=scales))


def plan_dict(plan: Any) -> dict[str, Any]:
    """A flux.Plan as JSON: what was chosen, why, and what the model gave to the others."""
    # Candidates are sorted, and the plan is the model's best.
    chosen = f"{plan.candidates[0][0]} g{plan.group_m}" if plan.candidates else ""
    if plan.fused and plan.op in ("gemm_ar", "all_reduce"):
        way = {0: "one-shot", 1: "two-shot"}.get(plan.mode, "gemm_rs + all_gather")
        chosen = f"{plan.config_name} {way}".strip()
    if plan.levels is not None:
        chosen = plan.levels.reason
    return {
        "fused": bool(plan.fused),
        "way": plan.way,
        "transport": str(plan.transport),
        "config": chosen,
        "time_us": plan.time_us,
        "reason": str(plan.reason),
        "candidates": [[str(name), float(time)] for name, time in plan.candidates],
    }
