"""What ``offplan device`` prints: a device profile, and the limits on host memory beside it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from offplan.costs import DeviceProfile
from offplan.measured import HostLimit, HostLimits
from offplan.report.document import Block, Heading, Paragraph, Table, render_blocks
from offplan.units import format_binary, format_size


def render_device(
    profile: DeviceProfile, format: str, width: int, host: HostLimits | None = None
) -> str:
    """``profile`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format.

    ``host``: the limits where the device was measured, if it was now.
    """
    if format == "json":
        document = msgspec.to_builtins(profile)
        return _json(document if host is None else {**document, "host": msgspec.to_builtins(host)})
    blocks = [*_blocks(profile), *([] if host is None else _host(host))]
    return render_blocks(blocks, format, width)


def render_host(host: HostLimits, format: str, width: int) -> str:
    """The limits alone, in the same formats."""
    if format == "json":
        return _json({"host": msgspec.to_builtins(host)})
    return render_blocks(_host(host), format, width)


def _json(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


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


def _host(host: HostLimits) -> Iterator[Block]:
    yield Heading("Host memory")
    yield Table(
        ("limit", "leaves", "of", "in use", "from"),
        tuple(_host_row(limit) for limit in host.limits),
        frozenset({1, 2, 3}),
    )
    yield Paragraph(tuple(_about_host(host)))


def _host_row(limit: HostLimit) -> tuple[str, ...]:
    sizes = (limit.left_bytes, limit.limit_bytes, limit.used_bytes)
    left, most, used = ("" if size is None else format_size(size) for size in sizes)
    if limit.name == "ulimit -l" and limit.limit_bytes is None:
        most = "unlimited"
    return (limit.name, left or "any", most, used, limit.where)


def _about_host(host: HostLimits) -> Iterator[tuple[str, str]]:
    known = [limit for limit in host.limits if limit.left_bytes is not None]
    if known:
        least = min(known, key=lambda limit: limit.left_bytes or 0)
        yield "ceiling", f"{format_size(least.left_bytes or 0)} ({least.name})"
    for limit in host.limits:
        if limit.note:
            yield limit.name, limit.note
    if host.map_count is not None and host.max_map_count is not None:
        yield "mappings", f"{host.map_count:,} of {host.max_map_count:,} (vm.max_map_count)"


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
            ("one copy on the host", f"{profile.host_copy_s * 1e6:.1f} us"),
        ),
        frozenset({1}),
    )


def _per_s(bytes_per_s: int) -> str:
    return f"{format_size(bytes_per_s)}/s"


def _tflops(flops_per_s: int) -> str:
    return f"{flops_per_s / 1e12:.1f} TFLOP/s"
