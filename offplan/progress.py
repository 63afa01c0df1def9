"""A line on stderr that says what takes so long, and is gone when it is done.

Shown only on a terminal, and only once the work has taken a second.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from rich.console import Console
from rich.status import Status

from offplan.ended import end_if_asked

_SHOW_AFTER_S = 1.0
_LOGGER = logging.getLogger(__name__)


class Progress:
    """``with Progress() as progress: progress.phase("capture")``."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.status: Status | None = None
        self.timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.status = Status("starting", console=self.console)
            self.timer = threading.Timer(_SHOW_AFTER_S, self.status.start)
            self.timer.daemon = True
            self.timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.timer is not None:
            self.timer.cancel()
            # The timer may be starting the status just now.
            self.timer.join()
        if self.status is not None:
            self.status.stop()

    def phase(self, name: str) -> None:
        """Say that the phase ``name`` begins.  Raises ``Ended`` if the command is asked to end."""
        end_if_asked()
        _LOGGER.info(name)
        if self.status is not None:
            self.status.update(name)
