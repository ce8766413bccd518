"""Feed of one gateway for recorders: requests that ended since a cursor, requests under way, and what waits.

The gateway keeps no place for any reader: the cursor names the last entry that the reader has. Nothing is computed
unless a recorder asks. An answer has a thousand entries at most; a recorder asks for the next ones soon.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Header, Query, Request, Response

from gateway.admin import in_flight
from gateway.admin.admin_context import AdminContext, queue_counts
from gateway.admin.in_flight import InFlightSource
from gateway.telemetry.request_journal import render_entries, rows_json
from identity.names import Role
from identity.peers import peer_of
from machinery.http_server import SSL_OBJECT
from schemas.wire.errors import Refusal, RefusedError
from store.tickets import TicketDenial

FEED_PATH: Final = "/api/dashboard/feed"
_READERS: Final = frozenset({Role.DASHBOARD, Role.ADMIN})
_MOST_ENDED: Final = 1000
_MOST_RUNNING: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRoute:
    """Handler of the feed."""

    context: AdminContext
    source: InFlightSource
    """The requests under way, and the connections to their engines."""

    async def feed(
        self,
        request: Request,
        after: Annotated[str, Query(max_length=200)] = "",
        limit: Annotated[int, Query(ge=0, le=_MOST_ENDED)] = _MOST_ENDED,
        authorization: Annotated[str, Header()] = "",
        *,
        progress: bool = False,
    ) -> Response:
        """Return what ended since the cursor `after`, oldest first, and what is under way; for recorders of the fleet.

        `progress`: engines are asked how far they are, too. `lost` is the number of requests that ended after the
        cursor and are gone; if `isComplete` is false and `lost` is 0, their number is unknown.
        """
        await self._check(request, authorization)
        context = self.context
        page = context.recorder.journal.page_after(after, limit)
        running = sorted(self.source.running(), key=lambda one: one.began_s)[:_MOST_RUNNING]
        links = self.source.links if progress else None
        described = await in_flight.describe_all(running, links, context.clock)
        body = {
            "gateway": context.id,
            "uptimeSeconds": round(context.uptime_s(), 1),
            "cursor": page.cursor,
            "isComplete": page.lost == 0,
            "lost": page.lost or 0,
            "requests": rows_json(render_entries(page.entries, context.id)),
            "running": rows_json(described),
            **queue_counts(context),
        }
        return Response(orjson.dumps(body), media_type="application/json")

    async def _check(self, request: Request, authorization: str) -> None:
        """Refuse clients but recorders and administrators of the fleet. Without keys, anyone may read the journal.

        Raises:
            RefusedError: the client has neither a certificate with such a role nor a ticket.

        """
        if not self.context.fleet_state.access.is_on:
            return
        peer = peer_of(request.scope.get("state", {}).get(SSL_OBJECT))
        if peer is not None and peer.identity.role in _READERS:
            return
        found = await self.context.metrics_access.tickets.check(authorization)
        if isinstance(found, TicketDenial):
            raise RefusedError(Refusal(status=found.status, message=found.why, code="no_ticket"))


def make_feed_router(context: AdminContext, source: InFlightSource) -> APIRouter:
    """Return the router of the feed."""
    router = APIRouter()
    route = FeedRoute(context=context, source=source)
    router.add_api_route(FEED_PATH, route.feed, methods=["GET"])
    return router
