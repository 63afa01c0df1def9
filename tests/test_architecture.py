"""Which module may import which, enforced on the source.

``TABLE`` is the architecture: data flows one way, and a module that is not in it fails the test.
The checks are functions from source text to complaints; each is tried on a source that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "offplan"
PRIVATE_TORCH_MODULE = "offplan.trace._torch"


@dataclass(frozen=True)
class Allowed:
    """What a module may import, as names under ``offplan.``, space-separated.

    ``*`` at the end of a name admits every module below it.  ``later`` lists what may be imported
    inside functions, or for type checkers, only; ``torch`` there, to name its types.
    """

    imports: str = ""
    later: str = ""
    torch: bool = False


TABLE = {
    "offplan": Allowed(later="api plan target replay.eager replay.training"),
    "offplan.api": Allowed(
        "errors units graph eligibility memory costs budget decide plan",
        later="torch target trace trace.capture",
    ),
    "offplan.__main__": Allowed("ended", later="cli"),
    "offplan.cli": Allowed(
        "commands.analyze commands.device commands.diff commands.explain commands.export "
        "commands.gate commands.report commands.run commands.sweep commands.verify"
    ),
    "offplan.commands": Allowed(),
    "offplan.commands.analyze": Allowed(
        "errors units files graph eligibility memory budget plan options requests report",
        later="charted plotted",
    ),
    "offplan.commands.diff": Allowed("diff options plan report.diff"),
    "offplan.commands.explain": Allowed(
        "errors budget costs explain opened options plan progress report.explain", later="decide"
    ),
    "offplan.commands.gate": Allowed(
        "errors units files eligibility plan gate options requests report report.findings"
    ),
    "offplan.commands.run": Allowed(
        "units files eligibility plan gate measured options requests progress report.run",
        later="replay.measure",
    ),
    "offplan.commands.verify": Allowed(
        "errors files graph plan options requests progress verified report.verify",
        later="replay.cases replay.verifying",
    ),
    "offplan.commands.device": Allowed(
        "errors units files costs measured options progress report.device", later="replay.probe"
    ),
    "offplan.commands.export": Allowed(
        "errors units files graph plan export dumped options report.blocks report.picture "
        "report.snapshot report.traces",
        later="opened charted",
    ),
    "offplan.commands.report": Allowed(
        "errors units files graph costs budget plan chart charted plotted opened measured options "
        "report.embed report.page"
    ),
    "offplan.options": Allowed("errors units budget costs eligibility ended plan"),
    "offplan.outside": Allowed("errors plan"),
    "offplan.requests": Allowed(
        "doors errors eligibility graph kept recompute budget decide outside plan options progress "
        "report",
        later="doors.torch_trace trace.capture replay.measure",
    ),
    # Plain values, and what is computed from them.
    "offplan.errors": Allowed(),
    "offplan.units": Allowed("errors"),
    "offplan.files": Allowed("errors"),
    "offplan.gpus": Allowed("errors"),
    "offplan.ended": Allowed(),
    "offplan.pools": Allowed("ended"),
    "offplan.progress": Allowed("ended"),
    "offplan.graph": Allowed("errors files"),
    "offplan.footprint": Allowed("graph"),
    "offplan.chart": Allowed("costs fusion graph memory schedule transfers"),
    "offplan.opened": Allowed("costs errors fusion graph kept plan relower"),
    "offplan.retrace": Allowed("graph kept options progress recompute requests"),
    "offplan.sweep": Allowed("budget decide eligibility errors graph joint"),
    "offplan.workers": Allowed(
        "budget eligibility errors kept pools progress requests retrace sweep"
    ),
    "offplan.commands.sweep": Allowed(
        "budget eligibility errors files memory options plotted progress report.document "
        "report.sweep requests sweep units workers"
    ),
    "offplan.kept": Allowed("errors files graph"),
    "offplan.eligibility": Allowed("errors units graph footprint"),
    "offplan.transfers": Allowed("graph footprint"),
    "offplan.allocator": Allowed(),
    "offplan.workspaces": Allowed("gpus graph"),
    "offplan.lifetimes": Allowed("graph footprint"),
    "offplan.overwritten": Allowed("graph"),
    "offplan.memory": Allowed("graph transfers allocator workspaces lifetimes"),
    "offplan.fusion": Allowed("graph transfers"),
    "offplan.recompute": Allowed("errors graph workspaces"),
    "offplan.roofline": Allowed("fusion graph"),
    "offplan.costs": Allowed("errors units files gpus graph roofline schedule"),
    "offplan.curve": Allowed(),
    "offplan.schedule": Allowed("transfers"),
    "offplan.windows": Allowed("allocator curve graph transfers"),
    "offplan.choices": Allowed("curve graph transfers windows"),
    "offplan.planner": Allowed(
        "errors units graph transfers memory curve schedule windows choices"
    ),
    "offplan.budget": Allowed("errors units graph transfers fusion memory costs schedule planner"),
    "offplan.activations": Allowed("allocator fusion graph recompute roofline windows"),
    "offplan.program": Allowed("activations schedule"),
    "offplan.relower": Allowed("graph recompute"),
    "offplan.joint": Allowed(
        "errors graph transfers windows roofline costs budget recompute activations",
        later="program",
    ),
    "offplan.decide": Allowed(
        "units fusion graph eligibility costs budget recompute activations relower joint plan",
        later="program",
    ),
    # make_plan calls the planner; check_plan, which proves what it made, must not (tested below).
    "offplan.plan": Allowed(
        "errors units files gpus graph footprint eligibility transfers fusion memory recompute "
        "budget"
    ),
    "offplan.exported": Allowed(),
    "offplan.export": Allowed("errors units files graph plan transfers exported"),
    "offplan.diff": Allowed("units graph eligibility plan"),
    "offplan.gate": Allowed("errors units files graph eligibility memory plan diff"),
    # pytest imports the plugin at once, whatever it runs.
    "offplan.pytest_plugin": Allowed(later="errors plan marked report"),
    "offplan.marked": Allowed(
        "errors units files graph eligibility budget decide plan gate progress requests",
        later="target trace.capture",
    ),
    "offplan.measured": Allowed("errors units files graph eligibility plan"),
    "offplan.verified": Allowed("files graph measured"),
    # Steps drawn in time.
    "offplan.charted": Allowed("errors graph transfers memory costs plan relower chart opened"),
    "offplan.plotted": Allowed("options charted report.timeline"),
    # What is to be said of one storage, or of many.
    "offplan.named": Allowed("errors graph plan"),
    "offplan.observed": Allowed("eligibility graph recompute"),
    "offplan.effects": Allowed(
        "activations budget costs curve fusion graph joint memory plan recompute schedule "
        "transfers windows"
    ),
    "offplan.explain": Allowed(
        "units graph footprint eligibility budget costs plan opened named observed effects"
    ),
    "offplan.report.explain": Allowed(
        "units eligibility effects observed explain report.document report.fold report.peak"
    ),
    "offplan.plainpickle": Allowed(),
    "offplan.dumped": Allowed("errors files plainpickle"),
    "offplan.report.timeline": Allowed("units memory chart report.document"),
    "offplan.report.glyphs": Allowed(),
    "offplan.report.picture": Allowed(
        "units files graph memory chart report.document report.glyphs report.timeline"
    ),
    "offplan.report.traces": Allowed("files graph chart report.picture report.timeline"),
    "offplan.report.snapshot": Allowed(
        "allocator files graph transfers memory chart report.document report.timeline"
    ),
    "offplan.report.blocks": Allowed(
        "units files allocator memory chart dumped report.document report.snapshot report.timeline"
    ),
    "offplan.report.embed": Allowed(
        "graph chart eligibility memory plan transfers report.document report.timeline"
    ),
    "offplan.report.page": Allowed(
        "errors units eligibility memory budget plan measured report.document report.embed "
        "report.html report.peak"
    ),
    "offplan.report.diff": Allowed("units diff report.document report.fold"),
    "offplan.report": Allowed(
        "errors units graph eligibility memory costs budget plan gate measured report.*",
    ),
    "offplan.report.verify": Allowed("units report.document verified"),
    "offplan.report.sweep": Allowed("errors report.document sweep units"),
    "offplan.report.*": Allowed(
        "errors units graph eligibility memory costs budget plan gate measured report report.*",
    ),
    # From a model to plain values.
    "offplan.target": Allowed(
        "doors errors units", later="doors.transformers doors.timm", torch=True
    ),
    # Targets that are no file of the user's.
    "offplan.doors": Allowed("errors"),
    "offplan.doors.graph_text": Allowed("errors"),
    "offplan.doors.torch_log": Allowed("doors doors.graph_text errors"),
    "offplan.doors.transformers": Allowed("errors target", torch=True),
    "offplan.doors.timm": Allowed("errors target", torch=True),
    "offplan.doors.torch_trace": Allowed(
        "doors doors.graph_text doors.torch_log errors gpus graph overwritten target trace._torch "
        "trace.backend trace.facts trace.sources",
        torch=True,
    ),
    "offplan.trace": Allowed("trace.*", torch=True),
    PRIVATE_TORCH_MODULE: Allowed(torch=True),
    "offplan.trace.sources": Allowed("target trace._torch", torch=True),
    "offplan.trace.failures": Allowed("errors target trace._torch trace.sources", torch=True),
    "offplan.trace.autograd": Allowed("errors trace._torch", torch=True),
    "offplan.trace.attention": Allowed("errors gpus trace._torch", torch=True),
    "offplan.trace.pretend": Allowed("errors gpus trace._torch", torch=True),
    "offplan.trace.build": Allowed("errors trace._torch trace.sources", torch=True),
    "offplan.trace.facts": Allowed(
        "errors graph trace._torch trace.sources workspaces", torch=True
    ),
    "offplan.trace.compilers": Allowed("errors graph trace._torch", torch=True),
    "offplan.trace.lowering": Allowed(
        "graph trace._torch trace.compilers trace.facts workspaces", torch=True
    ),
    "offplan.trace.recompute": Allowed("errors trace._torch trace.facts", torch=True),
    "offplan.trace.backend": Allowed(
        "errors graph target trace._torch trace.compilers trace.facts trace.recompute "
        "trace.sources",
        torch=True,
    ),
    "offplan.trace.capture": Allowed(
        "errors gpus graph overwritten recompute target trace trace.*", torch=True
    ),
    # From a plan to a run on a GPU.
    "offplan.replay": Allowed("replay.*", torch=True),
    # What the command line reads before it starts anything.
    "offplan.replay.limits": Allowed("errors units measured"),
    "offplan.replay.layout": Allowed("transfers"),
    "offplan.replay.*": Allowed(
        "errors units files gpus graph kept footprint eligibility transfers recompute fusion "
        "memory roofline costs budget plan decide measured pools verified target "
        "trace trace.* replay replay.*",
        torch=True,
    ),
}


@dataclass(frozen=True)
class Import:
    """``import module`` or ``from module import name``, at ``line``."""

    module: str
    name: str | None
    line: int
    later: bool


def source_modules() -> dict[str, Path]:
    """Dotted name to file, of every module in the package."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = source_modules()


