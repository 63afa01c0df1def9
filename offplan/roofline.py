"""How long an op takes on a device, from its sizes and what the device can do at the most.

1.  An op takes a fixed time for each kernel that it launches, and then the longest of: its
    arithmetic over the rate of its dtype, its traffic over the memory rate, and its elements over
    the rate of its kind.
2.  *Traffic* is the bytes of its inputs that an op can touch, each input once (an expanded one has
    fewer bytes than elements), and the bytes that it writes.
3.  An *elementwise* op whose operands all lie alike, each dense, runs as fast as memory.  Any other
    one (broadcast, transposed, sliced, cast to wider elements) addresses each element on its own,
    at the *element rate* of the device, whatever their size.
4.  A *product* pads its result to whole tiles, and its tiles to whole rounds of the
    multiprocessors, unless it can split the summed dimension.  Rows that are not aligned fall back
    to kernels that are several times slower.
5.  A *convolution* takes its arithmetic and its traffic one after the other; all but those of
    single elements in place, and of images with their channels last, also convert what they read
    and write to another layout and back.
6.  *Attention* is two products forward and five backward, half of each under a causal mask.
7.  What remains (reductions, normalizations, look-ups, scatters, pooling) has a part of the element
    rate by kind, which is lower where few rows or channels leave multiprocessors idle.
8.  What a compiler writes itself (``fusion.KERNEL``) is as fast as memory, where it reduces nearly
    so; among such kernels, products and attention have a part of their rates.

All constants were fitted to times of single ops in training steps of twelve models on an H200 with
torch 2.11; those of a compiler's to times of kernels in steps that Inductor compiled of two models,
and to such steps.  Times that depend on values (how often an index repeats) are of ordinary ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from offplan.fusion import KERNEL, kernel_said
from offplan.graph import GraphFacts, Op, StorageId, Value, ValueId


@dataclass(frozen=True)
class Rates:
    """What a device reaches, per second.

    ``matmul_flops_per_s`` has rates by dtype, and ``tf32``; float32 is always there.  The
    attention rates are of causal attention in 16-bit floats, 128 wide.
    """

    memory_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    kernel_s: float
    multiprocessor_count: int

    @property
    def elements_per_s(self) -> float:
        """Definition 3: instruction-bound, as products of float32 are."""
        return self.matmul_flops_per_s["float32"] / _FLOPS_PER_ELEMENT

    def matmul(self, dtype: str) -> float:
        rates = self.matmul_flops_per_s
        for name in (dtype, *_NEXT_BEST.get(dtype, ())):
            if name in rates:
                return rates[name]
        return rates["float32"]


_FLOPS_PER_ELEMENT = 128
# Which rate stands in for one that a device does not have.
_NEXT_BEST = {"bfloat16": ("float16",), "float16": ("bfloat16",), "tf32": ("float32",)}
_HALVES = ("bfloat16", "float16")

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
_CONVOLUTIONS = {"convolution", "convolution_backward"}
_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Ops that read rows of their first input: as much as they return.
_LOOKUPS = {"embedding", "index", "_unsafe_index", "index_select", "gather"}
# Ops that only ask their inputs for sizes.
_READ_FOR_SIZES = {
    *("nll_loss_backward", "new_zeros", "new_ones", "new_full"),
    *("zeros_like", "ones_like", "full_like"),
}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "prod", "any", "all"),
    *("argmax", "argmin", "norm", "linalg_vector_norm", "logsumexp"),
}
# Parts of the element rate (definition 7), of the largest tensor's elements.
_ELEMENT_PARTS = {
    "_softmax": 0.6,
    "_softmax_backward_data": 0.45,
    "_safe_softmax": 0.3,
    "_log_softmax": 0.7,
    "_log_softmax_backward_data": 0.62,
    "native_layer_norm": 0.95,
    "native_layer_norm_backward": 0.38,
    "_fused_rms_norm": 0.95,
    "_fused_rms_norm_backward": 0.38,
    "native_group_norm_backward": 0.38,
    "native_dropout": 1.0,
    "avg_pool2d": 0.85,
    "avg_pool2d_backward": 0.14,
    "max_pool2d_with_indices": 0.65,
    "max_pool2d_with_indices_backward": 0.21,
    "cat": 0.6,
    "sort": 0.05,
    "topk": 0.05,
}
# The same where each row, or channel, is one block's: up to the second part, by their number.
_ROW_PARTS = {
    "native_group_norm": (1 / 400, 0.39),
    "native_batch_norm": (1 / 440, 0.39),
    "native_batch_norm_backward": (1 / 800, 0.34),
}
# Parts for the elements that a scatter adds, one or a row for each index.
_SCATTER_PARTS = {
    "embedding_dense_backward": 0.12,
    "index_put": 0.042,
    "index_add": 0.32,
    "scatter_add": 0.32,
    "slice_backward": 0.8,
    "select_backward": 1.0,
}
_SINGLE_SCATTER_PART = 0.015
_SINGLE_LOOKUP_PART = 0.46
# Parts of the memory rate (definition 8).
_FUSED_PART = 1.0
_REDUCING_PART = 0.85
# Part of the rate that products and attention reach among them, one after the other without a gap:
# the clocks of a device that has no rest are lower.
_BUSY_PART = 0.945
# Kernels that an op launches, where they are more than one.
_KERNELS = {
    "nll_loss_forward": 5,
    "nll_loss_backward": 2,
    "index": 5,
    "topk": 20,
    "sort": 20,
    "cumsum": 4,
    "scatter": 3,
    "embedding_dense_backward": 9,
    "index_put": 8,
    "slice_backward": 2,
    "select_backward": 2,
    "index_add": 2,
}

# ``graphsafe_run_with_rng_state(native_dropout.default, %, 0.1, True, rng_state=%)``
_RNG_WRAPPERS = ("run_and_save_rng_state", "run_with_rng_state")
_WITH_RNG = re.compile(r"(?<![\w.])(\w+\.\w+)(?:, |$)")
_TRANSPOSED = re.compile(r"\], (True|False), \[")
# ``..., dropout, is_causal``; between them, the efficient backward's masks.
_DROPOUT = re.compile(r"(?:^|, )(\d+\.\d+(?:e-\d+)?)(?:, (?:\[[^\]]*\], )?(True|False))?(?:, |$)")
_DIMENSIONS = re.compile(r"\[(-?\d+(?:, -?\d+)*)\]")


def is_view(facts: GraphFacts, op: Op) -> bool:
    """Whether ``op`` launches nothing on the device.

    Its outputs all lie on its inputs' storages or on the host, and it writes nothing; or it only
    allocates.
    """
    if op.mutates:
        return False
    if _kind(op) in _ALLOCATIONS:
        return True
    values = [facts.values[value] for value in op.inputs]
    # What an op only holds it does not read (``offplan.fusion``).
    given = {value.storage for value in values if value.kind == "tensor"}
    made = {facts.values[value].storage for value in op.outputs} - given
    return not any(storage is not None and _is_on_device(facts, storage) for storage in made)


def device_s(facts: GraphFacts, op: Op, rates: Rates) -> float:
    """Seconds that ``op``, which is no view, takes on the device."""
    call = _call(facts, _inner(facts, op))
    if op.target == KERNEL:
        return rates.kernel_s + _kernel_s(op, call, rates)
    kernels_s = rates.kernel_s * _KERNELS.get(call.kind, 1)
    rate_part = _BUSY_PART if facts.compiler == "inductor" else 1.0
    if call.kind in _MATMULS and _are_matrices(call.inputs[-1:], call.outputs[:1]):
        return kernels_s + max(_product_s(call, rates) / rate_part, _traffic_s(call, rates))
    if call.kind in _CONVOLUTIONS and len(call.inputs) > 1 + call.is_backward and call.outputs:
        return kernels_s + _convolution_s(call, rates)
    if "scaled_dot_product" in call.kind and _are_matrices(_operands(call)):
        return kernels_s + max(_attention_s(call, rates) / rate_part, _traffic_s(call, rates))
    elements_s = _elements(call) / rates.elements_per_s
    if call.kind in _SCATTER_PARTS:
        # What is added to is filled or copied first.
        return kernels_s + elements_s + _traffic_s(call, rates)
    return kernels_s + max(elements_s, _traffic_s(call, rates))


def _kernel_s(op: Op, call: _Call, rates: Rates) -> float:
    """Definition 8."""
    unread_bytes, reduces = kernel_said(op)
    traffic_s = max(0.0, _traffic_s(call, rates) - unread_bytes / rates.memory_bytes_per_s)
    return traffic_s / (_REDUCING_PART if reduces else _FUSED_PART)


@dataclass(frozen=True)
class _Call:
    """One op with the tensors that it takes and makes."""

    kind: str
    constants: str
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    written: Sequence[Value]

    @property
    def is_backward(self) -> bool:
        return self.kind.endswith("backward")

    @property
    def result(self) -> Value | None:
        return self.outputs[0] if self.outputs else None


def _call(facts: GraphFacts, op: Op) -> _Call:
    def tensors(values: Sequence[ValueId]) -> list[Value]:
        found = (facts.values[value] for value in dict.fromkeys(values))
        return [value for value in found if value.kind == "tensor"]

    outputs = tensors(op.outputs)
    kind = _kind(op).removeprefix("_unsafe_") if "put" in op.target else _kind(op)
    if "batch_norm" in kind:
        kind = "native_batch_norm_backward" if kind.endswith("backward") else "native_batch_norm"
    return _Call(kind, op.constants, tensors(op.inputs), outputs, [*outputs, *tensors(op.mutates)])


def _inner(facts: GraphFacts, op: Op) -> Op:
    """What ``op`` runs, if all that it does is run one op with a random-number state."""
    found = _WITH_RNG.search(op.constants) if op.target.endswith(_RNG_WRAPPERS) else None
    if found is None:
        return op
    # The state is no operand, wherever it comes: a byte tensor, or no tensor at all.
    inputs = tuple(v for v in op.inputs if facts.values[v].dtype not in ("", "uint8"))
    return msgspec.structs.replace(
        op, target=f"aten.{found[1]}", inputs=inputs, constants=op.constants[found.end() :]
    )


def _kind(op: Op) -> str:
    """``mm`` for ``aten.mm.default``, and for its in-place form."""
    parts = op.target.split(".")
    name = parts[1] if len(parts) > 1 else op.target
    return name.removesuffix("_") if op.mutates else name


def _is_on_device(facts: GraphFacts, storage: StorageId) -> bool:
    return facts.device == "cpu" or facts.storages[storage].device != "cpu"


def _are_matrices(*values: Sequence[Value]) -> bool:
    """Whether there are some, and all have rows and columns (those of unknown size have none)."""
    return all(values) and all(len(value.shape) > 1 for some in values for value in some)


# --- products -------------------------------------------------------------------------------------

_TILE = 128
_SMALL_TILE = 32
# Sides of tiles, and what of the rate they reach.
_TILES = ((128, 1.0), (64, 0.7), (32, 0.35))
# How many parts of the summed dimension, and what of the rate is left.
_SPLITS = ((1, 1.0), (2, 0.9), (4, 0.8))
# Rows that begin at odd multiples of this many bytes, and what of the rate is left.
_MISALIGNED = {2: 0.175, 4: 0.75, 8: 0.9}


def _product_s(call: _Call, rates: Rates) -> float:
    """Definition 4.  The second factor comes last among the inputs, whatever is added."""
    first, second, result = call.inputs[-2:][0], call.inputs[-1], call.outputs[0]
    rows, columns = result.shape[-2:]
    batch = math.prod(result.shape[:-2])
    summed = second.shape[-2]
    padded = batch * _padded(rows) * _padded(columns) * summed
    busy = max(
        part * _busy_part(batch * -(-rows // tile) * -(-columns // tile), rates)
        for tile, part in _TILES
    )
    rate = rates.matmul(first.dtype) * busy
    if not padded:
        return 0.0
    return 2 * padded / (rate * min(map(_aligned_part, (first, second, result))))


def _padded(size: int) -> int:
    tile = _TILE if size >= _TILE else _SMALL_TILE
    return -(-size // tile) * tile


def _busy_part(tiles: int, rates: Rates) -> float:
    """The part of the multiprocessors that have work, over all rounds."""
    count = rates.multiprocessor_count
    return max(
        kept * tiles * parts / (max(-(-tiles * parts // count), 1) * count)
        for parts, kept in _SPLITS
    )


def _aligned_part(value: Value) -> float:
    """By how rows begin, for the vector loads of fast kernels."""
    row_bytes = max(value.stride[-2:], default=0) * value.item_bytes
    needed = 16 if value.item_bytes <= 2 else 8
    for alignment, part in _MISALIGNED.items():
        if alignment < needed and row_bytes % (2 * alignment):
            return part
    return 1.0


# --- convolutions ---------------------------------------------------------------------------------

# Of the rate: of any, backward, and with too few channels for tensor cores.
_CONVOLUTION_PART = 0.85
_CONVOLUTION_BACKWARD_PART = 0.6
_FEW_CHANNELS = 8
_FEW_CHANNELS_PART = 0.07
_LAYOUT_PASSES = 3.0


def _convolution_s(call: _Call, rates: Rates) -> float:
    """Definition 5."""
    image, weight = call.inputs[call.is_backward :][:2]
    result = call.inputs[0] if call.is_backward else call.outputs[0]
    if not weight.shape or not image.shape or not result.shape:
        return 0.0
    # A transposed one works from its input as others do towards their output.
    is_transposed = (found := _TRANSPOSED.search(call.constants)) and found[1] == "True"
    moved = image if is_transposed else result
    flops = 2 * moved.element_count * (weight.element_count // max(weight.shape[0], 1))
    rate = rates.matmul("tf32" if image.dtype == "float32" else image.dtype) * _CONVOLUTION_PART
    if weight.shape[1:2] and weight.shape[1] < _FEW_CHANNELS:
        rate *= _FEW_CHANNELS_PART
    elif call.is_backward:
        rate *= _CONVOLUTION_BACKWARD_PART
    is_pointwise = math.prod(weight.shape[2:]) == 1 and image.shape[2:] == result.shape[2:]
    traffic_s = _bytes((image, weight, result)) / rates.memory_bytes_per_s
    traffic_s *= 1.0 if is_pointwise or _has_channels_last(image) else _LAYOUT_PASSES
    if not call.is_backward:
        return flops / rate + traffic_s
    wanted = {value.shape for value in call.outputs}
    gradients = (image.shape in wanted) + (weight.shape in wanted)
    return gradients * (flops / rate + traffic_s)


def _has_channels_last(image: Value) -> bool:
    return len(image.shape) > 2 and image.shape[1] > 1 and image.stride[1] == 1


# --- attention ------------------------------------------------------------------------------------

# Of the rate, forward and backward: with a mask given as a tensor, with narrow heads, with dropout,
# and of the rate of float32 products where attention is in float32.
_MASKED_PARTS = (0.68, 0.68)
_NARROW_PARTS = (0.78, 1.0)
_NARROW_WIDTH = 64
_DROPOUT_PARTS = {True: (0.42, 0.69), False: (0.68, 0.83)}
_FLOAT32_PARTS = (0.67, 0.67)


def _attention_s(call: _Call, rates: Rates) -> float:
    """Definition 6."""
    query, key, value = _operands(call)
    side = int(call.is_backward)
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    flops = pairs * (query.shape[-1] + value.shape[-1]) * (5.0 if side else 2.0)
    found = _DROPOUT.search(call.constants)
    if (found is not None and found[2] == "True") or "is_causal=True" in call.constants:
        flops /= 2
    is_half = query.dtype in _HALVES
    rate = _attention_rates(rates)[side] if is_half else rates.matmul("float32")
    if not is_half:
        rate *= _FLOAT32_PARTS[side]
    if is_half and query.shape[-1] <= _NARROW_WIDTH:
        rate *= _NARROW_PARTS[side]
    mask = (*query.shape[-2:-1], *key.shape[-2:-1])
    if is_half and any(v.shape[-2:] == mask and v not in (query, key, value) for v in call.inputs):
        rate *= _MASKED_PARTS[side]
    if found is not None and float(found[1]):
        rate *= _DROPOUT_PARTS[is_half][side]
    return flops / rate


def _attention_rates(rates: Rates) -> tuple[float, float]:
    return rates.attention_forward_flops_per_s, rates.attention_backward_flops_per_s


def _operands(call: _Call) -> Sequence[Value]:
    """Query, key and value, of which each that is given again is listed once; or none."""
    found = call.inputs[int(call.is_backward) :][:3]
    return [found[0], found[min(1, len(found) - 1)], found[-1]] if found else []


# --- elements and bytes ---------------------------------------------------------------------------


def _traffic_s(call: _Call, rates: Rates) -> float:
    """Definition 2."""
    written = _bytes(call.written)
    if call.kind in _READ_FOR_SIZES:
        return written / rates.memory_bytes_per_s
    read = [_touched_bytes(value) for value in call.inputs]
    if call.kind in _LOOKUPS and read:
        read[0] = min(read[0], written)
    if call.kind == "nll_loss_forward" and len(read) > 1:
        read[0] = read[1]
    return (sum(read) + written) / rates.memory_bytes_per_s


def _bytes(values: Sequence[Value]) -> int:
    return sum(map(_touched_bytes, values))


def _touched_bytes(value: Value) -> int:
    elements = 1
    for size, stride in zip(value.shape, value.stride, strict=False):
        elements *= size if stride else 1
    return elements * value.item_bytes


def _elements(call: _Call) -> float:
    """Elements at the element rate that take as long as the op; 0 where memory decides."""
    kind, operands = call.kind, [*call.inputs, *call.outputs]
    largest = max((value.element_count for value in operands), default=0)
    if kind in _SCATTER_PARTS:
        return _scattered_elements(call)
    if kind in _ROW_PARTS and len(call.outputs) > 1:
        # The second output has one number for each row: its mean, or the gradient of its weight.
        each, most = _ROW_PARTS[kind]
        return largest / max(min(each * call.outputs[1].element_count, most), each)
    if kind in _ELEMENT_PARTS and not (kind == "cat" and _lie_alike(operands, True)):
        return largest / _ELEMENT_PARTS[kind]
    if kind in _REDUCTIONS and call.inputs and call.outputs:
        return _reduced_elements(call)
    if kind in _LOOKUPS:
        return largest / _SINGLE_LOOKUP_PART if _is_of_single_elements(call) else 0.0
    if call.result is None or kind in ("cat", "nll_loss_forward", *_READ_FOR_SIZES):
        return 0.0
    count = call.result.element_count
    return 0.0 if _lie_alike(operands, False) else float(count)


def _scattered_elements(call: _Call) -> float:
    if call.kind in ("embedding_dense_backward", "slice_backward", "select_backward"):
        added = call.inputs[0].element_count if call.inputs else 0
    else:
        added = call.inputs[-1].element_count if call.inputs else 0
    if call.kind == "index_put" and _is_of_single_elements(call):
        return added / _SINGLE_SCATTER_PART
    return added / _SCATTER_PARTS[call.kind]


def _is_of_single_elements(call: _Call) -> bool:
    """Whether indexes are of the last dimensions, so that no row is taken as a whole."""
    return "[None, " in call.constants


def _lie_alike(values: Sequence[Value], each_alone: bool) -> bool:
    """Definition 3; ``each_alone`` asks only that each is contiguous."""
    tensors = [value for value in values if value.element_count > 1 or value.shape]
    if each_alone:
        return all(value.stride == _contiguous(value.shape) for value in tensors)
    if any(not value.shape for value in values):
        return False
    layouts = {_layout(value) for value in tensors}
    widths = [value.item_bytes for value in values]
    is_cast = len(values) == 2 and widths[0] == 2 and widths[1] > 2
    return len(layouts) <= 1 and all(map(_is_dense, tensors)) and not is_cast


def _layout(value: Value) -> tuple[tuple[int, int], ...]:
    pairs = zip(value.shape, value.stride, strict=False)
    return tuple((size, stride) for size, stride in pairs if size != 1)


def _is_dense(value: Value) -> bool:
    reach = 1 + sum((size - 1) * stride for size, stride in _layout(value))
    return reach == value.element_count


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


# Parts of the element rate of a reduction along memory, by whether its runs are short, and of one
# across it, by the root of how many results it has.
_SHORT_RUN = 256
_ALONG_PARTS = {True: 1.2, False: 2.0}
_ACROSS_PART = 0.032
_ACROSS_MOST = 2.5


def _reduced_elements(call: _Call) -> float:
    given, made = call.inputs[0], call.outputs[0]
    count, results = given.element_count, max(made.element_count, 1)
    if results == count:
        return 0.0
    if results == 1 or _is_along_memory(call):
        return count / _ALONG_PARTS[count // results <= _SHORT_RUN]
    return count / min(_ACROSS_PART * math.sqrt(results), _ACROSS_MOST)


def _is_along_memory(call: _Call) -> bool:
    """Whether the dimension that is contiguous in memory is among the reduced ones."""
    given = call.inputs[0]
    found = _DIMENSIONS.search(call.constants)
    steps = [(stride, place) for place, stride in enumerate(given.stride) if stride]
    if found is None or not steps:
        return True
    reduced = {int(text) % len(given.shape) for text in found[1].split(",")}
    return min(steps)[1] in reduced
