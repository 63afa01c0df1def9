"""What the backward computes again instead of receiving it, and the graphs that this makes.

1.  A *choice* is a set of ops of one region's forward, by position, that run again in its backward.
    What they and the rest of the backward read of the forward's other values is saved, and nothing
    else: a choice decides the saved values, and with them both graphs.
2.  ``chosen`` is the choice that a traced pair already makes: an op of the backward that has the
    name and target of one in the forward is that op again.
"""

from __future__ import annotations

import msgspec


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forward ops of ``region``, by position in its forward, that run again in its backward."""

    region: int
    ops: tuple[int, ...]
