"""Targets whose results do not depend on their inputs alone."""

from __future__ import annotations

import itertools

import torch
from torch import nn

_calls = itertools.count()


@torch.library.custom_op("offplan_tests::drift", mutates_args=())
def drift(x: torch.Tensor, steady_calls: int) -> torch.Tensor:
    """``x``, and another number once that many calls are over."""
    return x + max(0, next(_calls) + 1 - steady_calls)


drift.register_fake(lambda x, steady_calls: torch.empty_like(x))
drift.register_autograd(lambda ctx, grad: (grad, None))


class Drifting(nn.Module):
    def __init__(self, steady_calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.steady_calls = steady_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.offplan_tests.drift(self.linear(x).exp(), self.steady_calls).sin().sum()


def build(steady_calls: int = 0):
    return Drifting(steady_calls), (torch.randn(8, 16),)
