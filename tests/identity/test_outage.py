"""An outage of the store and the signer: certificates serve on, and end at a known time with a named reason."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from identity.authority import load_certificate
from identity.credentials import GRACE, Credentials
from identity.names import Role
from identity.peers import PeerError
from identity.renewal import Applicant, Renewal
from identity.trust_sync import TrustSync
from machinery import virtual_time
from schemas.trust import TlsMode
from tests.support.identities import handshake
from tests.support.signing import UUID, OutageTransport, SigningFleet, running

ENGINE = Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID)
GATEWAY = Applicant(role=Role.GATEWAY, name="edge")


class Ends:
    """An engine's listener and a gateway, with the work that keeps their identities."""

    def __init__(self, fleet: SigningFleet, engine: Credentials, gateway: Credentials) -> None:
        self.all = (engine, gateway)
        self._server = engine.server(frozenset({Role.GATEWAY}))
        self._client = gateway.client(frozenset({Role.NODE}))
        self._name = engine.identity.dns_name
        self.renewals = [
            Renewal(fleet.store, fleet.clock, one.folder, applicant)
            for one, applicant in ((engine, ENGINE), (gateway, GATEWAY))
        ]
        syncs = [
            TrustSync(fleet.store, fleet.clock, credentials.folder) for credentials in self.all
        ]
        self.work = [*(sync.run() for sync in syncs), *(renewal.run() for renewal in self.renewals)]

    def connect(self) -> None:
        """Let the gateway connect to the engine. Raises PeerError."""
        for credentials in self.all:
            credentials.refresh()
        peer = handshake(self._client.context, self._server.context, self._name)
        assert peer.identity.name == "edge"

    @property
    def refused(self) -> set[str]:
        """The reasons of refusals."""
        return {*self._server.verifier.refused, *self._client.verifier.refused}

    @property
    def accepted_late(self) -> int:
        """The number of expired certificates that were accepted."""
        return self._server.verifier.expired + self._client.verifier.expired


@pytest.mark.ci
def test_outage_of_nine_days_is_not_noticed_and_long_one_ends_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = SigningFleet(tmp_path)
        fleet.store = store = OutageTransport(fleet.clock, expires_by_itself=False)
        await fleet.publish(TlsMode.STRICT)
        folders = [await fleet.join(), await fleet.join(Role.GATEWAY, "edge")]
        end = load_certificate(folders[0].certificate()).not_valid_after_utc
        # Just before the renewal: the worst moment.
        await _sleep(timedelta(days=17, hours=23))
        ends = Ends(fleet, *(Credentials(folder, fleet.clock) for folder in folders))
        async with running(*ends.work):
            await _sleep(timedelta(minutes=5))
            store.is_away = True
            for _ in range(9 * 4):
                await _sleep(timedelta(hours=6))
                ends.connect()
            assert ends.accepted_late == 0
            while fleet.clock.now() < end + GRACE - timedelta(hours=6):
                await _sleep(timedelta(hours=6))
                ends.connect()
            assert ends.accepted_late > 0
            assert all("away" in renewal.failure for renewal in ends.renewals)
            await _sleep(timedelta(hours=6, minutes=1))
            with pytest.raises(PeerError, match="it was not renewed"):
                ends.connect()
            assert ends.refused == {"Expired"}
            store.is_away = False
            async with fleet.signers():
                await _sleep(timedelta(minutes=10))
            ends.connect()
            assert all(renewal.failure == "" for renewal in ends.renewals)

    virtual_time.run(test())


async def _sleep(time: timedelta) -> None:
    await asyncio.sleep(time.total_seconds())
