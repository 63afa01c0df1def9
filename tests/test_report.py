"""What people and programs read: goldens at 80 columns, JSON, annotations, and folding."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB, graph_facts
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.eligibility import RULE_SETS
from offplan.errors import UsageError
from offplan.gate import GateResult, Thresholds, check
from offplan.graph import GraphBreak, GraphFacts
from offplan.plan import Plan, make_plan
from offplan.report import Timing, analyze_report, render_analyze, render_gate
from offplan.report.document import Heading, Item, Listing, Paragraph, Table, to_markdown, to_text
from offplan.report.fold import fold, ranges

SHAPE = (2048, 1024)
FLAT = (2048 * 1024,)
BYTES = 8 * MiB
TIMING = Timing(build_s=1.25, capture_s=32.0, partition_s=7.5, analysis_s=0.31)


def model(layers: int = 3) -> GraphFacts:
    """Layers that save a weight, two views of one activation, a slice of another, and a flag."""
    facts = FactsBuilder(spec="model.py", params={"layers": str(layers)})
    facts.breaks = (GraphBreak(reason="call to print", source="model.py:40"),)
    region = facts.region()
    h = region.input("tokens", SHAPE)
    region.save(h)
    for number in range(layers):
        module = f"layers.{number}"
        weight = region.input(f"{module}.proj.weight", (1024, 1024), kind="parameter")
        y = region.op("aten.mm.default", [h], SHAPE, module=module, source="model.py:10")
        wide = region.op("aten.exp.default", [y], (4 * 2048, 1024), module=module)
        region.save(
            region.view(weight, (1024, 1024), (1, 1024), target="aten.t.default", module=module),
            region.view(y, FLAT, module=f"{module}.attn", source="model.py:11"),
            region.view(y, SHAPE, target="aten.detach.default", module=module),
            region.view(wide, (1024, 1024), target="aten.slice.Tensor", module=module),
        )
        h = y
    region.save(region.op("aten.gt.Scalar", [h], (4,), "bool", source="model.py:30"))
    region.output(h, "logits")
    return facts.build()


def analyzed(plan: Plan, top: int = 12) -> str:
    return render_analyze(analyze_report(plan, TIMING, top), "text", 80)


ANALYZED = """\
model.py layers=3
  traced for   cuda (H200), torch 2.14.1, aot_eager compiler, min-cut
               partitioner, attention auto
  graphs       1 region, 19 forward ops, 14 backward ops, 14 saved values
  graph break  model.py:40: call to print
  took         41.1 s: build 1.2 s, capture 32.0 s, partition 7.5 s, analysis
               310 ms

Saved for backward: 134.22 MB of activations, 12.58 MB of parameters
  rule       because                held by    values   logical    storage
  eligible   can leave the device                   7  46.14 MB  117.44 MB
  parameter  a parameter or buffer  parameter       3  12.58 MB   12.58 MB
  input      is a graph input       input           1   8.39 MB    8.39 MB
  alias      its holder keeps it    output          2  16.78 MB    8.39 MB
  too_small  storage under 5MiB                     1       4 B        4 B
  total                                            14  83.89 MB  146.80 MB
  under whole-storage, minimum 5MiB; logical: what the values carry; storage:
  each storage once

The three rule sets (this plan: whole-storage)
  rules          bytes     eligible  skipped: alias  skipped: alias_layout
  no-view        logical        0 B        62.91 MB                    0 B
                 storage        0 B       125.83 MB                    0 B
  last-holder    logical   12.58 MB        50.33 MB                    0 B
                 storage  100.66 MB        25.17 MB                    0 B
  whole-storage  logical   46.14 MB        16.78 MB                    0 B
                 storage  117.44 MB         8.39 MB                    0 B

