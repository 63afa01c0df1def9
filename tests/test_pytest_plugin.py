"""The pytest plugin, as a project's tests use it.

Most targets here are plan files, which need no trace: what imports torch runs in a process of its
own, since an inner run in this one forgets the modules that it imported.  The inner runs have the
plugin by its module, whether or not the environment's own install registers it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from facts_builder import FactsBuilder, MiB

from offplan.errors import UsageError
from offplan.gate import Growth, Thresholds
from offplan.marked import OPTIONS, asked
from offplan.plan import Plan, load_plan, make_plan, write_plan

ROOT = Path(__file__).parent.parent
SHAPE = (2048, 1024)
PLUGIN = ("-p", "no:offplan", "-p", "offplan.pytest_plugin")
ARGUMENTS = (*PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-n0")


def layers(count: int) -> Plan:
    """``count`` layers that each save two views (16 MiB in all) holding each other: ``alias``."""
    facts = FactsBuilder(params={"layers": str(count)})
    region = facts.region()
    x = region.input("x", SHAPE)
    for number in range(count):
        module = f"layers.{number}"
        y = region.op("aten.mm.default", [x], SHAPE, module=module)
        region.save(
            region.view(y, (2048 * 1024,), module=module, source="model.py:20"),
            region.view(y, SHAPE, target="aten.detach.default", module=module),
        )
    return make_plan(facts.build(), rules="last-holder", min_bytes=0)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with a plan of two layers; only its own settings apply."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    write_plan(pytester.path / "two.plan.yaml", layers(2))
    return pytester


def run(project: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    project.makepyfile(test_small_model=f"import pytest\n{source}")
    return project.runpytest_inprocess(*ARGUMENTS, *arguments)


def marked(options: str, body: str = "def test_memory():\n    pass\n") -> str:
    return f"@pytest.mark.offplan({options})\n{body}"


# --- the mark -------------------------------------------------------------------------------------


def test_limits_are_checked_though_the_test_is_empty(project: pytest.Pytester) -> None:
    good = marked('target="two.plan.yaml", max_alias_skipped="32MiB"')
    run(project, good).assert_outcomes(passed=1)
    bad = marked('target="two.plan.yaml", max_alias_skipped=32 * 2**20 - 1')
    run(project, bad).assert_outcomes(failed=1)


FAILED = """\
_________________________________ test_memory __________________________________
offplan gate failed: model.py layers=2 (last-holder)
  check                limit    actual
  skipped under alias    0 B  33.55 MB  FAILED  33.55 MB too much

alias: 4 values, 33.55 MB
  16.78 MB  x2  float32[2097152] from aten.view.default
                in layers.0-1 (model.py:20)
                held by saved detach (layers.0-1)
  16.78 MB  x2  float32[2048, 1024] from aten.detach.default
                in layers.0-1 (model.py:2)
                held by saved view (layers.0-1)

