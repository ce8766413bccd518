"""OpenAI's response bodies, whole and in pieces. Values in, bytes out; sends nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from nodeagent.engine.openai import logprobs
from nodeagent.engine.openai.bodies import Request
from nodeagent.engine.openai.logprobs import Offset, Spell
from nodeagent.engine.text.deltas import Delta, ToolCall
from nodeagent.engine.text.reading import Finish

Json: TypeAlias = dict[str, Any]

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
class Totals:
    """What is told at the end."""

    usage: Usage
    performance: Mapping[str, float | None] | None = None
    """Ours, if asked for (`performance.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One complete choice."""

    delta: Delta
    finish: Finish
    echo: str = ""
    stopped_by: str | None = None
    """The stop word that ended it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all bodies of one response have in common, and where its choices' texts are."""

    id: str
    created: int
    request: Request
    fingerprint: str
    spell: Spell
    offsets: tuple[Offset, ...]
    """One a choice."""

    def whole(self, choices: Sequence[Whole], totals: Totals) -> bytes:
        """Return the one body of a response that is not streamed."""
        name = "chat.completion" if self.request.is_chat else "text_completion"
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body = {**self._head(name), "choices": shown, "usage": totals.usage.body()}
        return orjson.dumps(_with_performance(body, totals))

    def _choice(self, index: int, choice: Whole) -> Json:
        shown: Json = (
            {"message": _message(choice.delta)}
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
            **_stopped(choice.stopped_by),
        }

    def first(self, index: int, *, echo: str = "", mark: bytes = b"") -> bytes:
        """Return what goes before a choice's first token: a chat says who speaks, a completion its prompt if asked."""
        if self.request.is_chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return self._chunk(index, {"delta": delta}, mark=mark)
        return self._chunk(index, {"text": echo}, mark=mark)

    def piece(self, index: int, delta: Delta, *, mark: bytes = b"") -> bytes:
        """Return what some tokens add to a choice."""
        shown: Json = {"delta": _delta(delta)} if self.request.is_chat else {"text": delta.content}
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
        why = {"finish_reason": finish, **_stopped(stopped_by)}
        return self._chunk(index, {**shown, **why}, mark=mark)

    def last(self, totals: Totals) -> bytes:
        """Return what ends a stream that went well."""
        if not self.request.has_usage and totals.performance is None:
            return DONE
        usage = {"usage": totals.usage.body()} if self.request.has_usage else {}
        body = {**self._chunk_head(), "choices": [], **usage}
        return event(_with_performance(body, totals)) + DONE

    def _logprobs(self, index: int, delta: Delta) -> Json:
        if self.request.is_chat:
            return logprobs.chat(delta.scored, self.spell)
        return logprobs.completion(delta.scored, self.spell, self.offsets[index])

    def _chunk(self, index: int, shown: Json, *, mark: bytes) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **shown}
        body = {**self._chunk_head(), "choices": [choice]}
        if self.request.has_usage:
            body["usage"] = None
        return mark + event(body)

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


def _stopped(stopped_by: str | None) -> Json:
    """Return vLLM's `stop_reason`, where there is one to tell."""
    return {} if stopped_by is None else {"stop_reason": stopped_by}


def _with_performance(body: Json, totals: Totals) -> Json:
    return body if totals.performance is None else {**body, "performance": dict(totals.performance)}


def _delta(delta: Delta) -> Json:
    """Return a chunk's `delta`, with what there is."""
    shown: Json = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning:
        shown["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        shown["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return shown


def _call_piece(call: ToolCall) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function["name"] = call.name
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(delta: Delta) -> Json:
    """Return a whole answer: an answer that is only calls has no content."""
    calls = _calls(delta.tool_calls)
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


def _calls(pieces: Sequence[ToolCall]) -> list[Json]:
    """Join the pieces of calls, in the order of their indexes."""
    found: list[Json] = []
    for index in sorted({piece.index for piece in pieces}):
        parts = [piece for piece in pieces if piece.index == index]
        function = {"name": parts[0].name, "arguments": "".join(one.arguments for one in parts)}
        found.append({"id": parts[0].id, "type": "function", "function": function})
    return found


def marked(fleet: Json) -> bytes:
    """Return the mark of a chunk: a comment line in its event, for gateways."""
    return b": fleet " + orjson.dumps(fleet) + b"\n"


def event(body: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
