"""Every byte that is pinned is unpinned: once, by its owner, and when no copy uses it any more."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from test_replay_runtime import layers, plan_for

from offplan.errors import OffplanError
from offplan.replay.compiled import Replay, loss_of
from offplan.replay.host import HostMemoryError, HostPool
from offplan.replay.pinning import Pageable
from offplan.replay.runtime import CpuLink, Runtime, Slot
from offplan.trace._torch import empty_host_cache

MIB = 1024**2
ROOT = Path(__file__).parent.parent


class Recorded(Pageable):
    """Pins nothing, and records every pin and unpin; it may refuse the next pins."""

    name = "register"
    is_pinned = True

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.pin_count = 0
        self.is_refusing = False

    def pin(self, address: int, size_bytes: int) -> None:
        if self.is_refusing:
            raise HostMemoryError("host pinned memory was refused")
        assert address not in self.held
        self.held[address] = size_bytes
        self.pin_count += 1

    def unpin(self, address: int) -> None:
        # A second time, or of what was never pinned, this fails.
        del self.held[address]


def slot(host_offset: int = 0) -> Slot:
    return Slot("value", 0, 4096, 4096, (), 4, host_offset)


def send(runtime: Runtime, number: int) -> torch.Tensor:
    value = torch.ones(1024)
    with runtime.forward_run(4096):
        host = runtime.offload(value, number)
        del value
        runtime.release(host, number)
    return host


def runtime_with(backend: Recorded) -> tuple[Runtime, int]:
    runtime = Runtime(CpuLink(), HostPool([4096], backend))
    (number,) = runtime.add_slots([slot()])
    return runtime, number


def replay_with(backend: Recorded) -> tuple[Replay, torch.nn.Module]:
    """A replay on the CPU whose host memory is ``backend``'s."""
    plan = plan_for(layers, "cpu")
    target = layers("cpu")
    replay = Replay(target, plan, device="cpu")
    sizes = [slab.asked_bytes for slab in replay.runtime.pool.slabs]
    assert sizes
    arenas = [size for size, found in replay.runtime.pool.free.items() for _ in found]
    replay.runtime.pool.close()
    replay.runtime.pool = HostPool(arenas, backend)
    return replay, target.model


# --- close and collection -------------------------------------------------------------------------


def test_what_was_pinned_and_never_used_is_unpinned_at_close():
    backend = Recorded()
    runtime, _ = runtime_with(backend)
    assert sum(backend.held.values()) == runtime.stats().host_pinned_bytes == 4096
    runtime.close()
    runtime.close()
    assert (backend.held, runtime.stats().host_pinned_bytes) == ({}, 0)


def test_what_was_never_reloaded_is_unpinned_at_close_and_stays_addressable():
    backend = Recorded()
    runtime, number = runtime_with(backend)
    host = send(runtime, number)
    assert host.view(torch.float32).sum() == 1024
    runtime.close()
    assert backend.held == {}
    assert not host.any()
    del host
    gc.collect()


def test_a_runtime_that_is_dropped_unpins_once_its_last_host_tensor_has_gone():
    backend = Recorded()
    runtime, number = runtime_with(backend)
    host = send(runtime, number)
    reference = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert reference() is None
    assert backend.held == {}
    assert not host.any()


def test_a_pool_that_is_dropped_keeps_its_pages_for_its_host_tensors_only():
    backend = Recorded()
    pool = HostPool([4096], backend)
    tensor = pool.lease(4096).host_tensor(0, 100).fill_(5)
    del pool
    gc.collect()
    assert len(backend.held) == 1
    assert set(tensor.tolist()) == {5}
    del tensor
    gc.collect()
    assert backend.held == {}


def test_every_slab_that_was_added_is_unpinned():
    backend = Recorded()
    pool = HostPool([4096], backend)
    leases = [pool.lease(4096) for _ in range(5)]
    assert len(backend.held) == 5 == len(pool.slabs)
    del leases
    pool.close()
    assert backend.held == {}


def test_a_pin_that_is_refused_later_leaves_the_rest_as_it_was():
    backend = Recorded()
    pool = HostPool([4096], backend)
    lease = pool.lease(4096)
    backend.is_refusing = True
    with pytest.raises(HostMemoryError, match="refused"):
        pool.lease(4096)
    assert (len(backend.held), pool.pinned_bytes) == (1, 4096)
    del lease
    pool.lease(4096)
    pool.close()
    assert backend.held == {}


# --- steps ----------------------------------------------------------------------------------------


def test_steps_pin_once_and_unpin_all():
    backend = Recorded()
    replay, _ = replay_with(backend)
    with replay:
        for _ in range(3):
            replay.step()
        assert backend.pin_count == 1
        assert sum(backend.held.values()) == replay.stats().host_pinned_bytes > 0
    assert backend.held == {}


