"""The command: exit codes, streams, files, and one message for each thing that goes wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from offplan.api import analyze as analyze_in_a_script
from offplan.cli import app
from offplan.costs import profile_for, profile_text
from offplan.errors import UsageError
from offplan.plan import Plan, load_plan

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "sample_graphs" / "saved_view.py"
MODEL = """
import torch

def build(width: int = 64):
    return torch.nn.Linear(width, width), (torch.randn(32, width),)

def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty current directory with a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def offplan(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def analyze(*arguments: str) -> Result:
    return offplan("analyze", "--device", "cpu", *arguments)


def in_a_process(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "offplan", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# --- analyze ----------------------------------------------------------------------------------


def test_analyze_prints_the_report_and_writes_the_plan(folder):
    result = analyze("model.py", "-p", "width=128")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("model.py width=128\n")
    assert result.stderr == "wrote offplan.plan.yaml\n"
    plan = load_plan(folder / "offplan.plan.yaml")
    assert plan.target.params == {"width": "128"}
    # The input of x @ W^T is saved for the weight's gradient: 32 * 128 floats.
    assert plan.saved_bytes == 32 * 128 * 4


def test_the_same_analysis_writes_the_same_bytes(folder):
    for name in ("a", "b"):
        assert analyze("model.py", "-o", f"{name}.plan.yaml", "--graph", f"{name}.graph.json")
    assert Path("a.plan.yaml").read_bytes() == Path("b.plan.yaml").read_bytes()
    assert Path("a.graph.json").read_bytes() == Path("b.graph.json").read_bytes()


def test_a_saved_graph_gives_the_plan_of_the_model_that_it_came_from(folder):
    analyze("model.py", "-o", "a.plan.yaml", "--graph", "a.graph.json")
    result = offplan("analyze", "a.graph.json", "-o", "b.plan.yaml")
    assert result.exit_code == 0, result.stderr
    assert "took" not in result.stdout
    assert Path("a.plan.yaml").read_bytes() == Path("b.plan.yaml").read_bytes()


def test_json_is_pure_and_exact(folder):
    result = analyze("model.py", "--format", "json")
    document = json.loads(result.stdout)
    assert document["saved_bytes"] == 32 * 64 * 4
    phases = {"build_s", "capture_s", "partition_s", "lower_s", "analysis_s"}
    assert set(document["timing"]) == phases


def test_markdown_has_tables(folder):
    assert "| rule |" in analyze("model.py", "--format", "markdown").stdout


def test_budget_0_plans_transfers_and_no_budget_none(folder):
    analyze(str(SAMPLE), "-o", "none.plan.yaml")
    analyze(str(SAMPLE), "-o", "floor.plan.yaml", "--budget", "0")
    none, floor = load_plan(Path("none.plan.yaml")), load_plan(Path("floor.plan.yaml"))
    assert (none.budget, none.moved_bytes, none.transfers) == (None, 0, ())
    assert (floor.budget, floor.moved_bytes) == (0, 8 * 1024**2)
    assert len(floor.transfers) == 1


# --- budgets --------------------------------------------------------------------------------------

DEEP = """
import torch

def build(layers: int = 4, width: int = 256, rows: int = 8192):
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(),
                                  torch.nn.Linear(width, width)) for _ in range(layers)]
    return torch.nn.Sequential(*blocks), (torch.randn(rows, width),)
"""
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="traces for cuda: needs a CUDA build of torch"
)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda_build)]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> Path:
    """Where the graphs of the chain are, traced once for each device."""
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "deep.py").write_text(DEEP)
    for device in ["cpu"] if torch.version.cuda is None else ["cpu", "cuda"]:
        made = offplan(
            *("analyze", str(folder / "deep.py"), "--device", device, "-o", str(folder / "p.yaml")),
            *("--graph", str(folder / f"{device}.graph.json")),
        )
        assert made.exit_code == 0, made.stderr
    return folder


@pytest.fixture
def deep(folder, graphs) -> Path:
    """A chain of layers, whose activations of 8 MiB make most of its peak, and its graphs."""
    for path in graphs.glob("*.graph.json"):
        shutil.copy(path, folder)
    (folder / "deep.py").write_text(DEEP)
    return folder


