"""Pin backends: what each pins and gives back, which one is taken, and what is said of the rest."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offplan.errors import UsageError
from offplan.measured import HostLimit, HostLimits
from offplan.replay import pinning
from offplan.replay.host import HostMemoryError, HostPool
from offplan.replay.limits import read_limits
from offplan.replay.pinning import (
    PIN_NAMES,
    FirstThatWorks,
    Locked,
    Pageable,
    Pages,
    Registered,
    TorchPinned,
    choose,
)
from offplan.trace._torch import empty_host_cache

MIB, GIB = 1024**2, 1024**3
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
NO_LIMITS = HostLimits()


class Cuda:
    """The calls of CUDA's runtime that pin, with addresses for memory; it may refuse them."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self.refusal = 0
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append("register")
        if self.refusal:
            return self.refusal
        self.registered[address] = size_bytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.calls.append("finish"))
    monkeypatch.setattr(pinning, "_forget_cuda_error", lambda: found.calls.append("forget"))
    return found


def locked_kib() -> int:
    """What the system says that this process has locked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1])
    pytest.skip("the system does not say what is locked")


def can_lock() -> bool:
    try:
        Locked().take(MIB)
    except HostMemoryError:
        return False
    return True


needs_lock = pytest.mark.skipif(not can_lock(), reason="this process may lock nothing")


def filled(pages: Pages) -> ctypes.Array[ctypes.c_ubyte]:
    memory = (ctypes.c_ubyte * pages.size_bytes).from_address(pages.address)
    ctypes.memset(pages.address, 7, pages.size_bytes)
    return memory


# --- pages of our own -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * MIB + 5])
def test_pages_are_whole_and_zero_and_no_more_than_that(size):
    pages = Pageable().take(size)
    assert pages.address % mmap.PAGESIZE == 0
    assert pages.size_bytes == pages.reserved_bytes == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    assert not any(bytes((ctypes.c_ubyte * pages.size_bytes).from_address(pages.address)))


@needs_lock
@pytest.mark.parametrize("size", [MIB, 5 * MIB // 2, 8 * MIB])
def test_locked_bytes_are_what_is_said_and_gone_when_given_back(size):
    before = locked_kib()
    pages = Locked(piece_bytes=MIB).take(size)
    assert locked_kib() - before == pages.reserved_bytes // 1024 == size // 1024
    memory = filled(pages)
    pages.give_back()
    assert locked_kib() == before
    assert set(memory) == {0}
    assert not pages.is_held


@needs_lock
def test_pages_that_are_dropped_are_unlocked():
    before = locked_kib()
    pages = Locked().take(MIB)
    assert locked_kib() > before
    del pages
    gc.collect()
    assert locked_kib() == before


@needs_lock
def test_registered_pages_are_locked_and_known_to_cuda_in_one_piece(cuda):
    before = locked_kib()
    pages = Registered(piece_bytes=MIB).take(3 * MIB)
    assert cuda.registered == {pages.address: (3 * MIB, 1)}
    assert locked_kib() - before == 3 * 1024
    pages.give_back()
    # Copies are over before their memory goes.
    assert cuda.calls == ["register", "finish", "unregister"]
    assert locked_kib() == before
    pages.give_back()
    assert len(cuda.calls) == 3


@needs_lock
def test_a_refused_registration_leaves_usable_memory_and_no_error_behind(cuda):
    before = locked_kib()
    pages = Pageable().take(MIB)
    memory = filled(pages)
    cuda.refusal = 2
    with pytest.raises(HostMemoryError, match="1MiB of host pinned memory were refused") as raised:
        Registered().pin(pages.address, pages.size_bytes)
    assert "error 2" in raised.value.what
    assert "CUDA out of memory" not in str(raised.value)
    assert cuda.calls == ["register", "forget"]
    assert locked_kib() == before
    assert set(memory) == {7}
    assert len(bytes(filled(pages))) == MIB


@needs_lock
def test_an_interrupt_while_pages_are_locked_unlocks_what_was(monkeypatch):
    before = locked_kib()
    lock = Locked._lock

    def interrupted(self, address, size_bytes, done, asked_bytes):
        if done == 2 * MIB:
            raise KeyboardInterrupt
        lock(self, address, size_bytes, done, asked_bytes)

    monkeypatch.setattr(Locked, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Locked(piece_bytes=MIB).take(4 * MIB)
    gc.collect()
    assert locked_kib() == before


def test_what_no_limit_allows_is_refused_before_it_is_tried():
    limit = HostLimit(name="ulimit -l", left_bytes=2 * MIB, limit_bytes=256 * MIB)
    with pytest.raises(HostMemoryError) as raised:
        Locked(lambda: HostLimits(limits=(limit,))).take(3 * MIB)
    assert raised.value.what == (
        "3MiB of host pinned memory do not fit: ulimit -l leaves 2MiB of 256MiB"
    )


UNPRIVILEGED = """
import os, resource
import offplan.replay.pinning as pinning
from offplan.replay.limits import HostMemoryError
from offplan.measured import HostLimits
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
for read in (pinning.read_limits, HostLimits):
    try:
        pinning.Locked(read, piece_bytes=1 << 20).take(8 << 20)
    except HostMemoryError as error:
        print(error.what)
