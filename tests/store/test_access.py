"""Roles as data: what each component may do, and above all what it may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.kinds import KINDS
from store import keys
from store.etcd import users
from store.etcd.users import Account, Permission, Right

# Short ones, of few letters: it is in beginning alike that names could go wrong.
names = st.from_regex(r"[a1]([-a1.]{0,2}[a1])?", fullmatch=True)
prefixes = st.sampled_from(["", "/lab", "/teams/lab"])
DECLARED = [kind.name for kind in KINDS if kind.written_by_users]


def account(user: str, *nodes: str, prefix: str = "") -> Account:
    (found,) = [a for a in users.fleet_accounts(nodes, prefix=prefix) if a.user == user]
    return found


def may(account: Account, right: Right, key: str) -> bool:
    """Return whether etcd would let the account do it."""
    return any(
        permission.right in (right, Right.READWRITE)
        and (permission.key <= key < permission.end if permission.end else key == permission.key)
        for permission in account.permissions
    )


def may_touch(account: Account, right: Right, start: str, end: str) -> bool:
    """Return whether any of the account's ranges has a key in common with this one."""
    return any(
        permission.right in (right, Right.READWRITE)
        and permission.key < end
        and start < (permission.end or permission.key + "\0")
        for permission in account.permissions
    )


def test_a_gateway_reads_hashes_of_api_keys_and_no_other_secret() -> None:
    gateway = account("fleet-gateway")
    start, end = keys.SECRET_PREFIX, keys.prefix_end(keys.SECRET_PREFIX)
    assert may(gateway, Right.READ, keys.named(keys.API_KEY_PREFIX, "ci"))
    assert not may_touch(gateway, Right.WRITE, start, end)
    assert not may_touch(gateway, Right.READ, start, keys.API_KEY_PREFIX)
    assert not may_touch(gateway, Right.READ, keys.prefix_end(keys.API_KEY_PREFIX), end)


@pytest.mark.parametrize("user", ["fleet-reconciler", "fleet-node-a"])
def test_nobody_but_the_admin_comes_near_a_secret(user: str) -> None:
    start, end = keys.SECRET_PREFIX, keys.prefix_end(keys.SECRET_PREFIX)
    for right in (Right.READ, Right.WRITE):
        assert not may_touch(account(user, "a"), right, start, end)
        assert may_touch(account("fleet-admin"), right, start, end)


def test_a_gateway_writes_where_it_is_found_and_nothing_else() -> None:
    permissions = account("fleet-gateway").permissions
    assert [p.key for p in permissions if p.right is not Right.READ] == [keys.GATEWAY_LEASE_PREFIX]


@given(names, names, names)
def test_an_agent_writes_its_own_keys_and_nobody_elses(own: str, other: str, replica: str) -> None:
    agent = account(f"fleet-node-{own}", own, other)

    def written_by(node: str) -> list[str]:
        return [
            keys.node_lease_key(node),
            keys.status_key("Node", node),
            keys.rank_key(node, replica, 0),
            keys.endpoint_key(node, replica),
            keys.event_key(f"Node/{node}", replica),
        ]

    assert all(may(agent, Right.WRITE, key) for key in written_by(own))
    assert all(may(agent, Right.READ, key) for key in written_by(own))
    assert may(agent, Right.READ, keys.RESTORING)
    if own != other:
        assert not any(may(agent, Right.WRITE, key) for key in written_by(other))
        assert not any(may(agent, Right.READ, key) for key in written_by(other))


@given(names)
def test_an_agent_writes_no_spec_and_no_verdict(node: str) -> None:
    agent = account(f"fleet-node-{node}", node)
    for kind in KINDS:
        assert not may(agent, Right.WRITE, keys.spec_key(kind.name, node))
        if kind.name != "Node":
            assert not may(agent, Right.WRITE, keys.status_key(kind.name, node))
    for key in (keys.ELECTION_RECONCILER, keys.event_key("reconciler", node), "/elsewhere", "a"):
        assert not may(agent, Right.WRITE, key)
    assert not may(agent, Right.READWRITE, keys.node_life_key(node))
    assert not may(agent, Right.WRITE, keys.RESTORING)


def test_the_admin_sees_everything_and_writes_what_users_declare() -> None:
    admin = account("fleet-admin")
    written = {
        kind.name for kind in KINDS if may(admin, Right.WRITE, keys.spec_key(kind.name, "x"))
    }
    # A replica is deleted by hand to have it made anew.
    assert written == {*DECLARED, "Replica"}
    for key in (
        keys.node_lease_key("a"),
        keys.rank_key("a", "r-0", 0),
        keys.endpoint_key("a", "r-0"),
        keys.ELECTION_RECONCILER,
        keys.status_key("Replica", "r-0"),
        keys.status_key("ModelDeployment", "m"),
    ):
        assert may(admin, Right.READ, key)
        assert not may(admin, Right.WRITE, key)


def test_the_reconciler_lets_agents_and_users_speak_for_themselves() -> None:
    reconciler = account("fleet-reconciler")
    for key in (
        keys.node_lease_key("a"),
        keys.named(keys.GATEWAY_LEASE_PREFIX, "a"),
        keys.status_key("Node", "a"),
        keys.endpoint_key("a", "r-0"),
        keys.event_key("Node/a", "e"),
        keys.ticket_key("Node/a", "t"),
        keys.ticket_key("Gateway/g", "t"),
    ):
        assert not may(reconciler, Right.WRITE, key)
    # What a GitSource says.
    for kind in ("ModelDeployment", "NodePool", "ModelRoute", "ShardGroup", "GitSource"):
        assert may(reconciler, Right.WRITE, keys.spec_key(kind, "a"))
    assert may(reconciler, Right.READWRITE, keys.node_life_key("a"))


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
def test_an_agents_user_is_known_again_in_its_own_fleet_only(
    name: str, prefix: str, other: str
) -> None:
    user = users.fleet_accounts([name], prefix=prefix)[-1].user
    assert users.node_of_user(user, prefix=prefix) == name
    if prefix != other:
        assert users.node_of_user(user, prefix=other) is None


@pytest.mark.parametrize("user", ["root", "fleet-admin", "fleet-node-", "someone", ""])
def test_others_are_no_agents(user: str) -> None:
    assert users.node_of_user(user) is None


def test_no_two_users_have_one_file() -> None:
    """Not even where a node is called like a component."""
    found = users.fleet_accounts(["admin", "gateway", "root", "reconciler"])
    assert len({a.file for a in found}) == len({a.user for a in found}) == len(found)
