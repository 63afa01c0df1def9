"""A gate's result for the pages of code hosts and CI servers.

1.  ``github``: workflow commands, one line each: the checks that failed, then their findings on the
    source lines.  GitHub shows ten errors of a step; the log has all of them.
2.  ``gitlab``: a Code Quality report, one issue for each finding.
3.  ``junit``: a test suite with one case for each check; a failure has the findings as text.
4.  ``sarif``: SARIF 2.1.0, one rule for each check and one result for each finding.

A check that fails without findings is an issue itself; so is the peak, whose findings are what
there is, not what is wrong.  Paths are relative to the root of the repository.  ``gitlab`` and
``sarif`` need a place for everything: what has none is reported at the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import msgspec

from offplan import __version__
from offplan.gate import Check, GateResult
from offplan.report.document import Heading, plain, to_text
from offplan.report.findings import (
    MAX_ROWS,
    Finding,
    Place,
    Places,
    check_id,
    check_line,
    check_name,
    findings,
    findings_title,
    fingerprint,
    limit_and_actual,
    listing,
    message,
    title,
)

_JUNIT_WIDTH = 100
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


# --- GitHub ---------------------------------------------------------------------------------------


def github(result: GateResult, places: Places) -> str:
    return "".join(f"{line}\n" for line in _workflow_commands(result, places))


def _workflow_commands(result: GateResult, places: Places) -> Iterator[str]:
    for note in result.notes:
        yield _command("notice", {"title": "offplan gate"}, note)
    failed = [check for check in result.checks if not check.ok]
    for check in failed:
        yield _command("error", {"title": "offplan gate"}, check_line(check))
    for check in failed:
        for finding in findings(check)[:MAX_ROWS]:
            yield _annotation(check, finding, places)
    for check in result.checks:
        if check.ok:
            yield plain(f"ok: {check_line(check)}")


def _annotation(check: Check, finding: Finding, places: Places) -> str:
    properties = {"title": f"offplan gate: {check.rule or 'peak'}"}
    place = places.place(finding.source)
    if place is not None:
        properties = {"file": place.path, "line": str(place.line), **properties}
    # What is live at the peak is not wrong as such; and GitHub shows ten of each level.
    level = "warning" if check.rule is None else "error"
    return _command(level, properties, message(check, finding))


def _command(name: str, properties: dict[str, str], said: str) -> str:
    """A workflow command, escaped as GitHub's toolkit does."""
    listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {listed}::{_escaped(said)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


# --- what gitlab and sarif list -------------------------------------------------------------------


class _Issue(NamedTuple):
    check: Check
    said: str
    place: Place
    fingerprint: str
    module: str


def _issues(result: GateResult, places: Places) -> Iterator[_Issue]:
    home = places.home(result)
    for check in result.checks:
        if check.ok:
            continue
        limit, actual = limit_and_actual(check)
        rows = findings(check)
        if check.rule is None or not rows:
            yield _whole(result, check, rows, home)
            continue
        for row in rows:
            said = f"{message(check, row)} ({actual} in all, limit {limit})"
            name = fingerprint(title(result), row.fingerprint)
            yield _Issue(check, plain(said), places.place(row.source) or home, name, row.module)


def _whole(result: GateResult, check: Check, rows: Sequence[Finding], home: Place) -> _Issue:
    said = check_line(check)
    if rows:
        said += f"; the largest: {message(check, rows[0])}"
    return _Issue(check, plain(said), home, fingerprint(title(result), check_id(check)), "")


# --- GitLab ---------------------------------------------------------------------------------------


def gitlab(result: GateResult, places: Places) -> str:
    return _json(
        [
            {
                "description": issue.said,
                "check_name": f"offplan {check_id(issue.check)}",
                "fingerprint": issue.fingerprint,
                "severity": "major",
                "location": {
                    "path": issue.place.path,
                    "lines": {"begin": issue.place.line},
                },
            }
            for issue in _issues(result, places)
        ]
    )


# --- JUnit ----------------------------------------------------------------------------------------


def junit(result: GateResult, places: Places) -> str:
    failed = sum(not check.ok for check in result.checks)
    counts = {
        "tests": str(len(result.checks)),
        "failures": str(failed),
        "errors": "0",
    }
    suites = ElementTree.Element("testsuites", {"name": "offplan gate", **counts})
    name = plain(f"offplan gate {title(result)}")
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name, **counts, "skipped": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(properties, "property", {"name": "rules", "value": result.rules})
    file = places.home(result).path
    for check in result.checks:
        _add_case(suite, check, plain(title(result)), plain(file))
    if result.notes:
        notes = "".join(f"note: {plain(note)}\n" for note in result.notes)
        ElementTree.SubElement(suite, "system-out").text = notes
    ElementTree.indent(suites)
    body = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _add_case(suite: ElementTree.Element, check: Check, class_name: str, file: str) -> None:
    attributes = {"classname": class_name, "name": check_id(check), "file": file}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if check.ok:
        return
    attributes = {"message": check_line(check), "type": check.option}
    failure = ElementTree.SubElement(case, "failure", attributes)
    failure.text = check_line(check)
    if findings(check):
        blocks = (Heading(findings_title(check)), listing(check))
        failure.text += f"\n\n{to_text(blocks, _JUNIT_WIDTH)}"


# --- SARIF ----------------------------------------------------------------------------------------


def sarif(result: GateResult, places: Places) -> str:
    rules = [check_id(check) for check in result.checks]
    driver = {
        "name": "offplan",
        "version": __version__,
        "rules": [_sarif_rule(check) for check in result.checks],
    }
    invocation = {
        "executionSuccessful": True,
        "toolExecutionNotifications": [
            {"level": "note", "message": {"text": plain(note)}} for note in result.notes
        ],
    }
    run = {
        "tool": {"driver": driver},
        # Results of one target replace its own, not those of another.
        "automationDetails": {"id": plain(f"offplan gate {title(result)}/")},
        "invocations": [invocation],
        "results": [
            _sarif_result(issue, rules.index(check_id(issue.check)))
            for issue in _issues(result, places)
        ],
    }
    return _json({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _sarif_rule(check: Check) -> dict[str, object]:
    return {
        "id": check_id(check),
        "shortDescription": {"text": f"{check_name(check)}: limit {limit_and_actual(check)[0]}"},
        "defaultConfiguration": {"level": "error"},
    }


def _sarif_result(issue: _Issue, rule: int) -> dict[str, object]:
    location: dict[str, object] = {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(issue.place.path), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": issue.place.line},
        }
    }
    if issue.module:
        module = {"fullyQualifiedName": plain(issue.module), "kind": "module"}
        location["logicalLocations"] = [module]
    return {
        "ruleId": check_id(issue.check),
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": issue.said},
        "locations": [location],
        "partialFingerprints": {"offplan/v1": issue.fingerprint},
    }


def _json(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
