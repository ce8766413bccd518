"""Requests to join without a token: who is stored, who gets an answer, and when a request ends."""

import asyncio
from pathlib import Path

import httpx
import pytest

from fleetctl.fleets.join_approvals import list_machines
from identity import join_requests
from identity.authority import identity_of, load_certificate, new_key, spki_hash
from identity.join_requests import MAX_PENDING, REQUEST_LIFETIME_S
from identity.names import Role
from identity.proof import make_proof, poll_text
from identity.signer import revoke
from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from schemas.trust import IssuedCertificate
from schemas.wire.join import REQUESTS_PATH, PendingAnswer, PendingBody
from store import codec, keys
from store.memory import MemoryTransport
from tests.support.join import OTHER_UUID, UUID, JoinStand, machine


class Mac:
    """A machine without a token."""

    def __init__(self, stand: JoinStand, name: str = "studio", uuid: str = UUID) -> None:
        self.stand = stand
        self.key, request = new_key()
        who = machine(name, uuid)
        self.body = PendingBody(
            request=request.decode(), machine=who, chip="Apple M4 Pro", memory_bytes=64 << 30
        )
        self.id = ""

    async def ask(self, source: str = "10.0.0.7") -> httpx.Response:
        raw = self.body.model_dump_json(by_alias=True).encode()
        answered = await self.stand.post(raw, REQUESTS_PATH, source=source)
        if answered.is_success:
            self.id = PendingAnswer.model_validate_json(answered.content).id
        return answered

    async def poll(
        self, method: str = "GET", *, key: bytes = b"", authority: bytes = b""
    ) -> httpx.Response:
        hashed = authority or self.stand.ca.authority.spki_hash
        proof = make_proof(key or self.key, poll_text(self.id, hashed))
        headers = {"authorization": f"Proof {proof}"}
        return await self.stand.call(method, f"{REQUESTS_PATH}/{self.id}", headers)

    async def decide(self, *, is_approved: bool) -> None:
        request = await join_requests.find_request(self.stand.transport, self.id)
        assert request is not None
        await join_requests.decide(
            self.stand.transport, self.stand.clock, request, "anna", is_approved=is_approved
        )


@pytest.fixture
async def stand(tmp_path: Path) -> JoinStand:
    return await JoinStand(tmp_path).open()


async def test_an_approved_machine_gets_one_certificate_for_its_key(stand: JoinStand) -> None:
    mac = Mac(stand)
    assert (await mac.ask()).status_code == 200
    assert (await mac.poll()).json()["state"] == "Pending"
    await mac.decide(is_approved=True)
    first, again = await mac.poll(), await mac.poll()  # the first answer may be lost
    answer = PendingAnswer.model_validate_json(first.content).answer
    assert answer is not None
    certificate = load_certificate(answer.certificate)
    assert identity_of(certificate) == stand.ca.identity(Role.NODE, "studio")
    assert spki_hash(certificate.public_key()).hex() == (await _stored(mac)).key_hash
    assert again.json()["answer"]["certificate"] == answer.certificate
    assert (await mac.poll("DELETE")).json()["state"] == "Ended"
    assert (await mac.poll()).status_code == 404
    reasons = [reason for reason, _ in await stand.events()]
    assert {"JoinRequested", "Joined"} == set(reasons)
    item = await stand.transport.get(keys.issued_key("node", "studio"))
    assert item is not None
    assert codec.decode(IssuedCertificate, item).earlier == ()


async def _stored(mac: Mac) -> IssuedCertificate:
    item = await mac.stand.transport.get(keys.issued_key("node", "studio"))
    assert item is not None
    return codec.decode(IssuedCertificate, item)


async def test_an_approval_gives_no_revoked_name_back(stand: JoinStand) -> None:
    mac = Mac(stand)
    await mac.ask()
    await mac.decide(is_approved=True)
    assert (await mac.poll()).json()["state"] == "Issued"
    await revoke(stand.transport, stand.clock, stand.ca.identity(Role.NODE, "studio"), "stolen")
    assert (await mac.poll()).json()["code"] == "Revoked"
    await mac.decide(is_approved=True)
    assert (await mac.poll()).json()["state"] == "Issued"


async def test_only_the_holder_of_the_key_gets_the_answer(stand: JoinStand) -> None:
    mac, other = Mac(stand), new_key()[0]
    await mac.ask()
    await mac.decide(is_approved=True)
    stranger = await mac.poll(key=other)
    in_between = await mac.poll(authority=bytes(32))  # it has seen another authority
    assert stranger.status_code == in_between.status_code == 404
    mac_id, mac.id = mac.id, "a" * 16
    assert (await mac.poll()).content == stranger.content
    mac.id = mac_id
    assert (await mac.poll("DELETE", key=other)).status_code == 404
    assert (await mac.poll()).json()["state"] == "Issued"


