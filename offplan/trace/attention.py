"""Which attention kernel a named GPU would run, decided and called without that GPU.

``F.scaled_dot_product_attention`` asks the CUDA driver which fused kernel fits. With fake CUDA
tensors and no GPU the answer is always the math kernel, and the trace then saves the S x S matrix
that the GPU never makes. This module answers in the driver's place:

- ``choose_kernel`` is a pure function from the facts of one call to the kernel, with the reason
  why each kernel tried before it was rejected;
- ``choose_attention`` is a context in which every such call on fake CUDA tensors calls that
  kernel, with the pre- and post-processing that PyTorch does around it, op for op.

The rule:

1. Since torch 2.12, empty inputs are answered with zeros and no kernel is chosen.
2. Kernels are tried in the user's priority order. On sm90 and sm100 with cuDNN above 9.15 PyTorch
   installs the order cuDNN, flash, efficient, math at the first attention call of a process, over
   whatever the user set before that call; ``TORCH_CUDNN_SDPA_DEPRIORITIZED=1`` prevents it.
   Elsewhere the default is flash, efficient, math, cuDNN.
3. A kernel is taken if the user left it enabled and none of its conditions fails. Math has none.
4. flash: no mask; equal head sizes up to 256; sm80 to sm121; fp16 or bf16; when causal, equal
   query and key lengths; when training on sm86 to sm89 or sm120 and sm121, head size not in
   193 to 224, nor above 224 with dropout.
5. cuDNN: no strict determinism; fp16 or bf16; sm80 to sm121; a mask that needs no gradient and
   broadcasts from 2 or 4 dimensions; head sizes that are multiples of 8 within a limit that depends
   on the GPU and on the versions of cuDNN and torch; more than one key; no dropout with a single
   query; since torch 2.12, a dropout probability in sixteenths; since 2.14, no single query on
   sm10x and sm11x under most versions of cuDNN from 9.19 to 9.25.0.
6. efficient: sm50 to sm121; fp16 or fp32, or bf16 from sm80; head sizes that are multiples of the
   tensor cores' alignment.
7. All three: four dimensions, one batch size, head counts that are equal (or grouped, where the
   kernel supports that), nonzero lengths, last dimension with stride 1, the mask's included.
8. No kernel left: the error that PyTorch raises.

``Rules`` says where releases of torch differ, and since when.

Sources, read for their behaviour: ``aten/src/ATen/native/transformers/`` ``attention.cpp``,
``sdp_utils_cpp.h`` and ``cuda/sdp_utils.cpp``. Checked, call by call and op by op, against the C++
of the CUDA 13 builds of torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 with simulated driver answers.

Assumes that the process traced for is a fresh one: the first call under ``choose_attention`` counts
as its first call, which matters to rule 2.

Not handled: ROCm; nested tensors; ``vmap`` (it decomposes attention before the dispatcher gets
here); ``torch._fused_sdp_choice`` called directly, and the fused inference path of
``nn.MultiheadAttention`` (one op of its own in the trace); float8 inputs (FlashAttention 3); sizes
that are unbacked symbols; wheels built without flash attention (Windows); the backend for privately
registered devices ("overrideable").
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from offplan.errors import TraceError
from offplan.trace._torch import (
    cudnn_attention,
    efficient_attention,
    flash_attention,
    get_sdp_priority_order,
    is_fake,
    math_attention,
    scoped_library,
    set_sdp_priority_order,
)

_attention = torch.ops.aten.scaled_dot_product_attention.default

__all__ = [
    "AttentionCall",
    "AttentionError",
    "AttentionState",
    "Choice",
    "Kernel",
    "NoAvailableKernelError",
    "Platform",
    "Rejection",
    "Rules",
    "TensorFacts",
    "choose_attention",
    "choose_kernel",
    "current_platform",
    "default_order",
    "describe_call",
    "read_state",
    "why_not",
]

Kernel: TypeAlias = Literal["flash", "cudnn", "efficient", "math"]
_BACKENDS: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
_KERNELS: tuple[Kernel, ...] = ("flash", "cudnn", "efficient", "math")
_FLASH_HEAD_ALIGNMENT = 8
_EFFICIENT_MASK_ALIGNMENT = 8
_HALF_DTYPES = (torch.float16, torch.bfloat16)


class AttentionError(TraceError):
    """An attention call cannot be traced as asked: says which kernel, why not, what to do."""


class NoAvailableKernelError(AttentionError, RuntimeError):
    """No enabled kernel can run the call. A RuntimeError too, because that is what torch raises."""


@dataclass(frozen=True)
class TensorFacts:
    """What the choice depends on in one tensor. Strides and offset are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    storage_offset: int = 0


