"""Every private name of torch that offplan uses, in one place.

Tested with torch 2.11.0, 2.13.0 (CPU build) and 2.14.1.  When torch moves or renames one of
these, this is the only file to change.  Nothing here has state.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import _C as torch_c
from torch._C import _get_sdp_priority_order as get_sdp_priority_order
from torch._C import _set_sdp_priority_order as set_sdp_priority_order
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._dynamo.exc import Unsupported as DynamoUnsupported
from torch._dynamo.utils import counters as _dynamo_counters
from torch._functorch import partitioners as _partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import fake_tensor as fake_tensor_module
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    is_fake,
    unset_fake_temporarily,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor as proxy_tensor_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import _scoped_library as scoped_library
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "ENGINE_RUN_BACKWARD",
    "INDUCTOR_ALLOCATES_BY",
    "INDUCTOR_ALLOCATES_FROM",
    "MUST_RECOMPUTE",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "DynamoUnsupported",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TorchRuntimeError",
    "TracingContext",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "aot_module_simplified",
    "boxed_nop",
    "count_aot_call",
    "cudnn_attention",
    "default_partition",
    "dynamo_config",
    "efficient_attention",
    "empty_host_cache",
    "engine_run_backward",
    "fake_tensor_module",
    "flash_attention",
    "functorch_config",
    "fx_traceback",
    "generated_modules",
    "get_proxy_mode",
    "get_sdp_priority_order",
    "graph_break_reasons",
    "inductor",
    "inductor_lowering",
    "inductor_mode_options",
    "inductor_option_names",
    "input_metadata",
    "is_collective",
    "is_current_device",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "math_attention",
    "min_cut_rematerialization_partition",
    "mutated_input_count",
    "partition_saving",
    "proxy_tensor_module",
    "raw_stream",
    "reset_dynamo",
    "saved_storages",
    "scoped_library",
    "sequence_number",
    "set_sdp_priority_order",
    "spin",
    "storage_key",
    "stream_key",
    "torch_c",
    "tracing",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "unset_fake_temporarily",
]

cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math.default


# How a node of a joint graph is tagged that the backward computes again.
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


def partition_saving(
    joint: torch.fx.GraphModule, joint_inputs: Any, saved: Sequence[torch.fx.Node], **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Min-cut's partition of ``joint`` with ``saved`` as what the forward hands to the backward.

    Only what is searched for is given; ``joint`` has been through common subexpressions before.
    """

    def chosen(*args: Any, **kwargs: Any) -> list[torch.fx.Node]:
        return list(saved)

    with (
        mock.patch.object(_partitioners, "choose_saved_values_set", chosen),
        functorch_config.patch(cse=False),
    ):
        return min_cut_rematerialization_partition(joint, joint_inputs, **options)


def is_collective(target: Any) -> bool:
    """Whether all processes take part in the op ``target``."""
    return isinstance(target, OpOverload) and target.namespace in ("_c10d_functional", "c10d")


def empty_host_cache() -> None:
    """Have torch give back the pinned memory that it keeps.  Its public name is newer than 2.11."""
    torch_c._host_emptyCache()


def stream_key(index: int) -> tuple[int, int, int]:
    """What the current stream of GPU ``index`` is known by: all that ``torch.cuda.current_stream``
    asks, in a tenth of its time."""
    found: tuple[int, int, int] = torch_c._cuda_getCurrentStream(index)
    return found


def raw_stream(index: int) -> int:
    """CUDA's handle of the current stream of GPU ``index``, of a process that has used one."""
    found: int = torch_c._cuda_getCurrentRawStream(index)
    return found


def is_current_device(index: int) -> bool:
    """Whether GPU ``index`` is the current one, of a process that has used one."""
    return bool(torch_c._cuda_getDevice() == index)


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for that many cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)


def reset_dynamo() -> None:
    """Forget every compiled graph, and what was counted."""
    torch._dynamo.reset()
    _dynamo_counters.clear()


def inductor() -> Any:
    """What is used of Inductor, imported when first asked for: that takes a second."""
    import torch._inductor.config as config
    import torch._inductor.graph as graph
    from torch._inductor import scheduler
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    return SimpleNamespace(
        config=config,
        graph=graph,
        scheduler=scheduler,
        compile_fx=compile_fx,
        compile_fx_inner=compile_fx_inner,
        Partitioner=CustomPartitionerFn,
        ConstantFolder=UniformValueConstantFolder,
    )


