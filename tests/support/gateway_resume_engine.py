"""Streams with resume comments, as engines send them. The continuation depends on the request and the tokens only.

`check` verifies these and the streams of real engines (tests/engine).
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.forwarding.resume_log import ResumeLog
from machinery import engine_link
from tests.support.gateway_fake_engine import Call

DONE = b"data: [DONE]\n\n"
RESPONSES = "/v1/responses"
_MARK_BLOCK = re.compile(rb"^: [^\n]*\n\n", re.MULTILINE)
WORDS = ("Hel", "lo", "", ", ", "wor", "", "", "ld: ", "fleet {", "}\n\n", "\\n: ", "é🌍")
"""One for each token; the text of an empty one is held back and comes with the next."""
PROMPT_TOKENS, CACHED_TOKENS = 11, 4
Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The part of a request that determines the answer."""

    path: str
    body: Json

    @property
    def is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @property
    def has_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def prompt(self) -> str:
        return (
            f"{zlib.crc32(orjson.dumps([self.body.get('messages'), self.body.get('prompt')])):08x}"
        )


def tokens(seed: int, length: int) -> list[int]:
    """Return an answer's tokens, the last of which has no text."""
    return [*((seed + 7 * at) % len(WORDS) + 300 for at in range(length - 1)), 2]


def events(request: Request, *, seed: int = 1, length: int = 8, id_: str = "x-1") -> list[bytes]:
    """Return the events of an answer, from where another engine broke off, if one did; ends itself with the last token."""
    fleet: Json = request.body.get("fleet") or {}
    seed = int(fleet.get("seed", request.body.get("seed", seed)) or 0)
    told, made = len(fleet.get("tokens", ())), tokens(seed, length)
    assert made[:told] == fleet.get("tokens", [])
    assert fleet.get("prompt", request.prompt) == request.prompt
    teller = _Teller(request, seed, fleet.get("id", id_), fleet.get("created", 1_700_000_000))
    teller.cached = fleet.get("cached_tokens", CACHED_TOKENS)
    if request.path == RESPONSES:
        return list(teller.numbered(made, told, fleet.get("events", 0)))
    is_ended = bool(fleet.get("finished"))
    return list(teller.told(made, told, is_resumed=bool(fleet), is_ended=is_ended))


@dataclass
class _Teller:
    request: Request
    seed: int
    id: str
    created: int
    cached: int = CACHED_TOKENS
    is_introduced: bool = False

    def told(
        self, made: list[int], told: int, *, is_resumed: bool, is_ended: bool
    ) -> Iterator[bytes]:
        if self.request.is_chat and not is_resumed:
            yield self.chunk([], {"delta": {"role": "assistant", "content": ""}})
        for at in range(told, len(made) - 1):
            text = WORDS[made[at] - 300]
            if text:
                shown: Json = (
                    {"delta": {"content": text}} if self.request.is_chat else {"text": text}
                )
                yield self.chunk(made[told : at + 1], shown)
                told = at + 1
        usage = _usage(len(made), self.cached)
        if is_ended:
            yield self.commented({"tokens": made[told:], "usage": usage}) + self.end(usage)
            return
        last: Json = {"delta": {}} if self.request.is_chat else {"text": ""}
        yield self.chunk(made[told:], {**last, "finish_reason": "stop"}, usage=usage)
        yield self.end(usage)

    def end(self, usage: Json) -> bytes:
        """Return the last events, which engines write at once."""
        if not self.request.has_usage:
            return DONE
        body = {**self.head(), "choices": [], "usage": usage}
        return b"data: " + orjson.dumps(body) + b"\n\n" + DONE

    def numbered(self, made: list[int], told: int, sent: int) -> Iterator[bytes]:
        """Yield blocks of /v1/responses: `told` tokens and `sent` events came from another engine."""
        first = [("response.created", {"response": {"id": self.id}}), ("response.in_progress", {})]
        count = sent or 0
        yield self.mark([])
        if not sent:
            for kind, fields in first:
                yield self.numbered_event(kind, count, fields)
                count += 1
            yield self.mark([])
        for at in range(told, len(made) - 1):
            text = WORDS[made[at] - 300]
            if not text:
                continue
            # Two events for one token, as where an item opens.
            for kind in ("response.output_text.delta", "response.text.note"):
                yield self.numbered_event(kind, count, {"delta": text})
                count += 1
            yield self.mark(made[told : at + 1])
            told = at + 1
        text = "".join(WORDS[token - 300] for token in made[:-1])
        usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": len(made)}
        body = {"id": self.id, "output": text, "usage": usage}
        yield self.numbered_event("response.output_text.done", count, {"text": text})
        yield self.numbered_event("response.completed", count + 1, {"response": body})
        yield self.mark(made[told:], usage=_usage(len(made), self.cached))

    def numbered_event(self, kind: str, number: int, fields: Json) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"

    def mark(self, made: list[int], **more: Any) -> bytes:
        return self.commented({"tokens": made, **more}) + b"\n"

    def head(self) -> Json:
        return {"id": self.id, "created": self.created, "model": self.request.body["model"]}

    def chunk(self, made: list[int], shown: Json, **more: Any) -> bytes:
        choice = {"index": 0, "finish_reason": None, **shown}
        data = orjson.dumps({**self.head(), "choices": [choice]})
        return self.commented({"tokens": made, **more}) + b"data: " + data + b"\n\n"

    def commented(self, fields: Json) -> bytes:
        """Return the comment line of an event, with the fields of the first one if it is that."""
        if not self.is_introduced:
            self.is_introduced = True
            fields |= {"seed": self.seed, "prompt": self.request.prompt}
            fields |= {"cached_tokens": self.cached, "id": self.id, "created": self.created}
            fields["prompt_tokens"] = PROMPT_TOKENS
        return b": fleet " + orjson.dumps(fields) + b"\n"


