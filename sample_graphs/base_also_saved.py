"""A base and a view of it are both saved: the rows and the columns of one activation are mixed.

Each linear layer's weight gradient reads its own input, so the relu output crosses to the
backward and so does its transpose.  (Min-cut would recompute a plain ``view`` from the saved
base, but it does not count ``transpose`` among the ops that it may recompute.)

Saved by default: one storage of rows * columns * 4 bytes = 2048 * 1024 * 4 = 8,388,608 bytes (8
MiB), which two saved values share: 2 * 8,388,608 = 16,777,216 bytes of values.
"""

import torch
from torch import nn


class RowsAndColumns(nn.Module):
    def __init__(self, rows: int, columns: int, features: int) -> None:
        super().__init__()
        self.over_columns = nn.Linear(columns, features)
        self.over_rows = nn.Linear(rows, features)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        activation = x.relu()
        return self.over_columns(activation), self.over_rows(activation.transpose(0, 1))


def build(rows: int = 2048, columns: int = 1024, features: int = 16):
    return RowsAndColumns(rows, columns, features), (torch.randn(rows, columns),)
