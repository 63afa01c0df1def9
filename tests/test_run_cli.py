"""``offplan run``: what it measures and prints, what it refuses, and that nothing is left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_measured import fingerprint, no_plan, out_of_memory, result, steps
from typer.testing import CliRunner, Result

from offplan.budget import EVERYTHING
from offplan.cli import app
from offplan.errors import BudgetError
from offplan.graph import GraphFacts
from offplan.measured import HostLimit, HostLimits, Measurement, expected, load_measurement
from offplan.memory import Conditions
from offplan.plan import Plan, load_plan, write_plan
from offplan.replay import measure as measuring
from offplan.replay.arm import answer
from offplan.replay.layout import laid_out_bytes
from offplan.replay.limits import MARGIN_BYTES, amount
from offplan.replay.measure import Replays, Wanted, plans_to_replay, without_transfers
from offplan.replay.messages import Failure, read_answer, write_message
from offplan.units import format_size

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "sample_graphs" / "saved_view.py"
MODEL = """
import torch

def build(width: int = 64):
    return torch.nn.Linear(width, width), (torch.randn(32, width),)
"""
# Runs a step, then waits in the forward of the next one, and says so.
WAITS = """
import os, time
import torch


class Waits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2048, 2048)
        self.calls = 0

    @torch.compiler.disable
    def wait(self, x):
        if type(x).__name__ != "FakeTensor":
            self.calls += 1
        if self.calls == 2:
            open("waiting", "w").write(str(os.getpid()))
            time.sleep(120)
        return x

    def forward(self, x):
        return self.wait(self.linear(x).exp() * 2.0).exp()


def build():
    return Waits(), (torch.randn(2048, 2048),)
"""


COPIES = """
import shutil, sys
from pathlib import Path
number = len(list(Path('.').glob('asked.*')))
shutil.copy(sys.argv[1], f'asked.{number}')
shutil.copy(f'answer.{number}', sys.argv[2])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty current directory with a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # Where what was left behind would be.
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def plan(folder) -> Path:
    """A plan for the CPU that moves 8 MiB."""
    shutil.copy(SAMPLE, folder / "saved_view.py")
    made = offplan("analyze", "saved_view.py", "--device", "cpu", "--budget", "0")
    assert made.exit_code == 0, made.stderr
    return folder / "offplan.plan.yaml"


