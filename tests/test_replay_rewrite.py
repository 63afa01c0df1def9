"""Inserting transfers: where they stand, what they leave alone, and that undoing restores all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from offplan.errors import PlanError
from offplan.footprint import footprint
from offplan.graph import StorageId, Value
from offplan.plan import Plan, make_plan
from offplan.replay import graphs
from offplan.replay.compiled import Replay
from offplan.replay.host import Layout
from offplan.replay.packing import gather, piece_bytes, pieces, scatter
from offplan.replay.rewrite import insert_transfers
from offplan.target import Target

TRANSFER_OPS = {"offload", "release", "reload", "wait"}


class Model(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.first(x), self).sum()


def _layers(h: torch.Tensor, model: Any) -> torch.Tensor:
    return F.gelu(model.second(F.gelu(h))).sin()


def _views(h: torch.Tensor, model: Any) -> torch.Tensor:
    h = h.sigmoid()
    return h.view(-1).sin() * h.flatten() * h.reshape(-1).cos()


def _chunks(h: torch.Tensor, model: Any) -> torch.Tensor:
    a, b = h.exp().chunk(2, -1)
    return a * b * model.second(h)[:, :16]


def _tuples(h: torch.Tensor, model: Any) -> torch.Tensor:
    return h.sort(-1).values.sin() + F.layer_norm(h, (32,)) + h.max(-1, keepdim=True).values.cos()


def _stepped(h: torch.Tensor, model: Any) -> torch.Tensor:
    every_fourth = model.second(h)[20:, ::4]
    return every_fourth @ every_fourth.t()


def _shifted(h: torch.Tensor, model: Any) -> torch.Tensor:
    late = model.second(h)[9:]
    return late @ late.t()


def _absolute(h: torch.Tensor, model: Any) -> torch.Tensor:
    """Saves a view that starts late, and views it again by an offset into the storage."""
    late = model.second(h)[40:]
    return late.sin().sum() + late.as_strided((3, 8), (32, 2), 32 * 44 + 1).cos().sum()


def _complex(h: torch.Tensor, model: Any) -> torch.Tensor:
    z = torch.complex(h, h.sin()).conj()
    return (z * z.exp()).abs()


BODIES = [_layers, _views, _chunks, _tuples, _stepped, _shifted, _absolute, _complex]
bodies = pytest.mark.parametrize("body", BODIES, ids=[body.__name__[1:] for body in BODIES])


def target(body: Callable[..., Any]) -> Target:
    torch.manual_seed(0)
    return Target(Model(body), (torch.randn(64, 32),))


class Windows(NamedTuple):
    """How many transfers of a plan wait, and for what; a window that is never drawn tests nothing.

    ``held_on``: released later than they are offloaded; ``let_go``: before the forward's end.
    ``fetched``: reloaded earlier than they are needed; ``put_off``: after the backward's start.
    ``leaving`` and ``coming``: the most that are on their way at once.
    """

    held_on: int
    let_go: int
    fetched: int
    put_off: int
    leaving: int
    coming: int


def windows(plan: Plan) -> Windows:
    out = [(t.offload_after, t.release_by) for t in plan.transfers]
    back = [
        (t.reload_at, t.needed_by)
        for t in plan.transfers
        if t.reload_at is not None and t.needed_by is not None
    ]
    forward_end = sum(region.forward_ops for region in plan.regions)
    return Windows(
        held_on=sum(release > offload for offload, release in out),
        let_go=sum(release < forward_end - 1 for _, release in out),
        fetched=sum(reload < need for reload, need in back),
        put_off=sum(reload > forward_end for reload, _ in back),
        leaving=_most_at_once(out),
        coming=_most_at_once(back),
    )


def _most_at_once(spans: list[tuple[int, int]]) -> int:
    return max(sum(a <= start <= b for a, b in spans) for start, _ in spans) if spans else 0


def planned(body: Callable[..., Any]) -> Any:
    with Replay(target(body), None, device="cpu") as replay:
        replay.forward()
        assert replay.facts is not None
        return make_plan(replay.facts, budget=0, min_bytes=1)


def test_the_bodies_have_transfers_of_every_kind():
    found = {body.__name__: windows(planned(body)) for body in BODIES}
    # Under the floor of a chain of layers, each kind of window is open.
    assert min(found["_layers"]) >= 1
    assert found["_layers"].leaving >= 2
    assert found["_tuples"].coming >= 2
    assert sum(each.held_on for each in found.values()) > len(BODIES)


def rewriting(
    body: Callable[..., Any], watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay a step of ``body`` with ``watch`` in place of ``insert_transfers``."""
    plan = planned(body)
    assert plan.transfers
    monkeypatch.setattr(graphs, "insert_transfers", watch)
    with Replay(target(body), plan, device="cpu") as replay:
        replay.step()


