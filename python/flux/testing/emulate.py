"""Several ranks on one GPU.

To a kernel, peers are pointers: a rank is a stream, a workspace in plain device memory and an equal part of
the SMs. So one GPU is enough to run the real kernels, with their slots, signals and epochs, for any number of
ranks. What it can't show is what a link does to the order of writes: that takes several GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from flux import _native
from flux.comm import cuda
from flux.comm.workspace import HEADER_BYTES, MAX_WORLD_SIZE, OP_NAMES, round_up
from flux.errors import CommTimeoutError

_torch_cuda: Any = torch.cuda  # parts of it are not typed


def why_not(world_size: int, device: torch.device) -> str | None:
    """Why that many ranks cannot be emulated on that device, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not 2 <= world_size <= MAX_WORLD_SIZE:
        return f"2 to {MAX_WORLD_SIZE} ranks can be emulated, not {world_size}"
    return cuda.why_not(device)


class EmulatedRanks:
    """`world_size` ranks on one GPU, each with ``num_sms`` of its SMs.

    Ranks wait for each other, so all their CTAs must be resident at once: nothing else may run on the GPU.

    Attributes:
        num_sms: SMs of each rank; even, so that a cluster of two CTAs fits.
    """

    def __init__(self, world_size: int, device: torch.device | None = None, timeout_s: float = 10.0) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        reason = why_not(world_size, self.device)
        if reason is not None:
            raise RuntimeError(f"EmulatedRanks: {reason}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = properties.multi_processor_count // world_size // 2 * 2
        self._streams = [_torch_cuda.Stream(self.device) for _ in range(world_size)]
        # One pinned ErrorRecord for each rank: a kernel writes it, the host reads it.
        self._errors = [torch.zeros(16, dtype=torch.int32, pin_memory=True) for _ in range(world_size)]
        self._memory: list[torch.Tensor] = []
        self._buffers: list[Any] = []
        self._signal_bytes = 0
        self._slot_bytes = 0
        torch.ops.flux._prepare()

    def gemm_rs(
        self,
        xs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        transpose_weight: bool = False,
        config: int = -1,
        join: bool = True,
        absent: Collection[int] = (),
    ) -> list[torch.Tensor]:
        """GEMM+ReduceScatter of all ranks at once.

        Args:
            xs: for every rank x [m, k], contiguous, bfloat16 or float16.
            weights: for every rank [n, k], or [k, n] with `transpose_weight`.
            bias: [n], the same for all.
            config: id of a tile shape, or Plan.choice; -1: what the cost model chooses for ``num_sms``.
            join: whether the current stream waits for all ranks. If not, a rank starts its next call as soon
                as it is done with this one, as in real life; tensors must live until :meth:`check`.

            absent: ranks that do not make this call, as if they had died; their results are not written.

        Returns:
            For every rank its [m / world_size, n]; without `join` ready only after :meth:`check`.

        Raises:
            CommTimeoutError: from :meth:`check`, which the caller runs after synchronising.
        """
        m, k = xs[0].shape
        n = weights[0].shape[1 if transpose_weight else 0]
        core = _native.core
        if config < 0:
            config = core.select_gemm_rs(m, n, k, transpose_weight, self.world_size, self.num_sms).config
        layout = core.gemm_rs_layout(m, n, self.world_size, config & 0xFF)
        self._reserve(round_up(4 * layout.num_signals), round_up(layout.slot_bytes))
        outs = [torch.empty(m // self.world_size, n, dtype=x.dtype, device=self.device) for x in xs]
        current = torch.cuda.current_stream(self.device)
        for rank, stream in enumerate(self._streams):
            if rank in absent:
                continue
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                address = int(self._buffers[rank].address)
                torch.ops.flux._gemm_rs(
                    xs[rank], weights[rank], bias, outs[rank], transpose_weight, address, config, self.num_sms
                )
        if join:
            for stream in self._streams:
                current.wait_stream(stream)
        return outs

    def check(self) -> None:
        """Synchronises and raises CommTimeoutError if a rank ran out of time."""
        torch.cuda.synchronize(self.device)
        for error in self._errors:
            record = _native.core.read_error(error.data_ptr())
            if record is not None:
                op, rank, peer, tile, expected, seen = record
                name = OP_NAMES.get(op, str(op))
                raise CommTimeoutError(
                    name, rank, peer, expected, seen=seen, tile=tile, timeout_s=self.timeout_s
                )

    def _reserve(self, signal_bytes: int, slot_bytes: int) -> None:
        if signal_bytes <= self._signal_bytes and slot_bytes <= self._slot_bytes:
            return
        torch.cuda.synchronize(self.device)
        self._signal_bytes = max(signal_bytes, self._signal_bytes)
        self._slot_bytes = max(slot_bytes, self._slot_bytes)
        nbytes = HEADER_BYTES + self._signal_bytes + 2 * self._slot_bytes
        self._memory = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in self._streams]
        torch.cuda.synchronize(self.device)
        peers = [memory.data_ptr() for memory in self._memory]
        self._buffers = [
            _native.core.SymmBuffer(
                rank,
                self.world_size,
                peers,
                self._signal_bytes,
                self._slot_bytes,
                self._errors[rank].data_ptr(),
                int(self.timeout_s * 1e9),
            )
            for rank in range(self.world_size)
        ]
