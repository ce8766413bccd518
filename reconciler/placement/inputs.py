"""What is to be placed, as placement sees it. Pure.

Why a node cannot take a replica, as a value. Pure.
"""

from dataclasses import dataclass

from schemas import quantity
from schemas.deployment import ModelDeployment, ModelDeploymentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """One more replica of a deployment."""

    name: str
    """The deployment's."""
    spec: ModelDeploymentSpec
    apart_from: frozenset[str] = frozenset()
    """Deployments whose replicas must not be on the same node."""

    @property
    def path(self) -> str:
        return self.spec.model.path

    @property
    def override_bytes(self) -> int:
        """Return what spec.resources.memory says; 0 if it says nothing."""
        return quantity.parse(self.spec.resources.memory) if self.spec.resources else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What a deployment of a higher priority still misses."""

    want: PlacementRequest
    missing: int


def request_for(
    deployment: ModelDeployment, *, apart_from: frozenset[str] = frozenset()
) -> PlacementRequest:
    """Return what one more replica of the deployment wants."""
    return PlacementRequest(
        name=deployment.metadata.name, spec=deployment.spec, apart_from=apart_from
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a node cannot take a replica; `need` and `have` are what it is short of, in bytes where it is about bytes."""

    reason: str
    message: str
    need: int = 0
    have: int = 0