def allowed_for(module: str) -> Allowed | None:
    if module in TABLE:
        return TABLE[module]
    return TABLE.get(module.rpartition(".")[0] + ".*")


def imports_in(tree: ast.AST, later: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(tree):
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_type_checkers = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, child.lineno, later) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # A relative import is turned away by name, below: it would hide what is imported.
            module = "." * child.level + (child.module or "")
            yield from (Import(module, alias.name, child.lineno, later) for alias in child.names)
        else:
            yield from imports_in(child, later or inside or for_type_checkers)


def offplan_module(found: Import) -> str | None:
    """The offplan module that ``found`` brings in; None for an import from elsewhere."""
    if found.module != "offplan" and not found.module.startswith("offplan."):
        return None
    if found.name is not None and f"{found.module}.{found.name}" in MODULES:
        return f"{found.module}.{found.name}"
    return found.module


def is_listed(module: str, names: str) -> bool:
    for name in names.split():
        prefix, star, _ = f"offplan.{name}".partition("*")
        if module == prefix or (star and module.startswith(prefix)):
            return True
    return False


def import_complaints(source: str, module: str, allowed: Allowed) -> Iterator[str]:
    """What ``module`` imports although ``allowed`` does not say so."""
    for found in imports_in(ast.parse(source)):
        if found.module.startswith("."):
            yield f"line {found.line}: a relative import"
        is_torch = found.module.split(".")[0] == "torch"
        if (
            is_torch
            and not allowed.torch
            and not (found.later and "torch" in allowed.later.split())
        ):
            yield f"line {found.line}: torch"
        imported = offplan_module(found)
        # The package itself holds only its version; that import says nothing about the flow.
        if imported is None or imported in ("offplan", module):
            continue
        names = f"{allowed.imports} {allowed.later}" if found.later else allowed.imports
        if not is_listed(imported, names):
            yield f"line {found.line}: {imported}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def attribute_names(expression: ast.expr) -> list[str]:
    """``["torch", "nn", "Module"]`` for ``torch.nn.Module``; empty where the root is not a name."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    return [expression.id, *reversed(names)] if isinstance(expression, ast.Name) else []


def private_torch_complaints(source: str) -> Iterator[str]:
    """Private names of torch that ``source`` imports, or reads off a name imported from torch."""
    tree = ast.parse(source)
    from_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                full_name = alias.name if module is None else f"{module}.{alias.name}"
                if full_name.split(".")[0] != "torch":
                    continue
                from_torch.add(alias.asname or alias.name.split(".")[0])
                if any(map(is_private, full_name.split("."))):
                    yield f"line {node.lineno}: {full_name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names = attribute_names(node)
            if names and names[0] in from_torch:
                yield f"line {node.lineno}: {'.'.join(names)}"


MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_TYPES = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
}
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "add", "discard"),
    *("update", "setdefault", "sort", "reverse", "appendleft", "popleft"),
}


def is_mutable(expression: ast.expr | None) -> bool:
    if isinstance(expression, ast.Call):
        names = attribute_names(expression.func)
        return bool(names) and names[-1] in MUTABLE_TYPES
    return isinstance(expression, MUTABLE_DISPLAYS)


def assigned_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def state_complaints(source: str) -> Iterator[str]:
    """Containers at module level that are no constants, and code that changes a module's names."""
    tree = ast.parse(source)
    containers = set()
    for statement in tree.body:
        for name in assigned_names(statement):
            if is_mutable(statement.value):  # type: ignore[attr-defined]
                containers.add(name)
                if not name.isupper() and name != "__all__":
                    yield f"line {statement.lineno}: {name} is a container at module level"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id in containers:
                yield f"line {node.lineno}: {node.value.id} is changed"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (
                isinstance(owner, ast.Name)
                and owner.id in containers
                and node.func.attr in MUTATORS
            ):
                yield f"line {node.lineno}: {owner.id} is changed"