def test_a_forward_whose_loss_is_dropped_unpins_all():
    backend = Recorded()
    replay, _ = replay_with(backend)
    with replay:
        loss = loss_of(replay.forward())
        del loss
    assert backend.held == {}


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_failed_unpins_all_and_the_next_one_is_right(place):
    backend = Recorded()
    replay, model = replay_with(backend)

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    with replay:
        replay.step()
        expected = {name: each.grad.clone() for name, each in model.named_parameters()}
        failing = (
            replay.runtime.link.__class__,
            "fetch" if place == "backward" else "send",
        )
        kept = getattr(*failing)
        setattr(*failing, fail)
        try:
            with pytest.raises(ValueError, match="in the middle"):
                replay.step()
        finally:
            setattr(*failing, kept)
        for parameter in model.parameters():
            parameter.grad = None
        replay.step()
        found = {name: each.grad for name, each in model.named_parameters()}
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert backend.held == {}


def test_two_replays_share_nothing():
    backends = Recorded(), Recorded()
    (one, _), (other, _) = (replay_with(backend) for backend in backends)
    one.step()
    other.step()
    one.close()
    assert backends[0].held == {}
    assert len(backends[1].held) == 1
    other.step()
    other.close()
    assert backends[1].held == {}


def test_threads_use_runtimes_of_their_own():
    """And a lease may end on a thread that is not the runtime's."""
    failures: list[BaseException] = []
    hosts: list[torch.Tensor] = []
    backends = [Recorded() for _ in range(4)]

    def use(backend: Recorded) -> None:
        try:
            runtime, number = runtime_with(backend)
            for _ in range(50):
                host = send(runtime, number)
                buffer = runtime.reload(host, number)
                runtime.wait(buffer)
                assert buffer.view(torch.float32).sum() == 1024
                hosts.append(host)
                if len(hosts) > 3:
                    hosts.pop(0)
            runtime.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hosts.clear()
    gc.collect()
    assert failures == []
    assert [backend.held for backend in backends] == [{}] * 4
    assert all(backend.pin_count >= 1 for backend in backends)


# --- nothing to hold ------------------------------------------------------------------------------


def test_nothing_to_move_pins_nothing():
    backend = Recorded()
    pool = HostPool([], backend)
    assert (pool.pinned_bytes, backend.pin_count) == (0, 0)
    pool.close()


def test_a_lease_of_no_bytes_gives_empty_tensors_and_takes_nothing():
    backend = Recorded()
    pool = HostPool([0, 4096], backend, 4096)
    lease = pool.lease(0)
    tensor = lease.host_tensor(0, 0)
    assert tensor.shape == (0,)
    tensor.copy_(torch.empty(0, dtype=torch.uint8))
    assert pool.lease(4096).host_tensor(4096, 0).shape == (0,)
    del lease
    gc.collect()
    assert (pool.pinned_bytes, backend.pin_count) == (4096, 1)
    pool.close()


@pytest.mark.parametrize("size", [1, 2, 511, 4095])
def test_small_buffers_are_pinned_in_place(size):
    backend = Recorded()
    pool = HostPool([size], backend)
    tensor = pool.lease(size).host_tensor(0, size)
    ((address, held),) = backend.held.items()
    assert address <= tensor.data_ptr() < address + held
    assert held == pool.pinned_bytes
    assert pool.asked_bytes == size
    assert pool.is_pinned(tensor)
    pool.close()


def test_many_small_arenas_take_few_mappings():
    """Not one each, of which the system allows some 65,000."""

    def count() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = count()
    pool = HostPool([513 + number for number in range(20_000)], Pageable())
    leases = [pool.lease(513 + number) for number in range(0, 20_000, 7)]
    tensors = [lease.host_tensor(0, 513).fill_(1) for lease in leases]
    assert len(pool.slabs) == 1
    assert count() - before < 100
    del tensors, leases
    pool.close()


# --- exit and forked children ---------------------------------------------------------------------

# A backend that says what it does, in processes of their own.
SAYS = """
import gc, os, sys
import torch
from offplan.replay.host import HostPool
from offplan.replay.pinning import Locked, Pageable
from offplan.replay.runtime import CpuLink, Runtime, Slot
from offplan.trace._torch import empty_host_cache

class Says(Pageable):
    name, is_pinned = "register", True
    def pin(self, address, size_bytes):
        os.write(1, b"pin\\n")
    def unpin(self, address):
        os.write(1, b"unpin %d\\n" % (os.getpid() == OWNER))
    def leave(self, address):
        os.write(1, b"leave %d\\n" % (os.getpid() != OWNER))

OWNER = os.getpid()
runtime = Runtime(CpuLink(), HostPool([4096], Says()))
(number,) = runtime.add_slots([Slot("value", 0, 4096, 4096, (), 4, 0)])
value = torch.ones(1024)
"""
SENT = """
with runtime.forward_run(4096):
    host = runtime.offload(value, number)
    del value
    runtime.release(host, number)
"""


