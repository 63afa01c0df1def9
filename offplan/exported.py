"""The text of exported modules (``offplan.export``): ``<<name>>`` is where a plan's own goes.

What is written with it is read as code, so it is kept as black and ruff want it (tested).
"""

from __future__ import annotations

# What the plan's partitioner is called in ``torch._functorch.partitioners``.
PARTITIONERS = {
    "min-cut": "min_cut_rematerialization_partition",
    "default": "default_partition",
}

OFFLOADING_HEAD = '''<<first_line>>
"""What an offplan plan moves, marked for PyTorch's activation offloading.

Moves <<moved>>.
Leaves out <<left_out_total>> (see LEFT_OUT).

Import this file where the model is compiled, here as ``marks``:

<<usage>>

Copies wait in line with compute unless
``torch._functorch.config.activation_offload_separate_stream`` is set.  PyTorch's pass
chooses when they start and end, so the peak is not the one that the plan predicts.
Values are found by the names of their nodes, and checked by op, dtype, shape and strides.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import <<partitioner>>

'''

COMMON = '''# What the plan was made with.
TORCH = <<torch>>
COMPILER = <<compiler>>


class Saved(NamedTuple):
    """A value that the forward saves; ``storage_bytes`` of all that it is a part of."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_bytes: int
    moves: bool


class Graph(NamedTuple):
    """What one forward saves: ``saved_count`` counts inputs too, which do not move."""

    saved_count: int
    values: tuple[Saved, ...]


class LeftOut(NamedTuple):
    """A storage that the plan moves and that stays here, and why."""

    region: int
    name: str
    op: str
    storage_bytes: int
    why: str


def mark(joint: fx.GraphModule | fx.Graph) -> int:
    """Mark what moves in a joint graph, before it is partitioned; how many are marked.

    Raises ValueError, naming what differs, if the plan has no such graph.
    """
    _, marked = _mark(joint)
    return len(marked)


def joint_pass(joint: fx.GraphModule, joint_inputs: object = None) -> fx.GraphModule:
    """``mark`` in the form of a pass over joint graphs."""
    mark(joint)
    return joint


def _mark(joint: fx.GraphModule | fx.Graph) -> tuple[Graph, list[fx.Node]]:
    graph = joint.graph if isinstance(joint, fx.GraphModule) else joint
    by_name = {node.name: node for node in graph.nodes}
    found = [[_find(by_name, saved) for saved in each.values] for each in GRAPHS]
    differences = [[text for _, text in each if text] for each in found]
    fitting = [place for place, texts in enumerate(differences) if not texts]
    if not fitting:
        nearest = min(differences, key=len, default=["the plan saves nothing"])
        more = f"; and {len(nearest) - 5} more" if len(nearest) > 5 else ""
        raise ValueError(
            f"the plan has no such graph (made with torch {TORCH}, {COMPILER}; "
            f"torch {torch.__version__} here): {'; '.join(nearest[:5])}{more}"
        )
    place = max(fitting, key=lambda each: len(GRAPHS[each].values))
    values = GRAPHS[place].values
    moving = []
    for index, (saved, (outputs, _)) in enumerate(
        zip(values, found[place], strict=True)
    ):
        # Outputs of one op that look the same are told apart only if all of them move.
        if saved.moves and values.count(saved) != len(outputs):
            _warn(saved, "several outputs of its op look the same")
        elif saved.moves:
            moving.append((saved, outputs[values[:index].count(saved)]))
    return GRAPHS[place], _tag(graph, moving)


def _find(by_name: dict[str, fx.Node], saved: Saved) -> tuple[list[fx.Node], str]:
    """The nodes that may be ``saved``, or what differs."""
    node = by_name.get(saved.name)
    if node is None:
        return [], f"there is no {saved.name} ({saved.op})"
    if str(node.target) != saved.op:
        return [], f"{saved.name} is {node.target}, in the plan {saved.op}"
    outputs = [node]
    if isinstance(node.meta.get("val"), (tuple, list)):
        outputs = [user for user in node.users if user.target is operator.getitem]
    wanted = f"{saved.dtype} {list(saved.shape)} with strides {list(saved.stride)}"
    found = [_described(output.meta.get("val")) for output in outputs]
    if wanted not in found:
        return [], f"{saved.name} is {' and '.join(found)}, in the plan {wanted}"
    matching = [n for n, text in zip(outputs, found, strict=True) if text == wanted]
    return matching, ""


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return "no plain tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {list(value.shape)} with strides {list(value.stride())}"


def _warn(saved: Saved, why: str) -> None:
    text = f"{saved.name} stays, {saved.storage_bytes} bytes: {why}"
    warnings.warn(text, stacklevel=4)


'''

