"""The fetches that people ask an agent for (`fleetctl models pull`), beside those that replicas need."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from machinery.clock import Clock
from models.hub.errors import ModelFetchError
from models.hub.fetcher import FetchRequest, ModelFetcher
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.hub_settings import HubFactory, HubSettings
from models.hub.progress import FetchMonitor
from nodeagent.hub_grants import HubGrants
from nodeagent.peers.model_exchange import ModelExchange
from schemas.deployment import HubReference
from schemas.wire.stored_models import ModelFetchReport
from store.errors import StoreError

log = logging.getLogger(__name__)

_MAX_RUNNING: Final = 8
_MAX_KEPT: Final = 50


class TooManyPullsError(Exception):
    """As many fetches run as one agent takes at a time."""


@dataclass(kw_only=True)
class _Pull:
    task: asyncio.Task[None] | None = None
    monitor: FetchMonitor
    error: str = ""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()


class ModelPulls:
    """Fetches models into the store of this node until they are whole. `run()` must run before one can start.

    A pull that fails keeps its error until it is asked for again; it is not retried beyond the fetcher's own attempts.
    """

    def __init__(
        self,
        fetcher: ModelFetcher,
        hubs: HubSettings,
        clock: Clock,
        *,
        exchange: ModelExchange | None = None,
        grants: HubGrants | None = None,
    ) -> None:
        """`exchange`: the other agents as sources of files; None: the hub alone.

        `grants`: the tokens for gated repositories; None: there are none.
        """
        self._exchange = exchange
        self._fetcher = fetcher
        self._grants = grants
        self._hubs = hubs
        self._clock = clock
        self._factory: HubFactory | None = None
        self._group: asyncio.TaskGroup | None = None
        self._pulls: dict[str, _Pull] = {}

    async def run(self) -> None:
        """Run the pulls that are started, forever."""
        async with self._hubs.open() as factory, asyncio.TaskGroup() as group:
            self._factory, self._group = factory, group
            try:
                await asyncio.Event().wait()
            finally:
                self._factory = self._group = None
                for pull in self._pulls.values():
                    if pull.task is not None:
                        pull.task.cancel()

    def start(self, source: HubReference) -> None:
        """Start to fetch a commit; a fetch of it that runs goes on.

        Raises:
            TooManyPullsError: too many run, or the agent is starting or ending.

        """
        found = self._pulls.get(source.folder)
        if found is not None and found.is_running:
            return
        if (
            self._group is None
            or sum(one.is_running for one in self._pulls.values()) >= _MAX_RUNNING
        ):
            raise TooManyPullsError(
                f"{_MAX_RUNNING} fetches run already, or the agent is starting; try again later"
            )
        self._pulls.pop(source.folder, None)
        pull = _Pull(monitor=FetchMonitor(self._clock))
        pull.task = self._group.create_task(self._fetch(source, pull))
        self._pulls[source.folder] = pull
        ended = [name for name, one in self._pulls.items() if not one.is_running]
        for name in ended[: max(0, len(self._pulls) - _MAX_KEPT)]:
            del self._pulls[name]

    async def _fetch(self, source: HubReference, pull: _Pull) -> None:
        factory = self._factory
        assert factory is not None
        request = FetchRequest(
            repo=source.repo, commit=source.revision, patterns=source.files or DEFAULT_PATTERNS
        )
        try:
            token = "" if self._grants is None else await self._grants.token(source, source.folder)
            hub = factory(source, token)
            shared = (
                nullcontext()
                if self._exchange is None
                else self._exchange.sources(hub, source.repo, source.revision, pull.monitor)
            )
            async with shared as sources:
                await self._fetcher.fetch(hub, request, monitor=pull.monitor, sources=sources)
        except ModelFetchError as error:
            pull.error = f"{error.reason}: {error}"
        except (StoreError, OSError, ValueError) as error:
            pull.error = str(error)
        if pull.error:
            log.warning("model not pulled", extra={"model": source.folder, "why": pull.error})
        else:
            log.info("model pulled", extra={"model": source.folder})

    @property
    def is_busy(self) -> bool:
        """True if a pull runs."""
        return any(pull.is_running for pull in self._pulls.values())

    def reports(self) -> Iterator[ModelFetchReport]:
        """Yield the state of each pull, those that ended lately included."""
        for name, pull in self._pulls.items():
            state = pull.monitor.snapshot()
            yield ModelFetchReport(
                name=name,
                phase=state.phase,
                total_bytes=state.total_bytes,
                present_bytes=state.present_bytes,
                bytes_per_s=state.bytes_per_s,
                eta_s=state.eta_s,
                source=state.source,
                waiting=state.waiting,
                error=pull.error[:2000],
            )
