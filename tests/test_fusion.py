"""Tests of ``offplan.fusion``: what a compiler keeps in memory, against ops run one by one.

The graph of most tests: ``a = f(x)``, ``b = g(a)``, ``c = h(b)`` with h of a library, of which c is
saved and, in the backward, read by ``d = k(c, t)`` where t is the tangent.
"""

from __future__ import annotations

from math import ceil

import msgspec
import pytest

from offplan.budget import FLOOR, Aim, Outlooks, of_bytes
from offplan.costs import op_times_ms, profile_for
from offplan.errors import BudgetError
from offplan.fusion import BAND, KERNEL, as_run, fused, is_fused, kernel_said, landings
from offplan.graph import (
    Buffer,
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Kernel,
    Lowering,
    Op,
    Region,
    SavedValue,
    Storage,
    StorageId,
    TargetRef,
    Value,
    ValueId,
    digest,
)
from offplan.memory import Memory
from offplan.plan import Draft, check_plan, make_plan
from offplan.report.peak import Asked, Moved, predicted_blocks
from offplan.transfers import Transfer

MIB = 2**20
# Values, each on the storage of the same number.
X, A, B, C, T, D, E, LOSS = (ValueId(number) for number in range(8))


def value(number: int, size_bytes: int = MIB) -> Value:
    shape = () if size_bytes == 4 else (size_bytes // 4 // 256, 256)
    return Value("tensor", StorageId(number), "float32", 4, shape, (256, 1)[: len(shape)], 0)


def op(name: str, inputs: tuple[ValueId, ...], output: ValueId, target: str) -> Op:
    return Op(name, target, inputs, (output,))


def lowering(
    buffers: list[tuple[int, ValueId | None]], kernels: list[Kernel], outputs: list[int | None]
) -> Lowering:
    return Lowering(
        tuple(Buffer(size, value) for size, value in buffers), tuple(kernels), tuple(outputs)
    )


def a_step(**changes: object) -> GraphFacts:
    """Sizes: x, a, b, c, d and e 1 MiB each; the loss is the caller's scalar."""
    forward = Graph(
        (GraphInput(X, "input", "x"),),
        (
            op("f", (X,), A, "aten.add.Tensor"),
            op("g", (A,), B, "aten.relu.default"),
            op("h", (B,), C, "aten.mm.default"),
            op("loss", (C,), LOSS, "aten.sum.default"),
        ),
        (GraphOutput(LOSS, "output", "0"), GraphOutput(C, "saved", "saved 0")),
        lowering(
            [(0, X), (MIB, B), (MIB, C), (4, LOSS)],
            [
                Kernel(0, (0, 1), (0,), (1,)),
                Kernel(2, (2,), (1,), (2,), call="aten.mm.out"),
                Kernel(3, (3,), (2,), (3,)),
            ],
            [3, 2],
        ),
    )
    backward = Graph(
        (GraphInput(C, "saved", "saved 0"), GraphInput(T, "tangent", "t")),
        (
            op("k", (C, T), D, "aten.mul.Tensor"),
            op("l", (D,), E, "aten.mul.Tensor"),
        ),
        (GraphOutput(E, "gradient", "gradient of x"),),
        lowering([(0, C), (0, T), (MIB, E)], [Kernel(0, (0, 1), (0, 1), (2,))], [2]),
    )
    sizes = [4 if number in (T, LOSS) else MIB for number in range(8)]
    facts = GraphFacts(
        target=TargetRef("a.py"),
        torch="2.14.1",
        device="cpu",
        gpu="",
        attention="auto",
        compiler="inductor",
        partitioner="min-cut",
        model=(),
        storages=tuple(Storage(size, "cpu") for size in sizes),
        values=tuple(value(number, size) for number, size in enumerate(sizes)),
        regions=(Region(forward, backward, (SavedValue(C, C),)),),
    )
    return msgspec.structs.replace(facts, **changes)


def with_backward(facts: GraphFacts, found: Lowering) -> GraphFacts:
    (region,) = facts.regions
    assert region.backward is not None
    backward = msgspec.structs.replace(region.backward, lowering=found)
    return msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(region, backward=backward),)
    )


