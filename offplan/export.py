"""A plan's decisions in forms that other runtimes take.

1.  ``json`` lists the storages that a plan moves, for tools of one's own (``Document``).
2.  The two other forms are Python modules that need torch and nothing else (``offplan.exported`` is
    their text).  Such a module has a table of what the plan decides about each saved value that an
    op of a forward makes, and ``mark``, which marks those that move in a joint graph, before it is
    partitioned: for ``saved-for-offloading`` with ``should_offload``, which PyTorch's own
    activation offloading turns into ``saved_for_offloading``; for ``must-cpu-offload`` with the tag
    ``CheckpointPolicy.MUST_CPU_OFFLOAD``.
3.  A row is matched by the name of its node, and checked by op, dtype, shape and strides.  Names
    are unique in a graph, and the same whenever the same code is traced by the same torch; saved
    positions are not there yet before the partition.  All rows are checked, of values that stay
    too, so that another graph is refused.
4.  One graph can run several times in a step: regions with the same rows are one graph, and a value
    that one of them moves and another keeps is left out.
5.  A storage is *left out* if the receiving pass would refuse it, or would free what somebody still
    reads.  PyTorch's pass takes a value that is saved whole, once, by the op that computed it, and
    contiguous.  The tag goes on the op that allocates, so that views of it may be saved as well, by
    the ops that its reader knows for views.
6.  Neither form says when a copy starts or ends: that is for the pass to choose.  The peak that the
    plan predicts is for its own times.

Sizes are bytes; strides count elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import msgspec

from offplan.errors import PlanError
from offplan.exported import (
    OFFLOADING_MODULE,
    OFFLOADING_USAGE,
    PARTITIONERS,
    TAG_MODULE,
    TAG_USAGE,
)
from offplan.files import FileKind
from offplan.graph import GraphFacts, InputKind, StorageId, digest, timeline
from offplan.plan import Entry, Plan, View, analyze_command
from offplan.transfers import Transfer
from offplan.units import format_binary

Format = Literal["saved-for-offloading", "must-cpu-offload", "json"]

JSON_FILE = FileKind("an offplan export", b'{\n  "offplan_export":')
MODULE_FILE = FileKind("an offplan export", b"# offplan export")
DOCUMENT_VERSION = 1


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What PyTorch's pass and the partitioner call views (get_default_op_list, torch 2.11 to 2.14).
PYTORCH_VIEWS = _words(
    """
    aten.squeeze aten.unsqueeze aten.alias aten.view aten.slice aten.t prims.broadcast_in_dim
    aten.expand aten.as_strided aten.permute aten.select aten.split
    """
)
# What the reader of the tags takes for views, and computes again in the backward (torchtitan).
TAG_VIEWS = _words(
    """
    aten.t aten.transpose aten.view aten._unsafe_view aten.reshape aten.unsqueeze aten.squeeze
    aten.slice aten.select aten.expand aten.permute aten.as_strided aten.alias aten.split
    aten.narrow aten.unfold aten.detach
    """
)
# Their outputs are ``getitem`` nodes.  The plan does not say so, and these are all such ops that
# AOTAutograd leaves in a forward.
SEVERAL_OUTPUTS = _words(
    """
    aten._aminmax aten._batch_norm_no_update aten._batch_norm_with_update
    aten._batch_norm_with_update_functional aten._ctc_loss aten._cudnn_attention_forward
    aten._cudnn_ctc_loss aten._cudnn_rnn aten._efficient_attention_forward aten._embedding_bag
    aten._embedding_bag_forward_only aten._flash_attention_forward aten._histogramdd_bin_edges
    aten._linalg_det aten._linalg_eigh aten._linalg_slogdet aten._linalg_solve_ex aten._linalg_svd
    aten._native_batch_norm_legit aten._native_batch_norm_legit_functional
    aten._native_batch_norm_legit_no_training aten._native_multi_head_attention
    aten._pack_padded_sequence aten._scaled_dot_product_cudnn_attention
    aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_flash_attention
    aten._scaled_dot_product_flash_attention_for_cpu aten._sparse_mm_reduce_impl
    aten._sparse_semi_structured_apply aten._sparse_semi_structured_tile
    aten._to_sparse_semi_structured aten._transform_bias_rescale_qkv aten._unique aten._unique2
    aten._weight_norm_interface aten.adaptive_max_pool2d aten.adaptive_max_pool3d aten.aminmax
    aten.batch_norm_gather_stats aten.batch_norm_gather_stats_with_counts aten.batch_norm_stats
    aten.batch_norm_update_stats aten.cudnn_batch_norm aten.cummax aten.cummin
    aten.fake_quantize_per_channel_affine_cachemask
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    aten.fake_quantize_per_tensor_affine_cachemask aten.fractional_max_pool2d
    aten.fractional_max_pool3d aten.frexp aten.geqrf aten.histogram aten.kthvalue
    aten.linalg_cholesky_ex aten.linalg_eig aten.linalg_inv_ex aten.linalg_ldl_factor_ex
    aten.linalg_lstsq aten.linalg_lu aten.linalg_lu_factor_ex aten.linalg_polar aten.linalg_qr
    aten.log_sigmoid_forward aten.lu_unpack aten.max aten.max_pool2d_with_indices
    aten.max_pool3d_with_indices aten.median aten.min aten.mode
    aten.multilabel_margin_loss_forward aten.nanmedian aten.native_batch_norm aten.native_dropout
    aten.native_group_norm aten.native_layer_norm aten.nll_loss2d_forward aten.nll_loss_forward
    aten.rrelu_with_noise_functional aten.sort aten.split aten.split_copy aten.split_with_sizes
    aten.split_with_sizes_copy aten.std_mean aten.topk aten.triangular_solve aten.unbind
    aten.unbind_copy aten.unique_consecutive aten.unique_dim aten.unique_dim_consecutive
    aten.unsafe_split aten.unsafe_split_with_sizes aten.var_mean
    prims._low_memory_max_pool_with_offsets prims.frexp prims.prepare_softmax_online prims.svd
    """
)
# An overload of an op; what the partitioner itself puts into a forward has another name.
_OVERLOAD = re.compile(r"[a-z]\w*\.\w+\.\w+", re.ASCII | re.IGNORECASE)

_NUMBERS = re.compile(r"\[\n([\d\s,]+)\]", re.ASCII)


class LeftOut(NamedTuple):
    """A storage that the plan moves and the form cannot say: ``why``."""

    region: int
    name: str
    op: str
    size_bytes: int
    why: str

    def __str__(self) -> str:
        size = format_binary(self.size_bytes)
        return f"{self.name} ({self.op}) of region {self.region}, {size}: {self.why}"


@dataclass(frozen=True)
class Export:
    """The file, how many storages of how many bytes it moves, and which it leaves out."""

    text: str
    kind: FileKind
    moved_count: int
    moved_bytes: int
    left_out: tuple[LeftOut, ...]

    @property
    def planned_count(self) -> int:
        return self.moved_count + len(self.left_out)


def export_plan(plan: Plan, to: Format, facts: GraphFacts | None = None) -> Export:
    """The decisions of ``plan`` as ``to``; ``facts`` give the names of ops to ``json``.

    Raises ``PlanError`` if ``facts`` are not of the graphs that the plan is for, or the plan is not
    consistent.
    """
    if facts is not None and digest(facts) != plan.digest:
        raise PlanError(
            f"the plan was not made from these graphs of {facts.target.spec}",
            fix="write both again: " + analyze_command(plan) + " --graph FILE.graph.json",
        )
    if to == "json":
        return _json_export(plan, facts)
    for name, value, known in (
        ("partitioner", plan.partitioner, PARTITIONERS),
        ("compiler", plan.compiler, OFFLOADING_USAGE),
    ):
        if value not in known:
            raise PlanError(
                f"{name}: {value!r} is not one of {', '.join(known)}",
                fix=f"make the plan again with: {analyze_command(plan)}",
            )
    return _module_export(plan, _FORMS[to])


# --- a list of moved storages ---------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True):
    """A place on the timeline: op ``index`` of it, which is op ``position`` of its graph.

    ``name`` and ``target`` are the op's, or null where no graph file was given.  The place after
    the last op is the return.
    """

    index: int
    region: int
    graph: Literal["forward", "backward"]
    position: int
    name: str | None
    target: str | None


class SavedView(msgspec.Struct, frozen=True):
    """One saved value: ``positions`` in the list of values that the forward saves."""

    positions: tuple[int, ...]
    name: str
    op: str
    module: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int


class Moved(msgspec.Struct, frozen=True):
    """One storage that moves, made by ``op``.

    ``range`` is what comes back of it, in bytes from its start, and ``transfer_bytes`` what crosses
    the link each way: less than the range if ``packed``.  It is copied out after
    ``offload_after``, gone before the op after ``release_by``, copied back from before
    ``reload_at`` on, and there before ``needed_by``; null if the backward never reads it.
    """

    region: int
    storage: int
    bytes: int
    device: str
    name: str
    op: str
    module: str
    source: str
    range: tuple[int, int]
    transfer_bytes: int
    packed: bool
    saved: tuple[SavedView, ...]
    offload_after: Position
    release_by: Position
    reload_at: Position | None
    needed_by: Position | None


class Document(msgspec.Struct, frozen=True):
    """The ``json`` form; ``offplan_export`` is its version."""

    offplan_export: int
    target: str
    params: dict[str, str]
    torch: str
    compiler: str
    partitioner: str
    device: str
    digest: str
    moved_bytes: int
    storages: tuple[Moved, ...]


def _json_export(plan: Plan, facts: GraphFacts | None) -> Export:
    place = _places(plan, facts)
    moved = tuple(_moved(entry, transfer, place) for entry, transfer in _transfers(plan))
    document = Document(
        offplan_export=DOCUMENT_VERSION,
        target=plan.target.spec,
        params=plan.target.params,
        torch=plan.torch,
        compiler=plan.compiler,
        partitioner=plan.partitioner,
        device=plan.device,
        digest=plan.digest,
        moved_bytes=plan.moved_bytes,
        storages=moved,
    )
    text = json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False) + "\n"
    # Lists of numbers on one line: texts have no line break that is not escaped.
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    return Export(text, JSON_FILE, len(moved), sum(each.bytes for each in moved), ())


def _transfers(plan: Plan) -> Iterator[tuple[Entry, Transfer]]:
    """Each moved storage with its transfer."""
    by_storage = {(transfer.region, transfer.storage): transfer for transfer in plan.transfers}
    for entry in plan.storages:
        if entry.action != "offload":
            continue
        if entry.region >= len(plan.regions):
            raise PlanError(f"storage {entry.id} is of region {entry.region}, which is not there")
        transfer = None if entry.id is None else by_storage.get((entry.region, entry.id))
        if transfer is None:
            raise PlanError(
                f"storage {entry.id} of region {entry.region} is offloaded, but has no transfer",
                fix=f"make the plan again with: {analyze_command(plan)}",
            )
        yield entry, transfer


def _places(plan: Plan, facts: GraphFacts | None) -> Callable[[int], Position]:
    """From an index on the timeline to what it is the place of."""
    names = [] if facts is None else [(op.name, op.target) for op in timeline(facts)]
    spans: list[tuple[int, int, int, Literal["forward", "backward"]]] = []
    start = 0
    for region, size in enumerate(plan.regions):
        spans.append((start, start + size.forward_ops, region, "forward"))
        start += size.forward_ops
    for region, size in reversed([*enumerate(plan.regions)]):
        # The place after the last op is the backward's return, unless another one starts there.
        spans.append((start, start + size.backward_ops, region, "backward"))
        start += size.backward_ops

    def place(index: int) -> Position:
        name, target = names[index] if index < len(names) else (None, None)
        for first, end, region, graph in spans:
            if first <= index < end:
                return Position(index, region, graph, index - first, name, target)
        first, _, region, graph = spans[-1]
        return Position(index, region, graph, index - first, name, target)

    return place


def _moved(entry: Entry, transfer: Transfer, place: Callable[[int], Position]) -> Moved:
    return Moved(
        region=entry.region,
        storage=transfer.storage,
        bytes=entry.size_bytes,
        device=entry.device,
        name=entry.name,
        op=entry.op,
        module=entry.module,
        source=entry.source,
        range=(transfer.start, transfer.stop),
        transfer_bytes=transfer.transfer_bytes,
        packed=transfer.packed,
        saved=tuple(
            SavedView(
                positions=(view.position, *view.also_at),
                name=view.name,
                op=view.op,
                module=view.module,
                source=view.source,
                dtype=view.dtype,
                shape=view.shape,
                stride=view.stride,
                offset=view.offset,
                bytes=view.logical_bytes,
            )
            for view in entry.views
        ),
        offload_after=place(transfer.offload_after),
        release_by=place(transfer.release_by),
        reload_at=None if transfer.reload_at is None else place(transfer.reload_at),
        needed_by=None if transfer.needed_by is None else place(transfer.needed_by),
    )


# --- what each mechanism can say ------------------------------------------------------------------


def _packet(op: str) -> str:
    """``aten.view`` for ``aten.view.default``."""
    return op.rpartition(".")[0]


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refused_by_pytorch(entry: Entry, transfer: Transfer) -> str:
    """Why PyTorch's pass cannot move ``entry``; empty if it can (definition 5)."""
    common = _refused_by_both(transfer)
    if common:
        return common
    view = entry.views[0]
    if len(entry.views) > 1:
        return f"{len(entry.views)} saved values share it, and the pass copies each by itself"
    if _packet(view.op) in PYTORCH_VIEWS:
        return f"saved as a view ({view.op}), which the pass refuses"
    if _packet(view.op) in SEVERAL_OUTPUTS:
        return f"one of several outputs of {view.op}, which the pass refuses"
    if not _is_contiguous(view):
        return "saved with strides that are not contiguous, which the pass refuses"
    return ""


