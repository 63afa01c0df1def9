"""Device times from sizes and rates: each rule on an op that is about nothing else."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from facts_builder import FactsBuilder, RegionBuilder

from offplan.fusion import KERNEL
from offplan.graph import GraphFacts, Value, timeline
from offplan.roofline import Rates, device_s, is_view

# In a microsecond: 1000 flops of a product in float32, 16,000 in bfloat16.  All else is for free.
PRODUCTS = Rates(
    memory_bytes_per_s=1e30,
    matmul_flops_per_s={"float32": 1e9, "tf32": 4e9, "bfloat16": 16e9},
    attention_forward_flops_per_s=8e9,
    attention_backward_flops_per_s=4e9,
    kernel_s=0.0,
    multiprocessor_count=1,
)
# 1000 bytes of memory in a microsecond, and all else for free.
MEMORY = replace(PRODUCTS, memory_bytes_per_s=1e9, matmul_flops_per_s={"float32": 1e30})
# One element in a microsecond that is addressed on its own.
ELEMENTS = replace(PRODUCTS, matmul_flops_per_s={"float32": 128e6})
KERNELS = replace(MEMORY, memory_bytes_per_s=1e30, kernel_s=1e-6)


def times_us(facts: GraphFacts, rates: Rates) -> list[float]:
    """Of the ops of the first region's forward; None for views."""
    ops = facts.regions[0].forward.ops
    return [0.0 if is_view(facts, op) else device_s(facts, op, rates) * 1e6 for op in ops]


def region() -> RegionBuilder:
    return FactsBuilder().region()


def with_constants(facts: GraphFacts, **constants: str) -> GraphFacts:
    """``facts`` with the constants of the ops that have these names."""
    first = facts.regions[0]
    ops = tuple(
        msgspec.structs.replace(op, constants=constants.get(op.name, op.constants))
        for op in first.forward.ops
    )
    forward = msgspec.structs.replace(first.forward, ops=ops)
    return msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(first, forward=forward), *facts.regions[1:])
    )


# --- what a compiler writes -----------------------------------------------------------------------


def test_a_kernel_of_a_compiler_moves_bytes_whatever_their_layout():
    # 4000 bytes in and 8000 out; of an expanded input 40 bytes in and 4000 out.
    r = region()
    wide = r.op(KERNEL, [r.input("x", (10, 100))], (10, 100), dtype="float64")
    r.op(KERNEL, [r.view(r.input("y", (10, 1)), (10, 100), stride=(1, 0))], (1000,))
    assert wide
    found = times_us(r.facts.build(), MEMORY)
    assert found[0] == pytest.approx(12)
    assert found[-1] == pytest.approx(4.04)
    assert times_us(r.facts.build(), KERNELS)[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("3000 bytes unread", 9),
        ("reduces", 12 / 0.85),
        ("3000 bytes unread, reduces", 9 / 0.85),
        ("99999 bytes unread", 0),
    ],
)
def test_a_kernel_is_not_charged_for_what_it_does_not_read(said, expected):
    r = region()
    wide = r.op(KERNEL, [r.input("x", (10, 100))], (10, 100), dtype="float64", name="k")
    assert wide
    facts = with_constants(r.facts.build(), k=said)
    assert times_us(facts, MEMORY) == pytest.approx([expected])


@pytest.mark.parametrize("target", ["aten.mm.default", "aten.add.Tensor"])
def test_a_compiled_step_leaves_products_less_than_their_rate(target):
    r = region()
    x = r.input("x", (128, 128))
    r.op(target, [x, x], (128, 128))
    facts = r.facts.build()
    compiled = msgspec.structs.replace(facts, compiler="inductor")
    alone, within = (times_us(each, PRODUCTS)[0] for each in (facts, compiled))
    assert within == pytest.approx(alone / (0.945 if "mm" in target else 1.0))


# --- views ----------------------------------------------------------------------------------------


