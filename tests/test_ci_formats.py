"""Reports for code hosts and CI servers, the GitHub action, and the pre-commit hook."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import msgspec
import pytest
import typer
import yaml
from facts_builder import FactsBuilder, MiB
from typer.testing import CliRunner, Result

from offplan.commands.gate import gate
from offplan.gate import GateResult, Thresholds, check, read_config
from offplan.plan import Plan, make_plan, write_plan
from offplan.report import GATE_FORMATS, render_gate
from offplan.report.findings import Checkout

ROOT = Path(__file__).parent.parent
SHAPE = (2048, 1024)
FLAT = (2048 * 1024,)
# What each view of an 8 MiB storage carries.
BYTES = 8 * MiB
ODD = 'a"b<c>&d\n]]>\x1b'


def layers(
    count: int = 3, line: int = 20, file: str = "src/model.py", module: str = "layers"
) -> Plan:
    """``count`` layers that each save two views holding each other, made by ``file``:``line``."""
    facts = FactsBuilder(spec="src/model.py:build", params={"layers": str(count)})
    region = facts.region()
    x = region.input("x", SHAPE)
    for number in range(count):
        name = f"{module}.{number}"
        y = region.op("aten.mm.default", [x], SHAPE, module=name, source=f"{file}:{line - 1}")
        region.save(
            region.view(y, FLAT, module=name, source=f"{file}:{line}"),
            region.view(y, SHAPE, target="aten.detach.default", module=name),
        )
    plan = make_plan(facts.build(), rules="last-holder", min_bytes=0)
    target = msgspec.structs.replace(plan.target, source="src/model.py:7")
    return msgspec.structs.replace(plan, target=target)


def gated(plan: Plan, alias: int = 0, **limits: Any) -> GateResult:
    return check(plan, Thresholds(max_alias_skipped=alias, **limits))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder ``app`` of a repository, with ``src/model.py`` in it."""
    (tmp_path / ".git").mkdir()
    source = tmp_path / "app" / "src" / "model.py"
    source.parent.mkdir(parents=True)
    source.write_text("model = None\n")
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path / "app"


def rendered(result: GateResult, format: str, folder: Path | None = None) -> Any:
    places = None if folder is None else Checkout.around(folder, "my.plan.yaml")
    text = render_gate(result, format, 80, places)
    return ElementTree.fromstring(text) if format == "junit" else json.loads(text)


# --- the peak -------------------------------------------------------------------------------------


def test_a_peak_at_the_limit_passes_and_one_byte_more_fails() -> None:
    plan = layers()
    peak_bytes = plan.predicted.plan.peak_bytes
    assert check(plan, Thresholds(max_peak=peak_bytes)).ok
    result = check(plan, Thresholds(max_peak=peak_bytes - 1))
    (failed,) = result.checks
    assert (failed.ok, failed.rule, failed.actual_bytes) == (False, None, peak_bytes)
    assert failed.largest == plan.predicted.plan.largest


def test_the_peak_checked_is_that_of_the_plan_with_what_it_moves() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", SHAPE)
    for _ in range(6):
        x = region.op("aten.mm.default", [x], SHAPE)
        region.save(x)
    built = facts.build()
    still, moved = make_plan(built), make_plan(built, budget=0)
    limit = moved.predicted.plan.peak_bytes
    assert limit < still.predicted.plan.peak_bytes
    assert check(moved, Thresholds(max_peak=limit)).ok
    result = check(still, Thresholds(max_peak=limit))
    assert not result.ok
    assert result.notes[1] == (
        "a plan with --budget 56MiB keeps the peak within the limit; the floor is 58.72 MB"
    )


def test_a_peak_that_no_plan_keeps_to_is_answered_with_the_floor() -> None:
    _, note = check(layers(), Thresholds(max_peak=MiB)).notes
    assert note.startswith("no budget keeps the peak within 1.05 MB: the least there is, the floor")


def test_the_peak_can_be_configured(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.offplan]\nmax-peak = "2GiB"\n')
    configured = read_config(tmp_path)
    assert configured.max_peak == 2 * 1024**3
    assert Thresholds(max_peak=0).or_else(configured).max_peak == 0


