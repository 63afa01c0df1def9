"""What kernels allocate beyond their outputs: temporaries of an op, and what libraries keep.

1.  A *temporary* is device memory that an op allocates and frees again before it ends.  Its bytes
    follow from the shapes and strides that the op is given, by a formula for each kind of op.
2.  The formulas are read off torch's kernels (2.11), each checked against what the caching
    allocator counted on an H200.  An op that is not listed has no temporaries, as far as was seen.
3.  Where a library *chooses* between algorithms, as cuDNN does for convolutions, nothing in the
    graph says which it takes.  By their *thrift*, algorithms need
      0  reordered tensors and partial sums: what the hungriest of the usual ones took, too much
         rather than too little;
      1  reordered tensors;
      2  reordered inputs, the result being written as it has to lie.
4.  A *copy* is a temporary too: kernels that want an input contiguous make one of any other.
5.  *Kept* is what a library allocates once and never frees.

Assumes that cuDNN's benchmarking is off and TF32 is at its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from offplan.gpus import DEFAULT_GPU, GPUS, gpu_key
from offplan.graph import Op, Value

KIB = 1024
MIB = 1024 * KIB

# Threads that a multiprocessor runs at a time, on every GPU since Volta but some for consumers,
# which run fewer: they then split reductions less.
_THREADS_PER_MULTIPROCESSOR = 2048
_INDEX_BYTES = 8


class Scratch(NamedTuple):
    """What a stage of an op allocates, while the last ``missing_count`` outputs are not there yet.

    It is freed at the end of that stage, or of a later one: it is there during ``stage_count``.
    """

    missing_count: int
    sizes: tuple[int, ...]
    stage_count: int = 1


class Call(NamedTuple):
    """One op: its tensors, its arguments as written (``%`` for a value), the GPU, and the thrift of
    the algorithm that a library chooses."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: tuple[str, ...]
    multiprocessor_count: int
    thrift: int = 0


THRIFTS = range(3)


def temporaries(
    op: Op,
    values: Sequence[Value],
    gpu: str = "",
    deterministic: bool = False,
    thrift: int = 0,
) -> tuple[Scratch, ...]:
    """The temporaries of ``op`` on the GPU called ``gpu``, one stage of the op after the other.

    ``deterministic``: with kernels that repeat their results, where torch has them.  ``thrift``, of
    ``THRIFTS``, matters where a library ``chooses``.
    """
    target, constants = _unwrapped(op)
    name = target.rpartition(".")[0]
    formula = _FORMULAS.get(name)
    if deterministic and name in _DETERMINISTIC:
        formula = _DETERMINISTIC[name]
    if formula is None:
        return ()
    call = Call(
        tuple(_plain(values, op.inputs)),
        tuple(_plain(values, op.outputs)),
        split_arguments(constants),
        GPUS[gpu_key(gpu) or DEFAULT_GPU].multiprocessor_count,
        thrift,
    )
    if not call.inputs or not call.outputs:
        return ()
    stages: list[Scratch] = []
    together: list[int] = []
    for item in formula(call):
        if isinstance(item, Scratch):
            stages.append(item)
        elif item > 0:
            together.append(item)
    if together:
        stages.append(Scratch(0, tuple(together)))
    return tuple(stages)


def together(stages: Sequence[Scratch]) -> Iterator[Scratch]:
    """Each of ``stages`` with all that is there then: what earlier ones have not freed, too."""
    for number, stage in enumerate(stages):
        kept = (
            size
            for place, earlier in enumerate(stages[:number])
            if place + earlier.stage_count > number
            for size in earlier.sizes
        )
        yield stage._replace(sizes=(*kept, *stage.sizes))


def chooses(op: Op) -> bool:
    """Whether a library chooses between algorithms for ``op`` (definition 3)."""
    return _unwrapped(op)[0].rpartition(".")[0] in _CHOOSES


