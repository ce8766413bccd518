"""`/tokenize`: how many tokens the prompt of a request has, read exactly as the request itself would be.

Not OpenAI's; vLLM and llama.cpp have it under this name. Knows nothing of HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from engine import errors
from engine.openai import request_body
from engine.openai.messages import AnyMessage
from engine.openai.output_options import Tools
from engine.openai.parameters import EndpointParameters
from engine.openai.request_body import GenerationRequest, Token

# What of a chat its prompt depends on.
_CHAT_FIELDS = frozenset(
    {"messages", "reasoning_effort", "response_format", "tool_choice", "tools"}
)


class TokenizeBody(BaseModel):
    """What `/tokenize` takes: a chat's fields, or a prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1)] | None = None
    prompt: str | list[Token] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What is to be counted."""

    request: GenerationRequest
    has_tokens: bool
    """Whether the tokens themselves are wanted, too."""


def accepted_parameters() -> EndpointParameters:
    """Return the names of `/tokenize`."""
    own = frozenset({"model", "prompt", "return_tokens"})
    return EndpointParameters(honoured=_CHAT_FIELDS | own, labels=frozenset(), limited={})


def parse(raw: bytes) -> TokenizeRequest:
    """Read a body.

    Raises:
        RefusedError: it is wrong, or has a prompt and messages, or neither.

    """
    fields = request_body.read_object(raw)
    accepted_parameters().check(fields)
    given = {name: value for name, value in fields.items() if value is not None}
    has_tokens = given.pop("return_tokens", False)
    if not isinstance(has_tokens, bool):
        raise errors.invalid(
            "Invalid 'return_tokens': it must be true or false.", param="return_tokens"
        )
    if ("messages" in given) == ("prompt" in given):
        raise errors.invalid("Give either 'messages' or 'prompt'.", param="messages")
    if "messages" in given:
        request = request_body.parse_chat(orjson.dumps(given))
        return TokenizeRequest(request=request, has_tokens=has_tokens)
    for name in sorted(given.keys() & _CHAT_FIELDS):
        raise errors.invalid(f"'{name}' is for chats; give 'messages'.", param=name)
    request = request_body.parse_completion(orjson.dumps(given))
    if request.size != 1:
        raise errors.invalid("'prompt' must be one text, or one list of tokens.", param="prompt")
    return TokenizeRequest(request=request, has_tokens=has_tokens)


def encode_response(asked: TokenizeRequest, tokens: Sequence[int], context_length: int) -> bytes:
    """Return the answer."""
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": context_length}
    if asked.has_tokens:
        found["tokens"] = tokens
    return orjson.dumps(found)