PEAK = """\
offplan gate failed: src/model.py:build layers=1 (last-holder)
  note  the peak, in aten.mul.Tensor, is made of 33.55 MB workspace, 8.39 MB
        inputs, 8.39 MB saved
  note  no budget keeps the peak within 1.05 MB: the least there is, the floor,
        is 50.33 MB
  check             limit    actual
  predicted peak  1.05 MB  50.33 MB  FAILED  49.29 MB too much

largest of what is live at the peak
  8.39 MB  x1  saved, from aten.mm.default
               in layers.0 (src/model.py:19)
"""


def test_a_peak_that_is_too_high_reads_so_at_80_columns() -> None:
    result = check(layers(1), Thresholds(max_peak=MiB))
    assert render_gate(result, "text", 80) == PEAK


def test_what_is_live_at_the_peak_is_a_warning_to_github_and_the_peak_an_error() -> None:
    lines = render_gate(check(layers(1), Thresholds(max_peak=MiB)), "github").splitlines()
    assert lines[0].startswith("::notice ")
    assert lines[2] == "::error title=offplan gate::predicted peak: 50.33 MB, limit 1.05 MB"
    assert lines[3] == (
        "::warning file=src/model.py,line=19,title=offplan gate%3A peak::8.39 MB x1 at the peak: "
        "saved, from aten.mm.default, in layers.0 (src/model.py:19)"
    )


# --- places ---------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_root_of_the_repository(checkout: Path) -> None:
    text = render_gate(gated(layers()), "github", 80, Checkout.around(checkout))
    assert "::error file=app/src/model.py,line=20," in text
    assert {each["location"]["path"] for each in rendered(gated(layers()), "gitlab", checkout)} == {
        "app/src/model.py"
    }


def test_without_a_repository_paths_are_relative_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    found = Checkout.around(tmp_path).place("a.py:3")
    assert found is not None
    assert found.path == "a.py"
    assert Checkout.around(tmp_path).place(f"{tmp_path}/a.py:3") == found


@pytest.mark.parametrize("source", ["", "torch/nn/modules.py:3", "/etc/hostname:1", "a.py", ":3"])
def test_a_line_outside_the_repository_has_no_place(checkout: Path, source: str) -> None:
    (checkout / "a.py").write_text("")
    assert Checkout.around(checkout).place(source) is None


def test_an_offender_of_an_installed_package_is_reported_at_the_targets_factory(
    checkout: Path,
) -> None:
    result = gated(layers(file="transformers/llama.py"))
    locations = [issue["location"] for issue in rendered(result, "gitlab", checkout)]
    assert locations[0] == {"path": "app/src/model.py", "lines": {"begin": 7}}
    # To GitHub it is an annotation without a file: there is no line to put it on.
    assert "file=" not in render_gate(result, "github", 80, Checkout.around(checkout))


def test_what_has_no_file_at_all_is_reported_at_the_plan(checkout: Path) -> None:
    plan = layers(file="transformers/llama.py")
    target = msgspec.structs.replace(plan.target, spec="package.module:build", source="")
    plan = msgspec.structs.replace(plan, target=target)
    (checkout / "my.plan.yaml").write_text("")
    (first, *_) = rendered(gated(plan), "gitlab", checkout)
    assert first["location"] == {"path": "app/my.plan.yaml", "lines": {"begin": 1}}


# --- GitLab ---------------------------------------------------------------------------------------


def test_gitlab_gets_an_issue_for_each_row_of_offenders(checkout: Path) -> None:
    issues = rendered(gated(layers()), "gitlab", checkout)
    assert len(issues) == 2
    assert issues[0]["description"] == (
        "25.17 MB x3 skipped under alias: float32[2097152] from aten.view.default, in layers.0-2 "
        "(src/model.py:20), held by saved detach (layers.0-2) (50.33 MB in all, limit 0 B)"
    )
    assert issues[0]["check_name"] == "offplan max-alias-skipped"
    assert issues[0]["location"] == {"path": "app/src/model.py", "lines": {"begin": 20}}
    for issue in issues:
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert re.fullmatch("[0-9a-f]{32}", issue["fingerprint"])
    assert len({issue["fingerprint"] for issue in issues}) == 2


