"""Which saved values can leave the device, under each rule set, and who keeps those that cannot.

1.  A *keeper* of a storage is a distinct value on it among the inputs, the outputs (mutated inputs
    included) and the saved values of one region's forward.  A value with several roles is one
    keeper, in the first of: parameter, buffer, input (also: constant, handed from an earlier
    region), output (also: mutated), saved.
2.  The *holder* named for a saved value is the first keeper of its storage, in that order and then
    in graph order, that is not the value itself.  Its text is its kind, a space and its name:
    ``parameter lm_head.weight``, ``output 0``, ``saved view_12 (layers.3.self_attn)``.
3.  A value is *made by an aliasing op* if its storage is one of the storages of its op's inputs,
    and the op's schema declares that outputs may be views.  The two older rule sets ask only for
    the declaration, as the passes they stand for did: ``_unsafe_view`` declares none.  Who keeps a
    storage is never read off a schema.
4.  A saved value gets the first rule that holds, in the order of ``RULES``: ``not_tensor`` a SymInt
    or Python value; ``symbolic_size``; ``host`` its storage is on the CPU while the trace is for
    another device; ``unsupported`` not a plain strided tensor (the holder text names the layout);
    ``empty`` zero bytes; ``parameter`` its storage is a parameter's or buffer's; ``input``,
    ``output`` the value itself is a graph input, is returned; ``alias``; ``alias_layout``;
    ``rng_state``; ``not_float``; ``too_small`` the whole storage is under the minimum.
5.  ``no-view``: ``alias`` is every value made by an aliasing op.
6.  ``last-holder``: ``alias`` is a value made by an aliasing op whose storage has another keeper;
    ``alias_layout`` one that has none, but is not non-overlapping and dense.
7.  ``whole-storage``: the saved values of one storage are one *unit*, less those that stay on their
    own account (rules before ``alias`` other than ``empty``, and ``rng_state``).  ``alias`` is a
    value of a unit whose storage is kept by a value outside the unit.  ``alias_layout`` and
    ``not_float`` are not asked.  ``empty`` is asked of all the saved values of a storage together:
    if any carries bytes, those that carry none leave, or stay, with it; if none does, there is
    nothing to move and all stay.
8.  A value saved at several positions of a region has the same verdict at each, is one keeper, and
    counts once in the ledger.
9.  The *ledger* of a rule set has a row for each pair of rule (or eligible) and holder kind.
    *Logical bytes* are those that the row's values carry, elements times item size.  *Storage
    bytes* count each storage once in the whole ledger: as eligible if every saved value on it is,
    else in the row of the first skipped one, by region and saved position.

Assumes that a storage reaches another region only as an output of one and an input of the next, as
traces have it.  Everything is linear in ops and values: ``index`` is built once for all rule sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import msgspec

from offplan.footprint import is_dense
from offplan.graph import GraphFacts, GraphInput, Op, Region, StorageId, Value, ValueId

RuleSet = Literal["no-view", "last-holder", "whole-storage"]
Rule = Literal[
    "not_tensor",
    "symbolic_size",
    "host",
    "unsupported",
    "empty",
    "parameter",
    "input",
    "output",
    "alias",
    "alias_layout",
    "rng_state",
    "not_float",
    "too_small",
]
Outcome = Literal["eligible"] | Rule
HolderKind = Literal[
    "parameter", "buffer", "input", "constant", "handed", "output", "mutated", "saved"
]

RULE_SETS: tuple[RuleSet, ...] = get_args(RuleSet)
RULES: tuple[Rule, ...] = get_args(Rule)
DEFAULT_RULES: RuleSet = "whole-storage"
DEFAULT_MIN_BYTES = 5 * 1024**2

# Definition 1: every kind of input but parameters and buffers is an input.
_INPUT_ORDER: tuple[HolderKind, ...] = ("parameter", "buffer", "input")


class Keeper(NamedTuple):
    """A value that keeps its storage alive past the forward (definition 1)."""

    value: ValueId
    kind: HolderKind
    name: str
    module: str = ""

    @property
    def text(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.module})" if self.module else "")


class Verdict(NamedTuple):
    """What a rule set says of one saved value; ``rule`` is None when it is eligible.

    ``holder`` is a keeper's text; for ``unsupported`` and ``symbolic_size`` it says what the value
    is.  It is empty where nobody else keeps the storage.
    """

    region: int
    position: int
    rule: Rule | None
    holder: str = ""


@dataclass(frozen=True)
class RegionIndex:
    """Lookups into one region's forward.  ``keepers`` are in holder order (definition 2)."""

    facts: GraphFacts
    number: int
    region: Region
    makers: Mapping[ValueId, Op]
    origins: Mapping[StorageId, Op | GraphInput]
    aliasing: frozenset[ValueId]
    keepers: Mapping[StorageId, tuple[Keeper, ...]]
    roles: Mapping[ValueId, Keeper]
    staying: Mapping[StorageId, Keeper]
    carried_bytes: Mapping[StorageId, int]

    def value(self, value: ValueId) -> Value:
        return self.facts.values[value]


