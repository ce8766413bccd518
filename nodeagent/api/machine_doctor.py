"""The agent's part of `fleetctl doctor`: the checks of its own machine, in its own process and with its own rights."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from nodeagent.api.machine_metrics import AgentView, machine_vitals
from nodeagent.doctor.checks import run_checks
from nodeagent.doctor.collector import collect_facts
from nodeagent.doctor.readers import AgentKnowledge, CollectionScope
from schemas.node import Node
from schemas.wire.findings import encode_findings
from store import objects
from store.port import Transport

_FRESH_S: Final = 5.0
"""The age up to which one document answers several requests: the commands take seconds of a processor."""
_MAX_NEIGHBOURS: Final = 3


class MachineDoctor:
    """Examines the machine of one agent, once at a time."""

    def __init__(
        self, view: AgentView, scope: CollectionScope, transport: Transport | None = None
    ) -> None:
        """`transport`: the store with the other nodes; None: no neighbour is known."""
        self._view = view
        self._transport = transport
        self._slept_before_s = view.clock.elapsed() - view.clock.monotonic()
        self.scope = replace(
            scope,
            agent=AgentKnowledge(
                engine_pids=self._engine_pids,
                in_flight=self._in_flight,
                neighbours=self._neighbours,
                slept_s=self._slept_s,
            ),
        )
        self._turn = asyncio.Lock()
        self._document = b""
        self._made_at: float | None = None

    async def document(self) -> bytes:
        """Return the document with the findings, at most five seconds old. Requests at the same time share one."""
        clock = self._view.clock
        async with self._turn:
            if self._made_at is None or clock.monotonic() - self._made_at > _FRESH_S:
                facts = await collect_facts(self.scope, clock)
                self._document = encode_findings(run_checks(facts))
                self._made_at = clock.monotonic()
            return self._document

    def _slept_s(self) -> float:
        clock = self._view.clock
        return max(0.0, clock.elapsed() - clock.monotonic() - self._slept_before_s)

    def _engine_pids(self) -> list[int]:
        # A copy: engines start and end while a thread compares.
        trackers = list(self._view.engines.values())
        return [tracker.process.child.record.pid for tracker in trackers]

    async def _in_flight(self) -> Mapping[str, int | None]:
        ranks = (await machine_vitals(self._view))["ranks"]
        return {rank["replica"]: rank["inFlight"] for rank in ranks}

    async def _neighbours(self) -> Sequence[tuple[str, int]]:
        """Return the addresses of other agents in the store. Raises StoreError."""
        if self._transport is None:
            return ()
        nodes = await objects.list_all(self._transport, Node)
        urls = [
            urlsplit(node.status.agent_url)
            for node in nodes
            if node.name != self._view.name and node.status is not None and node.status.agent_url
        ]
        own = self._view.status.address
        found = {
            (url.hostname, url.port)
            for url in urls
            if url.hostname and url.port and url.hostname != own
        }
        return sorted(found)[:_MAX_NEIGHBOURS]
