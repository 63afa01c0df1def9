"""Storages as an eager forward saves them, one tensor at a time, and their way out and back.

1.  A *record* is one storage at one version.  Every tensor saved of it meanwhile is a *view* of the
    record, with its exact dtype, shape, strides and offset, so all of them share one copy, and come
    back on one storage.  A storage that was modified in place is another record from then on.
2.  A record is a *candidate* if it may be moved.  The last ``keep_last_count`` candidates of a
    forward wait; each one more sends the first of them on its way, so those that are left when the
    forward ends are kept.
3.  *Offload* copies the whole storage.  The mover holds it until the forward ends, or until one is
    sent while more bytes than may be in flight are held, of which it is the first; then it
    *releases* it: the compute stream waits for the copy.  The storage goes when nothing else holds
    it.  So the most that are held are the bytes in flight and the storage sent last.
4.  Whoever reads a view of a moved record gets it from where it is.  Storages that something else
    still holds are *found* there; others are *reloaded*.  Then the next ones in the expected order
    are reloaded too, one at least, and as many bytes as may be in flight; but those that come after
    some that stayed, as far as the run before tells, only into the bytes of others that stayed and
    were read: a backward begins near the peak, and it is these that make room.
5.  The *expected order* is the one in which the run before read its records, if it had as many of
    them; else the last saved comes first.
6.  A reloaded storage is held until each view that is still there was read once.  A view may be
    read again (a backward that kept its graph): its storage is then reloaded again.
7.  A *run* is one forward: it begins with the first tensor saved after the offload was entered, or
    after a backward.
8.  Host memory goes to those that ask first, as far as its budget goes.  All that find no room are
    then the last ones of their run, and the link is idle for them.  So once a run was followed by
    a backward, began with no other storage on the host, and had no room for some, the next one is
    *spread*: of each size it moves as many storages as that run did, in the same host memory, which
    is reserved as the run begins.  The last ones that ask stay, where others of their size can go
    for them, up to twice the bytes in flight: they would be on their way out when the forward ends,
    or back when the backward begins, which is when the peak is.  Of the others of a size, those
    that move are spread evenly.  Runs go on so, each as the one before, until one differs in the
    sizes of its candidates: from there on, and in the run after it, those that ask first are served
    again.  They are, too, in a run that begins while the gaps have no room for the reservation, as
    with an earlier forward's storages on the host.

Copies, streams and events are those of ``replay.runtime`` (its definitions 1 to 5 and 7).  All
computing is assumed to be on one stream.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offplan.errors import OffplanError
from offplan.replay.packing import window
from offplan.replay.runtime import Guarded, Link, ReplayError, explained
from offplan.replay.shelf import Block, Shelf

aten = torch.ops.aten


class Tally(NamedTuple):
    """How many storages, and their bytes."""

    count: int = 0
    bytes: int = 0

    def plus(self, size_bytes: int, sign: int = 1) -> Tally:
        return Tally(self.count + sign, self.bytes + sign * size_bytes)


_NONE = Tally()


@dataclass
class Totals:
    """What was done with the candidates so far."""

    offloaded: Tally = _NONE
    reloaded: Tally = _NONE
    found: Tally = _NONE
    over_budget: Tally = _NONE
    run_count: int = 0


class Record:
    """One storage at one version (definition 1).  The views that the graph saved keep it alive.

    ``held`` is the storage where it must not go: not moved, or reloaded and still to be read.
    ``live`` finds it where something else holds it.  ``rule`` is why it is no candidate, or empty.
    """

    def __init__(self, mover: Mover, tensor: torch.Tensor, rule: str) -> None:
        storage = tensor.untyped_storage()
        self.mover = mover
        self.rule = rule
        self.size_bytes = storage.nbytes()
        self.version = tensor._version
        self.held: torch.UntypedStorage | None = storage
        self.live = weakref.ref(storage)
        self.run: Run | None = None
        self.place = -1
        self.host: torch.Tensor | None = None
        self.block: Any = None
        self.sent: Any = None
        self.arriving: _Arriving | None = None
        self.round = 0
        self.view_count = 0
        self.unread_count = 0
        # Last, since it can fail, and what is not whole dies too.
        self.counter = version_counter(tensor)

    @property
    def is_moved(self) -> bool:
        return self.host is not None

    def here(self) -> torch.UntypedStorage | None:
        """The storage, if it is on the device with all of its bytes."""
        storage = self.live() if self.held is None else self.held
        return storage if storage is not None and storage.nbytes() == self.size_bytes else None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.mover.forget(self)


class _Arriving(NamedTuple):
    """A reload that nothing has waited for: ``copy`` fills ``target``."""

    target: Any
    copy: Any


class View:
    """One saved tensor of a record: what a graph holds in its place."""

    def __init__(self, record: Record, tensor: torch.Tensor) -> None:
        self.record = record
        # Saved in the middle of a round, it is not one of those that the round waits for.
        self.round = record.round
        record.view_count += 1
        self.dtype = tensor.dtype
        self.shape, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()
        self.version = tensor._version
        self.counter = version_counter(tensor)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on ``storage``."""
        tensor = window(storage, self.offset, self.shape, self.stride, self.dtype)
        if self.is_conj:
            tensor = aten._conj.default(tensor)
        return aten._neg_view.default(tensor) if self.is_neg else tensor

    def check_version(self) -> None:
        check_version(self.counter, self.version, self.dtype, self.shape)

    def __del__(self) -> None:
        record = self.record
        record.view_count -= 1
        if record.round > self.round:
            record.mover.read(self)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor whose ``_version`` is that of ``tensor``, now and later."""
    counter = tensor.detach()
    # Setting ``.data`` takes the storage, and leaves the counter that ``detach`` shares.
    counter.data = counter.new_empty(0)
    return counter


def check_version(
    counter: torch.Tensor, version: int, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    """Raise what autograd raises for a saved tensor that was modified in place.

    It leaves that check to whoever sets hooks, which see neither the modification nor the graph.
    """
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{str(dtype).removeprefix('torch.')}{list(shape)}] is at version "
            f"{counter._version}; expected version {version} instead."
        )


# --- runs -----------------------------------------------------------------------------------------


class Room:
    """Which candidates of a run get host memory (definition 8), as far as ``before`` it tells; the
    last ``last_bytes`` of a run that is spread stay first.

    ``asked`` are the places of those that wanted some.  ``counts`` is how many of each size are
    moved, None where that is no example to follow; ``reserved`` has the blocks of a run that is
    spread by place, and is None while those that ask first are served.
    """

    def __init__(self, shelf: Shelf, before: Run | None, last_bytes: int) -> None:
        self.shelf = shelf
        self.asked: list[int] = []
        self.was_enough = True
        is_alone = shelf.used_bytes == 0
        self.reserved = None if before is None else _reserved(shelf, before, last_bytes)
        self.counts: Counter[int] | None = Counter() if is_alone else None
        if before is not None and self.reserved is not None:
            self.counts = before.room.counts

    def block(self, record: Record) -> Block | None:
        """A block for ``record``, if it gets one."""
        self.asked.append(record.place)
        if self.reserved is not None:
            self.shelf.check_usable()
            block = self.reserved.pop(record.place, None)
        else:
            block = self.shelf.take(record.size_bytes)
            if block is not None and self.counts is not None:
                self.counts[record.size_bytes] += 1
        self.was_enough &= block is not None
        return block

    def differ(self) -> None:
        """This run is not like the one before."""
        if self.reserved is not None:
            self.reserved, self.counts = None, None

    def end(self) -> None:
        """Give back what was reserved in vain."""
        if self.reserved is not None:
            self.reserved.clear()


def _reserved(shelf: Shelf, before: Run, last_bytes: int) -> dict[int, Block] | None:
    """Blocks for a run like ``before``, by place; None if it is not to be spread."""
    room = before.room
    if room.counts is None or room.was_enough:
        return None
    asked = [place for place in room.asked if place not in before.found]
    chosen = spread(asked, before.sizes, room.counts, last_bytes)
    blocks = shelf.reserve([before.sizes[place] for place in chosen])
    return None if blocks is None else dict(zip(chosen, blocks, strict=True))


class Run:
    """The candidates of one forward, in the order in which they were saved (definition 7)."""

    def __init__(self, shelf: Shelf, before: Run | None, last_bytes: int) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.sizes: list[int] = []
        self.room = Room(shelf, before, last_bytes)
        # Places, in the order in which they were first read.
        self.read: dict[int, None] = {}
        # Places of storages that something else held past the forward.
        self.found: set[int] = set()
        self.order: list[int] = []
        self.cursor = 0
        self._before = before
        self._positions: dict[int, int] = {}
        # Positions of what stayed, still to be read or just read; bytes of what was, before that.
        self._staying: deque[int] = deque()
        self._freed_bytes = 0

    def add(self, record: Record) -> bool:
        """Take a candidate; whether it may move, as far as the run before can tell."""
        record.run, record.place = self, len(self.records)
        self.records.append(weakref.ref(record))
        self.sizes.append(record.size_bytes)
        before, place = self._before, record.place
        if before is None or before.sizes[place : place + 1] != [record.size_bytes]:
            self.room.differ()
            return True
        if place not in before.found:
            return True
        self.found.add(place)
        return False

    def expect(self) -> None:
        """Fix the expected order (definition 5)."""
        if self.order:
            return
        places = range(len(self.records))
        before = self._before
        learned: dict[int, None] = {}
        if before is not None and before.sizes == self.sizes:
            learned = before.read
        else:
            self.room.differ()
        self.order = [*learned, *(place for place in reversed(places) if place not in learned)]
        self._positions = {place: position for position, place in enumerate(self.order)}
        self._staying = deque(self._positions[place] for place in learned if self._stayed(place))
        self._before = None

    def _stayed(self, place: int) -> bool:
        record = self.records[place]()
        return record is not None and not record.is_moved and place not in self.found

    def reads(self, record: Record) -> None:
        """Note that ``record`` is read: what stayed and comes before it is gone, or passed."""
        self.read.setdefault(record.place)
        position = self._positions.get(record.place, -1)
        while self._staying and self._staying[0] < position:
            place = self.order[self._staying.popleft()]
            if place in self.read:
                self._freed_bytes += self.sizes[place]

    def most_ahead_bytes(self, record: Record, in_flight_bytes: int) -> int:
        """What may be on its way or unread with ``record`` (definition 4)."""
        if self._staying and self._staying[0] < self._positions[record.place]:
            return min(in_flight_bytes, self._freed_bytes)
        return in_flight_bytes

    def go_to(self, record: Record) -> None:
        """Have what comes after ``record`` come next."""
        self.cursor = self._positions.get(record.place, -1) + 1

    def next(self) -> Record | None:
        """The next record in the expected order that is moved and not on the device."""
        while self.cursor < len(self.order):
            record = self.records[self.order[self.cursor]]()
            if record is not None and record.is_moved and record.held is None:
                return record
            self.cursor += 1
        return None


def spread(
    asked: Sequence[int], sizes: Sequence[int], counts: Mapping[int, int], last_bytes: int
) -> list[int]:
    """The places in ``asked`` that are moved: of each size as many as ``counts`` says.

    Of each size first those stay that are among the last ``last_bytes``; those that move are spread
    evenly over the others.  Sizes begin one after another, not all with their first storage, so
    that what is saved together does not leave together.
    """
    of_size: dict[int, list[int]] = {}
    for place in asked:
        of_size.setdefault(sizes[place], []).append(place)
    for place in reversed(asked):
        size = sizes[place]
        last_bytes -= size
        if last_bytes < 0:
            break
        if len(of_size[size]) > counts.get(size, 0):
            of_size[size].pop()
    chosen: list[int] = []
    for number, (size, places) in enumerate(of_size.items()):
        count = min(counts.get(size, 0), len(places))
        for turn in range(count):
            part = turn * len(of_size) + number
            chosen.append(places[part * len(places) // (count * len(of_size))])
    return sorted(chosen)


# --- moving ---------------------------------------------------------------------------------------


class _Sending(NamedTuple):
    """An offload that is not released: the storage, the copy that reads it, and its bytes."""

    source: Any
    copy: Any
    size_bytes: int


class Mover:
    """Moves records over ``link`` into blocks of ``shelf`` (definitions 2 to 6)."""

    def __init__(
        self, link: Link, shelf: Shelf, keep_last_count: int, in_flight_bytes: int
    ) -> None:
        self.link = link
        self.shelf = shelf
        self.keep_last_count = keep_last_count
        self.in_flight_bytes = in_flight_bytes
        self.totals = Totals()
        self.is_closed = False
        self._run: Run | None = None
        # The last run that had a backward.
        self._learned: Run | None = None
        self._has_run = False
        self._waiting: deque[weakref.ref[Record]] = deque()
        self._sending: dict[int, _Sending] = {}
        self._sending_bytes = 0
        self._ahead: dict[int, weakref.ref[Record]] = {}
        self._ahead_bytes = 0
        self._reload_count = 0

    # --- the way out ------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """The next candidate is the first of another forward."""
        self.link.begin_run()
        self.end_forward()
        self._drop_ahead()
        if self._run is not None and self._run.read:
            self._learned = self._run
        self._run = Run(self.shelf, self._learned, 2 * self.in_flight_bytes)
        self._has_run = False

    def add(self, record: Record) -> bool:
        """Take a candidate, and move the one that is no longer among the last.

        False if it cannot leave: the run before found that storage held by something else.
        """
        assert self._run is not None
        if not self._run.add(record):
            return False
        self._waiting.append(weakref.ref(record))
        while len(self._waiting) > self.keep_last_count:
            first = self._waiting.popleft()()
            if first is not None:
                self._offload(first)
        return True

    def end_forward(self) -> None:
        """Keep what still waits, and release everything that was sent."""
        self._waiting.clear()
        if self._run is not None:
            self._run.room.end()
        self._release(0)
        # What an interrupt may have left uncounted.
        self._sending_bytes = 0

    def _offload(self, record: Record) -> None:
        # Modified since it was saved: whoever reads it is told so, and needs no bytes.
        if record.counter._version != record.version or record.here() is None:
            return
        # Before there is more: what is released here makes room for what the forward makes next.
        self._release(self.in_flight_bytes)
        with Guarded(self.link, f"the offload of {record.size_bytes} saved bytes"):
            assert record.run is not None
            block = record.run.room.block(record)
            if block is None:
                self.totals.over_budget = self.totals.over_budget.plus(record.size_bytes)
                return
            source = self.link.part(record.held, 0, record.size_bytes)
            host = block.host_tensor(record.size_bytes)
            sent = self.link.send(source, host, block.after)
            self._sending[id(record)] = _Sending(source, sent, record.size_bytes)
        record.block, record.host, record.sent, record.held = block, host, sent, None
        self._sending_bytes += record.size_bytes
        self.totals.offloaded = self.totals.offloaded.plus(record.size_bytes)
        if not self._has_run:
            self._has_run = True
            self.totals.run_count += 1

    def _release(self, most_bytes: int) -> None:
        """Let go of the storages sent first, until at most ``most_bytes`` are held."""
        while self._sending and self._sending_bytes > most_bytes:
            self._let_go(next(iter(self._sending)))

    def _let_go(self, key: int) -> None:
        sending = self._sending.get(key)
        if sending is None:
            return
        try:
            with Guarded(self.link, f"the release of {sending.size_bytes} saved bytes"):
                self.link.wait(sending.copy)
        finally:
            # Not before the wait: an interrupt would free the storage while it is copied.
            self._sending.pop(key, None)
            self._sending_bytes -= sending.size_bytes

    # --- the way back -----------------------------------------------------------------------------

    def bring(self, view: View) -> torch.Tensor:
        """The saved tensor; and the reloads that are issued because it was read."""
        record, run = view.record, view.record.run
        if run is None:
            return view.on(_there(record))
        run.expect()
        run.reads(record)
        tensor = self._moved(view) if record.is_moved else view.on(_there(record))
        self._look_ahead(run)
        return tensor

    def _look_ahead(self, run: Run) -> None:
        """Reload what comes next in ``run`` (definition 4)."""
        while (record := run.next()) is not None:
            size = record.size_bytes
            most_bytes = run.most_ahead_bytes(record, self.in_flight_bytes)
            if self._ahead and self._ahead_bytes + size > most_bytes:
                return
            self._check_open()
            self._fetch(record)
            self._ahead[id(record)] = weakref.ref(record)
            self._ahead_bytes += size

    def _moved(self, view: View) -> torch.Tensor:
        record = view.record
        if record.held is None:
            if record.here() is None:
                self._check_open()
            self._fetch(record)
            assert record.run is not None
            record.run.go_to(record)
        self._no_longer_ahead(record)
        if record.arriving is not None:
            self._check_open()
            target, copy = record.arriving
            with Guarded(self.link, f"the wait for {record.size_bytes} saved bytes"):
                self.link.arrive(record.host, target, copy)
            record.arriving = None
        assert record.held is not None
        tensor = view.on(record.held)
        if view.round < record.round:
            self.read(view)
        return tensor

    def _fetch(self, record: Record) -> None:
        """Begin a round of reads: take the storage where it is, or issue its reload."""
        storage = record.here()
        if storage is None:
            self._reload(record)
        else:
            if record.round == 0 and id(record) not in self._sending:
                self.totals.found = self.totals.found.plus(record.size_bytes)
                record.run.found.add(record.place)
            record.held = storage
        record.round += 1
        record.unread_count = record.view_count

    def _reload(self, record: Record) -> None:
        with Guarded(self.link, f"the reload of {record.size_bytes} saved bytes"):
            storage = self.link.buffer(record.size_bytes).untyped_storage()
            target = self.link.part(storage, 0, record.size_bytes)
            copy = self.link.fetch(record.host, target, record.sent)
            record.block.read_by(self._reload_count, copy)
            self._reload_count += 1
            record.arriving = _Arriving(target, copy)
        record.held = storage
        record.live = weakref.ref(record.held)
        self.totals.reloaded = self.totals.reloaded.plus(record.size_bytes)

    def read(self, view: View) -> None:
        """Count ``view`` as read, or gone, in this round; after the last one, let go."""
        record = view.record
        view.round = record.round
        record.unread_count -= 1
        if record.unread_count == 0 and record.is_moved:
            self._drop(record)

    def _drop(self, record: Record) -> None:
        arriving, record.arriving = record.arriving, None
        try:
            if arriving is not None:
                # Its bytes may be given to someone else, from here on the compute stream.
                with Guarded(self.link, f"letting go of {record.size_bytes} reloaded bytes"):
                    self.link.wait(arriving.copy)
        finally:
            record.held = None
            self._no_longer_ahead(record)

    def _no_longer_ahead(self, record: Record) -> None:
        if self._ahead.pop(id(record), None) is not None:
            self._ahead_bytes -= record.size_bytes

    def _drop_ahead(self) -> None:
        """Let go of what was reloaded for a backward that did not come to it."""
        for reference in list(self._ahead.values()):
            record = reference()
            if record is not None:
                record.round -= 1
                self._drop(record)
        self._ahead.clear()
        self._ahead_bytes = 0

    # --- the end ----------------------------------------------------------------------------------

    def forget(self, record: Record) -> None:
        """A record has died: nothing of it stays in flight."""
        # Nobody hears an error from here, and no bytes are missed.
        with suppress(OffplanError):
            self._let_go(id(record))
        with suppress(OffplanError):
            self._drop(record)

    def close(self) -> None:
        """Wait for copies in flight, and give the host memory back."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            with explained("waiting for the copies in flight"):
                self.link.drain()
        finally:
            self._waiting.clear()
            self._sending.clear()
            self._sending_bytes = 0
            if self._run is not None:
                self._run.room.end()
            self.shelf.close()

    def __del__(self) -> None:
        # Nobody hears an error from here.
        if not sys.is_finalizing():
            with suppress(OffplanError):
                self.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ReplayError(
                "the offload is closed, and what it had saved on the host is gone",
                fix="close it after the last backward",
            )


def _there(record: Record) -> torch.UntypedStorage:
    storage = record.here()
    if storage is None:
        raise ReplayError(
            "the storage of a saved tensor was resized between the forward and the backward",
            fix="resize it outside, or leave it alone: offload.leave(tensor)",
        )
    return storage
