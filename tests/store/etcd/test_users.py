"""Tests of `store.etcd.users`: the rights of each component as data, and enforced by a real etcd."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.kinds import KINDS
from store import keys
from store.errors import PermissionDeniedError, StoreError, UnauthenticatedError
from store.etcd import users
from store.etcd.connect import connect
from store.etcd.users import Account, Permission, Right, prefix_permission
from store.port import Delete, ModRevisionGuard, Put, Transport
from tests.support.store_binaries import BINARIES
from tests.support.store_guarded_etcd import Guarded, guarded_etcd

# Short names of few letters: mistakes would be in common beginnings.
names = st.from_regex(r"[a1]([-a1.]{0,2}[a1])?", fullmatch=True)
prefixes = st.sampled_from(["", "/lab", "/teams/lab"])


def account(user: str, *nodes: str, prefix: str = "") -> Account:
    (found,) = [a for a in users.fleet_accounts(nodes, prefix=prefix) if a.user == user]
    return found


def may(account: Account, right: Right, key: str) -> bool:
    """Return whether etcd would allow it to the account."""
    return any(
        permission.right in (right, Right.READWRITE)
        and (permission.key <= key < permission.end if permission.end else key == permission.key)
        for permission in account.permissions
    )


def may_touch(account: Account, right: Right, start: str, end: str) -> bool:
    """Return whether any of the account's ranges overlaps this one."""
    return any(
        permission.right in (right, Right.READWRITE)
        and permission.key < end
        and start < (permission.end or permission.key + "\0")
        for permission in account.permissions
    )


READ, WRITE, BOTH = Right.READ, Right.WRITE, Right.READWRITE


@pytest.mark.parametrize(
    ("user", "rights"),
    [
        ("fleet-admin", {keys.SECRET_PREFIX: BOTH}),
        (
            "fleet-reconciler",
            {
                keys.HUB_TOKEN_PREFIX: READ,
                keys.HUB_GRANT_PREFIX: BOTH,
                keys.EPOCH_SECRET_PREFIX: WRITE,
            },
        ),
        ("fleet-gateway", {keys.API_KEY_PREFIX: READ, keys.EXTERNAL_KEY_PREFIX: READ}),
        ("fleet-dashboard", {keys.API_KEY_PREFIX: READ}),
        ("fleet-node-a", {keys.hub_grant_prefix("a"): READ, keys.epoch_secret_prefix("a"): READ}),
    ],
)
def test_each_user_has_the_secrets_that_it_needs(user: str, rights: dict[str, Right]) -> None:
    end = keys.prefix_end(keys.SECRET_PREFIX)
    found = {
        permission
        for permission in account(user, "a").permissions
        if permission.key < end and (permission.end or permission.key) > keys.SECRET_PREFIX
    }
    if user == "fleet-admin":  # reads everything
        found -= {prefix_permission(f"{keys.ROOT}/", READ)}
    assert found == {prefix_permission(prefix, right) for prefix, right in rights.items()}


def test_the_gateway_and_users_write_what_is_theirs() -> None:
    written = {p.key for p in account("fleet-gateway").permissions if p.right is not READ}
    own = {keys.GATEWAY_LEASE_PREFIX, keys.FLOATING_ADDRESS_PREFIX, keys.request_prefix("gateway")}
    assert written == own
    admin = account("fleet-admin")
    kinds = {kind.name for kind in KINDS if may(admin, WRITE, keys.spec_key(kind.name, "x"))}
    # A user deletes a replica to have it created again.
    assert kinds == {"Replica", *(kind.name for kind in KINDS if kind.written_by_users)}


@given(names)
def test_a_joined_node_has_the_rights_of_an_agent(name: str) -> None:
    [agent] = [one for one in users.fleet_accounts([name]) if one.user == f"fleet-node-{name}"]
    assert users.joined_account("node", name) == agent


@pytest.mark.parametrize("component", ["gateway", "reconciler", "admin"])
def test_joined_processes_share_a_role_and_have_a_user_each(component: str) -> None:
    one, shared = users.joined_account(component, "edge-1"), account(f"fleet-{component}")
    assert (one.user, one.role) == (f"fleet-{component}-edge-1", shared.role)
    assert one.permissions == shared.permissions
    assert users.joined_account(component, "edge-1", prefix="/lab").user == f"{one.user}@/lab"


