"""Asks gateways for their metrics, as long as somebody needs them. Decides nothing.

What gateways answer is not trusted: it is read up to a limit, and what makes no sense is passed by.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from urllib.parse import urlsplit

import aiohttp

from machinery.clock import Clock
from reconciler.demand import gateway_metrics
from reconciler.demand.gateway_metrics import Demand, DemandTotals, GatewaySample, VersionMetrics
from schemas.records import GatewayLease
from store import codec, keys
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_ANSWER_S = 1.0
_BODY_LIMIT = 4 << 20
# Whoever can register gateways could register millions.
_GATEWAYS = 100
# Under load requests end all the time: that they do is told so often at most.
_FINISHED_NEWS_S = 5.0


class DemandScraper:
    """What gateways say, as of the last second. Run `run()` in a task group while leading."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        needed: Callable[[], AbstractSet[str]],
        on_change: Callable[[str], object],
    ) -> None:
        """`needed` says each second whose demand matters; `on_change` is told whose demand changed."""
        self._clock = clock
        self._needed = needed
        self._on_change = on_change
        self._tally = DemandTotals()
        self._told: dict[str, tuple[Demand, float]] = {}
        self._gateways = Informer(
            transport,
            keys.GATEWAY_LEASE_PREFIX,
            lambda item: codec.decode(GatewayLease, item),
            clock,
        )

    async def run(self) -> None:
        """Ask every second, for ever; nobody is asked while nothing is needed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._gateways.run())
            await self._gateways.wait_synced()
            # No cookies, no redirects, nothing unpacked: it is one plain text that is wanted.
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session:
                while True:
                    await self._round(session, frozenset(self._needed()))
                    await self._clock.sleep(_PERIOD_S)

    def demand(self, deployment: str) -> Demand | None:
        """Return how busy it is; None until everybody was asked once."""
        return self._tally.demand(deployment)

    def measured(self, deployment: str, template: str) -> VersionMetrics | None:
        """Return what became of its requests since we began to look; None until everybody was asked once."""
        return self._tally.measured(deployment, template)

    async def _round(self, session: aiohttp.ClientSession, needed: frozenset[str]) -> None:
        if not needed:
            if self._told:
                # Whatever happens until somebody is needed again is nobody's news then.
                self._tally, self._told = DemandTotals(), {}
            return
        urls = self._urls()
        async with asyncio.TaskGroup() as group:
            asked = {
                id_: group.create_task(_scrape(session, id_, url, needed))
                for id_, url in urls.items()
            }
        now_s = self._clock.monotonic()
        answers = {id_: task.result() for id_, task in asked.items()}
        self._tally.note(answers, urls, needed, now_s)
        self._tell(needed, now_s)

    def _urls(self) -> dict[str, str]:
        found: Mapping[str, GatewayLease] = self._gateways.items
        named = sorted((key.rpartition("/")[2], lease.url) for key, lease in found.items())
        return dict(named[:_GATEWAYS])

    def _tell(self, needed: frozenset[str], now_s: float) -> None:
        self._told = {name: told for name, told in self._told.items() if name in needed}
        for name in sorted(needed):
            demand = self._tally.demand(name)
            assert demand is not None
            told, told_s = self._told.get(name, (None, 0.0))
            if told is None or is_significant(told, demand, since_s=now_s - told_s):
                self._told[name] = (demand, now_s)
                self._on_change(name)


def is_significant(told: Demand, now: Demand, *, since_s: float) -> bool:
    """Return whether the change matters: a twentieth of the load does not, half the scaler's tolerance."""
    if (told.silent, told.is_complete) != (now.silent, now.is_complete):
        return True
    if bool(told.waiting) != bool(now.waiting) or bool(told.requests) != bool(now.requests):
        return True
    if abs(now.requests - told.requests) * 20 > told.requests:
        return True
    return now.finished != told.finished and since_s >= _FINISHED_NEWS_S


async def _scrape(
    session: aiohttp.ClientSession, id_: str, url: str, needed: frozenset[str]
) -> GatewaySample | None:
    """Return what the gateway shows; None if it does not answer, or is not the one we mean."""
    if not _is_plain(url):
        return None
    try:
        async with session.get(
            f"{url.rstrip('/')}/metrics/demand",
            allow_redirects=False,
            headers={"accept-encoding": "identity"},
        ) as response:
            # Several gateways may go by 127.0.0.1, each on its own machine.
            if response.status != 200 or response.headers.get("x-fleet-gateway") != id_:
                return None
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _BODY_LIMIT:
                    return None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        log.debug("a gateway does not answer", extra={"url": url, "why": str(error)})
        return None
    return gateway_metrics.parse(body.decode(errors="replace"), needed)


def _is_plain(url: str) -> bool:
    """Return whether it is http://host:port and nothing more."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname and parts.port)
    except ValueError:
        return False
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    return parts.scheme == "http" and is_whole and not extra
