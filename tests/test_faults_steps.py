"""Faults in steps that a compiler has made: the next step of the same model is the right one.

``test_faults`` has every point of what moves storages; here graphs call it, and what fails may also
be the compilation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from fault_lives import Bits, Life, Place, leased_of, outcome_of, place
from fault_points import HOWS
from test_faults import faults
from torch import nn
from training_loops import SMALL, Net, batch, loss_of

import offplan
from offplan.replay import graphs, rewrite, training
from offplan.replay.host import HostPool
from offplan.replay.runtime import Runtime
from offplan.replay.training import Backend
from offplan.trace._torch import reset_dynamo


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Kernels that repeat their bits, on one thread, and nothing compiled before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)
    reset_dynamo()


class Strided(Net):
    """One more storage is saved, of which a few columns are read: it is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(16, 128), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.head(self.wide(x)[:, ::32])


class CompiledLife(Life):
    """A step through ``torch.compile``, which compiled before; its host memory is taken anew."""

    phases = ("step",)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        torch.manual_seed(0)
        self.model = Strided().to(place.device)
        options = SMALL | {"device": place.device}
        self.backend = offplan.backend(budget=0, pin="off", **options)
        self.call = torch.compile(self.model, backend=self.backend)
        self.runtime = self.backend.runtime
        self.runtime.link = self.track(place.link())
        self._step()
        assert any(slot.pieces for slot in self.runtime.slots)

    def make(self) -> None:
        raise AssertionError

    def close(self) -> None:
        self.runtime.pool.close()

    def leased(self) -> list[str]:
        return leased_of(self.runtime)

    def step(self) -> Bits:
        if not self.runtime.pool.slabs or self.runtime.pool.is_closed:
            self.runtime.pool = HostPool((), self.place.pinning())
        return self._step()

    def _step(self) -> Bits:
        self.model.zero_grad()
        loss = loss_of(self.call(batch(0).to(self.place.device)))
        loss.backward()
        return [loss.detach().clone(), *(each.grad.clone() for each in self.model.parameters())]


@pytest.mark.parametrize(
    ("kind", "pin"),
    [
        ("host", "off"),
        ("lagging", "register"),
        pytest.param("cuda", "register", marks=pytest.mark.cuda),
    ],
)
def test_whatever_fails_in_a_compiled_step_leaves_the_next_one_right(kind: str, pin: str) -> None:
    with place(kind, pin) as found:
        life = CompiledLife(found)
        life.close()
        expected = life.step()
        life.close()
        with found.faults.watching() as counts:
            life.step()
        counts = +counts
        life.close()
        complaints = []
        for how in HOWS:
            for fault in faults(counts, how):
                said, wrong = outcome_of(life, fault, expected)
                if fault.how != "fails" and said != "interrupted":
                    wrong.append("nobody hears of it")
                complaints += [f"{fault}: {said}: {each}" for each in wrong]
        assert len(counts) >= 8
        life.backend.close()
    assert complaints == []


# --- compiling ------------------------------------------------------------------------------------

# What a graph goes through while it is planned and compiled, in this order.
STAGES: list[tuple[Any, str]] = [
    (graphs, "split_and_read"),
    (training, "localized"),
    (graphs, "insert_transfers"),
    (Runtime, "add_slots"),
    (rewrite, "_rewrite_forward"),
    (rewrite, "_rewrite_backward"),
    (graphs, "compile_pair"),
    (graphs.CompiledGraph, "compile_forward"),
    (graphs.CompiledGraph, "compile_backward"),
]
PLANNED = [(training, "FactsBuilder"), (training, "Decisions"), (training, "layouts")]
ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]


@contextmanager
def failing(owner: Any, name: str, error: type[BaseException], after: bool) -> Iterator[list[int]]:
    """``name`` of ``owner`` fails once, before it does what it does or after."""
    call, reached = getattr(owner, name), []

    def once(*args: Any, **kwargs: Any) -> Any:
        if reached:
            return call(*args, **kwargs)
        reached.append(1)
        if after:
            call(*args, **kwargs)
        raise error("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, once)
        yield reached


def trained(made: Backend, failed: Callable[[], Any]) -> tuple[Bits, int]:
    """Bits of a step after ``failed``, and how many bytes it moved."""
    reset_dynamo()
    torch.manual_seed(0)
    model = Net(layers=1)
    call = torch.compile(model, backend=made)
    with failed() as reached:
        for _ in range(2):
            with suppress(Exception, KeyboardInterrupt):
                loss_of(call(batch(0))).backward()
    assert reached
    model.zero_grad()
    model.calls.zero_()
    loss = loss_of(call(batch(0)))
    before = made.stats().reloaded_bytes
    loss.backward()
    gc.collect()
    return [loss.detach(), *(p.grad for p in model.parameters())], (
        made.stats().reloaded_bytes - before
    )


@contextmanager
def nothing() -> Iterator[list[int]]:
    yield [1]


# Each error, before and after what fails, with and without a plan: a pair of each is enough.
@pytest.mark.parametrize(
    ("planned", "error", "after"),
    [
        (False, ERRORS[0], False),
        (False, ERRORS[1], True),
        (True, ERRORS[2], False),
        (True, ERRORS[0], True),
    ],
)
def test_a_compilation_that_fails_can_be_done_again(
    planned: bool, error: type[BaseException], after: bool
) -> None:
    options: dict[str, Any] = {"budget": 0}
    if planned:
        options = {"plan": offplan.analyze(Net(layers=1), (batch(0),), budget=0, **SMALL)}
    given = {name: value for name, value in SMALL.items() if not planned or name != "compiler"}
    with offplan.backend(**options, **given) as made:
        expected, moved = trained(made, nothing)
    assert moved > 0
    for owner, name in STAGES if planned else [*STAGES, *PLANNED]:
        with offplan.backend(**options, **given) as made:
            fault = lambda: failing(owner, name, error, after)  # noqa: E731, B023
            found, again = trained(made, fault)
            assert again == moved, name
            assert all(map(torch.equal, found, expected)), name
            assert len(made.plans) == (not planned), name
            free = made.runtime.pool.free.items()
            assert sum(size * len(each) for size, each in free) == made.stats().host_asked_bytes
