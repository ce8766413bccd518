"""Serves the state of responses: reads what a request continues, stores what it made, runs it in the background.

Engines keep no state: a request that continues a response reaches them with the whole input.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from gateway.disk_calls import off_loop
from gateway.forwarding.retry_state import WholeResponse
from gateway.http.buffered_response import BufferedResponse, buffered_response
from gateway.http.request_context import (
    RequestContext,
    ResponseWriter,
    header_lines,
)
from gateway.request import Turn
from gateway.responses import turn as turns
from gateway.responses.database import ResponseDatabase, StoredResponse
from gateway.responses.turn import FinalEvent
from machinery.clock import Clock
from machinery.sqlite_file import DatabaseError
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal, RefusedError, body_too_large, invalid

if TYPE_CHECKING:  # it answers the requests
    from gateway.handler import InferenceHandler

log = logging.getLogger(__name__)

PATH: Final = "/v1/responses"
_REQUEST_ID: Final = wire_headers.REQUEST_ID.encode()
_WARNING: Final = wire_headers.WARNING.encode()
# Far more than fits into the memory of bodies, unless they are small.
_MAX_BACKGROUND: Final = 256
_RENEW_S: Final = 5.0
# A gateway that was killed renews nothing.
_LAPSE_S: Final = 30


@dataclass(frozen=True, slots=True)
class Background:
    """A background response under way."""

    task: asyncio.Task[None]
    cancel: Callable[[], object]
    """Ends it, here and at its engine."""


@dataclass(frozen=True, slots=True)
class StatefulResponses:
    """The stored responses of a gateway."""

    database: ResponseDatabase | None
    """None: this gateway stores none."""
    clock: Clock
    new_id: Callable[[], str] = lambda: secrets.token_hex(16)
    running: dict[tuple[str, str], "Background"] = field(default_factory=dict)
    """Background responses of this process, by id and owner."""

    def begin(self, handler: "InferenceHandler", context: RequestContext) -> bool:
        """Read the state that a request needs; return True if it is forwarded later.

        Raises:
            RefusedError: its state cannot be as it says, or is not here.

        """
        body = context.http_request.body
        turn = context.turn = turns.read(body, context.owner, has_store=self.database is not None)
        if turn.previous or turn.is_background:
            self.require()
        if turn.changes_body:
            handler.run(context, self._start(handler, context, turn))
        return turn.changes_body

    def require(self) -> ResponseDatabase:
        """Return the database. Raises RefusedError: this gateway has none."""
        if self.database is None:
            raise RefusedError(no_responses())
        return self.database

    def cancel(self, response_id: str, owner: str) -> None:
        """End a background response at its engine. Another process of this folder learns it from the database."""
        background = self.running.get((response_id, owner))
        if background is not None:
            background.cancel()

    def now_s(self) -> int:
        """Return the time in seconds since 1970."""
        return int(self.clock.now().timestamp())

    def conversation(
        self, response_id: str, owner: str, *, limit: int, param: str
    ) -> list[StoredResponse]:
        """Return the responses of a conversation up to one, oldest first. Blocks.

        Raises:
            RefusedError: one of them is not here, still runs, or all have more than `limit` bytes.

        """
        database, now_s = self.require(), self.now_s()
        ids, size, missing = database.conversation(response_id, owner, now_s)
        if size > limit:
            message = (
                f"The stored items up to '{response_id[:100]}' have {size} bytes; {limit} are allowed. "
                "Begin a new conversation, with a summary of this one as its input."
            )
            raise invalid(message, param=param)
        records = []
        for id_ in ids if not missing else ():
            record = database.response(id_, owner, now_s)
            if record is None:
                missing = id_
                break
            records.append(record)
        if missing:
            raise RefusedError(no_response(missing, param=param, needed_by=response_id))
        return records

    async def _start(
        self, handler: "InferenceHandler", context: RequestContext, turn: Turn
    ) -> None:
        """Put the conversation before the input of a request, and forward it."""
        http_request = context.http_request
        sent = http_request.body

        def resolve() -> bytes:
            records: list[StoredResponse] = []
            if turn.previous:
                records = self.conversation(
                    turn.previous, turn.owner, limit=handler.max_body, param="previous_response_id"
                )
                if records[-1].running_until_s >= self.now_s():
                    message = f"'{turn.previous[:100]}' still runs; wait for its end, or cancel it."
                    raise invalid(message, param="previous_response_id")
            return turns.resolve(turn, sent, records)

        body = await off_loop(resolve)
        if len(body) > handler.max_body:
            raise body_too_large(handler.max_body)
        # A body that is allowed must not be refused for ever because its input is held twice.
        size = min(len(body) + len(turn.input), handler.body_memory.share)
        refusal = context.hold(size, is_complete=True)
        if refusal is not None:
            raise RefusedError(refusal)
        http_request.body = body
        if turn.is_background:
            await self._start_background(handler, context, turn)
            return
        context.task = None  # from here on as without the wait
        handler.forward(context)

    async def _start_background(
        self, handler: "InferenceHandler", context: RequestContext, turn: Turn
    ) -> None:
        """Answer the client of a background response, and run it."""
        if len(self.running) >= _MAX_BACKGROUND:
            raise RefusedError(too_many_background())
        turn.response_id, now_s = f"resp_{self.new_id()}", self.now_s()
        turn.is_stored = False  # it is stored now, and again once it has ended

        def add() -> dict[str, Any]:
            begun = turns.begun(turn, context.http_request.body, now_s)
            record = StoredResponse(
                id=turn.response_id,
                owner=turn.owner,
                created_s=now_s,
                previous=turn.previous,
                running_until_s=now_s + _LAPSE_S,
                input=turn.input,
                body=orjson.dumps({**begun, "status": "in_progress"}),
            )
            self.require().add(record, now_s)
            return begun

        begun = await off_loop(add)
        response, done = buffered_response()
        detached = _detach(handler, context, response, orjson.dumps(begun))
        key = (turn.response_id, turn.owner)
        work = self._watch(handler, detached, begun, done)
        task = asyncio.get_running_loop().create_task(work)
        self.running[key] = Background(task, partial(handler.cancel, detached))
        task.add_done_callback(lambda _: self.running.pop(key, None))

        async def forward() -> None:
            detached.task = None
            handler.forward(detached)

        handler.run(detached, forward())

    async def _watch(
        self,
        handler: "InferenceHandler",
        context: RequestContext,
        begun: dict[str, Any],
        done: "asyncio.Future[None]",
    ) -> None:
        """Await a background response, cancel it if it was ended or deleted elsewhere, and store how it ended."""
        response, database = context.response, self.require()
        assert isinstance(response, BufferedResponse)
        response_id, owner = begun["id"], context.owner

        def end() -> None:
            fields = orjson.loads(response.body)
            if response.status < 400:
                fields |= {
                    name: begun[name] for name in ("id", "created_at", "background", "store")
                }
            else:
                fields = begun | failed(fields["error"]["message"])
            database.end(response_id, owner, orjson.dumps(fields), self.now_s())

        while not done.done():
            await asyncio.wait((done,), timeout=_RENEW_S)
            try:
                until_s = self.now_s() + _LAPSE_S
                if not await asyncio.to_thread(database.renew, response_id, owner, until_s):
                    handler.cancel(context)
            except DatabaseError as error:
                log.warning("cannot renew a background response", extra={"why": str(error)})
        try:
            await asyncio.to_thread(end)
        except DatabaseError as error:
            log.warning("cannot store a response", extra={"why": str(error)})

    async def store_whole(
        self, handler: "InferenceHandler", context: RequestContext, result: WholeResponse
    ) -> None:
        """Store a complete response, and then send it."""
        reason = await self._store(context, result.body)
        if reason:
            warning = wire_headers.format_warning(
                "the response is not stored; see the gateway's log"
            )
            context.extra_headers = (*context.extra_headers, (_WARNING, warning.encode()))
        context.task = None
        handler.on_result(context, result)

    async def store_stream(
        self, handler: "InferenceHandler", context: RequestContext, end: bytes
    ) -> None:
        """Store the response in the last event of a stream, and then send that."""
        data = end.partition(b"\ndata: ")[2].partition(b"\n")[0]
        try:
            body = bytes(msgspec.json.decode(data, type=FinalEvent).response)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = b""
        await self._store(context, body)
        context.task = None
        handler.end_stream(context, end)

    async def _store(self, context: RequestContext, body: bytes) -> str:
        """Store a response; return why it could not be stored, which is in the log: its client gets it anyway."""
        turn, context.turn = context.turn, None
        assert turn is not None
        now_s = self.now_s()

        def store() -> None:
            response_id = msgspec.json.decode(body, type=_Head).id
            record = StoredResponse(
                id=response_id,
                owner=turn.owner,
                created_s=now_s,
                previous=turn.previous,
                input=turn.input,
                body=body,
            )
            self.require().add(record, now_s)

        try:
            await asyncio.to_thread(store)
        except (DatabaseError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("cannot store a response", extra={"why": str(error)})
            return str(error)
        return ""


def _detach(
    handler: "InferenceHandler", context: RequestContext, response: ResponseWriter, body: bytes
) -> RequestContext:
    """Answer a request with this body; return its context for another response, with all that is counted."""
    detached = msgspec.structs.replace(context, response=response, task=None, kept_answer=None)
    handler.contexts.add(detached)
    handler.contexts.remove(context)
    context.limiters, context.held_bytes = (), 0
    lines = ((b"content-type", b"application/json"), (_REQUEST_ID, context.http_request.request_id))
    head = header_lines((*lines, *context.extra_headers))
    if context.kept_answer is not None:
        handler.idempotency.complete(context.kept_answer, 200, head, body)
    context.response.whole(200, head, body)
    return detached


class _Head(msgspec.Struct):
    id: str


def failed(message: str) -> dict[str, Any]:
    """Return the fields of a response that failed."""
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def no_responses() -> Refusal:
    """Return the refusal of state at a gateway that stores no responses."""
    message = (
        "This gateway stores no responses: it has no --state-dir FOLDER, or cannot use the folder, and its log says "
        "why. Send the whole input, or use a gateway of the fleet that stores them."
    )
    return Refusal(status=501, message=message, code="no_responses")


def no_response(response_id: str, *, param: str = "response_id", needed_by: str = "") -> Refusal:
    """Return the refusal of a response that is not here. `needed_by`: the one that continues it."""
    name = response_id[:100]
    what = f"'{name}'"
    if needed_by not in ("", response_id):
        what += f", which '{needed_by[:100]}' continues,"
    message = (
        f"There is no response {what} for this API key at this gateway. It was sent with 'store' false, could not be "
        "stored, was deleted, is older than 30 days, made room for newer ones, or another gateway has it: each "
        "machine's gateways have their own. Send the whole input, or use the gateway that has it."
    )
    code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
    return Refusal(status=404, message=message, param=param, code=code)


def too_many_background() -> Refusal:
    """Return the refusal of one background response too many."""
    message = f"{_MAX_BACKGROUND} background responses run at this gateway; wait for one, or leave 'background' out."
    return Refusal(status=429, message=message, code="too_many_requests", retry_after_s=10)
