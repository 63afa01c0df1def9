"""Every allocation, copy, pin, stream and event fails in turn, and nothing is left of it.

The points are those in the source (``fault_points``); what happens to whom is in ``fault_lives``.
Tests marked ``cuda`` are the same ones on a GPU.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fault_lives import LIVES, Life, allocated, outcome_of, place
from fault_points import HOWS, Fault, How, Point, points
from fault_streams import lagging_device

from offplan.replay import runtime
from offplan.replay.runtime import CudaLink, Guarded, ReplayError

# What moves storages while somebody trains.
MODULES = tuple(
    f"offplan.replay.{name}"
    for name in [
        "runtime",
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
PLACES = [("host", "off"), *(("lagging", pin) for pin in ("off", "register", "torch", "auto"))]
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


def test_copies_of_another_device_are_issued_with_it_as_the_current_one(monkeypatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    with lagging_device() as (device, _):
        link = CudaLink(torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "device", on)
        monkeypatch.setattr(runtime, "is_current_device", lambda index: bool(current))
        source, host = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        copy = link.send(source, host, None)
        assert not current
        # The stream of computing is the current one again, and the copy lags.
        assert device.current is None
        assert host.tolist() == [0] * 4
        link.wait(copy)
        assert host.tolist() == [1] * 4
        # Back after the first is there, by the same event for where computing stands.
        target = torch.zeros(4, dtype=torch.uint8)
        link.wait(link.fetch(host, target, copy))
        assert target.tolist() == [1] * 4
        assert not device.violations


def test_a_copy_that_fails_leaves_the_stream_of_computing_the_current_one(monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no more")

    with lagging_device() as (device, _):
        link = CudaLink(torch.device("cpu"))
        source, host = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        monkeypatch.setattr(torch.Tensor, "copy_", refuse)
        with (
            pytest.raises(ReplayError, match="the test failed: no more"),
            Guarded(link, "the test"),
        ):
            link.send(source, host, None)
        assert device.current is None
