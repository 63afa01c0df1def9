"""Worker processes, which each do one thing after another, and come and go with the command.

1.  A worker starts when there is something for it to do: what torch takes to start is paid once.
    It is a new process, not a copy: one of a process in which torch or CUDA has started can hang.
2.  One that is killed, as systems do that run out of memory, fails what it does and nothing else.
3.  Ctrl-C, which a terminal sends to every process, is the command's to hear of.  A command that
    ends early ends its workers at once; they end by themselves when it is gone without a word.
4.  What a worker prints goes to stderr: stdout has the command's result.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import process as process_pools
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import ParamSpec, TypeVar

from offplan.ended import deaf_processes

# What a worker gets to clear up in once it is asked to end.
_GRACE_S = 2.0
# How often the command looks for signals while it waits.
_LOOK_S = 0.1
_P = ParamSpec("_P")
_R = TypeVar("_R")


class WorkerLost(Exception):
    """A worker ended before its answer came, or could not be started: ``__cause__`` says why."""


class Pools:
    """``count`` workers; threads can share them."""

    def __init__(self, count: int) -> None:
        # A pool for each worker: one that is killed breaks its pool, with all that waits for it.
        self._pools = [_pool() for _ in range(count)]
        self._idle: queue.SimpleQueue[ProcessPoolExecutor] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        for pool in self._pools:
            self._idle.put(pool)

    def ask(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """What ``function`` returns in a worker; it raises no ``OSError`` and does not exit.

        Raises ``WorkerLost``, and ``CancelledError`` once the workers are asked to end.
        """
        pool = self._idle.get()
        try:
            if self._is_stopped.is_set():
                raise CancelledError
            with deaf_processes():
                answer = pool.submit(function, *args, **kwargs)
            return answer.result()
        except (BrokenProcessPool, OSError, SystemExit) as error:
            if self._is_stopped.is_set():
                raise CancelledError from error
            pool = _pool()
            self._pools.append(pool)
            raise WorkerLost(str(error)) from error
        finally:
            self._idle.put(pool)

    def stop(self) -> None:
        """At once: what runs is of no use any more."""
        self._is_stopped.set()
        # What closing takes away; it waits for a start that is under way, which adds to them.
        started = [pool._processes for pool in self._pools if pool._processes is not None]
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        running = [process for found in started for process in [*found.values()]]
        # Those that look after processes: Python's exit would wake them while they end, and fail.
        managers = [*process_pools._threads_wakeups]
        try:
            for process in running:
                process.terminate()
            _wait(running, time.monotonic() + _GRACE_S)
        finally:
            for process in running:
                process.kill()
            for manager in managers:
                manager.join(_GRACE_S)

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


@contextmanager
def pools(count: int) -> Iterator[Pools]:
    """``count`` workers, which have ended when the context has."""
    found = Pools(count)
    try:
        yield found
    except BaseException:
        found.stop()
        raise
    finally:
        found.close()


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that ask workers, which are not waited for: what they ask for is stopped next."""
    found = ThreadPoolExecutor(count)
    try:
        yield found
    finally:
        found.shutdown(wait=False, cancel_futures=True)


def awaited(answer: Future[_R]) -> _R:
    """What ``answer`` is.  A signal ends the wait, whichever thread the system gives it to."""
    while not answer.done():
        concurrent.futures.wait([answer], _LOOK_S)
    return answer.result()


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    )


def _wait(processes: Sequence[BaseProcess], deadline: float) -> None:
    while running := [process.sentinel for process in processes if process.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        wait(running, left)


# --- in a worker ----------------------------------------------------------------------------------


def _start() -> None:
    """Definitions 3 and 4."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end(number: int, frame: FrameType | None) -> None:
    """End now, without what multiprocessing would report as lost: libraries hold locks of its."""
    with suppress(Exception):
        util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(128 + number)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
