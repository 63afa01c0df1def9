"""What a plan does with its storages, and why: one in full, or many in a line each.

1.  A plan's storages are those that it saves, those that the backward computes again, and, where
    its graphs are there, all others of its step.  A name means some of them (``offplan.named``).
2.  One storage is *explained*: where it comes from, the views that are saved, every op that uses
    it, the values on it with what keeps them, each rule set's verdict in words, what would
    unlock it, what other actions would do (``offplan.effects``), and what is remarkable about it
    (``offplan.observed``).
3.  The *path* to a holder goes over values of one storage: ``a <- b -> c`` says that a was made as
    a view of b, and c, too.
4.  What *unlocks* a storage that stays is said only if the verdicts, asked again under the change,
    let it go: of the plan's rule set and of ``whole-storage``, as both have to.
5.  Several storages, or those of the whole plan, are *found*: what they are, what is done and why.

Without graphs only what the plan file says is there.  Takes time in proportion to ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from offplan.budget import Elsewhere
from offplan.costs import DeviceProfile
from offplan.effects import Effect, Effects, OnMachine
from offplan.eligibility import (
    Index,
    Outcome,
    RegionIndex,
    RuleSet,
    index,
    logical_bytes,
    verdicts,
)
from offplan.footprint import is_dense
from offplan.graph import (
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Op,
    Region,
    Storage,
    StorageId,
    TargetRef,
    Value,
    ValueId,
    graphs,
    timeline,
)
from offplan.named import Subject, find, subjects
from offplan.observed import Observation, observations
from offplan.opened import Opened
from offplan.plan import Entry, EntryAction, Plan, PlanVerdict, Prices, Recomputed, View
from offplan.units import format_binary, format_size

Phase = Literal["forward", "backward"]
Does = Literal["makes", "views", "reads", "writes", "makes again"]
Action = EntryAction | Literal["recompute", "not saved"]


class Origin(msgspec.Struct, frozen=True):
    """The op ``name`` that made something; for a graph input ``op`` is the kind of input."""

    name: str
    op: str
    module: str = ""
    source: str = ""


class SavedView(msgspec.Struct, frozen=True):
    """One saved view, at ``positions``; stride and offset in elements.  ``layout`` in words."""

    origin: Origin
    positions: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    logical_bytes: int
    layout: str


class At(msgspec.Struct, frozen=True):
    """An op, by its index on the timeline; one past the last is the end of the step."""

    phase: Phase
    index: int
    origin: Origin


class Use(msgspec.Struct, frozen=True):
    """An op that uses the storage."""

    does: Does
    at: At


class Trip(msgspec.Struct, frozen=True):
    """The way of a storage to the host and back, as in ``Transfer``."""

    offload_after: At
    release_by: At
    reload_at: At | None
    needed_by: At | None


class OnStorage(msgspec.Struct, frozen=True):
    """A value on the storage in the forward, made as a view of ``of`` (empty: it is the first).

    ``roles`` say why it outlives the forward, if it does: ``output 0``, ``saved``.
    """

    origin: Origin
    of: str
    roles: tuple[str, ...]


class Path(msgspec.Struct, frozen=True):
    """From a saved value to what else keeps its storage (definition 3)."""

    saved: str
    holder: str
    path: str


class Says(msgspec.Struct, frozen=True):
    """A rule set's verdict on the saved views ``names``, and its reason."""

    rules: RuleSet
    rule: Outcome
    holder: str
    names: tuple[str, ...]
    because: str


