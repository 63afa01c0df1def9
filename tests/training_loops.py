"""A small model, and a loop of a user's own run with and without an offplan backend.

Whatever a loop leaves behind is compared bit for bit: what it returns, parameters, gradients and
buffers.  The reference is torch's own compiler of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offplan.replay.runtime import RuntimeStats
from offplan.replay.training import Backend, backend
from offplan.trace._torch import reset_dynamo

WIDTH = 16
# What is small counts here.
SMALL: dict[str, Any] = {"compiler": "aot_eager", "min_size": 1, "device": "cpu"}


class Layer(nn.Module):
    def __init__(self, drop: float, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Layers, and a buffer that counts its calls."""

    def __init__(self, drop: float = 0.0, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop, width) for _ in range(layers))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x


class Broken(Net):
    """Dynamo ends a graph after each layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def batch(seed: int, rows: int = 32, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


Call = Callable[..., Any]
# Takes what was compiled, and the module; returns what is to be compared beside the module.
Loop = Callable[[Call, nn.Module], Sequence[torch.Tensor]]


def plain_steps(call: Call, model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """The loop that everyone writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = loss_of(call(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@dataclass
class Ran:
    """What a loop left behind, and what was moved for it."""

    state: dict[str, torch.Tensor]
    stats: RuntimeStats | None = None
    plans: int = 0


def run_loop(
    loop: Loop, make: Callable[[], nn.Module], chosen: Any, **compile_options: Any
) -> dict[str, torch.Tensor]:
    """Run ``loop`` on a new model, compiled for ``chosen``; every run draws the same numbers."""
    reset_dynamo()
    torch.manual_seed(0)
    model = make()
    call = torch.compile(model, backend=chosen, **compile_options)
    found = {f"result {i}": t.detach().clone() for i, t in enumerate(loop(call, model))}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.clone()
    found.update({f"buffer {name}": b.clone() for name, b in model.named_buffers()})
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differ = [
        name
        for name, tensor in found.items()
        if tensor.dtype != expected[name].dtype
        or not torch.equal(bits(tensor), bits(expected[name]))
    ]
    assert differ == []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def small_backend(**options: Any) -> Iterator[Backend]:
    """A backend that counts what is small, on the CPU."""
    given = SMALL | options
    if options.get("plan") is not None:
        del given["compiler"]
    with backend(**given) as made:
        yield made


def assert_trains(
    loop: Loop,
    make: Callable[[], nn.Module] = Net,
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> Ran:
    """The loop gives the same bits with a backend that moves something; returns what it moved.

    ``options`` are the backend's: without a plan or a budget, everything movable is moved.
    """
    if "plan" not in options:
        options = {"budget": 0} | options
    compile_options = compile_options or {}
    compiler = options.get("compiler", "aot_eager")
    expected = run_loop(loop, make, compiler, **compile_options)
    with small_backend(**options) as made:
        found = run_loop(loop, make, made, **compile_options)
        stats, plans = made.stats(), len(made.plans)
    assert_same(found, expected)
    assert stats.offload_count > 0
    return Ran(found, stats, plans)
