"""The command: exit codes, streams, files, and one message for each thing that goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offplan.cli import app
from offplan.plan import load_plan

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
    assert set(document["timing"]) == {"build_s", "capture_s", "partition_s", "analysis_s"}


def test_markdown_has_tables(folder):
    assert "| rule |" in analyze("model.py", "--format", "markdown").stdout


def test_budget_0_plans_transfers_and_no_budget_none(folder):
    analyze(str(SAMPLE), "-o", "none.plan.yaml")
    analyze(str(SAMPLE), "-o", "floor.plan.yaml", "--budget", "0")
    none, floor = load_plan(Path("none.plan.yaml")), load_plan(Path("floor.plan.yaml"))
    assert (none.budget, none.moved_bytes, none.transfers) == (None, 0, ())
    assert (floor.budget, floor.moved_bytes) == (0, 8 * 1024**2)
    assert len(floor.transfers) == 1


@pytest.mark.parametrize("budget", ["80GiB", "auto", "1"])
def test_other_budgets_say_that_they_come_later(folder, budget):
    result = analyze("model.py", "--budget", budget)
    assert result.exit_code == 2
    assert "later version" in result.stderr


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
