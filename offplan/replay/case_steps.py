"""Cases of ``offplan verify`` about ops, attention kernels, and how a step is put together.

As in ``replay.case_views``: each function is a factory, and its first line says what it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offplan.replay.case_views import WIDTH, no_bias, target_of
from offplan.target import Target

BATCH, HEADS, LENGTH, HEAD_SIZE = 2, 4, 20, 16


def in_place_after_save() -> Target:
    """A buffer is saved, and written in place before the forward ends; so is an activation."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        before = net.running.clone()
        net.running.mul_(0.5).add_(h.detach().mean(0))
        y = h * before
        y[:, ::3] = 0
        y.relu_()
        return (net.head(y) * net.running).sum()

    made = target_of(body, head=nn.Linear(WIDTH, WIDTH))
    made.model.register_buffer("running", torch.ones(WIDTH))
    return made


def batch_norm() -> Target:
    """Running statistics are buffers that each step writes, and reads in the next."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        normal = net.norm(h).relu()
        return (net.head(normal) * net.norm.running_var).sum()

    return target_of(body, norm=nn.BatchNorm1d(WIDTH), head=nn.Linear(WIDTH, WIDTH))


def sort_and_max_pool() -> Target:
    """Ops that return tuples: sorted values and the largest of windows, with their indexes."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        values, order = h.sort(-1)
        pooled, places = F.max_pool2d(h[None, None], 2, return_indices=True)
        return (values * order).sin().sum() + (pooled * (places % 7)).cos().sum()

    return target_of(body)


def bool_mask() -> Target:
    """A mask of one byte an element is saved."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        mask = h > net.head(h)
        filled = h.masked_fill(mask, 0.5)
        return net.head(filled.sin()).where(mask[:, 1:2], filled).sum()

    return target_of(body, head=nn.Linear(WIDTH, WIDTH))


def cpu_tensor() -> Target:
    """A tensor on the CPU is saved in a graph for the device, and stays where it is."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        factors = torch.rand(4, device="cpu")
        return net.head(h.sin() * factors[1]).square().sum()

    return target_of(body, head=nn.Linear(WIDTH, WIDTH))


def last_made_first_used() -> Target:
    """What the forward makes last, the backward uses first: no time to bring it back."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        return net.wide(h).sigmoid().sum()

    return target_of(body, wide=no_bias(WIDTH, 4 * WIDTH))


def layers() -> Target:
    """Several layers of one shape: many copies are on their way at once."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        for layer in net.stack:
            h = F.gelu(F.dropout(layer(h), 0.1, net.training)) + h
        return h.square().mean()

    return target_of(body, stack=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def shared_checkpointed() -> Target:
    """One block runs twice, checkpointed: its forward runs again in the backward."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = checkpoint(net.block, h, use_reentrant=False)
        return h.cos().sum()

    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Sigmoid())
    return target_of(body, block=block)


@torch.compiler.disable
def _outside(x: torch.Tensor) -> torch.Tensor:
    """A break between graphs."""
    return x


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid().sin()


def shared_graph() -> Target:
    """One compiled graph runs twice in a step, so that two runs hold host memory at once."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        h = net.block(_outside(h))
        h = net.block(_outside(h))
        return _outside(h).sum()

    return target_of(body, block=_Block())


@dataclass
class _Output:
    loss: torch.Tensor
    hidden: torch.Tensor


def output_without_gradient() -> Target:
    """A branch is returned, and never gets a gradient: its part of the backward gets none."""

    def body(net: Any, h: torch.Tensor) -> _Output:
        return _Output(net.one(h).sigmoid().sum(), net.two(h).sigmoid().sin())

    return target_of(body, one=nn.Linear(WIDTH, WIDTH), two=nn.Linear(WIDTH, WIDTH))


def graph_without_backward() -> Target:
    """A graph of its own saves for a backward that never comes: nothing of it is reloaded."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        main = net.one(_outside(h))
        side = net.two(_outside(h))
        return (_outside(main) + _outside(side).detach()).sum()

    return target_of(body, one=_Block(), two=_Block())


# --- attention ------------------------------------------------------------------------------------


def attention(dtype: str, dropout: float) -> Target:
    """Attention of queries, keys and values that are chunks of one buffer."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
            for part in net.qkv(h).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        return net.out(mixed.transpose(1, 2).flatten(2)).float().square().sum()

    made = target_of(
        body, BATCH, LENGTH, WIDTH, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)
    )
    x = made.args[0].detach().to(getattr(torch, dtype)).requires_grad_()
    return Target(made.model.to(x.dtype), (x,))


def padded_bias() -> Target:
    """Attention is given a bias, padded to a stride that is a multiple of 8, and expanded."""

    def body(net: Any, h: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2)
            for part in net.qkv(h).chunk(3, -1)
        )
        scores = (h @ h.transpose(1, 2)).detach().sin()
        bias = F.pad(scores, (0, 4))[..., :LENGTH].unsqueeze(1).expand(-1, HEADS, -1, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return net.out(mixed.transpose(1, 2).flatten(2)).square().sum()

    return target_of(
        body, BATCH, LENGTH, WIDTH, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)
    )
