"""Registration of this gateway in the store, so that the reconciler finds its metrics.

Serving does not depend on it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.http_server import ListenAddress
from schemas.records import GatewayLease
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.leases import LEASE_TTL_S, LeaseSession
from store.port import Put, Transport

_LOCAL = "127.0.0.1"
log = logging.getLogger(__name__)
_CLOSE_S = 1.0
_BACKOFF = Backoff(first_s=0.5, limit_s=5.0)
# A person has to mend the roles.
_REFUSED_BACKOFF = Backoff(first_s=20.0, limit_s=60.0)


def parse_address(text: str) -> ListenAddress | None:
    """Return host and port of HOST[:PORT], port 0 if it is missing; None for an empty text.

    Raises:
        ValueError: the text has another form.

    """
    if not text:
        return None
    wrong = f"{text} is no address; write HOST or HOST:PORT, such as 10.0.0.5:4000 or [fd00::5]"
    # A text with more than one colon is IPv6, which needs brackets.
    parts = urlsplit(f"//{text}") if text.count(":") < 2 or text.startswith("[") else None
    if parts is None or not parts.hostname or parts.netloc != text or "@" in text:
        raise ValueError(wrong)
    try:
        return ListenAddress(parts.hostname, parts.port or 0)
    except ValueError:
        raise ValueError(wrong) from None


def advertised_url(
    advertised: ListenAddress | None,
    bound: ListenAddress,
    etcd: Sequence[str],
    *,
    is_tls: bool = False,
) -> str:
    """Return the base URL at which the reconciler reaches this gateway.

    The configured address wins, then the bound one. If the gateway listens on every address, the
    local address of the route to etcd is used, because the reconciler reaches etcd too.
    """
    host, port = advertised or bound
    if advertised is None and is_any(host):
        host = next(filter(None, map(_leads_to, etcd)), _LOCAL)
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{named}:{port or bound.port}"


def is_any(host: str) -> bool:
    """Return whether a gateway that listens on the host listens on every address of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _leads_to(endpoint: str) -> str:
    """Return the local address of the route to the endpoint; empty if there is no route."""
    parts = urlsplit(endpoint)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, type_, protocol, _, address = found[0]
        # Connecting a datagram socket only asks the kernel for the route.
        with socket.socket(family, type_, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


class Registration:
    """Keeps the gateway's key under a lease for as long as the gateway runs."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        id_: str,
        lease: Callable[[], GatewayLease],
    ) -> None:
        """`lease` returns the value of the key; call `refresh` when it may have changed."""
        self._transport = transport
        self._clock = clock
        self._key = keys.named(keys.GATEWAY_LEASE_PREFIX, id_)
        self._lease = lease
        self._is_due = asyncio.Event()

    def refresh(self) -> None:
        """Write the value again if it has changed."""
        self._is_due.set()

    async def run(self) -> None:
        """Hold a lease forever, replacing a lost one; revoke it at the end."""
        last_reason, failures = "", 0
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=LEASE_TTL_S)
            error_: StoreError | None = None
            try:
                # Register, and return when the lease is lost. Raises StoreError.
                await session.open()
                try:
                    async with asyncio.TaskGroup() as group:
                        publishing = group.create_task(self._publish(session.id))
                        await session.keep()
                        publishing.cancel()
                except BaseExceptionGroup as failed:
                    raise failed.exceptions[0] from None
            except StoreError as error:
                error_ = error
            finally:
                # An unreachable etcd must not delay the end of the process.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await session.close()
            if error_ is None:
                last_reason, failures = "", 0
                continue
            failures += 1
            if str(error_) != last_reason:
                last_reason = str(error_)
                log.warning(
                    "gateway not registered; autoscaling does not see its load",
                    extra={"why": last_reason},
                )
            # An unreachable etcd comes back by itself.
            is_refused = isinstance(error_, PermissionDeniedError)
            backoff = _REFUSED_BACKOFF if is_refused else _BACKOFF
            await self._clock.sleep(backoff.delay_s(failures, jitter=random.random()))

    async def _publish(self, lease_id: int) -> None:
        """Write the value, and again after each change, forever. Raises StoreError."""
        written = None
        while True:
            self._is_due.clear()
            lease = self._lease()
            if lease != written:
                put = Put(key=self._key, value=codec.encode(lease), lease=lease_id)
                await self._transport.commit([], [put])
                written = lease
                log.info("gateway registered", extra={"lease": lease_id, "url": lease.url})
            await self._is_due.wait()