def planned(device: str, *arguments: str) -> tuple[Plan, Result]:
    """The plan of the chain."""
    found = offplan("analyze", f"{device}.graph.json", "-o", "deep.plan.yaml", *arguments)
    assert found.exit_code == 0, found.stderr
    return load_plan(Path("deep.plan.yaml")), found


@pytest.mark.parametrize("device", DEVICES)
def test_every_spelling_of_a_budget_is_met_and_less_peak_moves_more(deep, device):
    none, _ = planned(device)
    floor, _ = planned(device, "--budget", "floor")
    everything, _ = planned(device, "--budget", "0")
    peak, least = none.predicted.no_plan.peak_bytes, none.predicted.floor_bytes
    middle = (peak + least) // 2
    assert (none.budget, none.transfers, none.predicted.plan) == (None, (), none.predicted.no_plan)
    assert (floor.budget, floor.asked, floor.predicted.plan.peak_bytes) == (least, "floor", least)
    assert (everything.budget, everything.asked) == (0, "")
    assert everything.moved_bytes == everything.movable_bytes >= floor.moved_bytes
    for text, limit in (
        (str(middle), middle),
        (f"{middle / 1024:.6f}KiB", middle),
        (f"{middle / 1000**2:.6f} MB", middle),
        ("90%", int(0.9 * peak)),
    ):
        plan, found = planned(device, "--budget", text)
        assert plan.asked == text
        assert abs(plan.budget - limit) <= 1
        assert plan.predicted.plan.peak_bytes <= plan.budget
        assert plan.transfers or plan.recomputed
        assert plan.moved_bytes <= floor.moved_bytes
        assert "under the budget" in " ".join(found.stdout.split()) or (
            plan.predicted.plan.peak_bytes == plan.budget
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["100%", "1TB"])
def test_what_fits_already_moves_nothing_and_says_so(deep, device, text):
    plan, found = planned(device, "--budget", text)
    assert (plan.transfers, plan.moved_bytes) == ((), 0)
    assert "it fits already: nothing moves" in found.stdout


@needs_cuda_build
def test_auto_is_the_gpus_memory_less_a_stated_margin(deep):
    plan, found = planned("cuda", "--budget", "auto")
    assert plan.asked == "auto"
    assert plan.budget + plan.predicted.margin_bytes == profile_for("h200").memory_bytes
    assert plan.predicted.plan.reserved_bytes <= plan.budget
    assert "auto leaves" in found.stdout
    smaller, _ = planned("cuda", "--profile", "t4", "--budget", "auto")
    assert smaller.budget + smaller.predicted.margin_bytes == 16 * 1024**3


def test_auto_for_the_cpu_asks_for_a_profile_or_a_size(deep):
    found = offplan("analyze", "cpu.graph.json", "--budget", "auto")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "needs to know the device's memory" in found.stderr
    assert "--profile" in found.stderr


@pytest.mark.parametrize(
    "text", ["", "much", "-1", "80 %%", "0%", "101%", "%", "80GiB/s", "Auto", "none of it", "1e3"]
)
def test_what_is_no_budget_is_refused_before_the_trace(deep, text, monkeypatch):
    monkeypatch.setattr("offplan.trace.capture.trace", None)
    found = analyze("deep.py", "--budget", text)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith(f"error: --budget {text}: ")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("text", ["", "offload", "keep,swap", "keep,keep", "keep offload"])
def test_what_is_no_set_of_actions_is_refused_before_the_trace(deep, text, monkeypatch):
    monkeypatch.setattr("offplan.trace.capture.trace", None)
    found = analyze("deep.py", "--actions", text)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith(f"error: actions {text}: not keep, and others of ")
    assert "  try: for example: --actions keep,offload\n" in found.stderr


@pytest.mark.parametrize("actions", ["keep", "recompute,keep"])
def test_without_offload_among_the_actions_nothing_moves(deep, actions):
    every, _ = planned("cpu", "--budget", "0")
    assert (every.actions, every.choices) == (("keep", "recompute", "offload"), ())
    plan, found = planned("cpu", "--budget", "0", "--actions", actions)
    assert plan.actions == tuple(sorted(actions.split(",")))
    assert (plan.transfers, plan.moved_bytes, plan.choices) == ((), 0, ())
    assert (plan.movable_bytes, plan.saved_bytes) == (every.movable_bytes, every.saved_bytes)
    assert "nothing can move" in found.stdout


