"""Gradients of fake CUDA tensors on a machine with no GPU.

The C++ autograd engine asks the CUDA driver for a context before it runs a node whose tensors are
on a GPU, fake ones included.  ``python_backward`` puts a walk of the graph from Python in its
place, which must record the very ops that the engine would, in the same order:

1.  Only nodes on a path to a requested input run.
2.  Of the nodes whose gradients have all arrived, the one recorded last in the forward runs first.
3.  Gradients that meet at one input of a node are added in the order in which they arrive.
4.  Each gradient is brought to the shape and dtype that the receiving node states, by summing
    over broadcast dimensions (this is where bias gradients are reduced) and casting.
5.  Grad mode is off: with it on, several backwards record their twice-differentiable form.

Assumes that nothing registered hooks on the nodes except AOTAutograd's own, which carry source
lines from forward to backward nodes and are reproduced here.  Double backward is refused.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import get_gradient_edge

from offplan.errors import TraceError
from offplan.trace._torch import ENGINE_RUN_BACKWARD, fx_traceback, input_metadata, sequence_number

Gradient = torch.Tensor | None


@contextmanager
def python_backward() -> Iterator[None]:
    """Walk autograd graphs from Python inside the context, wherever torch would run its engine."""
    with _record_materialize_choice(), mock.patch.object(*ENGINE_RUN_BACKWARD, _run_backward):
        yield


@contextmanager
def _record_materialize_choice() -> Iterator[None]:
    # The engine fills missing gradients of a Python function with zeros unless its forward said not
    # to, but torch offers that choice for writing only.
    original = FunctionCtx.set_materialize_grads

    def remember(self: FunctionCtx, value: bool) -> None:
        original(self, value)
        self._offplan_materialize_grads = value  # type: ignore[attr-defined]

    FunctionCtx.set_materialize_grads = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionCtx.set_materialize_grads = original  # type: ignore[method-assign]


def _run_backward(
    outputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[Gradient],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[torch.Tensor],
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Gradient, ...]:
    """What the engine's entry point does, for the calls that AOTAutograd makes of it."""
    if create_graph or accumulate_grad:
        raise TraceError(
            "double backward (autograd.grad with create_graph) cannot be traced without a GPU",
            fix="leave the gradient penalty out of the traced step, or trace with --device cpu",
        )
    with torch.no_grad():
        found = _Walk(outputs, inputs).run(grad_outputs)
    if not allow_unreachable and any(gradient is None for gradient in found):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used")
    return found


class _Walk:
    """One backward pass: the nodes that must run, and the gradients that wait for them."""

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.roots = [_edge(output) for output in outputs]
        self.wanted = [_edge(tensor) for tensor in inputs]
        self.wanted_nodes = {node for node, _ in self.wanted}
        self.needed = _needed_nodes([node for node, _ in self.roots], self.wanted_nodes)
        self.waiting = self._edge_counts()
        self.buffers: dict[Any, list[Gradient]] = {}
        self.ready: list[tuple[int, int, Any]] = []
        self.arrival = itertools.count()
        self.captured: dict[tuple[Any, int], Gradient] = {}

    def run(self, seeds: Sequence[Gradient]) -> tuple[Gradient, ...]:
        self._deliver(self.roots, _fitted(self.roots, seeds))
        while self.ready:
            _, _, node = heapq.heappop(self.ready)
            gradients = self.buffers.pop(node)
            if node in self.wanted_nodes:
                self.captured.update({(node, i): g for i, g in enumerate(gradients)})
            if node in self.needed:
                self._run_node(node, gradients)
        return tuple(self.captured.get(edge) for edge in self.wanted)

    def _edge_counts(self) -> dict[Any, int]:
        counts: dict[Any, int] = {}
        sources = [self.roots, *(node.next_functions for node in self.needed)]
        for edges in sources:
            for node, _ in edges:
                if self._takes_part(node):
                    counts[node] = counts.get(node, 0) + 1
        return counts

    def _takes_part(self, node: Any) -> bool:
        return node is not None and (node in self.needed or node in self.wanted_nodes)

    def _run_node(self, node: Any, gradients: list[Gradient]) -> None:
        stack = list(node.metadata.get("traceback_", []))
        _enter_node(stack, sequence_number(node))
        # Fitted before the node is left, so that the sums belong to it as the engine's do.
        results = _fitted(node.next_functions, _call(node, gradients))
        _leave_node(stack)
        self._deliver(node.next_functions, results)

    def _deliver(self, edges: Sequence[tuple[Any, int]], gradients: Sequence[Gradient]) -> None:
        for (node, position), gradient in zip(edges, gradients, strict=True):
            if not self._takes_part(node):
                continue
            buffer = self.buffers.setdefault(node, [None] * len(input_metadata(node)))
            if gradient is not None:
                held = buffer[position]
                buffer[position] = gradient if held is None else held + gradient
            self.waiting[node] -= 1
            if self.waiting[node] == 0:
                # The arrival breaks ties; nodes themselves do not compare.
                heapq.heappush(self.ready, (-sequence_number(node), next(self.arrival), node))