=========================== short test summary info ============================
"""


def test_a_failure_is_the_gates_report_and_nothing_else(project: pytest.Pytester) -> None:
    done = run(project, marked('target="two.plan.yaml", max_alias_skipped="0"'))
    text = "\n".join(line.rstrip() for line in done.outlines)
    assert FAILED in text
    assert "pytest_plugin" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "limit",
    [
        'max_skipped={"alias": "1MiB"}',
        'max_peak="1MiB"',
        'max_alias_skipped=0, rules="no-view"',
        'baseline="one.plan.yaml"',
        'baseline="one.plan.yaml", max_growth="99%"',
    ],
)
def test_each_limit_can_fail(project: pytest.Pytester, limit: str) -> None:
    write_plan(project.path / "one.plan.yaml", layers(1))
    run(project, marked(f'target="two.plan.yaml", {limit}')).assert_outcomes(failed=1)


def test_a_growth_that_is_allowed_passes(project: pytest.Pytester) -> None:
    write_plan(project.path / "one.plan.yaml", layers(1))
    source = marked('target="two.plan.yaml", baseline="one.plan.yaml", max_growth="100%"')
    run(project, source).assert_outcomes(passed=1)


def test_a_test_that_fails_or_skips_by_itself_is_not_checked(project: pytest.Pytester) -> None:
    source = marked(
        'target="missing.plan.yaml", max_peak=0',
        "def test_memory():\n    assert not 'mine'\n",
    ) + marked(
        'target="missing.plan.yaml", max_peak=0', "def test_skips():\n    pytest.skip('not now')\n"
    )
    done = run(project, source)
    done.assert_outcomes(failed=1, skipped=1)
    done.stdout.fnmatch_lines(["*assert not 'mine'*"])


def test_a_limit_that_is_expected_to_fail_is_an_expected_failure(project: pytest.Pytester) -> None:
    source = marked('target="two.plan.yaml", max_peak=0')
    run(project, f"@pytest.mark.xfail(strict=True)\n{source}").assert_outcomes(xfailed=1)


def test_the_closest_of_several_marks_decides_option_by_option(project: pytest.Pytester) -> None:
    source = marked(
        'target="two.plan.yaml", max_alias_skipped="0"',
        "class TestModel:\n"
        "    def test_by_the_class(self):\n        pass\n"
        "    @pytest.mark.offplan(max_alias_skipped='1GiB')\n"
        "    def test_by_its_own(self):\n        pass\n",
    )
    done = run(project, source)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["FAILED *::test_by_the_class*"])


def test_a_method_of_a_unittest_case_is_checked_too(project: pytest.Pytester) -> None:
    source = "import unittest\nclass TestModel(unittest.TestCase):\n" + "\n".join(
        f"    {line}"
        for line in marked(
            'target="two.plan.yaml", max_peak=0', "def test_memory(self):\n    pass"
        ).splitlines()
    )
    run(project, source).assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ('target="two.plan.yaml", max_alias_skiped=0', "max_alias_skiped is not an option; known"),
        ('target="two.plan.yaml", max_peak="much"', "max_peak is wrong: 'much' is not a size"),
        ('max_peak="1GB"', "the test names no target"),
        ('"two.plan.yaml"', "the offplan mark takes options by name"),
        ('target="missing.plan.yaml", max_peak=0', "cannot read missing.plan.yaml"),
        ('target="two.plan.yaml", budget="1GiB", max_peak=0', "is a plan file: it takes no params"),
        ('target="two.plan.yaml", baseline="no.plan.yaml"', "there is no baseline no.plan.yaml"),
    ],
)
def test_a_mark_that_makes_no_sense_says_why_without_a_traceback(
    project: pytest.Pytester, mark: str, words: str
) -> None:
    done = run(project, marked(mark))
    done.assert_outcomes(failed=1)
    assert words in done.stdout.str()
    assert "Traceback" not in done.stdout.str()
    assert "pytest_plugin.py" not in done.stdout.str()


def test_the_mark_is_registered_and_described(project: pytest.Pytester) -> None:
    done = project.runpytest_inprocess(*PLUGIN, "--markers")
    done.stdout.fnmatch_lines(["@pytest.mark.offplan(target, params, budget, *"])


# --- reading a mark -------------------------------------------------------------------------------


def test_every_option_is_read(tmp_path: Path) -> None:
    wanted = asked(
        {
            "target": Path("model.py"),
            "params": {"batch": 4, "wide": True},
            "device": "cpu",
            "compiler": "inductor",
            "partitioner": "default",
            "min_size": "1MiB",
            "budget": "80%",
            "actions": "keep,offload",
            "max_alias_skipped": 0,
            "max_skipped": {"too_small": "1kB"},
            "max_peak": "20GiB",
            "baseline": "old.plan.yaml",
            "max_growth": "64MiB",
            "rules": "no-view",
            "gpu": None,
        },
        tmp_path,
        "a test",
    )
    assert wanted.thresholds == Thresholds(
        max_alias_skipped=0,
        max_skipped={"too_small": 1000},
        rules="no-view",
        baseline=tmp_path / "old.plan.yaml",
        max_growth=Growth(size_bytes=64 * MiB),
        max_peak=20 * 1024**3,
    )
    assert (wanted.target, wanted.params) == ("model.py", (("batch", "4"), ("wide", "True")))
    assert (wanted.tracing.device, wanted.tracing.compiler) == ("cpu", "inductor")
    assert (wanted.tracing.partitioner, wanted.planning.min_bytes) == ("default", MiB)
    assert (wanted.planning.budget, wanted.planning.actions) == ("80%", ("keep", "offload"))
    assert not wanted.own_baseline


@pytest.mark.parametrize("options", [{"baseline": True}, {"max_growth": "5%"}])
def test_a_growth_without_a_baseline_is_over_that_of_the_test(
    tmp_path: Path, options: dict[str, object]
) -> None:
    assert asked(options, tmp_path, "a test").own_baseline
    assert not asked({**options, "baseline": "old.plan.yaml"}, tmp_path, "a test").own_baseline


@pytest.mark.parametrize(
    "options",
    [
        {"target": 3},
        {"params": "batch=4"},
        {"device": "tpu"},
        {"compiler": "inductor "},
        {"gpu": 100},
        {"budget": True},
        {"budget": 0.5},
        {"actions": 1},
        {"actions": "evict"},
        {"min_size": 1.5},
        {"max_peak": -1},
        {"max_skipped": "alias=0"},
        {"rules": "all"},
        {"baseline": 1},
    ],
)
def test_a_wrong_option_is_a_usage_error_naming_it(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(UsageError) as caught:
        asked(options, tmp_path, "tests/test_x.py::test_y")
    (name,) = options
    assert name in str(caught.value)


def test_the_options_are_those_of_the_command() -> None:
    import inspect

    from offplan.commands.gate import gate

    known = set(inspect.signature(gate).parameters)
    renamed = {"params": "param"}
    planned = {"budget", "actions"}
    assert {renamed.get(name, name) for name in OPTIONS} - planned <= known


# --- the fixtures ---------------------------------------------------------------------------------


def test_the_plan_of_the_mark_is_a_fixture(project: pytest.Pytester) -> None:
    body = (
        "def test_memory(offplan_plan):\n"
        "    assert offplan_plan.saved_bytes == 2 * 8 * 2**20\n"
        "    assert offplan_plan.rules == 'last-holder'\n"
    )
    run(project, marked('target="two.plan.yaml"', body)).assert_outcomes(passed=1)


def test_the_fixture_without_a_target_says_what_is_missing(project: pytest.Pytester) -> None:
    done = run(project, "def test_memory(offplan_plan):\n    pass\n")
    done.assert_outcomes(errors=1)
    assert 'add @pytest.mark.offplan(target="model.py")' in done.stdout.str()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("'two.plan.yaml', (1,)", "a target that is named takes params"),
        ("'two.plan.yaml', target='a.py'", "a target that is named takes params"),
        ("'two.plan.yaml', max_peek=1", "max_peek is not an option"),
    ],
)
def test_a_check_that_makes_no_sense_says_why(
    project: pytest.Pytester, call: str, words: str
) -> None:
    done = run(project, f"def test_memory(offplan_check):\n    offplan_check({call})\n")
    done.assert_outcomes(failed=1)
    assert words in done.stdout.str()


# --- baselines ------------------------------------------------------------------------------------


def test_a_baseline_is_missed_then_written_then_kept_to(project: pytest.Pytester) -> None:
    source = marked('target="two.plan.yaml", baseline=True')
    missed = run(project, source)
    missed.assert_outcomes(failed=1)
    path = "__offplan__/test_small_model.test_memory.plan.yaml"
    missed.stdout.fnmatch_lines(
        [
            f"there is no baseline {path}",
            '  try: pytest --offplan-update "test_small_model.py::test_memory" writes it; '
            "commit it",
        ]
    )
    written = run(project, source, "--offplan-update", "--junitxml=report.xml")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["*= offplan baselines written =*", path])
    assert load_plan(project.path / path) == layers(2)
    (kept,) = ElementTree.parse(project.path / "report.xml").iter("property")
    assert (kept.get("name"), kept.get("value")) == ("offplan_baseline", path)

    run(project, source).assert_outcomes(passed=1)
    again = run(project, source, "--offplan-update")
    again.assert_outcomes(passed=1)
    assert "baselines written" not in again.stdout.str()

    write_plan(project.path / "two.plan.yaml", layers(3))
    grown = run(project, source)
    grown.assert_outcomes(failed=1)
    grown.stdout.fnmatch_lines(["*growth of alias from 33.55 MB*FAILED  16.78 MB too much"])
    run(project, source, "--offplan-update").assert_outcomes(passed=1)
    run(project, source).assert_outcomes(passed=1)


def test_limits_are_checked_while_baselines_are_written(project: pytest.Pytester) -> None:
    source = marked('target="two.plan.yaml", baseline="old.plan.yaml", max_alias_skipped=0')
    run(project, source, "--offplan-update").assert_outcomes(failed=1)
    assert load_plan(project.path / "old.plan.yaml") == layers(2)


def test_every_test_and_check_has_a_baseline_of_its_own(project: pytest.Pytester) -> None:
    source = (
        "class TestModel:\n"
        "    @pytest.mark.offplan(baseline=True)\n"
        "    @pytest.mark.parametrize('name', ['a/b', 'a b', 'x' * 300, 'batch=4'])\n"
        "    def test_memory(self, name, offplan_check):\n"
        "        offplan_check('two.plan.yaml')\n"
        "        offplan_check('two.plan.yaml')\n"
    )
    run(project, source, "--offplan-update").assert_outcomes(passed=4)
    run(project, source).assert_outcomes(passed=4)
    names = [path.name for path in (project.path / "__offplan__").iterdir()]
    assert len(names) == 8
    assert "test_small_model.TestModel.test_memory[batch=4].plan.yaml" in names
    assert "test_small_model.TestModel.test_memory[batch=4].2.plan.yaml" in names


def test_a_baseline_never_replaces_another_file(project: pytest.Pytester) -> None:
    source = marked('target="two.plan.yaml", baseline="tox.ini"')
    before = (project.path / "tox.ini").read_text()
    done = run(project, source, "--offplan-update")
    done.assert_outcomes(failed=1)
    assert "exists and is not an offplan plan" in done.stdout.str()
    assert (project.path / "tox.ini").read_text() == before


# --- traces ---------------------------------------------------------------------------------------

MODEL = """
import torch

