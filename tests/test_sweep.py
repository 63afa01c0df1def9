"""Sweeps: values, points, the largest that fits, heat maps, and one for real."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from fused_steps import fused_step
from msgspec.structs import replace
from typer.testing import CliRunner

from offplan.budget import FLOOR, Aim, of_bytes
from offplan.cli import app
from offplan.errors import UsageError
from offplan.report.sweep import render_sweep
from offplan.retrace import read_files
from offplan.sweep import Axis, Point, Sweep, ascending, axes_of, combinations, key, largest, point
from offplan.workers import grid

BATCH = Axis("batch", tuple(map(str, range(1, 17))))
SEQ = Axis("seq", ("2048", "4096"))


def test_ranges_lists_and_plain_values() -> None:
    given = {"batch": "1..3", "seq": "2048,4096", "width": "8..64*2", "even": "2..6:2", "x": "a"}
    axes, fixed = axes_of(given)
    assert axes == (
        Axis("batch", ("1", "2", "3")),
        Axis("seq", ("2048", "4096")),
        Axis("width", ("8", "16", "32", "64")),
        Axis("even", ("2", "4", "6")),
    )
    assert fixed == {"x": "a"}
    assert axes_of({"batch": "1,4..8:4,4"})[0] == (Axis("batch", ("1", "4", "8")),)
    assert axes_of({"sizes": "[1,2]"}) == ((), {"sizes": "[1,2]"})


@pytest.mark.parametrize("text", ["4..1", "1..4:0", "1..4*1", "0..4*2", "1..100000"])
def test_a_range_without_values_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"\.\."):
        axes_of({"batch": text})


def test_combinations_change_the_last_axis_first() -> None:
    found = combinations((Axis("a", ("1", "2")), Axis("b", ("x", "y"))))
    assert [tuple(each.values()) for each in found] == [
        ("1", "x"),
        ("1", "y"),
        ("2", "x"),
        ("2", "y"),
    ]


@pytest.mark.parametrize("fitting", range(17))
def test_bisection_finds_the_largest_that_fits(fitting: int) -> None:
    def look(value: str) -> Point:
        return Point({"batch": value}, "fits" if int(value) <= fitting else "does not fit")

    value, is_monotone, seen = largest(BATCH, look)
    assert value == (str(fitting) if fitting else None)
    assert is_monotone
    # What was found, and the next one, were looked at.
    looked = {int(each.params["batch"]) for each in seen}
    assert {fitting, fitting + 1} & set(range(1, 17)) <= looked
    assert len(seen) <= 5


def test_a_line_that_is_not_monotone_says_so() -> None:
    def found(sizes: dict[str, int]) -> tuple[str | None, bool]:
        def look(value: str) -> Point:
            size = sizes.get(value, int(value))
            return Point({"batch": value}, "fits" if size <= 9 else "does not fit", None, size)

        value, is_monotone, _ = largest(BATCH, look)
        assert value is None or look(value).does_fit
        return value, is_monotone

    assert found({}) == ("9", True)
    # Of 16, 8, 4 and so on, 8 needs more than 16.
    assert found({"8": 20}) == ("7", False)
    assert found({"4": 9, "8": 8}) == ("9", True)


def test_an_axis_of_words_has_no_largest() -> None:
    assert ascending(Axis("batch", ("16", "2"))).values == ("2", "16")
    with pytest.raises(UsageError, match="not all numbers"):
        ascending(Axis("attention", ("sdpa", "eager")))


def test_points_fit_as_they_are_with_a_plan_or_not() -> None:
    facts = fused_step()

    def at(aim: Aim) -> Point:
        return point({"batch": "4"}, facts, "whole-storage", 1, aim, None)

    free = at(Aim())
    assert free.outcome == "predicted"
    top = free.no_plan_bytes
    assert top is not None
    floor = at(Aim(budget=FLOOR))
    assert floor.outcome == "fits with a plan"
    assert floor.peak_bytes is not None
    assert floor.peak_bytes < top
    assert floor.moved_bytes > 0
    assert at(Aim(budget=of_bytes(2 * top))).outcome == "fits"
    small = at(Aim(budget=of_bytes(1000)))
    assert small.outcome == "does not fit"
    assert small.floor_bytes == floor.peak_bytes
    assert small.budget_bytes == 1000
    assert floor.sample_ms == pytest.approx(floor.step_ms / 4 if floor.step_ms else None)


def test_a_key_has_all_that_a_point_depends_on() -> None:
    facts = fused_step()
    keys = {
        key(facts, "whole-storage", 1, Aim()),
        key(facts, "no-view", 1, Aim()),
        key(facts, "whole-storage", 2, Aim()),
        key(facts, "whole-storage", 1, Aim(budget=FLOOR)),
        key(facts, "whole-storage", 1, Aim(host_bytes=1)),
        key(facts, "whole-storage", 1, Aim(op_ms={"a": 1.0})),
        key(facts, "whole-storage", 1, Aim(actions=("keep",))),
        # The same graphs, in another time and with other workspaces.
        key(replace(facts, gpu="NVIDIA A100-SXM4-80GB"), "whole-storage", 1, Aim()),
    }
    assert len(keys) == 8


def test_a_grid_is_in_the_order_of_its_axes() -> None:
    def look(params: dict[str, str]) -> Point:
        return Point(params, "fits")

    axes = (Axis("batch", ("1", "2")), SEQ)
    assert [each.params for each in grid(axes, look, 2)] == combinations(axes)


@pytest.fixture
def swept() -> Sweep:
    def at(batch: str, seq: str, outcome: str, step_ms: float | None, message: str = "") -> Point:
        peak = 10**9 * int(batch)
        return Point(
            {"batch": batch, "seq": seq},
            outcome,  # type: ignore[arg-type]
            no_plan_bytes=peak,
            floor_bytes=peak // 2,
            peak_bytes=peak,
            step_ms=step_ms,
            message=message,
        )

    points = (
        at("1", "2048", "fits", 12.25),
        at("1", "4096", "fits with a plan", 250.4),
        at("2", "2048", "does not fit", None),
        at("2", "4096", "failed", None, "model.py:3: no such size"),
    )
    return Sweep("model.py", (Axis("batch", ("1", "2")), SEQ), "80GiB", points)


def test_a_heat_map_reads_without_colours(swept: Sweep) -> None:
    text = render_sweep(swept)
    assert "12.2 ms" in text
    assert "250 ms*" in text
    assert "no, 1.00 GB" in text
    assert "model.py:3: no such size" in text
    assert "\x1b[" not in text


def test_colours_are_there_where_they_are_wanted(swept: Sweep) -> None:
    assert "\x1b[" in render_sweep(swept, color=True)


def test_csv_and_json_have_every_point(swept: Sweep) -> None:
    rows = list(csv.DictReader(io.StringIO(render_sweep(swept, "csv"))))
    assert [row["outcome"] for row in rows] == [each.outcome for each in swept.points]
    assert rows[0]["step_ms"] == "12.25"
    assert rows[0]["sample_ms"] == "12.25"
    assert msgspec.json.decode(render_sweep(swept, "json"), type=Sweep) == swept
    assert "| 2 | 4096 | failed |" in render_sweep(swept, "markdown")


def test_installed_packages_are_not_the_users_files(tmp_path: Path) -> None:
    data = tmp_path / "sizes.txt"
    data.write_text("8")
    found = read_files({str(data), pytest.__file__, json.__file__, "/proc/meminfo", "gone"})
    assert data in found
    assert Path(__file__) in found
    assert not any("site-packages" in str(path) for path in found)
    assert Path(json.__file__) not in found


TARGET = """
from pathlib import Path
from torch import nn, randn

