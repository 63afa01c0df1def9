"""A memory snapshot that a run wrote with ``torch.cuda.memory._dump_snapshot``, as plain records.

1.  The file is a pickle of plain values (``offplan.plainpickle``), or the same as JSON.  Older
    versions of torch wrote the segments alone.
2.  Only what is read here has to be there; all else in the file is passed over.
3.  What was allocated, in order: first the blocks that are in use in the end and that no event
    allocates, by address, which were there before; then one for each ``alloc`` event.

Sizes are bytes that were asked for; indexes count the events of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offplan.errors import FileFormatError, UsageError
from offplan.files import read_content
from offplan.plainpickle import PickleError, read_pickle

# Many times the history that torch keeps by default.
_MAX_RECORDS = 20_000_000
_MAX_FILE_BYTES = 4 * 1024**3
_MAX_DEVICES = 1024
_MAX_ADDRESS = 2**64
_LISTS = (list, tuple)
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class _Record(msgspec.Struct, frozen=True):
    pass


class DumpedBlock(_Record, frozen=True):
    size: int
    state: str
    requested_size: int = 0
    frames: Any = None


class DumpedSegment(_Record, frozen=True):
    address: int
    blocks: tuple[DumpedBlock, ...]
    device: int = 0


class DumpedEvent(_Record, frozen=True):
    action: str
    addr: int = 0
    size: int = 0
    frames: Any = None


class DumpedSnapshot(_Record, frozen=True):
    segments: tuple[DumpedSegment, ...]
    device_traces: tuple[tuple[DumpedEvent, ...], ...] = ()


class Allocated(NamedTuple):
    """An allocation of the run; ``event`` is None for what was there before (definition 3), and
    ``freed`` for what was not freed.  ``source`` is the line that asked for it, if it is known."""

    size_bytes: int
    address: int
    event: int | None
    freed: int | None
    source: str


@dataclass(frozen=True)
class Dumped:
    """What one device allocated, in order, and the most bytes at once."""

    device: int
    allocated: tuple[Allocated, ...]
    event_count: int
    peak_bytes: int


def load_dumped(path: Path, device: int | None = None) -> Dumped:
    """Read the snapshot at ``path`` for ``device``, by default the one with the most events.

    Raises ``FileFormatError`` for a file that is no snapshot, or has more than plain values.
    """
    snapshot = _snapshot(path)
    count = max(
        [len(snapshot.device_traces), *(segment.device + 1 for segment in snapshot.segments)]
    )
    if device is None:
        device = max(range(count), key=lambda each: _weight(snapshot, each), default=0)
    elif not 0 <= device < count:
        raise UsageError(f"{path} has no device {device}", fix=f"one of 0 to {count - 1}")
    events = snapshot.device_traces[device] if device < len(snapshot.device_traces) else ()
    allocated = [*_before(snapshot, device, events), *_by_event(events)]
    return Dumped(device, tuple(allocated), len(events), _peak_bytes(allocated))


def _snapshot(path: Path) -> DumpedSnapshot:
    content = read_content(path, _MAX_FILE_BYTES, "a memory snapshot")
    try:
        if content.lstrip()[:1] in (b"{", b"["):
            found = msgspec.json.decode(content)
        else:
            found = read_pickle(content)
        if isinstance(found, list):
            found = {"segments": found}
        _check_count(found)
        snapshot = msgspec.convert(found, DumpedSnapshot)
        _check_numbers(snapshot)
        return snapshot
    except (PickleError, msgspec.DecodeError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is not a memory snapshot: {error}",
            fix="write one in the run: torch.cuda.memory._dump_snapshot(FILE)",
        ) from error


def _check_count(found: Any) -> None:
    """Refuse a small file in which what is shared makes more than can be walked."""
    if not isinstance(found, dict):
        raise PickleError("it has no segments")
    segments, traces = found.get("segments"), found.get("device_traces", ())
    collections = [segments, *(traces if isinstance(traces, _LISTS) else ())]
    collections += [
        segment.get("blocks")
        for segment in (segments if isinstance(segments, _LISTS) else ())
        if isinstance(segment, dict)
    ]
    if sum(len(each) for each in collections if isinstance(each, _LISTS)) > _MAX_RECORDS:
        raise PickleError(f"it has more than {_MAX_RECORDS:,} blocks and events")


def _check_numbers(snapshot: DumpedSnapshot) -> None:
    """Refuse devices that no machine has, of which each would be looked at, and sizes that no
    memory has."""
    for segment in snapshot.segments:
        if not 0 <= segment.device < _MAX_DEVICES:
            raise PickleError(f"it has a segment of device {segment.device}")
        sizes = (size for block in segment.blocks for size in (block.size, block.requested_size))
        if not all(0 <= number < _MAX_ADDRESS for number in (segment.address, *sizes)):
            raise PickleError("it has a segment of sizes or addresses that there are not")
    if len(snapshot.device_traces) > _MAX_DEVICES:
        raise PickleError(f"it has events of {len(snapshot.device_traces)} devices")
    for events in snapshot.device_traces:
        for event in events:
            if not 0 <= event.size < _MAX_ADDRESS or not 0 <= event.addr < _MAX_ADDRESS:
                raise PickleError("it has an event of a size or address that there is not")


def _source(frames: Any) -> str:
    """``file:line`` of the innermost frame of Python that is not torch's own; of any, if none is.

    Frames are looked at where they are: most of a file is stacks, many of them shared.
    """
    others = ""
    for frame in frames if isinstance(frames, _LISTS) else ():
        name = frame.get("filename") if isinstance(frame, dict) else None
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        line = f"{name}:{frame.get('line')}"
        if "/torch/" not in name:
            return line
        others = others or line
    return others


def _weight(snapshot: DumpedSnapshot, device: int) -> tuple[int, int]:
    traces = snapshot.device_traces
    events = len(traces[device]) if device < len(traces) else 0
    return events, sum(segment.device == device for segment in snapshot.segments)


def _before(
    snapshot: DumpedSnapshot, device: int, events: tuple[DumpedEvent, ...]
) -> Iterator[Allocated]:
    """What was there before the first event: in use in the end, or freed by an event."""
    made: set[int] = set()
    freed_first: dict[int, tuple[int, DumpedEvent]] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            made.add(event.addr)
        elif event.action == "free_requested" and event.addr not in made:
            freed_first.setdefault(event.addr, (number, event))
    found = [
        Allocated(event.size, address, None, number, "")
        for address, (number, event) in freed_first.items()
    ]
    for segment in snapshot.segments:
        address = segment.address
        for block in segment.blocks if segment.device == device else ():
            if block.state in _IN_USE and address not in made and address not in freed_first:
                size = block.requested_size or block.size
                found.append(Allocated(size, address, None, None, _source(block.frames)))
            address += block.size
    yield from sorted(found, key=lambda each: each.address)


def _by_event(events: tuple[DumpedEvent, ...]) -> list[Allocated]:
    found: list[Allocated] = []
    at: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            at[event.addr] = len(found)
            found.append(Allocated(event.size, event.addr, number, None, _source(event.frames)))
        elif event.action == "free_requested" and event.addr in at:
            place = at.pop(event.addr)
            found[place] = found[place]._replace(freed=number)
    return found


def _peak_bytes(allocated: list[Allocated]) -> int:
    """The most bytes at once."""
    changes: dict[int, int] = {}
    for each in allocated:
        begin = -1 if each.event is None else each.event
        changes[begin] = changes.get(begin, 0) + each.size_bytes
        if each.freed is not None:
            changes[each.freed] = changes.get(each.freed, 0) - each.size_bytes
    most = now = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most
