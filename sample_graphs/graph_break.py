"""A graph break makes two regions, and one activation is saved by both.

The call that torch.compile may not trace splits the forward.  The first region returns the
activation and saves an alias of it for relu's backward; the second receives it and saves it for
the weight gradient.  Seen one region at a time it is a saved value here and an input there; on
the timeline it is one storage.

Saved by default: one storage of rows * width * 4 bytes = 2048 * 1024 * 4 = 8,388,608 bytes (8
MiB), two saved values; and x, which is the caller's, of the same size.
"""

import torch
from torch import nn


class RecordsShapes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.seen: set[tuple[int, ...]] = set()

    @torch.compiler.disable
    def record(self, activation: torch.Tensor) -> None:
        self.seen.add(tuple(activation.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = self.first(x).relu()
        self.record(activation)
        return self.second(activation)


def build(rows: int = 2048, width: int = 1024):
    return RecordsShapes(width), (torch.randn(rows, width),)
