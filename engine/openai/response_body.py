"""Response bodies of chats and completions, whole and in chunks: choices, log probabilities, usage, performance.

Values in, bytes out; nothing here sends or awaits.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from engine.jobs import TokenLogprobs
from engine.openai.request_body import GenerationRequest
from engine.text.output_parser import Delta, Finish, ScoredToken, ToolCallDelta
from schemas.wire import streams

Json: TypeAlias = dict[str, Any]
PerformanceBody: TypeAlias = dict[str, float | int | None]
PieceSpeller: TypeAlias = Callable[[int], bytes]  # the bytes of one token, maybe half a character

# OpenAI's value for an impossible token: JSON has no minus infinity.
_MIN_LOGPROB = -9999.0


@dataclass(slots=True)
class TextOffset:
    """Position of the next token in the text of a choice, in characters."""

    characters: int = 0
    _partial: bytes = b""
    """First bytes of a character that is not complete."""

    def take(self, piece: bytes) -> int:
        """Return the position of a token and advance behind it.

        A token that continues a character has the position of that character.
        """
        start = self.characters
        # In UTF-8, bytes of the form 10xxxxxx continue a character; one that is not continued is shown as U+FFFD.
        if not piece or piece[0] & 0xC0 != 0x80:
            start += len(_decode_piece(self._partial))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.characters += len(decoder.decode(self._partial + piece))
        self._partial = decoder.getstate()[0]
        return start


def chat_logprobs(scored: Iterable[ScoredToken], spell: PieceSpeller) -> Json:
    """Return the `logprobs` of a chat choice."""
    content = [
        {
            **_token_logprob(scored_token.token, scored_token.logprobs.logprob, spell),
            "top_logprobs": [
                _token_logprob(token, logprob, spell)
                for token, logprob in scored_token.logprobs.top
            ],
        }
        for scored_token in scored
    ]
    return {"content": content, "refusal": None}


def _token_logprob(token: int, logprob: float, spell: PieceSpeller) -> Json:
    piece = spell(token)
    return {
        "token": _decode_piece(piece),
        "logprob": _finite_logprob(logprob),
        "bytes": list(piece),
    }


def completion_logprobs(
    scored: Sequence[ScoredToken], spell: PieceSpeller, offset: TextOffset
) -> Json:
    """Return the `logprobs` of a completion choice; advances `offset`."""
    pieces = [spell(scored_token.token) for scored_token in scored]
    return {
        "tokens": [_decode_piece(piece) for piece in pieces],
        "token_logprobs": [
            _finite_logprob(scored_token.logprobs.logprob) for scored_token in scored
        ],
        "top_logprobs": [
            {
                _decode_piece(spell(token)): _finite_logprob(logprob)
                for token, logprob in scored_token.logprobs.top
            }
            for scored_token in scored
        ],
        "text_offset": [offset.take(piece) for piece in pieces],
    }


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt of a choice."""

    tokens: tuple[int, ...]
    text: str
    """Empty if the answer does not begin with it."""


def prompt_logprobs(
    echo: Echo, scores: Sequence[TokenLogprobs], spell: PieceSpeller, offset: TextOffset
) -> Json:
    """Return the `logprobs` of an echoed prompt; advances `offset`. The first token, which follows nothing, has none."""
    first = spell(echo.tokens[0])
    # A token that begins every text of the model is no part of the echo.
    is_shown = echo.text.startswith(_decode_piece(first).rstrip("\ufffd"))
    rest = [
        ScoredToken(token=token, logprobs=one)
        for token, one in zip(echo.tokens[1:], scores, strict=True)
    ]
    place = offset.take(first if is_shown else b"")
    body = completion_logprobs(rest, spell, offset)
    return {
        "tokens": [_decode_piece(first), *body["tokens"]],
        "token_logprobs": [None, *body["token_logprobs"]],
        "top_logprobs": [None, *body["top_logprobs"]],
        "text_offset": [place, *body["text_offset"]],
    }