def reached_names(source: str, start: str) -> set[str]:
    """Every name used by ``start`` and by the functions and classes of its module that it uses."""
    definitions = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            body = definitions.get(name, ast.Module([], []))
            waiting += [node.id for node in ast.walk(body) if isinstance(node, ast.Name)]
    return reached


# What decides which storages move, and when.
PLANNING = {
    f"offplan.{name}" for name in ("planner", "windows", "choices", "budget", "schedule", "curve")
}


def is_record(definition: ast.stmt) -> bool:
    """Whether a class only holds values: a frozen dataclass, a Struct or a NamedTuple."""
    if not isinstance(definition, ast.ClassDef):
        return False
    shapes = {ast.unparse(base) for base in (*definition.bases, *definition.decorator_list)}
    return bool(shapes & {"dataclass(frozen=True)", "msgspec.Struct", "_Record", "NamedTuple"})


def code_in(source: str) -> set[str]:
    """Functions and classes of a module that are more than records."""
    kinds = ast.FunctionDef | ast.ClassDef
    found = (node for node in ast.parse(source).body if isinstance(node, kinds))
    return {node.name for node in found if not is_record(node)}


def imported_code(source: str) -> dict[str, set[str]]:
    """The code that ``source`` imports by name from modules of the package: name to module."""
    found: dict[str, set[str]] = {}
    for each in imports_in(ast.parse(source)):
        module = offplan_module(each)
        if module is None:
            continue
        if each.name is None or module != each.module:
            found.setdefault(each.name or "offplan", set()).add(module)
        elif each.name in code_in(MODULES[module].read_text()):
            found.setdefault(each.name, set()).add(module)
    return found


