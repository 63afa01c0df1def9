"""A dispatch mode that also sees what a plain one does not, in code that Inductor compiled.

1.  Generated code allocates its buffers by functions that are no ops.  ``heard_allocations`` stands
    in for them, in modules that are loaded already and in those loaded meanwhile.
2.  The transfers in it are ops (``replay.operators``), inside which the mode that sees them would
    not be active.  It is, so that copies and buffers are seen as they are where transfers are plain
    calls.

Code that Inductor generates as C++ throughout (``cpp_wrapper``) allocates where nothing hears it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from offplan.trace._torch import (
    INDUCTOR_ALLOCATES_BY,
    INDUCTOR_ALLOCATES_FROM,
    TorchDispatchMode,
    generated_modules,
    torch_c,
    tree_leaves,
)
from offplan.trace.compilers import TRANSFERS


class Watch(TorchDispatchMode):
    """Sees every op, and every buffer that generated code allocates.  Only watches."""

    # A random op that is recomputed is wrapped in one of these.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._hearing = ExitStack()

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op ``func`` and return its result."""
        raise NotImplementedError

    def made(self, tensor: torch.Tensor) -> None:
        """Hear of a buffer that no op returned."""
        raise NotImplementedError

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` run: the mode only watches."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_transfer(func):
            return _run_transfer(func, self, args, kwargs or {})
        return self.ran(func, args, kwargs or {})

    def __enter__(self) -> Any:
        # It is entered again inside a transfer.
        if self._depth == 0:
            self._hearing.enter_context(heard_allocations(self.made))
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self._hearing.close()


@contextmanager
def heard_allocations(made: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``made`` with every buffer that generated code allocates meanwhile (definition 1)."""
    with ExitStack() as stack:
        for name in INDUCTOR_ALLOCATES_BY:
            original = getattr(INDUCTOR_ALLOCATES_FROM, name)
            heard = _heard(original, made)
            stack.enter_context(mock.patch.object(INDUCTOR_ALLOCATES_FROM, name, heard))
            _replace_in_modules(original, heard)
            # Of those loaded meanwhile, too.
            stack.callback(_replace_in_modules, heard, original)
        yield


def _heard(
    allocate: Callable[..., torch.Tensor], made: Callable[[torch.Tensor], None]
) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        tensor = allocate(*args)
        made(tensor)
        return tensor

    return call


def _replace_in_modules(old: Any, new: Any) -> None:
    for module in generated_modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _is_transfer(func: Any) -> bool:
    """Whether ``func`` is an operator of a runtime."""
    return str(getattr(func, "namespace", "")).startswith(TRANSFERS)


def _run_transfer(
    func: Any, mode: TorchDispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the operator ``func``, which ``mode`` was called for, under it (definition 2)."""
    devices = {leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    key = torch_c.DispatchKey.CUDA if "cuda" in devices else torch_c.DispatchKey.CPU
    with mode:
        return func.redispatch(torch_c.DispatchKeySet(key), *args, **kwargs)
