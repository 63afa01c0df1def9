"""What is moved: a storage that may leave the device, and its way to the host and back.

Indexes are positions of ops on the timeline (``graph.timeline``); an index one past the last op of
a backward stands for its return.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from offplan.footprint import Footprint
from offplan.graph import StorageId


class Move(NamedTuple):
    """A storage that may leave the device, saved by ``region``."""

    region: int
    storage: StorageId
    size_bytes: int
    footprint: Footprint


# The address of a reloaded range is a multiple of this, as a block's is: views keep their
# alignment, by which kernels choose.
DEVICE_ALIGNMENT_BYTES = 512


def first_byte(start: int) -> int:
    """Where in its storage the buffer of a range from ``start`` begins."""
    return start // DEVICE_ALIGNMENT_BYTES * DEVICE_ALIGNMENT_BYTES


def buffer_bytes(start: int, stop: int, item_bytes: int) -> int:
    """Bytes asked for when bytes ``start`` to ``stop`` of a storage come back: whole elements of
    ``item_bytes``, so that the buffer can be viewed as any dtype."""
    return -(-(stop - first_byte(start)) // item_bytes) * item_bytes


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One storage's way to the host and back.

    Bytes ``start`` to ``stop`` of the storage are what the device holds after the reload.
    ``transfer_bytes`` cross the link each way: that range, or only the touched bytes of it if
    ``packed``.
    """

    region: int
    storage: StorageId
    start: int
    stop: int
    transfer_bytes: int
    offload_after: int
    release_by: int
    reload_at: int | None
    needed_by: int | None
    packed: bool = False
