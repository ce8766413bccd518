"""Preloads of this node: models that its agent fetches before they have a replica, one at a time, without an engine.

The leading reconciler chooses the nodes and the order. A preload keeps the files that it brought when it ends.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from machinery.clock import Clock
from nodeagent.replicas.model_fetches import ModelFetches
from nodeagent.replicas.observation import FetchState, ObservedFetch
from schemas.model_snapshot import PreloadAssignment
from schemas.node import ModelReport
from store import codec, keys
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

# A look costs a few stats while something is to be fetched.
_POLL_S: Final = 1.0
# Files may be removed by hand.
_IDLE_S: Final = 30.0
_MOST_CHARACTERS: Final = 300


def preload_cache(transport: Transport, clock: Clock, node: str) -> Informer[PreloadAssignment]:
    """Return the cache of the node's preloads; `ModelPreloads` runs it."""
    return Informer(
        transport,
        keys.preload_prefix(node),
        lambda item: codec.decode(PreloadAssignment, item),
        clock,
    )


class ModelPreloads:
    """Carries out the preloads of one node. Without `run()`, nothing is fetched."""

    def __init__(self, cache: Informer[PreloadAssignment], fetches: ModelFetches) -> None:
        self._cache = cache
        self._fetches = fetches
        self._changed = asyncio.Event()
        self._held: dict[str, str] = {}
        """Folders of the models that are fetched for preloads, by the name under which the fetches know each."""
        self._problems: dict[str, str] = {}
        """Reasons why preloads fail, by the model's folder."""

    def with_problems(self, reports: Iterable[ModelReport]) -> tuple[ModelReport, ...]:
        """Return the reports of models with the reasons why their preloads fail."""
        return tuple(
            report.model_copy(update={"fetch_problem": self._problems[report.path]})
            if report.path in self._problems
            else report
            for report in reports
        )

    async def run(self, on_change: Callable[[], None]) -> None:
        """Fetch what is assigned, forever; `on_change` is called when a model is whole or fails."""
        self._cache.on_change(lambda _: self._changed.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run())
            while True:
                try:
                    is_idle = await self._advance(on_change)
                except OSError as error:
                    log.warning("preloads wait for the disk", extra={"why": str(error)})
                    is_idle = False
                try:
                    async with asyncio.timeout(_IDLE_S if is_idle else _POLL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
                self._changed.clear()

    async def _advance(self, on_change: Callable[[], None]) -> bool:
        """Start the next fetch if none runs; return whether all models are whole."""
        wanted = [found for _, found in sorted(self._cache.items.items())]
        states = {
            assignment.deployment: await self._fetches.find(assignment.source)
            for assignment in wanted
        }
        self._release({_user(assignment): assignment.source.folder for assignment in wanted})
        problems = {
            assignment.source.folder: _problem(states[assignment.deployment])
            for assignment in wanted
            if states[assignment.deployment].state is FetchState.FAILED
        }
        done = [
            assignment
            for assignment in wanted
            if states[assignment.deployment].state is FetchState.PRESENT
        ]
        ended = [name for name in map(_user, done) if name in self._held]
        for name in ended:
            self._fetches.release(name)
            del self._held[name]
        if ended or problems != self._problems:
            self._problems = problems
            on_change()
        self._start_next(wanted, states)
        return len(done) == len(wanted)

    def _start_next(
        self, wanted: Iterable[PreloadAssignment], states: Mapping[str, ObservedFetch]
    ) -> None:
        """Start the first fetch that is due, unless one runs."""
        if any(fetch.state is FetchState.RUNNING for fetch in states.values()):
            return
        for assignment in wanted:
            state = states[assignment.deployment]
            is_due = state.state is FetchState.FAILED and state.next_attempt is None
            if state.state is FetchState.NOT_STARTED or is_due:
                self._held[_user(assignment)] = assignment.source.folder
                self._fetches.want(
                    assignment.source, user=_user(assignment), deployment=assignment.deployment
                )
                return

    def _release(self, wanted: Mapping[str, str]) -> None:
        """End the fetches of preloads that are gone, or name another commit now."""
        for name, folder in list(self._held.items()):
            if wanted.get(name) != folder:
                self._fetches.release(name)
                del self._held[name]


def _user(one: PreloadAssignment) -> str:
    # Names of replicas have no slash.
    return f"preload/{one.deployment}"


def _problem(state: ObservedFetch) -> str:
    return f"{state.reason}: {state.message}"[:_MOST_CHARACTERS]
