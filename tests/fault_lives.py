"""Lives of what moves storages: made, used for a step, closed; and what is left after a fault.

Each life takes host memory anew in its step, so that pinning is part of it, and knows what its step
computes when nothing fails.  ``outcome_of`` runs one life with one fault and says what is wrong
with what followed:

1.  The error is one of offplan's, or torch's for memory, or the interruption, and says something.
2.  Nothing is in flight, no storage of the device is alive, no host byte is leased; after ``close``
    no host byte is pinned, locked, registered or mapped either.
3.  The next step, of the same life or of a new one if it could not be made, gives the same bits.
"""

from __future__ import annotations

import gc
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fault_points import Calls, Fault, Faults, Owner
from fault_streams import Cuda, Device, Event, Mapping, Stream, lagging_device
from torch.multiprocessing.reductions import StorageWeakRef

from offplan.errors import OffplanError
from offplan.footprint import Pattern
from offplan.measured import HostLimits
from offplan.replay import eager, pinning, runtime, shelf
from offplan.replay.cudart import Cudart, TorchCalls
from offplan.replay.host import HostPool
from offplan.replay.pinning import FirstThatWorks, Pageable, Pinning, Registered, TorchPinned
from offplan.replay.runtime import CpuLink, CudaLink, Link, Runtime, Slot, TimedCudaLink, cuda_link

Bits = list[torch.Tensor]
CPU = torch.device("cpu")


class Place:
    """A device, how its host memory is pinned, and whom to watch.  ``kind`` is ``host``, which
    copies at once, ``lagging``, a device that is played, ``lagging by torch``, which torch calls,
    or ``cuda``."""

    def __init__(self, kind: str, pin: str) -> None:
        self.kind, self.pin = kind, pin
        self.device = torch.device("cuda", 0) if kind == "cuda" else CPU
        self.lagging: Device | None = None
        self.cuda: Cuda | None = None
        self.faults = Faults(())
        self.pinnings: list[TorchPinned] = []

    def link(self) -> Link:
        if self.kind == "host":
            return CpuLink()
        return cuda_link(self.device, TimedCudaLink if self.pin == "register" else CudaLink)

    def pinning(self) -> Pinning:
        device = self.device if self.kind == "cuda" else None

        def registered() -> Pinning:
            return Registered(device, HostLimits, piece_bytes=4096)

        def of_torch() -> Pinning:
            self.pinnings.append(TorchPinned(device, HostLimits))
            return self.pinnings[-1]

        if self.pin == "off":
            return Pageable()
        if self.pin == "auto":
            return FirstThatWorks((registered(), of_torch(), Pageable()))
        return registered() if self.pin == "register" else of_torch()

    def in_flight(self) -> list[str]:
        """Copies that have not ended, and what they did wrong."""
        if self.lagging is None:
            return []
        wrong, self.lagging.violations = self.lagging.violations, []
        return wrong + ["a copy is in flight" for each in self.lagging.streams if each.queue]

    def held(self) -> list[str]:
        """What is still taken of the host."""
        found = self.in_flight()
        if self.cuda is not None and self.cuda.registered:
            found.append("memory is registered")
        if len(self.faults.mappings):
            found.append("memory is mapped")
        if any(each._held for each in self.pinnings):
            found.append("memory of torch is held")
        return found


@contextmanager
def place(kind: str, pin: str) -> Iterator[Place]:
    found, libc = Place(kind, pin), Calls(pinning._libc())
    with _attributes((pinning, "_libc", lambda: libc), (runtime, "_MOST_WAITS", 1)):
        if kind == "cuda":
            cudart = Calls(torch.cuda.cudart())
            cudart.cudaGetErrorString = lambda error: f"error {int(error)}"
            with _attributes((torch.cuda, "cudart", lambda: cudart)):
                found.faults = _faults(torch.cuda.Stream, runtime.Event, cudart, libc)
                yield found
            return
        with lagging_device("torch" if kind.endswith("torch") else "cudart") as played:
            found.lagging, found.cuda = played
            found.cuda.is_refusing = pin == "auto"
            found.faults = _faults(Stream, Event, found.cuda, libc)
            yield found


