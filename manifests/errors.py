"""Errors of manifests and of applying them, as messages for users."""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from schemas.meta import ObjectKey

_SHOWN = 20
_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestError:
    """One problem and its place. A value; `ManifestErrors` is the exception."""

    source: str
    """The file, or "standard input"."""
    message: str
    """The problem."""
    hint: str = ""
    """The remedy."""
    line: int = 0
    """From 1; 0 means the file as a whole."""
    column: int = 0
    """From 1."""
    about: str = ""
    """The object, as `ModelDeployment/qwen`."""
    path: str = ""
    """The field, as `spec.placement.pools[0]`."""

    @override
    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        text = ": ".join(part for part in (place, self.about, self.path, self.message) if part)
        return f"{text}. {self.hint}" if self.hint else text


class ManifestErrors(Exception):  # noqa: N818 - a collection of errors
    """All problems of an apply; nothing was written."""

    def __init__(self, problems: Sequence[ManifestError]) -> None:
        in_order = sorted(set(problems), key=lambda p: (p.source, p.line, p.column, str(p)))
        self.problems = tuple(in_order)
        super().__init__(self.show())

    def show(self, limit: int = _SHOWN) -> str:
        """Return the problems, one paragraph each, `limit` at most."""
        lines = [str(problem) for problem in self.problems[:limit]]
        rest = len(self.problems) - limit
        if rest > 0:
            lines.append(f"... and {rest} more {'problem' if rest == 1 else 'problems'}")
        return "\n".join(lines)


class ApplyError(Exception):
    """An apply stopped half-way; `__cause__` is the store's error, if there was one.

    Applying again is always safe: objects that are written already are unchanged.
    """

    def __init__(
        self, reason: str, *, written: Sequence[ObjectKey], missing: Sequence[ObjectKey]
    ) -> None:
        self.reason = reason
        self.written = tuple(written)
        self.missing = tuple(missing)
        total = len(self.written) + len(self.missing)
        objects = "object" if total == 1 else "objects"
        count = f"wrote {len(self.written) or 'none'} of {total} {objects}"
        parts = [f"{count}: {reason}", f"Not written: {join_names(self.missing)}"]
        if self.written:
            parts.append(f"Written: {join_names(self.written)}")
        parts.append("Applying again is safe: objects that are written already stay as they are")
        super().__init__(". ".join(parts) + ".")


class NotFoundError(Exception):
    """The object does not exist."""


class InUseError(Exception):
    """Other objects refer to it."""


class WriteRefusedError(Exception):
    """Users may not write or delete this kind."""


def join_names(keys: Sequence[ObjectKey], limit: int = _NAMED) -> str:
    """Return `Kind/name, Kind/name and 3 more`."""
    shown = ", ".join(f"{kind}/{name}" for kind, name in keys[:limit])
    rest = len(keys) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown
