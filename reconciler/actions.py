"""What the reconciler can do to the fleet: a closed set of values. Doing it is execute.py's job."""

from dataclasses import dataclass
from typing import TypeAlias

from reconciler.groups.group_view import GroupForm
from schemas.deployment import RevisionTemplate
from schemas.replica import LeavingRank, RankAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateReplica:
    """Assign a new replica to its nodes, one for each rank."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    """How they work together; None where there is one."""
    content: RevisionTemplate
    """What it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReplica:
    """Assign a replica of a lost node to others, in one write: as a new one of the name."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    content: RevisionTemplate
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformReplica:
    """Begin the next epoch of a replica whose ranks cannot go on together."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm
    failures: int
    """Epochs in a row that have failed by now."""
    because: str
    """Why the epoch before is over."""
    leaving: tuple[LeavingRank, ...] = ()
    """Ranks that may still be there where the next epoch has none, or others."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRanks:
    """Stop counting the memory of ranks of earlier epochs that have ended."""

    name: str
    leaving: tuple[LeavingRank, ...]
    """Those that have not."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReplica:
    """Ask the replica's agent to drain and stop it."""

    name: str
    because: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptReplica:
    """Ask another deployment's replica to drain and stop: its memory is needed for a higher priority."""

    name: str
    deployment: str
    """Whose it is."""
    by: str
    """The replica that takes its place."""
    because: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanReplica:
    """Leave a replica running though its deployment goes: a later one of the name may adopt it."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptReplica:
    """Make a replica that nobody owns the deployment's."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRevision:
    """Keep what the replicas run as the newest revision, be it again."""

    name: str
    template: str
    number: int
    cause: str
    """Why there is it."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRevision:
    """Drop a revision that is too old, or whose deployment is gone."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveReplica:
    """Forget a replica for which nothing runs any more."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDeployment:
    """Forget a deployment whose deletion was asked for and whose replicas are gone."""

    name: str
    version: int


Action: TypeAlias = (
    CreateReplica
    | MoveReplica
    | ReformReplica
    | ReleaseRanks
    | DeleteReplica
    | PreemptReplica
    | OrphanReplica
    | AdoptReplica
    | SaveRevision
    | RemoveRevision
    | RemoveReplica
    | RemoveDeployment
)
