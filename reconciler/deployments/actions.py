"""The actions of the reconciler: a closed set of values. execute.py carries them out."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from reconciler.groups.group_view import GroupForm
from schemas.deployment import HubReference, RevisionTemplate
from schemas.replica import LeavingRank, RankAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateReplica:
    """Create a replica and assign its ranks to nodes."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    """The form in which the ranks work together; None for one rank."""
    content: RevisionTemplate
    """The version that it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReplica:
    """Assign a replica of a lost node to other nodes, in one write: as a new replica of the same name."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    content: RevisionTemplate
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformReplica:
    """Begin the next epoch of a replica with several ranks whose current epoch is over."""

    name: str
    ranks: tuple[RankAssignment, ...]
    form: GroupForm
    failures: int
    """Number of failed epochs in a row."""
    because: str
    """Reason why the last epoch is over."""
    leaving: tuple[LeavingRank, ...] = ()
    """Ranks of earlier epochs that may still run and that the next epoch does not reuse."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRanks:
    """Stop counting the memory of ranks of earlier epochs that have ended."""

    name: str
    leaving: tuple[LeavingRank, ...]
    """The ranks that have not ended."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """Let the ranks of an epoch start: each Mac has fetched its files."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReplica:
    """Mark a replica as deleted: its agents drain and stop it."""

    name: str
    because: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptReplica:
    """Mark a replica of another deployment as deleted, because one that goes before needs its memory."""

    name: str
    deployment: str
    """The deployment of the victim."""
    by: str
    """The replica that needs the memory."""
    reason: Literal["Preempted", "GaveWay"] = "Preempted"
    """Preempted by a higher priority; GaveWay if it was idle, and requests wait for a model at zero."""
    because: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanReplica:
    """Keep a replica running without its deployment; a later deployment of the name may adopt it."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptReplica:
    """Make the deployment the owner of an orphaned replica."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRevision:
    """Store the current version as the newest revision, even if it is an older one again."""

    name: str
    template: str
    number: int
    cause: str
    """Change cause of the revision."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveRevision:
    """Remove a revision beyond the history limit, or of a deployment that is gone."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveReplica:
    """Remove a deleted replica that has stopped everywhere."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDeployment:
    """Remove a deleted deployment that has no replicas."""

    name: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPreload:
    """Let a node fetch the deployment's model before it gets a replica."""

    name: str
    """The deployment."""
    node: str
    source: HubReference
    version: int
    """mod_revision of the preload of another commit that it replaces; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPreload:
    """Stop keeping the deployment's model on a node."""

    name: str
    node: str
    version: int


Action: TypeAlias = (
    CreateReplica
    | MoveReplica
    | ReformReplica
    | ReleaseRanks
    | StartRanks
    | DeleteReplica
    | PreemptReplica
    | OrphanReplica
    | AdoptReplica
    | SaveRevision
    | RemoveRevision
    | RemoveReplica
    | RemoveDeployment
    | StartPreload
    | EndPreload
)
