"""What another action on one storage would do to the peak and to the step of a plan.

1.  All else of the plan stays as it is: the other transfers where they are, and what runs again.
    So an effect says what this storage is worth in this plan, not what the best plan without it
    would be.
2.  *Offload* of one that stays adds its transfer: released when its copy has landed, or before if
    that lowers the peak by half of its bytes or more, and reloaded as early as memory allows, or
    just in time, whichever is faster.  *Keep* of one that moves takes
    its transfer out.  Both are predicted as the plan itself is, and so is the time.
3.  *Keep* of one that is computed again, and *recompute* of one that is kept, are read off the
    memory curve: its bytes are there, or not, between the forward's last use of it and the
    backward's first.  They are bounds, as it is not known what else would be saved or freed then;
    the time is the price of its ops.
4.  Storages of regions that are runs of one graph move together (``offplan.windows``): an effect is
    of all of them.
5.  *Other machines* run the same plan with a link twice as fast, or a GPU half as fast.

Without a profile of the device there are no times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from offplan.activations import Activation, activations
from offplan.budget import NOMINAL, Action
from offplan.costs import (
    DeviceProfile,
    device_times_ms,
    link_rates,
    op_times,
    profile_for,
    with_arithmetic,
)
from offplan.curve import Curve
from offplan.fusion import as_run, fused, is_fused, landings
from offplan.graph import GraphFacts, StorageId
from offplan.joint import MIN_BYTES
from offplan.memory import Memory, Prediction
from offplan.plan import Entry, Plan, Prices, Recomputed
from offplan.recompute import copies
from offplan.schedule import Played, Rates, play
from offplan.transfers import Move, Transfer
from offplan.windows import Candidate, Span, candidates, send_away, spans_of

# How much faster a link, and slower a GPU, other machines have.
_TIMES = 2
HERE = "as it is"


class OnMachine(msgspec.Struct, frozen=True):
    """A step on one machine, as planned; with another action, and without a plan, where asked."""

    name: str
    step_ms: float
    other_ms: float | None = None
    no_plan_ms: float | None = None


class Effect(msgspec.Struct, frozen=True):
    """The plan with ``action`` taken on a storage instead (or, for one that has the action, with
    what it was taken instead of).

    ``is_bound``: definition 3, the peak would be ``other_peak_bytes`` or more.  ``at_peak``: the
    storage is on the device when the peak is reached.  ``peak_op`` and ``other_peak_op`` say where
    the peak is before and after.  ``still_there`` says why one that would move is on the device at
    the peak all the same.  ``laid_out_anew``: a compiler lays out graphs without any transfer
    otherwise, so that more changes than this.  ``count`` storages are taken together.  ``step_ms``
    are None without a profile.
    """

    action: Action
    peak_bytes: int
    other_peak_bytes: int
    peak_op: str
    other_peak_op: str
    at_peak: bool
    is_bound: bool = False
    still_there: str = ""
    laid_out_anew: bool = False
    count: int = 1
    step_ms: float | None = None
    other_step_ms: float | None = None
    machines: tuple[OnMachine, ...] = ()


class _Machine(NamedTuple):
    name: str
    op_ms: Sequence[float]
    rates: Rates
    ahead_ms: Sequence[float]


@dataclass(frozen=True)
class Effects:
    """Questions about ``plan``, whose graphs as planned are ``facts``; without ``profile`` copies
    are placed by nominal rates."""

    plan: Plan
    base: GraphFacts | None
    facts: GraphFacts
    profile: DeviceProfile | None

    # --- questions --------------------------------------------------------------------------------

    def of_entry(self, entry: Entry) -> Effect | None:
        """Of moving what is kept, or keeping what moves; None for what may do neither."""
        found, transfers = self._candidate(entry), self.other_transfers(entry)
        if found is None or transfers is None:
            return None
        action: Action = "keep" if entry.action == "offload" else "offload"
        return self._effect(action, found, transfers, len(self._together(found)))

    def other_transfers(self, entry: Entry) -> tuple[Transfer, ...] | None:
        """The plan's transfers less those of ``entry``, or with one more (definitions 2 and 4)."""
        found = self._candidate(entry)
        if found is None:
            return None
        group = self._together(found)
        if entry.action != "offload":
            return self._with(group)
        members = {(c.move.region, c.move.storage) for c in group}
        return tuple(t for t in self.plan.transfers if (t.region, t.storage) not in members)

    def _together(self, found: Candidate) -> list[Candidate]:
        return [c for c in self.candidates if c.twins == found.twins]

    def of_recomputing(self, entry: Entry, price_us: int | None) -> Effect | None:
        """Of computing again what is kept, at ``price_us``: what that could free at most."""
        found = self._candidate(entry)
        if found is None or found.needed_by is None or price_us is None or entry.action != "keep":
            return None
        start, stop = found.away
        return self._bound("recompute", start, stop, -found.size_bytes, price_us, found)

    def of_keeping(self, again: Recomputed, storage: StorageId) -> Effect | None:
        """Of saving what the backward computes again."""
        span = self.spans[again.region]
        region = self.facts.regions[again.region]
        places = [
            (forward, backward)
            for backward, forward in copies(region).items()
            if region.forward.ops[forward].name == again.name
        ]
        if not places:
            return None
        forward, backward = places[0]
        last = max(
            (
                place
                for place, op in enumerate(region.forward.ops)
                if any(self.facts.values[v].storage == storage for v in (*op.inputs, *op.outputs))
            ),
            default=forward,
        )
        start, stop = span.forward + last + 1, span.backward + backward
        return self._bound("keep", start, stop, again.size_bytes, -again.recompute_us, None)

    def prices(self, region: int, storage: StorageId) -> Prices | None:
        """What each action would cost, where the plan did not weigh them; None for a small one."""
        found = self._activations.get((region, storage))
        if found is None:
            return None
        rates = self._on[0].rates
        link_ms = rates.d2h_ms(found.size_bytes) if found.can_move else None
        return Prices(
            recompute_us=None if found.refused else round(1000 * found.cost_ms),
            recompute_why=found.refused,
            link_us=None if link_ms is None else round(1000 * link_ms),
        )

    def machines(self) -> tuple[OnMachine, ...]:
        """The plan, and no plan, as they run on other machines; nothing without a profile."""
        if self.profile is None or self.base is None:
            return ()
        base = self.base
        no_plan = {
            machine.name: sum(machine.op_ms)
            for machine in _machines(fused(base, with_transfers=True), self.profile)
        }
        return tuple(
            OnMachine(
                machine.name,
                self._play(self.plan.transfers, machine).time.step_ms,
                no_plan_ms=no_plan[machine.name],
            )
            for machine in self._on
        )

    # --- the plan as it is ------------------------------------------------------------------------

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return spans_of(self.facts)

    @cached_property
    def _planned(self) -> GraphFacts:
        return fused(self.facts, with_transfers=True)

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self._planned, self.plan.predicted.conditions)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that the plan could move."""
        last = self._memory.timeline().last
        moves = [
            Move(entry.region, entry.id, entry.size_bytes, entry.footprint)
            for entry in self.plan.storages
            if entry.id is not None and entry.footprint is not None
            if (entry.region, entry.id) in last
        ]
        return tuple(candidates(self._planned, moves, last, self.spans, landings(self.facts)))

    @cached_property
    def _activations(self) -> dict[tuple[int, StorageId], Activation]:
        movable = {(c.move.region, c.move.storage): c for c in self.candidates}
        device_ms = device_times_ms(self._planned, self.profile or profile_for(NOMINAL))
        found = activations(self.facts, self._planned, device_ms, movable, MIN_BYTES)
        return {(each.region, each.storage): each for each in found}

    @cached_property
    def _curve(self) -> tuple[int, ...]:
        """Bytes during each op under the plan, as the planner counts them."""
        return self._memory.curve(self.plan.transfers)

    @cached_property
    def _on(self) -> tuple[_Machine, ...]:
        return tuple(_machines(self._planned, self.profile or profile_for(NOMINAL)))

    def _play(self, transfers: Sequence[Transfer], machine: _Machine) -> Played:
        _, op_ms, rates, ahead_ms = machine
        return play(op_ms, self._forward_count, transfers, rates, ahead_ms)

    @property
    def _forward_count(self) -> int:
        return self.spans[-1].forward_end if self.spans else 0

    def _candidate(self, entry: Entry) -> Candidate | None:
        wanted = (entry.region, entry.id)
        return next((c for c in self.candidates if (c.move.region, c.move.storage) == wanted), None)

    # --- another plan -----------------------------------------------------------------------------

    def _effect(
        self, action: Action, found: Candidate, transfers: Sequence[Transfer], count: int
    ) -> Effect:
        before, after = self.plan.predicted.plan, self._prediction(transfers)
        return self._timed(
            Effect(
                action=action,
                peak_bytes=before.peak_bytes,
                other_peak_bytes=after.peak_bytes,
                peak_op=_named(before),
                other_peak_op=_named(after),
                at_peak=self._is_there(found, before.op),
                still_there=self._still_there(found, transfers, before.op),
                laid_out_anew=(
                    is_fused(self.facts) and bool(transfers) != bool(self.plan.transfers)
                ),
                count=count,
            ),
            transfers,
        )

    def _timed(self, effect: Effect, transfers: Sequence[Transfer]) -> Effect:
        if self.profile is None:
            return effect
        found = tuple(
            OnMachine(
                machine.name,
                self._play(self.plan.transfers, machine).time.step_ms,
                self._play(transfers, machine).time.step_ms,
            )
            for machine in self._on
        )
        return msgspec.structs.replace(
            effect, step_ms=found[0].step_ms, other_step_ms=found[0].other_ms, machines=found
        )

    def _bound(
        self,
        action: Action,
        start: int,
        stop: int,
        added_bytes: int,
        added_us: int,
        found: Candidate | None,
    ) -> Effect:
        """With ``added_bytes`` more during the ops ``[start, stop)`` (definition 3)."""
        before = self.plan.predicted.plan
        curve = Curve(self._curve)
        top = curve.top
        curve.add(start, stop, added_bytes)
        place = curve.last_above(0, len(self._curve), curve.top - 1)
        step_ms = None
        if self.profile is not None:
            step_ms = self._play(self.plan.transfers, self._on[0]).time.step_ms
        other = _op_name(self.facts, before.op if place is None else place)
        return Effect(
            action=action,
            peak_bytes=before.peak_bytes,
            other_peak_bytes=before.peak_bytes + curve.top - top,
            peak_op=_named(before),
            other_peak_op=other if curve.top != top else _named(before),
            at_peak=(
                self._is_there(found, before.op)
                if found is not None
                else not start <= before.op < stop
            ),
            is_bound=True,
            step_ms=step_ms,
            other_step_ms=None if step_ms is None else step_ms + added_us / 1000,
        )

    def _prediction(self, transfers: Sequence[Transfer]) -> Prediction:
        if not is_fused(self.facts):
            return self._memory.predict(transfers)
        ran = as_run(self.facts, transfers)
        return Memory(ran.facts, self.plan.predicted.conditions).predict(ran.transfers)

    def _is_there(self, found: Candidate, op: int) -> bool:
        """Whether the storage is on the device during ``op`` of the plan."""
        wanted = (found.move.region, found.move.storage)
        mine = [t for t in self.plan.transfers if (t.region, t.storage) == wanted]
        first = self._makers.get(found.move.storage, 0)
        if not mine:
            return first <= op <= found.last
        if first <= op <= max(mine[0].release_by, found.offload_after):
            return True
        return mine[0].reload_at is not None and mine[0].reload_at <= op <= found.last

    def _still_there(self, found: Candidate, transfers: Sequence[Transfer], op: int) -> str:
        """Why the storage is on the device during ``op`` although one of ``transfers`` moves it."""
        wanted = (found.move.region, found.move.storage)
        mine = next((t for t in transfers if (t.region, t.storage) == wanted), None)
        if mine is None or op < self._makers.get(found.move.storage, 0) or op > found.last:
            return ""
        if op <= mine.release_by:
            return "its copy to the host has not left by then"
        if mine.reload_at is not None and op >= mine.reload_at:
            return "it is back, or on its way, by then"
        return ""

    @cached_property
    def _makers(self) -> dict[StorageId, int]:
        found: dict[StorageId, int] = {}
        place = 0
        for region in self.facts.regions:
            for op in region.forward.ops:
                for value in op.outputs:
                    storage = self.facts.values[value].storage
                    if storage is not None:
                        found.setdefault(storage, place)
                place += 1
        return found

    # --- one transfer more ------------------------------------------------------------------------

    def _with(self, group: Sequence[Candidate]) -> tuple[Transfer, ...]:
        """The plan's transfers and those of ``group`` (definition 2)."""
        curve = Curve(self._curve)
        for candidate in group:
            send_away(curve, candidate, 1)
        limit = self._limit(curve, group)
        options = [
            (*self.plan.transfers, *(self._transfer(c, limit, at) for c, at in reloads))
            for reloads in zip(
                *(self._reloads(candidate, curve, limit) for candidate in group), strict=True
            )
        ]
        best = min(options, key=lambda found: self._play(found, self._on[0]).time.step_ms)
        return tuple(sorted(best, key=lambda t: (t.offload_after, t.storage)))

    def _limit(self, curve: Curve, group: Sequence[Candidate]) -> int:
        """What the step is held under: ``curve``, with ``group`` away, if that is a lot lower."""
        top = max(self._curve, default=0)
        lowered_bytes = top - curve.top
        return curve.top if 2 * lowered_bytes >= sum(c.size_bytes for c in group) else top

    def _reloads(
        self, candidate: Candidate, curve: Curve, limit: int
    ) -> Iterator[tuple[Candidate, int | None]]:
        """Where it could be reloaded: as early as ``limit`` allows, and just in time."""
        if candidate.needed_by is None or candidate.back_by is None:
            yield from ((candidate, None), (candidate, None))
            return
        start = max(candidate.span.backward, candidate.away[0])
        room = limit - candidate.back_bytes - candidate.staging_bytes
        full = curve.last_above(start, candidate.back_by, room)
        earliest = min(start if full is None else full + 1, candidate.needed_by)
        machine = self._on[0]
        starts = [0.0, *accumulate(machine.op_ms)]
        copy_ms = machine.rates.h2d_ms(candidate.move.footprint.transfer_bytes)
        in_time = bisect_left(starts, starts[candidate.needed_by] - copy_ms)
        # Of two that are as fast, the later one.
        yield candidate, min(max(earliest, in_time), candidate.needed_by)
        yield candidate, earliest

    def _transfer(self, candidate: Candidate, limit: int, reload_at: int | None) -> Transfer:
        footprint = candidate.move.footprint
        ops = range(candidate.offload_after + 1, candidate.span.forward_end)
        over = next((op for op in ops if self._curve[op] > limit), candidate.span.forward_end)
        transfer = Transfer(
            region=candidate.move.region,
            storage=candidate.move.storage,
            start=footprint.start,
            stop=footprint.stop,
            transfer_bytes=footprint.transfer_bytes,
            packed=footprint.packed,
            offload_after=candidate.offload_after,
            release_by=max(over - 1, candidate.offload_after),
            reload_at=reload_at,
            needed_by=candidate.needed_by,
        )
        return msgspec.structs.replace(transfer, release_by=self._landed(transfer))

    def _landed(self, transfer: Transfer) -> int:
        """The op during which its copy lands, at the latest the last one of the forward."""
        machine = self._on[0]
        played = self._play((*self.plan.transfers, transfer), machine)
        mine = len(self.plan.transfers)
        landed_ms = next(c.end_ms for c in played.copies if c.transfer == mine and c.to == "host")
        for place in range(transfer.offload_after, transfer.release_by):
            if played.starts_ms[place] + machine.op_ms[place] >= landed_ms:
                return place
        return transfer.release_by