def test_a_script_restricts_actions_as_the_command_does(deep):
    restricted = ("--budget", "floor", "--actions", "keep,offload", "--device", "cpu")
    found = offplan("analyze", "deep.py", *restricted, "-o", "cli.plan.yaml")
    assert found.exit_code == 0, found.stderr
    for actions in ("keep,offload", ("offload", "keep")):
        plan = analyze_in_a_script(
            "deep.py", budget="floor", actions=actions, device="cpu", compiler="aot_eager"
        )
        assert plan == Plan.load("cli.plan.yaml")
    with pytest.raises(UsageError, match="not keep, and others"):
        analyze_in_a_script("deep.py", actions=("offload",))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", ["1KiB", "1%"])
def test_an_infeasible_budget_exits_3_with_a_floor_that_then_works(deep, device, text):
    arguments = ("analyze", f"{device}.graph.json", "--budget")
    found = offplan(*arguments, text)
    assert (found.exit_code, found.stdout) == (3, "")
    assert not Path("offplan.plan.yaml").exists()
    words = re.fullmatch(
        r"error: no plan keeps the peak within (1KiB|1% \([\d.]+ MB\)): the floor is [\d.]+ MB, "
        r"made of [\d.]+ [MkG]?B of .*\n  at: aten\.\S+, op \d+\n  try: --budget (\d+) .*\n",
        found.stderr,
    )
    assert words, found.stderr
    least = words[2]
    again = offplan(*arguments, least)
    assert again.exit_code == 0, again.stderr
    assert load_plan(Path("offplan.plan.yaml")).predicted.plan.peak_bytes <= int(least)


def test_host_memory_that_is_too_small_raises_the_floor_and_is_named(deep):
    free, _ = planned("cpu", "--budget", "floor")
    limit = ("--host-budget", "20MiB")
    tight, found = planned("cpu", "--budget", "floor", *limit)
    assert 0 < sum(transfer.transfer_bytes for transfer in tight.transfers) <= 20 * 1024**2
    assert tight.predicted.floor_bytes > free.predicted.floor_bytes
    assert "at most 20.97 MB of host memory" in found.stdout
    refused = offplan(
        "analyze", "cpu.graph.json", "--budget", str(free.predicted.floor_bytes), *limit
    )
    assert refused.exit_code == 3
    assert "with 20.97 MB of host memory" in refused.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_the_curve_goes_from_no_plan_to_the_floor(deep, device):
    moving = ("--actions", "keep,offload", "--budget", "90%", "--budgets")
    plan, found = planned(device, *moving, "--format", "json")
    curve = json.loads(found.stdout)["curve"]
    assert len(curve) == 17
    assert [point["name"] for point in curve] == ["no plan", *[""] * 15, "floor"]
    assert curve[0]["peak_bytes"] == plan.predicted.no_plan.peak_bytes
    assert curve[-1]["peak_bytes"] == plan.predicted.floor_bytes
    peaks = [point["peak_bytes"] for point in curve]
    assert peaks == sorted(peaks, reverse=True)
    moved = [point["moved_bytes"] for point in curve]
    assert moved[0] == 0 < moved[-1]
    times = [point["step_ms"] for point in curve]
    if device == "cpu":
        assert set(times) == {None}
    else:
        assert times == sorted(times)
    _, found = planned(device, *moving)
    rows = found.stdout[found.stdout.index("What each budget would cost") :].splitlines()[2:]
    assert len(rows) == 17
    assert (" no plan " in rows[0], " floor " in rows[-1]) == (True, True)
    assert (("█" in rows[0]), ("%" in rows[1])) == (device == "cuda", True)


def test_the_joint_curve_is_never_slower_than_an_action_alone(deep):
    _, found = planned("cuda", "--budget", "90%", "--budgets", "--format", "json")
    report = json.loads(found.stdout)
    assert report["curve"] == []
    curve = report["joint_curve"]
    assert len(curve) == 17
    for point in curve:
        for alone in ("offload", "recompute"):
            if point[alone] is not None:
                assert point["joint"]["step_ms"] <= 1.005 * point[alone]["step_ms"]
    machines = [each["name"] for each in report["elsewhere"]]
    assert machines == ["as it is", "a link twice as fast", "a GPU half as fast"]
    # The same in words, of a chain that takes less long.
    found = offplan("analyze", "deep.py", "-p", "layers=2", "--budget", "90%", "--budgets")
    assert "with all actions and with one alone" in found.stdout
    assert "a link twice as fast" in found.stdout


