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
# Indent of the advice below a finding.
_ADVICE_INDENT = 2


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings as text, with the advice below each."""
    width = max(len(one.check) for one in findings)
    level_width = max(4, *(len(one.level) for one in findings))
    lines: list[str] = []
    for one in findings:
        word = terminal.style(one.level.ljust(level_width), _ROLES[one.level])
        lines.append(f"{word}  {one.check.ljust(width)}  {_where(one)}{one.message}{_since(one)}")
        if one.advice:
            indent = " " * (level_width + _ADVICE_INDENT + width + 2)
            lines.append(indent + terminal.style(one.advice, "dim"))
    return "\n".join((*lines, "", summary_line(findings)))


def _where(finding: Finding) -> str:
    return f"node/{finding.node}: " if finding.node else ""


def _since(finding: Finding) -> str:
    if finding.since is None:
        return ""
    return f" (since {finding.since.isoformat(sep=' ', timespec='minutes')})"


def summary_line(findings: Sequence[Finding]) -> str:
    """Return the number of findings per level, such as `11 OK, 1 WARN, 0 FAIL`; UNKNOWN only if there are some."""
    counts = {level: count_level(findings, level) for level in _ROLES}
    return ", ".join(
        f"{number} {level}" for level, number in counts.items() if number or level != "UNKNOWN"
    )
