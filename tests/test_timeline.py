"""The timeline in the terminal and as a picture: no peak is lost, and both show the same."""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from drawn_steps import STORAGE_BYTES, charts, layered, planned
from facts_builder import DRAWN, FactsBuilder, steps
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offplan.chart import Chart
from offplan.charted import charts_of, opened_of
from offplan.cli import app
from offplan.commands.report import report
from offplan.costs import profile_for
from offplan.errors import PlanError, UsageError
from offplan.graph import GraphFacts, save_graph
from offplan.opened import Opened
from offplan.plan import make_plan, write_plan
from offplan.plotted import has_colours
from offplan.report.glyphs import GLYPH_WIDTH, glyph
from offplan.report.picture import (
    HEIGHT,
    PART_COLOURS,
    PNG_FILE,
    SVG_FILE,
    WIDTH,
    Area,
    Rect,
    draw,
    to_png,
    to_svg,
)
from offplan.report.timeline import (
    Busy,
    columns,
    lanes,
    peak_moment,
    peak_ms,
    render_timeline,
    span_of,
    ticks,
)

GOLDEN = Path(__file__).with_name("timeline.txt")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def drawn_charts() -> tuple[Chart, Chart]:
    return charts(layered())


# --- columns --------------------------------------------------------------------------------------


@DRAWN
@given(steps(), st.integers(1, 90))
def test_the_highest_column_is_the_highest_moment_however_few_there_are(
    facts: GraphFacts, count: int
) -> None:
    for chart in charts(facts):
        drawn = columns(chart, span_of(chart), count)
        assert max(drawn.totals()) == max(chart.totals)
        for moment, total in zip(drawn.moments, drawn.totals(), strict=True):
            assert total == (0 if moment is None else chart.totals[moment])


def test_a_column_shows_what_is_held_while_compute_waits() -> None:
    _, plan = drawn_charts()
    stall = max(plan.played.stalls, key=lambda each: each.wait_ms)
    drawn = columns(plan, span_of(plan), 4000)
    middle_ms = stall.end_ms - stall.wait_ms / 2
    moment = drawn.moments[int(middle_ms / span_of(plan) * 4000)]
    assert moment is not None
    # What is held from the op before it on.
    assert plan.spans.ops[moment] == stall.op - 1


def test_a_step_that_is_shorter_than_the_time_shown_has_empty_columns_after_it() -> None:
    no_plan, _ = drawn_charts()
    drawn = columns(no_plan, 2 * span_of(no_plan), 100)
    assert all(moment is not None for moment in drawn.moments[:50])
    assert drawn.moments[50:] == (None,) * 50
    assert drawn.stacks[60] == ()


def test_shares_of_columns_add_up_to_the_time_that_is_busy() -> None:
    _, plan = drawn_charts()
    span_ms = span_of(plan)
    drawn = columns(plan, span_ms, 37)
    for spans in lanes(plan).values():
        busy_ms = sum(end - begin for begin, end in spans)
        assert sum(drawn.share(spans)) * span_ms / 37 == pytest.approx(busy_ms)
    assert drawn.share([Busy(0, span_ms)]) == pytest.approx((1.0,) * 37)


@given(st.floats(1e-3, 1e12), st.integers(1, 20))
def test_ticks_are_round_start_at_0_and_end_within_reach(most: float, about: int) -> None:
    found = ticks(most, about)
    assert found[0] == 0
    assert most / 3 < found[-1] + found[-1] / max(len(found) - 1, 1) or len(found) == 1
    assert found[-1] <= most * (1 + 1e-6)
    assert 1 <= len(found) <= about + 1


# --- the terminal ---------------------------------------------------------------------------------


def test_the_terminals_timeline_is_as_it_was() -> None:
    no_plan, plan = drawn_charts()
    text = render_timeline(no_plan, plan, 5 * STORAGE_BYTES, 80)
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 133, 200])
def test_no_line_is_wider_than_the_terminal_and_wider_ones_are_used(width: int) -> None:
    no_plan, plan = drawn_charts()
    lines = render_timeline(no_plan, plan, 10**9, width).splitlines()
    assert width - 12 <= max(map(len, lines)) <= width


