"""What differs between two plans: of the same model, or of two that have modules in common.

1.  An *item* is a storage that a plan saves, or one that it has the backward compute again.  Its
    *place* is the module and the target of the op that made it; of a graph input its kind and name.
    Ids, names of ops and positions say nothing: each trace counts anew.
2.  Items of the two plans are *matched* in passes, each of which takes what those before it left:
    alike in everything; alike in place, size, dtype and shape; in place and size; in place and
    dtype; in place.  Several that are alike are matched in order, as many as both plans have.
3.  An item that is not matched is *appeared* or *gone*.  A matched pair is *changed* if it is
    grown, shrunk or reshaped (another dtype, or another shape of the same size), or if its action,
    the rules that decide about its views (under any rule set), or their holders differ.
4.  A storage without verdicts, as one that is computed again has none, is compared without them.
5.  Plans *differ* if an item appeared, went or changed, or if a row of a ledger did.
6.  *Settings* are what a plan was asked for and traced with; a plan file does not record the
    model's code or its libraries, so that a difference in these is named only as what is left.

Pure.  Takes time in proportion to saved values.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar, get_args

import msgspec

from offplan.eligibility import RULE_SETS, RULES, LedgerRow, RuleSet
from offplan.graph import InputKind
from offplan.plan import Entry, Plan, Recomputed
from offplan.units import format_binary, format_size

ItemAction = Literal["keep", "offload", "skipped", "recompute"]
Kind = Literal["appeared", "gone", "changed"]
Facet = Literal["grown", "shrunk", "reshaped", "action", "verdict", "holder"]
Unit = Literal["bytes", "ms", "count"]

_INPUTS = get_args(InputKind)
# The counter that a trace appends to the name of an op.
_SAVED_NAME = re.compile(r"^(saved \S+?)(?:_\d+)+(?= |$)", re.ASCII)
_T = TypeVar("_T")

# Settings that a trace depends on: if none of them differs, graphs differ for another reason.
_TRACED = ("target", "torch", "compiler", "partitioner", "device", "GPU", "attention")


class Deciding(msgspec.Struct, frozen=True):
    """What a rule set says of an item's views: each (rule, holder) once, in order."""

    rules: RuleSet
    verdicts: tuple[tuple[str, str], ...]


