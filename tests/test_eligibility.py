"""Each rule set on small graphs worked out by hand, and on drawn graphs against a slow oracle."""

from __future__ import annotations

import pytest
from facts_builder import DRAWN, FactsBuilder, MiB, RegionBuilder, graph_facts
from hypothesis import given, settings

from offplan.eligibility import (
    RULE_SETS,
    RULES,
    Case,
    Rule,
    RuleSet,
    cases,
    index,
    ledger,
    ledger_by_holder,
    verdicts,
)
from offplan.graph import GraphFacts, Op, Region, StorageId, Value, ValueId

# 8 MiB of float32.
SHAPE = (2048, 1024)
FLAT = (2048 * 1024,)
BYTES = 8 * MiB


def build() -> tuple[FactsBuilder, RegionBuilder, ValueId]:
    """A builder with one region and an activation ``y`` of 8 MiB in it, made by relu."""
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    y = region.op("aten.relu.default", [x], SHAPE, name="relu")
    return facts, region, y


def rules_of(facts: FactsBuilder) -> dict[RuleSet, list[Rule | None]]:
    found = index(facts.build())
    return {name: [verdict.rule for verdict in verdicts(found, name)] for name in RULE_SETS}


def every_set(rules: list[Rule | None]) -> dict[RuleSet, list[Rule | None]]:
    return {"no-view": rules, "last-holder": rules, "whole-storage": rules}


def holders_of(facts: FactsBuilder, rules: RuleSet) -> list[str]:
    return [verdict.holder for verdict in verdicts(index(facts.build()), rules)]


def test_the_only_saved_view_of_an_activation_is_refused_by_no_view_alone() -> None:
    facts, region, y = build()
    region.save(region.view(y, FLAT))
    assert rules_of(facts) == {
        "no-view": ["alias"],
        "last-holder": [None],
        "whole-storage": [None],
    }
    assert holders_of(facts, "no-view") == [""]


def test_a_base_saved_beside_its_view_is_moved_by_the_older_sets_without_the_view() -> None:
    facts, region, y = build()
    region.save(y, region.view(y, FLAT))
    assert rules_of(facts) == {
        "no-view": [None, "alias"],
        "last-holder": [None, "alias"],
        "whole-storage": [None, None],
    }
    assert holders_of(facts, "last-holder") == ["", "saved relu"]


def test_three_chunks_of_one_storage_hold_each_other_except_under_whole_storage() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (512, 1024))
    # 512 rows of 3 * 1024 float32: 6 MiB, of which each chunk carries 2 MiB.
    qkv = region.op("aten.mm.default", [x], (512, 3072))
    chunks = [
        region.view(qkv, (512, 1024), (3072, 1), 1024 * i, name=f"split_{i}", module="attn")
        for i in range(3)
    ]
    region.save(*chunks)
    assert rules_of(facts) == {
        "no-view": ["alias"] * 3,
        "last-holder": ["alias"] * 3,
        "whole-storage": [None] * 3,
    }
    assert holders_of(facts, "last-holder") == [
        "saved split_1 (attn)",
        "saved split_0 (attn)",
        "saved split_0 (attn)",
    ]


def test_a_detach_of_the_output_stays_because_the_caller_holds_it() -> None:
    # What exp() saves.
    facts, region, y = build()
    region.save(region.view(y, SHAPE, target="aten.detach.default"))
    region.output(y)
    assert rules_of(facts) == every_set(["alias"])
    assert holders_of(facts, "whole-storage") == ["output 0"]


def test_a_saved_value_that_is_returned_is_output_not_alias() -> None:
    facts, region, y = build()
    region.save(y)
    region.output(y, "logits")
    assert rules_of(facts) == every_set(["output"])
    assert holders_of(facts, "whole-storage") == ["output logits"]


def test_the_new_value_of_a_mutated_input_is_an_output() -> None:
    facts, region, y = build()
    region.save(y)
    region.output(y, "bn.running_mean", "mutated")
    assert holders_of(facts, "whole-storage") == ["mutated bn.running_mean"]
    assert rules_of(facts)["no-view"] == ["output"]


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_view_of_a_parameter_or_buffer_is_the_models(kind: str) -> None:
    facts = FactsBuilder()
    region = facts.region()
    weight = region.input("lm_head.weight", SHAPE, kind=kind)  # type: ignore[arg-type]
    region.save(weight, region.view(weight, (1024, 2048), (1, 1024), target="aten.t.default"))
    assert rules_of(facts) == every_set(["parameter", "parameter"])
    assert holders_of(facts, "no-view") == [f"{kind} lm_head.weight"] * 2


