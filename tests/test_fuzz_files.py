"""Broken files of every kind are refused in one message, or used; and what was found, by name.

``benchmarks/fuzz.py files`` runs the same on many more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from fused_steps import fused_step
from fuzz_files import (
    KINDS,
    Kind,
    drawn_content,
    facts_of,
    outcome,
    places_of,
    plan_of,
    value_at,
)
from test_measured import measurement, predicted_arms

from offplan import files
from offplan.budget import Aim, parse_budget
from offplan.costs import load_profile, profile_for
from offplan.doors.torch_log import read_log
from offplan.dumped import load_dumped
from offplan.errors import FileFormatError, OffplanError, PlanError, UsageError
from offplan.files import parse_yaml
from offplan.graph import ModelTensor, load_graph, save_graph
from offplan.measured import dump_measurement, load_measurement
from offplan.outside import check_target, place_of
from offplan.plan import Plan, dump_plan, load_plan, make_plan

SEED, COUNT = 4, 120
BY_NAME = {kind.name: kind for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_broken_file_is_refused_or_used(kind: Kind) -> None:
    found = [
        outcome(kind, drawn_content(kind, Random(f"{kind.name} {SEED} {number}")))
        for number in range(COUNT)
    ]
    # Kept files that are damaged count as not there.
    assert "refused" in found or kind.name.startswith("kept")
    assert "used" in found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_valid_file_of_each_kind_is_used(kind: Kind) -> None:
    for seed in range(3):
        assert outcome(kind, kind.dump(kind.document(seed))) == "used"


# --- what was found -------------------------------------------------------------------------------


def refused(read: Callable[[Path], Any], path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(OffplanError) as caught:
        read(path)
    return str(caught.value)


def test_a_message_repeats_no_control_characters_of_a_file(tmp_path: Path) -> None:
    document = msgspec.to_builtins(facts_of(0)) | {"\x1b[31mred\u202e": 1}
    said = refused(load_graph, tmp_path / "made.graph.json", json.dumps(document).encode())
    assert "unknown field `?[31mred?`" in said


def test_a_message_does_not_repeat_what_is_very_long(tmp_path: Path) -> None:
    document = msgspec.to_builtins(facts_of(0)) | {"x" * 100_000: 1}
    said = refused(load_graph, tmp_path / "made.graph.json", json.dumps(document).encode())
    assert len(said) < 2000
    assert "xxx ... xxx" in said


def test_a_rate_that_no_device_has_is_refused(tmp_path: Path) -> None:
    text = BY_NAME["profile"].dump(BY_NAME["profile"].document(0) | {"d2h_bytes_per_s": 10**400})
    assert "d2h_bytes_per_s" in refused(load_profile, tmp_path / "made.yaml", text)


@pytest.mark.parametrize("size", [2**61, 10**400])
def test_a_storage_larger_than_any_memory_is_refused(tmp_path: Path, size: int) -> None:
    document = msgspec.to_builtins(facts_of(0))
    document["storages"][0]["size_bytes"] = size
    content = json.dumps(document).encode()
    assert "storages[0]" in refused(load_graph, tmp_path / "made.graph.json", content)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["values"][4].update(storage=1, shape=[1], stride=[1]), "storage 1 again"),
        (lambda d: _first(d)["ops"].reverse(), "use what is not made before in its forward"),
        (lambda d: _first(d)["ops"].append(_first(d)["ops"][0]), "make what is there already"),
        (lambda d: d["regions"][0]["saved"].reverse(), "does not save what its forward returns"),
        (lambda d: d["regions"][0]["backward"]["inputs"].pop(0), "in its backward"),
        (
            # The planner would have it copied before that.
            lambda d: _first(d)["ops"][-1].update(mutates=_first(d)["ops"][0]["outputs"]),
            "write to what is no input of it in its forward",
        ),
    ],
)
def test_graphs_that_are_no_program_are_refused(
    tmp_path: Path, change: Callable[[Any], Any], problem: str
) -> None:
    document = json.loads(save_graph(facts_of(0)))
    change(document)
    content = json.dumps(document).encode()
    assert problem in refused(load_graph, tmp_path / "made.graph.json", content)


def _first(document: Any) -> Any:
    return document["regions"][0]["forward"]


def _lowering(document: Any) -> Any:
    return _first(document)["lowering"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["kernels"][0].update(ops=[]), "a kernel of no ops"),
        (lambda d: d["kernels"][0].update(makes=[]), "a buffer that no kernel makes"),
        (lambda d: d["kernels"].reverse(), "a kernel that uses what is not made before"),
        (lambda d: d["kernels"].append(d["kernels"][0]), "a kernel that makes what is there"),
        (lambda d: d["kernels"][0]["makes"].extend(d["kernels"][0]["makes"]), "what is there"),
        (lambda d: d["buffers"][0].update(size_bytes=-1), "a size that no memory has"),
        (lambda d: d["buffers"][0].update(size_bytes=10**400), "a size that no memory has"),
        (lambda d: d["buffers"][0].update(over=1), "a buffer in place of a later one"),
        (lambda d: d["kernels"][0].update(reads=[99]), "buffers beyond its"),
    ],
)
def test_a_lowering_that_no_compiler_makes_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], problem: str
) -> None:
    document = json.loads(save_graph(fused_step()))
    change(_lowering(document))
    content = json.dumps(document).encode()
    assert problem in refused(load_graph, tmp_path / "made.graph.json", content)


# --- numbers --------------------------------------------------------------------------------------


def full_documents() -> dict[str, Any]:
    """Files with every number that reports make something of."""
    aim = Aim(profile=profile_for("h200"))
    plan = make_plan(facts_of(1), budget=parse_budget("floor"), min_bytes=1, aim=aim)
    tensor = ModelTensor("parameter", ("w",), "float32", (4, 2), 32)
    graph = msgspec.structs.replace(fused_step(), model=(tensor,))
    return {
        "plan": parse_yaml(dump_plan(plan).decode()),
        "graph": json.loads(save_graph(graph)),
        "measured": json.loads(dump_measurement(measurement(*predicted_arms()))),
    }


def numbers(document: Any) -> list[tuple[Any, ...]]:
    """Where numbers are: of lists, in the last item alone, which nothing passes over."""
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for path in places_of(document):
        if type(value_at(document, path)) in (int, float):
            found[tuple("" if isinstance(key, int) else key for key in path)] = path
    return list(found.values())


@pytest.mark.parametrize("name", ["plan", "graph", "measured"])
def test_a_number_that_is_zero_or_beyond_all_bounds_is_refused_or_used(name: str) -> None:
    kind, document = BY_NAME[name], full_documents()[name]
    assert outcome(kind, kind.dump(document)) == "used"
    for path in numbers(document):
        for number in (0, 10**400):
            changed = json.loads(json.dumps(document))
            value_at(changed, path[:-1])[path[-1]] = number
            found = outcome(kind, kind.dump(changed))
            # Some may well be zero, none as large as that.
            assert found == "refused" or number == 0, path


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["arms"].pop(0), "no arm of the role no plan"),
        (lambda d: d["arms"].pop(1), "no arm of the role plan"),
        (lambda d: d["arms"][1].update(steps=d["arms"][1]["steps"][:1]), "$.arms[1].steps"),
    ],
)
def test_a_measurement_without_what_is_compared_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], problem: str
) -> None:
    document = BY_NAME["measured"].document(0)
    change(document)
    content = json.dumps(document).encode()
    assert problem in refused(load_measurement, tmp_path / "made.json", content)


@pytest.mark.parametrize("device", [2**62, -1])
def test_a_snapshot_of_a_device_that_no_machine_has_is_refused(tmp_path: Path, device: int) -> None:
    segment = {"address": 0, "device": device, "blocks": []}
    content = json.dumps({"segments": [segment]}).encode()
    said = refused(load_dumped, tmp_path / "made.json", content)
    assert f"a segment of device {device}" in said


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"regions": ()}, "$.storages[0].region"),
        ({"storages": (msgspec.structs.replace(plan_of(1).storages[0], views=()),)}, "views"),
    ],
)
def test_a_plan_of_regions_that_are_not_there_is_refused(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    plan = msgspec.structs.replace(plan_of(1), **changes)
    assert field in refused(load_plan, tmp_path / "made.yaml", dump_plan(plan))


def test_an_event_that_a_log_has_in_part_is_refused(tmp_path: Path) -> None:
    line = 'V0101] {"describe_storage": {}, "frame_id": 0}\n'
    said = refused(lambda path: read_log(str(path)), tmp_path / "x.log", line.encode())
    assert "event that cannot be read" in said


# --- what is no file ------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], Any]] = {
    "plan": load_plan,
    "graph": load_graph,
    "profile": load_profile,
    "measurement": load_measurement,
    "snapshot": load_dumped,
    "log": lambda path: read_log(str(path)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.mkdir(), id="a folder"),
        pytest.param(os.mkfifo, id="a pipe that nobody writes to"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="a device without end"),
        pytest.param(lambda path: path.symlink_to(path), id="a link to itself"),
        pytest.param(lambda path: None, id="nothing"),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    read: Callable[[Path], Any], make: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "made"
    make(path)
    start = time.process_time()
    with pytest.raises(OffplanError, match="made"):
        read(path)
    assert time.process_time() - start < 1


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(FileFormatError, match="null"):
        load_plan(Path("a\x00b.yaml"))
    with pytest.raises(FileFormatError, match="too long"):
        load_plan(Path("a" * 5000))


def test_a_pipe_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_WAIT_S", 0.1)
    reader, writer = os.pipe()
    try:
        with pytest.raises(FileFormatError, match="nothing came from it"):
            load_plan(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pipe_that_is_written_to_is_read() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, dump_plan(plan_of(1)))
        os.close(writer)
        assert load_plan(Path(f"/dev/fd/{reader}")) == plan_of(1)
    finally:
        os.close(reader)


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.plan.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileFormatError, match="too large to be a plan"):
        load_plan(path)
    with pytest.raises(FileFormatError, match="too large to be a graph file"):
        load_graph(path)


# --- targets that plans name ----------------------------------------------------------------------


def plan_for(spec: str, **params: str) -> Plan:
    target = msgspec.structs.replace(plan_of(1).target, spec=spec, params=params)
    return msgspec.structs.replace(plan_of(1), target=target)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a model in it, another beside a plan in a folder of its own."""
    here = tmp_path / "here"
    (here / "plans" / "deep").mkdir(parents=True)
    (here / "package").mkdir()
    for name in ("model.py", "plans/model.py", "plans/deep/model.py", "package/net.py"):
        (here / name).write_text("def build(): ...\n")
    (tmp_path / "elsewhere.py").write_text("def build(): ...\n")
    (here / "plans" / "link.py").symlink_to(tmp_path / "elsewhere.py")
    (here / "plans" / "linked").symlink_to(tmp_path)
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("plans/model.py", "beside the plan"),
        ("plans/deep/model.py:make", "beside the plan"),
        ("plans/../plans/model.py", "beside the plan"),
        ("model.py", "below here"),
        ("plans/../model.py", "below here"),
        ("package.net:build", "below here"),
        ("../elsewhere.py", "elsewhere"),
        ("plans/link.py", "elsewhere"),
        ("plans/linked/elsewhere.py", "elsewhere"),
        ("/etc/model.py", "elsewhere"),
        ("shutil:rmtree", "elsewhere"),
        ("os.path:join", "elsewhere"),
        ("not_there.at_all:build", "elsewhere"),
        ("torch.hub:load", "elsewhere"),
        ("", "elsewhere"),
        ("../../x:y", "elsewhere"),
        ("hf:qwen3", "library"),
        ("timm:vit_base_patch16_224", "library"),
    ],
)
def test_where_the_code_of_a_plans_target_lies(folder: Path, spec: str, place: str) -> None:
    assert place_of(spec, Path("plans/made.plan.yaml")) == place