class Unlock(msgspec.Struct, frozen=True):
    """A change under which the storage could leave (definition 4)."""

    change: str
    effect: str


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One storage (definition 2).  ``id`` is None for what has no storage, or is not known.

    ``range_bytes`` and ``transfer_bytes`` are what a move allocates on reload, and carries each
    way; None if it may not move.  ``recompute_us`` and ``link_us`` are prices; None where they are
    not known, and ``recompute_why`` may say why.
    """

    id: StorageId | None
    region: int
    size_bytes: int
    device: str
    action: Action
    why: str
    origin: Origin
    views: tuple[SavedView, ...] = ()
    also_saved_by: tuple[int, ...] = ()
    range_bytes: int | None = None
    touched_bytes: int | None = None
    transfer_bytes: int | None = None
    packed: bool = False
    recompute_us: int | None = None
    recompute_why: str = ""
    recompute_inputs: tuple[str, ...] = ()
    recompute_ops: int = 0
    link_us: int | None = None
    trip: Trip | None = None
    values: tuple[OnStorage, ...] = ()
    paths: tuple[Path, ...] = ()
    uses: tuple[Use, ...] = ()
    verdicts: tuple[Says, ...] = ()
    unlocks: tuple[Unlock, ...] = ()
    effects: tuple[Effect, ...] = ()
    observations: tuple[Observation, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """One storage in a line (definition 5); ``dtype`` and ``shape`` are of its largest view."""

    id: StorageId | None
    region: int
    size_bytes: int
    action: Action
    rule: Outcome
    why: str
    origin: Origin
    dtype: str
    shape: tuple[int, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """``storages`` are explained in full, ``found`` are the ones that were found instead.

    ``machines`` run this plan as it is, ``elsewhere`` are new plans for the same peak.
    """

    target: TargetRef
    name: str
    notes: tuple[str, ...]
    rules: RuleSet
    budget: int | None
    asked: str
    peak_bytes: int
    no_plan_peak_bytes: int
    saved_bytes: int
    has_graphs: bool
    storages: tuple[Explained, ...] = ()
    found: tuple[Found, ...] = ()
    observations: tuple[Observation, ...] = ()
    machines: tuple[OnMachine, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


def explain(
    opened: Opened,
    name: str = "",
    profile: DeviceProfile | None = None,
    elsewhere: Sequence[Elsewhere] = (),
) -> Explanation:
    """What ``name`` means in a plan, or all of the plan without one; times are by ``profile``.

    Raises ``OffplanError`` for a name that means nothing.
    """
    plan, facts = opened.plan, opened.facts
    reader = _Reader(opened, profile)
    meant = find(name, plan, facts) if name else subjects(plan, facts)
    explained: tuple[Explained, ...] = ()
    if name and _is_one(meant):
        explained = tuple(map(reader.explained, meant))
    found = () if explained else tuple(map(reader.found, meant))
    return Explanation(
        target=plan.target,
        name=name,
        notes=(*opened.notes, *reader.notes()),
        rules=plan.rules,
        budget=plan.budget,
        asked=plan.asked,
        peak_bytes=plan.predicted.plan.peak_bytes,
        no_plan_peak_bytes=plan.predicted.no_plan.peak_bytes,
        saved_bytes=plan.saved_bytes,
        has_graphs=facts is not None,
        storages=explained,
        found=found,
        observations=() if explained else reader.observed_of(meant),
        machines=() if name or reader.effects is None else reader.effects.machines(),
        elsewhere=tuple(elsewhere),
    )


def _is_one(meant: Sequence[Subject]) -> bool:
    """Whether there is one, or all are one storage, that several regions save."""
    first = meant[0]
    return len(meant) == 1 or (
        first.storage is not None and all(each.storage == first.storage for each in meant)
    )


class _Reader:
    """Explains storages of one plan."""

    def __init__(self, opened: Opened, profile: DeviceProfile | None) -> None:
        self.plan = opened.plan
        self.facts = opened.facts
        self.index = None if opened.facts is None else index(opened.facts)
        self.effects = (
            None
            if opened.facts is None
            else Effects(opened.plan, opened.base, opened.facts, profile)
        )
        self.profile = profile
        self.observed: dict[tuple[int, StorageId], Observation] = {}
        for region in self.index.regions if self.index is not None else ():
            for each in observations(region):
                self.observed[each.region, each.storage] = each

    def notes(self) -> Iterator[str]:
        predicted = self.plan.predicted
        if self.effects is None:
            return
        if self.profile is None:
            yield "no times are predicted, as the plan's device has no profile (--profile)"
        elif predicted.profile and predicted.profile != self.profile.name:
            yield f"times are by the profile {self.profile.name}, not {predicted.profile}"
        elif predicted.op_times == "measured":
            yield "times are by the profile; the plan was made with measured op times"

    def observed_of(self, meant: Iterable[Subject]) -> tuple[Observation, ...]:
        keys = ((each.region, each.storage) for each in meant if each.entry is not None)
        found = (self.observed.get((region, s)) for region, s in keys if s is not None)
        return tuple(each for each in found if each is not None)

    # --- in a line --------------------------------------------------------------------------------

    def found(self, subject: Subject) -> Found:
        if subject.entry is not None:
            return self._found_entry(subject.entry)
        again = subject.again
        if again is not None:
            return Found(
                id=subject.storage,
                region=again.region,
                size_bytes=again.size_bytes,
                action="recompute",
                rule="eligible",
                why=again.reason,
                origin=Origin(again.name, again.op, again.module, again.source),
                dtype=again.dtype,
                shape=again.shape,
            )
        value, origin, why = self._unsaved(subject)
        return Found(
            id=subject.storage,
            region=subject.region,
            size_bytes=self._storage(subject).size_bytes,
            action="not saved",
            rule="eligible",
            why=why,
            origin=origin,
            dtype=value.dtype if value is not None else "",
            shape=value.shape if value is not None else (),
        )

    def _found_entry(self, entry: Entry) -> Found:
        largest = max(entry.views, key=lambda view: view.logical_bytes)
        return Found(
            id=entry.id,
            region=entry.region,
            size_bytes=entry.size_bytes,
            action=entry.action,
            rule=entry.rule,
            why=_why(self.plan, entry),
            origin=Origin(entry.name, entry.op, entry.module, entry.source),
            dtype=largest.dtype,
            shape=largest.shape,
        )

    # --- in full ----------------------------------------------------------------------------------

    def explained(self, subject: Subject) -> Explained:
        if subject.entry is not None:
            found = self._explained_entry(subject.entry)
        elif subject.again is not None:
            found = self._explained_again(subject.again, subject.storage)
        else:
            _, origin, why = self._unsaved(subject)
            storage = self._storage(subject)
            found = Explained(
                id=subject.storage,
                region=subject.region,
                size_bytes=storage.size_bytes,
                device=storage.device,
                action="not saved",
                why=why,
                origin=origin,
            )
        if self.index is None or subject.storage is None:
            return found
        region, again = self.index.regions[subject.region], subject.again
        observed = self.observed.get((subject.region, subject.storage))
        return msgspec.structs.replace(
            found,
            values=tuple(_values(region, subject.storage)),
            uses=tuple(_uses(region, subject.storage, "" if again is None else again.name)),
            observations=() if observed is None or subject.entry is None else (observed,),
        )

    def _explained_entry(self, entry: Entry) -> Explained:
        prices, footprint = self._prices(entry), entry.footprint
        effects: list[Effect | None] = []
        if self.effects is not None and entry.id is not None and footprint is not None:
            again_us = None if prices is None else prices.recompute_us
            effects = [self.effects.of_entry(entry), self.effects.of_recomputing(entry, again_us)]
        region = None if self.index is None else self.index.regions[entry.region]
        return Explained(
            id=entry.id,
            region=entry.region,
            size_bytes=entry.size_bytes,
            device=entry.device,
            action=entry.action,
            why=_why(self.plan, entry),
            origin=Origin(entry.name, entry.op, entry.module, entry.source),
            views=tuple(map(_saved_view, entry.views)),
            also_saved_by=tuple(
                each.region
                for each in self.plan.storages
                if each.id == entry.id and each.region != entry.region and each.id is not None
            ),
            range_bytes=None if footprint is None else footprint.device_bytes,
            touched_bytes=None if footprint is None else footprint.touched_bytes,
            transfer_bytes=None if footprint is None else footprint.transfer_bytes,
            packed=footprint is not None and footprint.packed,
            recompute_us=None if prices is None else prices.recompute_us,
            recompute_why="" if prices is None else prices.recompute_why,
            link_us=self._link_us(entry, prices),
            trip=self._trip(entry),
            paths=() if region is None else tuple(_paths(region, entry)),
            verdicts=tuple(_says(self.plan, entry)),
            unlocks=tuple(_unlocks(self.plan, entry, region)),
            effects=tuple(effect for effect in effects if effect is not None),
        )

    def _explained_again(self, again: Recomputed, storage: StorageId | None) -> Explained:
        effect = None
        if self.effects is not None and storage is not None:
            effect = self.effects.of_keeping(again, storage)
        return Explained(
            id=storage,
            region=again.region,
            size_bytes=again.size_bytes,
            device=self.plan.device,
            action="recompute",
            why=again.reason,
            origin=Origin(again.name, again.op, again.module, again.source),
            recompute_us=again.recompute_us,
            recompute_inputs=again.inputs,
            recompute_ops=len(again.ops),
            link_us=again.link_us,
            effects=() if effect is None else (effect,),
        )

    def _prices(self, entry: Entry) -> Prices | None:
        """The plan's, or else those of the profile; times only where the device is known."""
        prices = entry.prices
        weighed = any(each.prices is not None for each in self.plan.storages)
        if not weighed and self.effects is not None and isinstance(self._origin(entry), Op):
            assert entry.id is not None
            prices = self.effects.prices(entry.region, entry.id)
        if prices is not None and self.profile is None:
            return msgspec.structs.replace(prices, recompute_us=None, link_us=None)
        return prices

    def _origin(self, entry: Entry) -> Op | GraphInput | None:
        """The op that allocated the storage of ``entry``, or the input that it came in as."""
        if self.index is None or entry.id is None:
            return None
        return self.index.regions[entry.region].origins.get(entry.id)

    def _link_us(self, entry: Entry, prices: Prices | None) -> int | None:
        """The time of its copy, each way: the plan's, or else the profile's."""
        if prices is not None and prices.link_us is not None:
            return prices.link_us
        if entry.footprint is None or self.profile is None:
            return None
        seconds = entry.footprint.transfer_bytes / self.profile.d2h_bytes_per_s
        return round(1e6 * (seconds + self.profile.copy_latency_s))

    def _trip(self, entry: Entry) -> Trip | None:
        """Between which ops it is away, if it moves."""
        wanted = (entry.region, entry.id)
        mine = (t for t in self.plan.transfers if (t.region, t.storage) == wanted)
        transfer = next(mine, None)
        if transfer is None:
            return None
        ops = [] if self.facts is None else _timeline(self.facts)
        forward_count = sum(region.forward_ops for region in self.plan.regions)

        def at(place: int) -> At:
            origin = ops[place] if place < len(ops) else Origin("", "")
            return At("forward" if place < forward_count else "backward", place, origin)

        return Trip(
            offload_after=at(transfer.offload_after),
            release_by=at(transfer.release_by),
            reload_at=None if transfer.reload_at is None else at(transfer.reload_at),
            needed_by=None if transfer.needed_by is None else at(transfer.needed_by),
        )

    # --- what is not saved ------------------------------------------------------------------------

    def _storage(self, subject: Subject) -> Storage:
        assert self.facts is not None
        assert subject.storage is not None
        return self.facts.storages[subject.storage]

    def _unsaved(self, subject: Subject) -> tuple[Value | None, Origin, str]:
        """A value on a storage that is not saved, what made it, and why it is not saved."""
        assert self.facts is not None
        facts = self.facts
        forward_count = len(facts.regions)
        for number, graph in enumerate(graphs(facts)):
            unread = "the backward does not read it"
            for item in graph.inputs:
                if facts.values[item.value].storage == subject.storage:
                    return facts.values[item.value], Origin(item.name, item.kind), unread
            for op in graph.ops:
                for value in op.outputs:
                    if facts.values[value].storage == subject.storage:
                        why = unread if number < forward_count else "the backward makes it"
                        return facts.values[value], _origin(op), why
        return None, Origin(f"storage {subject.storage}", "unknown"), "no op uses it"


