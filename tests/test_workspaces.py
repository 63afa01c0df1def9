"""The formulas for temporaries against what an H200's caching allocator counted, and by rule.

``measured_workspaces.json`` has ops of training steps with what they were seen to allocate beyond
their outputs; the machine and versions are in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from facts_builder import ITEM_BYTES, contiguous

from offplan.graph import Op, StorageId, Value, ValueId
from offplan.workspaces import (
    THRIFTS,
    Scratch,
    chooses,
    is_contiguous,
    kept_bytes,
    reduction_bytes,
    split_arguments,
    temporaries,
    together,
)

MiB = 1024**2
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
MEASURED = json.loads((Path(__file__).parent / "measured_workspaces.json").read_text())
# Libraries choose between algorithms; the formula has what the hungrier ones take.
BOUNDED = {
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
}


def tensor(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Value:
    strides = contiguous(shape) if stride is None else stride
    return Value("tensor", StorageId(0), dtype, ITEM_BYTES[dtype], shape, strides)


def an_op(
    target: str, constants: str, inputs: list[Value], outputs: list[Value]
) -> tuple[Op, list[Value]]:
    ids = [ValueId(number) for number in range(len(inputs) + len(outputs))]
    op = Op("op", target, tuple(ids[: len(inputs)]), tuple(ids[len(inputs) :]), constants)
    return op, inputs + outputs


def most_bytes(op: Op, values: list[Value], gpu: str = H200) -> int:
    """The most beyond all outputs, as it is measured."""
    outputs = [values[v].logical_bytes for v in op.outputs if values[v].kind == "tensor"]
    return max(
        (
            sum(stage.sizes) - sum(outputs[len(outputs) - stage.missing_count :])
            for stage in together(temporaries(op, values, gpu))
        ),
        default=0,
    )


def measured_op(row: dict[str, Any]) -> tuple[Op, list[Value]]:
    def value(found: list[Any] | None) -> Value:
        if found is None:
            return Value("python")
        return tensor(found[0], tuple(found[1]), tuple(found[2]))

    return an_op(
        row["target"],
        row["constants"],
        [value(found) for found in row["inputs"]],
        [value(found) for found in row["outputs"]],
    )


def ids(row: dict[str, Any]) -> str:
    return f"{row['target'].split('.')[1]}-{row['measured_bytes']}"


@pytest.mark.parametrize(
    "row", [row for row in MEASURED["ops"] if row["target"] not in BOUNDED], ids=ids
)
def test_what_an_op_allocates_was_measured(row: dict[str, Any]) -> None:
    assert most_bytes(*measured_op(row)) == row["measured_bytes"]


@pytest.mark.parametrize(
    "row", [row for row in MEASURED["ops"] if row["target"] in BOUNDED], ids=ids
)
def test_where_a_library_chooses_it_is_no_less_than_measured(row: dict[str, Any]) -> None:
    op, values = measured_op(row)
    predicted = most_bytes(op, values)
    assert predicted >= row["measured_bytes"]
    # Over by no more than a copy of what goes in and out, and what is split.
    slack = max(values[v].logical_bytes for v in (*op.inputs, *op.outputs)) + 19 * MiB
    assert predicted <= row["measured_bytes"] + slack


def test_every_kind_of_op_with_a_measured_temporary_is_in_the_table() -> None:
    kinds = {row["target"] for row in MEASURED["ops"] if row["measured_bytes"]}
    assert len(MEASURED["ops"]) <= 60
    assert kinds >= BOUNDED | {"aten.sum.dim_IntList", "aten.embedding_dense_backward.default"}


# --- by rule --------------------------------------------------------------------------------------


def test_an_op_that_is_not_listed_has_no_temporaries() -> None:
    x = tensor("float32", (1024, 1024))
    assert temporaries(*an_op("aten.mul.Tensor", "", [x, x], [x]), H200) == ()


def test_matrices_that_cublas_takes_as_they_lie_are_not_copied() -> None:
    plain, result = tensor("float32", (64, 64)), tensor("float32", (64, 64))
    transposed = tensor("float32", (64, 64), (1, 64))
    padded = tensor("float32", (64, 64), (80, 1))
    stepped = tensor("float32", (64, 64), (256, 2))
    for left in (plain, transposed, padded):
        assert most_bytes(*an_op("aten.mm.default", "", [left, plain], [result])) == 0
    found = most_bytes(*an_op("aten.mm.default", "", [stepped, plain], [result]))
    assert found == 64 * 64 * 4


def test_a_reduction_that_fits_in_blocks_needs_no_memory() -> None:
    assert reduction_bytes(tensor("float32", (4096, 64)), {1}, 132) == ()
    assert reduction_bytes(tensor("float32", ()), set(), 132) == ()


def test_a_reduction_is_the_same_whatever_order_its_dimensions_have() -> None:
    value = tensor("float32", (8, 1024, 512))
    moved = tensor("float32", (1024, 512, 8), (512, 1, 524288))
    assert reduction_bytes(value, {0, 1}, 132) == reduction_bytes(moved, {0, 2}, 132) != ()


def test_a_smaller_gpu_shares_a_full_reduction_among_fewer_blocks() -> None:
    value = tensor("float32", (4096, 4096))
    assert reduction_bytes(value, {0, 1}, 132) == (4 * (4 * 132), 4)
    assert reduction_bytes(value, {0, 1}, 108) == (4 * (4 * 108), 4)


def test_a_wrapped_random_op_allocates_what_it_does_unwrapped() -> None:
    query = tensor("bfloat16", (4, 32, 2048, 64))
    inner = an_op(
        "aten._scaled_dot_product_cudnn_attention.default", "%, %, %, None, True", [query], [query]
    )
    wrapped = an_op(
        "higher_order.graphsafe_run_with_rng_state",
        "_scaled_dot_product_cudnn_attention.default, %, %, %, None, True, rng_state=%",
        [query],
        [query],
    )
    assert temporaries(*inner, H200) == temporaries(*wrapped, H200) != ()


def test_adding_at_indexes_sorts_them_where_results_have_to_repeat() -> None:
    value, source = tensor("float32", (4096, 512)), tensor("float32", (3413, 512))
    index = tensor("int64", (3413,))
    op, values = an_op("aten.index_add.default", "%, 0, %, %", [value, index, source], [value])
    assert temporaries(op, values, H200) == ()
    (stage,) = temporaries(op, values, H200, deterministic=True)
    assert sum(stage.sizes) >= source.logical_bytes + 6 * index.logical_bytes


def test_channels_last_convolutions_copy_nothing() -> None:
    shape, order = (8, 64, 64, 64), (262144, 1, 4096, 64)
    weight = tensor("float32", (64, 64, 3, 3), (576, 1, 192, 64))
    lying = tensor("float32", shape, order)
    constants = "%, %, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1"
    found = most_bytes(*an_op("aten.convolution.default", constants, [lying, weight], [lying]))
    assert found < lying.logical_bytes
    plain = tensor("float32", shape)
    copied = most_bytes(*an_op("aten.convolution.default", constants, [plain, weight], [plain]))
    assert copied - found >= 2 * plain.logical_bytes


def test_the_gradient_of_a_convolutions_input_is_computed_before_its_weights() -> None:
    value, weight = tensor("float32", (8, 64, 64, 64)), tensor("float32", (64, 64, 3, 3))
    constants = "%, %, %, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]"
    none = Value("python")
    op, values = an_op(
        "aten.convolution_backward.default",
        constants,
        [value, value, weight],
        [value, weight, none],
    )
    assert [stage.missing_count for stage in temporaries(op, values, H200)] == [1, 0]
    op, values = an_op(
        "aten.convolution_backward.default",
        constants.replace("[True, True", "[False, True"),
        [value, value, weight],
        [none, weight, none],
    )
    assert [stage.missing_count for stage in temporaries(op, values, H200)] == [0]


def test_what_a_stage_allocates_stays_for_as_many_stages_as_it_says() -> None:
    stages = [Scratch(2, (8,), stage_count=2), Scratch(1, (4,)), Scratch(0, (2, 1))]
    assert [*together(stages)] == [
        Scratch(2, (8,), stage_count=2),
        Scratch(1, (8, 4)),
        Scratch(0, (2, 1)),
    ]


def test_a_gradient_that_attention_cannot_take_is_copied_before_its_outputs_are_made() -> None:
    shape = (8, 16, 1024, 64)
    query, result = tensor("float32", shape, (1024, 64, 8192, 1)), tensor("float32", shape)
    lies_so = tensor("float32", shape, (1048576, 64, 1024, 1))
    target = "aten._scaled_dot_product_efficient_attention_backward.default"

    def stages(gradient: Value) -> tuple[Scratch, ...]:
        op, values = an_op(target, "", [gradient, *[query] * 3], [result] * 3)
        return temporaries(op, values, H200)

    product, last = stages(lies_so)
    copy = Scratch(3, (query.logical_bytes,), stage_count=3)
    # As an H200 allocated them: 33554432, then the outputs, 33554432 and 33587200.
    assert stages(query) == (copy, product, last)
    assert (product.sizes[0], last.sizes[1]) == (33554432, 33587200)


def test_the_gradient_of_a_bias_is_summed_when_the_convolutions_copies_are_gone() -> None:
    """Of a vision transformer's patches, as an H200 allocated them: a copy of the gradient, the
    weight's gradient and its workspace, then partial sums of the bias and semaphores."""
    picture, weight = tensor("float32", (96, 3, 224, 224)), tensor("float32", (1024, 3, 16, 16))
    gradient = tensor("float32", (96, 1024, 14, 14), (201728, 1, 14336, 1024))
    none, bias = Value("python"), tensor("float32", (1024,))
    op, values = an_op(
        "aten.convolution_backward.default",
        "%, %, %, [1024], [16, 16], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]",
        [gradient, picture, weight],
        [none, weight, bias],
    )
    copy, workspace, sums = temporaries(op, values, H200)
    assert not is_contiguous(gradient)
    assert copy == Scratch(2, (gradient.logical_bytes,), stage_count=2)
    assert workspace.missing_count == 1
    assert sums == Scratch(0, (138412032, 32))


