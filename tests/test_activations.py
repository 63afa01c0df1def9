"""What the backward needs, where it exists, and what it costs to compute again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB
from fused_steps import FUSED_OPS, fused_step
from hypothesis import given, settings
from joint_steps import moves_of
from trained_steps import PURE, Drawn, Layer, step, trained

from offplan.activations import Activation, activations
from offplan.budget import Aim, Outlooks
from offplan.fusion import fused
from offplan.graph import Compiler, GraphFacts, StorageId
from offplan.recompute import Choice, apply
from offplan.relower import relowered
from offplan.trace.capture import TraceOptions, trace
from offplan.windows import Candidate, spans_of

replace = msgspec.structs.replace
Movable = dict[tuple[int, StorageId], Candidate]


def found_in(
    facts: GraphFacts,
    op_ms: list[float] | None = None,
    movable: Movable | None = None,
    min_bytes: int = MiB,
) -> tuple[Activation, ...]:
    planned = fused(facts, with_transfers=True)
    times = [1.0] * facts.op_count if op_ms is None else op_ms
    return activations(facts, planned, times, movable or {}, min_bytes)


def named(facts: GraphFacts, found: tuple[Activation, ...]) -> dict[str, Activation]:
    """By the op of the forward that makes each."""
    makers: dict[tuple[int, StorageId], str] = {}
    for number, region in enumerate(facts.regions):
        for op in region.forward.ops:
            for value in op.outputs:
                storage = facts.values[value].storage
                if storage is not None:
                    makers.setdefault((number, storage), op.name)
    return {makers[item.region, item.storage]: item for item in found}


# --- op by op -------------------------------------------------------------------------------------


def chain() -> GraphFacts:
    """``gelu_1``, ``mm_2``, ``relu_3``, ``mm_4``, ``sum_5``: relu saves its output only, so that
    what the first mm makes is not saved."""
    return step([Layer("gelu"), Layer("mm"), Layer("relu"), Layer("mm")])


def test_activations_are_what_is_read_and_what_that_is_computed_from() -> None:
    facts = chain()
    by_name = named(facts, found_in(facts))
    assert list(by_name) == ["gelu_1", "mm_2", "relu_3"]
    assert [item.is_saved for item in by_name.values()] == [True, False, True]
    assert [item.size_bytes for item in by_name.values()] == [MiB] * 3
    assert [item.recipe for item in by_name.values()] == [(0,), (1,), (2,)]
    assert [item.inputs for item in by_name.values()] == [(), (0,), (1,)]
    assert [item.again_at for item in by_name.values()] == [None] * 3
    assert {item.refused for item in by_name.values()} == {""}


def test_where_an_activation_is_used_last_and_first_needed() -> None:
    facts = chain()
    by_name = named(facts, found_in(facts))
    assert [item.last_use for item in by_name.values()] == [1, 2, 3]
    backward = facts.regions[0].backward
    assert backward is not None
    names = [op.name for op in backward.ops]
    start = spans_of(facts)[0].backward
    received = {item.value: item.backward_value for item in facts.regions[0].saved}
    for name, item in by_name.items():
        value = {op.name: op for op in facts.regions[0].forward.ops}[name].outputs[0]
        readers = [n for n, op in enumerate(backward.ops) if received.get(value) in op.inputs]
        assert item.needed_by == (start + readers[0] if readers else None)
    # relu_3 is the second operand of mm_4: its transpose is taken just before.
    assert names[(by_name["relu_3"].needed_by or 0) - start].startswith("t_")
    assert by_name["mm_2"].needed_by is None


def test_the_least_size_leaves_small_ones_out() -> None:
    facts = step([Layer("gelu"), Layer("mm", units=2), Layer("gelu"), Layer("norm"), Layer("mm")])
    assert [item.size_bytes for item in found_in(facts)] == [MiB, 2 * MiB, 2 * MiB, 2 * MiB]
    assert [item.size_bytes for item in found_in(facts, min_bytes=2 * MiB)] == [2 * MiB] * 3
    # What the norm saves of each row is 1 KiB.
    small = {item.size_bytes for item in found_in(facts, min_bytes=1)}
    assert small == {1024, MiB, 2 * MiB}
    assert found_in(facts, min_bytes=3 * MiB) == ()


def test_a_gpu_hands_out_whole_blocks_and_the_host_does_not() -> None:
    for device, size_bytes in (("cuda", 4096), ("cpu", 4004)):
        facts = FactsBuilder(device=device)
        region = facts.region()
        x = region.input("x", (1,))
        region.save(region.op("aten.relu.default", [x], (1001,)))
        (item,) = found_in(facts.build(), min_bytes=1)
        assert item.size_bytes == size_bytes


def test_what_is_left_out_is_computed_in_the_recipe_of_what_reads_it() -> None:
    # Op by op small storages exist: what reads them has them saved, or given.
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024, 1024))
    scale = region.op("aten.mean.dim", [x], (1024,))
    region.save(region.op("aten.mul.Tensor", [x, scale], (1024, 1024)))
    (item,) = found_in(facts.build())
    assert item.recipe == (1,)
    assert item.inputs == ()


def test_a_recipe_has_the_views_of_its_storage_and_costs_its_ops() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024, 1024))
    y = region.op("aten.gelu.default", [x], (1024, 1024))
    region.save(region.view(y, (1024 * 1024,)))
    z = region.op("aten.mul.Tensor", [y, y], (1024, 1024))
    region.save(z)
    built = facts.build()
    made, read = found_in(built, [1.0, 0.25, 3.0, 0.0, 0.0])
    # The view is what is saved; a plan for the storage brings it back whole.
    assert made.recipe == (0, 1)
    assert (read.recipe, read.inputs) == ((2,), (0,))
    # Nothing but the backward wants them, so that they run once either way.
    assert (made.cost_ms, read.cost_ms) == (0, 0)
    output = replace_outputs(built, z)
    made, read = found_in(output, [1.0, 0.25, 3.0, 0.0, 0.0])
    assert (made.cost_ms, read.cost_ms) == (1.0, 3.0)


def replace_outputs(facts: GraphFacts, value: int) -> GraphFacts:
    """``facts`` that return ``value`` as well."""
    from offplan.graph import GraphOutput, ValueId

    (region,) = facts.regions
    outputs = (GraphOutput(ValueId(value), "output", "0"), *region.forward.outputs)
    forward = replace(region.forward, outputs=outputs)
    return replace(facts, regions=(replace(region, forward=forward),))


def test_several_outputs_of_an_op_have_one_recipe() -> None:
    facts = step([Layer("gelu"), Layer("norm"), Layer("mm")], rows=256)
    by_name = named(facts, found_in(facts, min_bytes=1))
    assert by_name["norm_2"].recipe == (1,)
    large = named(facts, found_in(facts))
    assert large["norm_2"].recipe == (1,)
    assert large["norm_2"].size_bytes == MiB


def test_graph_inputs_are_no_activations() -> None:
    facts = step([Layer("mm"), Layer("mul", 0, 0)])
    assert {item.recipe for item in found_in(facts)} == {(0,)}


def test_what_can_move_is_what_could_move_of_the_traced_step() -> None:
    facts = chain()
    assert not any(item.can_move for item in found_in(facts))
    by_name = named(facts, found_in(facts, movable=movable_of(facts)))
    assert [item.can_move for item in by_name.values()] == [True, False, True]
    assert [item.transfer_bytes for item in by_name.values()] == [MiB] * 3
    assert [item.lost_bytes for item in by_name.values()] == [0] * 3


def test_part_of_an_activation_crosses_the_link_and_the_rest_is_lost() -> None:
    facts = step([Layer("gelu"), Layer("split"), Layer("mul", 0, 0)], writes_loss=False)
    by_name = named(facts, found_in(facts, movable=movable_of(facts)))
    (item,) = by_name.values()
    # mul reads the first half of what gelu makes; gelu itself needs its input only.
    assert (item.size_bytes, item.transfer_bytes) == (MiB, MiB // 2)
    assert item.lost_bytes == MiB // 2
    assert item.needed_by is not None
    assert item.lost_through >= item.needed_by


def movable_of(facts: GraphFacts) -> Movable:
    candidates = Outlooks(facts, moves_of(facts), Aim()).planner.candidates
    return {(c.move.region, c.move.storage): c for c in candidates}


def test_what_must_not_run_again_says_why() -> None:
    facts = step([Layer("gelu"), Layer("dropout"), Layer("gelu"), Layer("mm")])
    by_name = named(facts, found_in(facts))
    assert by_name["dropout_2"].refused == "it draws random numbers"
    assert by_name["gelu_1"].refused == by_name["gelu_3"].refused == ""


def test_what_the_backward_computes_again_already() -> None:
    base = chain()
    facts = apply(base, [Choice(0, (1, 2))])
    by_name = named(facts, found_in(facts))
    assert list(by_name) == ["gelu_1", "mm_2", "relu_3"]
    backward = facts.regions[0].backward
    assert backward is not None
    start = spans_of(facts)[0].backward
    places = {op.name: start + at for at, op in enumerate(backward.ops)}
    assert by_name["relu_3"].again_at == places["relu_3"]
    assert by_name["mm_2"].again_at == places["mm_2"]
    assert by_name["gelu_1"].again_at is None
    assert [item.is_saved for item in by_name.values()] == [True, False, False]
    # That an op which runs again reads it is no need.
    t = min(at for name, at in places.items() if name.startswith("t_") and at > places["relu_3"])
    assert by_name["relu_3"].needed_by == t
    assert by_name["mm_2"].needed_by is None
    assert by_name["gelu_1"].needed_by is not None
    assert by_name["gelu_1"].needed_by > places["relu_3"]


def test_a_random_op_that_runs_again_as_traced_is_not_refused() -> None:
    base = step([Layer("gelu"), Layer("mm"), Layer("gelu")])
    facts = apply(base, [Choice(0, (1,))])
    (region,) = facts.regions
    assert region.backward is not None
    renamed = [
        replace(
            graph,
            ops=tuple(
                replace(op, target="aten.rand_like.default") if op.name == "mm_2" else op
                for op in graph.ops
            ),
        )
        for graph in (region.forward, region.backward)
    ]
    region = replace(region, forward=renamed[0], backward=renamed[1])
    by_name = named(facts, found_in(replace(facts, regions=(region,))))
    assert by_name["mm_2"].refused == ""


def test_what_only_the_return_of_a_backward_wants_is_needed_by_its_end() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024, 1024))
    region.save(region.op("aten.gelu.default", [x], (1024, 1024)))
    region.reads = [()]
    region.returned = (0,)
    built = facts.build()
    (item,) = found_in(built)
    assert item.needed_by == spans_of(built)[0].backward_end


def test_regions_follow_each_other_and_inputs_are_positions_among_all() -> None:
    facts = step(*[[Layer("gelu"), Layer("mm"), Layer("gelu")]] * 2)
    found = found_in(facts)
    assert [item.region for item in found] == [0] * (len(found) // 2) + [1] * (len(found) // 2)
    for place, item in enumerate(found):
        assert all(found[other].region == item.region for other in item.inputs)
        assert all(other < place for other in item.inputs)
    first = [item for item in found if item.region == 0]
    second = [item for item in found if item.region == 1]
    assert [item.recipe for item in first] == [item.recipe for item in second]


@settings(DRAWN, max_examples=60)
@given(trained(PURE))
def test_recipes_and_inputs_of_drawn_steps(drawn: Drawn) -> None:
    facts = drawn.build()
    found = found_in(facts)
    spans = spans_of(facts)
    for place, item in enumerate(found):
        ops = facts.regions[item.region].forward.ops
        span = spans[item.region]
        assert item.recipe
        assert item.size_bytes >= MiB
        assert span.forward <= item.last_use < span.forward_end
        assert item.needed_by is None or span.backward <= item.needed_by <= span.backward_end
        # What the recipe reads it makes, is given, is an activation of its inputs, or is small.
        made = {value for at in item.recipe for value in ops[at].outputs}
        given = {facts.values[i.value].storage for i in facts.regions[item.region].forward.inputs}
        inputs = {found[other].storage for other in item.inputs}
        for at in item.recipe:
            for value in ops[at].inputs:
                storage = facts.values[value].storage
                assert storage is not None
                is_small = facts.storages[storage].size_bytes < MiB
                assert value in made or storage in given | inputs or is_small
        assert item.storage in {facts.values[value].storage for value in made}
        assert all(other < place for other in item.inputs)
    saved = {
        (number, facts.values[item.value].storage)
        for number, region in enumerate(facts.regions)
        for item in region.saved
    }
    assert {(i.region, i.storage) for i in found if i.is_saved} <= saved


# --- as a compiler runs it ------------------------------------------------------------------------


def test_what_is_inside_a_kernel_does_not_exist() -> None:
    """``a`` is part of the kernel that makes ``b``; h of a library makes ``c`` of it."""
    facts = fused_step()
    found = found_in(facts)
    by_name = named(facts, found)
    assert list(by_name) == ["g", "s", "h", "p"]
    recipes = {name: [FUSED_OPS[at] for at in item.recipe] for name, item in by_name.items()}
    assert recipes == {"g": ["f", "g"], "s": ["s"], "h": ["h"], "p": ["p"]}
    assert [item.inputs for item in by_name.values()] == [(), (0,), (0,), (2,)]
    assert all(item.is_saved and not item.refused for item in found)
    bare = op_by_op(facts)
    by_name = named(bare, found_in(bare))
    # Op by op what f makes is there, and g is computed from it.
    assert list(by_name) == ["f", "g", "s", "h", "p"]
    assert [item.inputs for item in by_name.values()] == [(), (0,), (1,), (1,), (3,)]


def op_by_op(facts: GraphFacts) -> GraphFacts:
    return replace(
        facts,
        regions=tuple(
            replace(
                region,
                forward=replace(region.forward, lowering=None, lowering_alone=None),
                backward=None
                if region.backward is None
                else replace(region.backward, lowering=None, lowering_alone=None),
            )
            for region in facts.regions
        ),
    )


def test_a_kernel_costs_its_share_of_bytes_and_a_call_all_of_it() -> None:
    facts = fused_step()
    planned = fused(facts, with_transfers=True)
    times = [0.0] * facts.op_count
    made_by = {
        storage: at
        for at, op in enumerate(planned.regions[0].forward.ops)
        for value in op.outputs
        if (storage := planned.values[value].storage) is not None
    }
    by_name = named(facts, found_in(facts))
    for ms, name in ((3.0, "g"), (40.0, "h"), (500.0, "p")):
        times[made_by[by_name[name].storage]] = ms
    by_name = named(facts, found_in(facts, times))
    assert by_name["h"].cost_ms == 40.0
    # A kernel of the backward reads what p reads, and can make it too: what is left is the writing.
    assert by_name["p"].cost_ms == 250.0
    assert [by_name[name].alone_ms for name in "hp"] == [40.0, 500.0]
    # Their kernel reads x and makes b, s and m, of 4 KiB; for b alone it reads x and makes b.
    total = 3 * MiB + 4096
    assert by_name["g"].cost_ms == pytest.approx(3.0 * 2 * MiB / total)
    # Nothing but the backward wants s.
    assert by_name["s"].cost_ms == 0.0


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_view_that_is_only_saved_is_no_use(compiler: Compiler) -> None:
    """The partitioner takes those last: of queries, keys and values, of products."""
    spec = f"{Path(__file__).parent}/targets/working.py:attention_of_products"
    facts = trace(spec, {}, TraceOptions(device="cpu", compiler=compiler))
    (region,) = facts.regions
    found = found_in(facts, min_bytes=1)
    products = [at for at, op in enumerate(region.forward.ops) if "bmm" in op.target]
    late = [item for item in found if item.is_saved and item.last_view > item.last_use]
    assert len(late) >= 2
    for item in late:
        assert item.last_use <= products[-1] < item.last_view
    assert all(item.last_view >= item.last_use for item in found)


def test_a_fused_activation_is_used_and_needed_where_kernels_run() -> None:
    facts = fused_step()
    by_name = named(facts, found_in(facts))
    planned = fused(facts, with_transfers=True)
    start = spans_of(facts)[0].backward
    for name, item in by_name.items():
        uses = [
            at
            for at, op in enumerate(planned.regions[0].forward.ops)
            if item.storage in {planned.values[v].storage for v in (*op.inputs, *op.outputs)}
        ]
        assert item.last_use == uses[-1], name
    backward = facts.regions[0].backward
    assert backward is not None
    places = {op.name: start + at for at, op in enumerate(backward.ops)}
    assert {name: item.needed_by for name, item in by_name.items()} == {
        # The kernel of g_a and g_b runs where g_b stands.
        "g": places["h_b"], "s": places["g_b"], "h": places["p_a"], "p": places["q_b"],
    }  # fmt: skip


def test_what_a_fused_backward_makes_again_is_there_already_only_if_a_kernel_makes_it() -> None:
    merged = relowered(fused_step(), [Choice(0, (FUSED_OPS.index("s"),))])
    alone = relowered(fused_step(), [Choice(0, (FUSED_OPS.index("p"),))])
    # s is inside the kernel that reads it; d is made for a product to read.
    assert [item.again_at is not None for item in found_in(alone)] == [False, False, False, True]
    assert all(item.again_at is None for item in found_in(merged))
