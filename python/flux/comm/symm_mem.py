"""Symmetric GPU memory: the only file that uses torch's, which torch calls alpha (2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _register_process_group, _SymmetricMemory
from torch.distributed import ProcessGroup

from flux import _env
from flux.comm.group import name_of

_backend_set: str | None = None
rendezvous_count = 0  # allocations that this process has shared; ranks exchange it before the next one
_ALONE: Any = "flux-symm-mem-alone"  # torch has a type for group names, and functions that take str
_alone: ProcessGroup | None = None


def why_not(group: ProcessGroup, device: torch.device) -> str | None:
    """Why this rank cannot have symmetric memory with the configured backend, or None. Allocates nothing."""
    wanted = str(_env.get("FLUX_SYMM_BACKEND"))
    if _backend_set is not None and wanted != _backend_set:
        return f"FLUX_SYMM_BACKEND={wanted}, but this process already allocated with {_backend_set}"
    if wanted == "nvshmem" and group.size() != dist.get_world_size():
        # nvshmem_malloc is a collective of the whole job, so subgroups that grow at different times would
        # deadlock.
        return (
            f"the nvshmem backend allocates on the whole job ({dist.get_world_size()} ranks), the group has "
            f"{group.size()}; FLUX_SYMM_BACKEND=cuda serves any group"
        )
    if _backend_set is None:
        try:
            if _SymmetricMemory.get_backend(device) != wanted.upper():
                _SymmetricMemory.set_backend(wanted.upper())
        except RuntimeError as error:
            return f"torch has no {wanted} backend for symmetric memory here: {str(error).splitlines()[0]}"
    return None


def unreachable_peer(device: torch.device, uuids: list[str], rank: int) -> str | None:
    """Why this GPU cannot write to a peer's memory; of peers that it does not see, allocation finds out."""
    for peer, uuid in enumerate(uuids):
        if peer == rank:
            continue
        if uuid == uuids[rank]:
            return f"ranks {rank} and {peer} share one GPU"
        for index in range(torch.cuda.device_count()):
            visible = str(torch.cuda.get_device_properties(index).uuid) == uuid
            if visible and not torch.cuda.can_device_access_peer(device.index, index):
                return f"no peer-to-peer access from {device} to rank {peer}'s cuda:{index}"
    return None


@torch.inference_mode(False)  # later calls write to it in other modes
def _rendezvous(nbytes: int, group_name: str, device: torch.device) -> tuple[torch.Tensor, Any]:
    global rendezvous_count
    # Not symm_mem.empty(): newer torch may allocate it in a shared pool, at an offset.
    tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    rendezvous_count += 1
    return tensor, _SymmetricMemory.rendezvous(tensor, group_name)


def _catch_up(count: int, device: torch.device) -> None:
    """Allocates until this process has done so `count` times: up to torch 2.13 the keys under which ranks
    exchange handles are numbered per process, and ranks with other numbers would wait for ever.
    """
    global _alone
    if _alone is None and rendezvous_count < count:
        _alone = ProcessGroup(HashStore(), 0, 1)
        _alone._set_group_name(_ALONE)
        _register_process_group(_ALONE, _alone)
        _SymmetricMemory.set_group_info(_ALONE, 0, 1, HashStore())
    while rendezvous_count < count:
        _rendezvous(16, _ALONE, device)


class SymmetricMemory:
    """Zeroed bytes on every rank's GPU, a collective: `tensor`, the rank's; `peers`, the addresses. counts:
    all ranks' rendezvous_count; needed where ranks are in several groups.
    """

    def __init__(
        self, nbytes: int, group: ProcessGroup, device: torch.device, counts: Sequence[int] = ()
    ) -> None:
        global _backend_set
        _backend_set = str(_env.get("FLUX_SYMM_BACKEND"))
        _catch_up(max(counts, default=0), device)
        self.tensor, self._handle = _rendezvous(nbytes, name_of(group), device)
        offset = self.tensor.data_ptr() - self._handle.buffer_ptrs[self._handle.rank]
        self.peers = [base + offset for base in self._handle.buffer_ptrs]
        self.tensor.zero_()
        torch.cuda.synchronize(device)
