"""Small targets, one per thing that capture has to handle.  Each function is a factory."""

from __future__ import annotations

import functools
import threading
from collections import UserDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from offplan import Target


class Wrapped(nn.Module):
    """A linear layer followed by ``rest(hidden, self)``."""

    def __init__(self, rest, width: int = 64, **modules: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.rest = rest
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.rest(self.linear(x), self)


def _x(*shape: int):
    return (torch.randn(*(shape or (32, 64))),)


def plain():
    return Wrapped(lambda h, m: F.gelu(h)), _x()


def in_place():
    def rest(h, m):
        y = h * 2
        y.add_(1)
        y[:, 0] = 0
        return y.relu_()

    return Wrapped(rest), _x()


def autocast():
    def rest(h, m):
        with torch.autocast(h.device.type, dtype=torch.bfloat16):
            return m.second(h.relu()).float()

    return Wrapped(rest, second=nn.Linear(64, 64)), _x()


def dropout():
    return Wrapped(lambda h, m: F.dropout(h, 0.5, training=True)), _x()


def layer_norm_softmax():
    return Wrapped(lambda h, m: m.norm(h).softmax(-1), norm=nn.LayerNorm(64)), _x()


def rms_norm():
    return Wrapped(lambda h, m: m.norm(h), norm=nn.RMSNorm(64)), _x()


def broadcast_bias():
    def rest(h, m):
        return h + m.bias.expand(32, 64) * m.scale

    module = Wrapped(rest)
    module.bias = nn.Parameter(torch.zeros(1, 64))
    module.scale = nn.Parameter(torch.tensor(2.0))
    return module, _x()


def shared_gradient():
    """One value used several times: gradients meet and are added in the engine's order."""
    return Wrapped(lambda h, m: h.sin() + h.cos() * h + h.exp() + h[:, :1]), _x()


def frozen():
    module = Wrapped(lambda h, m: m.second(h), second=nn.Linear(64, 64))
    module.linear.requires_grad_(False)
    return module, _x()


def tied():
    module = Wrapped(lambda h, m: m.second(h.relu()), second=nn.Linear(64, 64))
    module.second.weight = module.linear.weight
    return module, _x()


def batch_norm_train():
    return Wrapped(lambda h, m: m.norm(h).relu(), norm=nn.BatchNorm1d(64)), _x()


def batch_norm_eval():
    module = Wrapped(lambda h, m: m.norm(h).relu(), norm=nn.BatchNorm1d(64))
    module.norm.eval()
    return module, _x()


def conv_channels_last(dtype: str = "float32"):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    form = {"memory_format": torch.channels_last, "dtype": getattr(torch, dtype)}
    return model.to(**form), (torch.randn(2, 3, 32, 32).to(**form),)


def conv_depthwise_transposed():
    return (
        nn.Sequential(
            nn.Conv2d(8, 8, 3, groups=8, dilation=2),
            nn.GroupNorm(2, 8),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 3, stride=2),
            nn.Upsample(scale_factor=2),
        ),
        _x(2, 8, 32, 32),
    )


def multi_head_attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    return Block(), _x(2, 16, 64)


def attention_bf16():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(128, 384)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )

    return Block().bfloat16(), (torch.randn(2, 16, 128, dtype=torch.bfloat16),)


def attention_of_products():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            query, key, value = (m(x) * 1.5 for m in (self.query, self.key, self.value))
            return torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)

    return Block(), _x(4, 32, 64)


def checkpointed():
    def rest(h, m):
        return checkpoint(lambda t: m.second(t.relu()).sin(), h, use_reentrant=False)

    return Wrapped(rest, second=nn.Linear(64, 64)), _x()


def checkpointed_dropout():
    def rest(h, m):
        return checkpoint(lambda t: F.dropout(m.second(t), 0.1), h, use_reentrant=False)

    return Wrapped(rest, second=nn.Linear(64, 64)), _x()


def checkpointed_noise():
    """The first and last of three random ops need not run again if their masks are kept."""

    def noisy(h):
        return h * (torch.rand_like(h) > 0.3)

    def rest(h, m):
        h = checkpoint(lambda t: noisy(m.second(t)), h, use_reentrant=False)
        h = checkpoint(lambda t: F.dropout(m.third(t).relu(), 0.1).tanh(), h, use_reentrant=False)
        return F.dropout(checkpoint(lambda t: noisy(t.sin()), h, use_reentrant=False), 0.1)

    return Wrapped(rest, second=nn.Linear(64, 64), third=nn.Linear(64, 64)), _x()


@dataclass
class Output:
    hidden: torch.Tensor
    loss: torch.Tensor


def dataclass_output():
    return Wrapped(lambda h, m: Output(h.relu(), h.square().mean())), _x()


def dict_output():
    return Wrapped(lambda h, m: {"a": h.relu(), "b": [h.sum(), {"c": h * 2}]}), _x()


def keyword_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, *, mask, extra=None):
            return self.linear(x) * mask["first"][0] + extra

    kwargs = {"mask": {"first": [torch.ones(64)]}, "extra": torch.zeros(64)}
    return Model(), _x(), kwargs


