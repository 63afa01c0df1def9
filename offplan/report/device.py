"""What ``offplan device`` prints: a device profile as text, markdown or JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from offplan.costs import DeviceProfile
from offplan.report.document import Block, Heading, Paragraph, Table, render_blocks
from offplan.units import format_binary, format_size


def render_device(profile: DeviceProfile, format: str, width: int) -> str:
    """``profile`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format."""
    if format == "json":
        return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"
    return render_blocks(_blocks(profile), format, width)


def _blocks(profile: DeviceProfile) -> Iterator[Block]:
    yield Heading(f"{profile.gpu} ({profile.source})")
    yield Paragraph(tuple(_summary(profile)))
    yield Heading("Link to the host")
    yield _link(profile)
    yield Heading("Compute")
    yield _compute(profile)


def _summary(profile: DeviceProfile) -> Iterator[tuple[str, str]]:
    yield "memory", format_size(profile.memory_bytes)
    if profile.versions is not None:
        found = profile.versions
        yield "measured with", f"torch {found.torch}, CUDA {found.cuda}, {found.processor}"
    if profile.overlap is not None:
        yield "overlap", f"{profile.overlap:.0%} of the shorter of copies and compute is hidden"
    if profile.ordering_ok is not None:
        yield "ordering", "holds" if profile.ordering_ok else "DOES NOT HOLD: do not move anything"
    pinned = f"{profile.pin_s_per_byte * 1000**3:.2f} s per GB"
    if profile.largest_pin_bytes is not None:
        pinned += f"; largest tried that worked: {format_binary(profile.largest_pin_bytes)}"
    yield "pinning", pinned
    if profile.note:
        yield "note", profile.note


def _link(profile: DeviceProfile) -> Table:
    rows = [
        (format_binary(rate.size_bytes), *map(_per_s, (rate.d2h_bytes_per_s, rate.h2d_bytes_per_s)))
        for rate in profile.link_sizes
    ]
    alone = (profile.d2h_bytes_per_s, profile.h2d_bytes_per_s)
    both = (profile.d2h_both_bytes_per_s, profile.h2d_both_bytes_per_s)
    return Table(
        ("copies of", "to the host", "to the device"),
        (
            *rows,
            ("large, one way", *map(_per_s, alone)),
            ("large, both ways", *map(_per_s, both)),
            ("latency", *[f"{profile.copy_latency_s * 1e6:.1f} us"] * 2),
        ),
        frozenset({1, 2}),
    )


def _compute(profile: DeviceProfile) -> Table:
    rows = [
        (f"matrix products, {dtype}", _tflops(rate))
        for dtype, rate in profile.matmul_flops_per_s.items()
    ]
    if profile.attention_flops_per_s is not None:
        rows.append(("attention, forward", _tflops(profile.attention_flops_per_s.forward)))
        rows.append(("attention, backward", _tflops(profile.attention_flops_per_s.backward)))
    return Table(
        ("", "rate"),
        (
            *rows,
            ("memory", _per_s(profile.memory_bytes_per_s)),
            ("one op on the device, at least", f"{profile.op_overhead_s * 1e6:.1f} us"),
            ("one op on the host", f"{profile.host_op_s * 1e6:.1f} us"),
            ("to enter a forward", f"{profile.host_start_s * 1e6:.1f} us"),
        ),
        frozenset({1}),
    )


def _per_s(bytes_per_s: int) -> str:
    return f"{format_size(bytes_per_s)}/s"


def _tflops(flops_per_s: int) -> str:
    return f"{flops_per_s / 1e12:.1f} TFLOP/s"