Largest saved activations
  100.66 MB  3 x 33.55 MB, offload
             made by aten.exp.default in layers.0-2 (model.py:1)
             saved as float32[1024, 1024] from aten.slice.Tensor in layers.0-2
               (model.py:2)
             transfers 4.19 MB each way, takes 4.19 MB when reloaded
   16.78 MB  2 x 8.39 MB, offload
             made by aten.mm.default in layers.0-1 (model.py:10)
             saved as float32[2097152] from aten.view.default in layers.0-1.attn
               (model.py:11)
             saved as float32[2048, 1024] from aten.detach.default in layers.0-1
               (model.py:2)
    8.39 MB  skipped under input
             float32[2048, 1024] from input tokens
    8.39 MB  skipped under alias, held by output logits
             made by aten.mm.default in layers.2 (model.py:10)
             saved as float32[2097152] from aten.view.default in layers.2.attn
               (model.py:11)
             saved as float32[2048, 1024] from aten.detach.default in layers.2
               (model.py:2)
        4 B  in 1 more rows (--top shows more)

Stays at any budget: 29.36 MB of 146.80 MB saved (whole-storage)
  rule       held by    storages     bytes
  parameter  parameter         3  12.58 MB
  input      input             1   8.39 MB
  alias      output            1   8.39 MB
  too_small                    1       4 B

Keep, recompute, offload: what is done with the rest
  action     storages      bytes  time
  keep              0        0 B
  recompute         0        0 B
  offload           5  117.44 MB

