"""Links to all engines, one to each; calls to external servers go over HTTP.

A link is opened when its engine's endpoint appears, and kept. One that is silent is probed by the health checks.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final, Protocol

from gateway.upstream.call import EngineCall, UnreachableError, WholeCall
from gateway.upstream.dialer import CONNECT_S, Dialer
from gateway.upstream.engine_link import SWITCHED, EngineLink
from gateway.upstream.external_client import ExternalClient
from gateway.upstream.tls import REFUSED
from machinery import engine_link
from machinery.clock import NEVER, Clock
from machinery.engine_link import EngineGauges, RequestHead
from schemas.wire.engine_address import EngineAddress

_SWEEP_S: Final = 1.0
_SHORT_SWEEP_S: Final = 0.05
# Requests with a shorter time limit are checked more often.
_SHORT_LIMIT_S: Final = 5.0
# Links to engines without an endpoint are closed after this time without a call, and those that do not open.
_IDLE_S: Final = 60.0
_OPEN_S: Final = 10.0
# A refused gateway learns of it within a round trip and a turn of the engine's loop.
_REFUSAL_S: Final = 1.0
# Handshakes at once; each takes 1 ms of CPU.
_DIALS_AT_ONCE: Final = 8

log = logging.getLogger(__name__)


class GaugesReceiver(Protocol):
    """Receives what engines report of their load."""

    def record_gauges(self, origin: EngineAddress, gauges: EngineGauges, now_s: float) -> None:
        """Record the load of one engine."""
        ...


class EngineLinks:
    """Sends calls. `run()` must run for time limits to hold."""

    def __init__(
        self, clock: Clock, dialer: Dialer, receiver: GaugesReceiver, *, silence_s: float
    ) -> None:
        """`silence_s`: the limit of `request`."""
        self.dialer = dialer
        self.external = ExternalClient(clock, dialer)
        self.links: dict[EngineAddress, EngineLink] = {}
        """The links that take calls, those that are not open yet included."""
        self._clock = clock
        self._now = clock.monotonic
        self._receiver = receiver
        self._silence_s = silence_s
        self._all: set[EngineLink] = set()
        self._dials: dict[EngineLink, asyncio.Task[None]] = {}
        self._known: frozenset[EngineAddress] = frozenset()
        """The engines and servers that have an endpoint."""
        self._wanted: dict[EngineAddress, None] = {}
        """Those that have no link yet."""
        self._is_wanted = asyncio.Event()
        self._short_limits: set[EngineCall] = set()
        """Calls whose time limits are checked more often."""
        self._has_short_limits = asyncio.Event()
        self._unlinked: dict[EngineAddress, str] = {}
        """Engines that speak no link, with what they answered."""

    def send(self, call: EngineCall) -> None:
        """Send a request; its response, or the reason why there is none, goes to the call.

        Time limits are held to the second, or to 50 ms if they are less than 5 s ahead.
        """
        now_s = self._now()
        if call.silence_s < _SHORT_LIMIT_S or call.until_s < now_s + _SHORT_LIMIT_S:
            self._short_limits.add(call)
            self._has_short_limits.set()
        if call.origin.external:
            self.external.send(call)
        else:
            link = self.links.get(call.origin) or self._dial(call.origin)
            link.start(call, now_s)

    async def request(
        self, origin: EngineAddress, path: str, lines: bytes = b"", *, limit: int
    ) -> tuple[int, bytes]:
        """Send a GET, with these header lines; return status and body. `limit`: as of `WholeCall`.

        Raises:
            UnreachableError: the engine or server accepts no connection.
            BrokenResponseError: the response is incomplete, or larger than the limit.

        """
        raw = engine_link.encode_request(RequestHead("GET", path, lines, 0), b"")
        silence_s = self._silence_s
        call = WholeCall(origin=origin, raw=raw, silence_s=silence_s, until_s=NEVER, limit=limit)
        self.send(call)
        try:
            return await call.response
        finally:
            call.cancel()

    async def probe(self, origin: EngineAddress) -> EngineGauges:
        """Return what the engine reports now.

        Raises:
            UnreachableError: the engine accepts no link.
            BrokenResponseError: the link ended.

        """
        link = self.links.get(origin) or self._dial(origin)
        return await link.ping()

    def _dial(self, origin: EngineAddress) -> EngineLink:
        link = self.links[origin] = EngineLink(self._clock, origin, self)
        self._all.add(link)
        self._dials[link] = asyncio.get_running_loop().create_task(self._connect(link))
        return link

    async def _connect(self, link: EngineLink) -> None:
        try:
            await self.dialer.connect(link.origin, CONNECT_S, lambda: link)
        except UnreachableError as error:
            link.lose(error)
        finally:
            self._dials.pop(link, None)

    def on_open(self, link: EngineLink) -> None:
        """Handle that an engine has accepted the link."""
        self.dialer.record_success(link.origin)
        self._unlinked.pop(link.origin, None)

    def on_gauges(self, link: EngineLink, gauges: EngineGauges) -> None:
        """Handle what an engine reports of its load."""
        self._receiver.record_gauges(link.origin, gauges, self._now())

    def forget(self, link: EngineLink) -> None:
        """Handle that a link takes no more calls. Called again at its end."""
        if self.links.get(link.origin) is link:
            del self.links[link.origin]
        if link.is_gone:
            self._all.discard(link)

    def explain_end(self, link: EngineLink) -> str:
        """Return why a link ended before it was open."""
        origin, answer = link.origin, link.head
        if not SWITCHED.startswith(answer[: len(SWITCHED)]):
            line = answer.partition(b"\r\n")[0][:100].decode(errors="replace")
            if self._unlinked.get(origin) != line:
                self._unlinked[origin] = line
                log.warning(
                    "engine speaks no engine link; run the same release on its node as on this gateway",
                    extra={"node": origin.node, "url": origin.url, "answer": line},
                )
            return f"it speaks no engine link, and answered {line!r}: its release differs from this gateway's"
        if origin.node and not link.is_cut and self._now() - link.opened_s < _REFUSAL_S:
            self.dialer.record_failure(origin, REFUSED, link.end)
            return f"the engine refused the connection after its TLS handshake: {link.end}"
        return link.end

    async def run(self) -> None:
        """Hold time limits, and open links to new engines, forever."""
        async with self.external.run(), asyncio.TaskGroup() as group:
            group.create_task(self._check_short_limits())
            group.create_task(self._open_wanted())
            while True:
                await self._clock.sleep(_SWEEP_S)
                self.sweep(self._now())

    def sweep(self, now_s: float) -> None:
        """Check every call and every link once."""
        for call in tuple(self.external.calls):
            _fail_if_late(call, now_s)
        for link in tuple(self._all):
            for call in tuple(link.calls.values()):
                _fail_if_late(call, now_s)
            if link.calls:
                link.idle_since = now_s
            elif link.is_open and link.origin in self._known:
                if self.links.get(link.origin) is not link:
                    link.cut()  # it goes away, and its last call has ended
            elif link.idle_since < now_s - (_IDLE_S if link.is_open else _OPEN_S):
                self._close(link)

    async def _check_short_limits(self) -> None:
        while True:
            if not self._short_limits:
                self._has_short_limits.clear()
                await self._has_short_limits.wait()
            await self._clock.sleep(_SHORT_SWEEP_S)
            now_s = self._now()
            for call in tuple(self._short_limits):
                is_short = call.silence_s < _SHORT_LIMIT_S or call.until_s < now_s + _SHORT_LIMIT_S
                if call.connection is None or _fail_if_late(call, now_s) or not is_short:
                    self._short_limits.discard(call)

    async def _open_wanted(self) -> None:
        """Open links to new engines, a few at once; failures are left to health checks and requests."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            while self._wanted:
                origins = [origin for origin in self._wanted if origin not in self.links]
                self._wanted.clear()
                for at in range(0, len(origins), _DIALS_AT_ONCE):
                    links = [self._dial(origin) for origin in origins[at : at + _DIALS_AT_ONCE]]
                    await asyncio.wait([self._dials[link] for link in links])

    def set_engines(self, addresses: Iterable[EngineAddress]) -> None:
        """Set the engines and servers that have an endpoint, and open a link to each new engine."""
        known = frozenset(addresses)
        for origin in known - self._known:
            if not origin.external:
                self._wanted[origin] = None
                self._is_wanted.set()
        self._known = known
        self.dialer.set_known(known)

    def connections(self) -> int:
        """Return the number of connections."""
        return len(self._all) + self.external.connections()

    def responding_origins(self) -> set[EngineAddress]:
        """Return the origins that sent anything since the last call."""
        origins, self.external.heard = self.external.heard, set()
        for link in self._all:
            if link.has_received:
                link.has_received = False
                origins.add(link.origin)
        return origins

    def silent_origins(self, since_s: float) -> set[EngineAddress]:
        """Return the origins that readers have been waiting on at least since that time."""
        silent = {call.origin for call in self.external.calls if call.silent_since <= since_s}
        for link in self._all:
            if any(call.silent_since <= since_s for call in link.calls.values()):
                silent.add(link.origin)
        return silent

    def fail_waiting(self, origin: EngineAddress, why: str) -> None:
        """Give up an engine that answers no probe: fail its requests, and close its link."""
        for link in tuple(self._all):
            if link.origin == origin:
                link.fail(why, is_silence=True)
                self._stop_dialing(link)

    def close_revoked(self) -> None:
        """Close the links to nodes whose certificate was revoked; their requests go elsewhere."""
        if self.dialer.tls is None:
            return
        is_revoked = self.dialer.tls.credentials.is_revoked
        for link in tuple(self._all):
            if link.origin.node and is_revoked(link.ssl_object):
                log.warning("link closed; its node is revoked", extra={"node": link.origin.node})
                self.dialer.tls_failures.add("Revoked")
                link.fail("the node's certificate was revoked")

    def _close(self, link: EngineLink) -> None:
        self.forget(link)
        link.cut()
        self._stop_dialing(link)

    def _stop_dialing(self, link: EngineLink) -> None:
        dial = self._dials.get(link)
        if dial is not None:
            dial.cancel()
            self._all.discard(link)

    def close(self) -> None:
        """Close every connection."""
        self.external.close()
        for link in tuple(self._all):
            self._close(link)


def _fail_if_late(call: EngineCall, now_s: float) -> bool:
    """Fail a call that exceeds its time limit; return whether it does."""
    link = call.connection
    if link is None:
        return False
    if call.silent_since < now_s - call.silence_s:
        link.fail_call(call, f"silent for {call.silence_s:g} s", is_silence=True)
        return True
    if call.until_s <= now_s and call.silent_since <= now_s:
        link.fail_call(call, "its time was up", is_silence=True)
        return True
    return False
