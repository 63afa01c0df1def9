"""Thresholds on what a plan leaves on the device, for CI.

1.  A rule's *skipped bytes* in a plan are the logical bytes of the saved values that the rule
    skips, under the rule set checked: the one asked for, else the configured one, else the plan's.
2.  ``max_skipped`` bounds a rule's skipped bytes; ``max_alias_skipped`` is the bound on ``alias``.
3.  Against a *baseline*, an older plan read under the same rule set, the growth of ``alias``, of
    ``alias_layout`` and of every rule that ``max_skipped`` names is bounded by ``max_growth``:
    bytes, or percent of the baseline's; nothing if it is not given.
4.  A check's *offenders* are the values that the rule skips, largest first.  For growth they are
    those that the baseline does not have, matched by op, module, dtype and shape, as many times as
    they occur.
5.  ``max_peak`` bounds the predicted peak of the plan as it is: with what it moves and recomputes.
    In place of offenders that check has ``largest``: what takes the most at the peak.

A threshold given on the command line replaces the same one from ``[tool.offplan]``, in the nearest
``pyproject.toml`` upward that has that table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TypeVar

from offplan.diff import matched
from offplan.eligibility import RULE_SETS, RULES, Rule, RuleSet
from offplan.errors import UsageError
from offplan.memory import LargeStorage, Prediction
from offplan.plan import Entry, Plan, View, cases
from offplan.units import format_binary, format_size, parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Choice = TypeVar("_Choice", bound=str)

# Checked against a baseline whatever else is named: the two rules that a change to a model trips.
_GROWTH_RULES: tuple[Rule, ...] = ("alias", "alias_layout")
# Rules that a rule set never answers, so that a threshold on one cannot fail.
_NEVER: Mapping[RuleSet, tuple[Rule, ...]] = {
    "no-view": ("alias_layout",),
    "last-holder": (),
    "whole-storage": ("alias_layout", "not_float"),
}


@dataclass(frozen=True)
class Growth:
    """How much more than a baseline is allowed: bytes, or percent of it."""

    size_bytes: int = 0
    percent: Decimal | None = None

    def allowed_bytes(self, baseline_bytes: int) -> int:
        if self.percent is None:
            return self.size_bytes
        return int(baseline_bytes * self.percent / 100)

    def __str__(self) -> str:
        return format_binary(self.size_bytes) if self.percent is None else f"{self.percent}%"


@dataclass(frozen=True)
class Thresholds:
    """What to check; None and empty where nothing is asked."""

    max_alias_skipped: int | None = None
    max_skipped: Mapping[Rule, int] = field(default_factory=dict)
    rules: RuleSet | None = None
    baseline: Path | None = None
    max_growth: Growth | None = None
    max_peak: int | None = None

    def or_else(self, configured: Thresholds) -> Thresholds:
        """These, with what they leave open taken from ``configured``."""
        alias, peak = self.max_alias_skipped, self.max_peak
        return Thresholds(
            max_alias_skipped=configured.max_alias_skipped if alias is None else alias,
            max_skipped={**configured.max_skipped, **self.max_skipped},
            rules=self.rules or configured.rules,
            baseline=self.baseline or configured.baseline,
            max_growth=self.max_growth or configured.max_growth,
            max_peak=configured.max_peak if peak is None else peak,
        )


@dataclass(frozen=True)
class Offender:
    """A saved value that a rule skips, and where it comes from."""

    rule: Rule
    holder: str
    logical_bytes: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    module: str
    source: str
    region: int
    position: int


@dataclass(frozen=True)
class Check:
    """One threshold.  ``baseline_bytes`` is None unless it bounds growth, ``rule`` if the peak.

    ``limit_bytes`` is the most allowed: for growth, the baseline's bytes and what may be added.
    One that holds has neither ``offenders`` nor ``largest``.
    """

    option: str
    rule: Rule | None
    limit_bytes: int
    actual_bytes: int
    offenders: tuple[Offender, ...] = ()
    baseline_bytes: int | None = None
    largest: tuple[LargeStorage, ...] = ()

    @property
    def ok(self) -> bool:
        return self.actual_bytes <= self.limit_bytes


@dataclass(frozen=True)
class GateResult:
    """Every check made on the plan of ``target``; ``notes`` say what to know when reading them.

    ``source`` is the ``file:line`` of the target's factory, where it has one.
    """

    target: str
    params: Mapping[str, str]
    rules: RuleSet
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    source: str = ""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


# --- checking -------------------------------------------------------------------------------------


def check(
    plan: Plan,
    thresholds: Thresholds,
    rules: RuleSet | None = None,
    baseline: Plan | None = None,
) -> GateResult:
    """Check ``plan``; ``baseline`` is the plan that ``thresholds.baseline`` names, loaded.

    Raises ``UsageError`` if there is nothing to check.
    """
    _refuse_nothing(thresholds, baseline)
    checked = rules or thresholds.rules or plan.rules
    skipped = _skipped(plan, checked)
    checks = [*_bounds(thresholds, skipped)]
    if thresholds.max_peak is not None:
        checks.insert(0, _peak(plan, thresholds.max_peak))
    if baseline is not None:
        named = [rule for rule in thresholds.max_skipped if rule not in _GROWTH_RULES]
        growth = thresholds.max_growth or Growth()
        before = _skipped(baseline, checked)
        checks += (
            _growth(rule, growth, before, skipped) for rule in (*_GROWTH_RULES, *_ordered(named))
        )
    return GateResult(
        target=plan.target.spec,
        params=plan.target.params,
        rules=checked,
        checks=tuple(checks),
        notes=(*_peak_notes(plan, thresholds), *_notes(plan, thresholds, checked, baseline)),
        source=plan.target.source,
    )


def _refuse_nothing(thresholds: Thresholds, baseline: Plan | None) -> None:
    if baseline is None and thresholds.max_growth is not None:
        raise UsageError("--max-growth needs a plan to compare with", fix="add --baseline OLD.plan")
    bounds = (thresholds.max_alias_skipped, thresholds.max_peak, thresholds.max_skipped or None)
    if all(bound is None for bound in (*bounds, baseline)):
        raise UsageError(
            "there is no threshold to check",
            fix="add --max-alias-skipped 0, --max-skipped RULE=SIZE, --max-peak SIZE or "
            "--baseline OLD.plan.yaml, or set them in [tool.offplan] in pyproject.toml",
        )


_Skipped = Mapping[Rule, tuple[Offender, ...]]


def _skipped(plan: Plan, rules: RuleSet) -> _Skipped:
    """The values that each rule skips, largest first."""
    found: dict[Rule, list[Offender]] = {rule: [] for rule in RULES}
    for case, entry, view in cases(plan, rules):
        if case.rule is not None:
            found[case.rule].append(_offender(case.rule, case.holder, entry, view))
    return {rule: tuple(sorted(values, key=_largest_first)) for rule, values in found.items()}


def _offender(rule: Rule, holder: str, entry: Entry, view: View) -> Offender:
    return Offender(
        rule=rule,
        holder=holder,
        logical_bytes=view.logical_bytes,
        name=view.name,
        dtype=view.dtype,
        shape=view.shape,
        op=view.op,
        module=view.module,
        source=view.source,
        region=entry.region,
        position=view.position,
    )


def _largest_first(offender: Offender) -> tuple[int, int, int]:
    return (-offender.logical_bytes, offender.region, offender.position)


def _total_bytes(values: Iterable[Offender]) -> int:
    return sum(value.logical_bytes for value in values)


def _bounds(thresholds: Thresholds, skipped: _Skipped) -> Iterator[Check]:
    if thresholds.max_alias_skipped is not None:
        yield _bound("max-alias-skipped", "alias", thresholds.max_alias_skipped, skipped)
    for rule in _ordered(thresholds.max_skipped):
        yield _bound("max-skipped", rule, thresholds.max_skipped[rule], skipped)


def _bound(option: str, rule: Rule, limit_bytes: int, skipped: _Skipped) -> Check:
    actual_bytes = _total_bytes(skipped[rule])
    offenders = skipped[rule] if actual_bytes > limit_bytes else ()
    return Check(option, rule, limit_bytes, actual_bytes, offenders)


def _peak(plan: Plan, limit_bytes: int) -> Check:
    predicted = plan.predicted.plan
    largest = predicted.largest if predicted.peak_bytes > limit_bytes else ()
    return Check("max-peak", None, limit_bytes, predicted.peak_bytes, largest=largest)


def _growth(rule: Rule, growth: Growth, before: _Skipped, now: _Skipped) -> Check:
    baseline_bytes = _total_bytes(before[rule])
    limit_bytes = baseline_bytes + growth.allowed_bytes(baseline_bytes)
    actual_bytes = _total_bytes(now[rule])
    offenders = _added(before[rule], now[rule]) if actual_bytes > limit_bytes else ()
    return Check("max-growth", rule, limit_bytes, actual_bytes, offenders, baseline_bytes)


def _added(before: Iterable[Offender], now: Iterable[Offender]) -> tuple[Offender, ...]:
    """Those of ``now`` beyond as many alike in ``before`` (definition 4)."""
    _, _, added = matched(before, now, _identity)
    return tuple(added)


def _identity(offender: Offender) -> tuple[str, str, str, tuple[int, ...]]:
    return (offender.op, offender.module, offender.dtype, offender.shape)


def _ordered(rules: Iterable[Rule]) -> list[Rule]:
    return sorted(rules, key=RULES.index)


def _peak_notes(plan: Plan, thresholds: Thresholds) -> Iterator[str]:
    """What could be done about a peak that is too high, and how sure it is."""
    limit_bytes, predicted = thresholds.max_peak, plan.predicted
    if limit_bytes is None:
        return
    peak_bytes, floor_bytes = predicted.plan.peak_bytes, predicted.floor_bytes
    if peak_bytes > limit_bytes:
        yield f"the peak{_place(predicted.plan)} is made of {_parts(predicted.plan)}"
    if floor_bytes > limit_bytes:
        yield (
            f"no budget keeps the peak within {format_size(limit_bytes)}: the least there is, the "
            f"floor, is {format_size(floor_bytes)}"
        )
    elif peak_bytes > limit_bytes:
        yield (
            f"a plan with --budget {_typed(limit_bytes)} keeps the peak within the limit; the "
            f"floor is {format_size(floor_bytes)}"
        )
    band = predicted.band_percent
    if band is not None and abs(peak_bytes - limit_bytes) * 100 <= band * limit_bytes:
        yield f"the peak is predicted to within {band}%, and the limit is closer to it than that"


def _place(peak: Prediction) -> str:
    if not peak.op_target:
        return ""
    module = f" in {peak.op_module}" if peak.op_module else ""
    source = f" ({peak.op_source})" if peak.op_source else ""
    return f", in {peak.op_target}{module}{source},"


def _parts(peak: Prediction) -> str:
    """The parts that are a hundredth of it or more, the largest first."""
    sizes = sorted(peak.parts.items(), key=lambda part: -part[1])
    shown = [(part, size) for part, size in sizes if size * 100 >= peak.peak_bytes]
    return ", ".join(f"{format_size(size)} {part.replace('_', ' ')}" for part, size in shown)


def _typed(size_bytes: int) -> str:
    """``size_bytes`` to the byte, as it was probably typed."""
    printed = format_size(size_bytes)
    if size_bytes % 1024**2 and parse_size(printed) == size_bytes:
        return printed.replace(".00", "").replace(" ", "")
    return format_binary(size_bytes)


def _notes(
    plan: Plan, thresholds: Thresholds, rules: RuleSet, baseline: Plan | None
) -> Iterator[str]:
    for rule in _ordered(thresholds.max_skipped):
        if rule in _NEVER[rules]:
            yield f"{rules} never skips a value under {rule}, so its threshold cannot fail"
    if baseline is None:
        return
    if baseline.rules != rules:
        yield f"the baseline was made with {baseline.rules}; both are compared under {rules}"
    if baseline.target.spec != plan.target.spec:
        yield f"the baseline is for another target: {baseline.target.spec}"
    elif baseline.target.params != plan.target.params:
        yield f"the baseline has other parameters: {_params(baseline)}; this plan: {_params(plan)}"
    pairs = (
        ("torch", baseline.torch, plan.torch),
        ("partitioner", baseline.partitioner, plan.partitioner),
        ("device", baseline.device, plan.device),
        ("GPU", baseline.gpu, plan.gpu),
        ("attention", baseline.attention, plan.attention),
        ("minimum size", format_binary(baseline.min_bytes), format_binary(plan.min_bytes)),
    )
    if baseline.choices != plan.choices:
        yield "the baseline recomputes something else, so what is saved is not the same"
    for name, before, now in pairs:
        if before != now:
            yield f"the baseline has another {name}: {before or 'none'}; this plan: {now or 'none'}"


def _params(plan: Plan) -> str:
    return " ".join(f"{name}={value}" for name, value in plan.target.params.items()) or "none"


# --- thresholds as text ---------------------------------------------------------------------------


def parse_max_skipped(text: str) -> tuple[Rule, int]:
    """``RULE=SIZE``.  Raises ``UsageError``."""
    name, separator, size = text.partition("=")
    if not separator:
        raise UsageError(f"{text!r} is not RULE=SIZE", fix="for example: --max-skipped alias=0")
    return _choice(name.strip(), RULES, "rule"), parse_size(size)


def parse_growth(text: str) -> Growth:
    """A size, or a percentage such as ``5%``.  Raises ``UsageError``."""
    stripped = text.strip()
    if not stripped.endswith("%"):
        return Growth(size_bytes=parse_size(stripped))
    try:
        percent = Decimal(stripped[:-1].strip())
    except InvalidOperation:
        percent = Decimal(-1)
    if not percent.is_finite() or percent < 0:
        raise UsageError(f"{text!r} is not a growth", fix="write a size (64MiB) or percent (5%)")
    return Growth(percent=percent)


def parse_rules(text: str) -> RuleSet:
    """The name of a rule set.  Raises ``UsageError``."""
    return _choice(text, RULE_SETS, "rule set")


def _choice(text: str, choices: tuple[_Choice, ...], what: str) -> _Choice:
    for choice in choices:
        if choice == text:
            return choice
    raise UsageError(f"{text!r} is not a {what}", fix=f"one of: {', '.join(choices)}")


# --- [tool.offplan] -------------------------------------------------------------------------------


def read_config(start: Path) -> Thresholds:
    """Thresholds from the nearest ``pyproject.toml`` at or above ``start`` with ``[tool.offplan]``.

    None is configured if there is no such file.  A relative baseline is beside the file.  Raises
    ``UsageError`` naming the file and key of what is unknown or of the wrong type.
    """
    absolute = start.absolute()
    for directory in (absolute, *absolute.parents):
        path = directory / "pyproject.toml"
        if path.is_file():
            table = _tool_table(path)
            if table is not None:
                return _configured(path, table)
    return Thresholds()


def _tool_table(path: Path) -> dict[str, object] | None:
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    tool = document.get("tool")
    table = tool.get("offplan") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError("tool.offplan must be a table", where=str(path))
    return table


@dataclass(frozen=True)
class Origin:
    """Where settings come from, for messages: a place, and how a setting is spelled there."""

    where: str
    prefix: str = ""
    hyphen: str = "_"

    def refusal(self, key: str, problem: str) -> UsageError:
        spelled = self.prefix + key.replace("-", self.hyphen)
        return UsageError(f"{spelled} {problem}", where=self.where)


SETTINGS = ("max-alias-skipped", "max-skipped", "rules", "baseline", "max-growth", "max-peak")


def _configured(path: Path, table: Mapping[str, object]) -> Thresholds:
    origin = Origin(str(path), "tool.offplan.", "-")
    for key in table:
        if key not in SETTINGS:
            raise origin.refusal(key, f"is not a setting; known are {', '.join(SETTINGS)}")
    return thresholds_of(table, path.parent, origin)


def thresholds_of(settings: Mapping[str, object], directory: Path, origin: Origin) -> Thresholds:
    """Thresholds from ``SETTINGS`` as a file or a program gives them: sizes are text or bytes.

    A relative baseline is in ``directory``.  Raises ``UsageError`` naming the setting.
    """
    alias, peak = settings.get("max-alias-skipped"), settings.get("max-peak")
    growth = settings.get("max-growth")
    baseline = _text(origin, settings, "baseline")
    rules = _text(origin, settings, "rules")
    return Thresholds(
        max_alias_skipped=None if alias is None else _size(origin, "max-alias-skipped", alias),
        max_skipped=_max_skipped(origin, settings.get("max-skipped", {})),
        rules=None if rules is None else _choice_at(origin, "rules", rules, RULE_SETS, "rule set"),
        baseline=None if baseline is None else directory / baseline,
        max_growth=None if growth is None else _growth_at(origin, growth),
        max_peak=None if peak is None else _size(origin, "max-peak", peak),
    )


def _max_skipped(origin: Origin, table: object) -> dict[Rule, int]:
    if not isinstance(table, dict):
        raise origin.refusal("max-skipped", 'must be a table, such as { alias = "0" }')
    return {
        _choice_at(origin, "max-skipped", name, RULES, "rule"): _size(
            origin, f"max-skipped.{name}", size
        )
        for name, size in table.items()
    }


def _growth_at(origin: Origin, value: object) -> Growth:
    if not isinstance(value, str):
        return Growth(size_bytes=_size(origin, "max-growth", value))
    try:
        return parse_growth(value)
    except UsageError as error:
        raise origin.refusal("max-growth", f"is wrong: {error.what}") from error


def _size(origin: Origin, key: str, value: object) -> int:
    """A size as text, or bytes as an integer (TOML's true is an ``int`` to Python)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise origin.refusal(key, 'must be a size, such as "5MiB"')
    try:
        return parse_size(value)
    except UsageError as error:
        raise origin.refusal(key, f"is wrong: {error.what}") from error


def _text(origin: Origin, table: Mapping[str, object], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise origin.refusal(key, "must be text")
    return value


def _choice_at(
    origin: Origin, key: str, text: str, choices: tuple[_Choice, ...], what: str
) -> _Choice:
    try:
        return _choice(text, choices, what)
    except UsageError as error:
        raise origin.refusal(key, f"is wrong: {error.what}, {error.fix}") from error