def reached_modules(source: str, start: str) -> set[str]:
    """Modules whose code ``start`` can run: those that it names, and all that they import code of.

    A renamed import would hide here, so that none is allowed (tested below).
    """
    names = reached_names(source, start)
    code = imported_code(source).items()
    waiting = [module for name, modules in code if name in names for module in modules]
    reached: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += set().union(*imported_code(MODULES[module].read_text()).values())
    return reached


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    allowed = allowed_for(module)
    assert allowed is not None, f"{module} is missing from the table"
    assert list(import_complaints(MODULES[module].read_text(), module, allowed)) == []


@pytest.mark.parametrize("module", [name for name in MODULES if name != PRIVATE_TORCH_MODULE])
def test_private_torch_names_are_used_in_one_module_only(module: str) -> None:
    assert list(private_torch_complaints(MODULES[module].read_text())) == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_holds_mutable_state(module: str) -> None:
    assert list(state_complaints(MODULES[module].read_text())) == []


def test_only_target_doors_trace_and_replay_may_import_torch() -> None:
    with_torch = {name.split(".")[1] for name, allowed in TABLE.items() if allowed.torch}
    # Doors are targets: the models of others, and graphs that torch printed.
    assert with_torch == {"target", "doors", "trace", "replay"}


def test_a_module_without_torch_reaches_torch_inside_functions_only() -> None:
    for name, allowed in TABLE.items():
        if not allowed.torch:
            for listed in allowed.imports.split():
                assert not allowed_for(f"offplan.{listed}").torch, (
                    f"{name} imports {listed} at once"
                )


