"""How much host memory can be pinned here, and what says so.

1.  A *limit* bounds the host memory that this process can still take.  Its *left* bytes are what it
    bounds less what counts against it already.  The *ceiling* is the least that any limit leaves.
2.  *free memory* is what the system says is available without swapping (``MemAvailable``).
3.  *cgroup* is a memory limit of the control group that the process is in or of one above it, in
    version 1 or 2.  File pages that the kernel gives up when it needs room do not count against it.
4.  *ulimit -l* bounds the bytes that a process without ``CAP_IPC_LOCK`` locks.  It holds for
    ``register``, which locks its pages; CUDA's own allocations are not counted against it.
5.  A *trial pin* is what was pinned and given back: the largest size tried that worked.  It limits
    if a larger size was refused.
6.  A mapping is one entry of the process's memory map, of which there are at most
    ``vm.max_map_count``.  Host memory comes in a few large slabs, so that it takes a few of them.

Read from ``/proc`` and the mounted control groups, below ``root``.  What cannot be read bounds
nothing.  Not handled: limits of a group that is not mounted here, and memory of one NUMA node.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from offplan.errors import OffplanError
from offplan.measured import HostLimit, HostLimits, PinName
from offplan.units import format_binary, format_size

_KIB = 1024
_LOCK_CAPABILITY = 14  # CAP_IPC_LOCK
# Version 1 says that there is no limit with the largest multiple of a page.
_UNLIMITED_BYTES = 1 << 60
# What stays free where pages are taken that the kernel cannot take back: it would kill instead.
MARGIN_BYTES = 64 * 1024**2
PAGE_BYTES = mmap.PAGESIZE

_FIXES = {
    "free memory": "end what else takes memory on this machine",
    "cgroup": "raise the memory limit of the container or job",
    "ulimit -l": "raise `ulimit -l`, or pin with CUDA's own allocator: --pin torch",
    "trial pin": "end what else pins memory on this machine",
}


class HostMemoryError(OffplanError):
    """Host memory for a replay cannot be had: over the budget, or refused by the system."""


# --- reading --------------------------------------------------------------------------------------


def read_limits(root: Path = Path("/")) -> HostLimits:
    """Every limit on host memory of this process, and its mappings."""
    proc = root / "proc"
    found = [*_free_memory(proc), *_cgroup_limits(root), *_lock_limit(proc)]
    map_count, max_map_count = (
        _count_lines(proc / "self/maps"),
        _number(proc / "sys/vm/max_map_count"),
    )
    return HostLimits(limits=tuple(found), map_count=map_count, max_map_count=max_map_count)


def with_trial(
    limits: HostLimits, largest_bytes: int, *, is_limit: bool, note: str = ""
) -> HostLimits:
    """``limits`` with the most that a trial pin reached."""
    trial = HostLimit(
        name="trial pin",
        left_bytes=largest_bytes if is_limit else None,
        limit_bytes=largest_bytes,
        note=note,
    )
    return HostLimits(
        limits=(*limits.limits, trial),
        map_count=limits.map_count,
        max_map_count=limits.max_map_count,
    )


def _free_memory(proc: Path) -> Iterator[HostLimit]:
    sizes = _sizes(proc / "meminfo")
    # Kernels before 3.14 do not say what is available.
    left = sizes.get("MemAvailable", sizes.get("MemFree"))
    if left is not None:
        total = sizes.get("MemTotal")
        yield HostLimit(
            name="free memory",
            left_bytes=left,
            limit_bytes=total,
            used_bytes=None if total is None else max(total - left, 0),
            where="/proc/meminfo",
        )


def _lock_limit(proc: Path) -> Iterator[HostLimit]:
    status = proc / "self/status"
    for line in _lines(proc / "self/limits"):
        row = re.match(r"Max locked memory\s+(\S+)", line)
        if row is None:
            continue
        limit = int(row[1]) if row[1].isdigit() else None
        used = _sizes(status).get("VmLck", 0)
        if _may_lock(status):
            note = "does not hold for this process, which has CAP_IPC_LOCK"
            left = None
        else:
            note = "holds for --pin register"
            left = None if limit is None else max(limit - used, 0)
        yield HostLimit(
            name="ulimit -l",
            left_bytes=left,
            limit_bytes=limit,
            used_bytes=used,
            where="/proc/self/limits",
            note=note,
        )


def _may_lock(status: Path) -> bool:
    for line in _lines(status):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _LOCK_CAPABILITY & 1)
    return False


# --- control groups -------------------------------------------------------------------------------


class _Mount(NamedTuple):
    """A mounted hierarchy: where, and which of its groups is seen there as the topmost."""

    point: PurePosixPath
    top: PurePosixPath
    version: int


class _Files(NamedTuple):
    """What a version calls its files, and the pages of a group that the kernel can give up."""

    limits: tuple[str, ...]
    usage: str
    given_up: tuple[str, ...]
    not_yet: tuple[str, ...]


_VERSIONS = {
    1: _Files(
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        given_up=("total_inactive_file", "total_active_file"),
        not_yet=("total_dirty", "total_writeback"),
    ),
    # Over memory.high nobody is killed; the process is held up until it stands still.
    2: _Files(
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        given_up=("inactive_file", "active_file"),
        not_yet=("file_dirty", "file_writeback"),
    ),
}


def _cgroup_limits(root: Path) -> Iterator[HostLimit]:
    """The limits of the groups that the process is in, from its own up."""
    groups = dict(_groups(root / "proc/self/cgroup"))
    for mount in _mounts(root / "proc/self/mountinfo"):
        group = groups.get(mount.version)
        if group is None:
            continue
        for path in _upwards(root, mount, group):
            yield from _limits_of(root, path, _VERSIONS[mount.version])
            if _read(_below(root, path) / "memory.use_hierarchy") == "0":
                # Version 1: what is above does not count what is in here.
                break


def _groups(path: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """The group of the process by version of the hierarchy that limits memory."""
    for line in _lines(path):
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, controllers, group = parts
        if "memory" in controllers.split(","):
            yield 1, PurePosixPath(group)
        elif number == "0" and not controllers:
            yield 2, PurePosixPath(group)


def _mounts(path: Path) -> Iterator[_Mount]:
    for line in _lines(path):
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or not kind:
            continue
        top, point = (PurePosixPath(_unescaped(field)) for field in fields[3:5])
        if kind[0] == "cgroup2":
            yield _Mount(point, top, 2)
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            yield _Mount(point, top, 1)


def _unescaped(field: str) -> str:
    """Spaces and the like are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _upwards(root: Path, mount: _Mount, group: PurePosixPath) -> Iterator[PurePosixPath]:
    """The folders of ``group`` and of those above it, as far as they are mounted."""
    try:
        below = group.relative_to(mount.top)
    except ValueError:
        # A container that sees its own group as the top, but is told the host's name of it.
        below = PurePosixPath(".")
    if ".." in below.parts or not _below(root, mount.point / below).is_dir():
        below = PurePosixPath(".")
    for part in (below, *below.parents):
        yield mount.point / part


