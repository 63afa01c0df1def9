"""Embedding and output head are one parameter, which is saved but is no activation.

Both layers' backwards read the weight, under whichever of its two names.  Its storage lives as
long as the model does, so moving a saved copy or a view of it would free nothing.

Saved by default: the weight, vocabulary * width * 4 = 2048 * 1024 * 4 = 8,388,608 bytes (8 MiB),
which has to stay; the embedding's output and the norm's, tokens * width * 4 = 2048 * 1024 * 4 =
8,388,608 bytes each (16 MiB); and the norm's statistics, 2 * tokens * 4 = 16,384 bytes.
"""

import torch
from torch import nn


class TiedHead(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def build(vocabulary: int = 2048, width: int = 1024, tokens: int = 2048):
    return TiedHead(vocabulary, width), (torch.randint(vocabulary, (tokens,)),)