# --- words ----------------------------------------------------------------------------------------


def _why(plan: Plan, entry: Entry) -> str:
    """Why it is done with ``entry``."""
    if entry.action == "skipped":
        rules = plan.rules
        skipped = [view for view in entry.views if view.verdicts[rules].rule != "eligible"]
        if not skipped:
            rules, skipped = "whole-storage", list(entry.views)
        verdict = PlanVerdict(entry.rule, entry.holder)
        return _because(verdict, skipped[0], rules, plan.min_bytes)
    if entry.prices is not None and entry.prices.reason:
        return entry.prices.reason
    if "offload" not in plan.actions:
        return "the plan may not move anything (--actions)"
    if entry.action == "offload":
        moves_all = plan.budget == 0
        return "everything movable moves" if moves_all else "the peak is over the budget without"
    if plan.budget is None:
        return "no budget was asked for, so nothing moves"
    return "the budget is met with it there"


def _because(verdict: PlanVerdict, view: View, rules: RuleSet, min_bytes: int) -> str:
    """Why ``rules`` say of ``view`` what they say, as a clause."""
    holder = verdict.holder
    said: Mapping[Outcome, str] = {
        "eligible": "nothing else keeps it, and it is large enough",
        "not_tensor": "it is a number, not a tensor",
        "symbolic_size": f"its {holder or 'size'} is not known when traced",
        "host": "it is on the CPU already",
        "unsupported": f"it is no plain strided tensor ({holder})",
        "empty": "it has no bytes",
        "parameter": f"it is {holder}, which stays on the device in any case",
        "input": f"it is {holder or 'an input'}, which the caller keeps",
        "output": f"it is {holder}, which is returned to the caller",
        "alias_layout": "its layout has gaps or overlaps, which a plain host copy would lose",
        "rng_state": "it is the state of a random generator: a few bytes, read in place",
        "not_float": f"it is {view.dtype}, and this rule set moves floating-point values only",
        "too_small": f"its storage is under the minimum of {format_binary(min_bytes)}",
    }
    if verdict.rule != "alias":
        return said[verdict.rule]
    if rules == "no-view":
        also = f"; {holder} is on its storage, too" if holder else ""
        return f"{view.op} made it as a view, and this rule set moves no view{also}"
    if rules == "last-holder":
        return f"it is a view, and {holder} is another value on its storage"
    return f"{holder} keeps the storage, and does not leave with it"


