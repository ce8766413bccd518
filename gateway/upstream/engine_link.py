"""Gateway's side of the engine link: one connection to one engine, which carries all of its calls.

No task and no future for a call: each read of the socket calls the receivers of the responses in it directly. The frames
are those of machinery/engine_link.py.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from typing_extensions import override

from gateway.upstream.call import BrokenResponseError, EngineCall, UnreachableError, UpstreamError
from gateway.upstream.response_head import InvalidResponseError, ResponseHead, SeenLines, read_head
from machinery import engine_link
from machinery.clock import NEVER, Clock
from machinery.engine_link import EngineGauges, FrameReader, LinkError
from schemas.wire.engine_address import EngineAddress

if TYPE_CHECKING:  # it has the links
    from gateway.upstream.engine_links import EngineLinks

_UPGRADE = (
    f"POST {engine_link.PATH} HTTP/1.1\r\nhost: %b\r\nconnection: upgrade\r\n"
    f"upgrade: {engine_link.UPGRADE}\r\n\r\n"
).encode()
SWITCHED: Final = b"HTTP/1.1 101 "
"""The beginning of an answer that accepts the link."""
_MOST_HEAD_BYTES = 8 << 10
_LAST_NUMBER = (1 << 32) - 1
_PARTS = frozenset({engine_link.EVENTS, engine_link.RECORDED, engine_link.RECORDED_PART})
_OF_RESPONSES = _PARTS | {engine_link.STATUS, engine_link.END}
_Batch: TypeAlias = tuple[list[bytes], list[bytes]]
"""Parts of a response's body, and the resume records beside them."""
# An engine has half of a window in transit while the other half is granted.
_GRANT_BYTES: Final = engine_link.WINDOW_BYTES // 2


def _read_status(payload: bytes) -> ResponseHead:
    head = engine_link.decode_status(payload)
    if not 200 <= head.status <= 599:
        raise LinkError(f"a response with status {head.status}")
    return read_head(head.status, head.lines.split(b"\r\n")[:-1])


_HEADS = SeenLines(_read_status)
"""Heads by their payload: nearly all have the same few headers."""