def custom_loss():
    module = Wrapped(lambda h, m: h)
    return Target(module, _x(), {}, loss=lambda out: F.cross_entropy(out, out.argmax(-1)))


def updated_buffer():
    def rest(h, m):
        m.count.add_(1)
        m.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * m.average

    module = Wrapped(rest)
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    module.register_buffer("average", torch.ones(64), persistent=False)
    return module, _x()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, unused, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor, x.detach() + 1

    @staticmethod
    def backward(ctx, grad, grad_second):
        x, weight = ctx.saved_tensors
        return grad * weight * ctx.factor + grad_second, None, None, (grad * x * ctx.factor).sum(0)


def custom_function():
    def rest(h, m):
        first, _ = Scale.apply(h, 2.0, "unused", m.weight)
        return first

    module = Wrapped(rest)
    module.weight = nn.Parameter(torch.ones(64))
    return module, _x()


@torch.library.custom_op("offplan_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def custom_op():
    return Wrapped(lambda h, m: scaled(h, 3.0)), _x()


def multi_output():
    def rest(h, m):
        values, indices = h.sort(-1)
        top, _ = h.topk(4, -1)
        largest, _ = h.max(-1)
        a, b = h.chunk(2, -1)
        return (
            (values + indices).sum() + top.sum() + largest.sum() + (a * b).sum() + h.std(-1).sum()
        )

    return Wrapped(rest), _x()


def embedding_cross_entropy():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 64, padding_idx=0)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            logits = self.head(self.table(tokens))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Model(), (torch.randint(100, (4, 16)),)


def idle_expert():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            return self.experts[0](x) * self.experts[2](x).sigmoid()

    return Model(), _x()


def graph_break():
    def rest(h, m):
        y = h.relu()
        torch._dynamo.graph_break()
        return m.second(y).exp()

    return Wrapped(rest, second=nn.Linear(64, 64)), _x()


def graph_break_in_loop():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            y = self.linear(x).relu()
            torch._dynamo.graph_break()
            return y * x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return Model(), _x()


def constructor_reads_values():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in rates)
            frequencies = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)
            table = torch.outer(torch.arange(32).float(), frequencies)
            self.register_buffer(
                "table", torch.cat([table.cos(), table.sin()], -1), persistent=False
            )
            self.gain = nn.Parameter(torch.full((64,), max(rates)))
            self.shift = torch.zeros(64)
            nn.init.trunc_normal_(self.layers[0].weight, std=float(torch.tensor(0.02)))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x + self.table) * self.gain
            return x + self.shift.to(x.device)

    return Model(), _x()


def weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    return nn.Sequential(layer, nn.ReLU()), _x()


def half_on_request():
    model = Wrapped(lambda h, m: h.relu()).to(torch.bfloat16)
    return model, (torch.randn(32, 64).bfloat16(),)


def returns_its_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            y = self.linear(x)
            return x, y, y.view(-1), y.detach()

    return Model(), _x()


def input_needs_gradient():
    return Wrapped(lambda h, m: h.sin()), (torch.randn(32, 64, requires_grad=True),)


def index_and_scatter():
    def rest(h, m):
        index = torch.arange(16, device=h.device) * 2
        picked = h[index]
        return h.index_add(0, index, picked) + torch.where(h > 0, h, h.flip(0)).cumsum(-1)

    return Wrapped(rest), _x()


def constants_on_the_device():
    """Small constants are computed for real while traced; without a GPU on the host."""

    def rest(h, m):
        scale = torch.tensor([2.0], device=h.device)
        offset = torch.tensor(1, device=h.device).type_as(h)
        return h[..., [-2], :] * scale + offset + torch.tensor([], device=h.device).sum()

    return Wrapped(rest), _x()


class Batch(UserDict):
    """A batch class that torch knows nothing of, as tokenizers return."""


def batch_object():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, batch):
            return self.linear(batch["x"]) * batch["mask"]

    return Model(), (Batch(x=torch.randn(32, 64), mask=torch.ones(64)),)


def decorated_forward():
    def passes_on(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        @passes_on
        def forward(self, x):
            return self.linear(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        @passes_on
        def forward(self, x):
            return self.inner(x).relu()

    return Model(), _x()


def abandoned_frame():
    """Dynamo gives up the outer frame, and compiles the inner ones: a break that no graph has."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Wrapped(lambda h, m: h.sin())
            self.second = Wrapped(lambda h, m: h.cos())
            self.lock = threading.Lock()

        def forward(self, x):
            with self.lock:
                return self.second(self.first(x).relu())

    return Model(), _x()


def own_attention_graph():
    """flex_attention traces a backward of its own while it is captured."""

    def rest(h, m):
        q = h.view(1, 2, 16, 64)
        return flex_attention(q, q, q)

    return Wrapped(rest), _x()


def no_grad_part():
    def rest(h, m):
        with torch.no_grad():
            target = m.second(h).softmax(-1)
        return (h.log_softmax(-1) * target).sum()

    return Wrapped(rest, second=nn.Linear(64, 64)), _x()


def complex_numbers():
    return Wrapped(lambda h, m: torch.fft.irfft(torch.fft.rfft(h).conj() * 2j, n=64)), _x()
