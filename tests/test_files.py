from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
import yaml
from facts_builder import DRAWN
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan import files
from offplan.errors import FileFormatError, OutputError
from offplan.files import (
    GRAPH_FILE,
    PLAN_FILE,
    YamlError,
    dump_yaml,
    parse_yaml,
    read_text,
    write_atomically,
)

PLAN = PLAN_FILE.first_bytes + b" of model.py\n"

# --- reading --------------------------------------------------------------------------------------

documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(DRAWN, max_examples=200)
@given(documents)
def test_what_is_written_is_read_back(document: object) -> None:
    assert parse_yaml(dump_yaml(document)) == document


@settings(DRAWN, max_examples=100)
@given(documents)
def test_other_yaml_readers_see_the_same(document: object) -> None:
    assert yaml.safe_load(dump_yaml(document)) == document


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("--- 1\n--- 2\n", "one document"),
        ("a: &x [1]\nb: *x\n", "anchors"),
        ("a: *x\n", "anchors"),
        ("a: !!python/object:os.system x\n", "tags"),
        ("a: !mine 1\n", "tags"),
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("[1]: 2\n", "key must be text"),
        ("a: [1\n", "line 2"),
        ("a: 1\n\tb: 2\n", "line"),
        ("a: \x00\n", "#x0000"),
        ("a: %\n", "cannot start any token"),
        ("[" * 33 + "]" * 33, "nested deeper"),
        # libyaml gives up first here, at a thousand levels.
        ("[" * 100_000, "nest"),
        ("- " * 100_000, "nested deeper"),
        ("{a: " * 100_000, "nested deeper"),
    ],
)
def test_yaml_that_plans_do_not_use_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(YamlError, match=problem):
        parse_yaml(text)


def test_the_line_of_a_problem_is_given() -> None:
    with pytest.raises(YamlError, match=r"'b' is given twice \(line 3\)"):
        parse_yaml("a: 1\nb: 2\nb: 3\n")


def test_a_billion_laughs_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(YamlError, match="anchors"):
        parse_yaml("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-12", -12),
        ("true", True),
        ("null", None),
        ("~", None),
        ("'12'", "12"),
        ("yes", "yes"),
        (".nan", ".nan"),
        (".inf", ".inf"),
        ("1.5", "1.5"),
        ("1e9", "1e9"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-31", "2026-01-31"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_only_integers_and_three_words_are_not_text(text: str, value: object) -> None:
    assert parse_yaml(text) == value


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"none\.yaml: No such file"):
        read_text(tmp_path / "none.yaml")
    with pytest.raises(FileFormatError, match="Is a directory"):
        read_text(tmp_path)


def test_a_file_that_is_not_utf_8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin1.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(FileFormatError, match=r"not UTF-8 text \(byte 9\)"):
        read_text(path)


def test_a_file_far_larger_than_any_plan_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    with path.open("wb") as file:
        file.truncate(40 * 1024**2)
    with pytest.raises(FileFormatError, match="too large"):
        read_text(path)


# --- writing --------------------------------------------------------------------------------------


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_file_gets_the_content_and_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "offplan.plan.yaml"
    write_atomically(path, PLAN, PLAN_FILE)
    assert path.read_bytes() == PLAN
    (tmp_path / "ordinary").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_plan_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "offplan.plan.yaml"
    path.write_bytes(PLAN + b"old")
    path.chmod(0o640)
    write_atomically(path, PLAN, PLAN_FILE)
    assert path.read_bytes() == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["offplan.plan.yaml"]


def test_an_empty_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new"
    path.touch()
    write_atomically(path, PLAN, PLAN_FILE)
    assert path.read_bytes() == PLAN


@pytest.mark.parametrize("kind", [PLAN_FILE, GRAPH_FILE])
@pytest.mark.parametrize("content", [b"import torch\n", b"schema_version: 1\n", b"#", b"{}", b"\0"])
def test_any_other_file_is_left_as_it_is(
    tmp_path: Path, kind: files.FileKind, content: bytes
) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=f"is not {kind.name}"):
        write_atomically(path, kind.first_bytes, kind)
    assert path.read_bytes() == content
    assert names(tmp_path) == ["model.py"]


def test_a_plan_is_not_written_over_a_graph_file_or_the_reverse(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for kind, other in ((PLAN_FILE, GRAPH_FILE), (GRAPH_FILE, PLAN_FILE)):
        path.write_bytes(other.first_bytes)
        with pytest.raises(OutputError, match=f"is not {kind.name}"):
            write_atomically(path, kind.first_bytes, kind)


def test_a_directory_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        write_atomically(tmp_path, PLAN, PLAN_FILE)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no directory .*missing"):
        write_atomically(tmp_path / "missing" / "plan.yaml", PLAN, PLAN_FILE)
    assert names(tmp_path) == []


def test_a_parent_that_is_a_file_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="Not a directory"):
        write_atomically(tmp_path / "file" / "plan.yaml", PLAN, PLAN_FILE)


def test_a_name_that_is_too_long_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="name too long"):
        write_atomically(tmp_path / ("x" * 300), PLAN, PLAN_FILE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_an_error_with_the_reason(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write_atomically(tmp_path / "plan.yaml", PLAN, PLAN_FILE)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_whatever_interrupts_leaves_the_old_plan_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "offplan.plan.yaml"
    path.write_bytes(PLAN + b"old")

    def interrupted(*_: object) -> None:
        raise failure

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises((KeyboardInterrupt, OutputError)):
        write_atomically(path, PLAN, PLAN_FILE)
    assert path.read_bytes() == PLAN + b"old"
    assert names(tmp_path) == ["offplan.plan.yaml"]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_bytes(PLAN + b"old")
    link = tmp_path / "link.yaml"
    link.symlink_to("real.yaml")
    write_atomically(link, PLAN, PLAN_FILE)
    assert link.is_symlink()
    assert (tmp_path / "real.yaml").read_bytes() == PLAN


def test_dev_null_swallows_a_plan_and_stays_a_device() -> None:
    write_atomically(Path("/dev/null"), PLAN, PLAN_FILE)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    write_atomically(path, PLAN, PLAN_FILE)
    reader.join(timeout=5)
    assert received == [PLAN]
