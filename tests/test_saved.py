"""What an eager forward moves where host memory is short, and how far ahead its backward reloads.

Tests marked ``cuda`` are the same ones on a GPU.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_eager import DEVICES, Watched, assert_nothing_is_left, assert_sums, chain, offload_of

from offplan.replay import shelf
from offplan.replay.hooks import ActivationOffload
from offplan.replay.live import LiveBytes
from offplan.replay.pace import paced
from offplan.replay.runtime import CpuLink
from offplan.replay.saved import spread
from offplan.verified import Pace

# One storage of a forward below, in one slab.
SIZE = 4096
DEPTH = 12
ROOM = 4


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(shelf, "SLAB_BYTES", SIZE)


def short_of_room(device: str = "cpu", **options: Any) -> ActivationOffload:
    """Room for ``ROOM`` storages on the host, and nothing in flight beside one."""
    short = {"host_budget": ROOM * SIZE, "in_flight_bytes": 0, "pin": "off"}
    return offload_of(None, device, **{**short, **options})


def forward(x: torch.Tensor, depth: int = DEPTH, held: list[Any] | None = None) -> torch.Tensor:
    """Saves ``depth`` storages as large as ``x``: the arguments of the sines."""
    for _ in range(depth):
        argument = x + 1
        x = argument.sin()
        if held is not None and not held:
            held.append(argument)
    return x.sum()


def leaf(device: str = "cpu", times: int = 1) -> torch.Tensor:
    return torch.linspace(-1, 1, times * SIZE // 4, device=device, requires_grad=True)


def moved(offload: ActivationOffload) -> list[int]:
    """Places that the last forward moved; its graph is still there."""
    assert offload.mover._run is not None
    records = [reference() for reference in offload.mover._run.records]
    return [place for place, record in enumerate(records) if record and record.is_moved]


def step(offload: ActivationOffload, x: torch.Tensor, **options: Any) -> list[int]:
    x.grad = None
    with offload:
        loss = forward(x, **options)
    places = moved(offload)
    loss.backward()
    expected = x.grad
    x.grad = None
    forward(x, options.get("depth", DEPTH)).backward()
    assert expected is not None
    assert torch.equal(expected, x.grad)
    assert offload.stats().host_pinned_bytes <= (offload.mover.shelf.budget_bytes or 0)
    return places


FIRST = [0, 1, 2, 3]
EVENLY = [0, 3, 6, 9]


# --- which are moved ------------------------------------------------------------------------------


def test_from_the_second_step_on_what_there_is_room_for_is_spread_over_the_forward(device):
    x, offload = leaf(device), short_of_room(device)
    taken: list[int] = []
    take = offload.mover.shelf.pinning.take
    offload.mover.shelf.pinning.take = lambda size: taken.append(size) or take(size)
    assert step(offload, x) == FIRST
    assert taken == [SIZE] * ROOM
    for number in range(2, 5):
        assert step(offload, x) == EVENLY
        stats = offload.stats()
        assert stats.moved == stats.reloaded == (number * ROOM, number * ROOM * SIZE)
        assert stats.over_budget == stats.kept
        assert stats.over_budget.count == number * (DEPTH - ROOM)
    # The same host memory, and no more of it.
    assert taken == [SIZE] * ROOM
    assert offload.stats().peak_host_bytes == ROOM * SIZE
    assert_sums(offload)
    assert_nothing_is_left(offload)


def test_where_there_is_room_for_all_every_step_moves_all():
    x = leaf()
    for budget in (None, DEPTH * SIZE):
        offload = offload_of(None, host_budget=budget, in_flight_bytes=0)
        with offload:
            loss = forward(x)
        loss.backward()
        for _ in range(2):
            with offload:
                loss = forward(x)
            assert moved(offload) == list(range(DEPTH))
            loss.backward()


def test_the_last_saved_stay_and_the_others_are_spread():
    x, offload = leaf(), short_of_room(keep_last_count=2)
    assert step(offload, x) == FIRST
    assert step(offload, x) == [0, 2, 5, 7]
    assert offload.stats().kept.count == 2 * (DEPTH - ROOM)
    assert offload.stats().over_budget.count == 2 * (DEPTH - ROOM - 2)


def test_what_would_be_in_flight_at_the_end_of_the_forward_stays():
    x, offload = leaf(), short_of_room(in_flight_bytes=2 * SIZE)
    assert step(offload, x) == FIRST
    # Two times two of them.
    assert step(offload, x) == [0, 2, 4, 6]
    offload = short_of_room(in_flight_bytes=1 << 30)
    assert step(offload, x) == step(offload, x) == FIRST


def test_a_run_of_other_sizes_and_the_one_after_it_serve_those_that_ask_first():
    x, wide, offload = leaf(), leaf(times=2), short_of_room(host_budget=2 * ROOM * SIZE)
    assert step(offload, x) == list(range(2 * ROOM))
    assert step(offload, x) == [0, 1, 3, 4, 6, 7, 9, 10]
    for _ in range(2):
        assert step(offload, wide) == FIRST
    assert step(offload, wide) == EVENLY
    # In turn, none is like the one before.
    for _ in range(2):
        assert step(offload, x) == list(range(2 * ROOM))
        assert step(offload, wide) == FIRST
    assert_nothing_is_left(offload)


@pytest.mark.parametrize("depth", [6, 18])
def test_a_run_that_ends_earlier_or_later_is_no_example(depth):
    x, offload = leaf(), short_of_room()
    step(offload, x)
    assert step(offload, x) == EVENLY
    # Spread up to the first difference, and then there is no room.
    assert step(offload, x, depth=depth) == [place for place in EVENLY if place < depth]
    assert step(offload, x, depth=depth) == FIRST
    assert step(offload, x, depth=depth) == [number * depth // ROOM for number in range(ROOM)]


def test_a_forward_before_the_last_ones_backward_serves_those_that_ask_first():
    x, offload = leaf(), short_of_room()
    for _ in range(2):
        step(offload, x)
    with offload:
        first = forward(x)
    assert moved(offload) == EVENLY
    with offload:
        second = forward(x)
    assert moved(offload) == []
    second.backward()
    first.backward()
    # The second found no room: it is no example of how much there is.
    assert step(offload, x) == FIRST
    assert step(offload, x) == EVENLY
    assert_nothing_is_left(offload)


def test_two_forwards_before_each_backward_never_end_up_moving_nothing():
    x, offload = leaf(), short_of_room()
    for _ in range(4):
        with offload:
            first = forward(x)
        assert moved(offload) == FIRST
        with offload:
            second = forward(x)
        (first + second).backward()
    assert_nothing_is_left(offload)


def test_evaluation_lost_forwards_and_failures_change_nothing():
    x, offload = leaf(), short_of_room()
    step(offload, x)
    assert step(offload, x) == EVENLY
    with offload, torch.no_grad():
        forward(x)
    assert step(offload, x) == EVENLY
    with offload:
        forward(x, 5)
    assert step(offload, x) == EVENLY
    with suppress(ZeroDivisionError), offload:
        forward(x, 5).mul(1 / 0)
    assert step(offload, x) == EVENLY
    with offload:
        loss = forward(x)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        _modify_in_backward(offload, x).backward()
    del loss
    assert step(offload, x)
    assert_nothing_is_left(offload)


def _modify_in_backward(offload: ActivationOffload, x: torch.Tensor) -> torch.Tensor:
    with offload:
        argument = x + 1
        loss = forward(argument.sin(), 3)
    with torch.no_grad():
        argument.add_(1)
    return loss


def test_what_something_else_holds_gives_its_turn_to_another_of_its_size():
    x, offload = leaf(), short_of_room()
    kept: list[list[Any]] = [[], [], []]
    places = [step(offload, x, held=held) for held in kept]
    # The first one was copied in vain once.
    assert places == [FIRST, [1, 3, 6, 9], [1, 3, 6, 9]]
    assert offload.stats().found.count == 1


SIZES = st.sampled_from([512, 1024, 4096, 5000])


@given(
    sizes=st.lists(SIZES, max_size=40),
    counts=st.dictionaries(SIZES, st.integers(0, 12)),
    last_bytes=st.integers(0, 30_000),
    data=st.data(),
)
def test_of_each_size_as_many_are_moved_and_evenly(sizes, counts, last_bytes, data):
    asked = [place for place in range(len(sizes)) if data.draw(st.booleans())]
    chosen = spread(asked, sizes, counts, last_bytes)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(asked)
    present = Counter(sizes[place] for place in asked)
    wanted = {size: min(count, counts.get(size, 0)) for size, count in present.items()}
    assert Counter(sizes[place] for place in chosen) == Counter(wanted)
    for size, count in wanted.items():
        places = [place for place in asked if sizes[place] == size]
        taken = [place in chosen for place in places]
        least = count
        while (
            least < len(places) and sum(sizes[p] for p in asked if p >= places[least]) > last_bytes
        ):
            least += 1
        # After those of the last that had to stay, none is moved; before, no stretch has more.
        assert not any(taken[least:])
        for stop in range(least + 1):
            assert abs(sum(taken[:stop]) * least - count * stop) <= least


# --- when the link is busy ------------------------------------------------------------------------


class Timed(CpuLink):
    """Copies of one ``SIZE`` take ``copy_s``, one after another in each direction; so do waits."""

    def __init__(self, copy_s: float) -> None:
        self.copy_s = copy_s
        self.now_s = 0.0
        self.free_s = {"out": 0.0, "in": 0.0}

    def _issue(self, way: str, after: float | None) -> float:
        self.free_s[way] = max(self.free_s[way], self.now_s, after or 0.0) + self.copy_s
        return self.free_s[way]

    def send(self, source: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        host.copy_(source)
        return self._issue("out", after)

    def fetch(self, host: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        return self._issue("in", after)

    def arrive(self, host: torch.Tensor, target: torch.Tensor, copy: Any) -> None:
        target.copy_(host)
        self.wait(copy)

    def wait(self, copy: Any) -> None:
        self.now_s = max(self.now_s, copy)


class Second(torch.autograd.Function):
    """Takes a second each way."""

    @staticmethod
    def forward(ctx, x, link):
        ctx.link = link
        link.now_s += 1
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.link.now_s += 1
        return grad, None


def test_the_link_is_busy_all_along_and_never_the_wait():
    """Half of the storages are moved, and a copy takes as long as two of them are computed."""
    depth = 40
    offload = short_of_room(host_budget=depth // 2 * SIZE, in_flight_bytes=2 * SIZE)
    link = Timed(copy_s=1.8)
    offload.mover.link = link
    took_s = []
    for _ in range(3):
        begin_s, x = link.now_s, leaf()
        with offload:
            y = x
            for _ in range(depth):
                y = Second.apply((y + 1).sin(), link)
            loss = y.sum()
        middle_s = link.now_s
        loss.backward()
        took_s.append((middle_s - begin_s, link.now_s - middle_s))
    # The first half has to wait for 20 copies, and the second half copies nothing.
    assert took_s[0][0] > 0.45 * depth * 1.8 + 0.45 * depth
    assert took_s[0][1] > 0.45 * depth * 1.8 + 0.45 * depth
    for way in (0, 1):
        assert depth <= took_s[1][way] <= 1.05 * depth
        assert took_s[2][way] == took_s[1][way]


@pytest.mark.parametrize("pace", get_args(Pace))
@pytest.mark.parametrize("in_flight_bytes", [0, 2 * SIZE, 1 << 30])
def test_copies_that_land_as_late_as_they_may_change_no_bit(pace, in_flight_bytes):
    """Host memory that is used again by the next step, and before that by the same one."""
    x = leaf()
    forward(x).backward()
    expected = x.grad
    offload = short_of_room(in_flight_bytes=in_flight_bytes)
    link = paced(offload.mover.link)
    offload.mover.link = link
    for repeat in range(3):
        link.set_pace(pace, repeat)
        for _ in range(4):
            link.begin_step()
            x.grad = None
            with offload:
                loss = forward(x)
            loss.backward()
            assert torch.equal(x.grad, expected)
    assert link.misordered == []
    assert offload.stats().reloaded.count == 3 * 4 * ROOM


def test_a_slab_that_goes_has_every_late_copy_from_it():
    """Steps of other sizes: the slabs of one make room for those of the next."""
    offload = short_of_room()
    slabs = offload.mover.shelf.slabs
    link = paced(offload.mover.link)
    offload.mover.link = link
    link.set_pace("slow", 0)
    seen = []
    for times in (1, 2, 1, 4, 1):
        x = leaf(times=times)
        link.begin_step()
        with offload:
            loss = forward(x)
        loss.backward()
        offloaded, x.grad = x.grad, None
        forward(x).backward()
        assert torch.equal(offloaded, x.grad)
        seen.append({number: pages.size_bytes for number, pages in slabs.items()})
    assert [{*sizes.values()} for sizes in seen[1::2]] == [{2 * SIZE}, {4 * SIZE}]
    assert link.misordered == []


# --- how far ahead --------------------------------------------------------------------------------


def test_reloads_wait_for_the_room_of_what_stayed_once_it_is_known_to_be_read(device):
    x = leaf(device)
    offload = offload_of(None, device, keep_last_count=1)
    for number in range(3):
        with offload:
            loss = chain(x + 0)
        watched = Watched(offload)
        loss.backward()
        kinds = [kind for kind, _ in watched.events]
        # One while the last one is read, and then all that is left; the first step knows no order.
        first = ["fetch"] * 9 + ["wait"] if number == 0 else ["fetch", "wait"] + ["fetch"] * 8
        assert kinds == first + ["wait"] * 8


def test_reloads_come_into_the_room_of_what_was_read():
    """Where every second one stayed, the backward never holds more than it began with."""
    offload = short_of_room(host_budget=10 * SIZE, in_flight_bytes=6 * SIZE)
    x = leaf()
    x.grad = torch.zeros_like(x)
    peaks = []
    for _ in range(3):
        with LiveBytes() as live:
            with offload:
                loss = forward(x, 40)
            began_bytes = live.live_bytes
            live.peak_bytes = 0
            loss.backward()
        peaks.append((live.peak_bytes - began_bytes) // SIZE)
    # In the first, six at once, beside what a step makes anyway.
    assert peaks == [peaks[0], peaks[0] - 5, peaks[0] - 5]


def kinds_of_last_step(offload: ActivationOffload, backward: Any) -> list[str]:
    """Reloads and waits of the third step.  A chain, and another that is saved last."""
    x = leaf()
    for number in range(3):
        with offload:
            losses = chain(x + 0), (x.repeat(4) + 1).sin().sum()
        watched = Watched(offload)
        backward(number, *losses)
    return [kind for kind, _ in watched.events]


def test_what_stayed_and_is_never_read_holds_no_reload_up():
    """The order of the step before has it first, and this backward leaves it out."""
    kinds = kinds_of_last_step(
        offload_of(None, keep_last_count=1),
        lambda number, loss, other: (loss if number == 2 else loss + other).backward(),
    )
    # Demanded, and then all others are on their way.
    assert kinds == ["fetch", "wait"] + ["fetch"] * 9 + ["wait"] * 9


def test_what_stayed_and_was_passed_over_makes_no_room():
    kinds = kinds_of_last_step(
        offload_of(None, keep_last_count=2),
        lambda number, loss, other: (loss if number == 2 else loss + other).backward(),
    )
    # While the other that stayed is read.
    assert kinds == ["fetch", "wait"] + ["fetch"] * 8 + ["wait"] * 8


def test_what_stayed_and_is_read_last_holds_no_reload_up():
    kinds = kinds_of_last_step(
        offload_of(None, keep_last_count=1),
        lambda _, loss, other: (loss.backward(), other.backward()),
    )
    assert kinds == ["fetch", "wait"] + ["fetch"] * 9 + ["wait"] * 9
