from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.errors import UsageError
from offplan.units import format_binary, format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("5MiB", 5 * 1024**2),
        ("1.5GiB", 1_610_612_736),
        ("49.66 GB", 49_660_000_000),
        ("0.1GB", 100_000_000),
        ("  2 kB ", 2000),
        ("2kib", 2048),
        ("3 TiB", 3 * 1024**4),
        ("7b", 7),
        ("0.5B", 0),
        ("1.9999999999999999999 B", 1),
    ],
)
def test_a_size_is_a_number_with_a_binary_or_decimal_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "+1", "1e9", "nan", "inf", "5 M", "1,000", "1 MiB 2", "0x10", "5MiBs", "٣"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size") as caught:
        parse_size(text)
    assert "5MiB" in caught.value.fix
    assert caught.value.exit_code == 2


@given(st.integers(0, 2**80))
def test_every_number_of_bytes_reads_as_typed(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    assert parse_size(format_binary(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_994, "999.99 kB"),
        # 999.995 kB and more would round to 1000.00 kB.
        (999_995, "1.00 MB"),
        (999_999_999_999, "1.00 TB"),
        (49_660_000_000, "49.66 GB"),
        (5_000_000_000_000_000, "5000.00 TB"),
        (-1500, "-1.50 kB"),
    ],
)
def test_a_size_prints_in_the_largest_decimal_unit_that_leaves_at_least_one(
    size_bytes: int, text: str
) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 10**15))
def test_a_printed_size_is_within_rounding_of_the_size(size_bytes: int) -> None:
    text = format_size(size_bytes)
    number, _ = text.split()
    # Half of the last printed digit: at most 0.005 of a unit that the size is at least one of.
    assert abs(parse_size(text) - size_bytes) <= size_bytes * 0.00501
    assert float(number) < 1000 or text.endswith("TB")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0"), (5 * 1024**2, "5MiB"), (1024, "1KiB"), (3 * 1024**3, "3GiB"), (1000, "1000")],
)
def test_a_threshold_prints_as_it_is_typed(size_bytes: int, text: str) -> None:
    assert format_binary(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.85, "850 ms"),
        (0.9996, "1.0 s"),
        (4.21, "4.2 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
    ],
)
def test_a_duration_prints_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
