"""From a plan to the transfers of one of its regions, in terms of that region's own graphs.

A plan speaks of a whole step: its ops are places on the step's timeline, its storages those of the
traced step.  A compiled graph is one region, with a template that counts from its own beginning.
"""

from __future__ import annotations

import msgspec
import torch

from offplan.errors import PlanError
from offplan.graph import StorageId
from offplan.plan import Entry, Plan, analyze_command
from offplan.trace.facts import RegionTemplate
from offplan.transfers import Transfer


def localized(plan: Plan, region: int, template: RegionTemplate) -> list[Transfer]:
    """The plan's transfers of ``region``, in terms of its own graphs and of ``template``.

    Raises ``PlanError`` if the region is not the one that the plan describes.
    """
    if region >= len(plan.regions):
        raise other_graphs(plan, f"{len(plan.regions)} regions were planned, there are more")
    size, backward = plan.regions[region], template.backward
    found = (len(template.forward.ops), len(backward.ops) if backward else 0, len(template.saved))
    expected = (size.forward_ops, size.backward_ops, size.saved)
    if found != expected:
        raise other_graphs(
            plan,
            f"region {region} has {found[0]} forward ops, {found[1]} backward ops and {found[2]} "
            f"saved values; it had {expected[0]}, {expected[1]} and {expected[2]}",
        )
    storages = {
        entry.id: _local_storage(plan, entry, template)
        for entry in plan.storages
        if entry.region == region and entry.action == "offload"
    }
    transfers = [transfer for transfer in plan.transfers if transfer.region == region]
    for transfer in transfers:
        if transfer.storage not in storages:
            raise PlanError(f"storage {transfer.storage} has a transfer, but no entry as offloaded")
    first_forward, first_backward = _first_ops(plan, region)
    return [
        msgspec.structs.replace(
            transfer,
            storage=storages[transfer.storage],
            offload_after=transfer.offload_after - first_forward,
            release_by=transfer.release_by - first_forward,
            reload_at=_minus(transfer.reload_at, first_backward),
            needed_by=_minus(transfer.needed_by, first_backward),
        )
        for transfer in transfers
    ]


def _local_storage(plan: Plan, entry: Entry, template: RegionTemplate) -> StorageId:
    """The template's storage for an offloaded entry, whose views must be its saved ones."""
    found = set()
    for view in entry.views:
        if view.position >= len(template.saved):
            raise other_graphs(plan, f"region {entry.region} saves less than {view.position + 1}")
        value = template.values[template.saved[view.position].value]
        traced = (value.dtype, value.shape, value.stride, value.offset)
        if traced != (view.dtype, view.shape, view.stride, view.offset):
            raise other_graphs(plan, f"saved value {view.name} of region {entry.region} differs")
        found.add(value.storage)
    storage = found.pop() if len(found) == 1 else None
    if storage is None or template.storages[storage].size_bytes != entry.size_bytes:
        raise other_graphs(plan, f"storage {entry.id} of region {entry.region} differs")
    return storage


def _first_ops(plan: Plan, region: int) -> tuple[int, int]:
    """Where the forward and the backward of ``region`` begin on the plan's timeline."""
    first_forward = sum(size.forward_ops for size in plan.regions[:region])
    first_backward = sum(size.forward_ops for size in plan.regions)
    first_backward += sum(size.backward_ops for size in plan.regions[region + 1 :])
    return first_forward, first_backward


def _minus(place: int | None, first: int) -> int | None:
    return None if place is None else place - first


def other_graphs(plan: Plan, difference: str) -> PlanError:
    """The refusal of ``plan`` for graphs that differ from its own as said."""
    reasons = [difference]
    if plan.torch != torch_version():
        reasons.append(f"torch was {plan.torch}, is {torch_version()}")
    return PlanError(
        f"the plan was made for other graphs: {'; '.join(reasons)}",
        fix=f"make it again with: {analyze_command(plan)}",
    )


def torch_version() -> str:
    """As plans record it."""
    return str(torch.__version__).split("+")[0]