def test_a_sort_of_many_indexes_is_too_large_for_the_small_pool() -> None:
    """For 65536 of them an H200 allocated 1070591 bytes at once, of large requests."""
    index, source = tensor("int64", (65536,)), tensor("float32", (65536, 8))
    table = tensor("float32", (4096, 8))
    op, values = an_op("aten.index_put.default", "%, [%], %, True", [table, index, source], [table])
    (stage,) = temporaries(op, values, H200)
    assert stage.sizes[-1] >= 1070591 > MiB
    assert sum(stage.sizes[-1:]) <= 2 * index.logical_bytes + 24 * 1024


def test_a_more_thrifty_algorithm_takes_no_more_at_any_stage() -> None:
    rows = [row for row in MEASURED["ops"] if "convolution" in row["target"]]
    less = 0
    for op, values in map(measured_op, rows):
        assert chooses(op)
        by_thrift = [temporaries(op, values, H200, thrift=thrift) for thrift in THRIFTS]
        assert by_thrift[0] == temporaries(op, values, H200)
        for stages in zip(*by_thrift, strict=True):
            sizes = [sum(stage.sizes) for stage in stages]
            assert sizes == sorted(sizes, reverse=True)
            assert len({stage.missing_count for stage in stages}) == 1
            less += sizes[0] > sizes[-1]
    assert less >= len(rows) / 2


