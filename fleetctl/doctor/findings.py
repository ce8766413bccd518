"""Findings of the checks: their levels, their text and their tree. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fleetctl.cli import terminal

Level = Literal["OK", "WARN", "FAIL"]
_ROLES: dict[Level, terminal.Role] = {"OK": "good", "WARN": "warn", "FAIL": "bad"}
# Indent of the advice below a finding.
_ADVICE_INDENT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check: store, leader, nodes, ..."""
    level: Level
    message: str
    """Observation, with the name of the object."""
    advice: str = ""
    """Remedy; empty if all is well."""


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return the number of findings of a level."""
    return sum(one.level == level for one in findings)


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings as text, with the advice below each."""
    width = max(len(one.check) for one in findings)
    lines: list[str] = []
    for one in findings:
        word = terminal.style(one.level.ljust(4), _ROLES[one.level])
        lines.append(f"{word}  {one.check.ljust(width)}  {one.message}")
        if one.advice:
            lines.append(" " * (_ADVICE_INDENT + width + 2) + terminal.style(one.advice, "dim"))
    return "\n".join((*lines, "", summary_line(findings)))


def summary_line(findings: Sequence[Finding]) -> str:
    """Return the number of findings per level, such as `11 OK, 1 WARN, 0 FAIL`."""
    return ", ".join(f"{count_level(findings, level)} {level}" for level in _ROLES)


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