def _faults(streams: type, events: type, cudart: Any, libc: Calls) -> Faults:
    return Faults(
        (
            Owner(torch, ("allocation",)),
            Owner(torch.Tensor, ("allocation", "copy")),
            Owner(torch.cuda, ("stream",)),
            Owner(runtime, ("stream",)),
            Owner(runtime.CudaCopy, ("stream",)),
            Owner(Cudart, ("stream", "copy")),
            Owner(TorchCalls, ("stream", "copy")),
            Owner(pinning, ("pin",)),
            Owner(streams, ("stream",)),
            Owner(events, ("stream",)),
            Owner(mmap, ("pin",)),
            Owner(Mapping, ("pin",)),
            Owner(cudart, ("pin",)),
            Owner(libc, ("pin",)),
        )
    )


class Life(ABC):
    """One life.  ``phases`` are those that faults happen in."""

    phases: tuple[str, ...] = ("make", "step", "close")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.storages: list[StorageWeakRef] = []

    @abstractmethod
    def make(self) -> None: ...

    @abstractmethod
    def step(self) -> Bits: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def leased(self) -> list[str]:
        """What is in flight, or of host memory in use."""

    def track(self, link: Link) -> Link:
        """Notes each storage of the device that passes through ``link``."""
        part = link.part

        def noted(storage: torch.UntypedStorage, first: int, size_bytes: int) -> Any:
            self.storages.append(StorageWeakRef(storage))
            return part(storage, first, size_bytes)

        link.part = noted  # type: ignore[method-assign]
        return link

    def alive(self) -> list[str]:
        found = [each for each in self.storages if not each.expired()]
        return [f"{len(found)} storages of the device are alive"] if found else []


# --- a runtime, called as graphs call it ----------------------------------------------------------

_COLUMNS = (Pattern(start=32, run=8, outer=((64, 64),)), Pattern(start=8, run=4, outer=((64, 64),)))
_SLOTS = (
    Slot("plain", 0, 4096, 4096, (), 4, 0),
    Slot("columns", 8, 4072, 64 * 12, _COLUMNS, 4, 4096),
    # As Inductor calls it: the bytes count from a value that begins anywhere.
    Slot("columns of a value", 8, 4072, 64 * 12, _COLUMNS, 4, 8192, (1,)),
)
_ARENA_BYTES = 12288


def leased_of(runtime: Runtime) -> list[str]:
    """What ``runtime`` has not given back of a step, in words."""
    pool = runtime.pool
    free = sum(size * len(arenas) for size, arenas in pool.free.items())
    found = [] if free == pool.asked_bytes else ["host memory is leased"]
    if runtime._sending or runtime._arriving:
        found.append("a storage is held")
    return found


class RuntimeLife(Life):
    """Three transfers, of every kind, both ways."""

    def make(self) -> None:
        self.runtime = Runtime(
            self.track(self.place.link()), HostPool((), self.place.pinning(), None)
        )
        self.numbers = self.runtime.add_slots(_SLOTS)

    def close(self) -> None:
        self.runtime.close()

    def leased(self) -> list[str]:
        return leased_of(self.runtime)

    def step(self) -> Bits:
        with self.runtime.forward_run(_ARENA_BYTES):
            hosts = self._forward()
        with self.runtime.backward_run():
            found = self._backward(hosts)
        assert self.runtime.stats().lease_count
        return found

    def _forward(self) -> list[torch.Tensor]:
        plain, columns, value = self.numbers
        hosts, values = [], [self._value(), self._value()]
        hosts += [self.runtime.offload(values[0], plain), self.runtime.offload(values[1], columns)]
        values.clear()
        self.runtime.release(hosts[0], plain)
        self.runtime.release(hosts[1], columns)
        kept = self._value()[1:]
        hosts.append(self.runtime.offload_value(kept, value))
        self.runtime.let_go(value)
        return hosts

    def _value(self) -> torch.Tensor:
        value = torch.linspace(0, 1, 1025, device=self.place.device)
        self.storages.append(StorageWeakRef(value.untyped_storage()))
        return value

    def _backward(self, hosts: list[torch.Tensor]) -> Bits:
        buffers = [self.runtime.reload(h, n) for h, n in zip(hosts, self.numbers, strict=True)]
        hosts.clear()
        for buffer in buffers:
            self.runtime.wait(buffer)
        plain, *packed = (buffer.cpu().clone() for buffer in buffers)
        floats = [buffer[:4032].view(torch.float32).view(63, 16) for buffer in packed]
        return [plain, *(part for each in floats for part in (each[:, 2], each[:, 8:10]))]


