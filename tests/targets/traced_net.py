"""A small network with what a trace has to tell: views, dropout, a buffer, ops of many outputs."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x, target):
        h = self.norm(x) * self.scale
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return nn.functional.mse_loss(self.dropout(scores @ v), target)


def build(batch: int = 2, seq: int = 8):
    x = torch.randn(batch, seq, 16)
    return Net(), (x, x.clone())
