"""Options of the listener for HTTPS, and the response to plain HTTP there."""

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway import errors
from gateway.http.request_context import header_lines
from machinery.tls_server import ServerCertificate, TlsOptions

# A handshake costs about 1 ms of CPU, so more at once would only make all of them slower.
_UNFINISHED_HANDSHAKES = 256
# The part of the open files that unfinished handshakes may take.
_SHARE_OF_FILES = 8


def tls_options(
    certificate: ServerCertificate, *, max_files: int, on_shed: Callable[[], None]
) -> TlsOptions:
    """Return the options of the listener. `max_files`: the limit of open files; 0: none."""
    limit = max_files // _SHARE_OF_FILES or _UNFINISHED_HANDSHAKES
    return TlsOptions(
        certificate=certificate,
        plain_response=_plain_response(),
        unfinished_handshakes=min(_UNFINISHED_HANDSHAKES, limit),
        on_shed=on_shed,
    )


def _plain_response() -> bytes:
    refusal = errors.https_required()
    body = refusal.body()
    head = [
        *refusal.headers(),
        (b"connection", b"close"),
        (b"content-length", b"%d" % len(body)),
    ]
    return STATUS_LINE[refusal.status] + header_lines(head) + b"\r\n" + body
