"""Plans that keep, recompute and offload: their file, those of schema 2, and their proof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from facts_builder import FactsBuilder, MiB
from hypothesis import given
from hypothesis import strategies as st
from test_plan import chain

from offplan import gate
from offplan.budget import FLOOR, Action, Aim, Budget, Outlooks
from offplan.errors import FileFormatError, PlanError, UsageError
from offplan.graph import GraphFacts, digest
from offplan.plan import (
    ACTIONS,
    Decided,
    Draft,
    Plan,
    Prices,
    Recomputed,
    Weighed,
    analyze_command,
    check_plan,
    dump_plan,
    given_actions,
    load_plan,
    make_plan,
    write_plan,
)
from offplan.recompute import Choice, apply

replace = msgspec.structs.replace
SCHEMA_2 = Path(__file__).with_name("schema_2.plan.yaml")
SHAPE = (2048, 1024)
SIZE_BYTES = 8 * MiB


def recomputed(place: int) -> Recomputed:
    return Recomputed(
        region=0,
        size_bytes=SIZE_BYTES,
        name=f"relu_{place}",
        op="aten.relu.default",
        source="model.py:1",
        dtype="float32",
        shape=SHAPE,
        ops=(place,),
        recompute_us=7,
        inputs=("x" if place == 0 else f"relu_{place - 1}",),
        link_us=160,
        reason="the cheapest",
    )


def weighed(base: GraphFacts) -> tuple[Weighed, ...]:
    """What is found of the storages that ``base`` saves, each made by one op of the one before."""
    forward = base.regions[0].forward
    before = forward.inputs[0].value
    places = {op.outputs[0]: place for place, op in enumerate(forward.ops)}
    found = []
    for saved in base.regions[0].saved:
        place = places[saved.value]
        storage, read = base.values[saved.value].storage, base.values[before].storage
        assert storage is not None
        assert read is not None
        found.append(Weighed(0, storage, (place,), (read,), 7, link_us=160, reason="the cheapest"))
        before = saved.value
    return tuple(found)


def plan_of(base: GraphFacts, *ops: int, budget: Budget | None = FLOOR) -> Plan:
    """The plan of ``base`` that computes ``ops`` of its one region again."""
    choices = (Choice(0, ops),)
    facts = apply(base, choices)
    draft = Draft(facts, "whole-storage", 0, ACTIONS)
    outlook = Outlooks(facts, draft.moves, Aim(budget=budget)).outlook()
    return draft.plan(outlook, budget, Decided(base, choices, weighed(base), 7 * len(ops)))


# --- the file -------------------------------------------------------------------------------------


def test_a_plan_of_schema_2_is_read_with_its_actions_by_their_new_names() -> None:
    written = yaml.safe_load(SCHEMA_2.read_bytes())
    names = {"moved": "offload", "kept": "keep", "skipped": "skipped"}
    assert {entry["action"] for entry in written["storages"]} == names.keys()
    loaded = load_plan(SCHEMA_2)
    assert loaded.actions == ("keep", "offload")
    assert not loaded.choices
    for entry in written["storages"]:
        entry["action"] = names[entry["action"]]
    # All else is what the file says, and nothing is added.
    added = {"schema_version": 3, "actions": ["keep", "offload"]}
    assert yaml.safe_load(dump_plan(loaded)) == written | added


def test_a_plan_of_schema_2_is_written_as_one_of_today(tmp_path: Path) -> None:
    loaded = load_plan(SCHEMA_2)
    path = tmp_path / "plan.yaml"
    write_plan(path, loaded)
    assert b"schema_version: 3\n" in path.read_bytes()
    assert load_plan(path) == loaded
    assert dump_plan(load_plan(path)) == path.read_bytes()


def test_the_command_of_a_plan_of_schema_2_makes_one_that_recomputes_nothing() -> None:
    assert " --actions keep,offload --budget 85%" in analyze_command(load_plan(SCHEMA_2))


def test_a_plan_of_schema_2_is_a_baseline() -> None:
    loaded = load_plan(SCHEMA_2)
    thresholds = gate.Thresholds(baseline=SCHEMA_2)
    result = gate.check(loaded, thresholds, baseline=loaded)
    assert result.ok
    assert result.notes == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"action: kept", b"action: [kept]"), (b"action: kept", b"action: gone"), (b"torch:", b"t:")],
)
def test_a_broken_plan_of_schema_2_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    content = SCHEMA_2.read_bytes()
    assert old in content
    path = tmp_path / "plan.yaml"
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(FileFormatError):
        load_plan(path)


def test_a_plan_with_all_three_actions_reads_back_as_written(tmp_path: Path) -> None:
    plan = plan_of(chain(), 1)
    assert plan.transfers
    assert plan.recomputed
    write_plan(tmp_path / "plan.yaml", plan)
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded == plan
    assert dump_plan(loaded) == dump_plan(plan)


PRICES = Prices(recompute_us=7, link_us=160, reason="the cheapest")


def test_prices_stand_at_what_was_weighed() -> None:
    base = chain()
    plan = plan_of(base, 1)
    assert [entry.name for entry in plan.storages] == ["relu_0", "relu_2", "relu_3"]
    assert {entry.prices for entry in plan.storages} == {PRICES}
    (one,) = [each for each in weighed(base) if each.ops == (2,)]
    draft = Draft(apply(base, plan.choices), "whole-storage", 0)
    outlook = Outlooks(draft.facts, draft.moves, Aim()).outlook()
    priced = draft.plan(outlook, None, Decided(base, plan.choices, (one,)))
    assert [entry.prices for entry in priced.storages] == [None, PRICES, None]


def test_a_storage_that_has_another_number_among_other_graphs_keeps_its_price() -> None:
    builder = FactsBuilder()
    for _ in range(2):
        region = builder.region()
        region.save(region.op("aten.relu.default", [region.input("x", SHAPE)], SHAPE))
    base = builder.build()
    old = make_plan(base).storages[1]
    assert old.id is not None
    choices = (Choice(0, (0,)),)
    draft = Draft(apply(base, choices), "whole-storage", 0)
    outlook = Outlooks(draft.facts, draft.moves, Aim()).outlook()
    decided = Decided(base, choices, (Weighed(1, old.id, (0,), recompute_us=7),))
    first, second = draft.plan(outlook, None, decided).storages
    assert (second.region, second.name) == (1, old.name)
    assert second.id != old.id
    assert (first.prices, second.prices) == (None, Prices(recompute_us=7))


def test_a_graph_input_that_is_saved_has_its_price_too() -> None:
    base = chain()
    x = base.values[base.regions[0].forward.inputs[0].value].storage
    assert x is not None
    draft = Draft(apply(base, (Choice(0, (0,)),)), "whole-storage", 0)
    outlook = Outlooks(draft.facts, draft.moves, Aim()).outlook()
    found = (Weighed(0, x, (), recompute_why="it is given"),)
    plan = draft.plan(outlook, None, Decided(base, (Choice(0, (0,)),), found))
    assert plan.storages[0].name == "x"
    assert plan.storages[0].prices == Prices(recompute_why="it is given")
    assert plan.recomputed == ()


def test_what_is_recomputed_is_what_was_weighed_saved_and_runs_again() -> None:
    assert plan_of(chain(), 1, 2).recomputed == (recomputed(1), recomputed(2))
    assert plan_of(chain(), 1, 2).recompute_us == 14


def test_of_a_recipe_only_what_runs_again_is_named() -> None:
    base = chain()
    choices = (Choice(0, (1,)),)
    found = weighed(base)[1]._replace(ops=(0, 1), inputs=())
    draft = Draft(apply(base, choices), "whole-storage", 0)
    outlook = Outlooks(draft.facts, draft.moves, Aim()).outlook()
    (again,) = draft.plan(outlook, None, Decided(base, choices, (found,))).recomputed
    assert (again.name, again.ops) == ("relu_1", (1,))


def test_what_the_base_recomputes_already_is_no_choice() -> None:
    base = apply(chain(), (Choice(0, (1,)),))
    draft = Draft(base, "whole-storage", 0)
    outlook = Outlooks(base, draft.moves, Aim()).outlook()
    plan = draft.plan(outlook, None, Decided(base, (Choice(0, (1,)),), weighed(base)))
    assert (plan.choices, plan.base_digest, plan.recomputed) == ((), "", ())
    # Nor is it among what a further choice adds.
    more = plan_of(base, 1, 3)
    assert [each.name for each in more.recomputed] == ["relu_3"]
    check_plan(base, more)


def test_what_is_recomputed_is_not_saved() -> None:
    base = make_plan(chain(), min_bytes=0)
    assert plan_of(chain(), 1, budget=None).saved_bytes == base.saved_bytes - SIZE_BYTES


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"actions": ("offload",)}, r"not keep .* `\$.actions`"),
        ({"actions": ("offload", "keep")}, r"not keep .* `\$.actions`"),
        ({"actions": ("keep", "offload")}, r"recompute is not an action - at `\$.choices`"),
        ({"actions": ("keep", "recompute")}, r"offload is not an action - at `\$.transfers`"),
        ({"base_digest": ""}, r"need each other - at `\$.base_digest`"),
        ({"choices": (), "base_digest": ""}, r"no op runs again - at `\$.recomputed`"),
    ],
)
def test_a_plan_at_odds_with_itself_is_refused(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    plan = replace(plan_of(chain(), 1), **change)
    write_plan(tmp_path / "plan.yaml", plan)
    with pytest.raises(FileFormatError, match=problem):
        load_plan(tmp_path / "plan.yaml")


# --- actions as text ------------------------------------------------------------------------------


@given(st.permutations(ACTIONS), st.integers(1, 3))
def test_actions_are_read_in_any_order(actions: list[Action], count: int) -> None:
    words = ["keep", *(action for action in actions[:count] if action != "keep")]
    expected = tuple(action for action in ACTIONS if action in words)
    assert given_actions(",".join(words)) == given_actions(words[::-1]) == expected


@pytest.mark.parametrize("text", ["", "offload", "keep,swap", "keep,keep", "keep,", "keep offload"])
def test_what_is_no_set_of_actions_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not keep, and others of recompute, offload"):
        given_actions(text)


@pytest.mark.parametrize("actions", [("keep",), ("keep", "recompute"), ("keep", "offload")])
def test_the_command_names_actions_that_are_not_all(actions: tuple[Action, ...]) -> None:
    assert "--actions" not in analyze_command(make_plan(chain(), aim=Aim(actions=ACTIONS)))
    plan = make_plan(chain(), aim=Aim(actions=actions))
    assert f" --actions {','.join(actions)}" in analyze_command(plan)


# --- the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [(1,), (1, 2), (0, 2), (0, 1, 2, 3)])
def test_a_plan_with_choices_is_for_its_graphs_and_for_their_base(ops: tuple[int, ...]) -> None:
    base = chain()
    plan = plan_of(base, *ops)
    check_plan(base, plan)
    check_plan(apply(base, plan.choices), plan)


def test_a_plan_with_choices_is_for_no_other_graphs() -> None:
    plan = plan_of(chain(), 1)
    for other in (chain(5), apply(chain(), (Choice(0, (2,)),))):
        with pytest.raises(PlanError, match="made for other graphs: the model's code changed"):
            check_plan(other, plan)


def test_an_op_that_must_not_run_again_is_refused() -> None:
    base = chain()
    region = base.regions[0]
    plan = plan_of(base, 1)
    ops = [*region.forward.ops]
    ops[1] = replace(ops[1], target="aten.rand_like.default")
    graph = replace(region.forward, ops=tuple(ops))
    random = replace(base, regions=(replace(region, forward=graph),))
    with pytest.raises(PlanError, match="must not run again: it draws random numbers"):
        check_plan(random, replace(plan, base_digest=digest(random)))


def changed_again(facts: GraphFacts, change: Callable[[GraphFacts], GraphFacts]) -> None:
    """Check a plan of ``facts`` with op 1 again, and that it is refused where this is changed."""
    plan = plan_of(facts, 1, budget=None)
    wrong = change(apply(facts, plan.choices))
    check_plan(wrong, replace(plan, digest=digest(wrong)))


def with_again(facts: GraphFacts, **changes: object) -> GraphFacts:
    """``facts`` with the op that runs again changed."""
    region = facts.regions[0]
    assert region.backward is not None
    ops = tuple(replace(op, **changes) if op.name == "relu_1" else op for op in region.backward.ops)
    backward = replace(region.backward, ops=ops)
    return replace(facts, regions=(replace(region, backward=backward),))


def test_an_op_that_runs_again_on_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match=r"relu_1 .* reads something else than in the forward"):
        changed_again(chain(), lambda facts: with_again(facts, constants="inplace=True"))

    def reading_the_last(facts: GraphFacts) -> GraphFacts:
        return with_again(facts, inputs=(facts.regions[0].saved[-1].backward_value,))

    with pytest.raises(PlanError, match=r"relu_1 .* reads something else than in the forward"):
        changed_again(chain(), reading_the_last)


def test_an_op_that_runs_again_on_what_was_written_to_since_is_refused() -> None:
    def writing(facts: GraphFacts) -> GraphFacts:
        region = facts.regions[0]
        ops = [*region.forward.ops]
        ops[-1] = replace(ops[-1], mutates=(ops[0].outputs[0],))
        forward = replace(region.forward, ops=tuple(ops))
        return replace(facts, regions=(replace(region, forward=forward),))

    with pytest.raises(PlanError, match=r"relu_1 .* reads what .* has written to"):
        changed_again(chain(), writing)


@pytest.mark.parametrize("change", [{"region": 1}, {"ops": ()}, {"ops": (2,)}])
def test_what_is_recomputed_by_ops_that_do_not_run_again_is_refused(
    change: dict[str, object],
) -> None:
    base = chain()
    plan = plan_of(base, 1)
    wrong = replace(plan, recomputed=(replace(plan.recomputed[0], **change),))
    with pytest.raises(PlanError, match=r"relu_1 .* is recomputed by ops that are not"):
        check_plan(base, wrong)
