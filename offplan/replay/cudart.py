"""The calls that order and copy on a GPU: by CUDA's own runtime, or by torch.

1.  ``Cudart`` calls the library that torch has loaded, by ``ctypes``: no stream is made the current
    one for a copy, and no tensor is made for its ends.  A *part* of a storage is an address there.
2.  ``TorchCalls`` does the same by torch, where that library is not to be had (a build for ROCm, or
    one with CUDA's runtime linked into it).  A part is a view.
3.  Both take events as ``Event``, and streams as they return them.  An error is a ``RuntimeError``
    that begins as torch's do.

The default stream is a handle of 0, and that of whichever device is current: whoever calls makes
the device of the link the current one first.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple, Protocol

import torch

from offplan.replay.packing import window
from offplan.trace._torch import raw_stream, stream_key

# CUDA's names for the two directions, which ``copy_`` of torch says too.
_TO_DEVICE, _TO_HOST = 1, 2


class Event(torch.cuda.Event):
    """An event that a forked child leaves alone: CUDA is not there to destroy it, and would end the
    process for the attempt.

    ``address`` is CUDA's name for it, which it has from when torch first records it.
    """

    address = 0

    def __new__(cls, *, enable_timing: bool = False) -> Event:
        event = super().__new__(cls, enable_timing=enable_timing)
        event.owner = os.getpid()
        return event

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            # One reference more than there are, so it is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class DeviceCalls(Protocol):
    """What a link asks of its device.  A stream is what ``current`` and ``named`` say it is."""

    def current(self) -> Any:
        """The current stream of the device."""

    def named(self, stream: torch.cuda.Stream) -> Any: ...

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> Any:
        """``size_bytes`` of ``storage``, which it keeps, from byte ``first``."""

    def record_event(self, event: Event, stream: Any) -> None: ...

    def wait_event(self, stream: Any, event: Event) -> None: ...

    def copy_to_host(self, host: torch.Tensor, source: Any, stream: Any) -> None: ...

    def copy_to_device(self, target: Any, host: torch.Tensor, stream: Any) -> None: ...


def device_calls(index: int) -> DeviceCalls:
    """Those of GPU ``index``."""
    library = loaded_library()
    return TorchCalls(index) if library is None else Cudart(library, index)


# --- by CUDA's runtime ----------------------------------------------------------------------------


def loaded_library() -> Any:
    """CUDA's runtime, if torch has loaded it as a library; None if not."""
    version = torch.version.cuda
    # No other copy of it is loaded, which would have a current device of its own.
    only_loaded = getattr(os, "RTLD_NOLOAD", None)
    if version is None or only_loaded is None:
        return None
    try:
        library = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}", mode=only_loaded)
        return declared(library)
    except (OSError, AttributeError):
        return None


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """``library`` with the types of what is called: an address is cut off without."""
    address = ctypes.c_void_p
    library.cudaMemcpyAsync.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, address]
    library.cudaEventRecord.argtypes = [address, address]
    library.cudaStreamWaitEvent.argtypes = [address, address, ctypes.c_uint]
    library.cudaGetLastError.argtypes = []
    for said in (library.cudaGetErrorName, library.cudaGetErrorString):
        said.argtypes, said.restype = [ctypes.c_int], ctypes.c_char_p
    return library


class Part(NamedTuple):
    """``size_bytes`` at ``address``, which are there for as long as ``owner`` is."""

    address: int
    size_bytes: int
    owner: torch.UntypedStorage


class Cudart:
    """Definition 1."""

    def __init__(self, library: Any, index: int) -> None:
        self._library = library
        self._index = index
        self._copy = library.cudaMemcpyAsync
        self._record = library.cudaEventRecord
        self._wait = library.cudaStreamWaitEvent

    def current(self) -> int:
        return raw_stream(self._index)

    def named(self, stream: torch.cuda.Stream) -> int:
        return stream.cuda_stream

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> Part:
        if first < 0 or first + size_bytes > storage.nbytes():
            raise RuntimeError(
                f"bytes {first} to {first + size_bytes} of a storage of {storage.nbytes()}"
            )
        return Part(storage.data_ptr() + first, size_bytes, storage)

    def record_event(self, event: Event, stream: int) -> None:
        code = self._record(event.address, stream)
        if code:
            raise self._error("cudaEventRecord", code)

    def wait_event(self, stream: int, event: Event) -> None:
        code = self._wait(stream, event.address, 0)
        if code:
            raise self._error("cudaStreamWaitEvent", code)

    def copy_to_host(self, host: torch.Tensor, source: Part, stream: int) -> None:
        address, size_bytes, _ = source
        code = self._copy(host.data_ptr(), address, size_bytes, _TO_HOST, stream)
        if code:
            raise self._error("cudaMemcpyAsync", code)

    def copy_to_device(self, target: Part, host: torch.Tensor, stream: int) -> None:
        address, size_bytes, _ = target
        code = self._copy(address, host.data_ptr(), size_bytes, _TO_DEVICE, stream)
        if code:
            raise self._error("cudaMemcpyAsync", code)

    def _error(self, call: str, code: int) -> RuntimeError:
        # CUDA keeps it for whoever asks next, which is the next kernel launch.
        self._library.cudaGetLastError()
        name = self._library.cudaGetErrorName(code).decode()
        text = self._library.cudaGetErrorString(code).decode()
        return RuntimeError(f"CUDA error: {text} ({name} of {call})")


# --- by torch -------------------------------------------------------------------------------------


class TorchCalls:
    """Definition 2."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        key = stream_key(self._index)
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = torch.cuda.current_stream(self._index)
        return found

    def named(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        return stream

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> torch.Tensor:
        return window(storage, first, (size_bytes,), (1,))

    def record_event(self, event: Event, stream: torch.cuda.Stream) -> None:
        stream.record_event(event)

    def wait_event(self, stream: torch.cuda.Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy_to_host(
        self, host: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        with _OnStream(stream, self.current()):
            host.copy_(source, non_blocking=True)

    def copy_to_device(
        self, target: torch.Tensor, host: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        with _OnStream(stream, self.current()):
            target.copy_(host, non_blocking=True)


class _OnStream:
    """``stream`` is the current one in place of ``before``, of the current device.

    ``torch.cuda.stream`` asks first for what is current, which is known here.
    """

    __slots__ = ("before", "stream")

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self.stream, self.before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.before)
