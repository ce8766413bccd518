"""The etcd users of a fleet: the keys that each may read and write, and the files with their passwords.

A role has the permissions that one process needs, and no others; docs/operations/etcd-security.md gives the reasons.
`store.keys` defines the keys themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from machinery import process_secrets
from schemas.kinds import KINDS
from store import keys

_USER, _PASSWORD = "FLEET_ETCD_USER", "FLEET_ETCD_PASSWORD"


class CredentialsError(ValueError):
    """The credentials file is missing or invalid; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """User and password for etcd. `user` is empty if the file contains only the password."""

    user: str
    password: str = field(repr=False)


def render_credentials(found: Credentials, comment: str) -> str:
    """Return the text of a credentials file: for a shell, systemd's EnvironmentFile, and `read_credentials`."""
    return f"# {comment}\n{_USER}={found.user}\n{_PASSWORD}={found.password}\n"


def read_credentials(path: Path) -> Credentials:
    """Read a file with the password on one line, or one of `render_credentials`.

    Raises:
        CredentialsError: it cannot be read, other users may read it, or it has neither form.

    """
    try:
        text = process_secrets.read_secret_file(path).decode()
    except process_secrets.OpenSecretError as error:
        raise CredentialsError(str(error)) from error
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} is not text: {_WANTED}") from error
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    named = dict(
        line.split("=", 1) for line in lines if line.startswith((f"{_USER}=", f"{_PASSWORD}="))
    )
    if named.get(_PASSWORD):
        return Credentials(user=named.get(_USER, ""), password=named[_PASSWORD])
    if len(lines) != 1 or named:
        raise CredentialsError(f"{path} holds no password: {_WANTED}")
    return Credentials(user="", password=lines[0])


_WANTED = (
    "expected one line with the password, or a file of `fleetctl init-auth` with "
    f"{_USER}=... and {_PASSWORD}=..."
)


ROOT_USER = "root"
"""etcd's fixed name for the user with all rights."""


class Right(StrEnum):
    """A kind of access to a key; deleting counts as writing."""

    READ = "READ"
    WRITE = "WRITE"
    READWRITE = "READWRITE"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Permission:
    """A right to one key, or to the keys from `key` up to, but not including, `end`."""

    key: str
    end: str = ""
    right: Right


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user of etcd, and its only role."""

    user: str
    role: str
    """The name of the role; several gateways have a user each, and one role."""
    file: str
    """The name of the file with its password."""
    permissions: frozenset[Permission]


def prefix_permission(prefix: str, right: Right) -> Permission:
    """Return the right to every key that begins with the prefix."""
    return Permission(key=prefix, end=keys.prefix_end(prefix), right=right)


def key_permission(key: str, right: Right) -> Permission:
    return Permission(key=key, right=right)


def fleet_accounts(
    nodes: Iterable[str], *, prefix: str = "", dashboard_writes: bool = False
) -> tuple[Account, ...]:
    """Return the users of a fleet whose keys are below the prefix, with an agent for each node.

    `dashboard_writes`: the dashboard's user may write what users declare, as the page with --allow-writes does.
    """
    writes = _dashboard_writes() if dashboard_writes else []
    # A role has one permission for a range of keys.
    dashboard = {
        (permission.key, permission.end): permission for permission in (*_dashboard(), *writes)
    }
    found_accounts = [
        _account("admin", _admin(), prefix),
        _account("reconciler", _reconciler(), prefix),
        _account("gateway", _gateway(), prefix),
        _account("dashboard", dashboard.values(), prefix),
        *(_account(f"node-{name}", _agent(name), prefix) for name in sorted(set(nodes))),
    ]
    return tuple(found_accounts)


def joined_account(component: str, name: str, *, prefix: str = "") -> Account:
    """Return the user of one machine or person that has joined: `fleet-node-<name>`, `fleet-gateway-<name>`.

    A node has a role of its own; the others share the role of their component, so that each can lose its user alone.
    """
    if component == "node":
        return _account(f"node-{name}", _agent(name), prefix)
    (shared,) = (
        account
        for account in fleet_accounts((), prefix=prefix)
        if account.file == f"{component}.env"
    )
    user = f"fleet-{component}-{name}{_mark(prefix)}"
    return replace(shared, user=user, file=f"{component}-{name}.env")


def node_of_user(user: str, *, prefix: str = "") -> str | None:
    """Return the node whose agent has this user in the fleet below the prefix; None for other users."""
    head, tail = "fleet-node-", _mark(prefix)
    if not (user.startswith(head) and user.endswith(tail)):
        return None
    name = user.removeprefix(head).removesuffix(tail)
    # A node's name has no @: such a user belongs to another fleet.
    return name if name and "@" not in name else None


def _account(component: str, permissions: Iterable[Permission], prefix: str) -> Account:
    moved = (
        Permission(key=prefix + p.key, end=p.end and prefix + p.end, right=p.right)
        for p in permissions
    )
    user = f"fleet-{component}{_mark(prefix)}"
    return Account(
        user=user,
        role=user,
        file=f"{component}.env",
        permissions=frozenset(moved),
    )


def _mark(prefix: str) -> str:
    """Return the suffix that distinguishes the users of two fleets in one etcd."""
    return f"@{prefix}" if prefix else ""


def _admin() -> list[Permission]:
    """Return the rights of fleetctl's users: read everything, write what users declare, and secrets."""
    declared = [kind.name for kind in KINDS if kind.written_by_users]
    # Deleting an object also deletes its status. A deployment is only marked; the reconciler deletes it.
    removed = [kind for kind in declared if kind != "ModelDeployment"]
    return [
        prefix_permission(f"{keys.ROOT}/", Right.READ),
        *(prefix_permission(keys.spec_prefix(kind), Right.READWRITE) for kind in declared),
        # Deleting a replica makes the reconciler create it again.
        prefix_permission(keys.spec_prefix("Replica"), Right.READWRITE),
        *(prefix_permission(keys.status_prefix(kind), Right.READWRITE) for kind in removed),
        prefix_permission(keys.SECRET_PREFIX, Right.READWRITE),
        prefix_permission(keys.FABRIC_TEST_PREFIX, Right.READWRITE),
        prefix_permission(keys.APPLY_SET_PREFIX, Right.READWRITE),
        # Each write is recorded with its author.
        prefix_permission(keys.CHANGE_PREFIX, Right.READWRITE),
        prefix_permission(keys.TICKET_PREFIX, Right.READWRITE),
        # The TLS mode, revocations, and an administrator's own certificate.
        prefix_permission(keys.TRUST_PREFIX, Right.READWRITE),
        prefix_permission(keys.request_prefix("admin"), Right.READWRITE),
        # The answers to Macs that ask to join; the requests themselves are a signer's.
        prefix_permission(keys.JOIN_DECISION_PREFIX, Right.READWRITE),
    ]


