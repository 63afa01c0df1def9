"""A traced step: an earlier trace of the same code, or a new one that is kept.

1.  A trace is the same if the request is, the versions of all that is installed are, and every file
    that the earlier one read is as it was: modules of the user's (``sys.modules``) and whatever
    else was opened for reading meanwhile (``sys.audit``), outside of installed packages.
2.  What a target learns otherwise, from the environment, a clock or a network, is not seen: a
    command that must know traces anew.
3.  Under a compiler that is asked how it lowers a choice, an earlier trace cannot be asked: the
    step is traced again the first time that a choice needs it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from offplan.graph import GraphFacts
from offplan.kept import TraceKey, folder, keep_trace, kept_trace
from offplan.options import parse_params
from offplan.progress import Progress
from offplan.recompute import Choice
from offplan.requests import Request, Step, step_of

_VERSIONS = ("torch", "transformers", "timm", "offplan")
_SYSTEM = ("/proc", "/sys", "/dev")
_GPUS = Path("/proc/driver/nvidia/gpus")


class Recorder:
    """Files that this process opens for reading; a hook cannot be taken away, so there is one."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_on or event != "open":
            return
        path, mode = arguments[0], arguments[1]
        if isinstance(path, str) and (mode is None or (isinstance(mode, str) and mode[:1] == "r")):
            self.files.add(path)


def traced_once(request: Request, progress: Progress, recorder: Recorder, *, again: bool) -> Step:
    """The traced step of ``request``; ``again``: whatever was kept."""
    key = _key(request)
    facts = None if again else kept_trace(key)
    if facts is not None:
        return Step(facts, {}, _later(request, progress))
    recorder.files.clear()
    recorder.is_on = True
    try:
        step = step_of(request, progress)
    finally:
        recorder.is_on = False
    keep_trace(key, step.facts, read_files(recorder.files))
    return step


def read_files(opened: set[str]) -> list[Path]:
    """The user's files among ``opened`` and the modules that are imported (definition 1)."""
    modules = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    paths = {Path(name).absolute() for name in (*opened, *filter(None, modules))}
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    outside = [*installed, *map(Path, _SYSTEM), *filter(None, [folder()])]
    return sorted(
        path
        for path in paths
        if path.suffix not in (".pyc", ".so")
        and not any(path.is_relative_to(above) for above in outside)
        and path.is_file()
    )


def _key(request: Request) -> TraceKey:
    options = {
        "device": request.device,
        "gpu": request.gpu or "",
        "attention": request.attention or "",
        "compiler": request.compiler,
        "partitioner": request.partitioner,
        # Where there is a GPU, it chooses kernels itself.
        "present": _present(),
    }
    versions = {name: _version(name) for name in _VERSIONS}
    versions |= {"python": sys.version, "packages": _packages()}
    where = str(Path.cwd())
    return TraceKey(
        request.target, parse_params(request.params), options, versions | {"folder": where}
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _packages() -> str:
    """A checksum of all that is installed: names of its metadata have the versions."""
    found = set()
    for above in sys.path:
        with suppress(OSError):
            names = os.listdir(above or ".")
            found |= {name for name in names if name.endswith((".dist-info", ".egg-info"))}
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def _present() -> str:
    """Models of the GPUs that are there."""
    models = []
    for path in sorted(_GPUS.glob("*/information")):
        with suppress(OSError):
            models.append(path.read_text().partition("\n")[0].removeprefix("Model:").strip())
    return ", ".join(models)


def _later(request: Request, progress: Progress) -> Callable[[Sequence[Choice]], GraphFacts] | None:
    """What asks a new trace, made the first time (definition 3)."""
    if request.compiler != "inductor":
        return None
    made: list[Step] = []

    def under(choices: Sequence[Choice]) -> GraphFacts:
        if not made:
            made.append(step_of(request, progress))
        asked = made[0].under
        assert asked is not None
        return asked(choices)

    return under
