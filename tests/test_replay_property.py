"""Random programs of views, in-place updates and reductions: a replay at the floor changes no bit.

A program is a list of steps, each an op on one of the tensors made so far.  Both arms run the same
compiled graphs; one has everything movable moved, placed for the least peak.
"""

from __future__ import annotations

import torch
from fuzz_ops import OPS, ROWS, WIDTH
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from slices import examples
from test_replay_rewrite import windows
from torch import nn

from offplan.plan import Plan, check_plan, make_plan
from offplan.replay.compiled import Replay, loss_of
from offplan.target import Target


class Program(nn.Module):
    """Runs ``steps``: (op, which tensor made so far).  The loss joins all that is left over."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        self.count.add_(made[0].detach().mean(0))
        for name, place in self.steps:
            made.append(OPS[name](made[place % len(made)], self.weight))
        return sum(tensor.float().mean() for tensor in made)  # type: ignore[return-value]


def _target(steps: list[tuple[str, int]]) -> Target:
    torch.manual_seed(0)
    return Target(Program(steps), (torch.randn(ROWS, WIDTH, requires_grad=True),))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _run(replay: Replay, target: Target) -> list[torch.Tensor]:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        loss = loss_of(replay.forward())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(_bits(loss))
    tensors = [*target.model.parameters(), target.args[0]]
    found += [_bits(tensor.grad) for tensor in tensors if tensor.grad is not None]
    return found + [_bits(buffer) for buffer in target.model.buffers()]


programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 30)), min_size=6, max_size=12
)


def assert_a_replay_changes_no_bit(steps: list[tuple[str, int]]) -> Plan:
    """Returns the plan that was replayed."""
    plain, moved = _target(steps), _target(steps)
    with Replay(plain, None, device="cpu") as replay:
        expected = _run(replay, plain)
        facts = replay.facts
    assert facts is not None
    plan = make_plan(facts, budget=0, min_bytes=1)
    check_plan(facts, plan)
    with Replay(moved, plan, device="cpu") as replay:
        found = _run(replay, moved)
        stats = replay.stats()
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)
    carried = sum(transfer.transfer_bytes for transfer in plan.transfers)
    assert stats.offloaded_bytes == 2 * carried
    return plan


@settings(
    max_examples=examples(8),
    deadline=None,
    derandomize=True,
    database=None,
    # Each example compiles twice: shrinking one would take longer than reading it.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=programs)
def test_a_replay_of_a_random_program_changes_no_bit(steps):
    assert_a_replay_changes_no_bit(steps)


def test_a_replay_of_every_op_at_once_changes_no_bit():
    plan = assert_a_replay_changes_no_bit([(name, 0) for name in OPS])
    assert len(plan.transfers) > 20
    # Copies of many storages are on their way at once; some wait, and some cannot wait.
    assert min(windows(plan)) >= 4