def _reconciler() -> list[Permission]:
    judged = (
        *("ModelDeployment", "NodePool", "ShardGroup", "ModelRoute", "ModelPolicy", "GitSource"),
        "Replica",
    )
    return [
        *(
            prefix_permission(prefix, Right.READ)
            for prefix in (keys.SPEC_PREFIX, keys.STATUS_PREFIX)
        ),
        *(
            prefix_permission(prefix, Right.READ)
            for prefix in (keys.NODE_LEASE_PREFIX, keys.ENDPOINT_PREFIX)
        ),
        # Gateways publish the load of deployments here.
        prefix_permission(keys.GATEWAY_LEASE_PREFIX, Right.READ),
        # Places replicas, registers nodes, and deletes deployments whose replicas are gone.
        *(
            prefix_permission(keys.spec_prefix(kind), Right.READWRITE)
            for kind in ("Replica", "Revision", "Node", "ModelDeployment")
        ),
        # The leader applies and prunes the manifests of GitSources.
        *(
            prefix_permission(keys.spec_prefix(kind), Right.READWRITE)
            for kind in ("NodePool", "ShardGroup", "ModelRoute", "ModelPolicy", "GitSource")
        ),
        prefix_permission(keys.APPLY_SET_PREFIX, Right.READWRITE),
        # It records those writes, and removes old records.
        prefix_permission(keys.CHANGE_PREFIX, Right.READWRITE),
        # A token for a hub is copied to the node that fetches with it.
        prefix_permission(keys.HUB_TOKEN_PREFIX, Right.READ),
        prefix_permission(keys.HUB_GRANT_PREFIX, Right.READWRITE),
        prefix_permission(keys.EPOCH_SECRET_PREFIX, Right.WRITE),
        # The commits of hub models, and the models that Macs made themselves.
        prefix_permission(keys.SNAPSHOT_PREFIX, Right.READWRITE),
        prefix_permission(keys.PRELOAD_PREFIX, Right.READWRITE),
        prefix_permission(keys.POWER_ORDER_PREFIX, Right.READWRITE),
        prefix_permission(keys.DEMAND_WEEK_PREFIX, Right.READWRITE),
        # Each agent's copies of its Replicas, and the mark that they are kept.
        prefix_permission(keys.ASSIGNMENT_PREFIX, Right.READWRITE),
        prefix_permission(keys.ASSIGNMENTS_KEPT, Right.READWRITE),
        # What agents must know of each deployment, and its mark.
        prefix_permission(keys.MODEL_USE_PREFIX, Right.READWRITE),
        prefix_permission(keys.MODEL_USES_KEPT, Right.READWRITE),
        prefix_permission(keys.SHARE_PREFIX, Right.READ),
        *(prefix_permission(keys.status_prefix(kind), Right.READWRITE) for kind in judged),
        # The reports about a replica are deleted with the replica.
        prefix_permission(keys.RANK_PREFIX, Right.READWRITE),
        prefix_permission(keys.NODE_LIFE_PREFIX, Right.READWRITE),
        # The leader checks the cables of groups regularly.
        prefix_permission(keys.FABRIC_TEST_PREFIX, Right.READWRITE),
        prefix_permission(keys.FABRIC_RANK_PREFIX, Right.READ),
        # A watch on a key is a watch on everything that begins with it.
        prefix_permission(keys.ELECTION_RECONCILER, Right.READWRITE),
        prefix_permission(keys.event_prefix("reconciler"), Right.READWRITE),
        prefix_permission(keys.RECONCILER_LEASE_PREFIX, Right.READWRITE),
        # Tickets for its own metrics and log; the secrets of other holders' tickets are only hashes.
        prefix_permission(keys.ticket_prefix("Reconciler"), Right.READ),
        prefix_permission(keys.TRUST_PREFIX, Right.READ),
        prefix_permission(keys.request_prefix("reconciler"), Right.READWRITE),
    ]


