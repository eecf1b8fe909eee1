"""Several processes that train one model, each on its share of every step's micro-batches.

The base is replicated and gradients are added up by hand, once for each step: gradients that fused functions write
straight from their accumulators never pass a hook, so a wrapper that relies on hooks would miss them.  Losses are
divided by the step's number of learned tokens before the backward pass, so the sum needs no further scaling.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from unweight.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Group:
    """The processes that train together; one alone is a group, too."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, items: Sequence[list[list[int]]]) -> Sequence[list[list[int]]]:
        """What of a step's micro-batches this process does."""
        return items[self.rank :: self.size]

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace tensors by their sums over all processes.  One message for each dtype and device."""
        if self.size == 1:
            return
        buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for bucket in buckets.values():
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all processes the tensors of the first one."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def agree(self, what: str, value: str) -> None:
        """Whether all processes have the same value.

        Raises:
            TrainingError: they don't.
        """
        if self.size > 1:
            values: list[str | None] = [None] * self.size
            dist.all_gather_object(values, value)
            if len(set(values)) > 1:
                raise TrainingError(f"the processes don't have the same {what}: {values}. Give all of them the same.")


def join(device: str | None) -> Group:
    """The group that ``torchrun`` has started, or this process alone; also one that the caller has set up already.

    A group that is made here stays until the process ends: the keys of one that is gone stay in torchrun's store, and a
    second one would wait for messages of the first.

    Raises:
        TrainingError: a GPU for each process was asked for, and there are fewer.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size(), local_rank)
    if size == 1:
        return Group()
    use_gpu = torch.cuda.is_available() and device != "cpu"
    if use_gpu:
        if local_rank >= torch.cuda.device_count():
            raise TrainingError(
                f"process {local_rank} has no GPU: there are {torch.cuda.device_count()}. Start as many processes as "
                "there are GPUs (torchrun --nproc-per-node)."
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    atexit.register(_leave)
    return Group(int(os.environ["RANK"]), size, local_rank)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
