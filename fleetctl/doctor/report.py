"""Findings as text for people. Pure."""

from collections.abc import Sequence

from fleetctl.cli import terminal
from insight.doctor.findings import Finding, Level, count_level

_ROLES: dict[Level, terminal.Role] = {
    "OK": "good",
    "WARN": "warn",
    "FAIL": "bad",
    "UNKNOWN": "dim",
}


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings as text, with the advice below each."""
    width = max(len(finding.check) for finding in findings)
    level_width = max(4, *(len(finding.level) for finding in findings))
    lines: list[str] = []
    for finding in findings:
        level = terminal.style(finding.level.ljust(level_width), _ROLES[finding.level])
        where = f"node/{finding.node}: " if finding.node else ""
        at = "" if finding.since is None else finding.since.isoformat(sep=" ", timespec="minutes")
        since = f" (since {at})" if at else ""
        lines.append(f"{level}  {finding.check.ljust(width)}  {where}{finding.message}{since}")
        if finding.advice:
            indent = " " * (level_width + width + 4)
            lines.append(indent + terminal.style(finding.advice, "dim"))
    return "\n".join((*lines, "", summary_line(findings)))


def summary_line(findings: Sequence[Finding]) -> str:
    """Return the number of findings per level, such as `11 OK, 1 WARN, 0 FAIL`; UNKNOWN only if there are some."""
    counts = {level: count_level(findings, level) for level in _ROLES}
    return ", ".join(
        f"{number} {level}" for level, number in counts.items() if number or level != "UNKNOWN"
    )
