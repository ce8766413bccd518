"""The join port: what a token gives, what strangers get, and how often they may ask."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from fleetctl.doctor.observe_security import read_security
from identity.authority import identity_of, load_certificate, new_key, spki_hash
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from identity.signer import revoke
from identity.token_store import TokenOptions, list_tokens
from insight.doctor.transport_security import check_joins
from machinery import virtual_time
from machinery.clock import SystemClock
from machinery.virtual_time import VirtualClock
from reconciler.services.join.port import REFUSAL_S
from schemas.node import Node
from schemas.trust import IssuedCertificate, JoinRole, RevokedCertificate
from schemas.wire.join import NAME_TAKEN, REJOIN_PATH, JoinAnswer, JoinRefusal, RejoinBody
from store import codec, keys, objects
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.etcd import running_etcd
from tests.support.identities import now
from tests.support.join import (
    OTHER_UUID,
    UUID,
    JoinStand,
    RecordedAccounts,
    join_body,
    machine,
)
from tests.support.signing import node_status

WRONG = "a" * 26


@pytest.fixture
async def stand(tmp_path: Path) -> JoinStand:
    return await JoinStand(tmp_path).open()


async def test_a_token_gives_a_certificate_for_the_key_of_the_machine(stand: JoinStand) -> None:
    _, request = new_key()
    answered = await stand.post(join_body(await stand.token(), request, machine("mac-1")))
    assert answered.status_code == 200, answered.text
    answer = JoinAnswer.model_validate_json(answered.content)
    certificate = load_certificate(answer.certificate)
    assert identity_of(certificate) == stand.ca.identity(Role.NODE, "mac-1")
    certificate.verify_directly_issued_by(load_certificate(answer.authorities))
    assert answer.etcd == ("https://127.0.0.1:2379",)
    assert (answer.etcd_user, answer.etcd_password) == ("", "")
    [(reason, message)] = await stand.events()
    assert reason == "Joined"
    assert "10.0.0.7" in message
    assert "11111111-aaaa" not in message


async def test_a_lost_answer_costs_nothing(stand: JoinStand) -> None:
    token, (_, request) = await stand.token(), new_key()
    first = await stand.post(join_body(token, request))
    again = await stand.post(join_body(token, request))
    assert again.json()["certificate"] == first.json()["certificate"]
    other = await stand.post(join_body(token, who=machine("mac-2")))
    assert (other.status_code, other.json()["code"]) == (403, "TokenEnded")
    assert "used once" in other.json()["message"]


@pytest.mark.parametrize(
    ("role", "remedy"),
    [
        ("node", "`fleetctl delete node mac-1`"),
        ("gateway", "`fleetctl cert revoke gateway/mac-1`"),
        ("reconciler", "`fleetctl cert revoke reconciler/mac-1`"),
        ("admin", "`fleetctl cert revoke admin/mac-1`"),
    ],
)
async def test_a_token_for_any_name_gives_no_name_that_the_fleet_has(
    tmp_path: Path, role: JoinRole, remedy: str
) -> None:
    """The UUID of the holder, its very request, or both: what a machine says of itself proves nothing."""
    accounts = RecordedAccounts()
    stand = await JoinStand(tmp_path, accounts=accounts).open()
    await stand.transport.commit([], node_status("mac-1", UUID))
    (_, request), who = new_key(), machine("mac-1")
    holder = await stand.token(TokenOptions(role=role, name="mac-1", labels={}), bytes(21))
    assert (await stand.post(join_body(holder, request, who))).status_code == 200
    accounts.issued.clear()
    token = await stand.token(TokenOptions(role=role, uses=2, labels={}))
    for body in (
        join_body(token, who=who),
        join_body(token, who=machine("mac-1", OTHER_UUID)),
        join_body(token, request, who),
    ):
        refused = await stand.post(body)
        assert (refused.status_code, refused.json()["code"]) == (409, "NameTaken")
        message = refused.json()["message"]
        assert f"--node mac-1` and join with it, or run {remedy}" in message
        assert UUID not in message
    assert accounts.issued == []
    [record] = [
        join_token_record
        for join_token_record in await list_tokens(stand.transport)
        if join_token_record.id == token.id
    ]
    assert record.uses == ()
    assert not any(UUID in message for _, message in await stand.events())
    assert [reason for reason, _ in await stand.events()].count(NAME_TAKEN) == 1  # counted thrice
    security = await read_security(
        stand.transport, stand.clock.now(), ((), {}, ()), (EtcdAddress(socket=tmp_path), None)
    )
    [warned] = [join.message for join in check_joins(security)]
    assert "address 10.0.0.7: the fleet has" in warned


async def test_a_node_without_a_certificate_keeps_its_name(stand: JoinStand) -> None:
    """Its certificate was revoked, or the fleet is being moved to TLS."""
    await stand.transport.commit([], node_status("mac-1", UUID))
    refused = await stand.post(join_body(await stand.token(), who=machine("mac-1")))
    assert (refused.status_code, refused.json()["code"]) == (409, "NameTaken")


async def test_a_token_for_the_name_replaces_a_lost_key(stand: JoinStand) -> None:
    before = await stand.post(join_body(await stand.token(), who=machine("mac-1")))
    named = await stand.token(TokenOptions(name="mac-1", labels={}), bytes(21))
    after = await stand.post(join_body(named))
    assert before.is_success
    assert after.is_success
    assert before.json()["certificate"] != after.json()["certificate"]


@pytest.mark.parametrize("name", [None, "mac-1"])
async def test_a_used_token_gives_no_revoked_name_back(stand: JoinStand, name: str | None) -> None:
    """The thief of a Mac sends once more what it joined with: after its removal, and after another Mac got the name."""
    token, (_, request) = await stand.token(TokenOptions(name=name, labels={})), new_key()
    body = join_body(token, request, machine("mac-1"))
    assert (await stand.post(body)).is_success
    await revoke(stand.transport, stand.clock, stand.ca.identity(Role.NODE, "mac-1"), "stolen")
    refused = await stand.post(body)
    assert (refused.status_code, refused.json()["code"]) == (409, "Revoked")
    fresh = await stand.token(entropy=bytes(21))
    assert (await stand.post(join_body(fresh, who=machine("mac-1")))).is_success
    assert (await stand.post(body)).json()["code"] == ("NameTaken" if name is None else "Revoked")


async def test_a_token_with_a_name_is_for_this_name(stand: JoinStand) -> None:
    token = await stand.token(TokenOptions(name="mac-7", labels={}))
    refused = await stand.post(join_body(token, who=machine("mac-8")))
    assert (refused.status_code, refused.json()["code"]) == (409, "WrongName")
    given = await stand.post(join_body(token))
    assert given.json()["identity"].endswith("/node/mac-7")


async def test_a_token_gives_its_role_and_labels(stand: JoinStand) -> None:
    token = await stand.token(TokenOptions(role="gateway", labels={}), bytes(21))
    given = await stand.post(join_body(token, who=machine("edge-1", "")))
    assert given.json()["identity"].endswith("/gateway/edge-1")
    labelled = await stand.token(TokenOptions(labels={"rack": "a1"}))
    await stand.post(join_body(labelled, who=machine("mac-1")))
    node = await objects.get(stand.transport, Node, "mac-1")
    assert node is not None
    assert node.metadata.labels == {"rack": "a1"}


async def test_a_node_without_a_hardware_uuid_is_refused(stand: JoinStand) -> None:
    refused = await stand.post(join_body(await stand.token(), who=machine("mac-1", "")))
    assert (refused.status_code, refused.json()["code"]) == (409, "NoHardwareUuid")


async def test_an_unknown_id_and_a_wrong_secret_get_the_same_answer(stand: JoinStand) -> None:
    token = await stand.token()
    body = join_body(token, secret=WRONG)
    wrong = await stand.post(body)
    unknown = await stand.post(body.model_copy(update={"id": "aaaaaaaa"}))
    assert wrong.status_code == unknown.status_code == 403
    assert wrong.content == unknown.content
    assert dict(wrong.headers) == dict(unknown.headers)
    reasons = {reason for reason, _ in await stand.events()}
    assert reasons == {"JoinRefused"}
    assert not any(WRONG in message for _, message in await stand.events())
    assert await stand.transport.get(keys.issued_key("node", "studio")) is None


def test_refusals_take_the_same_time(tmp_path: Path) -> None:
    async def times() -> list[float]:
        clock = VirtualClock()
        stand = await JoinStand(tmp_path, MemoryTransport(clock), clock).open()
        token = await stand.token()
        ended = await stand.token(TokenOptions(lifetime=timedelta(seconds=1), labels={}), bytes(21))
        await clock.sleep(1)
        found = []
        for body in (
            join_body(token, secret=WRONG),
            join_body(token, secret=WRONG).model_copy(update={"id": "aaaaaaab"}),
            join_body(ended),
        ):
            start = clock.monotonic()
            assert (await stand.post(body)).status_code == 403
            found.append(clock.monotonic() - start)
        return found

    assert virtual_time.run(times()) == pytest.approx([REFUSAL_S] * 3, abs=0.01)


def test_attempts_are_few_for_a_source_and_for_all(tmp_path: Path) -> None:
    async def statuses() -> None:
        clock = VirtualClock()
        transport = MemoryTransport(clock, expires_by_itself=False)
        stand = await JoinStand(tmp_path, transport, clock, most_per_minute=5).open()
        body = join_body(await stand.token(), secret=WRONG)
        mine = await asyncio.gather(*(stand.post(body) for _ in range(6)))
        assert [response.status_code for response in mine] == [403] * 5 + [429]
        assert 1 <= int(mine[-1].headers["retry-after"]) <= 12
        assert JoinRefusal.model_validate_json(mine[-1].content).code == "TooManyAttempts"
        others = await asyncio.gather(*(stand.post(body, source=f"10.0.1.{n}") for n in range(20)))
        assert [other.status_code for other in others].count(403) == 15  # 20 in all
        assert (await stand.post(body, source="fe80::1")).status_code == 429
        await clock.sleep(60)
        assert (await stand.post(body)).status_code == 403

    virtual_time.run(statuses())


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{" * 30_000, b"\xff\xfe", b'{"id":"aaaaaaaa","secret":"no"}', b"x" * 40_000],
)
async def test_what_is_no_request_is_refused(stand: JoinStand, raw: bytes) -> None:
    refused = await stand.post(raw)
    assert refused.status_code in (400, 413)
    assert refused.json()["code"] == "InvalidRequest"


async def test_a_refusal_does_not_repeat_a_secret(stand: JoinStand) -> None:
    refused = await stand.post(b'{"id":"aaaaaaaa","secret":"mf1.canary.canary"}')
    assert "canary" not in refused.text


async def test_the_authorities_are_public(stand: JoinStand) -> None:
    answer = await stand.get("/v1/ca")
    assert answer["identity"] == stand.ca.identity(Role.RECONCILER, "control-1").uri
    found = load_certificate(str(answer["authorities"])).public_key()
    assert spki_hash(found) == stand.ca.authority.spki_hash


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Transport]:
    async with running_etcd(tmp_path / "etcd") as running:
        transport = connect(running.address)
        yield transport
        await transport.close()


@pytest.mark.etcd
async def test_one_of_a_hundred_parallel_joins_gets_a_certificate(
    etcd: Transport, tmp_path: Path
) -> None:
    stand = await JoinStand(tmp_path, etcd).open()
    token, start = await stand.token(), asyncio.Barrier(100)
    bodies = [join_body(token, who=machine(f"mac-{n}", f"uuid-{n}")) for n in range(100)]

    async def attempt(number: int) -> int:
        await start.wait()
        return (await stand.post(bodies[number], source=f"10.0.0.{number}")).status_code

    statuses = await asyncio.gather(*map(attempt, range(100)))
    assert sorted(statuses) == [200] + [403] * 99
    [item] = (await etcd.list(keys.ISSUED_PREFIX)).items
    assert item.key == keys.issued_key("node", f"mac-{statuses.index(200)}")
    assert codec.decode(IssuedCertificate, item).earlier == ()


def body(uuid: str = "11111111-aaaa") -> RejoinBody:
    return RejoinBody(request=new_key()[1].decode(), machine=machine(uuid=uuid))


async def call(
    stand: JoinStand, role: Role, name: str, sent: RejoinBody, folder: IdentityFolder | None = None
) -> tuple[int, JoinAnswer | JoinRefusal]:
    """Send the body over TLS with a certificate; return status and answer."""
    context = (
        Credentials(folder or stand.ca.issue(role, name), SystemClock())
        .client(frozenset({Role.RECONCILER}))
        .context
    )
    async with (
        stand.serve() as address,
        aiohttp.ClientSession() as session,
        session.post(
            f"{address.url}{REJOIN_PATH}",
            data=sent.model_dump_json(by_alias=True),
            ssl=context,
            server_hostname=stand.credentials.identity.dns_name,
        ) as answered,
    ):
        model = JoinAnswer if answered.status == 200 else JoinRefusal
        return answered.status, model.model_validate_json(await answered.read())


async def test_a_node_gets_what_a_joined_one_gets(stand: JoinStand) -> None:
    status, answer = await call(stand, Role.NODE, "mac-1", body())
    assert status == 200
    assert isinstance(answer, JoinAnswer)
    assert answer.identity == stand.ca.identity(Role.NODE, "mac-1").uri
    assert answer.etcd == ("https://127.0.0.1:2379",)


async def test_a_certificate_from_before_another_key_got_the_name_joins_nothing(
    stand: JoinStand,
) -> None:
    """The disk of a Mac whose name a new one has got, even with the new one's UUID."""
    old = stand.ca.issue(Role.NODE, "mac-1", start=now() - timedelta(minutes=1))
    await stand.post(join_body(await stand.token(), who=machine("mac-1")))
    status, answer = await call(stand, Role.NODE, "mac-1", body(), folder=old)
    assert status == 409
    assert isinstance(answer, JoinRefusal)
    assert answer.code == "NameTaken"