@pytest.mark.parametrize("kind", ["input", "constant", "handed"])
def test_an_input_stays_and_so_do_its_views(kind: str) -> None:
    facts = FactsBuilder()
    region = facts.region()
    tokens = region.input("tokens", SHAPE, kind=kind)  # type: ignore[arg-type]
    region.save(tokens, region.view(tokens, FLAT))
    assert rules_of(facts) == every_set(["input", "alias"])
    assert holders_of(facts, "whole-storage") == [f"{kind} tokens"] * 2


def test_a_value_that_no_op_makes_is_the_callers_and_so_holds_its_views() -> None:
    facts = FactsBuilder()
    region = facts.region()
    stray = facts.tensor(SHAPE)
    region.save(stray, region.view(stray, FLAT))
    assert rules_of(facts)["whole-storage"] == ["input", "alias"]


def test_the_holder_is_the_first_of_parameter_input_output_saved() -> None:
    facts, region, y = build()
    view = region.view(y, FLAT, name="view")
    region.save(view, y)
    region.output(region.view(y, FLAT), "flat")
    assert holders_of(facts, "last-holder") == ["output flat", ""]
    assert holders_of(facts, "whole-storage") == ["output flat", "output flat"]


def test_a_last_holder_with_gaps_or_overlap_is_refused_for_its_layout() -> None:
    facts, region, y = build()
    z = region.op("aten.sin.default", [y], SHAPE)
    stepped = region.view(y, (1024, 1024), (2048, 2))
    expanded = region.view(z, (2, *SHAPE), (0, 1024, 1))
    region.save(stepped, expanded)
    assert rules_of(facts) == {
        "no-view": ["alias", "alias"],
        "last-holder": ["alias_layout", "alias_layout"],
        "whole-storage": [None, None],
    }


def test_a_dense_last_holder_may_be_transposed() -> None:
    facts, region, y = build()
    region.save(region.view(y, (1024, 2048), (1, 1024)))
    assert rules_of(facts)["last-holder"] == [None]


def test_a_value_that_owns_its_storage_is_not_asked_for_its_layout() -> None:
    facts, region, y = build()
    region.save(region.op("aten.empty_strided.default", [y], (1024, 1024), stride=(4096, 1)))
    assert rules_of(facts) == every_set([None])


def test_the_minimum_is_asked_of_the_whole_storage_however_small_the_view() -> None:
    # 4 KiB of 8 MiB leave; 4 MiB of 4 MiB stay.
    facts, region, y = build()
    region.save(region.view(y, (1024,)))
    region.save(region.op("aten.mm.default", [y], (1024, 1024)))
    assert rules_of(facts)["whole-storage"] == [None, "too_small"]


def test_a_storage_of_exactly_the_minimum_leaves() -> None:
    facts, region, y = build()
    region.save(y)
    found = index(facts.build())
    assert [v.rule for v in verdicts(found, "whole-storage", BYTES)] == [None]
    assert [v.rule for v in verdicts(found, "whole-storage", BYTES + 1)] == ["too_small"]


def test_integers_leave_only_under_whole_storage_and_random_state_never() -> None:
    facts, region, y = build()
    region.save(region.op("aten.gt.Scalar", [y], (8 * MiB,), "bool"))
    region.save(region.op("aten.rand.default", [y], (8 * MiB,), "int64", rng_state=True))
    assert rules_of(facts) == {
        "no-view": ["not_float", "rng_state"],
        "last-holder": ["not_float", "rng_state"],
        "whole-storage": [None, "rng_state"],
    }


def test_random_state_on_a_storage_holds_the_other_views_of_it() -> None:
    facts, region, y = build()
    state = region.view(y, (16,), name="state", rng_state=True)
    region.save(state, y)
    assert rules_of(facts)["whole-storage"] == ["rng_state", "alias"]
    assert holders_of(facts, "whole-storage") == ["", "saved state"]