def _gateway() -> list[Permission]:
    """Return the rights to the objects that a routing table is made of, and to write the gateway's own lease."""
    prefixes = (
        keys.ENDPOINT_PREFIX,
        # Measured by agents, for the strategy HardwareAware.
        keys.LOAD_PREFIX,
        keys.spec_prefix("ModelDeployment"),
        keys.status_prefix("ModelDeployment"),
        keys.spec_prefix("ModelRoute"),
        # Which models clients may ask for, and what the reconciler refused.
        keys.spec_prefix("ModelPolicy"),
        keys.status_prefix("ModelPolicy"),
        # An endpoint counts only on the node that has the replica.
        keys.spec_prefix("Replica"),
        # Labels contain the site of a Mac.
        keys.spec_prefix("Node"),
        # For the admin API: the Macs, and whether their agents are alive.
        keys.status_prefix("Node"),
        keys.NODE_LEASE_PREFIX,
        # Hashes of keys, not the keys.
        keys.API_KEY_PREFIX,
        # The keys that it sends to external servers.
        keys.EXTERNAL_KEY_PREFIX,
        # Tickets for its own log; the secrets of other holders' tickets are only hashes.
        keys.ticket_prefix("Gateway"),
    )
    return [
        *(prefix_permission(prefix, Right.READ) for prefix in prefixes),
        prefix_permission(keys.GATEWAY_LEASE_PREFIX, Right.READWRITE),
        prefix_permission(keys.FLOATING_ADDRESS_PREFIX, Right.READWRITE),
        *_trust(),
        prefix_permission(keys.issued_key("gateway", ""), Right.READ),
        prefix_permission(keys.refused_key("gateway", ""), Right.READ),
        prefix_permission(keys.request_prefix("gateway"), Right.READWRITE),
    ]


def _dashboard() -> list[Permission]:
    """Return the rights to read everything but secrets, and to write the dashboard's own lease."""
    prefixes = (
        *(keys.SPEC_PREFIX, keys.STATUS_PREFIX, keys.RANK_PREFIX, keys.LIFE_PREFIX),
        *(keys.ENDPOINT_PREFIX, keys.LEASE_PREFIX, keys.EVENT_PREFIX, keys.ELECTION_PREFIX),
        keys.LOAD_PREFIX,
        *(keys.SNAPSHOT_PREFIX, keys.PRELOAD_PREFIX, keys.SHARE_PREFIX, keys.APPLY_SET_PREFIX),
        *(keys.FABRIC_TEST_PREFIX, keys.FABRIC_RANK_PREFIX, keys.TRUST_PREFIX, keys.CHANGE_PREFIX),
        keys.JOIN_REQUEST_PREFIX,
        # Hashes of keys, not the keys.
        keys.API_KEY_PREFIX,
    )
    return [
        *(prefix_permission(prefix, Right.READ) for prefix in prefixes),
        prefix_permission(keys.DASHBOARD_LEASE_PREFIX, Right.READWRITE),
        # It asks gateways for their requests with a ticket of its own.
        prefix_permission(keys.ticket_prefix("Gateway"), Right.READWRITE),
        # Logs of agents, engines and reconcilers are read with tickets, too.
        prefix_permission(keys.ticket_prefix("Node"), Right.READWRITE),
        prefix_permission(keys.ticket_prefix("Reconciler"), Right.READWRITE),
        # A login link is good once: the dashboard removes its ticket.
        prefix_permission(keys.ticket_prefix("Dashboard"), Right.READWRITE),
        prefix_permission(keys.request_prefix("dashboard"), Right.READWRITE),
    ]