@given(names, names, names)
def test_an_agent_writes_its_own_keys_only(own: str, other: str, replica: str) -> None:
    agent = account(f"fleet-node-{own}", own, other)

    def written_by(node: str) -> list[str]:
        return [
            keys.node_lease_key(node),
            keys.status_key("Node", node),
            keys.rank_key(node, replica, 0),
            keys.endpoint_key(node, replica),
            keys.event_key(f"Node/{node}", replica),
        ]

    def shared_by(node: str) -> list[str]:
        return [keys.model_offer_key(node, replica), keys.fetch_claim_key(node, "0" * 64)]

    assert all(may(agent, Right.WRITE, key) for key in written_by(own))
    assert all(may(agent, Right.READ, key) for key in written_by(own))
    assert may(agent, Right.READ, keys.RESTORING)
    assert all(may(agent, Right.WRITE, key) for key in shared_by(own))
    assert all(may(agent, Right.READ, key) for key in shared_by(other))
    if own != other:
        assert not any(may(agent, Right.WRITE, key) for key in shared_by(other))
        assert not any(may(agent, Right.WRITE, key) for key in written_by(other))
        assert not any(may(agent, Right.READ, key) for key in written_by(other))


@given(names)
def test_an_agent_writes_no_spec_and_no_status_of_others(node: str) -> None:
    agent = account(f"fleet-node-{node}", node)
    for kind in KINDS:
        assert not may(agent, Right.WRITE, keys.spec_key(kind.name, node))
        if kind.name != "Node":
            assert not may(agent, Right.WRITE, keys.status_key(kind.name, node))
    for key in (keys.ELECTION_RECONCILER, keys.event_key("reconciler", node), "/elsewhere", "a"):
        assert not may(agent, Right.WRITE, key)
    assert not may(agent, Right.READWRITE, keys.node_life_key(node))
    assert not may(agent, Right.WRITE, keys.RESTORING)


@given(names, prefixes)
def test_fleets_in_one_etcd_share_neither_users_nor_keys(name: str, prefix: str) -> None:
    mine = users.fleet_accounts([name], prefix=prefix)
    theirs = users.fleet_accounts([name], prefix="/other")
    assert not {a.user for a in mine} & {a.user for a in theirs}
    assert [a.file for a in mine] == [a.file for a in theirs]
    for permission in {p for a in mine for p in a.permissions}:
        assert permission.key.startswith(f"{prefix}{keys.ROOT}/")
        assert not permission.end or permission.key < permission.end
        assert not any(may_touch(a, Right.READ, *_range(permission)) for a in theirs)


def _range(permission: Permission) -> tuple[str, str]:
    return permission.key, permission.end or permission.key + "\0"


@given(names, prefixes, prefixes)
def test_an_agents_user_is_recognised_in_its_own_fleet_only(
    name: str, prefix: str, other: str
) -> None:
    user = users.fleet_accounts([name], prefix=prefix)[-1].user
    assert users.node_of_user(user, prefix=prefix) == name
    if prefix != other:
        assert users.node_of_user(user, prefix=other) is None


@pytest.mark.parametrize("user", ["root", "fleet-admin", "fleet-node-", "someone", ""])
def test_other_users_are_not_agents(user: str) -> None:
    assert users.node_of_user(user) is None


def test_every_user_has_its_own_file() -> None:
    """Even where a node has the name of a component."""
    accounts = users.fleet_accounts(["admin", "gateway", "root", "reconciler"])
    assert len({a.file for a in accounts}) == len({a.user for a in accounts}) == len(accounts)


