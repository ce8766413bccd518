"""OpenAI's API, which engines speak themselves: bodies pass through, and only fields for routing are read."""

import re

import msgspec
import orjson
from typing_extensions import override

from gateway.apis.adapter import NO_MODEL, ApiAdapter, ModelMissingError, ResponseTranslator
from gateway.json_limits import decode_members
from gateway.request import HttpRequest, InferenceRequest
from machinery.clock import NEVER
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal, RefusedError, invalid

_FINAL = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\n", re.MULTILINE)
_NUMBER = re.compile(rb'"sequence_number":(\d{1,9})')
_EMBEDDINGS = "/v1/embeddings"
_RESPONSES = "/v1/responses"
_GENERATIONS = ("/v1/chat/completions", "/v1/completions", _RESPONSES)
# Paths whose requests leave no cache to reuse at an engine.
_STATELESS = (_EMBEDDINGS, "/v1/score", "/v1/rerank", "/tokenize", "/detokenize")
PATHS = (*_GENERATIONS, *_STATELESS)
_SESSION_ID = wire_headers.SESSION_ID.encode()
_TIMEOUT = wire_headers.REQUEST_TIMEOUT.encode()
_TRUE = b"true"


class ResponsesTranslator(ResponseTranslator):
    """Passes a /v1/responses stream through, and ends a broken one in that API's format.

    The last event is sent at the end, so that a client that has it can continue the stored response.
    """

    def __init__(self) -> None:
        self._last = self._final = b""

    @override
    def events(self, data: bytes) -> bytes:
        match = _FINAL.search(data)
        if match is None:
            self._last = data
            return data
        self._final = data[match.start() :]
        return data[: match.start()]

    @override
    def end(self) -> bytes:
        return self._final

    @override
    def broken(self, refusal: Refusal) -> bytes:
        if self._final:
            return self._final
        numbers = _NUMBER.findall(self._last)
        error = {
            "type": "error",
            "code": refusal.code,
            "message": refusal.message,
            "param": refusal.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"


class _RoutingFields(msgspec.Struct):
    """Fields for routing, as they are written: their values may be of any type and size. The engine validates them."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    fleet: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_RoutingFields).decode
_decode_text = msgspec.json.Decoder(str).decode


class OpenAiAdapter(ApiAdapter):
    """Adapter of `PATHS`."""

    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        body, path, fields = http_request.body, http_request.path, http_request.fields
        try:
            head = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _invalid_body(error) from error
        model = _model(head.model)
        if head.fleet:
            # The field is reserved for gateways, which use it to resume a stream.
            raise invalid("Unknown parameter: 'fleet'.", param="fleet")
        is_streamed = bool(head.stream) and bytes(head.stream) == _TRUE
        is_generation = path in _GENERATIONS
        has_session = head.session_id or _SESSION_ID in fields
        request = InferenceRequest(
            path=path,
            model=model,
            body=body,
            request_id=http_request.request_id,
            headers=http_request.headers,
            is_streamed=is_streamed,
            is_resumable=is_generation,
            choices=_number(bytes(head.n)) if head.n else 1,
            timeout_s=http_request.timeout_s() if _TIMEOUT in fields else NEVER,
            session=_session(head, http_request) if has_session else "",
            prompt=(head.messages or head.prompt or head.input) if is_generation else b"",
            cache_key=_text(head.prompt_cache_key) if head.prompt_cache_key else "",
            cache_salt=_text(head.cache_salt) if head.cache_salt else "",
        )
        return request, ResponsesTranslator() if is_streamed and path == _RESPONSES else None


def _model(raw: msgspec.Raw) -> str:
    """Return the name of the model.

    Raises:
        ModelMissingError: there is none.
        RefusedError: it is no text.

    """
    try:
        name = _decode_text(raw) if raw else ""
    except msgspec.ValidationError:
        if bytes(raw) != b"null":
            raise invalid(NO_MODEL.message, param="model") from None
        name = ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_body(error) from error
    if not name:
        raise ModelMissingError(NO_MODEL)
    return name


def _text(raw: msgspec.Raw) -> str:
    """Return a text; empty for any other value, which the engine refuses."""
    try:
        return _decode_text(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _number(raw: bytes) -> int:
    """Return the number of choices in JSON; 1 for what no engine accepts."""
    return max(1, int(raw)) if raw.isdigit() and len(raw) < 4 else 1


def _invalid_body(error: Exception) -> RefusedError:
    if isinstance(error, msgspec.ValidationError):
        return invalid("The body must be a JSON object.")
    if isinstance(error, RecursionError):
        return invalid("The body's JSON is nested too deeply.")
    return invalid(f"The body is not valid JSON: {error}")


def with_model(body: bytes, name: str) -> bytes:
    """Return the body, a JSON object, with this model; all other values stay as they were written.

    Raises:
        RefusedError: the body is not valid JSON, or has too many members.

    """
    return msgspec.json.encode({**decode_members(body), "model": name})


def _session(head: _RoutingFields, http_request: HttpRequest) -> str:
    """Return the client's session key; empty if there is none.

    `user` does not count, because many clients send one value for everything, and
    `previous_response_id` does not, because it changes with every turn.
    """
    if head.session_id and (own := _text(head.session_id)):
        return own
    return http_request.fields.get(_SESSION_ID, b"").decode("latin-1")
