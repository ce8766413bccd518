"""Scrapes the metrics of gateways every second, while a deployment needs them. Decides nothing.

Answers of gateways are not trusted: they are read up to a limit, and lines that make no sense are skipped.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from urllib.parse import urlsplit

import aiohttp

from identity.dialer import Dial, Dialer, UntrustedAddressError
from identity.metrics_access import TokenFileError
from machinery.clock import Clock
from machinery.http_body import read_limited
from machinery.tls_client import untrusted_reason
from reconciler.deployments.demand import gateway_metrics
from reconciler.deployments.demand.gateway_metrics import (
    Demand,
    DemandTotals,
    GatewaySample,
    VersionMetrics,
)
from schemas.records import GatewayLease
from schemas.wire import headers
from schemas.wire.errors import ErrorBody
from store import codec, keys
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_ANSWER_S = 1.0
_BODY_LIMIT = 4 << 20
_REFUSAL_LIMIT = 4096
# A client that may register gateways could register millions.
_GATEWAYS = 100
# Under load requests end all the time: a change of `finished` alone is reported this often at most.
_FINISHED_REPORT_S = 5.0


class DemandScraper:
    """The metrics of the gateways as of the last second. Run `run()` in a task group while leading."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        needed: Callable[[], AbstractSet[str]],
        on_change: Callable[[str], object],
        is_needed: Callable[[], bool] = lambda: False,
        dialer: Dialer | None = None,
    ) -> None:
        """Scrape for the deployments that `needed` returns; call `on_change` with one whose demand changed.

        `is_needed`: whether gateways are scraped even if no deployment needs it, for models on demand.
        """
        self._dialer = dialer or Dialer()
        self._untrusted: set[str] = set()
        """Gateways that are refused or refuse, by URL; each is logged once."""
        self._clock = clock
        self._needed, self._is_needed = needed, is_needed
        self._on_change = on_change
        self._totals = DemandTotals()
        self._reported: dict[str, tuple[Demand, float]] = {}
        self._gateways = Informer(
            transport,
            keys.GATEWAY_LEASE_PREFIX,
            lambda item: codec.decode(GatewayLease, item),
            clock,
        )

    async def run(self) -> None:
        """Scrape every second, forever; does nothing while no deployment needs it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._gateways.run())
            await self._gateways.wait_synced()
            # No cookies, no redirects, no decompression: the answer is one plain text.
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session:
                while True:
                    await self._round(session, frozenset(self._needed()))
                    await self._clock.sleep(_PERIOD_S)

    def demand(self, deployment: str) -> Demand | None:
        """Return the demand for a deployment; None before the first round."""
        return self._totals.demand(deployment)

    def requested(self) -> frozenset[str]:
        """Return the repositories of a hub that clients of any gateway ask for."""
        return self._totals.requested()

    def measured(self, deployment: str, template: str) -> VersionMetrics | None:
        """Return the metrics of a version since scraping began; None before the first round."""
        return self._totals.measured(deployment, template)

    async def _round(self, session: aiohttp.ClientSession, needed: frozenset[str]) -> None:
        if not needed and not self._is_needed():
            if self._totals.is_used:
                # What happens until metrics are needed again does not count.
                self._totals, self._reported = DemandTotals(), {}
            return
        leases = self._leases()
        urls = {id_: lease.url for id_, lease in leases.items()}
        self._untrusted &= set(urls.values())
        async with asyncio.TaskGroup() as group:
            scrapes = {
                id_: group.create_task(self._scrape(session, id_, lease, needed))
                for id_, lease in leases.items()
            }
        now_s = self._clock.monotonic()
        answers = {id_: task.result() for id_, task in scrapes.items()}
        self._totals.record(answers, urls=urls, needed=needed, now_s=now_s)
        self._reported = {
            name: reported for name, reported in self._reported.items() if name in needed
        }
        for name in sorted(needed):
            demand = self._totals.demand(name)
            assert demand is not None
            last, last_s = self._reported.get(name, (None, 0.0))
            if last is None or is_significant(last, demand, since_s=now_s - last_s):
                self._reported[name] = (demand, now_s)
                self._on_change(name)

    async def _scrape(
        self, session: aiohttp.ClientSession, id_: str, lease: GatewayLease, needed: frozenset[str]
    ) -> GatewaySample | None:
        """Return the gateway's metrics; None if it does not answer, or if another gateway answers."""
        url = lease.url
        if not _is_plain(url):
            return None
        try:
            dial = self._dialer.gateway(id_, lease)
            async with session.get(
                f"{url.rstrip('/')}/metrics/demand",
                allow_redirects=False,
                headers=_headers(dial),
                ssl=dial.ssl,
                server_hostname=dial.server_hostname,
            ) as response:
                if response.status in (401, 403):
                    body = await read_limited(response.content.iter_any(), _REFUSAL_LIMIT)
                    self._log_once(url, _refusal_text(body))
                    return None
                self._untrusted.discard(url)
                # Several gateways may register 127.0.0.1, each on its own machine.
                if response.status != 200 or response.headers.get(headers.GATEWAY) != id_:
                    return None
                body = await read_limited(response.content.iter_any(), _BODY_LIMIT)
        except (UntrustedAddressError, TokenFileError) as error:
            self._log_once(url, str(error))
            return None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = untrusted_reason(error)
            if not reason:
                log.debug("gateway does not answer", extra={"url": url, "why": str(error)})
            else:
                self._log_once(
                    url,
                    f"its certificate is not trusted ({reason}); give --identity-dir or --gateway-ca",
                )
            return None
        return gateway_metrics.parse(body.decode(errors="replace"), needed)

    def _log_once(self, url: str, why: str) -> None:
        if url not in self._untrusted:
            self._untrusted.add(url)
            log.warning(
                "gateway does not show its load; autoscaling does not see it",
                extra={"url": url, "why": why},
            )

    def _leases(self) -> dict[str, GatewayLease]:
        gateway_leases: Mapping[str, GatewayLease] = self._gateways.items
        named = sorted((key.rpartition("/")[2], key) for key in gateway_leases)
        return {id_: gateway_leases[key] for id_, key in named[:_GATEWAYS]}


def is_significant(last: Demand, now: Demand, *, since_s: float) -> bool:
    """Return whether a change matters: more than a twentieth of the load, which is half the autoscaler's tolerance."""
    if (last.silent, last.released) != (now.silent, now.released):
        return True
    if last.is_complete != now.is_complete:
        return True
    if bool(last.waiting) != bool(now.waiting) or bool(last.requests) != bool(now.requests):
        return True
    if abs(now.requests - last.requests) * 20 > last.requests:
        return True
    return now.finished != last.finished and since_s >= _FINISHED_REPORT_S


def _headers(dial: Dial) -> dict[str, str]:
    """Return the headers of a request. Raises TokenFileError."""
    bearer = {} if dial.token is None else {"authorization": f"Bearer {dial.token.token}"}
    return {"accept-encoding": "identity", **bearer}


def _refusal_text(body: bytes) -> str:
    """Return the message of a refusal."""
    refused = ErrorBody.parse(body)
    return refused.message if refused is not None else "it refuses to show its metrics"


def _is_plain(url: str) -> bool:
    """Return whether a URL is http://host:port or https://host:port, and nothing more."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname and parts.port)
    except ValueError:
        return False
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    return parts.scheme in ("http", "https") and is_whole and not extra
