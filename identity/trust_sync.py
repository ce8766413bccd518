"""The fleet's trust in the store, written to the folder of this process: authorities, mode and revocations.

`Credentials.watch` takes them from there, in this process and in the engines beside an agent, which never read the
store. `trust.json` also says when the store was last there; that is written once a minute, not with each answer.
"""

import asyncio
import logging
from typing import Final

from identity.authority import AuthorityError, load_authorities, spki_hash
from identity.folder import FolderError, IdentityFolder
from machinery.clock import Clock
from schemas.trust import FleetTrust, RevokedCertificate, TrustSnapshot
from store import codec, keys
from store.errors import StoreError
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

SEEN_S: Final = 60.0
"""The interval in which `trust.json` says that the store was there."""
_MAX_REVOKED = 100_000


class TrustSync:
    """Follows `trust/` and writes the files of an identity. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock, folder: IdentityFolder) -> None:
        self._transport = transport
        self._clock = clock
        self._folder = folder
        self._fleet = Informer(
            transport, keys.FLEET_TRUST, lambda item: codec.decode(FleetTrust, item), clock
        )
        self._revoked = Informer(
            transport,
            keys.REVOKED_PREFIX,
            lambda item: codec.decode(RevokedCertificate, item),
            clock,
        )
        self._changed = asyncio.Event()
        for informer in (self._fleet, self._revoked):
            informer.on_change(lambda _: self._changed.set())
        self.failure = ""
        """Reason why the files are not those of the store; "" if they are."""

    async def run(self) -> None:
        """Follow the store forever. Files that cannot be written are logged, and written a minute later."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run())
            group.create_task(self._revoked.run())
            await self._fleet.wait_synced()
            await self._revoked.wait_synced()
            group.create_task(self._look())
            while True:
                self._changed.clear()
                await self._write()
                await self._changed.wait()

    async def _look(self) -> None:
        """Ask the store once a minute: a watch tells nothing while nothing changes."""
        while True:
            await self._clock.sleep(SEEN_S)
            try:
                await self._transport.get(keys.FLEET_TRUST)
            except StoreError:
                continue
            self._changed.set()

    async def _write(self) -> None:
        fleet = self._fleet.items.get(keys.FLEET_TRUST)
        if fleet is None:
            return
        # A revocation that cannot be read is one all the same: its key has the serial number.
        revoked = sorted({*self._revoked.items, *self._revoked.undecodable})
        snapshot = TrustSnapshot(
            fleet=fleet.fleet,
            mode=fleet.mode,
            revoked=tuple(key.removeprefix(keys.REVOKED_PREFIX) for key in revoked[:_MAX_REVOKED]),
            seen=self._clock.now(),
        )
        try:
            await asyncio.to_thread(self._write_files, fleet, snapshot)
        except (FolderError, AuthorityError) as error:
            if self.failure != str(error):
                log.error("trust not written", extra={"why": str(error)})  # noqa: TRY400 - the reason is in the message
            self.failure = str(error)
        else:
            self.failure = ""

    def _write_files(self, fleet: FleetTrust, snapshot: TrustSnapshot) -> None:
        folder = self._folder
        before = folder.read_authorities() if folder.authorities.exists() else ""
        if before:
            # Refuse a bundle without any authority that is trusted already: an exchange always has
            # one of them. Another store behind the same address, or a restored one of another
            # fleet, does not change what is trusted.
            known = {spki_hash(authority.public_key()) for authority in load_authorities(before)}
            if known.isdisjoint(
                spki_hash(authority.public_key())
                for authority in load_authorities(fleet.authorities)
            ):
                raise FolderError(
                    f"the store has other authorities than {folder.authorities}: it belongs to another fleet, or this process "
                    "was away during a whole exchange. Join again with a token"
                )
        if before != fleet.authorities:
            folder.write_authorities(fleet.authorities)
            log.info("authorities changed", extra={"folder": str(folder.path)})
        folder.write_trust(_with_earlier(folder, snapshot))


def _with_earlier(folder: IdentityFolder, snapshot: TrustSnapshot) -> TrustSnapshot:
    """Return the snapshot with all revocations that this process has ever seen.

    A store that was restored from an older backup does not make a certificate valid again. Serial numbers are never
    used twice, so a revocation can only end by being forgotten, and revocations are few.
    """
    try:
        before = folder.read_trust()
    except FolderError:
        return snapshot  # damaged, and written anew
    if before is None or before.fleet != snapshot.fleet:
        return snapshot
    revoked = tuple(dict.fromkeys((*snapshot.revoked, *before.revoked)))[:_MAX_REVOKED]
    return snapshot.model_copy(update={"revoked": revoked})
