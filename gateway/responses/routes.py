"""`/v1/responses/{id}`: stored responses, which only the API key that made them may read, cancel and delete."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Query, Request, Response

from gateway.apis.http_bodies import json_response
from gateway.auth.access_control import owner_of
from gateway.disk_calls import off_loop
from gateway.responses import turn as turns
from gateway.responses.database import StoredResponse
from gateway.responses.stateful import StatefulResponses, failed, no_response
from schemas.wire.errors import RefusedError, invalid

_LAPSED = "Its gateway stopped while it ran, or could not write its result; send it again."


@dataclass(frozen=True, slots=True)
class ResponseRoutes:
    """Route handlers, one method for each route."""

    responses: StatefulResponses

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to the application."""
        path = "/v1/responses/{response_id}"
        app.add_api_route(path, self.response, methods=["GET"])
        app.add_api_route(path, self.delete, methods=["DELETE"])
        app.add_api_route(f"{path}/input_items", self.input_items, methods=["GET"])
        app.add_api_route(f"{path}/cancel", self.cancel, methods=["POST"])

    async def response(self, response_id: str, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream") == "true":
            raise invalid("A stored response is not streamed; leave 'stream' out.", param="stream")
        return json_response(self._shown(await self._record(response_id, request)))

    async def delete(self, response_id: str, request: Request) -> Response:
        """Delete a response; responses that continue it can no longer be continued."""
        database = self.responses.require()
        if not await off_loop(database.delete, response_id, owner_of(request)):
            raise RefusedError(no_response(response_id))
        self.responses.cancel(response_id, owner_of(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        """List the input items of a response, with those of the conversation before it."""
        await self._record(response_id, request)
        owner, limit_bytes = owner_of(request), 64 << 20

        def read() -> list[dict[str, Any]]:
            records = self.responses.conversation(
                response_id, owner, limit=limit_bytes, param="response_id"
            )
            arrays = [part for old in records[:-1] for part in (old.input, turns.output_items(old))]
            return turns.shown_items(response_id, turns.join([*arrays, records[-1].input]))

        items = await off_loop(read)
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after and after not in ids:
            raise invalid(f"There is no item '{after[:100]}'; use 'last_id' of a page.", "after")
        start = ids.index(after) + 1 if after else 0
        page = items[start : start + limit]
        edges = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return json_response(
            {"object": "list", "data": page, "has_more": len(items) > start + limit, **edges}
        )

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Cancel a background response; one that is over stays as it is."""
        record = await self._record(response_id, request)
        body = self._shown(record)
        if not body.get("background"):
            raise invalid(
                "Only a response with 'background' can be cancelled; to end another, close its connection."
            )
        if body["status"] == "in_progress":
            body["status"] = "cancelled"
            end, now_s = self.responses.require().end, self.responses.now_s()
            await off_loop(end, record.id, record.owner, orjson.dumps(body), now_s)
            self.responses.cancel(record.id, record.owner)
        return json_response(self._shown(await self._record(response_id, request)))

    async def _record(self, response_id: str, request: Request) -> StoredResponse:
        responses = self.responses
        database, owner = responses.require(), owner_of(request)
        record = await off_loop(database.response, response_id, owner, responses.now_s())
        if record is None:
            raise RefusedError(no_response(response_id))
        return record

    def _shown(self, record: StoredResponse) -> dict[str, Any]:
        body: dict[str, Any] = orjson.loads(record.body)
        has_lapsed = 0 < record.running_until_s < self.responses.now_s()
        return body | failed(_LAPSED) if has_lapsed else body
