"""Route of the audit log: changes with their authors, times and reasons."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Response

from dashboard.api.routes import json_response
from dashboard.api.time_parameters import parse_range
from dashboard.record_views import ChangeLog
from insight.changes import ChangeFilter, change_tree
from machinery.clock import Clock
from store.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class ChangeRoutes:
    """Handler of the route."""

    log: ChangeLog
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_route("/api/v1/changes", self.changes, methods=["GET"])

    async def changes(
        self,
        from_: Annotated[str, Query(alias="from", max_length=40)] = "720h",
        to: Annotated[str, Query(max_length=40)] = "now",
        kind: Annotated[str, Query(max_length=60)] = "",
        object_: Annotated[str, Query(alias="object", max_length=300)] = "",
        user: Annotated[str, Query(max_length=300)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """Return recorded writes of users, newest first, with the fields that differ: what `fleetctl changes` shows."""
        begin_s, end_s = parse_range(from_, to, self.clock.now().timestamp())
        wanted = ChangeFilter(kind=kind, name=object_, user=user, since_s=begin_s, until_s=end_s)
        recorded_changes = await self.log.select(wanted)
        if recorded_changes is None:
            raise UnavailableError("not since this dashboard started")
        shown = [change_tree(change) for change in reversed(recorded_changes[-limit:])]
        return json_response({"changes": shown, "total": len(recorded_changes)})
