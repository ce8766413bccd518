"""Who may read and write which keys: etcd's roles as data. Pure.

A role is what one process needs for its work, and nothing else; docs/operations/security.md says why
for each. Where a key lies is `store.keys`' to say; here is who may go there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from schemas.kinds import KINDS
from store import keys

ROOT_USER = "root"
"""etcd's own name for who may do everything; it knows no other."""


class Right(StrEnum):
    """What may be done with a key; deleting is writing."""

    READ = "READ"
    WRITE = "WRITE"
    READWRITE = "READWRITE"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Permission:
    """A right to one key, or to all from `key` up to but without `end`."""

    key: str
    end: str = ""
    right: Right


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user of etcd; its one role has the same name."""

    user: str
    file: str
    """The name of the file with its password."""
    permissions: frozenset[Permission]


def below(prefix: str, right: Right) -> Permission:
    """Return the right to every key that begins with the prefix."""
    return Permission(key=prefix, end=keys.prefix_end(prefix), right=right)


def one(key: str, right: Right) -> Permission:
    return Permission(key=key, right=right)


def accounts(nodes: Iterable[str], *, prefix: str = "") -> tuple[Account, ...]:
    """Return the users of a fleet whose keys lie below the prefix, with an agent for each node."""
    made = [
        _account("admin", _admin(), prefix),
        _account("reconciler", _reconciler(), prefix),
        _account("gateway", _gateway(), prefix),
        *(_account(f"node-{name}", _agent(name), prefix) for name in sorted(set(nodes))),
    ]
    return tuple(made)


def node_of(user: str, *, prefix: str = "") -> str | None:
    """Return the node whose agent has this user in the fleet below the prefix."""
    head, tail = "fleet-node-", _mark(prefix)
    if not (user.startswith(head) and user.endswith(tail)):
        return None
    name = user.removeprefix(head).removesuffix(tail)
    # No name of a node has an @: it is another fleet's.
    return name if name and "@" not in name else None


def _account(component: str, permissions: Iterable[Permission], prefix: str) -> Account:
    moved = (
        Permission(key=prefix + p.key, end=p.end and prefix + p.end, right=p.right)
        for p in permissions
    )
    return Account(
        user=f"fleet-{component}{_mark(prefix)}",
        file=f"{component}.env",
        permissions=frozenset(moved),
    )


def _mark(prefix: str) -> str:
    """Return what tells the users of two fleets in one etcd apart."""
    return f"@{prefix}" if prefix else ""


def _admin() -> list[Permission]:
    """Who uses fleetctl: sees everything, writes what users declare, and secrets."""
    declared = [kind.name for kind in KINDS if kind.written_by_users]
    # What is deleted at once takes its status with it; a deployment is marked, and goes later.
    removed = [kind for kind in declared if kind != "ModelDeployment"]
    return [
        below(f"{keys.ROOT}/", Right.READ),
        *(below(keys.spec_prefix(kind), Right.READWRITE) for kind in declared),
        # A replica is deleted to have it made anew.
        below(keys.spec_prefix("Replica"), Right.READWRITE),
        *(below(keys.status_prefix(kind), Right.READWRITE) for kind in removed),
        below(keys.SECRET_PREFIX, Right.READWRITE),
        below(keys.FABRIC_TEST_PREFIX, Right.READWRITE),
        below(keys.APPLY_SET_PREFIX, Right.READWRITE),
        below(keys.TICKET_PREFIX, Right.READWRITE),
    ]


def _reconciler() -> list[Permission]:
    judged = ("ModelDeployment", "NodePool", "ShardGroup", "ModelRoute", "GitSource", "Replica")
    return [
        *(below(prefix, Right.READ) for prefix in (keys.SPEC_PREFIX, keys.STATUS_PREFIX)),
        *(below(prefix, Right.READ) for prefix in (keys.NODE_LEASE_PREFIX, keys.ENDPOINT_PREFIX)),
        # Where gateways show how busy deployments are.
        below(keys.GATEWAY_LEASE_PREFIX, Right.READ),
        # It places replicas, registers nodes, and removes deployments whose replicas are gone.
        *(
            below(keys.spec_prefix(kind), Right.READWRITE)
            for kind in ("Replica", "Revision", "Node", "ModelDeployment")
        ),
        # What a GitSource says is applied, and pruned, by the leader.
        *(
            below(keys.spec_prefix(kind), Right.READWRITE)
            for kind in ("NodePool", "ShardGroup", "ModelRoute", "GitSource")
        ),
        below(keys.APPLY_SET_PREFIX, Right.READWRITE),
        *(below(keys.status_prefix(kind), Right.READWRITE) for kind in judged),
        # What agents said of a replica goes with the replica.
        below(keys.RANK_PREFIX, Right.READWRITE),
        below(keys.NODE_LIFE_PREFIX, Right.READWRITE),
        # Watching a key is watching what begins with it.
        below(keys.ELECTION_RECONCILER, Right.READWRITE),
        below(keys.event_prefix("reconciler"), Right.READWRITE),
    ]


def _gateway() -> list[Permission]:
    """Return what its table is made of; it writes where it is found, and nothing else."""
    prefixes = (
        keys.ENDPOINT_PREFIX,
        keys.spec_prefix("ModelDeployment"),
        keys.status_prefix("ModelDeployment"),
        keys.spec_prefix("ModelRoute"),
        # Labels, which say at which site a Mac is.
        keys.spec_prefix("Node"),
        # For its admin API: which Macs there are, and whether their agents live.
        keys.status_prefix("Node"),
        keys.NODE_LEASE_PREFIX,
        # Hashes of keys, never the keys.
        keys.API_KEY_PREFIX,
        # Who may read its log; the secrets of other holders' tickets are only hashes.
        keys.ticket_prefix("Gateway"),
    )
    return [
        *(below(prefix, Right.READ) for prefix in prefixes),
        below(keys.GATEWAY_LEASE_PREFIX, Right.READWRITE),
    ]


def _agent(node: str) -> list[Permission]:
    return [
        below(keys.spec_prefix("Replica"), Right.READ),
        below(keys.spec_prefix("ModelDeployment"), Right.READ),
        # The models that groups fall back on are looked at as well.
        below(keys.spec_prefix("ShardGroup"), Right.READ),
        # Nothing that is missing is gone while a backup is restored.
        one(keys.RESTORING, Right.READ),
        one(keys.node_lease_key(node), Right.READWRITE),
        one(keys.status_key("Node", node), Right.READWRITE),
        below(keys.rank_prefix(node), Right.READWRITE),
        below(keys.endpoint_prefix(node), Right.READWRITE),
        below(keys.event_prefix(f"Node/{node}"), Right.READWRITE),
        below(keys.FABRIC_TEST_PREFIX, Right.READ),
        below(keys.fabric_rank_prefix(node), Right.READWRITE),
        below(keys.ticket_prefix(f"Node/{node}"), Right.READ),
    ]
