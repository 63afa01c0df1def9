"""Whether the target that a plan file names may be run by whoever typed the name of the plan.

A plan is a file that others may have written, and to replay it is to run the target that it names,
with the plan's parameters.  What that target is, is decided without importing anything:

1.  A target's *file* is where its code lies: the ``.py`` file that it names, or the module's, if
    that lies below the current directory, from which Python then takes it.  Symbolic links are
    followed.  Models of ``hf:`` and ``timm:`` are libraries' code, and have none.
2.  A file in the plan's own folder, or below it, is run.
3.  One elsewhere in the current directory, or below it, is run, and a note says so.
4.  Anything else is refused unless the user has typed it, too: other files, and modules that Python
    takes from anywhere (``shutil:rmtree`` is such a target).

Assumed: the current directory is the user's own.  Not handled: what a file that may be run imports.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Literal

from offplan.errors import PlanError, UsageError
from offplan.plan import Plan

_DOORS = ("hf", "timm")

Place = Literal["library", "beside the plan", "below here", "elsewhere"]


def check_target(path: Path, plan: Plan, typed: str | None = None, command: str = "run") -> str:
    """What to tell the user before ``command`` runs the target of ``plan``, read from ``path``;
    mostly "".

    ``typed`` is the target as the user typed it beside the plan.  Raises ``PlanError`` for one that
    must be typed and was not, ``UsageError`` if another was.
    """
    spec = plan.target.spec
    if typed is not None:
        if typed != spec:
            raise UsageError(
                f"--target {typed}: {path} is a plan of {spec}",
                fix="type the plan's target, or analyze yours and run that plan",
            )
        return ""
    place = place_of(spec, path)
    if place == "elsewhere":
        raise PlanError(
            f"the plan names a target outside its folder: {_called(plan)}",
            where=str(path),
            fix="if you know what that runs, type it too: "
            + shlex.join(("offplan", command, str(path), "--target", spec)),
        )
    if place == "below here":
        return f"the plan names a target outside its folder: {spec}"
    return ""


def place_of(spec: str, plan: Path) -> Place:
    """Where the code of target ``spec`` of the plan file ``plan`` lies (definitions 1 to 4)."""
    prefix, separator, _ = spec.partition(":")
    if separator and prefix in _DOORS:
        return "library"
    file = _file_of(prefix)
    if file is None:
        return "elsewhere"
    # A file that is not there runs nothing, and is said to be missing later.
    real = Path(os.path.realpath(file))
    if real.is_relative_to(os.path.realpath(plan.parent)):
        return "beside the plan"
    return "below here" if real.is_relative_to(os.path.realpath(Path.cwd())) else "elsewhere"


def _file_of(location: str) -> Path | None:
    """The file of a target's code; None for a module that Python may take from anywhere."""
    if Path(location).suffix == ".py":
        return Path(location)
    parts = location.split(".")
    top = parts[0]
    if not all(part.isidentifier() for part in parts) or top in sys.stdlib_module_names:
        return None
    if top in sys.modules:
        # Imported already, so that it is not looked for here.
        return None
    # A package's own code runs before its modules'.
    package = Path.cwd().joinpath(*parts)
    for file in (package / "__init__.py", package.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def _called(plan: Plan) -> str:
    """The target with what it would be called with."""
    given = ", ".join(f"{name}={value!r}" for name, value in plan.target.params.items())
    return f"{plan.target.spec} ({given})" if given else plan.target.spec
