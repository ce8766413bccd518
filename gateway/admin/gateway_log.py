"""Route of the gateway's own log."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from identity.log_access import LogAccess, LogQuery

LOG_PATH = "/v1/logs/gateway"


def make_log_router(own: LogAccess) -> APIRouter:
    """Return the router of the log route."""

    async def show(
        query: Annotated[LogQuery, Query()],
        authorization: Annotated[str, Header()] = "",
    ) -> Response:
        """Send the last lines of the gateway's own log."""
        return await own.show(query, authorization)

    router = APIRouter()
    router.add_api_route(LOG_PATH, show, methods=["GET"])
    return router
