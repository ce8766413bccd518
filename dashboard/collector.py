"""Collector of figures: the feed of every gateway once a second, and the metrics of every agent every ten seconds.

Answers are not trusted: they are bounded in size and time and parsed into types. A process that hangs or answers
nonsense delays no other, and is reported with its reason.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from sys import intern
from typing import Final

import aiohttp
import msgspec

from dashboard.traffic import AgentState, GatewayState, Traffic, on_own_clock
from identity.dialer import Dial, Dialer, UntrustedAddressError
from insight.fleet_caches import FleetCaches
from insight.tickets import issue_ticket
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.http_body import read_limited
from machinery.prometheus import parse_samples
from schemas.node import NodeStatus
from schemas.records import GatewayLease
from schemas.wire.errors import ErrorBody
from schemas.wire.requests import EndedRequest, GatewayFeed
from store import keys
from store.errors import StoreError
from store.port import Transport

log = logging.getLogger(__name__)

_FEED_S: Final = 1.0
# The most that a gateway gives at once, and the wait after a full answer. 2,000 requests a second cost a gateway less
# than 2 % of its core; of more, the journal holds 10,000 for the quiet seconds that follow.
FEED_ENTRIES: Final = 1000
_NEXT_S: Final = 0.5
MOST_A_SECOND: Final = FEED_ENTRIES / _NEXT_S
"""Ended requests of one gateway that are read in a second, if it always has more."""
_AGENTS_S: Final = 10.0
_ANSWER_S: Final = 3.0
_FEED_BYTES: Final = 8 << 20
_METRICS_BYTES: Final = 1 << 20
# A client that may register gateways could register millions.
_MOST_GATEWAYS: Final = 200
_MOST_CURSORS: Final = 4 * _MOST_GATEWAYS
_AGENTS_AT_ONCE: Final = 50
_MOST_FIGURES: Final = 500
_BACKOFF: Final = Backoff(first_s=1.0, limit_s=10.0)
_PREFIXES: Final = ("fleet_node_", "fleet_agent_")


class CollectorError(Exception):
    """A process did not answer, or its answer cannot be used; the message says why."""


@dataclass(slots=True, kw_only=True)
class FigureCollector:
    """Asks gateways and agents, and gives their figures to `traffic`. Run `run()` in a task group."""

    transport: Transport
    caches: FleetCaches
    traffic: Traffic
    clock: Clock
    dialer: Dialer
    on_ended: Callable[[list[EndedRequest], Mapping[str, str]], None] = lambda *_: None
    """Called with requests of a gateway that ended, and what `cursors` has of it since then."""
    wants_progress: Callable[[], bool] = lambda: False
    """Returns whether a page shows requests in flight: their engines are asked then, too."""
    clock_jumped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this machine's clock jumped: sums of the last day may be of another day."""
    cursors: dict[str, str] = field(default_factory=dict)
    """The place up to which each gateway was read, by its id and by its URL: without a certificate, a gateway that
    starts again has another id."""
    _feed_decoder: msgspec.json.Decoder[GatewayFeed] = field(
        default_factory=lambda: msgspec.json.Decoder(GatewayFeed)
    )

    async def run(self) -> None:
        """Gather forever."""
        await self.caches.wait_synced()
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._follow_agents(session))
            tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
            while True:
                wanted = self._gateways()
                for key in set(tasks) - set(wanted):
                    log.debug("gateway is gone", extra={"gateway": key[0], "url": key[1]})
                    tasks.pop(key).cancel()
                now_s = self.clock.now().timestamp()
                self.traffic.forget_gateways((id_ for id_, _ in wanted), now_s)
                for key, lease in wanted.items():
                    if key not in tasks:
                        log.debug("gateway is followed", extra={"gateway": key[0], "url": key[1]})
                        tasks[key] = group.create_task(self._follow_gateway(session, key[0], lease))
                self._watch_clock()
                await self.clock.sleep(_FEED_S)

    def _watch_clock(self) -> None:
        """Notice a jump of this machine's clock."""
        traffic = self.traffic
        jump_s = traffic.known.note(self.clock.now().timestamp(), self.clock.elapsed())
        if not jump_s:
            return
        traffic.clock_jumps += 1
        log.warning(
            "the clock jumped; the time between is unknown", extra={"seconds": round(jump_s)}
        )
        self.clock_jumped.set()

    def _gateways(self) -> dict[tuple[str, str], GatewayLease]:
        """Return the registered gateways by id and URL; a changed URL is dialled anew."""
        prefix = keys.GATEWAY_LEASE_PREFIX
        leases = sorted(self.caches.gateways.items.items())[:_MOST_GATEWAYS]
        return {(key.removeprefix(prefix), lease.url): lease for key, lease in leases}

    async def _follow_gateway(
        self, session: aiohttp.ClientSession, id_: str, lease: GatewayLease
    ) -> None:
        """Read the feed of one gateway forever; a failure is recorded and tried again."""
        retries = Retries(_BACKOFF, self.clock)
        while True:
            try:
                dial = self.dialer.gateway(id_, lease)
                async with self._ticket(id_, lease, dial) as bearer:
                    while True:
                        feed = await self._feed(session, lease.url, dial, bearer, id_)
                        retries.reset()
                        places = self._remember(feed.cursor, id_, lease.url)
                        if not feed.is_complete:
                            log.warning(
                                "gateway has forgotten requests before they were read",
                                extra={"gateway": id_, "lost": feed.lost or "unknown"},
                            )
                        feed = self._on_own_clock(id_, feed)
                        ended = self.traffic.record_feed(id_, feed, self.clock.monotonic())
                        if ended:
                            log.debug(
                                "requests ended",
                                extra={"gateway": id_, "count": len(ended), "cursor": feed.cursor},
                            )
                            self.on_ended(ended, places)
                        is_full = len(feed.requests) >= FEED_ENTRIES
                        await self.clock.sleep(_NEXT_S if is_full else _FEED_S)
            except (CollectorError, UntrustedAddressError, StoreError) as error:
                if retries.failures == 0:
                    log.warning(
                        "gateway does not show its requests",
                        extra={"gateway": id_, "url": lease.url, "why": str(error)},
                    )
                self.traffic.record_silence(id_, str(error))
            await retries.wait()

    def _remember(self, cursor: str, *names: str) -> Mapping[str, str]:
        """Keep the place up to which a gateway was read; return what was kept."""
        for name in names:
            self.cursors.pop(name, None)
            self.cursors[name] = cursor
        while len(self.cursors) > _MOST_CURSORS:
            del self.cursors[next(iter(self.cursors))]
        return dict.fromkeys(names, cursor)

    @contextlib.asynccontextmanager
    async def _ticket(self, id_: str, lease: GatewayLease, dial: Dial) -> AsyncIterator[str]:
        """Yield a ticket where neither a certificate nor an open gateway makes it unnecessary; else an empty text."""
        if not lease.asks_for_keys or dial.server_hostname is not None:
            yield ""
            return
        async with issue_ticket(self.transport, f"Gateway/{id_}") as bearer:
            yield bearer

    async def _feed(
        self, session: aiohttp.ClientSession, url: str, dial: Dial, bearer: str, id_: str
    ) -> GatewayFeed:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        after = self.cursors.get(id_) or self.cursors.get(url, "")
        body = await _get(
            session,
            f"{url.rstrip('/')}/api/dashboard/feed",
            dial,
            limit=_FEED_BYTES,
            headers=headers,
            params={
                "after": after,
                "limit": str(FEED_ENTRIES),
                **({"progress": "true"} if self.wants_progress() else {}),
            },
        )
        try:
            gateway_feed = self._feed_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CollectorError(f"its answer cannot be read: {str(error)[:200]}") from error
        if gateway_feed.gateway != id_:
            raise CollectorError(f"another gateway ({gateway_feed.gateway[:60]}) answers at {url}")
        return gateway_feed

    def _on_own_clock(self, id_: str, found: GatewayFeed) -> GatewayFeed:
        """Return an answer with times of this machine's clock."""
        now_s, elapsed_s = self.clock.now().timestamp(), self.clock.elapsed()
        self.traffic.series.set_back(now_s)
        state = self.traffic.gateways.setdefault(id_, GatewayState())
        # After a gap, the oldest request may be from before the last answer.
        read_s = state.read_s if found.is_complete else float("-inf")
        if len(found.requests) < FEED_ENTRIES:
            state.read_s = elapsed_s
        if not found.requests:
            return found
        ended, is_wrong = on_own_clock(found.requests, now_s - (elapsed_s - read_s), now_s)
        if is_wrong and not state.is_clock_wrong:
            log.warning(
                "gateway has another time; its requests count as ended when they are read",
                extra={"gateway": id_, "ended": found.requests[-1].time.isoformat()},
            )
        state.is_clock_wrong = is_wrong
        return msgspec.structs.replace(found, requests=ended)

    async def _follow_agents(self, session: aiohttp.ClientSession) -> None:
        """Read the metrics of all agents every ten seconds, forever."""
        slots = asyncio.Semaphore(_AGENTS_AT_ONCE)
        while True:
            urls = self._agents()
            for gone in set(self.traffic.agents) - set(urls):
                del self.traffic.agents[gone]
            async with asyncio.TaskGroup() as group:
                for node, url in urls.items():
                    group.create_task(self._read_agent(session, slots, node, url))
            await self.clock.sleep(_AGENTS_S)

    def _agents(self) -> dict[str, str]:
        """Return the URLs of the agents that are alive, by node; https where both sides have an identity."""
        leases, agents = self.caches.objects.leases.items, {}
        for key, lease in leases.items():
            name = key.removeprefix(keys.NODE_LEASE_PREFIX)
            status = self.caches.objects.statuses.items.get(keys.status_key("Node", name))
            url = status.agent_url if isinstance(status, NodeStatus) else ""
            if self.dialer.has_identity and lease.tls:
                url = url.replace("http:", "https:", 1)
            if url:
                agents[name] = url
        return agents

    async def _read_agent(
        self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, node: str, url: str
    ) -> None:
        state = self.traffic.agents.setdefault(node, AgentState())
        async with slots:
            try:
                dial = self.dialer.node(node, url)
                body = await _get(session, f"{url.rstrip('/')}/metrics", dial, limit=_METRICS_BYTES)
            except (CollectorError, UntrustedAddressError) as error:
                if not state.problem:
                    log.warning(
                        "agent does not show its metrics", extra={"node": node, "why": str(error)}
                    )
                state.problem = str(error)
                return
        if state.problem:
            log.info("agent shows its metrics again", extra={"node": node})
        state.figures, state.problem = parse_figures(body), ""
        state.seen_s = self.clock.monotonic()


