"""Versions of stored documents: how what an earlier mlx-fleet wrote becomes what this one reads. Pure.

Every document begins with `{"storedVersion":N`. Whoever changes the shape of one (be it by one more
optional field: older processes refuse unknown fields) raises its number in `HISTORIES` and adds the
step from the number before. See docs/adr/0011-stored-versions.md.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

# A document of an earlier shape has no type any more: within this file and its steps it is a tree.
Tree: TypeAlias = dict[str, Any]
Migration: TypeAlias = Callable[[Tree], Tree]

# What the first fleets wrote, before documents said their version.
_UNSTAMPED = 1
_MEMBER = "storedVersion"
_STAMP = re.compile(rb'\s*\{\s*"storedVersion"\s*:\s*(\d+)\s*(?:,|(?=\}))')


class VersionError(ValueError):
    """The document has a version that this process cannot read; `is_newer` says in which direction."""

    def __init__(self, message: str, *, is_newer: bool) -> None:
        super().__init__(message)
        self.is_newer = is_newer


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionHistory:
    """One document's versions, from the oldest that can still be read to the one that is written."""

    current: int = 1
    steps: Mapping[int, Migration] = field(default_factory=dict)
    """By the version that it starts from: a pure function to the next version's tree."""

    def __post_init__(self) -> None:
        if sorted(self.steps) != list(range(self.oldest, self.current)):
            raise ValueError(f"there must be a step from each version to {self.current}")

    @property
    def oldest(self) -> int:
        """The oldest version that can be read."""
        return self.current - len(self.steps)

    @property
    def known(self) -> str:
        """What can be read, in words."""
        return f"{self.oldest} to {self.current}" if self.steps else str(self.current)


# By the name of the document's model. Who is not here has had one shape so far.
HISTORIES: Mapping[str, VersionHistory] = {}
_FIRST = VersionHistory()


def history_of(name: str, histories: Mapping[str, VersionHistory] = HISTORIES) -> VersionHistory:
    return histories.get(name, _FIRST)


@cache
def _prefix(version: int) -> bytes:
    return f'{{"{_MEMBER}":{version},'.encode()


def stamp_version(raw: bytes, version: int) -> bytes:
    """Return the document (canonical JSON) with its version as the first member."""
    prefix = _prefix(version)
    return (prefix if raw != b"{}" else prefix[:-1]) + raw[1:]


def split_version(raw: bytes) -> tuple[int, bytes]:
    """Return the document's version and the document without it, also if somebody edited it."""
    found = _STAMP.match(raw)
    if found is not None:
        return int(found[1]), b"{" + raw[found.end() :]
    if f'"{_MEMBER}"'.encode() not in raw:
        return _UNSTAMPED, raw
    import orjson  # noqa: PLC0415 - 20 ms for `fleetctl get`, which hardly ever comes by here

    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _UNSTAMPED, raw
    version = tree.pop(_MEMBER, _UNSTAMPED) if isinstance(tree, dict) else None
    # Whatever is wrong with it is told by whoever reads the document.
    return (version, orjson.dumps(tree)) if type(version) is int else (_UNSTAMPED, raw)


def migrate(raw: bytes, history: VersionHistory) -> bytes:
    """Return the document in its present shape, without its version.

    Raises:
        VersionError: it is newer than what this process knows, or older.

    """
    prefix = _prefix(history.current)
    if raw.startswith(prefix):  # what we wrote ourselves, which is nearly everything
        return b"{" + raw[len(prefix) :]
    version, document = split_version(raw)
    if version == history.current:
        return document
    known = f"this process reads {history.known}"
    if version > history.current:
        raise VersionError(
            f"its stored version is {version}, {known}. A newer mlx-fleet wrote it: upgrade this "
            "process to that release",
            is_newer=True,
        )
    if version < history.oldest:
        raise VersionError(
            f"its stored version is {version}, {known}. Run a release in between once, or delete "
            "the key",
            is_newer=False,
        )
    return _run_migrations(document, version, history)


def _run_migrations(document: bytes, version: int, history: VersionHistory) -> bytes:
    import orjson  # noqa: PLC0415 - as in `split`

    try:
        tree = orjson.loads(document)
        for number in range(version, history.current):
            tree = history.steps[number](tree)
        return orjson.dumps(tree)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise VersionError(
            f"its stored version is {version}, and it is not of that shape ({error!r}). Mend it, "
            "or delete the key",
            is_newer=False,
        ) from error