async def test_a_denied_machine_is_told_and_gets_nothing(stand: JoinStand) -> None:
    mac = Mac(stand)
    await mac.ask()
    await mac.decide(is_approved=True)
    await mac.decide(is_approved=False)  # the last word counts
    answered = (await mac.poll()).json()
    assert answered["state"] == "Denied"
    assert "answer" not in answered
    assert await stand.transport.get(keys.issued_key("node", "studio")) is None


async def test_the_name_of_another_machine_is_not_given_by_an_approval(stand: JoinStand) -> None:
    mac, thief = Mac(stand), Mac(stand, uuid=OTHER_UUID)
    for one in (mac, thief):
        await one.ask()
        await one.decide(is_approved=True)
    assert (await mac.poll()).json()["state"] == "Issued"
    refused = await thief.poll()
    assert (refused.status_code, refused.json()["code"]) == (409, "NameTaken")


async def test_an_approval_is_for_the_key_that_was_compared(stand: JoinStand) -> None:
    mac = Mac(stand)
    await mac.ask()
    request = await join_requests.find_request(stand.transport, mac.id)
    assert request is not None
    other = request.model_copy(update={"key_hash": "0" * 64})
    await join_requests.decide(stand.transport, stand.clock, other, "anna", is_approved=True)
    assert (await mac.poll()).json()["state"] == "Pending"


async def test_strangers_that_take_all_places_keep_none(stand: JoinStand) -> None:
    """The oldest without an answer goes, however often its machine asks."""
    macs = [Mac(stand, f"mac-{n}", f"uuid-{n}") for n in range(MAX_PENDING + 1)]
    for mac in macs[:-1]:
        assert (await mac.ask()).status_code == 200
    await macs[0].decide(is_approved=True)
    assert (await macs[1].poll()).json()["state"] == "Pending"
    assert (await macs[-1].ask()).status_code == 200
    assert (await macs[1].poll()).status_code == 404
    for mac in (macs[2], macs[-1]):
        assert (await mac.poll()).json()["state"] == "Pending"
    assert (await macs[0].poll()).json()["state"] == "Issued"
    waiting = await list_machines(stand.transport)
    assert {waiting_machine.same_source for waiting_machine in waiting} == {MAX_PENDING}
    assert f"10.0.0.7 ({MAX_PENDING} requests)" in waiting[-1].row(stand.clock.now())
    for mac in macs[2:]:
        await mac.decide(is_approved=False)
    assert (await macs[1].ask()).status_code == 200  # the place of the issued one
    await macs[1].decide(is_approved=False)
    refused = await Mac(stand, "late", "uuid-late").ask()
    assert (refused.status_code, "use a token" in refused.json()["message"]) == (503, True)


def test_a_source_asks_once_a_minute_and_a_request_lives_while_its_machine_waits(
    tmp_path: Path,
) -> None:
    async def steps() -> None:
        clock = VirtualClock()
        transport = MemoryTransport(clock, expires_by_itself=False)
        stand = await JoinStand(tmp_path, transport, clock, most_per_minute=1).open()
        mac, other = Mac(stand), Mac(stand, "other", OTHER_UUID)
        assert (await mac.ask()).status_code == 200
        assert (await other.ask()).status_code == 429
        assert (await other.ask("10.0.0.8")).status_code == 200
        for _ in range(3):
            await clock.sleep(REQUEST_LIFETIME_S - 1)
            assert (await mac.poll()).json()["state"] == "Pending"
        assert (await other.poll()).status_code == 404  # it has not asked for ten minutes
        for _ in range(8):
            await clock.sleep(REQUEST_LIFETIME_S - 1)
            await mac.poll()
        assert (await mac.poll()).status_code == 404  # an hour is enough

    virtual_time.run(steps())


async def test_requests_of_strangers_are_small(stand: JoinStand) -> None:
    mac = Mac(stand)
    raw = mac.body.model_dump_json(by_alias=True)
    for wrong in (
        raw.replace("Apple M4 Pro", "\\u001b[2J"),
        raw.replace("Apple M4 Pro", "x" * 101),
        raw.replace("studio", "Studio!"),
        raw.replace(UUID, "x" * 65),
        raw.replace("BEGIN CERTIFICATE REQUEST", "BEGIN NOTHING"),
        raw[:-1] + ',"more":1}',
    ):
        answered = await stand.post(wrong.encode(), REQUESTS_PATH)
        assert answered.status_code in (400, 409), answered.text
        assert answered.json()["code"] == "InvalidRequest"
    assert await join_requests.list_requests(stand.transport) == []


async def test_two_questions_at_once_get_one_certificate(stand: JoinStand) -> None:
    mac = Mac(stand)
    await mac.ask()
    await mac.decide(is_approved=True)
    answers = await asyncio.gather(*(mac.poll() for _ in range(10)))
    good = {answer.json()["answer"]["certificate"] for answer in answers if answer.is_success}
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert len(good) == 1
    assert (await _stored(mac)).earlier == ()