def _says(plan: Plan, entry: Entry) -> Iterator[Says]:
    """The verdicts of all rule sets, views of one verdict together."""
    for rules in ("no-view", "last-holder", "whole-storage"):
        alike: dict[tuple[Outcome, str, str], list[str]] = {}
        for view in entry.views:
            verdict = view.verdicts[rules]
            because = _because(verdict, view, rules, plan.min_bytes)
            alike.setdefault((verdict.rule, verdict.holder, because), []).append(view.name)
        for (rule, holder, because), names in alike.items():
            yield Says(rules, rule, holder, tuple(names), because)


def _saved_view(view: View) -> SavedView:
    return SavedView(
        origin=Origin(view.name, view.op, view.module, view.source),
        positions=(view.position, *view.also_at),
        dtype=view.dtype,
        shape=view.shape,
        stride=view.stride,
        offset=view.offset,
        logical_bytes=view.logical_bytes,
        layout=_layout(view),
    )


def _layout(view: View) -> str:
    """What the strides say, in words."""
    value = Value("tensor", dtype=view.dtype, shape=view.shape, stride=view.stride)
    pairs = [(n, s) for n, s in zip(view.shape, view.stride, strict=True) if n != 1]
    if not view.shape:
        return "scalar" if view.logical_bytes else ""
    if any(stride == 0 for _, stride in pairs):
        return "expanded"
    if not is_dense(value):
        return "with gaps, or overlapping"
    ordered = [stride for _, stride in pairs]
    return "contiguous" if ordered == sorted(ordered, reverse=True) else "permuted"