def test_a_sparse_view_on_a_storage_holds_the_others_and_names_its_layout() -> None:
    facts, region, y = build()
    sparse = facts.add(Value(kind="tensor", storage=facts.values[y].storage, layout="sparse_coo"))
    region.call("aten.to_sparse.default", [y], sparse, name="to_sparse")
    region.save(sparse, y)
    assert rules_of(facts)["whole-storage"] == ["unsupported", "alias"]
    assert holders_of(facts, "whole-storage") == ["layout sparse_coo", "saved to_sparse"]


def test_what_has_no_storage_or_no_size_is_said_to_be_so() -> None:
    facts, region, y = build()
    size = facts.add(Value(kind="symint"))
    unknown = facts.add(Value(kind="tensor", storage=facts.values[y].storage, symbolic="s0*8"))
    strange = facts.add(Value(kind="tensor", shape=(2,), stride=(1,), item_bytes=4))
    for value in (unknown, strange):
        region.call("aten.odd.default", [y], value)
    region.save(size, unknown, strange)
    assert rules_of(facts) == every_set(["not_tensor", "symbolic_size", "unsupported"])
    assert holders_of(facts, "no-view") == ["", "size s0*8", "layout unknown"]


def test_a_tensor_on_the_cpu_is_on_the_host_unless_the_trace_is_for_the_cpu() -> None:
    for device, expected in (("cuda", "host"), ("cpu", None)):
        facts = FactsBuilder(device=device)
        region = facts.region()
        x = region.input("x", SHAPE, device="cpu")
        region.save(region.op("aten.relu.default", [x], SHAPE, device="cpu"))
        assert rules_of(facts) == every_set([expected])


def test_a_view_of_zero_bytes_leaves_with_the_others_under_whole_storage() -> None:
    facts, region, y = build()
    region.save(y, region.view(y, (0, 1024)))
    assert rules_of(facts) == {
        "no-view": [None, "empty"],
        "last-holder": [None, "empty"],
        "whole-storage": [None, None],
    }


def test_a_storage_of_which_only_zero_bytes_are_saved_stays() -> None:
    facts, region, y = build()
    region.save(region.view(y, (0, 1024)))
    region.save(region.op("aten.empty.default", [y], (0,)))
    assert rules_of(facts) == every_set(["empty", "empty"])


def test_a_value_saved_twice_does_not_hold_itself_and_counts_once() -> None:
    facts, region, y = build()
    view = region.view(y, FLAT)
    region.save(view, view)
    assert rules_of(facts)["last-holder"] == [None, None]
    found = index(facts.build())
    (row,) = ledger(cases(found, verdicts(found, "last-holder")))
    assert (row.rule, row.count, row.logical_bytes, row.storage_bytes) == (
        "eligible",
        1,
        BYTES,
        BYTES,
    )


def test_an_op_that_declares_no_alias_is_no_view_to_the_older_sets() -> None:
    # _unsafe_view, and a custom op that returns its input.
    facts, region, y = build()
    region.save(region.view(y, FLAT, target="aten._unsafe_view.default", declares_alias=False))
    assert rules_of(facts) == every_set([None])


def test_an_op_that_declares_no_alias_holds_the_storage_all_the_same() -> None:
    facts, region, y = build()
    region.save(region.view(y, FLAT, name="view"))
    region.output(region.view(y, FLAT, declares_alias=False), "flat")
    assert rules_of(facts) == every_set(["alias"])
    assert holders_of(facts, "whole-storage") == ["output flat"]


def test_an_op_that_may_alias_but_allocated_makes_no_view() -> None:
    # aten.contiguous or reshape that had to copy.
    facts, region, y = build()
    z = facts.tensor(SHAPE)
    region.call("aten.reshape.default", [y], z, declares_alias=True)
    region.save(z)
    assert rules_of(facts) == every_set([None])


def test_holders_are_looked_for_in_the_region_that_saves() -> None:
    facts, region, y = build()
    region.save(y)
    region.output(y)
    later = facts.region()
    later.receive(y, "y", "handed")
    later.save(later.view(y, FLAT))
    assert holders_of(facts, "whole-storage") == ["output 0", "handed y"]


# --- the ledger -----------------------------------------------------------------------------------