"""


def test_the_analysis_reads_so_at_80_columns() -> None:
    # What is predicted follows; tests/test_peak_report.py has goldens of that.
    text = analyzed(make_plan(model(), budget=0), top=4)
    assert text.startswith(ANALYZED + "Budget 0: everything movable moves\n")
    assert "\n  moved each way " in text[len(ANALYZED) :]


def test_without_a_budget_nothing_is_moved_and_what_could_be_is_kept() -> None:
    text = analyzed(make_plan(model()))
    assert "\nNo budget: nothing moves\n" in text
    assert "moved" not in text
    assert "3 x 33.55 MB, keep\n" in text


def test_a_model_that_saves_nothing_is_a_report_too() -> None:
    facts = FactsBuilder()
    facts.region()
    text = analyzed(make_plan(facts.build()))
    assert "Saved for backward: 0 B of activations, 0 B of parameters" in text
    empty = analyzed(make_plan(FactsBuilder().build(), budget=0))
    assert "0 regions, 0 forward ops, 0 backward ops, 0 saved values" in empty
    assert "\n  plan     nothing can move\n" in empty
    assert "reached in" not in empty


def test_a_skipped_storage_names_its_holder() -> None:
    text = analyzed(make_plan(model()))
    assert "8.39 MB  skipped under alias, held by output logits\n" in text
    facts = FactsBuilder()
    region = facts.region()
    region.save(region.view(region.input("x", SHAPE), FLAT))
    # Although the storage is the input's own: it is the view that is skipped.
    assert "  skipped under alias, held by input x\n" in analyzed(make_plan(facts.build()))


def test_a_transfer_is_mentioned_where_it_is_not_the_whole_storage() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    # Every second float of 8 MiB: a range of 4 bytes less, which reads the same.
    region.save(region.view(region.op("aten.sin.default", [x], SHAPE), (1024 * 1024,), (2,)))
    assert "transfers" not in analyzed(make_plan(facts.build()))
    # Every fourth: 512 Ki floats of 4 bytes are packed, and come back with their gaps.
    region.save(region.view(region.op("aten.cos.default", [x], SHAPE), (512 * 1024,), (4,)))
    text = analyzed(make_plan(facts.build()))
    assert "transfers 2.10 MB each way, takes 8.39 MB when reloaded\n" in text


def test_a_saved_graph_has_no_timing() -> None:
    report = analyze_report(make_plan(model()))
    assert "took" not in render_analyze(report, "text", 80)
    assert json.loads(render_analyze(report, "json", 80))["timing"] is None


def test_json_is_exact_and_the_same_but_for_the_timing() -> None:
    plan = make_plan(model(), budget=0)
    first = json.loads(render_analyze(analyze_report(plan, TIMING), "json", 80))
    second = json.loads(render_analyze(analyze_report(plan, None), "json", 200))
    assert first.pop("timing") == {
        "build_s": 1.25,
        "capture_s": 32.0,
        "partition_s": 7.5,
        "analysis_s": 0.31,
        "lower_s": 0.0,
    }
    assert second.pop("timing") is None
    assert first == second
    assert first["predicted"] == json.loads(msgspec.json.encode(plan.predicted))
    assert (first["asked"], first["curve"]) == ("", [])
    # 2 activations of 8 MiB and 3 of 32 MiB, of which 4 MiB each is saved.
    assert first["moved_bytes"] == (2 * 8 + 3 * 32) * MiB
    assert first["moving"]["transfer_bytes"] == (2 * 8 + 3 * 4) * MiB
    assert first["rule_sets"][0] == {
        "rules": "no-view",
        "eligible": {"values": 0, "logical_bytes": 0, "storage_bytes": 0},
        # All views but the parameters': 6 of 8 MiB on 3 storages of 8, 3 of 4 MiB on 3 of 32.
        "alias": {
            "values": 9,
            "logical_bytes": (6 * 8 + 3 * 4) * MiB,
            "storage_bytes": (3 * 8 + 3 * 32) * MiB,
        },
        "alias_layout": {"values": 0, "logical_bytes": 0, "storage_bytes": 0},
    }


def test_markdown_has_a_table_for_each_table_and_marks_nothing_up_by_accident() -> None:
    text = render_analyze(analyze_report(make_plan(model()), TIMING), "markdown", 80)
    assert "| too\\_small | storage under 5MiB |  | 1 | 4 B | 4 B |" in text
    assert "| ---: |" in text
    assert "float32\\[2048, 1024\\]" in text


def test_another_format_is_a_usage_error_naming_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'xml' is not a format") as caught:
        render_analyze(analyze_report(make_plan(model())), "xml", 80)
    assert "markdown" in caught.value.fix
    with pytest.raises(UsageError) as caught:
        render_gate(gated(0), "xml", 80)
    assert "github" in caught.value.fix


def test_forty_layers_take_no_more_lines_than_three() -> None:
    assert len(analyzed(make_plan(model(40))).splitlines()) == len(
        analyzed(make_plan(model(3))).splitlines()
    )


@settings(DRAWN, max_examples=40)
@given(graph_facts(), st.sampled_from(RULE_SETS), st.sampled_from((None, 0)), st.integers(0, 4))
def test_every_row_adds_up_to_the_plans_bytes(
    facts: GraphFacts, rules: str, budget: int | None, top: int
) -> None:
    plan = make_plan(facts, rules=rules, budget=budget)  # type: ignore[arg-type]
    report = analyze_report(plan, None, top)
    with_storage = [entry for entry in plan.storages if entry.id is not None]
    shown = sum(row.total_bytes for row in report.largest)
    parameters = [entry for entry in with_storage if entry.rule == "parameter"]
    assert report.parameter_bytes == sum(entry.size_bytes for entry in parameters)
    listed = shown + report.not_shown_bytes + report.parameter_bytes
    assert listed == sum(entry.size_bytes for entry in with_storage)
    assert len(report.largest) <= top
    sizes = [row.total_bytes for row in report.largest]
    assert sizes == sorted(sizes, reverse=True)
    everything = analyze_report(plan, None, 10**6)
    activations = sum(row.count for row in everything.largest)
    assert activations + everything.parameter_storages == len(with_storage)


@settings(DRAWN, max_examples=40)
@given(graph_facts(), st.integers(40, 130))
def test_no_line_is_wider_than_asked_nor_ends_in_spaces_nor_has_escapes(
    facts: GraphFacts, width: int
) -> None:
    report = analyze_report(make_plan(facts, budget=0), TIMING)
    # Tables keep their numbers whole, so they need about 80 columns.
    for line in render_analyze(report, "text", max(width, 80)).splitlines():
        assert len(line) <= max(width, 80)
    text = render_analyze(report, "text", width)
    assert "\x1b" not in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


# --- the gate -------------------------------------------------------------------------------------


def gated(limit: int) -> GateResult:
    limits = Thresholds(max_alias_skipped=limit, max_skipped={"not_float": MiB})
    return check(make_plan(model()), limits, "last-holder")


FAILED = """\
offplan gate failed: model.py layers=3 (last-holder)
  check                      limit    actual
  skipped under alias      1.05 MB  50.33 MB  FAILED  49.28 MB too much
  skipped under not_float  1.05 MB       4 B  ok

