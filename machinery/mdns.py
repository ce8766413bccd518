"""DNS service discovery over multicast (RFC 6762, RFC 6763): announces one service, and hears those of other machines.

What is heard is a hint with an age. Every machine of the local network can forge it, and it never says that a process
lives. The only file that imports zeroconf, which takes 170 ms: import this one where it is used.

    announcer = Announcer("_mlx-fleet._tcp.local.", lambda: service, clock)
    browser = Browser("_mlx-fleet._tcp.local.", clock)
    group.create_task(announcer.run())
    group.create_task(browser.run())
    browser.records()

Each network interface has a session of its own: one that fails is tried again for ever, and disturbs no other one.
Sessions speak IPv4 only: zeroconf's support of IPv6 is limited.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import zeroconf
from typing_extensions import override
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.control_characters import make_printable
from machinery.network_interfaces import Interface, InterfaceLister
from machinery.rate_limit import RateLimit

log = logging.getLogger(__name__)

LIST_EVERY_S: Final = 10.0
"""The time between two looks at the interfaces, and at the service that is announced."""
BACKOFF: Final = Backoff(first_s=1.0, limit_s=60.0)
TTL_S: Final = 120
"""The life of a record of a process that ended without a goodbye (RFC 6762, section 10)."""
MAX_RECORDS: Final = 256
"""Most services that are heard on one interface."""
_MAX_PROPERTIES, _MAX_TEXT, _MAX_ADDRESSES = 32, 255, 8
_PACKETS_PER_S, _PACKET_BURST = 200.0, 500.0
_STABLE_S = 120.0
_REGISTER_S = 15.0
_GOODBYE_S = 2.0
_GROUP = "224.0.0.251"
_SRV, _IN = 33, 1

ListInterfaces: TypeAlias = Callable[[], Awaitable[list[Interface]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service of this machine, as it is announced."""

    name: str
    """Its name for people; another number is added where it is taken."""
    port: int
    properties: Mapping[str, str]
    addresses: tuple[str, ...] = ()
    """The addresses at which it listens; () for all of this machine. Each link hears only of its own ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecord:
    """A service that was heard. Its texts have no control characters."""

    name: str
    port: int
    properties: Mapping[str, str]
    addresses: tuple[str, ...]
    """Its IPv4 addresses on the link where it was heard; others are left out."""
    interface: str
    age_s: float
    """The time since it was last heard."""


class LinkError(OSError):
    """An interface does not send or receive now."""


class _LinkProtocol(asyncio.DatagramProtocol):
    """Passes on the packets of neighbours, as many as a quiet network has; others are dropped (RFC 6762, section 11)."""

    def __init__(self, inner: Any, link: "_Link", clock: Clock) -> None:
        self._inner = inner
        self._link = link
        self._limit = RateLimit(clock, burst=_PACKET_BURST, per_s=_PACKETS_PER_S)

    @override
    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if self._link.interface.has_neighbour(addr[0]) and self._limit.take():
            self._inner.datagram_received(data, addr)

    @override
    def error_received(self, exc: Exception) -> None:
        self._link.fail(exc)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


class _Link:
    """The sockets on one interface."""

    def __init__(self, interface: Interface, responder: AsyncZeroconf) -> None:
        self.interface: Final = interface
        self.responder: Final = responder
        self._failed = asyncio.Event()
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the session, because the system refused to send."""
        self._error = error
        self._failed.set()

    async def hold(self, limit_s: float | None = None) -> None:
        """Wait until the link fails, or for so many seconds. Raises LinkError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._failed.wait()
        if self._failed.is_set():
            raise LinkError(f"{self.interface.name}: {self._error}") from self._error


@contextlib.asynccontextmanager
async def _open(interface: Interface, clock: Clock) -> AsyncIterator[_Link]:
    """Open the sockets on an interface. Raises OSError, zeroconf.Error."""
    address = str(interface.addresses[0].ip)
    _check_multicast(address)  # zeroconf leaks sockets where this fails
    responder = AsyncZeroconf(interfaces=[address], ip_version=zeroconf.IPVersion.V4Only)
    try:
        await responder.zeroconf.async_wait_for_start()
        link = _Link(interface, responder)
        for reader in responder.zeroconf.engine.readers:
            transport = reader.transport
            transport.set_protocol(_LinkProtocol(transport.get_protocol(), link, clock))
        if not responder.zeroconf.engine.senders:
            raise LinkError(f"{interface.name}: no multicast with {address}")
        yield link
    finally:
        await _within(responder.async_close())


def _check_multicast(address: str) -> None:
    """Join the group once on the interface with an address. Raises OSError."""
    membership = socket.inet_aton(_GROUP) + socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)


async def _within(work: Awaitable[object]) -> None:
    """Wait for the end of work that says goodbye; it may fail on a link that is gone."""
    with contextlib.suppress(OSError, zeroconf.Error):
        async with asyncio.timeout(_GOODBYE_S):
            await work


class _Sessions:
    """Keeps one session on each interface that leads to other machines."""

    def __init__(
        self,
        session: Callable[[_Link], Awaitable[None]],
        clock: Clock,
        interfaces: ListInterfaces | None,
    ) -> None:
        """`session` returns when it shall begin again, and raises OSError or zeroconf.Error after a failure."""
        self._session = session
        self._clock = clock
        self._interfaces = interfaces or InterfaceLister()

    async def run(self) -> None:
        """Run for ever."""
        running: dict[Interface, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    wanted = await self._interfaces()
                except OSError as error:
                    log.info("interfaces are not known", extra={"why": str(error)})
                    wanted = list(running)
                for gone in running.keys() - set(wanted):
                    running.pop(gone).cancel()
                for interface in wanted:
                    if interface not in running:
                        running[interface] = group.create_task(
                            self._keep(interface), name=f"mdns {interface.name}"
                        )
                await self._clock.sleep(LIST_EVERY_S)

    async def _keep(self, interface: Interface) -> None:
        """Hold a session, and begin another one after each failure."""
        retries = Retries(BACKOFF, self._clock)
        while True:
            begun = self._clock.monotonic()
            try:
                async with _open(interface, self._clock) as link:
                    await self._session(link)
                    continue
            except (
                OSError,
                RuntimeError,
                zeroconf.Error,
            ) as error:  # RuntimeError: zeroconf's, too
                # On macOS EHOSTUNREACH comes and goes after boot, wake and link changes (exo issue 2191).
                why = str(error) or type(error).__name__
            if self._clock.monotonic() - begun > _STABLE_S:
                retries.reset()
            if retries.failures == 0:
                extra = {"interface": interface.name, "why": why}
                log.info("no multicast on an interface; trying again", extra=extra)
            await retries.wait()


class Announcer:
    """Announces one service for as long as it runs, and withdraws it at the end."""

    def __init__(
        self,
        type_: str,
        service: Callable[[], Service],
        clock: Clock,
        interfaces: ListInterfaces | None = None,
    ) -> None:
        """`service` is asked again every ten seconds; what has changed is announced anew."""
        self._type = type_
        self._service = service
        self._sessions = _Sessions(self._announce, clock, interfaces)

    async def run(self) -> None:
        """Announce on every interface, for ever."""
        await self._sessions.run()

    async def _announce(self, link: _Link) -> None:
        service = self._service()
        info = _service_info(self._type, service, link.interface)
        if info is None:  # it does not listen on this link
            while self._service() == service:
                await link.hold(LIST_EVERY_S)
            return
        responder = link.responder
        async with asyncio.timeout(_REGISTER_S):
            announced = await responder.async_register_service(info, allow_name_change=True)
        try:
            await announced
            log.debug("announced", extra={"service": info.name, "interface": link.interface.name})
            while self._service() == service:
                await link.hold(LIST_EVERY_S)
        finally:
            await _within(_withdraw(responder, info))


async def _withdraw(responder: AsyncZeroconf, info: AsyncServiceInfo) -> None:
    # The call returns a task: without waiting for it, no goodbye is ever sent.
    await (await responder.async_unregister_service(info))


def _service_info(type_: str, service: Service, interface: Interface) -> AsyncServiceInfo | None:
    """Return the records of a service on a link; None if it does not listen there."""
    own = [str(address.ip) for address in interface.addresses]
    addresses = [one for one in own if not service.addresses or one in service.addresses]
    if not addresses:
        return None
    return AsyncServiceInfo(
        type_,
        f"{_label(service.name)}.{type_}",
        port=service.port,
        # A name of its own: the machine's is its system's, and a goodbye must not take another process's address away.
        server=f"{addresses[0].replace('.', '-')}-{service.port}.{type_}",
        properties=dict(service.properties),
        parsed_addresses=addresses,
        host_ttl=TTL_S,
        other_ttl=TTL_S,
    )


def _label(name: str) -> str:
    """Return a name as one label, with room for a number (RFC 6763, section 4.1.1: 63 bytes)."""
    return make_printable(name).replace(".", "-").encode()[:56].decode(errors="ignore") or "unnamed"


@dataclass(slots=True)
class _Names:
    """The names that were heard on one link."""

    link: _Link
    names: dict[str, None] = field(default_factory=dict)


class Browser:
    """Hears the services of one type for as long as it runs."""

    def __init__(self, type_: str, clock: Clock, interfaces: ListInterfaces | None = None) -> None:
        self._type = type_
        self._sessions = _Sessions(self._browse, clock, interfaces)
        self._heard: dict[str, _Names] = {}

    async def run(self) -> None:
        """Listen on every interface, for ever."""
        await self._sessions.run()

    def records(self) -> list[ServiceRecord]:
        """Return what was heard and has not been withdrawn, by name."""
        service_records = []
        for heard in self._heard.values():
            for name in heard.names:
                record = _read_record(self._type, name, heard.link)
                if record is not None:
                    service_records.append(record)
        return sorted(service_records, key=lambda one: (one.name, one.interface))

    async def _browse(self, link: _Link) -> None:
        heard = self._heard[link.interface.name] = _Names(link)

        def changed(
            zeroconf: object,  # noqa: ARG001 - zeroconf passes its arguments by name
            service_type: str,  # noqa: ARG001 - as above
            name: str,
            state_change: zeroconf.ServiceStateChange,
        ) -> None:
            if state_change.name == "Removed":
                heard.names.pop(name, None)
            elif len(heard.names) < MAX_RECORDS and _empty_info(self._type, name) is not None:
                heard.names[name] = None

        browser = AsyncServiceBrowser(
            link.responder.zeroconf,
            self._type,
            handlers=[changed],
            # Answers to multicast questions reach every process of this machine, those to the others only one of them.
            question_type=zeroconf.DNSQuestionType.QM,
        )
        try:
            await link.hold()
        finally:
            if self._heard.get(link.interface.name) is heard:
                del self._heard[link.interface.name]
            await browser.async_cancel()


def _empty_info(type_: str, name: str) -> AsyncServiceInfo | None:
    """Return where the records of a service are read into; None for a name that is not valid."""
    try:
        return AsyncServiceInfo(type_, name)
    except zeroconf.Error:
        return None


def _read_record(type_: str, name: str, link: _Link) -> ServiceRecord | None:
    """Return a service as its records in the cache say; None while they are not complete, or after their end."""
    cache = link.responder.zeroconf.cache
    info = _empty_info(type_, name)
    srv = cache.get_by_details(name, _SRV, _IN)
    if info is None or srv is None or not info.load_from_cache(link.responder.zeroconf):
        return None
    addresses = [
        ipaddress.IPv4Address(raw) for raw in info.addresses_by_version(zeroconf.IPVersion.V4Only)
    ]
    near = [str(address) for address in addresses if link.interface.has_neighbour(str(address))]
    if not near:
        return None
    return ServiceRecord(
        name=_text(name.removesuffix(f".{type_}").encode()),
        port=info.port or 0,
        properties=_texts(info.properties),
        addresses=tuple(near[:_MAX_ADDRESSES]),
        interface=link.interface.name,
        age_s=max(0.0, (zeroconf.current_time_millis() - srv.created) / 1000),
    )


def _texts(properties: Mapping[bytes, bytes | None]) -> dict[str, str]:
    pairs = list(properties.items())[:_MAX_PROPERTIES]
    return {_text(key): _text(value or b"") for key, value in pairs}


def _text(raw: bytes) -> str:
    return make_printable(
        raw[:_MAX_TEXT].decode(errors="replace").replace("\n", " ").replace("\t", " ")
    )
