"""OpenAI's two shapes of likelihoods: chat's and completions'. Pure.

How fast an answer was, as its client is told if it asks. Pure.

OpenAI's response bodies, whole and in pieces. Values in, bytes out; sends nothing.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from engine.openai.request_body import GenerationRequest
from engine.text.output_parser import Delta, Finish, ScoredToken, ToolCallDelta

Json: TypeAlias = dict[str, Any]
Spell: TypeAlias = Callable[[int], bytes]  # what one token alone spells, maybe half a character

# What OpenAI says of a token that cannot be; minus infinity is no JSON.
_MIN_LOGPROB = -9999.0


def chat_logprobs(scored: Iterable[ScoredToken], spell: Spell) -> Json:
    """Return a chat choice's `logprobs`."""
    content = [
        {
            **_token_logprob(one.token, one.likelihood.logprob, spell),
            "top_logprobs": [
                _token_logprob(token, logprob, spell) for token, logprob in one.likelihood.top
            ],
        }
        for one in scored
    ]
    return {"content": content, "refusal": None}


def _token_logprob(token: int, logprob: float, spell: Spell) -> Json:
    piece = spell(token)
    return {
        "token": _decode_piece(piece),
        "logprob": _finite_logprob(logprob),
        "bytes": list(piece),
    }


def completion_logprobs(scored: Sequence[ScoredToken], spell: Spell, offset: "TextOffset") -> Json:
    """Return a completion choice's `logprobs`; moves `offset` on."""
    pieces = [spell(one.token) for one in scored]
    return {
        "tokens": [_decode_piece(piece) for piece in pieces],
        "token_logprobs": [_finite_logprob(one.likelihood.logprob) for one in scored],
        "top_logprobs": [
            {
                _decode_piece(spell(token)): _finite_logprob(logprob)
                for token, logprob in one.likelihood.top
            }
            for one in scored
        ],
        "text_offset": [offset.take(piece) for piece in pieces],
    }


@dataclass(slots=True)
class TextOffset:
    """Where in a choice's text the next token begins, in characters."""

    characters: int = 0
    _open: bytes = b""
    """The beginning of a character."""

    def take(self, piece: bytes) -> int:
        """Return where a token begins, and go on behind it; the rest of a character begins where the character does."""
        begin = self.characters
        # In UTF-8, bytes of the form 10xxxxxx continue a character; what is not continued is shown as U+FFFD.
        if not piece or piece[0] & 0xC0 != 0x80:
            begin += len(_decode_piece(self._open))
        seen = self._open + piece
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.characters += len(decoder.decode(seen))
        self._open = decoder.getstate()[0]
        return begin


