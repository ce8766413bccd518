"""Event stream of one gateway: each request that ends, and every second what is in flight, by model and by node.

Events: `ended` with the journal's entry, under the id of that entry; `load` with sums; `gap` if entries are missing. A
client that reconnects with its last id gets what ended meanwhile, as far as the journal has it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final

import orjson
from fastapi import Header, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.admin.admin_context import AdminContext
from gateway.admin.in_flight import endpoint_of, phase_of
from gateway.http.request_context import RequestContext
from gateway.telemetry.request_journal import cursor_of, render_entries, rows_json
from schemas.wire.errors import Refusal, RefusedError

STREAM_PATH: Final = "/api/requests/stream"
_INTERVAL_S: Final = 1.0
_MOST_ENDED: Final = 500
_MOST_STREAMS: Final = 16


@dataclass(slots=True, kw_only=True)
class RequestStream:
    """Handler of the stream."""

    context: AdminContext
    running: Callable[[], Iterable[RequestContext]]
    open: int = field(default=0, init=False)
    """The number of open streams."""

    async def show(self, last_event_id: Annotated[str, Header(max_length=200)] = "") -> Response:
        """Stream requests as they end, and what is in flight, as server-sent events.

        Raises:
            RefusedError: too many clients follow already.

        """
        if self.open >= _MOST_STREAMS:
            message = (
                f"{self.open} clients follow the requests of this gateway already; try again later."
            )
            raise RefusedError(Refusal(status=429, message=message, code="too_many_readers"))
        return _CountedStream(self, self._events(last_event_id))

    async def _events(self, last_id: str) -> AsyncIterator[bytes]:
        context, journal = self.context, self.context.recorder.journal
        cursor = last_id
        if not last_id and (latest := journal.last(1)):
            cursor = cursor_of(latest[0])  # a new client is told of later ones alone
        is_stopping = context.log.is_stopping
        while not is_stopping():
            page = journal.page_after(cursor, _MOST_ENDED)
            if page.lost != 0:
                yield _event(
                    "gap", {"why": "entries are missing: too many ended, or the id is unknown"}
                )
            rows = render_entries(page.entries, context.id)
            for entry, row in zip(page.entries, rows, strict=True):
                yield _event("ended", rows_json(row), cursor_of(entry))
            cursor = page.cursor
            if len(rows) == _MOST_ENDED:
                continue  # more have ended
            yield _event("load", self._load())
            await context.clock.sleep(_INTERVAL_S)

    def _load(self) -> dict[str, object]:
        models: dict[str, Counter[str]] = {}
        nodes: dict[str, Counter[str]] = {}
        for context in self.running():
            phase, endpoint = phase_of(context), endpoint_of(context)
            models.setdefault(context.model, Counter())[phase] += 1
            if endpoint is not None:
                nodes.setdefault(endpoint.node, Counter())[phase] += 1
        now = self.context.clock.now()
        return {
            "time": now.isoformat(timespec="milliseconds"),
            "gateway": self.context.id,
            "models": models,
            "nodes": nodes,
        }


class _CountedStream(StreamingResponse):
    """A response that counts as one open stream while it is sent."""

    def __init__(self, stream: RequestStream, events: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stream.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.open -= 1


def _event(name: str, body: object, id_: str = "") -> bytes:
    head = f"id: {id_}\n" if id_ else ""
    return f"{head}event: {name}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"
