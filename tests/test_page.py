"""The page of a plan: what its HTML says, and what it does in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import Browser, Tab, executable
from facts_builder import FactsBuilder
from test_measured import measurement, no_plan
from test_measured import plan as plan_arm
from typer.testing import CliRunner, Result

from offplan.budget import FLOOR, Aim, Outlooks, PredictedTime
from offplan.chart import Chart, chart
from offplan.cli import app
from offplan.costs import profile_for
from offplan.decide import decide
from offplan.errors import PlanError
from offplan.graph import GraphFacts, save_graph
from offplan.measured import Measurement, expected, planned, write_measurement
from offplan.memory import Conditions
from offplan.plan import Draft, Plan, Recomputed, make_plan, write_plan
from offplan.relower import relowered
from offplan.report.embed import Drawn, embedded, script_safe
from offplan.report.page import Page, render_page
from offplan.report.timeline import PART_WORDS, STACK
from offplan.units import format_size

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ASSETS = ROOT / "offplan" / "report" / "assets"
# Set to draw the screenshots in docs/ anew, of a model that is traced for it.
UPDATES = "OFFPLAN_UPDATE_DOCS"
SHOTS = {"light": DOCS / "report-light.png", "dark": DOCS / "report-dark.png"}
SHOT_WIDTH, SHOT_HEIGHT = 1280, 1050

LAYERS = 6
SHAPE = (8192, 8192)
STORAGE_BYTES = 8192 * 8192 * 4
MANY = 5000
SHIFT = 8
# Nothing is given a name that a browser would read as markup, but for these.
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">\u2028&amp;.py"


def layered(
    spec: str = "model.py", *, device: str = "cuda", saves_relu: bool = False
) -> GraphFacts:
    """Layers that each save what a product makes, the last two of them half of it."""
    facts = FactsBuilder(spec=spec, device=device, params={"layers": str(LAYERS)})
    region = facts.region()
    region.gradient_shape = (1024, 8192)
    weight = region.input("weight", SHAPE, kind="parameter")
    x = region.input("x", SHAPE)
    for number in range(LAYERS):
        shape = SHAPE if number < LAYERS - 2 else (4096, 8192)
        module, source = f"layers.{number}.mlp", f"model.py:{10 + number}"
        x = region.op(
            "aten.mm.default", [x, weight], shape, name=f"up_{number}", module=module, source=source
        )
        region.save(region.view(x, (shape[0] * shape[1],), module=module))
        x = region.op("aten.relu.default", [x], shape, module=module)
        if saves_relu:
            region.save(x)
    region.save(weight)
    return facts.build()


def page_of(facts: GraphFacts, budget: int | None = 1_500_000_000, **changes: Any) -> Page:
    plan = make_plan(facts, budget=budget, min_bytes=0)
    has_times = facts.device == "cuda"
    drawn = [Drawn(False, charted(facts, ()), has_times)]
    if plan.transfers:
        drawn.append(Drawn(True, charted(facts, plan.transfers), has_times))
    return Page(**{"plan": plan, "drawn": tuple(drawn), **changes})


def charted(facts: GraphFacts, transfers: Any) -> Chart:
    return chart(facts, transfers, Conditions(), profile_for("h200"))


def curve_of(facts: GraphFacts) -> Any:
    return Outlooks(facts, Draft(facts, "whole-storage", 0).moves, Aim()).curve(5)


PLANNED = page_of(layered(), curve=curve_of(layered()))


def again(plan: Plan) -> Plan:
    """``plan`` with a storage that is computed again, as the list shows it."""
    storage = Recomputed(
        region=0,
        size_bytes=1000,
        name="gelu",
        op="aten.gelu.default",
        module="layers.7.mlp",
        source="model.py:70",
        dtype="float32",
        shape=(250,),
        ops=(1,),
        recompute_us=4,
        inputs=("up_0",),
    )
    return msgspec.structs.replace(plan, recomputed=(storage,), recompute_us=4)


def measured_of(plan: Plan, **changes: Any) -> Measurement:
    """What a run of ``plan`` could have found: no plan as in other tests, the plan at its peak."""
    arm = plan_arm(expected=expected(plan), planned=planned(plan))
    same = {"digest": plan.digest, "rules": plan.rules, "budget": plan.budget}
    return msgspec.structs.replace(measurement(no_plan(), arm), **{**same, **changes})


# --- the file -------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_may_fetch_nothing() -> None:
    html = render_page(PLANNED)
    assert not re.search(r"<[^>]*\b(src|href|action)\s*=\s*[\"']?(?!data:,)\w", html)
    assert "@import" not in html
    assert "url(" not in html
    # Its policy allows what is in it, and nothing else.
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{found}'"


def test_the_same_plan_gives_the_same_page() -> None:
    assert render_page(page_of(layered())) == render_page(page_of(layered()))


def test_texts_of_a_model_never_become_markup() -> None:
    html = render_page(page_of(layered(HOSTILE)))
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert "\u2028" not in html


def test_a_peak_or_a_step_of_nothing_has_not_changed_by_a_share_of_it() -> None:
    predicted = PLANNED.plan.predicted
    none = PredictedTime(no_plan_us=0, step_us=0, forward_us=0, stalled_us=0, least_us=0)
    no_plan = msgspec.structs.replace(predicted.no_plan, peak_bytes=0)
    predicted = msgspec.structs.replace(predicted, no_plan=no_plan, time=none)
    html = render_page(Page(msgspec.structs.replace(PLANNED.plan, predicted=predicted)))
    assert "<span>from 0 B</span>" in html
    assert "<span>from 0.0 ms</span>" in html


def test_what_is_embedded_reads_back_as_it_was() -> None:
    text = json.dumps({"a": HOSTILE}, ensure_ascii=False).encode()
    safe = script_safe(text)
    assert json.loads(safe) == {"a": HOSTILE}
    assert not re.search(rb"[<>&]|\xe2\x80[\xa8\xa9]", safe)


@pytest.mark.parametrize("place", [0, 1])
def test_spans_of_the_page_add_up_to_the_chart(place: int) -> None:
    found = json.loads(embedded(PLANNED.plan, PLANNED.drawn))
    panel, drawn = found["panels"][place], PLANNED.drawn[place].chart
    count = len(drawn.spans.ops)
    stacked = [[resting] * count for resting in panel["resting"]]
    for size, first, length, part, _, leaves, _ in zip(*panel["spans"], strict=True):
        for moment in range(first, first + length + 1):
            is_gone = leaves >= 0 and moment >= first + leaves
            held = STACK.index("in_flight") if is_gone else part
            stacked[held][moment] += found["sizes"][size]
    for moment, size in zip(*panel["temporary"], strict=True):
        stacked[STACK.index("workspace")][moment] += found["sizes"][size]
    assert {part: tuple(stacked[i]) for i, part in enumerate(STACK)} == {
        part: drawn.stacked[part] for part in STACK
    }
    assert found["parts"] == [PART_WORDS[part] for part in STACK]
    starts = [0, *accumulate(panel["starts"])]
    assert starts == [round(1e6 * start) for start in drawn.starts_ms]
    assert tuple(accumulate(panel["moments"])) == drawn.spans.ops


def test_storages_are_named_alike_whether_or_not_others_are_computed_again() -> None:
    """Choices make other graphs, in which the same storages have other numbers."""
    facts = layered(saves_relu=True)
    aim = Aim(budget=FLOOR, actions=("keep", "recompute"))
    plan = decide(facts, "whole-storage", 0, aim.budget, aim)
    assert plan.recomputed
    again = relowered(facts, plan.choices)
    drawn = (
        Drawn(False, charted(facts, ()), True),
        Drawn(True, charted(again, plan.transfers), True),
    )
    found = json.loads(embedded(plan, drawn))
    texts = found["strings"]
    # Inputs are always there, and have no span.
    named: list[set[str]] = []
    for panel in found["panels"]:
        named.append(set())
        for _, _, _, _, maker, _, row in zip(*panel["spans"], strict=True):
            if row >= 0:
                name = texts[panel["ops"][0][maker]]
                assert texts[found["storages"][row][3]] == name
                named[-1].add(name)
    assert named[0] >= {each.name for each in (*plan.storages, *plan.recomputed)} - {"weight", "x"}
    assert named[1] >= {each.name for each in plan.storages} - {"weight", "x"}


def test_each_copy_is_drawn_when_it_crosses_the_link() -> None:
    found = json.loads(embedded(PLANNED.plan, PLANNED.drawn))
    copies = [*zip(*found["panels"][1]["copies"], strict=True)]
    played = PLANNED.drawn[1].chart.played.copies
    assert len(copies) == len(played) > 0
    for (begin, length, way, size, row, *_), copy in zip(copies, played, strict=True):
        transfer = PLANNED.plan.transfers[copy.transfer]
        assert (begin, begin + length) == (round(1e6 * copy.begin_ms), round(1e6 * copy.end_ms))
        assert ("host", "device")[way] == copy.to
        assert found["sizes"][size] == transfer.transfer_bytes
        assert PLANNED.plan.storages[row].id == transfer.storage


def test_a_device_without_a_profile_has_ops_for_time() -> None:
    page = page_of(layered(device="cpu"))
    found = json.loads(embedded(page.plan, page.drawn))
    assert [panel["times"] for panel in found["panels"]] == [False, False]
    assert set(found["panels"][1]["starts"]) == {1}
    begin, length, way, *_ = next(zip(*found["panels"][1]["copies"], strict=True))
    first = page.plan.transfers[0]
    assert (begin, begin + length, way) == (first.offload_after + 1, first.release_by + 1, 0)


def test_without_graphs_the_page_says_how_to_get_its_timeline() -> None:
    note = "the graphs are not here: offplan analyze model.py --graph FILE.graph.json keeps them"
    html = render_page(Page(PLANNED.plan, notes=(note,)))
    assert 'id="chart"' not in html
    assert note in html
    # The storages and the ledger are the plan's own.
    assert 'id="rows"' in html
    assert 'id="ledger"' in html


def test_predicted_stands_beside_measured() -> None:
    plan = PLANNED.plan
    html = render_page(Page(plan, measured=measured_of(plan)))
    section = html[html.index('id="measured"') : html.index('id="predicted"')]
    cells = re.findall(r"<tr>(.*?)</tr>", section)
    rows = [tuple(re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", cell)) for cell in cells]
    assert rows[0] == ("", "", "predicted", "measured", "error")
    named = {row[:2]: row[2:] for row in rows}
    peak = plan.predicted.plan.peak_bytes
    measured_bytes = 47_900_000_000 - 26_300_000_000
    off = f"{100 * (measured_bytes / peak - 1):+.2f}%"
    assert named["plan", "peak allocated"] == (format_size(peak), "21.60 GB", off)
    assert named["no plan", "peak allocated"][1] == "47.90 GB"
    moved = format_size(sum(transfer.transfer_bytes for transfer in plan.transfers))
    assert named["", "moved back"][:2] == (moved, "26.30 GB")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "sha256:" + 64 * "0"}, "of other graphs than the plan"),
        ({"budget": 5}, "a budget of 5 bytes, this one has"),
        ({"rules": "no-view"}, "with rules no-view"),
    ],
)
def test_a_measurement_of_another_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        render_page(Page(PLANNED.plan, measured=measured_of(PLANNED.plan, **changes)))


def test_the_curve_marks_the_budget_and_the_plan() -> None:
    html = render_page(PLANNED)
    drawing = html[html.index('<svg class="curve"') : html.index("</svg>")]
    assert drawing.count('class="point"') == len(PLANNED.curve) == 5
    assert f"<title>budget {format_size(1_500_000_000)}</title>" in drawing
    assert f"this plan: {format_size(PLANNED.plan.predicted.plan.peak_bytes)}" in drawing
    # Without a curve there is none, and it is said how to have one.
    assert "offplan report --budgets" in render_page(page_of(layered()))


def test_the_page_is_made_without_torch() -> None:
    program = "import sys, offplan.report.page; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a plan and its graphs, and nothing kept elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFPLAN_CACHE", "off")
    write_plan(tmp_path / "model.plan.yaml", PLANNED.plan)
    (tmp_path / "model.graph.json").write_bytes(save_graph(layered()))
    return tmp_path


def ran(*words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words])


def test_the_command_writes_the_page_of_a_plan_and_its_graphs(folder: Path) -> None:
    done = ran("model.plan.yaml", "-o", "page.html")
    assert (done.exit_code, done.stdout) == (0, "")
    html = (folder / "page.html").read_text()
    assert done.stderr == f"wrote page.html ({format_size(len(html.encode()))})\n"
    # Few budgets of a small step are drawn without being asked for.
    assert 'id="chart"' in html
    assert '<svg class="curve"' in html
    # It may be written again, but over nothing else.
    assert ran("model.plan.yaml", "-o", "page.html").exit_code == 0
    refused = ran("model.plan.yaml", "-o", "model.graph.json")
    assert (refused.exit_code, "left as it is" in refused.stderr) == (1, True)


def test_the_command_does_without_graphs_and_refuses_those_of_another_plan(folder: Path) -> None:
    (folder / "model.graph.json").unlink()
    assert ran("model.plan.yaml").exit_code == 0
    html = (folder / "offplan.report.html").read_text()
    assert 'id="chart"' not in html
    assert "keeps them" in html
    other = folder / "other.graph.json"
    other.write_bytes(save_graph(layered(device="cpu")))
    refused = ran("model.plan.yaml", "--graph", str(other))
    assert (refused.exit_code, "has other graphs than" in refused.stderr) == (1, True)


def test_the_command_shows_a_measurement_of_the_plan_and_refuses_another(folder: Path) -> None:
    measured = folder / "measured.json"
    write_measurement(measured, measured_of(PLANNED.plan))
    assert ran("model.plan.yaml", "measured.json", "-o", "page.html").exit_code == 0
    assert 'id="measured"' in (folder / "page.html").read_text()
    write_measurement(measured, measured_of(PLANNED.plan, digest="sha256:0"))
    refused = ran("model.plan.yaml", "measured.json", "-o", "new.html")
    assert (refused.exit_code, "of other graphs" in refused.stderr) == (1, True)
    assert not (folder / "new.html").exists()


def test_a_page_on_stdout_is_refused(folder: Path) -> None:
    assert ran("model.plan.yaml", "-o", "-").exit_code == 2


# --- colours --------------------------------------------------------------------------------------


def palettes() -> dict[str, dict[str, str]]:
    """Colours by theme and name, as the style has them."""
    style = (ASSETS / "page.css").read_text()
    blocks = [block for block in re.findall(r"\{([^{}]*)\}", style) if "--back:" in block]
    found = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks]
    assert len(found) == 3
    # Dark by the system's choice and by the reader's are the same.
    assert found[1] == found[2]
    return {"light": found[0], "dark": found[1]}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neighbours_of_the_stack_and_the_background_are_three_to_one_apart(theme: str) -> None:
    colours = palettes()[theme]
    for part in STACK:
        assert contrast(colours[part], colours["back"]) >= 3, part
    for lower, upper in pairwise(STACK):
        assert contrast(colours[lower], colours[upper]) >= 3, (lower, upper)
    for text in ("text", "soft", "accent", "warn"):
        for behind in ("back", "raised"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("needs Chromium")
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def shown(browser: Browser, pages: Path, page: Page, **size: int) -> Tab:
    path = pages / "report.html"
    path.write_text(render_page(page))
    return browser.open(path, **size)


@pytest.fixture
def tab(browser: Browser, pages: Path) -> Iterator[Tab]:
    """The page of ``PLANNED``; whatever a test does to it, nothing fails or is fetched."""
    page = changed(PLANNED, plan=again(PLANNED.plan))
    found = shown(browser, pages, page)
    yield found
    check_quiet(found)


def changed(page: Page, **changes: Any) -> Page:
    fields = {name: getattr(page, name) for name in ("plan", "drawn", "measured", "curve", "notes")}
    return Page(**{**fields, **changes})


def check_quiet(tab: Tab) -> None:
    loud = tab.events("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert loud == []
    asked = [event["request"]["url"] for event in tab.events("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in asked) == 1


def shape(tab: Tab) -> dict[str, Any]:
    """Where the timeline is drawn, and how."""
    tab.evaluate("document.getElementById('chart').scrollIntoView({block: 'center'})")
    return dict(
        tab.evaluate(
            """(() => {
              const box = document.getElementById("chart").getBoundingClientRect();
              return { ...offplan.timeline.shape(), ...offplan.timeline.view(), x: box.left,
                y: box.top, ceiling: offplan.timeline.ceiling };
            })()"""
        )
    )


def spot(tab: Tab, panel: int, op: int, height_bytes: float) -> tuple[float, float]:
    """Where op ``op`` of a panel is drawn, at a number of bytes."""
    found = shape(tab)
    starts = PLANNED.drawn[panel].chart.starts_ms
    middle = 1e6 * (starts[op] + starts[op + 1]) / 2
    across = (middle - found["from"]) / (found["to"] - found["from"])
    y = found["y"] + found["tops"][panel] + found["high"] * (1 - height_bytes / found["ceiling"])
    return found["x"] + found["left"] + across * found["plot"], y


def first_names(tab: Tab, count: int = 4) -> list[str]:
    """What the list shows, from its top."""
    rows = "[...document.querySelectorAll('#rows tr.row')]"
    return list(tab.evaluate(f"{rows}.map(r => r.cells[2].innerText).slice(0, {count})"))


def test_the_browser_adds_up_and_writes_sizes_as_offplan_does(tab: Tab) -> None:
    tops = tab.evaluate("offplan.timeline.panels.map(p => Array.from(p.totals))")
    assert [tuple(map(int, top)) for top in tops] == [each.chart.totals for each in PLANNED.drawn]
    sizes = [0, 1, 999, 999_994, 999_995, 5 * 1024**2, 999_995_000, 123_456_789_012, 10**13]
    assert tab.evaluate(f"{sizes}.map(offplan.size)") == [format_size(size) for size in sizes]


def test_hovering_names_the_op_the_storage_and_their_source_lines(tab: Tab) -> None:
    # The first layer's product is held at the second's, above the weight and the input.
    above = PLANNED.drawn[0].chart.spans.resting["parameters"]
    above += PLANNED.drawn[0].chart.spans.resting["inputs"] + STORAGE_BYTES / 2
    tab.move(*spot(tab, 0, 3, above))
    said = tab.text("#tip")
    assert "no plan: " in said
    assert "aten.mm.default in layers.1.mlp (model.py:11)" in said
    assert f"op 3 of {len(PLANNED.drawn[0].chart.ops)}, forward" in said
    assert "saved activations: " in said
    assert "up_0, 268.44 MB: aten.mm.default in layers.0.mlp (model.py:10)" in said
    # The table beside it has both panels' bytes at that time.
    assert "At " in tab.text("#legend caption")
    tab.move(2, 2)
    assert tab.evaluate("document.getElementById('tip').hidden") is True
    assert tab.text("#legend caption") == "At the peaks"


def test_a_lane_names_the_copy_and_its_storage(tab: Tab) -> None:
    copy = next(c for c in PLANNED.drawn[1].chart.played.copies if c.to == "device")
    found = shape(tab)
    middle = 1e6 * (copy.begin_ms + copy.end_ms) / 2
    x = found["x"] + found["left"]
    x += (middle - found["from"]) / (found["to"] - found["from"]) * found["plot"]
    tab.move(x, found["y"] + found["lanesTop"] + 22 + 9)
    transfer = PLANNED.plan.transfers[copy.transfer]
    entry = next(each for each in PLANNED.plan.storages if each.id == transfer.storage)
    said = tab.text("#tip")
    assert f"to device: {format_size(transfer.transfer_bytes)}" in said
    assert f"{entry.name}: {entry.op} in {entry.module} ({entry.source})" in said
    assert f"needed by op {transfer.needed_by}" in said


def test_clicking_pins_and_escape_lets_go(tab: Tab) -> None:
    tab.click(*spot(tab, 1, 2, 1e8))
    pinned = tab.text("#tip")
    tab.move(*spot(tab, 1, 9, 1e8))
    assert tab.text("#tip") == pinned
    assert tab.evaluate("document.getElementById('tip').classList.contains('pinned')") is True
    tab.evaluate("document.getElementById('chart').focus()")
    tab.press("Escape")
    assert tab.evaluate("document.getElementById('tip').hidden") is True


def op_in(tab: Tab) -> int:
    """The op that is pointed to."""
    found = re.search(r"op (\d+) of", tab.text("#tip"))
    assert found is not None
    return int(found[1])


def test_keys_move_zoom_and_speak(tab: Tab) -> None:
    whole = tab.evaluate("offplan.timeline.view()")
    tab.evaluate("document.getElementById('chart').focus()")
    tab.press("p")
    peak = PLANNED.plan.predicted.plan.op
    assert op_in(tab) == peak
    # Ops that share a pixel are passed over.
    tab.press("ArrowRight")
    assert op_in(tab) > peak
    tab.press("ArrowLeft", times=2)
    assert op_in(tab) < peak
    assert tab.text("#spoken").startswith("plan: ")
    tab.press("ArrowUp")
    assert tab.text("#tip").startswith("no plan: ")
    tab.press("+", times=3)
    zoomed = tab.evaluate("offplan.timeline.view()")
    assert zoomed["to"] - zoomed["from"] == pytest.approx(0.6**3 * whole["to"])
    tab.press("Home")
    assert tab.evaluate("offplan.timeline.view()")["from"] == 0
    tab.press("-", times=9)
    assert tab.evaluate("offplan.timeline.view()") == whole
    tab.press("+")
    tab.press("0")
    assert tab.evaluate("offplan.timeline.view()") == whole


def test_dragging_and_the_wheel_move_and_zoom(tab: Tab) -> None:
    found = shape(tab)
    start = (found["x"] + found["left"] + 200, found["y"] + found["tops"][0] + 40)
    end = (start[0] + 120, start[1])
    tab.drag(start, end, modifiers=SHIFT)
    length = found["to"] * 120 / found["plot"]
    view = tab.evaluate("offplan.timeline.view()")
    assert view["to"] - view["from"] == pytest.approx(length, rel=0.02)
    tab.drag(start, end)
    moved = tab.evaluate("offplan.timeline.view()")
    assert moved["from"] == pytest.approx(view["from"] - length * 120 / found["plot"], rel=0.02)
    # The page scrolls under the wheel until the chart has the focus.
    tab.evaluate("document.activeElement.blur()")
    tab.mouse("mouseWheel", *start, deltaX=0, deltaY=-100)
    tab.settle()
    assert tab.evaluate("offplan.timeline.view()") == moved
    tab.evaluate("document.getElementById('chart').focus({preventScroll: true})")
    start = (shape(tab)["x"] + 300, shape(tab)["y"] + 80)
    tab.mouse("mouseWheel", *start, deltaX=0, deltaY=-100)
    tab.wait(lambda: tab.evaluate("offplan.timeline.view()") != moved)
    nearer = tab.evaluate("offplan.timeline.view()")
    assert nearer["to"] - nearer["from"] < moved["to"] - moved["from"]


def test_ops_can_be_the_axis(tab: Tab) -> None:
    tab.evaluate("document.getElementById('by-op').click()")
    assert tab.evaluate("offplan.timeline.view()") == {
        "from": 0,
        "to": len(PLANNED.drawn[0].chart.ops),
    }
    assert tab.evaluate("document.getElementById('by-op').ariaPressed") == "true"


def test_each_column_sorts_both_ways(tab: Tab) -> None:
    heads = tab.evaluate(
        "[...document.querySelectorAll('#rows thead button')].map(b => b.dataset.key)"
    )
    assert len(heads) == 7
    for column, key in enumerate(heads):
        for order in ("descending", "ascending") if key == "bytes" else ("ascending", "descending"):
            # The list begins with the largest first, so that a click there turns it round.
            head = f"document.querySelector('#rows thead [data-key={key}]')"
            if tab.evaluate(f"{head}.parentNode.ariaSort") != order:
                tab.evaluate(f"{head}.click()")
            assert tab.evaluate(f"{head}.parentNode.ariaSort") == order
            rows = "[...document.querySelectorAll('#rows tr.row')]"
            found = tab.evaluate(f"{rows}.map(r => r.cells[{column}].innerText)")
            assert len(found) == LAYERS + 2
            keyed = [sort_key(key, cell) for cell in found]
            assert keyed == sorted(keyed, reverse=order == "descending"), key


def sort_key(key: str, cell: str) -> Any:
    if key == "bytes":
        number, unit = cell.lstrip("▸").split()
        return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    # Numbers in texts are compared as such, and capitals with their letters.
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", cell.lower())]


def test_the_list_is_filtered_by_text_and_by_action(tab: Tab) -> None:
    moved = [entry for entry in PLANNED.plan.storages if entry.action == "offload"]
    tab.evaluate("document.getElementById('action').value = 'offload'")
    tab.evaluate("document.getElementById('action').dispatchEvent(new Event('change'))")
    assert sorted(first_names(tab, 99)) == sorted(entry.name for entry in moved)
    said = tab.text("#shown")
    assert said.startswith(f"{len(moved)} of {LAYERS + 2} storages, ")
    assert format_size(sum(entry.size_bytes for entry in moved)) in said
    tab.evaluate("document.getElementById('action').value = ''")
    tab.evaluate("document.getElementById('filter').focus()")
    tab.call("Input.insertText", text="layers.2 MODEL.py:12")
    assert first_names(tab) == ["up_2"]
    tab.call("Input.insertText", text="x")
    assert first_names(tab) == []


def test_a_row_opens_on_its_views_and_every_rule_sets_verdict(tab: Tab) -> None:
    tab.evaluate("document.getElementById('filter').value = 'weight'")
    tab.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    tab.evaluate("document.querySelector('#rows tr.row button').click()")
    tab.settle()
    said = tab.text("#rows tr.more")
    assert "skipped under parameter, held by parameter weight" in said
    assert "float32[8192, 8192] stride (8192, 1)" in said
    assert [rules in said for rules in ("no-view", "last-holder", "whole-storage")] == [True] * 3
    assert tab.evaluate("document.querySelector('#rows tr.row button').ariaExpanded") == "true"
    # What the backward computes again is in the list, too.
    tab.evaluate("document.getElementById('filter').value = 'gelu'")
    tab.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    tab.evaluate("document.querySelector('#rows tr.row button').click()")
    assert "computed from up_0; computing it again takes 0.00 ms" in tab.text("#rows tr.more")


def test_a_storage_is_found_on_the_timeline_from_the_list(tab: Tab) -> None:
    tab.evaluate("document.getElementById('filter').value = 'up_1'")
    tab.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    tab.evaluate("document.querySelector('#rows tr.row button').click()")
    tab.evaluate("document.querySelector('#rows tr.more button').click()")
    tab.settle()
    assert "aten.mm.default in layers.1.mlp (model.py:11)" in tab.text("#tip")
    assert tab.evaluate("document.activeElement.id") == "chart"


def test_thousands_of_storages_are_listed_without_drawing_them_all(
    browser: Browser, pages: Path
) -> None:
    plan = PLANNED.plan
    first = plan.storages[0]
    entries = tuple(
        msgspec.structs.replace(first, name=f"up_{i}", size_bytes=1000 + i) for i in range(MANY)
    )
    many = msgspec.structs.replace(plan, storages=entries)
    tab = shown(browser, pages, Page(many))
    drawn = "document.querySelectorAll('#rows tr.row').length"
    assert 10 < tab.evaluate(drawn) < 60
    assert first_names(tab, 1) == [f"up_{MANY - 1}"]
    tab.evaluate("document.querySelector('#rows thead [data-key=name]').click()")
    assert first_names(tab, 3) == ["up_0", "up_1", "up_2"]
    tab.evaluate("document.getElementById('rows').scrollTop = 1e9")
    tab.settle()
    assert 10 < tab.evaluate(drawn) < 60
    last = "[...document.querySelectorAll('#rows tr.row')].at(-1)"
    assert tab.evaluate(f"{last}.cells[2].innerText") == f"up_{MANY - 1}"
    assert tab.evaluate(f"{last}.ariaRowIndex") == str(MANY + 1)
    # A row that is opened there stays in place.
    tab.evaluate(f"{last}.querySelector('button').click()")
    tab.settle()
    assert tab.evaluate("document.querySelectorAll('#rows tr.more').length") == 1
    check_quiet(tab)


def test_hostile_texts_are_shown_as_texts(browser: Browser, pages: Path) -> None:
    tab = shown(browser, pages, page_of(layered(HOSTILE)))
    assert "<img src=x" in tab.text("h1")
    assert tab.evaluate("document.title").startswith("</script><img")
    check_quiet(tab)


def test_a_page_without_graphs_or_times_works(browser: Browser, pages: Path) -> None:
    tab = shown(browser, pages, Page(PLANNED.plan, notes=("how to get them",)))
    assert "how to get them" in tab.text("#timeline")
    assert len(first_names(tab, 99)) == LAYERS + 1
    check_quiet(tab)
    tab = shown(browser, pages, page_of(layered(device="cpu")))
    assert tab.evaluate("document.getElementById('by-time').disabled") is True
    tab.evaluate("document.getElementById('chart').focus()")
    tab.press("p")
    assert " ms" not in tab.text("#tip")
    check_quiet(tab)


@pytest.mark.parametrize("width", [360, 1920])
def test_nothing_is_wider_than_the_window(tab: Tab, width: int) -> None:
    tab.resize(width, 800)
    tab.settle()
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    drawn = tab.evaluate("document.getElementById('drawing').getBoundingClientRect().width")
    assert drawn == pytest.approx(shape(tab)["width"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_categories_are_to_be_seen_in_either_theme(tab: Tab, theme: str) -> None:
    tab.emulate(prefers_color_scheme=theme)
    shape(tab)
    tab.settle()
    check_shows(tab, tab.screenshot(), theme, "parameters inputs saved reloaded in_flight")
    # The button turns it round.
    tab.evaluate("document.getElementById('theme').click()")
    tab.settle()
    other = "dark" if theme == "light" else "light"
    check_shows(tab, tab.screenshot(), other, "parameters inputs saved reloaded in_flight")


def check_shows(tab: Tab, png: bytes, theme: str, parts: str) -> None:
    """Whether the background is most of a picture, and each of ``parts`` is in it."""
    colours = palettes()[theme]
    found = counted_colours(tab, png)
    assert max(found, key=lambda colour: found[colour]) == colours["back"]
    for part in parts.split():
        # More than a legend's swatch.
        assert found.get(colours[part], 0) > 300, part


def counted_colours(tab: Tab, png: bytes) -> dict[str, int]:
    """How many pixels of a picture have each colour, of those that are not rare: its page decodes
    it, as only its own pictures are let in."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return dict(
        tab.evaluate(
            f"""(async () => {{
              const picture = new Image();
              picture.src = "{url}";
              await picture.decode();
              const canvas = new OffscreenCanvas(picture.width, picture.height);
              const pen = canvas.getContext("2d");
              pen.drawImage(picture, 0, 0);
              const all = pen.getImageData(0, 0, canvas.width, canvas.height).data, counts = {{}};
              for (let i = 0; i < all.length; i += 4) {{
                const colour = all[i] << 16 | all[i + 1] << 8 | all[i + 2];
                counts[colour] = (counts[colour] || 0) + 1;
              }}
              return Object.fromEntries(Object.entries(counts).filter(([, n]) => n > 50)
                .map(([c, n]) => ["#" + Number(c).toString(16).padStart(6, "0"), n]));
            }})()"""
        )
    )