# --- an offload, as eager training uses it --------------------------------------------------------


class OffloadLife(Life):
    """Two forwards with their backwards, of which the second has no room for both its blocks and
    the first one's."""

    def make(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(32, 32, device=self.place.device, requires_grad=True)
        with _attributes(
            (eager, "link_for", lambda device, timing: self.track(self.place.link())),
            (shelf, "SLAB_BYTES", 4096),
        ):
            self.offload = eager.offload_activations(
                device=self.place.device,
                min_offload_bytes=1,
                in_flight_bytes=5000,
                host_budget=40 * 1024,
                pin=self.place.pinning(),
            )

    def close(self) -> None:
        self.offload.close()

    def leased(self) -> list[str]:
        mover = self.offload.mover
        found = ["host memory is leased"] if mover.shelf.used_bytes else []
        if mover._sending or mover._ahead:
            found.append("a storage is held")
        if mover._sending_bytes or mover._ahead_bytes:
            found.append("bytes are counted twice")
        return found

    def step(self) -> Bits:
        self.x.grad = None
        with _attributes((shelf, "SLAB_BYTES", 4096)):
            losses = [self._run(1), self._run(3)]
        assert self.offload.stats().run_count
        assert self.x.grad is not None
        found, self.x.grad = self.x.grad, None
        return [found.cpu(), *losses]

    def _run(self, times: int) -> torch.Tensor:
        with self.offload:
            wide = torch.cat([self.x + 0] * times)
            for _ in range(3):
                wide = wide.exp().sin()
            loss = wide.square().sum()
        loss.backward()
        return loss.detach().cpu()


@contextmanager
def _attributes(*given: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in given]
    try:
        for owner, name, value in given:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


# --- with a fault ---------------------------------------------------------------------------------


def outcome_of(life: Life, fault: Fault, expected: Bits) -> tuple[str, list[str]]:
    """What ``fault`` ended in (``fine`` if nothing was heard of it), and what was wrong then."""
    said, wrong, phase = _lived(life, fault)
    if phase == "make":
        wrong += _still(life.place.held)
        life.make()
    if phase in ("make", "step"):
        wrong += _still(life.alive) + _still(life.leased) + life.place.in_flight()
        if not _are_equal(life.step(), expected):
            wrong.append("the next step gives other bits")
        wrong += _still(life.alive) + _still(life.leased)
    if phase in ("make", "step") or "close" not in life.phases:
        life.close()
    return said, wrong + _still(life.alive) + _still(life.place.held)


def _still(found: Callable[[], list[str]]) -> list[str]:
    """What is found, once what only waits for the garbage collector has gone."""
    if not found():
        return []
    gc.collect()
    return found()


def _lived(life: Life, fault: Fault) -> tuple[str, list[str], str]:
    """What was heard, what was wrong with it, and in which phase; ``fine`` after the last."""
    phase, unheard = "", []
    hook, sys.unraisablehook = sys.unraisablehook, lambda args: unheard.append(args.exc_type)
    try:
        with life.place.faults.watching(fault):
            for phase in life.phases:
                getattr(life, phase)()
    except KeyboardInterrupt:
        return "interrupted", [] if fault.how != "fails" else ["interrupted by nobody"], phase
    except OffplanError as error:
        wrong = [] if error.what and error.fix else [f"says too little: {error}"]
        return type(error).__name__, wrong, phase
    except torch.OutOfMemoryError:
        return "OutOfMemoryError", [], phase
    except Exception as error:
        return type(error).__name__, [f"ends in {type(error).__name__}: {error}"], phase
    finally:
        sys.unraisablehook = hook
    wrong = [] if life.place.faults.armed is None else ["not reached"]
    # Where Python itself lets go of something, it hears no Ctrl-C.
    if unheard == [KeyboardInterrupt] and fault.how != "fails":
        return "interrupted", wrong, "fine"
    return "fine", [*wrong, *(f"unheard: {kind}" for kind in unheard)], "fine"


def _are_equal(found: Bits, expected: Bits) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def allocated(kind: str) -> int:
    """Bytes of the device that are taken now."""
    gc.collect()
    return torch.cuda.memory_allocated() if kind == "cuda" else 0


LIVES: tuple[Callable[[Place], Life], ...] = (RuntimeLife, OffloadLife)
