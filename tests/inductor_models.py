"""Models that Inductor compiles in a moment, each with something that it or a transfer could spoil.

All sizes are small: what matters is which storages are saved, in which views, and what is fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offplan


class Block(nn.Module):
    """Attention over the chunks of one projection, and dropout."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        scores = torch.softmax(q @ k.transpose(-2, -1) * 0.125, dim=-1)
        return x + self.drop(self.out(torch.tanh(scores @ v)))


class Gpt(nn.Module):
    """The embedding's backward adds up in parallel, unless kernels are to be deterministic."""

    def __init__(self, width: int, drop: float, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.block = Block(width, drop)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return (x @ self.embedding.weight.t()).logsumexp(-1).mean()


def dropout() -> Any:
    return offplan.Target(Gpt(32, 0.1, False), (torch.randint(64, (4, 16)),))


def checkpointed() -> Any:
    return offplan.Target(Gpt(32, 0.0, True), (torch.randint(64, (4, 16)),))


class Views(nn.Module):
    """Saves a slice with gaps in it, which is packed; chunks of one value; and an expanded row.

    It only multiplies and adds, so that what Inductor fuses changes no bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.second = nn.Linear(32, 96)
        self.last = nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stepped = self.first(x)[:, ::4]
        left, middle, right = self.second(x).chunk(3, dim=-1)
        row = (left * right)[:1].expand(x.shape[0], -1)
        mixed = self.last(torch.relu(row * middle + stepped * stepped * left))
        return (mixed * self.scale).square().sum()


def views() -> Any:
    return offplan.Target(Views(), (torch.randn(64, 32),))


class Transcendental(Views):
    """The same with functions that a vector unit rounds otherwise than a scalar one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x).exp()
        stepped = wide[:, ::4].sin()
        left, _, right = self.second(x).sin().chunk(3, dim=-1)
        row = (left * right).mean(0, keepdim=True).expand(x.shape[0], -1)
        return (self.last(torch.relu(row + stepped * left)) * self.scale).square().sum()


def transcendental() -> Any:
    return offplan.Target(Transcendental(), (torch.randn(64, 32),))


def conv() -> Any:
    model, images = _conv_net()
    form = torch.channels_last
    return offplan.Target(model.to(memory_format=form), (images.contiguous(memory_format=form),))


def contiguous_conv() -> Any:
    """Inductor computes it in the other memory format."""
    model, images = _conv_net()
    return offplan.Target(model, (images,))


def _conv_net() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 4),
    )
    return model, torch.randn(4, 3, 16, 16)


class Chain(nn.Module):
    """Large values made and read one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.square().sum()


def chain() -> Any:
    return offplan.Target(Chain(), (torch.randn(256, 64),))


class Part(nn.Module):
    """Saves rows of a larger value, and no other part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.mm(x, self.first.weight)[16:32]
        return self.last(rows).square().sum()


def part() -> Any:
    return offplan.Target(Part(), (torch.randn(64, 32),))
