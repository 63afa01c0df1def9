"""The GPU, for one of several measuring processes at a time.

Everything that the GPU is busy with is done in a turn: building a model, warming up, timing.  What
the processor alone does, tracing and compiling, is done outside, while another process has its turn
(``compile_only``).  A lock on a file, so that a process that dies lets go.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config as functorch_config


class Turns:
    """The turns of one process at the GPU of all that name the same ``path`` (None: alone)."""

    def __init__(self, path: str | None) -> None:
        self._lock = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else has a turn; the device has finished what was issued when it ends."""
        if self._lock is None:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class _Compiled(BaseException):
    """All is compiled, and would run now."""


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _Compiled


def compile_only(step: Callable[[], Any]) -> None:
    """Compile what ``step`` calls, its backward too, and run nothing of it.

    AOTAutograd makes the backward with the forward if it is told to, and calls what it made through
    one function; the compiled code stays where ``torch.compile`` keeps it.
    """
    # A cycle, unless Dynamo is imported before.
    from torch._functorch._aot_autograd import runtime_wrappers

    ahead = functorch_config.patch(force_non_lazy_backward_lowering=True)
    stopped = mock.patch.object(runtime_wrappers, "call_func_at_runtime_with_args", _stop)
    with ahead, stopped, suppress(_Compiled):
        step()
