"""Choices of what the backward computes again, as torch partitions for them.

The graphs are those that ``recompute.apply`` foresees, and a replay of them changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from slices import TIMES, examples
from test_replay_property import OPS, Program
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_loops import Net, assert_same, batch, plain_steps, run_loop, small_backend

from offplan.errors import PlanError
from offplan.graph import GraphFacts, Op, Region, digest
from offplan.plan import ACTIONS, Plan, check_plan, make_plan
from offplan.recompute import Choice, Refusals, apply, chosen
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.target import Target
from offplan.trace._torch import reset_dynamo
from offplan.trace.capture import TracedStep, TraceOptions, trace, traced, traced_target

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sorted(path.stem for path in (ROOT / "sample_graphs").glob("*.py"))
TARGETS = ROOT / "tests" / "targets" / "working.py"
MODELS = ROOT / "tests" / "inductor_models.py"
SMALL = {"qwen3_14b": {"layers": "1"}, "tiny_gpt": {"layers": "1"}}

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a CUDA build of torch"
)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda_build)]


@cache
def step_of(spec: str, device: str, *options: str) -> TracedStep:
    """A traced sample, or another target; ``options`` are its partitioner and compiler."""
    path = f"{ROOT / 'sample_graphs' / spec}.py" if spec in SAMPLES else spec
    return traced(path, SMALL.get(spec, {}), TraceOptions(device, None, None, *options))  # type: ignore[arg-type]


# --- choices --------------------------------------------------------------------------------------

Picked = Callable[[Op], bool]


def choices_of(facts: GraphFacts, is_picked: Picked) -> tuple[Choice, ...]:
    """Of the ops that may run again those that are picked, in every region with a backward; what a
    user checkpoints may be picked or not."""
    again = chosen(facts)
    found = []
    for number, region in enumerate(facts.regions):
        if region.backward is None:
            continue
        refusals = Refusals(facts, number)
        ops = tuple(
            place
            for place, op in enumerate(region.forward.ops)
            if (place in again[number].ops or refusals(place) is None) and is_picked(op)
        )
        found.append(Choice(number, ops))
    return tuple(found)


def drawn_choices(facts: GraphFacts, seed: int, share: float) -> tuple[Choice, ...]:
    """Runs of one graph pick the same: each op is drawn by its name."""
    return choices_of(facts, lambda op: Random(f"{seed} {op.name} {op.target}").random() < share)


def is_cheap(op: Op) -> bool:
    """Pointwise ops, and those that only look at their input."""
    parts = op.target.split(".")
    return op.declares_alias or parts[1] in {
        *("add", "sub", "mul", "div", "relu", "gelu", "silu", "sigmoid", "tanh", "pow", "rsqrt"),
        *("exp", "neg", "where", "le", "_to_copy", "native_layer_norm", "convert_element_type"),
    }


CHOICES: dict[str, Callable[[GraphFacts], tuple[Choice, ...]]] = {
    "as torch does": chosen,
    "cheap ops": lambda facts: choices_of(facts, is_cheap),
    "all": lambda facts: choices_of(facts, lambda op: True),
    "nothing": lambda facts: choices_of(facts, lambda op: False),
    "few": lambda facts: drawn_choices(facts, 1, 0.1),
    "some": lambda facts: drawn_choices(facts, 2, 0.3),
    "many": lambda facts: drawn_choices(facts, 3, 0.6),
    "most": lambda facts: drawn_choices(facts, 4, 0.9),
}


def distinct(facts: GraphFacts, names: Sequence[str] = ()) -> list[tuple[Choice, ...]]:
    """What the ``CHOICES``, or those named, come to, each once: of few ops several are alike."""
    return [*dict.fromkeys(CHOICES[name](facts) for name in names or CHOICES)]


def names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]


def difference(one: Region, other: Region) -> str:
    """Where two regions first differ, for a message."""
    pairs = [(one.forward, other.forward), (one.backward, other.backward)]
    for part, (a, b) in zip(("forward", "backward"), pairs, strict=True):
        if a is None or b is None:
            continue
        for place, (x, y) in enumerate(zip(a.ops, b.ops, strict=False)):
            if (x.target, x.inputs, x.outputs) != (y.target, y.inputs, y.outputs):
                return f"{part} {place}: {x} is not {y}"
    return f"saved: {one.saved} is not {other.saved}"


def assert_foreseen(step: TracedStep, choices: tuple[Choice, ...]) -> GraphFacts:
    """The trace under ``choices`` has the graphs that ``apply`` makes; returns it."""
    found, foreseen = step.under(choices), apply(step.facts, choices)
    for one, other in zip(found.regions, foreseen.regions, strict=True):
        assert names(one.forward.ops) == names(other.forward.ops)
        if one.backward and other.backward:
            assert names(one.backward.ops) == names(other.backward.ops)
        assert len(one.saved) == len(other.saved)
    assert digest(found) == digest(foreseen), [
        difference(*pair) for pair in zip(found.regions, foreseen.regions, strict=True)
    ]
    return found


# --- the graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        *(pytest.param(spec, "cuda", marks=needs_cuda_build) for spec in SAMPLES),
        # Where the device makes a difference to what runs again: dropout, convolutions, attention.
        *((spec, "cpu") for spec in ("checkpointed", "conv_net", "tiny_gpt")),
    ],
)
def test_a_choice_makes_the_graphs_that_apply_foresees(spec, device):
    step = step_of(spec, device)
    for choices in distinct(step.facts):
        assert_foreseen(step, choices)


@needs_cuda_build
@pytest.mark.parametrize(
    "spec", ["checkpointed", "conv_net", "fused_qkv", "graph_break", "tiny_gpt"]
)
def test_a_choice_does_so_where_the_default_partitioner_made_the_base(spec):
    step = step_of(spec, "cuda", "default")
    for choices in distinct(step.facts):
        assert_foreseen(step, choices)


@pytest.mark.parametrize(
    "name",
    [
        *("in_place", "dropout", "layer_norm_softmax", "tied", "batch_norm_train"),
        *("multi_head_attention", "attention_bf16", "checkpointed", "checkpointed_dropout"),
        *("checkpointed_noise",),
        *("updated_buffer", "custom_function", "custom_op", "multi_output", "idle_expert"),
        *("graph_break_in_loop", "index_and_scatter", "constants_on_the_device", "no_grad_part"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_choice_does_so_for_what_models_do(name, device):
    step = step_of(f"{TARGETS}:{name}", device)
    for choices in distinct(step.facts):
        assert_foreseen(step, choices)


# Inductor takes seconds for each choice of the largest model: three here, and all of the others.
LARGEST = {"tiny_gpt": ("cheap ops", "nothing", "some")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "spec", ["graph_break", "tiny_gpt", f"{MODELS}:checkpointed", f"{MODELS}:views"]
)
def test_a_choice_does_so_for_what_inductor_lowers(spec, device):
    step = step_of(spec, device, "min-cut", "inductor")
    names = LARGEST.get(spec, ()) if TIMES == 1 else ()
    for choices in distinct(step.facts, names):
        assert_foreseen(step, choices)


def test_without_a_choice_or_with_torchs_own_nothing_is_partitioned_again():
    step = step_of("tiny_gpt", "cpu")
    assert step.under(()) is step.facts
    assert step.under(chosen(step.facts)) is step.facts


def test_the_base_stays_as_it_is_when_it_was_partitioned_again():
    step = step_of("checkpointed", "cpu")
    before = digest(step.facts)
    for name in ("all", "nothing", "some"):
        step.under(CHOICES[name](step.facts))
    spec = str(ROOT / "sample_graphs" / "checkpointed.py")
    assert digest(trace(spec, {}, TraceOptions("cpu"))) == before
    first = digest(step.under(CHOICES["some"](step.facts)))
    assert (
        digest(trace(spec, {}, TraceOptions("cpu"), choices=CHOICES["some"](step.facts))) == first
    )


def test_what_is_chosen_runs_again_and_nothing_else_of_the_forward():
    step = step_of("tiny_gpt", "cpu")
    for name in ("cheap ops", "some", "nothing"):
        choices = CHOICES[name](step.facts)
        for choice, region in zip(choices, step.under(choices).regions, strict=True):
            wanted = {step.facts.regions[choice.region].forward.ops[p].name for p in choice.ops}
            assert region.backward is not None
            again = {*names(region.forward.ops)} & {*names(region.backward.ops)}
            assert again <= wanted


@pytest.mark.parametrize("device", DEVICES)
def test_random_ops_that_a_user_has_run_again_do_so_only_where_they_are_needed(device):
    """Of the three, two make masks, which are saved here; then torch does not wrap them."""
    step = step_of(f"{TARGETS}:checkpointed_noise", device)
    before, found = wrapped_in(step.facts), wrapped_in(apply(step.facts, (Choice(0, ()),)))
    assert len(before) == 3
    assert before[0].endswith("_state")
    assert before[0] == found[0]
    assert len(found) == 1
    assert_foreseen(step, (Choice(0, ()),))


def wrapped_in(facts: GraphFacts) -> list[str]:
    """The names of wrapped random ops in the only forward."""
    (region,) = facts.regions
    return [op.name for op in region.forward.ops if op.target.startswith("higher_order.")]


def test_a_view_that_is_not_chosen_is_saved_and_not_made_again():
    """The partitioner by itself makes views again whatever they are tagged."""
    step = step_of("fused_qkv", "cpu")
    nothing = step.under(CHOICES["nothing"](step.facts))
    (region,) = nothing.regions
    assert region.backward is not None
    assert {*names(region.forward.ops)}.isdisjoint(names(region.backward.ops))


def test_inductor_lowers_what_was_partitioned_again():
    step = step_of("tiny_gpt", "cpu", "min-cut", "inductor")
    (region,) = step.under(CHOICES["nothing"](step.facts)).regions
    (base,) = step.facts.regions
    assert region.backward is not None
    assert base.backward is not None
    assert region.backward.lowering is not None
    assert region.forward.lowering is not None
    assert len(region.backward.ops) < len(base.backward.ops)
    assert region.backward.lowering != base.backward.lowering
    kernels = region.backward.lowering.kernels
    assert max(op for kernel in kernels for op in kernel.ops) < len(region.backward.ops)


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        ("conv_net", "cpu"),
        pytest.param(f"{MODELS}:dropout", "cuda", marks=needs_cuda_build),
        pytest.param(f"{MODELS}:checkpointed", "cuda", marks=needs_cuda_build),
    ],
)
def test_lowerings_are_read_where_a_kernel_writes_what_it_keeps_over_what_is_there(spec, device):
    """What runs again is used by one kernel only, often over the last use of another buffer."""
    step = step_of(spec, device, "min-cut", "inductor")
    (region,) = step.under(CHOICES["all"](step.facts)).regions
    for graph in (region.forward, region.backward):
        assert graph is not None
        for found in (graph.lowering, graph.lowering_alone):
            assert found is not None
            made = [number for kernel in found.kernels for number in kernel.makes]
            assert len(made) == len(set(made))
            known = set(range(len(found.buffers))) - {*made}
            for kernel in found.kernels:
                known |= {*kernel.makes}
                assert known >= {*kernel.reads, *kernel.writes}
            assert known >= {number for number in found.outputs if number is not None}


# --- what is refused ------------------------------------------------------------------------------


def place_of(facts: GraphFacts, target: str, region: int = 0) -> int:
    ops = facts.regions[region].forward.ops
    return next(place for place, op in enumerate(ops) if op.target.startswith(target))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("dropout", "aten.native_dropout"),
        ("custom_op", "offplan_tests.scaled"),
        ("batch_norm_train", "aten._native_batch_norm_legit_functional"),
    ],
)
def test_apply_refuses_what_must_not_run_twice(name, target):
    facts = step_of(f"{TARGETS}:{name}", "cpu").facts
    with pytest.raises(PlanError, match="must not run again"):
        apply(facts, [Choice(0, (place_of(facts, target),))])


def test_numbers_are_not_drawn_again_whoever_asks_for_it():
    step = step_of(f"{TARGETS}:dropout", "cpu")
    place = place_of(step.facts, "aten.native_dropout")
    with pytest.raises(PlanError, match=r"native_dropout.*must not run again"):
        step.under([Choice(0, (place,))])


def test_a_choice_for_other_graphs_is_refused():
    step = step_of("saved_view", "cpu")
    with pytest.raises(PlanError, match="names region 1, of 1"):
        step.under([Choice(1, ())])
    with pytest.raises(PlanError, match="names op 1000 of region 0, which has"):
        step.under([Choice(0, (1000,))])


def test_runs_of_one_graph_have_the_same_choice_or_none():
    """Of three layers with a break inside, the second and third run the same two graphs."""
    step = step_of(f"{TARGETS}:graph_break_in_loop", "cpu")
    assert len(step.facts.regions) == 6
    everything = CHOICES["all"](step.facts)
    with pytest.raises(PlanError, match="regions 2 and 4 are runs of one graph"):
        step.under([choice for choice in everything if choice.region != 4])
    assert digest(step.under(everything)) != digest(step.facts)


# --- the same bits --------------------------------------------------------------------------------


def plan_under(base: GraphFacts, choices: tuple[Choice, ...], *, moves: bool) -> Plan:
    """A plan with ``choices``, and with everything or nothing moved."""
    facts = apply(base, choices)
    plan = make_plan(facts, budget=0 if moves else None, min_bytes=1)
    plan = msgspec.structs.replace(plan, choices=choices, base_digest=digest(base), actions=ACTIONS)
    check_plan(facts, plan)
    return plan


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bits_of(target: Target, plan: Plan | None) -> tuple[list[torch.Tensor], GraphFacts]:
    """Losses, gradients, buffers and the state of the generator, of two steps; and the facts."""
    inputs = [leaf for leaf in target.args if isinstance(leaf, torch.Tensor)]
    with Replay(target, plan, device="cpu") as replay:
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            loss = loss_of(replay.forward())
            loss.backward(retain_graph=True)
            loss.backward()
            found += [_bits(loss), torch.get_rng_state()]
        facts = replay.facts
    assert facts is not None
    tensors = [*target.model.parameters(), *inputs]
    found += [_bits(tensor.grad) for tensor in tensors if tensor.grad is not None]
    return found + [_bits(buffer) for buffer in target.model.buffers()], facts


def assert_same_bits(build: Callable[[], Target], choices: Any, *, moves: bool) -> None:
    """A replay under ``choices``, a function of the facts, is one without a plan bit by bit."""
    expected, base = bits_of(build(), None)
    plan = plan_under(base, choices(base), moves=moves)
    found, facts = bits_of(build(), plan)
    assert digest(facts) == plan.digest
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)


class Checkpointed(nn.Module):
    """Blocks that the user checkpoints, each with dropout, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(layer(x).relu(), 0.3).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return self.block(self.layers[2], x).square().mean()