def offplan(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def answering(monkeypatch, program: str) -> None:
    """Have every process that measures run ``program`` in place of an arm."""

    def command(asked: Path, answered: Path) -> list[str]:
        return [sys.executable, "-c", program, str(asked), str(answered)]

    monkeypatch.setattr(measuring, "_command", command)


def left_over(folder: Path) -> list[Path]:
    # Torch keeps a folder of its own there.
    return list((folder / "temporary").glob("offplan*"))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_running(process: int) -> bool:
    try:
        # A zombie has ended; who should have waited for it is gone.
        return "zombie" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


# --- what it measures -----------------------------------------------------------------------------


def test_run_replays_the_default_plan_and_verifies_it(plan):
    found = offplan("run", "--steps", "2", "-o", "measured.json")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("offplan run ok: saved_view.py\n")
    assert "Verified: same bits" in found.stdout
    assert found.stderr == "wrote measured.json\n"
    measured = load_measurement(Path("measured.json"))
    assert [arm.role for arm in measured.arms] == ["no plan", "plan"]
    assert measured.digest == load_plan(plan).digest
    assert [len(arm.measured) for arm in measured.arms] == [2, 2]
    assert measured.plan.to_host_bytes == 8 * 1024**2
    assert measured.no_plan.forward_end_bytes - measured.plan.forward_end_bytes == 8 * 1024**2
    assert left_over(plan.parent) == []


# --- budgets --------------------------------------------------------------------------------------

# Its activations of 256 KiB are most of its peak.
DEEP = """
import torch

def build(layers: int = 4, width: int = 64):
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
              for _ in range(layers)]
    return torch.nn.Sequential(*blocks), (torch.randn(1024, width),)
"""


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    """Traces and arms run in this process, one after another; and a model with layers."""

    def answer_here(processes: Any, request: Any, name: str) -> Any:
        found = answer(request)
        assert not isinstance(found, Failure), found
        return found

    monkeypatch.setattr(measuring._Processes, "answer", answer_here)
    (folder / "deep.py").write_text(DEEP)
    return folder


def test_a_target_is_planned_for_first_and_rule_sets_are_compared(here):
    shutil.copy(SAMPLE, here / "saved_view.py")
    found = offplan(
        *("run", "saved_view.py", "-p", "batch=128", "--device", "cpu", "--budget", "0"),
        *("--compare", "no-view,whole-storage", "--steps", "1", "--repeat", "--format", "json"),
    )
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["params"] == {"batch": "128"}
    # The only saved value is a view, which the oldest rule set leaves on the device.
    moved = {row["name"]: row["moved_bytes"] for row in document["compared"]}
    assert moved == {"no plan": 0, "no-view": 0, "whole-storage": 16 * 1024**2}
    assert document["rules"] == "whole-storage"
    assert document["arms"][-1]["role"] == "control"
    assert document["verification"]["compared"] == ["plan (no-view)", "plan (whole-storage)"]
    assert not Path("offplan.plan.yaml").exists()


def replayed(*arguments: str, exit_code: int = 0) -> tuple[Measurement, str]:
    """A run with everything over a byte movable: the measurement, and what was printed."""
    found = offplan("run", "deep.plan.yaml", "--steps", "1", "-o", "measured.json", *arguments)
    assert found.exit_code == exit_code, found.stdout + found.stderr
    return load_measurement(Path("measured.json")), " ".join(found.stdout.split())


def planned(*arguments: str) -> Plan:
    found = offplan(
        *("analyze", "deep.py", "--device", "cpu", "--min-size", "1", "-o", "deep.plan.yaml"),
        *arguments,
    )
    assert found.exit_code == 0, found.stderr
    return load_plan(Path("deep.plan.yaml"))


@pytest.mark.parametrize("budget", ["2MB", "85%", "floor", "0"])
def test_a_run_within_a_budget_measures_the_peak_that_was_predicted(here, budget):
    plan = planned("--budget", budget)
    assert plan.transfers
    found, said = replayed()
    assert found.plan.peak_allocated_bytes == plan.predicted.plan.peak_bytes
    assert found.no_plan.peak_allocated_bytes == plan.predicted.no_plan.peak_bytes
    assert found.plan.forward_end_bytes == plan.predicted.plan.forward_end_bytes
    assert (found.budget, found.over_budget_bytes, found.ok) == (plan.budget, 0, True)
    if found.budget:
        assert found.plan.peak_allocated_bytes <= found.budget
    assert found.plan.to_host_bytes == plan.moved_bytes > 0
    assert found.plan.expected == expected(plan)
    assert found.no_plan.expected == expected(without_transfers(plan))
    assert re.search(r"peak allocated [\d.]+ MB [\d.]+ MB -[\d.]+ [kM]B [\d.]+ MB none", said)
    assert "without a plan (as measured)" in said
    assert "Verified: same bits" in said


def test_a_budget_of_a_run_plans_again_from_the_choices_of_the_plan(here):
    planned()
    found, said = replayed("--budget", "85%")
    assert (found.asked, found.min_bytes) == ("85%", 1)
    assert found.plan.peak_allocated_bytes <= found.budget
    assert found.budget == int(0.85 * found.no_plan.peak_allocated_bytes)
    assert re.search(r"minimum 1, budget 85%: [\d.]+ MB", said)


def test_a_budget_that_fits_already_moves_nothing(here):
    planned()
    found, said = replayed("--budget", "1GB")
    assert found.ok
    assert found.plan.to_host_bytes == 0
    assert "minimum 1, budget 1.00 GB" in said


def test_an_infeasible_budget_of_a_run_exits_3_and_its_floor_then_works(here):
    planned()
    refused = offplan("run", "deep.plan.yaml", "--budget", "100kB", "-o", "measured.json")
    assert (refused.exit_code, refused.stdout) == (3, "")
    words = re.search(r"the floor is .*--budget (\d+) is the least", refused.stderr, re.DOTALL)
    assert words, refused.stderr
    assert not Path("measured.json").exists()
    found, _ = replayed("--budget", words[1])
    assert found.plan.peak_allocated_bytes == found.budget == int(words[1])


def test_a_measured_peak_over_the_budget_exits_3_and_says_by_how_much(folder, monkeypatch):
    (folder / "deep.py").write_text(DEEP)
    plan = planned("--budget", "floor")
    assert plan.budget is not None
    answering(monkeypatch, COPIES)
    moved, count = plan.moved_bytes, len(plan.transfers)
    for number, (peak, size) in enumerate([(2_000_000, 0), (plan.budget + 4096, moved)]):
        each = steps(1.0, 1.0, moved=size, count=count if size else 0, peak_allocated_bytes=peak)
        write_message(Path(f"answer.{number}"), result(no_plan(role="plan", steps=each)))
    found, said = replayed(exit_code=3)
    assert (found.ok, found.over_budget_bytes) == (False, 4096)
    assert found.verification is not None
    assert found.verification.ok
    assert said.startswith("offplan run failed: deep.py")
    assert "budget exceeded: the measured peak is 4.10 kB over it" in said


# --- which plans it replays -----------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """Traces are made in this process; the devices that they were for."""
    devices = []

    def trace_here(choices: Any, verify: bool, on_phase: Any) -> GraphFacts:
        from offplan.trace.capture import TraceOptions, trace

        devices.append(choices.device)
        options = TraceOptions(
            choices.device, None, choices.attention, choices.partitioner, choices.compiler
        )
        return trace(choices.target.spec, choices.target.params, options)

    monkeypatch.setattr(measuring, "_traced", trace_here)
    return devices


def test_a_plan_is_replayed_as_it_is_where_nothing_else_is_asked_for(plan, traced):
    made = load_plan(plan)
    for wanted in (
        Wanted(),
        Wanted(budget=EVERYTHING),
        Wanted(device="cpu", rules="whole-storage"),
    ):
        assert plans_to_replay(made, wanted) == Replays((made,), made, without_transfers(made))
    assert traced == []


def test_budget_0_plans_again_from_the_choices_of_the_plan(plan, traced):
    made = load_plan(plan)
    wanted = Wanted(budget=EVERYTHING, verify=False)
    replays = plans_to_replay(without_transfers(made), wanted)
    assert replays == Replays((made,), made, without_transfers(made))
    assert traced == ["cpu"]


def test_what_is_planned_to_be_verified_is_predicted_for_deterministic_kernels(plan, traced):
    made = load_plan(plan)
    found = plans_to_replay(without_transfers(made), Wanted(budget=EVERYTHING)).plan
    assert found.predicted.conditions == Conditions(deterministic=True)
    assert found.transfers == made.transfers


def test_other_actions_plan_again(plan, traced):
    made = load_plan(plan)
    found = plans_to_replay(made, Wanted(actions=("keep", "recompute"), verify=False)).plan
    assert (found.actions, found.budget, found.transfers) == (("keep", "recompute"), 0, ())
    again = plans_to_replay(found, Wanted(budget=EVERYTHING, verify=False)).plan
    assert again == found
    assert traced == ["cpu"]
    assert plans_to_replay(found, Wanted(actions=made.actions, verify=False)).plan == made


def test_what_is_no_set_of_actions_is_refused(plan, traced):
    found = CliRunner().invoke(app, ["run", str(plan), "--actions", "offload"])
    assert found.exit_code == 2
    assert "not keep, and others of recompute, offload" in found.stderr
    assert traced == []


def test_other_rules_plan_again(plan, traced):
    replays = plans_to_replay(load_plan(plan), Wanted(rules="no-view"))
    assert (replays.plan.rules, replays.plan.budget, replays.plan.transfers) == ("no-view", 0, ())


def test_a_plan_for_cuda_is_planned_again_for_the_cpu_and_says_so(plan, traced):
    made = msgspec.structs.replace(load_plan(plan), device="cuda", gpu="NVIDIA H200")
    replays = plans_to_replay(made, Wanted(device="cpu", verify=False))
    assert replays.plan == load_plan(plan)
    assert replays.notes == ("the plan is for cuda; it was planned again for cpu",)


def test_planning_again_says_what_changed_since(plan, traced):
    old = msgspec.structs.replace(
        without_transfers(load_plan(plan)), digest="sha256:0", torch="2.0"
    )
    replays = plans_to_replay(old, Wanted(budget=EVERYTHING))
    (note,) = replays.notes
    assert note.startswith("planned again, from the target as it is now: ")
    assert "torch was 2.0" in note


def test_the_plan_of_its_own_rule_set_is_the_one_reported_on(plan, traced):
    made = load_plan(plan)
    compared = ("whole-storage", "no-view", "no-view")
    replays = plans_to_replay(made, Wanted(compare=compared, verify=False))
    assert [each.rules for each in replays.plans] == ["whole-storage", "no-view"]
    assert replays.plan == made
    others = plans_to_replay(made, Wanted(compare=("no-view", "last-holder")))
    assert others.plan.rules == "last-holder"


def test_a_plan_that_moves_nothing_says_what_would_be_moved(plan, monkeypatch):
    answering(monkeypatch, COPIES)
    for number in range(2):
        write_message(Path(f"answer.{number}"), result(no_plan(role="plan")))
    write_plan(plan, without_transfers(load_plan(plan)))
    found = offplan("run")
    assert found.exit_code == 0, found.stderr
    said = "no budget: moves nothing (--budget 0 would move 8.39 MB)"
    assert said in " ".join(found.stdout.split())


# --- answers of made-up processes -----------------------------------------------------------------


def test_what_differs_is_named_and_exits_3(plan, monkeypatch):
    answering(monkeypatch, COPIES)
    for number, (moved, bits) in enumerate([(0, "a"), (8 * 1024**2, "b"), (0, "a")]):
        arm = no_plan(role="plan", steps=steps(1.0, 1.0, moved=moved, count=min(moved, 1)))
        write_message(Path(f"answer.{number}"), result(arm, fingerprint(bits)))
    found = offplan("run", "-o", "measured.json")
    assert found.exit_code == 3, found.stderr
    assert "Verification failed: 2 differences" in found.stdout
    assert "gradient weight" in found.stdout
    # A control was run, to see whether kernels repeat, and the result is written all the same.
    assert len(list(Path().glob("asked.*"))) == 3
    assert not load_measurement(Path("measured.json")).ok


def test_a_plan_that_runs_out_of_memory_exits_3(plan, monkeypatch):
    answering(monkeypatch, COPIES)
    for number in range(2):
        write_message(Path(f"answer.{number}"), result(out_of_memory(no_plan(role="plan"))))
    found = offplan("run")
    assert found.exit_code == 3, found.stderr
    assert found.stdout.count("out of memory in the backward of step 0") == 2


def test_an_error_of_an_arm_is_the_commands_error(plan, monkeypatch):
    answering(monkeypatch, COPIES)
    failure = Failure(exit_code=1, what="no luck", where="model.py:3", fix="try again")
    write_message(Path("answer.0"), failure)
    found = offplan("run")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == "error: no luck\n  at: model.py:3\n  try: try again\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import sys; print('first'); sys.exit('could not load libfoo.so\\n')",
            "'no plan' ended with exit code 1: could not load libfoo.so",
        ),
        ("import os; os.kill(os.getpid(), 9)", "'no plan' was ended by SIGKILL"),
        ("pass", "'no plan' ended with exit code 0"),
    ],
)
def test_a_process_that_dies_is_one_message_with_its_last_words(plan, monkeypatch, program, words):
    answering(monkeypatch, program)
    found = offplan("run")
    assert (found.exit_code, found.stdout) == (1, "")
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert left_over(plan.parent) == []