SECRET = f"{keys.SECRET_PREFIX}hub-token"
API_KEY = keys.named(keys.API_KEY_PREFIX, "ci")
MINE = [
    keys.status_key("Node", "mac-1"),
    keys.node_lease_key("mac-1"),
    keys.rank_key("mac-1", "qwen-0", 0),
    keys.endpoint_key("mac-1", "qwen-0"),
    keys.event_key("Node/mac-1", "e"),
]
# mac-10 begins with mac-1.
OTHERS = [
    key
    for node in ("mac-2", "mac-10")
    for key in (
        keys.status_key("Node", node),
        keys.node_lease_key(node),
        keys.rank_key(node, "qwen-0", 0),
        keys.endpoint_key(node, "qwen-0"),
        keys.event_key(f"Node/{node}", "e"),
    )
]
SPECS = [
    keys.spec_key(kind, "mac-1")
    for kind in ("Node", "Replica", "ModelDeployment", "NodePool", "ModelRoute", "ShardGroup")
]
VERDICTS = [
    keys.status_key("Replica", "qwen-0"),
    keys.status_key("ModelDeployment", "qwen"),
    keys.event_key("reconciler", "e"),
    keys.ELECTION_RECONCILER,
    keys.named(keys.RECONCILER_LEASE_PREFIX, "r"),
    keys.assignment_key("mac-10", "qwen-0"),
    keys.ASSIGNMENTS_KEPT,
]
# An agent looks whether a leader keeps its copies.
OPEN_VERDICTS = {keys.ELECTION_RECONCILER, keys.ASSIGNMENTS_KEPT}
REGISTRATION = keys.named(keys.GATEWAY_LEASE_PREFIX, "g")
# With the right to write one, a component could grant itself access.
MY_TICKET = keys.ticket_key("Node/mac-1", "t")
OTHER_TICKETS = [keys.ticket_key(holder, "t") for holder in ("Node/mac-10", "Node/mac-2")]
GATEWAY_TICKET = keys.ticket_key("Gateway/g", "t")
LOGIN_TICKET = keys.ticket_key("Dashboard/d", "t")
TICKETS = [MY_TICKET, *OTHER_TICKETS, GATEWAY_TICKET, LOGIN_TICKET]
# Whoever writes these decides whom the fleet trusts.
TRUST = [
    keys.FLEET_TRUST,
    keys.issued_key("node", "mac-1"),
    keys.named(keys.REVOKED_PREFIX, "0A"),
    keys.refused_key("node", "mac-1"),
]
OTHER_TRUST = [
    *(keys.issued_key("node", "mac-10"), keys.issued_key("node", "mac-2")),
    *(keys.issued_key("admin", "anna"), keys.refused_key("node", "mac-10")),
]
OTHER_EPOCHS = [keys.epoch_secret_key(node, "qwen-0") for node in ("mac-10", "mac-2")]
MY_EPOCH = keys.epoch_secret_key("mac-1", "qwen-0")
MY_REQUEST = keys.request_key("node", "mac-1")
# mac-10 begins with mac-1.
OTHER_REQUESTS = [keys.request_key("node", name) for name in ("mac-10", "mac-2")]
GATEWAY_REQUEST = keys.request_key("gateway", "g")
RECONCILER_REQUEST = keys.request_key("reconciler", "r")
REQUESTS = [MY_REQUEST, *OTHER_REQUESTS, GATEWAY_REQUEST, RECONCILER_REQUEST]
DASHBOARD = keys.named(keys.DASHBOARD_LEASE_PREFIX, "d")
APPLY_SET = keys.named(keys.APPLY_SET_PREFIX, "gitsource.a")
DELETED_AT_ONCE = ("NodePool", "ModelRoute", "ShardGroup", "GitSource")
JOINS = [
    keys.named(prefix, "abcdefgh")
    for prefix in (keys.JOIN_TOKEN_PREFIX, keys.JOIN_REQUEST_PREFIX, keys.JOIN_DECISION_PREFIX)
]
FOREIGN = [SECRET, API_KEY, "/elsewhere", f"{keys.ROOT}/new/x"]

