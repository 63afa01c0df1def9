"""The Plan: what is saved, under which rule it stays, and what moves when.  A YAML file.

1.  A plan has one *entry* for each storage that a region saves, and one for each saved value that
    has no storage (a SymInt).  Each saved value is a *view* of one entry, with its verdict under
    every rule set, so that a gate can apply any of them to the file alone.
2.  An entry is *movable* if every view of it is eligible under the plan's rule set, and under
    ``whole-storage``: the two older rule sets allow moves that free nothing, because a holder they
    do not look for keeps the storage.
3.  Its *action* is ``offload`` if it has a transfer, ``keep`` if it is movable and has none, else
    ``skipped``: under the rule of its first view that is skipped by the plan's rule set, or else by
    ``whole-storage``.  The third action, ``recompute``, leaves no entry: what the backward computes
    again is not saved.
4.  ``saved_bytes`` are the sizes of the saved storages, each once, less those on the host;
    ``movable_bytes`` of those that are movable; ``moved_bytes`` of those that are offloaded;
    ``staying_bytes`` are saved less movable: no budget moves them.
5.  Indexes in transfers are positions on the timeline, as ``planner`` defines them.
6.  ``budget`` is the peak that was asked for in bytes, 0 if everything moves, and None if nothing
    does; ``asked`` is how it was asked for, where that is not the number (``80%``, ``auto``).
7.  A plan describes graphs as they run.  Where it has the backward compute again what is saved
    without a plan, these are not the *base* graphs, which a trace gives: ``choices`` make them from
    those (``offplan.recompute``), ``base_digest`` names those, and ``recomputed`` says what is not
    saved any more.  Without choices both are the same, and ``base_digest`` is empty.
8.  ``check_plan`` proves a plan against the facts by walking the timeline.  It shares no code with
    the planner, nor with the rules; and with what applies choices, only which ops may run again.
9.  A plan of schema 2 is read as one that may keep and offload.

The same facts and choices give the same bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from offplan import eligibility
from offplan.budget import Action, Aim, Budget, Outlook, Outlooks, Predicted, of_bytes
from offplan.eligibility import Case, Index, LedgerRow, Outcome, RegionIndex, RuleSet
from offplan.errors import FileFormatError, OutputError, PlanError, UsageError
from offplan.files import PLAN_FILE, YamlError, dump_yaml, parse_yaml, read_text, write_atomically
from offplan.footprint import Footprint, footprint
from offplan.fusion import as_run, is_fused
from offplan.gpus import DEFAULT_GPU, find_gpu, gpu_key
from offplan.graph import (
    Compiler,
    GraphBreak,
    GraphFacts,
    Op,
    Region,
    StorageId,
    TargetRef,
    ValueId,
    digest,
)
from offplan.memory import predict
from offplan.recompute import Choice, apply, chosen, wrapped
from offplan.transfers import Move, Transfer
from offplan.units import format_binary

SCHEMA_VERSION = 3

ACTIONS: tuple[Action, ...] = ("keep", "recompute", "offload")
EntryAction = Literal["keep", "offload", "skipped"]
# What schema 2 called them.
_RENAMED = {"moved": "offload", "kept": "keep"}
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class PlanVerdict(_Record, frozen=True):
    """``eligible``, or the rule that skips the value and its holder's text."""

    rule: Outcome
    holder: str = ""


class View(_Record, frozen=True, kw_only=True):
    """One saved value.  ``also_at`` are further positions that save the same one.

    ``name``, ``op``, ``module`` and ``source`` are of the op that made it; for a graph input ``op``
    is the kind of input and ``name`` its name.  ``stride`` and ``offset`` count elements.
    """

    position: Count
    also_at: tuple[Count, ...] = ()
    name: str
    op: str
    module: str = ""
    source: str = ""
    dtype: str
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count
    logical_bytes: Count
    verdicts: dict[RuleSet, PlanVerdict]


class Prices(_Record, frozen=True, kw_only=True):
    """What each action on a storage would cost, in whole microseconds, and why one was taken.

    ``recompute_us`` is None where the storage cannot be computed again, and ``recompute_why`` says
    why.  ``link_us`` is the time of the copy, each way; None where it cannot be copied.
    """

    recompute_us: Count | None = None
    recompute_why: str = ""
    link_us: Count | None = None
    reason: str = ""


class Entry(_Record, frozen=True, kw_only=True):
    """One saved storage (definition 1); ``id`` is None for a value without one.

    ``name``, ``op``, ``module`` and ``source`` are of the op that allocated it, or of the graph
    input it came in as.  ``footprint`` is there if the storage may leave, ``prices`` if all actions
    were weighed for it.
    """

    region: Count
    id: StorageId | None
    size_bytes: Count
    device: str
    action: EntryAction
    rule: Outcome = "eligible"
    holder: str = ""
    name: str
    op: str
    module: str = ""
    source: str = ""
    footprint: Footprint | None = None
    prices: Prices | None = None
    views: tuple[View, ...]


class Recomputed(_Record, frozen=True, kw_only=True):
    """A storage that the backward computes again instead of receiving it (definition 7).

    ``name``, ``op``, ``module`` and ``source`` are of the op that makes it, ``dtype`` and ``shape``
    of the value that it makes.  ``ops`` are the positions in the base forward of all that runs
    again for it, ``recompute_us`` the time that takes; other storages can need the same ops.
    ``inputs`` names the large storages that these read.  ``link_us`` and ``reason`` are as in
    ``Prices``.
    """

    region: Count
    size_bytes: Count
    name: str
    op: str
    module: str = ""
    source: str = ""
    dtype: str
    shape: tuple[Count, ...]
    ops: tuple[Count, ...]
    recompute_us: Count
    inputs: tuple[str, ...] = ()
    link_us: Count | None = None
    reason: str = ""