def whole(parts: Sequence[str]) -> str:
    return "\n".join(textwrap.dedent(part) for part in parts)


def said(*parts: str, exit_code: int = 0) -> list[str]:
    """What a program prints, in a process that was started for it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", whole(parts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == exit_code, done.stderr
    # Nothing is said about an error that was ignored at the end.
    assert ("Exception ignored" in done.stderr) is False, done.stderr
    return done.stdout.splitlines()


# Imports what takes seconds.  For each program that it is given, it forks a process whose main
# program that then is, and which ends as any other.
STARTER = """
import json, os, sys
import offplan.replay.runtime

for line in sys.stdin:
    program, output, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        exec(program)
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STARTER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as found:
        yield found


@pytest.fixture
def said_soon(starter: subprocess.Popen[str], tmp_path: Path) -> Callable[..., list[str]]:
    """As ``said``, in a process that has imported all of it."""

    def run(*parts: str) -> list[str]:
        output, errors = tmp_path / "output", tmp_path / "errors"
        starter.stdin.write(json.dumps([whole(parts), str(output), str(errors)]) + "\n")
        assert starter.stdout.readline() == "0\n", errors.read_text()
        assert "Exception ignored" not in errors.read_text()
        return output.read_text().splitlines()

    return run


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del runtime; gc.collect()"])
@pytest.mark.parametrize("sent", ["", SENT])
def test_what_is_pinned_at_exit_is_unpinned_then(said_soon, sent, end):
    assert said_soon(SAYS, sent, end) == ["pin", "unpin 1"]


def test_an_error_that_ends_the_interpreter_unpins_too():
    program = "runtime.release = None\nraise ValueError('the step failed')"
    assert said(SAYS, SENT, program, exit_code=1) == ["pin", "unpin 1"]


def test_a_cycle_that_is_never_collected_is_unpinned_at_exit(said_soon):
    cycle = "gc.disable(); runtime.itself = runtime; held = [runtime]; held.append(held); del held"
    assert said_soon(SAYS, SENT, cycle, "del runtime, host") == ["pin", "unpin 1"]


FORKED = """
child = os.fork()
if child == 0:
    {child}
_, status = os.waitpid(child, 0)
os.write(1, b"child %d\\n" % os.waitstatus_to_exitcode(status))
host = runtime.reload(host, number); runtime.wait(host)
assert host.view(torch.float32).sum() == 1024
runtime.close()
"""


@pytest.mark.parametrize(
    ("child", "leaves"),
    [
        ("os._exit(0)", False),
        ("sys.exit(0)", True),
        ("runtime.close(); del runtime, host; gc.collect(); os._exit(0)", True),
        ("del runtime, host; gc.collect(); os._exit(0)", True),
    ],
)
def test_a_forked_child_neither_unpins_nor_crashes(said_soon, child, leaves):
    lines = said_soon(SAYS, SENT, FORKED.format(child=child))
    expected = ["pin", *(["leave 1"] if leaves else []), "child 0", "unpin 1"]
    assert lines == expected


def test_a_forked_child_cannot_use_its_parents_host_memory_and_is_told_why(said_soon):
    program = """
    from offplan.errors import OffplanError
    child = os.fork()
    if child == 0:
        try:
            runtime.pool.lease(4096)
        except OffplanError as error:
            os.write(1, error.what.encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
    """
    words = "host memory of another process cannot be used in its forked child"
    assert said_soon(SAYS, program) == ["pin", words, "unpin 1"]


def test_a_forked_child_gets_zeros_and_shares_no_page_with_its_parent(said_soon):
    """As ``register`` keeps its pages from a child; locked here, since there is no CUDA."""
    program = """
    import ctypes
    from offplan.replay.pinning import Registered
    backend = Locked()
    pages = backend.take(1 << 20)
    Registered._separate(backend, pages.address, pages.size_bytes)
    memory = (ctypes.c_ubyte * pages.size_bytes).from_address(pages.address)
    ctypes.memset(pages.address, 7, pages.size_bytes)
    child = os.fork()
    if child == 0:
        os.write(1, b"child sees %d\\n" % max(memory))
        ctypes.memset(pages.address, 9, pages.size_bytes)
        os._exit(0)
    os.waitpid(child, 0)
    os.write(1, b"parent sees %d\\n" % min(memory))
    """
    assert said_soon(SAYS, program) == ["pin", "child sees 0", "parent sees 7", "unpin 1"]


