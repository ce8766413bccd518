"""`fleetctl join` without a token, `get joinrequests`, `approve` and `deny`: both sides show the same six words."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress
from fleetctl.fleets.join_files import JoinFolder
from fleetctl.verbs.join import JoinRequest, join_with_approval
from identity.authority import new_key, read_request, spki_hash
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.join_code import join_code, normalize_code
from identity.join_requests import list_requests
from identity.proof import make_proof, poll_text
from machinery.clock import SystemClock
from nodeagent.hardware import linux
from nodeagent.hardware.readings import HardwareFacts
from schemas.wire.join import REQUESTS_PATH, PendingBody
from tests.support.fleet import Done
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.join import OTHER_UUID, JoinStand, join_body, machine
from tests.support.waiting import until_async


@dataclass
class Meeting:
    """A fleet with a join port, and a machine that asks to join it."""

    fleet: MemoryFleet
    stand: JoinStand
    address: JoinAddress
    folder: Path

    def __post_init__(self) -> None:
        self.said: list[str] = []

    @property
    def words(self) -> str:
        """The words on the machine's screen."""
        return next((line.strip() for line in self.said if line.startswith("\n")), "")

    async def join(self, facts: HardwareFacts, name: str = "studio") -> str:
        """Ask to join and wait; return the URI of the identity."""
        request = JoinRequest(
            token=None,
            addresses=(self.address,),
            folder=JoinFolder(IdentityFolder(self.folder)),
            machine=machine(name),
            limit_s=30.0,
        )
        identity, _ = await join_with_approval(request, facts, self.said.append)
        return identity.uri

    async def asked(self) -> None:
        """Wait until the request is stored."""

        async def is_there() -> bool:
            return bool(await list_requests(self.stand.transport)) and bool(self.words)

        await until_async(is_there, limit_s=20, what="the request")

    async def ctl(self, *words: str, stdin: bytes = b"") -> Done:
        return await self.fleet.ctl(*words, stdin=stdin)


@pytest.fixture
async def meeting(tmp_path: Path) -> AsyncIterator[Meeting]:
    fleet = MemoryFleet()
    stand = await JoinStand(tmp_path / "fleet", fleet.store).open()
    async with stand.serve() as address:
        yield Meeting(fleet, stand, address, tmp_path / "identity")


@pytest.fixture
def facts() -> HardwareFacts:
    return replace(linux.read_facts(), chip="Apple M4 Pro\x1b[2J", memory_bytes=64 << 30)


async def test_a_machine_joins_when_its_words_are_approved(
    meeting: Meeting, facts: HardwareFacts
) -> None:
    async with asyncio.TaskGroup() as group:
        joining = group.create_task(meeting.join(facts))
        await meeting.asked()
        shown = await meeting.ctl("get", "joinrequests")
        assert "Apple M4 Pro?[2J" in shown.out
        assert "64Gi" in shown.out
        assert "Pending" in shown.out
        as_json = (await meeting.ctl("get", "jr", "studio", "-o", "json")).out
        assert json.loads(as_json)["items"][0]["status"] == {"condition": "Pending"}
        # Whoever could copy the words from here would not look at the machine's screen.
        for out in (shown.out, as_json):
            assert normalize_code(meeting.words) not in normalize_code(out)

        wrong = await meeting.ctl("approve", "studio", "--code", "a b c d e f")
        assert wrong.code == 1
        assert "these are not the words of studio" in wrong.err
        assert "a server may sit between" in " ".join(wrong.err.split())
        assert not joining.done()

        typed = "-".join(meeting.words.upper().split())
        done = await meeting.ctl("approve", "studio", stdin=f"{typed}\n".encode())
        assert done.code == 0, done.err
        assert "Apple M4 Pro?[2J, 64Gi, from 127.0.0.1" in done.err
        assert "approved: studio gets its certificate" in done.out
    assert joining.result() == stand_uri(meeting, "studio")
    own = Credentials(IdentityFolder(meeting.folder), SystemClock())
    assert own.identity.uri == joining.result()
    assert "No machines wait" in (await meeting.ctl("get", "joinrequests")).err


