"""A graph as torch prints it, read without running it.

1.  A printed graph is a module whose ``forward`` assigns the result of one op to one name in each
    line, and returns a tuple.  A name is annotated with what it is: ``f32[2, 8][8, 1]cuda:0`` is a
    dtype, a shape, a stride and a device, ``Sym(2*s0)`` a size.
2.  A comment above a line says where in the user's program it and the lines below it come from.
3.  Beside a returned name, newer versions of torch say what it is.

Sizes may be expressions of symbols; ``Sizes`` gives them the values that they had.  This module
needs no torch.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offplan.errors import FileFormatError, TraceError

_SOURCE = re.compile(r"#.*?File: (.+?):(\d+) in ")
_CLASS = re.compile(r"^(\s*)class [^\n(]*\(", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#")
_TENSOR = re.compile(r"^(\w+)\[(.*?)\]\[(.*?)\](\w+(?::\d+)?)$")
_SYMBOLIC = re.compile(r"^Sym\((.*)\)$")
_MUTATION = "InputMutationAOTOutput"
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "ToFloat": float,
    "TruncToInt": int,
    "Identity": lambda a: a,
}


@dataclass(frozen=True)
class TensorText:
    """What an annotation says of a tensor; ``dtype`` in torch's short form (``bf16``)."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


@dataclass(frozen=True)
class Placeholder:
    name: str
    annotation: str


@dataclass(frozen=True)
class Line:
    """``name = expression``, with its annotation and the user's line, either empty if not given."""

    name: str
    annotation: str
    expression: ast.expr
    file: str
    line: int


@dataclass(frozen=True)
class GraphText:
    placeholders: tuple[Placeholder, ...]
    lines: tuple[Line, ...]
    outputs: tuple[ast.expr, ...]
    mutated_count: int


def read_graph(text: str, name: str) -> GraphText:
    """The printed graph ``text``, which messages call ``name``.

    Raises ``FileFormatError`` for text that is no printed graph.
    """
    try:
        forward = forward_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileFormatError(f"{name} is not a printed graph: {error}") from error
    if forward is None or not isinstance(forward.body[-1], ast.Return):
        raise FileFormatError(f"{name} is not a printed graph: it has no forward that returns")
    sources = _sources(text)
    lines = [_line(s, sources, name) for s in forward.body[:-1] if not _is_deletion(s)]
    returned = forward.body[-1]
    value = returned.value
    outputs = tuple(value.elts) if isinstance(value, ast.Tuple | ast.List) else (value,)
    last = text.splitlines()[returned.lineno - 1 :]
    return GraphText(
        placeholders=tuple(
            Placeholder(argument.arg, _annotation(argument.annotation))
            for argument in forward.args.args[1:]
        ),
        lines=tuple(lines),
        outputs=tuple(output for output in outputs if output is not None),
        mutated_count=sum(_MUTATION in line for line in last),
    )


def forward_of(text: str) -> ast.FunctionDef | None:
    """The outermost ``forward`` of a printed module.  Raises what ``ast.parse`` raises."""
    # A class is called as what was compiled is, which may be ``<lambda>``.
    for statement in ast.parse(_CLASS.sub(r"\1class Printed(", text)).body:
        for inner in getattr(statement, "body", ()):
            if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                return inner
    return None


def _is_deletion(statement: ast.stmt) -> bool:
    """``a = b = None``: torch prints where a value is last used."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is None
    )


def _line(statement: ast.stmt, sources: list[tuple[str, int]], graph: str) -> Line:
    target: ast.expr | None = None
    annotation = ""
    if isinstance(statement, ast.AnnAssign):
        target, annotation = statement.target, _annotation(statement.annotation)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    value = getattr(statement, "value", None)
    if not isinstance(target, ast.Name) or value is None:
        raise FileFormatError(f"{graph} has a line that is no op: {ast.unparse(statement)[:80]}")
    return Line(target.id, annotation, value, *sources[statement.lineno - 1])


def _annotation(expression: ast.expr | None) -> str:
    value = getattr(expression, "value", None)
    return value if isinstance(value, str) else ""


def _sources(text: str) -> list[tuple[str, int]]:
    """For each line of ``text``, the user's file and line that the comment above it names."""
    found: list[tuple[str, int]] = []
    current = ("", 0)
    for line in text.splitlines():
        if _COMMENT.match(line):
            match = _SOURCE.search(line)
            current = (match[1], int(match[2])) if match else ("", 0)
        found.append(current)
    return found


@dataclass(frozen=True)
class Sizes:
    """The values of symbols, and what expressions of them come to."""

    values: Mapping[str, int | float]
    graph: str

    def tensor(self, annotation: str) -> TensorText | None:
        """What ``annotation`` says of a tensor; None if it is no tensor's."""
        match = _TENSOR.match(annotation)
        if match is None:
            return None
        shape, stride = self._numbers(match[2]), self._numbers(match[3])
        return TensorText(match[1], shape, stride, match[4])

    def number(self, annotation: str) -> int | float | None:
        """The value of a size (``Sym(2*s0)``); None if it is none."""
        match = _SYMBOLIC.match(annotation)
        return None if match is None else self._value(_expression(match[1], self.graph))

    def _numbers(self, text: str) -> tuple[int, ...]:
        if not text.strip():
            return ()
        # A lone number is a tuple, too.
        tree = _expression(f"({text},)", self.graph)
        return tuple(int(self._value(item)) for item in getattr(tree, "elts", ()))

    def _value(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
            return tree.value
        if isinstance(tree, ast.Name) and tree.id in self.values:
            return self.values[tree.id]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._value(tree.operand)
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
            return combine(tree.op, self._value(tree.left), self._value(tree.right))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            function = _FUNCTIONS.get(tree.func.id)
            if function is not None:
                return function(*(self._value(argument) for argument in tree.args))
        if isinstance(tree, ast.Name):
            raise TraceError(
                f"graph {self.graph} has a size {tree.id} that the trace does not say",
                fix=f"give it: -p {tree.id}=128",
            )
        raise TraceError(f"graph {self.graph} has a size that cannot be read: {ast.unparse(tree)}")


def combine(kind: ast.operator, left: Any, right: Any) -> Any:
    """The sum, product, ... of two numbers.  Raises ``TraceError`` for what is no such operator."""
    function = _OPERATORS.get(type(kind))
    if function is None or not all(isinstance(side, int | float) for side in (left, right)):
        raise TraceError(f"a graph computes a size in a way that cannot be read: {ast.dump(kind)}")
    if isinstance(kind, ast.Pow) and abs(right) > 64:
        raise TraceError(f"a graph raises a size to the power {right}")
    try:
        return function(left, right)
    except ArithmeticError as error:
        raise TraceError(f"a graph computes a size that is none: {error}") from error


def _expression(text: str, graph: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FileFormatError(f"graph {graph} has a size that cannot be read: {text}") from error