def _usage(made: int, cached: int) -> Json:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": made,
        "total_tokens": PROMPT_TOKENS + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check(frames: list[tuple[bytes, bytes]]) -> None:
    """Fail unless a whole stream is recorded as gateways need it, by its records and events; of fake engines and of real ones."""
    records = [engine_link.decode_records(record, 1)[0] for record, _ in frames if record]
    stream = b"".join(events for _, events in frames)
    *told, end = stream.split(b"\n\n")[:-1]
    assert end + b"\n\n" == DONE
    assert all(event.startswith(b'data: {"id":"') for event in told)
    assert [bool(record.start) for record in records] == [True] + [False] * (len(records) - 1)
    assert [record.finished for record in records] == [[]] * (len(records) - 1) + [[0]]
    start, first = records[0].start, orjson.loads(told[0][6:])
    assert start is not None
    assert (first["id"], first["created"]) == (start.id, start.created)
    resume_log = ResumeLog(10_000)
    for record, _ in frames:
        resume_log.add(record)
    sums = resume_log.resume_point()
    assert sums is not None
    assert sums.tokens == records[-1].output_tokens == resume_log.usage()[2]
    assert resume_log.usage()[:2] == (start.prompt_tokens, start.cached_tokens)


def clean(stream: bytes) -> bytes:
    """Return a stream as clients get it."""
    stream = _MARK_BLOCK.sub(b"", stream)
    lines = stream.split(b"\n")
    return b"\n".join(line for line in lines if not line.startswith(b": "))


@dataclass
class Marked:
    """A script of fake engines. What several of them share is cut as many times as there are cuts."""

    cuts: list[int] = field(default_factory=list)
    """After how many bytes of its stream each attempt dies, one after another."""
    ends: str = "dies"
    length: int = 8
    bodies: list[Json] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        assert call.headers.get("x-fleet-resumable") == "1"
        body = orjson.loads(call.body)
        self.bodies.append(body)
        # Each engine would begin an answer of its own.
        own = len(self.bodies)
        answer = Request(call.path, body)
        data = b"".join(events(answer, seed=own, length=self.length, id_=f"x-{own}"))
        if not self.cuts:
            await call.begin_stream()
            await call.chunk(data)
            await call.send(b"0\r\n\r\n")
            return
        await ENDS[self.ends](call, data[: self.cuts.pop(0)])


async def _dies(call: Call, data: bytes) -> None:
    await call.begin_stream()
    await call.chunk(data)
    call.die()


async def _closes(call: Call, data: bytes) -> None:
    """End without the last chunk, but orderly."""
    await call.begin_stream()
    await call.chunk(data)
    call.writer.close()


async def _half_a_chunk(call: Call, data: bytes) -> None:
    await call.begin_stream()
    await call.send(b"%x\r\n%b" % (len(data) + 1000, data))
    call.writer.close()


async def _garbage(call: Call, data: bytes) -> None:
    await call.begin_stream()
    await call.chunk(data)
    await call.send(b"\x00\xff no chunk at all\r\n" * 20)


async def _odd_event(call: Call, data: bytes) -> None:
    """Send what is well framed, and no event of a chat."""
    await call.begin_stream()
    await call.chunk(data[: data.rfind(b"\n\n") + 2] + b"\x00\xff\n\ndata: more\n\n")
    await call.send(b"0\r\n\r\n")


async def _too_short(call: Call, data: bytes) -> None:
    """Say that this was all."""
    await call.begin_stream()
    await call.chunk(data)
    await call.send(b"0\r\n\r\n")


async def _wrong_length(call: Call, data: bytes) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999999\r\n\r\n"
    await call.send(head.encode() + data)
    call.writer.close()


async def _drains(call: Call, data: bytes) -> None:
    error = {"message": "This replica is shutting down.", "type": "server_error", "param": None}
    event = b"data: " + orjson.dumps({"error": error | {"code": "draining"}}) + b"\n\n"
    await call.begin_stream()
    await call.chunk(data[: data.rfind(b"\n\n") + 2] + event)
    await call.send(b"0\r\n\r\n")


ENDS = {
    "dies": _dies,
    "closes": _closes,
    "half a chunk": _half_a_chunk,
    "garbage": _garbage,
    "odd event": _odd_event,
    "too short": _too_short,
    "wrong length": _wrong_length,
    "drains": _drains,
}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user"}], "stream": True, "seed": 6}

WITH_USAGE = BODY | {"stream_options": {"include_usage": True}}

# Without a seed, an engine draws one of its own, and who goes on has to take that.
UNSEEDED = {"model": "m", "prompt": "x", "stream": True}

CASES = [(CHAT, BODY), (CHAT, WITH_USAGE), (COMPLETION, UNSEEDED)]


def expected_stream(path: str = CHAT, body: dict[str, Any] = BODY, length: int = 8) -> bytes:
    return clean(b"".join(events(Request(path, body), length=length)))