async def test_a_certificate_that_a_restored_store_does_not_know_joins_again(
    stand: JoinStand,
) -> None:
    await stand.post(join_body(await stand.token(), who=machine("mac-1")))
    new = stand.ca.issue(Role.NODE, "mac-1", start=now() + timedelta(minutes=1))
    status, _ = await call(stand, Role.NODE, "mac-1", body(), folder=new)
    assert status == 200


async def test_a_certificate_whose_revocation_the_signer_has_not_read_yet_joins_nothing(
    stand: JoinStand,
) -> None:
    stolen = stand.ca.issue(Role.NODE, "mac-1")
    leaf = stand.ca.leaves[stand.ca.identity(Role.NODE, "mac-1").uri]
    entry = RevokedCertificate(
        identity=stand.ca.identity(Role.NODE, "mac-1").uri, revoked=now(), not_after=leaf.not_after
    )
    key = keys.named(keys.REVOKED_PREFIX, leaf.serial)
    await stand.transport.commit([], [Put(key=key, value=codec.encode(entry))])
    status, answer = await call(stand, Role.NODE, "mac-1", body(), folder=stolen)
    assert isinstance(answer, JoinRefusal)
    assert (status, answer.code) == (409, "Revoked")


async def test_etcd_does_not_join(stand: JoinStand) -> None:
    status, answer = await call(stand, Role.ETCD, "control-1", body())
    assert status == 403
    assert isinstance(answer, JoinRefusal)
    assert answer.code == "WrongRole"


async def test_a_stranger_is_refused_before_anything_is_read_from_the_store(
    stand: JoinStand,
) -> None:
    refused = await stand.post(body().model_dump_json(by_alias=True).encode(), REJOIN_PATH)
    assert refused.status_code == 403
    assert refused.json()["code"] == "NoCertificate"
    malformed = await stand.post(b"{}", REJOIN_PATH)
    assert malformed.status_code == 403