def test_colours_change_how_cells_are_painted_and_not_where_they_are() -> None:
    no_plan, plan = drawn_charts()
    coloured = render_timeline(no_plan, plan, None, 80, color=True)
    text = render_timeline(no_plan, plan, None, 80)
    assert "\x1b" not in text
    shown = ESCAPE.sub("", coloured).splitlines()
    assert [len(line) for line in shown] == [len(line) for line in text.splitlines()]
    # Each line ends as the terminal was before it.
    for line in coloured.splitlines():
        assert "\x1b" not in line or ESCAPE.findall(line)[-1] == "\x1b[0m"


def test_the_peak_is_marked_above_its_column_and_named() -> None:
    no_plan, plan = drawn_charts()
    text = render_timeline(no_plan, plan, None, 80, 20)
    assert text.count("▼") == text.count("◂ peak") == 2
    lines = text.splitlines()
    mark = next(number for number, line in enumerate(lines) if "▼" in line)
    place = lines[mark].index("▼")
    expected = 10 + peak_ms(no_plan) / span_of(no_plan, plan) * 61
    assert abs(place - expected) <= 1
    assert lines[mark + 1][place] not in " ╌"
    assert f"{no_plan.ops[no_plan.prediction.op].target}" in text


def test_a_budget_is_a_line_where_nothing_is_drawn() -> None:
    no_plan, _ = drawn_charts()
    with_line = render_timeline(no_plan, None, 3 * STORAGE_BYTES, 80)
    without = render_timeline(no_plan, None, None, 80)
    assert "◂ budget" in with_line
    assert "◂ budget" not in without
    assert with_line.replace("╌", " ").replace("◂ budget", "").split() == without.split()


def test_copies_have_lanes_and_a_step_without_any_has_none() -> None:
    no_plan, plan = drawn_charts()
    assert "to host" not in render_timeline(no_plan, None, None, 80)
    text = render_timeline(None, plan, None, 80)
    lines = {line.split("│")[0].strip(): line for line in text.splitlines() if "│" in line}
    host, device = lines["to host"], lines["to device"]
    axis = next(line for line in text.splitlines() if "└" in line)
    backward = axis.index("┼")
    # Nothing comes back before the backward, and nothing goes out after it has begun.
    assert not device[10:backward].strip()
    assert device[backward:].strip()
    assert host[10:backward].strip()
    assert not host[backward + 1 :].strip()
    moved = sum(transfer.transfer_bytes for transfer in plan.transfers)
    assert moved == 6 * STORAGE_BYTES
    assert "to host: 1.61 GB in 6 copies" in text


def test_without_charts_there_is_nothing_to_draw() -> None:
    assert render_timeline(None, None, None, 80) == "no graphs, no timeline\n"


