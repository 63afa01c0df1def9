"""A small saved view keeps a large storage alive: a head reads only the first rows.

The head's weight gradient needs an eighth of the relu output, and the other seven eighths stay on
the device with it until the backward is done.  The view alone is under the 5 MiB minimum; its
storage, which is what a move would free, is not.

Saved by default: a view of kept * width * 4 = 1024 * 1024 * 4 = 4,194,304 bytes (4 MiB) on a
storage of rows * width * 4 = 8192 * 1024 * 4 = 33,554,432 bytes (32 MiB).
"""

import torch
from torch import nn


class ReadsTheFirstRows(nn.Module):
    def __init__(self, kept: int, width: int, features: int) -> None:
        super().__init__()
        self.kept = kept
        self.head = nn.Linear(width, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.relu()[: self.kept])


def build(rows: int = 8192, kept: int = 1024, width: int = 1024, features: int = 16):
    return ReadsTheFirstRows(kept, width, features), (torch.randn(rows, width),)
