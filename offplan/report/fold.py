"""Folds what repeats from layer to layer into one row: ``layers.0-39.self_attn x40``.

1.  Two texts are *alike* if they are equal but for their integers, and for the counter that a trace
    appends to an op's name (``view``, ``view_12``) in a saved holder.
2.  Things are folded when everything else about them is equal and their texts are alike, one by
    one.
3.  A folded text shows, for each integer that differs, what it ranges over: ``0-39``, ``0,2,5-7``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

_INTEGER = re.compile(r"(\d+)", re.ASCII)
_SAVED_NAME = re.compile(r"^(saved \S+?)(?:_\d+)+(?= |$)", re.ASCII)
# Longer lists say where they start and end; the count is beside them.
_MAX_RANGES = 4


class Group(NamedTuple):
    """Places of the things folded, in order, and their texts folded."""

    places: tuple[int, ...]
    texts: tuple[str, ...]


def fold(things: Iterable[tuple[Hashable, Sequence[str]]]) -> list[Group]:
    """Fold ``things``, each a key that must be equal and texts that must be alike.

    Groups are in the order of their first thing.
    """
    found: dict[Hashable, list[tuple[int, list[list[str]]]]] = {}
    for place, (key, texts) in enumerate(things):
        parts = [_INTEGER.split(_SAVED_NAME.sub(r"\1", text)) for text in texts]
        alike = tuple(tuple(part[::2]) for part in parts)
        found.setdefault((key, alike), []).append((place, parts))
    return [_group(members) for members in found.values()]


def _group(members: Sequence[tuple[int, list[list[str]]]]) -> Group:
    texts = []
    for versions in zip(*(parts for _, parts in members), strict=True):
        columns = zip(*versions, strict=True)
        texts.append("".join(_column(index, column) for index, column in enumerate(columns)))
    return Group(tuple(place for place, _ in members), tuple(texts))


def _column(index: int, column: Sequence[str]) -> str:
    """One part of a text over all members: odd parts are integers."""
    if index % 2 == 0 or len(set(column)) == 1:
        return column[0]
    return ranges(sorted({int(text) for text in column}))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as ``0-3,7``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    if len(runs) > _MAX_RANGES:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
