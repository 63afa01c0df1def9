"""Points at which something can be refused: found in the source, counted as reached, and failed.

A *point* is a call in offplan's own code that takes memory, copies, pins, uses a stream or event,
or changes a file.  ``points`` finds them by the names of what is called (``KINDS``), so that a new
call is a new point.  ``Faults`` watches those same names while something runs, and knows a call by
the file and line that make it: it counts how often each point is reached, and at one of these
moments it fails, before the call or right after it was done.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import mmap
import os
import pathlib
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "offplan"

Kind = Literal["allocation", "copy", "stream", "pin", "file"]
KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        [
            "empty",
            "empty_like",
            "empty_strided",
            "full",
            "full_like",
            "zeros",
            "zeros_like",
            "ones",
            "ones_like",
            "arange",
            "rand",
            "randn",
            "randn_like",
            "randint",
            "new_empty",
            "new_zeros",
            "new_full",
            "new_ones",
            "clone",
            "contiguous",
            "pin_memory",
        ],
        "allocation",
    ),
    **dict.fromkeys(["copy_", "copy_to_host", "copy_to_device", "to", "cpu", "cuda"], "copy"),
    **dict.fromkeys(
        [
            "Stream",
            "Event",
            "record",
            "record_event",
            "wait_event",
            "wait_stream",
            "synchronize",
            "query",
            "elapsed_time",
        ],
        "stream",
    ),
    **dict.fromkeys(
        [
            "mmap",
            "mlock",
            "mlock2",
            "munlock",
            "madvise",
            "cudaHostAlloc",
            "cudaHostRegister",
            "cudaHostUnregister",
            "empty_host_cache",
        ],
        "pin",
    ),
    **dict.fromkeys(
        [
            "open",
            "fdopen",
            "write",
            "writelines",
            "write_bytes",
            "write_text",
            "fsync",
            "fdatasync",
            "flush",
            "truncate",
            "chmod",
            "replace",
            "rename",
            "link",
            "symlink",
            "unlink",
            "rmdir",
            "mkdir",
            "makedirs",
            "touch",
            "mkstemp",
            "mkdtemp",
            "TemporaryDirectory",
            "NamedTemporaryFile",
            "TemporaryFile",
            "rmtree",
            "copyfile",
            "copy2",
            "utime",
        ],
        "file",
    ),
}


class Point(NamedTuple):
    """``call`` in ``function`` of ``module``; the same words twice in a function are one point."""

    module: str
    function: str
    call: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.module}:{self.function}: {self.call}"

    @property
    def name(self) -> str:
        return self.call.rpartition(".")[2]


class _Place(NamedTuple):
    first_line: int
    last_line: int
    point: Point


@cache
def _places() -> dict[str, tuple[_Place, ...]]:
    """Every point by the file that it is in."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[str(path)] = tuple(places_in(path.read_text(), module))
    return found


def points(*modules: str) -> set[Point]:
    """Those in ``modules``, or in all of offplan."""
    found = {place.point for places in _places().values() for place in places}
    return {point for point in found if not modules or point.module in modules}


def places_in(source: str, module: str) -> Iterator[_Place]:
    """The points in ``source``, each with the lines of its call."""
    yield from _places_below(ast.parse(source), module, ())


def _places_below(tree: ast.AST, module: str, scope: tuple[str, ...]) -> Iterator[_Place]:
    for child in ast.iter_child_nodes(tree):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call) and _is_point(child):
            call = ast.unparse(child.func)
            point = Point(module, ".".join(scope), call, KINDS[_last_name(child.func)])
            yield _Place(child.lineno, child.end_lineno or child.lineno, point)
        yield from _places_below(child, module, (*scope, child.name) if named else scope)


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_point(call: ast.Call) -> bool:
    name = _last_name(call.func)
    if name not in KINDS:
        return False
    if name == "replace":
        # Of a path; text takes two arguments, and records take names.
        return isinstance(call.func, ast.Attribute) and len(call.args) == 1 and not call.keywords
    if name == "open":
        return _writes(call)
    if name == "write":
        return not ast.unparse(call.func).startswith(("sys.", "self."))
    return True


