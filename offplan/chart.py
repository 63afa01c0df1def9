"""A step drawn in time: what is held when, when ops run, and when each copy crosses the link.

1.  A chart is of the graphs as they run under the given transfers (``offplan.fusion``), by the
    predictions that the plan was made with: memory is ``offplan.memory``'s, op times the profile's
    roofline, copies ``offplan.schedule``'s.
2.  Time is milliseconds from the start of the forward.  An op stands from ``starts_ms[k]`` for
    ``op_ms[k]``; waits for copies, and what these take of memory, lie between ops.  A *moment* is
    when its op is, so that what happens between two graphs shows at the op beside it.
3.  ``stacked`` has the bytes of each part at each moment; their sum is the curve whose highest
    point is the peak, less what the allocator's blocks add (``memory.Spans``).

Assumes nothing runs beside the step.  Takes time in proportion to ops and storages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from offplan.costs import DeviceProfile, link_rates, op_times
from offplan.fusion import as_run
from offplan.graph import GraphFacts, Op, StorageId, timeline
from offplan.memory import PARTS, Conditions, Memory, Part, Prediction, Spans
from offplan.schedule import Played, play
from offplan.transfers import Transfer


@dataclass(frozen=True)
class Chart:
    """See the module docstring.  ``facts`` and ``transfers`` are as they run (definition 1)."""

    facts: GraphFacts
    transfers: tuple[Transfer, ...]
    memory: Memory
    spans: Spans
    op_ms: tuple[float, ...]
    forward_count: int
    played: Played

    @cached_property
    def prediction(self) -> Prediction:
        """The peak, as the caching allocator would count it."""
        return self.memory.predict(self.transfers)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return tuple(timeline(self.facts))

    @property
    def starts_ms(self) -> tuple[float, ...]:
        """When each op starts, and the end of the step."""
        return self.played.starts_ms

    @cached_property
    def stacked(self) -> Mapping[Part, tuple[int, ...]]:
        """Bytes of each part at each moment (definition 3)."""
        count = len(self.spans.ops)
        changes: dict[Part, list[int]] = {part: [0] * (count + 1) for part in PARTS}
        for part, size in self.spans.resting.items():
            changes[part][0] += size
        for span in self.spans.held:
            leaves = span.end + 1 if span.leaves is None else max(span.leaves, span.start)
            changes[span.part][span.start] += span.size_bytes
            changes[span.part][leaves] -= span.size_bytes
            changes["in_flight"][leaves] += span.size_bytes
            changes["in_flight"][span.end + 1] -= span.size_bytes
        found = {part: [*accumulate(change)][:-1] for part, change in changes.items()}
        for moment, size in enumerate(self.spans.temporary_bytes):
            found["workspace"][moment] += size
        return {part: tuple(sizes) for part, sizes in found.items()}

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Bytes at each moment."""
        return tuple(map(sum, zip(*self.stacked.values(), strict=True)))

    @cached_property
    def makers(self) -> Mapping[StorageId, int]:
        """The op that first returns a value on each storage that an op makes."""
        values = self.facts.values
        found: dict[StorageId, int] = {}
        for place, op in enumerate(self.ops):
            for value in op.outputs:
                storage = values[value].storage
                if storage is not None:
                    found.setdefault(storage, place)
        return found


def chart(
    facts: GraphFacts,
    transfers: Sequence[Transfer],
    conditions: Conditions,
    profile: DeviceProfile,
    op_ms: Mapping[str, float] | None = None,
) -> Chart:
    """The chart of ``facts`` under ``transfers``; ``op_ms`` has measured times by ``op_key``."""
    ran = as_run(facts, transfers)
    memory = Memory(ran.facts, conditions)
    times = op_times(ran.facts, profile, op_ms)
    forward_count = sum(len(region.forward.ops) for region in ran.facts.regions)
    return Chart(
        facts=ran.facts,
        transfers=ran.transfers,
        memory=memory,
        spans=memory.spans(ran.transfers),
        op_ms=times.op_ms,
        forward_count=forward_count,
        # Copies are placed by the positions that the plan has, as the planner counts them.
        played=play(
            times.op_ms, forward_count, transfers, link_rates(ran.facts, profile), times.ahead_ms
        ),
    )