# --- graphs ---------------------------------------------------------------------------------------


def _origin(op: Op) -> Origin:
    return Origin(op.name, op.target, op.module, op.source)


def _timeline(facts: GraphFacts) -> list[Origin]:
    return [_origin(op) for op in timeline(facts)]


def _uses(region: RegionIndex, storage: StorageId, again: str) -> Iterator[Use]:
    """Every op that uses ``storage``: of all forwards, and of the backwards that are handed it.

    ``again`` names the op that makes it again in the region's backward, if one does.
    """
    facts, place = region.facts, 0
    for each in facts.regions:
        for op in each.forward.ops:
            does = _does(facts, op, {storage})
            if does is not None:
                yield Use(does, At("forward", place, _origin(op)))
            place += 1
    for each in reversed(facts.regions):
        if each.backward is None:
            continue
        here = _received(facts, each, storage)
        for op in each.backward.ops:
            does = _does(facts, op, here)
            if again and each is region.region and op.name == again:
                here |= {s for v in op.outputs if (s := facts.values[v].storage) is not None}
                does = "makes again"
            if does is not None:
                yield Use(does, At("backward", place, _origin(op)))
            place += 1


def _received(facts: GraphFacts, region: Region, storage: StorageId) -> set[StorageId]:
    """What ``storage`` is in the backward of ``region``."""
    return {storage} | {
        received
        for item in region.saved
        if facts.values[item.value].storage == storage
        if (received := facts.values[item.backward_value].storage) is not None
    }


