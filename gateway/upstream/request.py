"""A request as it is written to an engine; the body as it came wherever that works. Pure."""

import re

import msgspec
import orjson

from gateway.asks import Ask
from gateway.errors import invalid
from gateway.routing.table import Target

_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode(ask: Ask, target: Target, more: bytes = b"") -> bytes:
    """Return the HTTP request for the engine; the body as it came wherever that works.

    `more`: header lines, each with its end.
    """
    body = ask.body
    if ask.model not in target.names and target.names:
        # A route's name, or a served name younger than the engine: it answers to its own.
        body = renamed(body, ask.model, target.names[0])
    return (
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
    ) % (ask.path.encode("ascii"), target.host, len(body), ask.request_id, more, body)


def renamed(body: bytes, old: str, new: str) -> bytes:
    """Return the body with another model name, every other byte as it was if possible.

    Raises:
        RefusedError: its members cannot be told apart.

    """
    found = list(_MODEL_MEMBER.finditer(body))
    if len(found) == 1 and orjson.loads(found[0][1]) == old:
        return body[: found[0].start(1)] + orjson.dumps(new) + body[found[0].end(1) :]
    # The word is a key elsewhere too, or is written with escapes: only parsing tells them apart.
    # Values stay as they came, those that are wrong and numbers that fit into no float, too.
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    fields["model"] = msgspec.Raw(orjson.dumps(new))
    return msgspec.json.encode(fields)