def build(width: int = 64):
    with open("built.txt", "a") as file:
        file.write(f"{width}\\n")
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
    return model, (torch.randn(32, width),)
"""
TRACED = """
import pytest

def marked(**options):
    return pytest.mark.offplan(target="model.py", device="cpu", **options)

@marked(max_peak="1GB")
def test_plan(offplan_plan):
    assert offplan_plan.moved_bytes == 0

@marked(max_peak="1GB", budget=0, min_size=0)
def test_budget(offplan_plan):
    assert offplan_plan.moved_bytes > 0

@marked(max_peak="1GB")
def test_again():
    pass

@marked(max_peak=0, params={"width": 128})
def test_too_much():
    pass

@pytest.mark.offplan(device="cpu", max_peak=0)
def test_model(offplan_check):
    import torch
    model, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    plan = offplan_check(model, (x,), max_peak="1GB")
    assert plan.saved_bytes == 32 * 64 * 4
    assert plan.device == "cpu"
    offplan_check(model, kwargs={"input": x})

def test_nonsense(offplan_check):
    offplan_check(3)

@pytest.mark.offplan(target="nowhere.py")
def test_nowhere(offplan_plan):
    pass
"""


def test_targets_are_traced_once_and_models_where_they_are_checked(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(model=MODEL, test_traced=TRACED)
    below = project.mkdir("below")
    # Targets are the project's, wherever the tests are started.
    done = in_a_process(project, "../test_traced.py", cwd=below)
    assert "3 failed, 3 passed, 1 error" in done.stdout, done.stdout
    # Once for each width, though two plans are made of the first.
    assert (project.path / "built.txt").read_text() == "64\n128\n"
    failures = done.stdout.partition("= FAILURES =")[2]
    assert "\noffplan gate failed: model.py width=128 (whole-storage)\n" in failures
    line = TRACED.splitlines().index('    offplan_check(model, kwargs={"input": x})')
    assert "\noffplan gate failed: Linear (whole-storage)\n" in failures
    assert re.search(rf"\n  at: \S*test_traced.py:{line}\n", failures), failures
    errors = done.stdout.partition("= ERRORS =")[2]
    assert f"\nthere is no file nowhere.py\n  at: {project.path} (pytest's rootdir)\n" in errors
    assert "\nwhat is checked is a model or a target, not of type int\n" in failures


# --- in other people's runs -----------------------------------------------------------------------


def in_a_process(
    project: pytest.Pytester, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", *arguments],
        cwd=cwd or project.path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_baselines_written_by_workers_are_reported(project: pytest.Pytester) -> None:
    source = "".join(
        marked(
            'target="two.plan.yaml", baseline=True',
            f"@pytest.mark.xdist_group('g')\ndef test_{n}():\n    pass\n",
        )
        for n in range(2)
    )
    project.makepyfile(test_small_model=f"import pytest\n{source}")
    done = in_a_process(project, "-p", "xdist", "-n1", "--dist=loadgroup", "--offplan-update")
    assert "2 passed" in done.stdout, done.stdout
    assert "__offplan__/test_small_model.test_0.plan.yaml\n" in done.stdout
    assert "__offplan__/test_small_model.test_1.plan.yaml\n" in done.stdout


def test_a_run_without_such_tests_imports_neither_torch_nor_the_gate(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        test_other="import sys\n"
        "def test_other():\n"
        "    assert 'offplan.pytest_plugin' in sys.modules\n"
        "    assert {'torch', 'msgspec', 'offplan.gate'}.isdisjoint(sys.modules)\n"
    )
    done = in_a_process(project)
    assert "1 passed" in done.stdout, done.stdout


def test_a_plan_file_is_checked_without_torch(project: pytest.Pytester) -> None:
    source = marked('target="two.plan.yaml", max_alias_skipped="1GiB"')
    project.makepyfile(
        test_small_model=f"import pytest, sys\n{source}",
        test_then="import sys\ndef test_then():\n    assert 'torch' not in sys.modules\n",
    )
    done = in_a_process(project)
    assert "2 passed" in done.stdout, done.stdout