def test_only_where_a_library_chooses_does_thrift_matter() -> None:
    for row in MEASURED["ops"]:
        op, values = measured_op(row)
        if not chooses(op):
            assert temporaries(op, values, H200, thrift=2) == temporaries(op, values, H200)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        ("%, [0, 1], True", ("%", "[0, 1]", "True")),
        ("%, [[1], (2, 3)], x=%", ("%", "[[1], (2, 3)]", "x=%")),
    ],
)
def test_arguments_are_split_at_the_outermost_commas(text: str, parts: tuple[str, ...]) -> None:
    assert split_arguments(text) == parts


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    assert is_contiguous(tensor("float32", (4, 1, 8), (8, 999, 1)))
    assert not is_contiguous(tensor("float32", (4, 2, 8), (8, 32, 1)))
    assert is_contiguous(tensor("float32", (0, 8), (99, 99)))


# --- what libraries keep --------------------------------------------------------------------------


def steps(*targets: str) -> list[Op]:
    return [Op(f"op{number}", target) for number, target in enumerate(targets)]


def test_each_thread_that_multiplies_has_a_workspace_from_its_first_product_on() -> None:
    ops = steps("aten.relu.default", "aten.mm.default", "aten.bmm.default", "aten.mm.default")
    assert list(kept_bytes(ops, 3, H200)) == [(1, 32 * MiB), (3, 32 * MiB)]
    assert list(kept_bytes(ops, 1, H200)) == [(1, 32 * MiB)]
    assert list(kept_bytes(ops, 3, A100)) == [(1, 8 * MiB + 131072), (3, 8 * MiB + 131072)]


def test_compiled_products_have_the_same_workspace() -> None:
    ops = steps("aten.mm.out", "aten.addmm.out")
    assert list(kept_bytes(ops, 1, H200)) == [(0, 32 * MiB), (1, 32 * MiB)]


def test_adding_a_bias_takes_the_workspace_of_another_library_too() -> None:
    ops = steps("aten.addmm.default", "aten.mm.default")
    assert list(kept_bytes(ops, 1, H200)) == [(0, 32 * MiB), (0, MiB), (1, 32 * MiB)]


def test_without_products_nothing_is_kept() -> None:
    assert list(kept_bytes(steps("aten.relu.default", "aten.convolution.default"), 1, H200)) == []