def test_traceback_shows_what_the_process_said(plan, monkeypatch):
    answering(monkeypatch, "import sys; sys.exit('first line\\nlast line')")
    assert "first line" in offplan("run", "--traceback").stderr


def test_a_process_does_not_outlive_an_interruption(plan, monkeypatch):
    answering(
        monkeypatch, "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )

    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], *arguments: Any) -> int:
        if arguments:
            return wait(process, *arguments)
        assert wait_for(lambda: Path("pid").exists() and Path("pid").read_text() != "")
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    found = offplan("run")
    assert (found.exit_code, found.stderr) == (130, "error: interrupted\n")
    assert not is_running(int(Path("pid").read_text()))


def test_the_command_itself_does_without_torch(plan):
    (plan.parent / "torch.py").write_text("raise ImportError('torch is for the arms')\n")
    done = subprocess.run(
        [sys.executable, "-m", "offplan", "run"],
        cwd=plan.parent,
        env={**os.environ, "PYTHONPATH": f"{plan.parent}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the process of 'no plan' ended with exit code 1: Import")


# --- interruptions of real ones -------------------------------------------------------------------


@contextmanager
def waiting(folder: Path, *source: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``offplan run`` in the middle of a step, and the process that runs it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "offplan", "run", *source],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for(lambda: Path("waiting").exists() or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        assert wait_for(lambda: Path("waiting").read_text() != "")
        yield process, int(Path("waiting").read_text())
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_in_the_middle_of_a_step_ends_the_arm_and_is_one_message(folder):
    (folder / "waits.py").write_text(WAITS)
    with waiting(folder, "waits.py", "--device", "cpu", "--budget", "0") as (process, arm):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert errors == "error: interrupted\n"
    assert not is_running(arm)
    assert left_over(folder) == []


def test_an_arm_ends_with_a_command_that_is_killed(folder):
    (folder / "waits.py").write_text(WAITS)
    made = offplan("analyze", "waits.py", "--device", "cpu", "--budget", "0")
    assert made.exit_code == 0, made.stderr
    with waiting(folder) as (process, arm):
        process.kill()
        process.wait()
        assert wait_for(lambda: not is_running(arm), 20)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["missing.plan.yaml"], 1, "cannot read missing.plan.yaml"),
        (["missing.py", "--device", "cpu"], 1, "there is no file missing.py"),
        (["model.graph.json"], 2, "a replay needs the model"),
        (["-p", "width=3"], 2, "takes no -p"),
        (["--budget", "much"], 2, "not a budget"),
        (["--profile", "abacus"], 2, "no profile is known"),
        (["--profile", "missing.yaml"], 1, "cannot read missing.yaml"),
        (["--compare", "oldest"], 2, "is not a rule set"),
        (["model.py", "--device", "cpu", "--compare", "no-view"], 2, "add --budget 0"),
        (["--host-budget", "much"], 2, "is not a size"),
        (["-o", "model.py"], 1, "is not an offplan measurement"),
        (["-o", "no/such/folder/x.json"], 1, "there is no directory"),
    ],
)
def test_a_mistake_is_one_message(plan, arguments, exit_code, words):
    found = offplan("run", *arguments)
    assert found.exit_code == exit_code, found.stdout + found.stderr
    assert words in found.stderr
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