OFFLOADING_CODE = '''def partition(
    joint: fx.GraphModule, joint_inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition as the plan was, with PyTorch's activation offloading, and what moves marked.

    Raises ValueError if other values are saved than in the plan, or PyTorch refuses one.
    """
    graph, marked = _mark(joint)
    with torch._functorch.config.patch(enable_activation_offloading=True):
        forward, backward = <<partitioner>>(
            joint, joint_inputs, **options
        )
    (output,) = forward.graph.find_nodes(op="output")
    saved_count = len(output.args[0]) - options["num_fwd_outputs"]
    if saved_count != graph.saved_count:
        raise ValueError(
            f"the forward saves {saved_count} values, in the plan {graph.saved_count}"
        )
    names = {n.name for n in forward.graph.nodes if n.meta.get("saved_for_offloading")}
    if refused := [node.name for node in marked if node.name not in names]:
        raise ValueError(f"PyTorch does not offload {', '.join(refused)}")
    return forward, backward


def _tag(graph: fx.Graph, moving: list[tuple[Saved, fx.Node]]) -> list[fx.Node]:
    marked = []
    for saved, node in moving:
        if node.target is operator.getitem:
            _warn(saved, "PyTorch does not offload one of several outputs of an op")
            continue
        node.meta["should_offload"] = True
        marked.append(node)
    return marked


'''

TAG_HEAD = '''<<first_line>>
"""What an offplan plan moves, tagged CheckpointPolicy.MUST_CPU_OFFLOAD.

Moves <<moved>>.
Leaves out <<left_out_total>> (see LEFT_OUT).

Torch 2.11 to 2.14 define the tag, and nothing in them acts on it.  TorchTitan's graph
trainer does: ``apply_cpu_offload_pass`` inserts the copies.  It, or a reader of your
own, runs on the joint graph after this, where nothing is partitioned: of plans made with
--partitioner default it sees all that they save.  Import this file, here as ``marks``,
where the model is compiled:

<<usage>>

The tag is on the op that allocates the storage, in ``node.meta["recompute"]``: views of
it that the backward reads are for the reader to compute again from what comes back.  The
reader chooses when copies start and end, so the peak is not the one that the plan
predicts.  Values are found by the names of their nodes, and checked by op, dtype, shape
and strides; what shares a storage is read off the fake tensors.
"""

from __future__ import annotations

import operator
import warnings
from typing import NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

'''

TAG_CODE = '''# What the reader of the tags takes for views.
VIEWS = {
<<view_ops>>
}


def _tag(graph: fx.Graph, moving: list[tuple[Saved, fx.Node]]) -> list[fx.Node]:
    sharing: dict[StorageWeakRef, list[fx.Node]] = {}
    for node in graph.nodes:
        if (storage := _storage(node)) is not None:
            sharing.setdefault(storage, []).append(node)
    marked: dict[fx.Node, None] = {}
    for saved, node in moving:
        base, *others = sharing[StorageWeakRef(node.meta["val"].untyped_storage())]
        if why := _refusal(base, others):
            _warn(saved, why)
            continue
        base.meta["recompute"] = CheckpointPolicy.MUST_CPU_OFFLOAD
        marked[base] = None
    return list(marked)


def _storage(node: fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _refusal(base: fx.Node, others: list[fx.Node]) -> str:
    """Why the storage that ``base`` allocates cannot move; empty if it can."""
    forward = [node for node in (base, *others) if not _is_backward(node)]
    if base not in forward:
        return f"{base.name} is the backward's until a partition takes it forward"
    if not any(_is_backward(user) for node in forward for user in node.users):
        return "the backward reads it only where a partition makes it compute again"
    for node in forward[1:]:
        if str(node.target).rpartition(".")[0] not in VIEWS:
            return f"{node.name} ({node.target}) shares it, and is not taken for a view"
    return ""


'''

TABLES = """# What the plan decides about each saved value that an op makes, by graph.
<<tables>>

# What the plan moves besides.
<<left_out>>
"""

# How a user calls it, by the compiler that the plan is for.
OFFLOADING_USAGE = {
    "aot_eager": """    import torch
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=marks.partition
    )
    step = torch.compile(model, backend=backend)
    step(*args).sum().backward()

Or mark only, whatever partitions afterwards:

    import torch._functorch.config

    torch._functorch.config.joint_custom_pass = marks.joint_pass
    torch._functorch.config.enable_activation_offloading = True
    step = torch.compile(model, backend="aot_eager")

The graphs of another compiler are others, and refused: see COMPILER.""",
    "inductor": """    import torch
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

    class Partition(CustomPartitionerFn):
        def __call__(self, joint, joint_inputs, **options):
            return marks.partition(joint, joint_inputs, **options)

        def uuid(self):
            return get_hash_for_files((marks.__file__,))

    torch._inductor.config.custom_partitioner_fn = Partition()
    step = torch.compile(model)
    step(*args).sum().backward()

The graphs of another compiler are others, and refused: see COMPILER.""",
}
TAG_USAGE = {
    "aot_eager": """    import torch
    import torch._functorch.config

    def joint_pass(joint, joint_inputs):
        marks.mark(joint)
        return reader(joint)

    torch._functorch.config.joint_custom_pass = joint_pass
    step = torch.compile(model, backend="aot_eager")
    step(*args).sum().backward()

The graphs of another compiler are others, and refused: see COMPILER.""",
    "inductor": """    import torch
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class JointPass(CustomGraphPass):
        def __call__(self, graph):
            marks.mark(graph)
            reader(graph)

        def uuid(self):
            return get_hash_for_files((marks.__file__,))

    torch._inductor.config.joint_custom_post_pass = JointPass()
    step = torch.compile(model)
    step(*args).sum().backward()

The graphs of another compiler are others, and refused: see COMPILER.""",
}

OFFLOADING_MODULE = OFFLOADING_HEAD + COMMON + OFFLOADING_CODE + TABLES
TAG_MODULE = TAG_HEAD + COMMON + TAG_CODE + TABLES
