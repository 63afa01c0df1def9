"""What may run again, and the graphs that a choice makes: by hand, on samples, on drawn steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_steps import KINDS, Drawn, Layer, step, trained

from offplan import recompute
from offplan.errors import PlanError
from offplan.graph import (
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Op,
    Region,
    ValueId,
    digest,
)
from offplan.graph import _problems as problems_of
from offplan.recompute import Choice, applied, apply, chosen, copies, refusal

replace = msgspec.structs.replace
SAMPLES = Path("sample_graphs")


def names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]


def backward(facts: GraphFacts, number: int = 0) -> Graph:
    found = facts.regions[number].backward
    assert found is not None
    return found


def forward_names(facts: GraphFacts, number: int = 0) -> list[str]:
    return names(facts.regions[number].forward.ops)


def place(facts: GraphFacts, name: str, number: int = 0) -> int:
    return forward_names(facts, number).index(name)


def saved_names(facts: GraphFacts, number: int = 0) -> list[str]:
    """The ops, or inputs, that make what is saved."""
    region = facts.regions[number]
    makers = {item.value: item.name for item in region.forward.inputs}
    makers |= {value: op.name for op in region.forward.ops for value in op.outputs}
    return [makers[item.value] for item in region.saved]


def again(facts: GraphFacts, *wanted: str) -> GraphFacts:
    return apply(facts, [Choice(0, tuple(sorted(place(facts, name) for name in wanted)))])


# --- what a choice makes, by hand -----------------------------------------------------------------


def three_layers() -> GraphFacts:
    """``gelu_1``, ``mm_2``, ``gelu_3``, ``sum_4``: the gelus save what they read, mm saves both."""
    return step([Layer("gelu"), Layer("mm"), Layer("gelu")])


def test_what_is_saved_without_a_choice() -> None:
    facts = three_layers()
    assert forward_names(facts) == ["gelu_1", "mm_2", "gelu_3", "sum_4"]
    assert saved_names(facts) == ["x", "w1", "gelu_1", "mm_2"]
    assert chosen(facts) == (Choice(0, ()),)


def test_an_op_that_runs_again_stands_before_the_first_op_that_needs_it() -> None:
    facts = again(three_layers(), "mm_2")
    assert names(backward(facts).ops) == [
        "sum_4_backward_a",
        "mm_2",
        "gelu_3_backward_a",
        "t_5",
        "mm_2_backward_a",
        "t_6",
        "mm_2_backward_b",
        "gelu_1_backward_a",
    ]
    assert saved_names(facts) == ["x", "w1", "gelu_1"]
    assert chosen(facts) == (Choice(0, (1,)),)


def test_it_brings_what_it_needs_itself_in_the_order_of_the_forward() -> None:
    facts = again(three_layers(), "mm_2", "gelu_1")
    assert names(backward(facts).ops)[:4] == [
        "sum_4_backward_a", "gelu_1", "mm_2", "gelu_3_backward_a",
    ]  # fmt: skip
    assert saved_names(facts) == ["x", "w1"]


def test_what_only_an_op_that_runs_again_reads_is_saved() -> None:
    # relu saves its output only; computed again, it needs mm's.
    facts = step([Layer("gelu"), Layer("mm"), Layer("relu"), Layer("mm")])
    assert saved_names(facts) == ["x", "w1", "w2", "gelu_1", "relu_3"]
    assert saved_names(again(facts, "relu_3")) == ["x", "w1", "w2", "gelu_1", "mm_2"]


def test_an_op_that_nothing_needs_does_not_run_again() -> None:
    facts = three_layers()
    found = again(facts, "gelu_3", "mm_2")
    assert "gelu_3" not in names(backward(found).ops)
    assert chosen(found) == (Choice(0, (1,)),)


def test_forward_ops_that_nothing_needs_any_more_go() -> None:
    # The loss reads gelu's input, so that only the backward wants what gelu makes.
    facts = step([Layer("gelu"), Layer("mm"), Layer("gelu")])
    region = facts.regions[0]
    x, loss = region.forward.inputs[0].value, region.forward.ops[-1]
    ops = (*region.forward.ops[:-1], replace(loss, inputs=(x,)))
    facts = replace(facts, regions=(replace(region, forward=replace(region.forward, ops=ops)),))
    found = again(facts, "gelu_1", "mm_2")
    assert forward_names(found) == ["sum_4"]
    assert names(backward(found).ops)[1:3] == ["gelu_1", "mm_2"]


def test_an_output_of_several_can_be_all_that_is_needed() -> None:
    facts = step([Layer("gelu"), Layer("norm"), Layer("mm")])
    assert saved_names(facts) == ["x", "w1", "gelu_1", "norm_2", "norm_2", "norm_2"]
    found = again(facts, "norm_2")
    assert saved_names(found) == ["x", "w1", "gelu_1"]
    (copy,) = [op for op in backward(found).ops if op.name == "norm_2"]
    assert len(copy.outputs) == 3


def test_views_run_again_on_the_storage_that_is_saved() -> None:
    facts = step([Layer("gelu"), Layer("view"), Layer("mm")])
    assert saved_names(facts) == ["x", "w1", "view_2"]
    found = again(facts, "view_2")
    assert saved_names(found) == ["x", "w1", "gelu_1"]
    made = {op.name: op for op in backward(found).ops}["view_2"]
    storages = {found.values[value].storage for value in (*made.inputs, *made.outputs)}
    assert len(storages) == 1


def test_what_runs_again_is_an_allocation_of_its_own() -> None:
    found = again(three_layers(), "mm_2")
    in_forward = {
        found.values[v].storage for op in found.regions[0].forward.ops for v in op.outputs
    }
    (copy,) = [op for op in backward(found).ops if op.name == "mm_2"]
    assert found.values[copy.outputs[0]].storage not in in_forward


def test_one_region_is_rewritten_and_the_others_keep_what_they_compute() -> None:
    facts = step(*[[Layer("gelu"), Layer("mm"), Layer("gelu")]] * 3)
    found = apply(facts, [Choice(1, (1,))])
    assert [choice.ops for choice in chosen(found)] == [(), (1,), ()]
    for number in (0, 2):
        assert forward_names(found, number) == forward_names(facts, number)
        assert saved_names(found, number) == saved_names(facts, number)
    assert computed(found) == computed(facts)


def test_the_traced_choice_can_be_undone() -> None:
    base = again(three_layers(), "mm_2")
    found = apply(base, [Choice(0, ())])
    assert digest(found) == digest(three_layers())


def test_where_everything_comes_from_is_told() -> None:
    facts = three_layers()
    found = applied(facts, [Choice(0, (1,))])
    assert found.origins is not None
    (origin,) = found.origins
    assert origin.again == {1: 1}
    assert origin.forward == {n: n for n in range(4)}
    ops, before = backward(found.facts).ops, backward(facts).ops
    assert {before[old].name: ops[new].name for old, new in origin.own.items()} == {
        op.name: op.name for op in before
    }


# --- what must not run again ----------------------------------------------------------------------


def forward_of(*ops: Op, changed: Sequence[int] = (), kind: str = "buffer") -> GraphFacts:
    """One region: inputs x (value 0) and a buffer (value 1), each made value on its own storage."""
    facts = FactsBuilder()
    region = facts.region()
    region.input("x", (256, 1024))
    region.input("running_mean", (1024,), kind=kind)  # type: ignore[arg-type]
    most = max(value for op in ops for value in (*op.inputs, *op.outputs))
    while len(facts.values) <= most:
        facts.tensor((256, 1024))
    region.ops += ops
    for value in changed:
        region.outputs.append(GraphOutput(ValueId(value), "mutated", "running_mean"))
    return facts.build()


def op(target: str, inputs: Sequence[int], output: int, constants: str = "", **more: object) -> Op:
    return Op(
        name=f"op_{output}",
        target=target,
        inputs=tuple(map(ValueId, inputs)),
        outputs=(ValueId(output),),
        constants=constants,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "target",
    [
        "aten.native_dropout.default",
        "aten.dropout.default",
        "aten.bernoulli.p",
        "aten.rand_like.default",
        "aten.randn.default",
        "aten.randint.low",
        "aten.normal.float_float",
        "aten.uniform.default",
        "aten.multinomial.default",
        "aten._fused_dropout.default",
        "aten.rrelu_with_noise_functional.default",
        "prims.philox_rand.default",
        "prims.inductor_seed.default",
    ],
)
def test_ops_that_draw_random_numbers_do_not_run_again(target: str) -> None:
    facts = forward_of(op(target, (0,), 2))
    assert "random numbers" in (refusal(facts, 0, 0) or "")
    with pytest.raises(PlanError, match=rf"op_2 \({target}\) must not run again: .*random"):
        apply(facts, [Choice(0, (0,))])


FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


@pytest.mark.parametrize(
    ("target", "constants", "is_random"),
    [
        (FLASH, "", False),
        (FLASH, "%, %, %, 0.0, True", False),
        (FLASH, "%, %, %, 0.1, True", True),
        (FLASH, "%, %, %, dropout_p=0.0", False),
        (FLASH, "%, %, %, dropout_p=0.5, is_causal=True", True),
        (FLASH, "%, %, %, is_causal=True, scale=0.125", False),
        (EFFICIENT, "%, %, %, None, True, 0.0, True", False),
        (EFFICIENT, "%, %, %, None, True, 0.2, True", True),
        (EFFICIENT, "%, %, %, [1, 2], True, 0.2", True),
        ("aten._scaled_dot_product_cudnn_attention.default", "%, %, %, None, True, 0.1", True),
        ("aten._scaled_dot_product_fused_attention_overrideable.default",
         "%, %, %, None, 0.1", True),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "%, %, %, 0.1", True),
    ],
)  # fmt: skip
def test_attention_runs_again_only_without_dropout(
    target: str, constants: str, is_random: bool
) -> None:
    facts = forward_of(op(target, (0, 0, 0), 2, constants))
    assert ("random" in (refusal(facts, 0, 0) or "")) == is_random


def test_dropout_that_is_not_a_number_is_taken_for_dropout() -> None:
    facts = forward_of(op(FLASH, (0, 0, 0), 2, "%, %, %, %"))
    assert refusal(facts, 0, 0) is not None


@pytest.mark.parametrize(
    ("wrapped", "alone"),
    [
        ("native_dropout.default, %, 0.5, True", "%, 0.5, True"),
        # Torch says nothing of an op's arguments if all of them are values.
        ("_scaled_dot_product_flash_attention_for_cpu.default, %, %, %", ""),
    ],
)
def test_an_op_that_does_not_draw_again_has_the_arguments_of_one_that_never_did(
    wrapped: str, alone: str
) -> None:
    target = "higher_order.run_and_save_rng_state"
    (region,) = forward_of(op(target, (0, 0, 0), 3, wrapped)).regions
    state = region.forward.ops[0].outputs[0]
    once = recompute.Wrapped(0, 0, state, state).once(region)
    assert (once.target, once.constants) == (f"aten.{wrapped.partition(',')[0]}", alone)
    assert state not in once.outputs


def test_ops_that_write_do_not_run_again_nor_what_makes_or_reads_it() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (256, 1024))
    y = region.op("aten.gelu.default", [x], (256, 1024))
    seen = region.view(y, (256 * 1024,))
    region.op("aten.relu.default", [seen], (256 * 1024,))
    region.op("aten.add_.Tensor", [y], (256, 1024), mutates=[y])
    region.op("aten.relu.default", [x], (256, 1024))
    built = facts.build()
    found = [refusal(built, 0, number) for number in range(5)]
    assert found[0] == "what it makes is written to"
    assert found[1] == found[2] == "what it reads is written to"
    assert found[3] == "it writes to its input"
    assert found[4] is None


def test_what_reads_a_buffer_that_the_step_changes_does_not_run_again() -> None:
    norm = op("aten.native_batch_norm.default", (0, 1), 2)
    other = op("aten.gelu.default", (0,), 3)
    # The new running mean is a value of its own, of the buffer's shape.
    assert refusal(forward_of(norm, other), 0, 0) is None
    facts = forward_of(norm, other, changed=[1])
    assert refusal(facts, 0, 0) == "it reads a buffer or input that the step changes"
    assert refusal(facts, 0, 1) is None
    # A parameter is changed by the optimizer only, which runs when the backward has.
    assert refusal(forward_of(norm, other, changed=[1], kind="parameter"), 0, 0) is None


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("_c10d_functional.all_reduce.default", "collective"),
        ("_c10d_functional.wait_tensor.default", "collective"),
        ("c10d.allreduce_.default", "collective"),
        ("my_ops.scale.default", "not one of torch's own"),
        ("higher_order.triton_kernel_wrapper_functional", "not one of torch's own"),
    ],
)
def test_collectives_and_custom_ops_do_not_run_again(target: str, why: str) -> None:
    facts = forward_of(op(target, (0,), 2))
    assert why in (refusal(facts, 0, 0) or "")
    with pytest.raises(PlanError, match="op_2"):
        apply(facts, [Choice(0, (0,))])


def test_what_the_traced_backward_computes_again_is_not_refused() -> None:
    # As a checkpoint with its own random state does.
    facts = again(three_layers(), "mm_2")
    (region,) = facts.regions
    custom = {"mm_2": "my_ops.mm.default"}
    renamed = [
        replace(
            graph, ops=tuple(replace(o, target=custom.get(o.name, o.target)) for o in graph.ops)
        )
        for graph in (region.forward, backward(facts))
    ]
    facts = replace(facts, regions=(Region(*renamed, region.saved),))
    assert refusal(facts, 0, 1) is not None
    found = apply(facts, [Choice(0, (0, 1))])
    assert chosen(found) == (Choice(0, (0, 1)),)


def test_a_choice_beyond_the_graphs_is_an_error() -> None:
    facts = three_layers()
    with pytest.raises(PlanError, match="region 1, of 1"):
        apply(facts, [Choice(1, (0,))])
    with pytest.raises(PlanError, match="region -1"):
        apply(facts, [Choice(-1, (0,))])
    for number in (4, -1):
        with pytest.raises(PlanError, match=f"op {number} of region 0, which has 4"):
            apply(facts, [Choice(0, (number,))])


def test_a_choice_of_a_region_without_a_backward_is_an_error() -> None:
    facts = three_layers()
    (region,) = facts.regions
    bare = replace(facts, regions=(replace(region, backward=None, saved=()),))
    assert apply(bare, [Choice(0, ())]) is bare
    with pytest.raises(PlanError, match="no backward"):
        apply(bare, [Choice(0, (1,))])


def test_torch_knows_of_no_other_random_op() -> None:
    """Each that draws, as torch says, in the way that a trace writes its arguments down."""
    torch = pytest.importorskip("torch")
    seeded = 0
    names = {
        n.removeprefix("aten::").split(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("aten::")
    }
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            found = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded not in found.tags or "backward" in name:
                continue
            arguments = [argument.name for argument in found._schema.arguments]
            constants = ", ".join("0.5" if a == "dropout_p" else "%" for a in arguments)
            facts = forward_of(op(f"aten.{name}.{overload}", (0,), 2, constants))
            assert "random" in (refusal(facts, 0, 0) or ""), found
            seeded += 1
    assert seeded > 50


# --- samples --------------------------------------------------------------------------------------

SMALL = {"qwen3_14b": {"layers": "2", "batch": "1", "seq": "64"}}


@pytest.fixture(scope="module", params=sorted(path.stem for path in SAMPLES.glob("*.py")))
def sample(request: pytest.FixtureRequest) -> GraphFacts:
    from offplan.trace.capture import TraceOptions, trace  # only here: all else is without torch

    name = request.param
    if name == "qwen3_14b":
        pytest.importorskip("transformers")
    return trace(f"{SAMPLES / name}.py", SMALL.get(name, {}), TraceOptions(device="cpu"))


def test_a_choice_that_is_made_already_changes_nothing(sample: GraphFacts) -> None:
    assert apply(sample, chosen(sample)) is sample
    assert apply(sample, ()) is sample


def test_writing_a_sample_again_gives_the_same(sample: GraphFacts) -> None:
    choices = chosen(sample)
    for forced in (False, True):
        writer = recompute._Writer(sample)
        for region, choice in zip(sample.regions, choices, strict=True):
            made = recompute._kept(region)
            if forced and region.backward is not None:
                made = recompute._Repartition(region, frozenset(choice.ops)).graphs()
            writer.add(made)
        found = replace(
            sample,
            storages=tuple(writer.storages),
            values=tuple(writer.values),
            regions=tuple(writer.regions),
        )
        if forced:
            # Own ops that depend on no gradient stand where they are needed, not where torch puts
            # them by itself.
            assert what_is_there(found) == what_is_there(sample)
        else:
            assert digest(found) == digest(sample)
        assert computed(found) == computed(sample)


def what_is_there(facts: GraphFacts) -> list[object]:
    """The graphs, but for the order of backwards."""
    return [
        (
            [(op.target, op.constants, op.inputs, op.outputs) for op in region.forward.ops],
            [saved.value for saved in region.saved],
            sorted(
                (op.name, op.target, op.constants) for op in getattr(region.backward, "ops", ())
            ),
        )
        for region in facts.regions
    ]


def test_all_that_may_run_again_in_a_sample_gives_consistent_facts(sample: GraphFacts) -> None:
    for share in (1.0, 0.4):
        choices = random_choices(sample, Random(1), share)
        found = apply(sample, choices)
        check(sample, found, choices)
        assert computed(found) == computed(sample)


# --- drawn steps ----------------------------------------------------------------------------------


def random_choices(facts: GraphFacts, choice: Random, share: float) -> list[Choice]:
    """Ops that may run again, or do already, of every region with a backward."""
    made = []
    for number, region in enumerate(facts.regions):
        if region.backward is None:
            continue
        before = set(copies(region).values())
        allowed = [
            at
            for at in range(len(region.forward.ops))
            if at in before or refusal(facts, number, at) is None
        ]
        made.append(Choice(number, tuple(at for at in allowed if choice.random() < share)))
    return made


def check(base: GraphFacts, found: GraphFacts, choices: Sequence[Choice]) -> None:
    """What must hold of ``found``, which are ``base`` under ``choices``."""
    assert list(problems_of(found)) == []
    wanted = {choice.region: choice.ops for choice in choices}
    for number, (before, after) in enumerate(zip(base.regions, found.regions, strict=True)):
        check_order(after.forward)
        if after.backward is None or before.backward is None:
            assert after.backward is None
            continue
        check_order(after.backward)
        check_saved(found, after)
        allowed = {names(before.forward.ops)[at] for at in wanted.get(number, ())}
        # What else looks like a forward op is the backward's own: it runs in both, as traced.
        ran_again = {after.backward.ops[at].name for at in copies(after)}
        assert ran_again <= allowed
        check_order_of_own(before, after, allowed)
        check_needed(after)
    assert apply(found, chosen(found)) is found


def check_order(graph: Graph) -> None:
    """Every op reads what is there, and each value is made once."""
    there = {item.value for item in graph.inputs}
    assert len(there) == len(graph.inputs)
    for made in graph.ops:
        assert there.issuperset(made.inputs), made.name
        assert there.isdisjoint(made.outputs), made.name
        assert set(made.mutates) <= set(made.inputs)
        there |= set(made.outputs)
    assert there.issuperset(output.value for output in graph.outputs if output.value is not None)


def check_saved(facts: GraphFacts, region: Region) -> None:
    """Saved values are what the backward reads, once each, as the same tensors."""
    assert region.backward is not None
    sent = [output.value for output in region.forward.outputs if output.kind == "saved"]
    assert sent == [item.value for item in region.saved]
    assert len(set(sent)) == len(sent)
    received = {i.value for i in region.backward.inputs if i.kind == "saved"}
    assert received == {item.backward_value for item in region.saved}
    for item in region.saved:
        assert facts.values[item.value] == facts.values[item.backward_value]
    read = {value for op in region.backward.ops for value in op.inputs}
    read |= {output.value for output in region.backward.outputs if output.value is not None}
    assert received <= read


def check_order_of_own(before: Region, after: Region, allowed: set[str]) -> None:
    """Own ops stay, in their order; but for ones that come before any gradient arrives, or that
    only what ran again read."""
    assert before.backward is not None
    assert after.backward is not None
    again_before = copies(before)
    own = [op.name for at, op in enumerate(before.backward.ops) if at not in again_before]
    left = [name for name in names(after.backward.ops) if name not in allowed]
    late = [name for name in own if name in set(downstream(before.backward))]
    assert [name for name in left if name in set(late)] == late
    assert set(left) <= set(own)


def downstream(graph: Graph) -> Iterator[str]:
    """Ops that depend on a gradient."""
    late = {item.value for item in graph.inputs if item.kind == "tangent"}
    for made in graph.ops:
        if not late.isdisjoint(made.inputs):
            late |= set(made.outputs)
            yield made.name


def check_needed(region: Region) -> None:
    """An op that runs again is needed by the next op that depends on a gradient, or by the return;
    one that is in the forward only for others, by those."""
    assert region.backward is not None
    ops, late = region.backward.ops, set(downstream(region.backward))
    makers = {value: at for at, op in enumerate(ops) for value in op.outputs}
    for at in copies(region):
        following = next((n for n in range(at + 1, len(ops)) if ops[n].name in late), None)
        roots = [ops[following].inputs] if following is not None else []
        if following is None:
            roots = [tuple(o.value for o in region.backward.outputs if o.value is not None)]
        needed, left = set(), [value for root in roots for value in root]
        while left:
            maker = makers.get(left.pop())
            if maker is not None and maker not in needed:
                needed.add(maker)
                left += ops[maker].inputs
        assert at in needed, ops[at].name
    used = {output.value for output in region.forward.outputs}
    for made in reversed(region.forward.ops):
        namespace, _, rest = made.target.partition(".")
        if used.isdisjoint(made.outputs) and not made.mutates:
            assert namespace not in ("aten", "prims") or rest.startswith(recompute._RANDOM)
        used |= set(made.inputs)


class _Expressions:
    """Numbers for what values are computed from: the same exactly if they are computed alike."""

    def __init__(self, known: dict[object, int]) -> None:
        self.known = known

    def of(self, *parts: object) -> int:
        return self.known.setdefault(parts, len(self.known))


def computed(facts: GraphFacts, known: dict[object, int] | None = None) -> list[object]:
    """What each region returns, as expressions of what it is given.  Reading a storage reads all
    that was written to it before."""
    known = KNOWN if known is None else known
    found: list[object] = []
    for region in facts.regions:
        expressions = _Expressions(known)
        env: dict[ValueId, int] = {}
        written: dict[object, int] = {}
        run(facts, region.forward, env, written, expressions)
        found.append(
            [
                (output.name, read(facts, output.value, env, written, expressions))
                for output in region.forward.outputs
                if output.kind != "saved"
            ]
        )
        if region.backward is None:
            continue
        for item in region.saved:
            env[item.backward_value] = env[item.value]
            storage = facts.values[item.value].storage
            if storage in written:
                written[facts.values[item.backward_value].storage] = written[storage]
        run(facts, region.backward, env, written, expressions)
        found.append(
            [
                (output.name, read(facts, output.value, env, written, expressions))
                for output in region.backward.outputs
            ]
        )
    return found


KNOWN: dict[object, int] = {}


def read(
    facts: GraphFacts,
    value: ValueId | None,
    env: dict[ValueId, int],
    written: dict[object, int],
    expressions: _Expressions,
) -> int | None:
    if value is None:
        return None
    storage = facts.values[value].storage
    return expressions.of(env[value], written.get(storage) if storage is not None else None)


def run(
    facts: GraphFacts,
    graph: Graph,
    env: dict[ValueId, int],
    written: dict[object, int],
    expressions: _Expressions,
) -> None:
    item: GraphInput
    for item in graph.inputs:
        env.setdefault(item.value, expressions.of(item.kind, item.name))
    for made in graph.ops:
        given = tuple(read(facts, value, env, written, expressions) for value in made.inputs)
        what = expressions.of(made.target, made.constants, given)
        for number, value in enumerate(made.outputs):
            env[value] = expressions.of(what, number)
        for value in made.mutates:
            written[facts.values[value].storage] = what


@settings(DRAWN, max_examples=120)
@given(trained(), st.integers(0, 2**32), st.sampled_from((0.2, 0.5, 1.0)))
def test_any_choice_that_is_allowed_computes_the_same(
    drawn: Drawn, seed: int, share: float
) -> None:
    facts, choice = drawn.build(), Random(seed)
    assert list(problems_of(facts)) == []
    choices = random_choices(facts, choice, share)
    found = apply(facts, choices)
    check(facts, found, choices)
    assert computed(found) == computed(facts)
    # The same of graphs that compute something again already, up to undoing it.
    for others in (random_choices(found, choice, share), base_choice(facts, found)):
        twice = apply(found, others)
        check(found, twice, others)
        assert computed(twice) == computed(facts)


def base_choice(base: GraphFacts, found: GraphFacts) -> list[Choice]:
    """The choice of ``base`` in terms of ``found``."""
    made = []
    for number, (choice, region) in enumerate(zip(chosen(base), base.regions, strict=True)):
        wanted = {region.forward.ops[at].name for at in choice.ops}
        places = [at for at, n in enumerate(forward_names(found, number)) if n in wanted]
        made.append(Choice(number, tuple(places)))
    return made


@settings(DRAWN, max_examples=60)
@given(trained(), st.integers(0, 2**32))
def test_undoing_a_choice_gives_the_digest_of_before(drawn: Drawn, seed: int) -> None:
    facts = drawn.build()
    choices = random_choices(facts, Random(seed), 0.5)
    found = apply(facts, choices)
    if any(
        forward_names(found, number) != forward_names(facts, number)
        for number in range(len(facts.regions))
    ):
        # What went from the forward is the backward's own op now.
        return
    assert digest(apply(found, base_choice(facts, found))) == digest(facts)


@settings(DRAWN, max_examples=40)
@given(trained(), st.integers(0, 2**32))
def test_more_of_a_choice_never_saves_an_op_that_it_computes_again(drawn: Drawn, seed: int) -> None:
    facts = drawn.build()
    choices = random_choices(facts, Random(seed), 0.6)
    found = apply(facts, choices)
    for choice in choices:
        region = facts.regions[choice.region]
        computed_again = {region.forward.ops[at].name for at in choice.ops}
        assert computed_again.isdisjoint(saved_names(found, choice.region))


def test_drawn_steps_have_ops_of_every_kind_and_some_are_refused() -> None:
    facts = step([Layer(kind) for kind in KINDS], rows=512)
    assert list(problems_of(facts)) == []
    refused = {
        made.name: refusal(facts, 0, at)
        for at, made in enumerate(facts.regions[0].forward.ops)
        if refusal(facts, 0, at) is not None
    }
    assert {name.rpartition("_")[0] for name in refused} >= {"dropout", "write"}
    assert facts.values[facts.regions[0].forward.ops[0].outputs[0]].logical_bytes == 2 * MiB