def test_a_thin_part_at_the_top_is_not_lost() -> None:
    # 1 MiB above 4 GiB, where a row ends: much less than an eighth of the next.
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024, 1024 * 1024))
    y = region.op("aten.relu.default", [x], (1024, 256))
    region.save(y)
    no_plan, _ = charts(facts.build())
    assert max(no_plan.totals) > no_plan.spans.resting["inputs"]
    text = render_timeline(no_plan, None, 5 * 4096**3 // 16, 80, 6)
    assert "▁" in text
    assert "▂" not in text


# --- pictures -------------------------------------------------------------------------------------


def test_the_svg_is_well_formed_and_says_of_each_copy_what_it_moves() -> None:
    no_plan, plan = drawn_charts()
    content = to_svg(draw("a <model> & more", no_plan, plan, 10**9))
    root = ElementTree.fromstring(content)
    name = "{http://www.w3.org/2000/svg}"
    titles = [element.text or "" for element in root.iter(f"{name}title")]
    assert titles[0] == "a <model> & more"
    said = [title for title in titles if " to host, " in title or " to device, " in title]
    assert len(said) == len(plan.played.copies) == 12
    assert any("layers.3.mlp.up" in title and "model.py:13" in title for title in said)
    texts = [element.text or "" for element in root.iter(f"{name}text")]
    assert f"peak {no_plan.prediction.peak_bytes / 1e9:.2f} GB" in texts
    assert "budget 1.00 GB" in texts
    assert content.startswith(SVG_FILE.first_bytes)


def test_shapes_are_on_the_paper_and_areas_are_stacked_without_gaps() -> None:
    no_plan, plan = drawn_charts()
    shapes = draw("model", no_plan, plan, None).shapes
    for rect in (shape for shape in shapes if isinstance(shape, Rect)):
        assert 0 <= rect.x <= rect.x + rect.width <= WIDTH
        assert 0 <= rect.y <= rect.y + rect.height <= HEIGHT
    alone = draw("model", no_plan, None, None).shapes
    first = [shape for shape in alone if isinstance(shape, Area)]
    for lower, upper in pairwise(first):
        assert lower.tops == upper.bottoms
    # The highest edge of the stack is the highest moment, on the scale of the lowest part.
    resting = no_plan.spans.resting["parameters"]
    bottom, top = first[0].bottoms[0], min(first[-1].tops)
    scale = (bottom - first[0].tops[0]) / resting
    assert bottom - top == pytest.approx(max(no_plan.totals) * scale, rel=0.01)


def decoded(content: bytes) -> tuple[list[bytes], bytes]:
    """Rows of palette indexes, and the palette, of a PNG whose checks hold."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        (check,) = struct.unpack(">I", content[at + 8 + size : at + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    assert ([*chunks][:1], [*chunks][-1:]) == ([b"IHDR"], [b"IEND"])
    width, height, depth, kind_of, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (width, height, depth, kind_of) == (WIDTH, HEIGHT, 8, 3)
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[start : start + WIDTH + 1] for start in range(0, len(raw), WIDTH + 1)]
    assert len(rows) == HEIGHT
    assert all(row[0] == 0 for row in rows)
    return [row[1:] for row in rows], chunks[b"PLTE"]


def test_the_png_has_the_pixels_of_the_areas() -> None:
    no_plan, plan = drawn_charts()
    picture = draw("model", no_plan, plan, None)
    content = to_png(picture)
    assert content.startswith(PNG_FILE.first_bytes)
    rows, palette = decoded(content)
    colours = [palette[at : at + 3] for at in range(0, len(palette), 3)]
    counts = Counter(colours[index] for row in rows for index in row)
    for area in (shape for shape in picture.shapes if isinstance(shape, Area)):
        if area.title == "saved activations":
            expected = sum(
                2 * (round(bottom) - round(top))
                for top, bottom in zip(area.tops, area.bottoms, strict=True)
            )
            found = counts[bytes.fromhex(PART_COLOURS["saved"][1:])]
            # Lines and marks are painted over some of them.
            assert expected > 10_000
            assert found > 0.9 * expected


def test_the_same_charts_give_the_same_files() -> None:
    first, second = (draw("model", *drawn_charts(), 10**9) for _ in range(2))
    assert to_svg(first) == to_svg(second)
    assert to_png(first) == to_png(second)


def test_letters_can_be_told_apart_and_others_are_question_marks() -> None:
    printable = [chr(code) for code in range(0x21, 0x7F)]
    assert len({glyph(letter) for letter in printable}) == len(printable)
    assert all(len(glyph(letter)) == GLYPH_WIDTH and any(glyph(letter)) for letter in printable)
    assert not any(glyph(" "))
    assert glyph("é") == glyph("▼") == glyph("?")


# --- which charts ---------------------------------------------------------------------------------


def test_a_plan_that_changes_nothing_has_one_chart() -> None:
    facts = layered(2)
    found = charts_of(opened_of(planned(facts, None), facts))
    assert found.plan is None
    assert [*found.by_name()] == ["no plan"]
    assert found.last is found.no_plan


def test_a_plan_that_moves_has_two_and_the_last_is_its_own() -> None:
    facts = layered(2)
    plan = planned(facts)
    found = charts_of(opened_of(plan, facts))
    assert [*found.by_name()] == ["no plan", "plan"]
    assert found.last.prediction.peak_bytes == plan.predicted.plan.peak_bytes
    assert found.no_plan.prediction.peak_bytes == plan.predicted.no_plan.peak_bytes


def test_what_cannot_be_drawn_says_what_to_do() -> None:
    facts = layered(2)
    with pytest.raises(PlanError, match="graphs, which are not here") as without_graphs:
        charts_of(Opened(planned(facts), None, None))
    assert "--graph" in without_graphs.value.fix
    host = FactsBuilder(device="cpu").build()
    plan = make_plan(host)
    with pytest.raises(UsageError, match="no profile") as without_profile:
        charts_of(opened_of(plan, host))
    assert "--profile h200" in without_profile.value.fix
    assert charts_of(opened_of(plan, host), profile_for("h200")).plan is None


def test_times_by_another_profile_are_noted() -> None:
    facts = layered(2)
    found = charts_of(opened_of(planned(facts), facts), profile_for("a100"))
    assert found.notes == ("times are by the profile a100, the plan's are by h200",)


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    facts = layered()
    (tmp_path / "m.graph.json").write_bytes(save_graph(facts))
    write_plan(tmp_path / "m.plan.yaml", planned(facts))
    return tmp_path


def test_analyze_plots_what_it_found(saved: Path) -> None:
    graph, plan = str(saved / "m.graph.json"), str(saved / "n.plan.yaml")
    result = CliRunner().invoke(
        app,
        ["analyze", graph, "-o", plan, "--budget", "0", "--actions", "keep,offload", "--plot"],
    )
    assert result.exit_code == 0, result.stderr
    assert "no plan: peak " in result.stdout
    assert "to host: 1.61 GB in 6 copies" in result.stdout
    assert "\x1b" not in result.stdout


def test_plotting_what_is_no_text_is_refused_before_anything_is_traced(saved: Path) -> None:
    result = CliRunner().invoke(
        app, ["analyze", "no_such_model.py", "--plot", "--format", "json", "-o", str(saved / "x")]
    )
    assert result.exit_code == 2
    assert "--plot is drawn in text" in result.stderr


def test_colours_need_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert has_colours()
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert not has_colours()


def test_report_plots_a_plan_and_writes_no_page(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    alone = typer.Typer()
    alone.command()(report)
    result = CliRunner().invoke(alone, ["m.plan.yaml", "--plot"])
    assert result.exit_code == 0, result.stderr
    assert "to device: 1.61 GB in 6 copies" in result.stdout
    assert sorted(path.name for path in saved.iterdir()) == ["m.graph.json", "m.plan.yaml"]


@pytest.mark.parametrize("name", ["svg", "png"])
def test_pictures_are_written_again_and_over_nothing_else(saved: Path, name: str) -> None:
    output = saved / f"timeline.{name}"
    arguments = ["export", str(saved / "m.plan.yaml"), "--to", name, "-o", str(output)]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
    output.write_bytes(b"a picture of somebody else")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "is not an offplan picture" in result.stderr


def test_a_picture_that_is_no_text_needs_a_file(saved: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(saved / "m.plan.yaml"), "--to", "png"])
    assert result.exit_code == 2
    assert "-o FILE.png" in result.stderr


def test_the_peaks_moment_is_of_the_predicted_op() -> None:
    for chart in drawn_charts():
        assert chart.totals[peak_moment(chart)] == max(chart.totals)
        assert chart.spans.ops[peak_moment(chart)] == chart.prediction.op
