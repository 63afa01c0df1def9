"""Graph files read back as written or are refused with the field, and what the digest covers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, graph_facts
from hypothesis import given, settings

from offplan.errors import FileFormatError
from offplan.files import GRAPH_FILE
from offplan.graph import (
    GraphFacts,
    Value,
    digest,
    graphs,
    load_graph,
    save_graph,
    timeline,
)

replace = msgspec.structs.replace


def small() -> GraphFacts:
    """Two regions of one relu each; op names say which graph they are of."""
    facts = FactsBuilder(params={"batch": "2"})
    for number in range(2):
        region = facts.region()
        x = region.input(f"x{number}", (4, 4))
        y = region.op("aten.relu.default", [x], (4, 4), name=f"forward{number}", module="act")
        region.save(region.view(y, (16,), name=f"view{number}"))
        region.output(y)
    return facts.build()


# --- the timeline ---------------------------------------------------------------------------------


def test_forwards_run_in_order_then_backwards_in_reverse() -> None:
    facts = small()
    first, second = facts.regions
    assert list(graphs(facts)) == [
        first.forward,
        second.forward,
        second.backward,
        first.backward,
    ]
    names = [op.name for op in timeline(facts)]
    assert names[:4] == ["forward0", "view0", "forward1", "view1"]
    assert len(names) == facts.op_count == 6


def test_a_region_without_a_backward_has_none_on_the_timeline() -> None:
    facts = small()
    first, second = facts.regions
    facts = replace(facts, regions=(replace(first, backward=None, saved=()), second))
    assert list(graphs(facts)) == [first.forward, second.forward, second.backward]
    assert facts.op_count == 5


def test_logical_bytes_are_elements_times_item_size_whatever_the_strides() -> None:
    value = Value(kind="tensor", dtype="bfloat16", item_bytes=2, shape=(3, 5), stride=(0, 1))
    assert value.logical_bytes == 3 * 5 * 2
    assert Value(kind="tensor", item_bytes=4, shape=(3, 0)).logical_bytes == 0
    # No dimensions: one element.
    assert Value(kind="tensor", item_bytes=4).logical_bytes == 4


@pytest.mark.parametrize(
    ("dtype", "is_float"),
    [
        ("float32", True),
        ("bfloat16", True),
        ("float8_e4m3fn", True),
        ("complex64", True),
        ("int64", False),
        ("uint8", False),
        ("bool", False),
    ],
)
def test_floats_are_what_the_older_rule_sets_move(dtype: str, is_float: bool) -> None:
    assert Value(kind="tensor", dtype=dtype).is_float == is_float


# --- the digest -----------------------------------------------------------------------------------


def changed_op(facts: GraphFacts, **changes: Any) -> GraphFacts:
    region = facts.regions[0]
    op = replace(region.forward.ops[0], **changes)
    forward = replace(region.forward, ops=(op, *region.forward.ops[1:]))
    return replace(facts, regions=(replace(region, forward=forward), *facts.regions[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: changed_op(facts, name="renamed"),
        lambda facts: changed_op(facts, module="elsewhere"),
        lambda facts: changed_op(facts, source="model.py:99"),
        lambda facts: replace(facts, torch="2.11.0"),
        lambda facts: replace(facts, warnings=("a warning",)),
    ],
)
def test_names_and_source_lines_do_not_change_the_digest(
    change: Callable[[GraphFacts], GraphFacts],
) -> None:
    assert digest(change(small())) == digest(small())


def changed_value(facts: GraphFacts, **changes: Any) -> GraphFacts:
    return replace(facts, values=(replace(facts.values[0], **changes), *facts.values[1:]))


def renamed_input(facts: GraphFacts) -> GraphFacts:
    region = facts.regions[0]
    renamed = (replace(region.forward.inputs[0], name="other"),)
    forward = replace(region.forward, inputs=renamed)
    return replace(facts, regions=(replace(region, forward=forward), *facts.regions[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: changed_op(facts, target="aten.sigmoid.default"),
        lambda facts: changed_op(facts, constants="alpha=2"),
        lambda facts: changed_op(facts, inputs=()),
        lambda facts: changed_op(facts, mutates=(0,)),
        lambda facts: changed_value(facts, dtype="int32"),
        lambda facts: changed_value(facts, stride=(1, 4)),
        lambda facts: replace(facts, device="cpu"),
        lambda facts: replace(facts, compiler="inductor"),
        lambda facts: replace(facts, regions=facts.regions[::-1]),
        lambda facts: replace(facts, regions=(replace(facts.regions[0], backward=None),)),
        renamed_input,
    ],
)
def test_what_the_graphs_compute_changes_the_digest(
    change: Callable[[GraphFacts], GraphFacts],
) -> None:
    assert digest(change(small())) != digest(small())


@settings(DRAWN, max_examples=40)
@given(graph_facts())
def test_a_graph_file_reads_back_as_written_with_the_same_digest(
    tmp_path_factory: pytest.TempPathFactory, facts: GraphFacts
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.graph.json"
    path.write_bytes(save_graph(facts))
    loaded = load_graph(path)
    assert loaded == facts
    assert save_graph(loaded) == save_graph(facts)
    assert digest(loaded) == digest(facts)


# --- the file -------------------------------------------------------------------------------------


def test_a_graph_file_is_recognized_by_its_first_bytes() -> None:
    # What keeps write_atomically from replacing any other JSON file.
    assert save_graph(small()).startswith(GRAPH_FILE.first_bytes)


Document = dict[str, Any]


def set_first_value(document: Document, **changes: Any) -> None:
    document["values"][0].update(changes)


def add_to_model(document: Document, **changes: Any) -> None:
    valid = {"kind": "buffer", "names": ["b"], "dtype": "int8", "shape": [2, 2], "size_bytes": 4}
    document["model"].append(valid | changes)


def set_saved(document: Document, **changes: Any) -> None:
    document["regions"][0]["saved"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(schema_version=2), r"schema version 2[,;] this offplan reads 1"),
        (lambda d: d.update(torch=2), r"Expected `str`, got `int` - at `\$.torch`"),
        (lambda d: d.update(extra=1), "unknown field `extra`"),
        (lambda d: d.pop("values"), "missing required field `values`"),
        (lambda d: set_first_value(d, shape=["a"]), r"at `\$.values\[0\].shape\["),
        (lambda d: set_first_value(d, kind="tensr"), r"at `\$.values\[0\].kind`"),
        (lambda d: set_first_value(d, storage=99), r"values\[0\] has no storage"),
        (lambda d: set_first_value(d, storage=None), r"values\[0\] has no storage"),
        (lambda d: set_first_value(d, stride=[1]), r"2 sizes and 1 strides"),
        (lambda d: set_first_value(d, offset=-1), "negative size, stride or offset"),
        (lambda d: set_first_value(d, item_bytes=0), "no item size"),
        (lambda d: set_first_value(d, offset=1), "past the end of its storage"),
        (lambda d: d["storages"][0].update(size_bytes=-1), r"storages\[0\] has a negative size"),
        (lambda d: add_to_model(d, size_bytes=-1), r"model\[0\] has a size"),
        (lambda d: add_to_model(d, size_bytes=10**400), r"model\[0\] has a size"),
        (lambda d: add_to_model(d, shape=[0, 2]), r"model\[0\] has a size"),
        (lambda d: add_to_model(d, names=[]), r"model\[0\] has no name"),
        (lambda d: set_saved(d, value=10**6), r"regions\[0\] uses value 1000000"),
        (lambda d: set_saved(d, backward_value=-1), r"regions\[0\] uses value -1"),
        (
            lambda d: d["regions"][1]["forward"]["ops"][0].update(inputs=[999]),
            r"regions\[1\] uses value 999",
        ),
    ],
)
def test_a_broken_graph_file_is_refused_naming_the_field(
    tmp_path: Path, change: Callable[[Document], object], problem: str
) -> None:
    document = json.loads(save_graph(small()))
    change(document)
    path = tmp_path / "model.graph.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=problem) as caught:
        load_graph(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\x80\x04K\x01.", b"\xff", b"[" * 100_000, b'{"a":' * 100_000],
)
def test_a_foreign_file_is_refused_with_the_way_to_make_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.graph.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        load_graph(path)
    assert "--graph" in str(caught.value)


def test_a_missing_file_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"none\.graph\.json: No such file"):
        load_graph(tmp_path / "none.graph.json")
