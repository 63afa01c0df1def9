"""A step with the kernels that a compiler made of it, by hand.

    a = f(x), b = g(a), m = mean(b), s = s(b); c = h(b, w); d = p(c); e = q(d, w2); loss(e)

``h`` and ``q`` are products, calls of a library; all else are kernels that the compiler writes: one
of f, g, mean and s, which makes b, m and s; one of p; one of the loss.  In the backward products
read b and d, and kernels that the compiler writes read b, m, s and c.

``crossed``: p runs again in the backward, in one kernel with an op that reads e, which is saved.
"""

from __future__ import annotations

import msgspec
from facts_builder import FactsBuilder

from offplan.graph import (
    Buffer,
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Kernel,
    Lowering,
    Op,
    Region,
    SavedValue,
    Value,
    ValueId,
)

MIB = 2**20
FUSED_OPS = ("f", "g", "mean", "s", "h", "p", "q", "loss")
SAVED = ("w", "w2", "b", "m", "s", "c", "d")
SHAPE, SQUARE = (1024, 256), (256, 256)


class _Graph:
    """One graph: values by name, numbered as they are made."""

    def __init__(self, facts: FactsBuilder) -> None:
        self.facts = facts
        self.values: dict[str, ValueId] = {}
        self.ops: list[Op] = []

    def tensor(self, name: str, shape: tuple[int, ...]) -> ValueId:
        self.values[name] = self.facts.tensor(shape)
        return self.values[name]

    def on(self, name: str, value: Value) -> ValueId:
        """Another value on a storage that is there."""
        self.values[name] = self.facts.add(msgspec.structs.replace(value))
        return self.values[name]

    def op(
        self, name: str, target: str, reads: str, makes: str, shape: tuple[int, ...] = SHAPE
    ) -> None:
        inputs = tuple(self.values[read] for read in reads.split())
        self.ops.append(
            Op(name, f"aten.{target}", inputs, (self.tensor(makes, shape),), source="model.py:1")
        )

    def lowering(
        self, made: dict[str, int], kernels: list[tuple[str, str, str, str]], outputs: list[str]
    ) -> Lowering:
        """``made`` has sizes of what kernels make; each of these ops, reads, makes and its call."""
        names = [op.name for op in self.ops]
        buffers: dict[str, int] = {}
        for _, reads, makes, _ in kernels:
            for name in (*reads.split(), *makes.split()):
                buffers.setdefault(name, len(buffers))
        for name in outputs:
            buffers.setdefault(name, len(buffers))
        found = []
        for ops, reads, makes, call in kernels:
            places = tuple(names.index(op) for op in ops.split())
            read, make = (tuple(buffers[n] for n in part.split()) for part in (reads, makes))
            found.append(Kernel(places[-1], places, read, make, call=call))
        return Lowering(
            tuple(Buffer(made.get(name, 0), self.values[name]) for name in buffers),
            tuple(found),
            tuple(buffers[name] for name in outputs),
        )


def fused_step(device: str = "cuda", *, crossed: bool = False) -> GraphFacts:
    saved = ("w", "w2", "b", "m", "s", "c", "e") if crossed else SAVED
    facts = FactsBuilder(device=device)
    forward = _Graph(facts)
    inputs = [
        GraphInput(forward.tensor("x", SHAPE), "input", "x"),
        GraphInput(forward.tensor("w", SQUARE), "parameter", "w"),
        GraphInput(forward.tensor("w2", SQUARE), "parameter", "w2"),
    ]
    forward.op("f", "add.Tensor", "x", "a")
    forward.op("g", "relu.default", "a", "b")
    forward.op("mean", "mean.dim", "b", "m", (1024,))
    forward.op("s", "sigmoid.default", "b", "s")
    forward.op("h", "mm.default", "b w", "c")
    forward.op("p", "gelu.default", "c", "d")
    forward.op("q", "mm.default", "d w2", "e")
    forward.op("loss", "sum.default", "e", "loss", ())
    lowered = forward.lowering(
        {**dict.fromkeys("bscde", MIB), "m": 4096, "loss": 4},
        [
            ("f g mean s", "x", "b m s", ""),
            ("h", "b w", "c", "aten.mm.out"),
            ("p", "c", "d", ""),
            ("q", "d w2", "e", "aten.mm.out"),
            ("loss", "e", "loss", ""),
        ],
        ["loss", *saved],
    )
    outputs = [GraphOutput(forward.values["loss"], "output", "0")] + [
        GraphOutput(forward.values[name], "saved", f"saved {n}") for n, name in enumerate(saved)
    ]
    backward = _Graph(facts)
    received = [
        GraphInput(backward.on(name, facts.values[forward.values[name]]), "saved", f"saved {n}")
        for n, name in enumerate(saved)
    ]
    received.append(GraphInput(backward.tensor("t", SHAPE), "tangent", "tangent 0"))
    backward.op("q_a", "mm.default", "t w2", "gd")
    if crossed:
        backward.op("p", "gelu.default", "c", "d")
    backward.op("q_b", "mm.default", "d t", "gw2", SQUARE)
    backward.op("p_a", "gelu_backward.default", "gd c e" if crossed else "gd c", "gc")
    backward.op("h_a", "mm.default", "gc w", "gb")
    backward.op("h_b", "mm.default", "b gc", "gw", SQUARE)
    backward.op("g_a", "mul.Tensor", "gb s", "gs")
    backward.op("g_b", "threshold_backward.default", "gs b m", "gx")
    returned = ["gx", "gw", "gw2"]
    back_lowered = backward.lowering(
        {**dict.fromkeys(("gd", "d", "gc", "gb", "gx"), MIB), "gw": MIB // 4, "gw2": MIB // 4},
        [
            ("q_a", "t w2", "gd", "aten.mm.out"),
            *([("p p_a", "gd c e", "d gc", "")] if crossed else []),
            ("q_b", "d t", "gw2", "aten.mm.out"),
            *([] if crossed else [("p_a", "gd c", "gc", "")]),
            ("h_a", "gc w", "gb", "aten.mm.out"),
            ("h_b", "b gc", "gw", "aten.mm.out"),
            ("g_a g_b", "gb s b m", "gx", ""),
        ],
        returned,
    )
    gradients = [
        GraphOutput(backward.values[name], "gradient", f"gradient of {of}")
        for name, of in zip(returned, ("x", "w", "w2"), strict=True)
    ]
    region = Region(
        Graph(tuple(inputs), tuple(forward.ops), tuple(outputs), lowered, lowered),
        Graph(tuple(received), tuple(backward.ops), tuple(gradients), back_lowered, back_lowered),
        tuple(SavedValue(forward.values[name], backward.values[name]) for name in saved),
    )
    return msgspec.structs.replace(
        facts.build(),
        storages=tuple(facts.storages),
        values=tuple(facts.values),
        regions=(region,),
        compiler="inductor",
    )