def checkpointed() -> Target:
    torch.manual_seed(0)
    return Target(Checkpointed(), (torch.randn(8, 16),))


def built(name: str) -> Target:
    torch.manual_seed(0)
    return build_real(f"{TARGETS}:{name}", {}, "cpu")


@pytest.mark.parametrize("moves", [False, True], ids=["kept", "moved"])
@pytest.mark.parametrize("choice", ["cheap ops", "all", "nothing", "some"])
def test_checkpoints_with_dropout_may_be_kept_or_not(choice, moves):
    assert_same_bits(checkpointed, CHOICES[choice], moves=moves)


@pytest.mark.parametrize("choice", ["all", "nothing", "some"])
def test_the_same_numbers_are_drawn_whether_they_are_drawn_again_or_not(choice):
    assert_same_bits(lambda: built("checkpointed_noise"), CHOICES[choice], moves=True)


@pytest.mark.parametrize(
    "name",
    [
        *("in_place", "dropout", "layer_norm_softmax", "tied", "batch_norm_train"),
        *("updated_buffer", "custom_function", "custom_op", "multi_output", "graph_break_in_loop"),
        *("multi_head_attention", "index_and_scatter"),
    ],
)
def test_all_that_may_run_again_gives_the_same_bits(name):
    assert_same_bits(lambda: built(name), CHOICES["all"], moves=True)


