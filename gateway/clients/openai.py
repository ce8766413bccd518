"""OpenAI's API, which engines speak themselves: nothing is translated, and only what routing needs is read."""

from typing import Any

import msgspec
from typing_extensions import override

from gateway.asks import Ask, Heard
from gateway.clients.surface import Surface, Telling
from gateway.errors import invalid

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

_TRUE = b"true"


class _Head(msgspec.Struct):
    """The fields that routing needs; the engine judges them all."""

    model: Any = None
    stream: msgspec.Raw = msgspec.Raw()
    session_id: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Head)


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
        ask = Ask(
            path=heard.path,
            model=head.model,
            body=heard.body,
            request_id=heard.request_id,
            headers=heard.headers,
            is_streamed=bytes(head.stream) == _TRUE,
            session=_session(head, heard),
            prompt=bytes(head.messages or head.prompt or head.input),
        )
        return ask, None


def _decode(body: bytes) -> _Head:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise invalid("The body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    except RecursionError:
        raise invalid("The body's JSON is nested too deeply.") from None


def _session(head: _Head, heard: Heard) -> str:
    if isinstance(head.session_id, str):
        return head.session_id
    return heard.header(b"x-session-id").decode("latin-1")
