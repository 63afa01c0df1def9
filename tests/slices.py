"""How much is tried of what there is no end of: a slice, or ``OFFPLAN_EXAMPLES`` times as much."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("OFFPLAN_EXAMPLES", "1"))


def examples(count: int) -> int:
    """How many to draw where ``count`` are the slice that CI takes."""
    return count * TIMES