alias: 6 values, 50.33 MB
  16.78 MB  x2  float32[2097152] from aten.view.default
                in layers.0-1.attn (model.py:11)
                held by saved detach (layers.0-1)
  16.78 MB  x2  float32[2048, 1024] from aten.detach.default
                in layers.0-1 (model.py:2)
                held by saved view (layers.0-1.attn)
   8.39 MB  x1  float32[2097152] from aten.view.default
                in layers.2.attn (model.py:11)
                held by output logits
   8.39 MB  x1  float32[2048, 1024] from aten.detach.default
                in layers.2 (model.py:2)
                held by output logits
"""


def test_a_failed_gate_reads_so_at_80_columns() -> None:
    assert render_gate(gated(MiB), "text", 80) == FAILED


def test_a_gate_that_passes_says_ok_for_each_check() -> None:
    text = render_gate(gated(6 * BYTES), "text", 80)
    assert text == (
        "offplan gate ok: model.py layers=3 (last-holder)\n"
        "  check                       limit    actual\n"
        "  skipped under alias      50.33 MB  50.33 MB  ok\n"
        "  skipped under not_float   1.05 MB       4 B  ok\n"
    )


def test_sizes_that_would_round_to_the_same_are_given_in_bytes() -> None:
    text = render_gate(gated(6 * BYTES - 1), "text", 80)
    assert "50,331,647 B  50,331,648 B  FAILED  1 B too much" in text


def test_annotations_are_on_the_file_and_line_that_made_the_value() -> None:
    lines = render_gate(gated(0), "github", 80).splitlines()
    assert lines[0] == ("::error title=offplan gate::skipped under alias: 50.33 MB, limit 0 B")
    assert lines[1] == (
        "::error file=model.py,line=11,title=offplan gate%3A alias::16.78 MB x2 skipped under "
        "alias: float32[2097152] from aten.view.default, in layers.0-1.attn (model.py:11), held by "
        "saved detach (layers.0-1)"
    )
    assert lines[-1] == "ok: skipped under not_float: 4 B, limit 1.05 MB"
    assert len(lines) == 6


def test_annotations_escape_what_github_would_read_as_syntax() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    y = region.op("aten.mm.default", [x], SHAPE)
    region.save(y, region.view(y, FLAT, module="50%\n::error::", source="a,b:c.py:7"))
    result = check(make_plan(facts.build()), Thresholds(max_alias_skipped=0), "last-holder")
    _, line = render_gate(result, "github", 80).splitlines()
    assert line.startswith("::error file=a%2Cb%3Ac.py,line=7,title=offplan gate%3A alias::")
    assert "in 50%25%0A::error::" in line


def test_a_value_without_a_source_line_is_annotated_without_a_file() -> None:
    facts = FactsBuilder()
    region = facts.region()
    region.save(region.input("tokens", SHAPE))
    result = check(make_plan(facts.build()), Thresholds(max_skipped={"input": 0}))
    _, line = render_gate(result, "github", 80).splitlines()
    assert line == (
        "::error title=offplan gate%3A input::8.39 MB x1 skipped under input: "
        "float32[2048, 1024] from input tokens, held by input tokens"
    )


def test_the_gates_json_has_every_offender_and_exact_bytes() -> None:
    document = json.loads(render_gate(gated(0), "json", 80))
    assert document["ok"] is False
    alias, small = document["checks"]
    assert (alias["ok"], alias["limit_bytes"], alias["actual_bytes"]) == (False, 0, 6 * BYTES)
    assert len(alias["offenders"]) == 6
    assert alias["offenders"][0]["source"] == "model.py:11"
    assert (small["ok"], small["actual_bytes"]) == (True, 4)


def test_the_gates_notes_are_shown_in_every_format_for_people() -> None:
    result = check(
        make_plan(model()), Thresholds(max_alias_skipped=10**12), baseline=make_plan(model(2))
    )
    note = "the baseline has other parameters: layers=2; this plan: layers=3"
    assert f"note  {note}" in render_gate(result, "text", 80)
    assert f"::notice title=offplan gate::{note}" in render_gate(result, "github", 80)
    assert note in render_gate(result, "markdown", 80)


# --- folding --------------------------------------------------------------------------------------


def folded(*texts: str) -> list[tuple[int, str]]:
    return [(len(group.places), group.texts[0]) for group in fold((0, (text,)) for text in texts)]


def test_texts_that_differ_in_an_integer_are_one_row_over_its_range() -> None:
    layers = [f"layers.{number}.mlp" for number in range(40)]
    assert folded(*layers) == [(40, "layers.0-39.mlp")]


def test_texts_that_differ_in_anything_else_are_not_folded() -> None:
    assert folded("layers.0.mlp", "layers.0.attn", "blocks.0.mlp") == [
        (1, "layers.0.mlp"),
        (1, "layers.0.attn"),
        (1, "blocks.0.mlp"),
    ]


def test_each_integer_has_its_own_range() -> None:
    texts = [f"layers.{i}.experts.{j}" for i in (0, 1) for j in (0, 1, 5)]
    assert folded(*texts) == [(6, "layers.0-1.experts.0-1,5")]


def test_the_counter_of_a_traced_op_is_left_out_of_a_holder_only() -> None:
    assert folded("saved view (a.0)", "saved view_1 (a.1)", "saved view_12 (a.2)") == [
        (3, "saved view (a.0-2)")
    ]
    assert folded("parameter w_1", "parameter w") == [(1, "parameter w_1"), (1, "parameter w")]


def test_things_with_different_keys_are_not_folded() -> None:
    groups = fold([("a", ("x.1",)), ("b", ("x.2",)), ("a", ("x.3",))])
    assert [(group.places, group.texts) for group in groups] == [
        ((0, 2), ("x.1,3",)),
        ((1,), ("x.2",)),
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 5, 6, 7], "0,2,5-7"),
        ([0, 2, 4, 6], "0,2,4,6"),
        ([0, 2, 4, 6, 8], "0..8"),
    ],
)
def test_ranges_are_short(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


# --- blocks ---------------------------------------------------------------------------------------


def test_a_number_and_its_unit_are_not_torn_apart() -> None:
    said = "x" * 38 + " 10.00 GB of " + "y" * 30
    lines = to_text([Paragraph((("", said),))], 46).splitlines()
    assert lines[1].strip().startswith("10.00 GB")


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    name = "\x1b[31mred\nnext"
    blocks = [
        Heading(name),
        Paragraph((("warning", name),)),
        Table(("held by",), ((name,),)),
        Listing((Item((name,), (name,)),)),
    ]
    assert "\x1b" not in to_text(blocks, 80)
    assert "\x1b" not in to_markdown(blocks)
    assert len(to_text(blocks, 80).splitlines()) == 6


def test_markdown_in_a_name_stays_as_it_is() -> None:
    assert to_markdown([Heading("a_b*c`d<e>|[f]")]) == "### a\\_b\\*c\\`d&lt;e>\\|\\[f\\]\n"