def kept_bytes(ops: Sequence[Op], forward_count: int, gpu: str = "") -> Iterator[tuple[int, int]]:
    """Indexes of the ops at which a library allocates memory that it keeps, with its size.

    cuBLAS has a workspace for each thread and stream that multiplies matrices: the thread of the
    forward, and autograd's; so has cuBLASLt, which multiplies where a bias is added.
    """
    blas_bytes = _BLAS_BYTES if is_since_hopper(gpu) else _OLDER_BLAS_BYTES
    for part in (range(forward_count), range(forward_count, len(ops))):
        for targets, size in ((_MULTIPLIES, blas_bytes), (_ADDS_BIAS, _BLAS_LT_BYTES)):
            found = (index for index in part if ops[index].target.startswith(targets))
            first = next(found, None)
            if first is not None:
                yield first, size


# ATen/cuda/CublasHandlePool.cpp: CUBLAS_WORKSPACE_CONFIG ":4096:8", and before Hopper
# ":4096:2:16:8"; CUBLASLT_WORKSPACE_SIZE is 1 MiB.
_BLAS_BYTES = 32 * MIB
_OLDER_BLAS_BYTES = 8 * MIB + 128 * KIB
_BLAS_LT_BYTES = MIB
_MULTIPLIES = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
# Compiled code calls ``aten.addmm.out`` for other sums.
_ADDS_BIAS = ("aten.addmm.default",)


def is_since_hopper(gpu: str) -> bool:
    return GPUS[gpu_key(gpu) or DEFAULT_GPU].capability >= (9, 0)


def makes_last_first(op: Op) -> bool:
    """Whether ``op`` allocates its outputs in the opposite order, as a dropout its mask."""
    return op.target == "aten.native_dropout.default"


def _plain(values: Sequence[Value], ids: Sequence[int]) -> Iterator[Value]:
    for found in ids:
        value = values[found]
        if value.kind == "tensor" and value.storage is not None and not value.symbolic:
            yield value


def _unwrapped(op: Op) -> tuple[str, str]:
    """The target and arguments of ``op``; of a random op that the partitioner wrapped, its own."""
    if op.target.endswith("run_with_rng_state"):
        inner, _, rest = op.constants.partition(", ")
        return f"aten.{inner}", rest
    return op.target, op.constants


