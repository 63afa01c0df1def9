"""Bytes and times of a step, read while it runs.

On CUDA they are the caching allocator's own counts, and events on the compute stream.  On the CPU
they are the storages of tensors, those of the target and those that a dispatch mode sees come and
go, and the wall clock; what a kernel allocates inside itself is not seen there.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from offplan.replay.live import LiveBytes
from offplan.target import Target
from offplan.trace._torch import storage_key, tree_leaves


def own_tensors(target: Target) -> list[torch.Tensor]:
    """Parameters and buffers."""
    return [*target.model.parameters(), *target.model.buffers()]


def input_tensors(target: Target) -> list[torch.Tensor]:
    """Every tensor in the arguments."""
    leaves = tree_leaves((target.args, dict(target.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class Reading(NamedTuple):
    """One step, as ``offplan.measured.Step`` has it."""

    forward_ms: float
    backward_ms: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    forward_end_bytes: int


class Gauge(Protocol):
    """Reads bytes and times of a step: ``begin``, ``forward_ended``, ``ended``, in this order."""

    def settle(self, target: Target) -> None:
        """Hear of what the target holds between steps."""

    def watching(self) -> AbstractContextManager[Any]:
        """What has to be active while a step runs."""

    def begin(self) -> None: ...

    def forward_ended(self) -> None: ...

    def ended(self) -> Reading: ...

    def held_bytes(self) -> int:
        """Bytes allocated now."""

    def most_bytes(self) -> int:
        """The most that was allocated since the step began, or at all."""


class CudaGauge:
    """The caching allocator's own counts, and events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[torch.cuda.Event] = []
        self.forward_end_bytes = 0

    def settle(self, target: Target) -> None:
        # What building left in the cache would count as reserved.
        torch.cuda.empty_cache()

    def watching(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.marks[0].record()

    def forward_ended(self) -> None:
        self.forward_end_bytes = torch.cuda.memory_allocated(self.device)
        self.marks[1].record()

    def ended(self) -> Reading:
        begun, between, ended = self.marks
        ended.record()
        torch.cuda.synchronize(self.device)
        return Reading(
            forward_ms=begun.elapsed_time(between),
            backward_ms=between.elapsed_time(ended),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self.device),
            forward_end_bytes=self.forward_end_bytes,
        )

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def most_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class CpuGauge:
    """Live bytes of tensors: the target's own, and those that a dispatch mode sees come and go."""

    def __init__(self) -> None:
        self.live = LiveBytes()
        self.resting_bytes = 0
        self.times: list[float] = []
        self.forward_end_bytes = 0

    def settle(self, target: Target) -> None:
        tensors = [*own_tensors(target), *input_tensors(target)]
        sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
        self.resting_bytes = sum(sizes.values())

    def watching(self) -> AbstractContextManager[Any]:
        return self.live

    def begin(self) -> None:
        self.live.peak_bytes = self.live.live_bytes
        self.times = [time.perf_counter()]

    def forward_ended(self) -> None:
        self.forward_end_bytes = self.held_bytes()
        self.times.append(time.perf_counter())

    def ended(self) -> Reading:
        begun, between, ended = *self.times, time.perf_counter()
        return Reading(
            forward_ms=1000 * (between - begun),
            backward_ms=1000 * (ended - between),
            peak_allocated_bytes=self.most_bytes(),
            peak_reserved_bytes=None,
            forward_end_bytes=self.forward_end_bytes,
        )

    def held_bytes(self) -> int:
        return self.resting_bytes + self.live.live_bytes

    def most_bytes(self) -> int:
        return self.resting_bytes + self.live.peak_bytes
