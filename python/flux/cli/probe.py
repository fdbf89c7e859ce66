"""Active measurements between GPUs: ``python -m flux.cli.probe push|symm``.

Prints one JSON object on the last line of its output.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import permutations
from typing import Any

import torch

from flux import machine
from flux.bench.timing import elapsed_ms, recorded

_PUSH_BYTES = 256 << 20
_REPEATS = 6
_cuda: Any = torch.cuda  # parts of it are not typed


def _timed_copies(
    pairs: list[tuple[int, int]],
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]],
    streams: list[torch.cuda.Stream],
) -> float:
    """GB/s of the slowest of these pairs when all push at once. The source issues the copy: a push."""
    events = []
    for i, j in pairs:
        # torch orders a copy after both devices' current streams, so default streams would serialise a ring.
        with torch.cuda.stream(streams[i]):
            # The delay lets all GPUs enqueue everything before the first byte moves.
            _cuda._sleep(4_000_000)
            copy = partial(buffers[j][1].copy_, buffers[i][0], non_blocking=True)
            events.append(recorded(copy, _REPEATS))
    slowest = max(elapsed_ms(start, end) for start, end in events)
    return float(_PUSH_BYTES * _REPEATS / slowest / 1e6)


def push() -> dict[str, Any]:
    """Copy-engine bandwidth of every ordered pair, and with every GPU pushing to its neighbour at once."""
    count = torch.cuda.device_count()
    buffers = {}
    for i in range(count):
        source = torch.empty(_PUSH_BYTES, dtype=torch.uint8, device=f"cuda:{i}").fill_(i + 1)
        buffers[i] = (source, torch.empty_like(source))
    for i in range(count):
        torch.cuda.synchronize(i)
    streams = [_cuda.Stream(i) for i in range(count)]
    pairs = list(permutations(range(count), 2))
    rates = {}
    for pair in pairs:
        _timed_copies([pair], buffers, streams)
        rates[f"{pair[0]}-{pair[1]}"] = max(_timed_copies([pair], buffers, streams) for _ in range(2))
    ring = [(i, (i + 1) % count) for i in range(count)]
    return {"pairs": rates, "ring": max(_timed_copies(ring, buffers, streams) for _ in range(3))}


def _symm_rank(rank: int, size: int) -> dict[str, Any]:
    import torch.distributed as dist

    import flux
    from flux import _env, _native
    from flux.comm.symm_mem import SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    memory = SymmetricMemory(1 << 20, group, device)
    answer: dict[str, Any] = {"backend": str(_env.get("FLUX_SYMM_BACKEND")), "peers": len(memory.peers)}
    if _native.available():
        x = torch.full((128 * size, 256), float(rank + 1), device=device, dtype=torch.bfloat16)
        weight = torch.full((256, 256), 1 / 256, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            out = flux.gemm_rs(x, weight)
        flux.check()
        exact = bool((out == size * (size + 1) / 2).all())
        answer["gemm_rs"] = "exact" if exact else f"rank {rank} got a wrong sum"
    return answer


def symm() -> dict[str, Any]:
    """Symmetric memory between all GPUs, and one tiny fused call through it."""
    from flux.cli.probe import _symm_rank as fn  # importable in other processes: this module is __main__
    from flux.testing import spawn

    answers: list[dict[str, Any]] = spawn(fn, torch.cuda.device_count(), timeout_s=90)
    wrong = [a for a in answers if a.get("gemm_rs", "exact") != "exact"]
    return wrong[0] if wrong else answers[0]


def main() -> None:
    machine.disable_multicast()
    probes = {"push": push, "symm": symm}
    try:
        answer = probes[sys.argv[1]]()
    except Exception as error:  # the parent process shows the error
        answer = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