def test_a_machine_without_a_gpu_names_the_cpu(plan):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    found = offplan("run", "model.py")
    assert found.exit_code == 1
    assert "there is no GPU to replay on" in found.stderr
    assert "--device cpu" in found.stderr


@pytest.mark.cuda
def test_a_sample_is_replayed_on_the_gpu(folder):
    shutil.copy(SAMPLE, folder / "saved_view.py")
    found = offplan("run", "saved_view.py", "--budget", "0", "--steps", "2", "-o", "measured.json")
    assert found.exit_code == 0, found.stdout + found.stderr
    plan = load_measurement(Path("measured.json")).plan
    assert plan.parts is not None
    assert plan.parts.workspace is not None
    # The step that looks at the parts allocates what the others do.
    assert plan.parts.peak_bytes == plan.peak_allocated_bytes


def test_answers_are_read_as_they_were_written(tmp_path):
    found = result(no_plan())
    write_message(tmp_path / "answer.json", found)
    assert read_answer(tmp_path / "answer.json") == found


# --- host memory ----------------------------------------------------------------------------------


def short_of(left_bytes: int, name: str = "cgroup") -> HostLimits:
    """A machine on which one limit leaves that much after what is kept free."""
    margin = 0 if name == "ulimit -l" else MARGIN_BYTES
    limit = HostLimit(
        name=name,  # type: ignore[arg-type]
        left_bytes=left_bytes + margin,
        limit_bytes=2 * 1024**3,
        where="memory.max",
    )
    return HostLimits(limits=(limit,))


