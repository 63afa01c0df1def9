"""Predicted memory against an oracle that runs the step and asks, at every moment, who holds what.

The oracle keeps the holders themselves (the names in a graph's code, what autograd saved, what the
caller was given) and looks for each value's next reader every time, so that it shares nothing with
the spans of ``offplan.lifetimes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from facts_builder import DRAWN, FactsBuilder, graph_facts
from hypothesis import given
from hypothesis import strategies as st

from offplan.allocator import Block, CachingAllocator, charged_bytes
from offplan.graph import (
    Graph,
    GraphFacts,
    ModelTensor,
    Op,
    Region,
    Storage,
    StorageId,
    Value,
    ValueId,
)
from offplan.graph import timeline as ops_of
from offplan.memory import PARTS, Conditions, curve, predict, reserved_range, timeline
from offplan.plan import Plan, make_plan
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.gauge import CpuGauge
from offplan.trace.capture import TraceOptions, trace
from offplan.transfers import Transfer
from offplan.workspaces import kept_bytes, temporaries, together

MiB = 1024**2
RESIDENT = ("parameter", "buffer", "input", "constant")
Key = Any


def block(size: int, facts: GraphFacts) -> int:
    """What an allocation counts in a segment of its own, written out once more."""
    if facts.device != "cuda":
        return size
    size = (size + 511) // 512 * 512
    segment = (size + 2 * MiB - 1) // (2 * MiB) * 2 * MiB
    return segment if size >= 10 * MiB and segment - size <= MiB else size


# --- the oracle -----------------------------------------------------------------------------------


class Frame(NamedTuple):
    """What is held at one moment; ``op`` is the index it counts with, ``runs`` if it is that op."""

    op: int
    runs: bool
    held: frozenset[Key]


class Oracle:
    """Runs a step.

    Storages are named by the forward's id, clones and buffers by what they are of.
    """

    def __init__(self, facts: GraphFacts, transfers: Sequence[Transfer] = ()) -> None:
        self.facts = facts
        self.transfers = {(t.region, t.storage): t for t in transfers}
        self.frames: list[Frame] = []
        self.sizes: dict[Key, int] = {
            StorageId(number): storage.size_bytes for number, storage in enumerate(facts.storages)
        }
        self.same: dict[ValueId, Key] = {}
        self.sent = {
            facts.values[s.backward_value].storage: facts.values[s.value].storage
            for region in facts.regions
            for s in region.saved
        }
        self.resident = {
            facts.values[item.value].storage
            for region in facts.regions
            for graph in (region.forward, region.backward)
            for item in (graph.inputs if graph else ())
            if item.kind in RESIDENT
        }
        # Holders that outlive a graph: autograd, the caller, the engine, and ``.grad``.
        self.saved: dict[int, set[Key]] = {}
        self.caller: dict[int, set[Key]] = {}
        self.engine: set[Key] = set()
        self.handed: dict[Key, list[ValueId]] = {}
        self.gradients: dict[str, list[Key]] = {}
        self.kept: set[Key] = set()
        self.position = 0
        self.output = self.loss_output()
        self.run()

    def run(self) -> None:
        for number, region in enumerate(self.facts.regions):
            self.forward(number, region.forward)
        self.loss()
        for number, region in reversed([*enumerate(self.facts.regions)]):
            if region.backward is not None:
                self.backward(number, region, region.backward)
        self.note(self.position - 1, set())

    def key(self, value: ValueId | None) -> Key | None:
        """The storage of ``value``, if it is on the device and not there before the step."""
        if value is None:
            return None
        if value in self.same:
            return self.same[value]
        storage = self.facts.values[value].storage
        storage = self.sent.get(storage, storage)
        if storage is None or storage in self.resident or not self.sizes[storage]:
            return None
        return storage if self.facts.storages[storage].device == self.facts.device else None

    def keys(self, values: Iterable[ValueId | None]) -> set[Key]:
        return {key for value in values if (key := self.key(value)) is not None}

    def moved(self, number: int) -> set[Key]:
        return {storage for region, storage in self.transfers if region == number}

    def note(self, op: int, held: set[Key], runs: bool = False) -> None:
        around = set().union(*self.saved.values(), *self.caller.values())
        everything = held | around | self.engine | self.kept | self.waiting()
        op = max(0, min(op, self.facts.op_count - 1))
        self.frames.append(Frame(op, runs, frozenset(everything)))

    def names(self, graph: Graph, done: int, moved: Set[Key] = frozenset()) -> set[Key]:
        """Storages of the variables of the graph's code after its op ``done``.

        Instead of what is ``moved`` it returns host tensors.
        """
        inputs = {item.value for item in graph.inputs}
        made = inputs | {value for op in graph.ops[: done + 1] for value in op.outputs}
        read = {value for op in graph.ops for value in op.inputs}
        later = {value for op in graph.ops[done + 1 :] for value in op.inputs}
        returned = {o.value for o in graph.outputs if self.key(o.value) not in moved}
        return self.keys(made & (later | returned | (inputs - read)))

    # --- forward --------------------------------------------------------------------------------

    def forward(self, number: int, graph: Graph) -> None:
        first, moved = self.position, self.moved(number)
        self.position += len(graph.ops)
        inputs = self.keys(item.value for item in graph.inputs)
        self.note(first, inputs)
        for place, op in enumerate(graph.ops):
            env = self.names(graph, place - 1, moved) | self.keys(op.outputs)
            self.note(first + place, env | inputs | self.in_flight(first + place), runs=True)
        last = max(self.position - 1, first)
        self.note(last, self.names(graph, len(graph.ops), moved) | inputs)
        returned = [output for output in graph.outputs if output.value is not None]
        self.saved[number] = self.keys(o.value for o in returned if o.kind == "saved") - moved
        self.caller[number] = self.keys(
            o.value
            for o in returned
            if o.kind == "output"
            or (o.kind == "mutated" and self.is_received(self.key(o.value), number))
        )
        for earlier in range(number + 1):
            # The caller drops what the last region that is handed it has returned from.
            self.caller[earlier] = {
                key
                for key in self.caller[earlier]
                if self.is_received(key, number) or not self.is_received(key, earlier)
            }

    def is_received(self, key: Key, after: int) -> bool:
        """Whether a region after the one numbered ``after`` is handed ``key``."""
        later = self.facts.regions[after + 1 :]
        return any(key in {self.key(i.value) for i in r.forward.inputs} for r in later)

    def in_flight(self, op: int) -> set[Key]:
        """Moved storages that the runtime holds during ``op``, and packed bytes of them."""
        found: set[Key] = set()
        for (_, storage), transfer in self.transfers.items():
            if transfer.offload_after < op <= transfer.release_by:
                found.add(storage)
            start = min(transfer.offload_after + 1, transfer.release_by)
            if transfer.packed and start <= op <= transfer.release_by:
                self.sizes["packed", storage] = transfer.transfer_bytes
                found.add(("packed", storage))
        return found

    # --- loss -----------------------------------------------------------------------------------

    def loss(self) -> None:
        """The loss, and the gradient of it that starts the backward."""
        values = self.facts.values
        final = [
            values[o.value]
            for number, region in enumerate(self.facts.regions)
            for o in region.forward.outputs
            if o.kind == "output" and o.value is not None and values[o.value].is_float
            if not self.is_received(self.key(o.value), number)
        ]
        item_bytes = final[0].item_bytes if len(final) == 1 else 8
        if self.output is None:
            self.sizes["loss"] = item_bytes
            self.kept.add("loss")
        else:
            item_bytes = values[self.output].item_bytes
            self.kept |= self.keys([self.output])
        self.note(self.position - 1, set())
        self.caller.clear()
        self.sizes["start"] = item_bytes
        self.kept.add("start")

    def loss_output(self) -> ValueId | None:
        for number, region in enumerate(self.facts.regions):
            for output, _ in self.tangents(region):
                is_scalar = not self.facts.values[output].shape
                if is_scalar and not self.is_received(self.key(output), number):
                    return output
        return None

    def tangents(self, region: Region) -> list[tuple[ValueId, ValueId]]:
        values = self.facts.values
        outputs = [
            o.value
            for o in region.forward.outputs
            if o.kind in ("output", "mutated") and o.value is not None
        ]
        found = []
        for item in region.backward.inputs if region.backward else ():
            tangent = values[item.value]
            while item.kind == "tangent" and outputs:
                output = outputs.pop(0)
                if (values[output].shape, values[output].dtype) == (tangent.shape, tangent.dtype):
                    found.append((output, item.value))
                    break
        return found

    # --- backward -------------------------------------------------------------------------------

    def backward(self, number: int, region: Region, graph: Graph) -> None:
        first, moved = self.position, self.moved(number)
        self.position += len(graph.ops)
        self.saved[number] = set()
        received = self.receive(region, graph)
        self.note(first, received | (self.names(graph, -1) - moved))
        for place, op in enumerate(graph.ops):
            env = self.names(graph, place - 1) | self.keys([*op.inputs, *op.outputs])
            env = (env - moved) | self.buffers(number, graph, first, place)
            self.note(first + place, env, runs=True)
        last = max(self.position - 1, first)
        env = self.names(graph, len(graph.ops)) - moved
        self.note(last, env | self.buffers(number, graph, first, len(graph.ops)))
        self.engine = set()
        self.settle(number, region, graph, last)

    def receive(self, region: Region, graph: Graph) -> set[Key]:
        """What the engine hands over; up to torch 2.12 it holds that until the return."""
        pairs = self.tangents(region)
        known = {tangent for _, tangent in pairs}
        received = self.keys(
            i.value for i in graph.inputs if i.kind == "tangent" and i.value not in known
        )
        copied: set[Key] = set()
        for output, tangent in pairs:
            arrived = self.handed.pop(self.key(output), [])
            received |= self.keys(arrived)
            if output == self.output:
                self.rename(graph, tangent, "start")
            elif arrived and self.has_strides_of(arrived[0], tangent):
                self.rename(graph, tangent, self.key(arrived[0]))
            elif arrived or self.output is None:
                copied |= self.keys([tangent])
            else:
                received |= self.keys([tangent])
        if tuple(map(int, self.facts.torch.split(".")[:2])) < (2, 13):
            self.engine = received
        return received | copied

    def has_strides_of(self, one: ValueId, other: ValueId) -> bool:
        return self.facts.values[one].stride == self.facts.values[other].stride

    def rename(self, graph: Graph, value: ValueId, key: Key) -> None:
        """Put ``value`` and its views on the storage that really came."""
        storage = self.facts.values[value].storage
        for found in [value, *(v for op in graph.ops for v in op.outputs)]:
            if self.facts.values[found].storage == storage:
                self.same[found] = key

    def buffers(self, number: int, graph: Graph, first: int, place: int) -> set[Key]:
        """Reloaded storages that are there during op ``place`` of the graph, or its return."""
        found: set[Key] = set()
        for (region, storage), transfer in self.transfers.items():
            if region != number or transfer.reload_at is None or transfer.needed_by is None:
                continue
            last = transfer.needed_by - first
            for later, op in enumerate(graph.ops):
                if storage in self.keys([*op.inputs, *op.outputs]):
                    last = max(last, later)
            if transfer.reload_at - first <= place <= last:
                self.sizes["buffer", storage] = self.buffer_bytes(region, storage, transfer)
                found.add(("buffer", storage))
            wait = max(transfer.reload_at, transfer.needed_by - 1) - first
            if transfer.packed and transfer.reload_at - first <= place <= wait:
                self.sizes["arriving", storage] = transfer.transfer_bytes
                found.add(("arriving", storage))
        return found

    def buffer_bytes(self, region: int, storage: Key, transfer: Transfer) -> int:
        """Whole elements of every saved view, from an aligned start."""
        saved = [self.facts.values[s.value] for s in self.facts.regions[region].saved]
        item = max(v.item_bytes for v in saved if v.storage == storage)
        start = transfer.start - transfer.start % 512
        return (transfer.stop - start + item - 1) // item * item

    def waiting(self) -> set[Key]:
        """Gradients for earlier regions, and the first of those that wait for others."""
        handed = self.keys(value for values in self.handed.values() for value in values)
        return handed | {keys[0] for keys in self.gradients.values() if keys[0] is not None}

    def settle(self, number: int, region: Region, graph: Graph, op: int) -> None:
        cloned = []
        pairs = [
            (output.value, item)
            for output, item in zip(graph.outputs, region.forward.inputs, strict=False)
            if output.value is not None
        ]
        leaves = [(value, item) for value, item in pairs if item.kind != "handed"]
        for value, receiver in pairs:
            if receiver.kind == "handed" and self.is_awaited(self.key(receiver.value), number):
                self.handed.setdefault(self.key(receiver.value), []).append(value)
        for place, (value, leaf) in enumerate(leaves):
            again = any(value == later for later, _ in leaves[place + 1 :])
            if self.sources(leaf.name) == 1 and (again or not self.fits(value, leaf.value)):
                cloned.append((value, leaf.name))
            else:
                self.gradients.setdefault(leaf.name, []).append(self.key(value))
        for place, (value, name) in enumerate(cloned):
            self.sizes["clone", name] = self.facts.values[value].logical_bytes
            self.kept.add(("clone", name))
            self.note(op, self.keys(later for later, _ in cloned[place:]))

    def is_awaited(self, key: Key, before: int) -> bool:
        """Whether an earlier region takes the gradient of ``key`` as a tangent."""
        earlier = self.facts.regions[:before]
        return any(key == self.key(output) for r in earlier for output, _ in self.tangents(r))

    def sources(self, name: str) -> int:
        """How many gradients the step gives for one leaf."""
        return sum(
            output.value is not None and item.name == name and item.kind != "handed"
            for region in self.facts.regions
            if region.backward
            for output, item in zip(region.backward.outputs, region.forward.inputs, strict=False)
        )

    def fits(self, value: ValueId, leaf: ValueId) -> bool:
        """Whether torch would keep the gradient: by what it lays out for a tensor like the leaf."""
        gradient, tensor = self.facts.values[value], self.facts.values[leaf]
        like = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride, device="meta"))
        return all(
            size == 1 or one == other
            for size, one, other in zip(
                gradient.shape, gradient.stride, like.stride(), strict=False
            )
        )

    # --- sums -----------------------------------------------------------------------------------

    def resting_bytes(self) -> int:
        storages = [self.facts.storages[s] for s in self.resident if s is not None]
        sizes = [s.size_bytes for s in storages if s.device == self.facts.device]
        return sum(block(size, self.facts) for size in sizes) + self.kept_bytes()

    def kept_bytes(self) -> int:
        if self.facts.device != "cuda":
            return 0
        count = sum(len(region.forward.ops) for region in self.facts.regions)
        return sum(size for _, size in kept_bytes([*ops_of(self.facts)], count, self.facts.gpu))

    def by_op(self) -> tuple[int, ...]:
        ops, rests = [*ops_of(self.facts)], self.resting_bytes()
        found = [0] * len(ops)
        for op, runs, held in self.frames:
            size = rests + sum(block(self.sizes[key], self.facts) for key in held)
            if runs and self.facts.device == "cuda":
                size += self.temporary_bytes(ops[op])
            if ops:
                found[op] = max(found[op], size)
        return tuple(found)

    def temporary_bytes(self, op: Op) -> int:
        outputs = [size for v in op.outputs if (size := self.facts.values[v].logical_bytes)]
        most = 0
        for stage in together(temporaries(op, self.facts.values, self.facts.gpu)):
            missing = outputs[len(outputs) - stage.missing_count :]
            size = sum(block(size, self.facts) for size in stage.sizes)
            most = max(most, size - sum(block(size, self.facts) for size in missing))
        return most

    def last_op(self, storage: Key) -> int:
        return max(frame.op for frame in self.frames if storage in frame.held)


# --- what is asked of the model -------------------------------------------------------------------


@st.composite
def facts_and_transfers(draw: st.DrawFn) -> tuple[GraphFacts, list[Transfer]]:
    """Drawn facts, and transfers of storages that only autograd holds beyond the forward."""
    facts = draw(graph_facts())
    facts = msgspec.structs.replace(facts, torch=draw(st.sampled_from(("2.11.0", "2.14.1"))))
    transfers: list[Transfer] = []
    if facts.device == "cpu" or draw(st.booleans()):
        oracle = Oracle(facts)
        for number, storage in sorted(movable(facts, oracle)):
            if draw(st.booleans()):
                transfers.append(draw_transfer(draw, facts, oracle, number, storage))
    return facts, transfers


def movable(facts: GraphFacts, oracle: Oracle) -> set[tuple[int, StorageId]]:
    """Saved storages of one region that an op makes, and nobody else is given."""
    held = Counter(
        key
        for number, region in enumerate(facts.regions)
        for key in oracle.keys(s.value for s in region.saved)
    )
    given = {
        key
        for region in facts.regions
        for graph in (region.forward, region.backward)
        if graph is not None
        for key in oracle.keys(
            o.value for o in (*graph.outputs, *region.forward.inputs) if not is_saved(o)
        )
    }
    return {
        (number, key)
        for number, region in enumerate(facts.regions)
        if region.forward.ops
        for key in oracle.keys(s.value for s in region.saved)
        if held[key] == 1 and key not in given
    }


def is_saved(item: Any) -> bool:
    return item.kind == "saved"


def draw_transfer(
    draw: st.DrawFn, facts: GraphFacts, oracle: Oracle, number: int, storage: StorageId
) -> Transfer:
    first = sum(len(region.forward.ops) for region in facts.regions[:number])
    forward, backward = facts.regions[number].forward, facts.regions[number].backward
    assert backward is not None
    uses = [
        first + place
        for place, op in enumerate(forward.ops)
        if storage in oracle.keys([*op.inputs, *op.outputs])
    ]
    release = draw(st.integers(uses[-1], first + len(forward.ops) - 1))
    start_of_backward = sum(len(region.forward.ops) for region in facts.regions) + sum(
        len(region.backward.ops) for region in facts.regions[number + 1 :] if region.backward
    )
    needs = [
        start_of_backward + place
        for place, op in enumerate(backward.ops)
        if storage in oracle.keys([*op.inputs, *op.outputs])
    ]
    reload_at = draw(st.integers(start_of_backward, needs[0])) if needs else None
    size = facts.storages[storage].size_bytes
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    return Transfer(
        region=number,
        storage=storage,
        start=start,
        stop=stop,
        transfer_bytes=draw(st.integers(1, stop - start)),
        offload_after=uses[-1],
        release_by=release,
        reload_at=reload_at,
        needed_by=needs[0] if needs else None,
        packed=draw(st.booleans()),
    )


@DRAWN
@given(facts_and_transfers())
def test_bytes_at_every_op_are_those_of_the_oracle(
    case: tuple[GraphFacts, list[Transfer]],
) -> None:
    facts, transfers = case
    assert timeline(facts).during == Oracle(facts).by_op()
    assert curve(facts, transfers) == Oracle(facts, transfers).by_op()


@DRAWN
@given(graph_facts())
def test_a_saved_storage_is_held_until_the_oracle_drops_it(facts: GraphFacts) -> None:
    oracle, found = Oracle(facts), timeline(facts)
    saved = {
        (number, key)
        for number, region in enumerate(facts.regions)
        for key in oracle.keys(s.value for s in region.saved)
        if any(key in frame.held for frame in oracle.frames)
    }
    assert found.last == {key: oracle.last_op(key[1]) for key in saved}
    assert found.resting_bytes == oracle.resting_bytes()


@DRAWN
@given(facts_and_transfers())
def test_the_parts_of_the_peak_sum_to_it(case: tuple[GraphFacts, list[Transfer]]) -> None:
    facts, transfers = case
    found = predict(facts, transfers)
    assert sum(found.parts.values()) == found.peak_bytes
    assert set(found.parts) == set(PARTS)
    assert min(found.parts.values()) >= 0
    assert found.reserved_bytes >= found.peak_bytes >= found.forward_end_bytes
    sizes = [item.count * item.size_bytes for item in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    for part in PARTS:
        # There can be more of a part than the largest of it, and never less.
        assert (
            sum(i.count * i.size_bytes for i in found.largest if i.part == part)
            <= (found.parts[part])
        )
    if facts.device == "cpu" and facts.op_count:
        assert found.peak_bytes == max(Oracle(facts, transfers).by_op())
        assert found.parts["rounding"] == found.parts["workspace"] == 0


# --- real graphs ----------------------------------------------------------------------------------


@cache
def sample_facts(name: str) -> GraphFacts:
    return trace(f"sample_graphs/{name}.py", {}, TraceOptions())


@pytest.mark.skipif(torch.version.cuda is None, reason="traces for cuda: needs a CUDA build")
@pytest.mark.parametrize(
    "name", ["checkpointed", "conv_net", "fused_qkv", "graph_break", "tied_weights", "tiny_gpt"]
)
@pytest.mark.parametrize("version", ["2.11.0", "2.14.1"])
def test_samples_take_what_the_oracle_counts_with_and_without_a_plan(
    name: str, version: str
) -> None:
    facts = msgspec.structs.replace(sample_facts(name), torch=version)
    transfers = make_plan(facts, min_bytes=0, budget=0).transfers
    oracle = Oracle(facts)
    resting = oracle.resting_bytes() - timeline(facts).resting_bytes
    assert resting <= 0  # Tensors of the model that no graph uses.
    assert timeline(facts).during == tuple(size - resting for size in oracle.by_op())
    moved = Oracle(facts, transfers)
    assert curve(facts, transfers) == tuple(size - resting for size in moved.by_op())
    # Blocks are reused, so that the allocator counts a little less or more than each in its own.
    found = predict(facts, transfers)
    assert found.peak_bytes == pytest.approx(max(moved.by_op()) - resting, rel=0.03)
    assert sum(found.parts.values()) == found.peak_bytes


WORKING = "tests/targets/working.py"


def measured_on_cpu(
    name: str, plan: Plan | None, accumulates: bool = False
) -> tuple[GraphFacts, int, int]:
    """Facts, peak and end of the forward of the second step of a replay."""
    torch.manual_seed(0)
    torch.compiler.reset()
    target = build_real(f"{WORKING}:{name}", {}, "cpu")
    gauge = CpuGauge()
    gauge.settle(target)
    with Replay(target, plan, device="cpu") as replay:
        for _ in range(2):
            for parameter in target.model.parameters():
                parameter.grad = parameter.grad if accumulates else None
            with gauge.watching():
                gauge.begin()
                loss = loss_of(replay.forward())
                gauge.forward_ended()
                loss.backward()
                reading = gauge.ended()
            del loss
        assert replay.facts is not None
        return replay.facts, reading.peak_allocated_bytes, reading.forward_end_bytes


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "autocast", "broadcast_bias", "shared_gradient", "frozen", "tied"),
        *("batch_norm_train", "conv_channels_last", "attention_bf16", "checkpointed"),
        *("custom_function", "embedding_cross_entropy", "idle_expert", "graph_break"),
        *("graph_break_in_loop", "returns_its_input", "index_and_scatter", "no_grad_part"),
    ],
)
def test_a_replay_on_the_cpu_takes_what_is_predicted(name: str) -> None:
    facts, peak_bytes, forward_end_bytes = measured_on_cpu(name, None)
    found = predict(facts, ())
    assert (found.peak_bytes, found.forward_end_bytes) == (peak_bytes, forward_end_bytes)
    plan = make_plan(facts, min_bytes=0, budget=0)
    if not plan.transfers:
        return
    facts, peak_bytes, forward_end_bytes = measured_on_cpu(name, plan)
    found = predict(facts, plan.transfers)
    assert (found.peak_bytes, found.forward_end_bytes) == (peak_bytes, forward_end_bytes)


@pytest.mark.parametrize("name", ["plain", "broadcast_bias", "tied", "graph_break"])
def test_gradients_of_earlier_steps_are_added_to(name: str) -> None:
    facts, peak_bytes, forward_end_bytes = measured_on_cpu(name, None, accumulates=True)
    found = predict(facts, (), Conditions(accumulate=True))
    assert (found.peak_bytes, found.forward_end_bytes) == (peak_bytes, forward_end_bytes)


# --- what is reserved -----------------------------------------------------------------------------


@DRAWN
@given(facts_and_transfers())
def test_what_is_predicted_to_be_reserved_is_within_its_range(
    case: tuple[GraphFacts, list[Transfer]],
) -> None:
    facts, transfers = case
    least, most = reserved_range(facts, transfers)
    assert least <= predict(facts, transfers).reserved_bytes <= most
    if facts.device == "cpu":
        assert least == most


def convolutions(channels: Sequence[int], kernel: int = 3) -> GraphFacts:
    """Convolutions, one after the other, of which each result is saved."""
    facts = FactsBuilder()
    region = facts.region()
    value = region.input("x", (8, channels[0], 64, 64))
    for before, after in pairwise(channels):
        weight = region.input("w", (after, before, kernel, kernel), kind="parameter")
        shape = (8, after, 64, 64)
        value = region.op("aten.convolution.default", [value, weight], shape)
        region.save(value)
    built = facts.build()
    forward = built.regions[0].forward
    constants = "%, %, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1"
    ops = tuple(msgspec.structs.replace(op, constants=constants) for op in forward.ops)
    forward = msgspec.structs.replace(forward, ops=ops)
    region_facts = msgspec.structs.replace(built.regions[0], forward=forward)
    return msgspec.structs.replace(built, regions=(region_facts,))


def test_where_a_library_chooses_the_range_is_wide_and_the_same_every_time() -> None:
    facts = convolutions((64, 128, 192, 96))
    least, most = reserved_range(facts, ())
    assert least < predict(facts, ()).reserved_bytes <= most
    assert reserved_range(facts, ()) == (least, most)


def test_where_nothing_is_chosen_and_no_block_is_like_another_the_range_is_one_number() -> None:
    facts = a_step()
    assert {*reserved_range(facts, ())} == {predict(facts, ()).reserved_bytes}


def test_a_reload_is_allocated_before_an_op_that_makes_its_last_output_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Recording(CachingAllocator):
        def allocate(self, size_bytes: int) -> Block:
            asked.append(size_bytes)
            return super().allocate(size_bytes)

    monkeypatch.setattr("offplan.memory.CachingAllocator", Recording)
    found = a_step()
    mask = ValueId(len(found.values))
    storage = StorageId(len(found.storages))
    backward = found.regions[0].backward
    assert backward is not None
    (op,) = backward.ops
    dropout = msgspec.structs.replace(
        op, target="aten.native_dropout.default", outputs=(*op.outputs, mask)
    )
    facts = msgspec.structs.replace(
        found,
        values=(*found.values, Value("tensor", storage, "bool", 1, (5 * MiB,), (1,))),
        storages=(*found.storages, Storage(5 * MiB, "cuda")),
        regions=(
            msgspec.structs.replace(
                found.regions[0], backward=msgspec.structs.replace(backward, ops=(dropout,))
            ),
        ),
    )
    saved = facts.values[facts.regions[0].saved[0].value].storage
    assert saved is not None
    transfer = Transfer(0, saved, 0, 16 * MiB, 16 * MiB, 0, 0, 1, 1)
    predict(facts, [transfer])
    output_bytes = facts.values[op.outputs[0]].logical_bytes
    assert asked[-3:] == [16 * MiB, 5 * MiB, output_bytes]


# --- conditions -----------------------------------------------------------------------------------


def a_step() -> GraphFacts:
    """A step with a trained matrix and vector, and a tensor that is not trained."""
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024,))
    y = region.op("aten.relu.default", [x], (4 * MiB,))
    region.save(y)
    model = (
        ModelTensor("parameter", ("w",), "float32", (1024, 2048), 8 * MiB, requires_grad=True),
        ModelTensor("parameter", ("b",), "float32", (2048,), 8192, requires_grad=True),
        ModelTensor("buffer", ("mean",), "float32", (2048,), 8192),
    )
    return msgspec.structs.replace(facts.build(), model=model)


OPTIMIZERS = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_keeps_the_state_that_torchs_keeps(optimizer: Any) -> None:
    facts = a_step()
    parameters = [torch.nn.Parameter(torch.zeros(t.shape)) for t in facts.model if t.requires_grad]
    state_bytes = 0
    if OPTIMIZERS[optimizer] is not None:
        real = OPTIMIZERS[optimizer](parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        real.step()
        state_bytes = sum(
            value.untyped_storage().nbytes()
            for state in real.state.values()
            for name, value in state.items()
            if name != "step" and value is not None
        )
    found = predict(facts, (), Conditions(optimizer=optimizer))
    assert found.parts["optimizer"] == state_bytes
    alone = timeline(facts).resting_bytes
    assert timeline(facts, Conditions(optimizer=optimizer)).resting_bytes == alone + state_bytes


def test_gradients_of_earlier_steps_rest() -> None:
    found = predict(a_step(), (), Conditions(accumulate=True))
    assert found.parts["gradients"] == 8 * MiB + 8192


def test_expandable_segments_reserve_what_is_allocated_in_steps_of_20_mib() -> None:
    facts = a_step()
    found = predict(facts, (), Conditions(expandable_segments=True))
    # 16 MiB of saved activation, 8 of the matrix: 40 MiB; and one small granule.
    assert found.reserved_bytes == 42 * MiB
    assert found.parts["rounding"] < MiB


def test_the_oracles_rounding_is_the_allocators() -> None:
    facts = a_step()
    for size in (0, 1, 512, 513, MiB, 10 * MiB - 1, 10 * MiB, 13 * MiB, 13 * MiB - 512, 25 * MiB):
        assert block(size, facts) == charged_bytes(size)
        expected = CachingAllocator()
        if size:
            expected.allocate(size)
        assert block(size, facts) == expected.allocated_bytes