def _limits_of(root: Path, path: PurePosixPath, files: _Files) -> Iterator[HostLimit]:
    folder = _below(root, path)
    used = _number(folder / files.usage)
    if used is None:
        return
    stat = _counts(folder / "memory.stat")
    file_bytes = sum(stat.get(name, 0) for name in files.given_up)
    held = sum(stat.get(name, 0) for name in files.not_yet)
    used = max(used - max(file_bytes - held, 0), 0)
    for name in files.limits:
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED_BYTES:
            yield HostLimit(
                name="cgroup",
                left_bytes=max(limit - used, 0),
                limit_bytes=limit,
                used_bytes=used,
                where=str(path / name),
            )


# --- small files ----------------------------------------------------------------------------------


def _below(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to("/") if path.is_absolute() else root / path


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _count_lines(path: Path) -> int | None:
    return len(_lines(path)) or None


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name, from lines like ``MemTotal:   24683652 kB``."""
    found = {}
    for line in _lines(path):
        row = re.match(r"(\w+):\s+(\d+) kB", line)
        if row is not None:
            found[row[1]] = int(row[2]) * _KIB
    return found


def _counts(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# --- room -----------------------------------------------------------------------------------------


def holding(limits: HostLimits, pin: PinName) -> Sequence[HostLimit]:
    """The limits that hold for memory of the backend ``pin`` (definition 4)."""
    return [limit for limit in limits.limits if pin == "register" or limit.name != "ulimit -l"]


def least(limits: HostLimits, pin: PinName, margin_bytes: int = MARGIN_BYTES) -> HostLimit | None:
    """The limit that leaves the least; None where nothing is known."""
    known = [limit for limit in holding(limits, pin) if limit.left_bytes is not None]
    return min(known, key=lambda limit: room_bytes(limit, margin_bytes), default=None)


def ceiling_bytes(limits: HostLimits, pin: PinName, margin_bytes: int = MARGIN_BYTES) -> int | None:
    """The most that can still be pinned (definition 1), less a margin; None where nothing limits.

    Memory that is not to be pinned has the same ceiling: it is written to all the same.
    """
    found = least(limits, pin, margin_bytes)
    return None if found is None else room_bytes(found, margin_bytes)


def room_bytes(limit: HostLimit, margin_bytes: int = MARGIN_BYTES) -> int:
    """What may be taken under ``limit``, which leaves something or nothing."""
    assert limit.left_bytes is not None
    # Locking is refused at its limit, and a trial was not; the others end in a kill.
    exact = limit.name in ("ulimit -l", "trial pin")
    return limit.left_bytes if exact else max(limit.left_bytes - margin_bytes, 0)


def check_room(limits: HostLimits, asked_bytes: int, pin: PinName) -> None:
    """Raise ``HostMemoryError`` if pinning ``asked_bytes`` goes over a limit, before it is tried.

    The kernel does not refuse what goes over the memory of a machine or a group: it kills.
    """
    found = least(limits, pin)
    if found is None or asked_bytes <= room_bytes(found):
        return
    raise HostMemoryError(
        f"{amount(asked_bytes)} of host pinned memory do not fit: {limit_words(found)}",
        fix=f"{_FIXES[found.name]}, or move less (--host-budget {room_bytes(found)})",
    )


def limit_words(limit: HostLimit) -> str:
    """What ``limit`` is and leaves, as a clause of a message."""
    assert limit.left_bytes is not None
    words = f"{limit.name} leaves {amount(limit.left_bytes)}"
    if limit.limit_bytes is not None:
        words += f" of {amount(limit.limit_bytes)}"
    return f"{words} ({limit.where})" if limit.name == "cgroup" else words


def amount(size_bytes: int) -> str:
    """``256MiB``, or ``1.50 GB (1500000001 bytes)`` where it is no such multiple."""
    binary = format_binary(size_bytes)
    return binary if binary.endswith("iB") else f"{format_size(size_bytes)} ({size_bytes} bytes)"


def reserved_bytes(asked_bytes: int, pin: PinName) -> int:
    """What a slab of ``asked_bytes`` takes: whole pages, and powers of two with ``torch``."""
    pages = -(-asked_bytes // PAGE_BYTES) * PAGE_BYTES
    return 1 << (pages - 1).bit_length() if pin == "torch" and pages else pages
