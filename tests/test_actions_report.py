"""What people read of keep, recompute and offload: what was done, at what price, and the curve."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from facts_builder import MiB
from test_peak_report import GB, point
from test_plan import chain
from test_plan_actions import plan_of, recomputed

from offplan.budget import JointPoint
from offplan.plan import Plan, Prices, make_plan
from offplan.report import analyze_report, render_analyze
from offplan.report.document import to_text
from offplan.report.peak import Asked, Moved, joint_blocks, predicted_blocks

replace = msgspec.structs.replace
BYTES = 8 * MiB


def text_of(plan: Plan, top: int = 12) -> str:
    return render_analyze(analyze_report(plan, top=top), "text", 80)


def with_prices(plan: Plan, *prices: Prices) -> Plan:
    entries = zip(plan.storages, prices, strict=True)
    return replace(plan, storages=tuple(replace(entry, prices=each) for entry, each in entries))


def section(text: str, heading: str) -> str:
    """What stands under ``heading``."""
    return text.partition(f"\n{heading}\n")[2].partition("\n\n")[0]


# --- what is saved --------------------------------------------------------------------------------


def test_a_storage_has_its_reason_and_the_price_of_the_two_actions_not_taken() -> None:
    plan = make_plan(chain(2), budget=0)
    kept, moved = plan.storages
    plan = replace(plan, storages=(replace(kept, action="keep"), moved))
    cheap = Prices(recompute_us=120, link_us=1_500, reason="frees nothing at the peak")
    never = Prices(recompute_why="it draws random numbers", link_us=1_500)
    text = text_of(with_prices(plan, cheap, never))
    assert section(text, "Largest saved activations").splitlines() == [
        "  8.39 MB  keep",
        "           float32[2048, 1024] from aten.relu.default (model.py:1)",
        "           frees nothing at the peak",
        "           instead: recompute 0.12 ms, offload 1.50 ms each way",
        "  8.39 MB  offload",
        "           float32[2048, 1024] from aten.relu.default (model.py:1)",
        "           instead: keep 8.39 MB",
        "           cannot be recomputed: it draws random numbers",
    ]


def test_layers_with_the_same_prices_are_one_row_and_others_are_not() -> None:
    plan = make_plan(chain(3))
    cheap, dear = Prices(recompute_us=120), Prices(recompute_us=900)
    rows = analyze_report(with_prices(plan, cheap, dear, cheap)).largest
    assert [(row.count, row.prices) for row in rows] == [(2, cheap), (1, dear)]


def test_a_plan_for_which_nothing_was_weighed_shows_no_prices() -> None:
    text = text_of(make_plan(chain(), budget=0))
    assert "8.39 MB, offload\n" in text
    assert "instead" not in text


# --- what is computed again -----------------------------------------------------------------------

AGAIN = """\
  16.78 MB  2 x 8.39 MB, recompute, 0.01 ms each
            float32[2048, 1024] from aten.relu.default in layers.1-2
              (model.py:1)
            reads relu_0-1
            the cheapest
            instead: keep 8.39 MB, offload 0.16 ms each way"""


def layered(plan: Plan, *places: int) -> Plan:
    found = tuple(replace(recomputed(place), module=f"layers.{place}") for place in places)
    return replace(plan, recomputed=found)


def test_what_is_computed_again_reads_so_folded_over_layers() -> None:
    plan = layered(plan_of(chain(), 1, 2), 1, 2)
    assert section(text_of(plan), "Largest that the backward computes again") == AGAIN


def test_rows_of_what_is_computed_again_beyond_the_largest_are_counted() -> None:
    larger = replace(recomputed(1), size_bytes=2 * BYTES)
    plan = replace(plan_of(chain(), 1, 2), recomputed=(recomputed(2), larger))
    report = analyze_report(plan, top=1)
    assert [row.size_bytes for row in report.recomputed] == [2 * BYTES]
    assert "8.39 MB  in 1 more rows (--top shows more)" in text_of(plan, top=1)
    assert "instead: keep 16.78 MB, offload 0.16 ms each way" in text_of(plan, top=1)


def test_without_a_link_only_keeping_is_the_alternative() -> None:
    plan = plan_of(chain(), 1)
    plan = replace(plan, recomputed=(replace(recomputed(1), link_us=None, inputs=(), reason=""),))
    assert section(text_of(plan), "Largest that the backward computes again").splitlines() == [
        "  8.39 MB  recompute, 0.01 ms",
        "           float32[2048, 1024] from aten.relu.default (model.py:1)",
        "           instead: keep 8.39 MB",
    ]


# --- totals ---------------------------------------------------------------------------------------

TOTALS = """\
  action     storages     bytes  time
  keep              1   8.39 MB
  recompute         2  16.78 MB  0.01 ms computed again
  offload           1   8.39 MB  0.16 ms copied, each way"""


def test_totals_have_counts_bytes_and_time_of_each_action() -> None:
    plan = make_plan(chain(2), budget=0)
    kept, moved = plan.storages
    entries = (replace(kept, action="keep"), replace(moved, prices=Prices(link_us=160)))
    again = (recomputed(1), recomputed(2))
    plan = replace(plan, storages=entries, moved_bytes=BYTES, recomputed=again, recompute_us=12)
    title = "Keep, recompute, offload: what is done with the rest"
    assert section(text_of(plan), title) == TOTALS
    document = json.loads(render_analyze(analyze_report(plan), "json"))
    assert document["actions"] == ["keep", "offload"]
    assert document["taken"] == [
        {"action": "keep", "storages": 1, "storage_bytes": BYTES, "time_us": None},
        {"action": "recompute", "storages": 2, "storage_bytes": 2 * BYTES, "time_us": 12},
        {"action": "offload", "storages": 1, "storage_bytes": BYTES, "time_us": 160},
    ]
    assert [row["count"] for row in document["recomputed"]] == [2]


def test_of_a_plan_that_keeps_all_there_are_no_totals_to_read() -> None:
    assert "Keep, recompute, offload" not in text_of(make_plan(chain()))


def test_a_plan_that_only_recomputes_is_set_beside_no_plan() -> None:
    plan = plan_of(chain(), 1, 2)
    assert not plan.transfers
    moved = Moved(0, 0, 0, recomputed=2, recompute_us=3_200)
    asked = Asked(plan.budget, plan.asked)
    text = to_text(predicted_blocks(plan.predicted, asked, moved), 80)
    assert "\n  computed again              3.2 ms\n" in text
    assert "\n  plan     recomputes 2 storages, at no cost\n" in text
    assert "moved" not in text
    both = to_text(predicted_blocks(plan.predicted, asked, moved._replace(storages=1)), 80)
    assert "recomputes 2 storages and offloads 1 storage, at no cost" in both


# --- the curve ------------------------------------------------------------------------------------


def joint(
    limit_gb: float, times_ms: Sequence[float | None], rates: tuple[float | None, float | None]
) -> JointPoint:
    name = {47.9: "no plan", 20.0: "floor"}.get(limit_gb, "")
    arms = [None if ms is None else point(name, limit_gb - 0.05, 3, ms) for ms in times_ms]
    return JointPoint(int(limit_gb * GB), *arms, *rates)


POINTS = (
    joint(47.9, (676.0, 676.0, 676.0), (None, None)),
    joint(43.1, (676.1, 676.2, 681.0), (15e6, 3e9)),
    joint(34.1, (686.1, 741.0, None), (9e6, 1.2e9)),
    joint(20.0, (1016.1, None, None), (9e6, None)),
)
CURVE = """\
What each budget would cost, with all actions and with one alone
   budget         all      peak   offload      peak  recompute      peak
  no plan    676.0 ms  47.85 GB  676.0 ms  47.85 GB   676.0 ms  47.85 GB
      90%    676.1 ms  43.05 GB  676.2 ms  43.05 GB   681.0 ms  43.05 GB
      72%    686.1 ms  34.05 GB  741.0 ms  34.05 GB       none
    floor  1,016.1 ms  19.95 GB      none                 none

