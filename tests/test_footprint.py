"""Bytes counted one by one against the arithmetic of offplan.footprint."""

from __future__ import annotations

import itertools

import pytest
from facts_builder import DRAWN, ITEM_BYTES, MiB, contiguous, strided_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.footprint import Footprint, footprint, is_dense
from offplan.graph import StorageId, Value


def window(
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    dtype: str = "float32",
) -> Value:
    return Value(
        kind="tensor",
        storage=StorageId(0),
        dtype=dtype,
        item_bytes=ITEM_BYTES[dtype],
        shape=shape,
        stride=contiguous(shape) if stride is None else stride,
        offset=offset,
    )


def bytes_of(view: Value) -> set[int]:
    """Every byte that ``view`` touches, one element after another."""
    found = set()
    for indexes in itertools.product(*(range(size) for size in view.shape)):
        element = view.offset + sum(i * s for i, s in zip(indexes, view.stride, strict=True))
        found.update(range(element * view.item_bytes, (element + 1) * view.item_bytes))
    return found


def test_a_4_mib_view_of_a_32_mib_storage_is_4_mib() -> None:
    # float32: 1 Mi elements from element 2 Mi, so bytes 8 MiB to 12 MiB of 32.
    found = footprint([window((1024, 1024), offset=2 * 1024**2)])
    assert found == Footprint(8 * MiB, 12 * MiB, 4 * MiB)
    assert found.transfer_bytes == found.device_bytes == 4 * MiB


def test_every_other_column_is_a_range_and_not_mostly_gaps() -> None:
    # Elements 0, 2, ... 2046 of float32: 1024 * 4 bytes touched in 2047 * 4 bytes; 2 * 4096 > 8188.
    found = footprint([window((1024,), (2,))])
    assert found == Footprint(0, 8188, 4096)
    assert found.transfer_bytes == 8188


def test_every_fourth_element_is_packed_but_takes_its_gaps_on_the_device() -> None:
    # Elements 0, 4, ... 4092: 1024 * 4 bytes touched in 4093 * 4.
    found = footprint([window((1024,), (4,))])
    assert found == Footprint(0, 16372, 4096, packed=True)
    assert found.transfer_bytes == 4096
    assert found.device_bytes == 16372


def test_an_expanded_view_counts_its_bytes_once() -> None:
    # A row of 1024 float32 seen 512 times.
    assert footprint([window((512, 1024), (0, 1))]) == Footprint(0, 4096, 4096)


def test_windows_of_unfold_count_their_overlap_once() -> None:
    # x.unfold(0, 3, 1) of ten elements: eight windows of three, on all ten.
    assert footprint([window((8, 3), (1, 1))]) == Footprint(0, 40, 40)


def test_windows_of_unfold_that_step_over_elements_count_what_they_touch() -> None:
    # x.unfold(0, 3, 4): elements 0-2, 4-6, 8-10: nine of eleven.
    assert footprint([window((3, 3), (4, 1))]) == Footprint(0, 44, 36)


def test_the_chunks_of_a_fused_qkv_are_the_whole_storage() -> None:
    # (4, 3 * 8) rows of bfloat16, in three chunks of 8 columns: 4 * 24 * 2 = 192 bytes.
    chunks = [window((4, 8), (24, 1), offset, "bfloat16") for offset in (0, 8, 16)]
    assert footprint(chunks) == Footprint(0, 192, 192)


def test_one_chunk_of_three_is_packed() -> None:
    # 4 rows of 8 columns of 24: 4 * 16 bytes touched in 3 * 48 + 16 = 160.
    found = footprint([window((4, 8), (24, 1), 0, "bfloat16")])
    assert found == Footprint(0, 160, 64, packed=True)


def test_a_base_and_its_views_are_the_base() -> None:
    base = window((64, 64))
    views = [window((64, 32), (64, 2)), window((32, 64), offset=1024), window((64, 64), (1, 64))]
    assert footprint([base, *views]) == Footprint(0, 16384, 16384)


def test_a_view_as_another_dtype_is_counted_in_bytes() -> None:
    # Two float32 from byte 4, and one int64 from byte 8: bytes 4 to 16.
    assert footprint([window((2,), offset=1), window((1,), offset=1, dtype="int64")]) == Footprint(
        4, 16, 12
    )


def test_views_of_zero_bytes_touch_nothing() -> None:
    assert footprint([window((0, 4), offset=9), window((2,), offset=1)]) == Footprint(4, 12, 8)
    assert footprint([window((0, 4))]) == Footprint(0, 0, 0)


def test_the_transposed_view_of_a_matrix_is_dense_in_bytes() -> None:
    assert footprint([window((128, 64), (1, 128))]).touched_bytes == 128 * 64 * 4


@settings(DRAWN, max_examples=300)
@given(st.data())
def test_one_view_of_nested_dimensions_is_counted_exactly(data: st.DataObject) -> None:
    shape, strides, inner = [], [], 1
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.integers(1, 4))
        stride = data.draw(st.one_of(st.just(0), st.integers(inner, inner + 3)))
        shape.append(size)
        strides.append(stride)
        inner += (size - 1) * stride
    order = data.draw(st.permutations(range(len(shape))))
    view = window(tuple(shape[i] for i in order), tuple(strides[i] for i in order), 2, "bfloat16")
    touched = bytes_of(view)
    found = footprint([view])
    assert (found.start, found.stop) == (min(touched), max(touched) + 1)
    assert found.touched_bytes == len(touched)


@settings(DRAWN, max_examples=300)
@given(st.data())
def test_any_views_are_never_counted_under_and_never_over_their_range(data: st.DataObject) -> None:
    views = []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(("float32", "bfloat16")))
        shape, strides, offset = data.draw(strided_windows(60))
        views.append(window(shape, strides, offset, dtype))
    touched = set[int]().union(*map(bytes_of, views))
    found = footprint(views)
    assert (found.start, found.stop) == (min(touched), max(touched) + 1)
    assert len(touched) <= found.touched_bytes <= found.stop - found.start
    assert found.packed == (2 * found.touched_bytes < found.stop - found.start)
    assert found.transfer_bytes <= found.device_bytes


@settings(DRAWN, max_examples=200)
@given(st.data())
def test_shifted_slices_within_one_period_are_counted_exactly(data: st.DataObject) -> None:
    period, rows = data.draw(st.integers(4, 12)), data.draw(st.integers(2, 4))
    views = []
    for _ in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, period - 1))
        width = data.draw(st.integers(1, period - first))
        views.append(window((rows, width), (period, 1), first))
    touched = set[int]().union(*map(bytes_of, views))
    assert footprint(views).touched_bytes == len(touched)


@settings(DRAWN, max_examples=300)
@given(strided_windows(40))
def test_dense_means_as_many_elements_as_places_and_no_gap(
    drawn: tuple[tuple[int, ...], tuple[int, ...], int],
) -> None:
    shape, strides, _ = drawn
    view = window(shape, strides)
    places = sorted(
        sum(i * s for i, s in zip(indexes, strides, strict=True))
        for indexes in itertools.product(*(range(size) for size in shape))
    )
    assert is_dense(view) == (places == list(range(len(places))))


@pytest.mark.parametrize("count", [1, 50])
def test_many_views_of_one_storage_take_linear_time(count: int) -> None:
    # 2,000 slices per unit would take minutes if each were compared with each.
    views = [window((16, 4), (8 * 1024, 1), 4 * i) for i in range(2000)] * count
    assert footprint(views).touched_bytes == 16 * 4 * 4 * 2000