def _dashboard_writes() -> list[Permission]:
    """Return the rights to change what users declare; every change is recorded with its author."""
    declared = (kind.name for kind in KINDS if kind.written_by_users)
    return [
        *(prefix_permission(keys.spec_prefix(kind), Right.READWRITE) for kind in declared),
        prefix_permission(keys.CHANGE_PREFIX, Right.READWRITE),
        prefix_permission(keys.APPLY_SET_PREFIX, Right.READWRITE),
    ]


def dashboard_may_write(permissions: Iterable[Permission], *, prefix: str = "") -> bool:
    """Return whether the permissions of the dashboard's role include those to change what users declare."""
    return any(
        permission.right is not Right.READ and permission.key.startswith(prefix + keys.SPEC_PREFIX)
        for permission in permissions
    )


def _trust() -> list[Permission]:
    """Return the rights to what every process must know of trust: not the certificates of others, which name their Macs."""
    return [
        # A watch on a key is a watch on everything that begins with it.
        prefix_permission(keys.FLEET_TRUST, Right.READ),
        prefix_permission(keys.REVOKED_PREFIX, Right.READ),
    ]


def _agent(node: str) -> list[Permission]:
    return [
        prefix_permission(keys.spec_prefix("Replica"), Right.READ),
        prefix_permission(keys.spec_prefix("ModelDeployment"), Right.READ),
        # A model that a rollback may need is not collected.
        prefix_permission(keys.spec_prefix("Revision"), Right.READ),
        # The fallback models of groups are checked as well.
        prefix_permission(keys.spec_prefix("ShardGroup"), Right.READ),
        # The limits that the node's pools set on transfers of models.
        prefix_permission(keys.spec_prefix("NodePool"), Right.READ),
        key_permission(keys.spec_key("Node", node), Right.READ),
        # What of a hub's models the memory proof needs, before they are fetched.
        prefix_permission(keys.SNAPSHOT_PREFIX, Right.READ),
        prefix_permission(keys.hub_grant_prefix(node), Right.READ),
        prefix_permission(keys.preload_prefix(node), Right.READ),
        prefix_permission(keys.power_order_prefix(node), Right.READ),
        # A watch on a key is a watch on everything that begins with it.
        prefix_permission(keys.assignment_prefix(node), Right.READ),
        prefix_permission(keys.ASSIGNMENTS_KEPT, Right.READ),
        prefix_permission(keys.MODEL_USE_PREFIX, Right.READ),
        prefix_permission(keys.MODEL_USES_KEPT, Right.READ),
        key_permission(keys.ELECTION_RECONCILER, Right.READ),
        # While a backup is restored, missing objects do not count as deleted.
        key_permission(keys.RESTORING, Right.READ),
        key_permission(keys.node_lease_key(node), Right.READWRITE),
        key_permission(keys.status_key("Node", node), Right.READWRITE),
        prefix_permission(keys.rank_prefix(node), Right.READWRITE),
        prefix_permission(keys.endpoint_prefix(node), Right.READWRITE),
        key_permission(keys.load_key(node), Right.READWRITE),
        prefix_permission(keys.event_prefix(f"Node/{node}"), Right.READWRITE),
        prefix_permission(keys.FABRIC_TEST_PREFIX, Right.READ),
        prefix_permission(keys.fabric_rank_prefix(node), Right.READWRITE),
        # The files that other agents give, and the queues for hubs.
        prefix_permission(keys.SHARE_PREFIX, Right.READ),
        prefix_permission(keys.share_prefix(node), Right.READWRITE),
        prefix_permission(keys.ticket_prefix(f"Node/{node}"), Right.READ),
        # The secrets of groups that it has a rank of.
        prefix_permission(keys.epoch_secret_prefix(node), Right.READ),
        *_trust(),
        key_permission(keys.issued_key("node", node), Right.READ),
        key_permission(keys.refused_key("node", node), Right.READ),
        key_permission(keys.request_key("node", node), Right.READWRITE),
    ]
