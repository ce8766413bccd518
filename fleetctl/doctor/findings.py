"""Findings of the checks: their levels, their text and their tree. Pure."""

from collections.abc import Sequence
from typing import Any

from fleetctl.cli import terminal
from schemas.wire.findings import Finding, Level

__all__ = [
    "Finding",
    "Level",
    "count_level",
    "counted",
    "findings_tree",
    "format_findings",
    "ok",
    "summary_line",
]

_ROLES: dict[Level, terminal.Role] = {
    "OK": "good",
    "WARN": "warn",
    "FAIL": "bad",
    "UNKNOWN": "dim",
}
# Indent of the advice below a finding.
_ADVICE_INDENT = 2


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return the number of findings of a level."""
    return sum(one.level == level for one in findings)


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


def findings_tree(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for `-o json`."""
    return {
        "ok": not count_level(findings, "FAIL"),
        "findings": [
            {
                "check": one.check,
                "level": one.level,
                "message": one.message,
                **({"advice": one.advice} if one.advice else {}),
                **({"node": one.node} if one.node else {}),
                **({"since": one.since.isoformat()} if one.since is not None else {}),
                **({"fix": one.fix} if one.fix else {}),
            }
            for one in findings
        ],
    }


def ok(check: str, message: str) -> Finding:
    """Return the finding of a check that found no problem."""
    return Finding(check=check, level="OK", message=message)


def counted(number: int, one: str, several: str) -> str:
    """Return a number with its noun phrase."""
    return f"{number} {one if number == 1 else several}"
