"""What the doctor says about one thing, and how it is shown. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fleetctl import terminal

Level = Literal["OK", "WARN", "FAIL"]
_ROLES: dict[Level, terminal.Role] = {"OK": "good", "WARN": "warn", "FAIL": "bad"}
# Indents what follows under what was found.
_MARGIN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Which check: store, leader, nodes, ..."""
    level: Level
    message: str
    """What is so, with the name of what it is about."""
    advice: str = ""
    """What to do, where something is wrong."""


def count(found: Sequence[Finding], level: Level) -> int:
    return sum(one.level == level for one in found)


def text(found: Sequence[Finding]) -> str:
    """Return the findings for people, what to do below each."""
    width = max(len(one.check) for one in found)
    lines: list[str] = []
    for one in found:
        word = terminal.style(one.level.ljust(4), _ROLES[one.level])
        lines.append(f"{word}  {one.check.ljust(width)}  {one.message}")
        if one.advice:
            lines.append(" " * (_MARGIN + width + 2) + terminal.style(one.advice, "dim"))
    return "\n".join((*lines, "", summary(found)))


def summary(found: Sequence[Finding]) -> str:
    """Return how much is well, such as `11 OK, 1 WARN, 0 FAIL`."""
    return ", ".join(f"{count(found, level)} {level}" for level in _ROLES)


def tree(found: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for programs."""
    return {
        "ok": not count(found, "FAIL"),
        "findings": [
            {
                "check": one.check,
                "level": one.level,
                "message": one.message,
                **({"advice": one.advice} if one.advice else {}),
            }
            for one in found
        ],
    }
