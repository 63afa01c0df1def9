"""Targets that need no file of the user's: other people's configurations, and traces of real runs.

1.  ``hf:WHERE``: a configuration of transformers (``doors.transformers``).
2.  ``timm:NAME``: a model of timm (``doors.timm``).
3.  ``trace:FOLDER``: what ``TORCH_TRACE`` wrote in a real run (``doors.torch_trace``); it has
    graphs, and no model.

The first two are built as any target is.  Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from offplan.errors import TargetError

TRACE_PREFIX = "trace:"
TRACE_LOGS = "dedicated_log_torch_trace_*.log"


def is_trace(target: str) -> bool:
    """Whether a target is a trace: by its prefix, or a folder or file of what torch wrote."""
    if target.startswith(TRACE_PREFIX):
        return True
    path = Path(target)
    if path.suffix == ".log":
        return path.is_file()
    return path.is_dir() and any(path.glob(TRACE_LOGS))


def no_model(target: str) -> TargetError:
    """Why a trace, or a plan of one, cannot be replayed."""
    return TargetError(
        f"{target} is a trace of a real run: it has graphs, and no model to run",
        fix="analyze the model itself (a file, hf: or timm:) and replay that plan",
    )
