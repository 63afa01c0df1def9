"""The saved view has gaps: a head reads every second column.

The view's elements lie ``step`` apart, so a copy made by shape comes back dense, with other
strides than the backward graph was compiled for.  That is what the ``alias_layout`` rule of
``last-holder`` refuses.

Saved by default: a view of rows * width / step * 4 = 4096 * 1024 / 2 * 4 = 8,388,608 bytes (8
MiB) with strides (1024, 2), on a storage of rows * width * 4 = 4096 * 1024 * 4 = 16,777,216 bytes
(16 MiB).
"""

import torch
from torch import nn


class EveryNthColumn(nn.Module):
    def __init__(self, width: int, step: int, features: int) -> None:
        super().__init__()
        self.step = step
        self.head = nn.Linear(len(range(0, width, step)), features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.relu()[:, :: self.step])


def build(rows: int = 4096, width: int = 1024, step: int = 2, features: int = 16):
    return EveryNthColumn(width, step, features), (torch.randn(rows, width),)