def parse_figures(body: bytes) -> dict[str, float]:
    """Return the values of an agent's metrics, by name; `NAME/VALUE` for those with one label. Pure."""
    figures: dict[str, float] = {}
    for sample in parse_samples(body.decode(errors="replace")):
        if not sample.name.startswith(_PREFIXES) or len(sample.labels) > 1:
            continue
        name = "/".join((sample.name, *sample.labels.values()))
        if len(figures) < _MOST_FIGURES:
            with contextlib.suppress(ValueError):
                value = float(sample.value)
                if isfinite(value):
                    # The names of one agent are those of a thousand others.
                    figures[intern(name)] = value
    return figures


async def _get(
    session: aiohttp.ClientSession,
    url: str,
    dial: Dial,
    *,
    limit: int,
    headers: dict[str, str] | None = None,
    params: dict[str, str] | None = None,
) -> bytes:
    """Return the body of an answer. Raises CollectorError."""
    try:
        async with session.get(
            url,
            params=params,
            headers={"accept-encoding": "identity", **(headers or {})},
            allow_redirects=False,
            ssl=dial.ssl,
            server_hostname=dial.server_hostname,
        ) as response:
            if response.status != 200:
                body = await read_limited(response.content.iter_any(), 4096)
                refused = ErrorBody.parse(body)
                why = "" if refused is None else f": {refused.message}"
                raise CollectorError(f"{url} answers {response.status}{why}")
            return await read_limited(response.content.iter_any(), limit)
    except TimeoutError as error:
        raise CollectorError(f"{url} does not answer within {_ANSWER_S:g} s") from error
    except aiohttp.ClientConnectorError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise CollectorError(f"{url} does not answer: {why}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise CollectorError(f"{url} does not answer: {error}") from error
