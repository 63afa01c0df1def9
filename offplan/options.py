"""What commands share: their options, how these are read, and how errors end a command.

Exit codes: 0 fine, 1 error, 2 usage, 3 the answer is no, 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import shutil
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offplan.budget import Action, Budget, parse_budget
from offplan.costs import DeviceProfile, find_profile
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES
from offplan.ended import Ended, hear
from offplan.errors import OffplanError, UsageError
from offplan.plan import ACTIONS, given_actions
from offplan.units import format_binary

DEFAULT_PLAN = Path("offplan.plan.yaml")
DEFAULT_MIN_SIZE = format_binary(DEFAULT_MIN_BYTES)
GRAPH_SUFFIX = ".graph.json"

# What writing to a file says that has no room.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

# Options of every command.
ShowTraceback = Annotated[
    bool, typer.Option("--traceback", help="Print a Python traceback with an error.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results and errors only.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say on stderr what is being done, and how long.")
]


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the options that every command has; print a deliberate error as one message,
    and end with its exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        show_traceback = bool(kwargs.pop("traceback_", False))
        quiet, verbose = bool(kwargs.pop("quiet", False)), bool(kwargs.pop("verbose", False))
        try:
            hear()
            if quiet and verbose:
                raise UsageError("--quiet and --verbose are opposites", fix="give one of them")
            with _less_said() if quiet else _more_said() if verbose else nullcontext():
                command(*args, **kwargs)
        except typer.Exit:
            raise
        except OffplanError as error:
            _fail(str(error), error.exit_code, show_traceback)
        except Ended as error:
            _fail(str(error), error.exit_code, show_traceback)
        except KeyboardInterrupt:
            _fail("interrupted", 130, show_traceback)
        except BrokenPipeError:
            # The reader (head, less) has what it wanted; closing keeps Python from flushing again.
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            _fail(_unforeseen(error), 1, show_traceback)

    kinds = typing.get_type_hints(command, include_extras=True)
    shared = {"quiet": Quiet, "verbose": Verbose, "traceback_": ShowTraceback}
    given = inspect.signature(command)
    own = [each.replace(annotation=kinds[name]) for name, each in given.parameters.items()]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in shared.items()
    ]
    # What typer reads instead of the wrapper's own parameters.
    run.__signature__ = given.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {**kinds, **shared}
    return run


def _unforeseen(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _NO_ROOM and error.filename is None:
        with suppress(OSError):
            # Or Python would write it once more at its end, and fail again.
            sys.stdout.close()
        return f"cannot write the result: {error.strerror}"
    return (
        f"offplan failed: {type(error).__name__}: {error}\n"
        "  try: run again with --traceback, and report what it prints"
    )


@contextmanager
def _less_said() -> Iterator[None]:
    """Results only: nothing on stderr but the message of an error, which comes after this."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


@contextmanager
def _more_said() -> Iterator[None]:
    """What offplan logs, and each phase, on stderr."""
    logger, handler = logging.getLogger("offplan"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)8.0f ms  %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _fail(message: str, exit_code: int, show_traceback: bool) -> None:
    if show_traceback:
        traceback.print_exc()
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


# --- options --------------------------------------------------------------------------------------

Params = Annotated[
    list[str] | None,
    typer.Option("-p", "--param", metavar="KEY=VALUE", help="A parameter of the factory."),
]
NamedTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="The target that the plan names. To be typed where a plan names a module, or a file "
        "neither in its own folder nor in this one; such a plan is refused otherwise.",
    ),
]
Device = Annotated[
    Literal["cuda", "cpu"], typer.Option(help="Device to trace for; cuda needs no GPU.")
]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU to trace for: h200 (default), h100, a100, l40s, rtx4090, ..."),
]
Attention = Annotated[
    Literal["flash", "cudnn", "efficient", "math"] | None,
    typer.Option(help="Attention kernel to trace, in place of the one that the GPU would choose."),
]
CompilerName = Annotated[
    Literal["aot_eager", "inductor"],
    typer.Option(
        help="What compiles the graphs: AOTAutograd alone, or Inductor, whose passes run."
    ),
]
PartitionerName = Annotated[
    Literal["min-cut", "default"], typer.Option(help="Which AOTAutograd partitioner to use.")
]
Rules = Annotated[
    Literal["no-view", "last-holder", "whole-storage"] | None,
    typer.Option(help=f"Rule set; {DEFAULT_RULES} if not given."),
]
MinSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Storages under this size stay on the device.")
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|N%|auto|floor|0",
        help="The peak to stay within; 0 moves everything movable; without one nothing moves.",
    ),
]
ActionsText = Annotated[
    str | None,
    typer.Option(
        "--actions",
        metavar="ACTION,ACTION",
        help="What may be done with what is saved: keep, and any of recompute and offload; all of "
        "them if not given.",
    ),
]
ProfileText = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE|NAME",
        help="Rates of the GPU and its link: a file by offplan device, or a GPU's name.",
    ),
]
OpTimes = Annotated[
    Literal["roofline", "measured"],
    typer.Option(help="Op times from the profile, or measured on the GPU (cached by shape)."),
]
HostBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most host memory that may be taken.")
]
Pin = Annotated[
    Literal["register", "torch", "off", "auto"],
    typer.Option(
        help="How host memory is pinned: pages of our own, torch's allocator, not at all, or the "
        "first of them that works."
    ),
]

# --- reading them ---------------------------------------------------------------------------------


def parse_params(texts: list[str]) -> dict[str, str]:
    params: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise UsageError(f"-p {text}: not KEY=VALUE", fix="for example: -p batch=8")
        if key in params:
            raise UsageError(f"-p {key} is given twice")
        params[key] = value
    return params


def budget_of(text: str | None) -> Budget | None:
    return None if text is None else parse_budget(text)


def actions_of(text: str | None) -> tuple[Action, ...]:
    return ACTIONS if text is None else given_actions(text)


def profile_of(text: str | None) -> DeviceProfile | None:
    return None if text is None else find_profile(text)


def width() -> int:
    return shutil.get_terminal_size(fallback=(80, 24)).columns


def check_graph_name(path: Path) -> None:
    if not path.name.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"--graph {path}: the name must end in {GRAPH_SUFFIX}, by which it is recognized",
            fix=f"--graph {path.with_suffix('')}{GRAPH_SUFFIX}",
        )