def test_without_a_budget_a_few_points_are_shown_and_with_one_none(deep):
    _, found = planned("cpu")
    rows = found.stdout[found.stdout.index("What each budget would cost") :].splitlines()[2:]
    assert len(rows) == 6
    _, found = planned("cpu", "--budget", "floor")
    assert "What each budget" not in found.stdout


@needs_cuda_build
def test_a_profile_is_a_shipped_name_or_a_file(deep):
    own, _ = planned("cuda", "--budget", "floor")
    slow, found = planned("cuda", "--budget", "floor", "--profile", "t4")
    assert (own.predicted.profile, slow.predicted.profile) == ("h200", "t4")
    assert slow.predicted.time.step_us > own.predicted.time.step_us
    # Another link or GPU changes no byte of the step without a plan.
    assert slow.predicted.no_plan == own.predicted.no_plan
    assert "  profile  t4\n" in found.stdout
    mine = msgspec.structs.replace(profile_for("t4"), name="mine")
    Path("mine.yaml").write_text(profile_text(mine))
    from_file, _ = planned("cuda", "--budget", "floor", "--profile", "mine.yaml")
    assert from_file.predicted.profile == "mine"
    assert from_file.predicted.time == slow.predicted.time
    assert from_file.transfers == slow.transfers


@pytest.mark.parametrize(
    ("text", "exit_code", "words"),
    [
        ("abacus", 2, "no profile is known for the GPU 'abacus'"),
        ("missing.yaml", 1, "cannot read missing.yaml"),
        ("deep.yaml", 1, "deep.yaml is not an offplan device profile"),
        ("foreign.yml", 1, "foreign.yml is not an offplan device profile"),
    ],
)
def test_what_is_no_profile_is_refused_before_the_trace(deep, text, exit_code, words, monkeypatch):
    Path("deep.yaml").write_text(DEEP)
    Path("foreign.yml").write_text("services: {web: {image: nginx}}\n")
    monkeypatch.setattr("offplan.trace.capture.trace", None)
    found = analyze("deep.py", "--profile", text)
    assert (found.exit_code, found.stdout) == (exit_code, "")
    assert words in found.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_adds_its_state_and_accumulation_the_gradients(deep, device):
    # Each of 8 matrices and biases is a whole number of blocks of 512 bytes.
    parameters = 8 * (256 * 256 + 256) * 4
    peaks = {}
    for name, arguments in (
        ("alone", ()),
        ("sgd", ("--optimizer", "sgd")),
        ("adamw", ("--optimizer", "adamw")),
        ("accumulate", ("--accumulate",)),
    ):
        plan, _ = planned(device, *arguments)
        peaks[name] = plan.predicted.no_plan.peak_bytes
        assert plan.predicted.no_plan.parts["optimizer"] == {"sgd": 1, "adamw": 2}.get(name, 0) * (
            parameters
        )
    assert peaks["adamw"] - peaks["alone"] == 2 * parameters
    assert peaks["sgd"] - peaks["alone"] == parameters
    # Gradients that are there from the start are no longer made: at most one set more.
    assert 0 < peaks["accumulate"] - peaks["alone"] <= parameters


