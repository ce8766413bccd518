"""Route of the usage of nodes and models: what `fleetctl top` answers, sampled when it is asked for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from fastapi import APIRouter, Response

from dashboard.api.routes import json_response
from dashboard.api.time_parameters import show_time
from identity.dialer import Dialer
from insight import usage
from insight.usage import UsageRow
from insight.usage_samples import SamplePair, sample_pair
from machinery.clock import Clock
from store.errors import UnavailableError
from store.port import Transport

_OVER_S: Final = 1.0
_KEPT_S: Final = 2.0
"""Clients that ask within this time share the samples: each costs a question to every agent, engine and gateway."""
_LONGEST_S: Final = 30.0


@dataclass(slots=True)
class UsageRoutes:
    """Handler of `/api/v1/top`."""

    transport: Transport
    dialer: Dialer
    clock: Clock
    _pair: SamplePair | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_route("/api/v1/top/{what}", self.top, methods=["GET"])

    async def top(self, what: Literal["nodes", "models"]) -> Response:
        """Return the usage of nodes or models, as `fleetctl top -o json`; `reasons` says why values are unknown."""
        before, now = await self._samples()
        rows: Sequence[UsageRow]
        if what == "nodes":
            rows, reasons = usage.node_rows(before, now), usage.node_reasons(now)
        else:
            rows, reasons = usage.model_rows(before, now), usage.model_reasons(now)
        return json_response(
            {
                "at": show_time(self.clock.now().timestamp()),
                "seconds": round(now.at_s - before.at_s, 3),
                "items": [usage.row_tree(row) for row in rows],
                "reasons": reasons,
            }
        )

    async def _samples(self) -> SamplePair:
        """Return two samples that are a second apart. Raises StoreError."""
        try:
            # The wait for the samples of another client counts, too.
            async with asyncio.timeout(_LONGEST_S), self._lock:
                pair = self._pair
                if pair is None or self.clock.monotonic() - pair[1].at_s >= _KEPT_S:
                    pair = await sample_pair(
                        self.transport, self.clock, self.dialer, over_s=_OVER_S
                    )
                    self._pair = pair
                return pair
        except TimeoutError as error:
            raise UnavailableError(f"not within {_LONGEST_S:g} s") from error
