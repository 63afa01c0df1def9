"""The attention chooser: its rule as tables, its calls as traced ops, and both against a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from offplan.trace.attention import (
    AttentionCall,
    AttentionError,
    AttentionState,
    NoAvailableKernelError,
    Platform,
    TensorFacts,
    choose_attention,
    choose_kernel,
    current_platform,
    default_order,
    describe_call,
    read_state,
    why_not,
)

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to compare with"),
]

H200 = Platform((9, 0), 91900, (2, 11))
H200_214 = Platform((9, 0), 92400, (2, 14))
B200 = Platform((10, 0), 91900, (2, 11))
A100 = Platform((8, 0), 91900, (2, 11))
A10 = Platform((8, 6), 91900, (2, 11))
RTX_4090 = Platform((8, 9), 91900, (2, 11))
RTX_5090 = Platform((12, 0), 91900, (2, 11))
T4 = Platform((7, 5), 91900, (2, 11))

BF16, FP16, FP32, BOOL = torch.bfloat16, torch.float16, torch.float32, torch.bool
SHAPE = (2, 8, 128, 64)
ORDER_CUDNN_FIRST = [3, 1, 2, 0, 4]
ORDER_FLASH_FIRST = [1, 2, 0, 3, 4]


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, grad: bool = True) -> TensorFacts:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return TensorFacts(shape, tuple(strides), dtype, grad)


def call(
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = BF16,
    *,
    key: tuple[int, ...] | None = None,
    value: tuple[int, ...] | None = None,
    mask: TensorFacts | tuple[int, ...] | None = None,
    grad: bool = True,
    **options: Any,
) -> AttentionCall:
    if isinstance(mask, tuple):
        mask = contiguous(mask, BOOL, grad=False)
    key = key or shape
    return AttentionCall(
        contiguous(shape, dtype, grad),
        contiguous(key, dtype, grad),
        contiguous(value or key, dtype, grad),
        mask,
        **options,
    )


def with_head(size: int) -> tuple[int, ...]:
    return (2, 8, 128, size)


def chosen(attention_call: AttentionCall, platform: Platform, **state: Any) -> str | None:
    order = state.pop("order", default_order(platform))
    return choose_kernel(attention_call, platform, AttentionState(order=order, **state)).kernel


# --- the rule -----------------------------------------------------------------------------------

SEEN_ON_H200 = {
    "bf16": (call(), "cudnn"),
    "causal": (call(is_causal=True), "cudnn"),
    "explicit mask": (call(mask=(128, 128)), "cudnn"),
    "grouped heads": (call(key=(2, 2, 128, 64), enable_gqa=True), "cudnn"),
    "dropout": (call(dropout_p=0.1), "cudnn"),
    "head size 72": (call(with_head(72)), "cudnn"),
    "head size 128": (call(with_head(128)), "cudnn"),
    "head size 20": (call(with_head(20)), "flash"),
    "fp32": (call(dtype=FP32), "efficient"),
    "fp32 with a mask": (call(dtype=FP32, mask=(128, 128)), "efficient"),
}


@pytest.mark.parametrize(("attention_call", "kernel"), SEEN_ON_H200.values(), ids=SEEN_ON_H200)
def test_h200_chooses_what_it_was_seen_to_choose(
    attention_call: AttentionCall, kernel: str
) -> None:
    assert chosen(attention_call, H200) == kernel


BY_GPU = [
    (call(), {H200: "cudnn", B200: "cudnn", A100: "flash", RTX_4090: "flash", T4: "math"}),
    (call(dtype=FP16), {H200: "cudnn", A100: "flash", RTX_5090: "flash", T4: "efficient"}),
    (call(dtype=FP32), {B200: "efficient", A100: "efficient", T4: "efficient"}),
    (call(dtype=torch.float64), {H200: "math", A100: "math", T4: "math"}),
    (call(mask=(128, 128)), {B200: "cudnn", A100: "efficient", RTX_4090: "efficient", T4: "math"}),
    (call(dtype=FP16, mask=(128, 128)), {A100: "efficient", T4: "efficient"}),
    (call(dropout_p=0.1), {B200: "cudnn", A100: "flash", RTX_4090: "flash", T4: "math"}),
    (call(with_head(20)), {B200: "flash", A100: "flash", RTX_4090: "flash", T4: "math"}),
    (call(with_head(21), FP32), {H200: "math", A100: "math", T4: "efficient"}),
    (call(with_head(20), FP32), {H200: "efficient", A100: "efficient", T4: "efficient"}),
    (call(with_head(20), FP16), {T4: "math"}),
    (call(with_head(192)), {H200: "cudnn", B200: "flash", A100: "flash", RTX_4090: "flash"}),
    (call(with_head(216)), {A100: "flash", A10: "efficient", RTX_5090: "efficient"}),
    (call(with_head(216), grad=False), {A10: "flash", RTX_4090: "flash"}),
    (call(with_head(216), grad_enabled=False), {RTX_4090: "flash"}),
    (call(with_head(256)), {H200: "cudnn", H200_214: "cudnn", RTX_4090: "flash"}),
    (call(with_head(256), dropout_p=0.5), {A100: "flash", RTX_4090: "efficient"}),
    (call(with_head(264)), {H200: "efficient", A100: "efficient"}),
    (call(with_head(257)), {H200: "math", A100: "math"}),
    (call(with_head(1)), {H200: "flash"}),
    (call(with_head(192), value=(2, 8, 128, 128)), {B200: "cudnn", H200_214: "cudnn"}),
    (call(with_head(192), value=(2, 8, 128, 192)), {B200: "flash", H200_214: "flash"}),
    (call(with_head(192), grad=False), {H200_214: "cudnn"}),
    (call(key=(2, 8, 256, 64), is_causal=True), {H200: "cudnn", A100: "efficient"}),
    (call(key=(2, 2, 128, 64), enable_gqa=True), {A100: "flash", H200_214: "cudnn"}),
    (call(dtype=FP32, key=(2, 2, 128, 64), enable_gqa=True), {A100: "math", H200_214: "efficient"}),
    (call(key=(2, 3, 128, 64), enable_gqa=True), {H200: "math"}),
    (call(key=(2, 2, 128, 64)), {H200: "math", H200_214: "math"}),
    (call(key=(2, 1, 128, 64)), {H200: "math", H200_214: "cudnn"}),
    (
        call(key=(2, 2, 128, 64), value=(2, 1, 128, 64), enable_gqa=True),
        {H200: "cudnn", A100: "math"},
    ),
    (call((8, 128, 64)), {H200: "math", H200_214: "cudnn"}),
    (call((128, 64)), {H200: "math", H200_214: "math"}),
    (call(key=(1, 8, 128, 64)), {H200: "math", A100: "math"}),
    (call((2, 8, 0, 64)), {H200: "math"}),
    (call(key=(2, 8, 0, 64)), {H200: "math", A100: "math"}),
    (call(key=(2, 8, 1, 64)), {H200: "flash"}),
    (call((2, 8, 1, 64), key=SHAPE), {H200: "cudnn"}),
    (call((2, 8, 1, 64), key=SHAPE, dropout_p=0.5), {H200: "flash"}),
    (call(dropout_p=0.1), {H200_214: "flash"}),
    (call(dropout_p=0.125), {H200_214: "cudnn"}),
]


@pytest.mark.parametrize(
    ("attention_call", "platform", "kernel"),
    [(a_call, platform, kernel) for a_call, by in BY_GPU for platform, kernel in by.items()],
)
def test_each_gpu_takes_the_first_kernel_that_fits(
    attention_call: AttentionCall, platform: Platform, kernel: str
) -> None:
    assert chosen(attention_call, platform) == kernel


MASKS = [
    ((128, 128), "cudnn"),
    ((1, 128), "cudnn"),
    ((2, 1, 1, 128), "cudnn"),
    ((2, 8, 128, 1), "cudnn"),
    ((8, 128, 128), "efficient"),
    ((3, 1, 128, 128), "efficient"),
    (contiguous((128, 128), BF16, grad=False), "cudnn"),
    (contiguous((128, 128), BF16, grad=True), "efficient"),
    (TensorFacts((128, 128), (1, 128), BF16), "math"),
    (TensorFacts((2, 8, 128, 128), (1, 0, 0, 0), BOOL), "math"),
]


@pytest.mark.parametrize(("mask", "kernel"), MASKS)
def test_h200_gives_a_mask_to_cudnn_if_it_broadcasts_and_needs_no_gradient(
    mask: Any, kernel: str
) -> None:
    assert chosen(call(mask=mask), H200) == kernel


def test_fused_kernels_need_unit_stride_in_the_last_dimension() -> None:
    transposed = TensorFacts(SHAPE, (65536, 8192, 1, 128), BF16)
    assert chosen(replace(call(), key=transposed), H200) == "math"


def test_strict_determinism_excludes_cudnn() -> None:
    assert chosen(call(), H200, deterministic=True) == "flash"


def test_disabled_kernels_are_passed_over() -> None:
    assert chosen(call(), H200, enabled=frozenset({"efficient", "math"})) == "efficient"
    assert chosen(call(dtype=FP32), H200, enabled=frozenset({"flash"})) is None


def test_the_order_decides_among_kernels_that_fit() -> None:
    assert chosen(call(), H200, order=("efficient", "cudnn", "flash", "math")) == "efficient"
    assert chosen(call(), H200, order=("math", "cudnn", "flash", "efficient")) == "math"


def test_a_choice_says_why_each_kernel_before_it_was_rejected() -> None:
    rejected = choose_kernel(call(dtype=FP32), H200, AttentionState(default_order(H200))).rejected
    assert [rejection.kernel for rejection in rejected] == ["cudnn", "flash"]
    assert all("float32" in rejection.reason for rejection in rejected)


def test_offsets_matter_to_the_efficient_kernel_since_2_13() -> None:
    shifted = replace(contiguous(SHAPE, FP32), storage_offset=2)
    for minor, kernel in ((12, "efficient"), (13, "math")):
        platform = Platform((9, 0), 92000, (2, minor))
        assert chosen(replace(call(dtype=FP32), value=shifted), platform) == kernel


SINCE = [
    (12, call(dropout_p=0.1), "cudnn", "flash"),
    (13, call((65536, 1, 16, 64)), "cudnn", "flash"),
    (14, call(key=(2, 1, 128, 64)), "math", "cudnn"),
    (14, call(dtype=FP32, key=(2, 2, 128, 64), enable_gqa=True), "math", "efficient"),
    (14, call((8, 128, 64), mask=(128, 128)), "math", "cudnn"),
    (14, call(with_head(200)), "cudnn", "flash"),
]


@pytest.mark.parametrize(("minor", "attention_call", "before", "since"), SINCE)
def test_releases_of_torch_differ(
    minor: int, attention_call: AttentionCall, before: str, since: str
) -> None:
    assert chosen(attention_call, Platform((9, 0), 92400, (2, minor - 1))) == before
    assert chosen(attention_call, Platform((9, 0), 92400, (2, minor))) == since


@pytest.mark.parametrize(
    ("version", "kernel"), [(91800, "cudnn"), (92400, "flash"), (92401, "cudnn"), (92501, "cudnn")]
)
def test_2_14_keeps_single_queries_from_cudnn_that_fails_on_them(version: int, kernel: str) -> None:
    single = call((2, 8, 1, 64), key=SHAPE)
    assert chosen(single, Platform((10, 0), version, (2, 14))) == kernel
    assert chosen(single, Platform((9, 0), version, (2, 14))) == "cudnn"
    assert chosen(single, Platform((10, 0), version, (2, 13))) == "cudnn"


def test_a_one_dimensional_mask_is_torch_s_error_where_cudnn_is_tried() -> None:
    with pytest.raises(IndexError):
        chosen(call(mask=(128,)), H200)
    assert chosen(call(mask=(128,)), A100) == "efficient"


ORDERS = [
    (H200, "cudnn"),
    (B200, "cudnn"),
    (Platform((10, 3), 91900, (2, 11)), "cudnn"),
    (Platform((10, 1), 91900, (2, 11)), "flash"),
    (Platform((10, 1), 92000, (2, 13)), "cudnn"),
    (Platform((10, 1), 92000, (2, 13), cuda_version=(12, 9)), "flash"),
    (Platform((9, 0), 91500, (2, 11)), "flash"),
    (Platform((9, 0), None, (2, 11)), "flash"),
    (A100, "flash"),
    (RTX_5090, "flash"),
]


@pytest.mark.parametrize(("platform", "first"), ORDERS)
def test_cudnn_comes_first_on_hopper_and_blackwell_with_a_recent_cudnn(
    platform: Platform, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert default_order(platform)[0] == first
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert default_order(platform)[0] == "flash"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "yes")
    assert default_order(platform)[0] == first


CUDNN_VERSIONS = [
    (call(dropout_p=0.5), 91200, r"9\.11 to 9\.13"),
    (call(with_head(256)), 90900, "up to 128"),
    (call(), 8907, "cuDNN 9"),
    (call(), None, "cuDNN 9"),
]


@pytest.mark.parametrize(("attention_call", "version", "reason"), CUDNN_VERSIONS)
def test_older_cudnn_can_do_less(
    attention_call: AttentionCall, version: int | None, reason: str
) -> None:
    assert why_not("cudnn", attention_call, H200) is None
    found = why_not("cudnn", attention_call, replace(H200, cudnn_version=version))
    assert found is not None
    assert re.search(reason, found)


# --- the calls ----------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records aten calls as values: ops, arguments and results, tensors by layout and identity."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, ...]] = []
        self._seen: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.ops.append((str(func), *map(self.value, (args, kwargs or {}, result))))
        return result

    def value(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            if not any(seen is item for seen in self._seen):
                self._seen.append(item)
            place = next(i for i, seen in enumerate(self._seen) if seen is item)
            return (place, item.dtype, tuple(item.shape), item.stride(), item.storage_offset())
        if isinstance(item, (list, tuple)):
            return tuple(self.value(child) for child in item)
        if isinstance(item, dict):
            return tuple((name, self.value(child)) for name, child in sorted(item.items()))
        return str(item)

    @property
    def names(self) -> list[str]:
        return [op[0].removeprefix("aten.") for op in self.ops]

    def results(self, name: str) -> Any:
        return next(op[3] for op in self.ops if op[0] == f"aten.{name}")


def fake(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def record(
    function: Callable[[], Any],
    capability: tuple[int, int] = (9, 0),
    override: str | None = None,
) -> Recorder:
    with choose_attention(capability, override), Recorder() as recorder:
        function()
    return recorder


@pytest.fixture
def fake_mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


CUDNN = "_scaled_dot_product_cudnn_attention.default"
FLASH = "_scaled_dot_product_flash_attention.default"
EFFICIENT = "_scaled_dot_product_efficient_attention.default"
ADDITIVE = ["scalar_tensor.default", "scalar_tensor.default", "where.self"]
GRAD = ["detach.default"]


@pytest.mark.usefixtures("fake_mode")
class TestOps:
    def test_cudnn_takes_inputs_as_they_are(self) -> None:
        query, key, value = (fake(*SHAPE) for _ in "qkv")
        recorder = record(lambda: F.scaled_dot_product_attention(query, key, value))
        assert recorder.names == [CUDNN, *GRAD]
        log_sum_exp, seed = recorder.results(CUDNN)[1], recorder.results(CUDNN)[6]
        assert log_sum_exp[2] == (2, 8, 128, 1)
        assert seed[1] is torch.int64

    def test_cudnn_takes_a_mask_unexpanded(self) -> None:
        mask = fake(2, 1, 1, 128, dtype=BOOL, grad=False)
        query = fake(*SHAPE)
        recorder = record(lambda: F.scaled_dot_product_attention(query, query, query, mask))
        assert recorder.names == [*ADDITIVE, CUDNN, *GRAD]
        assert recorder.results("where.self")[2] == (2, 1, 1, 128)

    def test_flash_pads_the_head_and_slices_the_output(self) -> None:
        query = fake(2, 8, 128, 20)
        recorder = record(lambda: F.scaled_dot_product_attention(query, query, query))
        pads = ["constant_pad_nd.default"] * 3
        assert recorder.names == [*pads, FLASH, *GRAD, "slice.Tensor"]
        assert recorder.results(FLASH)[0][2] == (2, 8, 128, 24)
        assert recorder.results("slice.Tensor")[2] == (2, 8, 128, 20)
        scale = dict(recorder.ops[3][2])["scale"]
        assert scale == str(20**-0.5)

    def test_efficient_pads_slices_and_expands_a_mask(self) -> None:
        query, key = fake(2, 8, 10, 64, dtype=FP32), fake(2, 8, 13, 64, dtype=FP32)
        mask = fake(10, 13, dtype=BOOL, grad=False)
        recorder = record(lambda: F.scaled_dot_product_attention(query, key, key, mask))
        layout = ["constant_pad_nd.default", "slice.Tensor", "expand.default"]
        assert recorder.names == [*ADDITIVE, *layout, EFFICIENT, *GRAD]
        assert recorder.results("expand.default")[2:4] == ((2, 8, 10, 13), (0, 0, 16, 1))
        assert recorder.results(EFFICIENT)[1][2] == (2, 8, 32)

    def test_efficient_expands_an_aligned_mask_only(self) -> None:
        query, mask = fake(2, 8, 16, 64, dtype=FP32), fake(16, 16, dtype=FP32, grad=False)
        recorder = record(lambda: F.scaled_dot_product_attention(query, query, query, mask))
        assert recorder.names == ["expand.default", EFFICIENT, *GRAD]

    def test_math_computes_in_fp32_and_repeats_grouped_heads(self) -> None:
        query, key = fake(2, 8, 16, 64), fake(2, 2, 16, 64)
        recorder = record(
            lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True),
            override="math",
        )
        assert recorder.names[:3] == ["_to_copy.default"] * 3
        assert recorder.names.count("clone.default") == 2
        assert recorder.results("_safe_softmax.default")[1] is FP32
        assert recorder.names[-1] == "_to_copy.default"

    def test_grouped_heads_reach_fused_kernels_ungrouped(self) -> None:
        query, key = fake(2, 8, 16, 64), fake(2, 2, 16, 64)
        for override, name in (("cudnn", CUDNN), ("flash", FLASH)):
            recorder = record(
                lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True),
                override=override,
            )
            assert recorder.names == [name, *GRAD]

    def test_no_grad_needs_no_log_sum_exp(self) -> None:
        query = fake(*SHAPE, dtype=FP32)
        with torch.no_grad():
            recorder = record(lambda: F.scaled_dot_product_attention(query, query, query))
        assert recorder.names == [EFFICIENT]
        assert recorder.results(EFFICIENT)[1][2] == (2, 8, 0)

    def test_inference_mode_chooses_too(self) -> None:
        with torch.inference_mode(), choose_attention((8, 0), None):
            query = fake(2, 8, 128, 20, grad=False)
            output = F.scaled_dot_product_attention(query, query, query)
        assert output.stride() == (2 * 8 * 128 * 24 // 2, 128 * 24, 24, 1)

    def test_the_gradient_function_is_the_kernel_s(self) -> None:
        query = fake(*SHAPE)
        with choose_attention((9, 0), None):
            output = F.scaled_dot_product_attention(query, query, query)
        assert type(output.grad_fn).__name__ == "ScaledDotProductCudnnAttentionBackward0"

    def test_autocast_casts_before_the_choice(self) -> None:
        query = fake(*SHAPE, dtype=FP32)
        with autocast_to_bf16():
            recorder = record(lambda: F.scaled_dot_product_attention(query, query, query))
        assert recorder.names == ["_to_copy.default", CUDNN, *GRAD]

    def test_multihead_attention_is_seen(self) -> None:
        with torch.device("cuda"):
            module = nn.MultiheadAttention(64, 4, batch_first=True)
        inputs = fake(2, 16, 64, dtype=FP32)
        recorder = record(lambda: module(inputs, inputs, inputs, need_weights=False))
        assert EFFICIENT in recorder.names
        with autocast_to_bf16():
            recorder = record(lambda: module(inputs, inputs, inputs, need_weights=False))
        assert CUDNN in recorder.names

    def test_user_s_kernels_are_respected(self) -> None:
        query = fake(*SHAPE)

        def attend() -> None:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                F.scaled_dot_product_attention(query, query, query)

        assert record(attend).names == [FLASH, *GRAD]

    def test_user_s_order_is_overwritten_by_the_first_call_of_a_process(self) -> None:
        # torch's own behaviour: it installs its default order at that call.
        query = fake(*SHAPE)
        wanted = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]

        def attend() -> None:
            with sdpa_kernel(wanted, set_priority=True):
                F.scaled_dot_product_attention(query, query, query)
                F.scaled_dot_product_attention(query, query, query)
            F.scaled_dot_product_attention(query, query, query)
            with sdpa_kernel(wanted, set_priority=True):
                F.scaled_dot_product_attention(query, query, query)

        with order(ORDER_FLASH_FIRST):
            names = [name for name in record(attend).names if name not in GRAD]
        assert names == [CUDNN, CUDNN, FLASH, EFFICIENT]

    def test_user_s_order_holds_where_torch_has_no_other(self) -> None:
        query = fake(*SHAPE)

        def attend() -> None:
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True):
                F.scaled_dot_product_attention(query, query, query)

        assert record(attend, (8, 0)).names == [EFFICIENT, *GRAD]

    def test_strict_determinism_is_respected(self) -> None:
        query = fake(*SHAPE)
        for warn_only, name in ((False, FLASH), (True, CUDNN)):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            try:
                recorder = record(lambda: F.scaled_dot_product_attention(query, query, query))
            finally:
                torch.use_deterministic_algorithms(False)
            assert recorder.names == [name, *GRAD]


@contextmanager
def autocast_to_bf16() -> Iterator[None]:
    # torch.autocast("cuda") turns itself off on a machine with no GPU.
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


@contextmanager
def order(numbers: list[int]) -> Iterator[None]:
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(numbers)
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def attend_and_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True) * 2


def test_make_fx_records_the_kernel() -> None:
    with FakeTensorMode(), choose_attention((9, 0), None):
        inputs = [fake(*SHAPE) for _ in "qkv"]
        graph = make_fx(attend_and_scale)(*inputs)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets[0] == f"aten.{CUDNN}"


@pytest.mark.parametrize("head_size", [64, 20])
def test_aot_autograd_records_the_kernel(head_size: int) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with FakeTensorMode(), choose_attention((9, 0), None), torch.no_grad():
        inputs = [fake(2, 8, 128, head_size, grad=False) for _ in "qkv"]
        aot_function(attend_and_scale, fw_compiler=compiler)(*inputs)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert f"aten.{CUDNN if head_size == 64 else FLASH}" in targets
    assert targets.count("aten.constant_pad_nd.default") == (0 if head_size == 64 else 3)


# --- overrides and errors -----------------------------------------------------------------------


@pytest.mark.usefixtures("fake_mode")
class TestOverride:
    @pytest.mark.parametrize(
        ("override", "name"), [("flash", FLASH), ("cudnn", CUDNN), ("efficient", EFFICIENT)]
    )
    def test_an_override_wins_over_order_and_switches(self, override: str, name: str) -> None:
        query = fake(*SHAPE)

        def attend() -> None:
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(query, query, query)

        assert record(attend, override=override).names == [name, *GRAD]

    @pytest.mark.parametrize("override", ["flash", "cudnn"])
    def test_an_override_that_does_not_fit_is_an_error(self, override: str) -> None:
        query = fake(*SHAPE, dtype=FP32)
        with pytest.raises(AttentionError, match=rf"'{override}'.*float32.*ask for another"):
            record(lambda: F.scaled_dot_product_attention(query, query, query), override=override)

    def test_an_unknown_override_is_an_error(self) -> None:
        with pytest.raises(AttentionError, match="unknown attention kernel 'fast'"):
            record(lambda: None, override="fast")

    def test_no_fitting_kernel_is_torch_s_error(self) -> None:
        query = fake(*SHAPE, dtype=torch.float64)

        def attend() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(query, query, query)

        with pytest.raises(RuntimeError, match=r"No available kernel.*flash: .*float64"):
            record(attend)

    def test_no_enabled_kernel_is_torch_s_error(self) -> None:
        query = fake(*SHAPE)

        def attend() -> None:
            with sdpa_kernel([]):
                F.scaled_dot_product_attention(query, query, query)

        with pytest.raises(NoAvailableKernelError, match="No viable backend"):
            record(attend)

    def test_invalid_arguments_are_torch_s_error(self) -> None:
        query, key = fake(*SHAPE), fake(*SHAPE, dtype=FP32)
        with pytest.raises(RuntimeError, match="same dtype"):
            record(lambda: F.scaled_dot_product_attention(query, key, key))


# --- the context --------------------------------------------------------------------------------


def test_other_tensors_reach_torch() -> None:
    query = torch.randn(1, 2, 4, 8)
    expected = F.scaled_dot_product_attention(query, query, query)
    with choose_attention((9, 0), "math"):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
        with FakeTensorMode() as mode, Recorder() as recorder:
            query = mode.from_tensor(query)
            F.scaled_dot_product_attention(query, query, query)
    assert "_scaled_dot_product_flash_attention_for_cpu.default" in recorder.names


def test_the_context_leaves_nothing_behind() -> None:
    before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    with order(ORDER_FLASH_FIRST):
        with FakeTensorMode(), choose_attention((9, 0), None):
            query = fake(*SHAPE)
            F.scaled_dot_product_attention(query, query, query)
            assert torch._C._get_sdp_priority_order() == ORDER_CUDNN_FIRST
        assert torch._C._get_sdp_priority_order() == ORDER_FLASH_FIRST
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before


def test_the_order_of_a_gpu_that_is_present_says_nothing_about_the_named_one() -> None:
    with order(ORDER_CUDNN_FIRST), FakeTensorMode():
        query = fake(*SHAPE)
        a100 = record(lambda: F.scaled_dot_product_attention(query, query, query), (8, 0))
        h200 = record(lambda: F.scaled_dot_product_attention(query, query, query), (9, 0))
        assert torch._C._get_sdp_priority_order() == ORDER_CUDNN_FIRST
    assert (a100.names[0], h200.names[0]) == (FLASH, CUDNN)


def test_the_context_ends_with_an_exception() -> None:
    before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    with pytest.raises(KeyError), choose_attention((9, 0), None):
        raise KeyError
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before


def test_contexts_do_not_nest() -> None:
    with FakeTensorMode(), choose_attention((9, 0), None):
        query = fake(*SHAPE)
        with pytest.raises(AttentionError, match="does not nest"), choose_attention((8, 0), None):
            pass
        with Recorder() as recorder:
            F.scaled_dot_product_attention(query, query, query)
    assert recorder.names == [CUDNN, *GRAD]


# --- against a GPU ------------------------------------------------------------------------------

GRID = {
    "dtype": [BF16, FP16, FP32],
    "head_size": [1, 8, 20, 64, 72, 96, 128, 136, 192, 200, 216, 224, 256, 264],
}
HEADS = [(4, 4, False), (4, 2, True), (4, 2, False), (4, 1, False)]
LENGTHS = [(16, 16), (10, 13), (1, 16), (16, 1), (16, 0)]
OPTIONS = [
    {},
    {"is_causal": True},
    {"dropout_p": 0.1},
    {"dropout_p": 0.125},
    {"mask": ("full", BOOL, False)},
    {"mask": ("full", None, True)},
    {"mask": ("full", FP32, False)},
    {"mask": ("row", BOOL, False)},
    {"mask": ("heads", BOOL, False)},
    {"mask": ("three", BOOL, False)},
]


def grid_calls(
    dtype: torch.dtype, head_size: int
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], dict[str, Any]]]:
    """Every call of the grid; the caller decides by its modes whether tensors are fake."""
    for heads, lengths, options, grad in itertools.product(HEADS, LENGTHS, OPTIONS, (True, False)):
        query_heads, key_heads, enable_gqa = heads
        rest = dict(options)
        mask = rest.pop("mask", None)
        query = fake(2, query_heads, lengths[0], head_size, dtype=dtype, grad=grad)
        key = fake(2, key_heads, lengths[1], head_size, dtype=dtype, grad=grad)
        attn_mask = None
        if mask is not None:
            shapes = {
                "full": lengths,
                "row": (1, lengths[1]),
                "heads": (2, 1, *lengths),
                "three": (4, *lengths),
            }
            attn_mask = fake(*shapes[mask[0]], dtype=mask[1] or dtype, grad=mask[2])
        yield (
            (query, key, key.detach().requires_grad_(grad), attn_mask),
            {
                "dropout_p": rest.get("dropout_p", 0.0),
                "is_causal": rest.get("is_causal", False),
                "enable_gqa": enable_gqa,
            },
        )


CHOICES = ["math", "flash", "efficient", "cudnn"]


class TestAgainstGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", GRID["dtype"], ids=str)
    @pytest.mark.parametrize("head_size", GRID["head_size"])
    def test_the_pure_choice_is_the_gpu_s(self, dtype: torch.dtype, head_size: int) -> None:
        platform = current_platform(torch.cuda.get_device_capability())
        warm_up()
        differing = []
        for tensors, options in grid_calls(dtype, head_size):
            real = torch._fused_sdp_choice(*tensors, **options)
            pure = choose_kernel(describe_call(*tensors, **options), platform, read_state())
            if CHOICES[real] != pure.kernel:
                shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]
                differing.append((CHOICES[real], pure, shapes, options))
        assert not differing

    @pytest.mark.parametrize("dtype", GRID["dtype"], ids=str)
    @pytest.mark.parametrize("head_size", [20, 64, 200, 256])
    def test_the_traced_ops_are_the_gpu_s(self, dtype: torch.dtype, head_size: int) -> None:
        capability = torch.cuda.get_device_capability()
        with FakeTensorMode():
            warm_up()
            for tensors, options in grid_calls(dtype, head_size):
                real = ops_or_error(tensors, options)
                with choose_attention(capability, None):
                    warm_up()
                    assert ops_or_error(tensors, options) == real

    def test_the_first_call_sets_the_order_that_the_context_sets(self) -> None:
        with FakeTensorMode():
            warm_up()
        after_first_call = torch._C._get_sdp_priority_order()
        capability = torch.cuda.get_device_capability()
        with order(ORDER_FLASH_FIRST), FakeTensorMode(), choose_attention(capability, None):
            warm_up()
            assert torch._C._get_sdp_priority_order() == after_first_call


def warm_up() -> None:
    # The first call of a process installs the default order.
    query = fake(1, 1, 8, 8, dtype=FP16, grad=False)
    F.scaled_dot_product_attention(query, query, query)


def ops_or_error(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], options: dict[str, Any]
) -> Any:
    with Recorder() as recorder:
        recorder.value(tensors)
        try:
            output = F.scaled_dot_product_attention(*tensors, **options)
        except RuntimeError:
            return "error"
        return recorder.ops, recorder.value(output)
