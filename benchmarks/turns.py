"""The GPU, for one of several measuring processes at a time.

Everything that the GPU is busy with is done in a turn: building a model, warming up, timing.  What
the processor alone does, tracing and compiling, is done outside, while another process has its turn
(``Gated``).  A turn is *quiet* if nobody compiles either: the host issues each step's kernels, and
is late with them when its memory and cores are somebody else's.  Of two GPUs of one host each has a
quiet turn of its own, at the same time, when nobody compiles for either.  The locks are on files,
so that a process that dies lets go.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config


class Turns:
    """The turns of one process at the GPU of all that name the same ``path`` (None: alone).

    ``path`` ends with the GPU's number; other GPUs of the host are those whose files are there."""

    def __init__(self, path: str | None) -> None:
        self._gpu = None if path is None else _opened(Path(path))
        self._host = None if path is None else _opened(Path(f"{path}-host"))
        self._hosts = [] if path is None else [self._host, *map(_opened, _others(Path(path)))]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else has a turn; the device has finished what was issued when it ends."""
        with _locked(self._gpu, fcntl.LOCK_EX):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Nobody is quiet, on any GPU."""
        with ExitStack() as stack:
            for host in self._hosts:
                stack.enter_context(_locked(host, fcntl.LOCK_SH))
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A turn during which nobody compiles: it comes when all are done with that."""
        with _locked(self._host, fcntl.LOCK_EX), self.alone():
            yield


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def _others(path: Path) -> list[Path]:
    """The host's files of the GPUs beside that of ``path``."""
    found = path.parent.glob(path.name.rstrip("0123456789") + "*-host")
    return sorted(each for each in found if each.name != f"{path.name}-host")


@contextmanager
def _locked(file: int | None, how: int) -> Iterator[None]:
    if file is None:
        yield
        return
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def inductor() -> Callable[..., Any]:
    """What the name ``inductor`` stands for, as a backend of its own: ``torch.compile`` tells
    compiled code apart by it."""
    from torch._inductor.compile_fx import compile_fx

    def backend(module: Any, example_inputs: Any) -> Any:
        return compile_fx(module, example_inputs)

    return backend


class _ClosedError(BaseException):
    """All is compiled, and would run now."""


class Gated:
    """``step`` as ``backend`` compiles it, which ``prepare`` can have compiled without running."""

    def __init__(self, step: Callable[..., Any], backend: Callable[..., Any]) -> None:
        self._is_open = True
        self._backend = backend
        self._call = torch.compile(step, backend=self._compile, dynamic=False)

    def _compile(self, module: Any, example_inputs: Any) -> Callable[..., Any]:
        run = self._backend(module, example_inputs)

        def gated(*args: Any) -> Any:
            if not self._is_open:
                raise _ClosedError
            return run(*args)

        return gated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a call with these arguments runs, its backward too.

        A step that falls into several graphs compiles the first here, and the others as it runs.
        """
        self._is_open = False
        try:
            ahead = functorch_config.patch(force_non_lazy_backward_lowering=True)
            with ahead, suppress(_ClosedError):
                self._call(*args, **kwargs)
        finally:
            self._is_open = True
