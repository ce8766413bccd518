"""The APIs that clients may speak: how each asks, and how it is answered. Engines speak OpenAI's alone.

How requests of other APIs are read: bodies with known fields only, and what every translation needs. Pure.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from gateway.errors import Refusal, RefusedError, invalid
from gateway.request import HttpRequest, InferenceRequest
from gateway.upstream.connection import Headers


class ResponseTranslator(Protocol):
    """How one answer is told, made of an engine's in OpenAI's words. Does no I/O."""

    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        """Return a complete answer's status, headers and body; refusals come here, too."""
        ...

    def begin(self, headers: Headers) -> Headers:
        """Return the headers of a stream."""
        ...

    def events(self, data: bytes) -> bytes:
        """Return what is sent for one or more whole events; may be empty."""
        ...

    def end(self) -> bytes:
        """Return what ends a stream that was told to its end."""
        ...

    def broken(self, refusal: Refusal) -> bytes:
        """Return what ends a stream that cannot go on; must not look like the end of the text."""
        ...


class ApiAdapter(Protocol):
    """One API."""

    def telling(self) -> ResponseTranslator | None:
        """Return how refusals are told before the request is read; None for OpenAI's own way."""
        ...

    def read(self, heard: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        """Return what is asked, and how to tell the answer; None if it is passed through as it is.

        Raises:
            RefusedError: the request is not one of this API.

        """
        ...


_B = TypeVar("_B", bound=msgspec.Struct)
_NONE: Mapping[str, str] = MappingProxyType({})
_GENERATIONS = ("/v1/chat/completions", "/v1/completions")
_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


def decode(
    decoder: msgspec.json.Decoder[_B],
    kind: type[_B],
    body: bytes,
    meant: Mapping[str, str] = _NONE,
) -> _B:
    """Return a body. `meant`: other APIs' names of fields, and what they are called in this one.

    Raises:
        RefusedError: it is no JSON, or not of that kind; names the field.

    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name, where = unknown[1], unknown[2]
        if where:
            raise invalid(f"'{name[:100]}' is not known in '{where[:200]}'.", param=name[:100])
        message = unknown_name("field", name, kind.__struct_fields__, meant)
        raise invalid(message, param=name[:100])
    wrong = _WRONG.match(text)
    assert wrong is not None
    param = wrong[2] or None
    raise invalid(f"Invalid '{param}': {wrong[1]}." if param else f"{text}.", param=param)


def unknown_name(
    what: str, name: str, known: Iterable[str], meant: Mapping[str, str] = _NONE
) -> str:
    """Return what to say of a name that nobody knows; `meant` as above."""
    own = meant.get(name)
    near = [own] if own else difflib.get_close_matches(name[:100], sorted(known), n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {what}: '{name[:100]}'.{hint}"


def to_inference_request(
    heard: HttpRequest, path: str, body: dict[str, Any], *, session: str = ""
) -> InferenceRequest:
    """Return what an engine is asked; `body` in OpenAI's words, `session` if the body names one."""
    own = heard.header(b"x-session-id").decode("latin-1")
    is_streamed, is_generation = body.get("stream") is True, path in _GENERATIONS
    # What keeps no state at an engine need not go where its like went.
    shown = orjson.dumps(body.get("messages") or body.get("prompt")) if is_generation else b""
    return InferenceRequest(
        path=path,
        model=body["model"],
        body=orjson.dumps(body),
        request_id=heard.request_id,
        headers=heard.headers,
        is_streamed=is_streamed,
        is_resumable=is_streamed and is_generation,
        session=own or session,
        prompt=shown,
    )


def unencodable(error: orjson.JSONEncodeError) -> RefusedError:
    """Return the refusal of a body with what JSON for an engine cannot have, such as numbers of more than 64 bits."""
    return invalid(f"The body cannot be passed on to an engine: {error}.")


def without_nones(**fields: object) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}
