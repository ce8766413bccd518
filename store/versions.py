"""Versions of stored documents. Pure.

Every document begins with `{"storedVersion":N`. A process refuses a document of a newer version, and never overwrites
it: it would drop what it does not know. See docs/adr/0009-serialization.md.
"""

import re
from collections.abc import Mapping
from functools import cache

# By the name of the document's model. A model that is missing has version 1, the shape of release 0.1.0. A release that
# changes a shape raises its number here, and reads both.
VERSIONS: Mapping[str, int] = {}
_MEMBER = "storedVersion"
_STAMP = re.compile(rb'\s*\{\s*"storedVersion"\s*:\s*(\d+)\s*(?:,|(?=\}))')


class VersionError(ValueError):
    """The document has a version that this process cannot read; `is_newer` tells in which direction."""

    def __init__(self, message: str, *, is_newer: bool) -> None:
        super().__init__(message)
        self.is_newer = is_newer


def version_of(model: str) -> int:
    """Return the version in which this process writes documents of a model, by its name."""
    return VERSIONS.get(model, 1)


@cache
def _prefix(version: int) -> bytes:
    return f'{{"{_MEMBER}":{version},'.encode()


def stamp_version(raw: bytes, version: int) -> bytes:
    """Return the document (canonical JSON) with its version as the first member."""
    prefix = _prefix(version)
    return (prefix if raw != b"{}" else prefix[:-1]) + raw[1:]


def split_version(raw: bytes) -> tuple[int, bytes]:
    """Return the document's version, 0 if it has none, and the document without it; also of one edited by hand."""
    match = _STAMP.match(raw)
    if match is not None:
        return int(match[1]), b"{" + raw[match.end() :]
    if f'"{_MEMBER}"'.encode() not in raw:
        return 0, raw
    import orjson  # noqa: PLC0415 - 20 ms for `fleetctl get`, which rarely needs it

    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return 0, raw
    version = tree.pop(_MEMBER, 0) if isinstance(tree, dict) else None
    # The decoder reports whatever else is wrong.
    return (version, orjson.dumps(tree)) if type(version) is int else (0, raw)


def unstamp(raw: bytes, version: int) -> bytes:
    """Return the document without its version; one without a version was written by hand, and is read as current.

    Raises:
        VersionError: it has another version than this one.

    """
    prefix = _prefix(version)
    if raw.startswith(prefix):  # written by this version, as nearly all documents are
        return b"{" + raw[len(prefix) :]
    stored, document = split_version(raw)
    if stored in (0, version):
        return document
    if stored > version:
        raise VersionError(
            f"its stored version is {stored}, this process reads {version}. A newer mlx-fleet wrote it: upgrade this "
            "process to that release",
            is_newer=True,
        )
    raise VersionError(
        f"its stored version is {stored}, this process reads {version}. Delete the key",
        is_newer=False,
    )
