"""OpenAI's Responses as they come from engines; only a stream that cannot go on is ended in their words.

OpenAI's API, which engines speak themselves: nothing is translated, and only what routing needs is read.
"""

import re
from typing import Any

import msgspec
import orjson
from typing_extensions import override

from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.errors import Refusal, invalid
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream.connection import Headers

_NUMBER = re.compile(rb'"sequence_number":(\d{1,9})')


class ResponsesTranslator(ResponseTranslator):
    """Passes one stream through."""

    def __init__(self) -> None:
        self._last = b""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return status, headers, body

    @override
    def begin(self, headers: Headers) -> Headers:
        return headers

    @override
    def events(self, data: bytes) -> bytes:
        self._last = data
        return data

    @override
    def end(self) -> bytes:
        return b""

    @override
    def broken(self, refusal: Refusal) -> bytes:
        numbers = _NUMBER.findall(self._last)
        error = {
            "type": "error",
            "code": refusal.code,
            "message": refusal.message,
            "param": refusal.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"


_EMBEDDINGS = "/v1/embeddings"
_RESPONSES = "/v1/responses"
PATHS = ("/v1/chat/completions", "/v1/completions", _EMBEDDINGS, _RESPONSES)

_TRUE = b"true"
# Of one choice, as engines read the field.
_ONE = (b"", b"1", b"null")
_RESUMABLE = PATHS[:2]


class _RoutingFields(msgspec.Struct):
    """The fields that routing needs; the engine judges them all."""

    model: Any = None
    stream: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    fleet: msgspec.Raw = msgspec.Raw()
    session_id: Any = None
    conversation: Any = None
    prompt_cache_key: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _ModelName(msgspec.Struct):
    model: str = ""


_DECODER = msgspec.json.Decoder(_RoutingFields)
_MODEL_NAME = msgspec.json.Decoder(_ModelName)


class OpenAiAdapter(ApiAdapter):
    """The surface of `PATHS`."""

    @override
    def telling(self) -> ResponseTranslator | None:
        return None

    @override
    def read(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        head = _decode(heard.body)
        if not isinstance(head.model, str) or not head.model:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        if head.fleet:
            # Between gateways and engines: what a client says there must not pass for our own.
            raise invalid("Unknown parameter: 'fleet'.", param="fleet")
        is_streamed = bytes(head.stream) == _TRUE
        ask = InferenceRequest(
            path=heard.path,
            model=head.model,
            body=heard.body,
            request_id=heard.request_id,
            headers=heard.headers,
            is_streamed=is_streamed,
            is_resumable=is_streamed and heard.path in _RESUMABLE and bytes(head.n) in _ONE,
            session=_session(head, heard),
            # Embeddings keep no state that could be used again.
            prompt=b""
            if heard.path == _EMBEDDINGS
            else bytes(head.messages or head.prompt or head.input),
            cache_key=head.prompt_cache_key if isinstance(head.prompt_cache_key, str) else "",
        )
        return ask, ResponsesTranslator() if is_streamed and heard.path == _RESPONSES else None


def _decode(body: bytes) -> _RoutingFields:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise invalid("The body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None


def find_model_name(body: bytes) -> str:
    """Return the model that a body names which may be wrong otherwise; empty if it names none."""
    try:
        return _MODEL_NAME.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _session(head: _RoutingFields, heard: HttpRequest) -> str:
    """Return what the client calls its conversation; the gateway finds out itself if it does not.

    Not `user`, which many set to one value for all they do, nor `previous_response_id`, which changes with
    every turn.
    """
    if isinstance(head.session_id, str) and head.session_id:
        return head.session_id
    if header := heard.header(b"x-session-id"):
        return header.decode("latin-1")
    named = head.conversation
    if isinstance(named, dict):
        named = named.get("id")
    return named if isinstance(named, str) else ""
