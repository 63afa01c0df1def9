"""Mixture of experts with top-k routing in fixed shapes, and an expert that never gets a token.

Which tokens an expert gets depends on the data, how many must not if the model is to be traced:
each expert takes its ``capacity`` best tokens out of those that chose it, and a gate of zero
fills up the rest.  The router scores the first ``experts - idle`` only, as after an expert has
been retired, so the idle ones are parameters that no graph uses: they get no gradient, and no
saved bytes.

Saved by default: capacity = 5/4 * tokens * top_k / (experts - idle) = 5 * 4096 * 2 // (4 * 3) =
3413 rows for each of 3 experts.  Per expert: the gathered input and the output, 3413 * 512 * 4 =
6,989,824 bytes each, and the hidden layer before and after GELU, twice as wide, 13,979,648 bytes
each; together 41,938,944.  For 3 experts 125,816,832 bytes; and, all of them small, the router's
probabilities, the chosen experts, the gates, and the row numbers, which are integers.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class MixtureOfExperts(nn.Module):
    def __init__(self, experts: int, idle: int, top_k: int, width: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.active = experts - idle
        self.router = nn.Linear(width, self.active, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        gates = x.new_zeros(len(x), self.active).scatter(1, chosen, weights)
        capacity = min(len(x), 5 * len(x) * self.top_k // (4 * self.active))
        mixed = torch.zeros_like(x)
        for column in range(self.active):
            gate, rows = gates[:, column].topk(capacity)
            mixed = mixed.index_add(0, rows, self.experts[column](x[rows]) * gate[:, None])
        return mixed


def build(experts: int = 4, idle: int = 1, top_k: int = 2, tokens: int = 4096, width: int = 512):
    return MixtureOfExperts(experts, idle, top_k, width), (torch.randn(tokens, width),)
