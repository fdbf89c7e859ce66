"""Several ranks on one GPU.

To a kernel, peers are pointers: a rank is a stream, a workspace in plain device memory and an equal part of
the SMs. So one GPU is enough to run the real kernels, with their slots, signals and epochs, for any number of
ranks. What it can't show is what a link does to the order of writes: that takes several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from flux import _native
from flux.calls import checks
from flux.comm import cuda
from flux.comm.workspace import HEADER_BYTES, MAX_WORLD_SIZE, OP_NAMES, round_up
from flux.errors import CommTimeoutError
from flux.fp8.scales import Scales
from flux.ops import gemm as plain
from flux.ops.norm_and_quant import End, Made
from flux.ops.ways import ag_gemm as ag_gemm_ways
from flux.plan.sums import KERNEL_ROWS

_torch_cuda: Any = torch.cuda  # parts of it are not typed

# SMs left free if copy engines send: on one GPU the driver may run a copy as a kernel, and the CTAs that
# wait for the copy leave no room on their SMs.
_SMS_FOR_COPIES = 8


def why_not(world_size: int, device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not 2 <= world_size <= MAX_WORLD_SIZE:
        return f"2 to {MAX_WORLD_SIZE} ranks can be emulated, not {world_size}"
    return cuda.why_not(device)


class _Workspaces:
    """The workspaces of all ranks, in plain device memory.

    Attributes:
        epochs: calls of each rank whose rows were copied, which the host counts.
    """

    def __init__(self, errors: list[torch.Tensor], device: torch.device, timeout_s: float) -> None:
        self._errors = errors
        self._device = device
        self._timeout_s = timeout_s
        self._memory: list[torch.Tensor] = []
        self._buffers: list[Any] = []
        self._signal_bytes = 0
        self._slot_bytes = 0
        self._exchange_bytes = 0
        self.epochs = [0] * len(errors)

    def address(self, rank: int) -> int:
        return int(self._buffers[rank].address)

    def reserve(self, layout: Any) -> None:
        """Grows the workspaces for a call that signals; new memory starts at epoch 0."""
        self._grow(round_up(4 * layout.num_signals), round_up(layout.slot_bytes), 0)

    def reserve_exchange(self, nbytes: int) -> None:
        """Grows the workspaces for a call whose ranks exchange vectors."""
        self._grow(0, 0, round_up(nbytes))

    def _grow(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int) -> None:
        have = (self._signal_bytes, self._slot_bytes, self._exchange_bytes)
        need = (signal_bytes, slot_bytes, exchange_bytes)
        if all(a <= b for a, b in zip(need, have, strict=True)):
            return
        torch.cuda.synchronize(self._device)
        grown = [max(sizes) for sizes in zip(need, have, strict=True)]
        self._signal_bytes, self._slot_bytes, self._exchange_bytes = grown
        nbytes = HEADER_BYTES + self._signal_bytes + 2 * (self._slot_bytes + self._exchange_bytes)
        self._memory = [torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in self._errors]
        for memory in self._memory:
            memory[nbytes - 2 * self._exchange_bytes :] = 0xFF
        torch.cuda.synchronize(self._device)
        peers = [memory.data_ptr() for memory in self._memory]
        sizes = (self._signal_bytes, self._slot_bytes, self._exchange_bytes)
        deadline = int(self._timeout_s * 1e9)
        self._buffers = [
            _native.core.SymmBuffer(rank, len(peers), peers, *sizes, error.data_ptr(), deadline)
            for rank, error in enumerate(self._errors)
        ]
        self.epochs = [0] * len(peers)


class EmulatedRanks:
    """`world_size` ranks on one GPU, each with ``num_sms`` of its SMs.

    Ranks wait for each other, so all their CTAs must be resident at once: nothing else may run on the GPU.

    Calls take, for every rank, contiguous bfloat16 or float16 tensors, and these keywords:

    - scales: for every rank the canonical scales (flux.fp8.scales) of fp8 operands; none without those.
    - join: whether the current stream waits for all ranks. If not, a rank starts its next call as soon as it
      is done with this one, as in real life; tensors must live until :meth:`check`, and only then are results
      ready.
    - absent: ranks that do not make this call, as if they had died; their results are not written.
    - copied: tiles or rows of x travel through copy engines instead of the SMs of the launch, into workspaces
      of their own.
    - config: id of a tile shape, or Plan.choice; -1: the tile shape that the cost model chooses.

    A rank that runs out of time is told by :meth:`check`.

    Attributes:
        num_sms: SMs of each rank; even, so that a cluster of two CTAs fits.
        streams: of each rank, where all its calls go.
    """

    def __init__(self, world_size: int, device: torch.device | None = None, timeout_s: float = 10.0) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        reason = why_not(world_size, self.device)
        if reason is not None:
            raise RuntimeError(f"EmulatedRanks: {reason}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_sms = sms // world_size // 2 * 2
        self._num_sms_beside_copies = (sms - _SMS_FOR_COPIES) // world_size // 2 * 2
        # Clusters of more than two CTAs cannot use all SMs of every group of SMs.
        self._num_sms_in_clusters = max(self.num_sms * 3 // 4, 2)
        self.streams = [_torch_cuda.Stream(self.device) for _ in range(world_size)]
        # One pinned ErrorRecord for each rank: a kernel writes it, the host reads it.
        self._errors = [torch.zeros(16, dtype=torch.int32, pin_memory=True) for _ in range(world_size)]
        # Calls that use copy engines have separate workspaces and epochs.
        self._stored, self._copied = (_Workspaces(self._errors, self.device, timeout_s) for _ in range(2))
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
        copied: bool = False,
        chunks: int = 1,
        rounds_own: bool = False,
        scales: Sequence[Scales] = (),
    ) -> list[torch.Tensor]:
        """GEMM+ReduceScatter of all ranks at once.

        Args:
            xs: for every rank x [m, k].
            weights: for every rank [n, k], or [k, n] with `transpose_weight`.
            bias: [n], the same for all.
            chunks: copies for each peer.
            rounds_own: round own products before they are summed, as the products of peers are.

        Returns:
            For every rank its [m / world_size, n].
        """
        m, k = xs[0].shape
        n = weights[0].shape[1 if transpose_weight else 0]
        core, num_sms = _native.core, self._num_sms_beside_copies if copied else self.num_sms
        if config < 0:
            sizes = (m, n, k, transpose_weight, self.world_size, num_sms)
            config = core.select_gemm_rs(*sizes, **_operands(xs[0], scales)).config
        layout = core.gemm_rs_layout(m, n, self.world_size, config & 0xFF)
        workspaces = self._copied if copied else self._stored
        workspaces.reserve(layout)
        chunks = min(chunks, layout.m_tiles * layout.n_tiles)
        outs = self._empty(xs[0], m // self.world_size, n, scales)

        def launch(rank: int) -> None:
            epoch = self._copy_epoch(rank, copied, next_=True)
            staging = None
            if copied:
                staging = torch.empty(layout.slot_bytes, dtype=torch.uint8, device=self.device)
            given = (xs[rank], weights[rank], bias, outs[rank], transpose_weight)
            how = (config, num_sms, epoch, chunks, staging, rounds_own)
            of_scales = _of_rank(xs, scales, rank)
            torch.ops.flux._gemm_rs(*given, workspaces.address(rank), *how, **of_scales)

        self._launch(launch, join, absent)
        return outs

    def ag_gemm(
        self,
        xs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        *,
        transpose_weight: bool = False,
        config: int = -1,
        join: bool = True,
        absent: Collection[int] = (),
        copied: bool = False,
        chunk_rows: int = 128,
        reuse: bool = False,
        scales: Sequence[Scales] = (),
    ) -> list[torch.Tensor]:
        """AllGather+GEMM of all ranks at once.

        Args:
            xs: for every rank x [m / world_size, k].
            weights: for every rank [n, k], or [k, n] with `transpose_weight`.
            biases: for every rank [n].
            chunk_rows: of one copy, a multiple of 128.
            reuse: multiply what the call before, with the same `xs` and `copied`, has gathered.

        Returns:
            For every rank its [m, n].
        """
        rows, k = xs[0].shape
        m, n = rows * self.world_size, weights[0].shape[1 if transpose_weight else 0]
        core = _native.core
        num_sms = self._num_sms_beside_copies if copied else self.num_sms
        if config < 0:
            sizes = (m, n, k, transpose_weight, self.world_size, num_sms)
            config = core.select_ag_gemm(*sizes, **_operands(xs[0], scales)).config
        workspaces = self._gathering(xs[0], copied, scales)
        outs = self._empty(xs[0], m, n, scales)

        def launch(rank: int) -> None:
            bias = None if biases is None else biases[rank]
            epoch = self._copy_epoch(rank, copied, next_=not reuse)
            given = (xs[rank], weights[rank], bias, outs[rank], transpose_weight)
            how = (config, num_sms, epoch, chunk_rows if copied else 0, reuse)
            of_scales = _of_rank(xs, scales, rank)
            torch.ops.flux._ag_gemm(*given, workspaces.address(rank), *how, **of_scales)

        self._launch(launch, join, absent)
        return outs

    def gemm_ar(
        self,
        xs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None = None,
        *,
        mode: int,
        transpose_weight: bool = False,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        config: int = -1,
        join: bool = True,
        absent: Collection[int] = (),
        scales: Sequence[Scales] = (),
        end: End | None = None,
    ) -> list[torch.Tensor]:
        """GEMM+AllReduce of all ranks at once: in the kernel that takes up to 256 rows of 16 bits, else by a
        product and its sum.

        Args:
            xs: for every rank x [m, k].
            weights: for every rank [n, k], or [k, n] with `transpose_weight`.
            bias: [n], the same for all.
            mode: 0 one-shot, 1 two-shot.
            residual: [m, n], the same for all.
            norm_weight: [n]; then RMSNorm is applied, with eps 1e-6.
            end: instead of norm_weight, a norm that is quantised.

        Returns:
            For every rank its [m, n]; with `norm_weight` first all norms, then all sums; with `end` fp8 of
            the norms, then their scales, too.
        """
        m, n = xs[0].shape[0], weights[0].shape[1 if transpose_weight else 0]
        end = end or End(norm_weight, 1e-6)
        if scales or m >= KERNEL_ROWS.stop:
            products = self._empty(xs[0], m, n, scales)

            def multiply(rank: int) -> None:
                products[rank].record_stream(torch.cuda.current_stream(self.device))
                once = bias if rank == 0 else None
                of_rank = scales[rank] if scales else None
                operands = (xs[rank], weights[rank], once, transpose_weight, products[rank], of_rank)
                call = checks.Product(*operands)
                plain.run(call.matrices(checks.gemm_args("gemm", call)))

            return self._sum(products, m, mode, join, absent, residual, end, multiply)
        self._stored.reserve_exchange(self._exchange(m, n, mode).bytes)
        sums = self._empty(xs[0], m, n)
        made = [end.in_kernel("gemm_ar", total) for total in sums]

        def launch(rank: int) -> None:
            own, total = made[rank], sums[rank]
            first, second = (total, None) if own is None else (own.normalised, total)
            given = (xs[rank], weights[rank], bias, first, transpose_weight, self._stored.address(rank))
            how = (config, self._num_sms_in_clusters, mode, residual, end.norm_weight, end.eps, second)
            torch.ops.flux._gemm_ar(*given, *how, **end.for_kernel(own))

        self._launch(launch, join, absent)
        return _with_norms(sums, made)

    def all_reduce(
        self,
        xs: Sequence[torch.Tensor],
        *,
        mode: int,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        join: bool = True,
        absent: Collection[int] = (),
        end: End | None = None,
    ) -> list[torch.Tensor]:
        """AllReduce of all ranks at once: for every rank the sum of all `xs` [m, n], plus residual [m, n].
        With a norm_weight [n], or `end`, as gemm_ar.
        """
        return self._sum(xs, xs[0].shape[0], mode, join, absent, residual, end or End(norm_weight, 1e-6))

    def reduce_scatter(
        self, xs: Sequence[torch.Tensor], *, join: bool = True, absent: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """ReduceScatter of all ranks at once: for every rank its [m / world_size, n] of the sum of all `xs`
        [m, n].
        """
        mode = int(_native.core.ExchangeMode.SCATTER)
        return self._sum(xs, xs[0].shape[0] // self.world_size, mode, join, absent, None, End())

    def _sum(
        self,
        xs: Sequence[torch.Tensor],
        rows: int,
        mode: int,
        join: bool,
        absent: Collection[int],
        residual: torch.Tensor | None,
        end: End,
        multiply: Callable[[int], None] = lambda rank: None,
    ) -> list[torch.Tensor]:
        """The sum of all `xs` [m, n], of which every rank gets `rows` rows. multiply: makes a rank's x."""
        m, n = xs[0].shape
        whole = m if end.norm_weight is None else -(-m // self.world_size) * self.world_size
        self._stored.reserve_exchange(self._exchange(whole, n, mode).bytes)
        sums = self._empty(xs[0], rows, n)
        made = [end.in_kernel("all_reduce", total) for total in sums]

        def launch(rank: int) -> None:
            multiply(rank)
            own, total = made[rank], sums[rank]
            first, second = (total, None) if own is None else (own.normalised, total)
            given = (self._stored.address(rank), self.num_sms, mode, residual, end.norm_weight, end.eps)
            torch.ops.flux._all_reduce(xs[rank], first, *given, second, **end.for_kernel(own))

        self._launch(launch, join, absent)
        return _with_norms(sums, made)

    def _exchange(self, m: int, n: int, mode: int) -> Any:
        core = _native.core
        return core.exchange(m, n, self.world_size, core.ExchangeMode(mode))

    def collect(
        self,
        xs: Sequence[torch.Tensor],
        *,
        join: bool = True,
        absent: Collection[int] = (),
        copied: bool = False,
        scales: Sequence[Scales] = (),
    ) -> list[torch.Tensor]:
        """For every rank the rows [m, k] that the call of ag_gemm before this one, with the same `xs` and
        `copied`, has gathered; with `scales` then theirs.
        """
        workspaces = self._gathering(xs[0], copied, scales)
        outs = self._empty(xs[0], xs[0].shape[0] * self.world_size, xs[0].shape[1])
        gathered = ag_gemm_ways.new_gathered(xs[0], list(outs[0].shape), scales)[1:]
        of_rows = [
            ag_gemm_ways.scale_target([out, *(torch.empty_like(each) for each in gathered)]) for out in outs
        ]

        def launch(rank: int) -> None:
            epoch = self._copy_epoch(rank, copied, next_=False)
            of_scales = (scales[rank].x, *of_rows[rank]) if scales else ()
            torch.ops.flux._collect(xs[rank], outs[rank], workspaces.address(rank), epoch, *of_scales)

        self._launch(launch, join, absent)
        return [*outs, *(each for targets in of_rows for each in targets)]

    def all_gather(
        self,
        xs: Sequence[torch.Tensor],
        *,
        join: bool = True,
        absent: Collection[int] = (),
        copied: bool = False,
        chunk_rows: int = 128,
        begun: bool = False,
    ) -> list[torch.Tensor]:
        """AllGather of all ranks at once: for every rank the rows [m, k] of all."""
        workspaces = self._gathering(xs[0], copied)
        outs = self._empty(xs[0], xs[0].shape[0] * self.world_size, xs[0].shape[1])

        def launch(rank: int) -> None:
            epoch = self._copy_epoch(rank, copied, next_=not begun)
            address = workspaces.address(rank)
            chunk = chunk_rows if copied else 0
            torch.ops.flux._all_gather(xs[rank], outs[rank], address, epoch, chunk, begun)

        self._launch(launch, join, absent)
        return outs

    def begin_all_gather(self, xs: Sequence[torch.Tensor], chunk_rows: int = 128) -> None:
        """Lets copy engines send all ranks' rows; ends by all_gather(xs, copied=True, begun=True)."""
        workspaces = self._gathering(xs[0], copied=True)

        def launch(rank: int) -> None:
            epoch = self._copy_epoch(rank, copied=True, next_=True)
            torch.ops.flux._begin_all_gather(xs[rank], workspaces.address(rank), epoch, chunk_rows)

        self._launch(launch, False, ())

    def check(self) -> None:
        """Synchronises and raises CommTimeoutError if a rank ran out of time. Notes tell of others."""
        torch.cuda.synchronize(self.device)
        errors = []
        for record in filter(None, (_native.core.read_error(error.data_ptr()) for error in self._errors)):
            op, rank, peer, tile, expected, seen = record
            more = {"seen": seen, "tile": tile, "timeout_s": self.timeout_s}
            errors.append(CommTimeoutError(OP_NAMES.get(op, str(op)), rank, peer, expected, **more))
        for other in errors[1:]:
            errors[0].add_note(str(other))
        if errors:
            raise errors[0]

    def _gathering(self, x: torch.Tensor, copied: bool, scales: Sequence[Scales] = ()) -> _Workspaces:
        workspaces = self._copied if copied else self._stored
        rows, k = x.shape
        columns = scales[0].scaling(k).columns(k) if scales else 0
        sizes = (rows * self.world_size, k, self.world_size)
        workspaces.reserve(_native.core.ag_gemm_layout(*sizes, scale_columns=columns))
        return workspaces

    def _copy_epoch(self, rank: int, copied: bool, next_: bool) -> int:
        """Epoch of a rank's next call, or of its last one; 0 if the kernel counts."""
        if not copied:
            return 0
        self._copied.epochs[rank] += next_
        return self._copied.epochs[rank]

    def _empty(
        self, x: torch.Tensor, rows: int, columns: int, scales: Sequence[Scales] = ()
    ) -> list[torch.Tensor]:
        dtype = scales[0].out_dtype if scales else x.dtype
        return [torch.empty(rows, columns, dtype=dtype, device=self.device) for _ in self.streams]

    def _launch(self, launch: Callable[[int], None], join: bool, absent: Collection[int]) -> None:
        """Calls ``launch(rank)`` on the stream of each rank."""
        current = torch.cuda.current_stream(self.device)
        for rank, stream in enumerate(self.streams):
            if rank in absent:
                continue
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                launch(rank)
        if join:
            for stream in self.streams:
                current.wait_stream(stream)


def _operands(x: torch.Tensor, scales: Sequence[Scales]) -> dict[str, Any]:
    return scales[0].scaling(x.shape[1]).operands(x.dtype) if scales else {}


def _of_rank(xs: Sequence[torch.Tensor], scales: Sequence[Scales], rank: int) -> dict[str, Any]:
    return scales[rank].for_kernel(xs[rank]) if scales else {}


def _with_norms(sums: list[torch.Tensor], made: Sequence[Made | None]) -> list[torch.Tensor]:
    """All norms, all sums, fp8 of all norms, its scales: as far as there are any."""
    normed = [each for each in made if each is not None]
    of_fp8 = zip(*(each.quantised for each in normed), strict=True)
    return [*(each.normalised for each in normed), *sums, *(made for column in of_fp8 for made in column)]