def test_a_target_beside_its_plan_is_run_and_one_below_here_is_announced(folder: Path) -> None:
    path = Path("plans/made.plan.yaml")
    assert check_target(path, plan_for("plans/model.py")) == ""
    said = check_target(path, plan_for("model.py"))
    assert said == "the plan names a target outside its folder: model.py"


def test_a_target_elsewhere_must_be_typed(folder: Path) -> None:
    path, plan = Path("plans/made.plan.yaml"), plan_for("shutil:rmtree", path="/home")
    with pytest.raises(PlanError) as caught:
        check_target(path, plan)
    assert "outside its folder: shutil:rmtree (path='/home')" in str(caught.value)
    assert "--target shutil:rmtree" in str(caught.value)
    assert check_target(path, plan, "shutil:rmtree") == ""
    with pytest.raises(UsageError, match=r"is a plan of shutil:rmtree"):
        check_target(path, plan, "model.py")


def test_a_plan_that_names_a_function_of_python_does_not_run_it(folder: Path) -> None:
    """End to end: it would have removed a folder."""
    from typer.testing import CliRunner

    from offplan.cli import app

    victim = folder / "plans"
    path = folder / "made.plan.yaml"
    path.write_bytes(dump_plan(plan_for("shutil:rmtree", path=str(victim))))
    for command in (
        ["run", str(path), "--device", "cpu"],
        ["gate", str(path)],
        ["explain", str(path)],
    ):
        found = CliRunner().invoke(app, command)
        assert found.exit_code != 0 or command[0] == "explain"
        assert victim.is_dir()
    found = CliRunner().invoke(app, ["run", str(path), "--device", "cpu"])
    assert found.exit_code == 1
    assert "the plan names a target outside its folder: shutil:rmtree" in found.output


def test_no_command_but_those_that_replay_imports_a_plans_target(folder: Path) -> None:
    from typer.testing import CliRunner

    from offplan.cli import app

    ran = folder / "ran"
    (folder / "model.py").write_text(f"open({str(ran)!r}, 'w')\n")
    path = folder / "made.plan.yaml"
    path.write_bytes(dump_plan(plan_for("model.py")))
    (folder / "made.graph.json").write_bytes(save_graph(facts_of(1)))
    commands = [
        ["gate", str(path), "--max-alias-skipped", "0"],
        ["explain", str(path)],
        ["diff", str(path), str(path)],
        ["report", str(path), "-o", "page.html"],
        ["export", str(path), "--to", "json"],
        ["export", str(path), "--to", "perfetto", "-o", "trace.json"],
        ["analyze", "made.graph.json", "--device", "cpu", "-o", "again.plan.yaml"],
    ]
    for command in commands:
        found = CliRunner().invoke(app, command)
        assert found.exit_code in (0, 3), found.output
    assert not ran.exists()
