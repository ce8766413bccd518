"""Encodes requests to engines: the head with its trace context, and the body, unchanged where possible. Pure.

A client's `traceparent` reaches engines whether or not this gateway traces;
`gateway.telemetry.otel` records spans.
"""

import re
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import msgspec
import orjson
from typing_extensions import override

from gateway.json_limits import decode_members
from gateway.request import JSON, HttpRequest, InferenceRequest
from gateway.routing.table import ExternalServer
from machinery import engine_link
from machinery.engine_link import BODY_BYTES, LinkError, RequestHead
from machinery.http_server import TRACE_PARENT, TRACE_STATE
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal, RefusedError, invalid

_TRACE_PARENT = wire_headers.TRACE_PARENT.encode()
_TRACE_STATE = wire_headers.TRACE_STATE.encode()
_LINES = b"content-type: %b\r\n" + wire_headers.REQUEST_ID.encode() + b": %b\r\n%b"
_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


# Fields of this fleet's engines; a server that does not know one refuses the request.
_FLEET_FIELDS = (
    "include_performance",
    "return_tokens",
    "return_progress",
    "session_id",
    "cache_salt",
)
_VIA = b"via"
_PSEUDONYM = b"mlx-fleet"
# Fleets that a request may pass: a route of one may lead to another, but not in a circle.
_MOST_FLEETS = 3


class Trace(Protocol):
    """The trace context of one request."""

    def attempt(self, replica: str, node: str) -> bytes:
        """Return the header lines for a request to this engine, each with its line end."""
        ...


@dataclass(frozen=True, slots=True)
class PassthroughTrace(Trace):
    """The client's context, unchanged; no spans are recorded."""

    lines: bytes

    @override
    def attempt(self, replica: str, node: str) -> bytes:
        return self.lines


def parse_context(request: HttpRequest) -> tuple[bytes, bytes]:
    """Return the client's traceparent and tracestate; empty if they are missing or invalid."""
    parent = request.fields.get(_TRACE_PARENT, b"")
    if not TRACE_PARENT.fullmatch(parent):
        return b"", b""
    if _TRACE_STATE not in request.fields:
        return parent, b""
    state = b",".join(value for name, value in request.headers if name == _TRACE_STATE)
    return parent, state if TRACE_STATE.fullmatch(state) else b""


def trace_lines(parent: bytes, state: bytes) -> bytes:
    """Return the context as header lines."""
    lines = b"%b: %b\r\n" % (_TRACE_PARENT, parent)
    return lines + b"%b: %b\r\n" % (_TRACE_STATE, state) if state else lines


def encode_external(request: InferenceRequest, server: ExternalServer) -> tuple[bytes, memoryview]:
    """Return the request for an external server as `encode_link` does, without what only this fleet's engines know.

    Raises:
        RefusedError: the body is not valid JSON, or the request has passed too many fleets.

    """
    via = [value for name, value in request.headers if name == _VIA]
    passed = sum(value.count(_PSEUDONYM) for value in via)
    if passed >= _MOST_FLEETS:
        message = f"The request has passed {passed} fleets already: a ModelRoute's external endpoint leads back to its own fleet."
        raise RefusedError(Refusal(status=508, message=message, code="loop"))
    if request.content_type != JSON:
        raise invalid(
            "The route leads to an external server, and uploads are sent to this fleet's engines only.",
            param="model",
        )
    fields = decode_members(request.body)
    for name in _FLEET_FIELDS:
        fields.pop(name, None)
    fields["model"] = msgspec.Raw(orjson.dumps(server.model))
    lines = server.authorization + b"via: %b\r\n" % b", ".join(
        [b"1.1 " + _PSEUDONYM] * (passed + 1)
    )
    path = server.path + request.path.removeprefix("/v1")
    return encode_link(request, path, lines, msgspec.json.encode(fields))


def encode_link(
    request: InferenceRequest, path: str, lines: bytes, body: bytes
) -> tuple[bytes, memoryview]:
    """Return the payload of REQUEST, with further header lines, and the rest of a large body.

    Raises:
        RefusedError: the headers are too large.

    """
    lines = _LINES % (request.content_type, request.request_id, lines)
    head = RequestHead("POST", path, lines, len(body))
    first, rest = body[:BODY_BYTES], memoryview(body)[BODY_BYTES:]
    try:
        return engine_link.encode_request(head, first), rest
    except LinkError as error:
        raise invalid(f"The request cannot be sent to an engine: {error}.") from error


def rename_model(body: bytes, old: str, new: str) -> bytes:
    """Return the body with another model name, all other bytes unchanged if possible.

    Raises:
        RefusedError: the body is not valid JSON.

    """
    found = list(islice(_MODEL_MEMBER.finditer(body), 2))
    if len(found) == 1 and orjson.loads(found[0][1]) == old:
        return body[: found[0].start(1)] + orjson.dumps(new) + body[found[0].end(1) :]
    # The key occurs more than once or has escapes, so the body must be parsed. Values stay
    # unchanged, invalid ones and numbers beyond floats included.
    fields = decode_members(body)
    fields["model"] = msgspec.Raw(orjson.dumps(new))
    return msgspec.json.encode(fields)