def inductor_lowering() -> Any:
    """What is used of Inductor to see how it lowers a graph, imported when first asked for."""
    import torch._inductor.config as config
    import torch._inductor.graph as graph
    from torch._inductor import ir, scheduler
    from torch._inductor.codegen.simd_kernel_features import MemoryEstimator, SIMDKernelFeatures
    from torch._inductor.codegen.wrapper import ReuseLine
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.memory import reorder_for_peak_memory
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    return SimpleNamespace(
        config=config,
        ir=ir,
        graph=graph,
        GraphLowering=graph.GraphLowering,
        scheduler=scheduler,
        NopKernel=scheduler.NopKernelSchedulerNode,
        DeviceProperties=DeviceProperties,
        MemoryEstimator=MemoryEstimator,
        # Torch 2.11 and newer.
        MixOrder=getattr(scheduler, "FusedMixOrderReductions", None),
        ReuseLine=ReuseLine,
        SIMDKernelFeatures=SIMDKernelFeatures,
        WeakDep=WeakDep,
        reorder_for_peak_memory=reorder_for_peak_memory,
        V=V,
        OrderedSet=OrderedSet,
    )


def has_cpp_compiler() -> bool:
    """Whether Inductor finds what it compiles with for the CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def generated_modules() -> list[Any]:
    """The modules of the code that Inductor has generated in this process."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return [] if codecache is None else list(codecache.PyCodeCache.modules)


# Where that code takes the functions from that allocate its buffers, and what it calls them.
INDUCTOR_ALLOCATES_FROM: Any = torch_c._dynamo.guards
INDUCTOR_ALLOCATES_BY = ("_empty_strided_cpu", "_empty_strided_cuda")

engine_run_backward = torch.autograd._engine_run_backward
# Where torch.autograd looks it up, for patching.
ENGINE_RUN_BACKWARD = (torch.autograd, "_engine_run_backward")


def storage_key(tensor: torch.Tensor) -> int:
    """An identity for the tensor's storage, valid while some tensor keeps that storage alive."""
    return int(tensor.untyped_storage()._cdata)


def inductor_option_names() -> frozenset[str]:
    """What ``torch.compile(options=...)`` takes for Inductor."""
    return frozenset(torch._inductor.list_options())


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """The options that a mode of ``torch.compile`` stands for; KeyError for another word."""
    return dict(torch._inductor.list_mode_options()[mode])


def count_aot_call() -> None:
    """Say that AOTAutograd is called, as torch's wrapper of it does, which its users may go round.

    Where Dynamo splits a graph for DistributedDataParallel, it asks this count.
    """
    _dynamo_counters["aot_autograd"]["total"] += 1


def graph_break_reasons() -> list[str]:
    """Why Dynamo left code out of its graphs since it was last reset, one line each."""
    counted = list(_dynamo_counters["graph_break"])
    frames = _dynamo_counters["frames"]
    if frames["total"] > frames["ok"]:
        # It gave up a whole frame, which it does not count as a break.
        counted += list(_dynamo_counters["unimplemented"])
    texts = [str(text).strip() for text in counted]
    return [text.splitlines()[0].strip() for text in texts if text]


def saved_storages(node: Any) -> dict[int, int]:
    """Storage key -> bytes of the tensors that ``node`` saved itself.

    Tensors behind hooks are left out, and their hooks not run: a checkpoint's would recompute.
    """
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    saved = [item for item in tree_leaves(raw) if getattr(item, "unpack_hook", 0) is None]
    tensors = [item.data for item in saved if isinstance(item.data, torch.Tensor)]
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def mutated_input_count(joint: torch.fx.GraphModule, forward_outputs: int) -> int:
    """How many of a joint graph's first outputs are new contents of inputs.

    AOTAutograd's own count is not where a partitioner could see it yet.
    """
    (output,) = joint.graph.find_nodes(op="output")
    described = tree_leaves(output.meta.get("desc", ()))[:forward_outputs]
    return sum(isinstance(each, InputMutationAOTOutput) for each in described)


def sequence_number(node: Any) -> int:
    """The autograd engine's priority of ``node``; nodes recorded later run earlier."""
    return int(node._sequence_nr())


def input_metadata(node: Any) -> tuple[Any, ...]:
    """Shape, dtype and device that ``node`` expects of each gradient that it receives."""
    return tuple(node._input_metadata)


def tree_leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Leaves of nested containers with where they are (``['mask'][0]``; empty for a lone leaf)."""
    leaves, _ = tree_flatten_with_path(tree)
    found: list[tuple[str, Any]] = []
    for path, leaf in leaves:
        if isinstance(leaf, Mapping):
            inner = [(f"[{key!r}]", item) for key, item in leaf.items()]
            found += [
                (keystr(path) + key + rest, value)
                for key, item in inner
                for rest, value in tree_leaves_with_path(item)
            ]
        else:
            found.append((keystr(path), leaf))
    return found