DENIED_TO_WRITE = {
    "node-mac-1": [
        *(*OTHERS, *SPECS, *VERDICTS, *FOREIGN, *TICKETS, REGISTRATION, APPLY_SET),
        *(*TRUST, *OTHER_REQUESTS, GATEWAY_REQUEST, RECONCILER_REQUEST),
        *(*JOINS, keys.RESTORING, keys.node_life_key("mac-1")),
    ],
    "gateway": [
        *(*MINE, *SPECS, *VERDICTS, *FOREIGN, *TICKETS, APPLY_SET),
        *(*TRUST, MY_REQUEST, *OTHER_REQUESTS, RECONCILER_REQUEST, *JOINS),
    ],
    "reconciler": [
        *(*FOREIGN, *TRUST, MY_REQUEST, *OTHER_REQUESTS, GATEWAY_REQUEST, *JOINS, *TICKETS),
        REGISTRATION,
        *(key for key in MINE if not key.startswith(keys.RANK_PREFIX)),
    ],
    "dashboard": [
        *(*MINE, *SPECS, *VERDICTS, *FOREIGN, *TRUST, *REQUESTS, REGISTRATION, APPLY_SET)
    ],
    "admin": [
        *(*MINE[1:], *VERDICTS, keys.spec_key("Revision", "qwen-1"), *FOREIGN[2:], *REQUESTS),
        JOINS[1],  # a signer's, which uses root's password
    ],
}
DENIED_TO_READ = {
    "node-mac-1": [
        *(SECRET, API_KEY, *OTHERS, "/elsewhere", REGISTRATION),
        *(verdict for verdict in VERDICTS if verdict not in OPEN_VERDICTS),
        *(keys.spec_key("Node", "mac-10"), keys.spec_key("ModelRoute", "a")),
        *(*OTHER_TICKETS, GATEWAY_TICKET, LOGIN_TICKET, *OTHER_REQUESTS, GATEWAY_REQUEST),
        *(*OTHER_TRUST, *OTHER_EPOCHS, keys.issued_key("gateway", "g"), *JOINS),
    ],
    "gateway": [
        *(*OTHER_TRUST, keys.issued_key("node", "mac-1"), MY_EPOCH, *OTHER_EPOCHS),
        *(SECRET, MINE[2], keys.spec_key("Revision", "a"), *VERDICTS[2:]),
        *(MY_TICKET, LOGIN_TICKET, *OTHER_TICKETS, *JOINS),
    ],
    "reconciler": [SECRET, API_KEY, MINE[-1], "/elsewhere", *TICKETS, MY_EPOCH, *JOINS],
    "dashboard": [SECRET, "/elsewhere", *REQUESTS, MY_EPOCH],
    "admin": ["/elsewhere"],
}
DENIED_TO_LIST = {
    "node-mac-1": [
        keys.SECRET_PREFIX,
        f"{keys.ROOT}/",
        keys.SPEC_PREFIX,
        keys.NODE_LEASE_PREFIX,
        keys.RANK_PREFIX,
        keys.rank_prefix("mac-10"),
        keys.ENDPOINT_PREFIX,
        keys.ASSIGNMENT_PREFIX,
        keys.assignment_prefix("mac-10"),
        *(keys.TRUST_PREFIX, keys.ISSUED_PREFIX, keys.EPOCH_SECRET_PREFIX),
        keys.epoch_secret_prefix("mac-10"),
    ],
    "gateway": [
        keys.TRUST_PREFIX,
        keys.SECRET_PREFIX,
        f"{keys.ROOT}/",
        keys.SPEC_PREFIX,
        keys.RANK_PREFIX,
    ],
    "reconciler": [keys.SECRET_PREFIX, keys.API_KEY_PREFIX, f"{keys.ROOT}/"],
    "dashboard": [keys.SECRET_PREFIX, f"{keys.ROOT}/", keys.HUB_TOKEN_PREFIX],
    "admin": ["/"],
}
ALLOWED_TO_WRITE = {
    "node-mac-1": [*MINE, MY_REQUEST],
    "gateway": [REGISTRATION, GATEWAY_REQUEST],
    "reconciler": [
        RECONCILER_REQUEST,
        *VERDICTS,
        *(keys.spec_key(kind, "a") for kind in ("Replica", "Node", "ModelDeployment")),
        # Kinds of a GitSource's manifests.
        *(keys.spec_key(kind, "a") for kind in DELETED_AT_ONCE),
        APPLY_SET,
        keys.rank_key("mac-2", "qwen-0", 0),
    ],
    "dashboard": [DASHBOARD, GATEWAY_TICKET, LOGIN_TICKET, keys.request_key("dashboard", "d")],
    "admin": [
        *(SECRET, API_KEY, *TRUST, keys.request_key("admin", "anna")),
        keys.status_key("Node", "mac-1"),
        *(keys.spec_key(kind, "a") for kind in ("ModelDeployment", "Node", "NodePool")),
        *(keys.spec_key("GitSource", "a"), APPLY_SET, *TICKETS, JOINS[0], JOINS[2]),
    ],
}
ALLOWED_TO_LIST = {
    "node-mac-1": [
        keys.spec_prefix("Replica"),
        keys.spec_prefix("ModelDeployment"),
        keys.spec_prefix("NodePool"),
        *(keys.assignment_prefix("mac-1"), keys.ASSIGNMENTS_KEPT),
        keys.ticket_prefix("Node/mac-1"),
        *(keys.FLEET_TRUST, keys.REVOKED_PREFIX, keys.epoch_secret_prefix("mac-1")),
    ],
    "gateway": [
        keys.ENDPOINT_PREFIX,
        keys.LOAD_PREFIX,
        keys.spec_prefix("ModelRoute"),
        keys.spec_prefix("Replica"),
        keys.spec_prefix("Node"),
        keys.status_prefix("Node"),
        keys.NODE_LEASE_PREFIX,
        keys.API_KEY_PREFIX,
        keys.GATEWAY_LEASE_PREFIX,
        keys.ticket_prefix("Gateway"),
        *(keys.FLEET_TRUST, keys.REVOKED_PREFIX),
    ],
    "reconciler": [
        keys.SPEC_PREFIX,
        keys.STATUS_PREFIX,
        keys.RANK_PREFIX,
        keys.NODE_LEASE_PREFIX,
        keys.GATEWAY_LEASE_PREFIX,
        keys.ENDPOINT_PREFIX,
        keys.ELECTION_RECONCILER,
        *(keys.FLEET_TRUST, keys.REVOKED_PREFIX),
    ],
    "dashboard": [
        *(keys.SPEC_PREFIX, keys.STATUS_PREFIX, keys.RANK_PREFIX, keys.LEASE_PREFIX),
        *(keys.LIFE_PREFIX, keys.ENDPOINT_PREFIX, keys.EVENT_PREFIX, keys.API_KEY_PREFIX),
        *(keys.ELECTION_RECONCILER, keys.SNAPSHOT_PREFIX, keys.PRELOAD_PREFIX),
    ],
    "admin": [f"{keys.ROOT}/", keys.SECRET_PREFIX],
}
WHO = list(DENIED_TO_WRITE)