def _does(facts: GraphFacts, op: Op, storages: set[StorageId]) -> Does | None:
    def is_on(values: Iterable[ValueId]) -> bool:
        return any(facts.values[value].storage in storages for value in values)

    if is_on(op.mutates):
        return "writes"
    if is_on(op.outputs):
        return "views" if is_on(op.inputs) else "makes"
    return "reads" if is_on(op.inputs) else None


def _parents(region: RegionIndex, storage: StorageId) -> dict[ValueId, ValueId | None]:
    """The forward's values on ``storage``, each with the value that it is a view of."""
    found: dict[ValueId, ValueId | None] = {}
    for item in region.region.forward.inputs:
        if region.value(item.value).storage == storage:
            found[item.value] = None
    for op in region.region.forward.ops:
        for output in op.outputs:
            if region.value(output).storage == storage:
                found.setdefault(output, next((v for v in op.inputs if v in found), None))
    return found


def _values(region: RegionIndex, storage: StorageId) -> Iterator[OnStorage]:
    parents = _parents(region, storage)
    saved = {item.value for item in region.region.saved}
    outputs: dict[ValueId, list[str]] = {}
    for item in region.region.forward.outputs:
        if item.value is not None and item.kind in ("output", "mutated"):
            outputs.setdefault(item.value, []).append(f"{item.kind} {item.name}")
    for value, parent in parents.items():
        roles = [*outputs.get(value, ()), *(("saved",) * (value in saved))]
        if value not in region.makers:
            keeper = region.roles.get(value)
            given = keeper.text if keeper is not None and keeper.kind != "saved" else ""
            roles = [*([given] if given else []), *roles]
        of = "" if parent is None else _value_name(region, parent)
        yield OnStorage(_value_origin(region, value), of, tuple(roles))


def _paths(region: RegionIndex, entry: Entry) -> Iterator[Path]:
    """From each saved value to each other keeper of its storage, unless that leaves with it."""
    if entry.id is None:
        return
    parents = _parents(region, entry.id)
    saved = {item.value for item in region.region.saved}
    for view in entry.views:
        value = region.region.saved[view.position].value
        for keeper in region.keepers.get(entry.id, ()):
            leaves_too = keeper.value in saved and keeper.kind == "saved"
            if keeper.value != value and not leaves_too:
                path = _path(region, parents, value, keeper.value)
                yield Path(view.name, keeper.text, path)


def _path(
    region: RegionIndex, parents: Mapping[ValueId, ValueId | None], start: ValueId, end: ValueId
) -> str:
    """Over views, from one value of a storage to another (definition 3)."""
    up, down = _ancestors(parents, start), _ancestors(parents, end)
    meets = next((value for value in up if value in down), None)
    if meets is None:
        return f"{_value_name(region, start)}, {_value_name(region, end)}"
    before = up[: up.index(meets) + 1]
    after = list(reversed(down[: down.index(meets)]))
    steps = " <- ".join(_value_name(region, value) for value in before)
    return " -> ".join((steps, *(_value_name(region, value) for value in after)))


def _ancestors(parents: Mapping[ValueId, ValueId | None], value: ValueId) -> list[ValueId]:
    found: list[ValueId] = []
    at: ValueId | None = value
    while at is not None and at not in found:
        found.append(at)
        at = parents.get(at)
    return found


def _value_origin(region: RegionIndex, value: ValueId) -> Origin:
    op = region.makers.get(value)
    if op is not None and len(op.outputs) > 1:
        name = f"{op.name}[{op.outputs.index(value)}]"
        return msgspec.structs.replace(_origin(op), name=name)
    if op is not None:
        return _origin(op)
    role = region.roles.get(value)
    return Origin(f"value {value}", "unknown") if role is None else Origin(role.name, role.kind)


def _value_name(region: RegionIndex, value: ValueId) -> str:
    return _value_origin(region, value).name


# --- what would unlock it -------------------------------------------------------------------------


