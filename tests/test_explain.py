"""What explain says of storages: each claim against the plan and the graphs, made the slow way."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import msgspec
import pytest
from drawn_steps import layered
from facts_builder import DRAWN, FactsBuilder, MiB, RegionBuilder
from fused_steps import fused_step
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import random_step
from typer.testing import CliRunner, Result

from offplan import eligibility
from offplan.budget import Action, Aim, of_bytes
from offplan.cli import app
from offplan.costs import profile_for
from offplan.decide import Decisions
from offplan.effects import Effects
from offplan.eligibility import RuleSet
from offplan.errors import OffplanError, UsageError
from offplan.explain import Explained, Explanation, explain
from offplan.fusion import as_run
from offplan.graph import GraphFacts, ValueId, save_graph
from offplan.memory import Prediction, predict
from offplan.named import find
from offplan.observed import Observation, observations
from offplan.opened import Opened
from offplan.plan import ACTIONS, Entry, Plan, check_plan, make_plan, write_plan
from offplan.recompute import Choice, apply
from offplan.report.explain import found_rows, render_explanation
from offplan.transfers import Transfer
from offplan.units import format_size

H200 = profile_for("h200")
SHAPE = (1024, 2048)
BYTES = 8 * MiB
FLAT = (1024 * 2048,)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFPLAN_CACHE", "off")


def opened(facts: GraphFacts, plan: Plan | None = None) -> Opened:
    return Opened(plan or make_plan(facts), facts, facts)


def only(found: Explanation) -> Explained:
    (storage,) = found.storages
    return storage


# --- observations ---------------------------------------------------------------------------------


def step(facts: FactsBuilder) -> tuple[RegionBuilder, ValueId, ValueId]:
    region = facts.region()
    return region, region.input("x", SHAPE), region.input("w", SHAPE, kind="parameter")


def observed(facts: FactsBuilder) -> dict[str, Observation]:
    """Observations by the name of the op that made what they are of."""
    (region,) = eligibility.index(facts.build()).regions
    return {
        origin.name: each
        for each in observations(region)
        if (origin := region.origins.get(each.storage)) is not None
    }


def test_what_is_computed_from_parameters_alone_is_said_with_their_names() -> None:
    facts = FactsBuilder()
    region, x, w = step(facts)
    cast = region.op("aten._to_copy.default", [region.view(w, FLAT)], SHAPE, name="cast")
    tanh = region.op("aten.tanh.default", [cast], SHAPE, name="tanh")
    mixed = region.op("aten.mul.Tensor", [tanh, x], SHAPE, name="mixed")
    zeros = region.op("aten.zeros.default", [], SHAPE, name="zeros")
    noise = region.op("aten.rand.default", [], SHAPE, name="noise")
    region.save(cast, tanh, mixed, zeros, noise)
    found = observed(facts)
    assert {name: each.others for name, each in found.items()} == {
        "cast": ("w",),
        "tanh": ("w",),
        "zeros": (),
    }
    assert {each.kind for each in found.values()} == {"parameters"}
    assert {each.freed_bytes for each in found.values()} == {BYTES}


def test_what_reads_a_buffer_that_the_step_changes_is_not_from_parameters() -> None:
    facts = FactsBuilder()
    region = facts.region()
    buffer = region.input("count", SHAPE, kind="buffer")
    region.save(region.op("aten.exp.default", [buffer], SHAPE, name="exp"))
    assert set(observed(facts)) == {"exp"}
    region.output(region.op("aten.add.Tensor", [buffer], SHAPE), kind="mutated")
    assert set(observed(facts)) == set()


def test_the_same_op_of_the_same_inputs_saved_twice_is_said_once() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    first = region.op("aten.relu.default", [x], SHAPE, name="first")
    again = region.op("aten.relu.default", [x], SHAPE, name="again")
    other = region.op("aten.relu.default", [first], SHAPE, name="other")
    random = [region.op("aten.rand_like.default", [x], SHAPE, name=f"rand{i}") for i in range(2)]
    region.save(first, again, other, *random)
    found = observed(facts)
    assert {name: (each.kind, each.others) for name, each in found.items()} == {
        "again": ("twice", ("first",))
    }


def test_a_cast_counts_as_a_copy_only_if_what_it_casts_is_saved_too() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    kept = region.op("aten.relu.default", [x], SHAPE, name="kept")
    gone = region.op("aten.exp.default", [x], SHAPE, name="gone")
    casts = [
        region.op("aten._to_copy.default", [value], SHAPE, "bfloat16", name=name)
        for name, value in (("cast", kept), ("lone", gone))
    ]
    region.save(kept, *casts)
    found = observed(facts)
    assert {name: (each.kind, each.others) for name, each in found.items()} == {
        "cast": ("copied", ("kept",))
    }


def test_a_copy_of_what_is_saved_in_part_only_is_no_copy() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    base = region.op("aten.relu.default", [x], SHAPE)
    region.save(
        region.view(base, (16,)),
        region.op("aten.clone.default", [base], SHAPE, name="clone"),
    )
    assert observed(facts) == {}


def test_masks_are_found_whatever_their_dtype() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    mask = region.op("aten.gt.Scalar", [x], SHAPE, "bool", name="bool")
    drawn = region.op("aten.bernoulli.p", [x], SHAPE, name="drawn")
    scaled = region.op("aten.div.Tensor", [drawn], SHAPE, name="scaled")
    dropped = region.op("aten.mul.Tensor", [x, scaled], SHAPE, name="dropped")
    region.save(mask, scaled, dropped)
    found = observed(facts)
    assert {name: each.kind for name, each in found.items()} == {"bool": "mask", "scaled": "mask"}
    elements = 1024 * 2048
    assert found["bool"].freed_bytes == elements - elements // 8
    assert found["scaled"].freed_bytes == 4 * elements - elements // 8


def test_expanded_padded_and_widened_copies_free_what_they_added() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    few = region.op("aten.relu.default", [x], (8, 1, 4096))
    wide = region.view(few, (8, 5, 4096), (4096, 0, 1), target="aten.expand.default")
    narrow = region.op("aten.exp.default", [x], (64, 20), "bfloat16")
    region.save(
        region.op("aten.clone.default", [wide], (8, 5, 4096), name="expanded"),
        region.op("aten.repeat.default", [few], (8, 3, 4096), name="repeated"),
        region.op("aten.constant_pad_nd.default", [narrow], (64, 24), "bfloat16", name="padded"),
        region.op("aten._to_copy.default", [narrow], (64, 20), name="widened"),
    )
    found = observed(facts)
    assert {name: (each.kind, each.freed_bytes) for name, each in found.items()} == {
        "expanded": ("expanded", 8 * 4 * 4096 * 4),
        "repeated": ("expanded", 8 * 2 * 4096 * 4),
        "padded": ("padded", 64 * 4 * 2),
        "widened": ("widened", 64 * 20 * 2),
    }


# --- names ----------------------------------------------------------------------------------------


def named_step() -> GraphFacts:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    for number in range(3):
        module = f"layers.{number}"
        w = region.input(f"{module}.up.weight", SHAPE, kind="parameter")
        up = region.op(
            "aten.mm.default", [x, w], SHAPE, module=f"{module}.up", source="net/model.py:7"
        )
        x = region.op("aten.relu.default", [up], SHAPE, module=module, source="net/model.py:8")
        region.save(w, region.view(up, FLAT, module=f"{module}.up", name=f"flat_{number}"), x)
    region.output(region.op("aten.sum.default", [x], (), name="loss", source="net/model.py:9"))
    return facts.build()


NAMED = named_step()
NAMED_PLAN = make_plan(NAMED)


def meant(name: str, facts: GraphFacts | None = NAMED) -> list[tuple[str, str]]:
    found = find(name, NAMED_PLAN, facts)
    return [
        (each.entry.op, each.entry.module or each.entry.name) if each.entry else ("", "")
        for each in found
    ]


UP = [("aten.mm.default", f"layers.{number}.up") for number in range(3)]
RELU = [("aten.relu.default", f"layers.{number}") for number in range(3)]
WEIGHT = [("parameter", f"layers.{number}.up.weight") for number in range(3)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.1.up.weight", WEIGHT[1:2]),
        ("flat_2", UP[2:]),
        ("relu_3", []),
        ("layers.1", [WEIGHT[1], UP[1], RELU[1]]),
        ("layers.1.up", [WEIGHT[1], UP[1]]),
        ("layers.*.up", [*WEIGHT[:1], UP[0], *WEIGHT[1:2], UP[1], *WEIGHT[2:], UP[2]]),
        ("flat_[01]", UP[:2]),
        ("aten.relu", RELU),
        ("model.py:7", UP),
        ("net/model.py:8", RELU),
        ("/home/me/net/model.py:8", RELU),
        # Nothing is made there that is saved: what is read.
        ("model.py:9", RELU[2:]),
    ],
)
def test_a_name_means(name: str, expected: list[tuple[str, str]]) -> None:
    if not expected:
        with pytest.raises(OffplanError):
            meant(name)
        return
    assert meant(name) == expected


def test_a_module_that_makes_nothing_is_what_its_forward_reads() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    w = region.input("down.weight", SHAPE, kind="parameter")
    hidden = region.op("aten.relu.default", [x], SHAPE, name="hidden", module="act")
    region.op("aten.mm.default", [hidden, w], SHAPE, module="down")
    region.save(hidden, w)
    built = facts.build()
    plan = make_plan(built)
    names = [each.entry.name for each in find("down", plan, built) if each.entry]
    assert names == ["down.weight", "hidden"]
    assert [each.entry.name for each in find("down", plan, None) if each.entry] == ["down.weight"]


def test_a_storage_is_named_by_its_number_with_or_without_a_mark() -> None:
    entry = next(entry for entry in NAMED_PLAN.storages if entry.op == "aten.mm.default")
    for name in (str(entry.id), f"#{entry.id}"):
        (found,) = find(name, NAMED_PLAN, None)
        assert found.entry == entry


def test_a_storage_that_is_not_saved_is_found_in_the_graphs_only() -> None:
    (loss,) = find("loss", NAMED_PLAN, NAMED)
    assert loss.entry is None
    assert loss.storage is not None
    found = only(explain(opened(NAMED, NAMED_PLAN), f"#{loss.storage}"))
    assert (found.action, found.why) == ("not saved", "the backward does not read it")
    for name in ("loss", f"#{loss.storage}"):
        with pytest.raises(OffplanError):
            find(name, NAMED_PLAN, None)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("layers.1.upp", "layers.1.up"), ("model.layers.2", "layers.2"), ("flat_9", "flat_")],
)
def test_a_name_of_nothing_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(OffplanError) as caught:
        meant(name)
    assert caught.value.exit_code == 1
    assert nearest in caught.value.fix


# --- verdicts, holders, unlocks -------------------------------------------------------------------


def held_step() -> GraphFacts:
    """A storage whose saved view stays because of another view of it that is returned."""
    facts = FactsBuilder()
    region, x, w = step(facts)
    y = region.op("aten.mm.default", [x, w], SHAPE, name="mm")
    flat = region.view(y, FLAT, name="flat")
    region.save(region.view(flat, (2048, 1024), name="rows"))
    region.output(region.view(y, (16,), name="head"))
    return facts.build()


def test_the_path_to_a_holder_goes_over_the_views_between() -> None:
    found = only(explain(opened(held_step()), "mm"))
    (path,) = found.paths
    assert (path.saved, path.holder) == ("rows", "output 0")
    assert path.path == "rows <- flat <- mm -> head"
    assert [(value.origin.name, value.of, value.roles) for value in found.values] == [
        ("mm", "", ()),
        ("flat", "mm", ()),
        ("rows", "flat", ("saved",)),
        ("head", "mm", ("output 0",)),
    ]


def test_views_that_leave_together_do_not_hold_each_other() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    y = region.op("aten.relu.default", [x], SHAPE, name="relu")
    region.save(y, region.view(y, FLAT))
    found = only(explain(opened(facts.build()), "relu"))
    assert found.paths == ()
    assert [said.rule for said in found.verdicts if said.rules == "whole-storage"] == ["eligible"]


def test_every_rule_of_every_set_has_a_reason() -> None:
    for rules in eligibility.RULE_SETS:
        found = explain(opened(held_step(), make_plan(held_step(), rules=rules)), "mm")
        assert all(said.because for said in only(found).verdicts)


def entry_of(plan: Plan, name: str) -> Entry:
    return next(entry for entry in plan.storages if entry.name == name)


def test_a_smaller_minimum_unlocks_exactly_what_it_says() -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    region.save(region.op("aten.relu.default", [x], (256, 1024), name="small"))
    built = facts.build()
    (unlock,) = only(explain(opened(built), "small")).unlocks
    assert unlock.change == "--min-size 1MiB"
    assert entry_of(make_plan(built, min_bytes=MiB), "small").action == "keep"
    assert entry_of(make_plan(built, min_bytes=MiB + 1), "small").action == "skipped"


@pytest.mark.parametrize("rules", ["no-view", "last-holder"])
def test_whole_storage_rules_unlock_views(rules: RuleSet) -> None:
    facts = FactsBuilder()
    region, x, _ = step(facts)
    y = region.op("aten.relu.default", [x], SHAPE, name="relu")
    region.save(y, region.view(y, FLAT))
    built = facts.build()
    found = only(explain(opened(built, make_plan(built, rules=rules)), "relu"))
    assert found.action == "skipped"
    assert found.unlocks[0].change == "--rules whole-storage"
    assert entry_of(make_plan(built), "relu").action == "keep"


def test_a_copy_of_what_is_returned_unlocks_the_storage() -> None:
    (unlock,) = only(explain(opened(held_step()), "mm")).unlocks
    assert unlock.change == "return a copy of output 0 (.clone())"
    assert "takes 64 B" in unlock.effect
    # The same model with the copy.
    facts = FactsBuilder()
    region, x, w = step(facts)
    y = region.op("aten.mm.default", [x, w], SHAPE, name="mm")
    region.save(region.view(region.view(y, FLAT), (2048, 1024)))
    region.output(region.op("aten.clone.default", [region.view(y, (16,))], (16,)))
    assert entry_of(make_plan(facts.build()), "mm").action == "keep"


def test_a_copy_of_a_returned_view_is_not_offered_where_something_else_holds_it() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    view = region.view(x, FLAT, name="view")
    region.save(view)
    region.output(region.view(x, (16,), name="head"))
    found = only(explain(opened(facts.build()), "view"))
    assert [unlock.change.split()[0] for unlock in found.unlocks] == ["let"]


def test_nothing_unlocks_a_parameter() -> None:
    found = only(explain(opened(NAMED, NAMED_PLAN), "layers.0.up.weight"))
    assert (found.action, found.unlocks) == ("skipped", ())


# --- uses -----------------------------------------------------------------------------------------


def test_uses_are_of_both_passes_in_order() -> None:
    for same_storages in (False, True):
        facts = FactsBuilder(same_storages=same_storages)
        region, x, _ = step(facts)
        y = region.op("aten.relu.default", [x], SHAPE, name="relu")
        view = region.view(y, FLAT, name="flat")
        region.op("aten.add_.Tensor", [view], (4,), name="add_", mutates=[view])
        region.op("aten.sum.default", [view], (), name="sum")
        region.save(view)
        found = only(explain(opened(facts.build()), "relu"))
        assert [(use.at.phase, use.does, use.at.origin.name) for use in found.uses][:4] == [
            ("forward", "makes", "relu"),
            ("forward", "views", "flat"),
            ("forward", "writes", "add_"),
            ("forward", "reads", "sum"),
        ]
        assert [(use.at.index, use.at.phase, use.does) for use in found.uses][4:] == [
            (4, "backward", "reads")
        ]


# --- effects --------------------------------------------------------------------------------------


def planned(facts: GraphFacts, share: float) -> Plan:
    """A plan between the floor and the peak, everything movable however small."""
    floor = make_plan(facts, min_bytes=1).predicted
    peak, least = floor.no_plan.peak_bytes, floor.floor_bytes
    limit = least + round(share * (peak - least))
    aim = Aim(profile=H200)
    return make_plan(facts, min_bytes=1, budget=limit, aim=aim)


@settings(DRAWN, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from((0.0, 0.5, 1.0)), st.integers(1, 2))
def test_another_action_is_a_plan_that_holds_and_does_what_is_said(
    seed: int, share: float, regions: int
) -> None:
    facts = random_step(Random(seed), regions=regions)
    plan = planned(facts, share)
    effects = Effects(plan, facts, facts, H200)
    for entry in plan.storages:
        effect, transfers = effects.of_entry(entry), effects.other_transfers(entry)
        if effect is None or transfers is None:
            assert entry.footprint is None
            continue
        moved = {(transfer.region, transfer.storage) for transfer in transfers}
        assert ((entry.region, entry.id) in moved) == (entry.action != "offload")
        after = predict(facts, transfers, plan.predicted.conditions)
        assert effect.other_peak_bytes == after.peak_bytes
        check_plan(facts, with_transfers(plan, transfers, after))


@pytest.mark.parametrize("budget", [None, 0])
def test_effects_of_what_a_compiler_fuses_are_as_it_is_run(budget: int | None) -> None:
    facts = fused_step()
    plan = make_plan(facts, min_bytes=1, budget=budget, aim=Aim(profile=H200))
    effects = Effects(plan, facts, facts, H200)
    checked = 0
    for entry in plan.storages:
        effect, transfers = effects.of_entry(entry), effects.other_transfers(entry)
        if effect is None or transfers is None:
            continue
        checked += 1
        after = predict(*as_run(facts, transfers), plan.predicted.conditions)
        assert effect.other_peak_bytes == after.peak_bytes
        assert effect.laid_out_anew == (not plan.transfers or not transfers)
        check_plan(facts, with_transfers(plan, transfers, after))
    assert checked > 2


def with_transfers(plan: Plan, transfers: tuple[Transfer, ...], after: Prediction) -> Plan:
    """``plan`` with other transfers, and what that changes of it."""
    moved = {(transfer.region, transfer.storage) for transfer in transfers}
    entries = tuple(
        entry
        if entry.footprint is None
        else msgspec.structs.replace(
            entry, action="offload" if (entry.region, entry.id) in moved else "keep"
        )
        for entry in plan.storages
    )
    predicted = msgspec.structs.replace(plan.predicted, plan=after)
    return msgspec.structs.replace(
        plan, transfers=transfers, storages=entries, predicted=predicted, budget=None
    )


LAYERED = layered()


def test_keeping_what_moves_says_by_how_much_the_peak_is_over_the_budget() -> None:
    plan = make_plan(LAYERED, budget=of_bytes(limit_of(LAYERED, 0.5)), aim=Aim(profile=H200))
    moved = next(entry for entry in plan.storages if entry.action == "offload")
    found = explain(opened(LAYERED, plan), f"#{moved.id}", H200)
    (effect,) = only(found).effects
    assert effect.action == "keep"
    assert effect.other_peak_bytes > (plan.budget or 0) >= effect.peak_bytes
    over = format_size(effect.other_peak_bytes - (plan.budget or 0))
    assert f"{over} over the budget" in render_explanation(found)


def limit_of(facts: GraphFacts, share: float) -> int:
    predicted = make_plan(facts).predicted
    floor, peak = predicted.floor_bytes, predicted.no_plan.peak_bytes
    return floor + round(share * (peak - floor))


def test_moving_what_is_not_there_at_the_peak_leaves_it() -> None:
    facts = FactsBuilder()
    region = facts.region()
    region.gradient_shape = (1,)
    x = region.input("x", SHAPE)
    early = region.op("aten.relu.default", [x], SHAPE, name="early")
    big = region.op("aten.exp.default", [x], (16384, 2048), name="big")
    region.op("aten.sum.default", [big], (), name="sum")
    late = region.op("aten.cos.default", [x], SHAPE, name="late")
    region.save(early, late)
    built = facts.build()
    effects = {
        name: only(explain(opened(built), name, H200)).effects[0] for name in ("early", "late")
    }
    assert {name: effect.at_peak for name, effect in effects.items()} == {
        "early": True,
        "late": False,
    }
    assert effects["early"].other_peak_bytes < effects["early"].peak_bytes
    assert effects["late"].other_peak_bytes == effects["late"].peak_bytes
    said = render_explanation(explain(opened(built), "late", H200))
    assert "leaves the peak as it is, in aten.sum.default (op 2)" in " ".join(said.split())
    assert "it is not on the device then" in " ".join(said.split())


def activations() -> GraphFacts:
    """Layers that save a product, and what is cheap to compute of it."""
    facts = FactsBuilder(params={"layers": "4"})
    region = facts.region()
    weight = region.input("weight", (4096, 4096), kind="parameter")
    x = region.input("x", (4096, 4096))
    for number in range(4):
        module, source = f"layers.{number}", "net.py:20"
        y = region.op(
            "aten.mm.default", [x, weight], (4096, 4096), module=f"{module}.up", source=source
        )
        x = region.op("aten.relu.default", [y], (4096, 4096), module=module, source=source)
        region.save(y, x)
    region.output(region.op("aten.sum.default", [x], (), module="", source="net.py:30"))
    return facts.build()


ACTIVATIONS = activations()


def decided(share: float, actions: tuple[Action, ...] = ACTIONS) -> Opened:
    aim = Aim(profile=H200, actions=actions)
    decisions = Decisions(ACTIVATIONS, "whole-storage", MiB, aim)
    plan = decisions.plan(of_bytes(limit_of(ACTIVATIONS, share)))
    return Opened(plan, ACTIVATIONS, decisions.facts_of(plan))


JOINT = decided(0.4, ("keep", "recompute"))


def test_what_is_computed_again_says_from_what_at_what_price_and_what_keeping_would_do() -> None:
    assert JOINT.plan.recomputed
    for again in JOINT.plan.recomputed:
        found = only(explain(JOINT, again.name, H200))
        assert (found.action, found.recompute_us) == ("recompute", again.recompute_us)
        assert found.recompute_inputs == again.inputs
        assert next(use.does for use in found.uses if use.at.phase == "backward") == "makes again"
        (effect,) = found.effects
        assert effect.is_bound
        # The same choices without its ops: what is then not saved is not in the bound.
        choices = tuple(
            Choice(choice.region, tuple(op for op in choice.ops if op not in again.ops))
            for choice in JOINT.plan.choices
        )
        kept = predict(apply(ACTIVATIONS, choices), (), JOINT.plan.predicted.conditions)
        assert kept.peak_bytes <= effect.other_peak_bytes
        assert effect.other_peak_bytes <= effect.peak_bytes + again.size_bytes


def test_computing_again_what_is_kept_can_free_no_more_than_it_says() -> None:
    found = opened(ACTIVATIONS)
    for entry in found.plan.storages:
        explained = only(explain(found, f"#{entry.id}", H200))
        for effect in explained.effects:
            if effect.action == "recompute":
                assert effect.peak_bytes - entry.size_bytes <= effect.other_peak_bytes
                assert effect.step_ms is not None
                assert explained.recompute_us is not None
                added_ms = explained.recompute_us / 1000
                assert effect.other_step_ms == pytest.approx(effect.step_ms + added_ms)
    prices = [only(explain(found, f"#{entry.id}", H200)).recompute_us for entry in saved(found)]
    assert None not in prices


def saved(found: Opened) -> list[Entry]:
    return [entry for entry in found.plan.storages if entry.footprint is not None]


def test_a_faster_link_makes_moving_cheaper_and_a_slower_gpu_makes_it_wait_less() -> None:
    plan = make_plan(ACTIVATIONS, budget=0, aim=Aim(profile=H200))
    here, faster, slower = explain(opened(ACTIVATIONS, plan), "", H200).machines
    assert plan.predicted.time is not None
    assert here.step_ms == pytest.approx(plan.predicted.time.step_ms, abs=0.001)
    assert here.no_plan_ms == pytest.approx(plan.predicted.time.no_plan_ms, abs=0.001)
    assert faster.no_plan_ms == here.no_plan_ms
    assert faster.step_ms < here.step_ms
    assert None not in (here.no_plan_ms, slower.no_plan_ms)
    assert slower.step_ms / (slower.no_plan_ms or 1) < here.step_ms / (here.no_plan_ms or 1)


def test_without_a_profile_no_times_are_said() -> None:
    found = explain(opened(ACTIVATIONS), "layers.0.up", None)
    assert found.machines == ()
    effects = only(found).effects
    assert effects
    assert {effect.step_ms for effect in effects} == {None}
    assert only(found).recompute_us is None
    assert " ms" not in render_explanation(found)


# --- many storages --------------------------------------------------------------------------------


def test_identical_layers_are_one_row_and_rows_are_all_there_is() -> None:
    found = explain(opened(NAMED, NAMED_PLAN)).found
    rows = found_rows(found)
    assert {(row.module, row.count) for row in rows if row.rule == "eligible"} == {
        ("layers.0-2", 3),
        ("layers.0-2.up", 3),
    }
    assert sum(row.count for row in rows) == len(NAMED_PLAN.storages)
    assert sum(row.total_bytes for row in rows) == sum(e.size_bytes for e in NAMED_PLAN.storages)


def test_reasons_that_differ_in_prices_only_are_one_row() -> None:
    first, *others = explain(JOINT).found
    assert others
    priced = [
        msgspec.structs.replace(first, action="recompute", why=f"computing it again frees {n} GB")
        for n in (1.49, 1.62)
    ]
    (row,) = found_rows(priced)
    assert row.why == "computing it again frees 1.49 GB, or about that"


# --- the command ----------------------------------------------------------------------------------

runner = CliRunner()


def command(tmp_path: Path, found: Opened, *arguments: str, graphs: bool = True) -> Result:
    """``offplan explain`` of a plan file, with its base graphs beside it."""
    plan = tmp_path / "net.plan.yaml"
    write_plan(plan, found.plan)
    if graphs:
        assert found.base is not None
        (tmp_path / "net.graph.json").write_bytes(save_graph(found.base))
    return runner.invoke(app, ["explain", str(plan), *arguments], env={"COLUMNS": "80"})


def test_one_storage_in_full_at_80_columns(tmp_path: Path) -> None:
    done = command(tmp_path, opened(held_step()), "mm")
    assert (done.exit_code, done.stdout) == (0, HELD)


def test_the_whole_plan_at_80_columns(tmp_path: Path) -> None:
    done = command(tmp_path, JOINT)
    assert (done.exit_code, done.stdout) == (0, WHOLE)


def test_json_is_json_with_the_same_rows(tmp_path: Path) -> None:
    whole = json.loads(command(tmp_path, JOINT, "--format", "json", "--top", "1").stdout)
    (row,) = whole["found"]
    rows = found_rows([each for each in explain(JOINT).found if each.rule != "parameter"])
    assert row["ids"] == list(rows[0].ids)
    assert whole["not_shown_rows"] == len(rows) - 1
    assert whole["parameter_bytes"] == 4096 * 4096 * 4
    one = json.loads(command(tmp_path, JOINT, "layers.0.up", "--format", "json").stdout)
    (storage,) = one["storages"]
    assert storage["origin"]["module"] == "layers.0.up"
    assert {use["does"] for use in storage["uses"]} >= {"makes", "reads"}


def test_markdown_has_the_same_headings(tmp_path: Path) -> None:
    done = command(tmp_path, opened(held_step()), "mm", "--format", "markdown")
    headings = [line[4:] for line in done.stdout.splitlines() if line.startswith("### ")]
    assert headings[1:] == [
        "What is on it, and what keeps it past the forward",
        "What each rule set says",
        "What would unlock it",
        "Ops that use it",
    ]


def test_without_graphs_the_plan_is_explained_and_how_to_get_the_rest(tmp_path: Path) -> None:
    done = command(tmp_path, opened(held_step()), "mm", graphs=False)
    assert done.exit_code == 0
    assert "output 0 keeps the storage" in done.stdout
    assert "offplan analyze model.py --graph FILE.graph.json" in " ".join(done.stdout.split())
    assert "Ops that use it" not in done.stdout


def test_a_name_of_nothing_ends_with_one_and_names_that_are_near(tmp_path: Path) -> None:
    done = command(tmp_path, JOINT, "layers.9.up")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "error: nothing that the plan saves or computes again is called" in done.stderr
    assert "layers.0.up" in done.stderr


def test_other_machines_are_planned_for_when_asked(tmp_path: Path) -> None:
    done = command(tmp_path, JOINT, "--elsewhere", "--format", "json")
    assert done.exit_code == 0
    elsewhere = json.loads(done.stdout)["elsewhere"]
    aim = Aim(profile=H200, actions=JOINT.plan.actions)
    decisions = Decisions(ACTIVATIONS, "whole-storage", MiB, aim)
    expected = decisions.elsewhere(of_bytes(JOINT.plan.budget or 0))
    assert elsewhere == [msgspec.to_builtins(each) for each in expected]
    assert len(elsewhere) == 3


def test_other_machines_need_a_budget(tmp_path: Path) -> None:
    done = command(tmp_path, opened(ACTIVATIONS), "--elsewhere")
    assert done.exit_code == UsageError.exit_code
    assert "analyze with --budget" in done.stderr


HELD = """\
#2: 8.39 MB, skipped
  why        output 0 keeps the storage, and does not leave with it
  made by    mm, aten.mm.default (model.py:1)
  saved as   float32[2048, 1024], contiguous: 8.39 MB, position 0, by rows,
             aten.view.default (model.py:2)
  storage    8.39 MB on cuda, region 0
  computing  again takes 0.09 ms

