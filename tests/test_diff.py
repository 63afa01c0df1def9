"""What differs between two plans, told by place and shape and never by id."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB, graph_facts
from hypothesis import given
from typer.testing import CliRunner

from offplan.cli import app
from offplan.diff import Change, Quantity, diff
from offplan.errors import UsageError
from offplan.graph import GraphFacts
from offplan.plan import Plan, load_plan, make_plan
from offplan.recompute import Choice
from offplan.report.diff import render_diff

SCHEMA_2 = Path(__file__).parent / "schema_2.plan.yaml"
MODULES = tuple(f"layers.{number}.mlp" for number in range(3))


def plan(
    modules: tuple[str, ...] = MODULES,
    *,
    rows: int = 2048,
    budget: int | None = None,
    extra_ops: int = 0,
    second_view: bool = False,
    params: dict[str, str] | None = None,
) -> Plan:
    """Each module saves what one product makes: rows x 1024 of float32."""
    facts = FactsBuilder(params=params or {})
    region = facts.region()
    x = region.input("x", (rows, 1024))
    for _ in range(extra_ops):
        region.op("aten.relu.default", [x], (rows, 1024), module="stem")
    for module in modules:
        y = region.op("aten.mm.default", [x], (rows, 1024), module=module)
        region.save(region.view(y, (rows * 1024,), module=module))
        if second_view:
            region.save(region.view(y, (1024, rows), module=module))
    return make_plan(facts.build(), budget=budget)


def told(changes: tuple[Change, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(change.kind, change.item.module, change.facets) for change in changes]


@given(graph_facts())
@DRAWN
def test_a_plan_does_not_differ_from_itself(facts: GraphFacts) -> None:
    same = diff(make_plan(facts), make_plan(facts))
    assert same.is_identical
    assert not same.differs
    assert render_diff(same).count("\n") == 1


def test_other_ids_and_names_of_the_same_storages_are_no_difference() -> None:
    found = diff(plan(), plan(extra_ops=3))
    assert not found.differs
    assert not found.is_same_graphs
    assert any("a plan does not record which" in note for note in found.notes)


def test_what_appears_and_what_goes_is_told_by_module() -> None:
    old, new = plan(MODULES), plan((*MODULES[1:], "head"))
    assert told(diff(old, new).changes) == [
        ("appeared", "head", ()),
        ("gone", MODULES[0], ()),
    ]


def test_several_alike_in_one_module_are_counted() -> None:
    found = diff(plan(("mlp",) * 3), plan(("mlp",) * 5))
    assert told(found.changes) == [("appeared", "mlp", ())] * 2
    assert sum(change.delta_bytes for change in found.changes) == 2 * 8 * MiB


def test_another_batch_grows_storages_in_place_and_back_shrinks_them() -> None:
    small, large = plan(params={"batch": "1"}), plan(rows=4096, params={"batch": "2"})
    grown = diff(small, large)
    assert told(grown.changes) == [("changed", module, ("grown",)) for module in MODULES]
    assert [change.delta_bytes for change in grown.changes] == [8 * MiB] * 3
    assert [each.name for each in grown.settings] == ["-p batch"]
    assert {change.facets for change in diff(large, small).changes} == {("shrunk",)}


def test_a_budget_changes_actions_of_the_same_graphs() -> None:
    found = diff(plan(), plan(budget=0))
    assert told(found.changes) == [("changed", module, ("action",)) for module in MODULES]
    assert found.is_same_graphs
    assert not found.ledger
    numbers = {row.name: row.delta for row in found.quantities}
    assert numbers["moved"] == 3 * 8 * MiB
    assert [(each.name, each.new) for each in found.settings] == [
        ("budget", "0 (everything moves)")
    ]


def test_a_second_view_changes_verdicts_and_the_ledger_of_the_rule_sets_it_concerns() -> None:
    found = diff(plan(), plan(second_view=True))
    assert told(found.changes) == [("changed", module, ("verdict",)) for module in MODULES]
    rows = {(row.rules, row.rule): row for row in found.ledger}
    alias = rows["last-holder", "alias"]
    assert (alias.old_count, alias.new_count) == (0, 6)
    assert alias.new_storage_bytes == 3 * 8 * MiB
    assert ("whole-storage", "alias") not in rows


def test_settings_that_differ_are_named_and_several_at_once_are_not_told_apart() -> None:
    old = plan()
    new = msgspec.structs.replace(old, torch="9.9", partitioner="default", digest="sha256:0")
    found = diff(old, new)
    assert [each.name for each in found.settings] == ["torch", "partitioner"]
    assert any(note.startswith("torch and partitioner changed at once") for note in found.notes)


def test_plans_that_differ_in_nothing_compared_are_not_called_the_same() -> None:
    old = plan()
    found = diff(old, msgspec.structs.replace(old, warnings=("something",)))
    assert not found.differs
    assert not found.is_identical
    assert found.notes == ("nothing that is compared here differs, but the plans' warnings do",)


def test_other_ops_that_run_again_explain_what_only_one_plan_saves() -> None:
    old = plan()
    found = diff(old, msgspec.structs.replace(old, budget=0, choices=(Choice(0, (1,)),)))
    assert any(note.startswith("other ops run again in the backward") for note in found.notes)
    other = diff(old, msgspec.structs.replace(old, budget=0))
    assert not any(note.startswith("other ops run again") for note in other.notes)


@given(graph_facts(), graph_facts())
@DRAWN
def test_differences_add_up_to_what_is_saved(a: GraphFacts, b: GraphFacts) -> None:
    old, new = make_plan(a), make_plan(b)
    changes = diff(old, new).changes
    before, after = (sum(e.size_bytes for e in each.storages) for each in (old, new))
    assert sum(change.delta_bytes for change in changes) == after - before
    # Backwards, what appeared is what went.
    back = diff(new, old).changes
    kinds = ("appeared", "gone"), ("gone", "appeared")
    for kind, other in kinds:
        assert sum(c.kind == kind for c in changes) == sum(c.kind == other for c in back)


def test_layers_that_changed_alike_are_one_row() -> None:
    assert render_diff(diff(plan(), plan(budget=0))).split("Changed")[1] == (
        ": 3 storages\n"
        "  25.17 MB  x3  layers.0-2.mlp\n"
        "                aten.mm.default float32[2097152] (model.py:1)\n"
        "                action: keep -> offload\n"
    )


def test_a_storage_that_grew_shows_both_sizes() -> None:
    text = render_diff(diff(plan(MODULES[:1]), plan(MODULES[:1], rows=4096)))
    assert text.split("Changed")[1].split("\n\n")[0] == (
        ": 1 storage (+8.39 MB)\n"
        "  +8.39 MB    layers.0.mlp\n"
        "              aten.mm.default, keep (model.py:1)\n"
        "              grown: float32[2097152] of 8.39 MB -> float32[4194304] of 16.78 MB"
    )


def test_a_number_is_not_shown_for_a_difference_too_small_to_print() -> None:
    found = diff(plan(), plan(budget=0))
    times = tuple(Quantity(name, "ms", 5.30, 5.31) for name in ("step, no plan", "step, plan"))
    numbers = (*times, Quantity("stalled", "ms", 1.0, 1.2))
    text = render_diff(msgspec.structs.replace(found, quantities=numbers))
    assert "step" not in text
    assert "+0.2 ms" in text


def test_rows_beyond_the_top_are_counted() -> None:
    names = ("alpha", "beta", "gamma")
    text = render_diff(diff(plan(names), plan(names, budget=0)), top=1)
    assert "and 2 rows more of 16.78 MB (--top)" in text
    assert "beta" not in text


def test_json_has_every_change_and_markdown_is_markdown() -> None:
    found = diff(plan(), plan(budget=0))
    document = json.loads(render_diff(found, "json"))
    assert document["differs"] is True
    assert len(document["changes"]) == 3
    assert render_diff(found, "markdown").startswith("### offplan diff: ")
    with pytest.raises(UsageError, match="not a format"):
        render_diff(found, "html")


def test_a_plan_of_schema_2_can_be_compared() -> None:
    old = load_plan(SCHEMA_2)
    assert diff(old, old).is_identical
    assert diff(old, plan()).differs


def test_the_command_exits_3_for_a_difference_only_if_asked_to(tmp_path: Path) -> None:
    old, new = tmp_path / "old.plan.yaml", tmp_path / "new.plan.yaml"
    plan().save(old)
    plan(budget=0).save(new)

    def code(*arguments: str) -> int:
        return CliRunner().invoke(app, ["diff", *arguments]).exit_code

    assert code(str(old), str(new)) == 0
    assert code(str(old), str(new), "--exit-code") == 3
    assert code(str(old), str(old), "--exit-code") == 0
    assert code(str(old), str(tmp_path / "missing.yaml")) == 1