def with_lowering(**lowerings: Lowering | None) -> GraphFacts:
    facts = a_step()
    (region,) = facts.regions
    forward = msgspec.structs.replace(region.forward, **lowerings)
    return msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(region, forward=forward),)
    )


def bytes_at(facts: GraphFacts, transfers: tuple[Transfer, ...] = ()) -> tuple[int, ...]:
    """Bytes at each op, of what the step itself allocates, in MiB."""
    found = fused(facts, transfers, with_transfers=True)
    resting = MIB
    return tuple((size - resting) // MIB for size in Memory(found).curve(transfers))


def transfer(reload_at: int = 4, needed_by: int = 4) -> Transfer:
    return Transfer(
        region=0,
        storage=StorageId(C),
        start=0,
        stop=MIB,
        transfer_bytes=MIB,
        packed=False,
        offload_after=2,
        release_by=3,
        reload_at=reload_at,
        needed_by=needed_by,
    )


def test_a_value_inside_a_kernel_is_never_in_memory() -> None:
    # b; b still; b and c; c.  Then c and e, of which e is left: d never is.
    assert bytes_at(a_step()) == (1, 1, 2, 1, 2, 1)


def test_op_by_op_it_is() -> None:
    curve = Memory(a_step()).curve(())
    assert tuple((size - MIB) // MIB for size in curve) == (1, 2, 2, 1, 2, 2)


def test_without_a_lowering_facts_stay_as_they_are() -> None:
    facts = with_lowering(lowering=None)
    facts = msgspec.structs.replace(
        facts,
        regions=tuple(
            msgspec.structs.replace(
                region, backward=msgspec.structs.replace(region.backward, lowering=None)
            )
            for region in facts.regions
        ),
    )
    assert not is_fused(facts)
    assert fused(facts, with_transfers=True) is facts


def test_positions_and_the_digest_stay() -> None:
    facts = a_step()
    assert fused(facts, with_transfers=True).op_count == facts.op_count
    bare = with_lowering(lowering=None)
    assert digest(bare) == digest(facts)


def test_a_librarys_call_keeps_its_op_and_shapes() -> None:
    made = fused(a_step(), with_transfers=True)
    call = made.regions[0].forward.ops[2]
    assert call.target == "aten.mm.out"
    shapes = [made.values[v].shape for v in call.inputs if made.values[v].kind == "tensor"]
    assert shapes == [(1024, 256)]
    assert made.values[call.outputs[0]].storage == C


@pytest.mark.parametrize("named", [(1, 2), (2,)], ids=["with the product", "the sum alone"])
def test_a_call_for_several_ops_is_priced_as_the_product_it_is_named_after(
    named: tuple[int, ...],
) -> None:
    facts = a_step()
    (region,) = facts.regions
    ops = (
        region.forward.ops[0],
        msgspec.structs.replace(region.forward.ops[1], target="aten.mm.default", inputs=(X, A)),
        msgspec.structs.replace(region.forward.ops[2], target="aten.add.Tensor", inputs=(A, B)),
        region.forward.ops[3],
    )
    made = lowering(
        [(0, X), (MIB, A), (MIB, C), (4, LOSS)],
        [
            Kernel(0, (0,), (0,), (1,)),
            Kernel(2, named, (0, 1), (2,), call="aten.addmm.out"),
            Kernel(3, (3,), (2,), (3,)),
        ],
        [3, 2],
    )
    forward = msgspec.structs.replace(region.forward, ops=ops, lowering=made)
    region = msgspec.structs.replace(region, forward=forward)
    found = fused(msgspec.structs.replace(facts, regions=(region,)), with_transfers=True)
    call = found.regions[0].forward.ops[2]
    assert (call.name, call.target) == ("g", "aten.addmm.out")
    assert [found.values[v].kind for v in call.inputs].count("tensor") == 2


def test_a_kernel_is_named_by_its_ops_and_moves_bytes() -> None:
    made = fused(a_step(), with_transfers=True)
    kernel = made.regions[0].forward.ops[0]
    assert (kernel.target, kernel.name) == (KERNEL, "fused_add_relu")
    assert kernel.inputs == (X,)
    times = op_times_ms(
        msgspec.structs.replace(
            made,
            storages=tuple(Storage(s.size_bytes, "cuda") for s in made.storages),
            device="cuda",
        ),
        profile_for("h200"),
    )
    # What is part of a kernel takes no time, and the host issues nothing for it.
    assert times[0] > 0
    assert times[1] == 0


def test_a_kernel_says_what_it_does_not_read_and_whether_it_reduces() -> None:
    ways = ({}, {"unread_bytes": 12}, {"reduces": True}, {"unread_bytes": 12, "reduces": True})
    for said in ways:
        found = lowering([(0, C), (0, T), (MIB, E)], [Kernel(0, (0, 1), (0, 1), (2,), **said)], [2])
        made = fused(with_backward(a_step(), found), with_transfers=True)
        assert made.regions[0].backward is not None
        kernel = next(op for op in made.regions[0].backward.ops if op.target == KERNEL)
        assert kernel_said(kernel) == (said.get("unread_bytes", 0), said.get("reduces", False))


def test_kernels_that_stand_for_one_op_do_not_say_what_they_leave_unread() -> None:
    found = lowering(
        [(0, C), (0, T), (MIB, D), (MIB, D), (MIB, E)],
        [
            Kernel(0, (0,), (0, 1), (2,), unread_bytes=4, reduces=True),
            Kernel(0, (0,), (0, 1), (3,), unread_bytes=4),
            Kernel(0, (1,), (2, 3), (4,), unread_bytes=8),
        ],
        [4],
    )
    made = fused(with_backward(a_step(), found), with_transfers=True)
    assert made.regions[0].backward is not None
    kernels = [op for op in made.regions[0].backward.ops if op.target == KERNEL]
    # There are more kernels than ops: the last two are one.
    assert [kernel_said(kernel) for kernel in kernels] == [(4, True), (0, False)]


def test_a_kernel_that_allocates_nothing_takes_time() -> None:
    found = lowering(
        [(0, C), (0, T), (MIB, D)],
        [Kernel(0, (0,), (0, 1), (2,)), Kernel(1, (1,), (2,), (), writes=(2,))],
        [2],
    )
    made = fused(with_backward(a_step(), found), with_transfers=True)
    assert made.regions[0].backward is not None
    assert made.regions[0].backward.ops[1].mutates


def test_a_saved_storage_is_used_where_the_traced_op_uses_it() -> None:
    """Or a transfer would come after an op that the rewriting has to give the value to."""
    found = lowering([(0, C), (0, T), (MIB, E)], [Kernel(1, (0, 1), (0, 1), (2,))], [2])
    made = fused(with_backward(a_step(), found), with_transfers=True)
    backward = made.regions[0].backward
    assert backward is not None
    assert [made.values[v].storage for v in backward.ops[0].inputs] == [C]


def test_what_is_brought_back_can_be_written_over() -> None:
    found = Lowering(
        (Buffer(0, C), Buffer(0, T), Buffer(MIB, D, over=0), Buffer(MIB, E)),
        (Kernel(0, (0,), (0, 1), (2,)), Kernel(1, (1,), (2,), (3,))),
        (3,),
    )
    facts = with_backward(a_step(), found)
    # c as it was and d; d and e.
    assert bytes_at(facts)[4:] == (2, 2)
    # c is back, and d is in its place; d and e.
    assert bytes_at(facts, (transfer(),))[4:] == (1, 2)


def test_kernels_in_one_call_free_together_unless_a_transfer_stands_between() -> None:
    found = lowering(
        [(0, C), (0, T), (MIB, D), (MIB, E)],
        [Kernel(0, (0,), (0, 1), (2,)), Kernel(1, (1,), (2,), (3,), joined=True)],
        [3],
    )
    facts = with_backward(a_step(), found)
    assert bytes_at(facts)[4:] == (2, 3)
    assert bytes_at(facts, (transfer(needed_by=4),))[4:] == (2, 3)
    between = msgspec.structs.replace(transfer(), storage=StorageId(A), reload_at=5, needed_by=5)
    made = fused(facts, (between,))
    assert (Memory(made).curve(())[5] - MIB) // MIB == 2


def with_late_kernel(read: int = 2) -> GraphFacts:
    """The forward saves a as well, of which its own kernel is the last but one: no op needs it in
    memory.  ``read`` is the buffer that it reads: c, or 0 for x."""
    facts = a_step()
    (region,) = facts.regions
    forward = msgspec.structs.replace(
        region.forward,
        outputs=(*region.forward.outputs, GraphOutput(A, "saved", "saved 1")),
        lowering=lowering(
            [(0, X), (MIB, B), (MIB, C), (4, LOSS), (MIB, A)],
            [
                Kernel(1, (0, 1), (0,), (1,)),
                Kernel(2, (2,), (1,), (2,), call="aten.mm.out"),
                Kernel(3, (0,), (read,), (4,), early=0),
                Kernel(3, (3,), (2,), (3,)),
            ],
            [3, 2, 4],
        ),
    )
    assert region.backward is not None
    backward = msgspec.structs.replace(
        region.backward, inputs=(*region.backward.inputs, GraphInput(A, "saved", "saved 1"))
    )
    backward = msgspec.structs.replace(
        backward,
        lowering=lowering([(0, C), (0, T), (0, A), (MIB, E)], [Kernel(0, (0,), (0, 1), (3,))], [3]),
    )
    return msgspec.structs.replace(
        facts, regions=(Region(forward, backward, (SavedValue(C, C), SavedValue(A, A))),)
    )


def makers(facts: GraphFacts, storage: int) -> list[int]:
    ops = facts.regions[0].forward.ops
    return [
        place
        for place, op in enumerate(ops)
        if any(facts.values[value].storage == storage for value in op.outputs)
    ]


def test_a_kernel_runs_early_only_for_a_transfer_of_what_it_makes() -> None:
    facts = with_late_kernel(read=0)
    moved = msgspec.structs.replace(transfer(), storage=StorageId(A), offload_after=3)
    late, early = (as_run(facts, (found,)).facts for found in (transfer(), moved))
    assert [makers(late, storage) for storage in (B, C, A)] == [[0], [1], [2]]
    assert [makers(early, storage) for storage in (A, B, C)] == [[0], [1], [2]]


def test_what_a_kernel_reads_runs_before_it_however_early_it_is() -> None:
    moved = msgspec.structs.replace(transfer(), storage=StorageId(A), offload_after=3)
    made = as_run(with_late_kernel(), (moved,)).facts
    assert [makers(made, storage) for storage in (B, C, A)] == [[0], [1], [2]]


def test_what_a_late_kernel_reads_outlives_its_release() -> None:
    facts = with_late_kernel()
    released = msgspec.structs.replace(transfer(), offload_after=2, release_by=2)
    found = as_run(facts, (released,))
    sizes = Memory(found.facts).curve(found.transfers)
    # a and c, although c was to go.
    assert (sizes[3] - MIB) // MIB == 2


def test_before_it_is_known_what_moves_a_storage_is_used_until_the_later_position() -> None:
    made = fused(with_late_kernel(), with_transfers=True)
    ops = made.regions[0].forward.ops
    used = [
        place
        for place, op in enumerate(ops)
        if any(made.values[value].storage == C for value in op.inputs)
    ]
    assert used[-1] == 3


def test_a_reload_comes_before_the_kernels_whose_turn_it_is() -> None:
    """Both kernels run where l stands, so that what is reloaded before l is there for both."""
    found = lowering(
        [(0, C), (0, T), (MIB, D), (MIB, E)],
        [Kernel(1, (0,), (1,), (2,)), Kernel(1, (1,), (0, 2), (3,))],
        [3],
    )
    facts = with_backward(a_step(), found)
    ran = as_run(facts, (transfer(reload_at=5, needed_by=5),))
    assert [moved.reload_at for moved in ran.transfers] == [4]
    # c and d; c, d and e.
    curve = Memory(ran.facts).curve(ran.transfers)
    assert tuple((size - MIB) // MIB for size in curve[4:]) == (2, 3)


def test_where_a_reload_would_run_is_known_before_it_is_planned() -> None:
    found = lowering(
        [(0, C), (0, T), (MIB, D), (MIB, E)],
        [Kernel(1, (0,), (1,), (2,)), Kernel(1, (1,), (0, 2), (3,))],
        [3],
    )
    assert landings(with_backward(a_step(), found)) == [0, 1, 2, 3, 4, 4, 6]
    assert landings(op_by_op(a_step())) == [*range(7)]


def test_facts_that_run_op_by_op_have_their_transfers_as_planned() -> None:
    facts = op_by_op(a_step())
    assert as_run(facts, (transfer(),)) == (facts, (transfer(),))


def test_a_region_that_moves_nothing_is_compiled_alone() -> None:
    alone = lowering(
        [(0, X), (MIB, A), (MIB, B), (MIB, C), (4, LOSS)],
        [
            Kernel(0, (0,), (0,), (1,)),
            Kernel(1, (1,), (1,), (2,)),
            Kernel(2, (2,), (2,), (3,), call="aten.mm.out"),
            Kernel(3, (3,), (3,), (4,)),
        ],
        [4, 3],
    )
    facts = with_lowering(lowering_alone=alone)
    assert fused(facts).regions[0].forward.ops[1].name == "fused_relu"
    assert fused(facts, (transfer(),)).regions[0].forward.ops[1].name == "g"


def test_a_saved_copy_in_another_layout_is_what_is_held() -> None:
    """The compiler saves a copy of the input x, which rests in memory as well."""
    facts = a_step()
    (region,) = facts.regions
    forward = msgspec.structs.replace(
        region.forward,
        outputs=(GraphOutput(LOSS, "output", "0"), GraphOutput(X, "saved", "saved 0")),
        lowering=lowering(
            [(0, X), (2 * MIB, None), (4, LOSS)],
            [Kernel(0, (0,), (0,), (1,)), Kernel(3, (3,), (1,), (2,))],
            [2, 1],
        ),
    )
    assert region.backward is not None
    backward = msgspec.structs.replace(
        region.backward,
        inputs=(GraphInput(X, "saved", "saved 0"), GraphInput(T, "tangent", "t")),
        ops=(op("k", (X, T), D, "aten.mul.Tensor"), op("l", (D,), E, "aten.mul.Tensor")),
        lowering=lowering([(0, X), (0, T), (MIB, E)], [Kernel(0, (0, 1), (0, 1), (2,))], [2]),
    )
    facts = msgspec.structs.replace(
        facts, regions=(Region(forward, backward, (SavedValue(X, X),)),)
    )
    assert bytes_at(facts) == (2, 2, 2, 2, 3, 1)


def test_a_budget_leaves_the_band_free() -> None:
    facts = with_lowering(lowering_alone=a_step().regions[0].forward.lowering)
    draft = Draft(facts, "whole-storage", 0)
    outlooks = Outlooks(facts, draft.moves, Aim())
    peak = outlooks.no_plan.peak_bytes
    assert (
        outlooks.outlook_for(of_bytes(int(peak * (1 + BAND)) + 1)).predicted.plan.peak_bytes == peak
    )
    floor_bytes = outlooks.floor()[1].peak_bytes
    with pytest.raises(BudgetError, match="to spare"):
        outlooks.outlook_for(of_bytes(floor_bytes))
    least = outlooks.outlook_for(FLOOR)
    assert least.budget_bytes == ceil(floor_bytes * (1 + BAND))
    assert (
        outlooks.outlook_for(of_bytes(least.budget_bytes)).predicted.plan.peak_bytes <= floor_bytes
    )


def test_a_report_says_the_band_where_ops_are_fused() -> None:
    asked, moved = Asked(0, "0"), Moved(0, 0, 0)
    for facts, said in ((a_step(), True), (op_by_op(a_step()), False)):
        predicted = make_plan(facts, budget=0, min_bytes=0).predicted
        assert predicted.band_percent == (round(100 * BAND) if said else None)
        blocks = repr([*predicted_blocks(predicted, asked, moved)])
        assert (f"within {round(100 * BAND)}%" in blocks) == said


def test_a_plan_is_proved_against_what_ran_without_its_lowering() -> None:
    facts = a_step()
    plan = make_plan(facts, budget=0, min_bytes=0)
    check_plan(facts, plan)
    check_plan(op_by_op(facts), plan)


def op_by_op(facts: GraphFacts) -> GraphFacts:
    return msgspec.structs.replace(facts, regions=tuple(map(bare, facts.regions)))


def bare(region: Region) -> Region:
    assert region.backward is not None
    return Region(
        msgspec.structs.replace(region.forward, lowering=None),
        msgspec.structs.replace(region.backward, lowering=None),
        region.saved,
    )
