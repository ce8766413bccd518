"""Endpoints that lost their lease while their deployment still exists: they are used where no leased one is. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.routing.table import EngineEndpoint
from gateway.state.build_table import TableInputs
from schemas.deployment import ModelDeployment
from store import keys

# The longest time that an engine may outlive its agent's lease and still be tried. An agent update
# or an etcd outage is over by then; a Mac that is gone has refused its first connection long
# before.
ORPHAN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanEndpoint:
    """An endpoint that lost its lease while its deployment still exists."""

    endpoint: EngineEndpoint
    until_s: float


def orphans_of(
    known: Mapping[str, OrphanEndpoint],
    before: Mapping[str, EngineEndpoint],
    now: TableInputs,
    now_s: float,
) -> dict[str, OrphanEndpoint]:
    """Return the orphans after a change; `before` are the leased endpoints until now."""
    fresh = {
        replica: OrphanEndpoint(endpoint=endpoint, until_s=now_s + ORPHAN_S)
        for replica, endpoint in before.items()
    }
    orphans = {**known, **fresh}
    # Another engine may be published where an orphan was: its address answers for that one now.
    taken = {endpoint.origin for endpoint in now.leased.values()} if orphans else set()
    return {
        replica: orphan
        for replica, orphan in orphans.items()
        if replica not in now.leased
        and orphan.until_s > now_s
        and orphan.endpoint.origin not in taken
        and keys.endpoint_key(orphan.endpoint.node, replica) not in now.refused
        and _is_kept(now.deployments.get(orphan.endpoint.deployment))
    }


def _is_kept(deployment: ModelDeployment | None) -> bool:
    return deployment is not None and deployment.metadata.deletion_timestamp is None