def test_check_plan_shares_no_code_with_the_planner() -> None:
    source = MODULES["offplan.plan"].read_text()
    # So the search finds them.
    assert reached_modules(source, "make_plan") >= PLANNING
    found = reached_modules(source, "check_plan")
    assert found & PLANNING == set()
    # It proves the peak, by counting bytes as a prediction does.
    assert "offplan.memory" in found


@pytest.mark.parametrize(
    "source",
    [
        "from offplan.planner import Planner\ndef f():\n    Planner()",
        "from offplan.budget import Outlooks\ndef g():\n    Outlooks()\ndef f():\n    g()",
        "from offplan.budget import Outlooks\nclass G:\n    made = Outlooks\ndef f():\n    G()",
        "from offplan import planner\ndef f():\n    planner.Planner()",
        "import offplan.curve\ndef f():\n    return offplan.curve.Curve",
        "def f():\n    from offplan.schedule import step_time\n    step_time()",
        # Through a module that plans.
        "from offplan.plan import make_plan\ndef f():\n    make_plan()",
    ],
)
def test_code_that_plans_is_noticed(source: str) -> None:
    assert reached_modules(source, "f") & PLANNING


@pytest.mark.parametrize(
    "source",
    [
        "from offplan.budget import Aim, Predicted\ndef f(a: Aim):\n    Predicted()",
        "from offplan.budget import Outlooks\ndef g():\n    Outlooks()\ndef f():\n    pass",
        "from offplan.memory import predict\ndef f():\n    predict()",
    ],
)
def test_records_of_a_plan_and_predictions_are_not_planning(source: str) -> None:
    assert reached_modules(source, "f") & PLANNING == set()


def test_nothing_that_plans_is_imported_under_another_name() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in PLANNING:
                assert [alias.asname for alias in node.names if alias.asname] == [], module


@pytest.mark.parametrize("module", ["offplan", "offplan.__main__", "offplan.cli"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_module_that_is_not_in_the_table_is_noticed() -> None:
    assert allowed_for("offplan.utilities") is None
    assert allowed_for("offplan.trace.utilities") is None
    assert allowed_for("offplan.report.html") == TABLE["offplan.report.*"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.nn as nn",
        "def f():\n    from torch import nn",
        "from offplan import planner",
        "from offplan.planner import place",
        "import offplan.planner",
        "from offplan.target import Target",
        "from offplan.trace.capture import capture",
        "from . import planner",
        "class A:\n    if True:\n        import torch",
    ],
)
def test_a_forbidden_import_is_noticed(source: str) -> None:
    allowed = Allowed("errors", later="target")
    assert len(list(import_complaints(source, "offplan.plan", allowed))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from offplan import __version__",
        "from offplan.errors import PlanError",
        "def f():\n    from offplan.target import Target",
        "if TYPE_CHECKING:\n    from offplan.target import Target",
        "import torchvision",
    ],
)
def test_an_allowed_import_passes(source: str) -> None:
    allowed = Allowed("errors", later="target")
    assert list(import_complaints(source, "offplan.plan", allowed)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._guards import TracingContext",
        "from torch.library import _scoped_library",
        "import torch\ntorch._C",
        "import torch\nx = torch.cuda._lazy_init()",
        "from torch import fx as F\nF._x",
        "from torch import Tensor\nTensor._make_subclass(A, b)",
    ],
)
def test_a_private_torch_name_is_noticed(source: str) -> None:
    assert list(private_torch_complaints(source))


def test_public_torch_names_and_other_private_names_pass() -> None:
    source = "import torch\nfrom torch import nn\nnn.Linear.__init__\ntorch.fx.Graph\nself._x\n_y"
    assert list(private_torch_complaints(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}",
        "cache: dict[str, int] = dict()",
        "seen = collections.defaultdict(list)",
        "count = 0\ndef f():\n    global count",
        "NAMES = []\ndef f(x):\n    NAMES.append(x)",
        "NAMES = {}\ndef f(x):\n    NAMES[x] = 1",
        "NAMES = {}\ndef f(x):\n    del NAMES[x]",
    ],
)
def test_mutable_state_is_noticed(source: str) -> None:
    assert list(state_complaints(source))


def test_constants_and_local_containers_pass() -> None:
    source = (
        "_UNITS = {'b': 1}\n__all__ = ['f']\ndef f(x):\n    seen = []\n    seen.append(_UNITS[x])"
    )
    assert list(state_complaints(source)) == []