def stand_uri(meeting: Meeting, name: str) -> str:
    return f"mlxfleet://{meeting.stand.ca.authority.fleet}/node/{name}"


async def test_a_denied_machine_stops_and_keeps_nothing(
    meeting: Meeting, facts: HardwareFacts
) -> None:
    async def denied() -> str:
        with pytest.raises(
            FleetctlError, match="an administrator has denied this request"
        ) as caught:
            await meeting.join(facts)
        return str(caught.value)

    async with asyncio.TaskGroup() as group:
        group.create_task(denied())
        await meeting.asked()
        assert "denied" in (await meeting.ctl("deny", "studio")).out
    assert not meeting.folder.exists()


async def test_approving_without_a_comparison_has_to_be_said(
    meeting: Meeting, facts: HardwareFacts
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(meeting.join(facts))
        await meeting.asked()
        silent = await meeting.ctl("approve", "studio")  # nothing on standard input
        assert silent.code != 0
        done = await meeting.ctl("approve", "studio", "--yes-i-compared")
        assert done.code == 0, done.err


async def test_the_name_of_another_machine_is_not_approved(
    meeting: Meeting, facts: HardwareFacts
) -> None:
    token = await meeting.stand.token()
    await meeting.stand.post(join_body(token, who=machine("studio", OTHER_UUID)))

    async def waits() -> None:
        with pytest.raises(FleetctlError):
            await meeting.join(facts)

    async with asyncio.TaskGroup() as group:
        group.create_task(waits())
        await meeting.asked()
        refused = await meeting.ctl("approve", "studio", "--yes-i-compared")
        assert refused.code == 1
        assert "delete node studio" in refused.err
        await meeting.ctl("deny", "studio")


async def test_unknown_and_ambiguous_machines_are_explained(
    meeting: Meeting, facts: HardwareFacts
) -> None:
    none = await meeting.ctl("approve", "studio", "--yes-i-compared")
    assert "No machine waits now" in none.err
    for number in range(2):
        key, request = new_key()
        body = PendingBody(request=request.decode(), machine=machine("studio", f"uuid-{number}"))
        await join_client.ask_to_join((meeting.address,), key, body, SystemClock())
    both = await meeting.ctl("approve", "studio", "--yes-i-compared")
    assert "2 machines ask for the name studio: give an id" in both.err
    [first, _] = await list_requests(meeting.stand.transport)
    assert (await meeting.ctl("approve", first.id, "--yes-i-compared")).code == 0
    assert "there are" in (await meeting.ctl("approve", "mac")).err.lower()


async def test_a_server_in_between_changes_the_words_and_gets_nothing(
    meeting: Meeting, tmp_path: Path
) -> None:
    """It shows an authority of its own, and passes the machine's request on to the fleet."""
    between = await JoinStand(tmp_path / "between").open()
    key, request = new_key()
    body = PendingBody(request=request.decode(), machine=machine("studio"))
    async with between.serve() as where:
        caught = await join_client.ask_to_join((where,), key, body, SystemClock())
    passed_on = await meeting.stand.post(
        body.model_dump_json(by_alias=True).encode(), REQUESTS_PATH
    )
    assert passed_on.status_code == 200
    hashed = spki_hash(read_request(request))
    on_screen = join_code(caught.authority_hash, hashed)
    shown = await meeting.ctl("get", "joinrequests")
    assert on_screen not in shown.out
    assert (await meeting.ctl("approve", "studio", "--code", on_screen)).code == 1
    # Even with a careless approval, the machine's proofs name the other authority.
    assert (await meeting.ctl("approve", "studio", "--yes-i-compared")).code == 0
    proof = make_proof(key, poll_text(caught.id, caught.authority_hash))
    path, headers = f"{REQUESTS_PATH}/{caught.id}", {"authorization": f"Proof {proof}"}
    assert (await meeting.stand.call("GET", path, headers)).status_code == 404
