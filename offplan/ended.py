"""What Ctrl-C, SIGTERM and SIGHUP do to a command, and to the processes that it starts.

1.  Each raises ``Ended`` in the command, which ends with what it has begun to write gone, and with
    the processes that it started ended.
2.  Until a command is there to say so, and while a process starts that hears of it from its
    command, they wait.
3.  It is raised again where it was lost: a moment later if that was in what Python calls by itself
    (a weak reference's callback, a destructor), and when the next phase begins if a library caught
    all there is to catch.

Not handled: a signal before Python has loaded this module, which ends it as it does any program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What Python and the system do at first: anything else is somebody's wish (nohup).
_AT_FIRST = (signal.SIG_DFL, signal.default_int_handler)
_AGAIN_S = 0.01
_ONCE_S = 1.0


class Ended(KeyboardInterrupt):
    """A command that ``signal`` asks to end."""

    # Not KeyboardInterrupt itself: Python ends by SIGINT where code from a string raised that, also
    # if it was caught.
    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal

    def __str__(self) -> str:
        return "interrupted" if self.signal == signal.SIGINT else f"ended by {self.signal.name}"


class _Raises:
    """The handler of the signals.  ``asked`` is the last one's number."""

    def __init__(self) -> None:
        self.asked = 0
        self._heard_s = -_ONCE_S
        self._say_unraised = sys.unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # ``timeout``, and terminals that close, send it twice: what the first one began goes on.
        if time.monotonic() < self._heard_s + _ONCE_S:
            return
        self.asked, self._heard_s = number, time.monotonic()
        raise Ended(number)

    def unraised(self, lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Ended):
            self._say_unraised(lost)
            return
        self._heard_s = -_ONCE_S
        # Not at once: that would be in here, and be lost as well.
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), lost.exc_value.signal))
        again.daemon = True
        again.start()


def end_when_asked() -> None:
    """Definition 1, from ``hear`` on, but for signals that are ignored (``nohup``)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    raises = _Raises()
    for number in _SIGNALS:
        if signal.getsignal(number) in _AT_FIRST:
            signal.signal(number, raises)
    sys.unraisablehook = raises.unraised


def hear() -> None:
    """Raise ``Ended`` now for a signal that waited, and from now on for one that comes."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_if_asked() -> None:
    """Raise ``Ended`` if a signal has come, and what it raised was caught."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Raises) and handler.asked:
            raise Ended(handler.asked)


@contextmanager
def deaf_processes() -> Iterator[None]:
    """A context in which started processes do not hear of Ctrl-C, which goes to every process of
    a terminal, until they say what they do then."""
    from multiprocessing import resource_tracker

    # Its start would end this.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
