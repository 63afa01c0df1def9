"""What the peak of a step is made of: every storage, from the op that makes it to its end.

1.  The step runs under a dispatch mode, which sees every op that runs on a tensor of the device.
    A storage is *born* when an op first returns a tensor on it, or when code that Inductor compiled
    allocates it, and *ends* when its last owner lets it go, by a weak reference.
2.  The *peak* is reached in the op during which most was allocated: by the allocator's own count on
    CUDA (scratch memory that the op freed again included), by the bytes of all live storages on
    the CPU.  In code that Inductor compiled it is read when a buffer is allocated.
3.  A storage that is alive at the peak counts as
    *parameters*  if it is a parameter's or buffer's;
    *inputs*      if it is the target's;
    *gradients*   if it is some parameter's ``.grad`` when the step is over;
    *saved*       if it was born in the forward and alive when that ended, or if it was copied to
                  the host or back;
    *temporaries* otherwise.
4.  *Workspace* is what the allocator was asked for beyond those storages: scratch memory in the op,
    and memory that libraries keep (cuBLAS, cuDNN).  *Rounding* is what the allocator handed out
    beyond what it was asked for.  Neither is known on the CPU.

Watching slows the step down, so it is a step of its own, neither timed nor counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from offplan.measured import Parts
from offplan.replay.generated import Watch
from offplan.trace._torch import storage_key, tree_leaves

# The op of a peak that was reached in code that Inductor compiled.
COMPILED = "code compiled by Inductor"


class _Live(NamedTuple):
    """A storage: which one since the start, and the wrapper by which its end is noticed."""

    serial: int
    reference: Any


class _Peak(NamedTuple):
    op: str
    allocated_bytes: int
    requested_bytes: int | None
    sizes: dict[int, int]


class PartsWatch(Watch):
    """``with PartsWatch(device, parameters, inputs) as watch:`` around one step.

    Call ``forward_ended`` between forward and backward, and ``parts`` with the gradients after.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
    ) -> None:
        super().__init__()
        self.device = device
        self.live: dict[int, _Live] = {}
        self.born = 0
        self.saved: set[int] = set()
        self.peak = _Peak("", 0, None, {})
        self.parameters = {self._serial(tensor) for tensor in parameters}
        self.inputs = {self._serial(tensor) for tensor in inputs}
        self.before = set(self._serials())
        self._reset()

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {storage_key(tensor) for tensor in self._on_device((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in self._on_device(result):
            # A storage that comes from outside, such as host memory on the CPU, is not born here.
            if storage_key(tensor) not in given:
                self._serial(tensor)
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        self._reached(str(func))
        return result

    def made(self, tensor: torch.Tensor) -> None:
        """A buffer that no op returned."""
        if tensor.device == self.device:
            self._serial(tensor)
            self._reached(COMPILED)

    def forward_ended(self) -> None:
        """What is alive now and was born since the start is saved."""
        self.saved |= set(self._serials()) - self.before

    def parts(self, gradients: Iterable[torch.Tensor]) -> Parts:
        """The parts of the peak; ``gradients`` are those of the parameters, now."""
        kept = {self._serial(tensor) for tensor in gradients}
        names = {
            **dict.fromkeys(self.saved, "saved"),
            **dict.fromkeys(kept, "gradients"),
            **dict.fromkeys(self.inputs, "inputs"),
            **dict.fromkeys(self.parameters, "parameters"),
        }
        sums = dict.fromkeys(("parameters", "inputs", "gradients", "saved", "temporaries"), 0)
        for serial, size_bytes in self.peak.sizes.items():
            sums[names.get(serial, "temporaries")] += size_bytes
        peak = self.peak
        if peak.requested_bytes is not None:
            sums["workspace"] = peak.requested_bytes - sum(peak.sizes.values())
            sums["rounding"] = peak.allocated_bytes - peak.requested_bytes
        return Parts(peak_bytes=peak.allocated_bytes, op=peak.op, **sums)

    def _serial(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; the next one if it is seen for the first time."""
        key = storage_key(tensor)
        known = self.live.get(key)
        if known is not None and known.reference() is not None:
            return known.serial
        serial, self.born = self.born, self.born + 1

        def ended(reference: Any) -> None:
            # A key is used again once its storage is gone.
            if key in self.live and self.live[key].serial == serial:
                del self.live[key]

        self.live[key] = _Live(serial, weakref.ref(tensor.untyped_storage(), ended))
        return serial

    def _serials(self) -> list[int]:
        return [live.serial for live in self.live.values()]

    def _sizes(self) -> dict[int, int]:
        # Read now, since a storage can be resized while it lives.
        found = ((live.serial, live.reference()) for live in list(self.live.values()))
        return {serial: storage.nbytes() for serial, storage in found if storage is not None}

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy between a watched storage and the host's memory is a transfer."""
        watched = [self.live.get(storage_key(tensor)) for tensor in (target, source)]
        if watched.count(None) == 1:
            self.saved.update(live.serial for live in watched if live is not None)

    def _on_device(self, tree: Any) -> list[torch.Tensor]:
        return [
            leaf
            for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor)
            and leaf.device == self.device
            and leaf.layout == torch.strided
        ]

    def _reached(self, op: str) -> None:
        if self.device.type == "cuda":
            found = torch.cuda.memory_stats(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            allocated = found["allocated_bytes.all.peak"]
            if allocated > self.peak.allocated_bytes:
                requested = found["requested_bytes.all.peak"]
                self.peak = _Peak(op, allocated, requested, self._sizes())
            return
        sizes = self._sizes()
        total = sum(sizes.values())
        if total > self.peak.allocated_bytes:
            self.peak = _Peak(op, total, None, sizes)

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
