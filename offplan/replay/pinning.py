"""How host memory is made fit for the copy engines: the backends of ``--pin``.

1.  *Pinned* memory stays where it is, and CUDA knows it, so that its copies run while the host does
    something else.  *Pageable* memory is copied through a buffer of CUDA's own, and the host waits.
2.  ``register`` maps whole pages of its own, locks them, and registers them with CUDA.  It takes
    the bytes asked for, and they count as locked ones: against ``ulimit -l``, and in ``VmLck``.
3.  ``torch`` asks torch's host allocator, which asks CUDA for a power of two, and keeps what it is
    given back until its cache is emptied.
4.  ``off`` is pageable memory.
5.  ``auto`` takes the first of these three that works, and says which did not.  Nothing else ever
    falls back.
6.  *Pages* are one allocation.  They are unpinned once: when they are given back, when nothing
    refers to them any more, or when the interpreter exits, whichever comes first, and not before
    the device has finished all copies.
7.  A forked child owns no pages.  It sees zeros where the pinned ones were, since it must not share
    them: the first of the two to write would get another page, and in the parent the device would
    keep on copying to the old one.

On the CPU there is nothing to pin for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch

from offplan.errors import UsageError
from offplan.measured import HostLimits, PinName
from offplan.replay.limits import (
    HostMemoryError,
    amount,
    check_room,
    read_limits,
    reserved_bytes,
)
from offplan.trace._torch import empty_host_cache

PIN_NAMES: tuple[PinName, ...] = ("torch", "register", "off", "auto")
DEFAULT_PIN: PinName = "register"

# Pages are locked, and with that made, in pieces: one call for all would hear no Ctrl-C for half a
# minute, and would not say how much there was.  They are registered in one call, since no copy may
# cross from one registration into another.
LOCK_PIECE_BYTES = 1 << 30
# Pinned for every device, not only for the one that is current.
_PORTABLE = 1
# Since Linux 4.14; Python has no name for it.
_WIPE_ON_FORK = 18

ReadLimits = Callable[[], HostLimits]


class Pages:
    """One allocation (definition 6): ``size_bytes`` from ``address``, whole pages.

    ``reserved_bytes`` is what it really takes, ``is_pinned`` whether CUDA knows it.
    """

    def __init__(
        self,
        backend: Pinning,
        address: int,
        size_bytes: int,
        reserved_bytes: int,
        mapping: mmap.mmap | None,
    ) -> None:
        """``mapping`` is theirs, if they are not the backend's own."""
        self.address = address
        self.size_bytes = size_bytes
        self.reserved_bytes = reserved_bytes
        self._owner = os.getpid()
        self.mapping = mapping
        # Not a method of this object, which it would keep alive.  It runs at exit too, and has the
        # mapping, which must not go before.
        self._unpin = weakref.finalize(self, _unpin, self._owner, backend, address, mapping)

    @property
    def is_held(self) -> bool:
        """Whether they are still as they were taken, and this process's own."""
        return self._unpin.alive and os.getpid() == self._owner

    def give_back(self) -> None:
        """Unpin them and return them to the system.

        Their addresses stay valid, and read as zeros, until the last host tensor on them is gone.
        Those of ``torch`` are its own: they go when the last host tensor has gone.
        """
        if self.is_held and self.mapping is not None:
            try:
                self._unpin()
            finally:
                # Refused while they are locked, as they stay where unlocking was; they then go with
                # the mapping.
                with suppress(OSError):
                    self.mapping.madvise(mmap.MADV_DONTNEED)


def _unpin(owner: int, backend: Pinning, address: int, mapping: mmap.mmap | None) -> None:
    if os.getpid() == owner:
        backend.unpin(address)
    else:
        backend.leave(address)


