"""Offload for eager models: how one is made, and a target's step under it.

What it does with each saved tensor is in ``replay.hooks``, how bytes move in ``replay.saved``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offplan.errors import UsageError
from offplan.measured import PinName
from offplan.replay.compiled import Steps
from offplan.replay.gauge import input_tensors
from offplan.replay.hooks import ActivationOffload, Owners
from offplan.replay.pinning import DEFAULT_PIN, Pinning, choose
from offplan.replay.runtime import ReplayError, RuntimeStats, link_for, present_device
from offplan.replay.saved import Mover
from offplan.replay.shelf import Shelf
from offplan.target import Target
from offplan.trace.backend import step_of

MIN_OFFLOAD_BYTES = 5 * 2**20
# The backward reads the last saved storage at once: it would only come back late.  The one before
# it is on its way meanwhile.
KEEP_LAST_COUNT = 1
# 20 ms of a PCIe 5 link: what is saved between two long ops, so that the link is never idle.
IN_FLIGHT_BYTES = 2**30


def offload_activations(
    *,
    parameters: torch.nn.Module | Iterable[Any] | None = None,
    device: str | torch.device | None = None,
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
    keep_last_count: int = KEEP_LAST_COUNT,
    in_flight_bytes: int | None = None,
    host_budget: int | None = None,
    pin: PinName | Pinning = DEFAULT_PIN,
    checkpointed_inputs_only: bool = False,
    timing: bool = False,
) -> ActivationOffload:
    """Offload for eager models: enter it around the forward.

    ``parameters`` (a model, or modules and tensors): storages that are never moved, their buffers
    included.  ``device`` is the one to move from: by default the first parameter's, else the
    current GPU.  Storages under ``min_offload_bytes`` stay, and the last ``keep_last_count`` that a
    forward saves.  Beside the one that was sent last, at most ``in_flight_bytes`` more than that
    wait for their copies; as many are reloaded before they are read, but one storage always may:
    by default 1 GiB, or nothing more with ``checkpointed_inputs_only``, which moves what
    checkpointed blocks save and nothing else.

    ``host_budget`` limits host memory in bytes: what it has no room for stays on the device.  In
    the first step those saved first are moved.  From the second on as many storages of each size
    are, spread evenly over the forward, so that the link is busy all along; those that would be in
    flight at its end, twice ``in_flight_bytes``, stay first.  Where a forward saves other sizes
    than the one before, or one before it still has storages on the host, those saved first are
    moved again.  Sizes that only the first layers save cannot be spread any further.

    ``pin`` is how host memory is made fit for copies: ``register``, ``torch``, ``auto`` or ``off``.

    Raises ``UsageError`` for options that make no sense, ``DeviceError`` without such a device, and
    ``HostMemoryError`` if host memory cannot be had: here if ``pin`` cannot be used at all, later
    where the system refuses more.
    """
    for name, number in (("keep_last_count", keep_last_count), ("host_budget", host_budget or 0)):
        if number < 0:
            raise UsageError(f"{name} is {number}", fix="give a number that is not negative")
    owners = Owners(parameters)
    found = _device(device or next((t.device for t in owners.tensors()), None))
    if in_flight_bytes is None:
        in_flight_bytes = 0 if checkpointed_inputs_only else IN_FLIGHT_BYTES
    shelf = Shelf(choose(pin, found), host_budget)
    mover = Mover(link_for(found, timing=timing), shelf, keep_last_count, in_flight_bytes)
    return ActivationOffload(mover, found, owners, min_offload_bytes, checkpointed_inputs_only)


def _device(device: str | torch.device | None) -> torch.device:
    return present_device(
        device,
        doing="to move from",
        fix="move from the CPU (device='cpu', to try it), or run on a machine with a GPU",
    )


class EagerReplay(Steps):
    """A target's eager training step on ``device``, under an offload of its own.

    ``enabled=False`` moves nothing.  A context manager, with the methods of ``compiled.Replay``.
    """

    def __init__(
        self,
        target: Target,
        *,
        device: str | torch.device,
        host_budget: int | None = None,
        pin: PinName | Pinning = DEFAULT_PIN,
        timing: bool = False,
        min_offload_bytes: int = MIN_OFFLOAD_BYTES,
        keep_last_count: int = KEEP_LAST_COUNT,
        in_flight_bytes: int | None = None,
        checkpointed_inputs_only: bool = False,
        enabled: bool = True,
    ) -> None:
        self.target = target
        self.device = _device(device)
        self.enabled = enabled
        self.offload = offload_activations(
            parameters=target.model,
            device=self.device,
            min_offload_bytes=min_offload_bytes,
            keep_last_count=keep_last_count,
            in_flight_bytes=in_flight_bytes,
            host_budget=host_budget,
            pin=pin if enabled else "off",
            checkpointed_inputs_only=checkpointed_inputs_only,
            timing=timing,
        )
        self._step = step_of(target)

    def close(self) -> None:
        """Wait for copies in flight, and give host memory back.  A second call does nothing."""
        self.offload.close()

    def stats(self) -> RuntimeStats:
        """What was moved so far, and the host memory held.  Waits for the device if timed."""
        found = self.offload.stats()
        return RuntimeStats(
            offload_count=found.moved.count,
            offloaded_bytes=found.moved.bytes,
            reload_count=found.reloaded.count,
            reloaded_bytes=found.reloaded.bytes,
            lease_count=found.run_count,
            host_asked_bytes=found.peak_host_bytes,
            host_pinned_bytes=found.host_pinned_bytes,
            stalled_ms=found.stalled_ms,
        )

    def forward(self) -> Any:
        """Run the forward; returns what the model, or its loss, returned."""
        if self.offload.mover.is_closed:
            raise ReplayError("the replay is closed", fix="make a new one")
        self.offload.leave(*input_tensors(self.target))
        active: AbstractContextManager[Any] = self.offload if self.enabled else nullcontext()
        with active:
            return self._step(*self.target.args, **self.target.kwargs)