def test_the_ledger_counts_a_storage_in_the_row_of_its_first_skipped_value() -> None:
    # y: 8 MiB, saved (eligible) and through a view (alias, 8 MiB more of logical bytes).
    facts, region, y = build()
    region.save(y, region.view(y, FLAT))
    found = index(facts.build())
    eligible, alias = ledger(cases(found, verdicts(found, "last-holder")))
    assert (eligible.rule, eligible.logical_bytes, eligible.storage_bytes) == (
        "eligible",
        BYTES,
        0,
    )
    assert (alias.rule, alias.holder, alias.logical_bytes, alias.storage_bytes) == (
        "alias",
        "saved",
        BYTES,
        BYTES,
    )


def test_an_expanded_view_carries_more_than_its_storage() -> None:
    # 1 MiB of float32 elements seen 4 times: 4 * 8 MiB logical, 8 MiB of storage.
    facts, region, y = build()
    region.save(region.view(y, (4, *SHAPE), (0, 1024, 1)))
    found = index(facts.build())
    (row,) = ledger(cases(found, verdicts(found, "whole-storage")))
    assert (row.logical_bytes, row.storage_bytes) == (4 * BYTES, BYTES)


def test_the_ledger_by_holder_has_a_row_for_each_holder() -> None:
    facts = FactsBuilder()
    region = facts.region()
    for name in ("a", "b"):
        region.save(region.input(name, SHAPE, kind="parameter"))
    found = index(facts.build())
    verdicts_ = verdicts(found, "no-view")
    assert [row.holder for row in ledger_by_holder(cases(found, verdicts_))] == [
        "parameter a",
        "parameter b",
    ]
    assert [row.holder for row in ledger(cases(found, verdicts_))] == ["parameter"]


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_the_ledger_adds_up(facts: GraphFacts) -> None:
    found = index(facts)
    saved = {
        (number, s.value): facts.values[s.value]
        for number, region in enumerate(facts.regions)
        for s in region.saved
    }
    storages = {value.storage for value in saved.values() if value.storage is not None}
    known = [value for value in saved.values() if value.kind == "tensor" and not value.symbolic]
    for rules in RULE_SETS:
        for rows in (
            ledger(cases(found, verdicts(found, rules))),
            ledger_by_holder(cases(found, verdicts(found, rules))),
        ):
            assert sum(row.count for row in rows) == len(saved)
            assert sum(row.logical_bytes for row in rows) == sum(v.logical_bytes for v in known)
            assert sum(row.storage_bytes for row in rows) == sum(
                facts.storages[storage].size_bytes for storage in storages
            )
            assert len({(row.rule, row.holder) for row in rows}) == len(rows)


def test_ledger_rows_are_in_the_order_of_the_rules_eligible_first() -> None:
    order: list[Rule | None] = [*reversed(RULES), None]
    found = [Case(0, i, StorageId(i), 1, 1, rule, "") for i, rule in enumerate(order)]
    assert [row.rule for row in ledger(found)] == ["eligible", *RULES]


# --- the oracle -----------------------------------------------------------------------------------