def test_an_event_is_not_destroyed_in_a_forked_child():
    """CUDA is not there in the child, and its destruction would abort the process."""
    program = """
    import gc, os, weakref
    from offplan.replay.runtime import Event
    event = Event()
    child = os.fork()
    there = weakref.ref(event)
    del event
    gc.collect()
    os.write(1, b"%s %s\\n" % (b"parent" if child else b"child", str(there()).encode()[:5]))
    os._exit(0) if child == 0 else os.waitpid(child, 0)
    """
    lines = said(program)
    assert sorted(line.split()[0] for line in lines) == ["child", "parent"]
    assert "parent None" in lines
    assert "child None" not in lines


# --- on a GPU -------------------------------------------------------------------------------------


def pinned_bytes() -> tuple[int, int, int]:
    """Bytes locked and mappings of this process, and pinned by torch."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    empty_host_cache()
    return (
        int(status["VmLck"].split()[0]) * 1024,
        len(Path("/proc/self/maps").read_text().splitlines()),
        int(torch.cuda.host_memory_stats()["allocated_bytes.current"]),
    )


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["register", "torch"])
def test_a_replay_pins_what_it_says_and_gives_all_of_it_back(pin):
    plan = plan_for(layers, "cuda")
    target = layers("cuda")
    with Replay(target, None, device="cuda") as replay:
        replay.step()
    before = pinned_bytes()
    with Replay(target, plan, device="cuda", pin=pin) as replay:
        for _ in range(2):
            replay.step()
        during = pinned_bytes()
        reported = replay.stats().host_pinned_bytes
    gc.collect()
    after = pinned_bytes()
    taken = (during[0] - before[0]) if pin == "register" else (during[2] - before[2])
    assert taken == reported > 0
    assert (after[0], after[2]) == (before[0], before[2])


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["register", "torch", "off"])
def test_a_step_that_failed_on_the_gpu_unpins_all(pin):
    plan = plan_for(layers, "cuda")
    before = pinned_bytes()
    replay = Replay(layers("cuda"), plan, device="cuda", pin=pin)
    replay.step()
    loss = loss_of(replay.forward())
    replay.close()
    with pytest.raises(OffplanError, match="closed"):
        loss.backward()
    del loss, replay
    gc.collect()
    after = pinned_bytes()
    assert (after[0], after[2]) == (before[0], before[2])


ON_GPU = """
import gc, os, sys
import torch
from offplan.replay.host import HostPool
from offplan.replay.pinning import choose
from offplan.replay.runtime import CudaLink, Runtime, Slot
device = torch.device("cuda", 0)
runtime = Runtime(CudaLink(device), HostPool([64 << 20], choose("{pin}", device)))
(number,) = runtime.add_slots([Slot("value", 0, 64 << 20, 64 << 20, (), 4, 0)])
value = torch.ones(16 << 20, device=device)
torch.cuda._sleep(300_000_000)
with runtime.forward_run(64 << 20):
    host = runtime.offload(value, number)
    del value
    runtime.release(host, number)
"""


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["register", "torch"])
@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "del runtime, host; gc.collect()"])
def test_an_interpreter_ends_cleanly_with_copies_in_flight(pin, end):
    assert said(ON_GPU.replace("{pin}", pin), end) == []


FORKED_ON_GPU = """
child = os.fork()
if child == 0:
    {child}
_, status = os.waitpid(child, 0)
buffer = runtime.reload(host, number)
runtime.wait(buffer)
same = bool(buffer.view(torch.float32).eq(1).all())
runtime.close()
os.write(1, b"child %d same %d\\n" % (os.waitstatus_to_exitcode(status), same))
"""


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["register", "torch"])
@pytest.mark.parametrize(
    "child",
    [
        "os._exit(0)",
        "runtime.close(); del runtime, host; gc.collect(); os._exit(0)",
        "del runtime, host; gc.collect(); os._exit(0)",
        "sys.exit(0)",
    ],
)
def test_a_child_forked_while_copies_are_in_flight_changes_nothing(pin, child):
    """The copy goes on into pages that the child must not have made another copy of."""
    program = ON_GPU.replace("{pin}", pin)
    assert said(program, FORKED_ON_GPU.format(child=child)) == ["child 0 same 1"]


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["register", "torch"])
def test_many_pools_one_after_another_leave_nothing(pin):
    """Pinned bytes and mappings are flat."""
    plan = plan_for(layers, "cuda")
    target = layers("cuda")
    counts = []
    for _ in range(6):
        with Replay(target, plan, device="cuda", pin=pin) as replay:
            replay.step()
        gc.collect()
        counts.append(pinned_bytes())
    locked, mappings, pinned = zip(*counts[1:], strict=True)
    assert len(set(locked)) == len(set(pinned)) == 1
    assert max(mappings) - min(mappings) <= 8