def test_a_plan_that_fits_into_host_memory_is_replayed_as_it_is(plan, traced):
    made = load_plan(plan)
    needed = laid_out_bytes(made.transfers)
    for limits in (HostLimits(), short_of(needed)):
        assert plans_to_replay(made, Wanted(limits=limits)) == Replays(
            (made,), made, without_transfers(made)
        )
    assert plans_to_replay(made, Wanted(host_budget_bytes=needed)).plan == made
    assert traced == []


def test_a_plan_for_which_host_memory_is_short_is_made_for_what_there_is(here, traced):
    made = planned("--budget", "0")
    room = 700_000
    found = plans_to_replay(made, Wanted(limits=short_of(room), verify=False))
    assert 0 < laid_out_bytes(found.plan.transfers) <= room
    assert found.plan.moved_bytes < made.moved_bytes
    assert found.plan.predicted.plan.peak_bytes > made.predicted.plan.peak_bytes
    (note,) = found.notes
    moved, peaks = (
        (format_size(value(found.plan)), format_size(value(made)))
        for value in (lambda p: p.moved_bytes, lambda p: p.predicted.plan.peak_bytes)
    )
    leaves = f"cgroup leaves {amount(room + MARGIN_BYTES)} of 2GiB (memory.max)"
    assert note == (
        f"host pinned memory: {leaves}, so that {moved[0]} move, not {moved[1]}, "
        f"for a predicted peak of {peaks[0]}, not {peaks[1]}"
    )


