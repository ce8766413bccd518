"""POST /v1/rejoin: a certificate of the fleet is asked for, and the name stays with its Mac."""

from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from identity.authority import new_key
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import SystemClock
from schemas.trust import RevokedCertificate
from schemas.wire.join import REJOIN_PATH, JoinAnswer, JoinRefusal, RejoinBody
from store import codec, keys
from store.port import Put
from tests.support.identities import now
from tests.support.join import JoinStand, join_body, machine


@pytest.fixture
async def stand(tmp_path: Path) -> JoinStand:
    return await JoinStand(tmp_path).open()


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