def fingerprints(plan: Plan, **limits: Any) -> list[str]:
    # Parameters are part of a fingerprint; layer counts are compared apart from them.
    target = msgspec.structs.replace(plan.target, params={})
    result = gated(msgspec.structs.replace(plan, target=target), **limits)
    return [issue["fingerprint"] for issue in rendered(result, "gitlab")]


def test_fingerprints_do_not_depend_on_lines_layer_counts_or_limits() -> None:
    known = fingerprints(layers())
    assert fingerprints(layers()) == known
    assert fingerprints(layers(line=99)) == known
    assert fingerprints(layers(7)) == known
    assert fingerprints(layers(), alias=BYTES) == known


def test_fingerprints_depend_on_the_module_file_check_and_parameters() -> None:
    known = set(fingerprints(layers()))
    assert known.isdisjoint(fingerprints(layers(module="blocks")))
    assert known.isdisjoint(issue["fingerprint"] for issue in rendered(gated(layers()), "gitlab"))
    other = check(layers(), Thresholds(max_skipped={"alias": 0}))
    assert known.isdisjoint(issue["fingerprint"] for issue in rendered(other, "gitlab"))
    # Of the two rows one has a source line.
    assert len(known & set(fingerprints(layers(file="other.py")))) == 1


def test_rows_that_differ_in_size_only_have_fingerprints_of_their_own() -> None:
    facts = FactsBuilder()
    region = facts.region()
    for rows in (2048, 4096):
        y = region.op("aten.mm.default", [region.input("x", SHAPE)], (rows, 1024))
        region.save(y, region.view(y, (rows * 1024,), module="block", source="model.py:3"))
    result = check(make_plan(facts.build(), rules="no-view"), Thresholds(max_alias_skipped=0))
    issues = rendered(result, "gitlab")
    assert len(issues) == 2
    assert len({issue["fingerprint"] for issue in issues}) == 2


def test_the_peak_is_one_issue_that_names_the_largest() -> None:
    result = check(layers(), Thresholds(max_peak=MiB))
    (issue,) = rendered(result, "gitlab")
    assert issue["description"].startswith("predicted peak: ")
    assert (
        "; the largest: 25.17 MB x3 at the peak: saved, from aten.mm.default"
        in (issue["description"])
    )


@pytest.mark.parametrize("format", ["gitlab", "sarif"])
def test_a_gate_that_passes_has_no_issues(format: str) -> None:
    document = rendered(gated(layers(), 10**9), format)
    assert (document if format == "gitlab" else document["runs"][0]["results"]) == []


# --- JUnit ----------------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_check_and_the_offenders_of_those_that_fail() -> None:
    suites = rendered(gated(layers(), max_skipped={"parameter": 0}), "junit")
    assert suites.tag == "testsuites"
    (suite,) = suites
    for counted in (suites, suite):
        assert (counted.get("tests"), counted.get("failures"), counted.get("errors")) == (
            *("2", "1", "0"),
        )
    alias, parameter = suite.findall("testcase")
    assert (alias.get("classname"), alias.get("name")) == (
        "src/model.py:build layers=3",
        "max-alias-skipped",
    )
    assert alias.get("file") == "src/model.py"
    (failure,) = alias
    assert failure.get("message") == "skipped under alias: 50.33 MB, limit 0 B"
    assert "25.17 MB  x3  float32[2097152] from aten.view.default" in failure.text
    assert (parameter.get("name"), list(parameter)) == ("max-skipped parameter", [])


def test_junit_names_a_growth_the_same_whatever_the_baseline_has() -> None:
    names = [
        [
            case.get("name")
            for case in rendered(check(layers(4), Thresholds(), baseline=old), "junit").iter(
                "testcase"
            )
        ]
        for old in (layers(3), layers(2))
    ]
    assert names[0] == names[1] == ["max-growth alias", "max-growth alias_layout"]


def test_junit_has_the_notes() -> None:
    suites = rendered(check(layers(1), Thresholds(max_peak=MiB)), "junit")
    assert suites.findtext("testsuite/system-out").startswith("note: the peak, in aten.")


# --- SARIF ----------------------------------------------------------------------------------------


