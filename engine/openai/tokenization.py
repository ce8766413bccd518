"""Requests and responses of `/tokenize`, which reads a prompt as the request itself would be read, and of `/detokenize`.

The paths are those of vLLM and llama.cpp, not OpenAI's. Nothing here knows HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import Field

from engine.openai import prompts, request_body
from engine.openai.messages import AnyMessage
from engine.openai.output_options import Tools
from engine.openai.parameters import EndpointParameters, LenientModel
from engine.openai.prompts import Token, Tokens
from engine.openai.request_body import GenerationRequest, RequestPolicy
from engine.openai.template_variables import TemplateVariables
from schemas.wire import errors


class TokenizeBody(LenientModel):
    """Body of `/tokenize`: the fields of a chat, or a prompt."""

    model: str
    messages: Annotated[list[AnyMessage], Field(min_length=1)] | None = None
    prompt: str | list[Token] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """One checked request for a token count."""

    request: GenerationRequest
    has_tokens: bool
    """True if the response has the tokens, too."""

    @property
    def model(self) -> str:
        """The name of the requested model."""
        return self.request.model


class DetokenizeBody(LenientModel):
    """Body of `/detokenize`."""

    model: str
    tokens: Tokens


TOKENIZE_PARAMETERS: Final = EndpointParameters(model=TokenizeBody)
DETOKENIZE_PARAMETERS: Final = EndpointParameters(model=DetokenizeBody)


def parse_tokens(raw: bytes, *, context_length: int) -> DetokenizeBody:
    """Parse a body of `/detokenize`.

    Raises:
        RefusedError: a value is wrong, or there are more tokens than the context has.

    """
    fields = request_body.read_object(raw)
    DETOKENIZE_PARAMETERS.check(fields)
    prompts.check_tokens(fields.get("tokens"), context_length, "tokens")
    return request_body.validate(DetokenizeBody, fields)


def parse(raw: bytes, *, sees_images: bool = False) -> TokenizeRequest:
    """Parse a body; messages may have images if the model `sees_images`.

    Raises:
        RefusedError: a value is wrong, or there is not exactly one of `prompt` and `messages`.

    """
    fields = request_body.read_object(raw)
    TOKENIZE_PARAMETERS.check(fields)
    has_tokens = fields.pop("return_tokens", True)
    if not isinstance(has_tokens, bool):
        raise errors.invalid(
            "Invalid 'return_tokens': it must be true or false.", param="return_tokens"
        )
    if ("messages" in fields) == ("prompt" in fields):
        raise errors.invalid("Give either 'messages' or 'prompt'.", param="messages")
    if "messages" in fields:
        policy = RequestPolicy(sees_images=sees_images)
        request = request_body.parse_chat(orjson.dumps(fields), policy=policy)
        return TokenizeRequest(request=request, has_tokens=has_tokens)
    for name in sorted(fields.keys() - {"model", "prompt"}):
        raise errors.invalid(f"'{name}' is for chats; give 'messages'.", param=name)
    request = request_body.parse_completion(orjson.dumps(fields))
    if request.size != 1:
        raise errors.invalid("'prompt' must be one text, or one list of tokens.", param="prompt")
    return TokenizeRequest(request=request, has_tokens=has_tokens)


def encode_response(request: TokenizeRequest, tokens: Sequence[int], context_length: int) -> bytes:
    """Return the response body."""
    body: dict[str, Any] = {"count": len(tokens), "max_model_len": context_length}
    if request.has_tokens:
        body["tokens"] = tokens
    return orjson.dumps(body)


def encode_text(text: str) -> bytes:
    """Return the response body of `/detokenize`."""
    return orjson.dumps({"prompt": text})
