"""The timeline as the terminal at hand shows it: as wide as that is, in colours where it has them.

Colours are left out where the output is no terminal, where ``NO_COLOR`` is set to anything, and on
a terminal that is ``dumb``.
"""

from __future__ import annotations

import os
import sys

from offplan.charted import Charts
from offplan.options import width
from offplan.report.timeline import render_timeline


def plotted(charts: Charts, budget_bytes: int | None) -> str:
    """The timeline of ``charts`` as text."""
    return render_timeline(charts.no_plan, charts.plan, budget_bytes, width(), color=has_colours())


def has_colours() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
