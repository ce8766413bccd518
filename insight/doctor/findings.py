"""Findings of the checks, and their tree. Pure."""

from collections.abc import Sequence
from typing import Any

from schemas.wire.findings import Finding, Level

__all__ = ["Finding", "Level", "count_level", "findings_tree"]


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return the number of findings of a level."""
    return sum(one.level == level for one in findings)


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