class RegionSize(_Record, frozen=True):
    """Counts of one region; ``saved`` counts saved positions."""

    forward_ops: Count
    backward_ops: Count
    saved: Count


class Plan(_Record, frozen=True, kw_only=True):
    """See the module docstring; byte counts are definition 4.

    ``actions`` are those that it may take.  ``recompute_us`` is the time of all ops that run again
    for ``recomputed``, each once.
    """

    schema_version: int
    target: TargetRef
    torch: str
    compiler: Compiler
    partitioner: str
    device: str
    gpu: str
    attention: str
    digest: str
    regions: tuple[RegionSize, ...]
    rules: RuleSet
    min_bytes: Count
    budget: Count | None
    asked: str = ""
    predicted: Predicted
    saved_bytes: Count
    movable_bytes: Count
    moved_bytes: Count
    staying_bytes: Count
    ledger: dict[RuleSet, tuple[LedgerRow, ...]]
    storages: tuple[Entry, ...]
    transfers: tuple[Transfer, ...]
    breaks: tuple[GraphBreak, ...]
    warnings: tuple[str, ...]
    actions: tuple[Action, ...]
    choices: tuple[Choice, ...] = ()
    base_digest: str = ""
    recomputed: tuple[Recomputed, ...] = ()
    recompute_us: Count = 0

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.  Raises ``FileFormatError`` naming the field for anything else."""
        return load_plan(Path(path))

    def save(self, path: str | Path) -> None:
        """Write a plan file; the same plan gives the same bytes."""
        write_plan(Path(path), self)

    @property
    def op_count(self) -> int:
        return sum(region.forward_ops + region.backward_ops for region in self.regions)


# --- making ---------------------------------------------------------------------------------------

_Verdicts = Mapping[RuleSet, Sequence[eligibility.Verdict]]


class Weighed(NamedTuple):
    """A storage of the base graphs, and what was found of it when actions were weighed.

    ``ops`` are its recipe, by position in the forward of ``region``, and ``inputs`` the large
    storages that the recipe reads.  The rest is as in ``Prices``.
    """

    region: int
    storage: StorageId
    ops: tuple[int, ...]
    inputs: tuple[StorageId, ...] = ()
    recompute_us: int | None = None
    recompute_why: str = ""
    link_us: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Decided:
    """Choices for ``base``, and what was weighed for them.

    ``recompute_us`` is the time of all ops that run again because of them, each once.
    """

    base: GraphFacts
    choices: tuple[Choice, ...]
    weighed: tuple[Weighed, ...] = ()
    recompute_us: int = 0


def make_plan(
    facts: GraphFacts,
    *,
    rules: RuleSet = eligibility.DEFAULT_RULES,
    min_bytes: int = eligibility.DEFAULT_MIN_BYTES,
    budget: int | Budget | None = None,
    aim: Aim | None = None,
) -> Plan:
    """The plan for ``facts``.  ``budget`` None moves nothing, 0 everything movable; otherwise it is
    the most bytes of peak.  ``aim`` says what else to plan for; its own budget is not read.

    Raises ``BudgetError`` if no plan is within the budget.
    """
    wanted = of_bytes(budget) if isinstance(budget, int) else budget
    aim = replace(aim or Aim(), budget=wanted)
    draft = Draft(facts, rules, min_bytes, aim.actions)
    outlook = Outlooks(facts, draft.moves, aim).outlook()
    return draft.plan(outlook, wanted)


class Draft:
    """What a plan of ``facts`` says whatever its budget; ``moves`` may leave the device."""

    def __init__(
        self,
        facts: GraphFacts,
        rules: RuleSet,
        min_bytes: int,
        actions: tuple[Action, ...] = ("keep", "offload"),
    ) -> None:
        self.facts = facts
        self.actions = actions
        self.rules: RuleSet = rules
        self.min_bytes = min_bytes
        index = eligibility.index(facts)
        verdicts = {
            name: eligibility.verdicts(index, name, min_bytes) for name in eligibility.RULE_SETS
        }
        self.ledger = _ledgers(index, verdicts)
        self.entries = tuple(_entries(index, verdicts, rules))
        self.moves = tuple(_moves(self.entries)) if "offload" in actions else ()

    def plan(self, outlook: Outlook, budget: Budget | None, decided: Decided | None = None) -> Plan:
        """The plan with the transfers of ``outlook``, which was made for ``budget``.

        ``decided`` has the choices that ``facts`` were made with.
        """
        facts, transfers = self.facts, outlook.transfers
        entries = _marked(self.entries, transfers)
        if decided is not None:
            entries = _priced(entries, decided, facts)
        saved_bytes = _total_bytes(entries, ("offload", "keep", "skipped"), facts.device)
        movable_bytes = _total_bytes(entries, ("offload", "keep"), facts.device)
        plan = Plan(
            schema_version=SCHEMA_VERSION,
            target=TargetRef(facts.target.spec, dict(sorted(facts.target.params.items()))),
            torch=facts.torch,
            compiler=facts.compiler,
            partitioner=facts.partitioner,
            device=facts.device,
            gpu=facts.gpu,
            attention=facts.attention,
            digest=digest(facts),
            regions=tuple(_region_sizes(facts)),
            rules=self.rules,
            min_bytes=self.min_bytes,
            budget=outlook.budget_bytes,
            asked="" if budget is None or budget.kind == "everything" else budget.text,
            predicted=outlook.predicted,
            saved_bytes=saved_bytes,
            movable_bytes=movable_bytes,
            moved_bytes=_total_bytes(entries, ("offload",), facts.device),
            staying_bytes=saved_bytes - movable_bytes,
            ledger=self.ledger,
            storages=entries,
            transfers=transfers,
            breaks=facts.breaks,
            warnings=(*facts.warnings, *outlook.warnings),
            actions=self.actions,
        )
        if decided is None or digest(decided.base) == plan.digest:
            return plan
        return msgspec.structs.replace(
            plan,
            choices=decided.choices,
            base_digest=digest(decided.base),
            recomputed=tuple(_recomputed(decided)),
            recompute_us=decided.recompute_us,
        )


def _ledgers(index: Index, verdicts: _Verdicts) -> dict[RuleSet, tuple[LedgerRow, ...]]:
    return {
        name: eligibility.ledger(eligibility.cases(index, found))
        for name, found in verdicts.items()
    }


def _marked(entries: Iterable[Entry], transfers: Iterable[Transfer]) -> tuple[Entry, ...]:
    """``entries``, with those that have a transfer marked as offloaded."""
    moved = {(transfer.region, transfer.storage) for transfer in transfers}
    return tuple(
        msgspec.structs.replace(entry, action="offload")
        if (entry.region, entry.id) in moved
        else entry
        for entry in entries
    )


def _priced(entries: Iterable[Entry], decided: Decided, facts: GraphFacts) -> tuple[Entry, ...]:
    """``entries`` of ``facts`` with the prices of what was weighed."""
    same = _same_storages(decided.base, facts)
    found = {}
    for each in decided.weighed:
        storage = same.get((each.region, each.storage))
        found[each.region, storage] = Prices(
            recompute_us=each.recompute_us,
            recompute_why=each.recompute_why,
            link_us=each.link_us,
            reason=each.reason,
        )
    return tuple(
        msgspec.structs.replace(entry, prices=found.get((entry.region, entry.id)))
        for entry in entries
    )


def _same_storages(base: GraphFacts, facts: GraphFacts) -> dict[tuple[int, StorageId], StorageId]:
    """The storages of ``facts`` by region and what they are in ``base``: those of the same inputs
    and of the outputs of the same ops, of the forward."""
    found = {}
    for number, (old, new) in enumerate(zip(base.regions, facts.regions, strict=True)):
        ops = {(op.name, op.target): op.outputs for op in new.forward.ops}
        inputs = {(item.kind, item.name): (item.value,) for item in new.forward.inputs}
        pairs = [(op.outputs, ops.get((op.name, op.target), ())) for op in old.forward.ops]
        pairs += [((i.value,), inputs.get((i.kind, i.name), ())) for i in old.forward.inputs]
        for before, after in pairs:
            for value, other in zip(before, after, strict=False):
                storage, same = base.values[value].storage, facts.values[other].storage
                if storage is not None and same is not None:
                    found[number, storage] = same
    return found


def _recomputed(decided: Decided) -> Iterator[Recomputed]:
    """What was weighed and saved, and is made by an op that runs again by choice."""
    base = decided.base
    index = eligibility.index(base)
    added = _added(decided)
    again = {choice.region: frozenset(choice.ops) for choice in decided.choices}
    saved = {
        (number, base.values[item.value].storage)
        for number, region in enumerate(base.regions)
        for item in region.saved
    }
    for each in decided.weighed:
        region = index.regions[each.region]
        maker = region.origins.get(each.storage)
        is_saved = (each.region, each.storage) in saved
        if is_saved and isinstance(maker, Op) and (each.region, maker.outputs) in added:
            ops = tuple(place for place in each.ops if place in again[each.region])
            yield _recomputed_one(region, each._replace(ops=ops), maker)


def _added(decided: Decided) -> set[tuple[int, tuple[ValueId, ...]]]:
    """Ops that run again by choice and not in the base, by region and outputs."""
    before = {choice.region: frozenset(choice.ops) for choice in chosen(decided.base)}
    return {
        (choice.region, decided.base.regions[choice.region].forward.ops[place].outputs)
        for choice in decided.choices
        for place in choice.ops
        if place not in before[choice.region]
    }


def _recomputed_one(region: RegionIndex, each: Weighed, maker: Op) -> Recomputed:
    facts = region.facts
    values = (facts.values[output] for output in maker.outputs)
    value = next(value for value in values if value.storage == each.storage)
    return Recomputed(
        region=each.region,
        size_bytes=facts.storages[each.storage].size_bytes,
        name=maker.name,
        op=maker.target,
        module=maker.module,
        source=maker.source,
        dtype=value.dtype,
        shape=value.shape,
        ops=each.ops,
        recompute_us=each.recompute_us or 0,
        inputs=tuple(_storage_origin(region, storage).name for storage in each.inputs),
        link_us=each.link_us,
        reason=each.reason,
    )


def _region_sizes(facts: GraphFacts) -> Iterator[RegionSize]:
    for region in facts.regions:
        backward_ops = len(region.backward.ops) if region.backward else 0
        yield RegionSize(len(region.forward.ops), backward_ops, len(region.saved))


def _total_bytes(entries: Sequence[Entry], actions: tuple[EntryAction, ...], device: str) -> int:
    """Sizes of the storages on the device under ``actions``, each once."""
    sizes = {
        entry.id: entry.size_bytes
        for entry in entries
        if entry.action in actions and (entry.device != "cpu" or device == "cpu")
    }
    return sum(sizes.values())


class _Origin(NamedTuple):
    """What made a value or allocated a storage; ``op`` is the kind of input for a graph input."""

    name: str
    op: str
    module: str = ""
    source: str = ""


def _entries(index: Index, verdicts: _Verdicts, rules: RuleSet) -> Iterator[Entry]:
    """Entries by region and first saved position, none moved yet."""
    first = 0
    for region in index.regions:
        end = first + len(region.region.saved)
        own: _Verdicts = {name: found[first:end] for name, found in verdicts.items()}
        grouped: dict[tuple[StorageId | None, ValueId | None], list[View]] = {}
        for value, view in _views(region, own):
            storage = region.value(value).storage
            # A value without a storage is an entry of its own.
            key = (storage, value if storage is None else None)
            grouped.setdefault(key, []).append(view)
        for (storage, value_id), views in grouped.items():
            yield _entry(region, storage, value_id, tuple(views), rules)
        first = end


def _views(region: RegionIndex, verdicts: _Verdicts) -> Iterator[tuple[ValueId, View]]:
    """Each distinct saved value of ``region`` with its view, by first saved position."""
    positions: dict[ValueId, list[int]] = {}
    for position, saved in enumerate(region.region.saved):
        positions.setdefault(saved.value, []).append(position)
    for value_id, (position, *also_at) in positions.items():
        found = {name: by_position[position] for name, by_position in verdicts.items()}
        yield value_id, _view(region, value_id, position, tuple(also_at), found)


def _view(
    region: RegionIndex,
    value_id: ValueId,
    position: int,
    also_at: tuple[int, ...],
    verdicts: Mapping[RuleSet, eligibility.Verdict],
) -> View:
    value = region.value(value_id)
    origin = _value_origin(region, value_id)
    return View(
        position=position,
        name=origin.name,
        dtype=value.dtype or value.kind,
        shape=value.shape,
        stride=value.stride,
        offset=value.offset,
        logical_bytes=eligibility.logical_bytes(value),
        op=origin.op,
        module=origin.module,
        source=origin.source,
        also_at=also_at,
        verdicts={
            name: PlanVerdict(verdict.rule or "eligible", verdict.holder)
            for name, verdict in verdicts.items()
        },
    )


def _entry(
    region: RegionIndex,
    storage: StorageId | None,
    value_id: ValueId | None,
    views: tuple[View, ...],
    rules: RuleSet,
) -> Entry:
    """The entry of a storage, or of a value without one, kept or skipped (definitions 2 and 3)."""
    facts = region.facts
    if storage is None:
        assert value_id is not None
        origin, size_bytes, device = _value_origin(region, value_id), 0, ""
    else:
        origin = _storage_origin(region, storage)
        size_bytes, device = facts.storages[storage].size_bytes, facts.storages[storage].device
    skipped = _first_skipped(views, rules) or _first_skipped(views, "whole-storage")
    values = (region.value(region.region.saved[view.position].value) for view in views)
    return Entry(
        region=region.number,
        id=storage,
        size_bytes=size_bytes,
        device=device,
        action="skipped" if skipped else "keep",
        rule=skipped.rule if skipped else "eligible",
        holder=skipped.holder if skipped else "",
        name=origin.name,
        op=origin.op,
        module=origin.module,
        source=origin.source,
        footprint=None if skipped else footprint(values),
        views=views,
    )


def _first_skipped(views: Sequence[View], rules: RuleSet) -> PlanVerdict | None:
    found = (view.verdicts[rules] for view in views)
    return next((verdict for verdict in found if verdict.rule != "eligible"), None)


def _value_origin(region: RegionIndex, value: ValueId) -> _Origin:
    op = region.makers.get(value)
    if op is not None:
        return _Origin(op.name, op.target, op.module, op.source)
    role = region.roles[value]
    return _Origin(role.name, role.kind)


def _storage_origin(region: RegionIndex, storage: StorageId) -> _Origin:
    origin = region.origins.get(storage)
    if isinstance(origin, Op):
        return _Origin(origin.name, origin.target, origin.module, origin.source)
    if origin is None:
        return _Origin(f"storage {storage}", "unknown")
    return _Origin(origin.name, origin.kind)


def _moves(entries: Iterable[Entry]) -> Iterator[Move]:
    for entry in entries:
        if entry.footprint is not None and entry.id is not None:
            yield Move(entry.region, entry.id, entry.size_bytes, entry.footprint)


def cases(plan: Plan, rules: RuleSet) -> Iterator[tuple[Case, Entry, View]]:
    """Every saved value of ``plan``, as the ledger of ``rules`` counts it and where it stands."""
    views = ((entry, view) for entry in plan.storages for view in entry.views)
    for entry, view in sorted(views, key=lambda pair: (pair[0].region, pair[1].position)):
        verdict = view.verdicts[rules]
        case = Case(
            region=entry.region,
            position=view.position,
            storage=entry.id,
            storage_bytes=entry.size_bytes,
            logical_bytes=view.logical_bytes,
            rule=None if verdict.rule == "eligible" else verdict.rule,
            holder=verdict.holder,
        )
        yield case, entry, view


def given_actions(actions: str | Sequence[str]) -> tuple[Action, ...]:
    """``actions``, as text separated by commas, in the order that a plan has them in.

    Raises ``UsageError`` for what is no action, named twice, or without ``keep``.
    """
    words = actions.split(",") if isinstance(actions, str) else actions
    words = [word.strip() for word in words]
    found = tuple(action for action in ACTIONS if action in words)
    if "keep" not in found or len(found) != len(words):
        raise UsageError(
            f"actions {','.join(words)}: not keep, and others of {', '.join(ACTIONS[1:])}",
            fix="for example: --actions keep,offload",
        )
    return found


# --- the file -------------------------------------------------------------------------------------


def dump_plan(plan: Plan) -> bytes:
    """The plan file.  Raises ``OutputError`` for text that is not Unicode."""
    header = f"{PLAN_FILE.first_bytes.decode()} of {plan.target.spec}; make it again with: "
    first_line = _printable(header + analyze_command(plan))
    try:
        return f"{first_line}\n{dump_yaml(msgspec.to_builtins(plan))}".encode()
    except UnicodeEncodeError as error:
        raise OutputError(
            f"the plan cannot be written: {error.object[error.start : error.end]!r} is not Unicode",
            fix="give the target a name in UTF-8",
        ) from error


def analyze_command(plan: Plan) -> str:
    """The command that makes ``plan``, without options that are at their default."""
    words = ["offplan", "analyze", plan.target.spec]
    for name, value in plan.target.params.items():
        words += ["-p", f"{name}={value}"]
    if plan.device != "cuda":
        words += ["--device", plan.device]
    gpu = gpu_key(plan.gpu)
    if gpu is not None and gpu != DEFAULT_GPU:
        words += ["--gpu", gpu]
    if plan.attention not in ("", "auto"):
        words += ["--attention", plan.attention]
    if plan.compiler != "aot_eager":
        words += ["--compiler", plan.compiler]
    if plan.partitioner != "min-cut":
        words += ["--partitioner", plan.partitioner]
    if plan.rules != eligibility.DEFAULT_RULES:
        words += ["--rules", plan.rules]
    if plan.min_bytes != eligibility.DEFAULT_MIN_BYTES:
        words += ["--min-size", format_binary(plan.min_bytes)]
    if plan.actions != ACTIONS:
        words += ["--actions", ",".join(plan.actions)]
    if plan.budget is not None:
        words += ["--budget", plan.asked or str(plan.budget)]
    if plan.predicted.profile not in ("", _own_profile(plan.gpu)):
        words += ["--profile", plan.predicted.profile]
    if plan.predicted.op_times != "roofline":
        words += ["--op-times", plan.predicted.op_times]
    conditions, host_budget = plan.predicted.conditions, plan.predicted.host_budget
    if conditions.optimizer != "none":
        words += ["--optimizer", conditions.optimizer]
    if conditions.accumulate:
        words += ["--accumulate"]
    if conditions.expandable_segments:
        words += ["--expandable-segments"]
    if host_budget is not None:
        words += ["--host-budget", str(host_budget)]
    return shlex.join(words)


def _own_profile(gpu: str) -> str:
    """The profile that is used for ``gpu`` if none is named: its own, which has its short name."""
    try:
        return gpu_key(find_gpu(gpu).name) or ""
    except UsageError:
        return ""


def _printable(text: str) -> str:
    """``text`` on one line, whatever the target is called."""
    return "".join(char if char.isprintable() else "?" for char in text)


def write_plan(path: Path, plan: Plan) -> None:
    """Write ``plan`` to ``path``, whole or not at all; only ever over a plan.

    Raises ``OutputError``.
    """
    write_atomically(path, dump_plan(plan), PLAN_FILE)


def load_plan(path: Path) -> Plan:
    """Read a plan file.  Raises ``FileFormatError`` naming the field for anything else."""
    text = read_text(path)
    try:
        document = parse_yaml(text)
    except YamlError as error:
        raise _not_a_plan(path, str(error)) from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise _not_a_plan(path, "it has no schema_version")
    version = document["schema_version"]
    if version not in (2, SCHEMA_VERSION):
        raise FileFormatError(
            f"{path} has schema version {version!r}, this offplan reads 2 and {SCHEMA_VERSION}",
            fix="make the plan again with this version of offplan",
        )
    if version == 2:
        document = _renamed(document)
    try:
        plan = msgspec.convert(document, Plan)
    except msgspec.ValidationError as error:
        raise _not_a_plan(path, str(error)) from error
    problem = next(_problems(plan), None)
    if problem is not None:
        raise _not_a_plan(path, problem)
    return plan


def _renamed(document: dict[str, object]) -> dict[str, object]:
    """A document of schema 2 in terms of this one (definition 9)."""
    storages = document.get("storages")
    if isinstance(storages, list):
        storages = [
            {**entry, "action": _RENAMED.get(str(entry.get("action")), entry.get("action"))}
            if isinstance(entry, dict)
            else entry
            for entry in storages
        ]
    return {
        **document,
        "schema_version": SCHEMA_VERSION,
        "storages": storages,
        "actions": ["keep", "offload"],
    }


def _not_a_plan(path: Path, problem: str) -> FileFormatError:
    return FileFormatError(
        f"{path} is not an offplan plan: {problem}",
        fix=f"make one with: offplan analyze TARGET -o {shlex.quote(str(path))}",
    )


def _problems(plan: Plan) -> Iterator[str]:
    """What a schema cannot say: every rule set is there, each saved position once, all within the
    regions and ops that there are, and no action that the plan may not take."""
    yield from _forbidden(plan)
    yield from _misplaced(plan)
    for name in eligibility.RULE_SETS:
        if name not in plan.ledger:
            yield f"no ledger for {name} - at `$.ledger`"
    seen: set[tuple[int, int]] = set()
    for place, entry in enumerate(plan.storages):
        if not entry.views:
            yield f"a storage that no saved value is a view of - at `$.storages[{place}].views`"
        for view_place, view in enumerate(entry.views):
            at = f"at `$.storages[{place}].views[{view_place}]`"
            if len(view.verdicts) != len(eligibility.RULE_SETS):
                yield f"not a verdict for every rule set - {at}"
            for position in (view.position, *view.also_at):
                if (entry.region, position) in seen:
                    yield f"position {position} of region {entry.region} is there twice - {at}"
                seen.add((entry.region, position))


def _misplaced(plan: Plan) -> Iterator[str]:
    """What names a region or an op that the plan does not have; ``check_plan`` says the rest."""
    count, end = len(plan.regions), plan.op_count
    parts: tuple[tuple[str, Sequence[Entry | Transfer | Choice | Recomputed]], ...] = (
        ("storages", plan.storages),
        ("transfers", plan.transfers),
        ("choices", plan.choices),
        ("recomputed", plan.recomputed),
    )
    for name, items in parts:
        for place, item in enumerate(items):
            if not 0 <= item.region < count:
                yield f"region {item.region}, of {count} - at `$.{name}[{place}].region`"
    for place, transfer in enumerate(plan.transfers):
        ops = (transfer.offload_after, transfer.release_by)
        back = (transfer.reload_at or 0, transfer.needed_by or 0)
        if not all(0 <= op < end for op in ops) or not all(0 <= op <= end for op in back):
            yield f"an op beyond the plan's {end} - at `$.transfers[{place}]`"
        if (transfer.reload_at is None) != (transfer.needed_by is None):
            yield f"only one of reload_at and needed_by - at `$.transfers[{place}]`"
        if not 0 <= transfer.start < transfer.stop or transfer.transfer_bytes <= 0:
            yield f"no bytes that could be moved - at `$.transfers[{place}]`"


def _forbidden(plan: Plan) -> Iterator[str]:
    if plan.actions != tuple(action for action in ACTIONS if action in ("keep", *plan.actions)):
        yield "not keep and others of keep, recompute, offload, in order - at `$.actions`"
    if "recompute" not in plan.actions and plan.choices:
        yield "ops run again, but recompute is not an action - at `$.choices`"
    if bool(plan.choices) != bool(plan.base_digest):
        yield "choices and the graphs that they are made from need each other - at `$.base_digest`"
    if plan.recomputed and not plan.choices:
        yield "storages are recomputed, but no op runs again - at `$.recomputed`"
    if "offload" not in plan.actions and plan.transfers:
        yield "storages move, but offload is not an action - at `$.transfers`"


# --- the proof ------------------------------------------------------------------------------------


def check_plan(facts: GraphFacts, plan: Plan) -> None:
    """Prove that ``plan`` is for ``facts`` and safe to replay; ``PlanError`` names what is not.

    The saved values must be those of the facts; every transfer must be of a storage that nobody
    else holds, carry every saved byte, and keep each op from reading a storage that is away.  An
    op that runs again must read what it read, as it was then.

    ``facts`` are those that the plan describes, or its base's: then no op may run again that must
    not (``recompute.refusal``).
    """
    if plan.choices and digest(facts) == plan.base_digest:
        facts = apply(facts, plan.choices)
    if digest(facts) != plan.digest:
        raise PlanError(
            f"the plan was made for other graphs: {_what_changed(facts, plan)}",
            fix=f"make it again with: {analyze_command(plan)}",
        )
    _check_entries(facts, plan)
    _check_transfers(facts, plan)
    _Walk(facts, plan).check()
    if plan.choices:
        for number, region in enumerate(facts.regions):
            _check_again(facts, number, region)
        _check_recomputed(plan)
    _check_peak(facts, plan)


def _check_peak(facts: GraphFacts, plan: Plan) -> None:
    """The transfers keep the peak that the plan predicts, and that within the budget."""
    # As on the GPU that the plan is for: its libraries' workspaces are part of the peak.
    as_planned = msgspec.structs.replace(facts, gpu=plan.gpu)
    found = plan.predicted.plan.peak_bytes
    # What ran does not say how it was lowered, which the plan was predicted from.
    if facts.compiler != "inductor" or is_fused(facts):
        found = predict(*as_run(as_planned, plan.transfers), plan.predicted.conditions).peak_bytes
    if found != plan.predicted.plan.peak_bytes:
        raise PlanError(
            f"the plan predicts a peak of {plan.predicted.plan.peak_bytes} bytes; its transfers "
            f"make one of {found}",
            fix=f"make it again with: {analyze_command(plan)}",
        )
    if plan.budget and found > plan.budget:
        raise PlanError(
            f"the plan's peak of {found} bytes is over its budget of {plan.budget}",
            fix=f"make it again with: {analyze_command(plan)}",
        )


def _check_recomputed(plan: Plan) -> None:
    """What is said to be computed again is made by ops that run again."""
    again = {choice.region: frozenset(choice.ops) for choice in plan.choices}
    for each in plan.recomputed:
        if not each.ops or not again.get(each.region, frozenset()).issuperset(each.ops):
            raise PlanError(
                f"{each.name} of region {each.region} is recomputed by ops that are not"
            )


def _check_again(facts: GraphFacts, number: int, region: Region) -> None:
    """Ops that run again in the backward of ``region`` read what they read in its forward, and
    nothing has written to that since."""
    if region.backward is None:
        return
    first = {(op.name, op.target): (place, op) for place, op in enumerate(region.forward.ops)}
    # Values of the backward, and what they were in the forward.
    known = {saved.backward_value: saved.value for saved in region.saved}
    constants = {i.name: i.value for i in region.forward.inputs if i.kind == "constant"}
    for item in region.backward.inputs:
        if item.kind == "constant" and item.name in constants:
            known[item.value] = constants[item.name]
    # Random ops that draw the same numbers again are not quite what they were.
    drawn: dict[int, tuple[int, Op | None]] = {
        item.twin: (item.place, item.again(region)) for item in wrapped(region)
    }
    known.update((item.given, item.given) for item in wrapped(region))
    ran = [(op.name, op.mutates) for op in region.forward.ops]
    for here, op in enumerate(region.backward.ops):
        place, same = drawn.get(here, first.get((op.name, op.target), (0, None)))
        if same is not None:
            reads = tuple(known.get(value) for value in op.inputs)
            if reads != same.inputs or op.constants != same.constants:
                raise _not_the_same(number, op, "reads something else than in the forward")
            read = {facts.values[value].storage for value in same.inputs} - {None}
            for name, mutates in ran[place:]:
                if not read.isdisjoint(facts.values[value].storage for value in mutates):
                    raise _not_the_same(number, op, f"reads what {name} has written to")
            known.update(zip(op.outputs, same.outputs, strict=True))
        ran.append((op.name, tuple(known.get(value, value) for value in op.mutates)))


def _not_the_same(number: int, op: Op, why: str) -> PlanError:
    return PlanError(
        f"{op.name} ({op.target}) runs again in the backward of region {number}, but {why}",
        where=" ".join(part for part in (op.module, op.source) if part),
    )


def _what_changed(facts: GraphFacts, plan: Plan) -> str:
    pairs: list[tuple[str, object, object]] = [
        ("target", plan.target.spec, facts.target.spec),
        ("parameters", plan.target.params, facts.target.params),
        ("torch", plan.torch, facts.torch),
        ("compiler", plan.compiler, facts.compiler),
        ("partitioner", plan.partitioner, facts.partitioner),
        ("device", plan.device, facts.device),
        ("GPU", plan.gpu, facts.gpu),
        ("attention", plan.attention, facts.attention),
        ("regions", len(plan.regions), len(facts.regions)),
    ]
    if not plan.choices:
        # A plan with choices does not say these of its base.
        planned = sum(region.saved for region in plan.regions)
        found = sum(len(region.saved) for region in facts.regions)
        pairs += [("ops", plan.op_count, facts.op_count), ("saved values", planned, found)]
    changed = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
    return "; ".join(changed) or "the model's code changed (same target, versions and op count)"


def _check_entries(facts: GraphFacts, plan: Plan) -> None:
    """Each saved position has one view, with the facts' storage, shape, strides and bytes."""
    expected = {
        (number, position): saved.value
        for number, region in enumerate(facts.regions)
        for position, saved in enumerate(region.saved)
    }
    for entry in plan.storages:
        size_bytes = 0
        if entry.id is not None:
            if entry.id not in range(len(facts.storages)):
                raise PlanError(f"storage {entry.id} is not in the graphs")
            size_bytes = facts.storages[entry.id].size_bytes
        if entry.size_bytes != size_bytes:
            raise PlanError(
                f"storage {entry.id} has {size_bytes} bytes, the plan says {entry.size_bytes}"
            )
        for view in entry.views:
            for position in (view.position, *view.also_at):
                value_id = expected.pop((entry.region, position), None)
                if value_id is None:
                    raise PlanError(f"region {entry.region} saves nothing at position {position}")
                _check_view(facts, entry, view, value_id)
    for number, position in expected:
        raise PlanError(f"the plan has no view for saved position {position} of region {number}")


