"""Ops of random programs: what each makes of a tensor of any shape, and of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS, WIDTH = 8, 12


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Any tensor as one that the weight can multiply."""
    rows = x.reshape(-1)
    return (
        rows[: len(rows) // WIDTH * WIDTH].view(-1, WIDTH) if len(rows) >= WIDTH else rows[:, None]
    )


def _updated(x: torch.Tensor) -> torch.Tensor:
    """In place, on an activation of its own and through a view of it."""
    y = x * 1.5
    y.add_(0.25)
    y.reshape(-1)[::3].mul_(0.5)
    return y


def _product(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    first = parts[0]
    for part in parts[1:]:
        first = first * part if part.shape == first.shape else first
    return first


def _both(x: torch.Tensor) -> torch.Tensor:
    """Saves a base and several different views of it."""
    view = x.reshape(-1)
    return (view.sin() * view)[1:] * x.reshape(-1)[:-1]


OPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "exp": lambda x, w: (x.sin() * 0.5).exp(),
    "sigmoid": lambda x, w: x.sigmoid(),
    "relu": lambda x, w: x.relu(),
    "relu_": lambda x, w: (x + 1).relu_(),
    "square": lambda x, w: x * x.cos(),
    "update": lambda x, w: _updated(x),
    "flatten": lambda x, w: flat(x).sin(),
    "view": lambda x, w: flat(x)[: x.numel() // 2 * 2].view(2, -1).tanh(),
    "slice": lambda x, w: flat(x)[x.numel() // 3 :].sin(),
    "step": lambda x, w: flat(x)[::5].cos(),
    "gap": lambda x, w: matrix(x)[:, :2].exp().sin(),
    "transpose": lambda x, w: matrix(x).t().sin(),
    "square_transpose": lambda x, w: matrix(x) * matrix(x).roll(1, 0).t().t().sin(),
    "expand": lambda x, w: (matrix(x).mean(0, keepdim=True).sin().expand(3, -1)).cos(),
    "chunks": lambda x, w: _product(matrix(x).sigmoid().chunk(3, -1)),
    "unfold": lambda x, w: flat(x.sin()).unfold(0, 4, 2).exp(),
    "strided": lambda x, w: x.sin().contiguous().as_strided((2, 3), (1, 2), 1).cos(),
    "pair": lambda x, w: _both(x.sigmoid()),
    "sum": lambda x, w: matrix(x).sum(-1).sin(),
    "max": lambda x, w: matrix(x).max(-1).values.sin(),
    "sort": lambda x, w: flat(x).sort().values.sin(),
    "softmax": lambda x, w: matrix(x).softmax(-1),
    "layer_norm": lambda x, w: nn.functional.layer_norm(matrix(x), (matrix(x).shape[-1],)),
    "matmul": lambda x, w: matrix(x) @ w if matrix(x).shape[-1] == WIDTH else x.sin(),
    "gram": lambda x, w: matrix(x) @ matrix(x).t(),
    "dropout": lambda x, w: nn.functional.dropout(x, 0.3),
    "complex": lambda x, w: torch.fft.rfft(flat(x), n=8).conj().abs(),
    "half": lambda x, w: (x.to(torch.bfloat16) * 2).sin().to(x.dtype),
}
