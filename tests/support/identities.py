"""Identities for tests: folders with certificates of one authority."""

import contextlib
import ssl
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from identity.authority import LEAF_LIFETIME, Authority, Leaf, new_key
from identity.authority_folder import AuthorityFolder
from identity.folder import IdentityFolder
from identity.names import Identity, Role
from identity.peers import Peer, peer_of
from machinery.clock import SystemClock
from schemas.trust import FleetTrust, TlsMode, TrustSnapshot
from store import codec, keys
from store.port import Put, Transport


def now() -> datetime:
    """Return the time of this machine."""
    return SystemClock().now()


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, server_name: str) -> Peer:
    """Return the client as the server knows it after a handshake in memory. Raises what either side raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=server_name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    sslobjects = list(ends)
    while sslobjects:
        for end in tuple(sslobjects):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                sslobjects.remove(end)
    peer = peer_of(ends[1])
    assert peer is not None
    return peer


@dataclass
class TestAuthority:
    """An authority, and the folders of the identities that it has signed."""

    __test__ = False

    root: Path
    authority: Authority = field(default_factory=lambda: Authority.create(now()))
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """The last certificate of each identity, by its URI."""
    fleet: str = ""
    """The uid in the identities; empty: the authority's own."""

    def identity(self, role: Role, name: str) -> Identity:
        return Identity(self.fleet or self.authority.fleet, role, name)

    def issue(
        self,
        role: Role,
        name: str,
        *,
        start: datetime | None = None,
        lifetime: timedelta = LEAF_LIFETIME,
    ) -> IdentityFolder:
        """Return the folder of an identity with a new key and certificate."""
        identity = self.identity(role, name)
        key, request = new_key()
        leaf = self.authority.sign(
            request,
            identity,
            start or now(),
            addresses=["127.0.0.1", "localhost"],
            lifetime=lifetime,
        )
        self.leaves[identity.uri] = leaf
        folder = IdentityFolder(self.root / f"{role}-{name}")
        folder.write_identity(key, leaf.pem)
        folder.write_authorities(self.authority.pem)
        return folder

    async def publish(self, transport: Transport, mode: TlsMode = TlsMode.PERMISSIVE) -> None:
        """Write the fleet's trust to a store."""
        trust = FleetTrust(fleet=self.authority.fleet, authorities=self.authority.pem, mode=mode)
        await transport.commit([], [Put(key=keys.FLEET_TRUST, value=codec.encode(trust))])

    def authority_folder(self) -> AuthorityFolder:
        """Return a folder with the authority's key, for a signer."""
        folder = AuthorityFolder(self.root / "authority")
        folder.write(self.authority)
        return folder

    def snapshot(
        self,
        *,
        mode: TlsMode = TlsMode.STRICT,
        revoked: tuple[str, ...] = (),
        seen: datetime | None = None,
    ) -> TrustSnapshot:
        """Return a snapshot of the fleet's trust."""
        return TrustSnapshot(
            fleet=self.authority.fleet, mode=mode, revoked=revoked, seen=seen or now()
        )