def test_views_allocations_and_what_the_host_does_launch_nothing():
    r = region()
    x = r.input("x", (1024, 1024))
    r.view(x, (1024 * 1024,))
    r.op("aten.empty.memory_format", [], (1024, 1024))
    r.op("aten.arange.default", [], (1024, 1024), device="cpu")
    r.op("aten.add_.Tensor", [x], (), mutates=[x])
    facts = r.facts.build()
    assert [is_view(facts, op) for op in timeline(facts)] == [True, True, True, False]


# --- products -------------------------------------------------------------------------------------


def test_a_product_takes_its_flops_over_the_rate_of_its_dtype():
    r = region()
    for dtype in ("float32", "bfloat16"):
        a, b = r.input("a", (256, 384), dtype), r.input("b", (384, 512), dtype)
        r.op("aten.mm.default", [a, b], (256, 512), dtype)
    flops = 2 * 256 * 384 * 512
    assert times_us(r.facts.build(), PRODUCTS) == pytest.approx([flops / 1000, flops / 16000])


def test_a_dtype_without_a_rate_takes_that_of_its_sibling_or_of_float32():
    half = replace(PRODUCTS, matmul_flops_per_s={"float32": 1e9, "float16": 8e9})
    assert half.matmul("bfloat16") == 8e9
    assert half.matmul("tf32") == half.matmul("int8") == 1e9


def test_the_added_tensor_of_a_product_is_no_factor():
    r = region()
    bias, a, b = r.input("bias", (512,)), r.input("a", (256, 384)), r.input("b", (384, 512))
    r.op("aten.addmm.default", [bias, a, b], (256, 512))
    r.op("aten.mm.default", [a, b], (256, 512))
    added, bare = times_us(r.facts.build(), PRODUCTS)
    assert added == bare


def test_a_square_of_one_tensor_is_a_product_too():
    r = region()
    # An op lists each of its inputs once.
    r.op("aten.mm.default", [r.input("a", (256, 256))], (256, 256))
    assert times_us(r.facts.build(), PRODUCTS) == pytest.approx([2 * 256**3 / 1000])


def test_each_product_of_a_batch_counts():
    r = region()
    for batch in (1, 6):
        a, b = r.input("a", (batch, 128, 128)), r.input("b", (batch, 128, 128))
        r.op("aten.bmm.default", [a, b], (batch, 128, 128))
    one, six = times_us(r.facts.build(), PRODUCTS)
    assert six == pytest.approx(6 * one)


def test_a_product_pays_for_whole_tiles_and_whole_rounds_of_them():
    r = region()
    for rows in (256, 257):
        a, b = r.input("a", (rows, 4096)), r.input("b", (4096, 256))
        r.op("aten.mm.default", [a, b], (rows, 256))
    whole, more = times_us(r.facts.build(), PRODUCTS)
    assert more == pytest.approx(1.5 * whole)
    # Four tiles on three multiprocessors leave some of them idle in the second round.
    idle, _ = times_us(r.facts.build(), replace(PRODUCTS, multiprocessor_count=3))
    assert whole < idle < 2 * whole


def test_rows_that_are_not_aligned_make_a_product_slow():
    r = region()
    for columns in (4096, 4095):
        a, b = r.input("a", (128, 128), "bfloat16"), r.input("b", (128, columns), "bfloat16")
        r.op("aten.mm.default", [a, b], (128, columns), "bfloat16")
    aligned, odd = times_us(r.facts.build(), PRODUCTS)
    assert odd > 5 * aligned


def test_a_thin_product_takes_its_bytes_over_the_memory_rate():
    r = region()
    a, b = r.input("a", (4096, 1)), r.input("b", (1, 4096))
    r.op("aten.mm.default", [a, b], (4096, 4096))
    assert times_us(r.facts.build(), MEMORY) == pytest.approx([4 * (4096**2 + 2 * 4096) / 1000])


# --- convolutions ---------------------------------------------------------------------------------


def test_a_convolution_is_a_product_in_tf32():
    r = region()
    x, weight = r.input("x", (2, 64, 32, 32)), r.input("weight", (128, 64, 3, 3))
    r.op("aten.convolution.default", [x, weight], (2, 128, 32, 32))
    flops = 2 * 2 * 128 * 32 * 32 * 64 * 9
    (found,) = times_us(r.facts.build(), PRODUCTS)
    assert flops / 4000 < found < 1.3 * flops / 4000