def _check_view(facts: GraphFacts, entry: Entry, view: View, value_id: ValueId) -> None:
    value = facts.values[value_id]
    found = (entry.id, view.dtype, view.shape, view.stride, view.offset)
    expected = (value.storage, value.dtype or value.kind, value.shape, value.stride, value.offset)
    if found != expected:
        raise PlanError(
            f"view {view.name} of storage {entry.id} is not what the graphs save at position "
            f"{view.position}: {found} there, {expected} here"
        )


def _check_transfers(facts: GraphFacts, plan: Plan) -> None:
    """Transfers are of offloaded entries, one each, and carry every byte of their saved views."""
    moved = {
        (entry.region, entry.id): entry for entry in plan.storages if entry.action == "offload"
    }
    for transfer in plan.transfers:
        entry = moved.pop((transfer.region, transfer.storage), None)
        if entry is None:
            raise PlanError(
                f"storage {transfer.storage} has a transfer, but no entry of region "
                f"{transfer.region} that is offloaded, or has two"
            )
        _check_coverage(facts, transfer, entry)
    for region, storage in moved:
        raise PlanError(f"storage {storage} of region {region} is offloaded, but has no transfer")


def _check_coverage(facts: GraphFacts, transfer: Transfer, entry: Entry) -> None:
    region = facts.regions[transfer.region]
    for view in entry.views:
        value = facts.values[region.saved[view.position].value]
        if value.logical_bytes == 0:
            continue
        reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
        first = value.offset * value.item_bytes
        last = first + (reach + 1) * value.item_bytes
        if first < transfer.start or last > transfer.stop:
            raise PlanError(
                f"the transfer of storage {transfer.storage} carries bytes {transfer.start} to "
                f"{transfer.stop}, but {view.name} needs {first} to {last}"
            )
        smallest = value.item_bytes if transfer.packed else transfer.stop - transfer.start
        if not smallest <= transfer.transfer_bytes <= transfer.stop - transfer.start:
            raise PlanError(
                f"the transfer of storage {transfer.storage} says {transfer.transfer_bytes} bytes "
                f"for the range {transfer.start} to {transfer.stop}"
            )
    if transfer.stop > entry.size_bytes:
        raise PlanError(f"the transfer of storage {transfer.storage} reaches past its end")