def _refused_by_tag(entry: Entry, transfer: Transfer) -> str:
    """Why a tag cannot move ``entry``; empty if it can (definition 5)."""
    common = _refused_by_both(transfer)
    if common:
        return common
    if _packet(entry.op) in TAG_VIEWS:
        return f"made by {entry.op}, which the reader of the tag takes for a view"
    for view in entry.views:
        packet = _packet(view.op)
        if view.name != entry.name and packet not in TAG_VIEWS - SEVERAL_OUTPUTS:
            return f"saved through {view.op}, which the reader of the tag cannot compute again"
    return ""


def _refused_by_both(transfer: Transfer) -> str:
    if transfer.packed:
        return (
            f"the plan copies only {format_binary(transfer.transfer_bytes)} of it, "
            "in pieces; this would copy all of it"
        )
    if transfer.reload_at is None:
        return "the backward never reads it, and nothing brings it back"
    return ""


# --- the table ------------------------------------------------------------------------------------

_INPUT_KINDS = frozenset(get_args(InputKind))
_Key = tuple[int, StorageId | None]


class _Row(NamedTuple):
    """A saved value as the joint graph shows it."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Form(NamedTuple):
    """One of the two module forms: why it leaves an entry out, and the text of its module."""

    name: Format
    refusal: Callable[[Entry, Transfer], str]
    code: str
    usage: Mapping[str, str]


def _module_export(plan: Plan, form: _Form) -> Export:
    refusals = {
        (entry.region, entry.id): form.refusal(entry, transfer)
        for entry, transfer in _transfers(plan)
    }
    graphs = _graphs(plan)
    for graph in graphs:
        _leave_out_what_other_runs_keep(graph, refusals)
    moved = [entry for entry in plan.storages if refusals.get((entry.region, entry.id)) == ""]
    left_out = tuple(
        LeftOut(entry.region, entry.name, entry.op, entry.size_bytes, why)
        for entry in plan.storages
        if (why := refusals.get((entry.region, entry.id), ""))
    )
    tables = [_table(plan, graph, refusals) for graph in graphs]
    text = _module_text(plan, form, tables, moved, left_out)
    return Export(text, MODULE_FILE, len(moved), sum(entry.size_bytes for entry in moved), left_out)


class _Graph(NamedTuple):
    """The saved values of one graph, and of each region that ran it the entries they are of."""

    rows: tuple[_Row, ...]
    regions: tuple[int, ...]
    runs: tuple[tuple[tuple[Entry, View], ...], ...]


def _graphs(plan: Plan) -> list[_Graph]:
    """The graphs of ``plan`` that save something (definition 4), in the order they first ran."""
    found: dict[tuple[_Row, ...], list[tuple[int, tuple[tuple[Entry, View], ...]]]] = {}
    for region in range(len(plan.regions)):
        saved = [
            (entry, view)
            for entry in plan.storages
            if entry.region == region
            for view in entry.views
            if _is_made_in_the_graph(entry, view)
        ]
        saved.sort(key=lambda pair: pair[1].position)
        rows = tuple(_Row(v.name, v.op, v.dtype, v.shape, v.stride) for _, v in saved)
        if rows:
            found.setdefault(rows, []).append((region, tuple(saved)))
    return [
        _Graph(rows, tuple(region for region, _ in runs), tuple(saved for _, saved in runs))
        for rows, runs in found.items()
    ]


def _is_made_in_the_graph(entry: Entry, view: View) -> bool:
    """Whether a node of the joint graph computes it, of a size that the plan knows.

    What the partitioner adds by itself, for random state, is in no joint graph.
    """
    return (
        entry.id is not None
        and view.op not in _INPUT_KINDS
        and _OVERLOAD.fullmatch(view.op) is not None
        and view.verdicts["whole-storage"].rule not in ("symbolic_size", "unsupported")
    )


def _leave_out_what_other_runs_keep(graph: _Graph, refusals: dict[_Key, str]) -> None:
    for of_each_run in zip(*graph.runs, strict=True):
        keys = [(entry.region, entry.id) for entry, _ in of_each_run]
        if all(refusals.get(key) == "" for key in keys):
            continue
        for key in keys:
            if refusals.get(key) == "":
                refusals[key] = "its graph runs again, and keeps it there"


def _table(plan: Plan, graph: _Graph, refusals: dict[_Key, str]) -> str:
    """The graph as an element of ``GRAPHS``."""
    lines = ["    Graph("]
    numbers = ", ".join(map(str, graph.regions))
    lines.append(f"        # Region{'s' if len(graph.regions) > 1 else ''} {numbers} of the plan.")
    lines += [f"        saved_count={plan.regions[graph.regions[0]].saved},", "        values=("]
    where = ""
    for row, (entry, view) in zip(graph.rows, graph.runs[0], strict=True):
        here = _one_line(" ".join(filter(None, (view.module, view.source))))
        if here and here != where:
            lines.append(f"            # {here}")
        where = here
        moves = refusals.get((entry.region, entry.id)) == ""
        arguments = [*map(_literal, row), str(entry.size_bytes), str(moves)]
        lines += _call("Saved", arguments, indent=12)
    return "\n".join([*lines, "        ),", "    ),"])


def _literal(value: object) -> str:
    """``value`` as black writes it."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        # Black takes the quotes that need fewer backslashes.
        return repr(value) if "\\" in text else text
    return repr(value)