def _edge(tensor: torch.Tensor) -> tuple[Any, int]:
    if tensor.grad_fn is not None:
        # Not get_gradient_edge: for a Python function it makes a view, which would be traced.
        return tensor.grad_fn, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _needed_nodes(roots: list[Any], wanted: set[Any]) -> set[Any]:
    """Nodes with a path of at least one edge to a wanted node: those that have to run."""
    needed: set[Any] = set()
    seen: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, children_done = stack.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if children_done:
            if any(child in needed or child in wanted for child in children):
                needed.add(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((child, False) for child in children if child not in seen)
    return needed


def _call(node: Any, gradients: list[Gradient]) -> list[Gradient]:
    if not isinstance(node, BackwardCFunction):
        results = node(*gradients)
        return list(results) if isinstance(results, tuple) else [results]
    if getattr(node, "_offplan_materialize_grads", True):
        gradients = [
            _zeros(meta) if gradient is None else gradient
            for gradient, meta in zip(gradients, input_metadata(node), strict=True)
        ]
    results = node.apply(*gradients)
    return _match_edges(node, list(results) if isinstance(results, tuple) else [results])


def _zeros(metadata: Any) -> torch.Tensor:
    # The overload with just the options that the engine passes: the graph records them.
    return torch.ops.aten.zeros.default(
        list(metadata.shape),
        dtype=metadata.dtype,
        layout=torch.strided,
        device=metadata.device,
    )


def _match_edges(node: Any, results: list[Gradient]) -> list[Gradient]:
    """Results of a Python function, one per argument, as one per edge (tensor arguments only)."""
    given = iter([g for g, used in zip(results, node.needs_input_grad, strict=False) if used])
    return [None if child is None else next(given, None) for child, _ in node.next_functions]


def _fitted(edges: Sequence[tuple[Any, int]], gradients: Sequence[Gradient]) -> list[Gradient]:
    """Each gradient as the node at the end of its edge wants it (definition 4)."""
    return [
        gradient
        if gradient is None or node is None
        else _fit(gradient, input_metadata(node)[position])
        for (node, position), gradient in zip(edges, gradients, strict=True)
    ]


def _fit(gradient: torch.Tensor, metadata: Any) -> torch.Tensor:
    if gradient.shape != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    if gradient.dtype != metadata.dtype:
        gradient = gradient.to(metadata.dtype)
    if gradient.device != metadata.device and gradient.dim() == 0:
        gradient = gradient.to(metadata.device)
    return gradient


def _enter_node(stack: list[str], sequence: int) -> None:
    fx_traceback.set_stack_trace(stack)
    fx_traceback.set_grad_fn_seq_nr(sequence)
    # Newer than 2.11.
    getattr(fx_traceback, "_mark_autograd_backward", lambda: None)()


def _leave_node(stack: list[str]) -> None:
    fx_traceback.set_stack_trace([*stack, fx_traceback.GRADIENT_ACC_SPECIAL_STACK])
    fx_traceback.reset_grad_fn_seq_nr()
    getattr(fx_traceback, "_reset_autograd_backward", lambda: None)()
