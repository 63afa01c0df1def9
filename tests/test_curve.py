"""The curve against a plain list that does everything op by op."""

from __future__ import annotations

import pytest
from facts_builder import DRAWN
from hypothesis import given
from hypothesis import strategies as st

from offplan.curve import Curve

VALUES = st.lists(st.integers(-50, 50), max_size=40)


@st.composite
def changes(draw: st.DrawFn, count: int) -> list[tuple[int, int, int]]:
    """Ranges, some of them empty, and what is added to them."""
    places = st.integers(0, count)
    return draw(st.lists(st.tuples(places, places, st.integers(-30, 30)), max_size=12))


@st.composite
def changed_values(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    values = draw(VALUES)
    return values, draw(changes(len(values)))


def after(values: list[int], added: list[tuple[int, int, int]]) -> tuple[Curve, list[int]]:
    """The curve and the list, with ``added`` to both."""
    curve, plain = Curve(values), list(values)
    for start, stop, amount in added:
        curve.add(start, stop, amount)
        for place in range(start, stop):
            plain[place] += amount
    return curve, plain


@DRAWN
@given(changed_values())
def test_the_highest_of_every_range_is_the_lists(
    drawn: tuple[list[int], list[tuple[int, int, int]]],
) -> None:
    curve, plain = after(*drawn)
    assert curve.top == max(plain, default=0)
    for start in range(len(plain) + 1):
        for stop in range(len(plain) + 1):
            assert curve.highest(start, stop) == max(plain[start:stop], default=None)


@DRAWN
@given(changed_values(), st.integers(-80, 80))
def test_the_last_above_a_limit_is_the_lists(
    drawn: tuple[list[int], list[tuple[int, int, int]]], limit: int
) -> None:
    curve, plain = after(*drawn)
    for start in range(len(plain) + 1):
        for stop in range(len(plain) + 1):
            above = [place for place in range(start, stop) if plain[place] > limit]
            assert curve.last_above(start, stop, limit) == max(above, default=None)


@DRAWN
@given(changed_values())
def test_what_is_added_and_taken_again_leaves_no_trace(
    drawn: tuple[list[int], list[tuple[int, int, int]]],
) -> None:
    values, added = drawn
    curve, _ = after(values, [*added, *((start, stop, -size) for start, stop, size in added)])
    for place, value in enumerate(values):
        assert curve.highest(place, place + 1) == value


def test_a_copy_and_what_it_was_made_of_change_by_themselves() -> None:
    curve = Curve([1, 2, 3])
    curve.add(0, 2, 5)
    other = curve.copy()
    other.add(0, 1, 10)
    curve.add(2, 3, 20)
    assert [other.highest(op, op + 1) for op in range(3)] == [16, 7, 3]
    assert [curve.highest(op, op + 1) for op in range(3)] == [6, 7, 23]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9])
def test_places_past_the_last_op_never_count(count: int) -> None:
    # The tree has a power of two of places; those without an op must not be the highest.
    curve = Curve([-7] * count)
    curve.add(0, count, -1)
    assert curve.highest(0, count) == (-8 if count else None)
    assert curve.last_above(0, count, -9) == (count - 1 if count else None)
    assert curve.top == (-8 if count else 0)
