"""A device whose copies lag, on the CPU: streams and events for ``CudaLink`` where there is no GPU.

Computing is done at once, and a copy that is issued on another stream when somebody waits for it,
and not before.  Like a GPU's, such a copy keeps nothing alive: a storage that has gone when its
copy is done is a *violation*, the copy of freed memory that might be somebody else's by then.

``Cuda`` stands for CUDA's runtime, as far as host memory is registered with it, and streams, events
and addresses are given to it.  An address is one of a storage that somebody has asked for its own.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offplan.replay import cudart, pinning, runtime
from offplan.replay.packing import window

_copy, _empty, _zeros = torch.Tensor.copy_, torch.empty, torch.zeros
_address, _storage_address = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr


class _Window(NamedTuple):
    """A tensor that is not kept alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor | None:
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return window(storage, self.offset, self.size, self.stride, self.dtype)


def _window_of(tensor: torch.Tensor) -> _Window:
    reference = StorageWeakRef(tensor.untyped_storage())
    place = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
    return _Window(reference, tensor.dtype, *place)


class Device:
    """What all streams share: which one is current, and what was done wrong."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.streams: list[Stream] = []
        self.current: Stream | None = None
        self.wait_count = 0
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def knows(self, storage: torch.UntypedStorage) -> None:
        """Somebody has asked for its address, the last of all."""
        first = _storage_address(storage)
        self._storages.pop(first, None)
        self._storages[first] = storage.nbytes(), StorageWeakRef(storage)

    def bytes_at(self, address: int, size_bytes: int) -> _Window:
        for first, (length, storage) in reversed(self._storages.items()):
            offset = address - first
            if not storage.expired() and 0 <= offset <= offset + size_bytes <= length:
                return _Window(storage, torch.uint8, offset, (size_bytes,), (1,))
        raise AssertionError(f"{size_bytes} bytes at {address:#x} are nobody's")

    def settle(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class Stream:
    """``torch.cuda.Stream``.  The one of computing is ``None`` to ``Device.current``."""

    def __init__(self, on: Device) -> None:
        self.on = on
        self.queue: deque[Callable[[], None]] = deque()
        self.done_count = 0
        # That of computing comes first.
        self.cuda_stream = len(on.streams)
        on.streams.append(self)

    def wait_event(self, event: Event) -> None:
        # What it says now: it may be recorded again before this stream comes to wait.
        stream, place = event.stream, event.place
        if self is self.on.streams[0]:
            self.on.wait_count += 1
        assert stream is not None, "an event is waited for that was never recorded"
        if self.on.current is None and self is self.on.streams[0]:
            stream.run_until(place)
        else:
            self.queue.append(lambda: stream.run_until(place))

    def record_event(self, event: Event) -> Event:
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run_until(self.done_count + len(self.queue))

    def run_until(self, place: int) -> None:
        while self.queue and self.done_count < place:
            self.done_count += 1
            self.queue.popleft()()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_window(_window_of(target), _window_of(source))

    def copy_window(self, *places: _Window) -> None:
        def run() -> None:
            to, of = (place.tensor() for place in places)
            if to is None or of is None:
                self.on.violations.append("a copy used memory that was gone")
            else:
                _copy(to, of)

        self.queue.append(run)


class Event:
    """``torch.cuda.Event``, with the time that is asked for."""

    made: ClassVar[weakref.WeakValueDictionary[int, Event]] = weakref.WeakValueDictionary()

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.place = 0
        self.cuda_event = 0
        self.address = 0

    def record(self, stream: Stream) -> None:
        self.cuda_event = self.cuda_event or id(self)
        Event.made[self.cuda_event] = self
        self.stream, self.place = stream, stream.done_count + len(stream.queue)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.place)

    def query(self) -> bool:
        return self.stream is None or self.stream.done_count >= self.place

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Cuda:
    """The calls of CUDA's runtime that pin, with addresses for memory; it may refuse them all.  And
    those that order and copy, with handles too, which fail as ``code`` says."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.registered: dict[int, int] = {}
        self.is_refusing = False
        self.code = 0
        self.kinds: list[int] = []

    def cudaMemcpyAsync(
        self, target: int, source: int, size_bytes: int, kind: int, stream: int
    ) -> int:
        self.kinds.append(kind)
        if not self.code:
            ends = [self.device.bytes_at(each, size_bytes) for each in (target, source)]
            self.device.streams[stream].copy_window(*ends)
        return self.code

    def cudaEventRecord(self, event: int, stream: int) -> int:
        if not self.code:
            Event.made[event].record(self.device.streams[stream])
        return self.code

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        assert not flags
        if not self.code:
            self.device.streams[stream].wait_event(Event.made[event])
        return self.code

    def cudaGetLastError(self) -> int:
        error, self.code = self.code, 0
        return error

    def cudaGetErrorName(self, error: int) -> bytes:
        return f"cudaError{error}".encode()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if self.is_refusing:
            return 2
        if address in self.registered:
            return 712
        self.registered[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> Any:
        return _Text(f"error {error}")


class _Text(str):
    """As torch gives it, and as ctypes does."""

    __slots__ = ()

    def decode(self) -> str:
        return str(self)


class Mapping(mmap.mmap):
    """One whose methods can be replaced."""

    def madvise(self, option: int) -> None:
        super().madvise(option)


@contextmanager
def lagging_device(calls: str = "cudart") -> Iterator[tuple[Device, Cuda]]:
    """While this is entered, ``CudaLink(torch.device("cpu"))`` is a link to such a device, by calls
    of ``cudart`` or of ``torch``."""
    device = Device()
    cuda, compute = Cuda(device), Stream(device)

    def current(place: Any = None) -> Stream:
        return device.current or compute

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    def set_stream(stream: Stream) -> None:
        device.current = None if stream is compute else stream

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if device.current is None:
            return _copy(target, source, non_blocking)
        device.current.copy(target, source)
        return target

    def address(tensor: torch.Tensor) -> int:
        device.knows(tensor.untyped_storage())
        return _address(tensor)

    def storage_address(storage: torch.UntypedStorage) -> int:
        device.knows(storage)
        return _storage_address(storage)

    def here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            if str(kwargs.get("device")) == "cuda":
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda place=None: Stream(device))
        patch.setattr(torch.cuda, "current_stream", current)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "set_stream", set_stream)
        patch.setattr(cudart, "stream_key", current)
        patch.setattr(cudart, "raw_stream", lambda index: current().cuda_stream)
        patch.setattr(cudart, "loaded_library", lambda: cuda if calls == "cudart" else None)
        patch.setattr(torch.Tensor, "data_ptr", address)
        patch.setattr(torch.UntypedStorage, "data_ptr", storage_address)
        patch.setattr(runtime, "is_current_device", lambda index: True)
        patch.setattr(torch.cuda, "synchronize", lambda place=None: device.settle())
        patch.setattr(torch.cuda, "cudart", lambda: cuda)
        patch.setattr(torch.Tensor, "copy_", copy)
        patch.setattr(torch, "empty", here(_empty))
        patch.setattr(torch, "zeros", here(_zeros))
        patch.setattr(runtime, "Event", Event)
        patch.setattr(pinning, "_active_bytes", lambda: 0)
        patch.setattr(pinning, "empty_host_cache", lambda: None)
        patch.setattr(mmap, "mmap", Mapping)
        yield device, cuda
