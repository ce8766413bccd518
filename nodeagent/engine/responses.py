"""OpenAI's response bodies, whole and in pieces. Values in, bytes out; sends nothing."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from nodeagent.engine.jobs import FinishReason, Piece
from nodeagent.engine.openai import Request

Json: TypeAlias = dict[str, Any]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> Json:
        """Return OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all bodies of one response have in common."""

    id: str
    created: int
    request: Request

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> bytes:
        """Return the one body of a response that is not streamed."""
        shown: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.request.is_chat
            else {"text": text}
        )
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish}
        name = "chat.completion" if self.request.is_chat else "text_completion"
        return orjson.dumps({**self._head(name), "choices": [choice], "usage": usage.body()})

    def first(self) -> bytes:
        """Return what goes before the first text: a chat says who speaks."""
        if not self.request.is_chat:
            return b""
        return self._chunk({"delta": {"role": "assistant", "content": "", "refusal": None}}, None)

    def piece(self, piece: Piece) -> bytes:
        """Return what one step adds, which may be nothing at all."""
        out = b""
        if piece.text:
            out += self._chunk(
                {"delta": {"content": piece.text}}
                if self.request.is_chat
                else {"text": piece.text},
                None,
            )
        if piece.finish is not None:
            out += self._chunk(
                {"delta": {}} if self.request.is_chat else {"text": ""}, piece.finish
            )
        return out

    def last(self, usage: Usage) -> bytes:
        """Return what ends a stream that went well."""
        if not self.request.has_usage:
            return DONE
        return event({**self._chunk_head(), "choices": [], "usage": usage.body()}) + DONE

    def _chunk(self, shown: Json, finish: FinishReason | None) -> bytes:
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish}
        body = {**self._chunk_head(), "choices": [choice]}
        if self.request.has_usage:
            body["usage"] = None
        return event(body)

    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk" if self.request.is_chat else "text_completion")

    def _head(self, name: str) -> Json:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.request.model,
        }


def event(body: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