def _call(name: str, arguments: Sequence[str], indent: int) -> list[str]:
    """A call in a tuple, on one line if it is within 88 columns."""
    margin = " " * indent
    line = f"{margin}{name}({', '.join(arguments)}),"
    if len(line) <= 88:
        return [line]
    return [f"{margin}{name}(", *(f"{margin}    {each}," for each in arguments), f"{margin}),"]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


# --- the module -----------------------------------------------------------------------------------


def _module_text(
    plan: Plan,
    form: _Form,
    tables: Iterable[str],
    moved: Sequence[Entry],
    left_out: Sequence[LeftOut],
) -> str:
    left_out_lines = [
        line
        for each in left_out
        for line in _call("LeftOut", [_literal(value) for value in each], indent=4)
    ]
    texts = {
        "first_line": _one_line(
            f"{MODULE_FILE.first_bytes.decode()} --to {form.name}, of the plan that this makes:"
        )
        + "\n"
        + _one_line(f"# {analyze_command(plan)}"),
        "usage": form.usage[plan.compiler],
        "moved": _counted([entry.size_bytes for entry in moved]),
        "left_out_total": _counted([each.size_bytes for each in left_out]),
        "torch": _literal(plan.torch),
        "compiler": _literal(plan.compiler),
        "partitioner": PARTITIONERS[plan.partitioner],
        "view_ops": "\n".join(f'    "{op}",' for op in sorted(TAG_VIEWS)),
        "tables": _tuple("GRAPHS: tuple[Graph, ...]", "\n".join(tables)),
        "left_out": _tuple("LEFT_OUT: tuple[LeftOut, ...]", "\n".join(left_out_lines)),
    }
    # In one pass: what is put in may look like a place to put something.
    return re.sub(r"<<(\w+)>>", lambda found: texts[found[1]], form.code)


def _counted(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} storage{'' if len(sizes) == 1 else 's'}, {sum(sizes)} bytes"


def _tuple(name: str, lines: str) -> str:
    return f"{name} = (\n{lines}\n)" if lines else f"{name} = ()"


_FORMS = {
    form.name: form
    for form in (
        _Form("saved-for-offloading", _refused_by_pytorch, OFFLOADING_MODULE, OFFLOADING_USAGE),
        _Form("must-cpu-offload", _refused_by_tag, TAG_MODULE, TAG_USAGE),
    )
}