@pytest.mark.parametrize("text", ["0", "floor", "90%"])
def test_a_budget_of_a_saved_graph_gives_the_plan_of_its_target(deep, text):
    arguments = ("--budget", text, "--optimizer", "adamw")
    analyze("deep.py", *arguments, "-o", "a.plan.yaml", "--graph", "a.graph.json")
    found = offplan("analyze", "a.graph.json", *arguments, "-o", "b.plan.yaml")
    assert found.exit_code == 0, found.stderr
    assert Path("a.plan.yaml").read_bytes() == Path("b.plan.yaml").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "cpu", "--budget", "0"],
        ["--device", "cpu", "--budget", "floor", "--accumulate"],
        ["--device", "cpu", "--budget", "100.5 MB", "--optimizer", "adafactor"],
        ["--device", "cpu", "--budget", "95%", "--profile", "t4"],
        ["--device", "cpu", "--budget", "floor", "--actions", "offload,keep"],
        ["--device", "cpu", "--actions", "keep"],
        ["--device", "cpu", "-p", "layers=2", "--rules", "last-holder", "--host-budget", "2MiB"],
        pytest.param(["--budget", "auto", "--expandable-segments"], marks=needs_cuda_build),
        pytest.param(["--budget", "90%", "--profile", "h100"], marks=needs_cuda_build),
        pytest.param(["--gpu", "a100", "--budget", "floor"], marks=needs_cuda_build),
        pytest.param(["--gpu", "a100", "--profile", "h200"], marks=needs_cuda_build),
        pytest.param(["--gpu", "a100", "--profile", "a100"], marks=needs_cuda_build),
    ],
    ids=" ".join,
)
def test_the_command_in_a_plan_makes_the_same_plan(deep, arguments):
    made = offplan("analyze", "deep.py", *arguments, "--min-size", "1MiB", "-o", "a.plan.yaml")
    assert made.exit_code == 0, made.stderr
    first = Path("a.plan.yaml").read_text().split("\n", 1)[0]
    command = first.partition("; make it again with: ")[2]
    program, *again = shlex.split(command)
    assert program == "offplan"
    found = offplan(*again, "-o", "b.plan.yaml")
    assert found.exit_code == 0, found.stderr
    assert Path("a.plan.yaml").read_bytes() == Path("b.plan.yaml").read_bytes()


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["missing.py"], 1, "there is no file missing.py"),
        (["model.py:other"], 1, "has no 'other'"),
        (["model.py:broken"], 1, "ValueError: no weights"),
        (["model"], 1, "is not a target"),
        (["model.py", "-p", "width"], 2, "not KEY=VALUE"),
        (["model.py", "-p", "width=wide"], 2, "not a whole number"),
        (["model.py", "-p", "height=3"], 2, "takes no parameter 'height'"),
        (["model.py", "-p", "width=3", "-p", "width=4"], 2, "given twice"),
        (["model.py", "--min-size", "huge"], 2, "is not a size"),
        (["model.py", "--attention", "flash"], 2, "needs --device cuda"),
        (["model.py", "--graph", "x.json"], 2, "must end in .graph.json"),
        (["model.py", "-o", "-"], 2, "-o names a file"),
        (["model.py", "--gpu", "h100"], 2, "--gpu is about CUDA kernels"),
        (["model.py", "-o", "."], 1, "is a directory"),
        (["model.py", "-o", "no/such/folder/x.yaml"], 1, "there is no directory"),
        (["model.py", "-o", "model.py"], 1, "is not an offplan plan"),
        (["model.py", "--graph", "other.graph.json"], 1, "is not an offplan graph file"),
        (["other.graph.json"], 1, "is not an offplan graph file"),
        (["missing.graph.json"], 1, "cannot read"),
        (["x.plan.yaml"], 2, "is not a target"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(folder, arguments, exit_code, words):
    (folder / "other.graph.json").write_text("{}")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = analyze(*arguments)
    assert result.exit_code == exit_code
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {k: v for k, v in after.items() if "__pycache__" not in str(k)} == before


def test_an_unknown_gpu_is_named_with_those_known(folder):
    result = offplan("analyze", "model.py", "--gpu", "abacus")
    # On a CPU build of torch the device is refused first.
    assert result.exit_code in (1, 2)
    assert "abacus" in result.stderr or "CUDA build" in result.stderr


def test_traceback_is_printed_where_asked(folder):
    result = analyze("model.py:broken", "--traceback")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: building the model failed: ValueError: no weights" in result.stderr


def test_an_output_that_cannot_be_written_is_refused_before_the_trace(folder, monkeypatch):
    def traced(*arguments):
        raise AssertionError("traced")

    monkeypatch.setattr("offplan.trace.capture.trace", traced)
    assert "is not an offplan plan" in analyze("model.py", "-o", "model.py").stderr


def test_ctrl_c_is_one_message_and_leaves_no_file(folder):
    (folder / "slow.py").write_text(
        "import time\nfrom model import build as inner\n"
        "def build():\n    open('started', 'w').close()\n    time.sleep(60)\n    return inner()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "offplan", "analyze", "slow.py", "--device", "cpu"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (folder / "started").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert errors == "error: interrupted\n"
    assert not list(folder.glob("*plan*"))


# --- gate ----------------------------------------------------------------------------------


@pytest.fixture
def plan(folder) -> Path:
    """A plan that skips 8 MiB under ``alias`` by ``no-view``, and nothing by ``whole-storage``."""
    shutil.copy(SAMPLE, folder / "saved_view.py")
    assert analyze("saved_view.py").exit_code == 0
    return folder / "offplan.plan.yaml"


def test_gate_reads_the_default_plan_and_passes(plan):
    result = offplan("gate", "--max-alias-skipped", "0")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("offplan gate ok: saved_view.py")


def test_gate_fails_with_exit_3_and_names_the_offender(plan):
    result = offplan("gate", "--max-alias-skipped", "0", "--rules", "no-view")
    assert result.exit_code == 3
    assert "8.39 MB too much" in result.stdout
    assert "saved_view.py:20" in result.stdout
    assert result.stderr == ""


def test_gate_prints_github_annotations_on_the_file_and_line(plan):
    result = offplan("gate", "--max-alias-skipped", "0", "--rules", "no-view", "--format", "github")
    assert result.exit_code == 3
    assert "::error file=saved_view.py,line=20," in result.stdout


def test_gate_takes_thresholds_from_pyproject(plan):
    (plan.parent / "pyproject.toml").write_text(
        '[tool.offplan]\nmax-alias-skipped = "0"\nrules = "no-view"\n'
    )
    assert offplan("gate").exit_code == 3
    assert offplan("gate", "--max-alias-skipped", "8MiB").exit_code == 0


def test_gate_compares_with_a_baseline(plan):
    shutil.copy(plan, "old.plan.yaml")
    same = offplan("gate", "--baseline", "old.plan.yaml", "--rules", "no-view")
    assert same.exit_code == 0, same.stdout + same.stderr


def test_gate_analyzes_a_target(folder):
    shutil.copy(SAMPLE, folder / "saved_view.py")
    result = offplan(
        "gate",
        "saved_view.py",
        *("--device", "cpu", "--max-alias-skipped", "0", "--rules", "no-view"),
    )
    assert result.exit_code == 3
    assert not Path("offplan.plan.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ([], 2, "there is no threshold"),
        (["--max-alias-skipped", "lots"], 2, "is not a size"),
        (["--max-skipped", "alias"], 2, "is not RULE=SIZE"),
        (["--max-skipped", "colour=0"], 2, "is not a rule"),
        (["--max-growth", "5%"], 2, "needs a plan to compare with"),
        (["--baseline", "missing.yaml"], 1, "cannot read missing.yaml"),
        (["missing.yaml", "--max-alias-skipped", "0"], 1, "cannot read missing.yaml"),
        (["foreign.yaml", "--max-alias-skipped", "0"], 1, "foreign.yaml"),
        (["corrupt.yaml", "--max-alias-skipped", "0"], 1, "corrupt.yaml"),
        (["offplan.plan.yaml", "-p", "a=1", "--max-alias-skipped", "0"], 2, "takes no -p"),
    ],
)
def test_a_gate_that_cannot_decide_says_why(plan, arguments, exit_code, words):
    Path("foreign.yaml").write_text("services: {web: {image: nginx}}\n")
    Path("corrupt.yaml").write_bytes(plan.read_bytes()[:200] + b"\xff: [")
    result = offplan("gate", *arguments)
    assert result.exit_code == exit_code, result.stdout
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_gate_on_a_plan_file_and_help_start_without_torch(plan):
    (plan.parent / "torch.py").write_text("raise ImportError('torch must not be imported')\n")
    for arguments in (["--help"], ["--version"], ["gate", "--max-alias-skipped", "0"]):
        done = in_a_process(*arguments, cwd=plan.parent, PYTHONPATH=f"{plan.parent}:{ROOT}")
        assert done.returncode == 0, done.stderr


def test_results_go_to_stdout_and_nothing_moves_on_stderr_without_a_terminal(folder):
    done = in_a_process("analyze", "model.py", "--device", "cpu", "--format", "json", cwd=folder)
    assert json.loads(done.stdout)["device"] == "cpu"
    assert done.stderr == "wrote offplan.plan.yaml\n"


def test_a_reader_that_stops_early_is_not_an_error(folder):
    done = subprocess.run(
        f"{sys.executable} -m offplan analyze model.py --device cpu | head -c 1; "
        "exit ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