def program(steps: list[tuple[str, int]]) -> Target:
    torch.manual_seed(0)
    return Target(Program(steps), (torch.randn(8, 12, requires_grad=True),))


# Two ops need more elements than a program may leave them.
drawn_programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPS.keys() - {"strided", "unfold"})), st.integers(0, 30)),
    min_size=6,
    max_size=12,
)


@settings(
    max_examples=examples(8),
    deadline=None,
    derandomize=True,
    database=None,
    # Each example compiles twice: shrinking one would take longer than reading it.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=drawn_programs, seed=st.integers(0, 1000), share=st.sampled_from([0.2, 0.5, 0.8, 1.0]))
def test_a_random_program_under_a_random_choice_gives_the_same_bits(steps, seed, share):
    assert_same_bits(
        lambda: program(steps), lambda facts: drawn_choices(facts, seed, share), moves=True
    )


def test_every_op_at_once_gives_the_same_bits():
    assert_same_bits(lambda: program([(name, 0) for name in OPS]), CHOICES["all"], moves=True)


# --- with other compilers, and in loops of a user's own -------------------------------------------


def test_inductor_replays_a_choice_with_transfers():
    """Inductor fuses other kernels, so that bits may differ."""
    spec = f"{MODELS}:dropout"
    base = step_of(spec, "cpu", "min-cut", "inductor").facts
    plan = plan_under(base, CHOICES["some"](base), moves=True)
    assert plan.transfers

    def losses(chosen_plan: Plan | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        target = build_real(spec, {}, "cpu")
        with Replay(target, chosen_plan, device="cpu", compiler="inductor") as replay:
            torch.manual_seed(1)
            found = [replay.step() for _ in range(2)]
            if chosen_plan is not None:
                assert replay.facts is not None
                assert digest(replay.facts) == chosen_plan.digest
        return [*found, *(p.grad for p in target.model.parameters() if p.grad is not None)]

    for one, other in zip(losses(plan), losses(None), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("moves", [False, True], ids=["kept", "moved"])
def test_a_backend_has_run_again_what_its_plan_says(moves):
    model = Net()
    base = traced_target(Target(model, (batch(0),)), TraceOptions("cpu")).facts
    plan = plan_under(base, CHOICES["most"](base), moves=moves)
    reset_dynamo()
    expected = run_loop(plain_steps, Net, "aot_eager")
    with small_backend(plan=plan) as made:
        found = run_loop(plain_steps, Net, made)
        (graph,) = [graph for graph in made._graphs.graphs if graph.base is not None]
        assert (made.stats().offload_count > 0) == moves
    assert_same(found, expected)
    assert graph.template is not None
    assert graph.template.backward is not None
    sizes = len(graph.template.forward.ops), len(graph.template.backward.ops)
    assert sizes == (plan.regions[0].forward_ops, plan.regions[0].backward_ops)
    reset_dynamo()


def test_a_plan_whose_numbers_would_be_drawn_from_another_state_is_refused():
    target = checkpointed()
    base = traced_target(target, TraceOptions("cpu")).facts
    choices = CHOICES["all"](base)
    facts = apply(base, choices)
    (region,) = facts.regions
    assert region.backward is not None
    places = [p for p, op in enumerate(region.backward.ops) if "rng_state" in op.target]
    assert len(places) == 2
    ops = list(region.backward.ops)
    swapped = [ops[place].inputs[0] for place in reversed(places)]
    for place, state in zip(places, swapped, strict=True):
        inputs = (state, *ops[place].inputs[1:])
        ops[place] = msgspec.structs.replace(ops[place], inputs=inputs)
    backward = msgspec.structs.replace(region.backward, ops=tuple(ops))
    swapped_facts = msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(region, backward=backward),)
    )
    plan = plan_under(base, choices, moves=False)
    plan = msgspec.structs.replace(plan, digest=digest(swapped_facts))
    check_plan(facts, msgspec.structs.replace(plan, digest=digest(facts)))
    with pytest.raises(PlanError, match="reads something else than in the forward"):
        check_plan(swapped_facts, plan)


def test_a_replay_refuses_choices_that_were_made_for_other_graphs():
    target = built("layer_norm_softmax")
    base = traced_target(target, TraceOptions("cpu")).facts
    plan = plan_under(base, CHOICES["all"](base), moves=False)
    other = msgspec.structs.replace(plan, base_digest="sha256:" + "0" * 64)
    with pytest.raises(PlanError, match="made for other graphs"):
        bits_of(built("layer_norm_softmax"), other)


def test_a_replay_refuses_choices_that_differ_for_runs_of_one_graph():
    target = built("graph_break_in_loop")
    base = traced_target(target, TraceOptions("cpu")).facts
    plan = plan_under(base, CHOICES["all"](base), moves=False)
    some = tuple(choice for choice in plan.choices if choice.region != 4)
    with pytest.raises(PlanError, match="regions 2 and 4 are runs of one graph"):
        bits_of(built("graph_break_in_loop"), msgspec.structs.replace(plan, choices=some))


def test_a_replay_refuses_to_draw_numbers_again():
    target = built("dropout")
    base = traced_target(target, TraceOptions("cpu")).facts
    plan = plan_under(base, CHOICES["nothing"](base), moves=False)
    place = place_of(base, "aten.native_dropout")
    bad = msgspec.structs.replace(plan, choices=(Choice(0, (place,)),))
    with pytest.raises(PlanError, match="must not run again"):
        bits_of(built("dropout"), bad)
