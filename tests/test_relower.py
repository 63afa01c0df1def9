"""What a compiler is guessed to make of graphs under other choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random

import msgspec
import pytest
from fused_steps import FUSED_OPS, MIB, fused_step

from offplan.budget import Aim, Outlooks
from offplan.fusion import fused
from offplan.graph import Graph, GraphFacts, Kernel, Lowering, Region, digest
from offplan.graph import _problems as problems_of
from offplan.memory import Memory
from offplan.plan import Draft
from offplan.recompute import Choice, apply, chosen, refusal
from offplan.relower import relowered

replace = msgspec.structs.replace


def again(facts: GraphFacts, *names: str) -> GraphFacts:
    places = [op.name for op in facts.regions[0].forward.ops]
    return relowered(facts, [Choice(0, tuple(sorted(places.index(name) for name in names)))])


def lowering_of(graph: Graph | None) -> Lowering:
    assert graph is not None
    assert graph.lowering is not None
    return graph.lowering


def kernels(graph: Graph | None) -> list[list[str]]:
    """The ops of each kernel."""
    assert graph is not None
    return [[graph.ops[at].name for at in kernel.ops] for kernel in lowering_of(graph).kernels]


def kernel_of(graph: Graph | None, name: str) -> Kernel:
    assert graph is not None
    (found,) = [
        kernel
        for kernel in lowering_of(graph).kernels
        if name in {graph.ops[at].name for at in kernel.ops}
    ]
    return found


def bytes_made(graph: Graph | None) -> int:
    found = lowering_of(graph)
    return sum(found.buffers[n].size_bytes for kernel in found.kernels for n in kernel.makes)


def check(base: GraphFacts, found: GraphFacts, choices: Sequence[Choice]) -> None:
    """What must hold of ``found``, which are ``base`` under ``choices``."""
    plain = apply(base, choices)
    assert digest(found) == digest(plain)
    assert list(problems_of(found)) == []
    for before, after in zip(base.regions, found.regions, strict=True):
        check_graph(found, before.forward, after.forward, ())
        if after.backward is not None and before.backward is not None:
            check_graph(found, before.backward, after.backward, after.saved)
    assert chosen(found) == chosen(plain)


def check_graph(facts: GraphFacts, before: Graph, graph: Graph, saved: Sequence[object]) -> None:
    assert (graph.lowering is None) == (before.lowering is None)
    if graph.lowering is None:
        return
    found = graph.lowering
    storage_of = [value.storage for value in facts.values]
    given = {storage_of[item.value] for item in graph.inputs}
    there: set[int] = set()
    stood = -1
    for kernel in found.kernels:
        assert kernel.ops
        for number in (*kernel.reads, *kernel.writes):
            value = found.buffers[number].value
            is_given = value is not None and storage_of[value] in given
            assert number in there or is_given, kernel
        assert there.isdisjoint(kernel.makes)
        there |= set(kernel.makes)
        stood = max(stood, kernel.at)
    for number, output in zip(found.outputs, graph.outputs, strict=True):
        assert (number is None) == (output.value is None)
        if number is None or output.value is None:
            continue
        value = found.buffers[number].value
        assert number in there or (value is not None and storage_of[value] in given)
    assert len(set(found.outputs)) <= len(found.outputs)
    used = {n for kernel in found.kernels for n in (*kernel.reads, *kernel.writes)}
    used |= {number for number in found.outputs if number is not None}
    # Nothing is made for nobody.
    assert all(number in used for kernel in found.kernels for number in kernel.makes)


# --- by hand --------------------------------------------------------------------------------------


def test_the_choice_of_before_is_the_same_facts() -> None:
    facts = fused_step()
    assert relowered(facts, chosen(facts)) is facts
    assert relowered(facts, ()) is facts


def test_what_pointwise_kernels_read_is_computed_inside_them() -> None:
    found = again(fused_step(), "s")
    (region,) = found.regions
    assert kernels(region.backward)[-1] == ["s", "g_a", "g_b"]
    assert len(kernels(region.backward)) == 6
    assert bytes_made(region.backward) == bytes_made(fused_step().regions[0].backward)
    # b is what it is computed from, and read anyway; s is not saved, nor made in the forward.
    assert bytes_made(region.forward) == bytes_made(fused_step().regions[0].forward) - MIB
    reads = kernel_of(region.backward, "s").reads
    assert len(reads) == len(set(reads)) == 3


def test_what_a_call_reads_is_a_kernel_of_its_own() -> None:
    found = again(fused_step(), "p")
    (region,) = found.regions
    assert kernels(region.backward) == [
        ["q_a"], ["p"], ["q_b"], ["p_a"], ["h_a"], ["h_b"], ["g_a", "g_b"],
    ]  # fmt: skip
    made = kernel_of(region.backward, "p")
    assert not made.call
    assert [lowering_of(region.backward).buffers[n].size_bytes for n in made.makes] == [MIB]
    # It is still made in the forward, for q.
    assert kernels(region.forward) == kernels(fused_step().regions[0].forward)


def test_a_call_that_runs_again_is_a_call() -> None:
    found = again(fused_step(), "h")
    (region,) = found.regions
    assert kernels(region.backward)[:4] == [["q_a"], ["q_b"], ["h"], ["p_a"]]
    assert kernel_of(region.backward, "h").call == "aten.mm.out"


def test_kernels_that_run_again_for_each_other_stand_in_the_order_of_the_forward() -> None:
    found = again(fused_step(), "f", "g", "h", "p")
    (region,) = found.regions
    assert kernels(region.backward) == [
        ["q_a"], ["f", "g"], ["h"], ["p"], ["q_b"], ["p_a"], ["h_a"], ["h_b"], ["g_a", "g_b"],
    ]  # fmt: skip
    made = kernel_of(region.backward, "g")
    assert len(made.makes) == 1


def test_outputs_of_one_kernel_come_of_one_kernel_again() -> None:
    found = again(fused_step(), "f", "g", "mean")
    (region,) = found.regions
    made = kernel_of(region.backward, "g")
    buffers = lowering_of(region.backward).buffers
    assert [found.storages[found.values[buffers[n].value or 0].storage or 0].size_bytes
            for n in made.makes] == [MIB, 4096]  # fmt: skip


def test_what_is_inside_a_kernel_is_computed_with_what_needs_it() -> None:
    # a is in no buffer: b's kernel computes it, again or not; alone it is not wanted.
    facts = fused_step()
    assert kernels(again(facts, "f").regions[0].backward) == kernels(facts.regions[0].backward)
    assert kernels(again(facts, "f", "g").regions[0].backward)[4:6] == [["f", "g"], ["h_b"]]


def test_what_is_saved_now_is_made_by_the_kernel_that_it_is_in() -> None:
    # g alone runs again, from a, which must be saved for that.
    found = again(fused_step(), "g")
    (region,) = found.regions
    made = kernel_of(region.forward, "f")
    buffers = lowering_of(region.forward).buffers
    a = region.forward.ops[0].outputs[0]
    assert a in {buffers[n].value for n in made.makes}
    assert a in {item.value for item in region.saved}
    assert list(problems_of(found)) == []


def test_kernels_that_would_wait_for_each_other_are_taken_apart() -> None:
    """p_a reads e, which is computed again from d, which was made in one kernel with p_a."""
    facts = fused_step(crossed=True)
    (before,) = facts.regions
    assert kernels(before.backward)[:3] == [["q_a"], ["p", "p_a"], ["q_b"]]
    found = again(facts, "p", "q")
    (region,) = found.regions
    assert kernels(region.backward)[:4] == [["q_a"], ["p"], ["q"], ["p_a"]]
    check(facts, found, [Choice(0, (FUSED_OPS.index("p"), FUSED_OPS.index("q")))])


@pytest.mark.parametrize("writes", [False, True])
def test_a_kernel_that_cannot_be_taken_apart_waits_for_nothing(writes: bool) -> None:
    """The same, of a call: what it is guessed to use is given up, and the order is found."""
    facts = fused_step(crossed=True)
    (region,) = facts.regions
    lowering = lowering_of(region.backward)
    (place,) = (n for n, kernel in enumerate(lowering.kernels) if len(kernel.makes) > 1)
    kernel = lowering.kernels[place]
    *reads, e = kernel.reads
    called = replace(kernel, call="extern", reads=tuple(reads), writes=(e,))
    if not writes:
        called = replace(kernel, call="extern")
    kernels_now = (*lowering.kernels[:place], called, *lowering.kernels[place + 1 :])
    assert region.backward is not None
    backward = replace(region.backward, lowering=replace(lowering, kernels=kernels_now))
    found = again(replace(facts, regions=(replace(region, backward=backward),)), "p", "q")
    # What is only written to is not computed again for that.
    q = [] if writes else [["q"]]
    assert kernels(found.regions[0].backward) == [
        ["q_a"], ["p", "p_a"], *q, ["q_b"], ["h_a"], ["h_b"], ["g_a", "g_b"],
    ]  # fmt: skip


def test_what_a_choice_undoes_is_saved_again() -> None:
    facts = fused_step()
    found = again(facts, "p")
    undone = relowered(found, [Choice(0, ())])
    assert digest(undone) == digest(facts)
    assert kernels(undone.regions[0].backward) == kernels(facts.regions[0].backward)
    check(found, undone, [Choice(0, ())])


def test_a_forward_kernel_that_nothing_needs_goes() -> None:
    # Nothing but the backward wants m and s: with both made again, they are in no kernel.
    found = again(fused_step(), "mean", "s")
    (region,) = found.regions
    assert kernels(region.forward)[0] == ["f", "g"]
    assert bytes_made(region.forward) == bytes_made(fused_step().regions[0].forward) - MIB - 4096


def test_memory_of_a_choice_falls_by_what_is_not_saved() -> None:
    facts = fused_step()
    turn = len(facts.regions[0].forward.ops) - 1
    before = Memory(fused(facts, with_transfers=True)).curve(())[turn]
    for names, size_bytes in ((("s",), MIB), (("p",), MIB), (("s", "p"), 2 * MIB)):
        found = again(facts, *names)
        forward_count = len(found.regions[0].forward.ops)
        after = Memory(fused(found, with_transfers=True)).curve(())[forward_count - 1]
        assert before - after == size_bytes


CHOICES = [
    tuple(FUSED_OPS.index(name) for name in names)
    for count in range(1, 5)
    for names in combinations(FUSED_OPS[:7], count)
]


@pytest.mark.parametrize("ops", CHOICES, ids=lambda ops: "+".join(FUSED_OPS[at] for at in ops))
def test_every_choice_of_the_step_is_consistent(ops: tuple[int, ...]) -> None:
    facts = fused_step()
    choices = [Choice(0, ops)]
    found = relowered(facts, choices)
    check(facts, found, choices)
    # It can be predicted, and planned for.
    outlooks = Outlooks(found, Draft(found, "whole-storage", 0).moves, Aim())
    assert outlooks.floor()[1].peak_bytes <= outlooks.no_plan.peak_bytes


def test_facts_without_a_lowering_are_only_applied() -> None:
    facts = fused_step()
    (region,) = facts.regions
    bare = replace(facts, regions=(without(region),))
    choices = [Choice(0, (FUSED_OPS.index("p"),))]
    assert relowered(bare, choices) == apply(bare, choices)


def without(region: Region) -> Region:
    assert region.backward is not None
    return Region(
        replace(region.forward, lowering=None, lowering_alone=None),
        replace(region.backward, lowering=None, lowering_alone=None),
        region.saved,
    )


# --- a sample -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample() -> GraphFacts:
    pytest.importorskip("torch")
    from offplan.trace.capture import TraceOptions, trace  # only here: all else is without torch

    path = Path("sample_graphs/tiny_gpt.py")
    params = {"layers": "2", "batch": "2", "seq": "64", "width": "96"}
    return trace(str(path), params, TraceOptions(device="cpu", compiler="inductor"))


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_choices_of_a_sample_are_consistent(sample: GraphFacts, seed: int, share: float) -> None:
    choice = Random(seed)
    forward = sample.regions[0].forward
    assert forward.lowering is not None
    before = set(chosen(sample)[0].ops)
    allowed = [
        at for at in range(len(forward.ops)) if at in before or refusal(sample, 0, at) is None
    ]
    choices = [Choice(0, tuple(at for at in allowed if choice.random() < share))]
    found = relowered(sample, choices)
    check(sample, found, choices)
    fused(found, with_transfers=True)
