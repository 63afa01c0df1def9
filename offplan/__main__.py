"""The ``offplan`` command, and ``python -m offplan``."""

from __future__ import annotations

from offplan.ended import end_when_asked


def main() -> None:
    """Entry point of the ``offplan`` command."""
    end_when_asked()
    # What takes a moment to load comes after it.
    from offplan.cli import app

    app()


if __name__ == "__main__":
    main()