Break-even: bytes freed by a millisecond of waiting or of computing again
  budget      offload   recompute
     90%  15.00 MB/ms  3.00 GB/ms
     72%   9.00 MB/ms  1.20 GB/ms
   floor   9.00 MB/ms
"""


def test_the_joint_curve_reads_so_at_80_columns() -> None:
    assert to_text(joint_blocks(POINTS), 80) == CURVE


def test_an_action_that_is_not_allowed_has_no_columns() -> None:
    points = [replace(each, recompute=None, recompute_bytes_per_ms=None) for each in POINTS]
    text = to_text(joint_blocks(points), 80)
    assert text.splitlines()[1].split() == ["budget", "all", "peak", "offload", "peak"]


def test_without_a_profile_the_joint_curve_has_peaks_only() -> None:
    points = [
        JointPoint(
            each.limit_bytes,
            each.joint and replace(each.joint, step_ms=None, least_ms=None),
            None,
            None,
            None,
            None,
        )
        for each in POINTS
    ]
    text = to_text(joint_blocks(points), 80)
    assert " ms" not in text
    assert "Break-even" not in text
    assert "43.05 GB" in text


def test_a_joint_curve_of_one_point_is_none() -> None:
    assert list(joint_blocks(POINTS[:1])) == []


def test_the_report_has_the_joint_curve_in_text_and_json() -> None:
    report = analyze_report(make_plan(chain()), joint_curve=POINTS)
    assert render_analyze(report, "text", 80).endswith(CURVE)
    first, *_, last = json.loads(render_analyze(report, "json"))["joint_curve"]
    assert first["joint"]["name"] == "no plan"
    assert last["offload"] is None
    assert last["offload_bytes_per_ms"] == 9e6
    assert "| floor | 1,016.1 ms |" in render_analyze(report, "markdown")