class Pinning(Protocol):
    """A backend: takes pages and lets go of them.  ``name`` is the one that is at work."""

    @property
    def name(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fallen back from, and why."""

    @property
    def is_pinned(self) -> bool:
        """Whether its pages are pinned."""

    def take(self, size_bytes: int) -> Pages:
        """Pages for ``size_bytes``.  Raises ``HostMemoryError``, and has taken nothing then."""

    def unpin(self, address: int) -> None:
        """Undo what made the pages fit for copies, once no copy uses them."""

    def leave(self, address: int) -> None:
        """In a forked child: do nothing to the parent's pages, nor ask CUDA, which is not there."""


# --- pages of our own -----------------------------------------------------------------------------


class Pageable:
    """``off``: whole pages of ordinary memory."""

    name: str = "off"
    is_pinned = False
    notes: tuple[str, ...] = ()

    def take(self, size_bytes: int) -> Pages:
        size = reserved_bytes(size_bytes, "off")
        pages = _mapped(size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.pin(address, size)
        return Pages(self, address, size, size, pages)

    def pin(self, address: int, size_bytes: int) -> None:
        """Make whole pages fit for copies.  Raises ``HostMemoryError``, and they are as before."""

    def unpin(self, address: int) -> None:
        pass

    def leave(self, address: int) -> None:
        # The child has a mapping of its own there, which goes with the object.
        pass


def _mapped(size_bytes: int) -> mmap.mmap:
    try:
        # Private: shared memory would outlive madvise, and be seen by forked children.
        return mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"{amount(size_bytes)} of host memory were refused: {error}",
            fix="move less: plan with a larger budget for the peak",
        ) from error


class Locked(Pageable):
    """Pages that are locked, but that no device knows: what can be tried where there is none."""

    name = "locked"

    def __init__(self, read: ReadLimits = read_limits, piece_bytes: int = LOCK_PIECE_BYTES) -> None:
        self._read = read
        self._piece_bytes = piece_bytes
        self._sizes: dict[int, int] = {}

    def take(self, size_bytes: int) -> Pages:
        check_room(self._read(), reserved_bytes(size_bytes, "register"), "register")
        return super().take(size_bytes)

    def pin(self, address: int, size_bytes: int) -> None:
        done = 0
        try:
            while done < size_bytes:
                piece = min(self._piece_bytes, size_bytes - done)
                self._lock(address + done, piece, done, size_bytes)
                done += piece
        except BaseException:
            # All of them: Ctrl-C is heard after a piece was locked, and before it counts as done.
            _libc().munlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
            raise
        self._sizes[address] = size_bytes

    def unpin(self, address: int) -> None:
        size = self._sizes.pop(address, 0)
        if size:
            _libc().munlock(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def _lock(self, address: int, size_bytes: int, done: int, asked_bytes: int) -> None:
        if not _libc().mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
            return
        reason = os.strerror(ctypes.get_errno())
        # Read again: now it is known that one of them was reached.
        check_room(self._read(), asked_bytes - done, "register")
        raise HostMemoryError(
            f"{amount(asked_bytes)} of host pinned memory were refused: after {amount(done)} no "
            f"more could be locked ({reason})",
            fix="raise `ulimit -l`, pin with CUDA's own allocator (--pin torch), or move less "
            f"(--host-budget {done})",
        )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Registered(Locked):
    """``register``: locked pages that CUDA knows.  ``device`` None: the one that is current."""

    name = "register"
    is_pinned = True

    def __init__(
        self,
        device: torch.device | None = None,
        read: ReadLimits = read_limits,
        piece_bytes: int = LOCK_PIECE_BYTES,
    ) -> None:
        super().__init__(read, piece_bytes)
        self.device = device

    def pin(self, address: int, size_bytes: int) -> None:
        super().pin(address, size_bytes)
        try:
            self._separate(address, size_bytes)
            self._register(address, size_bytes)
        except BaseException:
            super().unpin(address)
            raise

    def unpin(self, address: int) -> None:
        try:
            # Whatever thread a tensor dies on: without this, CUDA would start on its first device.
            with _on(self.device):
                try:
                    _surely(_finish_copies)
                finally:
                    _surely(lambda: self._unregister(address))
        finally:
            super().unpin(address)

    def _unregister(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _forget_cuda_error()

    def _separate(self, address: int, size_bytes: int) -> None:
        """Keep the pages from a forked child (definition 7)."""
        for advice in (_WIPE_ON_FORK, mmap.MADV_DONTFORK):
            if not _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice):
                return

    def _register(self, address: int, size_bytes: int) -> None:
        with _on(self.device), _explained(size_bytes):
            try:
                error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)
            except BaseException:
                # Ctrl-C is heard when CUDA has done it.
                with suppress(RuntimeError):
                    self._unregister(address)
                raise
            if int(error):
                raise RuntimeError(torch.cuda.cudart().cudaGetErrorString(error))


@contextmanager
def _explained(size_bytes: int) -> Iterator[None]:
    """What CUDA refuses as ``HostMemoryError``."""
    try:
        yield
    except RuntimeError as error:
        _forget_cuda_error()
        raise HostMemoryError(
            f"{amount(size_bytes)} of host pinned memory were refused by CUDA, within every limit "
            f"that the system names: {str(error).splitlines()[0]}",
            fix="move less (--host-budget), or end what else pins memory on this machine",
        ) from error


def _on(device: torch.device | None) -> Any:
    return nullcontext() if device is None else torch.cuda.device(device)


def _finish_copies() -> None:
    # After a failed kernel the device takes no more orders; nor does it copy any more.
    with suppress(RuntimeError):
        torch.cuda.synchronize()


def _surely(finish: Callable[[], None]) -> None:
    """Do what no memory may go without, whether Ctrl-C is heard meanwhile or not."""
    try:
        finish()
    except KeyboardInterrupt:
        finish()
        raise


def _forget_cuda_error() -> None:
    # CUDA keeps the error of a refused call for whoever asks next, which is the next kernel launch.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


# --- torch's own ----------------------------------------------------------------------------------


class TorchPinned:
    """``torch``: what ``torch.empty(pin_memory=True)`` gives (definition 3)."""

    name = "torch"
    is_pinned = True
    notes: tuple[str, ...] = ()

    def __init__(self, device: torch.device | None = None, read: ReadLimits = read_limits) -> None:
        self.device = device
        self._read = read
        self._held: dict[int, torch.Tensor] = {}

    def take(self, size_bytes: int) -> Pages:
        size, most = reserved_bytes(size_bytes, "off"), reserved_bytes(size_bytes, "torch")
        check_room(self._read(), most, "torch")
        with _on(self.device), _explained(size):
            before = _active_bytes()
            try:
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except BaseException:
                # Ctrl-C is heard when torch has taken it.
                empty_host_cache()
                raise
            grown = _active_bytes() - before
        address = memory.data_ptr()
        self._held[address] = memory
        # By torch's settings it may round less; another thread may have pinned meanwhile.
        reserved = grown if size <= grown <= most else most
        return Pages(self, address, size, reserved, None)

    def unpin(self, address: int) -> None:
        with _on(self.device):
            try:
                _surely(_finish_copies)
            finally:
                del self._held[address]
                with suppress(RuntimeError):
                    empty_host_cache()

    def leave(self, address: int) -> None:
        # The end of the tensor would ask CUDA about copies: it gets none, by one reference more.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held[address]))


def _active_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


# --- which one ------------------------------------------------------------------------------------


class FirstThatWorks:
    """``auto``: the first of some backends that gives what is asked for, from then on."""

    def __init__(self, backends: tuple[Pinning, ...]) -> None:
        self._left = list(backends)
        self.notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._left[0].name

    @property
    def is_pinned(self) -> bool:
        return self._left[0].is_pinned

    def take(self, size_bytes: int) -> Pages:
        while len(self._left) > 1:
            try:
                return self._left[0].take(size_bytes)
            except HostMemoryError as error:
                refused = self._left.pop(0)
                self.notes += (f"--pin {refused.name} fell back to {self.name}: {error.what}",)
        return self._left[0].take(size_bytes)

    def unpin(self, address: int) -> None:
        raise AssertionError("pages are unpinned by the backend that took them")

    def leave(self, address: int) -> None:
        raise AssertionError("pages are left by the backend that took them")


def choose(name: PinName | Pinning, device: torch.device, asked_bytes: int = 0) -> Pinning:
    """The backend that ``--pin name`` means on ``device``, tried with a page.  A backend is itself.

    Raises ``UsageError`` for another name, and ``HostMemoryError`` if it cannot be used here, or
    has no room for ``asked_bytes``.
    """
    if not isinstance(name, str):
        return name
    if name not in PIN_NAMES:
        raise UsageError(f"{name!r} is no way to pin", fix=f"one of: {', '.join(PIN_NAMES)}")
    if device.type == "cpu" or name == "off":
        return Pageable()
    if name == "auto":
        return FirstThatWorks((Registered(device), TorchPinned(device), Pageable()))
    check_room(read_limits(), reserved_bytes(asked_bytes, name), name)
    pinning: Pinning = Registered(device) if name == "register" else TorchPinned(device)
    try:
        pinning.take(1).give_back()
    except HostMemoryError as error:
        raise HostMemoryError(
            f"--pin {name} cannot be used here: {error.what}",
            fix=f"{error.fix}; or --pin auto, which takes what works",
        ) from error
    return pinning
