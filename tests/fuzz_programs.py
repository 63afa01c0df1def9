"""Random training steps: drawn from a random-number generator, small, and sound under plain eager.

1.  A *program* is a list of steps.  Each runs one op on tensors made so far and adds what it makes;
    or changes one of them in place; or runs steps of its own: in a (selective) checkpoint, or
    without gradients.  The tensors made so far begin with a buffer, both inputs (the second
    needs a gradient) and the output of a linear layer.
2.  It returns some of what it made, some more than once, and a loss joins some of what it returns:
    so outputs are consumed twice, or get no backward, or share a storage.
3.  A program that is drawn is *settled*: steps are left out that eager torch refuses, and changes
    in place that its backward refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Protocol

import torch
from fuzz_ops import OPS, ROWS, WIDTH, flat, matrix
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from offplan.target import Target

MOST_ELEMENTS = 2048
MOST_STEPS = 5

_Op = Callable[[torch.Tensor, Any], torch.Tensor]


def _image(x: torch.Tensor) -> torch.Tensor:
    """Any tensor as one image of two channels, four pixels high."""
    rows = flat(x)
    if len(rows) < 16:
        rows = rows.repeat(16)[:16]
    return rows[: len(rows) // 8 * 8].reshape(1, 2, 4, -1)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Any tensor as (1, 2, n, 4): two heads."""
    rows = flat(x)
    if len(rows) < 16:
        rows = rows.repeat(16)[:16]
    return rows[: len(rows) // 8 * 8].view(1, -1, 2, 4).transpose(1, 2)


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values that lie side by side."""
    heads = _heads(x)
    joined = torch.cat((heads, heads.sin(), heads.cos()), -1)
    query, key, value = joined.chunk(3, -1)
    return functional.scaled_dot_product_attention(query, key, value)


def _twice_and_whole(x: torch.Tensor) -> torch.Tensor:
    parts = x.exp().reshape(-1).split(max(1, x.numel() // 2))
    return torch.stack([part.sum() * part.mean() for part in parts])


def _masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.detach() > 0.5, 0.25)


def _embedded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Labels at an offset of one."""
    labels = torch.arange(x.numel() + 1).remainder(WIDTH)[1:][:16]
    return functional.embedding(labels, weight) * flat(x)[:16].mean()


def _classified(x: torch.Tensor) -> torch.Tensor:
    rows = matrix(x)
    labels = torch.arange(rows.shape[0] + 1).remainder(rows.shape[1])[1:]
    return functional.cross_entropy(rows, labels, reduction="none")


def _written(x: torch.Tensor) -> torch.Tensor:
    """What an op saved is never written to, and all else is: parts of a new buffer."""
    found = torch.zeros(x.numel() + 2, dtype=x.dtype)
    found[1:-1] = flat(x)
    found[0].fill_(2.0)
    return found.sin()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    rows = flat(x)
    places = torch.arange(rows.shape[0]).remainder(7)
    return torch.zeros(7, dtype=x.dtype).index_add(0, places, rows.tanh())


FRESH: dict[str, _Op] = OPS | {
    "scaled": lambda x, w: x * 0.5,
    "shifted": lambda x, w: x + 1,
    "unsqueeze": lambda x, w: x.unsqueeze(0).exp(),
    "bare_view": lambda x, w: flat(x)[: x.numel() // 2 * 2].view(-1, 2),
    "bare_transpose": lambda x, w: matrix(x).t(),
    "bare_slice": lambda x, w: flat(x)[x.numel() // 2 :],
    "bare_select": lambda x, w: matrix(x)[0],
    "bare_expand": lambda x, w: matrix(x)[:1].expand(4, -1),
    "permute": lambda x, w: _image(x).permute(0, 3, 1, 2).sigmoid(),
    "diagonal": lambda x, w: (matrix(x) @ matrix(x).t()).diagonal().sin(),
    "unbind": lambda x, w: _product_of(matrix(x).sigmoid().unbind(0)[:3]),
    "split": lambda x, w: _twice_and_whole(x),
    "movedim": lambda x, w: _image(x).tanh().movedim(1, -1).exp(),
    "window": lambda x, w: matrix(x).sin().narrow(0, 0, 1).cos(),
    "as_complex": lambda x, w: torch.view_as_real(
        torch.view_as_complex(_image(x).sin().movedim(1, -1).contiguous()).conj().resolve_conj()
    ).exp(),
    "negative": lambda x, w: torch.imag(
        torch.view_as_complex(_image(x).movedim(1, -1).contiguous()).conj()
    ).sin(),
    "same_dtype_view": lambda x, w: x.sin().view(torch.float32).exp(),
    "channels_last": lambda x, w: _image(x).contiguous(memory_format=torch.channels_last).sin(),
    "convolved": lambda x, w: functional.conv2d(_image(x), w[:2, :2, None, None]).sin(),
    "pooled": lambda x, w: functional.max_pool2d(_image(x), 2, ceil_mode=True).sin(),
    "attention": lambda x, w: _interleaved(x),
    "attention_bias": lambda x, w: functional.scaled_dot_product_attention(
        _heads(x), _heads(x), _heads(x), attn_mask=flat(w)[:1].expand(1, 1, 1)
    ),
    "embedding": _embedded,
    "classified": lambda x, w: _classified(x),
    "masked": lambda x, w: _masked(x),
    "where": lambda x, w: torch.where(x.detach() > 0, x.sin(), x.cos()),
    "written": lambda x, w: _written(x),
    "scattered": lambda x, w: _scattered(x),
    "gathered": lambda x, w: flat(x).exp()[torch.arange(x.numel()).flip(0)],
    "cumulated": lambda x, w: flat(x).cumsum(0).sin(),
    "logsumexp": lambda x, w: matrix(x).logsumexp(-1),
    "deviation": lambda x, w: matrix(x).var(0, unbiased=False),
    "largest": lambda x, w: x.amax().exp(),
    "top": lambda x, w: flat(x).topk(min(3, x.numel())).values.exp(),
    "normed": lambda x, w: functional.normalize(matrix(x), dim=-1),
    "gelu": lambda x, w: functional.gelu(x),
    "double": lambda x, w: x.double().exp().float(),
    "empty": lambda x, w: torch.cat((flat(x)[:0], flat(x).sin())),
    "linear": lambda x, w: functional.linear(_wide(x), w, w[0]).relu(),
    "batch_of": lambda x, w: torch.bmm(_heads(x)[0], _heads(x)[0].transpose(1, 2)).sin(),
    "dropped_twice": lambda x, w: functional.dropout(functional.dropout(x, 0.2).exp(), 0.2),
    "noise": lambda x, w: x * torch.rand_like(x),
}


def _wide(x: torch.Tensor) -> torch.Tensor:
    rows = matrix(x)
    return rows if rows.shape[-1] == WIDTH else rows.expand(-1, WIDTH)


def _product_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    found = parts[0]
    for part in parts[1:]:
        found = found * part
    return found


def _cut(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = min(x.numel(), y.numel())
    return flat(x)[:count], flat(y)[:count]


PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "times": lambda x, y: torch.mul(*_cut(x, y)),
    "plus": lambda x, y: torch.add(*_cut(x, y)),
    "joined": lambda x, y: torch.cat((flat(x), flat(y).sin())),
    "stacked": lambda x, y: torch.stack(_cut(x, y)).tanh(),
    "outer": lambda x, y: torch.outer(flat(x)[:8], flat(y)[:8]).sin(),
    "chosen": lambda x, y: torch.where(_cut(x, y)[0] > _cut(x, y)[1], *_cut(x, y)),
    "over": lambda x, y: _cut(x, y)[0] / (_cut(x, y)[1].abs() + 1),
    "dotted": lambda x, y: torch.dot(*_cut(x, y)),
    "lerp": lambda x, y: torch.lerp(*_cut(x, y), 0.3),
}

# In place, on what the first is; with what the second is.
CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, y: x.add_(0.5),
    "mul_": lambda x, y: x.mul_(0.75),
    "relu_in_place": lambda x, y: x.relu_(),
    "add_other_": lambda x, y: x.add_(y.reshape(-1)[:1].mean()),
    "part_": lambda x, y: x.view(-1)[::2].mul_(0.5),
    "row_": lambda x, y: x[0].add_(1),
    "transposed_": lambda x, y: x.transpose(0, -1).mul_(1.5),
    "set_": lambda x, y: x.view(-1)[:2].copy_(y.reshape(-1)[:2]),
    "assigned": lambda x, y: x.__setitem__(0, 0.25),
    "masked_": lambda x, y: x.masked_fill_(x.detach() > 0.7, 0.1),
    "detached_": lambda x, y: x.detach().add_(0.125),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "zero_": lambda x, y: x.view(-1)[1:2].zero_(),
}

# Steps that run steps of their own.
BLOCKS = ("checkpoint", "saving", "no_grad")
OTHERS = ("detach", "count")
# A checkpoint runs its steps twice: what changes something outside would do it twice, and a
# selective one is not for what changes anything.
_CHANGES_ITS_OWN = ("update", "relu_", "written")


@dataclass(frozen=True)
class Step:
    """``op`` on the tensors made so far at ``places``, modulo how many there are."""

    op: str
    places: tuple[int, int]
    body: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """``outputs`` are places of what is returned; ``weights`` what the loss takes of each: 0 is
    nothing, 2 is to consume it twice.  The backward runs ``backwards`` times on one forward."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]
    backwards: int = 1

    def ops(self) -> set[str]:
        return set(_names(self.steps))


def _names(steps: Sequence[Step]) -> Iterator[str]:
    for step in steps:
        yield step.op
        yield from _names(step.body)


# --- running --------------------------------------------------------------------------------------


def _saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, _saves_products)


def in_checkpoint(body: Callable[..., Any], selective: bool, *given: torch.Tensor) -> Any:
    if selective:
        return checkpoint(body, *given, use_reentrant=False, context_fn=SELECTIVE)
    return checkpoint(body, *given, use_reentrant=False)


class Net(nn.Module):
    """Runs a program.  ``in_checkpoint`` may be replaced, by what records it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.register_buffer("count", torch.zeros(WIDTH))
        self.in_checkpoint = in_checkpoint

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [self.count, y, x, self.first(x)]
        for step in self.program.steps:
            self.take(step, made)
        return tuple(made[place % len(made)] for place in self.program.outputs)

    def take(self, step: Step, made: list[torch.Tensor]) -> None:
        first, second = (made[place % len(made)] for place in step.places)
        if step.op in FRESH:
            made.append(FRESH[step.op](first, self.weight))
        elif step.op in PAIRS:
            made.append(PAIRS[step.op](first, second))
        elif step.op in CHANGES:
            CHANGES[step.op](first, second)
        elif step.op == "detach":
            made.append(first.detach())
        elif step.op == "count":
            self.count.add_(first.detach().mean())
        elif step.op == "no_grad":
            with torch.no_grad():
                made.append(self._body(step, first, second))
        else:
            body = partial(self._body, step)
            made.append(self.in_checkpoint(body, step.op == "saving", first, second))

    def _body(self, step: Step, *given: torch.Tensor) -> torch.Tensor:
        made = list(given)
        for inner in step.body:
            self.take(inner, made)
        return made[-1]


def target_of(program: Program, seed: int = 0) -> Target:
    torch.manual_seed(seed)
    x, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(4, 6)
    return Target(Net(program), (x, y))


def loss_of(program: Program, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The loss that the program takes of what it returned; None if it needs no gradient."""
    parts = []
    for output, weight in zip(outputs, program.weights, strict=True):
        if weight:
            parts.append(output.float().mean())
        if weight == 2:
            parts.append((output * output).sum().float() * 0.125)
    loss = sum(parts[1:], parts[0]) if parts else None
    return loss if loss is not None and loss.requires_grad else None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Found:
    """What some steps of a program left behind: each tensor by what it is called."""

    tensors: dict[str, torch.Tensor]

    def different(self, other: Found) -> list[str]:
        """What has other bits, or is there in one of them only."""
        names = dict.fromkeys((*self.tensors, *other.tensors))
        return [name for name in names if not _same(self.tensors, other.tensors, name)]

    def distance(self, other: Found, name: str) -> float:
        """How far apart two tensors are, relative to the larger of the norm of one and 1."""
        one, two = self.tensors.get(name), other.tensors.get(name)
        if one is None or two is None:
            # Compiled, what a graph reaches only through unused outputs gets a gradient of zeros.
            there = one if two is None else two
            return 0.0 if there is not None and not there.any() else float("inf")
        if one.shape != two.shape:
            return float("inf")
        far = (one.double() - two.double()).norm() / one.double().norm().clamp(min=1)
        return float(far) if torch.isfinite(far) else float("inf")


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> bool:
    if name not in one or name not in other:
        return False
    a, b = one[name], other[name]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def run(program: Program, target: Target, forward: Callable[[], Any], steps: int = 2) -> Found:
    """Run ``steps`` training steps; gradients add up."""
    found: dict[str, torch.Tensor] = {}
    for number in range(steps):
        torch.manual_seed(number)
        outputs = forward()
        loss = loss_of(program, outputs)
        for place, output in enumerate(outputs):
            found[f"output {place} of step {number}"] = output.detach().clone()
        if loss is None:
            continue
        for left in reversed(range(program.backwards)):
            loss.backward(retain_graph=left > 0)
        found[f"loss of step {number}"] = loss.detach()
        # What a step has written into them may carry its graph into the next.
        for tensor in (*target.model.buffers(), target.args[1]):
            tensor.detach_()
    found["random numbers"] = torch.get_rng_state()
    named = [*target.model.named_parameters(), ("x", target.args[0])]
    found |= {f"gradient of {name}": t.grad for name, t in named if t.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in target.model.named_buffers()}
    found["input y"] = target.args[1].clone()
    return Found(found)


def eager(program: Program) -> Found:
    target = target_of(program)
    return run(program, target, lambda: target.model(*target.args))


# --- drawing --------------------------------------------------------------------------------------


class Choice(Protocol):
    """What draws: a ``Random``, or what hypothesis makes smaller programs by."""

    def choice(self, items: Sequence[Any], /) -> Any: ...

    def randint(self, least: int, most: int, /) -> int: ...

    def random(self) -> float: ...


def drawn(choice: Choice) -> Program:
    """A settled program whose loss needs a gradient."""
    while True:
        settled = attempted(choice)
        if settled is not None:
            return settled


def attempted(choice: Choice) -> Program | None:
    """A settled program; None if nothing is left of what was drawn."""
    count = choice.randint(2, MOST_STEPS)
    steps = tuple(_step(choice) for _ in range(count))
    outputs = (-1, *(choice.choice((-1, choice.randint(0, 30))) for _ in range(2)))
    weights = (choice.choice((1, 1, 2)), choice.randint(0, 2), choice.randint(0, 2))
    return _settled(Program(steps, outputs, weights, choice.choice((1, 1, 1, 2))))


def numbered(seed: int, number: int) -> Program:
    """Program ``number`` of the many that ``seed`` stands for."""
    return drawn(Random(f"offplan program {seed} {number}"))


def _step(choice: Choice, within: tuple[str, ...] = ()) -> Step:
    """A step, in the body of blocks named ``within``."""
    # The latest tensor more often: programs are then deep, too.
    places = (choice.choice((-1, -1, -2, choice.randint(0, 30))), choice.randint(0, 30))
    kind = choice.random()
    if kind < 0.2 and len(within) < 2:
        op = choice.choice(BLOCKS)
        body = tuple(_step(choice, (*within, op)) for _ in range(choice.randint(1, 3)))
        return Step(op, places, body)
    runs_again = not {"checkpoint", "saving"}.isdisjoint(within)
    if kind < 0.25:
        return Step("detach" if runs_again else choice.choice(OTHERS), places)
    table = choice.choice((FRESH, FRESH, FRESH, PAIRS, FRESH if runs_again else CHANGES))
    names = sorted(table.keys() - _CHANGES_ITS_OWN if "saving" in within else table)
    return Step(choice.choice(names), places)


class _Watched(Net):
    """Leaves steps out that eager torch refuses, and keeps the others in ``taken``."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.taken: list[Step] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [self.count, y, x, self.first(x)]
        for step in self.program.steps:
            if self._is_taken(step, made):
                self.taken.append(step)
        return tuple(made[place % len(made)] for place in self.program.outputs)

    def _is_taken(self, step: Step, made: list[torch.Tensor]) -> bool:
        count = len(made)
        before = [tensor._version for tensor in made]
        try:
            self.take(step, made)
        except (RuntimeError, IndexError):
            if [tensor._version for tensor in made[:count]] != before:
                raise
            return False
        if len(made) > count and not _is_good(made[-1]):
            made.pop()
            return False
        return True


def _is_good(tensor: torch.Tensor) -> bool:
    is_small = 0 < tensor.numel() <= MOST_ELEMENTS
    return is_small and tensor.is_floating_point() and bool(torch.isfinite(tensor).all())


def _settled(program: Program) -> Program | None:
    """``program`` without the steps that eager torch refuses; None if nothing is left of it."""
    torch.manual_seed(0)
    watched = _Watched(program)
    x, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(4, 6)
    try:
        watched(x, y)
    except (RuntimeError, IndexError):
        return None
    program = replace(program, steps=tuple(watched.taken))
    while program.steps:
        if _runs(program):
            return program
        changes = [place for place, step in enumerate(program.steps) if _changes(step)]
        if not changes:
            return None
        left_out = changes[-1]
        steps = program.steps[:left_out] + program.steps[left_out + 1 :]
        program = replace(program, steps=steps)
    return None


def _changes(step: Step) -> bool:
    return not CHANGES.keys().isdisjoint(_names([step])) or step.op == "count"


def _runs(program: Program) -> bool:
    """Whether eager torch runs it, forward and backward, and a parameter gets a gradient."""
    try:
        # Compiled, a backward is traced for all that is returned, used or not.
        eager(replace(program, weights=(1,) * len(program.weights)))
        found = eager(program)
    except (RuntimeError, IndexError):
        return False
    return "gradient of first.weight" in found.tensors and all(
        bool(torch.isfinite(tensor).all()) for tensor in found.tensors.values()
    )
