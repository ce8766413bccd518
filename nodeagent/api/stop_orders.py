"""The route that stops the engines of a Mac at once: `PUT /v1/stop-order`, and `DELETE` to let them start again.

It works without etcd: an administrator proves their role by a certificate. It writes the file that `fleetctl stop --local`
writes (nodeagent/engines/stop_order.py), so the order outlives the agent.
"""

import logging
from dataclasses import dataclass
from typing import Annotated

import orjson
from fastapi import FastAPI, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from identity.credentials import Credentials
from machinery.clock import Clock
from nodeagent.api.admin_access import AdminAccess
from nodeagent.engines.stop_order import StopOrder
from schemas.wire.errors import RefusedError
from store.tickets import TicketChecker

log = logging.getLogger(__name__)

_MAX_GRACE_S = 600.0


class StopQuery(BaseModel):
    """The query of a stop order."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float = Field(default=10.0, ge=0, le=_MAX_GRACE_S, alias="graceSeconds")
    """The time for requests to finish before an engine is killed."""


AuthorizationHeader = Annotated[str, Header()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRoutes:
    """The routes of one agent's stop order, and their authorization."""

    node: str
    order: StopOrder
    tickets: TicketChecker
    clock: Clock
    credentials: Credentials | None
    """The agent's identity; None: it listens on loopback, or the operator insists on plain HTTP."""

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the agent's API."""
        app.add_api_route("/v1/stop-order", self.put, methods=["PUT"])
        app.add_api_route("/v1/stop-order", self.delete, methods=["DELETE"])

    async def put(
        self,
        request: Request,
        query: Annotated[StopQuery, Query()],
        authorization: AuthorizationHeader = "",
    ) -> Response:
        """Write the order and end all engines; answer with their number when they have ended."""
        user = await self._access.authorize(request, authorization)
        log.warning("engines are stopped by an order", extra={"user": user})
        try:
            ended = await self.order.execute(self.clock, grace_s=query.grace_s)
        except OSError as error:
            raise self._unwritable(error) from error
        return _json_response({"node": self.node, "ended": ended})

    async def delete(self, request: Request, authorization: AuthorizationHeader = "") -> Response:
        """Remove the order; answer whether there was one."""
        user = await self._access.authorize(request, authorization)
        try:
            was_given = self.order.take_back()
        except OSError as error:
            raise self._unwritable(error) from error
        log.warning("engines may start again by an order", extra={"user": user})
        return _json_response({"node": self.node, "wasStopped": was_given})

    @property
    def _access(self) -> AdminAccess:
        return AdminAccess(
            node=self.node,
            tickets=self.tickets,
            credentials=self.credentials,
            action="stops engines",
            without_store="Without etcd, a certificate of the role admin stops engines, or `fleetctl stop --local` on this Mac",
        )

    def _unwritable(self, error: OSError) -> RefusedError:
        return self._access.refused(
            500,
            f"cannot write to {self.order.state_dir}: {error.strerror}. `fleetctl stop --local` on this Mac needs the same "
            "folder; free its disk, or end the engines by hand",
        )


def _json_response(body: dict[str, str | int | bool]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