@pytest.fixture(scope="module", params=BINARIES)
async def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guarded]:
    async with guarded_etcd(tmp_path_factory.mktemp("roles"), binary=request.param) as found:
        yield found


@pytest.fixture
async def everything(guarded: Guarded, way: str) -> AsyncIterator[Transport]:
    """The store, with all rights."""
    root = connect(guarded.address("root", way=way))
    yield root
    await root.close()


@pytest.fixture(params=WHO)
async def who(
    request: pytest.FixtureRequest, guarded: Guarded, way: str
) -> AsyncIterator[tuple[str, Transport]]:
    transport = connect(guarded.address(request.param, way=way))
    yield request.param, transport
    await transport.close()


async def not_denied(calls: dict[str, Callable[[], Awaitable[object]]]) -> dict[str, str]:
    """Return the results of the calls that were not refused with PermissionDeniedError."""
    found = {}
    for what, call in calls.items():
        try:
            found[what] = f"done: {await call()}"
        except PermissionDeniedError:
            continue
        except StoreError as error:
            found[what] = repr(error)
    return found


async def everything_there(root: Transport) -> dict[str, bytes]:
    return {item.key: item.value for item in (await root.list("/")).items}


@pytest.mark.etcd
async def test_keys_of_other_writers_are_denied(
    who: tuple[str, Transport], everything: Transport
) -> None:
    name, transport = who
    for key in DENIED_TO_WRITE[name]:
        await everything.commit([], [Put(key=key, value=b"theirs")])
    before = await everything_there(everything)
    calls: dict[str, Callable[[], Awaitable[object]]] = {}
    for key in DENIED_TO_WRITE[name]:
        put, delete = Put(key=key, value=b"hostile"), Delete(key=key)
        calls[f"put {key}"] = lambda put=put: transport.commit([], [put])  # type: ignore[misc]
        calls[f"delete {key}"] = lambda gone=delete: transport.commit([], [gone])  # type: ignore[misc]
    assert await not_denied(calls) == {}
    assert await everything_there(everything) == before


