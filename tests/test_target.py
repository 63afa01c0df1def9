"""Targets: what they may be called, how ``-p`` is parsed, and what is said when one is wrong."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from offplan import Target
from offplan.errors import OffplanError, TargetError, UsageError
from offplan.target import load_target

HEADER = "import torch\nfrom torch import nn\nfrom typing import Literal, Optional\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(body: str, name: str = "model.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(HEADER + textwrap.dedent(body))
        return name

    return _write


def test_the_factory_is_build_unless_another_is_named(write):
    path = write(
        """
        def build(): return nn.Linear(2, 2), (torch.ones(1, 2),)
        def other(): return nn.Linear(3, 3), (torch.ones(1, 3),)
        """
    )
    assert load_target(path, {}).target.model.in_features == 2
    assert load_target(f"{path}:other", {}).target.model.in_features == 3
    # Where the factory is, for annotations: the header has three lines, then an empty one.
    assert load_target(f"{path}:other", {}).source == "model.py:6"


def test_a_module_and_factory_are_imported_from_the_current_directory(write, monkeypatch):
    write("", "zoo/__init__.py")
    write("def tiny(): return nn.Linear(2, 2), (torch.ones(1, 2),)", "zoo/models.py")
    found = load_target("zoo.models:tiny", {})
    assert isinstance(found.target.model, torch.nn.Linear)
    for name in ("zoo", "zoo.models"):
        monkeypatch.delitem(sys.modules, name)


def test_a_file_may_import_its_neighbours(write):
    write("WIDTH = 7", "neighbour_of_model.py")
    path = write(
        """
        from neighbour_of_model import WIDTH
        def build(): return nn.Linear(WIDTH, 2), (torch.ones(1, WIDTH),)
        """
    )
    assert load_target(path, {}).target.model.in_features == 7


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ("(x, 2)", 2, []),
        ("[x]", 1, []),
        ("x", 1, []),
        ("{'input': x}", 0, ["input"]),
    ],
)
def test_a_module_level_model_takes_inputs_as_a_tuple_list_tensor_or_dict(
    write, inputs, args, kwargs
):
    path = write(f"model = nn.Linear(2, 2)\nx = torch.ones(1, 2)\ninputs = {inputs}\n")
    target = load_target(path, {}).target
    assert (len(target.args), list(target.kwargs)) == (args, kwargs)


def test_a_module_level_loss_is_used(write):
    path = write("model = nn.Linear(2, 2)\ninputs = (torch.ones(1, 2),)\nloss = torch.mean\n")
    assert load_target(path, {}).target.loss is torch.mean


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("(nn.Linear(2, 2), (x,))", (1, [])),
        ("(nn.Linear(2, 2), [x])", (1, [])),
        ("(nn.Linear(2, 2), x)", (1, [])),
        ("(nn.Linear(2, 2), (), {'input': x})", (0, ["input"])),
        ("Target(nn.Linear(2, 2), (x,))", (1, [])),
    ],
)
def test_a_factory_may_return_a_tuple_or_a_target(write, returned, expected):
    path = write(
        f"from offplan import Target\nx = torch.ones(1, 2)\ndef build(): return {returned}"
    )
    target = load_target(path, {}).target
    assert isinstance(target, Target)
    assert (len(target.args), list(target.kwargs)) == expected


PARAMETERS = """
    def build(
        count: int = 1, rate: float = 0.5, name: str = "x", flag: bool = False,
        mode: Literal["a", "b"] = "a", maybe: Optional[int] = 3, union: int | str = 0,
        dtype: torch.dtype = torch.float32, untyped=4, plain=None,
    ):
        build.got = dict(locals())
        return nn.Linear(2, 2), (torch.ones(1, 2),)
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count=8", 8),
        ("count=1_000", 1000),
        ("rate=1e-3", 0.001),
        ("name=8", "8"),
        ("name=a=b", "a=b"),
        ("flag=true", True),
        ("flag=0", False),
        ("mode=b", "b"),
        ("maybe=none", None),
        ("maybe=7", 7),
        ("union=7", 7),
        ("union=seven", "seven"),
        ("dtype=bfloat16", torch.bfloat16),
        ("untyped=5", 5),
        ("plain=5", "5"),
    ],
)
def test_parameters_are_parsed_by_annotation_or_default(write, text, value):
    path = write(PARAMETERS)
    key, _, given = text.partition("=")
    load_target(path, {key: given})
    got = sys.modules["offplan_target_model"].build.got[key]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"count": "many"}, "'many' is not a whole number"),
        ({"count": "1.5"}, "'1.5' is not a whole number"),
        ({"rate": "fast"}, "'fast' is not a number"),
        ({"flag": "maybe"}, "'maybe' is not true or false"),
        ({"mode": "c"}, "'c' is not one of a, b"),
        ({"dtype": "nn"}, "'nn' is not a dtype"),
        ({"width": "3"}, "build() takes no parameter 'width'"),
    ],
)
def test_a_bad_parameter_is_a_usage_error(write, params, words):
    path = write(PARAMETERS)
    with pytest.raises(UsageError) as raised:
        load_target(path, params)
    assert words in raised.value.what
    assert raised.value.exit_code == 2


def test_a_missing_parameter_is_named(write):
    path = write("def build(width: int): return nn.Linear(width, 2), ()")
    with pytest.raises(UsageError, match="needs width"):
        load_target(path, {})


def test_a_factory_with_keyword_arguments_takes_any_parameter(write):
    path = write("def build(**options): build.got = options; return nn.Linear(2, 2), ()")
    load_target(path, {"anything": "3"})
    assert sys.modules["offplan_target_model"].build.got == {"anything": "3"}


@pytest.mark.parametrize(
    ("body", "words", "where"),
    [
        ("def build(:\n", "not valid Python", "model.py:4"),
        ("import no_such_package_here\n", "No module named", "model.py:4"),
        ("raise ValueError('at import')\n", "ValueError: at import", "model.py:4"),
        ("def build():\n    raise KeyError('gone')\n", "KeyError: 'gone'", "model.py:5"),
        ("def build(): return 3\n", "returned int", ""),
        ("def build(): return (3, ())\n", "the model is a int", ""),
        ("def build(): return (nn.Linear(2, 2), (), 3)\n", "inputs must be", ""),
        ("def other(): pass\n", "has no 'build'", ""),
        ("model = nn.Linear(2, 2)\n", "'model' but no 'inputs'", ""),
    ],
)
def test_a_broken_file_is_one_message_with_the_users_line(write, body, words, where):
    path = write(body)
    with pytest.raises(TargetError) as raised:
        load_target(path, {})
    assert words in raised.value.what
    assert raised.value.where.endswith(where)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("missing.py", "there is no file missing.py"),
        ("missing.package:build", "there is no module 'missing.package'"),
        ("torch.nn", "is not a target"),
        ("torch.nn:no_such_name", "has no 'no_such_name'"),
    ],
)
def test_a_target_that_is_not_there_is_named(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OffplanError) as raised:
        load_target(spec, {})
    assert words in raised.value.what


def test_parameters_for_a_module_level_model_are_refused(write):
    path = write("model = nn.Linear(2, 2)\ninputs = (torch.ones(1, 2),)\n")
    with pytest.raises(UsageError, match="takes no -p"):
        load_target(path, {"batch": "3"})


def test_the_import_path_is_left_as_it_was(write):
    path = write("def build(): return nn.Linear(2, 2), (torch.ones(1, 2),)")
    before = list(sys.path)
    load_target(path, {})
    assert sys.path == before
    assert Path(path).exists()