class Item(msgspec.Struct, frozen=True):
    """Definition 1.  ``dtype`` and ``shape`` are of its first view, or of the value made again.

    ``shape`` counts elements, ``size_bytes`` are of the whole storage.
    """

    region: int
    op: str
    module: str
    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    action: ItemAction
    deciding: tuple[Deciding, ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        return (self.op, self.name if self.op in _INPUTS else self.module)


class Change(msgspec.Struct, frozen=True):
    """Definition 3: ``old`` is None if it appeared, ``new`` if it is gone."""

    kind: Kind
    facets: tuple[Facet, ...]
    old: Item | None
    new: Item | None

    @property
    def item(self) -> Item:
        found = self.new or self.old
        assert found is not None
        return found

    @property
    def delta_bytes(self) -> int:
        before = 0 if self.old is None else self.old.size_bytes
        return (0 if self.new is None else self.new.size_bytes) - before


class LedgerChange(msgspec.Struct, frozen=True):
    """A row of one rule set's ledger, in both plans; counts and bytes are 0 where it is missing."""

    rules: RuleSet
    rule: str
    holder: str
    old_count: int
    new_count: int
    old_logical_bytes: int
    new_logical_bytes: int
    old_storage_bytes: int
    new_storage_bytes: int


class Quantity(msgspec.Struct, frozen=True):
    """A number of both plans; None where a plan does not have it."""

    name: str
    unit: Unit
    old: float | None
    new: float | None

    @property
    def delta(self) -> float | None:
        return None if self.old is None or self.new is None else self.new - self.old


class Setting(msgspec.Struct, frozen=True):
    """Something a plan was asked for or traced with, that is not the same in both (text)."""

    name: str
    old: str
    new: str


class Difference(msgspec.Struct, frozen=True):
    """Everything that differs between two plans, and what could not be told.

    ``changes`` has what changed, then appeared, then went; ``quantities`` has equal ones too.
    """

    old_target: str
    new_target: str
    is_same_graphs: bool
    matched_count: int
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    changes: tuple[Change, ...]
    ledger: tuple[LedgerChange, ...]

    @property
    def differs(self) -> bool:
        """Definition 5."""
        return bool(self.changes or self.ledger)

    @property
    def is_identical(self) -> bool:
        """Whether there is nothing at all to say."""
        moved = any(row.old != row.new for row in self.quantities)
        return not (self.differs or self.settings or self.notes or moved)


def diff(old: Plan, new: Plan) -> Difference:
    """What changed from ``old`` to ``new``."""
    before, after = tuple(_items(old)), tuple(_items(new))
    pairs, gone, appeared = _matched(before, after)
    changes = [*_changed(pairs)]
    changes += (Change("appeared", (), None, item) for item in appeared)
    changes += (Change("gone", (), item, None) for item in gone)
    settings = tuple(_settings(old, new))
    is_same = _base(old) == _base(new)
    return Difference(
        old_target=_titled(old),
        new_target=_titled(new),
        is_same_graphs=is_same,
        matched_count=len(pairs),
        settings=settings,
        notes=tuple(_notes(old, new, settings, is_same=is_same, changed=bool(changes))),
        quantities=tuple(_quantities(old, new)),
        changes=tuple(changes),
        ledger=tuple(_ledger(old, new)),
    )


# --- items and their matches ----------------------------------------------------------------------


def _items(plan: Plan) -> Iterator[Item]:
    """Saved storages in the order of their first saved position, then those computed again."""
    saved = [entry for entry in plan.storages if entry.id is not None]
    for entry in sorted(saved, key=lambda each: (each.region, _first(each))):
        yield _saved(entry)
    for made in plan.recomputed:
        yield _made_again(made)


def _first(entry: Entry) -> int:
    return min(view.position for view in entry.views)


def _saved(entry: Entry) -> Item:
    view = min(entry.views, key=lambda each: each.position)
    return Item(
        region=entry.region,
        op=entry.op,
        module=entry.module,
        name=entry.name,
        source=entry.source,
        dtype=view.dtype,
        shape=view.shape,
        size_bytes=entry.size_bytes,
        action=entry.action,
        deciding=tuple(Deciding(rules, _verdicts(entry, rules)) for rules in RULE_SETS),
    )


def _verdicts(entry: Entry, rules: RuleSet) -> tuple[tuple[str, str], ...]:
    verdicts = (view.verdicts[rules] for view in entry.views)
    return tuple(sorted({(each.rule, _SAVED_NAME.sub(r"\1", each.holder)) for each in verdicts}))


def _made_again(made: Recomputed) -> Item:
    return Item(
        region=made.region,
        op=made.op,
        module=made.module,
        name=made.name,
        source=made.source,
        dtype=made.dtype,
        shape=made.shape,
        size_bytes=made.size_bytes,
        action="recompute",
    )


_PASSES: tuple[Callable[[Item], Hashable], ...] = (
    lambda item: (item.place, item.size_bytes, item.dtype, item.shape, item.action, item.deciding),
    lambda item: (item.place, item.size_bytes, item.dtype, item.shape),
    lambda item: (item.place, item.size_bytes),
    lambda item: (item.place, item.dtype),
    lambda item: item.place,
)


def _matched(
    old: Sequence[Item], new: Sequence[Item]
) -> tuple[list[tuple[Item, Item]], list[Item], list[Item]]:
    """Pairs, and what is left of ``old`` and of ``new`` (definition 2)."""
    pairs: list[tuple[Item, Item]] = []
    gone, appeared = list(old), list(new)
    for key in _PASSES:
        found, gone, appeared = matched(gone, appeared, key)
        pairs += found
    return pairs, gone, appeared


def matched(
    old: Iterable[_T], new: Iterable[_T], key: Callable[[_T], Hashable]
) -> tuple[list[tuple[_T, _T]], list[_T], list[_T]]:
    """Pairs of equal ``key``, in order, as many as both have; the rest of ``old``, of ``new``."""
    waiting: dict[Hashable, deque[_T]] = {}
    for thing in old:
        waiting.setdefault(key(thing), deque()).append(thing)
    pairs, added = [], []
    for thing in new:
        alike = waiting.get(key(thing))
        if alike:
            pairs.append((alike.popleft(), thing))
        else:
            added.append(thing)
    return pairs, [thing for alike in waiting.values() for thing in alike], added


def _changed(pairs: Iterable[tuple[Item, Item]]) -> Iterator[Change]:
    for old, new in pairs:
        facets = tuple(_facets(old, new))
        if facets:
            yield Change("changed", facets, old, new)


def _facets(old: Item, new: Item) -> Iterator[Facet]:
    if old.size_bytes != new.size_bytes:
        yield "grown" if new.size_bytes > old.size_bytes else "shrunk"
    elif old.deciding and new.deciding and (old.dtype, old.shape) != (new.dtype, new.shape):
        yield "reshaped"
    if old.action != new.action:
        yield "action"
    if not old.deciding or not new.deciding:
        return
    if _rules(old) != _rules(new):
        yield "verdict"
    elif old.deciding != new.deciding:
        yield "holder"


def _rules(item: Item) -> list[set[str]]:
    return [{rule for rule, _ in each.verdicts} for each in item.deciding]


# --- ledger and numbers ---------------------------------------------------------------------------


def _ledger(old: Plan, new: Plan) -> Iterator[LedgerChange]:
    nothing = LedgerRow("eligible", "", 0, 0, 0)
    for rules in RULE_SETS:
        before = {(row.rule, row.holder): row for row in old.ledger.get(rules, ())}
        after = {(row.rule, row.holder): row for row in new.ledger.get(rules, ())}
        order = ("eligible", *RULES)
        for key in sorted({*before, *after}, key=lambda key: (order.index(key[0]), key[1])):
            a, b = before.get(key, nothing), after.get(key, nothing)
            change = LedgerChange(
                rules=rules,
                rule=key[0],
                holder=key[1],
                old_count=a.count,
                new_count=b.count,
                old_logical_bytes=a.logical_bytes,
                new_logical_bytes=b.logical_bytes,
                old_storage_bytes=a.storage_bytes,
                new_storage_bytes=b.storage_bytes,
            )
            if _counts(a) != _counts(b):
                yield change


def _counts(row: LedgerRow) -> tuple[int, int, int]:
    return (row.count, row.logical_bytes, row.storage_bytes)


def _quantities(old: Plan, new: Plan) -> Iterator[Quantity]:
    def both(name: str, unit: Unit, read: Callable[[Plan], float | None]) -> Quantity:
        return Quantity(name, unit, read(old), read(new))

    yield both("peak, no plan", "bytes", lambda plan: plan.predicted.no_plan.peak_bytes)
    yield both("peak, plan", "bytes", lambda plan: plan.predicted.plan.peak_bytes)
    yield both("floor", "bytes", lambda plan: plan.predicted.floor_bytes)
    yield both("reserved, no plan", "bytes", lambda plan: plan.predicted.no_plan.reserved_bytes)
    yield both("reserved, plan", "bytes", lambda plan: plan.predicted.plan.reserved_bytes)
    yield both("saved", "bytes", lambda plan: plan.saved_bytes)
    yield both("movable", "bytes", lambda plan: plan.movable_bytes)
    yield both("moved", "bytes", lambda plan: plan.moved_bytes)
    yield both("staying", "bytes", lambda plan: plan.staying_bytes)
    yield both("recomputed", "bytes", lambda plan: sum(x.size_bytes for x in plan.recomputed))
    yield both("step, no plan", "ms", lambda plan: _time_ms(plan, "no_plan_us"))
    yield both("step, plan", "ms", lambda plan: _time_ms(plan, "step_us"))
    yield both("stalled", "ms", lambda plan: _time_ms(plan, "stalled_us"))
    yield both("recomputing", "ms", lambda plan: plan.recompute_us / 1000)
    yield both("storages saved", "count", lambda plan: len(plan.storages))
    yield both("transfers", "count", lambda plan: len(plan.transfers))
    yield both("ops", "count", lambda plan: plan.op_count)
    yield both("regions", "count", lambda plan: len(plan.regions))


def _time_ms(plan: Plan, name: str) -> float | None:
    time = plan.predicted.time
    return None if time is None else float(getattr(time, name)) / 1000


# --- what changed around --------------------------------------------------------------------------


def _titled(plan: Plan) -> str:
    params = (f"{name}={value}" for name, value in plan.target.params.items())
    return " ".join((plan.target.spec, *params))


def _base(plan: Plan) -> str:
    return plan.base_digest or plan.digest


def _settings(old: Plan, new: Plan) -> Iterator[Setting]:
    yield from _unequal("target", old.target.spec, new.target.spec)
    before, after = old.target.params, new.target.params
    for name in sorted({*before, *after}):
        was, is_now = (params.get(name, "not given") for params in (before, after))
        yield from _unequal(f"-p {name}", was, is_now)
    pairs: tuple[tuple[str, Callable[[Plan], str]], ...] = (
        ("torch", lambda plan: plan.torch),
        ("compiler", lambda plan: plan.compiler),
        ("partitioner", lambda plan: plan.partitioner),
        ("device", lambda plan: plan.device),
        ("GPU", lambda plan: plan.gpu),
        ("attention", lambda plan: plan.attention),
        ("graph breaks", lambda plan: str(len(plan.breaks))),
        ("rule set", lambda plan: plan.rules),
        ("minimum size", lambda plan: format_binary(plan.min_bytes)),
        ("budget", _budget),
        ("actions", lambda plan: ", ".join(plan.actions)),
        ("conditions", _conditions),
        ("profile", lambda plan: plan.predicted.profile),
        ("op times", lambda plan: plan.predicted.op_times),
        ("host memory", lambda plan: _optional_size(plan.predicted.host_budget)),
    )
    for name, read in pairs:
        yield from _unequal(name, read(old), read(new))


def _unequal(name: str, old: str, new: str) -> Iterator[Setting]:
    if old != new:
        yield Setting(name, old or "none", new or "none")


def _budget(plan: Plan) -> str:
    if plan.budget is None:
        return "none (nothing moves)"
    if plan.budget == 0:
        return "0 (everything moves)"
    size = format_size(plan.budget)
    return f"{plan.asked} ({size})" if plan.asked else size


def _optional_size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _conditions(plan: Plan) -> str:
    found = msgspec.to_builtins(plan.predicted.conditions)
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()))


