"""Options of the listener for HTTPS, and the response to plain HTTP there."""

from collections.abc import Callable

from gateway import errors
from machinery.tls_server import ContextSource, TlsOptions

# A handshake costs about 1 ms of CPU, so more at once would only make all of them slower.
_UNFINISHED_HANDSHAKES = 256
# The part of the open files that unfinished handshakes may take.
_SHARE_OF_FILES = 8


def tls_options(
    certificate: ContextSource, *, max_files: int, on_shed: Callable[[], None]
) -> TlsOptions:
    """Return the options of the listener. `max_files`: the limit of open files; 0: none."""
    limit = max_files // _SHARE_OF_FILES or _UNFINISHED_HANDSHAKES
    return TlsOptions(
        certificate=certificate,
        plain_response=errors.https_required().http_response(),
        unfinished_handshakes=min(_UNFINISHED_HANDSHAKES, limit),
        on_shed=on_shed,
    )
