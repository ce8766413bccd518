"""Interface of API adapters, and helpers to decode their requests. Engines speak OpenAI's API only."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from gateway.auth.rate_limits import Rates, openai_headers
from gateway.json_limits import MAX_MESSAGES, check_values
from gateway.metrics.response_summary import TokenCounts
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream.call import Headers
from schemas.wire import headers as wire_headers
from schemas.wire import nulls
from schemas.wire.errors import Refusal, RefusedError, invalid

_B = TypeVar("_B", bound=msgspec.Struct)
_NONE: Mapping[str, str] = MappingProxyType({})
_SESSION_ID = wire_headers.SESSION_ID.encode()
_GENERATIONS = ("/v1/chat/completions", "/v1/completions")
_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_LONGEST_ERROR = 1000
_WRONG = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


_NO_MODEL_TEXT = re.compile(
    r"Object missing required field `model`|Expected `str`, got `null` - at `\$\.model`"
)
NO_MODEL = Refusal(
    status=400, message='"model" must be the name of a model, as a string.', param="model"
)


class _ModelName(msgspec.Struct):
    model: str = ""


_MODEL_NAME = msgspec.json.Decoder(_ModelName)


class ModelMissingError(RefusedError):
    """A request that is valid but for the name of a model, which the gateway's default replaces."""


class ResponseTranslator(Protocol):
    """Translates one response from OpenAI's format. Does no I/O."""

    is_file: bool = False
    """True if a stream becomes a file, whose connection is cut off where it breaks."""

    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        """Return status, headers and body of a complete response or a refusal; as they are by default."""
        return status, headers, body

    def begin(self, headers: Headers) -> Headers:
        """Return the headers of a stream; as they are by default."""
        return headers

    def take_usage(self, usage: Callable[[], TokenCounts]) -> None:
        """Take what returns the tokens of a stream so far, before its first event."""
        del usage  # most translations do not need it

    def take_wait(self, waited_s: float) -> None:
        """Take the seconds that the request waited at the gateway, before its response begins."""
        del waited_s  # few APIs show it

    def events(self, data: bytes) -> bytes:
        """Return the translation of one or more complete events; empty by default."""
        del data
        return b""

    def end(self) -> bytes:
        """Return the end of a complete stream; empty by default."""
        return b""

    def broken(self, refusal: Refusal) -> bytes:
        """Return the end of a broken stream; it must not look like the end of the text."""
        return refusal.event()


class ApiAdapter(Protocol):
    """One API."""

    def rate_headers(self, rates: Rates) -> Headers:
        """Return the response headers that tell the state of rate limits; OpenAI's unless an API has its own."""
        return openai_headers(rates)

    def error_translator(self) -> ResponseTranslator | None:
        """Return the translator of refusals before the request is parsed; None, the default, for OpenAI's format."""
        return None

    def find_model(self, body: bytes) -> str:
        """Return the model in a body that may be invalid otherwise; empty if there is none."""
        try:
            return _MODEL_NAME.decode(body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""

    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        """Return the inference request, and the translator of its response; None passes it through.

        Raises:
            RefusedError: the request is not valid in this API.

        """
        ...


def decode(decoder: msgspec.json.Decoder[_B], body: bytes, meant: Mapping[str, str] = _NONE) -> _B:
    """Return the decoded body, in which null is the same as leaving a field out.

    `meant`: names of other APIs for fields of this one.

    Raises:
        ModelMissingError: it names no model and must; with a default model it may be valid.
        RefusedError: the body is not valid JSON, has too many values, or has a wrong field, which the error names.

    """
    check_values(body)
    try:
        try:
            return _with_model(decoder.decode(body), decoder.type)
        except msgspec.ValidationError:
            if b"null" not in body:
                raise
            return _with_model(decoder.decode(_without_nulls(body)), decoder.type)
    except msgspec.ValidationError as error:
        text = str(error)
        if len(text) > _LONGEST_ERROR:  # it has a name or a value of the client
            text = f"{text[:_LONGEST_ERROR]}...{text[-_LONGEST_ERROR:]}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None
    if _NO_MODEL_TEXT.fullmatch(text) and _needs_model(decoder.type):
        raise ModelMissingError(NO_MODEL)
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name, where = unknown[1], unknown[2]
        if where:
            raise invalid(f"Unknown field '{name[:100]}' in '{where[:200]}'.", param=name[:100])
        message = unknown_name("field", name, decoder.type.__struct_fields__, meant)
        raise invalid(message, param=name[:100])
    wrong = _WRONG.match(text)
    assert wrong is not None
    param = wrong[2] or None
    raise invalid(f"Invalid '{param}': {wrong[1]}." if param else f"{text}.", param=param)


def _without_nulls(body: bytes) -> bytes:
    fields = msgspec.json.decode(body)
    if isinstance(fields, dict):
        nulls.drop_nulls(fields)
    return msgspec.json.encode(fields)


def _with_model(found: _B, kind: type[_B]) -> _B:
    if getattr(found, "model", None) == "" and _needs_model(kind):
        raise ModelMissingError(NO_MODEL)
    return found


def _needs_model(kind: type[msgspec.Struct]) -> bool:
    return any(field.name == "model" and field.required for field in msgspec.structs.fields(kind))


def unknown_name(
    what: str, name: str, known: Iterable[str], meant: Mapping[str, str] = _NONE
) -> str:
    """Return the error text for an unknown name; `meant` as in `decode`."""
    own = meant.get(name)
    near = [own] if own else difflib.get_close_matches(name[:100], sorted(known), n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {what}: '{name[:100]}'.{hint}"


def check_messages(messages: Sequence[object]) -> None:
    """Raise RefusedError if there are more messages than engines accept."""
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            f"'messages' has {len(messages)} elements; it may have {MAX_MESSAGES}.",
            param="messages",
        )


def to_inference_request(
    http_request: HttpRequest, path: str, body: dict[str, Any], *, session: str = ""
) -> InferenceRequest:
    """Return the inference request. `body`: in OpenAI's format; `session`: a session key from the body."""
    own = http_request.fields.get(_SESSION_ID, b"").decode("latin-1")
    is_streamed, is_generation = body.get("stream") is True, path in _GENERATIONS
    # Other endpoints keep no state at the engine, so affinity is of no use to them.
    shown = orjson.dumps(body.get("messages") or body.get("prompt")) if is_generation else b""
    return InferenceRequest(
        path=path,
        model=body["model"],
        body=orjson.dumps(body),
        request_id=http_request.request_id,
        headers=http_request.headers,
        is_streamed=is_streamed,
        is_resumable=is_generation,
        timeout_s=http_request.timeout_s(),
        session=own or session,
        prompt=shown,
    )


def unencodable(error: orjson.JSONEncodeError) -> RefusedError:
    """Return the refusal of values that an engine's JSON cannot have, such as integers beyond 64 bits."""
    return invalid(f"The body cannot be passed on to an engine: {error}.")


def without_nones(**fields: object) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}
