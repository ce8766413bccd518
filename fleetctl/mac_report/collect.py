"""Collection of a report: runs the commands of macOS in several kinds of processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetctl.cli.errors import FleetctlError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Settings of one report."""

    has_sudo: bool = False
    model: Path | None = None
    key: str = ""
    """Words for the keyed hash; empty for random ones."""


class Report:
    """A finished report."""

    holds = False

    def write(self, path: Path) -> None:
        """Write the archive. Raises OSError."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """Return lines for the owner."""
        return []


async def collect_report(settings: ReportSettings, show: Callable[[str], object]) -> Report:
    """Collect a report."""
    show(f"key: {settings.key or 'random'}")
    raise FleetctlError("mac-report is not complete in this version")