def _machines(facts: GraphFacts, profile: DeviceProfile) -> Iterator[_Machine]:
    """The machine of ``profile``, and others (definition 5)."""
    rates, (op_ms, ahead_ms) = link_rates(facts, profile), op_times(facts, profile)
    yield _Machine(HERE, op_ms, rates, ahead_ms)
    yield _Machine("a link twice as fast", op_ms, rates.times(_TIMES), ahead_ms)
    slower = with_arithmetic(profile, 1 / _TIMES)
    op_ms, ahead_ms = op_times(facts, slower)
    yield _Machine("a GPU half as fast", op_ms, link_rates(facts, slower), ahead_ms)


def _named(prediction: Prediction) -> str:
    module = f" in {prediction.op_module}" if prediction.op_module else ""
    return f"{prediction.op_target}{module} (op {prediction.op:,})"


def _op_name(facts: GraphFacts, index: int) -> str:
    place = index
    for region_graphs in (
        [region.forward for region in facts.regions],
        [region.backward for region in reversed(facts.regions) if region.backward],
    ):
        for graph in region_graphs:
            if place < len(graph.ops):
                op = graph.ops[place]
                module = f" in {op.module}" if op.module else ""
                return f"{op.target}{module} (op {index:,})"
            place -= len(graph.ops)
    return ""