def test_sarif_has_what_the_schema_requires_and_code_scanning_needs(checkout: Path) -> None:
    result = gated(layers(), max_skipped={"parameter": 0}, max_peak=MiB)
    document = rendered(result, "sarif", checkout)
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-2.1.0.json")
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert run["tool"]["driver"]["name"] == "offplan"
    assert rules == ["max-peak", "max-alias-skipped", "max-skipped parameter"]
    assert all(invocation["executionSuccessful"] is True for invocation in run["invocations"])
    assert len(run["results"]) == 3
    for found in run["results"]:
        assert rules[found["ruleIndex"]] == found["ruleId"]
        assert found["level"] == "error"
        assert found["message"]["text"]
        assert found["partialFingerprints"]["offplan/v1"]
        (location,) = found["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"] == {
            "uri": "app/src/model.py",
            "uriBaseId": "%SRCROOT%",
        }
        assert physical["region"]["startLine"] >= 1
    notes = run["invocations"][0]["toolExecutionNotifications"]
    assert [note["message"]["text"] for note in notes] == list(result.notes)
    assert {note["level"] for note in notes} == {"note"}


def test_sarif_names_the_module_as_a_logical_location() -> None:
    (run,) = rendered(gated(layers()), "sarif")["runs"]
    assert run["results"][0]["locations"][0]["logicalLocations"] == [
        {"fullyQualifiedName": "layers.0-2", "kind": "module"}
    ]


def test_a_sarif_path_is_a_uri(checkout: Path) -> None:
    odd = checkout / "my model#1 ü.py"
    odd.write_text("")
    (run,) = rendered(gated(layers(file=odd.name)), "sarif", checkout)["runs"]
    uri = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "app/my%20model%231%20%C3%BC.py"
    assert unquote(uri) == f"app/{odd.name}"


# --- whatever a model is called -------------------------------------------------------------------


@pytest.mark.parametrize("format", ["gitlab", "sarif", "junit"])
def test_odd_names_of_modules_and_parameters_are_escaped(format: str) -> None:
    plan = layers(1, module=ODD, file=ODD)
    target = msgspec.structs.replace(plan.target, spec=ODD, params={"a": ODD}, source="")
    plan = msgspec.structs.replace(plan, target=target)
    text = render_gate(gated(plan), format, 80)
    assert "\x1b" not in text
    if format == "junit":
        document = ElementTree.fromstring(text)
        said = document.findtext("testsuite/testcase/failure") or ""
    else:
        document = json.loads(text)
        said = json.dumps(document, ensure_ascii=False).replace('\\"', '"')
    assert 'a"b<c>&d?]]>?.0' in said


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def plan_file(checkout: Path) -> Path:
    write_plan(checkout / "offplan.plan.yaml", layers())
    return checkout / "offplan.plan.yaml"


