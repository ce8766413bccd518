"""Findings of the checks, and their tree. Pure."""

from collections.abc import Sequence
from typing import Any

from schemas.wire.findings import Finding, Level

__all__ = ["Finding", "Level", "count_level", "findings_tree"]


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return the number of findings of a level."""
    return sum(finding.level == level for finding in findings)


def findings_tree(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for `-o json`."""
    return {
        "ok": not count_level(findings, "FAIL"),
        "findings": [
            {
                "check": finding.check,
                "level": finding.level,
                "message": finding.message,
                **({"advice": finding.advice} if finding.advice else {}),
                **({"node": finding.node} if finding.node else {}),
                **({"since": finding.since.isoformat()} if finding.since is not None else {}),
                **({"fix": finding.fix} if finding.fix else {}),
            }
            for finding in findings
        ],
    }