class Oracle:
    """The definitions, one saved value at a time, searching the whole region for each question."""

    def __init__(self, facts: GraphFacts, region: Region, rules: RuleSet, min_bytes: int) -> None:
        self.facts, self.region, self.rules, self.min_bytes = facts, region, rules, min_bytes

    def value(self, value: ValueId) -> Value:
        return self.facts.values[value]

    def saved(self) -> set[ValueId]:
        return {saved.value for saved in self.region.saved}

    def listed(self, *kinds: str) -> set[ValueId]:
        forward = self.region.forward
        return {item.value for item in forward.inputs if item.kind in kinds} | {
            item.value for item in forward.outputs if item.kind in kinds and item.value is not None
        }

    def given(self) -> set[ValueId]:
        return self.listed("input", "constant", "handed", "parameter", "buffer")

    def on(self, storage: StorageId | None, values: set[ValueId]) -> set[ValueId]:
        return {value for value in values if self.value(value).storage == storage}

    def maker(self, value: ValueId) -> Op | None:
        return next((op for op in self.region.forward.ops if value in op.outputs), None)

    def is_view(self, value: ValueId) -> bool:
        op = self.maker(value)
        storage = self.value(value).storage
        if op is None or not op.declares_alias:
            return False
        return any(self.value(v).storage == storage for v in op.inputs)

    def stays_alone(self, value: ValueId) -> bool:
        found = self.value(value)
        odd = found.kind != "tensor" or found.symbolic or found.layout != "strided"
        given = value in self.given() or self.maker(value) is None
        returned = value in self.listed("output", "mutated")
        return bool(odd or given or returned or found.rng_state)

    def empty(self, value: ValueId) -> bool:
        if self.rules != "whole-storage":
            return self.value(value).logical_bytes == 0
        together = self.on(self.value(value).storage, self.saved())
        return all(self.value(v).symbolic or self.value(v).logical_bytes == 0 for v in together)

    def alias(self, value: ValueId) -> bool:
        storage = self.value(value).storage
        outside = self.on(storage, self.given() | self.listed("output", "mutated"))
        keepers = outside | self.on(storage, self.saved())
        if self.rules == "no-view":
            return self.is_view(value)
        if self.rules == "last-holder":
            return self.is_view(value) and len(keepers) > 1
        if self.value(value).rng_state:
            return bool(outside)
        return any(self.stays_alone(other) for other in keepers - {value}) or bool(outside)

    def dense(self, value: ValueId) -> bool:
        found = self.value(value)
        reach = sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True))
        # As many places as elements, and every place taken: only then is the span the count.
        places = {0}
        for size, stride in zip(found.shape, found.stride, strict=True):
            if size > 1 and stride == 0:
                return False
        if reach + 1 != found.element_count:
            return False
        if found.element_count > 5000:
            # Drawn windows are small; larger values are whole and contiguous.
            return True
        for size, stride in zip(found.shape, found.stride, strict=True):
            places = {place + i * stride for place in places for i in range(size)}
        return len(places) == found.element_count

    def rule(self, value: ValueId) -> Rule | None:
        found = self.value(value)
        older = self.rules != "whole-storage"
        if found.kind != "tensor":
            return "not_tensor"
        if found.symbolic:
            return "symbolic_size"
        storage = None if found.storage is None else self.facts.storages[found.storage]
        if storage is not None and storage.device == "cpu" and self.facts.device != "cpu":
            return "host"
        if found.layout != "strided" or storage is None:
            return "unsupported"
        if self.empty(value):
            return "empty"
        if self.on(found.storage, self.listed("parameter", "buffer")):
            return "parameter"
        if value in self.given() or self.maker(value) is None:
            return "input"
        if value in self.listed("output", "mutated"):
            return "output"
        if self.alias(value):
            return "alias"
        if self.rules == "last-holder" and self.is_view(value) and not self.dense(value):
            return "alias_layout"
        if found.rng_state:
            return "rng_state"
        if older and not found.dtype.startswith(("float", "bfloat")):
            return "not_float"
        return "too_small" if storage.size_bytes < self.min_bytes else None


@settings(DRAWN, max_examples=150)
@given(graph_facts())
def test_every_verdict_is_what_the_definitions_say(facts: GraphFacts) -> None:
    found = index(facts)
    for rules in RULE_SETS:
        for verdict in verdicts(found, rules):
            region = facts.regions[verdict.region]
            oracle = Oracle(facts, region, rules, 5 * MiB)
            value = region.saved[verdict.position].value
            assert verdict.rule == oracle.rule(value), (rules, verdict)


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_a_holder_is_a_value_that_keeps_the_storage_and_is_not_the_value_itself(
    facts: GraphFacts,
) -> None:
    found = index(facts)
    for rules in RULE_SETS:
        for verdict in verdicts(found, rules):
            if verdict.rule != "alias":
                continue
            region = found.regions[verdict.region]
            value = region.region.saved[verdict.position].value
            keepers = region.keepers[region.value(value).storage]  # type: ignore[index]
            others = [keeper.text for keeper in keepers if keeper.value != value]
            assert verdict.holder in others or (rules == "no-view" and not others)
            assert rules != "whole-storage" or verdict.holder


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_under_whole_storage_the_views_of_a_storage_leave_together(facts: GraphFacts) -> None:
    found = index(facts)
    leave: dict[tuple[int, StorageId], set[bool]] = {}
    for case in cases(found, verdicts(found, "whole-storage")):
        if case.storage is not None:
            leave.setdefault((case.region, case.storage), set()).add(case.rule is None)
    assert all(len(answers) == 1 for answers in leave.values())
