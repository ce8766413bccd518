"""Findings of agents about their machines: all of them for one node, only the problems for a fleet. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from insight.doctor.findings import Finding, ok
from schemas.quantity import counted

_MAX_NAMES = 5
# The fleet's own checks report these already, from what agents publish.
_CHECKED_FOR_THE_FLEET = frozenset(("disk", "thunderbolt bridge", "wired memory"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The findings of one agent about its machine, or the reason why there are none."""

    node: str
    findings: tuple[Finding, ...] = ()
    error: str = ""


def check_machines(reports: Sequence[MachineReport]) -> Iterator[Finding]:
    """Yield the problems that agents found on their machines, and one line about the rest."""
    examined = [one for one in reports if not one.error]
    bad = [
        found
        for one in examined
        for found in one.findings
        if found.level in ("WARN", "FAIL") and found.check not in _CHECKED_FOR_THE_FLEET
    ]
    yield from _grouped(bad)
    silent = [one for one in reports if one.error]
    if silent:
        yield Finding(
            check="machines",
            level="UNKNOWN",
            message=f"{counted(len(silent), 'machine was', 'machines were')} not examined: {silent[0].error}",
            advice="run `fleetctl doctor --local` on these machines",
        )
    if examined:
        number = counted(len(examined), "agent", "agents")
        result = "" if bad else " and found no problem"
        yield ok(
            "machines",
            f"{number} examined {'its machine' if len(examined) == 1 else 'their machines'}{result}",
        )


def _grouped(bad: Sequence[Finding]) -> Iterator[Finding]:
    """Yield each problem once, with the names of all nodes that have it: most settings are the same on every Mac."""
    by_problem: dict[tuple[str, str, str], list[Finding]] = {}
    for one in bad:
        by_problem.setdefault((one.check, one.level, one.message), []).append(one)
    for first, *others in by_problem.values():
        also = f" (also on {_names([one.node for one in others])})" if others else ""
        yield replace(first, message=f"{first.message}{also}")


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:_MAX_NAMES])
    return f"{shown} and {len(nodes) - _MAX_NAMES} more" if len(nodes) > _MAX_NAMES else shown


def report_findings(report: MachineReport) -> tuple[Finding, ...]:
    """Return all findings about one machine, for `doctor --node`."""
    if report.error:
        return (
            Finding(
                check="machine",
                level="FAIL",
                message=report.error,
                advice="run `fleetctl doctor --local` on that machine",
            ),
        )
    return report.findings
