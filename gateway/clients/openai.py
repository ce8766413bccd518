"""OpenAI's API, which engines speak themselves: nothing is translated, and only what routing needs is read."""

from typing import Any

import msgspec
from typing_extensions import override

from gateway.asks import Ask, Heard
from gateway.clients.responses import Responding
from gateway.clients.surface import Surface, Telling
from gateway.errors import invalid

_EMBEDDINGS = "/v1/embeddings"
_RESPONSES = "/v1/responses"
PATHS = ("/v1/chat/completions", "/v1/completions", _EMBEDDINGS, _RESPONSES)

_TRUE = b"true"
# Of one choice, as engines read the field.
_ONE = (b"", b"1", b"null")
_RESUMABLE = PATHS[:2]


class _Head(msgspec.Struct):
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


class _Named(msgspec.Struct):
    model: str = ""


_DECODER = msgspec.json.Decoder(_Head)
_NAMED = msgspec.json.Decoder(_Named)


class OpenAi(Surface):
    """The surface of `PATHS`."""

    @override
    def telling(self) -> Telling | None:
        return None

    @override
    def read(self, heard: Heard) -> tuple[Ask, Telling | None]:
        head = _decode(heard.body)
        if not isinstance(head.model, str) or not head.model:
            raise invalid('"model" must be the name of a model, as a string.', param="model")
        if head.fleet:
            # Between gateways and engines: what a client says there must not pass for our own.
            raise invalid("Unknown parameter: 'fleet'.", param="fleet")
        is_streamed = bytes(head.stream) == _TRUE
        ask = Ask(
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
        return ask, Responding() if is_streamed and heard.path == _RESPONSES else None


def _decode(body: bytes) -> _Head:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise invalid("The body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None


def model_in(body: bytes) -> str:
    """Return the model that a body names which may be wrong otherwise; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _session(head: _Head, heard: Heard) -> str:
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
