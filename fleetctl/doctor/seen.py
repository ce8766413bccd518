"""What the doctor saw: values to judge."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleetctl.fabric.judging import Verdict
from fleetctl.skew import Versions
from schemas.meta import ApiObject
from schemas.node import Node
from schemas.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """How the store is."""

    address: str
    version: str
    read_s: float
    """How long it took to answer a read that every member has to agree on."""
    write_error: str = ""
    """Why it takes no writes; empty if it does."""
    is_restoring: bool = False
    """Whether `fleetctl restore` is at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of asking somebody over HTTP or TCP from here."""

    label: str
    """For people: `node/mac-1`, `gateway/1f2e`, `replica/qwen-0`."""
    url: str
    error: str = ""
    """Why there was no good answer; empty if there was one."""
    offset_s: float | None = None
    """How far its clock is ahead of ours, in seconds, give or take one; None if it did not say."""
    holds_lease: bool = True
    """Whether it thinks that the fleet knows of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk of this machine that has the fleet's folder."""

    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that was looked at."""

    store: Store
    versions: Versions
    skew: Sequence[str]
    nodes: Sequence[Node]
    ready: frozenset[str]
    replicas: Sequence[Replica]
    objects: Sequence[ApiObject]
    """Objects of the kinds that have a condition which says whether they are well."""
    verdicts: Sequence[Verdict]
    """About each ShardGroup."""
    agents: Sequence[Answer]
    gateways: Sequence[Answer]
    engines: Sequence[Answer]
    disk: Disk | None = None
    """None if the fleet has no folder on this machine."""
