"""Many steps of every kind leave behind what as many without offplan do, and nothing else.

A slice of ``benchmarks/long_run.py``, which says what the steps are; times are measured there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offplan.trace._torch import reset_dynamo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import long_run

STEPS, WINDOW = 160, 20
KINDS = {
    *("plain", "accumulated", "evaluated", "dropped", "refused"),
    *("failed in the forward", "failed in the backward"),
}


@pytest.fixture(autouse=True, scope="module")
def settings() -> Iterator[None]:
    """Kernels that repeat their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)
    reset_dynamo()


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    loop = long_run.plain("cpu")
    for number in range(STEPS):
        loop.step(number)
    return state(loop)


def state(loop: long_run.Loop) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in loop.model.named_parameters()}


@pytest.mark.parametrize("engine", long_run.ENGINES)
def test_steps_of_every_kind_hold_no_more_in_the_end(
    engine: str, expected: dict[str, torch.Tensor]
) -> None:
    windows = []
    with long_run.ENGINES[engine]("cpu") as training:
        kinds = set()
        for number in range(STEPS):
            kinds.add(training.loop.step(number))
            if (number + 1) % WINDOW == 0:
                windows.append(long_run.held("cpu", training.pinned_bytes()))
        found = state(training.loop)
    assert kinds == KINDS
    # The first ones compile, and take host memory for each shape.
    first, last = windows[3], windows[-1]
    assert first["pinned_bytes"] == last["pinned_bytes"] > 0
    for what in ("tensors", "threads", "open_files"):
        assert last[what] == first[what], what
    assert last["objects"] - first["objects"] < 20
    assert found.keys() == expected.keys()
    # Compiled graphs compute the same in other ops.
    compare = torch.equal if engine == "hooks" else torch.allclose
    assert all(compare(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("name", "rise", "is_flat"),
    [("allocated_bytes", 1, False), ("objects", 1, True), ("objects", 9, False)],
)
def test_what_grows_is_seen(name: str, rise: int, is_flat: bool) -> None:
    windows = [{"step": 50 * n, "step_ms": 1.0, name: 1000 + rise * n} for n in range(20)]
    found = long_run.judged(windows)
    assert found["grown"] == {name: 14 * rise}
    assert long_run.met(found, "cpu")[f"{name.replace('_', ' ')} flat"] == is_flat


def test_a_step_that_takes_longer_is_seen() -> None:
    windows = [{"step": 50 * n, "step_ms": 1.0 + (n >= 15) * 0.2, "objects": 1} for n in range(20)]
    assert not long_run.met(long_run.judged(windows), "cpu")["step at most 1.10 of before"]
