"""What is to be placed, as placement sees it. Pure."""

from dataclasses import dataclass

from schemas import quantity
from schemas.deployment import ModelDeployment, ModelDeploymentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
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

    want: Want
    missing: int


def want_of(deployment: ModelDeployment, *, apart_from: frozenset[str] = frozenset()) -> Want:
    """Return what one more replica of the deployment wants."""
    return Want(name=deployment.metadata.name, spec=deployment.spec, apart_from=apart_from)
