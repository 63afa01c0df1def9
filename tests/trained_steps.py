"""Training steps with a backward that reads what backwards read, numbered as a trace numbers them.

    step([Layer("mm"), Layer("gelu"), Layer("norm")])

Each layer reads the value before, or one further back; its gradients read what its kind needs: the
inputs, the output, or nothing.  What of that the forward makes or is given is saved.  Ops that
nothing needs are left out, as AOTAutograd does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from facts_builder import ITEM_BYTES, FactsBuilder, contiguous, count
from hypothesis import strategies as st

from offplan.graph import (
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    InputKind,
    Op,
    Region,
    SavedValue,
    StorageId,
    TargetRef,
    Value,
    ValueId,
)

Kind = Literal[
    "relu", "gelu", "mul", "mm", "norm", "view", "split", "dropout", "attention", "write"
]
PURE: tuple[Kind, ...] = ("relu", "gelu", "mul", "mm", "norm", "view", "split")
KINDS: tuple[Kind, ...] = (*PURE, "attention", "dropout", "write")
WIDTH = 1024


class Layer(NamedTuple):
    """``first`` and ``second`` say how far back what it reads is; ``units`` how wide what ``mm``
    makes is, in units of WIDTH columns."""

    kind: Kind
    first: int = 0
    second: int = 1
    units: int = 1
    dropout: float = 0.0


@dataclass(eq=False)
class _Tensor:
    """``on``: whose storage it lies on; None for one of its own."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    on: _Tensor | None = None
    offset: int = 0
    stride: tuple[int, ...] | None = None

    @property
    def base(self) -> _Tensor:
        return self if self.on is None else self.on.base


@dataclass(eq=False)
class _Call:
    name: str
    target: str
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    constants: str = ""
    mutates: list[_Tensor] = field(default_factory=list)
    kind: str = ""

    @property
    def is_view(self) -> bool:
        return any(t.on is not None for t in self.outputs) and not self.mutates


def step(
    *regions: Sequence[Layer], rows: int = 256, device: str = "cuda", writes_loss: bool = True
) -> GraphFacts:
    """A step of these regions, each of which hands its last value to the next.  Activations have
    ``rows`` times WIDTH elements.  The last region returns the loss, or what it has last."""
    facts = FactsBuilder(device=device)
    numbers = _Numbers(facts)
    built, given = [], None
    for place, layers in enumerate(regions):
        is_last = place == len(regions) - 1
        region = _Step(layers, given, rows, returns_loss=is_last and writes_loss)
        built.append(numbers.region(region))
        given = region.made[-1]
    return GraphFacts(
        target=TargetRef("model.py"),
        torch="2.14.1",
        device=device,
        gpu="H200" if device == "cuda" else "",
        attention="auto",
        compiler="aot_eager",
        partitioner="min-cut",
        model=(),
        storages=tuple(facts.storages),
        values=tuple(facts.values),
        regions=tuple(built),
    )


@st.composite
def layers(
    draw: st.DrawFn, kinds: Sequence[Kind] = KINDS, most: int = 12, least: int = 1
) -> tuple[Layer, ...]:
    """Layers that mostly read the value before."""
    back = st.sampled_from((0, 0, 0, 0, 1, 2, 3, 5))
    one = st.builds(
        Layer,
        st.sampled_from(kinds),
        back,
        back,
        st.sampled_from((1, 1, 2, 4)),
        st.sampled_from((0.0, 0.0, 0.1)),
    )
    return tuple(draw(st.lists(one, min_size=least, max_size=most)))


class Drawn(NamedTuple):
    """What a step is built of: a failing test prints this, and not the facts."""

    regions: tuple[tuple[Layer, ...], ...]
    rows: int = 256
    writes_loss: bool = True

    def build(self) -> GraphFacts:
        return step(*self.regions, rows=self.rows, writes_loss=self.writes_loss)