What is on it, and what keeps it past the forward
  value                why it stays
  mm     made          gone with its last reader
  flat   view of mm    gone with its last reader
  rows   view of flat  saved
  head   view of mm    output 0
  held by output 0  rows <- flat <- mm -> head

What each rule set says
  no-view        alias  aten.view.default made it as a view, and this rule set
                        moves no view; output 0 is on its storage, too
  last-holder    alias  it is a view, and output 0 is another value on its
                        storage
  whole-storage  alias  output 0 keeps the storage, and does not leave with it

What would unlock it
  return a copy of output 0 (.clone()): the copy takes 64 B until the caller
  drops it, and all of the 8.39 MB could leave

Ops that use it
  0  forward makes   mm, aten.mm.default (model.py:1)
  1  forward views   flat, aten.view.default (model.py:2)
  2  forward views   rows, aten.view.default (model.py:2)
  3  forward views   head, aten.view.default (model.py:2)
  4  backward reads  grad_1, aten.mul.Tensor
"""

WHOLE = """\
model.py layers=4: 603.98 MB in 9 storages
  recompute   335.54 MB in 5 storages
  keep        201.33 MB in 3 storages
  skipped     67.11 MB in 1 storage
  parameters  67.11 MB in 1 storage, which stay
  peak        402.66 MB, 704.65 MB without a plan

