"""What a case of ``offplan verify`` says of its graphs and its plan, as predicates.

A case is there for one thing.  If another version of torch, or another compiler, no longer makes
graphs with that thing in them, the case would compare bits and show nothing; so it says what has to
be there, and fails where it is not.

Claims read the plan and the facts alone, and hold before anything is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from offplan.footprint import is_dense
from offplan.graph import GraphFacts, Op, StorageId, Value
from offplan.plan import Entry, Plan, View
from offplan.transfers import Transfer


class Evidence(NamedTuple):
    """The graphs of a case, and the plan that moves everything movable of them."""

    facts: GraphFacts
    plan: Plan

    @property
    def moved(self) -> Iterator[Entry]:
        return (entry for entry in self.plan.storages if entry.action == "offload")

    @property
    def moved_views(self) -> Iterator[tuple[Entry, View]]:
        return ((entry, view) for entry in self.moved for view in entry.views)

    def forward_ops(self) -> Iterator[Op]:
        return (op for region in self.facts.regions for op in region.forward.ops)

    def storage_of(self, value: int) -> StorageId | None:
        return self.facts.values[value].storage


@dataclass(frozen=True)
class Claim:
    """``says`` completes the sentence "the graphs do not have ...".  ``device``: only there."""

    says: str
    holds: Callable[[Evidence], bool]
    device: str = ""
    compiler: str = ""

    def applies(self, evidence: Evidence) -> bool:
        facts = evidence.facts
        return self.device in ("", facts.device) and self.compiler in ("", facts.compiler)


def unmet(claims: tuple[Claim, ...], evidence: Evidence) -> tuple[str, ...]:
    """What of ``claims`` does not hold."""
    return tuple(
        claim.says for claim in claims if claim.applies(evidence) and not claim.holds(evidence)
    )


# --- claims ---------------------------------------------------------------------------------------


def moves_view(says: str, test: Callable[[View], bool], device: str = "") -> Claim:
    """Some moved storage has a saved view of that kind."""
    return Claim(
        f"a moved view that is {says}",
        lambda evidence: any(test(view) for _, view in evidence.moved_views),
        device,
    )


def moves_storage(says: str, test: Callable[[Entry], bool]) -> Claim:
    return Claim(f"a moved storage with {says}", lambda evidence: any(map(test, evidence.moved)))


def moves_result_of(target: str, device: str = "", compiler: str = "") -> Claim:
    """Some moved storage has a value that an op ``target`` makes, saved itself or not."""

    def holds(evidence: Evidence) -> bool:
        moved = {entry.id for entry in evidence.moved}
        return any(
            evidence.storage_of(value) in moved
            for op in evidence.forward_ops()
            if target in op.target
            for value in op.outputs
        )

    return Claim(f"a moved storage that {target} has part in", holds, device, compiler)


def stays(rule: str, holder: str = "", device: str = "") -> Claim:
    """Some saved storage is skipped under ``rule``, for a holder of that kind."""
    return Claim(
        f"a storage skipped under {rule}" + (f", held by {holder}" if holder else ""),
        lambda evidence: any(
            entry.rule == rule and entry.holder.startswith(holder)
            for entry in evidence.plan.storages
        ),
        device,
    )


def runs(target: str, device: str = "", compiler: str = "") -> Claim:
    """Some forward has an op whose target contains ``target``."""
    return Claim(
        f"{target} in a forward",
        lambda evidence: any(target in op.target for op in evidence.forward_ops()),
        device,
        compiler,
    )


def moves_at_least(count: int) -> Claim:
    return Claim(
        f"{count} storages that move",
        lambda evidence: len(evidence.plan.transfers) >= count,
    )


def some_moved(test: Callable[[Entry], bool]) -> Callable[[Evidence], bool]:
    return lambda evidence: any(map(test, evidence.moved))


def transfer_that(says: str, test: Callable[[Transfer, Plan], bool]) -> Claim:
    return Claim(
        f"a transfer that {says}",
        lambda evidence: any(test(each, evidence.plan) for each in evidence.plan.transfers),
    )


def writes_an_input(evidence: Evidence) -> bool:
    """An op of a forward writes to one of its inputs, a buffer of the model or an argument."""
    return any(
        value in {given.value for given in region.forward.inputs}
        for region in evidence.facts.regions
        for op in region.forward.ops
        for value in op.mutates
    )


def returns(count: int) -> Callable[[Evidence], bool]:
    """Some region returns ``count`` values to the caller."""

    def holds(evidence: Evidence) -> bool:
        return any(
            sum(output.kind == "output" for output in region.forward.outputs) >= count
            for region in evidence.facts.regions
        )

    return holds


def computes_again(evidence: Evidence) -> bool:
    """A backward has a matrix product of a forward again, from the same arguments."""
    for region in evidence.facts.regions:
        received = {saved.backward_value: saved.value for saved in region.saved}
        products = {op.target for op in region.forward.ops if op.target.startswith("aten.addmm.")}
        backward = region.backward.ops if region.backward else ()
        if received and any(op.target in products for op in backward):
            return True
    return False


def runs_one_graph_twice(evidence: Evidence) -> bool:
    """Two regions with transfers have the same ops."""
    moved = {transfer.region for transfer in evidence.plan.transfers}
    shapes = [
        tuple(op.target for op in evidence.facts.regions[number].forward.ops) for number in moved
    ]
    return len(shapes) > len(set(shapes))


def moves_in_region(number: int) -> Callable[[Evidence], bool]:
    return lambda evidence: any(each.region == number for each in evidence.plan.transfers)


# --- what they ask --------------------------------------------------------------------------------


def is_packed(transfer: Transfer, plan: Plan) -> bool:
    return transfer.packed


def turns_around(transfer: Transfer, plan: Plan) -> bool:
    """Made by one of the last ops of its forward, used by one of the first of its backward."""
    forward = sum(size.forward_ops for size in plan.regions[: transfer.region + 1])
    backward = sum(size.forward_ops for size in plan.regions)
    backward += sum(size.backward_ops for size in plan.regions[transfer.region + 1 :])
    return (
        forward - transfer.offload_after <= 3
        and transfer.needed_by is not None
        and transfer.needed_by - backward <= 3
    )


def window_of(view: View) -> tuple[object, ...]:
    return view.dtype, view.shape, view.stride, view.offset


def is_part(view: View) -> bool:
    return view.offset > 0 and view.stride[0] > view.shape[-1]


def is_mostly_unsaved(entry: Entry) -> bool:
    return len(entry.views) == 1 and entry.views[0].logical_bytes * 2 < entry.size_bytes


def is_bool(view: View) -> bool:
    return view.dtype == "bool"


def is_transposed_square(view: View) -> bool:
    return len(view.shape) == 2 and view.shape[0] == view.shape[1] and view.stride[0] == 1


def is_expanded(view: View) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(view.stride, view.shape, strict=True))


def is_stepped(view: View) -> bool:
    return view.shape[-1] > 1 and view.stride[-1] > 1


def is_overlapping(view: View) -> bool:
    """Windows of one row: the step to the next is smaller than the window."""
    return (
        len(view.shape) >= 2
        and view.stride[-1] == 1
        and 0 < view.stride[-2] < view.shape[-1]
        and view.shape[-2] > 1
    )


def is_empty(view: View) -> bool:
    return view.logical_bytes == 0


def is_channels_last(view: View) -> bool:
    return len(view.shape) == 4 and view.stride[1] == 1 and view.shape[1] > 1


def is_aligned_bias(view: View) -> bool:
    """Broadcast, its rows longer than what is seen of them, by a multiple of 8."""
    rows = len(view.shape) == 4 and view.stride[-2]
    return bool(rows) and is_expanded(view) and rows > view.shape[-1] and rows % 8 == 0


def is_offset_labels(view: View) -> bool:
    return view.dtype == "int64" and view.offset % 2 == 1


def views_of(count: int) -> Callable[[Entry], bool]:
    """``count`` different windows at least, one of them the whole of the storage."""

    def test(entry: Entry) -> bool:
        whole = any(view.logical_bytes == entry.size_bytes for view in entry.views)
        return whole and len({window_of(view) for view in entry.views}) >= count

    return test


def chunks_of_rows(entry: Entry) -> bool:
    """Three windows with the same strides, none of them dense, side by side in each row."""
    chunks = [view for view in entry.views if not is_dense(_value(view))]
    return len({view.offset for view in chunks}) >= 3 and len({v.stride for v in chunks}) <= 2


def has_square_and_transpose(entry: Entry) -> bool:
    return any(map(is_transposed_square, entry.views)) and len(entry.views) > 1


def has_two_dtypes(entry: Entry) -> bool:
    return len({view.dtype for view in entry.views}) > 1


def has_one_window_twice(entry: Entry) -> bool:
    windows = [window_of(view) for view in entry.views]
    return len(windows) > len(set(windows)) or any(view.also_at for view in entry.views)


def _value(view: View) -> Value:
    return Value("tensor", dtype=view.dtype, shape=view.shape, stride=view.stride)