def printed(module: fx.GraphModule) -> tuple[str, str]:
    return module.print_readable(print_output=False), str(module.graph)


def fields(module: fx.GraphModule) -> dict[str, dict[str, Any]]:
    return {node.name: dict(node.meta) for node in module.graph.nodes}


@bodies
def test_undoing_restores_the_printed_graphs_and_what_is_recorded_of_them(body, monkeypatch):
    def watch(forward, backward, *rest):
        before = [(printed(module), fields(module)) for module in (forward, backward)]
        undo = insert_transfers(forward, backward, *rest)
        changed = [(printed(module), fields(module)) for module in (forward, backward)]
        undo()
        after = [(printed(module), fields(module)) for module in (forward, backward)]
        assert [a[0] != b[0] for a, b in zip(before, changed, strict=True)] == [True, True]
        for (text, metas), (old_text, old_metas) in zip(after, before, strict=True):
            assert text == old_text
            assert metas.keys() == old_metas.keys()
            for name, meta in metas.items():
                assert meta.keys() == old_metas[name].keys()
                assert all(meta[key] is old_metas[name][key] for key in meta)
        return insert_transfers(forward, backward, *rest)

    rewriting(body, watch, monkeypatch)


@bodies
def test_everything_else_keeps_its_order_name_target_and_record(body, monkeypatch):
    def watch(forward, backward, template, transfers, *rest):
        before = [_nodes(module) for module in (forward, backward)]
        undo = insert_transfers(forward, backward, template, transfers, *rest)
        moved = {t.storage for t in transfers}
        receivers = {
            name
            for name, value in zip(
                template.backward.input_names, template.backward.inputs, strict=True
            )
            if template.values[value].storage in moved
        }
        pairs = ((forward, before[0], set()), (backward, before[1], receivers))
        for module, old, changed in pairs:
            names = {name for name, *_ in old}
            kept = [item for item in _nodes(module) if item[0] in names]
            assert [item[:3] for item in kept] == [item[:3] for item in old]
            for (name, *_, val), (*_, old_val) in zip(kept, old, strict=True):
                assert (val is old_val) == (name not in changed)
        return undo

    rewriting(body, watch, monkeypatch)


def _nodes(module: fx.GraphModule) -> list[tuple[str, str, Any, Any]]:
    return [(n.name, n.op, n.target, n.meta.get("val")) for n in module.graph.nodes]


@bodies
def test_transfers_stand_where_they_are_planned(body, monkeypatch):
    def watch(forward, backward, template, transfers, *rest):
        undo = insert_transfers(forward, backward, template, transfers, *rest)
        for kind, graph, local, place in (
            ("offload", forward, template.forward, lambda t: t.offload_after + 1),
            ("release", forward, template.forward, lambda t: t.release_by + 1),
            ("reload", backward, template.backward, lambda t: t.reload_at),
            ("wait", backward, template.backward, lambda t: t.needed_by),
        ):
            known = {op.name for op in local.ops}
            done, found = 0, []
            for node in graph.graph.nodes:
                done += node.name in known
                if getattr(node.target, "__name__", "") == kind:
                    found.append(done)
            assert sorted(found) == sorted(place(t) for t in transfers)
        return undo

    rewriting(body, watch, monkeypatch)


def test_every_position_of_a_storage_saves_one_host_tensor(monkeypatch):
    def watch(forward, backward, template, transfers, *rest):
        undo = insert_transfers(forward, backward, template, transfers, *rest)
        (output,) = forward.graph.find_nodes(op="output")
        saved = output.args[0][template.output_count :]
        values = template.forward.outputs[template.output_count :]
        for transfer in transfers:
            hosts = {
                node
                for node, value in zip(saved, values, strict=True)
                if template.values[value].storage == transfer.storage
            }
            assert [node.target.__name__ for node in hosts] == ["offload"]
            (host,) = hosts
            assert host.meta["val"].device.type == "cpu"
            assert host.meta["val"].numel() == transfer.transfer_bytes
        return undo

    rewriting(_views, watch, monkeypatch)


@bodies
def test_bits_and_bytes_are_those_of_the_plain_step(body):
    plan = planned(body)
    arms = []
    for arm_plan in (None, plan):
        made = target(body)
        with Replay(made, arm_plan, device="cpu") as replay:
            loss = replay.step()
            arms.append([loss, *(p.grad for p in made.model.parameters() if p.grad is not None)])
            moved = replay.stats().offloaded_bytes
    assert all(torch.equal(a, b) for a, b in zip(*arms, strict=True))
    assert moved == sum(t.transfer_bytes for t in plan.transfers)


@pytest.mark.parametrize("body", [_shifted, _absolute])
def test_a_range_that_starts_late_is_not_carried_from_the_beginning(body):
    assert max(transfer.start for transfer in planned(body).transfers) > 512