pages = pinning.Locked().take(4 << 20)
print(pages.reserved_bytes)
"""


def test_a_real_lock_limit_is_named_and_what_fits_below_it_is_locked():
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    known, found_out, reserved = done.stdout.splitlines()
    assert known == "8MiB of host pinned memory do not fit: ulimit -l leaves 4MiB of 4MiB"
    # Where the limit could not be read beforehand, the system says it.
    assert found_out.startswith("8MiB of host pinned memory were refused: after 4MiB no more")
    assert reserved == str(4 * MIB)


def test_memory_that_the_system_does_not_have_is_a_clear_error():
    with pytest.raises(HostMemoryError, match="of host memory were refused"):
        Pageable().take(1 << 62)


# --- is it pinned? --------------------------------------------------------------------------------


@needs_lock
def test_views_and_slices_of_pinned_memory_are_recognised_and_nothing_else_is(cuda):
    pool = HostPool([64 * 1024], Registered())
    tensor = pool.lease(64 * 1024).host_tensor(512, 4096)
    floats = tensor.view(torch.float32)
    views = (
        tensor,
        tensor[100:],
        tensor.detach()[1:2],
        floats.view(32, 32).t()[3:, ::2],
        floats[5],
    )
    assert all(map(pool.is_pinned, views))
    assert not pool.is_pinned(tensor.clone())
    assert not pool.is_pinned(tensor[:0])
    assert not HostPool([64 * 1024], Pageable()).is_pinned(tensor)
    pool.close()
    assert not any(map(pool.is_pinned, views))


def test_pageable_memory_is_not_called_pinned():
    pool = HostPool([4096], Pageable())
    assert not pool.is_pinned(pool.lease(4096).host_tensor(0, 4096))


def test_a_tensor_that_reaches_out_of_the_memory_is_not_pinned():
    class Known(Pageable):
        is_pinned = True

    pool = HostPool([4096], Known())
    tensor = pool.lease(4096).host_tensor(0, 4096)
    assert pool.is_pinned(tensor)
    beyond = (ctypes.c_ubyte * 8192).from_address(tensor.data_ptr())
    reaching = torch.frombuffer(beyond, dtype=torch.uint8)
    assert not pool.is_pinned(reaching)
    assert pool.is_pinned(reaching[:4096])


# --- which one ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PIN_NAMES)
def test_nothing_is_pinned_on_the_cpu(name):
    found = choose(name, CPU)
    assert (found.name, found.is_pinned, found.notes) == ("off", False, ())


@pytest.mark.parametrize("name", ["none", "", True])
def test_another_name_is_refused(name):
    if name is True:
        name = "True"
    with pytest.raises(UsageError, match="is no way to pin"):
        choose(name, CPU)


def test_a_backend_that_was_chosen_is_itself():
    backend = Pageable()
    assert choose(backend, torch.device("cuda")) is backend


class Failing(Registered):
    """A backend that cannot be used."""

    def pin(self, address: int, size_bytes: int) -> None:
        raise HostMemoryError("no host pinned memory today", fix="wait")


def test_a_backend_that_cannot_be_used_fails_at_once_and_names_the_way_out(monkeypatch):
    monkeypatch.setattr(pinning, "Registered", Failing)
    with pytest.raises(HostMemoryError) as raised:
        choose("register", torch.device("cuda"))
    assert raised.value.what == "--pin register cannot be used here: no host pinned memory today"
    assert raised.value.fix == "wait; or --pin auto, which takes what works"


@pytest.mark.parametrize("name", ["register", "torch"])
def test_what_does_not_fit_fails_before_anything_is_pinned(cuda, monkeypatch, name):
    limit = HostLimit(name="free memory", left_bytes=GIB, limit_bytes=2 * GIB)
    monkeypatch.setattr(pinning, "read_limits", lambda: HostLimits(limits=(limit,)))
    with pytest.raises(HostMemoryError, match="2GiB of host pinned memory do not fit: free memory"):
        choose(name, torch.device("cuda"), 2 * GIB)
    assert cuda.calls == []


def test_auto_takes_the_first_that_works_and_says_why_not_another():
    backend = FirstThatWorks((Failing(read=lambda: NO_LIMITS), Pageable()))
    assert (backend.name, backend.notes) == ("register", ())
    pages = backend.take(MIB)
    assert pages.size_bytes == MIB
    assert (backend.name, backend.is_pinned) == ("off", False)
    assert backend.notes == ("--pin register fell back to off: no host pinned memory today",)
    backend.take(MIB)
    assert len(backend.notes) == 1
    pages.give_back()
    assert not pages.is_held


def test_auto_without_any_that_works_fails_as_the_last():
    backend = FirstThatWorks((Failing(read=lambda: NO_LIMITS), Failing(read=lambda: NO_LIMITS)))
    with pytest.raises(HostMemoryError, match="no host pinned memory today"):
        backend.take(MIB)


def test_a_fallback_that_takes_more_than_the_budget_is_refused():
    class Doubling(Pageable):
        name = "doubling"

        def take(self, size_bytes: int) -> Pages:
            return Pages(self, 0, size_bytes, 2 * size_bytes, None)

    backend = FirstThatWorks((Failing(read=lambda: NO_LIMITS), Doubling()))
    with pytest.raises(HostMemoryError, match="the host budget is 4096"):
        HostPool([4096], backend, 4096)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["register", "torch"])
@pytest.mark.parametrize("size", [1, 4096, 3 * MIB, 129_500_000])
def test_pinned_bytes_are_what_the_system_counts(name, size):
    # Torch counts nothing before.
    torch.cuda.init()
    empty_host_cache()
    before_kib = locked_kib()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pages = choose(name, torch.device("cuda", 0)).take(size)
    if name == "register":
        assert (locked_kib() - before_kib) * 1024 == pages.reserved_bytes
        assert pages.reserved_bytes == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    else:
        grown = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
        assert grown == pages.reserved_bytes >= size
    pages.give_back()
    del pages
    gc.collect()
    assert locked_kib() == before_kib
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["register", "torch"])
def test_torch_calls_views_of_pinned_memory_pinned_as_the_pool_does(name):
    pool = HostPool([MIB], choose(name, torch.device("cuda", 0)))
    tensor = pool.lease(MIB).host_tensor(512, 4096)
    for view in (tensor, tensor[100:], tensor.view(torch.float32).view(32, 32).t()[3:, ::2]):
        assert view.is_pinned()
        assert pool.is_pinned(view)
    pool.close()
    assert not pool.is_pinned(tensor)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["register", "torch"])
def test_a_copy_to_pinned_memory_does_not_hold_up_the_host(name):
    """Behind a kernel of a tenth of a second or more, the call itself takes far less."""
    pool = HostPool([64 * MIB], choose(name, torch.device("cuda", 0)))
    host = pool.lease(64 * MIB).host_tensor(0, 64 * MIB)
    source = torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    done = torch.cuda.Event()
    start = time.perf_counter()
    host.copy_(source, non_blocking=True)
    done.record()
    is_behind = not done.query()
    issued_s = time.perf_counter() - start
    assert is_behind, f"the copy was over when it had been issued, after {issued_s:.3f} s"
    del host
    # Given back while the copy is in flight: it is waited for.
    pool.close()
    assert done.query()


@pytest.mark.cuda
def test_a_refused_registration_leaves_no_error_for_the_next_launch():
    backend = Registered(torch.device("cuda", 0))
    pages = backend.take(MIB)
    with pytest.raises(HostMemoryError, match="host pinned memory were refused by CUDA"):
        Registered(torch.device("cuda", 0)).pin(pages.address, MIB)
    assert torch.ones(4, device="cuda").sum().item() == 4
    memory = filled(pages)
    assert set(memory[:: MIB // 64]) == {7}


@pytest.mark.cuda
def test_a_large_slab_is_registered_in_one_piece_and_copied_across():
    """Larger than what is locked at once: a copy over the edge of two pieces is one copy."""
    size = 2 * pinning.LOCK_PIECE_BYTES + 64 * MIB
    limit = pinning.check_room
    try:
        limit(read_limits(), size, "register")
    except HostMemoryError as error:
        pytest.skip(error.what)
    pool = HostPool([size], choose("register", torch.device("cuda", 0)))
    lease = pool.lease(size)
    edge = lease.host_tensor(pinning.LOCK_PIECE_BYTES - 32 * MIB, 64 * MIB)
    source = torch.arange(64 * MIB, device="cuda").to(torch.uint8)
    edge.copy_(source, non_blocking=True)
    back = edge.to("cuda", non_blocking=True)
    assert torch.equal(back, source)
    assert edge.is_pinned()
    pool.close()


@pytest.mark.cuda
def test_torch_is_told_apart_by_what_it_rounds():
    pages = TorchPinned(torch.device("cuda", 0)).take(135_000_000)
    assert pages.size_bytes < pages.reserved_bytes == 256 * MIB
