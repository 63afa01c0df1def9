"""The transfers of a runtime as operators that a compiler takes into its graphs.

1.  ``offload(value, slot, size_bytes) -> host`` issues the copy of a slot's bytes.  ``value`` is
    the one that the storage was allocated for: its strides are asked for as they were traced, and
    bytes count from where it begins, since the compiler may lay it out inside a larger buffer.
2.  ``release_(host, value, slot)`` waits for the copy.  It says that it writes to the host bytes,
    so that it is neither dropped nor moved before the offload, and takes ``value``, so that the
    compiler keeps the storage until then and no longer.
3.  ``reload(host, slot, size_bytes, dtype) -> buffer`` issues the copy back, and ``wait_(buffer)``
    says that it writes to the buffer, so that whatever reads it comes afterwards.
4.  The names end as those of ops that write do: Inductor moves nothing across one.
5.  Sizes are arguments although the runtime knows them: what is compiled is cached by what the
    graph says.

Each runtime has a namespace of its own, the first one that is free, and a weak reference from it:
the operators go with the object that made them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NoReturn

import torch

from offplan.replay.runtime import ReplayError, Runtime, TransferOps
from offplan.trace.compilers import TRANSFERS


class Operators:
    """The operators of ``runtime``.  They are valid until ``close``, or until this object dies."""

    def __init__(self, runtime: Runtime) -> None:
        self._library = _free_namespace()
        self.namespace = self._library.ns
        calls = _Calls(runtime)
        exact, any_layout = (torch.Tag.needs_exact_strides,), (torch.Tag.flexible_layout,)
        self._define(
            "offload(Tensor value, int slot, int size_bytes) -> Tensor", calls.offload, exact
        )
        self._define(
            "release_(Tensor(a!) host, Tensor value, int slot) -> ()", calls.release, any_layout
        )
        self._define(
            "reload(Tensor host, int slot, int size_bytes, ScalarType dtype) -> Tensor",
            calls.reload,
            any_layout,
        )
        self._define("wait_(Tensor(a!) buffer) -> ()", calls.wait, any_layout)
        for name, fake in (
            ("offload", calls.fake_offload),
            ("release_", _nothing),
            ("reload", calls.fake_reload),
            ("wait_", _nothing),
        ):
            torch.library.register_fake(f"{self.namespace}::{name}", fake, lib=self._library)
        self._finalizer = weakref.finalize(self, self._library._destroy)
        self._finalizer.atexit = False

    @property
    def ops(self) -> TransferOps:
        """What graph nodes call."""
        found = getattr(torch.ops, self.namespace)
        return TransferOps(
            offload=found.offload.default,
            release=found.release_.default,
            reload=found.reload.default,
            wait=found.wait_.default,
            graph_keeps=True,
        )

    def close(self) -> None:
        """Take the operators back: what was compiled with them cannot run any more."""
        self._finalizer()

    def _define(self, schema: str, function: Any, tags: tuple[Any, ...]) -> None:
        name = self._library.define(schema, tags=tags)
        self._library.impl(name, function, "CompositeExplicitAutograd")


def _free_namespace() -> Any:
    for number in itertools.count():
        try:
            return torch.library.Library(f"{TRANSFERS}{number}", "DEF")
        except RuntimeError:
            # Another runtime has it.
            continue
    raise AssertionError


def _nothing(*args: Any) -> None:
    """What an operator that only writes does on fake tensors."""


class _Calls:
    """The operators' functions, which do not keep the runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    @property
    def runtime(self) -> Runtime:
        return self._runtime() or _gone()

    def offload(self, value: torch.Tensor, slot: int, size_bytes: int) -> torch.Tensor:
        return (self._runtime() or _gone()).offload_value(value, slot)

    def release(self, host: torch.Tensor, value: torch.Tensor, slot: int) -> None:
        (self._runtime() or _gone()).let_go(slot)

    def reload(
        self, host: torch.Tensor, slot: int, size_bytes: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return (self._runtime() or _gone()).reload(host, slot, dtype)

    def wait(self, buffer: torch.Tensor) -> None:
        (self._runtime() or _gone()).wait(buffer)

    def fake_offload(self, value: torch.Tensor, slot: int, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def fake_reload(
        self, host: torch.Tensor, slot: int, size_bytes: int, dtype: torch.dtype
    ) -> torch.Tensor:
        count = size_bytes // dtype.itemsize
        return torch.empty(count, dtype=dtype, device=self.runtime.device)


def _gone() -> NoReturn:
    raise ReplayError("the replay is closed", fix="make a new one")