def test_the_least_of_the_host_budget_and_the_limits_counts(here, traced):
    made = planned("--budget", "0")
    wanted = Wanted(limits=short_of(700_000), host_budget_bytes=400_000, verify=False)
    found = plans_to_replay(made, wanted)
    assert 0 < laid_out_bytes(found.plan.transfers) <= 400_000
    assert "--host-budget is 400.00 kB, so that" in found.notes[0]
    wanted = Wanted(limits=short_of(400_000), host_budget_bytes=700_000, verify=False)
    found = plans_to_replay(made, wanted)
    assert 0 < laid_out_bytes(found.plan.transfers) <= 400_000
    assert "cgroup leaves" in found.notes[0]


def test_no_host_memory_at_all_moves_nothing_and_says_so(here, traced):
    made = planned("--budget", "0")
    found = plans_to_replay(made, Wanted(limits=short_of(0), verify=False))
    assert found.plan.transfers == ()
    assert "so that 0 B move" in found.notes[0]


def test_a_budget_that_needs_more_host_memory_than_there_is_is_refused(here, traced):
    floor = planned("--budget", "floor").predicted.floor_bytes
    made = planned("--budget", str(floor))
    with pytest.raises(BudgetError, match=r"with [\d.]+ kB of host memory: the floor is"):
        plans_to_replay(made, Wanted(limits=short_of(400_000), verify=False))


def test_a_lock_limit_counts_for_what_is_pinned_by_register_on_a_gpu_only(plan, traced):
    made = load_plan(plan)
    limits = short_of(4096, "ulimit -l")
    assert plans_to_replay(made, Wanted(limits=limits)).plan == made
    for pin, most in (("register", 4096), ("torch", None), ("off", None), ("auto", None)):
        room = measuring._room("cuda", Wanted(limits=limits, pin=pin))  # type: ignore[arg-type]
        assert room.most_bytes == most
    words = measuring._room("cuda", Wanted(limits=limits)).words
    assert words.startswith("ulimit -l leaves 4KiB of 2GiB (raise it, or --pin torch")


def test_torch_needs_room_for_a_power_of_two(plan):
    made = load_plan(plan)
    needed = laid_out_bytes(made.transfers)
    assert needed == 8 * 1024**2
    wanted = [
        Wanted(limits=short_of(size + measuring._PROCESS_BYTES), pin="torch")
        for size in (needed - 1, needed, needed + 1)
    ]
    assert [measuring._room("cuda", each).has(made) for each in wanted] == [False, True, True]


def test_a_host_budget_that_binds_is_kept_to_and_reported(here):
    planned("--budget", "0")
    found, said = replayed("--host-budget", "600kB")
    assert found.ok
    assert 0 < found.plan.host_bytes <= 600_000
    assert (
        "note host pinned memory: --host-budget is 600.00 kB, so that 524.29 kB move, not" in said
    )


# --- hooks ----------------------------------------------------------------------------------------


def test_hooks_are_measured_against_no_offload_and_beside_the_replay(here):
    planned("--budget", "0")
    found, said = replayed("--engine", "hooks", "--repeat")
    assert found.engine == "hooks"
    assert [(arm.role, arm.engine) for arm in found.arms] == [
        ("no offload", "hooks"),
        ("hooks", "hooks"),
        ("plan", "compiled"),
        ("control", "hooks"),
    ]
    assert found.no_plan.to_host_bytes == 0
    assert found.plan.role == "hooks"
    assert found.plan.to_host_bytes > 0
    assert found.verification is not None
    assert found.verification.compared == ("hooks",)
    assert found.verification.control == "same"
    assert "Without offload and with it no offload hooks delta" in said
    assert "Hooks and replay compared" in said
    assert "not compared the replay: graphs may round otherwise than eager training does" in said


def test_a_way_to_pin_that_does_not_exist_is_refused(here):
    planned()
    found = offplan("run", "deep.plan.yaml", "--pin", "lock")
    assert found.exit_code == 2