@dataclass(frozen=True)
class Index:
    facts: GraphFacts
    regions: tuple[RegionIndex, ...]


class Case(NamedTuple):
    """One saved value as the ledger counts it; ``storage`` is None for what has none."""

    region: int
    position: int
    storage: StorageId | None
    storage_bytes: int
    logical_bytes: int
    rule: Rule | None
    holder: str


class LedgerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values under one rule (or eligible) with one holder kind, or one holder (definition 9)."""

    rule: Outcome
    holder: str
    count: int
    logical_bytes: int
    storage_bytes: int


# --- the index ------------------------------------------------------------------------------------


def index(facts: GraphFacts) -> Index:
    """The lookups that every rule set needs, built in one pass over ``facts``."""
    regions = (_region_index(facts, number) for number in range(len(facts.regions)))
    return Index(facts, tuple(regions))


def _region_index(facts: GraphFacts, number: int) -> RegionIndex:
    region = facts.regions[number]
    makers, aliasing, origins = _forward_ops(facts, region)
    keepers, roles = _keepers(facts, region, makers)
    staying: dict[StorageId, Keeper] = {}
    carried: dict[StorageId, int] = {}
    for value_id in distinct_saved(region):
        value = facts.values[value_id]
        if value.storage is None:
            continue
        carried[value.storage] = carried.get(value.storage, 0) + logical_bytes(value)
        if _stays_alone(value) or value_id not in makers:
            staying.setdefault(value.storage, _saved_keeper(value_id, makers))
    return RegionIndex(
        facts=facts,
        number=number,
        region=region,
        makers=makers,
        origins=origins,
        aliasing=aliasing,
        keepers=keepers,
        roles=roles,
        staying=staying,
        carried_bytes=carried,
    )


def _stays_alone(value: Value) -> bool:
    """Whether ``value`` stays whoever else keeps its storage (definition 7)."""
    unknown = value.kind != "tensor" or bool(value.symbolic) or value.layout != "strided"
    return unknown or value.rng_state


def _forward_ops(
    facts: GraphFacts, region: Region
) -> tuple[dict[ValueId, Op], frozenset[ValueId], dict[StorageId, Op | GraphInput]]:
    """Who makes each value, which are made by aliasing ops, and where each storage comes from."""
    makers: dict[ValueId, Op] = {}
    aliasing: set[ValueId] = set()
    origins: dict[StorageId, Op | GraphInput] = {}
    for item in region.forward.inputs:
        storage = facts.values[item.value].storage
        if storage is not None:
            origins.setdefault(storage, item)
    for op in region.forward.ops:
        read = {facts.values[value].storage for value in op.inputs} - {None}
        for output in op.outputs:
            makers.setdefault(output, op)
            storage = facts.values[output].storage
            if storage is not None and storage not in read:
                origins.setdefault(storage, op)
            elif storage is not None and op.declares_alias:
                aliasing.add(output)
    return makers, frozenset(aliasing), origins


def _keepers(
    facts: GraphFacts, region: Region, makers: Mapping[ValueId, Op]
) -> tuple[dict[StorageId, tuple[Keeper, ...]], dict[ValueId, Keeper]]:
    """Keepers of each storage in holder order, and the role of each value that is one."""
    roles: dict[ValueId, Keeper] = {}
    for keeper in (*_input_keepers(region), *_output_keepers(region)):
        roles.setdefault(keeper.value, keeper)
    for value_id in distinct_saved(region):
        roles.setdefault(value_id, _saved_keeper(value_id, makers))
    by_storage: dict[StorageId, list[Keeper]] = {}
    for keeper in roles.values():
        storage = facts.values[keeper.value].storage
        if storage is not None:
            by_storage.setdefault(storage, []).append(keeper)
    return {storage: tuple(found) for storage, found in by_storage.items()}, roles


def _input_keepers(region: Region) -> Iterator[Keeper]:
    inputs = [Keeper(item.value, _input_kind(item), item.name) for item in region.forward.inputs]
    # A stable sort on the kind alone: graph order within a kind.
    yield from sorted(inputs, key=lambda keeper: _INPUT_ORDER.index(_ordered_as(keeper.kind)))


def _input_kind(item: GraphInput) -> HolderKind:
    # The other two kinds are of backward graphs.
    return "input" if item.kind == "saved" or item.kind == "tangent" else item.kind


def _ordered_as(kind: HolderKind) -> HolderKind:
    return kind if kind in _INPUT_ORDER else "input"


def _output_keepers(region: Region) -> Iterator[Keeper]:
    for item in region.forward.outputs:
        if item.value is None:
            continue
        if item.kind == "output" or item.kind == "mutated":
            yield Keeper(item.value, item.kind, item.name)


def _saved_keeper(value: ValueId, makers: Mapping[ValueId, Op]) -> Keeper:
    op = makers.get(value)
    if op is None:
        return Keeper(value, "saved", f"value {value}")
    return Keeper(value, "saved", op.name, op.module)


def distinct_saved(region: Region) -> Iterator[ValueId]:
    """The saved values of ``region``, each once, by first saved position."""
    yield from dict.fromkeys(saved.value for saved in region.saved)


def logical_bytes(value: Value) -> int:
    """Bytes that ``value`` carries; 0 where they are not known."""
    return 0 if value.kind != "tensor" or value.symbolic else value.logical_bytes


# --- the rules: each answers a holder text where it holds, None where it does not -----------------

_Test = Callable[[RegionIndex, ValueId, int], "str | None"]


def _not_tensor(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    return "" if region.value(value).kind != "tensor" else None


def _symbolic_size(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    symbolic = region.value(value).symbolic
    return f"size {symbolic}" if symbolic else None


def _host(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    storage = region.value(value).storage
    if storage is None or region.facts.device == "cpu":
        return None
    return "" if region.facts.storages[storage].device == "cpu" else None


def _unsupported(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    found = region.value(value)
    if found.layout != "strided":
        return f"layout {found.layout}"
    return "layout unknown" if found.storage is None else None


def _empty_value(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    return "" if region.value(value).logical_bytes == 0 else None


def _empty_unit(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    return "" if region.carried_bytes[_storage(region, value)] == 0 else None


def _parameter(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    first = region.keepers[_storage(region, value)][0]
    return first.text if first.kind in ("parameter", "buffer") else None


def _input(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    role = region.roles[value]
    if role.kind in ("input", "constant", "handed"):
        return role.text
    # Made by no op and listed nowhere: it came from outside, so it is the caller's.
    return "" if role.kind == "saved" and value not in region.makers else None


def _output(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    role = region.roles[value]
    return role.text if role.kind in ("output", "mutated") else None


def _alias_view(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    if value not in region.aliasing:
        return None
    other = _other_keeper(region, value)
    return other.text if other else ""


def _alias_shared(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    other = _other_keeper(region, value)
    return other.text if other and value in region.aliasing else None


def _alias_unit(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    storage = _storage(region, value)
    first = region.keepers[storage][0]
    if first.kind != "saved":
        return first.text
    staying = region.staying.get(storage)
    # A value that stays on its own account is not of the unit; its own rule says why it stays.
    if staying is None or region.value(value).rng_state:
        return None
    return staying.text


def _alias_layout(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    if value not in region.aliasing or is_dense(region.value(value)):
        return None
    return ""


def _rng_state(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    return "" if region.value(value).rng_state else None


def _not_float(region: RegionIndex, value: ValueId, _min_bytes: int) -> str | None:
    return "" if not region.value(value).is_float else None


def _too_small(region: RegionIndex, value: ValueId, min_bytes: int) -> str | None:
    size_bytes = region.facts.storages[_storage(region, value)].size_bytes
    return "" if size_bytes < min_bytes else None


def _storage(region: RegionIndex, value: ValueId) -> StorageId:
    storage = region.value(value).storage
    assert storage is not None, "rules after unsupported are asked of tensors with a storage only"
    return storage


def _other_keeper(region: RegionIndex, value: ValueId) -> Keeper | None:
    # Keepers are distinct values, so this looks at two at most.
    keepers = region.keepers[_storage(region, value)]
    return next((keeper for keeper in keepers if keeper.value != value), None)


_Tests = tuple[tuple[Rule, _Test], ...]
_KIND: _Tests = (
    ("not_tensor", _not_tensor),
    ("symbolic_size", _symbolic_size),
    ("host", _host),
    ("unsupported", _unsupported),
)
_OWNED: _Tests = (("parameter", _parameter), ("input", _input), ("output", _output))
_TESTS: Mapping[RuleSet, _Tests] = {
    "no-view": (
        *_KIND,
        ("empty", _empty_value),
        *_OWNED,
        ("alias", _alias_view),
        ("rng_state", _rng_state),
        ("not_float", _not_float),
        ("too_small", _too_small),
    ),
    "last-holder": (
        *_KIND,
        ("empty", _empty_value),
        *_OWNED,
        ("alias", _alias_shared),
        ("alias_layout", _alias_layout),
        ("rng_state", _rng_state),
        ("not_float", _not_float),
        ("too_small", _too_small),
    ),
    "whole-storage": (
        *_KIND,
        ("empty", _empty_unit),
        *_OWNED,
        ("alias", _alias_unit),
        ("rng_state", _rng_state),
        ("too_small", _too_small),
    ),
}


def verdicts(
    facts: Index, rules: RuleSet, min_bytes: int = DEFAULT_MIN_BYTES
) -> tuple[Verdict, ...]:
    """One verdict per saved value, by region and saved position."""
    return tuple(
        verdict for region in facts.regions for verdict in _verdicts(region, rules, min_bytes)
    )


def _verdicts(region: RegionIndex, rules: RuleSet, min_bytes: int) -> Iterator[Verdict]:
    decided: dict[ValueId, tuple[Rule | None, str]] = {}
    for position, saved in enumerate(region.region.saved):
        if saved.value not in decided:
            decided[saved.value] = _decide(region, saved.value, rules, min_bytes)
        rule, holder = decided[saved.value]
        yield Verdict(region.number, position, rule, holder)


def _decide(
    region: RegionIndex, value: ValueId, rules: RuleSet, min_bytes: int
) -> tuple[Rule | None, str]:
    for rule, test in _TESTS[rules]:
        holder = test(region, value, min_bytes)
        if holder is not None:
            return rule, holder
    return None, ""


# --- the ledger -----------------------------------------------------------------------------------


def cases(facts: Index, found: Iterable[Verdict]) -> Iterator[Case]:
    """What the ledger counts of ``found``: each saved value of a region once (definition 8)."""
    seen: set[tuple[int, ValueId]] = set()
    for verdict in found:
        region = facts.regions[verdict.region]
        value_id = region.region.saved[verdict.position].value
        if (verdict.region, value_id) in seen:
            continue
        seen.add((verdict.region, value_id))
        value = region.value(value_id)
        size_bytes = 0 if value.storage is None else facts.facts.storages[value.storage].size_bytes
        yield Case(
            region=verdict.region,
            position=verdict.position,
            storage=value.storage,
            storage_bytes=size_bytes,
            logical_bytes=logical_bytes(value),
            rule=verdict.rule,
            holder=verdict.holder,
        )


def ledger(found: Iterable[Case]) -> tuple[LedgerRow, ...]:
    """Rows by rule and holder kind, eligible first, then in the order of ``RULES``."""
    return _tally(found, holder_kind)


def ledger_by_holder(found: Iterable[Case]) -> tuple[LedgerRow, ...]:
    """The same, with a row for each holder."""
    return _tally(found, str)


def holder_kind(holder: str) -> str:
    """The first word of a holder's text (definition 2)."""
    return holder.partition(" ")[0]