def test_a_transposed_convolution_counts_from_its_input():
    r = region()
    weight = r.input("weight", (64, 128, 4, 4))
    small, large = r.input("small", (2, 64, 32, 32)), r.input("large", (2, 128, 64, 64))
    target = "aten.convolution.default"
    r.op(target, [small, weight], (2, 128, 64, 64), name="up")
    r.op(target, [large, weight], (2, 64, 32, 32), name="down")
    settings = "%, %, None, [2, 2], [1, 1], [1, 1], {}, [0, 0], 1"
    facts = with_constants(r.facts.build(), up=settings.format(True), down=settings.format(False))
    up, down = times_us(facts, PRODUCTS)
    assert up == pytest.approx(down)


def test_the_backward_of_a_convolution_costs_what_it_returns():
    r = region()
    gradient, x = r.input("g", (8, 128, 16, 16)), r.input("x", (8, 64, 16, 16))
    weight = r.input("weight", (128, 64, 3, 3))
    r.op("aten.convolution_backward.default", [gradient, x, weight], (128, 64, 3, 3))
    facts = r.facts.build()
    op = facts.regions[0].forward.ops[0]
    both = msgspec.structs.replace(op, outputs=(x, *op.outputs))
    one_s, both_s = (device_s(facts, which, PRODUCTS) for which in (op, both))
    assert both_s == pytest.approx(2 * one_s)


def test_a_convolution_that_is_no_product_of_pixels_converts_its_layout():
    r = region()
    x = r.input("x", (8, 64, 16, 16))
    for size in (1, 3):
        weight = r.input("weight", (64, 64, size, size))
        r.op("aten.convolution.default", [x, weight], (8, 64, 16, 16))
    pointwise, other = times_us(r.facts.build(), MEMORY)
    assert other > 2.5 * pointwise


def test_a_convolution_of_an_image_with_channels_last_converts_nothing():
    r = region()
    x, weight = r.input("x", (8, 64, 16, 16)), r.input("weight", (64, 64, 3, 3))
    last = r.view(x, (8, 64, 16, 16), stride=(64 * 256, 1, 64 * 16, 64))
    for image in (x, last):
        r.op("aten.convolution.default", [image, weight], (8, 64, 16, 16))
    first_us, last_us = [us for us in times_us(r.facts.build(), MEMORY) if us]
    assert last_us == pytest.approx(first_us / 3)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "constants"),
    [
        ("_scaled_dot_product_flash_attention", "%, %, %, 0.0, {}, scale=0.125"),
        ("_scaled_dot_product_efficient_attention", "%, %, %, None, True, 0.1, {}"),
        ("_scaled_dot_product_cudnn_attention", "%, %, %, None, True, 0.0, {}, scale=1e-05"),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "%, %, %, %, None, %, %, %, %, 0.0, [True, True, True, False], {}",
        ),
    ],
)
def test_a_causal_mask_halves_attention(target, constants):
    r = region()
    shape = (2, 8, 1024, 128)
    inputs = [r.input(name, shape, "bfloat16") for name in "gqkvo"]
    given = inputs if target.endswith("backward") else inputs[1:4]
    for name in ("masked", "full"):
        r.op(f"aten.{target}.default", given, shape, "bfloat16", name=name)
    facts = with_constants(
        r.facts.build(), masked=constants.format(True), full=constants.format(False)
    )
    masked, full = times_us(facts, PRODUCTS)
    assert full == pytest.approx(2 * masked)


def test_attention_counts_two_products_forward_and_five_backward():
    r = region()
    shape = (2, 8, 1024, 128)
    gradient, q, k, v, out = (r.input(name, shape, "bfloat16") for name in "gqkvo")
    target = "aten._scaled_dot_product_flash_attention"
    r.op(f"{target}.default", [q, k, v], shape, "bfloat16")
    r.op(f"{target}_backward.default", [gradient, q, k, v, out], shape, "bfloat16")
    product = 2 * 2 * 8 * 1024 * 1024 * 128
    assert times_us(r.facts.build(), PRODUCTS) == pytest.approx(
        [2 * product / 8000, 5 * product / 4000]
    )


