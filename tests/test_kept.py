"""What is kept on disk: found again, never trusted when damaged, and never in the way."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec
import pytest
from fused_steps import fused_step

from offplan import kept
from offplan.graph import GraphFacts, TargetRef, digest
from offplan.kept import (
    TraceKey,
    keep_graph,
    keep_result,
    keep_trace,
    kept_graph,
    kept_result,
    kept_trace,
)

KEY = TraceKey("model.py", {"batch": "2"}, {"device": "cuda"}, {"torch": "2.14.1"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def facts() -> GraphFacts:
    target = TargetRef(KEY.spec, KEY.params)
    return msgspec.structs.replace(fused_step(), target=target)


def test_graphs_are_found_by_their_digest(facts: GraphFacts) -> None:
    assert kept_graph(digest(facts)) is None
    path = keep_graph(facts)
    assert path is not None
    assert kept_graph(digest(facts)) == facts


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-10],
        lambda content: b"offplan kept 1\n" + zlib.compress(b"{}"),
        lambda content: b"offplan kept 1\nnot compressed",
        lambda content: b"",
    ],
    ids=["cut", "something else", "garbage", "empty"],
)
def test_what_is_damaged_counts_as_not_there(facts: GraphFacts, damage: object) -> None:
    path = keep_graph(facts)
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert kept_graph(digest(facts)) is None
    assert not path.exists()


def test_graphs_under_another_name_are_not_taken(facts: GraphFacts) -> None:
    path, other = keep_graph(facts), "sha256:" + 64 * "0"
    assert path is not None
    wrong = kept._graph_path(other, "0")
    assert wrong is not None
    wrong.write_bytes(path.read_bytes())
    assert kept_graph(other) is None


def test_a_digest_names_no_file_outside_the_folder(cache: Path) -> None:
    path = kept._graph_path("../../../etc/passwd", "0")
    assert path is not None
    assert path.parent == cache / "graphs"
    assert kept._graph_path("sha256:0", "../../../etc/passwd") is None


def test_graphs_of_one_digest_for_two_gpus_are_both_kept(facts: GraphFacts) -> None:
    other = msgspec.structs.replace(facts, gpu="NVIDIA A100-SXM4-80GB")
    assert digest(other) == digest(facts)
    assert facts.gpu != other.gpu
    for each in (facts, other):
        keep_graph(each)
    for each in (facts, other):
        assert kept_graph(digest(facts), each.gpu) == each
    assert kept_graph(digest(facts), "another") is None


def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, facts: GraphFacts
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OFFPLAN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert keep_graph(facts) is None
    assert kept_graph(digest(facts)) is None


def test_a_trace_holds_while_its_files_are_as_they_were(facts: GraphFacts, tmp_path: Path) -> None:
    code = tmp_path / "model.py"
    code.write_text("width = 1\n")
    keep_trace(KEY, facts, [code])
    assert kept_trace(KEY) == facts
    assert kept_trace(msgspec.structs.replace(KEY, params={"batch": "4"})) is None
    assert kept_trace(msgspec.structs.replace(KEY, versions={"torch": "2.15"})) is None
    code.write_text("width = 2\n")
    assert kept_trace(KEY) is None
    code.write_text("width = 1\n")
    assert kept_trace(KEY) == facts
    code.unlink()
    assert kept_trace(KEY) is None


def test_a_trace_has_its_own_graphs_whatever_else_has_their_digest(facts: GraphFacts) -> None:
    keep_trace(KEY, facts, [])
    other = msgspec.structs.replace(facts, target=TargetRef("other.py"), gpu="another")
    keep_trace(msgspec.structs.replace(KEY, spec="other.py"), other, [])
    assert kept_trace(KEY) == facts


def test_results_are_found_by_what_they_were_computed_from() -> None:
    keep_result(b"a", b"1")
    assert kept_result(b"a") == b"1"
    assert kept_result(b"b") is None


def test_what_was_used_least_recently_goes_first(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    for number, name in enumerate((b"old", b"used", b"new")):
        keep_result(name, 1000 * b"x")
        path = kept._result_path(name)
        assert path is not None
        os.utime(path, (number, number))
    assert kept_result(b"old") is not None
    monkeypatch.setattr(kept, "LIMIT_BYTES", 3200)
    keep_result(b"one more", 1000 * b"x")
    there = {name: kept_result(name) is not None for name in (b"old", b"used", b"new", b"one more")}
    assert there == {b"old": True, b"used": False, b"new": True, b"one more": True}
    assert sum(path.stat().st_size for path in cache.glob("*/*")) <= 3200


def test_what_cannot_be_written_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, facts: GraphFacts, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "file"))
    assert keep_graph(facts) is None
    assert kept_graph(digest(facts)) is None


def test_off_keeps_nothing(monkeypatch: pytest.MonkeyPatch, facts: GraphFacts) -> None:
    monkeypatch.setenv("OFFPLAN_CACHE", "off")
    assert keep_graph(facts) is None
    keep_result(b"a", b"1")
    assert kept_result(b"a") is None