def run_gate(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(gate)
    return CliRunner().invoke(app, list(arguments))


def test_reports_of_several_formats_are_written_beside_what_is_printed(plan_file: Path) -> None:
    formats = [word for name in GATE_FORMATS for word in ("--report", f"{name}=gate.{name}")]
    for _ in range(2):  # a report of an earlier run is replaced
        done = run_gate("--max-alias-skipped", "0", *formats)
        assert done.exit_code == 3, done.stderr
        assert done.stdout.startswith("offplan gate failed: src/model.py:build layers=3")
        assert done.stderr.splitlines() == [f"wrote gate.{name}" for name in GATE_FORMATS]
    assert Path("gate.text").read_text() == done.stdout
    for format in GATE_FORMATS:
        printed = run_gate("--max-alias-skipped", "0", "--format", format).stdout
        assert Path(f"gate.{format}").read_text() == printed
    assert '"path": "app/src/model.py"' in Path("gate.gitlab").read_text()


@pytest.mark.parametrize(
    ("report", "exit_code", "words"),
    [
        ("gate.xml", 2, "--report gate.xml: not FORMAT=FILE"),
        ("html=gate.html", 2, "formats: text, json, markdown, github, gitlab, junit, sarif"),
        ("junit=", 2, "not FORMAT=FILE"),
        ("junit=missing/gate.xml", 1, "there is no directory missing"),
        ("junit=src/model.py", 1, "exists and is not a report by offplan gate"),
        ("junit=offplan.plan.yaml", 1, "exists and is not a report by offplan gate"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_checked(
    plan_file: Path, report: str, exit_code: int, words: str
) -> None:
    before = plan_file.read_bytes()
    done = run_gate("--max-alias-skipped", "0", "--report", report)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert words in done.stderr
    assert plan_file.read_bytes() == before


def test_the_peak_is_a_threshold_of_its_own(plan_file: Path) -> None:
    assert run_gate("--max-peak", "1GB").exit_code == 0
    failed = run_gate("--max-peak", "1MB")
    assert failed.exit_code == 3
    assert "predicted peak" in failed.stdout


def test_the_step_summary_gets_the_report_after_what_is_there(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = plan_file.parent / "summary.md"
    summary.write_text("# earlier\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run_gate("--max-alias-skipped", "0").exit_code == 3
    assert summary.read_text() == "# earlier\n"
    done = run_gate("--max-alias-skipped", "0", "--format", "github")
    assert done.stdout.startswith("::error ")
    markdown = run_gate("--max-alias-skipped", "0", "--format", "markdown").stdout
    assert summary.read_text() == f"# earlier\n{markdown}\n"


def test_a_step_summary_that_cannot_be_written_does_not_change_the_answer(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(plan_file.parent))
    done = run_gate("--max-alias-skipped", "1GB", "--format", "github")
    assert done.exit_code == 0
    assert done.stderr.startswith("note: no step summary: cannot write ")


# --- the GitHub action ----------------------------------------------------------------------------


def action() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "action.yml").read_text())


def steps() -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in action()["runs"]["steps"]}


def texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    else:
        yield str(value)


def test_no_script_of_the_action_has_anything_pasted_into_it() -> None:
    scripts = [step["run"] for step in steps().values() if "run" in step]
    assert len(scripts) == 2
    assert not any("${{" in script for script in scripts)


def test_every_input_of_the_action_is_used_and_every_one_used_is_declared() -> None:
    used = set(re.findall(r"\binputs\.([\w-]+)", " ".join(texts(action()["runs"]))))
    assert used == set(action()["inputs"])
    for step in steps().values():
        for name in step.get("env", {}):
            assert f"${name}" in step["run"] or f"${{{name}:-" in step["run"]


def test_the_actions_options_are_those_of_the_commands() -> None:
    from offplan.commands.analyze import analyze

    known = set()
    for command in (analyze, gate):
        app = typer.Typer()
        app.command()(command)
        for parameter in typer.main.get_command(app).params:
            known |= set(parameter.opts)
    script = steps()["Analyze and check"]["run"]
    options = set(re.findall(r"(?:option|each|gate) (--[\w-]+)", script))
    assert len(options) == 14
    assert options <= known


STUB = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("STATUS_" + sys.argv[1].upper(), "0")))
"""


class ActionRun:
    """Runs a step of the action as GitHub does, with programs that note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        self.outputs_file = folder / "outputs"
        programs = folder / "bin"
        programs.mkdir()
        for name in ("offplan", "python"):
            program = programs / name
            program.write_text(STUB.format(python=sys.executable))
            program.chmod(0o755)

    def __call__(self, step: str, **given: str) -> int:
        inputs = {name: spec.get("default", "") for name, spec in action()["inputs"].items()}
        inputs |= {name.replace("_", "-"): text for name, text in given.items() if name.islower()}
        environment = {name: text for name, text in given.items() if name.isupper()}
        for name, expression in steps()[step]["env"].items():
            (wanted,) = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", expression).groups()
            environment[name] = inputs[wanted]
        script = self.folder / "script.sh"
        script.write_text(steps()[step]["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "CALLS": str(self.calls_file),
                "GITHUB_OUTPUT": str(self.outputs_file),
                "GITHUB_ACTION_PATH": "/the/action",
                **environment,
            },
            check=False,
        )
        return done.returncode

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    @property
    def outputs(self) -> list[str]:
        return self.outputs_file.read_text().splitlines()[1:-1]


@pytest.fixture
def act(tmp_path: Path) -> ActionRun:
    return ActionRun(tmp_path)


def test_the_action_analyzes_a_target_and_checks_its_plan(act: ActionRun) -> None:
    assert act("Analyze and check", target="model.py", max_alias_skipped="0") == 0
    assert act.calls == [
        [
            *("offplan", "analyze", "--device=cuda", "--compiler=aot_eager"),
            *("--output=offplan.plan.yaml", "--", "model.py"),
        ],
        [
            *("offplan", "gate", "--format", "github", "--max-alias-skipped=0"),
            *("--", "offplan.plan.yaml"),
        ],
    ]
    assert act.outputs == ["offplan.plan.yaml"]


def test_the_action_passes_every_option_on(act: ActionRun) -> None:
    act(
        "Analyze and check",
        target="model.py:build",
        params="batch=8\n  name=a b  \n\n",
        budget="80GiB",
        gpu="h100",
        rules="no-view",
        plan="out.plan.yaml",
        max_skipped="too_small=1GB\nparameter=0",
        max_peak="80GiB",
        baseline="old.plan.yaml",
        max_growth="5%",
        reports="sarif=gate.sarif\njunit=gate.xml\n",
    )
    analyzed, checked = act.calls
    assert analyzed[4:] == [
        *(
            "--compiler=aot_eager",
            "--rules=no-view",
            "--budget=80GiB",
            "--output=out.plan.yaml",
        ),
        *("--param=batch=8", "--param=name=a b", "--", "model.py:build"),
    ]
    assert checked[2:] == [
        *("--format", "github", "--rules=no-view", "--max-peak=80GiB", "--baseline=old.plan.yaml"),
        *("--max-growth=5%", "--max-skipped=too_small=1GB", "--max-skipped=parameter=0"),
        *("--report=sarif=gate.sarif", "--report=junit=gate.xml", "--", "out.plan.yaml"),
    ]


def test_the_action_checks_a_plan_file_as_it_is(act: ActionRun) -> None:
    act("Analyze and check", target="committed.plan.yaml", max_peak="1GB")
    ((*_, plan),) = act.calls
    assert plan == "committed.plan.yaml"


@pytest.mark.parametrize("command", ["analyze", "gate"])
def test_the_action_fails_as_the_command_does(act: ActionRun, command: str) -> None:
    status = {f"STATUS_{command.upper()}": "3"}
    assert act("Analyze and check", target="model.py", max_peak="1GB", **status) == 3
    assert act.calls[-1][1] == command


HOSTILE = "x$(touch stolen)`touch stolen`; touch stolen\" '\n--help"


def test_text_in_an_input_of_the_action_is_never_run(act: ActionRun) -> None:
    inputs = {name.replace("-", "_"): HOSTILE for name in action()["inputs"]}
    act("Analyze and check", **inputs)
    act("Install offplan", **inputs)
    assert not (act.folder / "stolen").exists()
    analyzed, checked, *installed = act.calls
    # What follows the double dash is no option, whatever it looks like.
    assert analyzed[-2:] == ["--", HOSTILE]
    assert checked[-2:] == ["--", HOSTILE]
    assert f"--budget={HOSTILE}" in analyzed
    assert act.outputs == HOSTILE.split("\n")
    assert installed[0] == ["python", "-m", "pip", "install", "--requirement", HOSTILE]


@pytest.mark.parametrize(
    ("install", "installed"),
    [("", ["/the/action"]), ("offplan==1.0", ["offplan==1.0"]), ("none", [])],
)
def test_the_action_installs_itself_or_what_it_is_told_to(
    act: ActionRun, install: str, installed: list[str]
) -> None:
    act.calls_file.write_text("")
    assert act("Install offplan", install=install) == 0
    assert [call[-1] for call in act.calls] == installed


# --- the pre-commit hook --------------------------------------------------------------------------


def test_the_hook_runs_the_gate_on_the_plan_that_its_arguments_name(plan_file: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["id"] == "offplan-gate"
    assert hook["language"] == "python"
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "ci/model.plan.yaml")
    assert not re.search(hook["files"], "docker-compose.yaml")
    program, command, *arguments = shlex.split(hook["entry"])
    assert (program, command) == ("offplan", "gate")
    done = run_gate(*arguments, str(plan_file), "--max-alias-skipped", "0")
    assert done.exit_code == 3
