"""Random training steps in every arm (``fuzz_arms``): no arm changes a bit; and named programs.

``benchmarks/fuzz.py programs`` runs the same on many more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from fuzz_arms import Door, Outcome, outcome, recorded, through_dynamo, through_the_quick_door
from fuzz_programs import (
    BLOCKS,
    CHANGES,
    FRESH,
    OTHERS,
    PAIRS,
    Program,
    Step,
    attempted,
    eager,
    numbered,
    run,
    target_of,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from slices import examples

from offplan.recompute import Refusals
from offplan.replay import saved
from offplan.replay.compiled import Replay
from offplan.trace._torch import reset_dynamo

SEED = 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Torch warns of selective checkpoints whatever is in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    reset_dynamo()


def ran(program: Program, seed: int = 0) -> Outcome:
    return outcome(program, Random(f"plans {seed}"), through_the_quick_door)


class ByHypothesis:
    """Draws what hypothesis then knows how to make smaller."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def choice(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def randint(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def random(self) -> float:
        return self.draw(st.floats(0, 1, exclude_max=True))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = attempted(ByHypothesis(draw))
    assume(program is not None)
    assert program is not None
    return program


@settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    database=None,
    # A program that fails is read more quickly than it is made smaller.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(program=programs(), seed=st.integers(0, 2**32))
def test_no_arm_of_a_random_program_changes_a_bit(program: Program, seed: int) -> None:
    ran(program, seed)


@pytest.mark.parametrize("number", range(2))
def test_nor_does_one_that_dynamo_captures(number: int) -> None:
    outcome(numbered(SEED, number), Random(f"plans {number}"), through_dynamo)


def test_programs_have_every_op_and_plans_that_do_something() -> None:
    every = {*FRESH, *PAIRS, *CHANGES, *BLOCKS, *OTHERS}
    ops: set[str] = set()
    for number in range(400):
        ops |= {*numbered(SEED, number).ops()}
        if ops == every:
            break
    assert ops == every
    found = [ran(numbered(SEED, number), number) for number in range(8)]
    assert sum(each.moved for each in found) > 3
    assert sum(each.hooked for each in found) > 10
    assert sum(each.run_again for each in found) > 3


def test_a_number_is_always_the_same_program() -> None:
    assert numbered(SEED, 7) == numbered(SEED, 7) != numbered(SEED, 8)


@pytest.mark.parametrize("number", range(3))
def test_the_quick_door_comes_to_the_facts_of_dynamo(number: int) -> None:
    """The same bits, and as much saved, through both doors."""
    program = numbered(SEED, number)
    found = []
    for door in (through_the_quick_door, through_dynamo):
        target = target_of(program)
        with door(program)(target, None) as replay:
            arm = run(program, target, replay.forward)
            assert replay.facts is not None
            sizes = [
                replay.facts.values[item.value].logical_bytes
                for region in replay.facts.regions
                for item in region.saved
            ]
            found.append((arm, sorted(sizes)))
    assert found[0][0].different(found[1][0]) == []
    assert found[0][1] == found[1][1]


def test_a_bit_that_an_arm_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: what comes back under hooks is made one bit larger."""
    original = saved.Mover.bring

    def bring(self: saved.Mover, view: saved.View) -> torch.Tensor:
        found = original(self, view)
        return torch.nextafter(found, found + 1) if found.is_floating_point() else found

    monkeypatch.setattr(saved.Mover, "bring", bring)
    steps = tuple(Step(op, (-1, -1)) for op in ("exp", "square", "sigmoid", "times", "exp"))
    program = Program(steps, (-1,), (1,))
    with pytest.raises(AssertionError, match="eager under hooks changes bits of gradient"):
        ran(program)


# --- what was found -------------------------------------------------------------------------------

ASSIGNED = Program((Step("square", (0, 0)), Step("set_", (0, 3))), (3, -1, 4), (1, 1, 1))


@pytest.mark.parametrize("door", [through_the_quick_door, through_dynamo])
def test_a_buffer_that_is_given_what_needs_a_gradient_is_one_that_changes(
    door: Callable[[Program], Callable[..., Replay]],
) -> None:
    """It is written to after the forward, which returns its new contents: no op that reads it may
    run again, as it would then read those."""
    target = target_of(ASSIGNED)
    with door(ASSIGNED)(target, None) as replay:
        run(ASSIGNED, target, replay.forward)
        facts = replay.facts
    assert facts is not None
    (region,) = facts.regions
    assert [output.kind for output in region.forward.outputs].count("mutated") == 1
    refusals = Refusals(facts, 0)
    (buffer,) = (item.value for item in region.forward.inputs if item.name.endswith("count"))
    readers = [place for place, op in enumerate(region.forward.ops) if buffer in op.inputs]
    assert readers
    assert all(refusals(place) for place in readers)


@pytest.mark.parametrize(
    "steps",
    [
        # Returned: an input that is written to.
        (Step("masked_", (0, 3)), Step("add_other_", (1, 3)), Step("update", (-1, 3))),
        # A checkpoint in another.
        (Step("saving", (3, 3), (Step("checkpoint", (0, 0), (Step("exp", (0, 0)),)),)),),
        # Random numbers that are drawn again in a backward.
        (Step("checkpoint", (3, 3), (Step("dropout", (0, 0)), Step("exp", (-1, 0)))),),
        # Changed after it was saved, where what was saved is another value.
        (Step("exp", (3, 3)), Step("shifted", (-1, 3)), Step("mul_", (-1, 3))),
    ],
)
def test_a_named_program_changes_no_bit(steps: tuple[Step, ...]) -> None:
    ran(Program(steps, (-1, 3, 1), (1, 2, 0), backwards=2))


def test_a_plan_is_right_where_torch_computes_again_from_what_was_written_to() -> None:
    """Torch's partitioner saves a buffer to compute an activation again from it, and the step then
    writes to the buffer: up to torch 2.14 at least, its gradients are wrong without any plan."""
    steps = (Step("over", (3, 0)), Step("assigned", (0, 0)), Step("cumulated", (-1, 2)))
    assert ran(Program(steps, (-1, -1, 0), (2, 2, 1)), 3).eager in ("torch differs", "same")


def test_the_recorder_sees_what_dynamo_sees_of_a_checkpoint() -> None:
    body = (Step("matmul", (0, 0)), Step("exp", (-1, 0)))
    program = Program((Step("saving", (3, 3), body),), (-1,), (1,))
    names = [str(node.target) for node in recorded(program).module.graph.nodes]
    assert "tag_activation_checkpoint" in names
    assert Door(program).recorded.given[0] == "x"
    assert "gradient of weight" in eager(program).tensors
