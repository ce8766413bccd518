"""Findings of agents about their machines, in the doctor of the fleet and of one node."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from insight.doctor.checks import CHECKS
from insight.doctor.findings import Finding
from insight.doctor.machines import MachineReport, report_findings

WELL = Finding(check="sleep", level="OK", message="this Mac does not sleep on mains power")
SLEEPS = Finding(check="sleep", level="FAIL", message="it sleeps", advice="sudo pmset -c sleep 0")


def report(node: str, *found: Finding) -> MachineReport:
    return MachineReport(
        node=node,
        findings=tuple(
            Finding(check=f.check, level=f.level, message=f.message, advice=f.advice, node=node)
            for f in found
        ),
    )


def lines(*reports: MachineReport) -> list[str]:
    check = next(one for one in CHECKS if one.name == "machines")
    found = check.findings(SimpleNamespace(machines=reports))
    return [
        f"{finding.level} {finding.check} {finding.node}: {finding.message}" for finding in found
    ]


def test_machines_that_are_well_are_one_line() -> None:
    assert lines(*(report(f"mac-{n}", WELL, WELL) for n in range(3))) == [
        "OK machines : 3 agents examined their machines and found no problem"
    ]


def test_only_problems_of_a_machine_are_shown() -> None:
    unknown = Finding(check="gpu spin", level="UNKNOWN", message="nobody knows")
    assert lines(report("mac-1", WELL, SLEEPS, unknown), report("mac-2", WELL)) == [
        "FAIL sleep mac-1: it sleeps",
        "OK machines : 2 agents examined their machines",
    ]


def test_a_problem_of_many_machines_is_shown_once() -> None:
    found = lines(*(report(f"mac-{n}", SLEEPS) for n in range(9)))
    assert found[0] == (
        "FAIL sleep mac-0: it sleeps (also on mac-1, mac-2, mac-3, mac-4, mac-5 and 3 more)"
    )
    assert len(found) == 2


@pytest.mark.parametrize("check", ["disk", "thunderbolt bridge", "wired memory"])
def test_a_problem_that_the_fleet_checks_itself_is_not_said_twice(check: str) -> None:
    problem = Finding(check=check, level="FAIL", message="only 1 GiB")
    assert lines(report("mac-1", problem)) == [
        "OK machines : 1 agent examined its machine and found no problem"
    ]


def test_what_was_not_examined_is_unknown() -> None:
    silent = MachineReport(node="mac-2", error="node/mac-2 does not answer")
    assert lines(silent) == [
        "UNKNOWN machines : 1 machine was not examined: node/mac-2 does not answer",
    ]


def test_a_node_shows_everything_or_why_not() -> None:
    assert report_findings(report("mac-1", WELL))[0].level == "OK"
    [finding] = report_findings(MachineReport(node="mac-2", error="node/mac-2 does not answer"))
    assert (finding.level, finding.message) == ("FAIL", "node/mac-2 does not answer")


def test_the_times_of_a_problem_do_not_keep_it_from_being_shown_once() -> None:
    first = Finding(
        check="x", level="WARN", message="m", node="a", since=datetime(2026, 1, 1, tzinfo=UTC)
    )
    second = Finding(check="x", level="WARN", message="m", node="b")
    found = lines(
        MachineReport(node="a", findings=(first,)), MachineReport(node="b", findings=(second,))
    )
    assert found[0] == "WARN x a: m (also on b)"
