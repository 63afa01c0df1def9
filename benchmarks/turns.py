"""Turns at a machine that several measuring processes share.

Everyone is in the *room* together while building, compiling and planning, and alone while timing:
whoever waits to be alone stands in the *door*, so that nobody comes in meanwhile, until all others
have come to their own timing, or ended.  Locks on files, so that a process that dies lets go.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """The turns of one process at the machine of all that name the same ``path`` (None: alone)."""

    def __init__(self, path: str | None) -> None:
        self.is_shared = path is not None
        if path is not None:
            flags = os.O_RDWR | os.O_CREAT
            self._room, self._door = os.open(path, flags), os.open(path + ".door", flags)
            self._enter(fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is in the room; the device has finished what was issued when it ends."""
        if not self.is_shared:
            yield
            return
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self._enter(fcntl.LOCK_EX)
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
            self._enter(fcntl.LOCK_SH)

    def _enter(self, how: int) -> None:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, how)
        fcntl.flock(self._door, fcntl.LOCK_UN)