def _tally(found: Iterable[Case], group: Callable[[str], str]) -> tuple[LedgerRow, ...]:
    ordered = sorted(found, key=lambda case: (case.region, case.position))
    deciding = _deciding_cases(ordered)
    sums: dict[tuple[Outcome, str], list[int]] = {}
    for case in ordered:
        key = (case.rule or "eligible", group(case.holder))
        row = sums.setdefault(key, [0, 0, 0])
        row[0] += 1
        row[1] += case.logical_bytes
        if case.storage is not None and deciding[case.storage] is case:
            row[2] += case.storage_bytes
    rows = [LedgerRow(*key, *row) for key, row in sums.items()]
    return tuple(sorted(rows, key=_ledger_order))


def _deciding_cases(ordered: Iterable[Case]) -> dict[StorageId, Case]:
    """The case that counts each storage: the first skipped one, or the first if none is."""
    deciding: dict[StorageId, Case] = {}
    for case in ordered:
        if case.storage is None:
            continue
        current = deciding.setdefault(case.storage, case)
        if current.rule is None and case.rule is not None:
            deciding[case.storage] = case
    return deciding


def _ledger_order(row: LedgerRow) -> tuple[int, str]:
    return (-1 if row.rule == "eligible" else RULES.index(row.rule), row.holder)