def test_a_packed_transfer_carries_the_touched_bytes_only():
    (transfer,) = [t for t in planned(_stepped).transfers if t.packed]
    assert transfer.transfer_bytes == 44 * 8 * 4
    assert transfer.start == 20 * 32 * 4


def _merged(h: torch.Tensor, model: Any) -> torch.Tensor:
    """Two equal copies, of which the partitioner makes one, each viewed in its own way."""
    a = h.t().clone(memory_format=torch.contiguous_format).view(-1)
    b = h.t().clone(memory_format=torch.contiguous_format).view(64, 32)
    return a.sin().sum() + (b @ b.t()).sum()


def _merged_chunks(h: torch.Tensor, model: Any) -> torch.Tensor:
    a, b = h.t().clone(memory_format=torch.contiguous_format).chunk(2)
    c, d, *_ = h.t().clone(memory_format=torch.contiguous_format).chunk(4)
    return (a @ b.t()).sum() + (c.view(-1, 16) @ d.view(16, -1)).sum()


@pytest.mark.parametrize("body", [_merged, _merged_chunks])
def test_views_of_nodes_that_the_partitioner_merges_share_their_storage(body):
    with Replay(target(body), None, device="cpu") as replay:
        replay.forward()
        facts = replay.facts
    assert facts is not None
    ops = facts.regions[0].forward.ops
    (clone,) = [op for op in ops if op.target == "aten.clone.default"]
    (copied,) = [facts.values[value].storage for value in clone.outputs]
    views = [op for op in ops if op.target in ("aten.view.default", "aten.split.Tensor")]
    assert len(views) >= 2
    assert {facts.values[value].storage for op in views for value in op.outputs} == {copied}


REFUSALS = [
    ({"storage": StorageId(0)}, "cannot be moved"),
    ({"offload_after": 0, "release_by": 0}, "it is copied before|after its release"),
    ({"reload_at": None}, "only one of"),
    ({"needed_by": 99}, "not in order"),
    ({"start": 4}, "are used"),
    ({"start": -4}, "are used"),
    ({"packed": True, "transfer_bytes": 12}, "it carries"),
    ({"stop": 1 << 40, "transfer_bytes": 1 << 40}, "it ends before"),
]


@pytest.mark.parametrize(("change", "why"), REFUSALS)
def test_an_unsafe_transfer_is_refused_with_the_graphs_unchanged(change, why, monkeypatch):
    def watch(forward, backward, template, transfers, layout, runtime, *rest):
        before = printed(forward), printed(backward)
        wrong = [msgspec.structs.replace(transfers[-1], **change)]
        with pytest.raises(PlanError, match=why):
            insert_transfers(forward, backward, template, wrong, Layout((0,), 0), runtime, *rest)
        assert (printed(forward), printed(backward)) == before
        assert runtime.slots == []
        return insert_transfers(forward, backward, template, transfers, layout, runtime, *rest)

    rewriting(_layers, watch, monkeypatch)


# --- packing --------------------------------------------------------------------------------------


def _view(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, item: int = 4) -> Value:
    return Value("tensor", StorageId(0), "float32", item, shape, stride, offset)


PACKED = [
    [_view((20,), (5,), 3)],
    [_view((4, 8), (32, 1), 2), _view((4, 8), (32, 1), 16)],
    [_view((3, 1, 4), (40, 0, 2), 1), _view((2, 2), (0, 1), 100)],
    [_view((6, 3), (16, 1), 0), _view((6, 3), (16, 1), 2)],
    [_view((5,), (9,), 1, item=2), _view((4,), (20,), 30, item=1)],
    [_view((5,), (2,), 0), _view((3,), (3,), 1)],
]


@pytest.mark.parametrize("views", PACKED)
def test_packed_bytes_are_those_the_footprint_counts_and_come_back(views):
    storage = torch.randint(256, (1024,), dtype=torch.uint8).untyped_storage()
    found = pieces(views)
    assert piece_bytes(found) == footprint(views).touched_bytes
    packed = gather(storage, found)
    assert packed.numel() == piece_bytes(found)
    back = torch.zeros(1024, dtype=torch.uint8).untyped_storage()
    scatter(packed, back, 0, found)
    original, restored = torch.tensor(storage.tolist()), torch.tensor(back.tolist())
    touched = torch.zeros(1024, dtype=torch.bool)
    for view in views:
        index = torch.arange(1024).view(-1, view.item_bytes)
        touched[
            index.as_strided(
                (*view.shape, view.item_bytes),
                (*(s * view.item_bytes for s in view.stride), 1),
                view.offset * view.item_bytes,
            ).reshape(-1)
        ] = True
    assert torch.equal(original[touched], restored[touched])
