"""What the reconciler can do to the fleet: a closed set of values. Doing it is execute.py's job."""

from dataclasses import dataclass
from typing import TypeAlias

from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateReplica:
    """Assign a new replica to a node."""

    name: str
    node: str
    memory: MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReplica:
    """Assign a replica of a lost node to another one, in one write."""

    name: str
    node: str
    memory: MemoryProof
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
    CreateReplica | MoveReplica | DeleteReplica | PreemptReplica | RemoveReplica | RemoveDeployment
)