def _decode_piece(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _finite_logprob(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Times of one request in seconds of one monotonic clock, and its token counts."""

    arrived_s: float
    started_s: float | None
    """The time at which it got its slots; None if it needed none."""
    first_s: float | None
    """The time of its first token."""
    last_s: float
    """The time of its last token."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens from the prefix cache."""
    generated_tokens: int
    """Generated by this engine, without those of an engine before."""
    choices: int


def performance_body(timing: RequestTiming) -> PerformanceBody:
    """Return the `performance` of a response; None where there is nothing to measure."""
    cached = {"cached_tokens": timing.cached_tokens}
    if timing.started_s is None or timing.first_s is None:
        unknown = dict.fromkeys(
            ("queue_s", "prefill_s", "ttft_s", "prompt_tokens_per_s", "decode_tokens_per_s")
        )
        return {**unknown, **cached}
    prefill_s = timing.first_s - timing.started_s
    prefilled = timing.prompt_tokens - timing.cached_tokens
    # The first token of each choice comes with its prompt.
    decoded = timing.generated_tokens - timing.choices
    return {
        "queue_s": round(timing.started_s - timing.arrived_s, 6),
        "prefill_s": round(prefill_s, 6),
        "ttft_s": round(timing.first_s - timing.arrived_s, 6),
        "prompt_tokens_per_s": _tokens_per_s(prefilled, prefill_s),
        "decode_tokens_per_s": _tokens_per_s(decoded, timing.last_s - timing.first_s),
        **cached,
    }


def _tokens_per_s(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def body(self) -> Json:
        """Return OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTotals:
    """Figures at the end of a response."""

    usage: Usage
    performance: Mapping[str, float | None] | None = None
    """`performance_body`, if the client asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteChoice:
    """One choice of a response that is not streamed."""

    delta: Delta
    finish: Finish
    echo: str = ""
    stop_word: str | None = None
    """The stop word that ended the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormatter:
    """Formats the body or the chunks of one response."""

    id: str
    created: int
    request: GenerationRequest
    fingerprint: str
    spell: PieceSpeller
    offsets: tuple[TextOffset, ...]
    """One for each choice."""
    echoes: tuple[Echo, ...]
    """One for each choice."""

    def full_body(self, choices: Sequence[CompleteChoice], totals: ResponseTotals) -> bytes:
        """Return the body of a response that is not streamed."""
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        bodies = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body = {**self._head(kind), "choices": bodies, "usage": totals.usage.body()}
        return orjson.dumps(_with_performance(body, totals))

    def _choice(self, index: int, choice: CompleteChoice) -> Json:
        text: Json = (
            {"message": _message_body(choice.delta)}
            if self.request.is_chat
            else {"text": choice.echo + choice.delta.content}
        )
        has_logprobs = self.request.top_logprobs is not None
        return {
            "index": index,
            **text,
            "logprobs": self._logprobs(index, choice.delta) if has_logprobs else None,
            "finish_reason": choice.finish,
            **_stop_reason(choice.stop_word),
        }

    def first_chunk(self, index: int, *, echo: str = "") -> bytes:
        """Return the chunk before the first token of a choice: the role in a chat, the echo in a completion."""
        if self.request.is_chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return self._chunk(index, {"delta": delta})
        return self._chunk(index, {"text": echo})

    def delta_chunk(self, index: int, delta: Delta) -> bytes:
        """Return the chunk that adds a delta to a choice."""
        text: Json = (
            {"delta": _delta_body(delta)} if self.request.is_chat else {"text": delta.content}
        )
        has_logprobs = delta.scored or delta.prompt_logprobs
        logprobs = self._logprobs(index, delta) if has_logprobs else None
        return self._chunk(index, {**text, "logprobs": logprobs})

    def finish_chunk(
        self,
        index: int,
        finish: Finish,
        *,
        stop_word: str | None = None,
    ) -> bytes:
        """Return the chunk with the finish reason of a choice."""
        text: Json = {"delta": {}} if self.request.is_chat else {"text": ""}
        reason = {"finish_reason": finish, **_stop_reason(stop_word)}
        return self._chunk(index, {**text, **reason})

    def stream_end(self, totals: ResponseTotals) -> bytes:
        """Return the end of a complete stream: the usage if requested, and `[DONE]`."""
        if not self.request.has_usage and totals.performance is None:
            return streams.DONE
        usage = {"usage": totals.usage.body()} if self.request.has_usage else {}
        body = {**self._chunk_head(), "choices": [], **usage}
        return sse_event(_with_performance(body, totals)) + streams.DONE

    def _logprobs(self, index: int, delta: Delta) -> Json:
        if self.request.is_chat:
            return chat_logprobs(delta.scored, self.spell)
        offset = self.offsets[index]
        of_prompt = (
            prompt_logprobs(self.echoes[index], delta.prompt_logprobs, self.spell, offset)
            if delta.prompt_logprobs is not None
            else {}
        )
        of_answer = completion_logprobs(delta.scored, self.spell, offset)
        return {name: of_prompt.get(name, []) + values for name, values in of_answer.items()}

    def _chunk(self, index: int, fields: Json) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        body = {**self._chunk_head(), "choices": [choice]}
        if self.request.has_usage:
            body["usage"] = None
        return sse_event(body)

    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk" if self.request.is_chat else "text_completion")

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
        }


def _stop_reason(stop_word: str | None) -> Json:
    """Return vLLM's `stop_reason`, if a stop word ended the choice."""
    return {} if stop_word is None else {"stop_reason": stop_word}


def _with_performance(body: Json, totals: ResponseTotals) -> Json:
    return body if totals.performance is None else {**body, "performance": dict(totals.performance)}


def _delta_body(delta: Delta) -> Json:
    """Return the `delta` of a chunk, without empty fields."""
    body: Json = {}
    if delta.content:
        body["content"] = delta.content
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        body["tool_calls"] = _tool_call_deltas(delta.tool_calls)
    return body


def _tool_call_deltas(pieces: Sequence[ToolCallDelta]) -> list[Json]:
    """Return one entry for each call: clients such as instructor read the first entry of a chunk only."""
    entries: dict[int, Json] = {}
    for piece in pieces:
        entry = entries.get(piece.index)
        if entry is None:
            entries[piece.index] = _tool_call_delta(piece)
        else:
            entry["function"]["arguments"] += piece.arguments
    return list(entries.values())


def _tool_call_delta(call: ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function["name"] = call.name
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message_body(delta: Delta) -> Json:
    """Return the `message` of a whole answer; `content` is null if there are only calls."""
    calls = _tool_call_bodies(delta.tool_calls)
    body: Json = {
        "role": "assistant",
        "content": None if calls and not delta.content else delta.content,
        "refusal": None,
    }
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if calls:
        body["tool_calls"] = calls
    return body


def _tool_call_bodies(pieces: Sequence[ToolCallDelta]) -> list[Json]:
    """Join the pieces of each call, in the order of their indexes."""
    bodies: list[Json] = []
    for index in sorted({piece.index for piece in pieces}):
        parts = [piece for piece in pieces if piece.index == index]
        function = {"name": parts[0].name, "arguments": "".join(part.arguments for part in parts)}
        bodies.append({"id": parts[0].id, "type": "function", "function": function})
    return bodies


def sse_event(body: Json) -> bytes:
    """Return one server-sent event."""
    return streams.DATA + orjson.dumps(body) + streams.END