def _writes(call: ast.Call) -> bool:
    """Whether a call of ``open`` names a mode that changes the file."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = [each.value for each in given if isinstance(each, ast.Constant)]
    return any(isinstance(word, str) and word and set(word) <= set("wxab+t") for word in words)


# --- failing --------------------------------------------------------------------------------------

# What a call that was refused returns; others raise.
_RETURNS: dict[str, int] = {
    "mlock": -1,
    "munlock": -1,
    "madvise": -1,
    "cudaHostRegister": 2,
    "cudaHostUnregister": 713,
}
How = Literal["fails", "interrupted before", "interrupted after"]
HOWS: tuple[How, ...] = ("fails", "interrupted before", "interrupted after")


class Fault(NamedTuple):
    """The ``number``-th time that ``point`` is reached, from 1."""

    point: Point
    number: int
    how: How

    def __str__(self) -> str:
        return f"{self.point} ({self.how}, time {self.number})"


def error_for(point: Point) -> BaseException:
    """What CUDA, torch or the system says at ``point``."""
    import torch

    if point.name == "mmap":
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if point.kind == "file":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if point.kind == "allocation" and "pinning" not in point.module:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    return RuntimeError(f"CUDA error: {point.name} was refused\nCompile with TORCH_USE_CUDA_DSA")


class Owner(NamedTuple):
    """A module, a class or an object, and the kinds of its calls that are watched."""

    place: Any
    kinds: tuple[Kind, ...]


class Faults:
    """Counts points as they are reached, on any thread, and fails once if a fault is ``armed``.

    ``mappings`` has every mapping that was made, for as long as it is there.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        self.owners = owners
        self.counts: Counter[Point] = Counter()
        self.armed: Fault | None = None
        self.mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    @contextmanager
    def watching(self, fault: Fault | None = None) -> Iterator[Counter[Point]]:
        """Watch the names of ``KINDS`` that ``owners`` have; the counts begin at zero."""
        # Read before reading is watched.
        _places()
        self.counts.clear()
        self.armed = fault
        with pytest.MonkeyPatch.context() as patch:
            for owner, kinds in self.owners:
                for name in KINDS:
                    call = getattr(owner, name, None)
                    if KINDS[name] in kinds and callable(call):
                        patch.setattr(owner, name, self._wrapped(name, call))
            yield self.counts

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            point = _point_at(name, sys._getframe(1))
            if point is None:
                return call(*args, **kwargs)
            fault = self._due(point)
            if fault is None:
                return self._noted(name, call(*args, **kwargs))
            if fault.how == "fails":
                if name == "write":
                    call(args[0][: len(args[0]) // 2])
                return _failed(fault.point)
            if fault.how == "interrupted after":
                result = self._noted(name, call(*args, **kwargs))
                if isinstance(result, _File):
                    result.close()
            raise KeyboardInterrupt

        return watched

    def _noted(self, name: str, result: Any) -> Any:
        if name == "mmap":
            self.mappings.add(result)
        return _File(self, result) if name == "open" and hasattr(result, "write") else result

    def _due(self, point: Point) -> Fault | None:
        """The fault that is due now that ``point`` is reached."""
        self.counts[point] += 1
        fault = self.armed
        if fault is None or (point, self.counts[point]) != fault[:2]:
            return None
        self.armed = None
        return fault


def _point_at(name: str, frame: FrameType) -> Point | None:
    """The point that is the call of ``name`` that ``frame`` makes."""
    for place in _places().get(frame.f_code.co_filename, ()):
        if place.point.name == name and place.first_line <= frame.f_lineno <= place.last_line:
            return place.point
    return None


def _failed(point: Point) -> Any:
    if point.name in _RETURNS:
        ctypes.set_errno(errno.ENOMEM)
        return _RETURNS[point.name]
    raise error_for(point)


class _File:
    """An open file whose methods are watched."""

    def __init__(self, faults: Faults, file: Any) -> None:
        self._file = file
        for name in ("write", "flush"):
            setattr(self, name, faults._wrapped(name, getattr(file, name)))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Calls:
    """The functions of ``module`` that are points, where they can be replaced."""

    def __init__(self, module: Any) -> None:
        for name in KINDS:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


FILE_OWNERS = (
    Owner(os, ("file",)),
    Owner(pathlib.Path, ("file",)),
    Owner(tempfile, ("file",)),
)
