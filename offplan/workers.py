"""Points of a sweep, each traced and planned in a worker process (``offplan.pools``).

1.  A worker traces one point after another, as many workers at a time as there are jobs.  Tracing
    takes a core and some gigabytes, so that there are no more jobs than free memory allows.
2.  Each point is kept by content, and by offplan's own code, as soon as it is there: a sweep that
    is stopped, which it is at once, goes on where it was.  What failed is not kept.
3.  A worker that is killed fails its point and no other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from offplan import __version__
from offplan.budget import Aim
from offplan.eligibility import RuleSet
from offplan.errors import OffplanError
from offplan.kept import keep_result, kept_result
from offplan.pools import WorkerLost, awaited, pools, threads
from offplan.progress import Progress
from offplan.requests import Request
from offplan.retrace import Recorder, traced_once
from offplan.sweep import Axis, Largest, Point, combinations, key, largest, point

# What a trace of a large model takes, torch included.
_JOB_BYTES = 2 * 1024**3
# Parts of offplan that make no difference to a point.
_NOT_OF_POINTS = ("report", "replay", "commands", "__pycache__")
_KILLED = (
    "its process was killed, as systems do that run out of memory\n  try: fewer at a time: --jobs 1"
)


@dataclass(frozen=True)
class Task:
    """What all points have in common.  ``again``: take nothing that was kept."""

    request: Request
    fixed: dict[str, str]
    rules: RuleSet
    min_bytes: int
    aim: Aim
    again: bool = False

    def at(self, params: dict[str, str]) -> Request:
        given = [f"{name}={value}" for name, value in {**self.fixed, **params}.items()]
        return replace(self.request, params=given)


def default_jobs() -> int:
    """As many as there are cores, and as free memory allows."""
    return max(1, min(os.cpu_count() or 1, _free_bytes() // _JOB_BYTES))


def _free_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _JOB_BYTES
    sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if ":" in line}
    return int(sizes.get("MemAvailable", 0)) * 1024


@cache
def _recorder() -> Recorder:
    # Of the worker: a hook cannot be taken away again.
    return Recorder()


@cache
def _own_code() -> bytes:
    """The version, and a checksum of the code that makes points, which a checkout changes."""
    state = hashlib.sha256(__version__.encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] not in _NOT_OF_POINTS:
            state.update(path.read_bytes())
    return state.digest()


def look(task: Task, params: dict[str, str]) -> Point:
    """The point at ``params``, in this process."""
    try:
        step = traced_once(task.at(params), Progress(), _recorder(), again=task.again)
        name = _own_code() + key(step.facts, task.rules, task.min_bytes, task.aim)
        known = None if task.again else kept_result(name)
        if known is not None:
            found = msgspec.json.decode(known, type=Point)
            return msgspec.structs.replace(found, params=params)
        found = point(params, step.facts, task.rules, task.min_bytes, task.aim, step.under)
    except OffplanError as error:
        return Point(params, "failed", message=str(error))
    except (Exception, SystemExit) as error:  # of the user's model, which can raise anything
        return Point(params, "failed", message=f"{type(error).__name__}: {error}")
    keep_result(name, msgspec.json.encode(found))
    return found


_PACKAGE = Path(__file__).parent
_T = TypeVar("_T")
_R = TypeVar("_R")
Look = Callable[[dict[str, str]], Point]


@contextmanager
def workers(task: Task, jobs: int, on_done: Callable[[Point], None]) -> Iterator[Look]:
    """A function that looks at a point in one of ``jobs`` workers; threads can share it."""
    with pools(jobs) as processes:

        def ask(params: dict[str, str]) -> Point:
            try:
                found = processes.ask(look, task, params)
            except WorkerLost as lost:
                is_killed = isinstance(lost.__cause__, BrokenProcessPool)
                found = Point(
                    params, "failed", message=_KILLED if is_killed else _not_started(lost)
                )
            on_done(found)
            return found

        yield ask


def _not_started(error: BaseException) -> str:
    return f"no process can be started for it: {error}\n  try: fewer at a time: --jobs 1"


def grid(axes: tuple[Axis, ...], ask: Look, jobs: int) -> tuple[Point, ...]:
    """Every point."""
    return tuple(_side_by_side([*combinations(axes)], ask, jobs))


def lines(
    axes: tuple[Axis, ...], along: Axis, ask: Look, jobs: int
) -> tuple[tuple[Point, ...], tuple[Largest, ...]]:
    """The largest value of ``along`` for every combination of ``axes``, and the points seen."""

    def line(params: dict[str, str]) -> tuple[Largest, list[Point]]:
        value, is_monotone, seen = largest(along, lambda value: ask({**params, along.name: value}))
        return Largest(params, value, is_monotone), seen

    found = list(_side_by_side(combinations(axes), line, jobs))
    return tuple(p for _, seen in found for p in seen), tuple(each for each, _ in found)


def _side_by_side(things: list[_T], do: Callable[[_T], _R], jobs: int) -> Iterator[_R]:
    with threads(jobs) as pool:
        asked = [pool.submit(do, thing) for thing in things]
        for each in asked:
            yield awaited(each)
