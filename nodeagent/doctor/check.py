"""A check of the doctor: its name, the facts that it needs, and a pure function from these facts to findings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

from nodeagent.doctor.host_facts import System
from schemas.wire.findings import Finding, Level

MAC: Final[frozenset[System]] = frozenset(("macOS",))
BOTH: Final[frozenset[System]] = frozenset(("macOS", "Linux"))


def finding(
    level: Level,
    message: str,
    advice: str = "",
    *,
    node: str = "",
    since: datetime | None = None,
    fix: str = "",
) -> Finding:
    """Return a finding; the registry gives it the name of its check."""
    return Finding(
        check="", level=level, message=message, advice=advice, node=node, since=since, fix=fix
    )


ok, warn, fail, unknown = (partial(finding, level) for level in ("OK", "WARN", "FAIL", "UNKNOWN"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a fleet or of a machine."""

    name: str
    """Stable name in findings."""
    run: Callable[..., Iterable[Finding]]
    """Judges the facts of `needs` and `uses`, which are its arguments by name."""
    needs: tuple[str, ...] = ()
    """Facts without which nothing can be said."""
    uses: tuple[str, ...] = ()
    """Further facts, which may be None."""
    unknown: Finding | None = None
    """The finding if a needed fact is missing; None: the check is left out, because the fact was not observed."""
    remedy: str = ""
    """Advice for problems that have none of their own."""
    systems: frozenset[System] = BOTH
    purpose: str = ""
    """The failure that it finds, for the documentation."""
    source: str = ""
    """Commands and files that are read for it, for the documentation."""

    def findings(self, facts: object) -> Iterator[Finding]:
        """Yield what it finds in the facts."""
        values = {name: getattr(facts, name) for name in (*self.needs, *self.uses)}
        if any(values[name] is None for name in self.needs):
            results: Iterable[Finding] = () if self.unknown is None else (self.unknown,)
        else:
            results = self.run(**values)
        for result in results:
            remedy = self.remedy if result.level in ("WARN", "FAIL") else ""
            yield replace(result, check=result.check or self.name, advice=result.advice or remedy)


def run_all(checks: Iterable[Check], facts: object) -> list[Finding]:
    """Return the findings of checks, in their order."""
    return [result for check in checks for result in check.findings(facts)]


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
