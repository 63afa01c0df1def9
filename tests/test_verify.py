"""``offplan verify``: every built-in case on the CPU, what it claims for a GPU, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fuzz_files import plan_of
from torch.nn.attention import sdpa_kernel
from typer.testing import CliRunner

from offplan.budget import EVERYTHING
from offplan.cli import app
from offplan.errors import UsageError
from offplan.graph import TargetRef
from offplan.measured import Machine
from offplan.plan import dump_plan, make_plan
from offplan.replay import case_views, claims, selftest, verifying
from offplan.replay.cases import CASES, Case, find_cases
from offplan.replay.claims import Evidence, unmet
from offplan.replay.selftest import Asked, verify_one
from offplan.report.verify import render_verified
from offplan.trace._torch import reset_dynamo
from offplan.trace.capture import TraceOptions, trace
from offplan.verified import CaseResult, Difference, Verified, verified

UNSTEADY = Path(__file__).parent / "targets" / "unsteady.py"
GOLDEN = Path(__file__).parent / "verify.txt"
BROKEN = Path(__file__).parent / "targets" / "broken.py"
# Those whose graphs Inductor makes quite otherwise; all of them take minutes.
BY_INDUCTOR = ("base-and-views", "gaps-are-packed", "shared-graph")
ISSUE = {
    "a slice that is the last holder": "slice-of-a-larger-buffer",
    "an alias of an output": "alias-of-an-output",
    "a square transpose": "square-transpose",
    "base and several views": "base-and-views",
    "interleaved QKV": "interleaved-qkv",
    "offset-1 labels": "shifted-labels",
    "expanded": "expanded",
    "stepped": "stepped",
    "unfolded": "unfolded",
    "zero-size": "zero-size",
    "padded and broadcast bias": "padded-bias",
    "conjugate": "conjugate-view",
    "negative": "negative-view",
    "real of complex": "real-view-of-complex",
    "dtype views": "dtype-view",
    "channels-last": "channels-last",
    "saved twice": "saved-twice",
    "in-place after save": "in-place-after-save",
    "batch-norm statistics": "batch-norm",
    "sort and max-pool": "sort-and-max-pool",
    "bool masks": "bool-mask",
    "dropout, math": "math-attention",
    "dropout, flash": "flash-attention",
    "dropout, efficient": "efficient-attention",
    "dropout, cuDNN": "cudnn-attention",
    "a CPU tensor": "cpu-tensor",
    "last produced, first consumed": "last-made-first-used",
    "shared blocks under checkpointing": "shared-checkpointed",
    "no backward": "graph-without-backward",
}


def asked(name: str, compiler: str = "aot_eager", device: str = "cpu", repeats: int = 2) -> Asked:
    (case,) = find_cases([name])
    return Asked(
        name=name,
        target=case.target,
        is_case=True,
        device=device,
        compiler=compiler,
        repeats=repeats,
    )


def of_target(spec: str, **params: str) -> Asked:
    target = TargetRef(spec, params)
    return Asked(
        name=spec, target=target, is_case=False, device="cpu", compiler="aot_eager", repeats=1
    )


# --- cases ----------------------------------------------------------------------------------------


def test_what_has_to_be_there_is_there():
    assert set(ISSUE.values()) <= {case.name for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_says_in_one_line_what_it_is_about_and_claims_something(case):
    assert case.about.endswith(".")
    assert case.claims


@pytest.mark.parametrize("name", [case.name for case in CASES if case.only != "cuda"])
def test_a_case_on_the_cpu_shows_its_subject_and_changes_no_bit(name):
    found = verify_one(asked(name))
    assert (found.outcome, found.unmet, found.message, found.differences) == ("same", (), "", ())
    assert found.transfers > 0
    assert found.steps == 2 * 5 * selftest.STEPS
    # A loss, three gradients of the first layer and of the input, the input, the output, kept too.
    assert found.tensors >= 7


@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_a_case_compiled_by_inductor_changes_no_bit(name):
    found = verify_one(asked(name, "inductor", repeats=1))
    assert (found.outcome, found.unmet, found.message, found.differences) == ("same", (), "", ())


@pytest.mark.parametrize(
    ("case", "compiler"),
    [
        pytest.param(case, compiler, id=f"{case.name}-{compiler}")
        for number, case in enumerate(c for c in CASES if c.only != "cpu")
        # Inductor takes as long as all others together: every third here, all on a GPU.
        for compiler in (("aot_eager", "inductor") if number % 3 == 0 else ("aot_eager",))
    ],
)
def test_a_case_has_its_subject_in_the_graphs_for_a_gpu(case, compiler):
    kernel = nullcontext() if case.kernel is None else sdpa_kernel(selftest._BACKENDS[case.kernel])
    options = TraceOptions("cuda", "h200", partitioner=case.partitioner, compiler=compiler)
    reset_dynamo()
    with kernel:
        facts = trace(case.target.spec, case.target.params, options)
    plan = make_plan(facts, budget=EVERYTHING, min_bytes=0)
    assert unmet(case.claims, Evidence(facts, plan)) == ()


@pytest.mark.cuda
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_on_the_gpu_changes_no_bit(name, compiler):
    found = verify_one(asked(name, compiler, "cuda"))
    assert found.outcome in ("same", "not here"), found


def test_a_case_whose_graphs_lost_their_subject_fails(monkeypatch):
    wrong = Case(case_views.stepped, (claims.moves_view("expanded", claims.is_expanded),))
    monkeypatch.setattr(selftest, "CASES", (wrong,))
    found = verify_one(asked("stepped"))
    assert found.outcome == "does not test what it says"
    assert found.unmet == ("a moved view that is expanded",)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_case_claims_is_not_true_of_a_plain_layer(case, plain_layer):
    """So that claims can fail."""
    if case.only == "cuda":
        pytest.skip("its kernel is in no graph for the CPU")
    if case.name == "last-made-first-used":
        # It is true of most graphs in which anything moves.
        nothing = make_plan(plain_layer.facts)
        plain_layer = Evidence(plain_layer.facts, nothing)
    assert unmet(case.claims, plain_layer)


@pytest.fixture(scope="module")
def plain_layer() -> Evidence:
    reset_dynamo()
    facts = trace(f"{BROKEN.with_name('working.py')}:plain", {}, TraceOptions("cpu"))
    return Evidence(facts, make_plan(facts, budget=EVERYTHING, min_bytes=0))


def test_a_case_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="no case 'unfold'"):
        find_cases(["unfolded", "unfold"])


# --- the user's target ----------------------------------------------------------------------------


def test_a_target_goes_the_same_way():
    found = verify_one(of_target(f"{BROKEN.with_name('working.py')}:batch_norm_train"))
    assert (found.outcome, found.message) == ("same", "")
    assert found.transfers > 0


def test_a_large_tensor_is_compared_by_its_fingerprint(monkeypatch):
    monkeypatch.setattr(selftest, "EXACT_BYTES", 64)
    assert verify_one(of_target(f"{BROKEN.with_name('working.py')}:plain")).outcome == "same"
    drifting = verify_one(of_target(str(UNSTEADY), steady_calls="6"))
    assert drifting.outcome == "different"


def test_kernels_that_do_not_repeat_are_said_to():
    found = verify_one(of_target(str(UNSTEADY)))
    assert found.outcome == "does not repeat"
    assert found.difference_count > 0


def test_a_difference_names_pace_step_and_tensor_and_how_far_off_it_is():
    # Two sessions of three steps are steady: all without the plan, and the first two with it.
    found = verify_one(of_target(str(UNSTEADY), steady_calls="6"))
    assert found.outcome == "different"
    first = found.differences[0]
    assert (first.what, first.pace, first.repeat, first.step) == ("loss", "slow to the host", 0, 0)
    assert (first.elements, first.of_elements) == (1, 1)
    assert first.off_by is not None
    assert first.off_by > 0


def test_a_target_that_cannot_run_is_a_failure_that_says_why():
    found = verify_one(of_target("gone.py"))
    assert (found.outcome, found.message.splitlines()[0]) == ("failed", "there is no file gone.py")


# --- what it comes to -----------------------------------------------------------------------------


def result(outcome: str, **more: Any) -> CaseResult:
    return CaseResult(
        name=outcome.replace(" ", "-"),
        about="It is about something.",
        target=TargetRef("model.py", {}),
        outcome=outcome,
        **more,
    )


def whole(*cases: CaseResult) -> Verified:
    return verified(
        cases,
        device="cpu",
        machine=None,
        compiler="aot_eager",
        repeats=2,
        steps_per_session=3,
        version="1",
    )


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((), 0),
        (("same", "not here"), 0),
        (("same", "failed"), 1),
        (("does not test what it says",), 1),
        (("failed", "different"), 3),
        (("does not repeat",), 3),
    ],
)
def test_the_exit_code_says_what_was_found(outcomes, code):
    assert whole(*map(result, outcomes)).exit_code == code


def test_the_report_names_what_differs():
    off = Difference(
        what="gradient",
        name="first.weight",
        pace="slow",
        repeat=1,
        step=2,
        elements=3,
        of_elements=4096,
        off_by=0.25,
    )
    bytes_ = Difference(
        what="bytes to the host", pace="fast", repeat=0, expected="1,024", found="512"
    )
    found = whole(
        result("same", moved_bytes=4096, transfers=3, steps=30),
        result("different", difference_count=9, differences=(off, bytes_)),
        result("does not test what it says", unmet=("a moved view that is expanded",)),
        result("failed", message="no\n  at: model.py:3"),
        result("not here", message="only where --device is cuda"),
    )
    assert render_verified(found, "text", 80) == GOLDEN.read_text()
    assert json.loads(render_verified(found, "json", 80))["schema_version"] == 1
    assert "## different: DIFFERENT" in render_verified(found, "markdown", 80)


# --- the command ----------------------------------------------------------------------------------


def invoke(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["verify", *words])
    return found.exit_code, found.stdout, found.stderr


def test_the_command_verifies_cases_and_a_target_and_writes_what_it_found(tmp_path):
    file = tmp_path / "verified.json"
    target = f"{BROKEN.with_name('working.py')}:plain"
    words = ("--case", "stepped", "--case", "cudnn-attention", "--repeats", "1", "-o", str(file))
    code, text, said = invoke(target, "--device", "cpu", "--jobs", "1", *words)
    assert (code, said) == (0, f"wrote {file}\n")
    assert "3 cases: 2 same, 1 not here" in text
    found = msgspec.json.decode(file.read_bytes(), type=Verified)
    assert [case.outcome for case in found.cases] == ["same", "not here", "same"]
    assert found.machine is not None
    assert found.machine.torch == torch.__version__.split("+")[0]


def test_an_error_in_one_case_leaves_the_others_and_ends_in_1():
    words = ("--case", "stepped", "--repeats", "1", "--jobs", "1")
    code, text, _ = invoke("gone.py", "--device", "cpu", *words)
    assert code == 1
    assert "2 cases: 1 same, 1 FAILED" in text
    assert "there is no file gone.py" in text


def test_a_difference_ends_in_3_and_json_is_pure():
    words = ("-p", "steady_calls=6", "--no-cases", "--format", "json", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, "-m", "offplan", "verify", str(UNSTEADY), "--device", "cpu", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["cases"][0]["outcome"] == "different"


def test_a_case_that_brings_its_process_down_fails_alone(tmp_path):
    ends = tmp_path / "ends.py"
    ends.write_text("import os\nos._exit(7)\n")
    code, text, _ = invoke(str(ends), "--device", "cpu", "--case", "stepped", "--repeats", "1")
    assert code == 1
    assert "2 cases: 1 same, 1 FAILED" in text
    assert "its process was ended" in text


def test_cases_are_listed_with_one_line_each():
    code, text, _ = invoke("--list")
    assert code == 0
    for case in CASES:
        assert case.name in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--case", "gone"), "there is no case 'gone'"),
        (("--no-cases",), "nothing to verify"),
        (("--no-cases", "--case", "stepped", "model.py"), "--case and --no-cases"),
        (("-p", "batch=1"), "-p is for a target"),
        (("model.graph.json",), "saved graph"),
        (("--target", "model.py"), "--target is for plan files, and none is named"),
        (("model.py", "--target", "model.py"), "--target is for plan files, and model.py is none"),
    ],
)
def test_wrong_usage_is_one_message(words, message):
    code, text, said = invoke("--device", "cpu", *words)
    assert (code, text) == (2, "")
    assert message in said


@pytest.fixture
def asked_for(monkeypatch, tmp_path) -> list[TargetRef]:
    """The targets that the command goes on to verify, none of which is run; in a folder with a
    model, and plans of it and of others in a folder of their own."""
    here = tmp_path / "here"
    (here / "plans").mkdir(parents=True)
    (here / "model.py").write_text("def build(): ...\n")
    for name, spec in (("mine", "model.py"), ("theirs", "shutil:rmtree")):
        target = TargetRef(spec, {"path": "/home"})
        made = msgspec.structs.replace(plan_of(1), target=target)
        (here / "plans" / f"{name}.plan.yaml").write_bytes(dump_plan(made))
    monkeypatch.chdir(here)
    targets: list[TargetRef] = []

    def verify_all(cases: Any, found: list[TargetRef], *rest: Any) -> Verified:
        targets.extend(found)
        return whole()

    monkeypatch.setattr(verifying, "verify_all", verify_all)
    return targets


def test_a_plan_that_names_a_target_elsewhere_is_refused_until_that_is_typed(asked_for):
    plan = "plans/theirs.plan.yaml"
    code, text, said = invoke(plan, "--no-cases", "--device", "cpu")
    assert (code, text, asked_for) == (1, "", [])
    assert "the plan names a target outside its folder: shutil:rmtree (path='/home')" in said
    assert f"offplan verify {plan} --target shutil:rmtree" in said
    code, _, said = invoke(plan, "--no-cases", "--device", "cpu", "--target", "shutil:rmtree")
    assert (code, said) == (0, "")
    assert asked_for == [TargetRef("shutil:rmtree", {"path": "/home"})]


def test_a_plan_that_names_a_target_below_here_is_announced(asked_for):
    plan = "plans/mine.plan.yaml"
    code, _, said = invoke(plan, "--no-cases", "--device", "cpu")
    assert (code, said) == (0, "note: the plan names a target outside its folder: model.py\n")
    assert [target.spec for target in asked_for] == ["model.py"]
    code, _, said = invoke(plan, "--no-cases", "--device", "cpu", "--target", "other.py")
    assert code == 2
    assert f"--target other.py: {plan} is a plan of model.py" in said


def test_without_a_cpp_compiler_inductor_is_refused_for_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(verifying, "has_cpp_compiler", lambda: False)
    found = verifying._machine_of("cpu", "inductor")
    assert isinstance(found, tuple)
    assert found[0] == "Inductor finds no C++ compiler here, and needs one for the CPU"
    assert isinstance(verifying._machine_of("cpu", "aot_eager"), Machine)


def test_without_a_gpu_there_is_one_message():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, text, said = invoke("--case", "stepped")
    assert (code, text) == (1, "")
    assert "there is no cuda device to verify on" in said
