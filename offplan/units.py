"""Parse and print sizes and times.

Sizes: KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB are powers of 1000; a bare number is
bytes.  Printed sizes use decimal units with two digits (``49.66 GB``), except whole binary
multiples, which users type as thresholds and read back as they typed them (``5MiB``).
"""

from __future__ import annotations

import re
from decimal import Decimal

from offplan.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes named by ``text`` (``5MiB``, ``1.5GiB``, ``49.66 GB``, ``4096``).

    A fraction of a byte is cut off.  Raises ``UsageError`` for anything else: a sign, an unknown
    unit, a number that is not finite.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise UsageError(
            f"{text!r} is not a size",
            fix="write bytes (1048576) or a number with kB, MB, GB, KiB, MiB or GiB (5MiB)",
        )
    # Decimal, not float: 0.1GB is exactly 100,000,000 bytes, and large sizes keep every byte.
    return int(Decimal(match.group(1)) * _UNITS[match.group(2).lower()])


def format_size(size_bytes: int) -> str:
    """``size_bytes`` in the largest decimal unit of which there is at least one: ``49.66 GB``."""
    if size_bytes < 0:
        return "-" + format_size(-size_bytes)
    for unit, scale in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        # From 999.995 of the unit below, which would print as 1000.00.
        if size_bytes * 200_000 >= scale * 199_999:
            return f"{Decimal(size_bytes) / scale:.2f} {unit}"
    return f"{size_bytes} B"


def format_binary(size_bytes: int) -> str:
    """``size_bytes`` as a threshold is typed: ``5MiB`` when it is a whole multiple, else bytes."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def format_seconds(seconds: float) -> str:
    """A duration for people: ``850 ms``, ``4.2 s``, ``2 min 05 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
