"""What a gateway knows of names and engines at one moment: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple


class Origin(NamedTuple):
    """Where an engine listens; what connections, load and penalties are counted by."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One engine that may be asked."""

    replica: str
    node: str
    deployment: str
    origin: Origin
    names: tuple[str, ...]
    """Names that the engine itself answers to, its deployment's own first."""
    version: int
    """Changes when the endpoint is published anew: then it may be tried once more."""
    template: str = ""
    """The version of the deployment that runs there; agents of before said nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a name's requests and who may serve it."""

    deployments: tuple[str, ...]
    weight: int = 1
    leased: tuple[Target, ...] = ()
    orphans: tuple[Target, ...] = ()
    """Engines whose lease is lost but which may live on; asked when nobody else is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One name that clients may use."""

    name: str
    created: int
    shares: tuple[Share, ...]
    reason: str
    """Why nothing is ready, should that be so."""
    sleepers: tuple[tuple[int, str], ...] = ()
    """Deployments that a request brings back from zero, with their weights."""

    def ready(self) -> int:
        """Return how many leased endpoints serve the name."""
        return sum(len(share.leased) for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A new version of a deployment that gets a part of its requests."""

    template: str
    weight: int
    """Percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Everything a gateway knows of names and engines at one moment."""

    models: Mapping[str, Model] = field(default_factory=lambda: MappingProxyType({}))
    endpoints: int = 0
    trials: Mapping[str, Trial] = field(default_factory=lambda: MappingProxyType({}))
    """By deployment."""