class _Walk:
    """The timeline, op by op, with the transfers that each storage is under."""

    def __init__(self, facts: GraphFacts, plan: Plan) -> None:
        self.facts = facts
        self.transfers = plan.transfers
        self.sent = {transfer.storage: transfer for transfer in plan.transfers}
        self.spans = self._spans()

    def _spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """First op and end of each graph, by direction and region."""
        spans = {}
        position = 0
        for number, region in enumerate(self.facts.regions):
            spans["forward", number] = (position, position + len(region.forward.ops))
            position += len(region.forward.ops)
        for number, region in reversed([*enumerate(self.facts.regions)]):
            size = len(region.backward.ops) if region.backward else 0
            spans["backward", number] = (position, position + size)
            position += size
        return spans

    def check(self) -> None:
        for transfer in self.transfers:
            self._check_windows(transfer)
        made: set[StorageId] = set()
        for number in range(len(self.facts.regions)):
            self._walk_forward(number, made)
            self._walk_backward(number)
        for transfer in self.transfers:
            if transfer.storage not in made:
                raise PlanError(
                    f"storage {transfer.storage} is offloaded, but no forward op makes it"
                )

    def _check_windows(self, transfer: Transfer) -> None:
        name = f"storage {transfer.storage}"
        _, forward_end = self.spans["forward", len(self.facts.regions) - 1]
        start, end = self.spans["backward", transfer.region]
        if not 0 <= transfer.offload_after <= transfer.release_by < forward_end:
            raise PlanError(
                f"{name} is offloaded after op {transfer.offload_after} and released by op "
                f"{transfer.release_by}: not in that order within the forward"
            )
        if (transfer.reload_at is None) != (transfer.needed_by is None):
            raise PlanError(f"{name} has only one of reload_at and needed_by")
        if transfer.reload_at is None or transfer.needed_by is None:
            return
        if not start <= transfer.reload_at <= transfer.needed_by <= end:
            raise PlanError(
                f"{name} is reloaded at op {transfer.reload_at} and needed by op "
                f"{transfer.needed_by}: not in that order within its region's backward, "
                f"ops {start} to {end}"
            )

    def _walk_forward(self, number: int, made: set[StorageId]) -> None:
        graph = self.facts.regions[number].forward
        for item in graph.inputs:
            transfer = self._sent(item.value)
            if transfer is not None:
                raise PlanError(
                    f"storage {transfer.storage} is offloaded, but is input {item.name}'s"
                )
        start, _ = self.spans["forward", number]
        for place, op in enumerate(graph.ops, start):
            made.update(s for v in op.outputs if (s := self.facts.values[v].storage) is not None)
            for value in (*op.inputs, *op.outputs):
                transfer = self._sent(value)
                if transfer is not None and place > transfer.release_by:
                    raise self._misread(transfer, place, op, "after its release")
            for value in op.mutates:
                transfer = self._sent(value)
                if transfer is not None and place > transfer.offload_after:
                    raise self._misread(transfer, place, op, "after it was copied", "written")
        for output in graph.outputs:
            transfer = None if output.value is None else self._sent(output.value)
            if transfer is not None and output.kind != "saved":
                raise PlanError(
                    f"storage {transfer.storage} is offloaded, but returned as {output.kind} "
                    f"{output.name}"
                )

    def _walk_backward(self, number: int) -> None:
        region = self.facts.regions[number]
        if region.backward is None:
            return
        received = self._received(number)
        start, end = self.spans["backward", number]
        for place, op in enumerate(region.backward.ops, start):
            for value in op.inputs:
                transfer = received.get(self.facts.values[value].storage)
                if transfer is not None and not _is_back(transfer, place):
                    raise self._misread(transfer, place, op, "before it is back")
        for output in region.backward.outputs:
            if output.value is None:
                continue
            transfer = received.get(self.facts.values[output.value].storage)
            if transfer is not None and not _is_back(transfer, end):
                raise PlanError(
                    f"storage {transfer.storage} is returned as {output.name} before it is back"
                )

    def _received(self, number: int) -> dict[StorageId | None, Transfer]:
        """Transfers by the storages on which the backward of ``number`` receives them."""
        received: dict[StorageId | None, Transfer] = {}
        for saved in self.facts.regions[number].saved:
            transfer = self._sent(saved.value)
            placeholder = self.facts.values[saved.backward_value].storage
            if transfer is not None and placeholder is not None:
                received[placeholder] = received[transfer.storage] = transfer
        return received

    def _sent(self, value: ValueId) -> Transfer | None:
        storage = self.facts.values[value].storage
        return None if storage is None else self.sent.get(storage)

    def _misread(
        self, transfer: Transfer, place: int, op: Op, when: str, how: str = "read"
    ) -> PlanError:
        return PlanError(
            f"storage {transfer.storage} is {how} by op {place} ({op.name}) {when}",
            where=" ".join(part for part in (op.module, op.source) if part),
        )


def _is_back(transfer: Transfer, place: int) -> bool:
    return transfer.needed_by is not None and transfer.needed_by <= place