@pytest.mark.etcd
async def test_a_partly_denied_transaction_changes_nothing(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    agent = connect(guarded.address("node-mac-1", way=way))
    before = await everything_there(everything)
    mixed = [Put(key=MINE[0], value=b"x"), Put(key=OTHERS[0], value=b"x")]
    with pytest.raises(PermissionDeniedError):
        await agent.commit([], mixed)
    # A guard must not reveal the value of a key that may not be read.
    with pytest.raises(PermissionDeniedError):
        await agent.commit([ModRevisionGuard(key=SECRET, mod_revision=0)], mixed[:1])
    assert await everything_there(everything) == before
    await agent.close()


@pytest.mark.etcd
async def test_keys_of_others_cannot_be_read(who: tuple[str, Transport]) -> None:
    name, transport = who
    gets = {f"get {key}": lambda key=key: transport.get(key) for key in DENIED_TO_READ[name]}
    lists = {f"list {key}": lambda key=key: transport.list(key) for key in DENIED_TO_LIST[name]}
    assert await not_denied({**gets, **lists}) == {}


@pytest.mark.etcd
async def test_keys_of_others_cannot_be_watched(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    await everything.commit([], [Put(key=SECRET, value=b"hf_x")])
    for name in ("node-mac-1", "gateway", "reconciler"):
        transport = connect(guarded.address(name, way=way))
        for prefix in (keys.SECRET_PREFIX, SECRET, f"{keys.ROOT}/"):
            async with aclosing(transport.watch(prefix, after_revision=1)) as watch:
                with pytest.raises(StoreError, match="permission denied"):
                    await anext(watch)
        await transport.close()


@pytest.mark.etcd
async def test_necessary_operations_are_allowed(who: tuple[str, Transport]) -> None:
    name, transport = who
    lease = await transport.grant(30)
    for key in ALLOWED_TO_WRITE[name]:
        revision = await transport.commit([], [Put(key=key, value=b"1", lease=lease)])
        guard = ModRevisionGuard(key=key, mod_revision=revision)
        await transport.commit([guard], [Put(key=key, value=b"2", lease=lease)])
        assert await transport.get(key) is not None
    for prefix in ALLOWED_TO_LIST[name]:
        listing = await transport.list(prefix)
        async with aclosing(transport.watch(prefix, after_revision=listing.revision)) as watch:
            await anext(watch)
    assert await transport.keep_alive(lease) > 0
    await transport.revoke(lease)


@pytest.mark.etcd
async def test_a_lease_with_foreign_keys_cannot_be_revoked(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    """etcd requires the right to write every key on the lease; a lease without keys may be revoked by anyone."""
    agent = connect(guarded.address("node-mac-1", way=way))
    theirs = connect(guarded.address("node-mac-2", way=way))
    lease = await theirs.grant(60)
    await theirs.commit([], [Put(key=OTHERS[1], value=b"alive", lease=lease)])
    with pytest.raises(PermissionDeniedError):
        await agent.revoke(lease)
    assert await everything.get(OTHERS[1]) is not None
    await theirs.revoke(lease)
    assert await everything.get(OTHERS[1]) is None
    for transport in (agent, theirs):
        await transport.close()


@pytest.mark.etcd
async def test_limits_of_etcds_roles(guarded: Guarded, way: str, everything: Transport) -> None:
    """The gaps of etcd's permissions that docs/operations/etcd-security.md lists; hence client certificates."""
    nobody = connect(replace(guarded.address("gateway", way=way), username="", password=""))
    agent = connect(guarded.address("node-mac-1", way=way))
    theirs = connect(guarded.address("node-mac-2", way=way))
    assert await nobody.grant(5) > 0
    lease = await theirs.grant(5)
    await theirs.commit([], [Put(key=OTHERS[1], value=b"alive", lease=lease)])
    assert await nobody.keep_alive(lease) > 0
    assert (await nobody.status()).version
    with pytest.raises(UnauthenticatedError):
        await nobody.revoke(lease)
    # Who knows a lease's number can put a key on it, by a transaction; then its owner cannot revoke it.
    await everything.commit([], [Delete(key=MINE[3])])
    absent = ModRevisionGuard(key=MINE[3], mod_revision=0)
    await agent.commit([absent], [Put(key=MINE[3], value=b"1", lease=lease)])
    with pytest.raises(PermissionDeniedError):
        await theirs.revoke(lease)
    await everything.revoke(lease)
    for transport in (nobody, agent, theirs):
        await transport.close()
