"""Thresholds to the byte, baselines, and what may be configured."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.eligibility import RULES, Rule, RuleSet
from offplan.errors import UsageError
from offplan.gate import (
    Growth,
    Thresholds,
    check,
    parse_growth,
    parse_max_skipped,
    parse_rules,
    read_config,
)
from offplan.plan import Plan, make_plan
from offplan.recompute import Choice

SHAPE = (2048, 1024)
FLAT = (2048 * 1024,)
# What each view of an 8 MiB storage carries.
BYTES = 8 * MiB


def layers(count: int, rules: RuleSet = "last-holder", min_bytes: int = 0) -> Plan:
    """``count`` layers that each save two views (16 MiB in all) holding each other: ``alias``."""
    facts = FactsBuilder(params={"layers": str(count)})
    region = facts.region()
    x = region.input("x", SHAPE)
    for number in range(count):
        module = f"layers.{number}"
        y = region.op("aten.mm.default", [x], SHAPE, module=module)
        region.save(
            region.view(y, FLAT, module=module, source="model.py:20"),
            region.view(y, SHAPE, target="aten.detach.default", module=module),
        )
    return make_plan(facts.build(), rules=rules, min_bytes=min_bytes)


def test_bytes_at_the_limit_pass_and_one_more_fails() -> None:
    plan = layers(3)
    # 3 layers, 2 views of 8 MiB each.
    assert check(plan, Thresholds(max_alias_skipped=6 * BYTES)).ok
    result = check(plan, Thresholds(max_alias_skipped=6 * BYTES - 1))
    assert not result.ok
    (failed,) = result.checks
    assert (failed.limit_bytes, failed.actual_bytes) == (6 * BYTES - 1, 6 * BYTES)


def test_the_rule_set_asked_for_is_read_off_a_plan_made_with_another() -> None:
    plan = layers(1)
    nothing = Thresholds(max_alias_skipped=0)
    assert not check(plan, nothing).ok
    assert check(plan, nothing, "whole-storage").ok
    assert check(plan, Thresholds(max_alias_skipped=0, rules="whole-storage")).ok
    assert not check(plan, Thresholds(max_alias_skipped=0, rules="whole-storage"), "no-view").ok


def test_each_rule_has_its_own_threshold() -> None:
    facts = FactsBuilder()
    region = facts.region()
    region.save(region.input("w", SHAPE, kind="parameter"), region.input("x", SHAPE))
    limits: dict[Rule, int] = {"input": BYTES, "parameter": BYTES - 1}
    result = check(make_plan(facts.build()), Thresholds(max_skipped=limits))
    assert [(c.rule, c.ok) for c in result.checks] == [("parameter", False), ("input", True)]


def test_offenders_come_largest_first_with_holder_and_source_line() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    y = region.op("aten.mm.default", [x], SHAPE, name="mm", module="layers.0")
    region.save(
        region.view(y, (16,), name="slice", source="model.py:9"),
        region.view(y, FLAT, name="view", module="layers.0.mlp", source="model.py:20"),
    )
    (failed,) = check(
        make_plan(facts.build()), Thresholds(max_alias_skipped=0), "last-holder"
    ).checks
    assert [offender.name for offender in failed.offenders] == ["view", "slice"]
    first = failed.offenders[0]
    assert (first.holder, first.op, first.module, first.source, first.logical_bytes) == (
        "saved slice",
        "aten.view.default",
        "layers.0.mlp",
        "model.py:20",
        BYTES,
    )


def test_a_check_that_passes_has_no_offenders() -> None:
    (passed,) = check(layers(1), Thresholds(max_alias_skipped=BYTES * 2)).checks
    assert passed.offenders == ()


@settings(DRAWN, max_examples=30)
@given(st.integers(0, 3), st.integers(0, 8 * 8 * MiB))
def test_a_check_fails_exactly_if_more_is_skipped_than_allowed(count: int, limit: int) -> None:
    result = check(layers(count), Thresholds(max_alias_skipped=limit))
    assert result.ok == (count * 2 * BYTES <= limit)


# --- baselines ------------------------------------------------------------------------------------


def test_without_a_growth_nothing_may_be_added_to_the_baseline() -> None:
    assert check(layers(2), Thresholds(), baseline=layers(2)).ok
    assert check(layers(1), Thresholds(), baseline=layers(2)).ok
    assert not check(layers(3), Thresholds(), baseline=layers(2)).ok


@pytest.mark.parametrize(
    ("growth", "ok"),
    [
        # 2 to 3 layers: 32 MiB to 48 MiB of alias, 16 MiB or 50% more.
        (Growth(size_bytes=2 * BYTES), True),
        (Growth(size_bytes=2 * BYTES - 1), False),
        (Growth(percent=Decimal(50)), True),
        (Growth(percent=Decimal("49.99")), False),
    ],
)
def test_growth_is_bounded_in_bytes_or_percent_of_the_baseline(growth: Growth, ok: bool) -> None:
    assert check(layers(3), Thresholds(max_growth=growth), baseline=layers(2)).ok == ok


def test_offenders_of_growth_are_those_that_the_baseline_does_not_have() -> None:
    result = check(layers(3), Thresholds(), baseline=layers(2))
    failed = next(each for each in result.checks if not each.ok)
    assert failed.rule == "alias"
    assert failed.baseline_bytes == 4 * BYTES
    assert [offender.module for offender in failed.offenders] == ["layers.2", "layers.2"]


def test_growth_is_checked_of_alias_alias_layout_and_the_rules_named() -> None:
    limits: dict[Rule, int] = {"alias": 10**12, "parameter": 10**12}
    result = check(layers(1), Thresholds(max_skipped=limits), baseline=layers(1))
    assert [(c.option, c.rule) for c in result.checks] == [
        ("max-skipped", "parameter"),
        ("max-skipped", "alias"),
        ("max-growth", "alias"),
        ("max-growth", "alias_layout"),
        ("max-growth", "parameter"),
    ]


def test_a_baseline_made_otherwise_is_compared_under_the_same_rules_and_said_to_be_so() -> None:
    other = msgspec.structs.replace(
        layers(1, rules="no-view", min_bytes=MiB), torch="2.11.0", gpu="A100"
    )
    result = check(layers(1), Thresholds(), "last-holder", other)
    assert result.ok
    assert result.notes == (
        "the baseline was made with no-view; both are compared under last-holder",
        "the baseline has another torch: 2.11.0; this plan: 2.14.1",
        "the baseline has another GPU: A100; this plan: H200",
        "the baseline has another minimum size: 1MiB; this plan: 0",
    )


def test_a_baseline_that_recomputes_something_else_is_said_to_do_so() -> None:
    plan = layers(1)
    other = msgspec.structs.replace(plan, choices=(Choice(0, (1,)),), base_digest="sha256:0")
    assert check(plan, Thresholds(), baseline=plan).notes == ()
    assert check(plan, Thresholds(), baseline=other).notes == (
        "the baseline recomputes something else, so what is saved is not the same",
    )


def test_a_baseline_for_another_target_or_parameters_is_said_to_be_so() -> None:
    (note,) = check(layers(1), Thresholds(), baseline=layers(2)).notes
    assert note == "the baseline has other parameters: layers=2; this plan: layers=1"
    facts = FactsBuilder(spec="other.py")
    facts.region()
    (note, _) = check(
        layers(1), Thresholds(), "last-holder", make_plan(facts.build(), min_bytes=0)
    ).notes[::-1]
    assert note == "the baseline is for another target: other.py"


def test_a_threshold_that_cannot_fail_is_said_to_be_so() -> None:
    result = check(layers(1, "whole-storage"), Thresholds(max_skipped={"not_float": 0}))
    assert result.notes == (
        "whole-storage never skips a value under not_float, so its threshold cannot fail",
    )


@pytest.mark.parametrize("thresholds", [Thresholds(), Thresholds(rules="no-view")])
def test_nothing_to_check_is_a_usage_error(thresholds: Thresholds) -> None:
    with pytest.raises(UsageError, match="no threshold"):
        check(layers(1), thresholds)


def test_a_growth_without_a_baseline_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--max-growth needs"):
        check(layers(1), Thresholds(max_alias_skipped=0, max_growth=Growth()))


# --- text -----------------------------------------------------------------------------------------


def test_a_rule_and_size_are_read_from_one_option() -> None:
    assert parse_max_skipped("too_small=200MiB") == ("too_small", 200 * MiB)


@pytest.mark.parametrize("text", ["alias", "alias:0", "=5", "Alias=5", "eligible=0", "alias=much"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_max_skipped(text)


def test_an_unknown_rule_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        parse_max_skipped("aliases=0")
    assert all(rule in caught.value.fix for rule in RULES)
    with pytest.raises(UsageError, match="'all' is not a rule set"):
        parse_rules("all")


@pytest.mark.parametrize(
    ("text", "growth"),
    [
        ("64MiB", Growth(size_bytes=64 * MiB)),
        ("0", Growth()),
        (" 5 % ", Growth(percent=Decimal(5))),
        ("0.5%", Growth(percent=Decimal("0.5"))),
    ],
)
def test_a_growth_is_a_size_or_a_percentage(text: str, growth: Growth) -> None:
    assert parse_growth(text) == growth


@pytest.mark.parametrize("text", ["", "%", "-5%", "nan%", "inf%", "five%", "-1", "5%%"])
def test_a_growth_that_is_neither_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_growth(text)


def test_a_percentage_of_a_baseline_is_cut_to_whole_bytes() -> None:
    # 0.1% of 1,999 bytes is 1.999.
    assert Growth(percent=Decimal("0.1")).allowed_bytes(1999) == 1


# --- [tool.offplan] -------------------------------------------------------------------------------


def configure(directory: Path, text: str) -> Path:
    path = directory / "pyproject.toml"
    path.write_text(text)
    return path


FULL = """
[tool.offplan]
max-alias-skipped = "1GiB"
max-skipped = { too_small = 1000, parameter = "30 GB" }
rules = "last-holder"
baseline = "ci/baseline.plan.yaml"
max-growth = "5%"
"""


def test_every_threshold_can_be_configured_and_a_baseline_is_beside_the_file(
    tmp_path: Path,
) -> None:
    configure(tmp_path, FULL)
    assert read_config(tmp_path) == Thresholds(
        max_alias_skipped=1024**3,
        max_skipped={"too_small": 1000, "parameter": 30 * 1000**3},
        rules="last-holder",
        baseline=tmp_path / "ci" / "baseline.plan.yaml",
        max_growth=Growth(percent=Decimal(5)),
    )


def test_the_nearest_file_upward_that_has_the_table_counts(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    configure(tmp_path, "[tool.offplan]\nmax-alias-skipped = 1\n")
    configure(tmp_path / "a", "[tool.offplan]\nmax-alias-skipped = 2\n")
    configure(below, "[tool.ruff]\n")
    assert read_config(below).max_alias_skipped == 2


def test_no_file_and_no_table_configure_nothing(tmp_path: Path) -> None:
    assert read_config(tmp_path) == Thresholds()
    configure(tmp_path, "[project]\nname = 'x'\n")
    assert read_config(tmp_path) == Thresholds()


def test_the_command_line_wins_over_the_file_threshold_by_threshold(tmp_path: Path) -> None:
    configure(tmp_path, FULL)
    given_ = Thresholds(max_alias_skipped=0, max_skipped={"too_small": 7})
    merged = given_.or_else(read_config(tmp_path))
    assert merged.max_alias_skipped == 0
    assert merged.max_skipped == {"too_small": 7, "parameter": 30 * 1000**3}
    assert merged.rules == "last-holder"
    assert merged.max_growth == Growth(percent=Decimal(5))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("max-alias-skiped = 0", "tool.offplan.max-alias-skiped is not a setting; known are"),
        ("max-alias-skipped = true", "tool.offplan.max-alias-skipped must be a size"),
        ("max-alias-skipped = -1", "tool.offplan.max-alias-skipped must be a size"),
        ("max-alias-skipped = 1.5", "tool.offplan.max-alias-skipped must be a size"),
        ("max-alias-skipped = 'lots'", "max-alias-skipped is wrong: 'lots' is not a size"),
        ("max-skipped = 0", "tool.offplan.max-skipped must be a table"),
        ("max-skipped = { aliases = 0 }", "max-skipped is wrong: 'aliases' is not a rule"),
        ("max-skipped = { alias = [] }", "tool.offplan.max-skipped.alias must be a size"),
        ("rules = 'all'", "tool.offplan.rules is wrong: 'all' is not a rule set"),
        ("rules = 1", "tool.offplan.rules must be text"),
        ("baseline = 1", "tool.offplan.baseline must be text"),
        ("max-growth = [5]", "tool.offplan.max-growth must be a size"),
        ("max-growth = '5 percent'", "tool.offplan.max-growth is wrong"),
    ],
)
def test_a_wrong_setting_is_a_usage_error_naming_the_file_and_key(
    tmp_path: Path, setting: str, problem: str
) -> None:
    path = configure(tmp_path, f"[tool.offplan]\n{setting}\n")
    with pytest.raises(UsageError) as caught:
        read_config(tmp_path)
    assert problem in caught.value.what
    assert caught.value.where == str(path)


@pytest.mark.parametrize("content", [b"[tool", b"\xff", b"tool = { offplan = 1 }"])
def test_a_file_that_cannot_be_understood_is_a_usage_error_naming_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value)


def test_a_tool_that_is_no_table_configures_nothing(tmp_path: Path) -> None:
    configure(tmp_path, "tool = 1\n")
    assert read_config(tmp_path) == Thresholds()
