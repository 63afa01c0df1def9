"""Backwards that read what their forward overwrote: found in graphs by hand, and in torch's own.

Of torch's graphs nothing is asserted that another version could set right: where compiled gradients
are those of eager mode, nothing may be told; where they are not, it has to be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from offplan.cli import app
from offplan.graph import (
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Op,
    Region,
    SavedValue,
    Storage,
    StorageId,
    TargetRef,
    Value,
    ValueId,
)
from offplan.overwritten import WrongRead, warnings_of, wrong_reads
from offplan.recompute import Choice
from offplan.target import Target
from offplan.trace._torch import reset_dynamo
from offplan.trace.capture import TracedStep, TraceOptions, traced_target

# --- by hand --------------------------------------------------------------------------------------

BUFFER = GraphInput(ValueId(0), "buffer", "running")


def on(storage: int, *shape: int, offset: int = 0) -> Value:
    stride = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
    return Value("tensor", StorageId(storage), "float32", 4, shape, stride, offset)


def step(put: Op, read: Op, *, written: int = 2, saved: int = 0) -> GraphFacts:
    """A forward with a buffer of 8 x 4 (value 0), of which ``put`` makes what is copied into it
    (value 2); ``read`` of its backward has the saved buffer (value 4), rows 6 and 7 (5) and 0 (6).
    """
    ids = [ValueId(number) for number in range(9)]
    values = [on(0, 8, 4), on(1, 8, 4), on(2, 8, 4), on(0, 8, 4)]
    values += [on(0, 8, 4), on(0, 2, 4, offset=24), on(0, 4), on(3, 8, 4), on(4, 8, 4)]
    forward = Graph(
        (BUFFER, GraphInput(ids[1], "input", "x")),
        (
            put,
            Op("copy_", "aten.copy_.default", (ids[0], ids[written]), (ids[3],), mutates=(ids[0],)),
        ),
        (GraphOutput(ids[saved], "saved", "saved 0"),),
    )
    last_rows = Op("slice_1", "aten.slice.Tensor", (ids[4],), (ids[5],))
    first_row = Op("select", "aten.select.int", (ids[4],), (ids[6],))
    backward = Graph(
        (GraphInput(ids[4], "saved", "saved 0"), GraphInput(ids[8], "tangent", "tangent")),
        (last_rows, first_row, read),
        (GraphOutput(ids[7], "gradient", "gradient of x"),),
    )
    return GraphFacts(
        target=TargetRef("model.py"),
        torch="2.14.1",
        device="cuda",
        gpu="",
        attention="auto",
        compiler="aot_eager",
        partitioner="min-cut",
        model=(),
        storages=tuple(Storage(128, "cuda") for _ in range(5)),
        values=tuple(values),
        regions=(Region(forward, backward, (SavedValue(ids[saved], ids[4]),)),),
    )


def found(facts: GraphFacts) -> list[WrongRead]:
    return list(wrong_reads(facts, facts.regions[0]))


def op(name: str, *inputs: int, constants: str = "", makes: int = 7, source: str = "") -> Op:
    overload = f"aten.{name}.default"
    read = tuple(map(ValueId, inputs))
    return Op(name, overload, read, (ValueId(makes),), constants, source=source)


ADDS = "%, [%], %, True"
ADDED = op("add", 0, 1, makes=2, source="model.py:7")
ONE_ROW = op("select_scatter", 0, 1, constants="%, %, 0, 3", makes=2)
LAST_ROW = op("select_scatter", 0, 1, constants="%, %, 0, -1", makes=2)
ROWS = op("slice_scatter", 0, 1, constants="%, %, 0, 1, 3", makes=2)
TO_THE_END = op("slice_scatter", 0, 1, constants="%, %, 0, 1, 9223372036854775807", makes=2)


@pytest.mark.parametrize(
    ("put", "read"),
    [
        (ADDED, op("sin", 4)),
        (ADDED, op("mul", 8, 5)),
        # The same op as in the forward, which makes something else of what is there now.
        (ADDED, op("add", 4, 8)),
        (ONE_ROW, op("sin", 4)),
        # It puts other elements there than the forward, and then all are read.
        (LAST_ROW, op("mul", 8, 5)),
        (TO_THE_END, op("mul", 8, 5)),
        (op("copy", 0, 1, makes=2), op("copy", 8, 4)),
        (op("index_put", 0, 1, constants=ADDS, makes=2), op("index_put", 4, 8, constants=ADDS)),
    ],
)
def test_a_read_of_what_was_overwritten_is_wrong(put, read):
    (wrong,) = found(step(put, read))
    assert (wrong.given, wrong.op) == (BUFFER, read.target)


@pytest.mark.parametrize(
    ("put", "read"),
    [
        (ADDED, op("mul", 8, 8)),
        (ADDED, op("zeros_like", 4)),
        (ADDED, op("copy", 4, 8)),
        # Other elements.
        (ONE_ROW, op("mul", 8, 5)),
        (ONE_ROW, op("mul", 8, 6)),
        (ROWS, op("mul", 5, 6)),
        # What was written, made again of that.
        (ONE_ROW, op("select_scatter", 4, 8, constants="%, %, 0, 3")),
        (op("clamp", 0, makes=2), op("clamp", 4)),
        (op("where", 1, 1, 0, makes=2), op("where", 8, 8, 4)),
    ],
)
def test_no_other_read_is_wrong(put, read):
    assert found(step(put, read)) == []


def test_what_the_forward_saves_after_its_write_is_what_is_meant():
    assert found(step(ADDED, op("sin", 4), saved=3)) == []
    assert found(step(ADDED, op("sin", 4), saved=0)) != []


def test_a_forward_that_goes_on_with_what_it_wrote_has_not_overwritten_it():
    facts = step(ADDED, op("sin", 4))
    (region,) = facts.regions
    goes_on = Op("neg", "aten.neg.default", (ValueId(3),), (ValueId(8),))
    forward = Graph(region.forward.inputs, (*region.forward.ops, goes_on), region.forward.outputs)
    assert not [*wrong_reads(facts, Region(forward, region.backward, region.saved))]
    assert not [*wrong_reads(facts, Region(region.forward, None, ()))]


def test_the_warning_names_the_op_its_line_and_the_buffer():
    assert list(warnings_of(step(ADDED, op("add", 4, 8)))) == [
        "torch compiles this step to wrong gradients: in the backward, aten.add.default "
        "(model.py:7) reads buffer running after the forward wrote there, and means what was there "
        "before; write to it after the backward, or assign a new tensor in its place"
    ]


# --- torch's own ----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("running", torch.full((8,), 2.0))
        self.register_buffer("queue", torch.linspace(0, 1, 64).view(8, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.linear(x)).square().sum()


def set_after(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h / (net.running.abs() + 1)
    net.running[0] = 0.25
    return made


def averaged_after(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h / net.running.sqrt()
    with torch.no_grad():
        net.running.mul_(0.9).add_(h.mean(0).square())
    return made


def cloned_first(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h * net.running.clone()
    net.running.mul_(0.5)
    return made


def warmed_up(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.count.add_(1)
    return h.sin() * (1 - 0.5 ** net.count.float())


def one_row_of_those_read(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h[:, :4] * net.running[4:].sin()
    net.running[5] = 0.5
    return made


def set_before(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.running[0] = 0.25
    net.running[3:5] = h.detach()[0, :2]
    return h / (net.running.abs() + 1)


def clamped_before(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.running.clamp_(max=1.5)
    return h * net.running.sin()


def other_rows(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h[:, :4] * net.running[4:].sin()
    net.running[1] = h.detach().sum()
    net.running[0:2] = 3.0
    return made


def assigned(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = h / (net.running.abs() + 1)
    net.running = net.running * 0.5
    return made


def batch_norm(net: Any, h: torch.Tensor) -> torch.Tensor:
    return net.norm(h).relu()


def batch_norm_and_its_statistics(net: Any, h: torch.Tensor) -> torch.Tensor:
    return net.norm(h).relu() * net.norm.running_var.sqrt()


def counter(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.count.add_(1)
    return h.sin() * net.running.sin()


def rolled_queue(net: Any, h: torch.Tensor) -> torch.Tensor:
    made = (h @ net.queue.clone().detach().t()).softmax(-1)
    net.queue[2:5] = F.normalize(h.detach()[:3], dim=-1)
    return made


WRONG = [set_after, averaged_after, cloned_first, warmed_up, one_row_of_those_read]
RIGHT = [set_before, clamped_before, other_rows, assigned, batch_norm, counter]
# It depends on the compiler.
EITHER = [batch_norm_and_its_statistics, rolled_queue]


def gradients(body: Callable[..., torch.Tensor], compiler: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    reset_dynamo()
    net, x = Net(body), torch.randn(6, 8, requires_grad=True)
    loss = net if compiler is None else torch.compile(net, backend=compiler)
    loss(x).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in net.linear.parameters() if p.grad is not None)]


def is_right(body: Callable[..., torch.Tensor], compiler: str) -> bool:
    expected = gradients(body, None)
    try:
        found = gradients(body, compiler)
    except RuntimeError:
        # Another version may refuse it.
        return False
    pairs = zip(expected, found, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def traced(body: Callable[..., torch.Tensor], compiler: Any = "aot_eager") -> TracedStep:
    torch.manual_seed(0)
    target = Target(Net(body), (torch.randn(6, 8, requires_grad=True),))
    return traced_target(target, TraceOptions("cpu", compiler=compiler))


@pytest.mark.parametrize("body", [*WRONG, *RIGHT, *EITHER], ids=lambda body: body.__name__)
def test_what_torch_compiles_to_wrong_gradients_is_told_and_nothing_else(body):
    assert bool(traced(body).facts.warnings) != is_right(body, "aot_eager")


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.__name__)
def test_nothing_is_told_of_a_step_that_is_right_under_inductor_either(body):
    assert traced(body, "inductor").facts.warnings == ()


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_a_wrong_step_is_known_to_be_wrong_by_what_it_is_called(body):
    """Torch 2.11 and 2.14.1; another version may have set it right."""
    if is_right(body, "aot_eager"):
        pytest.skip(f"torch {torch.__version__} compiles it to the right gradients")
    (warning,) = traced(body).facts.warnings
    name = "count" if body is warmed_up else "running"
    assert f"reads buffer {name} after the forward wrote there" in warning
    assert "test_overwritten.py:" in warning


def test_where_the_backward_computes_nothing_again_nothing_is_wrong():
    found = traced(set_after)
    assert found.under([Choice(0, ())]).warnings == ()
    # And back: what is told is of the graphs at hand.
    assert found.under([]).warnings == found.facts.warnings


def test_analyze_tells_it_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if is_right(set_after, "aot_eager"):
        pytest.skip(f"torch {torch.__version__} compiles it to the right gradients")
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(8, 8)\n"
        "        self.register_buffer('running', torch.ones(8))\n"
        "    def forward(self, x):\n"
        "        made = self.linear(x) / (self.running.abs() + 1)\n"
        "        self.running[0] = 0.25\n"
        "        return made.square().sum()\n"
        "def build():\n"
        "    return Net(), (torch.randn(4, 8),)\n"
    )
    said = "aten.abs.default (model.py:8) reads buffer running after the forward wrote there"
    for format in ("text", "json", "markdown"):
        words = ["analyze", "model.py", "--device", "cpu", "--format", format]
        result = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
        assert result.exit_code == 0, result.output
        assert said in " ".join(result.stdout.split())
    warnings = json.loads(CliRunner().invoke(app, [*words[:-1], "json"]).stdout)["warnings"]
    assert [said in warning for warning in warnings] == [True]