def _unlocks(plan: Plan, entry: Entry, region: RegionIndex | None) -> Iterator[Unlock]:
    """Changes under which ``entry`` could leave (definition 4)."""
    if entry.action != "skipped" or entry.rule in ("parameter", "empty", "host", "not_tensor"):
        return
    asked = [view.verdicts[plan.rules].rule for view in entry.views]
    whole = [view.verdicts["whole-storage"].rule for view in entry.views]
    if plan.rules != "whole-storage" and set(whole) == {"eligible"}:
        yield Unlock("--rules whole-storage", "all views of it leave together, strides and all")
    # Every other rule comes before this one.
    if {*asked, *whole} <= {"eligible", "too_small"}:
        size = format_binary(entry.size_bytes)
        yield Unlock(f"--min-size {size}", "every storage of that size or more may move, then")
    if region is None or entry.id is None:
        return
    returned = [
        item
        for item in region.region.forward.outputs
        if item.kind == "output" and item.value is not None
        if region.value(item.value).storage == entry.id
    ]
    if returned and _leaves(plan, entry, _with_returned_copies(region, returned)):
        copied = sum(
            logical_bytes(region.value(item.value)) for item in returned if item.value is not None
        )
        names = ", ".join(item.name for item in returned)
        yield Unlock(
            f"return a copy of output {names} (.clone())",
            f"the copy takes {format_size(copied)} until the caller drops it, and all of the "
            f"{format_size(entry.size_bytes)} could leave",
        )
    elif _leaves(plan, entry, _with_saved_copies(region, entry)):
        copied = sum(view.logical_bytes for view in entry.views)
        yield Unlock(
            "let the backward read a contiguous copy of it (.clone(), as the forward's next op)",
            f"the copy takes {format_size(copied)} until it has left; the storage itself stays "
            "with its holder",
        )


def _leaves(plan: Plan, entry: Entry, changed: GraphFacts) -> bool:
    """Whether all that ``entry`` saves may leave in ``changed`` graphs."""
    wanted = {position for view in entry.views for position in (view.position, *view.also_at)}
    found = index(changed)
    one = Index(changed, (found.regions[entry.region],))
    return all(
        verdict.rule is None
        for rules in {plan.rules, "whole-storage"}
        for verdict in verdicts(one, rules, plan.min_bytes)
        if verdict.position in wanted
    )


def _with_returned_copies(region: RegionIndex, returned: Sequence[GraphOutput]) -> GraphFacts:
    """The graphs if the caller were given copies."""
    facts = region.facts
    values, storages = list(facts.values), list(facts.storages)
    copies: dict[int, ValueId] = {}
    for item in returned:
        assert item.value is not None
        copies[item.value] = ValueId(len(values))
        values.append(_copy(values[item.value], storages))
    outputs = tuple(
        msgspec.structs.replace(item, value=copies[item.value])
        if item in returned and item.value is not None
        else item
        for item in region.region.forward.outputs
    )
    forward = msgspec.structs.replace(region.region.forward, outputs=outputs)
    return _replaced(facts, region.number, forward, values, storages)


def _with_saved_copies(region: RegionIndex, entry: Entry) -> GraphFacts:
    """The graphs if what ``entry`` saves were copies, made by the same ops."""
    facts = region.facts
    values, storages = list(facts.values), list(facts.storages)
    for view in entry.views:
        saved = region.region.saved[view.position].value
        values[saved] = _copy(values[saved], storages)
    return _replaced(facts, region.number, region.region.forward, values, storages)


def _copy(value: Value, storages: list[Storage]) -> Value:
    """A contiguous copy of ``value`` on a storage that is added."""
    stride: list[int] = []
    step = 1
    for size in reversed(value.shape):
        stride.insert(0, step)
        step *= max(size, 1)
    device = storages[value.storage].device if value.storage is not None else ""
    storages.append(Storage(value.logical_bytes, device))
    return msgspec.structs.replace(
        value, storage=StorageId(len(storages) - 1), stride=tuple(stride), offset=0
    )


def _replaced(
    facts: GraphFacts,
    number: int,
    forward: Graph,
    values: Sequence[Value],
    storages: Sequence[Storage],
) -> GraphFacts:
    region: Region = msgspec.structs.replace(facts.regions[number], forward=forward)
    regions = (*facts.regions[:number], region, *facts.regions[number + 1 :])
    return msgspec.structs.replace(
        facts, values=tuple(values), storages=tuple(storages), regions=regions
    )