def _notes(
    old: Plan, new: Plan, settings: Sequence[Setting], *, is_same: bool, changed: bool
) -> Iterator[str]:
    names = [each.name for each in settings]
    traced = [name for name in names if name in _TRACED or name.startswith("-p ")]
    if is_same:
        yield from _notes_on_decisions(old, new, differs=bool(names or changed))
    elif not traced:
        yield (
            "the graphs differ, though target, parameters, torch, compiler, partitioner, device, "
            "GPU and attention are the same: the model's code, a library it uses or offplan's "
            "tracing changed; a plan does not record which"
        )
    elif len(traced) > 1:
        yield (
            f"{_listed(traced)} changed at once, and the model's code may have: two plans do not "
            "say which of these made a difference"
        )
    else:
        yield (
            f"of what a plan records of the trace only {traced[0]} changed; whether the model's "
            "code or its libraries did too, it does not say"
        )
    if not is_same and not changed:
        yield "what differs in the graphs is not saved, nor computed again"
    if (old.predicted.time is None) != (new.predicted.time is None):
        which = "old" if old.predicted.time is None else "new"
        yield f"the {which} plan predicts no time, as it was made without a profile"


def _notes_on_decisions(old: Plan, new: Plan, *, differs: bool) -> Iterator[str]:
    unequal = [
        name
        for name in Plan.__struct_fields__
        if name != "schema_version" and getattr(old, name) != getattr(new, name)
    ]
    if differs:
        yield "both plans are of the same graphs: only what was decided about them can differ"
        if old.choices != new.choices:
            yield (
                "other ops run again in the backward: what only one plan saves, the other "
                "computes again from what it saves, or does not need"
            )
    elif unequal:
        yield f"nothing that is compared here differs, but the plans' {_listed(unequal)} do"


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return " and ".join((", ".join(names[:-1]), names[-1]))
