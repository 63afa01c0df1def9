"""The plan's counts and file, and check_plan against plans that are right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import yaml
from facts_builder import DRAWN, FactsBuilder, MiB, RegionBuilder, graph_facts, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan import eligibility
from offplan.budget import FLOOR, Aim, parse_budget
from offplan.costs import profile_for
from offplan.eligibility import RULE_SETS, RuleSet
from offplan.errors import BudgetError, FileFormatError, OutputError, PlanError
from offplan.gpus import GPUS
from offplan.graph import GraphBreak, GraphFacts, ModelTensor, Value, ValueId
from offplan.memory import Conditions, predict
from offplan.plan import (
    ACTIONS,
    Entry,
    Plan,
    analyze_command,
    cases,
    check_plan,
    dump_plan,
    load_plan,
    make_plan,
    write_plan,
)
from offplan.transfers import Transfer

replace = msgspec.structs.replace
SHAPE = (2048, 1024)
FLAT = (2048 * 1024,)
BYTES = 8 * MiB


def build() -> tuple[FactsBuilder, RegionBuilder, ValueId]:
    facts = FactsBuilder(params={"seq": "4", "batch": "2"})
    region = facts.region()
    x = region.input("x", SHAPE)
    y = region.op(
        "aten.relu.default", [x], SHAPE, name="relu", module="layers.0", source="model.py:7"
    )
    return facts, region, y


def view_plan() -> tuple[GraphFacts, Plan]:
    """One activation of 8 MiB, saved through a view, moved."""
    facts, region, y = build()
    region.save(region.view(y, FLAT, name="view", module="layers.0", source="model.py:8"))
    built = facts.build()
    return built, make_plan(built, budget=0)


def chain(length: int = 4, device: str = "cuda") -> GraphFacts:
    """Activations of 8 MiB, each made of the one before, all saved, and read in reverse."""
    facts = FactsBuilder(device=device)
    region = facts.region()
    value = region.input("x", SHAPE)
    for number in range(length):
        value = region.op("aten.relu.default", [value], SHAPE, name=f"relu_{number}")
        region.save(value)
    region.output(region.op("aten.sum.default", [value], (1,)))
    region.reads = [(position,) for position in reversed(range(length))]
    return facts.build()


# Budgets as they are asked for.  A size that no plan meets gives way to the floor.
BUDGETS = (None, "0", "floor", "auto", "100%", "95%", "70%", "40%")


def plan_within(facts: GraphFacts, text: str | None, aim: Aim, rules: RuleSet) -> Plan:
    budget = None if text is None or (text, facts.device) == ("auto", "cpu") else parse_budget(text)
    try:
        return make_plan(facts, rules=rules, min_bytes=0, budget=budget, aim=aim)
    except BudgetError as error:
        return make_plan(facts, rules=rules, min_bytes=0, budget=error.floor_bytes, aim=aim)


conditions = st.builds(
    Conditions,
    optimizer=st.sampled_from(("none", "sgd", "adamw", "adafactor")),
    accumulate=st.booleans(),
    expandable_segments=st.booleans(),
)
aims = st.builds(
    Aim,
    host_bytes=st.sampled_from((None, 0, 100_000, 2**40)),
    conditions=conditions,
    profile=st.sampled_from((None, profile_for("h100"), profile_for("t4"))),
)


# --- counts ---------------------------------------------------------------------------------------


def test_a_4_mib_view_of_a_32_mib_storage_frees_32_and_carries_4() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (4,))
    # 8 Mi elements of float32: 32 MiB; rows 2048 to 3071 of 8192, 4 KiB each: 8 to 12 MiB.
    y = region.op("aten.relu.default", [x], (8192, 1024))
    region.save(region.view(y, (1024, 1024), offset=2048 * 1024))
    plan = make_plan(facts.build(), budget=0)
    assert plan.saved_bytes == plan.movable_bytes == plan.moved_bytes == 32 * MiB
    assert plan.staying_bytes == 0
    (transfer,) = plan.transfers
    assert (transfer.start, transfer.stop) == (8 * MiB, 12 * MiB)
    assert transfer.transfer_bytes == 4 * MiB
    (entry,) = plan.storages
    assert entry.footprint is not None
    assert entry.footprint.device_bytes == 4 * MiB


def test_bytes_that_stay_are_saved_less_movable_each_storage_once() -> None:
    facts, region, y = build()
    weight = region.input("w", (1024, 1024), kind="parameter")
    region.save(weight, region.view(weight, (1024 * 1024,)), y, region.view(y, FLAT))
    plan = make_plan(facts.build())
    # 4 MiB of parameter stay; 8 MiB of activation could leave, and do not without a budget.
    assert plan.saved_bytes == 12 * MiB
    assert plan.movable_bytes == BYTES
    assert plan.staying_bytes == 4 * MiB
    assert plan.moved_bytes == 0
    assert [entry.action for entry in plan.storages] == ["skipped", "keep"]
    assert plan.transfers == ()


def test_storages_on_the_host_are_in_no_count_of_device_bytes() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE, device="cpu")
    region.save(region.op("aten.relu.default", [x], SHAPE, device="cpu"))
    plan = make_plan(facts.build())
    assert (plan.saved_bytes, plan.staying_bytes) == (0, 0)
    assert plan.storages[0].rule == "host"


def test_an_older_rule_set_does_not_move_a_storage_that_a_holder_keeps() -> None:
    # last-holder lets y go (no aliasing op made it), but its view is returned to the caller.
    facts, region, y = build()
    region.save(y)
    region.output(region.view(y, FLAT), "flat")
    plan = make_plan(facts.build(), rules="last-holder", budget=0)
    (entry,) = plan.storages
    assert entry.views[0].verdicts["last-holder"].rule == "eligible"
    assert (entry.action, entry.rule, entry.holder) == ("skipped", "alias", "output flat")
    assert plan.transfers == ()
    assert plan.movable_bytes == 0


def test_an_entry_names_the_op_that_allocated_it_and_each_view_its_own() -> None:
    _, plan = view_plan()
    (entry,) = plan.storages
    assert (entry.name, entry.op, entry.module, entry.source) == (
        "relu",
        "aten.relu.default",
        "layers.0",
        "model.py:7",
    )
    (view,) = entry.views
    assert (view.name, view.op, view.source) == ("view", "aten.view.default", "model.py:8")


def test_a_saved_input_names_its_kind_and_name() -> None:
    facts = FactsBuilder()
    region = facts.region()
    region.save(region.input("tokens", SHAPE))
    (entry,) = make_plan(facts.build()).storages
    assert (entry.op, entry.name) == ("input", "tokens")
    assert (entry.views[0].op, entry.views[0].name) == ("input", "tokens")


def test_a_saved_size_has_an_entry_without_a_storage() -> None:
    facts, region, _ = build()
    region.save(facts.add(Value(kind="symint")))
    (entry,) = make_plan(facts.build()).storages
    assert (entry.id, entry.size_bytes, entry.rule) == (None, 0, "not_tensor")
    assert entry.views[0].dtype == "symint"


def test_a_value_saved_twice_is_one_view_at_two_positions() -> None:
    facts, region, y = build()
    region.save(y, y)
    built = facts.build()
    plan = make_plan(built, budget=0)
    (view,) = plan.storages[0].views
    assert (view.position, view.also_at) == (0, (1,))
    check_plan(built, plan)


def test_the_command_names_every_choice_that_is_not_the_default() -> None:
    facts = chain()
    conditions = Conditions("adamw", accumulate=True, expandable_segments=True)
    aim = Aim(
        host_bytes=2**30,
        conditions=conditions,
        profile=profile_for("a100"),
        op_ms={"an op": 1.0},
    )
    command = analyze_command(make_plan(facts, budget=parse_budget("90%"), aim=aim))
    assert command == (
        "offplan analyze model.py --actions keep,offload --budget 90% --profile a100 "
        "--op-times measured --optimizer adamw --accumulate --expandable-segments "
        "--host-budget 1073741824"
    )


def test_the_profile_of_the_gpu_itself_is_not_named() -> None:
    facts = replace(chain(), gpu=GPUS["a100"].name)
    plan = make_plan(facts, aim=Aim(profile=profile_for("a100"), actions=ACTIONS))
    assert plan.predicted.profile == "a100"
    assert analyze_command(plan) == "offplan analyze model.py --gpu a100"
    other = make_plan(facts, aim=Aim(profile=profile_for("h200"), actions=ACTIONS))
    assert analyze_command(other) == "offplan analyze model.py --gpu a100 --profile h200"
    # The CPU has no profile of its own, and no times are predicted for it.
    on_cpu = make_plan(chain(device="cpu"))
    assert (on_cpu.predicted.profile, on_cpu.predicted.time) == ("", None)
    assert "--profile" not in analyze_command(on_cpu)


@pytest.mark.parametrize("key", sorted(GPUS))
def test_a_shipped_profile_has_the_name_by_which_it_is_found(key: str) -> None:
    assert profile_for(GPUS[key].name).name == key


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_the_ledgers_in_a_plan_are_those_of_its_views(facts: GraphFacts) -> None:
    plan = make_plan(facts)
    for rules in RULE_SETS:
        found = [case for case, _, _ in cases(plan, rules)]
        assert eligibility.ledger(found) == plan.ledger[rules]


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_under_whole_storage_movable_bytes_are_the_ledgers_eligible_bytes(
    facts: GraphFacts,
) -> None:
    plan = make_plan(facts)
    eligible = [row for row in plan.ledger["whole-storage"] if row.rule == "eligible"]
    assert plan.movable_bytes == sum(row.storage_bytes for row in eligible)


# --- the file -------------------------------------------------------------------------------------


def test_the_first_line_says_what_the_file_is_and_how_to_make_it_again() -> None:
    facts, _ = view_plan()
    aim = Aim(actions=ACTIONS)
    plan = make_plan(facts, rules="no-view", min_bytes=MiB, budget=0, aim=aim)
    first = dump_plan(plan).split(b"\n")[0].decode()
    assert first == (
        "# offplan plan of model.py; make it again with: offplan analyze model.py "
        "-p batch=2 -p seq=4 --rules no-view --min-size 1MiB --budget 0"
    )


def test_the_command_quotes_what_a_shell_would_split() -> None:
    facts = FactsBuilder(spec="my model.py:f", params={"name": "a b"}, device="cpu")
    facts.region()
    command = analyze_command(make_plan(facts.build(), aim=Aim(actions=ACTIONS)))
    assert command == "offplan analyze 'my model.py:f' -p 'name=a b' --device cpu"


@settings(DRAWN, max_examples=60)
@given(
    st.one_of(graph_facts(), steps()), st.sampled_from(RULE_SETS), st.sampled_from(BUDGETS), aims
)
def test_a_plan_reads_back_as_written_and_the_same_facts_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    facts: GraphFacts,
    rules: RuleSet,
    budget: str | None,
    aim: Aim,
) -> None:
    plan = plan_within(facts, budget, aim, rules)
    content = dump_plan(plan)
    path = tmp_path_factory.getbasetemp() / "drawn.plan.yaml"
    path.write_bytes(content)
    loaded = load_plan(path)
    assert loaded == plan
    assert dump_plan(loaded) == content
    assert dump_plan(plan_within(facts, budget, aim, rules)) == content


@pytest.mark.parametrize("text", ["0", "floor", "auto", "95%", "40MiB", "41943040"])
def test_a_budget_reads_back_as_it_was_asked_for(tmp_path: Path, text: str) -> None:
    budget = parse_budget(text)
    plan = make_plan(chain(), budget=budget)
    write_plan(tmp_path / "plan.yaml", plan)
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded == plan
    assert f" --budget {text}" in analyze_command(loaded)
    # What it was asked for is enough to ask for it again.
    again = parse_budget(loaded.asked) if loaded.asked else loaded.budget
    assert make_plan(chain(), budget=again) == plan


@settings(DRAWN, max_examples=60)
@given(st.text(max_size=20), st.text(max_size=20))
def test_any_name_of_a_target_or_holder_reads_back(
    tmp_path_factory: pytest.TempPathFactory, spec: str, name: str
) -> None:
    facts = FactsBuilder(spec=spec, params={name: spec})
    facts.breaks = (GraphBreak(reason=name, source=spec),)
    region = facts.region()
    region.save(region.input(name, SHAPE))
    plan = make_plan(facts.build())
    path = tmp_path_factory.getbasetemp() / "named.plan.yaml"
    path.write_bytes(dump_plan(plan))
    assert load_plan(path) == plan


def test_a_name_that_is_not_unicode_is_an_error_not_a_traceback() -> None:
    facts = FactsBuilder(spec="mod\udce9l.py")
    facts.region()
    with pytest.raises(OutputError, match="not Unicode"):
        dump_plan(make_plan(facts.build()))


def test_the_file_is_plain_yaml_to_anyone_else() -> None:
    _, plan = view_plan()
    document = yaml.safe_load(dump_plan(plan))
    assert document["moved_bytes"] == BYTES
    assert document["storages"][0]["views"][0]["shape"] == [2048 * 1024]


def test_the_file_is_the_same_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = view_plan()
    document = msgspec.to_builtins(plan)
    python_text = yaml.dump(
        document,
        Dumper=yaml.SafeDumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=2**20,
    )
    assert dump_plan(plan).decode().split("\n", 1)[1] == python_text


def test_a_plan_of_nine_hundred_views_is_read_as_it_was_written(tmp_path: Path) -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    for layer in range(450):
        y = region.op("aten.mm.default", [x], SHAPE, module=f"layers.{layer}")
        region.save(y, region.view(y, FLAT, module=f"layers.{layer}"))
    plan = make_plan(facts.build(), budget=0)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    assert load_plan(path) == plan


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"schema_version: 3", b"schema_version: 1", "version 1, this offplan reads 2 and 3"),
        (b"schema_version: 3\n", b"", "has no schema_version"),
        (b"torch: 2.14.1", b"torch: [2]", r"Expected `str`, got `array` - at `\$.torch`"),
        (b"torch: 2.14.1\n", b"", "missing required field `torch`"),
        (b"rules: whole-storage", b"rules: all", r"Invalid enum value 'all' - at `\$.rules`"),
        (b"min_bytes: 5242880", b"min_bytes: -1", r"`int` >= 0 - at `\$.min_bytes`"),
        (b"min_bytes: 5242880", b"min_bytes: .nan", r"got `str` - at `\$.min_bytes`"),
        (b"min_bytes: 5242880", b"min_bytes: " + b"9" * 5000, r"got `str` - at `\$.min_bytes`"),
        (b"budget: 0", b"budgets: 0", "unknown field `budgets`"),
        (b" id: 1\n  size_bytes: 8", b" id: 1\n  size_bytes: x", r"`\$.storages\[0\].size_bytes`"),
        (
            b"\n    peak_bytes: ",
            b"\n    peak: ",
            r"unknown field `peak` - at `\$.predicted.no_plan`",
        ),
        (b"profile: h200", b"profile: [h200]", r"got `array` - at `\$.predicted.profile`"),
        (b"position: 0", b"position: true", r"views\[0\].position`"),
        (b"  - position: 0", b"  - position: 0\n    also_at: [0]", "position 0 .* is there twice"),
        (b"      no-view: {rule: alias}\n", b"", "not a verdict for every rule set"),
        (b"  no-view:\n", b"  no-vieW:\n", r"at `key` in `\$.ledger`"),
    ],
)
def test_a_changed_plan_is_refused_naming_the_field(
    tmp_path: Path, old: bytes, new: bytes, problem: str
) -> None:
    _, plan = view_plan()
    content = dump_plan(plan)
    assert old in content
    path = tmp_path / "plan.yaml"
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(FileFormatError, match=problem):
        load_plan(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"- 1\n",
        b"hello\n",
        b"\x89PNG\r\n",
        b"schema_version: [1]\n",
        b"schema_version: 1\n",
        b"{" * 5000,
        b"a: &a [*a]\n",
        b"\xff\xfe\x00",
        b'{"target":{"spec":"model.py"}}',
    ],
)
def test_a_foreign_file_is_not_a_plan_and_the_message_says_how_to_get_one(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)


@settings(DRAWN, max_examples=60)
@given(st.data())
def test_a_plan_with_any_byte_changed_is_read_or_refused_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    _, plan = view_plan()
    content = bytearray(dump_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "broken.plan.yaml"
    path.write_bytes(bytes(content))
    with suppress(FileFormatError):
        assert dump_plan(load_plan(path))


# --- the proof ------------------------------------------------------------------------------------


@settings(DRAWN, max_examples=150)
@given(
    st.one_of(graph_facts(), steps()), st.sampled_from(RULE_SETS), st.sampled_from(BUDGETS), aims
)
def test_every_plan_that_is_made_passes(
    facts: GraphFacts, rules: RuleSet, budget: str | None, aim: Aim
) -> None:
    plan = plan_within(facts, budget, aim, rules)
    check_plan(facts, plan)
    if plan.budget:
        assert plan.predicted.plan.peak_bytes <= plan.budget


def with_transfer(plan: Plan, place: int, transfer: Transfer) -> Plan:
    transfers = [*plan.transfers]
    transfers[place] = transfer
    return replace(plan, transfers=tuple(transfers))


def shifted(field: str, by: int) -> Callable[[Transfer], Transfer]:
    return lambda transfer: replace(transfer, **{field: getattr(transfer, field) + by})


def carrying(transfer: Transfer, start: int, stop: int) -> Transfer:
    return replace(transfer, start=start, stop=stop, transfer_bytes=stop - start, packed=False)


def released_before_its_last_use(transfer: Transfer) -> Transfer:
    before = transfer.offload_after - 1
    return replace(transfer, offload_after=before, release_by=before)


BREAKS: dict[str, Callable[[Transfer], Transfer]] = {
    "released before it is copied": lambda t: replace(t, release_by=t.offload_after - 1),
    "released before its last use": released_before_its_last_use,
    "waited for after its first use": shifted("needed_by", 1),
    "reloaded after it is needed": lambda t: replace(t, reload_at=t.needed_by + 1),  # type: ignore[operator]
    "reloaded before the backward": lambda t: replace(t, reload_at=t.release_by),
    "needed before it is reloaded": lambda t: replace(t, needed_by=t.reload_at - 1),  # type: ignore[operator]
    "never reloaded": lambda t: replace(t, reload_at=None, needed_by=None),
    "reloaded but never waited for": lambda t: replace(t, needed_by=None),
    "released in the backward": lambda t: replace(t, release_by=t.needed_by),
    "first byte not carried": lambda t: carrying(t, t.start + 1, t.stop),
    "last byte not carried": lambda t: carrying(t, t.start, t.stop - 1),
    "carried past the end": lambda t: carrying(t, t.start, t.stop + 2**50),
    "carrying more than its range": shifted("transfer_bytes", 2**50),
    "carrying less than its range": lambda t: replace(t, transfer_bytes=0),
    "of another region": shifted("region", 1),
    "of another storage": shifted("storage", 1),
    "of no storage": shifted("storage", 2**40),
}


@settings(DRAWN, max_examples=100)
@given(graph_facts(), st.sampled_from(sorted(BREAKS)), st.data())
def test_a_transfer_that_is_changed_to_be_wrong_is_refused(
    facts: GraphFacts, name: str, data: st.DataObject
) -> None:
    plan = make_plan(facts, min_bytes=0, budget=0)
    read = [i for i, t in enumerate(plan.transfers) if t.needed_by is not None]
    if not read:
        return
    place = data.draw(st.sampled_from(read))
    with pytest.raises(PlanError):
        check_plan(facts, with_transfer(plan, place, BREAKS[name](plan.transfers[place])))


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_each_wrong_change_is_refused_naming_the_storage(name: str) -> None:
    facts, plan = view_plan()
    wrong = with_transfer(plan, 0, BREAKS[name](plan.transfers[0]))
    with pytest.raises(PlanError, match=r"storage \d+"):
        check_plan(facts, wrong)


def test_a_read_of_a_released_storage_names_the_storage_the_op_and_its_line() -> None:
    facts, plan = view_plan()
    wrong = with_transfer(plan, 0, replace(plan.transfers[0], offload_after=0, release_by=0))
    with pytest.raises(PlanError) as caught:
        check_plan(facts, wrong)
    assert str(caught.value) == (
        "storage 1 is read by op 1 (view) after its release\n  at: layers.0 model.py:8"
    )


def test_a_write_after_the_copy_is_refused_even_before_the_release() -> None:
    facts, region, y = build()
    region.op("aten.add_.Tensor", [y], (4,), name="add_", mutates=[y])
    region.save(y)
    built = facts.build()
    plan = make_plan(built, budget=0)
    check_plan(built, plan)
    wrong = with_transfer(plan, 0, replace(plan.transfers[0], offload_after=0))
    with pytest.raises(PlanError, match=r"storage 1 is written by op 1 \(add_\)"):
        check_plan(built, wrong)


@pytest.mark.parametrize("held_as", ["input", "output"])
def test_a_storage_that_the_caller_holds_may_not_be_moved(held_as: str) -> None:
    facts, region, y = build()
    held = y if held_as == "output" else region.inputs[0].value
    region.save(held)
    if held_as == "output":
        region.output(y)
    built = facts.build()
    plan = make_plan(built, budget=0)
    (entry,) = plan.storages
    assert entry.id is not None
    transfer = Transfer(0, entry.id, 0, BYTES, BYTES, 0, 0, 1, 1)
    wrong = replace(plan, storages=(replace(entry, action="offload"),), transfers=(transfer,))
    with pytest.raises(PlanError, match=f"is offloaded, but .*{held_as}"):
        check_plan(built, wrong)


def recounted(facts: GraphFacts, plan: Plan) -> Plan:
    """``plan`` with the peak that its transfers, as they are now, make."""
    found = predict(facts, plan.transfers, plan.predicted.conditions)
    return replace(plan, predicted=replace(plan.predicted, plan=found))


def test_a_predicted_peak_that_is_edited_by_hand_is_refused_with_both_numbers() -> None:
    facts = chain()
    plan = make_plan(facts, budget=FLOOR)
    peak = plan.predicted.plan.peak_bytes
    edited = replace(plan.predicted.plan, peak_bytes=peak - 512)
    with pytest.raises(PlanError, match=f"peak of {peak - 512} .* make one of {peak}") as caught:
        check_plan(facts, replace(plan, predicted=replace(plan.predicted, plan=edited)))
    assert caught.value.fix == (
        "make it again with: offplan analyze model.py --actions keep,offload --budget floor"
    )


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(
            lambda t, plan: replace(t, release_by=plan.regions[0].forward_ops - 1), id="out"
        ),
        pytest.param(lambda t, plan: replace(t, reload_at=plan.regions[0].forward_ops), id="back"),
    ],
)
def test_transfers_that_are_edited_to_hold_more_are_refused(
    late: Callable[[Transfer, Plan], Transfer],
) -> None:
    facts = chain()
    plan = make_plan(facts, budget=FLOOR)
    assert plan.budget is not None
    held = replace(plan, transfers=tuple(late(transfer, plan) for transfer in plan.transfers))
    # Each window is still in order and no read comes too early: only the bytes are wrong.
    with pytest.raises(PlanError, match="predicts a peak of"):
        check_plan(facts, held)
    # Nor does it help to correct the prediction, since the budget is what it was.
    found = recounted(facts, held)
    peak = found.predicted.plan.peak_bytes
    assert peak > plan.budget
    with pytest.raises(
        PlanError, match=f"peak of {peak} bytes is over its budget of {plan.budget}"
    ):
        check_plan(facts, found)
    check_plan(facts, replace(found, budget=peak))


@pytest.mark.parametrize("text", ["floor", "95%", "34MiB"])
def test_a_plan_within_any_budget_is_for_its_own_graphs_only(text: str) -> None:
    plan = make_plan(chain(), budget=parse_budget(text))
    assert plan.transfers
    check_plan(chain(), plan)
    with pytest.raises(PlanError, match="was made for other graphs"):
        check_plan(chain(5), plan)


def test_a_prediction_under_other_conditions_is_refused() -> None:
    weight = ModelTensor("parameter", ("w",), "float32", (2**20,), 4 * MiB, requires_grad=True)
    facts = replace(chain(), model=(weight,))
    plan = make_plan(facts, aim=Aim(conditions=Conditions("adamw")))
    check_plan(facts, plan)
    without = replace(plan, predicted=replace(plan.predicted, conditions=Conditions()))
    with pytest.raises(PlanError, match="predicts a peak of"):
        check_plan(facts, without)


def change_entry(plan: Plan, **changes: object) -> Plan:
    return replace(plan, storages=(replace(plan.storages[0], **changes),))


def change_view(plan: Plan, **changes: object) -> Plan:
    entry: Entry = plan.storages[0]
    return change_entry(plan, views=(replace(entry.views[0], **changes),))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda plan: replace(plan, storages=()), "no view for saved position 0"),
        (lambda plan: replace(plan, transfers=()), "is offloaded, but has no transfer"),
        (lambda plan: replace(plan, transfers=plan.transfers * 2), "or has two"),
        (lambda plan: change_entry(plan, action="keep"), "no entry of region 0 that is offloaded"),
        (lambda plan: change_entry(plan, size_bytes=1), "has 8388608 bytes, the plan says 1"),
        (lambda plan: change_entry(plan, id=10**9), "is not in the graphs"),
        (lambda plan: change_entry(plan, region=7), "region 7 saves nothing"),
        (lambda plan: change_view(plan, offset=4), "is not what the graphs save"),
        (lambda plan: change_view(plan, dtype="int8"), "is not what the graphs save"),
        (lambda plan: change_view(plan, also_at=(1,)), "saves nothing at position 1"),
    ],
)
def test_entries_that_are_not_the_saved_values_are_refused(
    change: Callable[[Plan], Plan], problem: str
) -> None:
    facts, plan = view_plan()
    with pytest.raises(PlanError, match=problem):
        check_plan(facts, change(plan))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"torch": "2.11.0"}, "torch was 2.11.0, is 2.14.1"),
        ({"partitioner": "default"}, "partitioner was default, is min-cut"),
        ({"regions": ()}, "regions was 0, is 1; ops was 0, is 3; saved values was 0, is 1"),
        ({}, "the model's code changed"),
    ],
)
def test_a_plan_for_other_graphs_is_refused_saying_what_changed(
    change: dict[str, object], problem: str
) -> None:
    facts, plan = view_plan()
    other = replace(plan, digest="sha256:0", **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=problem) as caught:
        check_plan(facts, other)
    assert "offplan analyze" in caught.value.fix