def test_paper_has_the_tables_in_light_colours_and_no_controls(tab: Tab) -> None:
    tab.emulate(prefers_color_scheme="dark")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("document.querySelectorAll('#rows tr.row').length") == LAYERS + 2
    hidden = "[...document.querySelectorAll('.controls, #theme, .keys')]"
    assert tab.evaluate(f"{hidden}.every(e => !e.getClientRects().length)") is True
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.emulate(prefers_color_scheme="dark")
    tab.call("Emulation.setEmulatedMedia", media="")
    assert tab.call("Page.printToPDF")["data"].startswith("JVBERi")


# --- docs -----------------------------------------------------------------------------------------


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each part of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    place = 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        content = png[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert check == zlib.crc32(kind + content)
        yield kind, content
        place += 12 + length


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_screenshots_in_the_docs_are_of_the_page(
    request: pytest.FixtureRequest, tmp_path: Path, theme: str
) -> None:
    path = SHOTS[theme]
    if os.environ.get(UPDATES) == "1":
        DOCS.mkdir(exist_ok=True)
        path.write_bytes(taken(request.getfixturevalue("browser"), tmp_path, theme))
    png = path.read_bytes()
    assert len(png) < 300_000
    width, height = struct.unpack(">II", next(chunks(png))[1][:8])
    assert (width, height) == (SHOT_WIDTH, SHOT_HEIGHT)


def test_the_screenshots_in_the_docs_show_every_category(tab: Tab) -> None:
    for theme, path in SHOTS.items():
        parts = "parameters saved gradients reloaded in_flight temporaries"
        check_shows(tab, path.read_bytes(), theme, parts)


def taken(browser: Browser, folder: Path, theme: str) -> bytes:
    """The top of the page of four layers of Qwen3-14B, with the pointer on a storage."""
    plan, page = folder / "qwen3.plan.yaml", folder / "qwen3.html"
    graph = folder / "qwen3.graph.json"
    offplan = [sys.executable, "-m", "offplan"]
    target = ["sample_graphs/qwen3_14b.py", "-p", "layers=4", "--budget", "65%"]
    files = ["-o", str(plan), "--graph", str(graph)]
    subprocess.run([*offplan, "analyze", *target, *files], cwd=ROOT, check=True)
    made = [*offplan, "report", str(plan), "--graph", str(graph), "-o", str(page)]
    subprocess.run(made, cwd=ROOT, check=True)
    tab = browser.open(page, SHOT_WIDTH, SHOT_HEIGHT)
    tab.emulate(prefers_color_scheme=theme)
    found = shape(tab)
    tab.evaluate("scrollTo(0, 0)")
    top = tab.evaluate("document.getElementById('chart').getBoundingClientRect().top")
    y = top + found["tops"][0] + found["high"] * 0.3
    tab.move(found["x"] + found["left"] + 0.42 * found["plot"], y)
    return tab.screenshot()
