"""Every allocation, copy, pin, stream and event fails in turn, and nothing is left of it.

The points are those in the source (``fault_points``); what happens to whom is in ``fault_lives``.
Tests marked ``cuda`` are the same ones on a GPU.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fault_lives import LIVES, Life, allocated, outcome_of, place
from fault_points import HOWS, Fault, How, Point, points
from fault_streams import Event, Stream, lagging_device

from offplan.replay import cudart, runtime
from offplan.replay.host import HostPool, Pageable
from offplan.replay.runtime import CudaLink, Guarded, ReplayError, Runtime, Slot

# What moves storages while somebody trains.
MODULES = tuple(
    f"offplan.replay.{name}"
    for name in [
        "runtime",
        "cudart",
        "packing",
        "host",
        "pinning",
        "shelf",
        "saved",
        "hooks",
        "eager",
        "operators",
    ]
)
NOT_REFUSED = {
    "offplan.replay.host:Lease.host_tensor: torch.empty": "a tensor of no bytes",
    "offplan.replay.operators:_Calls.fake_offload: torch.empty": "fake",
    "offplan.replay.operators:_Calls.fake_reload: torch.empty": "fake",
}
# Points that only another failure leads to, which comes first.
ONLY_AFTER = {
    "offplan.replay.pinning:Locked.pin: _libc().munlock": (
        "register",
        "offplan.replay.pinning:Locked._lock: _libc().mlock",
    ),
    "offplan.replay.pinning:TorchPinned.take: empty_host_cache": (
        "torch",
        "offplan.replay.pinning:TorchPinned.take: torch.empty",
    ),
}
# A failure of these is no reason to fail: what they are for is done otherwise, or not needed.
TOLERATED = {
    "offplan.replay.pinning:Registered._separate: _libc().madvise": "forked children, in two ways",
    "offplan.replay.pinning:_finish_copies: torch.cuda.synchronize": "no more copies either",
    "offplan.replay.pinning:_forget_cuda_error: torch.zeros": "forgets an error",
    "offplan.replay.pinning:Locked.unpin: _libc().munlock": "unlocked with the mapping",
    "offplan.replay.pinning:Pages.give_back: self.mapping.madvise": "given back with the mapping",
    "offplan.replay.pinning:TorchPinned.unpin: empty_host_cache": "torch keeps it for the next",
}
# CUDA refuses this only where it takes no orders at all any more.
UNREGISTER = "offplan.replay.pinning:Registered._unregister: torch.cuda.cudart().cudaHostUnregister"
# ``auto`` goes on to the next way to pin.
FALLS_BACK = ("offplan.replay.pinning", "offplan.replay.limits")
PLACES = [
    ("host", "off"),
    *(("lagging", pin) for pin in ("off", "register", "torch", "auto")),
    ("lagging by torch", "register"),
]
CUDA = [pytest.param("cuda", pin, marks=pytest.mark.cuda) for pin in ("register", "torch", "off")]


def reached(make: type[Life], kind: str, pin: str) -> Counter[Point]:
    with place(kind, pin) as found:
        life = make(found)
        with found.faults.watching() as counts:
            for phase in life.phases:
                getattr(life, phase)()
        return +counts


def test_every_point_of_what_moves_storages_is_reached_by_some_life() -> None:
    met = {point for kind, pin in PLACES for make in LIVES for point in reached(make, kind, pin)}
    not_met = {str(point) for point in points(*MODULES) - met}
    assert not_met == {*NOT_REFUSED, *ONLY_AFTER}


@pytest.mark.parametrize("last", ONLY_AFTER)
def test_a_point_that_another_failure_leads_to_is_reached(last: str) -> None:
    pin, first = ONLY_AFTER[last]
    (point,) = (point for point in points(*MODULES) if str(point) == first)
    with place("lagging", pin) as found:
        life = LIVES[0](found)
        expected = plain(life)
        said, wrong = outcome_of(life, Fault(point, 1, "interrupted after"), expected)
        assert (said, wrong) == ("interrupted", [])
        assert last in map(str, found.faults.counts)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("make", LIVES)
@pytest.mark.parametrize(("kind", "pin"), [*PLACES, *CUDA])
def test_whatever_fails_leaves_nothing_behind(
    make: type[Life], kind: str, pin: str, how: How
) -> None:
    counts = reached(make, kind, pin)
    complaints = []
    with place(kind, pin) as found:
        expected = plain(make(found))
        before = allocated(kind)
        for fault in faults(counts, how):
            said, wrong = outcome_of(make(found), fault, expected)
            if said == "fine" and not is_tolerated(fault, pin):
                wrong.append("nobody hears of it")
            complaints += [f"{fault}: {said}: {each}" for each in wrong]
        assert allocated(kind) == before
    assert complaints == []


def faults(counts: Counter[Point], how: How) -> Iterator[Fault]:
    """The first, the second and the last time that each point is reached."""
    for point, count in counts.items():
        if how == "fails" and str(point) == UNREGISTER:
            continue
        # How often a device is asked whether it is done yet depends on when it is.
        is_asking = point.function.startswith("Timed") and point.name in ("query", "synchronize")
        for number in [1] if is_asking else sorted({1, min(2, count), count}):
            yield Fault(point, number, how)


def is_tolerated(fault: Fault, pin: str) -> bool:
    if fault.how != "fails":
        return False
    return str(fault.point) in TOLERATED or (pin == "auto" and fault.point.module in FALLS_BACK)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are of a few pages."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(life: Life):
    life.make()
    found = life.step()
    life.close()
    gc.collect()
    return found


# Modules that have points of a device too, and run where nobody trains.
OTHERS = {
    "offplan.replay.arm": "offplan run, in a process of its own: a failure is its answer",
    "offplan.replay.fingerprint": "as arm",
    "offplan.replay.gauge": "as arm",
    "offplan.replay.optimes": "as arm",
    "offplan.replay.compiled": "places the target before anything is moved; as arm",
    "offplan.replay.probe": "offplan device, which ends",
    "offplan.replay.graphs": "calls its recorder",
    "offplan.replay.rewrite": "fake tensors",
    "offplan.replay.training": "waits for the device where the user measures",
    "offplan.program": "numbers of the planner's",
    "offplan.pools": "an event of threads",
    "offplan.trace.": "fake tensors",
    "offplan.doors.": "targets, built as fake tensors",
    "offplan.replay.case_": "targets of offplan verify",
    "offplan.replay.pace": "copies that offplan verify slows down",
    "offplan.replay.selftest": "offplan verify, which says of each case what it ended in",
    "offplan.replay.verifying": "as selftest",
}


def test_a_module_that_takes_memory_is_among_those_that_are_tried_or_says_why_not() -> None:
    found = {point.module for point in points() if point.kind != "file"} - {*MODULES}
    unknown = {module for module in found if not module.startswith(tuple(OTHERS))}
    assert unknown == set()


# --- streams --------------------------------------------------------------------------------------

CALLS = ["cudart", "torch"]
CPU = torch.device("cpu")


def whole(link: CudaLink, flat: torch.Tensor) -> Any:
    return link.part(flat.untyped_storage(), 0, flat.numel())


def flat(value: int) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.uint8)


@pytest.mark.parametrize("calls", CALLS)
def test_copies_of_another_device_are_issued_with_it_as_the_current_one(calls, monkeypatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    asked = []
    with lagging_device(calls) as (device, _):
        link = CudaLink(CPU)
        monkeypatch.setattr(torch.cuda, "device", on)
        monkeypatch.setattr(runtime, "is_current_device", lambda index: bool(current))
        name, now = type(link.calls), type(link.calls).current
        monkeypatch.setattr(name, "current", lambda self: asked.append(len(current)) or now(self))
        source, host = flat(1), flat(0)
        copy = link.send(whole(link, source), host, None)
        assert not current
        # The stream of computing is the current one again, and the copy lags.
        assert device.current is None
        assert host.tolist() == [0] * 4
        link.wait(copy)
        assert host.tolist() == [1] * 4
        # Back after the first is there, by the same event for where computing stands.
        target = flat(0)
        link.wait(link.fetch(host, whole(link, target), copy))
        assert target.tolist() == [1] * 4
        assert not device.violations
    # A default stream is the one of the device that is current.
    assert set(asked) == {1}


def test_a_copy_that_fails_leaves_the_stream_of_computing_the_current_one(monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no more")

    with lagging_device("torch") as (device, _):
        link = CudaLink(CPU)
        source, host = flat(1), flat(0)
        monkeypatch.setattr(torch.Tensor, "copy_", refuse)
        with (
            pytest.raises(ReplayError, match="the test failed: no more"),
            Guarded(link, "the test"),
        ):
            link.send(whole(link, source), host, None)
        assert device.current is None


def test_copies_say_to_cuda_which_way_they_go() -> None:
    with lagging_device() as (_, cuda):
        link = CudaLink(CPU)
        source, host = flat(1), flat(0)
        link.fetch(host, whole(link, source), link.send(whole(link, source), host, None))
        link.drain()
        assert cuda.kinds == [2, 1]


@pytest.mark.parametrize("call", ["cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"])
def test_an_error_of_cuda_is_explained_and_left_to_nobody_else(call, monkeypatch) -> None:
    with lagging_device() as (_, cuda):
        made = getattr(cuda, call)

        def refused(*args: int) -> int:
            cuda.code = 700
            return made(*args)

        setattr(cuda, call, refused)
        moving = Runtime(CudaLink(CPU), HostPool([64], Pageable()))
        (number,) = moving.add_slots([Slot("the storage of relu", 0, 64, 64, (), 4, 0)])
        says = rf"the offload of the storage of relu failed: CUDA error: .*700.* of {call}\)"
        with moving.forward_run(64), pytest.raises(ReplayError, match=says):
            moving.offload(torch.ones(16), number)
        # The next kernel launch would be told of it.
        assert cuda.code == 0


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_the_runtime_that_torch_has_loaded_is_found_and_says_what_an_error_is() -> None:
    library = cudart.loaded_library()
    assert library is not None
    error = cudart.Cudart(library, 0)._error("cudaMemcpyAsync", 1)
    assert str(error) == "CUDA error: invalid argument (cudaErrorInvalidValue of cudaMemcpyAsync)"


@pytest.mark.parametrize("calls", CALLS)
def test_a_copy_is_not_waited_for_behind_a_later_one_of_its_direction(calls) -> None:
    with lagging_device(calls) as (device, _):
        link = CudaLink(CPU)
        sources, hosts = [flat(number) for number in range(3)], [flat(9) for _ in range(3)]
        ends = zip(sources, hosts, strict=True)
        copies = [link.send(whole(link, source), host, None) for source, host in ends]
        target = flat(9)
        back = link.fetch(hosts[0], whole(link, target), copies[0])
        before = device.wait_count
        link.wait(copies[1])
        assert [host.tolist()[0] for host in hosts] == [0, 1, 9]
        link.wait(copies[0])
        link.wait(copies[1])
        assert device.wait_count == before + 1
        # A later one is, and one of the other direction.
        link.wait(copies[2])
        link.wait(back)
        assert device.wait_count == before + 3
        assert [each.tolist()[0] for each in (*hosts, target)] == [0, 1, 2, 0]
        # What one stream has waited for says nothing of another, and nothing of the next run.
        device.current = other = Stream(device)
        link.wait(copies[0])
        link.wait(copies[0])
        device.current = None
        assert len(other.queue) == 1
        link.wait(copies[0])
        link.begin_run()
        link.wait(copies[0])
        assert device.wait_count == before + 5


def test_a_direction_waits_once_for_what_it_has_to_come_after() -> None:
    with lagging_device() as (device, _):
        link = CudaLink(CPU)
        source, host, target = flat(1), flat(0), flat(0)
        sent = [link.send(whole(link, source), host, None) for _ in range(2)]
        queue = device.streams[-1].queue
        added = []
        for after in (sent[1], sent[0], None):
            before = len(queue)
            link.fetch(host, whole(link, target), after)
            added.append(len(queue) - before)
        # For where computing stands, the copy that it comes after, and the copy itself.
        assert added == [3, 2, 2]
        link.drain()
        assert target.tolist() == [1] * 4


def test_a_wait_that_is_wrongly_left_out_is_noticed() -> None:
    with lagging_device() as (device, _):
        link = CudaLink(CPU)
        source, host = flat(1), flat(0)
        copy = link.send(whole(link, source), host, None)
        link._out.seen = link.calls.current(), copy.number
        link.wait(copy)
        del source
        link.drain()
        assert device.violations == ["a copy used memory that was gone"]


@pytest.mark.parametrize("calls", CALLS)
def test_events_are_used_again_and_never_by_two_copies_that_somebody_has(calls) -> None:
    """Forwards of two steps before their backwards, in either order, on either stream."""
    slots = [Slot(f"value {n}", 0, 64, 64, (), 4, 512 * n) for n in range(3)]
    made: list[int] = []
    with lagging_device(calls) as (device, _):
        moving = Runtime(CudaLink(CPU), HostPool([2048], Pageable()))
        numbers = moving.add_slots(slots)

        def forward(first: int) -> list[torch.Tensor]:
            with moving.forward_run(2048):
                values = [torch.full((16,), float(first + number)) for number in numbers]
                hosts = [moving.offload(values[n], n) for n in numbers]
                values.clear()
                for number in reversed(numbers):
                    moving.release(hosts[number], number)
            return hosts

        def backward(hosts: list[torch.Tensor], first: int) -> None:
            with moving.backward_run():
                found = [moving.reload(hosts[n].detach(), n, torch.float32) for n in numbers]
                events = {id(each.copy.event) for each in moving._arriving.values()}
                assert len(events) == len(numbers)
                for buffer in reversed(found):
                    moving.wait(buffer)
                # As a stream does when its turn comes.
                device.settle()
                assert [each.tolist() for each in found] == [[first + n] * 16 for n in numbers]

        for step in range(6):
            one, other = forward(10), forward(20)
            order = [(one, 10), (other, 20)]
            device.current = Stream(device) if step % 2 else None
            for hosts, first in reversed(order) if step % 3 else order:
                thread = threading.Thread(target=backward, args=(hosts, first))
                thread.start()
                thread.join()
            device.settle()
            device.current = None
            del one, other, order, hosts
            made.append(len({id(each) for each in gc.get_objects() if type(each) is Event}))
        assert moving.stats().lease_count == 12
        moving.close()
        assert not device.violations
    assert made[2:] == made[2:3] * 4