@dataclass(frozen=True)
class AttentionCall:
    """One call of ``scaled_dot_product_attention``; shapes are (batch, heads, length, head)."""

    query: TensorFacts
    key: TensorFacts
    value: TensorFacts
    mask: TensorFacts | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    grad_enabled: bool = True

    @property
    def trains(self) -> bool:
        """Whether autograd records the call."""
        inputs = (self.query, self.key, self.value)
        return self.grad_enabled and any(tensor.requires_grad for tensor in inputs)

    @property
    def trains_mask(self) -> bool:
        """Whether autograd records the mask."""
        return self.grad_enabled and self.mask is not None and self.mask.requires_grad


@dataclass(frozen=True)
class Platform:
    """The GPU and the libraries that the choice is made for.

    ``cudnn_version`` is as cuDNN reports it (9.19.0 is 91900), or None without cuDNN.
    """

    capability: tuple[int, int]
    cudnn_version: int | None
    torch_version: tuple[int, int]
    cuda_version: tuple[int, int] = (13, 0)


@dataclass(frozen=True)
class AttentionState:
    """The user's settings: which kernels are enabled, and in which order they are tried."""

    order: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
    enabled: frozenset[Kernel] = frozenset(_KERNELS)
    deterministic: bool = False


@dataclass(frozen=True)
class Rejection:
    """A kernel that was tried before the chosen one, and why it could not run the call."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True)
class Choice:
    """The chosen kernel, or None if there is none, and the kernels tried before it."""

    kernel: Kernel | None
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True)
class Rules:
    """Where releases of torch differ. Everything else in this module holds for 2.11 to 2.14."""

    cudnn_mask_fill: float
    empty_is_zero: Literal["never", "any input", "output or value"]
    unbatched_inputs: bool
    mask_excludes_causal: bool
    efficient_gqa: bool
    broadcast_heads: bool
    cudnn_dropout_sixteenths: bool
    cudnn_grid_limit: bool
    cudnn_head_256: bool
    cudnn_decode_faults: bool
    efficient_offset_alignment: bool
    cudnn_first_on_all_minors: bool
    mask_gradient_trains: bool

    @staticmethod
    def of(torch_version: tuple[int, int]) -> Rules:
        since_12, since_13, since_14 = (torch_version >= (2, minor) for minor in (12, 13, 14))
        return Rules(
            # 2.11 gives cuDNN a finite value for masked positions; later versions -inf.
            cudnn_mask_fill=-math.inf if since_12 else -65504.0,
            # 2.12 answers empty inputs with zeros, before it chooses; 2.13 narrows what is empty.
            empty_is_zero="output or value" if since_13 else "any input" if since_12 else "never",
            # 2.14 gives three-dimensional inputs a batch dimension, and all kernels a chance.
            unbatched_inputs=since_14,
            # 2.14 refuses a mask together with is_causal; before, only the math kernel did.
            mask_excludes_causal=since_14,
            # 2.14 runs grouped heads in the efficient kernel.
            efficient_gqa=since_14,
            # 2.14 lets one key/value head serve all query heads without enable_gqa.
            broadcast_heads=since_14,
            # 2.12 knows that cuDNN rounds the dropout probability to sixteenths.
            cudnn_dropout_sixteenths=since_12,
            # 2.13 keeps batches and heads within 65535 for cuDNN.
            cudnn_grid_limit=since_13,
            # 2.14 ties head sizes above 128 to cuDNN above 9.22, and to those with a backward pass.
            cudnn_head_256=since_14,
            # 2.14 keeps single queries from versions of cuDNN that fail on them on sm10x and sm11x.
            cudnn_decode_faults=since_14,
            # 2.13 checks where q, k and v start in their storages for the efficient kernel.
            efficient_offset_alignment=since_13,
            # 2.13 on CUDA 13 prefers cuDNN on every sm9x and sm10x; before, minor 0 and 3 only.
            cudnn_first_on_all_minors=since_13,
            # 2.14 computes the efficient kernel's log-sum-exp for a mask's gradient alone, too.
            mask_gradient_trains=since_14,
        )


# --- the choice ---------------------------------------------------------------------------------


def choose_kernel(call: AttentionCall, platform: Platform, state: AttentionState) -> Choice:
    """The kernel that ``platform`` runs for ``call``, as PyTorch's ``select_sdp_backend`` finds it.

    The kernel is None where PyTorch raises "No available kernel". ``state.order`` is the order in
    force, so on sm90 and sm100 pass ``default_order`` for a process without settings of its own.
    """
    call = _with_batch(call, Rules.of(platform.torch_version))
    rejected: list[Rejection] = []
    for kernel in state.order:
        reason = None if kernel in state.enabled else "it is disabled"
        reason = reason or why_not(kernel, call, platform, deterministic=state.deterministic)
        if reason is None:
            return Choice(kernel, tuple(rejected))
        rejected.append(Rejection(kernel, reason))
    return Choice(None, tuple(rejected))


def why_not(
    kernel: Kernel, call: AttentionCall, platform: Platform, *, deterministic: bool = False
) -> str | None:
    """Why ``kernel`` cannot run ``call``, or None if it can. Ignores what the user disabled."""
    rules = Rules.of(platform.torch_version)
    call = _with_batch(call, rules)
    if kernel == "math":
        return None
    if kernel == "flash":
        return _why_not_flash(call, platform, rules)
    if kernel == "cudnn":
        return _why_not_cudnn(call, platform, rules, deterministic)
    return _why_not_efficient(call, platform, rules)


def default_order(platform: Platform) -> tuple[Kernel, ...]:
    """The order of a process in which the user set none, once it made its first attention call."""
    if _prefers_cudnn(platform):
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "math", "cudnn")


def _prefers_cudnn(platform: Platform) -> bool:
    # PyTorch takes "1" alone for true here.
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    major, minor = platform.capability
    if major not in (9, 10) or (platform.cudnn_version or 0) <= 91500:
        return False
    all_minors = Rules.of(platform.torch_version).cudnn_first_on_all_minors
    return minor in (0, 3) or (all_minors and platform.cuda_version >= (13, 0))


def _with_batch(call: AttentionCall, rules: Rules) -> AttentionCall:
    inputs = (call.query, call.key, call.value)
    if not rules.unbatched_inputs or any(len(tensor.shape) != 3 for tensor in inputs):
        return call
    query, key, value = (_unsqueezed(tensor) for tensor in inputs)
    mask = call.mask
    while mask is not None and len(mask.shape) < 4:
        mask = _unsqueezed(mask)
    return replace(call, query=query, key=key, value=value, mask=mask)


def _unsqueezed(tensor: TensorFacts) -> TensorFacts:
    stride = tensor.shape[0] * tensor.stride[0] if tensor.shape else 1
    return replace(tensor, shape=(1, *tensor.shape), stride=(stride, *tensor.stride))


def _first(reasons: Iterator[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_flash(call: AttentionCall, platform: Platform, rules: Rules) -> str | None:
    def reasons() -> Iterator[str | None]:
        yield _four_dimensions(call)
        if call.mask is not None:
            yield "it takes no attention mask"
        yield _flash_head_size(call, platform)
        yield _gpu_in_range(platform, (8, 0))
        if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
            yield "with is_causal it needs query and key of the same length"
        yield _dtypes(call, _low_precision_dtypes(platform))
        yield _batch_and_heads(call, rules, gqa=True, equal_kv_heads=True)
        yield _nonzero_lengths(call)
        yield _unit_last_stride(call, ignore_singleton=True)

    return _first(reasons())


def _why_not_cudnn(
    call: AttentionCall, platform: Platform, rules: Rules, deterministic: bool
) -> str | None:
    version = platform.cudnn_version

    def reasons() -> Iterator[str | None]:
        if version is None or version < 90000:
            yield "it needs cuDNN 9"
            return
        if call.dropout_p > 0.0 and 91100 < version < 91400:
            yield "cuDNN 9.11 to 9.13 does not support dropout"
        yield _four_dimensions(call)
        if deterministic:
            yield "it is not deterministic, and deterministic algorithms are on"
        yield _dtypes(call, _low_precision_dtypes(platform))
        yield _cudnn_mask(call)
        yield _gpu_in_range(platform, (8, 0))
        if rules.cudnn_dropout_sixteenths and not float(call.dropout_p * 16).is_integer():
            yield "it rounds the dropout probability to sixteenths"
        yield _nonzero_lengths(call)
        yield _unit_last_stride(call, ignore_singleton=True)
        yield _batch_and_heads(call, rules, gqa=True, equal_kv_heads=False)
        yield _cudnn_sizes(call, platform, rules)

    return _first(reasons())


def _why_not_efficient(call: AttentionCall, platform: Platform, rules: Rules) -> str | None:
    def reasons() -> Iterator[str | None]:
        yield _gpu_in_range(platform, (5, 0))
        yield _four_dimensions(call)
        yield _efficient_alignment(call, platform, rules)
        yield _nonzero_lengths(call)
        yield _unit_last_stride(call, ignore_singleton=False)
        yield _batch_and_heads(call, rules, gqa=rules.efficient_gqa, equal_kv_heads=True)
        older = (torch.float16, torch.float32)
        yield _dtypes(call, older if platform.capability < (8, 0) else (*older, torch.bfloat16))

    return _first(reasons())


def _gpu_in_range(platform: Platform, lowest: tuple[int, int]) -> str | None:
    if lowest <= platform.capability <= (12, 1):
        return None
    return f"it needs a GPU from sm{lowest[0]}{lowest[1]} to sm121"


def _four_dimensions(call: AttentionCall) -> str | None:
    dimensions = [len(tensor.shape) for tensor in (call.query, call.key, call.value)]
    if dimensions == [4, 4, 4]:
        return None
    return f"it needs four-dimensional query, key and value, not {dimensions}"


def _low_precision_dtypes(platform: Platform) -> tuple[torch.dtype, ...]:
    return _HALF_DTYPES if platform.capability >= (8, 0) else (torch.float16,)


def _dtypes(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> str | None:
    dtype = call.query.dtype
    if dtype == call.key.dtype == call.value.dtype and dtype in allowed:
        return None
    names = ", ".join(str(allowed_dtype).removeprefix("torch.") for allowed_dtype in allowed)
    return f"on this GPU it takes {names}, not {str(dtype).removeprefix('torch.')}"


def _flash_head_size(call: AttentionCall, platform: Platform) -> str | None:
    head_size = call.query.shape[-1]
    if head_size != call.key.shape[-1] or head_size != call.value.shape[-1] or head_size > 256:
        return "it needs one head size for query, key and value, up to 256"
    small_shared_memory = (8, 6) <= platform.capability <= (8, 9)
    small_shared_memory |= (12, 0) <= platform.capability <= (12, 1)
    if not (small_shared_memory and call.trains) or head_size <= 192:
        return None
    if head_size <= 224 or call.dropout_p > 0.0:
        return "on this GPU it cannot train head sizes 193 to 224, nor above 224 with dropout"
    return None


def _batch_and_heads(
    call: AttentionCall, rules: Rules, *, gqa: bool, equal_kv_heads: bool
) -> str | None:
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return "it needs query, key and value of the same batch size"
    query_heads, key_heads, value_heads = (
        tensor.shape[-3] for tensor in (call.query, call.key, call.value)
    )
    if call.enable_gqa and gqa:
        if equal_kv_heads and key_heads != value_heads:
            return "it needs as many key heads as value heads"
        if 0 in (key_heads, value_heads) or query_heads % key_heads or query_heads % value_heads:
            return "the key and value heads must divide the query heads"
        return None
    if query_heads == key_heads == value_heads:
        return None
    if rules.broadcast_heads and query_heads > 0 and key_heads == 1 and value_heads == 1:
        return None
    return "it needs as many query heads as key and value heads"


def _nonzero_lengths(call: AttentionCall) -> str | None:
    if call.query.shape[-2] == 0 or call.key.shape[-2] == 0:
        return "it takes no empty sequence"
    return None


def _unit_last_stride(call: AttentionCall, *, ignore_singleton: bool) -> str | None:
    inputs = (call.query, call.key, call.value)
    unit = all(tensor.stride[-1] == 1 for tensor in inputs)
    if not unit and not (ignore_singleton and call.query.shape[-1] == 1):
        return "the last dimension of query, key and value must have stride 1"
    if call.mask is not None and call.mask.stride[-1] != 1:
        return "the last dimension of the mask must have stride 1"
    return None


def _cudnn_mask(call: AttentionCall) -> str | None:
    mask = call.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "its mask cannot require a gradient"
    if len(mask.shape) < 2:
        # What C++ does here, too.
        raise IndexError("attention mask with fewer than two dimensions")
    batch, heads, query_length, _ = call.query.shape
    full: tuple[int, ...] = (batch, heads, query_length, call.key.shape[2])
    full = full[4 - len(mask.shape) :] if len(mask.shape) in (2, 4) else ()
    pairs = zip(mask.shape, full, strict=False)
    if full and all(size in (1, full_size) for size, full_size in pairs):
        return None
    return "its mask must have 2 or 4 dimensions that broadcast to batch, heads, query, key"


def _cudnn_sizes(call: AttentionCall, platform: Platform, rules: Rules) -> str | None:
    batch, heads, query_length, head_size = call.query.shape
    value_size = call.value.shape[3]
    if rules.cudnn_grid_limit and (batch > 65535 or heads > 65535):
        return "it takes at most 65535 batches and 65535 heads"
    limit = _cudnn_head_limit(head_size, value_size, platform, rules)
    if head_size > limit or value_size > limit:
        return f"on this GPU its head sizes go up to {limit}"
    if head_size % 8 or value_size % 8:
        return "it needs head sizes that are multiples of 8"
    if call.key.shape[2] == 1:
        return "it takes no single key"
    if query_length == 1 and call.dropout_p != 0.0:
        return "it takes no single query with dropout"
    if query_length == 1 and rules.cudnn_decode_faults and _cudnn_decode_fails(platform):
        return "this version of cuDNN takes no single query on this GPU"
    return _cudnn_backward_sizes(call, platform, rules)


def _cudnn_decode_fails(platform: Platform) -> bool:
    version = platform.cudnn_version or 0
    faulty = 91900 <= version <= 92400 or version == 92500
    return faulty and platform.capability[0] in (10, 11)


def _cudnn_head_limit(head_size: int, value_size: int, platform: Platform, rules: Rules) -> int:
    version = platform.cudnn_version or 0
    is_192_128 = version >= 91100 and (head_size, value_size) == (192, 128)
    if rules.cudnn_head_256:
        if _cudnn_supports_256(platform):
            return 256
        sm90_or_sm10x = platform.capability == (9, 0) or platform.capability[0] == 10
        return 192 if sm90_or_sm10x and is_192_128 else 128
    if platform.capability[0] == 10 and is_192_128:
        return 192
    return 256 if platform.capability == (9, 0) and version >= 91000 else 128


def _cudnn_supports_256(platform: Platform) -> bool:
    version = platform.cudnn_version or 0
    if platform.capability == (10, 7) and version <= 92500:
        return False
    return version > 92200 and (platform.capability == (9, 0) or platform.capability[0] == 10)


def _cudnn_backward_sizes(call: AttentionCall, platform: Platform, rules: Rules) -> str | None:
    if not (rules.cudnn_head_256 and call.trains and _cudnn_supports_256(platform)):
        return None
    sizes = (call.query.shape[3], call.value.shape[3])
    if max(sizes) <= 128 or sizes in ((192, 128), (256, 256)):
        return None
    return "on this GPU it cannot train head sizes above 128 other than 192/128 and 256/256"


def _efficient_alignment(call: AttentionCall, platform: Platform, rules: Rules) -> str | None:
    alignment = _matmul_alignment(call.query.dtype, platform)
    head_size, value_size = call.query.shape[-1], call.value.shape[-1]
    if head_size != call.key.shape[-1]:
        return "it needs query and key of the same head size"
    if 0 in (head_size, value_size) or head_size % alignment or value_size % alignment:
        return f"it needs head sizes that are multiples of {alignment}"
    if not rules.efficient_offset_alignment or platform.capability < (8, 0):
        return None
    for tensor in (call.query, call.key, call.value):
        if 0 not in tensor.shape and tensor.storage_offset % alignment:
            return f"it needs storage offsets that are multiples of {alignment}"
    return None


def _matmul_alignment(dtype: torch.dtype, platform: Platform) -> int:
    is_half = dtype in _HALF_DTYPES
    if platform.capability >= (8, 0):
        return 8 if is_half else 4
    return 8 if is_half and platform.capability >= (7, 0) else 1


# --- the calls ----------------------------------------------------------------------------------


def read_state() -> AttentionState:
    """The settings in force in torch now, ``torch.nn.attention.sdpa_kernel`` contexts included."""
    switches: tuple[tuple[Kernel, bool], ...] = (
        ("flash", torch.backends.cuda.flash_sdp_enabled()),
        ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),
        ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
        ("math", torch.backends.cuda.math_sdp_enabled()),
    )
    order = tuple(_BACKENDS[b] for b in get_sdp_priority_order() if b in _BACKENDS)
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    return AttentionState(
        order=order,
        enabled=frozenset(kernel for kernel, enabled in switches if enabled),
        deterministic=torch.are_deterministic_algorithms_enabled() and strict,
    )


def describe_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The facts of a call that is about to be made, gradient mode included."""
    return AttentionCall(
        query=_describe(query),
        key=_describe(key),
        value=_describe(value),
        mask=None if attn_mask is None else _describe(attn_mask),
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        grad_enabled=torch.is_grad_enabled(),
    )