def build(batch: int = 2):
    width = int((Path(__file__).parent / "width.txt").read_text())
    if batch == 7:
        raise ValueError("seven is odd")
    return nn.Sequential(nn.Linear(width, width), nn.GELU()), (randn(batch, width),)
"""


def test_a_sweep_for_real_goes_on_from_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TARGET)
    (tmp_path / "width.txt").write_text("64")
    words = ["sweep", "model.py", "-p", "batch=2,7", "--device", "cpu", "--jobs", "1"]
    runner = CliRunner()
    first = runner.invoke(app, [*words, "--format", "json"])
    assert first.exit_code == 0, first.output
    two, seven = json.loads(first.stdout)["points"]
    assert (two["outcome"], seven["outcome"]) == ("predicted", "failed")
    assert "seven is odd" in seven["message"]
    traces = list((tmp_path / "cache" / "traces").iterdir())
    assert len(traces) == 1
    # The file that the target reads is one of what the trace depends on.
    assert "width.txt" in traces[0].read_text()
    assert len(list((tmp_path / "cache" / "results").iterdir())) == 1


HARSH = """
import os
from torch import nn, randn

def build(batch: int = 2):
    print("built", batch)
    if batch == 3:
        os.kill(os.getpid(), 9)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    if batch == 4:
        model.register_forward_pre_hook(lambda *given: exit(5))
    return model, (randn(batch, 8),)
"""


def test_a_model_that_prints_exits_or_is_killed_leaves_the_other_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(HARSH)
    words = ["model.py", "-p", "batch=2..5", "--device", "cpu", "--jobs", "1", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "offplan", "sweep", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    outcomes = [each["outcome"] for each in points]
    assert outcomes == ["predicted", "failed", "failed", "predicted"]
    assert "was killed" in points[1]["message"]


def test_an_interrupted_sweep_leaves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(task: object, jobs: int, on_done: Callable[[Point], None]) -> Iterator[object]:
        on_done(Point({"batch": "2"}, "predicted"))
        on_done(Point({"batch": "1"}, "predicted"))
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("offplan.commands.sweep.workers", interrupted)
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "model.py", "-p", "batch=1..9", "-o", "out.json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert "2 points done" in result.stderr
    written = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Sweep)
    assert [each.params["batch"] for each in written.points] == ["1", "2"]


def test_nothing_to_sweep_over_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["sweep", "model.py", "-p", "batch=1"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["sweep", "model.py", "-p", "batch=1,2", "--largest", "batch"])
    assert result.exit_code == 2
    assert "--budget" in result.output
