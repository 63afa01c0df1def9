"""Names for source lines that are the same on every machine.

A file under the current directory is named relative to it, so that CI annotations land on it; an
installed package's file relative to its ``site-packages``; anything else by its full path.  Files
of torch, of offplan and of Python itself have no name: the line that matters is the caller's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offplan.target import is_library_file

_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")


class SourceNames:
    """Maps ``(file, line)`` to ``file:line`` as reports print it, or to an empty string."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = os.path.realpath(root or Path.cwd())
        self.names: dict[str, str] = {}

    def __call__(self, filename: str, line: int) -> str:
        if filename not in self.names:
            self.names[filename] = "" if is_library_file(filename) else self._name(filename)
        name = self.names[filename]
        return f"{name}:{line}" if name else ""

    def of_text(self, text: str) -> str:
        """The same for a ``file:line`` string; other text is returned as it is."""
        filename, _, line = text.rpartition(":")
        return self(filename, int(line)) or text if filename and line.isdigit() else text

    def _name(self, filename: str) -> str:
        path = os.path.realpath(filename)
        # Before the current directory: an environment often lies inside the project.
        if _INSTALLED.match(path):
            return _INSTALLED.sub("", path)
        if path.startswith(self.root + os.sep):
            return os.path.relpath(path, self.root)
        return path