def test_a_mask_and_dropout_each_make_attention_slower():
    r = region()
    shape = (2, 8, 1024, 128)
    q, k, v = (r.input(name, shape, "bfloat16") for name in "qkv")
    mask = r.input("mask", (2, 1, 1024, 1024), "bfloat16")
    target = "aten._scaled_dot_product_cudnn_attention.default"
    for name, given in (("bare", [q, k, v]), ("masked", [q, k, v, mask]), ("drops", [q, k, v])):
        r.op(target, given, shape, "bfloat16", name=name)
    facts = with_constants(r.facts.build(), drops="%, %, %, None, True, 0.1, scale=0.125")
    bare, masked, drops = times_us(facts, PRODUCTS)
    assert masked > 1.3 * bare
    assert drops > 1.3 * bare


@pytest.mark.parametrize(
    "wrapped",
    [
        "higher_order.run_and_save_rng_state",
        "higher_order.run_with_rng_state",
        "rng_prims.graphsafe_run_with_rng_state",
    ],
)
def test_an_op_that_is_run_with_a_random_state_takes_its_own_time(wrapped):
    r = region()
    state = r.facts.add(Value("tensor", r.facts.storage(16), "uint8", 1, (16,), (1,)))
    r.receive(state, "state", "input")
    q, k, v = (r.input(name, (2, 8, 1024, 64), "bfloat16") for name in "qkv")
    target = "_scaled_dot_product_flash_attention.default"
    r.op(f"aten.{target}", [q, k, v], (2, 8, 1024, 64), "bfloat16", name="bare")
    r.op(wrapped, [state, q, k, v], (2, 8, 1024, 64), "bfloat16", name="within")
    facts = with_constants(
        r.facts.build(), bare="%, %, %, 0.0, True", within=f"%, {target}, %, %, %, 0.0, True"
    )
    bare, within = times_us(facts, PRODUCTS)
    assert bare == within > 1000


# --- bytes and elements ---------------------------------------------------------------------------


def test_an_elementwise_op_takes_what_it_reads_and_writes():
    r = region()
    x, y = r.input("x", (1024, 1024)), r.input("y", (1024, 1024))
    r.op("aten.add.Tensor", [x, y], (1024, 1024))
    r.op("aten.add.Tensor", [x], (1024, 1024))
    mib_us = 1024**2 / 1000
    assert times_us(r.facts.build(), MEMORY) == pytest.approx([12 * mib_us, 8 * mib_us])


def test_an_expanded_input_has_the_bytes_that_are_there():
    r = region()
    row = r.input("row", (1024,))
    expanded = r.view(row, (1024, 1024), (0, 1), target="aten.expand.default")
    r.op("aten.neg.default", [expanded], (1024, 1024))
    _, found = times_us(r.facts.build(), MEMORY)
    assert found == pytest.approx(4 * (1024**2 + 1024) / 1000)


def test_what_an_op_writes_in_place_counts():
    r = region()
    x = r.input("x", (1024, 1024))
    r.op("aten.add_.Tensor", [x], (), mutates=[x])
    assert times_us(r.facts.build(), MEMORY)[0] >= 2 * 4 * 1024**2 / 1000


def test_operands_that_do_not_lie_alike_go_by_element():
    r = region()
    x, half = r.input("x", (64, 64)), r.input("half", (64, 64), "bfloat16")
    row = r.input("row", (64,))
    turned = r.view(x, (64, 64), (1, 64), target="aten.t.default")
    part = r.view(r.input("wide", (64, 128)), (64, 64), (128, 1), target="aten.slice.Tensor")
    for given in ([x, row], [x, turned], [part], [half]):
        r.op("aten.add.Tensor", given, (64, 64))
    r.op("aten.add.Tensor", [x], (64, 64))
    r.op("aten.add.Tensor", [turned], (64, 64), stride=(1, 64))
    found = [us for us in times_us(r.facts.build(), ELEMENTS) if us]
    assert found[:4] == pytest.approx([64 * 64] * 4)
    assert found[4:] == pytest.approx([0, 0], abs=1e-9)


