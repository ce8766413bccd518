"""Traces as the carriage sees them: the context that engines are sent, in W3C's form. No I/O.

What a client says in `traceparent` reaches engines whether or not we record anything ourselves; the recording
is `gateway.record.otel`, which is loaded only where somebody wants it.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from gateway.asks import RawHeaders
from machinery.web import TRACE_PARENT

# Printable, for it goes into a header as it is; W3C asks for 512 characters at least.
_STATE = re.compile(rb"[ -~\t]{1,2048}")


class Trace(Protocol):
    """One request's trace while it is carried."""

    def attempt(self, replica: str, node: str) -> bytes:
        """Return the header lines that an engine is sent with a request, each with its end."""
        ...


@dataclass(frozen=True, slots=True)
class Passed(Trace):
    """A client's context as it came; nothing is recorded."""

    lines: bytes

    @override
    def attempt(self, replica: str, node: str) -> bytes:
        return self.lines


def context(headers: RawHeaders) -> tuple[bytes, bytes]:
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


def lines(parent: bytes, state: bytes) -> bytes:
    """Return the headers that say so."""
    found = b"traceparent: " + parent + b"\r\n"
    return found + b"tracestate: " + state + b"\r\n" if state else found
