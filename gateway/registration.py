"""By which address the reconciler reaches this gateway. Sends nothing.

The gateway's sign of life in the store, so that the reconciler finds its figures. Nothing waits for it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from gateway.routing.table import Origin
from machinery.clock import Clock
from machinery.version import version
from schemas.records import GatewayLease
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.leases import LeaseSession
from store.port import Put, Transport

_LOCAL = "127.0.0.1"


def parse_address(text: str) -> Origin | None:
    """Return host and port (0 if it is left out) of HOST[:PORT]; None for an empty text.

    Raises:
        ValueError: it is something else.

    """
    if not text:
        return None
    wrong = f"{text} is no address; write HOST or HOST:PORT, such as 10.0.0.5:4000 or [fd00::5]"
    # With more than one colon it is IPv6, which needs its brackets.
    parts = urlsplit(f"//{text}") if text.count(":") < 2 or text.startswith("[") else None
    if parts is None or not parts.hostname or parts.netloc != text or "@" in text:
        raise ValueError(wrong)
    try:
        return Origin(parts.hostname, parts.port or 0)
    except ValueError:
        raise ValueError(wrong) from None


def advertised_url(advertised: Origin | None, bound: Origin, etcd: Sequence[str]) -> str:
    """Return the gateway's base address: what its owner says, else what it listens on.

    Who listens on every address has none to tell; then it is the one that leads to etcd, which the
    reconciler reaches as well.
    """
    host, port = advertised or bound
    if advertised is None and _is_any(host):
        host = next(filter(None, map(_leads_to, etcd)), _LOCAL)
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{port or bound.port}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _leads_to(endpoint: str) -> str:
    """Return the address of ours that packets to etcd would come from; empty if there is no way."""
    parts = urlsplit(endpoint)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, type_, protocol, _, address = found[0]
        # Connecting a datagram socket only asks the kernel for the route.
        with socket.socket(family, type_, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


log = logging.getLogger(__name__)

# As nodes' leases (docs/architecture.md, section 3): a dead gateway holds nothing up for longer.
LEASE_TTL_S = 4
_GOODBYE_S = 1.0


class Registration:
    """Keeps the gateway's key under a lease for as long as it runs. The gateway serves without it, too."""

    def __init__(
        self, transport: Transport, clock: Clock, *, id_: str, url: str, asks_for_keys: bool = True
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._key = keys.named(keys.GATEWAY_LEASE_PREFIX, id_)
        lease = GatewayLease(url=url, version=version(), asks_for_keys=asks_for_keys)
        self._value = codec.encode(lease)

    async def run(self) -> None:
        """Hold a lease for ever, a new one whenever one is lost; give it back at the end."""
        told: str | None = None
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=LEASE_TTL_S)
            failed: StoreError | None = None
            try:
                await self._hold(session)
            except StoreError as error:
                failed = error
            finally:
                # At the end of the process an etcd that is away must not keep it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await session.close()
            if failed is None:
                told = None
                continue
            if str(failed) != told:
                told = str(failed)
                log.warning("not registered; autoscaling does not see us", extra={"why": told})
            # Rights are mended by a person, an etcd that is away comes back by itself.
            is_refused = isinstance(failed, PermissionDeniedError)
            await self._clock.sleep(random.uniform(0.5, 1.5) * (20 if is_refused else 1))

    async def _hold(self, session: LeaseSession) -> None:
        """Register, and stay so until the lease is lost. Raises StoreError."""
        await session.open()
        put = Put(key=self._key, value=self._value, lease=session.id)
        await self._transport.commit([], [put])
        log.info("registered", extra={"lease": session.id})
        await session.keep()
