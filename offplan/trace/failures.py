"""Turn what torch raises while tracing into one plain message.

It says what failed, with the op, where in the user's program, and what to try.

Torch wraps an error several times on its way out (operator, fake tensor, AOTAutograd, Dynamo), so
the whole chain of causes is searched for the first one that says something definite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from offplan.errors import OffplanError, TraceError
from offplan.target import describe
from offplan.trace._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    DynamoUnsupported,
    TorchDynamoException,
    TorchRuntimeError,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    graph_break_reasons,
)
from offplan.trace.sources import SourceNames

_DOUBLE_BACKWARD = "does not currently support double backward"
_SUBCLASS = re.compile(r"tensor subclass|DTensor|NestedTensor", re.IGNORECASE)
# Dynamo wraps the model's own error as: ... got RuntimeError('message')
_INNER = re.compile(r"got (\w+)\((['\"])(.*?)\2\)", re.DOTALL)
_DRIVER = re.compile(r"CUDA error|NVIDIA driver|CUDA driver|hasPrimaryContext")


@contextmanager
def explained(sources: SourceNames) -> Iterator[None]:
    """Re-raise anything torch raises inside the context as a ``TraceError``."""
    try:
        yield
    except OffplanError as error:
        error.where = error.where or _where([error], sources)
        raise
    except Exception as error:
        chain = list(_causes(error))
        wrapped = next((e for e in chain if isinstance(e, OffplanError)), None)
        if wrapped is not None:
            wrapped.where = wrapped.where or _where(chain, sources)
            raise wrapped from error
        raise _explain(chain, sources) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = getattr(current, "inner_exception", None)
        current = inner or current.__cause__ or current.__context__


def _explain(chain: list[BaseException], sources: SourceNames) -> TraceError:
    where = _where(chain, sources)
    for error in reversed(chain):
        known = _known(error)
        if known is not None:
            what, fix = known
            return TraceError(what, where=where, fix=fix)
    return _unknown(chain, where)


def _known(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.func} makes a tensor whose shape depends on values, which are not known "
            "without running the model",
            "use an op with a fixed output shape (torch.where, a mask, a fixed capacity)",
        )
    if isinstance(error, DataDependentOutputException):
        return (
            f"{error.func} reads a value of a tensor, and values are not known without running the "
            "model",
            "keep the decision on the device (torch.where), pass the value as a Python argument, "
            "or switch off what asks for it (layer drop, checks of the inputs)",
        )
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{error.func} has no fake kernel, so its output cannot be known without running it",
            "register one with torch.library.register_fake",
        )
    if isinstance(error, UnsupportedFakeTensorException):
        return (
            f"a tensor cannot be traced: {_first_line(error)}",
            "use plain strided tensors for parameters, buffers and inputs",
        )
    text = str(error)
    if _DRIVER.search(text):
        left_out = "; ".join(graph_break_reasons()[:2])
        return (
            "an op asks the CUDA driver, so it cannot be traced on a machine without a GPU"
            + (f" (it runs outside of the graphs: {left_out})" if left_out else ""),
            "trace with --device cpu, or on a machine with a GPU",
        )
    if _DOUBLE_BACKWARD in text:
        return (
            "the step needs a double backward, which AOTAutograd does not trace",
            "leave the gradient penalty out of the traced step",
        )
    if isinstance(error, DynamoUnsupported) and _SUBCLASS.search(text):
        return (
            f"a tensor subclass cannot be traced: {_first_line(error)}",
            "pass plain tensors to the model",
        )
    if "no fake impl" in text.lower() or "register_fake" in text:
        op = re.search(r"[a-zA-Z_]\w*[.:]+\w+(?:\.\w+)?", text)
        return (
            f"{op.group(0) if op else 'an op'} has no fake kernel, so its output cannot be known "
            "without running it",
            "register one with torch.library.register_fake",
        )
    return None


def _unknown(chain: list[BaseException], where: str) -> TraceError:
    runtime = next((e for e in chain if isinstance(e, TorchRuntimeError)), None)
    if runtime is not None:
        inner = _INNER.search(str(runtime))
        text = f"{inner.group(1)}: {inner.group(3)}" if inner else _first_line(runtime)
        return TraceError(f"the model's forward failed: {_one_line(text)}", where=where)
    innermost = chain[-1]
    if not any(isinstance(e, TorchDynamoException) for e in chain):
        return TraceError(f"the model's forward failed: {describe(chain[0])}", where=where)
    return TraceError(
        f"torch could not trace the model: {describe(innermost)}",
        where=where,
        fix="run again with --traceback for the whole story",
    )


def _first_line(error: BaseException) -> str:
    return describe(error).split(": ", 1)[-1]


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\n", " ").split())


def _where(chain: list[BaseException], sources: SourceNames) -> str:
    """The user's line: from Dynamo's own stack if it has one, else from the traceback."""
    for error in chain:
        stack = getattr(error, "real_stack", None) or getattr(error, "user_stack", None)
        for frame in reversed(list(stack or ())):
            name = sources(frame.filename, frame.lineno or 0)
            if name:
                return name
    for error in reversed(chain):
        name = _traceback_line(error, sources)
        if name:
            return name
    return ""


def _traceback_line(error: BaseException, sources: SourceNames) -> str:
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        name = sources(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        found = name or found
        traceback = traceback.tb_next
    return found