@st.composite
def trained(
    draw: st.DrawFn,
    kinds: Sequence[Kind] = KINDS,
    most: int = 10,
    least: int = 1,
    most_regions: int = 3,
    rows: Sequence[int] = (256,),
) -> Drawn:
    """One or more regions, some of them twins."""
    few = min(2, most_regions)
    drawn = [draw(layers(kinds, most, least)) for _ in range(draw(st.integers(1, few)))]
    regions = draw(st.lists(st.sampled_from(drawn), min_size=1, max_size=most_regions))
    return Drawn(tuple(regions), draw(st.sampled_from(rows)), draw(st.booleans()))


class _Step:
    """The forward and the backward of one region, not numbered yet."""

    def __init__(
        self, given_layers: Sequence[Layer], given: _Tensor | None, rows: int, *, returns_loss: bool
    ) -> None:
        self.rows = rows
        self.handed = None if given is None else _Tensor(given.shape)
        self.sent = given
        x = self.handed or _Tensor((rows, WIDTH))
        self.inputs: list[tuple[_Tensor, InputKind, str]] = [
            (x, "input" if given is None else "handed", "x")
        ]
        self.made = [x]
        self.forward: list[_Call] = []
        self.names = 0
        for layer in given_layers:
            self._layer(layer)
        if returns_loss:
            loss = self._call("aten.sum.default", "sum", [self.made[-1]], [_Tensor(())])
            self.result = loss.outputs[0]
        else:
            if self.made[-1] is x:
                self._layer(Layer("gelu"))
            self.result = self.made[-1]
        self._drop_unneeded()
        self.tangent = _Tensor(self.result.shape)
        self.gradients: dict[_Tensor, _Tensor] = {self.result: self.tangent}
        self.backward: list[_Call] = []
        for call in reversed(self.forward):
            if any(output in self.gradients for output in call.outputs):
                self._differentiate(call)

    # --- forward ----------------------------------------------------------------------------------

    def _call(
        self,
        target: str,
        kind: str,
        inputs: list[_Tensor],
        outputs: list[_Tensor],
        constants: str = "",
        mutates: Sequence[_Tensor] = (),
    ) -> _Call:
        self.names += 1
        call = _Call(
            f"{kind}_{self.names}", target, inputs, outputs, constants, [*mutates], kind=kind
        )
        self.forward.append(call)
        return call

    def _layer(self, layer: Layer) -> None:
        a = self.made[-1 - layer.first % len(self.made)]
        b = self.made[-1 - layer.second % len(self.made)]
        shape, kind = a.shape, layer.kind
        if kind in ("relu", "gelu"):
            call = self._call(f"aten.{kind}.default", kind, [a], [_Tensor(shape)])
        elif kind == "mul":
            call = self._call("aten.mul.Tensor", kind, [a, b], [_Tensor(shape)])
        elif kind == "mm":
            weight = _Tensor((shape[1], layer.units * WIDTH))
            self.inputs.append((weight, "parameter", f"w{len(self.inputs)}"))
            made = _Tensor((shape[0], weight.shape[1]))
            call = self._call("aten.mm.default", kind, [a, weight], [made])
        elif kind == "norm":
            stats = [_Tensor((shape[0], 1)), _Tensor((shape[0], 1))]
            call = self._call("aten.native_layer_norm.default", kind, [a], [_Tensor(shape), *stats])
        elif kind == "view":
            call = self._call("aten.view.default", kind, [a], [self._seen(a, shape)])
        elif kind == "split":
            half = (max(1, shape[0] // 2), shape[1])
            call = self._call("aten.split.Tensor", kind, [a], [self._seen(a, half) for _ in "ab"])
        elif kind == "dropout":
            call = self._call(
                "aten.native_dropout.default", kind, [a], [_Tensor(shape), _Tensor(shape, "bool")]
            )
        elif kind == "attention":
            call = self._call(
                "aten._scaled_dot_product_flash_attention.default",
                kind,
                [a, a, b],
                [_Tensor(shape), _Tensor((shape[0],))],
                f"dropout_p={layer.dropout}" if layer.dropout else "",
            )
        else:
            if a.base in {tensor for tensor, _, _ in self.inputs}:
                a = self._fresh(a)
            call = self._call("aten.add_.Tensor", kind, [a], [self._seen(a, shape)], mutates=[a])
        self.made += call.outputs[: 2 if kind == "split" else 1]

    def _fresh(self, a: _Tensor) -> _Tensor:
        call = self._call("aten.gelu.default", "gelu", [a], [_Tensor(a.shape)])
        return call.outputs[0]

    @staticmethod
    def _seen(a: _Tensor, shape: tuple[int, ...]) -> _Tensor:
        return _Tensor(shape, a.dtype, on=a, stride=a.stride)

    def _drop_unneeded(self) -> None:
        needed, kept = {self.result}, []
        for call in reversed(self.forward):
            if call.mutates or not needed.isdisjoint(call.outputs):
                needed |= {*call.inputs}
                kept.append(call)
        self.forward = kept[::-1]

    # --- backward ---------------------------------------------------------------------------------

    def _back(self, of: _Call, part: str, inputs: list[_Tensor], output: _Tensor) -> _Tensor:
        target = {
            "relu": "aten.threshold_backward.default",
            "gelu": "aten.gelu_backward.default",
            "mm": "aten.mm.default",
            "norm": "aten.native_layer_norm_backward.default",
            "attention": "aten._scaled_dot_product_flash_attention_backward.default",
            "view": "aten.view.default",
            "sum": "aten.expand.default",
            "split": "aten.cat.default",
        }.get(of.kind, "aten.mul.Tensor")
        self.backward.append(_Call(f"{of.name}_backward_{part}", target, inputs, [output]))
        return output

    def _differentiate(self, call: _Call) -> None:
        a, out = call.inputs[0], call.outputs[0]
        g = self.gradients.get(out)
        if call.kind == "split":
            halves = [self.gradients[o] for o in call.outputs if o in self.gradients]
            self._accumulate(a, self._back(call, "a", halves, _Tensor(a.shape)))
            return
        if g is None:
            return
        if call.kind in ("sum", "view"):
            stride = None if call.kind == "view" else (0, 0)
            seen = _Tensor(a.shape, on=g, stride=g.stride if stride is None else stride)
            self._accumulate(a, self._back(call, "a", [g], seen))
        elif call.kind == "relu":
            self._accumulate(a, self._back(call, "a", [g, out], _Tensor(a.shape)))
        elif call.kind == "gelu":
            self._accumulate(a, self._back(call, "a", [g, a], _Tensor(a.shape)))
        elif call.kind in ("mul", "mm"):
            b = call.inputs[1]
            other = b if call.kind == "mul" else self._turned(b)
            self._accumulate(a, self._back(call, "a", [g, other], _Tensor(a.shape)))
            one = a if call.kind == "mul" else self._turned(a)
            self._accumulate(b, self._back(call, "b", [one, g], _Tensor(b.shape)))
        elif call.kind == "norm":
            made = self._back(call, "a", [g, a, *call.outputs[1:]], _Tensor(a.shape))
            self._accumulate(a, made)
        elif call.kind == "dropout":
            self._accumulate(a, self._back(call, "a", [g, call.outputs[1]], _Tensor(a.shape)))
        elif call.kind == "attention":
            b = call.inputs[2]
            reads = [g, a, b, *call.outputs]
            for part, read in (("a", a), ("b", b)):
                self._accumulate(read, self._back(call, part, reads, _Tensor(read.shape)))
        else:
            self._accumulate(a, g)

    def _turned(self, value: _Tensor) -> _Tensor:
        turned = _Tensor(value.shape[::-1], on=value, stride=contiguous(value.shape)[::-1])
        self.names += 1
        self.backward.append(_Call(f"t_{self.names}", "aten.t.default", [value], [turned]))
        return turned

    def _accumulate(self, value: _Tensor, gradient: _Tensor) -> None:
        known = self.gradients.get(value)
        if known is not None:
            total = _Tensor(value.shape)
            self.names += 1
            self.backward.append(
                _Call(f"add_{self.names}", "aten.add.Tensor", [known, gradient], [total])
            )
            gradient = total
        self.gradients[value] = gradient


class _Numbers:
    """Numbers values and storages as a trace does."""

    def __init__(self, facts: FactsBuilder) -> None:
        self.facts = facts
        self.known: dict[_Tensor, StorageId] = {}

    def region(self, found: _Step) -> Region:
        if found.handed is not None and found.sent is not None:
            self.known[found.handed] = self.known[found.sent.base]
        forward: dict[_Tensor, ValueId] = {}
        for tensor, _, _ in found.inputs:
            self._storage(tensor, self.known)
        for tensor, _, _ in found.inputs:
            forward[tensor] = self._value(tensor, self.known)
        ops = self._ops(found.forward, forward, self.known)
        saved = self._saved(found)
        outputs = [
            GraphOutput(forward[found.result], "output", "0"),
            *(GraphOutput(forward[t], "saved", f"saved {n}") for n, t in enumerate(saved)),
        ]
        inputs = [GraphInput(forward[t], kind, name) for t, kind, name in found.inputs]
        backward: dict[_Tensor, ValueId] = {}
        received = [
            GraphInput(backward.setdefault(t, self._value(t, self.known)), "saved", f"saved {n}")
            for n, t in enumerate(saved)
        ]
        own = {t.base: self.known[t.base] for t in saved}
        self._storage(found.tangent, own)
        backward[found.tangent] = self._value(found.tangent, own)
        received.append(GraphInput(backward[found.tangent], "tangent", "tangent 0"))
        back_ops = self._ops(found.backward, backward, own)
        gradients = []
        for tensor, kind, name in found.inputs:
            gradient = None if kind == "input" else found.gradients.get(tensor)
            value = None if gradient is None else backward[gradient]
            gradients.append(GraphOutput(value, "gradient", f"gradient of {name}"))
        return Region(
            Graph(tuple(inputs), ops, tuple(outputs)),
            Graph(tuple(received), back_ops, tuple(gradients)),
            tuple(SavedValue(forward[t], backward[t]) for t in saved),
        )

    def _saved(self, found: _Step) -> list[_Tensor]:
        made = {tensor for call in found.backward for tensor in call.outputs} | {found.tangent}
        read = {t for call in found.backward for t in call.inputs} - made
        order = [t for t, _, _ in found.inputs] + [t for c in found.forward for t in c.outputs]
        return [tensor for tensor in order if tensor in read]

    def _ops(
        self,
        calls: Sequence[_Call],
        env: dict[_Tensor, ValueId],
        storages: dict[_Tensor, StorageId],
    ) -> tuple[Op, ...]:
        ops = []
        for call in calls:
            for tensor in call.outputs:
                env[tensor] = self._value(tensor, storages)
            ops.append(
                Op(
                    name=call.name,
                    target=call.target,
                    inputs=tuple(env[t] for t in call.inputs),
                    outputs=tuple(env[t] for t in call.outputs),
                    constants=call.constants,
                    mutates=tuple(env[t] for t in call.mutates),
                    declares_alias=call.is_view,
                    source="model.py:1",
                )
            )
        return tuple(ops)

    def _storage(self, tensor: _Tensor, storages: dict[_Tensor, StorageId]) -> StorageId:
        base = tensor.base
        if base not in storages:
            storages[base] = self.facts.storage(count(base.shape) * ITEM_BYTES[base.dtype])
        return storages[base]

    def _value(self, tensor: _Tensor, storages: dict[_Tensor, StorageId]) -> ValueId:
        return self.facts.add(
            Value(
                kind="tensor",
                storage=self._storage(tensor, storages),
                dtype=tensor.dtype,
                item_bytes=ITEM_BYTES[tensor.dtype],
                shape=tensor.shape,
                stride=contiguous(tensor.shape) if tensor.stride is None else tensor.stride,
                offset=tensor.offset,
            )
        )