def _describe(tensor: Tensor) -> TensorFacts:
    return TensorFacts(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        storage_offset=int(tensor.storage_offset()),
    )


def current_platform(gpu_capability: tuple[int, int]) -> Platform:
    """A GPU of that capability under the torch, cuDNN and CUDA of this process."""
    return Platform(
        capability=gpu_capability,
        cudnn_version=torch.backends.cudnn.version(),
        torch_version=_two_numbers(torch.__version__),
        cuda_version=_two_numbers(torch.version.cuda or "0.0"),
    )


def _two_numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def choose_attention(gpu_capability: tuple[int, int], override: str | None) -> Iterator[None]:
    """Make attention on fake CUDA tensors call the kernel that a GPU of that capability would run.

    ``override`` names the kernel instead, whatever the user's settings: "flash", "cudnn",
    "efficient" or "math". A call that it cannot run raises AttentionError.

    The kernel is registered with the dispatcher below autocast and above autograd, where the C++
    function is, so it is seen inside ``nn.MultiheadAttention`` and AOTAutograd too. Other tensors
    reach the C++ function. The priority order is put back on exit. Contexts do not nest.
    """
    if override is not None and override not in _KERNELS:
        names = ", ".join(_KERNELS)
        raise AttentionError(f"unknown attention kernel {override!r}: use one of {names}")
    chooser = _Chooser(current_platform(gpu_capability), override)
    original = torch.library.get_kernel(_attention, "CUDA")

    def attention(keyset: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.device.type == "cuda" and is_fake(query):
            arguments = _Arguments(query, *args, **kwargs)
            if chooser.accepts(arguments):
                return chooser.attention(arguments)
        output: Tensor = original.call_boxed(keyset, query, *args, **kwargs)
        return output

    order = get_sdp_priority_order()
    try:
        _forget_installed_order(order)
        with scoped_library("aten", "IMPL") as library:
            _register(library, attention)
            yield
    finally:
        set_sdp_priority_order(order)


def _forget_installed_order(order: list[int]) -> None:
    # PyTorch installs this order for a GPU that is present; it says nothing about the named one.
    installed = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    installed += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if order[:4] == [backend.value for backend in installed]:
        initial = [*installed[1:], installed[0]]
        set_sdp_priority_order([backend.value for backend in initial])


def _register(library: torch.library.Library, attention: Callable[..., Tensor]) -> None:
    with warnings.catch_warnings():
        # 2.11 warns of every kernel that replaces another, asked for or not.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        # The alias key that the C++ function has: in inference mode there are no autograd keys,
        # and FakeTensorMode and the Python dispatcher look the function up under this name.
        # One registration at a time: where dispatch modes are active, torch calls the function that
        # was registered last, even after its library is gone.
        try:
            library.impl(  # type: ignore[no-untyped-call]
                "scaled_dot_product_attention",
                attention,
                "CompositeImplicitAutograd",
                with_keyset=True,
                allow_override=False,
            )
        except RuntimeError as error:
            raise AttentionError(
                "scaled_dot_product_attention is already replaced from Python: leave that context "
                "first (choose_attention does not nest)"
            ) from error


@dataclass(frozen=True)
class _Arguments:
    """The arguments of one call of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def with_batch(self) -> _Arguments:
        query, key, value = (tensor.unsqueeze(0) for tensor in (self.query, self.key, self.value))
        mask = self.attn_mask
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


class _Chooser:
    """Chooses and calls kernels for one ``choose_attention`` context."""

    def __init__(self, platform: Platform, override: Kernel | None) -> None:
        self._platform = platform
        self._rules = Rules.of(platform.torch_version)
        self._override = override
        self._made_first_call = False

    def accepts(self, arguments: _Arguments) -> bool:
        """Whether PyTorch gets as far as choosing a kernel; else it says what is wrong."""
        query, mask = arguments.query, arguments.attn_mask
        for tensor in (query, arguments.key, arguments.value):
            if tensor.dtype != query.dtype or tensor.device != query.device:
                return False
            if tensor.dim() < 2 or tensor.is_nested:
                return False
        if mask is None:
            return True
        if arguments.is_causal and self._rules.mask_excludes_causal:
            return False
        return mask.dtype in (torch.bool, torch.float32, query.dtype)

    def attention(self, arguments: _Arguments) -> Tensor:
        dimensions = {t.dim() for t in (arguments.query, arguments.key, arguments.value)}
        if self._rules.unbatched_inputs and dimensions == {3}:
            return self._batched(arguments.with_batch()).squeeze(0)
        return self._batched(arguments)

    def _batched(self, arguments: _Arguments) -> Tensor:
        if _is_empty(arguments, self._rules):
            return _zeros(arguments)
        call = describe_call(
            arguments.query,
            arguments.key,
            arguments.value,
            arguments.attn_mask,
            arguments.dropout_p,
            arguments.is_causal,
            arguments.enable_gqa,
        )
        kernel = self._choose(call)
        if kernel == "flash":
            return _flash(arguments)
        if kernel == "cudnn":
            return _cudnn(arguments, call.trains, self._rules.cudnn_mask_fill)
        if kernel == "efficient":
            trains_mask = self._rules.mask_gradient_trains and call.trains_mask
            return _efficient(arguments, call.trains or trains_mask)
        return _math(arguments)

    def _choose(self, call: AttentionCall) -> Kernel:
        if self._override is not None:
            return self._forced(self._override, call)
        self._install_default_order()
        state = read_state()
        if not state.enabled:
            raise NoAvailableKernelError(
                "No viable backend for scaled_dot_product_attention was found: flash, cudnn, "
                "efficient and math are all disabled; enable one"
            )
        choice = choose_kernel(call, self._platform, state)
        if choice.kernel is None:
            reasons = "; ".join(f"{r.kernel}: {r.reason}" for r in choice.rejected)
            raise NoAvailableKernelError(
                f"No available kernel for scaled_dot_product_attention ({reasons}); enable "
                "another kernel, or change the inputs"
            )
        return choice.kernel

    def _forced(self, kernel: Kernel, call: AttentionCall) -> Kernel:
        deterministic = read_state().deterministic
        reason = why_not(kernel, call, self._platform, deterministic=deterministic)
        if reason is None:
            return kernel
        raise AttentionError(
            f"attention kernel {kernel!r} was asked for, but cannot run this call: {reason}; "
            "ask for another kernel, or leave the choice to torch"
        )

    def _install_default_order(self) -> None:
        # PyTorch does this at the first attention call of a process, and the order that it
        # overwrites may be one that the user set a moment before: sdpa_kernel(..., set_priority)
        # has no effect on that call, and on its exit restores the order from before, in which
        # cuDNN is last. The graph that a fresh process traces on the GPU shows all of this, so
        # the same is done here, to the same setting.
        if not self._made_first_call and _prefers_cudnn(self._platform):
            numbers = {kernel: number for number, kernel in _BACKENDS.items()}
            order = [numbers[kernel] for kernel in default_order(self._platform)]
            set_sdp_priority_order(order)
        self._made_first_call = True


def _is_empty(arguments: _Arguments, rules: Rules) -> bool:
    query, key, value = arguments.query, arguments.key, arguments.value
    if rules.empty_is_zero == "never":
        return False
    if rules.empty_is_zero == "any input":
        return 0 in (*query.shape, *key.shape, *value.shape)
    return 0 in (*query.shape[:-1], *value.shape)


def _zeros(arguments: _Arguments) -> Tensor:
    """Zeros that depend on every input, so that each gets a gradient."""
    query, key, value = arguments.query, arguments.key, arguments.value
    zeros: Tensor = torch.ops.aten.zeros.default(
        [*query.shape[:-1], value.size(-1)],
        dtype=query.dtype,
        layout=torch.strided,
        device=query.device,
    )
    # Summed in this order because C++ evaluates the operands of its sum from right to left.
    value_sum, key_sum, query_sum = (tensor.sum() for tensor in (value, key, query))
    nothing: Tensor = torch.ops.aten.mul.Scalar(query_sum + key_sum + value_sum, 0)
    return zeros + nothing


def _flash(arguments: _Arguments) -> Tensor:
    head_size = arguments.query.size(-1)
    padded = [_pad_head(t) for t in (arguments.query, arguments.key, arguments.value)]
    scale = arguments.scale
    if scale is None:
        # Given always, because it is that of the size before padding.
        scale = 1.0 / math.sqrt(head_size) if head_size else math.inf
    outputs = flash_attention(*padded, arguments.dropout_p, arguments.is_causal, False, scale=scale)
    output: Tensor = outputs[0]
    return output if output.size(-1) == head_size else _slice_last(output, head_size)


def _pad_head(tensor: Tensor) -> Tensor:
    excess = tensor.size(-1) % _FLASH_HEAD_ALIGNMENT
    return tensor if excess == 0 else _pad_last(tensor, _FLASH_HEAD_ALIGNMENT - excess)


def _cudnn(arguments: _Arguments, trains: bool, mask_fill: float) -> Tensor:
    outputs = cudnn_attention(
        arguments.query,
        arguments.key,
        arguments.value,
        _additive_mask(arguments, mask_fill),
        trains,
        arguments.dropout_p,
        arguments.is_causal,
        False,
        scale=arguments.scale,
    )
    output: Tensor = outputs[0]
    return output


def _efficient(arguments: _Arguments, trains: bool) -> Tensor:
    query, key = arguments.query, arguments.key
    mask = _additive_mask(arguments, -math.inf)
    if mask is not None:
        full_shape = (query.size(0), query.size(1), query.size(2), key.size(2))
        mask = _aligned(mask).expand(full_shape)
    outputs = efficient_attention(
        query,
        key,
        arguments.value,
        mask,
        trains,
        arguments.dropout_p,
        arguments.is_causal,
        scale=arguments.scale,
    )
    output: Tensor = outputs[0]
    return output


def _math(arguments: _Arguments) -> Tensor:
    # A composite of PyTorch's own; it asks nothing of the driver and decomposes as on the GPU.
    outputs = math_attention(
        arguments.query,
        arguments.key,
        arguments.value,
        _additive_mask(arguments, -math.inf),
        arguments.dropout_p,
        arguments.is_causal,
        None,
        scale=arguments.scale,
        enable_gqa=arguments.enable_gqa,
    )
    output: Tensor = outputs[0]
    return output


def _additive_mask(arguments: _Arguments, fill: float) -> Tensor | None:
    mask = arguments.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    dtype = arguments.query.dtype
    masked = torch.ops.aten.scalar_tensor.default(fill, dtype=dtype, device=mask.device)
    additive: Tensor = torch.ops.aten.where.ScalarSelf(mask, 0.0, masked)
    return additive


def _aligned(mask: Tensor) -> Tensor:
    """The mask with rows that start at multiples of the kernel's alignment, in the same shape."""
    *strides, last_stride = mask.stride()
    if last_stride == 1 and all(stride % _EFFICIENT_MASK_ALIGNMENT == 0 for stride in strides):
        return mask
    length = mask.size(-1)
    # A length that is a multiple already grows by a whole alignment: PyTorch pads so, too.
    padding = _EFFICIENT_MASK_ALIGNMENT - length % _EFFICIENT_MASK_ALIGNMENT
    return _slice_last(_pad_last(mask, padding), length)


def _pad_last(tensor: Tensor, padding: int) -> Tensor:
    padded: Tensor = torch.ops.aten.pad.default(tensor, [0, padding])
    return padded


def _slice_last(tensor: Tensor, length: int) -> Tensor:
    narrowed: Tensor = torch.ops.aten.slice.Tensor(tensor, -1, 0, length)
    return narrowed
