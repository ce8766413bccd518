"""Traces as the carriage sees them: the context that engines are sent, in W3C's form. No I/O.

What a client says in `traceparent` reaches engines whether or not we record anything ourselves; the recording
is `gateway.telemetry.otel`, which is loaded only where somebody wants it.

A request as it is written to an engine; the body as it came wherever that works. Pure.
"""

import re
from dataclasses import dataclass
from typing import Protocol

import msgspec
import orjson
from typing_extensions import override

from gateway.errors import invalid
from gateway.request import InferenceRequest, RawHeaders
from gateway.routing.table import EngineEndpoint
from machinery.http_server import TRACE_PARENT

# Printable, for it goes into a header as it is; W3C asks for 512 characters at least.
_STATE = re.compile(rb"[ -~\t]{1,2048}")


class Trace(Protocol):
    """One request's trace while it is carried."""

    def attempt(self, replica: str, node: str) -> bytes:
        """Return the header lines that an engine is sent with a request, each with its end."""
        ...


@dataclass(frozen=True, slots=True)
class PassthroughTrace(Trace):
    """A client's context as it came; nothing is recorded."""

    lines: bytes

    @override
    def attempt(self, replica: str, node: str) -> bytes:
        return self.lines


def parse_context(headers: RawHeaders) -> tuple[bytes, bytes]:
    """Return the client's traceparent and tracestate; empty if it sent none that is one."""
    parent = state = b""
    for name, value in headers:
        if name == b"traceparent":
            parent = value
        elif name == b"tracestate":
            state = state + b"," + value if state else value
    if not parent or not TRACE_PARENT.fullmatch(parent):
        return b"", b""
    return parent, state if _STATE.fullmatch(state) else b""


def trace_lines(parent: bytes, state: bytes) -> bytes:
    """Return the headers that say so."""
    found = b"traceparent: " + parent + b"\r\n"
    return found + b"tracestate: " + state + b"\r\n" if state else found


_MODEL_MEMBER = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_request(ask: InferenceRequest, target: EngineEndpoint, more: bytes = b"") -> bytes:
    """Return the HTTP request for the engine; the body as it came wherever that works.

    `more`: header lines, each with its end.
    """
    body = ask.body
    if ask.model not in target.names and target.names:
        # A route's name, or a served name younger than the engine: it answers to its own.
        body = rename_model(body, ask.model, target.names[0])
    return (
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
    ) % (ask.path.encode("ascii"), target.host, len(body), ask.request_id, more, body)


def rename_model(body: bytes, old: str, new: str) -> bytes:
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
