"""Cases of ``offplan verify`` about views: what is saved, on which storage, with which strides.

Each function is the factory of a small target, and its first line says what it is about.  What is
saved is made from the parameters, which change from step to step, and the loss depends on all of
it, so that a byte that comes back wrong, or from an earlier step, changes bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offplan.target import Target

ROWS, WIDTH = 16, 64


class Net(nn.Module):
    """A linear layer, and ``body(net, what the layer made, other inputs)``."""

    def __init__(self, body: Callable[..., Any], width: int, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.body(self, self.first(x), *others)


def target_of(
    body: Callable[..., Any], *shape: int, others: tuple[torch.Tensor, ...] = (), **parts: nn.Module
) -> Target:
    """``body`` after a linear layer, on an input of ``shape`` that needs a gradient, too."""
    x = torch.randn(*(shape or (ROWS, WIDTH)), requires_grad=True)
    return Target(Net(body, x.shape[-1], parts), (x, *others))


def no_bias(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def slice_of_a_larger_buffer() -> Target:
    """A saved slice is the last holder of a larger buffer."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        middle = net.wide(h)[5:11, 70:130]
        return net.head(middle).square().sum()

    return target_of(body, wide=no_bias(WIDTH, 4 * WIDTH), head=nn.Linear(60, 8))


def gaps_are_packed() -> Target:
    """Saved columns are mostly gaps: they are gathered for the copy, and scattered after it."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        wide = net.wide(h)
        return (net.one(wide[:, 3:11]) * net.two(wide[:, 101:109])).sin().sum()

    return target_of(body, wide=no_bias(WIDTH, 4 * WIDTH), one=nn.Linear(8, 8), two=nn.Linear(8, 8))


def alias_of_an_output() -> Target:
    """A saved value shares its storage with an output, which has to survive the step."""

    def body(net: Any, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        returned = h.exp()
        return returned.view(-1)[WIDTH:], net.head(returned.view(-1, 8)).sin().sum()

    return target_of(body, head=nn.Linear(8, 8))


def square_transpose() -> Target:
    """A square matrix is saved with its transpose, which differs from it in the strides alone."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        square = h.relu()
        return (net.over_columns(square) * net.over_rows(square.t())).sum()

    return target_of(
        body, WIDTH, WIDTH, over_columns=nn.Linear(WIDTH, 8), over_rows=nn.Linear(WIDTH, 8)
    )


def base_and_views() -> Target:
    """A base is saved with several different views of it."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        base = h.relu()
        parts = (
            net.whole(base),
            net.rows(base.t()),
            net.narrow(base.view(-1, 32)),
            net.part(base[2:9, 7:39]),
        )
        return torch.stack([part.sin().sum() for part in parts]).prod()

    return target_of(
        body,
        whole=nn.Linear(WIDTH, 8),
        rows=nn.Linear(ROWS, 8),
        narrow=nn.Linear(32, 8),
        part=nn.Linear(32, 8),
    )


def interleaved_qkv() -> Target:
    """Query, key and value are chunks of one buffer, each row of which has all three."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        query, key, value = net.qkv(h).chunk(3, -1)
        return (query.sigmoid() * key * value.sin()).sum() + (query @ key.t()).softmax(-1).var()

    return target_of(body, qkv=no_bias(WIDTH, 3 * WIDTH))


def shifted_labels() -> Target:
    """Integer labels are saved from their second element on, at byte 8 of their storage."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        labels = (h.detach().sum(-1) * 5).long() % WIDTH
        return F.cross_entropy(h[:-1], labels[1:])

    return target_of(body)


def expanded() -> Target:
    """A saved view has a stride of zero: one row stands for several."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        shared = h.relu().expand(3, -1, -1)
        weights = torch.stack([net.one.weight, net.two.weight, net.three.weight])
        return torch.bmm(shared, weights).sin().sum()

    return target_of(body, one=no_bias(8, WIDTH), two=no_bias(8, WIDTH), three=no_bias(8, WIDTH))


def stepped() -> Target:
    """A saved view takes every second column."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        return net.head(h.relu()[:, 1::2]).sin().sum()

    return target_of(body, head=nn.Linear(WIDTH // 2, 8))


def unfolded() -> Target:
    """A saved view has overlapping windows: its elements share memory with each other."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        windows = h.relu().view(-1).unfold(0, 8, 3)
        return net.head(windows).sin().sum()

    return target_of(body, head=nn.Linear(8, 8))


def zero_size() -> Target:
    """A saved view of no elements is on a storage that moves for another view; one has its own."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        base = h.relu()
        nothing = net.two(base[:0])
        empty = net.three(h.sigmoid()[3:3].sin())
        return net.one(base).sin().sum() + nothing.sum() + empty.sum()

    return target_of(
        body, one=nn.Linear(WIDTH, 8), two=nn.Linear(WIDTH, 8), three=nn.Linear(WIDTH, 8)
    )


def conjugate_view() -> Target:
    """A saved view of complex numbers is conjugated lazily: a bit of the tensor says so."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        numbers = torch.complex(h, h.sin())
        product = numbers.conj() * numbers.roll(1, 0)
        return torch.view_as_real(product).sum()

    return target_of(body)


def negative_view() -> Target:
    """A saved view is negated lazily: the imaginary part of a conjugate."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        numbers = torch.complex(h.sin(), h)
        return (numbers.conj().imag * net.head(h)).sum()

    return target_of(body, head=nn.Linear(WIDTH, WIDTH))


def real_view_of_complex() -> Target:
    """Complex numbers are saved as the real numbers that they consist of, too."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        numbers = torch.complex(h, h.cos())
        pairs = torch.view_as_real(numbers)
        return net.head(pairs).sin().sum() + torch.view_as_real(numbers * numbers).sum()

    return target_of(body, head=nn.Linear(2, 8))


class _Bits(torch.autograd.Function):
    """Saves a tensor, and the same memory as integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        ctx.save_for_backward(made, made.view(torch.int32))
        return made.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made, bits = ctx.saved_tensors
        return gradient * made.cos() * (1 + (bits & 7))


def dtype_view() -> Target:
    """One storage is saved as floats and as integers."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        return _Bits.apply(h).sum()

    return target_of(body)


def channels_last() -> Target:
    """Images are saved with the channels innermost."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        hidden = net.second(net.one(h).relu())
        return hidden.square().mean()

    made = target_of(
        body, 2, 8, 8, 8, one=nn.Conv2d(8, 16, 3, padding=1), second=nn.Conv2d(16, 4, 3)
    )
    model = made.model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    return Target(model, (x,))


class _Twice(torch.autograd.Function):
    """Saves one tensor at two places."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = x.sin()
        ctx.save_for_backward(made, made)
        return made * made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        one, other = ctx.saved_tensors
        return gradient * (one + other)


def saved_twice() -> Target:
    """One value is saved for two readers in the backward."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        made = net.head(h)
        grown = made.exp()
        return (_Twice.apply(made) * grown).sum() + (grown * h).mean()

    return target_of(body, head=nn.Linear(WIDTH, WIDTH))