def test_a_look_up_reads_what_it_returns_and_not_the_table():
    r = region()
    table, rows = r.input("table", (100_000, 1024)), r.input("rows", (16,), "int64")
    r.op("aten.embedding.default", [table, rows], (16, 1024))
    assert times_us(r.facts.build(), MEMORY)[0] == pytest.approx((2 * 16 * 4096 + 16 * 8) / 1000)


def test_adding_to_single_elements_is_slower_than_to_rows():
    r = region()
    x, index = r.input("x", (64, 64)), r.input("index", (64,), "int64")
    for name in ("rows", "elements"):
        r.op("aten.index_put.default", [x, index], (64, 64), name=name)
    facts = with_constants(
        r.facts.build(), rows="%, [%], %, True", elements="%, [None, %], %, True"
    )
    rows, elements = times_us(facts, ELEMENTS)
    assert elements > 2 * rows > 0


def test_a_reduction_across_memory_is_slow_where_few_results_share_it():
    r = region()
    x, wide = r.input("x", (4096, 16)), r.input("wide", (16, 4096))
    r.op("aten.sum.dim_IntList", [x], (1, 16), name="narrow")
    r.op("aten.sum.dim_IntList", [wide], (1, 4096), name="wide")
    r.op("aten.sum.dim_IntList", [wide], (16, 1), name="along")
    facts = with_constants(
        r.facts.build(), narrow="%, [0], True", wide="%, [0], True", along="%, [-1], True"
    )
    narrow, across, along = times_us(facts, ELEMENTS)
    assert narrow > 5 * across
    assert narrow > 5 * along


def test_few_channels_make_a_normalization_slow():
    built = FactsBuilder()
    r = built.region()
    for channels in (8, 1024):
        x = r.input("x", (1024 // channels, channels, 64))
        r.op("aten.native_batch_norm.default", [x], (1024 // channels, channels, 64))
    facts = built.build()
    ops = [
        msgspec.structs.replace(op, outputs=(*op.outputs, built.tensor((channels,))))
        for op, channels in zip(facts.regions[0].forward.ops, (8, 1024), strict=True)
    ]
    facts = built.build()
    few, many = (device_s(facts, op, ELEMENTS) for op in ops)
    assert few > 10 * many


@pytest.mark.parametrize("target", ["aten.new_zeros.default", "aten.nll_loss_backward.default"])
def test_an_input_that_is_asked_for_its_size_only_is_not_read(target):
    r = region()
    r.op(target, [r.input("x", (1024, 1024))], (1024, 1024))
    assert times_us(r.facts.build(), MEMORY) == pytest.approx([4 * 1024**2 / 1000])


def test_an_op_takes_a_kernel_at_least_and_some_take_more():
    r = region()
    x = r.input("x", (4,))
    r.op("aten.add.Tensor", [x], (4,))
    r.op("aten.topk.default", [x], (4,))
    add, topk = times_us(r.facts.build(), KERNELS)
    assert add == pytest.approx(1)
    assert topk > 5


@pytest.mark.parametrize(
    "kind",
    [
        *("mm", "bmm", "addmm", "convolution", "convolution_backward", "sum", "cat", "index_put"),
        *("_scaled_dot_product_flash_attention", "embedding", "native_batch_norm", "topk"),
        *("_scaled_dot_product_flash_attention_backward", "embedding_dense_backward"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,)])
def test_ops_without_sizes_to_count_have_a_time(kind, shape):
    r = region()
    x = r.input("x", shape)
    for given in ([], [x], [x, r.input("y", shape), r.input("z", shape)]):
        r.op(f"aten.{kind}.default", given, shape)
    for us in times_us(r.facts.build(), KERNELS):
        assert 0 < us < 100