The largest, folded over identical layers
  201.33 MB  recompute  3 x 67.11 MB aten.mm.default in layers.0-2.up
                        float32[4096, 4096] at net.py:20, #2 and others
                        computing it again frees 24.15 MB a millisecond
  134.22 MB  keep       2 x 67.11 MB aten.relu.default in layers.1,3
                        float32[4096, 4096] at net.py:20, #5 and others
                        the budget is met at the least time with it there
  134.22 MB  recompute  2 x 67.11 MB aten.relu.default in layers.0,2
                        float32[4096, 4096] at net.py:20, #3 and others
                        computing it again frees 2.08 GB a millisecond
   67.11 MB  skipped    x
                        float32[4096, 4096], #1
                        it is input x, which the caller keeps
   67.11 MB  keep       aten.mm.default in layers.3.up
                        float32[4096, 4096] at net.py:20, #8
                        the budget is met at the least time with it there
  offplan explain PLAN '#2' explains one; a module path, op or file:line, some

This plan, on other machines
  machine               no plan     step    cost
  as it is              11.9 ms  20.3 ms  +70.4%
  a link twice as fast  11.9 ms  20.3 ms  +70.4%
  a GPU half as fast    23.3 ms  40.1 ms  +72.0%
  what a new plan for the same peak would do there: --elsewhere
"""
