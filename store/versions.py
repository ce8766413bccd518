"""Versions of stored documents, and their migration to the current shape. Pure.

Every document begins with `{"storedVersion":N`. A change of a document's shape, even one more optional field (older
processes refuse unknown fields), raises its number in `HISTORIES` and adds the step from the number before.
See docs/adr/0009-serialization.md.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

# Documents of earlier shapes have no type: in this file and in migrations they are trees.
Tree: TypeAlias = dict[str, Any]
Migration: TypeAlias = Callable[[Tree], Tree]

# The first fleets wrote documents without a version.
_UNSTAMPED = 1
_MEMBER = "storedVersion"
_STAMP = re.compile(rb'\s*\{\s*"storedVersion"\s*:\s*(\d+)\s*(?:,|(?=\}))')


class VersionError(ValueError):
    """The document has a version that this process cannot read; `is_newer` tells in which direction."""

    def __init__(self, message: str, *, is_newer: bool) -> None:
        super().__init__(message)
        self.is_newer = is_newer


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionHistory:
    """The versions of one document, from the oldest that can be read to the current one."""

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
        """The versions that can be read, as text."""
        return f"{self.oldest} to {self.current}" if self.steps else str(self.current)


def _unchanged(tree: Tree) -> Tree:
    """Return the tree as it is: the next version has one more optional field."""
    return tree


def _role_for_admin(tree: Tree) -> Tree:
    """Return an API key with a role in place of `isAdmin`."""
    rest = {name: value for name, value in tree.items() if name != "isAdmin"}
    return {**rest, "role": "admin" if tree.get("isAdmin") else "user"}


def _fields_added(times: int) -> VersionHistory:
    """Return the history of a document that had one more optional field, or some of them, so many times."""
    return VersionHistory(current=1 + times, steps=dict.fromkeys(range(1, 1 + times), _unchanged))


# By the name of the document's model. Models that are missing have had one shape so far.
HISTORIES: Mapping[str, VersionHistory] = {
    "NodeLease": _fields_added(2),  # hasStorePassword; tls and insecureFlags
    "GatewayLease": _fields_added(
        2
    ),  # hasStorePassword, and https in its url; tls and insecureFlags
    "DashboardLease": _fields_added(1),  # tls
    "ReconcilerLease": _fields_added(2),  # joinAddress, tls; url
    # the commits' author and subject, and the preview, in its status; values in its drift
    "GitSource": _fields_added(2),
    "GitSourceStatus": _fields_added(2),
    "ApiKey": VersionHistory(current=2, steps={1: _role_for_admin}),
    # rateLimit and cacheSharing in its routing; hub in its model; performance; objectives; ngram in its model;
    # thresholds in placement.tier, nodePriorities in its status; vision; concurrency may be Auto, and
    # tokens in kvCache; healthCheck in its routing, and keep in kvCache; mtp in its model
    "ModelDeployment": _fields_added(10),
    # nodePriorities; concurrency; concurrencyLimit
    "ModelDeploymentStatus": _fields_added(3),
    # hub in its model; fetches in its status; performance; ngram in its model; vision; concurrency in its proofs,
    # and tokens in kvCache; concurrencyLimit in its proofs, and keep in kvCache; mtp in its model
    "Replica": _fields_added(8),
    "ReplicaStatus": _fields_added(1),  # fetches
    "RankStatus": _fields_added(1),  # fetch
    # hub in its model; performance; ngram in its model; vision; concurrency may be Auto; keep in kvCache; mtp in
    # its model
    "Revision": _fields_added(7),
    # rateLimit and cacheSharing in its routing; external; mirror; healthCheck in its routing
    "ModelRoute": _fields_added(4),
    "Endpoint": _fields_added(1),  # startSeconds
    # wiredLimit and the prefixLength of interfaces in its status; cores and Metal; hasMtpHead in its models
    "Node": _fields_added(3),
    "NodeStatus": _fields_added(3),
    "ModelSnapshot": _fields_added(1),  # hasMtpHead in its weights
    "ModelOffer": _fields_added(1),  # the same
    "NodePool": _fields_added(1),  # wiredLimit
    "ShardGroup": _fields_added(2),  # allowUnencryptedRing; fabric, and fabricChecks in its status
    "ShardGroupStatus": _fields_added(1),  # fabricChecks
}
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
    """Return the document's version and the document without it; handles documents that were edited by hand."""
    found = _STAMP.match(raw)
    if found is not None:
        return int(found[1]), b"{" + raw[found.end() :]
    if f'"{_MEMBER}"'.encode() not in raw:
        return _UNSTAMPED, raw
    import orjson  # noqa: PLC0415 - 20 ms for `fleetctl get`, which rarely needs it

    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _UNSTAMPED, raw
    version = tree.pop(_MEMBER, _UNSTAMPED) if isinstance(tree, dict) else None
    # The decoder reports whatever else is wrong.
    return (version, orjson.dumps(tree)) if type(version) is int else (_UNSTAMPED, raw)


def migrate(raw: bytes, history: VersionHistory) -> bytes:
    """Return the document in its current shape, without its version.

    Raises:
        VersionError: it is newer than this process knows, or too old.

    """
    prefix = _prefix(history.current)
    if raw.startswith(prefix):  # written by this version, as nearly all documents are
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
            f"its stored version is {version}, {known}. Run an intermediate release once, or delete "
            "the key",
            is_newer=False,
        )
    return _run_migrations(document, version, history)


def _run_migrations(document: bytes, version: int, history: VersionHistory) -> bytes:
    import orjson  # noqa: PLC0415 - as in `split`

    try:
        tree = orjson.loads(document)
    except ValueError as error:
        raise VersionError(
            f"is not JSON ({error}). Repair it, or delete the key", is_newer=False
        ) from error
    try:
        for number in range(version, history.current):
            tree = history.steps[number](tree)
        return orjson.dumps(tree)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise VersionError(
            f"its stored version is {version}, but it does not have that shape ({error!r}). Repair it, "
            "or delete the key",
            is_newer=False,
        ) from error
