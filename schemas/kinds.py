"""The list of kinds: classes, plural and short names. The one place where a new kind is added."""

from dataclasses import dataclass

from schemas.deployment import ModelDeployment
from schemas.event import Event
from schemas.fabrictest import FabricTest
from schemas.gitsource import GitSource
from schemas.meta import ApiObject
from schemas.node import Node
from schemas.pools import NodePool
from schemas.replica import Endpoint, Replica
from schemas.revision import Revision
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object; `written_by_users` says whether `apply` takes it."""

    type: type[ApiObject]
    plural: str
    short: str
    written_by_users: bool

    @property
    def name(self) -> str:
        return self.type.__name__


KINDS: tuple[Kind, ...] = (
    Kind(type=ModelDeployment, plural="modeldeployments", short="md", written_by_users=True),
    Kind(type=NodePool, plural="nodepools", short="np", written_by_users=True),
    Kind(type=ShardGroup, plural="shardgroups", short="sg", written_by_users=True),
    Kind(type=ModelRoute, plural="modelroutes", short="mr", written_by_users=True),
    Kind(type=GitSource, plural="gitsources", short="gs", written_by_users=True),
    Kind(type=Node, plural="nodes", short="no", written_by_users=True),
    Kind(type=Replica, plural="replicas", short="rep", written_by_users=False),
    Kind(type=Endpoint, plural="endpoints", short="ep", written_by_users=False),
    Kind(type=Revision, plural="revisions", short="rev", written_by_users=False),
    Kind(type=Event, plural="events", short="ev", written_by_users=False),
    Kind(type=FabricTest, plural="fabrictests", short="ft", written_by_users=False),
)


def by_name(name: str) -> Kind | None:
    """Return the kind that is spelled so in a manifest; None if there is none."""
    return next((kind for kind in KINDS if kind.name == name), None)


def by_alias(word: str) -> Kind | None:
    """Return the kind that a person means: `md`, `modeldeployment`, `ModelDeployments`."""
    low = word.lower()
    return next((k for k in KINDS if low in (k.plural, k.short, k.name.lower())), None)
