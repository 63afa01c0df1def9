"""Targets that cannot be traced or built, one per reason.  Each function is a factory."""

from __future__ import annotations

import sys

import torch
from torch import nn


class Wrapped(nn.Module):
    def __init__(self, rest) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.rest = rest

    def forward(self, x):
        return self.rest(self.linear(x), self)


def _x():
    return (torch.randn(32, 64),)


def shape_from_data():
    return Wrapped(lambda h, m: h[h > 0].sum()), _x()


def unique():
    return Wrapped(lambda h, m: torch.unique(h).sum()), _x()


def value_read():
    return Wrapped(lambda h, m: h * h.sum().item()), _x()


def branch_on_data():
    def rest(h, m):
        if h.sum() > 0:
            return h * 2
        return h

    return Wrapped(rest), _x()


def wrong_shapes():
    return Wrapped(lambda h, m: h @ torch.ones(3, 3, device=h.device)), _x()


def own_error():
    def rest(h, m):
        raise ValueError("the user's own message")

    return Wrapped(rest), _x()


def no_gradient():
    model = Wrapped(lambda h, m: h)
    model.requires_grad_(False)
    return model, _x()


def not_a_tensor():
    return Wrapped(lambda h, m: "text"), _x()


def double_backward():
    def rest(h, m):
        (gradient,) = torch.autograd.grad(h.sum(), m.linear.weight, create_graph=True)
        return gradient.square().sum()

    return Wrapped(rest), _x()


def backward_inside():
    def rest(h, m):
        h.sum().backward(retain_graph=True)
        return h.square().sum()

    return Wrapped(rest), _x()


@torch.library.custom_op("offplan_tests::no_fake_kernel", mutates_args=())
def no_fake_kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def missing_fake_kernel():
    return Wrapped(lambda h, m: no_fake_kernel(h)), _x()


def sparse_input():
    return Wrapped(lambda h, m: h), (torch.eye(64).to_sparse(),)


def nested_input():
    parts = [torch.randn(3, 64), torch.randn(4, 64)]
    return Wrapped(lambda h, m: h), (torch.nested.nested_tensor(parts, layout=torch.jagged),)


def lazy_module():
    return nn.LazyLinear(8), _x()


def constructor_reads_large_tensor():
    if torch.randn(4096, 4096).sum().item() > 0:
        return nn.Linear(64, 64), _x()
    return nn.Linear(64, 64), _x()


def constructor_raises():
    raise RuntimeError("no such configuration")


def too_many_arguments():
    return Wrapped(lambda h, m: h), (torch.randn(32, 64), 3)


def compiler_disabled():
    model = Wrapped(lambda h, m: h)
    model.forward = torch.compiler.disable(model.forward)
    return model, _x()


def exits():
    sys.exit(3)


def returns_nothing():
    return None


def returns_a_list_of_inputs():
    return nn.Linear(64, 64), "not inputs"


not_callable = 3
