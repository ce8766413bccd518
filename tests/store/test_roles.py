"""The roles of `store.etcd.users` in real etcds, both ways: what a stolen password is good for."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from store import keys
from store.errors import PermissionDeniedError, StoreError, UnauthenticatedError
from store.etcd.connect import connect
from store.port import Delete, ModRevisionGuard, Put, Transport
from tests.store.binaries import BINARIES
from tests.store.guarded import Guarded, guarded_etcd

pytestmark = pytest.mark.etcd

SECRET = f"{keys.SECRET_PREFIX}hub-token"
API_KEY = keys.named(keys.API_KEY_PREFIX, "ci")
MINE = [
    keys.status_key("Node", "mac-1"),
    keys.node_lease_key("mac-1"),
    keys.rank_key("mac-1", "qwen-0", 0),
    keys.endpoint_key("mac-1", "qwen-0"),
    keys.event_key("Node/mac-1", "e"),
]
# mac-10 begins as mac-1 does.
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
]
REGISTRATION = keys.named(keys.GATEWAY_LEASE_PREFIX, "g")
# Who could write one would let itself in.
MY_TICKET = keys.ticket_key("Node/mac-1", "t")
OTHER_TICKETS = [keys.ticket_key(holder, "t") for holder in ("Node/mac-10", "Node/mac-2")]
GATEWAY_TICKET = keys.ticket_key("Gateway/g", "t")
TICKETS = [MY_TICKET, *OTHER_TICKETS, GATEWAY_TICKET]
APPLY_SET = keys.named(keys.APPLY_SET_PREFIX, "gitsource.a")
DECLARED = ("NodePool", "ModelRoute", "ShardGroup", "GitSource")
FOREIGN = [SECRET, API_KEY, "/elsewhere", f"{keys.ROOT}/new/x"]

DENIED_TO_WRITE = {
    "node-mac-1": [*OTHERS, *SPECS, *VERDICTS, *FOREIGN, *TICKETS, REGISTRATION, APPLY_SET],
    "gateway": [*MINE, *SPECS, *VERDICTS, *FOREIGN, *TICKETS, APPLY_SET],
    "reconciler": [
        *FOREIGN,
        *TICKETS,
        REGISTRATION,
        *(key for key in MINE if not key.startswith(keys.RANK_PREFIX)),
    ],
    "admin": [*MINE[1:], *VERDICTS, keys.spec_key("Revision", "qwen-1"), *FOREIGN[2:]],
}
DENIED_TO_READ = {
    "node-mac-1": [
        *(SECRET, API_KEY, *OTHERS, *VERDICTS, SPECS[0], "/elsewhere", REGISTRATION),
        *(*OTHER_TICKETS, GATEWAY_TICKET),
    ],
    "gateway": [
        *(SECRET, MINE[2], keys.spec_key("Replica", "a"), *VERDICTS[2:]),
        *(MY_TICKET, *OTHER_TICKETS),
    ],
    "reconciler": [SECRET, API_KEY, MINE[-1], "/elsewhere", *TICKETS],
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
    ],
    "gateway": [keys.SECRET_PREFIX, f"{keys.ROOT}/", keys.SPEC_PREFIX, keys.RANK_PREFIX],
    "reconciler": [keys.SECRET_PREFIX, keys.API_KEY_PREFIX, f"{keys.ROOT}/"],
    "admin": ["/"],
}
ALLOWED_TO_WRITE = {
    "node-mac-1": MINE,
    "gateway": [REGISTRATION],
    "reconciler": [
        *VERDICTS,
        *(keys.spec_key(kind, "a") for kind in ("Replica", "Node", "ModelDeployment")),
        # What a GitSource says.
        *(keys.spec_key(kind, "a") for kind in DECLARED),
        APPLY_SET,
        keys.rank_key("mac-2", "qwen-0", 0),
    ],
    "admin": [
        SECRET,
        API_KEY,
        keys.status_key("Node", "mac-1"),
        *(keys.spec_key(kind, "a") for kind in ("ModelDeployment", "Node", "NodePool")),
        *(keys.spec_key("GitSource", "a"), APPLY_SET, *TICKETS),
    ],
}
ALLOWED_TO_LIST = {
    "node-mac-1": [
        keys.spec_prefix("Replica"),
        keys.spec_prefix("ModelDeployment"),
        keys.ticket_prefix("Node/mac-1"),
    ],
    "gateway": [
        keys.ENDPOINT_PREFIX,
        keys.spec_prefix("ModelRoute"),
        keys.spec_prefix("Node"),
        keys.status_prefix("Node"),
        keys.NODE_LEASE_PREFIX,
        keys.API_KEY_PREFIX,
        keys.GATEWAY_LEASE_PREFIX,
        keys.ticket_prefix("Gateway"),
    ],
    "reconciler": [
        keys.SPEC_PREFIX,
        keys.STATUS_PREFIX,
        keys.RANK_PREFIX,
        keys.NODE_LEASE_PREFIX,
        keys.GATEWAY_LEASE_PREFIX,
        keys.ENDPOINT_PREFIX,
        keys.ELECTION_RECONCILER,
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


@pytest.fixture(params=["grpc", "http"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def everything(guarded: Guarded, way: str) -> AsyncIterator[Transport]:
    """The store in the hands of who may do everything."""
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
    """Return the calls that were not refused with PermissionDeniedError, and what became of them."""
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


async def test_what_others_write_is_denied(
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


async def test_nothing_of_a_transaction_is_done_if_a_part_is_denied(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    agent = connect(guarded.address("node-mac-1", way=way))
    before = await everything_there(everything)
    mixed = [Put(key=MINE[0], value=b"x"), Put(key=OTHERS[0], value=b"x")]
    with pytest.raises(PermissionDeniedError):
        await agent.commit([], mixed)
    # Nor may a guard be used to ask what a key is that may not be read.
    with pytest.raises(PermissionDeniedError):
        await agent.commit([ModRevisionGuard(key=SECRET, mod_revision=0)], mixed[:1])
    assert await everything_there(everything) == before
    await agent.close()


async def test_what_concerns_others_is_not_shown(who: tuple[str, Transport]) -> None:
    name, transport = who
    gets = {f"get {key}": lambda key=key: transport.get(key) for key in DENIED_TO_READ[name]}
    lists = {f"list {key}": lambda key=key: transport.list(key) for key in DENIED_TO_LIST[name]}
    assert await not_denied({**gets, **lists}) == {}


async def test_nor_by_watching(guarded: Guarded, way: str, everything: Transport) -> None:
    await everything.commit([], [Put(key=SECRET, value=b"hf_x")])
    for name in ("node-mac-1", "gateway", "reconciler"):
        transport = connect(guarded.address(name, way=way))
        for prefix in (keys.SECRET_PREFIX, SECRET, f"{keys.ROOT}/"):
            async with aclosing(transport.watch(prefix, after_revision=1)) as watch:
                with pytest.raises(StoreError, match="permission denied"):
                    await anext(watch)
        await transport.close()


async def test_what_its_work_needs_is_allowed(who: tuple[str, Transport]) -> None:
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


async def test_anothers_lease_is_not_ended(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    """Etcd asks for the right to write every key on the lease; a lease without keys is anybody's."""
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


async def test_facts_that_roles_do_not_change(
    guarded: Guarded, way: str, everything: Transport
) -> None:
    """What docs/operations/security.md says etcd does not guard: hence client certificates."""
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
    # Who knows a lease's number can put a key on it, and then its owner cannot end it. etcd forbids
    # it to a plain put, and forgets it in a transaction.
    await everything.commit([], [Delete(key=MINE[3])])
    absent = ModRevisionGuard(key=MINE[3], mod_revision=0)
    await agent.commit([absent], [Put(key=MINE[3], value=b"1", lease=lease)])
    with pytest.raises(PermissionDeniedError):
        await theirs.revoke(lease)
    await everything.revoke(lease)
    for transport in (nobody, agent, theirs):
        await transport.close()