class EngineLink(asyncio.Protocol):
    """One link. Calls that it gets before it is open are sent then."""

    def __init__(self, clock: Clock, origin: EngineAddress, owner: "EngineLinks") -> None:
        self.origin = origin
        self.calls: dict[int, EngineCall] = {}
        """The calls that have no complete response, by stream."""
        self.gauges: EngineGauges | None = None
        """The last report of the engine; None before the link is open."""
        self.has_received = False
        """True if anything arrived since this was last reset."""
        self.opened_s = clock.monotonic()
        self.idle_since = self.opened_s
        """The time since which it has no call, by the last sweep."""
        self.end = ""
        """The reason of its end."""
        self.is_gone = False
        self.is_cut = False
        """True once the gateway has closed it."""
        self._now: Callable[[], float] = clock.monotonic
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(engine_link.MAX_RESPONSE_PAYLOAD)
        self.head = b""
        """The answer of the engine to the upgrade, so far; empty once it has switched."""
        self._is_switched = False
        self._next = 1
        self._unsent: list[EngineCall] = []
        """Calls that wait for the link to open."""
        self._uploads: deque[tuple[int, memoryview]] = deque()
        """The rest of large bodies, by stream."""
        self._is_full = False
        """True while the engine does not read."""
        self._frames: list[bytes] = []
        """Frames to write at the end of this iteration of the event loop."""
        self._pings: list[asyncio.Future[EngineGauges]] = []

    @property
    def is_open(self) -> bool:
        """True once the engine has accepted the link."""
        return self.gauges is not None

    @property
    def ssl_object(self) -> object:
        """The TLS state; None without TLS."""
        return None if self._transport is None else self._transport.get_extra_info("ssl_object")

    def start(self, call: EngineCall, now_s: float) -> None:
        """Send a request; its response goes to the call."""
        number = self._next
        self._next = number + 1
        if number == _LAST_NUMBER:
            self._owner.forget(self)
        call.stream_id, call.connection, call.silent_since = number, self, now_s
        self.calls[number] = call
        if self.gauges is None:
            self._unsent.append(call)
        else:
            self._send(call, self.gauges)

    def _send(self, call: EngineCall, gauges: EngineGauges) -> None:
        if call.replica and gauges.replica and call.replica != gauges.replica:
            # Ports of ended engines are reused. Later, because the caller does not expect an error yet.
            why = f"replica {gauges.replica} answers there, not {call.replica}"
            loop = asyncio.get_running_loop()
            loop.call_soon(self._end_call, call, UnreachableError(why))
            return
        number, rest = call.stream_id, call.body
        self._write(number, engine_link.REQUEST, call.raw)
        call.raw = call.body = b""  # never sent again, and streams live long
        if rest:
            self._uploads.append((number, memoryview(rest)))
            self._upload()

    def _write(self, number: int, kind: int, payload: bytes) -> None:
        """Send a frame: at once for the only call, else with the others of this iteration, in one system call."""
        self._frames.append(engine_link.frame(number, kind, payload))
        if len(self.calls) <= 1:
            self._flush()
        elif len(self._frames) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))

    def _upload(self) -> None:
        """Send the bodies in turns, as fast as the engine reads."""
        self._flush()
        while self._uploads and not self._is_full and self._transport is not None:
            number, rest = self._uploads.popleft()
            if number not in self.calls:
                continue
            part, rest = rest[: engine_link.BODY_BYTES], rest[engine_link.BODY_BYTES :]
            if rest:
                self._uploads.append((number, rest))
            self._transport.write(engine_link.frame(number, engine_link.BODY, bytes(part)))

    def drop(self, call: EngineCall) -> None:
        """Give up the call's response; the engine frees its slot."""
        if self.calls.pop(call.stream_id, None) is None:
            return
        call.connection, call.silent_since = None, NEVER
        if self.gauges is not None:
            self._write(call.stream_id, engine_link.CANCEL, b"")

    def _end_call(self, call: EngineCall, error: UpstreamError) -> None:
        """End a call with an error, unless it has ended."""
        if call.stream_id in self.calls:
            self.drop(call)
            call.on_error(error)

    def fail_call(self, call: EngineCall, why: str, *, is_silence: bool) -> None:
        """End a call because its time is up."""
        error = BrokenResponseError(why, had_bytes=call.has_bytes, is_silence=is_silence)
        self._end_call(call, error)

    def pause(self, call: EngineCall) -> None:
        """Grant the call no further bytes; the engine owes nothing meanwhile."""
        call.is_paused, call.silent_since = True, NEVER

    def resume(self, call: EngineCall) -> None:
        """Grant bytes again."""
        if call.is_paused:
            call.is_paused, call.silent_since = False, self._now()
            if call.unread >= _GRANT_BYTES:
                self._grant(call)

    def _grant(self, call: EngineCall) -> None:
        granted, call.unread = call.unread, 0
        self._write(call.stream_id, engine_link.WINDOW, engine_link.encode_window(granted))

    def ping(self) -> asyncio.Future[EngineGauges]:
        """Return the next report of the engine; it fails as calls do."""
        pong: asyncio.Future[EngineGauges] = asyncio.get_running_loop().create_future()
        self._pings.append(pong)
        if self.gauges is not None:
            self._write(0, engine_link.PING, b"")
        return pong

    def cut(self) -> None:
        """Close at once."""
        self._owner.forget(self)
        self.is_cut = True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str, *, is_silence: bool = False) -> None:
        """Fail all calls, and close."""
        self.cut()
        self.fail_all(why, is_silence=is_silence)

    def fail_all(
        self, why: str, *, is_silence: bool = False, error: UnreachableError | None = None
    ) -> None:
        """Fail all calls; with this error if the engine has not seen them."""
        pings, self._pings = self._pings, []
        for pong in pings:
            if not pong.done():
                pong.set_exception(error or BrokenResponseError(why, had_bytes=False))
        while self.calls:
            _, call = self.calls.popitem()
            call.connection, call.silent_since = None, NEVER
            broken = BrokenResponseError(why, had_bytes=call.has_bytes, is_silence=is_silence)
            call.on_error(error or broken)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance check: uvloop's transports do not inherit from it.
        self._transport = cast("asyncio.Transport", transport)
        host = self.origin.authority.encode("ascii", "replace")
        self._transport.write(_UPGRADE % host)

    @override
    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if not self._is_switched:
            data = self._read_switch(data)
        now_s, calls = self._now(), self.calls
        batches: dict[int, _Batch] = {}
        try:
            frames = self._reader.feed(data)
            self._let_others_run(len(frames))
            for number, kind, payload in frames:
                call = calls.get(number)
                if call is None:
                    if not number:
                        self._take(kind, payload)
                    continue
                if not call.is_paused:
                    call.silent_since = now_s
                if kind in _PARTS and call.has_bytes:
                    # An engine that is ahead of this gateway has sent several steps: one write for each client is enough.
                    batch = batches.get(number)
                    if batch is None:
                        batch = batches[number] = [], []
                    self._add_part(call, kind, payload, batch)
                    continue
                if number in batches:
                    self._pass_batch(number, batches.pop(number))
                    if number not in calls:
                        continue
                self._take_of_call(call, kind, payload)
        except (LinkError, InvalidResponseError) as error:
            self.end = f"the engine breaks the rules of the link: {error}"
            self.cut()
        for number, batch in batches.items():
            self._pass_batch(number, batch)

    def _let_others_run(self, frames: int) -> None:
        """After many frames, read on in the next turn of the loop."""
        if frames > engine_link.MANY_FRAMES and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _add_part(self, call: EngineCall, kind: int, payload: bytes, batch: _Batch) -> None:
        """Add a part of a body to those that have arrived with it."""
        if call.unread >= engine_link.WINDOW_BYTES:
            raise LinkError("more of a response than the window allows")
        call.unread += len(payload)
        if kind == engine_link.RECORDED_PART:
            if call.begun is None:
                call.begun = bytearray()
            call.begun += payload
            if len(call.begun) > engine_link.MAX_RECORDED:
                raise LinkError("a RECORDED that is too large")
            return
        if kind == engine_link.RECORDED:
            if call.begun:
                payload, call.begun = b"".join((call.begun, payload)), None
            record, payload = engine_link.split_recorded(payload)
            batch[1].append(record)
        batch[0].append(payload)

    def _pass_batch(self, number: int, batch: _Batch) -> None:
        """Hand over parts of a body, as one, unless the call was given up meanwhile."""
        call = self.calls.get(number)
        if call is None:
            return
        if call.unread >= _GRANT_BYTES and not call.is_paused:
            self._grant(call)
        payloads, records = batch
        if payloads:
            data = payloads[0] if len(payloads) == 1 else b"".join(payloads)
            if records:
                call.on_recorded(data, records)
            else:
                call.on_body(data)

    def _take_of_call(self, call: EngineCall, kind: int, payload: bytes) -> None:
        """Take a frame of a call that is no part of its body."""
        if (kind == engine_link.STATUS) == call.has_bytes and kind in _OF_RESPONSES:
            raise LinkError(f"a response out of order: kind {kind}")
        match kind:
            case engine_link.STATUS:
                call.has_bytes = True
                call.on_head(_HEADS[payload])
            case engine_link.END:
                self._release(call)
                call.on_end(payload)
            case engine_link.PROGRESS:
                call.on_progress(payload)
            case engine_link.FAIL:
                failure = engine_link.decode_failure(payload)
                self._release(call)
                if failure.last_event and call.has_bytes:
                    call.on_refused(failure.last_event)
                else:
                    why = failure.message[:500]
                    call.on_error(BrokenResponseError(why, had_bytes=call.has_bytes))
            case _:
                pass  # of a later release

    def _release(self, call: EngineCall) -> None:
        del self.calls[call.stream_id]
        call.connection, call.silent_since = None, NEVER

    def _read_switch(self, data: bytes) -> bytes:
        """Read the answer to the upgrade; return the bytes after it."""
        self.head += data
        end = self.head.find(b"\r\n\r\n")
        is_refused = not self.head.startswith(SWITCHED[: len(self.head)])
        if is_refused or len(self.head) > _MOST_HEAD_BYTES:
            self.cut()
            return b""
        if end < 0:
            return b""
        data, self.head, self._is_switched = self.head[end + 4 :], b"", True
        return data

    def _take(self, kind: int, payload: bytes) -> None:
        """Take a frame of the link itself."""
        if kind == engine_link.GOAWAY:
            self._owner.forget(self)
        elif kind == engine_link.GAUGES:
            is_first = self.gauges is None
            self.gauges = gauges = engine_link.decode_gauges(payload)
            pings, self._pings = self._pings, []
            for pong in pings:
                if not pong.done():
                    pong.set_result(gauges)
            self._owner.on_gauges(self, gauges)
            if is_first:
                self._owner.on_open(self)
                unsent, self._unsent = self._unsent, []
                for call in unsent:
                    if call.stream_id in self.calls:
                        self._send(call, gauges)

    @override
    def pause_writing(self) -> None:
        self._is_full = True

    @override
    def resume_writing(self) -> None:
        self._is_full = False
        self._upload()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(exc)

    def lose(self, error: Exception | None) -> None:
        """End the link, whose connection is lost or was never made."""
        self.is_gone, self._transport = True, None
        self._uploads.clear()
        if not self.end:
            text = "the connection was lost"
            self.end = text if error is None else f"{text}: {error}"
        self._owner.forget(self)
        if self.is_open:
            self.fail_all(self.end)
        elif isinstance(error, UnreachableError):
            self.fail_all(str(error), error=error)
        else:
            why = self._owner.explain_end(self)
            self.fail_all(why, error=UnreachableError(why))