def _decode_piece(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _finite_logprob(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


PerformanceBody: TypeAlias = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """When what happened to one request, in seconds of one monotonic clock, and how much."""

    arrived_s: float
    started_s: float | None
    """When it got its slots; None: it needed none."""
    first_s: float | None
    """When its first token was made."""
    last_s: float
    """When its last one was."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: these were not read again."""
    made_tokens: int
    """Here, without what another process had made before."""
    choices: int


def performance_body(story: RequestTiming) -> PerformanceBody:
    """Return the response's `performance`; None where there is nothing to measure."""
    cached = {"cached_tokens": story.cached_tokens}
    if story.started_s is None or story.first_s is None:
        nothing = dict.fromkeys(
            ("queue_s", "prefill_s", "ttft_s", "prompt_tokens_per_s", "decode_tokens_per_s")
        )
        return {**nothing, **cached}
    prefill_s = story.first_s - story.started_s
    # The first token of each choice comes with its prompt.
    decoded = story.made_tokens - story.choices
    return {
        "queue_s": round(story.started_s - story.arrived_s, 6),
        "prefill_s": round(prefill_s, 6),
        "ttft_s": round(story.first_s - story.arrived_s, 6),
        "prompt_tokens_per_s": _tokens_per_s(story.prompt_tokens - story.cached_tokens, prefill_s),
        "decode_tokens_per_s": _tokens_per_s(decoded, story.last_s - story.first_s),
        **cached,
    }


def _tokens_per_s(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else None


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

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
    """What is told at the end."""

    usage: Usage
    performance: Mapping[str, float | None] | None = None
    """Ours, if asked for (`performance.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteChoice:
    """One complete choice."""

    delta: Delta
    finish: Finish
    echo: str = ""
    stopped_by: str | None = None
    """The stop word that ended it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormatter:
    """What all bodies of one response have in common, and where its choices' texts are."""

    id: str
    created: int
    request: GenerationRequest
    fingerprint: str
    spell: Spell
    offsets: tuple[TextOffset, ...]
    """One a choice."""

    def whole(self, choices: Sequence[CompleteChoice], totals: ResponseTotals) -> bytes:
        """Return the one body of a response that is not streamed."""
        name = "chat.completion" if self.request.is_chat else "text_completion"
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body = {**self._head(name), "choices": shown, "usage": totals.usage.body()}
        return orjson.dumps(_with_performance(body, totals))

    def _choice(self, index: int, choice: CompleteChoice) -> Json:
        shown: Json = (
            {"message": _message_body(choice.delta)}
            if self.request.is_chat
            else {"text": choice.echo + choice.delta.content}
        )
        told = self.request.top_logprobs is not None
        likelihoods = self._logprobs(index, choice.delta) if told else None
        return {
            "index": index,
            **shown,
            "logprobs": likelihoods,
            "finish_reason": choice.finish,
            **_stop_reason(choice.stopped_by),
        }

    def first(self, index: int, *, echo: str = "", mark: bytes = b"") -> bytes:
        """Return what goes before a choice's first token: a chat says who speaks, a completion its prompt if asked."""
        if self.request.is_chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return self._chunk(index, {"delta": delta}, mark=mark)
        return self._chunk(index, {"text": echo}, mark=mark)

    def piece(self, index: int, delta: Delta, *, mark: bytes = b"") -> bytes:
        """Return what some tokens add to a choice."""
        shown: Json = (
            {"delta": _delta_body(delta)} if self.request.is_chat else {"text": delta.content}
        )
        likelihoods = self._logprobs(index, delta) if delta.scored else None
        return self._chunk(index, {**shown, "logprobs": likelihoods}, mark=mark)

    def end(
        self,
        index: int,
        finish: Finish,
        *,
        stopped_by: str | None = None,
        mark: bytes = b"",
    ) -> bytes:
        """Return what says why a choice is over; `stopped_by` is the stop word, if one did it."""
        shown: Json = {"delta": {}} if self.request.is_chat else {"text": ""}
        why = {"finish_reason": finish, **_stop_reason(stopped_by)}
        return self._chunk(index, {**shown, **why}, mark=mark)

    def last(self, totals: ResponseTotals) -> bytes:
        """Return what ends a stream that went well."""
        if not self.request.has_usage and totals.performance is None:
            return DONE
        usage = {"usage": totals.usage.body()} if self.request.has_usage else {}
        body = {**self._chunk_head(), "choices": [], **usage}
        return sse_event(_with_performance(body, totals)) + DONE

    def _logprobs(self, index: int, delta: Delta) -> Json:
        if self.request.is_chat:
            return chat_logprobs(delta.scored, self.spell)
        return completion_logprobs(delta.scored, self.spell, self.offsets[index])

    def _chunk(self, index: int, shown: Json, *, mark: bytes) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **shown}
        body = {**self._chunk_head(), "choices": [choice]}
        if self.request.has_usage:
            body["usage"] = None
        return mark + sse_event(body)

    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk" if self.request.is_chat else "text_completion")

    def _head(self, name: str) -> Json:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.fingerprint,
        }


def _stop_reason(stopped_by: str | None) -> Json:
    """Return vLLM's `stop_reason`, where there is one to tell."""
    return {} if stopped_by is None else {"stop_reason": stopped_by}


def _with_performance(body: Json, totals: ResponseTotals) -> Json:
    return body if totals.performance is None else {**body, "performance": dict(totals.performance)}


def _delta_body(delta: Delta) -> Json:
    """Return a chunk's `delta`, with what there is."""
    shown: Json = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning:
        shown["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        shown["tool_calls"] = [_tool_call_delta(call) for call in delta.tool_calls]
    return shown


def _tool_call_delta(call: ToolCallDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function["name"] = call.name
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message_body(delta: Delta) -> Json:
    """Return a whole answer: an answer that is only calls has no content."""
    calls = _tool_call_bodies(delta.tool_calls)
    shown: Json = {
        "role": "assistant",
        "content": None if calls and not delta.content else delta.content,
        "refusal": None,
    }
    if delta.reasoning:
        shown["reasoning_content"] = delta.reasoning
    if calls:
        shown["tool_calls"] = calls
    return shown


def _tool_call_bodies(pieces: Sequence[ToolCallDelta]) -> list[Json]:
    """Join the pieces of calls, in the order of their indexes."""
    found: list[Json] = []
    for index in sorted({piece.index for piece in pieces}):
        parts = [piece for piece in pieces if piece.index == index]
        function = {"name": parts[0].name, "arguments": "".join(one.arguments for one in parts)}
        found.append({"id": parts[0].id, "type": "function", "function": function})
    return found


def resume_comment(fleet: Json) -> bytes:
    """Return the mark of a chunk: a comment line in its event, for gateways."""
    return b": fleet " + orjson.dumps(fleet) + b"\n"


def sse_event(body: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