def split_arguments(text: str) -> tuple[str, ...]:
    """The arguments in ``Op.constants``, apart."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return (*found, text[start:].strip()) if text else ()


def joined_arguments(parts: Iterable[str]) -> str:
    """``Op.constants`` of these arguments: nothing, where all of them are values."""
    text = ", ".join(parts)
    return "" if set(text) <= set("%, ") else text


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.strip("[]()").split(",") if part.strip("- ").isdigit()]


# Sizes of temporaries that are there together at the end, and the stages before that.
Formula = Callable[[Call], Iterator[int] | Iterator[int | Scratch] | Iterator[Scratch]]


# --- copies ---------------------------------------------------------------------------------------


def is_contiguous(value: Value) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != expected:
            return value.element_count == 0
        expected *= size
    return True


def _is_channels_last(value: Value) -> bool:
    if len(value.shape) < 3 or value.stride[1] != 1:
        return False
    order = (0, *range(2, len(value.shape)), 1)
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride[dim] != expected:
            return False
        expected *= value.shape[dim]
    return True


def _copy(value: Value) -> int:
    return 0 if is_contiguous(value) else value.logical_bytes


def _copies(*positions: int) -> Callable[[Call], Iterator[int]]:
    """Copies of the inputs at ``positions`` that are not contiguous."""

    def found(call: Call) -> Iterator[int]:
        for position in positions:
            if position < len(call.inputs):
                yield _copy(call.inputs[position])

    return found


def _matrix_copies(call: Call) -> Iterator[int]:
    """cuBLAS takes a matrix if one of its last two strides is 1 and the other is long enough;
    others are cloned (ATen/native/cuda/Blas.cpp, ``prepare_matrix_for_cublas``)."""
    for value in call.inputs:
        if len(value.shape) < 2:
            continue
        (rows, columns), (one, other) = value.shape[-2:], value.stride[-2:]
        fits = (other == 1 and one >= max(1, columns)) or (one == 1 and other >= max(1, rows))
        if not fits:
            yield value.logical_bytes


def _cast(call: Call) -> Iterator[int]:
    """A scan reads its input in the type of its result."""
    if call.inputs[0].dtype != call.outputs[0].dtype:
        yield call.inputs[0].element_count * call.outputs[0].item_bytes


# --- reductions -----------------------------------------------------------------------------------


def _reduction(call: Call) -> Iterator[int]:
    """A sum, a mean, a largest value: partial results where blocks share an output."""
    value, result = call.inputs[0], call.outputs[0]
    if not value.is_float and value.dtype != result.dtype:
        yield value.element_count * result.item_bytes
    dims = _integers(call.arguments[1]) if len(call.arguments) > 1 else []
    rank = len(value.shape)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    if value.element_count:
        yield from reduction_bytes(value, reduced, call.multiprocessor_count)


class _Dim(NamedTuple):
    size: int
    step_bytes: int
    is_reduced: bool


def _iterated(value: Value, reduced: set[int]) -> list[_Dim]:
    """The dimensions as TensorIterator orders and joins them: reduced ones first, fastest first."""
    dims = [
        _Dim(size, stride * value.item_bytes, dim in reduced)
        for dim, (size, stride) in enumerate(zip(value.shape, value.stride, strict=True))
        if size > 1
    ]
    dims.sort(key=lambda dim: (not dim.is_reduced, dim.step_bytes))
    joined: list[_Dim] = []
    for dim in dims:
        last = joined[-1] if joined else None
        if (
            last
            and last.is_reduced == dim.is_reduced
            and last.size * last.step_bytes == dim.step_bytes
        ):
            joined[-1] = last._replace(size=last.size * dim.size)
        else:
            joined.append(dim)
    return joined


def reduction_bytes(value: Value, reduced: set[int], multiprocessor_count: int) -> tuple[int, ...]:
    """Partial results and semaphores, as ``setReduceConfig`` in ATen/native/cuda/Reduce.cuh lays
    them out: blocks of 512 threads, 4 elements at a time, blocks sharing an output where each
    thread would have 256 elements or more to add."""
    dims = _iterated(value, reduced)
    while sum((dim.size - 1) * dim.step_bytes for dim in dims) >= 2**31:
        # Offsets have 32 bits; the iterator is split along its longest dimension.
        longest = max(range(len(dims)), key=lambda place: dims[place].size * dims[place].step_bytes)
        dims[longest] = dims[longest]._replace(size=-(-dims[longest].size // 2))
    outputs = math.prod(dim.size for dim in dims if not dim.is_reduced)
    inputs = math.prod(dim.size for dim in dims if dim.is_reduced)
    inner = [dim for dim in dims if dim.is_reduced]
    outer = [dim for dim in dims if not dim.is_reduced]
    along_input = not outer or (bool(inner) and inner[0].step_bytes < outer[0].step_bytes)
    fastest = (inner if along_input else outer)[0].step_bytes if dims else value.item_bytes
    width, height, vector = inputs, outputs, 1
    if not along_input:
        width, height = outputs, inputs
    if fastest == value.item_bytes:
        if along_input and width > 128 and len(dims) == 1:
            width //= 4
        elif not along_input:
            vector = _output_vector(value, dims, outer[0])
            width //= vector
    layout = _block_layout(width, height, vector)
    return _shared_bytes(layout, along_input, vector, outputs, inputs, multiprocessor_count)


def _output_vector(value: Value, dims: Sequence[_Dim], fastest: _Dim) -> int:
    """Outputs that one thread computes together."""
    vector = 4
    others = [dim.step_bytes // value.item_bytes for dim in dims if dim is not fastest]
    for number in (value.offset, fastest.size, *others):
        while number % vector:
            vector //= 2
    return vector


def _block_layout(width: int, height: int, vector: int) -> tuple[int, int]:
    """Width and height of a block for that many columns and rows (``set_block_dimension``)."""
    most = 512 // vector
    wide = most if width >= most else _power_below(width)
    high = most if height >= most else _power_below(height)
    block_width = min(wide, 32)
    block_height = min(high, most // block_width)
    return min(wide, most // block_height), block_height


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _shared_bytes(
    block: tuple[int, int],
    along_input: bool,
    vector: int,
    outputs: int,
    inputs: int,
    multiprocessor_count: int,
) -> tuple[int, ...]:
    width, height = block
    step_input, step_output = (width, 1) if along_input else (1, width)
    if _ceil(inputs, step_input) < min(height * 16, 256):
        return ()
    step_input *= height
    per_thread = _ceil(inputs, step_input)
    grid = _ceil(outputs // vector, step_output)
    target = multiprocessor_count * (_THREADS_PER_MULTIPROCESSOR // (width * height))
    if per_thread < 256 or grid > target:
        return ()
    shares = max(min(_ceil(target, grid), _ceil(per_thread, 16)), _ceil(per_thread, 256))
    if shares <= 1:
        return ()
    # Sums of half-precision numbers, too, are kept in 4 bytes.
    partial_bytes = 4 * outputs * shares
    if not along_input:
        partial_bytes *= width * vector
    return partial_bytes, 4 * grid


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


# --- softmax and norms ----------------------------------------------------------------------------


def _softmax_backward(call: Call) -> Iterator[int]:
    """The product of gradient and output, before the kernel runs."""
    yield call.outputs[0].element_count * call.inputs[0].item_bytes


def _safe_softmax(call: Call) -> Iterator[int]:
    """Which elements are minus infinity, and which rows consist of them."""
    value = call.inputs[0]
    elements = value.element_count
    yield elements
    yield elements // max(value.shape[-1] if value.shape else 1, 1)
    yield 4


def _group_norm(call: Call) -> Iterator[int]:
    """A scale and a shift for each channel of each sample."""
    yield from (_copy(call.inputs[0]), *[4 * math.prod(call.inputs[0].shape[:2])] * 2)


def _group_norm_backward(call: Call) -> Iterator[int]:
    gradient, value, mean = call.inputs[:3]
    channels, groups = 4 * math.prod(value.shape[:2]), 4 * mean.element_count
    yield from (_copy(gradient), _copy(value), *[channels] * 3, *[groups] * 2)


# --- indexing -------------------------------------------------------------------------------------


def _index(call: Call) -> Iterator[int]:
    """Each index, expanded to the shape of all of them, is copied."""
    indexes = [value for value in call.inputs[1:] if value.dtype == "int64"]
    count = math.prod(_broadcast([value.shape for value in indexes]))
    for value in indexes:
        if value.element_count != count or not is_contiguous(value):
            yield count * _INDEX_BYTES


def _index_put(call: Call) -> Iterator[int]:
    """Accumulating sorts the positions: four lists of them, and scratch memory of the sort, which
    has room for two more; values that are not contiguous are copied before it
    (ATen/native/cuda/Indexing.cu)."""
    if "True" not in call.arguments:
        yield from _index(call._replace(inputs=call.inputs[:-1]))
        return
    indexes = [value for value in call.inputs[1:-1] if value.dtype == "int64"]
    count = math.prod(_broadcast([value.shape for value in indexes]))
    list_bytes = count * _INDEX_BYTES
    yield from (list_bytes, _copy(call.inputs[-1]), *[list_bytes] * 3, 2 * list_bytes + 24 * KIB)


def _deterministic_index_add(call: Call) -> Iterator[int]:
    """The source, scaled, is put in place as by ``index_put``."""
    index, source = call.inputs[-2:]
    list_bytes = index.element_count * _INDEX_BYTES
    yield from (source.logical_bytes, *[list_bytes] * 4, 2 * list_bytes + 24 * KIB)


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [max(sizes) for sizes in zip(*padded, strict=True)]


# Up to here embedding_dense_backward has a kernel without temporaries, and of that many gradient
# rows it makes one partial sum.
_FEW_INDEXES = 3072
_ROWS_PER_PARTIAL = 10


def _embedding_backward(call: Call) -> Iterator[int]:
    """Indexes are sorted, runs of equal ones are cut into partial sums in 4-byte floats, as many
    as there can be at most (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indexes = call.inputs[0], call.inputs[-1]
    yield _copy(gradient)
    yield _copy(indexes)
    count, (rows, width) = indexes.element_count, call.outputs[0].shape[:2]
    if count <= _FEW_INDEXES:
        return
    runs = min(count, rows)
    partials = count // _ROWS_PER_PARTIAL + runs
    yield from (count * _INDEX_BYTES,) * 3
    yield from (runs * _INDEX_BYTES,) * 2
    yield from (partials * _INDEX_BYTES, _INDEX_BYTES, _INDEX_BYTES)
    yield partials * _ceil(width, 32) * 32 * 4


def _sort(call: Call) -> Iterator[int]:
    """Keys and positions, twice: a bound, not measured."""
    value = call.inputs[0]
    yield from (value.logical_bytes,) * 2
    yield from (value.element_count * _INDEX_BYTES,) * 2


# --- attention ------------------------------------------------------------------------------------


def _queries(call: Call) -> tuple[int, int, int, int]:
    """Batch, heads, queries and head size; the query is the second input of a backward."""
    batch, heads, length, size = call.inputs[1].shape
    return batch, heads, length, size


def _cudnn_attention(call: Call) -> Iterator[int]:
    yield 256


def _cudnn_attention_backward(call: Call) -> Iterator[int]:
    """The query's gradient in 4-byte floats and a sum for each query; keys and values shared by
    several heads have gradients of all heads first."""
    batch, heads, length, size = _queries(call)
    extra = 0
    key = call.inputs[2]
    if key.shape[1] != heads:
        extra = 2 * batch * heads * key.shape[2] * size * key.item_bytes
    yield batch * heads * length * (4 * size + 4) + 256 + extra


def _efficient_attention_backward(call: Call) -> Iterator[Scratch]:
    """First the product of output and gradient, and its sum for each query, twice; then the query's
    gradient in 4-byte floats, with a lock for every 64 queries.  The kernel reads the incoming
    gradient with heads after queries; one that does not lie so is copied before anything else."""
    batch, heads, length, size = _queries(call)
    gradient = call.inputs[0]
    rows, shape = batch * heads * length, gradient.shape
    lies_so = gradient.stride == (math.prod(shape[1:]), shape[3], shape[1] * shape[3], 1)
    if not lies_so:
        yield Scratch(len(call.outputs), (gradient.logical_bytes,), stage_count=3)
    yield Scratch(0, (rows * size * 4, rows * 4, rows * 4))
    yield Scratch(0, (rows * 4, rows * size * 4 + batch * heads * _ceil(length, 64) * 16))


def _flash_attention_backward(call: Call) -> Iterator[int]:
    """The query's gradient and a sum for each query, both in 4-byte floats and padded."""
    batch, heads, length, size = _queries(call)
    padded, wide = _ceil(length, 128) * 128, _ceil(size, 32) * 32
    yield batch * heads * padded * 4
    yield batch * heads * padded * wide * 4
    key = call.inputs[2]
    if key.shape[1] != heads:
        yield from (batch * heads * key.shape[2] * size * key.item_bytes,) * 2


# --- convolutions ---------------------------------------------------------------------------------

# What cuDNN was seen to take for partial sums of a product that it splits: of an output of at most
# so many bytes, of the gradient of such an input, and of a weight's gradient (16 parts at most).
_LARGE_OUTPUT_BYTES = 36_000_000
_SPLIT_OUTPUT_BYTES = 15 * MIB // 2 + KIB
_SPLIT_INPUT_BYTES = 12 * MIB
_SPLIT_WEIGHT_BYTES = 18_100_000
_LEAST_SPLIT_WEIGHT_BYTES = 2_300_000
_PICTURE_WEIGHT_BYTES = 6_500_000
_MOST_SPLITS = 16
_LEAST_CONVOLUTION_BYTES = 400
# In smaller pictures the gradient of a pointwise weight is computed as any other.
_SMALL_SPACE = 512
_FEW_CHANNELS = 32
_CHANNELS_OF_PICTURES = 4
_SMALL_WEIGHT_BYTES = 4 * KIB


def _reordered(value: Value) -> int:
    """cuDNN's tensor-core kernels work on channels-last tensors; others are copied.  Channels then
    come in eights if elements have 2 bytes."""
    if _is_channels_last(value) or math.prod(value.shape[2:]) == 1:
        return 0
    return value.logical_bytes // value.shape[1] * _padded_channels(value)


def _padded_channels(value: Value) -> int:
    return _ceil(value.shape[1], 8) * 8 if value.item_bytes == 2 else value.shape[1]


def _is_product(value: Value, weight: Value, stride: Sequence[int]) -> bool:
    """Whether the convolution is a product of matrices as they lie in memory."""
    is_pointwise = math.prod(weight.shape[2:]) == 1 and max(stride, default=1) == 1
    return is_pointwise and math.prod(value.shape[2:]) % 4 == 0


def _convolution(call: Call) -> Iterator[int]:
    value, weight = call.inputs[:2]
    result = call.outputs[0]
    if _is_product(value, weight, _integers(call.arguments[3])):
        yield _LEAST_CONVOLUTION_BYTES
        return
    if _is_small_on_picture(weight):
        return
    size = _reordered(value) + _reordered(weight)
    if call.thrift < 2:
        size += _reordered(result)
    if call.thrift < 1 and result.logical_bytes <= _LARGE_OUTPUT_BYTES:
        size += _SPLIT_OUTPUT_BYTES
    yield size + _LEAST_CONVOLUTION_BYTES


def _convolution_backward(call: Call) -> Iterator[Scratch]:
    """First the input's gradient, then the weight's, then the bias's, which is a sum.  cuDNN takes
    a gradient that is contiguous or channels-last, of which a copy is made before if need be."""
    gradient, weight = call.inputs[0], call.inputs[2]
    count, wanted = len(call.outputs), [_wants(call, place) for place in range(3)]
    if any(wanted[:2]) and not (is_contiguous(gradient) or _is_channels_last(gradient)):
        yield Scratch(count, (gradient.logical_bytes,), stage_count=1 + sum(wanted[:2]))
    if wanted[0]:
        count -= 1
        yield Scratch(count, (_input_gradient_bytes(call),))
    if wanted[1]:
        count -= 1
        yield Scratch(count, (_weight_gradient_bytes(call),))
    if wanted[2] and gradient.element_count:
        summed = set(range(len(weight.shape))) - {1}
        sizes = reduction_bytes(gradient, summed, call.multiprocessor_count)
        if sizes:
            yield Scratch(0, sizes)


def _input_gradient_bytes(call: Call) -> int:
    gradient, value, weight = call.inputs[:3]
    if _is_product(value, weight, _integers(call.arguments[4])):
        return _LEAST_CONVOLUTION_BYTES
    size = _reordered(gradient) + _reordered(value) + _reordered(weight)
    if call.thrift < 1 and gradient.logical_bytes <= _LARGE_OUTPUT_BYTES:
        size += _SPLIT_INPUT_BYTES
    return size + _LEAST_CONVOLUTION_BYTES


def _weight_gradient_bytes(call: Call) -> int:
    gradient, value, weight = call.inputs[:3]
    if _is_small_on_picture(weight):
        return _SMALL_WEIGHT_BYTES
    is_product = _is_product(value, weight, _integers(call.arguments[4]))
    space = math.prod(value.shape[2:])
    if is_product and space >= _SMALL_SPACE and min(weight.shape[:2]) >= _FEW_CHANNELS:
        # One product for each sample, then summed.
        return value.shape[0] * weight.logical_bytes + _LEAST_CONVOLUTION_BYTES
    return _reordered(gradient) + _reordered(value) + _weight_bytes(value, weight, call.thrift)


def _is_small_on_picture(weight: Value) -> bool:
    """A small kernel on few channels, for which cuDNN reads a picture as it lies."""
    return weight.shape[1] < _CHANNELS_OF_PICTURES and math.prod(weight.shape[2:]) <= 9


def _weight_bytes(value: Value, weight: Value, thrift: int) -> int:
    """What the weight's gradient needs besides reordered tensors."""
    padded = weight.logical_bytes // weight.shape[1] * _padded_channels(weight)
    if thrift >= 1:
        return padded + KIB
    split = max(_MOST_SPLITS * padded, _LEAST_SPLIT_WEIGHT_BYTES)
    if weight.shape[1] < _CHANNELS_OF_PICTURES:
        # Colours, in fours or eights.
        return _reordered(value) // value.shape[1] + max(split, _PICTURE_WEIGHT_BYTES) + KIB
    return min(split, max(padded, _SPLIT_WEIGHT_BYTES)) + KIB


def _wants(call: Call, place: int) -> bool:
    """Whether the gradient at ``place`` is asked for."""
    mask = next((text for text in reversed(call.arguments) if text.startswith("[")), "")
    parts = mask.strip("[]").split(", ")
    return place >= len(parts) or parts[place] != "False"


def _formulas() -> Iterator[tuple[str, Formula]]:
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        yield name, _matrix_copies
    for name in ("sum", "mean", "amax", "amin", "prod", "norm", "linalg_vector_norm", "any", "all"):
        yield name, _reduction
    for name in ("cumsum", "cumprod"):
        yield name, _cast
    for name in ("index", "_unsafe_index"):
        yield name, _index
    for name in ("index_put", "_unsafe_index_put"):
        yield name, _index_put
    for name in ("sort", "argsort"):
        yield name, _sort
    yield "topk", _copies(0)
    yield "embedding", _copies(1)
    yield "native_layer_norm", _copies(0)
    yield "native_layer_norm_backward", _copies(0, 1)
    yield "_softmax", _copies(0)
    yield "_log_softmax", _copies(0)
    yield "_softmax_backward_data", _softmax_backward
    yield "_safe_softmax", _safe_softmax
    yield "native_group_norm", _group_norm
    yield "native_group_norm_backward", _group_norm_backward
    yield "embedding_dense_backward", _embedding_backward
    yield "_scaled_dot_product_cudnn_attention", _cudnn_attention
    yield "_scaled_dot_product_cudnn_attention_backward", _cudnn_attention_backward
    yield "_scaled_dot_product_efficient_attention_backward", _efficient_attention_backward
    yield "_scaled_dot_product_flash_attention_backward", _flash_attention_backward
    yield "convolution", _convolution
    yield "convolution_backward", _convolution_backward


_FORMULAS: Mapping[str, Formula] = {f"aten.{name}": formula for name, formula in _formulas()}
_CHOOSES = {"aten.convolution", "aten.convolution_backward"}
_DETERMINISTIC: Mapping[str, Formula] = {"aten.index_add": _deterministic_index_add}
