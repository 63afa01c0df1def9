"""How one captured graph becomes a compiled pair, by the compiler that a plan names.

1.  ``aot_eager``: AOTAutograd traces forward and backward; the pair runs op by op.
2.  ``inductor``: the same through Inductor's own entry point, so that its passes over the captured
    and the joint graph and its decompositions come first.  What is partitioned is what Inductor
    lowers; ``lower`` is the rest of it: its later passes, scheduling and code generation.
3.  Either way a ``Pair`` partitions the joint graph, and then gets both graphs to compile, which
    it may do with ``lower`` or not at all.
4.  Where transfers were inserted, Inductor neither reorders ops to lower the peak, which would move
    releases to their offloads, nor hands the memory of one buffer to another, which a copy may
    still read.  Freeing and allocating instead leaves the peak as it is.
5.  How Inductor fuses the rest does not depend on them: it goes by how many operations lie between
    two, and would else fuse less, and other kernels than a trace says.
6.  Before it partitions, Inductor times whether the operands of matrix products had better be
    padded.  It would make other graphs from run to run, and none without a GPU, so it is only done
    where it is forced (``force_shape_pad``), or where the caller's options say so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx

from offplan import __version__
from offplan.errors import TraceError, UsageError
from offplan.graph import Compiler
from offplan.trace._torch import (
    aot_module_simplified,
    boxed_nop,
    default_partition,
    functorch_config,
    inductor,
    min_cut_rematerialization_partition,
)

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
# A graph and its example inputs to what runs it; it takes its arguments in a list that it empties.
Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]

# What the names of the operators' namespaces begin with that are transfers in a graph.
TRANSFERS = "offplan_"
# As Inductor names itself in its compiled code caches.
_CACHE_KEY = f"offplan {__version__}".encode()


def _default_partition(
    joint: fx.GraphModule, joint_inputs: Any, *, compiler: str = "", **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    return default_partition(joint, joint_inputs, **options)


PARTITIONERS: dict[str, Partition] = {
    "min-cut": min_cut_rematerialization_partition,
    "default": _default_partition,
}


class Pair(Protocol):
    """Definition 3."""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]: ...

    def compile_forward(
        self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower
    ) -> Callable[..., Any]: ...

    def compile_backward(
        self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower
    ) -> Callable[..., Any]: ...

    @property
    def has_transfers(self) -> bool:
        """Whether ``partition`` has inserted any."""


def compile_pair(
    compiler: Compiler,
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    pair: Pair,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What runs the captured graph ``module``, compiled as ``pair`` says.

    ``options`` are Inductor's own, as ``torch.compile`` takes them.
    """
    # What the autograd cache keeps was partitioned before; and donated buffers would refuse a
    # backward that keeps its graph, to save what is freed in time anyway.
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
        if compiler == "inductor":
            return _compile_by_inductor(module, example_inputs, pair, dict(options or {}))
        return aot_module_simplified(
            module,
            example_inputs,
            fw_compiler=partial(pair.compile_forward, lower=boxed_nop),
            bw_compiler=partial(pair.compile_backward, lower=boxed_nop),
            partition_fn=pair.partition,
            keep_inference_input_mutations=True,
        )


def _compile_by_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    pair: Pair,
    options: dict[str, Any],
) -> Callable[..., Any]:
    names = inductor()

    class Partitioner(names.Partitioner):  # type: ignore[misc, name-defined]
        def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            return pair.partition(joint, joint_inputs, **options)

        def uuid(self) -> Any:
            # Inductor's cache is asked after the partition, for the graphs as they are then.
            return _CACHE_KEY

        def __reduce__(self) -> Any:
            # As a setting it is part of that cache's keys, too.
            return bytes, (_CACHE_KEY,)

    def compile_one(
        graph: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        compile_ = pair.compile_backward if options.get("is_backward") else pair.compile_forward
        return compile_(graph, inputs, lower=partial(_lower, names, pair, options))

    if names.config.custom_partitioner_fn is not None:
        raise TraceError(
            "torch._inductor.config.custom_partitioner_fn is set, and offplan partitions by itself",
            fix="unset it, or plan for --compiler aot_eager",
        )
    # Definition 6.
    with names.config.patch(
        custom_partitioner_fn=Partitioner(), shape_padding=names.config.force_shape_pad
    ):
        return names.compile_fx(
            module, example_inputs, inner_compile=compile_one, config_patches=options or None
        )


def _aligned_host_inputs(lowering: Any) -> Any:
    """Have Inductor take host memory to be aligned, as what was offloaded is.

    It would not, and then neither a buffer that is reloaded from it, so that kernels that read the
    buffer would load it element by element.
    """
    original = lowering.should_assume_input_aligned

    def is_aligned(example: torch.Tensor) -> bool:
        return example.device.type == "cpu" or original(example)

    return mock.patch.object(lowering, "should_assume_input_aligned", is_aligned)


def _fused_as_without(scheduler: Any) -> Any:
    """Have Inductor number operations, before it fuses them, as if there were no transfers, which
    stand between the others (definition 5)."""
    fuse_nodes = scheduler.Scheduler.fuse_nodes

    def renumbered(self: Any, nodes: list[Any]) -> Any:
        transfers = [node for node in nodes if _is_transfer(node)]
        orders = sorted(node.min_order for node in transfers)
        for node in set(nodes).difference(transfers):
            node.min_order -= bisect_left(orders, node.min_order)
            node.max_order -= bisect_left(orders, node.max_order)
        for node in transfers:
            before = bisect_left(orders, node.min_order)
            node.min_order += (before + 1) / (len(orders) + 1) - before - 1
            node.max_order = node.min_order
        return fuse_nodes(self, nodes)

    return mock.patch.object(scheduler.Scheduler, "fuse_nodes", renumbered)


def _is_transfer(node: Any) -> bool:
    """Whether an operation is a transfer, or takes what one returns."""
    called = node.node
    if type(called).__name__ == "MultiOutput":
        called = called.inputs[0]
    overload = getattr(called, "op_overload", None)
    return str(getattr(overload, "namespace", "")).startswith(TRANSFERS)


def _refuse_cuda_graphs(names: Any) -> None:
    if names.config.triton.cudagraphs:
        raise UsageError(
            'CUDA graphs are on (mode="reduce-overhead" or "max-autotune", or '
            "torch._inductor.config.triton.cudagraphs), and a graph with transfers cannot be "
            "recorded into one: each run leases its own host memory, and its copies wait on "
            "events of other streams",
            fix='switch them off: mode="max-autotune-no-cudagraphs", or '
            "torch._inductor.config.triton.cudagraphs = False",
        )


def _lower(
    names: Any,
    pair: Pair,
    options: dict[str, Any],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
) -> Callable[[list[Any]], Any]:
    if not pair.has_transfers:
        return names.compile_fx_inner(graph, inputs, **options)
    _refuse_cuda_graphs(names)
    # Definitions 4 and 5.
    with (
        names.config.patch(reorder_for_peak_memory=False, allow_buffer_reuse=False),
        _aligned_host_inputs(names.graph),
        _fused_as_without(names.scheduler),
    ):
        return names.compile_fx_inner(graph, inputs, **options)
