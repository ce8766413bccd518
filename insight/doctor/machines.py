"""Findings of agents about their machines: all of them for one node, only the problems for a fleet. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from insight.doctor.findings import Finding
from nodeagent.doctor.check import listed, ok, unknown
from schemas.quantity import counted

# The fleet's own checks report these already, from what agents publish.
_CHECKED_FOR_THE_FLEET = frozenset(("disk", "thunderbolt bridge", "wired memory"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The findings of one agent about its machine, or the reason why there are none."""

    node: str
    findings: tuple[Finding, ...] = ()
    error: str = ""


def check_machines(machines: Sequence[MachineReport]) -> Iterator[Finding]:
    """Yield the problems that agents found on their machines, and one line about the rest.

    Each problem comes once, with the names of all nodes that have it: most settings are the same on every Mac.
    """
    examined = [report for report in machines if not report.error]
    by_problem: dict[tuple[str, str, str], list[Finding]] = {}
    for report in examined:
        for finding in report.findings:
            if finding.level in ("WARN", "FAIL") and finding.check not in _CHECKED_FOR_THE_FLEET:
                key = (finding.check, finding.level, finding.message)
                by_problem.setdefault(key, []).append(finding)
    for first, *others in by_problem.values():
        also = f" (also on {listed([other.node for other in others])})" if others else ""
        yield replace(first, message=f"{first.message}{also}")
    silent = [report for report in machines if report.error]
    if silent:
        yield unknown(
            f"{counted(len(silent), 'machine was', 'machines were')} not examined: {silent[0].error}",
            "run `fleetctl doctor --local` on these machines",
        )
    if examined:
        agents = counted(len(examined), "agent", "agents")
        whose = "its machine" if len(examined) == 1 else "their machines"
        result = "" if by_problem else " and found no problem"
        yield ok(f"{agents} examined {whose}{result}")


def report_findings(report: MachineReport) -> tuple[Finding, ...]:
    """Return all findings about one machine, for `doctor --node`."""
    if not report.error:
        return report.findings
    advice = "run `fleetctl doctor --local` on that machine"
    return (Finding(check="machine", level="FAIL", message=report.error, advice=advice),)
